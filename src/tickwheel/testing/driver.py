"""The driver of a box: moves from event to event, as a worker and its scheduler would.

    next event (a job falls due, a schedule ticks) ──► set the clock ──► fire ──► claim, run, settle

It decides nothing itself: the store decides what is due, the scheduler what a tick adds, and the
attempt how a run ends, all with the same code as in production. It replaces only a worker's loops,
which would wake every few seconds through a month.

Without an event loop nothing here ever waits, so `by_hand` can run it.
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
from tickwheel.clock import StoreClock
from tickwheel.concurrency import first_of
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.engine.scheduler import Scheduler
from tickwheel.errors import UsageError
from tickwheel.job import Job, State
from tickwheel.testing.lingering import Lingering
from tickwheel.testing.parts import BoxClock, BoxStore, CallerLoops, by_hand
from tickwheel.testing.running import BoxRun, BoxRunner

R = TypeVar("R")

# How deep inline jobs may nest: each takes about twenty of Python's thousand stack frames.
DEEPEST = 20
# A wait for runs to end is checked again after this long.
LONGEST_MS = 86_400_000
# Ended jobs are kept at most a tenth longer than asked, so that pruning costs little.
PRUNE_PARTS = 10

_deferred: contextvars.ContextVar[list[Job]] = contextvars.ContextVar("tickwheel_deferred")
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("tickwheel_depth", default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxOptions:
    """The options of `sandbox`."""

    inline: bool
    raise_errors: bool
    schedules: bool
    limit: int


class SteppedScheduler(Scheduler):
    """The real scheduler, run step by step."""

    async def reconcile(self) -> None:
        await self._reconcile()

    async def fire(self) -> None:
        for schedule in await self._read_all():
            await self._fire_due([schedule])

    async def next_ms(self, now_ms: int) -> int | None:
        """The next tick of all schedules. Due ticks have just been fired, or can't be."""
        coming = [
            each.next_ms
            for each in await self._read_all()
            if each.next_ms is not None and each.next_ms > now_ms and not each.paused
        ]
        return min(coming, default=None)


