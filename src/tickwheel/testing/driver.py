"""The driver of a box: from event to event, as a worker and its scheduler would take them.

    next event (a job falls due, a schedule ticks) ──► set the clock ──► fire ──► claim, run, settle

It decides nothing itself. What is due the store says, what a tick adds the scheduler, what becomes
of a run the attempt: all of them the same code as in production. It takes the place of a worker's
loops alone, as they would tick every few seconds through a month.

Where no event loop runs, nothing here ever waits, so `by_hand` can run it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from tickwheel.app import App
from tickwheel.clock import StoreClock, first_of
from tickwheel.contact import Contact
from tickwheel.errors import UsageError
from tickwheel.job import Job, State
from tickwheel.scheduler import Scheduler
from tickwheel.testing.place import BoxClock, BoxStore, Loops, by_hand
from tickwheel.testing.running import BoxRun, Running

R = TypeVar("R")

# How deep inline jobs may add inline jobs: each takes some twenty frames of Python's thousand.
DEEPEST = 20
# A wait for runs to end is taken up again after this long.
LONGEST_MS = 86_400_000
# Ended jobs are kept a tenth longer than asked at most, so that looking for them costs little.
PRUNE_PARTS = 10

_deferred: contextvars.ContextVar[list[Job]] = contextvars.ContextVar("tickwheel_deferred")
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("tickwheel_depth", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxOptions:
    """What `sandbox` was given."""

    inline: bool
    raise_errors: bool
    schedules: bool
    limit: int


class Ticks(Scheduler):
    """The real scheduler, stepped."""

    async def reconcile(self) -> None:
        await self._reconcile()

    async def fire(self) -> None:
        for schedule in await self._look():
            await self._fire_due([schedule])

    async def next_ms(self, now_ms: int) -> int | None:
        """The next tick of all. What is due already has just been fired, or can't be."""
        coming = [
            each.next_ms
            for each in await self._look()
            if each.next_ms is not None and each.next_ms > now_ms and not each.paused
        ]
        return min(coming, default=None)


