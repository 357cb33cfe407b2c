"""A job as a row of PostgreSQL's, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec

from tickwheel.job import Changes, Job, Priority, Progress, Run, State
from tickwheel.stores.postgres.pool import Connection

T = TypeVar("T")

encode = msgspec.json.encode
_histories = msgspec.json.Decoder(tuple[Run, ...])
_metas = msgspec.json.Decoder(dict[str, str])
_progresses = msgspec.json.Decoder(Progress)
_changes = msgspec.json.Decoder(Changes)
_states = {state.value: state for state in State}
LEVELS = [int(priority) for priority in Priority]
# How often jobs are read again if they changed before they could be written.
TRIES = 5

# --- Reading and adding

# A parked job's priority is stored less 4: see part 4 of the schema. A node of an older release may
# leave it so when it cancels the job.
_READ = {
    "priority": "job.priority & 3 as priority",
    "parked": "job.priority < 0 and job.state = 'waiting' as parked",
}
ROW = ", ".join(_READ.get(name, f"job.{name}") for name in Job.__struct_encode_fields__)
# About how many bytes a row has. The server knows it without reading values that are stored apart.
ROW_BYTES = (
    "octet_length(payload) + octet_length(history) + coalesce(octet_length(result), 0)"
    " + coalesce(octet_length(traceback), 0) + coalesce(octet_length(meta), 0)"
    " + coalesce(octet_length(progress), 0) + coalesce(octet_length(changes), 0)"
)


def job_of(row: Sequence[Any]) -> Job:
    fields = dict(zip(Job.__struct_fields__, row, strict=True))
    fields["state"] = _states[fields["state"]]
    history = fields["history"]
    fields["history"] = () if history == "[]" else _read(_histories, history) or ()
    if fields["meta"] is not None:
        fields["meta"] = _read(_metas, fields["meta"])
    if fields["progress"] is not None:
        fields["progress"] = _read(_progresses, fields["progress"])
    if fields["changes"] is not None:
        fields["changes"] = changes_of(fields["changes"])
    return Job(**fields)


def changes_of(text: str | None) -> Changes | None:
    return None if text is None else _read(_changes, text)


def _read(decoder: msgspec.json.Decoder[T], text: str) -> T | None:
    """None for what another program has spoilt: the job itself can still run."""
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError:
        return None


async def jobs_of(db: Connection, schema: str, ids: Sequence[str]) -> list[Job]:
    """The jobs with these ids, in no order; unknown ids are left out."""
    cursor = await db.execute(f"select {ROW} from {schema}.job where id = any(%s)", (list(ids),))
    return [job_of(row) for row in await cursor.fetchall()]


_TYPES = {
    **dict.fromkeys(("retries", "attempt", "failures", "takeovers"), "integer"),
    **dict.fromkeys(("due_ms", "created_ms", "timeout_ms", "expires_ms", "fence"), "bigint"),
    **dict.fromkeys(("lease_until_ms", "started_ms", "settled", "ended_ms"), "bigint"),
    **dict.fromkeys(("parked", "asked", "told"), "boolean"),
    **dict.fromkeys(("meta", "progress", "history", "changes"), "json"),
    "priority": "smallint",
    "seen": "xid",
}


def record(fields: Iterable[str]) -> str:
    """These fields of encoded jobs, as a table. A job is encoded without the fields that have their
    defaults. To look for a field takes time, so only those that are needed are named."""
    columns = ", ".join(f"{name} {_TYPES.get(name, 'text')}" for name in fields)
    return f"json_to_recordset(%(jobs)s) as new({columns})"


def new(name: str) -> str:
    """A field of an encoded job, as a value for its column."""
    json = ("history", "meta", "progress", "changes")
    value = f"new.{name}::text" if name in json else f"new.{name}"
    default = {field.encode_name: field.default for field in msgspec.structs.fields(Job)}[name]
    if default is None or default is msgspec.NODEFAULT:
        return value
    text = "'[]'" if default == () else f"'{default}'" if isinstance(default, str) else int(default)
    return f"coalesce({value}, {text})" if name != "asked" else f"coalesce({value}, false)"


def encoded(jobs: Sequence[Job]) -> str:
    return encode(sorted(jobs, key=by_id)).decode()


def by_id(job: Job) -> str:
    return job.id


# --- Reading, deciding and writing, if one statement can't decide


async def marked(db: Connection, schema: str, ids: Sequence[str]) -> dict[str, tuple[str, Job]]:
    """Jobs by id, each with a mark of the version that was read."""
    cursor = await db.execute(
        f"select job.xmin::text, {ROW} from {schema}.job where id = any(%s)", (list(ids),)
    )
    return {(job := job_of(row[1:])).id: (row[0], job) for row in await cursor.fetchall()}


_CHANGED = (
    "state", "due_ms", "attempt", "fence", "failures", "takeovers", "worker", "lease_until_ms",
    "started_ms", "asked", "settled", "ended_ms", "error", "traceback", "result", "history",
    "progress",
)  # fmt: skip


# What only a change by others touches.
_CHOSEN = (
    "task", "payload", "queue", "created_ms", "retries", "timeout_ms", "expires_ms", "meta",
    "changes",
)  # fmt: skip


@cache
def _writing(schema: str, locked: str, changed: bool) -> str:
    columns = (*_CHANGED, *_CHOSEN) if changed else _CHANGED
    values = {name: new(name) for name in columns}
    values |= {"state": f"{values['state']}::{schema}.state", "watch_ms": "new.lease_until_ms"}
    values["priority"] = f"{new('priority')} - case when new.parked then 4 else 0 end"
    if changed:
        values["told"] = "new.told"
    return f"""
        with mine as materialized (
            select job.ctid as row_id, new.*
            from {record(("seen", "id", "priority", "parked", "told", *columns))}
            join {schema}.job on job.id = new.id and job.xmin = new.seen
            order by job.id for update of job {locked})
        update {schema}.job set {", ".join(f"{name} = {value}" for name, value in values.items())}
        from mine as new where job.ctid = new.row_id
        returning job.id"""


async def write_jobs(
    db: Connection, schema: str, changes: Sequence[tuple[str, Job]], locked: str = ""
) -> set[str]:
    """Write what a step made of jobs that it read with `marked`, unless they have changed since;
    returns the ids of the jobs that were written."""
    if not changes:
        return set()
    rows = [{"seen": mark, "told": job.told, **msgspec.to_builtins(job)} for mark, job in changes]
    changed = any(job.changes is not None for _, job in changes)
    statement = _writing(schema, locked, changed)
    cursor = await db.execute(statement, {"jobs": encode(rows).decode()})
    return {id for (id,) in await cursor.fetchall()}
