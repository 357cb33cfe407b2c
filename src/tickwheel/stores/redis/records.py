"""How a job is written into Redis, and read from there: pure, and in step with steps.lua.

A record is the job as it was added or last settled. What happened since then is a line for each
step, noted by a script that knows nothing of jobs; whoever reads the record applies them here, with
the functions of `tickwheel.job`. So what a step means is said in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tickwheel import job as life
from tickwheel.job import Job, Priority, State
from tickwheel.schedule import Schedule

LETTERS = {
    State.WAITING: "w",
    State.RUNNING: "r",
    State.DONE: "d",
    State.DEAD: "x",
    State.CANCELLED: "c",
}

# Other priorities than the known ones count as the nearest.
_RANKS: dict[int, int] = {priority: int(priority) for priority in Priority}

_encode = msgspec.json.encode
_job = msgspec.json.Decoder(Job).decode
_text = msgspec.json.Decoder(str).decode
_schedule = msgspec.json.Decoder(Schedule).decode


# --- Writing


def place(job: Job) -> str:
    """Where a job stands among those of its state: rank and queue."""
    return f"{_rank(job)}:{job.queue}"


def _rank(job: Job) -> int:
    return _RANKS.get(job.priority, 0 if job.priority < 0 else 3)


def record(job: Job) -> str:
    """The job, behind what scripts have to know of it. Text, for Lua's msgpack knows no bytes."""
    settled = "-" if job.settled is None else job.settled
    size = len(job.queue) if job.queue.isascii() else len(job.queue.encode())
    head = f"{LETTERS[job.state]}{_rank(job)} {settled} {size} {job.queue}"
    return head + _encode(job).decode()


def columns(jobs: Sequence[Job]) -> tuple[list[str], list[str], list[str], list[int]]:
    """Jobs to be added as their ids, records, places and due times."""
    return (
        [job.id for job in jobs],
        [record(life.added(job)) for job in jobs],
        [place(job) for job in jobs],
        [job.due_ms for job in jobs],
    )


def as_line(name: str) -> str:
    """A name as JSON, which has no line breaks."""
    return _encode(name).decode()


def task_part(task: str) -> str:
    """What the records of this task contain and no others: in a text, quotes are escaped."""
    return f'"task":{as_line(task)},'


def schedule_record(schedule: Schedule) -> str:
    return f"{schedule.fence} {_encode(schedule).decode()}"


# --- Reading


def read(record: bytes, lines: bytes | None) -> Job:
    """The job as it stands."""
    _, _, size, rest = record.split(b" ", 3)
    job = _job(memoryview(rest)[int(size) :])
    if lines:
        for line in reversed(lines.split(b"\n")):
            job = _STEPS[line[:1]](job, line)
    return job


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
    return msgspec.structs.replace(
        held, asked=asked == b"1", started_ms=int(started) if started else None
    )


def _cancelled(job: Job, line: bytes) -> Job:
    return life.cancelled(job, now_ms=int(line[2:]))


def _rerun(job: Job, line: bytes) -> Job:
    return life.rerun(job, now_ms=int(line[2:]))


_STEPS: dict[bytes, Callable[[Job, bytes], Job]] = {
    b"r": _claimed,
    b"c": _cancelled,
    b"w": _rerun,
}


# --- Cursors


def cursor_of(last: Sequence[bytes] | None) -> str | None:
    """Set, score and id of the last job that was looked at, as text."""
    return _encode([part.decode() for part in last]).decode() if last else None


def parse_cursor(cursor: str) -> list[str]:
    """Raises ValueError where this is not what `cursor_of` made."""
    parts: list[Any] = msgspec.json.decode(cursor, type=list[str])
    if len(parts) != 3 or parts[0][1:2] != ":" or parts[0][3:4] != ":":
        raise ValueError(cursor)
    float(parts[1])
    return parts
