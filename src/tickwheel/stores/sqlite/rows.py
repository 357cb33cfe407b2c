"""A job as a row of SQLite's, both ways: batches go in and come out as one JSON text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import apsw
import msgspec

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import Job, State

encode = msgspec.json.encode


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
# The same for a job that is not parked.
UNPARKED = _object(_FIELDS)
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


# What a run that ended well changes. Each value that is looked up in each row takes time.
_FINISH = """
    update job set state = 'done', lease_until_ms = null, started_ms = null, asked = 0,
                   settled = fence, ended_ms = new.value ->> 0, error = null, traceback = null,
                   result = new.value ->> 1, history = new.value ->> 2, progress = null
    from json_each(?) as new where job.n = new.key"""


def finish_jobs(db: apsw.Connection, changes: Sequence[tuple[int, Job]]) -> None:
    """Write what `settle` made of these jobs. Almost all are done and have nothing more to tell,
    and a short statement writes those."""
    plain = {
        n: (job.ended_ms, job.result, job.history)
        for n, job in changes
        if job.state is State.DONE and job.error is None and job.progress is None
    }
    if plain:
        db.execute(_FINISH, (encode(plain).decode(),))
    if len(plain) < len(changes):
        write_jobs(db, [(n, job) for n, job in changes if n not in plain])


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