class Driver:
    """Moves time in a box, and runs what becomes due."""

    def __init__(self, app: App, clock: BoxClock, store: BoxStore, options: BoxOptions) -> None:
        self._app = app
        self._clock = clock
        self._store = store
        self._options = options
        store_clock = StoreClock(clock)
        self._ticks = SteppedScheduler(
            store, app.tasks, store_clock, Reconnecting(store_clock), app.declared
        )
        self._loops = CallerLoops()
        self._jobs = BoxRunner(app, clock, store, self._loops)
        self.runs = self._jobs.runs
        self._at_work = False
        self._reconciled = False
        self._pruned_ms = clock.now_ms()
        self._started: list[str] = []
        self._failure: BaseException | None = None
        # Only on a virtual loop, where a run takes time, do runs overlap.
        self._running: set[asyncio.Task[list[BoxRun]]] = set()
        self._lingering = Lingering(app.tasks)

    async def close_lifespans(self) -> None:
        await self._jobs.lifespans.close()

    def close_lifespans_sync(self) -> None:
        self._jobs.lifespans.close_sync()

    def close(self) -> None:
        self._jobs.close()
        self._loops.close()

    # --- Time

    async def travel(self, until_ms: int) -> list[BoxRun]:
        """Let time pass, and run what becomes due on the way, in order."""
        return await self._work(lambda: self._travel(until_ms))

    async def _travel(self, until_ms: int) -> None:
        await self._start_due()
        while (now_ms := self._clock.now_ms()) < until_ms:
            await self._reach(min(await self._next_ms(now_ms), until_ms))
            await self._start_due()

    async def drain(self) -> list[BoxRun]:
        """Run due jobs, and due jobs that they add, until none is due."""
        return await self._work(self._drain)

    async def _drain(self) -> None:
        await self._start_due(linger=False)
        while self._running:
            one_ended = asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            await first_of(self._reach(self._clock.now_ms() + LONGEST_MS), one_ended)
            await self._start_due(linger=False)

    async def outage(self, until_ms: int) -> None:
        """Let time pass without a worker."""
        await self._work(lambda: self._clock.move_to(until_ms))

    async def _work(self, steps: Callable[[], Awaitable[None]]) -> list[BoxRun]:
        """One call by the user: exclusive, bounded, and finished when all its runs are."""
        if self._at_work:
            raise UsageError("this box is already busy; call travel, drain or outage one at a time")
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
        moments = [self._store.next_due_ms(now_ms), self._lingering.next_ms()]
        if self._options.schedules:
            moments.append(await self._ticks.next_ms(now_ms))
        return min((ms for ms in moments if ms is not None), default=float("inf"))

    async def _reach(self, ms: float) -> None:
        """Let time pass until then; on a virtual loop, or until something happens earlier."""
        now_ms = self._clock.now_ms()
        if self._clock.virtual:
            queues = self._store.known_queues()
            await self._store.wait(queues, now_ms=now_ms, until_ms=int(ms))
            self._jobs.stop_cancelled()
        else:
            await self._clock.move_to(int(ms))
        await self._prune()

    async def _prune(self) -> None:
        """Delete jobs that ended long ago, as workers do: their ids are free again."""
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

    async def _start_due(self, *, linger: bool = True) -> None:
        """Fire the ticks of this moment, and run the jobs that are due. Without `linger`, jobs of
        batch tasks don't wait for others that are due later."""
        if self._options.schedules:
            await self._ticks.fire()
        while jobs := await self._next_jobs(linger):
            if self._clock.virtual:
                run = asyncio.create_task(self._run(jobs))
                self._running.add(run)
                run.add_done_callback(self._running.discard)
            else:
                await self._run(jobs)
            self._raise_failure()

    async def _next_jobs(self, linger: bool) -> list[Job]:
        """Claim the job to start now, or the jobs of one batch; none if nothing should start."""
        while self._may_start():
            now_ms = self._clock.now_ms()
            job = await self._store.claim_next(now_ms)
            if job is None:
                break
            self._started.append(job.task)
            if not self._lingering.add(job, now_ms):
                return [job]
        while jobs := self._lingering.take(self._clock.now_ms() if linger else None):
            if jobs := await self._jobs.still_wanted(jobs):
                return jobs
        return []

    async def _all_ended(self) -> None:
        if self._running:
            await asyncio.gather(*self._running)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _may_start(self) -> bool:
        """Whether one more may start. Raises if jobs add themselves endlessly."""
        if len(self._started) < self._options.limit:
            return True
        now_ms = self._clock.now_ms()
        next_ms = self._store.next_due_ms(now_ms)
        if next_ms is None or next_ms > now_ms:
            return False
        [(task, count)] = Counter(self._started).most_common(1)
        raise UsageError(
            f"too many jobs: {len(self._started):,} runs in one go, {count:,} of them of "
            f"{task!r}, and more are due; does it add itself again? If this is intended, "
            "use sandbox(app, limit=…)"
        )

    async def _run(self, jobs: Sequence[Job]) -> list[BoxRun]:
        runs = await self._jobs.run(jobs)
        for run in runs:
            if run.failed and self._options.raise_errors and self._failure is None:
                self._failure = run.exception
        return runs

    # --- Inline

    async def added(self, jobs: Sequence[Job]) -> None:
        """Called with jobs just enqueued: those due now run before `enqueue` returns."""
        if not self._options.inline:
            return
        deferred = _deferred.get(None)
        if deferred is None:
            await self._run_inline(jobs)
        else:
            deferred += jobs

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        """Run work for a caller without an event loop. Inline jobs also run outside of one."""
        jobs: list[Job] = []
        value = self._loops.run(_deferring(jobs, work))
        by_hand(self._run_inline(jobs))
        return value

    async def _run_inline(self, jobs: Sequence[Job]) -> None:
        # Those that were added in one call are due together.
        together = Lingering(self._app.tasks)
        for each in jobs:
            with _deeper(each):
                now_ms = self._clock.now_ms()
                job = self._store.claim_this(each.id, now_ms)
                if job is not None and not together.add(job, now_ms):
                    _raise_first(await self._run([job]))
        while batch := together.take(None):
            with _deeper(batch[0]):
                _raise_first(await self._run(batch))


def _raise_first(runs: list[BoxRun]) -> None:
    for run in runs:
        if run.failed:
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
            f"too many nested jobs: {job.task!r} runs inline in a job that runs inline, {depth} "
            "deep; does it add itself again? Use sandbox(app) without inline=True"
        )
    outer = _depth.set(depth + 1)
    try:
        yield
    finally:
        _depth.reset(outer)
