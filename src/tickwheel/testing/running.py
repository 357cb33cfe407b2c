"""Run a job or a batch in a box with a worker's own code, settle it and record the run."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from bisect import insort
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any

from tickwheel.app import App
from tickwheel.arguments import decode_result
from tickwheel.client import JobInfo
from tickwheel.clock import StoreClock
from tickwheel.duration import moment
from tickwheel.engine import batches
from tickwheel.engine.attempt import JobContext, Runner, timeout_ms
from tickwheel.engine.following import followed
from tickwheel.engine.hand import Batch, Held, Stop
from tickwheel.engine.surroundings import CallNext, Middleware, Surroundings, chained
from tickwheel.errors import JobFailed, Partial, Retry, TickwheelError, UnknownTask
from tickwheel.job import Job, Outcome, Settlement, release
from tickwheel.registry import Definition
from tickwheel.retry import RetryPolicy, decide
from tickwheel.testing.lifespans import BoxLifespans
from tickwheel.testing.parts import BoxClock, BoxStore, CallerLoops, Outside, by_hand, on_a_loop
from tickwheel.traceback import users_frames

# How many plain functions may run at the same time on a virtual loop.
THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """One run of a job in a box."""

    # The number of the run in its box, in the order of their start.
    number: int
    task: str
    # When it started, in the box's time.
    at: datetime
    outcome: Outcome
    # The job as this run left it.
    job: JobInfo = field(repr=False)
    # What the task returned.
    result: Any = None
    # Its error in one line, as in the job's history, and the exception that the task raised.
    error: str | None = None
    exception: BaseException | None = None

    @property
    def traceback(self) -> str | None:
        """Where it failed, if it did: the frames of the task, as `jobs show` prints them."""
        return self.job.traceback

    @property
    def failed(self) -> bool:
        """Whether it failed, rather than that the task asked to run later."""
        by_choice = self.outcome is Outcome.RETRY and isinstance(self.exception, Retry)
        return self.outcome in (Outcome.RETRY, Outcome.DEAD) and not by_choice


class BoxRunner:
    """Runs claimed jobs. Without an event loop, it never waits."""

    def __init__(self, app: App, clock: BoxClock, store: BoxStore, loops: CallerLoops) -> None:
        self.runs: list[BoxRun] = []
        self._tasks = app.tasks
        self._clock = clock
        self._store = store
        self._followed = followed(store, app.following)
        self._loops = loops
        self.lifespans = BoxLifespans(app.lifespans, loops)
        # What each run has raised so far, by job.
        self._raised: dict[str, list[BaseException]] = {}
        self._middleware = chained(app.middlewares)
        self._runner = Runner(
            StoreClock(clock),
            threads=THREADS,
            processes=1,
            result_limit=app.payload_limit,
            surroundings=Surroundings(
                middleware=self._middleware and self._watch(self._middleware)
            ),
        )
        self._numbers = itertools.count(1)
        # How to stop each job that is running on an event loop.
        self._stops: dict[str, Callable[[Stop], None]] = {}

    def close(self) -> None:
        self._runner.close()

    def stop_cancelled(self) -> None:
        """Stop the jobs that were asked to stop."""
        for id in self._store.ids_to_stop() if self._stops else ():
            if id in self._stops:
                self._stops[id](Stop.CANCEL)

    async def still_wanted(self, jobs: Sequence[Job]) -> list[Job]:
        """Without those that were cancelled, replaced or moved while they waited for their
        batch."""
        stop = self._store.asks().keys()
        now_ms = self._clock.now_ms()
        unwanted = [release(job, ended_ms=now_ms) for job in jobs if job.id in stop]
        if unwanted:
            await self._store.settle(unwanted, now_ms=now_ms)
        return [job for job in jobs if job.id not in stop]

    async def run(self, jobs: Sequence[Job]) -> list[BoxRun]:
        """Make one attempt at a claimed job, or at a batch of them; settle and record it."""
        members = [self._held(job) for job in jobs]
        held = Batch(members) if members[0].limit else members[0]
        held.started_ms = self._clock.now_ms()
        numbers = {each: next(self._numbers) for each in members}
        raised: list[BaseException] = []
        self._raised[held.job.id] = raised
        try:
            if held.definition is not None:
                state = await self.lifespans.value(held.definition.pool)
                for each in (held, *members):
                    each.state = state
            ended = await self._attempt(held, raised)
        except (asyncio.CancelledError, TickwheelError):
            now_ms = self._clock.now_ms()
            released = [release(job, ended_ms=now_ms) for job in jobs]
            await self._store.settle(released, now_ms=now_ms)
            raise
        finally:
            self._raised.pop(held.job.id, None)
        settlements = ended if isinstance(ended, list) else [(held, ended)]
        now_ms = self._clock.now_ms()
        await self._followed.settle([settlement for _, settlement in settlements], now_ms=now_ms)
        return [
            await self._noted(numbers[each], each, settlement, _raised_for(each, held, raised))
            for each, settlement in settlements
        ]

    def _held(self, job: Job) -> Held:
        held = Held(job, self._tasks.find(job.task))
        held.started_ms = self._clock.now_ms()
        held.said = partial(self._told, held)
        return held

    def _told(self, held: Held) -> None:
        """Its task has said its progress: the store hears of it at once."""
        held.job = self._store.tell(held.job, held.progress)

    async def _noted(
        self, number: int, held: Held, settlement: Settlement, exception: BaseException | None
    ) -> BoxRun:
        assert held.started_ms is not None
        [job] = await self._store.get([held.job.id])
        assert job is not None
        returns = held.definition.returns if held.definition else Any
        if isinstance(exception, asyncio.CancelledError):
            exception = None
        if settlement.failed and exception is None:
            # It ended without an exception from the task: by its timeout, or before it began.
            kind = TimeoutError if held.stop is Stop.TIMEOUT else JobFailed
            exception = kind((settlement.error or "").removeprefix("TimeoutError: "))
        if exception is not None:
            # A test that it is raised in shows the task's frames, not ours.
            exception.__traceback__ = users_frames(exception.__traceback__)
        run = BoxRun(
            number=number,
            task=job.task,
            at=moment(held.started_ms),
            outcome=settlement.outcome,
            job=JobInfo.of(job, self._tasks.find(job.task)),
            result=decode_result(settlement.result, returns),
            error=settlement.error,
            exception=exception,
        )
        insort(self.runs, run, key=_number)
        return run

    # --- One attempt

    async def _attempt(
        self, held: Held, raised: list[BaseException]
    ) -> Settlement | batches.Settlements:
        now_ms = self._clock.now_ms()
        try:
            held.definition = definition = self._tasks.get(held.job.task)
        except UnknownTask as error:
            raised.append(error)
            return decide(held.job, error, RetryPolicy(), started_ms=now_ms, ended_ms=now_ms)
        if on_a_loop():
            return await self._on_the_loop(held, _watched(definition, raised))
        if self._middleware is not None:
            return self._with_middleware(held, _watched(definition, raised))
        # Its own context, like a task on an event loop.
        return contextvars.copy_context().run(
            by_hand, self._off_the_loop(held, _watched(definition, raised))
        )

    def _made(
        self, held: Held, definition: Definition
    ) -> Coroutine[Any, Any, Settlement | batches.Settlements]:
        if isinstance(held, Batch):
            return batches.attempt(self._runner, held, definition, began=_nothing)
        return self._runner.attempt(held, definition, began=_nothing)

    async def _on_the_loop(
        self, held: Held, definition: Definition
    ) -> Settlement | batches.Settlements:
        attempt = asyncio.create_task(self._made(held, definition))

        def stop(why: Stop) -> None:
            _stop_all(held, why)
            # A thread can't be stopped on request, only abandoned at its timeout.
            if definition.pool == "async" or why is not Stop.CANCEL:
                attempt.cancel()

        def stop_one(member: Held, why: Stop) -> None:
            member.stop = member.stop or why
            if all(each.stop for each in held.members):
                stop(why)

        stops: dict[str, Callable[[Stop], None]] = {
            each.job.id: partial(stop_one, each) for each in held.members
        } or {held.job.id: stop}
        self._stops |= stops
        try:
            with _deadline(held, definition, stop):
                await asyncio.wait([attempt])
            return attempt.result()
        finally:
            for id in stops:
                del self._stops[id]
            if not attempt.done():
                stop(Stop.RELEASE)

    def _with_middleware(
        self, held: Held, definition: Definition
    ) -> Settlement | batches.Settlements:
        """Off the loop, too: middleware gets one, and a plain function is called outside of it."""
        if definition.pool == "async":
            return self._loops.run(self._on_the_loop(held, definition))

        def attempt(outside: Outside) -> Coroutine[Any, Any, Settlement | batches.Settlements]:
            async def call(*args: Any, **kwargs: Any) -> Any:
                return await outside(partial(definition.function, *args, **kwargs))

            return self._made(held, replace(definition, pool="async", function=call))

        return self._loops.run_in_turns(attempt)

    def _watch(self, middleware: Middleware) -> Middleware:
        """The same, recording what it raises; if it returns, what the task raised is forgotten."""

        async def watched(job: JobContext, call_next: CallNext) -> Any:
            raised = self._raised[job.job.id]
            try:
                value = await middleware(job, call_next)
            except BaseException as error:
                raised.append(error)
                raise
            raised.clear()
            return value

        return watched

    async def _off_the_loop(
        self, held: Held, definition: Definition
    ) -> Settlement | batches.Settlements:
        """Never waits: a plain function is called, an async one runs to its end on a loop."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            if definition.pool == "async":
                return self._loops.run(_limited(held, definition, args, kwargs))
            return definition.function(*args, **kwargs)

        here = replace(definition, pool="async", function=call)
        return await self._made(held, here)


