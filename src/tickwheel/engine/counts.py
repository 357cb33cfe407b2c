"""What is counted about jobs, runs and store calls: plain numbers, read when somebody asks.

They exist only if metrics are on. Names are bounded: tasks and queues beyond the limit are counted
together, as "other".
"""

from __future__ import annotations

import inspect
import os
import secrets
import threading
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tickwheel.clock import Clock
from tickwheel.duration import FARTHEST_MS
from tickwheel.job import Job, Outcome, Settlement, State
from tickwheel.objective import Objective, Tally
from tickwheel.registry import PoolName
from tickwheel.store import Store, WorkerCounts
from tickwheel.trust.store import SealedStore

# How many tasks, queues, and pairs of the two have counts of their own.
NAMES = 200
PAIRS = 1_000
OTHER = "other"
# How many tasks a worker tells the store of.
TASKS_TOLD = 100

# The upper bounds of the buckets.
BOUNDS_MS = (
    *(1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000),
    *(10_000, 30_000, 60_000, 300_000, 900_000, 3_600_000),
)
CALL_BOUNDS_US = (
    *(50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000),
    *(100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000),
)

# Most times are short: their bucket by milliseconds, without a search.
SHORT_MS = 1_000
_BUCKET = bytes(bisect_left(BOUNDS_MS, ms) for ms in range(SHORT_MS + 1))

# By its own name here, because each run passes it.
DONE = Outcome.DONE
_NAMES = {
    Outcome.RETRY: "retried",
    Outcome.SNOOZE: "snoozed",
    Outcome.EXPIRE: "expired",
}
# These wait for something to happen: how long they take says nothing about the store.
WAITS = ("wait", "asked", "watch_ended")
STEPS = tuple(
    name
    for name, step in vars(Store).items()
    if inspect.iscoroutinefunction(step) and name not in ("open", "close")
)


class Started(Protocol):
    """A run that has started."""

    job: Job
    started_ms: int | None
    # Those of a batch.
    members: Sequence[Any]


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

    def copy(self) -> TaskCounts:
        same = copy(self)
        same.queues = {name: copy(counts) for name, counts in list(self.queues.items())}
        same.late, same.took = self.late.copy(), self.took.copy()
        return same

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

    def copy(self) -> CallCounts:
        same = copy(self)
        same.buckets = self.buckets.copy()
        return same


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """All counts at one moment."""

    tasks: Mapping[str, TaskCounts]
    calls: Mapping[str, CallCounts]
    empty_claims: int
    # HTTP callbacks by host and status, or why there was no answer.
    callbacks: Mapping[tuple[str, str], int]
    workers: Sequence[WorkerGauges]


