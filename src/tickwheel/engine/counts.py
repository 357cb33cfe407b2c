"""What is counted about jobs, runs and store calls: plain numbers, read when somebody asks.

They exist only if metrics are on. Names are bounded: tasks and queues beyond the limit are counted
together, as "other".
"""

from __future__ import annotations

import inspect
import threading
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tickwheel.clock import Clock
from tickwheel.job import Job, Outcome, Settlement, State
from tickwheel.objective import Objective, Tally
from tickwheel.registry import PoolName
from tickwheel.store import Store

# How many tasks, queues, and pairs of the two have counts of their own.
NAMES = 200
PAIRS = 1_000
OTHER = "other"

# The upper bounds of the buckets.
BOUNDS_MS = (
    *(1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000),
    *(10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000),
)
CALL_BOUNDS_US = (
    *(50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000),
    *(100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000),
)

# By their own names here, because each run passes them.
DONE, WAITING = Outcome.DONE, State.WAITING
# These wait for something to happen: how long they take says nothing about the store.
WAITS = ("wait", "cancel_requests", "watch_ended")
STEPS = tuple(
    name
    for name, step in vars(Store).items()
    if inspect.iscoroutinefunction(step) and name not in ("open", "close")
)


class JobCounts:
    """The jobs of one task in one queue, by what happened to them here."""

    __slots__ = EVENTS = (
        "added",
        "started",
        "done",
        "failed",
        "retried",
        "dead",
        "expired",
        "cancelled",
        "snoozed",
        "released",
        "lost",
    )

    def __init__(self) -> None:
        self.added = self.started = self.done = self.failed = self.retried = self.dead = 0
        self.expired = self.cancelled = self.snoozed = self.released = self.lost = 0


class TaskCounts:
    """The jobs of one task by queue; how punctual its runs were, and how long they took."""

    __slots__ = ("good", "late", "late_ms", "queues", "took", "took_ms")

    def __init__(self) -> None:
        self.queues: dict[str, JobCounts] = {}
        # One more than there are bounds: the last one is for everything above.
        self.late = [0] * (len(BOUNDS_MS) + 1)
        self.late_ms = 0
        self.took = [0] * (len(BOUNDS_MS) + 1)
        self.took_ms = 0
        # How many started within the objective.
        self.good = 0

    @property
    def tally(self) -> Tally:
        """A job that expired, because it could not start in time, was not punctual."""
        expired = sum(each.expired for each in self.queues.values())
        return Tally(sum(self.late) + expired, self.good)


