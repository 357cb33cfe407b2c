"""How a job is stored in Redis: text that statements.lua writes and this module reads.

A record is the job as it was added or last settled. For each step since then the script appends a
line, without knowing what the step means; a reader applies the lines with the functions of
`tickwheel.job`. So each step is defined in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tickwheel import job as life
from tickwheel.job import Changes, Job, Priority, Progress, State
from tickwheel.schedule import Schedule
from tickwheel.store import CURSOR_LIMIT

LETTERS = {
    State.WAITING: "w",
    State.RUNNING: "r",
    State.DONE: "d",
    State.DEAD: "x",
    State.CANCELLED: "c",
}

# An unknown priority counts as the nearest known one.
_RANKS: dict[int, int] = {priority: int(priority) for priority in Priority}

# A start that is unknown although there is progress. An older release reads 0.
_UNKNOWN = "000"

_encode = msgspec.json.encode
_job = msgspec.json.Decoder(Job).decode
_progress = msgspec.json.Decoder(Progress).decode
_text = msgspec.json.Decoder(str).decode
_schedule = msgspec.json.Decoder(Schedule).decode


# --- Writing


def place(job: Job) -> str:
    """Rank and queue: with the state, they name the set that a job is in."""
    return f"{_rank(job)}:{job.queue}"


def _rank(job: Job) -> int:
    return _RANKS.get(job.priority, 0 if job.priority < 0 else 3)


def record(job: Job) -> str:
    """The job as JSON, after what the script needs. It is text: Lua's msgpack has no bytes."""
    settled = "-" if job.settled is None else job.settled
    size = len(job.queue) if job.queue.isascii() else len(job.queue.encode())
    head = f"{LETTERS[job.state]}{_rank(job)} {settled} {size} {job.queue}"
    return head + _encode(job).decode()


class Columns(NamedTuple):
    """Jobs to add, as arguments of the script."""

    ids: list[str]
    records: list[str]
    places: list[str]
    dues: list[int]
    # By the number of the job, from 1; False if no job has any.
    metas: dict[int, str] | bool


def columns(jobs: Sequence[Job]) -> Columns:
    return Columns(
        [job.id for job in jobs],
        [record(life.added(job)) for job in jobs],
        [place(job) for job in jobs],
        [job.due_ms for job in jobs],
        {n: meta_lines(job.meta) for n, job in enumerate(jobs, 1) if job.meta} or False,
    )


def meta_lines(meta: Mapping[str, str]) -> str:
    """Each name and each value as a line."""
    return "\n".join(f"{as_line(name)}\n{as_line(value)}" for name, value in meta.items())


def started_part(job: Job) -> str:
    """When a job was started, as its line has it: after a 0, if there is progress."""
    if job.progress is None:
        return "" if job.started_ms is None else str(job.started_ms)
    return _UNKNOWN if job.started_ms is None else f"0{job.started_ms}"


def told(jobs: Sequence[Job]) -> dict[int, str] | bool:
    """The progress of jobs, by their number, from 1; False if there is none."""
    some = {n: job.progress for n, job in enumerate(jobs, 1) if job.progress is not None}
    return {n: _encode(progress).decode() for n, progress in some.items()} or False


def as_line(name: str) -> str:
    """A name as JSON, which has no line breaks."""
    return _encode(name).decode()


def name_in(line: str) -> str:
    """The name in such a line."""
    return _text(line)


def task_part(task: str) -> str:
    """Text that only records of this task contain: inside a string, quotes are escaped."""
    return f'"task":{as_line(task)},'


def parked_id(member: str) -> str:
    """The id in the member of a parked job: after its task, a line break, rank and due time."""
    return member.partition("\n")[2][17:]


def schedule_record(schedule: Schedule) -> str:
    return f"{schedule.fence} {_encode(schedule).decode()}"


# --- Reading


def read(record: bytes, lines: bytes | None) -> Job:
    """The job in its current state."""
    _, _, size, rest = record.split(b" ", 3)
    job = _job(memoryview(rest)[int(size) :])
    if lines:
        changes = job.changes
        if changes is not None:
            # What is pending is for the last claim, not for those before it.
            job = msgspec.structs.replace(job, changes=None)
        for line in reversed(lines.split(b"\n")):
            job = _STEPS[line[:1]](job, line)
        if changes is not None:
            running = job.state is State.RUNNING
            changes = changes if running else life.settled_changes(changes)
            job = msgspec.structs.replace(job, changes=changes)
    return job


def rewritten(record_: bytes, changes: Changes | None) -> str:
    """A record with these changes: that of a job that runs, which stays as it was before its
    claim."""
    return record(msgspec.structs.replace(read(record_, None), changes=changes))


def read_all(records: Sequence[bytes | None], lines: Sequence[bytes | None]) -> list[Job | None]:
    return [
        None if record is None else read(record, since)
        for record, since in zip(records, lines, strict=True)
    ]


def read_schedule(record: bytes) -> Schedule:
    return _schedule(record.partition(b" ")[2])


def _claimed(job: Job, line: bytes) -> Job:
    _, fence, until, asked, rest = line.split(b" ", 4)
    started, _, worker = (b"", b"", rest) if rest.startswith(b'"') else rest.partition(b" ")
    held = life.claimed(job, worker=_text(worker), fence=int(fence), now_ms=int(until), lease_ms=0)
    if asked == b"0" and not started:
        return held
    started_ms = int(started) if started not in (b"", _UNKNOWN.encode()) else None
    stop = asked in (b"1", b"3")
    return msgspec.structs.replace(held, cancel_requested=stop, started_ms=started_ms)


def _progressed(job: Job, line: bytes) -> Job:
    return msgspec.structs.replace(job, progress=_progress(line[2:]))


def _cancelled(job: Job, line: bytes) -> Job:
    return life.cancelled(job, now_ms=int(line[2:]))


def _rerun(job: Job, line: bytes) -> Job:
    return life.rerun(job, now_ms=int(line[2:]))


_STEPS: dict[bytes, Callable[[Job, bytes], Job]] = {
    b"r": _claimed,
    b"c": _cancelled,
    b"w": _rerun,
    # Not stored so: the script adds it for readers.
    b"p": _progressed,
}


# --- Cursors


def cursor_of(last: Sequence[bytes] | None) -> str | None:
    """Set, score and id of the last job that was read, as text."""
    return _encode([part.decode() for part in last]).decode() if last else None


def parse_cursor(cursor: str) -> list[str]:
    """Raises ValueError if `cursor_of` did not make this cursor."""
    if len(cursor) > CURSOR_LIMIT:
        raise ValueError(cursor)
    parts = msgspec.json.decode(cursor, type=list[str])
    if len(parts) != 3 or parts[0][1:2] != ":" or parts[0][3:4] != ":":
        raise ValueError(cursor)
    if not math.isfinite(float(parts[1])):
        raise ValueError(cursor)
    return parts


_AFTER = "id"


def cursor_after(id: bytes) -> str:
    """The last job that was read of those with some meta."""
    return _encode([_AFTER, id.decode()]).decode()


def parse_after(cursor: str) -> str:
    """Raises ValueError if `cursor_after` did not make this cursor."""
    if len(cursor) > CURSOR_LIMIT:
        raise ValueError(cursor)
    what, id = msgspec.json.decode(cursor, type=tuple[str, str])
    if what != _AFTER:
        raise ValueError(cursor)
    return id