class Counts:
    """The counts of one app in this process, by all its workers and callers."""

    def __init__(self, clock: Clock) -> None:
        self._now_ns = clock.monotonic_ns
        # For what workers tell the store: who counts, and since when.
        self._token = secrets.token_hex(4)
        self._since_ms: int | None = None
        self.tasks: dict[str, TaskCounts] = {}
        self._queues: set[str] = set()
        self._pairs = 0
        self.calls: dict[str, CallCounts] = {name: CallCounts() for name in STEPS}
        self.empty_claims = 0
        self.callbacks: dict[tuple[str, str], int] = {}
        # Callers may be on several threads.
        self._lock = threading.Lock()
        # Runs that have started and are not counted yet: at most as many as there are slots, since
        # each end counts all of them.
        self.starts: list[Started] = []
        # What can be asked of each running worker, by its name.
        self.workers: dict[str, Callable[[], WorkerGauges]] = {}
        # Who is told of jobs that are dead.
        self.on_dead: list[Callable[[Settlement], None]] = []
        self.set_objective(None)

    def set_objective(self, objective: Objective | None) -> None:
        """Count the runs that start within the objective, from now on; without one, all are."""
        self._within_ms = FARTHEST_MS if objective is None else objective.within_ms

    @property
    def tally(self) -> Tally:
        self.count_starts()
        tallies = [each.tally for each in self.tasks.values()]
        return Tally(sum(each.total for each in tallies), sum(each.good for each in tallies))

    def numbers(self) -> Numbers:
        """A copy of everything, which may be read on any thread. Call it on the event loop of the
        workers."""
        self.count_starts()
        return self._copy([ask() for ask in list(self.workers.values())])

    def from_any_thread(self) -> Numbers:
        """The same, without the workers, and without runs that have just started."""
        return self._copy(())

    def told(self, now_ms: int) -> WorkerCounts:
        """What a worker tells the store, by whose clock it is `now_ms`. Call it on the event loop
        of the workers."""
        self.count_starts()
        if self._since_ms is None:
            self._since_ms = now_ms
        with self._lock:
            tasks = list(self.tasks.items())
            sums = [(name, _sums(each)) for name, each in tasks]
        late = [sum(each) for each in zip(*(task.late for _, task in tasks), strict=True)]
        while late and not late[-1]:
            late.pop()
        names: dict[str, tuple[int, int, int]] = {}
        # The first ones: these stay the same, so that each count only grows.
        for n, (name, each) in enumerate(sums):
            name = name if n < TASKS_TOLD else OTHER
            done, failed, dead = names.get(name, (0, 0, 0))
            if each.done or each.failed or each.dead:
                names[name] = (done + each.done, failed + each.failed, dead + each.dead)
        return WorkerCounts(
            # After a fork, both processes count on.
            source=f"{self._token}-{os.getpid()}",
            since_ms=self._since_ms,
            started=sum(each.started for _, each in sums),
            done=sum(each.done for _, each in sums),
            failed=sum(each.failed for _, each in sums),
            dead=sum(each.dead for _, each in sums),
            expired=sum(each.expired for _, each in sums),
            late=tuple(late),
            tasks=names,
        )

    def _copy(self, workers: Sequence[WorkerGauges]) -> Numbers:
        with self._lock:
            return Numbers(
                tasks={name: each.copy() for name, each in list(self.tasks.items())},
                calls={name: each.copy() for name, each in self.calls.items()},
                empty_claims=self.empty_claims,
                callbacks=dict(self.callbacks),
                workers=workers,
            )

    def know(self, task: str, queue: str) -> None:
        """Begin with zero, so that the first of them shows as an increase."""
        with self._lock:
            self._queue(self.tasks.get(task) or self._task(task), queue)

    # --- Jobs and runs, on the worker's event loop

    def count_starts(self) -> None:
        """Count the runs that have started since the last call: many in one loop."""
        tasks, within_ms = self.tasks, self._within_ms
        for each in self.starts:
            if each.members:
                # A batch: its jobs come next.
                self.starts += each.members
                continue
            job, started_ms = each.job, each.started_ms or 0
            task = tasks.get(job.task) or self._task(job.task)
            (task.queues.get(job.queue) or self._queue(task, job.queue)).started += 1
            if job.history and started_before(job):
                continue
            due_ms = job.due_ms
            if job.created_ms > due_ms:
                due_ms = job.created_ms  # due in the past means now
            late_ms = started_ms - due_ms
            if 0 <= late_ms <= SHORT_MS:
                task.late[_BUCKET[late_ms]] += 1
            else:
                late_ms = max(late_ms, 0)
                task.late[bisect_left(BOUNDS_MS, late_ms)] += 1
            task.late_ms += late_ms
            if late_ms <= within_ms:
                task.good += 1
        self.starts.clear()

    def done(self, settlements: Iterable[Settlement], answers: Iterable[bool]) -> None:
        """The store has written how these ended, or not. Counts those that are done: nearly all, so
        in one loop."""
        self.count_starts()
        tasks = self.tasks
        for settlement, kept in zip(settlements, answers, strict=False):
            if settlement.outcome is DONE and kept:
                job = settlement.job
                task = tasks.get(job.task) or self._task(job.task)
                (task.queues.get(job.queue) or self._queue(task, job.queue)).done += 1
                took_ms = settlement.ended_ms - (settlement.started_ms or settlement.ended_ms)
                if 0 <= took_ms <= SHORT_MS:
                    task.took[_BUCKET[took_ms]] += 1
                    task.took_ms += took_ms
                else:
                    self._took(task, took_ms)

    def _took(self, task: TaskCounts, took_ms: int) -> None:
        task.took[bisect_left(BOUNDS_MS, took_ms)] += 1
        task.took_ms += max(took_ms, 0)

    def ended(self, settlement: Settlement, kept: bool | None, stop: str | None) -> None:
        """An attempt ended otherwise, or the store did not accept how. `stop` says why the run was
        stopped, if it was."""
        job = settlement.job
        if settlement.outcome is Outcome.PARK:
            return  # its task is unknown here
        self.count_starts()
        task = self.tasks.get(job.task) or self._task(job.task)
        jobs = task.queues.get(job.queue) or self._queue(task, job.queue)
        if settlement.started_ms is not None:
            self._took(task, settlement.ended_ms - settlement.started_ms)
        self._ended_otherwise(jobs, settlement, kept, stop == "cancel")

    def _ended_otherwise(
        self, jobs: JobCounts, settlement: Settlement, kept: bool | None, cancelled: bool
    ) -> None:
        outcome, ran = settlement.outcome, settlement.started_ms is not None
        if not kept:
            jobs.lost += ran
            return
        jobs.failed += settlement.failed
        if cancelled and settlement.state is State.WAITING:
            jobs.cancelled += 1
        elif outcome is Outcome.RELEASE:
            jobs.released += ran
        elif outcome is Outcome.DEAD:
            jobs.dead += 1
            for tell in self.on_dead:
                tell(settlement)
        else:
            name = _NAMES[outcome]
            setattr(jobs, name, getattr(jobs, name) + 1)

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

    def called(self, host: str, status: int | None) -> None:
        """An HTTP callback was answered, or not."""
        what = host, str(status or "none")
        if what not in self.callbacks and len(self.callbacks) >= PAIRS:
            what = OTHER, what[1]
        self.callbacks[what] = self.callbacks.get(what, 0) + 1

    # --- Store calls

    def counted(self, store: Store) -> Store:
        """The same handle on a store, with its calls counted."""
        if isinstance(store, SealedStore):
            store.on_refused = self._refused
        return cast(Store, CountedStore(store, self))

    def _refused(self, settlements: Iterable[Settlement]) -> None:
        """The store has found jobs that can't be trusted, and settled them as dead."""
        for each in settlements:
            self.ended(each, True, None)

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


def _sums(task: TaskCounts) -> JobCounts:
    """The jobs of a task in all queues, by the events that a worker tells of."""
    sums = JobCounts()
    # Quickly: the event loop waits, and there may be a thousand of them.
    for each in task.queues.values():
        sums.started += each.started
        sums.done += each.done
        sums.failed += each.failed
        sums.dead += each.dead
        sums.expired += each.expired
    return sums


def started_before(job: Job) -> bool:
    """Whether a run has started for the same due time, and was lost or released: how punctual that
    one was has been counted."""
    last = job.history[-1]
    again = last.outcome is Outcome.LOST or last.outcome is Outcome.RELEASE
    return again and last.started_ms is not None and last.due_ms == job.due_ms
