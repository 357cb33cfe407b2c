"""What `tickwheel top` shows at one moment, computed from two samples of the store. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tickwheel.duration import iso, moment
from tickwheel.envelope import readable
from tickwheel.job import Job, Outcome, State

if TYPE_CHECKING:
    from tickwheel.store import QueueInfo, WorkerInfo
    from tickwheel.unserved import UnservedTask

# The wheel's upcoming slots in the chart: ten minutes.
SLOT_MS, SLOTS = 10_000, 60
FAILURES_KEPT = 20

_FAILED = (Outcome.RETRY, Outcome.DEAD, Outcome.LOST)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Some of the jobs that were waiting at one moment."""

    at_ms: int
    jobs: Sequence[Job] = ()
    # Whether there were more.
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The store's state at one moment."""

    now_ms: int
    queues: Sequence[QueueInfo]
    workers: Sequence[WorkerInfo]
    # A little older if there are many.
    waiting: Waiting
    # The last jobs that ended, of each queue.
    ended: Sequence[Job] = ()
    # Tasks with waiting jobs that no running worker knows.
    unknown: Sequence[UnservedTask] = ()


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A queue, and how many of its jobs ended per second since the previous sample."""

    info: QueueInfo
    done_per_s: float | None
    dead_per_s: float | None


@dataclass(frozen=True, slots=True)
class Punctuality:
    """How late the most recently done jobs started."""

    jobs: int
    p50_ms: int
    p99_ms: int
    max_ms: int
    # When the last of them ended.
    last_ms: int


@dataclass(frozen=True, slots=True)
class Coming:
    """How many waiting jobs are due in each slot from now on."""

    slots: tuple[int, ...]
    overdue: int
    later: int
    waiting: int
    looked_at: int
    # Not all waiting jobs were read: each figure is a lower bound.
    at_least: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that failed."""

    ms: int
    id: str
    task: str
    queue: str
    outcome: Outcome
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Everything that is shown."""

    now_ms: int
    queues: list[QueueRow]
    workers: list[WorkerInfo]
    punctuality: Punctuality | None
    coming: Coming
    failures: list[Failure] = field(default_factory=list)
    unknown: list[UnservedTask] = field(default_factory=list)
    # Why the store could not be read; the rest is then from the last sample.
    away: str | None = None


def frame(sample: Sample, before: Sample | None, *, away: str | None = None) -> Frame:
    """The frame for a sample; rates need the previous sample."""
    return Frame(
        now_ms=sample.now_ms,
        queues=_queues(sample, before),
        workers=list(sample.workers),
        punctuality=_punctuality(sample.ended),
        coming=_coming(sample),
        failures=_failures([*sample.waiting.jobs, *sample.ended]),
        unknown=list(sample.unknown),
        away=away,
    )


def _queues(sample: Sample, before: Sample | None) -> list[QueueRow]:
    if before is None or sample.now_ms <= before.now_ms:
        return [QueueRow(queue, None, None) for queue in sample.queues]
    seconds = (sample.now_ms - before.now_ms) / 1000
    then = {queue.name: queue for queue in before.queues}

    def rate(queue: QueueInfo, state: State) -> float:
        earlier: int = getattr(then[queue.name], state) if queue.name in then else 0
        count: int = getattr(queue, state)
        # Ended jobs are pruned, so the count can shrink; that is no rate.
        return round(max(count - earlier, 0) / seconds, 3)

    return [
        QueueRow(queue, rate(queue, State.DONE), rate(queue, State.DEAD)) for queue in sample.queues
    ]


def _punctuality(ended: Iterable[Job]) -> Punctuality | None:
    runs = [job.history[-1] for job in ended if job.state is State.DONE and job.history]
    late = sorted(max(run.started_ms - run.due_ms, 0) for run in runs if run.started_ms is not None)
    if not late:
        return None
    return Punctuality(
        jobs=len(late),
        p50_ms=_percentile(late, 50),
        p99_ms=_percentile(late, 99),
        max_ms=late[-1],
        last_ms=max(run.ended_ms for run in runs),
    )


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """The least value that `percent` of all values don't exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _coming(sample: Sample) -> Coming:
    waiting, now_ms = sample.waiting, sample.now_ms
    due = [job.due_ms for job in waiting.jobs]
    slots = [0] * SLOTS
    for ms in due:
        if now_ms <= ms < now_ms + SLOTS * SLOT_MS:
            slots[(ms - now_ms) // SLOT_MS] += 1
    return Coming(
        slots=tuple(slots),
        # Jobs that became due since they were read are held by a worker by now.
        overdue=sum(ms < waiting.at_ms for ms in due),
        later=sum(ms >= now_ms + SLOTS * SLOT_MS for ms in due),
        waiting=sum(queue.waiting for queue in sample.queues),
        looked_at=len(due),
        at_least=waiting.more,
    )


def _failures(jobs: Iterable[Job]) -> list[Failure]:
    """The last runs that failed, the latest first."""
    found = {
        (job.id, run.attempt): Failure(
            run.ended_ms, job.id, job.task, job.queue, run.outcome, run.error or ""
        )
        for job in map(readable, jobs)
        for run in job.history
        if run.outcome in _FAILED
    }
    return sorted(found.values(), key=lambda each: -each.ms)[:FAILURES_KEPT]


# --- JSON


def frame_document(frame: Frame) -> dict[str, Any]:
    """A frame for programs."""
    coming, on_time = frame.coming, frame.punctuality
    return {
        "at": iso(moment(frame.now_ms)),
        "queues": [_queue_document(row) for row in frame.queues],
        "workers": [_worker_document(each) for each in frame.workers],
        "punctuality": None
        if on_time is None
        else {
            "jobs": on_time.jobs,
            "p50_ms": on_time.p50_ms,
            "p99_ms": on_time.p99_ms,
            "max_ms": on_time.max_ms,
            "last_ended": iso(moment(on_time.last_ms)),
        },
        "coming": {
            "slot_ms": SLOT_MS,
            "slots": list(coming.slots),
            "overdue": coming.overdue,
            "later": coming.later,
            "looked_at": coming.looked_at,
            "at_least": coming.at_least,
        },
        "unserved_tasks": [
            {"queue": each.queue, "task": each.task, "since": iso(moment(each.since_ms))}
            for each in frame.unknown
        ],
        "failures": [
            {
                "at": iso(moment(each.ms)),
                "id": each.id,
                "task": each.task,
                "queue": each.queue,
                "outcome": str(each.outcome),
                "error": each.error,
            }
            for each in frame.failures
        ],
    }


def _queue_document(row: QueueRow) -> dict[str, Any]:
    info = row.info
    return {
        "name": info.name,
        "paused": info.paused,
        **{str(state): getattr(info, state) for state in State},
        "done_per_s": row.done_per_s,
        "dead_per_s": row.dead_per_s,
    }


def _worker_document(worker: WorkerInfo) -> dict[str, Any]:
    return {
        "name": worker.name,
        "host": worker.host,
        "queues": list(worker.queues),
        "running": worker.running,
        "held": worker.held,
        "concurrency": worker.concurrency,
        "seen": iso(moment(worker.seen_ms)),
    }