def _number(run: BoxRun) -> int:
    return run.number


def _stop_all(held: Held, why: Stop) -> None:
    """Note why a run is stopped, for its job or for all of a batch."""
    for each in (held, *held.members):
        each.stop = each.stop or why


def _raised_for(each: Held, held: Held, raised: list[BaseException]) -> BaseException | None:
    """What the task raised, as far as it is about this job of the run."""
    error = raised[-1] if raised else None
    if isinstance(error, Partial) and isinstance(held, Batch):
        return error.errors.get(held.called.index(each)) if each in held.called else None
    return error


def _nothing() -> None:
    """For `began`: here a run's time starts with the run."""


def _watched(definition: Definition, raised: list[BaseException]) -> Definition:
    """The same task, recording what it raises; runs in this process, whatever its pool, and with
    nothing around it: connections to databases are the test's."""
    function = definition.function

    async def on_loop(*args: Any, **kwargs: Any) -> Any:
        try:
            return await function(*args, **kwargs)
        except BaseException as error:
            raised.append(error)
            raise

    def in_thread(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            raised.append(error)
            raise

    if definition.pool == "async":
        return replace(definition, function=on_loop, around=None)
    return replace(definition, function=in_thread, pool="thread", around=None)


@contextmanager
def _deadline(held: Held, definition: Definition, stop: Callable[[Stop], None]) -> Iterator[None]:
    """Stop the run at its timeout, by the event loop's time."""
    limit_ms = timeout_ms(held.job, definition)
    if limit_ms is None:
        yield
        return
    timer = asyncio.get_running_loop().call_later(limit_ms / 1000, stop, Stop.TIMEOUT)
    try:
        yield
    finally:
        timer.cancel()


async def _limited(
    held: Held, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    task = asyncio.current_task()
    assert task is not None

    def stop(why: Stop) -> None:
        _stop_all(held, why)
        task.cancel()

    with _deadline(held, definition, stop):
        return await definition.function(*args, **kwargs)
