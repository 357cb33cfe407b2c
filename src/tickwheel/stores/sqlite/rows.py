"""A job as a row of SQLite's, both ways: batches go in and come out as one JSON text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import apsw
import msgspec

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import Job, Settlement, lengthened

encode = msgspec.json.encode

# Runs that ended well are written by their kinds if there are so many of each, on average.
ALIKE = 4


def _object(columns: dict[str, str]) -> str:
    pairs = (f"'{name}', {column}" for name, column in columns.items())
    return f"json_object({', '.join(pairs)})"


# The state of a Job: a parked job has one of its own in the file.
STATE = "iif(state = 'parked', 'waiting', state)"
_JSON = ("meta", "progress", "history", "changes")
_FIELDS = {
    field: f"json({field})" if field in _JSON else field
    for field in Job.__struct_encode_fields__
    if field != "parked"
}
# One job as one JSON object; its keys are the fields of Job.
JOB = _object(_FIELDS | {"state": STATE, "parked": "state = 'parked'"})
# What a job has that was never claimed.
_FRESH = (
    "id", "task", "payload", "queue", "priority", "due_ms", "created_ms", "retries", "timeout_ms",
    "expires_ms", "meta",
)  # fmt: skip
# A job that is not parked, as one JSON object. Most were never claimed: the rest is left out.
_NEW = _object({name: _FIELDS[name] for name in _FRESH})
UNPARKED = f"iif(attempt = 0 and changes is null, {_NEW}, {_object(_FIELDS)})"
# How many bytes a job has; SQLite knows it without reading them. Only errors have a traceback.
SIZE = (
    "octet_length(payload) + octet_length(history)"
    " + iif(error is null, 0, octet_length(error) + ifnull(octet_length(traceback), 0))"
    " + ifnull(octet_length(result), 0) + ifnull(octet_length(meta), 0)"
    " + ifnull(octet_length(progress), 0) + ifnull(octet_length(changes), 0)"
)
# Whether a job still fits in the batch; `total` is the size of all jobs up to and with this one.
FITS = "(total <= :bytes or total = size)"
# Not strict, because `asked` and `parked` are 0 or 1 in the file, and bools in a Job.
numbered_jobs = msgspec.json.Decoder(list[tuple[int, Job]], strict=False)

# --- Reading


class Selecting(NamedTuple):
    """A statement that selects jobs as one JSON text, and the same for only their numbers."""

    jobs: str
    numbers: str

    @classmethod
    def of(cls, statement: Callable[[str], str], job: str = JOB) -> Selecting:
        return cls(statement(job), statement("null"))


def select_jobs(db: apsw.Connection, statement: Selecting, values: Any) -> list[tuple[int, Job]]:
    """Jobs with the numbers of their rows. A row that another program has spoilt hurts no other: it
    is read as far as it can be."""
    try:
        return numbered_jobs.decode(db.execute(statement.jobs, values).get)
    except (apsw.SQLError, msgspec.MsgspecError, UnicodeDecodeError):
        text = db.execute(statement.numbers, values).get
    numbers = msgspec.json.decode(text, type=list[tuple[int, None]])
    return [(n, _as_far_as_possible(db, n)) for n, _ in numbers]


# Text as bytes, because not all of it may be UTF-8.
_COLUMNS = [name for name in Job.__struct_encode_fields__ if name != "parked"]
_RAW = f"""select {
    ", ".join(f"iif(typeof({name}) = 'text', cast({name} as blob), {name})" for name in _COLUMNS)
} from job where n = ?"""


def _as_far_as_possible(db: apsw.Connection, n: int) -> Job:
    [row] = db.execute(_RAW, (n,)).fetchall()
    fields = {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value
        for name, value in zip(_COLUMNS, row, strict=True)
    }
    fields["parked"], fields["asked"] = fields["state"] == "parked", bool(fields["asked"])
    fields["state"] = "waiting" if fields["parked"] else fields["state"]
    for name in _JSON:
        text = fields.pop(name)
        try:
            read = msgspec.json.decode(str(text or "null"))
            msgspec.convert({**_ANY_JOB, name: read}, Job)
        except msgspec.MsgspecError:
            continue
        if read is not None:
            fields[name] = read
    return msgspec.convert(fields, Job)


_ANY_JOB = {"id": "", "task": "", "payload": "", "due_ms": 0, "created_ms": 0}
_BY_ID = Selecting.of(
    lambda job: (
        f"""select json_group_array(json_array(n, {job})) from job
                    where id in (select value from json_each(?))"""
    )
)


def read_jobs(db: apsw.Connection, ids: Sequence[str]) -> dict[str, tuple[int, Job]]:
    found = select_jobs(db, _BY_ID, (encode(ids).decode(),))
    return {job.id: (n, job) for n, job in found}


def fitting(db: apsw.Connection, ids: Sequence[str]) -> Sequence[str]:
    """The first of these ids, as many as fit in one batch."""
    if len(ids) == 1:
        return ids
    count = db.execute(
        f"""select count(*) from (
                select size, sum(size) over (order by key rows unbounded preceding) as total from (
                    select ids.key, ifnull({SIZE}, 0) as size
                    from json_each(:ids) as ids left join job on job.id = ids.value))
            where {FITS}""",
        {"ids": encode(ids).decode(), "bytes": BATCH_BYTES},
    ).get
    return ids[:count]


# --- Writing

_CHANGED = (
    "state", "due_ms", "attempt", "fence", "failures", "takeovers", "worker", "lease_until_ms",
    "started_ms", "asked", "settled", "ended_ms", "error", "traceback", "result", "history",
)  # fmt: skip


def _updating(progress: str) -> str:
    columns = (f"{name} = new.value ->> {i + 1}" for i, name in enumerate(_CHANGED))
    return f"""
        update job set {", ".join(columns)}, progress = {progress}
        from json_each(?) as new where job.n = new.value ->> 0"""


# Most jobs tell no progress, and to look for it in each row takes time.
_UPDATE, _UPDATE_TOLD = _updating("null"), _updating(f"new.value ->> {len(_CHANGED) + 1}")


# What runs that ended well change, where their worker still holds the job.
_FINISHED = """state = 'done', lease_until_ms = null, started_ms = null, asked = 0,
    settled = job.fence, error = null, traceback = null, progress = null"""
_FINISH = f"""
    update job set {_FINISHED}, ended_ms = new.value ->> 1, result = new.value ->> 2,
                   history = new.value ->> 3
    from json_each(:rows) as new
    where job.id = new.key and job.fence = new.value ->> 0
      and state = 'running' and lease_until_ms > :now and told = 0"""
# The same for many runs of a few kinds, which differ only in the due time: those of batches, and of
# jobs that take no time. Each value that is looked up in each row takes time.
_FINISH_ALIKE = f"""
    with kind as materialized (
        select key as number, value ->> 0 as fence, value ->> 1 as ended_ms,
               value ->> 2 as result, value ->> 3 as before, value ->> 4 as after
        from json_each(:kinds))
    update job set {_FINISHED}, ended_ms = kind.ended_ms, result = kind.result,
                   history = kind.before || due_ms || kind.after
    from json_each(:rows) as new cross join kind on kind.number = new.value
    where job.id = new.key and job.fence = kind.fence
      and state = 'running' and lease_until_ms > :now and told = 0"""


def finish_jobs(db: apsw.Connection, settlements: Sequence[Settlement], now_ms: int) -> int:
    """Write runs that are `just_done`, of different jobs, where `life.holds`; returns how many."""
    numbers, examples = _kinds(settlements)
    values: dict[str, Any] = {"now": now_ms}
    if len(examples) * ALIKE <= len(settlements):
        ids = (each.job.id for each in settlements)
        kinds = [
            (each.job.fence, each.ended_ms, each.result, *_history_around_due(each))
            for each in examples
        ]
        values["rows"] = encode(dict(zip(ids, numbers, strict=True))).decode()
        values["kinds"] = encode(kinds).decode()
        db.execute(_FINISH_ALIKE, values)
    else:
        # The history as text: SQLite would have to read it, and write it again.
        rows = {
            each.job.id: (each.job.fence, each.ended_ms, each.result, _history(each))
            for each in settlements
        }
        values["rows"] = encode(rows).decode()
        db.execute(_FINISH, values)
    return db.changes()


def _kinds(settlements: Sequence[Settlement]) -> tuple[list[int], list[Settlement]]:
    """The kind of each, by number, and one of each kind."""
    known: dict[tuple[Any, ...], int] = {}
    numbers: list[int] = []
    examples: list[Settlement] = []
    for each in settlements:
        job = each.job
        kind = (
            job.fence, job.attempt, job.worker, job.history,
            each.started_ms, each.ended_ms, each.result,
        )  # fmt: skip
        number = known.get(kind)
        if number is None:
            number = known[kind] = len(examples)
            examples.append(each)
        numbers.append(number)
    return numbers, examples


def _history(settlement: Settlement) -> str:
    return encode(lengthened(settlement.job.history, settlement)).decode()


def _history_around_due(settlement: Settlement) -> tuple[str, str]:
    """The history of a settled job as text, but for the last due time."""
    before, mark, after = _history(settlement).rpartition('"due_ms":')
    return before + mark, after[after.index(",") :]


# All that a change by others may touch: what a caller chose, and what the job's steps change.
_REPLACED = (
    "task", "payload", "queue", "priority", "created_ms", "retries", "timeout_ms", "expires_ms",
    "meta", "changes", "told", "progress", *_CHANGED,
)  # fmt: skip
_VALUES = ", ".join(f"{name} = new.value ->> {i}" for i, name in enumerate(_REPLACED, 1))
_REPLACE = f"""
    update job set {_VALUES}
    from json_each(?) as new where job.n = new.value ->> 0"""


def replace_jobs(db: apsw.Connection, changes: Sequence[tuple[int, Job]]) -> None:
    """Write jobs of which anything may have changed but their id."""
    rows = [
        (
            n, job.task, job.payload, job.queue, job.priority, job.created_ms, job.retries,
            job.timeout_ms, job.expires_ms, job.meta, job.changes, int(job.told), job.progress,
            *_changed(job),
        )
        for n, job in changes
    ]  # fmt: skip
    if rows:
        db.execute(_REPLACE, (encode(rows).decode(),))


def _changed(job: Job) -> tuple[Any, ...]:
    return (
        "parked" if job.parked else job.state, job.due_ms, job.attempt, job.fence,
        job.failures, job.takeovers, job.worker, job.lease_until_ms, job.started_ms,
        int(job.cancel_requested), job.settled, job.ended_ms, job.error, job.traceback,
        job.result, job.history,
    )  # fmt: skip


def write_jobs(db: apsw.Connection, changes: Sequence[tuple[int, Job]]) -> None:
    """Write what a step made of these jobs."""
    if not changes:
        return
    told = any(job.progress is not None for _, job in changes)
    rows = [(n, *_changed(job), *([job.progress] if told else [])) for n, job in changes]
    db.execute(_UPDATE_TOLD if told else _UPDATE, (encode(rows).decode(),))