class Driver:
    """Lets time pass in a box, and runs what falls due."""

    def __init__(self, app: App, clock: BoxClock, store: BoxStore, options: BoxOptions) -> None:
        self._app = app
        self._clock = clock
        self._store = store
        self._options = options
        store_clock = StoreClock(clock)
        self._ticks = Ticks(store, app.tasks, store_clock, Contact(store_clock), app.declared)
        self._loops = Loops()
        self._jobs = Running(app, clock, store, self._loops)
        self.runs = self._jobs.runs
        self._at_work = False
        self._reconciled = False
        self._pruned_ms = clock.now_ms()
        self._started: list[str] = []
        self._failure: BaseException | None = None
        # Only on a virtual loop, where a run takes time, do runs go on while others start.
        self._running: set[asyncio.Task[BoxRun]] = set()

    def close(self) -> None:
        self._jobs.close()
        self._loops.close()

    # --- Time

    async def travel(self, until_ms: int) -> list[BoxRun]:
        """Let time pass, and run what falls due on the way, in order."""
        return await self._work(lambda: self._travel(until_ms))

    async def _travel(self, until_ms: int) -> None:
        await self._start_due()
        while (now_ms := self._clock.now_ms()) < until_ms:
            await self._reach(min(await self._next_ms(now_ms), until_ms))
            await self._start_due()

    async def drain(self) -> list[BoxRun]:
        """Run what is due now, and what that adds, until nothing is due."""
        return await self._work(self._drain)

    async def _drain(self) -> None:
        await self._start_due()
        while self._running:
            one_ended = asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            await first_of(self._reach(self._clock.now_ms() + LONGEST_MS), one_ended)
            await self._start_due()

    async def outage(self, until_ms: int) -> None:
        """Let time pass without a worker."""
        await self._work(lambda: self._clock.move_to(until_ms))

    async def _work(self, steps: Callable[[], Awaitable[None]]) -> list[BoxRun]:
        """One call of the user's: alone, bounded, and over when all that it started is."""
        if self._at_work:
            raise UsageError("this box is at work already: one travel, drain or outage at a time")
        self._at_work, self._failure = True, None
        self._started.clear()
        before = len(self.runs)
        try:
            if self._options.schedules and not self._reconciled:
                self._reconciled = True
                await self._ticks.reconcile()
            await steps()
            await self._all_ended()
            self._raise_failure()
        finally:
            self._at_work = False
            for run in self._running:
                run.cancel()
        return self.runs[before:]

    async def _next_ms(self, now_ms: int) -> float:
        moments = [self._store.next_due_ms(now_ms)]
        if self._options.schedules:
            moments.append(await self._ticks.next_ms(now_ms))
        return min((ms for ms in moments if ms is not None), default=float("inf"))

    async def _reach(self, ms: float) -> None:
        """Let time pass until then. On a virtual loop, or until there is news before."""
        now_ms = self._clock.now_ms()
        if self._clock.virtual:
            queues = self._store.known_queues()
            await self._store.wait(queues, now_ms=now_ms, until_ms=int(ms))
            self._jobs.heed_cancels()
        else:
            await self._clock.move_to(int(ms))
        await self._prune()

    async def _prune(self) -> None:
        """Forget what ended long ago, as workers do: its ids are free again."""
        now_ms = self._clock.now_ms()
        app = self._app
        if now_ms - self._pruned_ms < min(app.retention_ms, app.dead_retention_ms) // PRUNE_PARTS:
            return
        self._pruned_ms = now_ms
        for states, keep_ms in (
            ((State.DONE, State.CANCELLED), app.retention_ms),
            ((State.DEAD,), app.dead_retention_ms),
        ):
            await self._store.prune(states, before_ms=now_ms - keep_ms, limit=1_000_000)

    # --- Jobs

    async def _start_due(self) -> None:
        """Fire what ticks at this moment, and run what is due at it."""
        if self._options.schedules:
            await self._ticks.fire()
        while self._may_start() and (job := await self._store.claim_next(self._clock.now_ms())):
            self._started.append(job.task)
            if self._clock.virtual:
                run = asyncio.create_task(self._run(job))
                self._running.add(run)
                run.add_done_callback(self._running.discard)
            else:
                await self._run(job)
            self._raise_failure()

    async def _all_ended(self) -> None:
        if self._running:
            await asyncio.gather(*self._running)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _may_start(self) -> bool:
        """Whether one more may start; an error where jobs add themselves without end."""
        if len(self._started) < self._options.limit:
            return True
        now_ms = self._clock.now_ms()
        next_ms = self._store.next_due_ms(now_ms)
        if next_ms is None or next_ms > now_ms:
            return False
        [(task, count)] = Counter(self._started).most_common(1)
        raise UsageError(
            f"a storm of jobs: {len(self._started):,} runs in one go, {count:,} of them of "
            f"{task!r}, and still more are due; does it add itself again? If so many are meant, "
            "write sandbox(app, limit=…)"
        )

    async def _run(self, job: Job) -> BoxRun:
        run = await self._jobs.run(job)
        if run.failed and self._options.raise_errors and self._failure is None:
            self._failure = run.exception
        return run

    # --- Inline

    async def added(self, jobs: Sequence[Job]) -> None:
        """Jobs were just enqueued: those that are due now run before `enqueue` returns."""
        if not self._options.inline:
            return
        deferred = _deferred.get(None)
        if deferred is None:
            await self._run_inline(jobs)
        else:
            deferred += jobs

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Work of a caller without an event loop. What runs inline runs outside of one, too."""
        jobs: list[Job] = []
        value = self._loops.run(_deferring(jobs, work))
        by_hand(self._run_inline(jobs))
        return value

    async def _run_inline(self, jobs: Sequence[Job]) -> None:
        for each in jobs:
            with _deeper(each):
                job = self._store.claim_this(each.id, self._clock.now_ms())
                run = None if job is None else await self._run(job)
            if run is not None and run.failed:
                assert run.exception is not None
                raise run.exception


async def _deferring(jobs: list[Job], work: Awaitable[R]) -> R:
    _deferred.set(jobs)
    return await work


@contextmanager
def _deeper(job: Job) -> Iterator[None]:
    depth = _depth.get()
    if depth >= DEEPEST:
        raise UsageError(
            f"a storm of jobs: {job.task!r} is run inline by a job that is run inline, {depth} "
            "deep; does it add itself again? Write sandbox(app) without inline=True"
        )
    token = _depth.set(depth + 1)
    try:
        yield
    finally:
        _depth.reset(token)