class CallCounts:
    """The calls of one method of the store."""

    __slots__ = ("buckets", "count", "errors", "total_us")

    def __init__(self) -> None:
        self.count = self.errors = self.total_us = 0
        self.buckets = [0] * (len(CALL_BOUNDS_US) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGauges:
    """A worker at this moment."""

    name: str
    queues: tuple[str, ...]
    # Held jobs: not due yet, due without a slot, and all of them.
    wheel: int
    ready: int
    held: int
    # Runs that take up a slot, and slots that are free for another, by pool.
    used: Mapping[PoolName, int]
    free: Mapping[PoolName, int]


class Counts:
    """The counts of one app in this process, by all its workers and callers."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.monotonic_ns
        self.tasks: dict[str, TaskCounts] = {}
        self._queues: set[str] = set()
        self._pairs = 0
        self.calls: dict[str, CallCounts] = {name: CallCounts() for name in STEPS}
        self.empty_claims = 0
        # Callers may be on several threads.
        self._lock = threading.Lock()
        # What can be asked of each running worker, by its name.
        self.workers: dict[str, Callable[[], WorkerGauges]] = {}
        # Who is told of jobs that are dead.
        self.on_dead: list[Callable[[Settlement], None]] = []
        self._within_ms = -1

    def set_objective(self, objective: Objective | None) -> None:
        """Count the runs that start within the objective, from now on."""
        self._within_ms = -1 if objective is None else objective.within_ms

    @property
    def tally(self) -> Tally:
        tallies = [each.tally for each in self.tasks.values()]
        return Tally(sum(each.total for each in tallies), sum(each.good for each in tallies))

    # --- Jobs and runs, on the worker's event loop

    def started(self, job: Job, now_ms: int) -> None:
        """A run starts."""
        task = self.tasks.get(job.task) or self._task(job.task)
        (task.queues.get(job.queue) or self._queue(task, job.queue)).started += 1
        if job.history and started_before(job):
            return
        late_ms = now_ms - job.due_ms
        if job.created_ms > job.due_ms:
            # Due in the past means now.
            late_ms = max(now_ms - job.created_ms, 0)
        task.late[bisect_left(BOUNDS_MS, late_ms)] += 1
        task.late_ms += late_ms
        if late_ms <= self._within_ms:
            task.good += 1

    def settled(self, settlement: Settlement, *, kept: bool | None, cancelled: bool) -> None:
        """An attempt ended, and the store accepted how (`kept`) or did not."""
        job, outcome, started_ms = settlement.job, settlement.outcome, settlement.started_ms
        if outcome is Outcome.PARK:
            return  # its task is unknown here
        task = self.tasks.get(job.task) or self._task(job.task)
        counts = task.queues.get(job.queue) or self._queue(task, job.queue)
        if started_ms is not None:
            took_ms = settlement.ended_ms - started_ms
            task.took[bisect_left(BOUNDS_MS, took_ms)] += 1
            task.took_ms += max(took_ms, 0)
            if not kept:
                counts.lost += 1
        if not kept:
            return
        if outcome is DONE:
            counts.done += 1
        else:
            self._ended_otherwise(counts, settlement, cancelled)

    def _ended_otherwise(self, counts: JobCounts, settlement: Settlement, cancelled: bool) -> None:
        outcome = settlement.outcome
        counts.failed += settlement.failed
        if cancelled and settlement.state is WAITING:
            counts.cancelled += 1
        elif outcome is Outcome.RETRY:
            counts.retried += 1
        elif outcome is Outcome.SNOOZE:
            counts.snoozed += 1
        elif outcome is Outcome.RELEASE:
            counts.released += settlement.started_ms is not None
        elif outcome is Outcome.EXPIRE:
            counts.expired += 1
        elif outcome is Outcome.DEAD:
            counts.dead += 1
            for tell in self.on_dead:
                tell(settlement)

    def added(self, jobs: Iterable[Job], answers: Iterable[bool]) -> None:
        with self._lock:
            for job, added in zip(jobs, answers, strict=False):
                if added:
                    task = self.tasks.get(job.task) or self._task(job.task)
                    (task.queues.get(job.queue) or self._queue(task, job.queue)).added += 1

    def _task(self, name: str) -> TaskCounts:
        """The counts of a task without any so far."""
        name = name if len(self.tasks) < NAMES else OTHER
        return self.tasks.setdefault(name, TaskCounts())

    def _queue(self, task: TaskCounts, name: str) -> JobCounts:
        if name not in self._queues:
            name = name if len(self._queues) < NAMES else OTHER
        if name not in task.queues:
            name = name if self._pairs < PAIRS else OTHER
        if name not in task.queues:
            self._pairs += 1
            self._queues.add(name)
        return task.queues.setdefault(name, JobCounts())

    # --- Store calls

    def counted(self, store: Store) -> Store:
        """The same handle on a store, with its calls counted."""
        return cast(Store, CountedStore(store, self))

    def timed(self, name: str, step: Step) -> Step:
        """The same step of a store, counted."""
        calls, now_ns, lock = self.calls[name], self._now_ns, self._lock

        async def timed(*args: Any, **kwargs: Any) -> Any:
            began_ns, failed = now_ns(), False
            try:
                return await step(*args, **kwargs)
            except Exception:
                failed = True
                raise
            finally:
                took_us = (now_ns() - began_ns) // 1_000
                with lock:
                    calls.count += 1
                    calls.errors += failed
                    calls.total_us += took_us
                    calls.buckets[bisect_left(CALL_BOUNDS_US, took_us)] += 1

        return timed


Step = Callable[..., Awaitable[Any]]


class CountedStore:
    """A handle on a store that counts what goes through it."""

    def __init__(self, store: Store, counts: Counts) -> None:
        self._store = store
        self._counts = counts
        for name in STEPS:
            setattr(self, f"_{name}", counts.timed(name, getattr(store, name)))
        for name in STEPS:
            if name not in ("add", "claim", "fire"):
                setattr(self, name, getattr(self, f"_{name}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def add(self, jobs: Any) -> Any:
        answers = await self._add(jobs)
        self._counts.added(jobs, answers)
        return answers

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        jobs = await self._claim(*args, **kwargs)
        if not jobs:
            self._counts.empty_claims += 1
        return jobs

    async def fire(self, schedule: Any, jobs: Any, **kwargs: Any) -> Any:
        fired = await self._fire(schedule, jobs, **kwargs)
        if fired:
            self._counts.added(jobs, [True] * len(jobs))
        return fired


def started_before(job: Job) -> bool:
    """Whether a run has started for the same due time, and was lost or released: how punctual that
    one was has been counted."""
    last = job.history[-1]
    again = last.outcome is Outcome.LOST or last.outcome is Outcome.RELEASE
    return again and last.started_ms is not None and last.due_ms == job.due_ms
