"""One job in a box: an attempt by the code that a worker uses, settled and noted."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
from bisect import insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from tickwheel.app import App
from tickwheel.attempt import Runner, timeout_ms
from tickwheel.client import JobInfo
from tickwheel.clock import StoreClock
from tickwheel.errors import JobFailed, Retry, UnknownTask
from tickwheel.hand import Held, Stop
from tickwheel.job import Job, Outcome, Settlement, release
from tickwheel.retry import RetryPolicy, decide
from tickwheel.span import moment
from tickwheel.tasks import Definition, decode_result
from tickwheel.testing.place import BoxClock, BoxStore, Loops, by_hand, on_a_loop

# Plain functions that may run side by side, on a virtual loop.
THREADS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRun:
    """One run of a job in a box."""

    # Counts the runs of a box, in the order in which they started.
    number: int
    task: str
    # When it started, in the box's time.
    at: datetime
    outcome: Outcome
    # The job as this run left it.
    job: JobInfo = field(repr=False)
    # What the task returned.
    result: Any = None
    # What became of it in one line, as the job's history has it, and what the task raised.
    error: str | None = None
    exception: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether something went wrong, rather than that the task asked to run later."""
        asked = self.outcome is Outcome.RETRY and isinstance(self.exception, Retry)
        return self.outcome in (Outcome.RETRY, Outcome.DEAD) and not asked


class Running:
    """Runs jobs that were claimed. Where no event loop runs, it never waits."""

    def __init__(self, app: App, clock: BoxClock, store: BoxStore, loops: Loops) -> None:
        self.runs: list[BoxRun] = []
        self._tasks = app.tasks
        self._clock = clock
        self._store = store
        self._loops = loops
        self._runner = Runner(
            StoreClock(clock), threads=THREADS, processes=1, result_limit=app.payload_limit
        )
        self._numbers = itertools.count(1)
        # How to stop each job that is running on an event loop.
        self._stops: dict[str, Callable[[Stop], None]] = {}

    def close(self) -> None:
        self._runner.close()

    def heed_cancels(self) -> None:
        """Stop what somebody asked to stop."""
        asked = self._store.asked_to_stop() if self._stops else []
        for id in asked:
            if id in self._stops:
                self._stops[id](Stop.ASKED)

    async def run(self, job: Job) -> BoxRun:
        """One attempt at a job that was claimed, settled and noted."""
        held = Held(job)
        held.started_ms = self._clock.now_ms()
        number = next(self._numbers)
        raised: list[BaseException] = []
        try:
            settlement = await self._attempt(held, raised)
        except asyncio.CancelledError:
            settlement = release(job, ended_ms=self._clock.now_ms())
            await self._store.settle([settlement], now_ms=settlement.ended_ms)
            raise
        await self._store.settle([settlement], now_ms=self._clock.now_ms())
        return await self._noted(number, held, settlement, raised)

    async def _noted(
        self, number: int, held: Held, settlement: Settlement, raised: list[BaseException]
    ) -> BoxRun:
        assert held.started_ms is not None
        [job] = await self._store.get([held.job.id])
        assert job is not None
        returns = held.definition.returns if held.definition else Any
        exception = raised[-1] if raised else None
        if isinstance(exception, asyncio.CancelledError):
            exception = None
        if settlement.failed and exception is None:
            # It ended without an error of the task's own: by its timeout, or before it began.
            kind = TimeoutError if held.stop is Stop.TIMEOUT else JobFailed
            exception = kind((settlement.error or "").removeprefix("TimeoutError: "))
        run = BoxRun(
            number=number,
            task=job.task,
            at=moment(held.started_ms),
            outcome=settlement.outcome,
            job=JobInfo.of(job),
            result=decode_result(settlement.result, returns),
            error=settlement.error,
            exception=exception,
        )
        insort(self.runs, run, key=_number)
        return run

    # --- One attempt

    async def _attempt(self, held: Held, raised: list[BaseException]) -> Settlement:
        now_ms = self._clock.now_ms()
        try:
            held.definition = definition = self._tasks.get(held.job.task)
        except UnknownTask as error:
            raised.append(error)
            return decide(held.job, error, RetryPolicy(), started_ms=now_ms, ended_ms=now_ms)
        if on_a_loop():
            return await self._on_the_loop(held, _watched(definition, raised))
        # A context of its own, as a task of an event loop has.
        return contextvars.copy_context().run(
            by_hand, self._off_the_loop(held, _watched(definition, raised))
        )

    async def _on_the_loop(self, held: Held, definition: Definition) -> Settlement:
        attempt = asyncio.create_task(self._runner.attempt(held, definition, began=_nothing))

        def stop(why: Stop) -> None:
            held.stop = held.stop or why
            # A thread is not ended by a request, only left behind at its timeout.
            if definition.pool == "async" or why is not Stop.ASKED:
                attempt.cancel()

        self._stops[held.job.id] = stop
        try:
            with _deadline(held, definition, stop):
                await asyncio.wait([attempt])
            return attempt.result()
        finally:
            del self._stops[held.job.id]
            if not attempt.done():
                stop(Stop.RELEASE)

    async def _off_the_loop(self, held: Held, definition: Definition) -> Settlement:
        """Never waits: a plain function is called, an async one run to its end on a loop."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            if definition.pool == "async":
                return self._loops.run(_limited(held, definition, args, kwargs))
            return definition.function(*args, **kwargs)

        here = replace(definition, pool="async", function=call)
        return await self._runner.attempt(held, here, began=_nothing)


def _number(run: BoxRun) -> int:
    return run.number


def _nothing() -> None:
    """For `began`: here the time of a run begins with the run."""


def _watched(definition: Definition, raised: list[BaseException]) -> Definition:
    """The same task, which tells what it raises; in this process, whatever its pool."""
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
        return replace(definition, function=on_loop)
    return replace(definition, function=in_thread, pool="thread")


@contextmanager
def _deadline(held: Held, definition: Definition, stop: Callable[[Stop], None]) -> Iterator[None]:
    """Stop the run when it has taken as long as it may, by the time of the event loop."""
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
        held.stop = why
        task.cancel()

    with _deadline(held, definition, stop):
        return await definition.function(*args, **kwargs)
