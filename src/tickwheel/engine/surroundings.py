"""What an app puts around its runs: its lifespan, opened and closed, and its middleware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tickwheel.duration import duration_text
from tickwheel.errors import BadConfig, LifespanError
from tickwheel.lifespan import Lifespan
from tickwheel.retry import describe

log = logging.getLogger("tickwheel")

# After this long, the log says that a lifespan is still being opened.
SLOW_S = 10.0
# How long one that is cancelled may take to end before it is abandoned.
CANCELLED_S = 1.0

CallNext = Callable[[], Awaitable[Any]]
# Called with a job's context and what runs its task.
Middleware = Callable[[Any, CallNext], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an app puts around each run of one worker."""

    # The value of the lifespan in the worker's process.
    state: Any = None
    # All of the app's middleware as one; None if it has none.
    middleware: Middleware | None = None
    # The lifespan that child processes open.
    in_children: Lifespan | None = None


NO_SURROUNDINGS = Surroundings()


def chained(middlewares: Sequence[Middleware]) -> Middleware | None:
    """One middleware that does what all of these do; the first is outermost."""
    chain: Middleware | None = None
    for each in reversed(middlewares):
        chain = each if chain is None else _around(each, chain)
    return chain


def _around(outer: Middleware, inner: Middleware) -> Middleware:
    return lambda job, call_next: outer(job, lambda: inner(job, call_next))


class OpenLifespan:
    """A lifespan of a worker's own process.

    It has a task of its own, and a sync one a thread: some context managers must be left where they
    were entered.
    """

    def __init__(self, lifespan: Lifespan) -> None:
        self._name = lifespan.name
        self._lifespan = lifespan
        self._closing = asyncio.Event()
        # Whether somebody was told that it failed.
        self._said = False
        self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._live(), name=f"lifespan {self._name}")

    async def value(self) -> Any:
        """Wait until it is open; returns its value. Raises LifespanError, or BadConfig."""
        try:
            if not await self._opened_within(SLOW_S):
                log.warning("the lifespan %s is still starting", self._name)
                await self._opened_within(None)
        except asyncio.CancelledError:
            if self._opened.done():
                # It opened at the last moment: then it is closed like any other.
                await self.close(CANCELLED_S)
            else:
                await self._cancel()
            raise
        if self._task.done():
            raise self._failure("failed at its start")
        return self._opened.result()

    async def _opened_within(self, timeout_s: float | None) -> bool:
        waits = (self._opened, self._task)
        done, _ = await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    async def until_it_fails(self) -> None:
        """Raises LifespanError if it ends before it is closed: something in its block failed."""
        await asyncio.wait([self._task])
        if not self._closing.is_set():
            self._said = True
            raise self._failure("failed while its worker was running")

    async def close(self, within_s: float) -> LifespanError | None:
        """Close it; returns what went wrong, if something did."""
        self._closing.set()
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        try:
            await asyncio.wait([self._task], timeout=within_s)
        except asyncio.CancelledError:
            # A Ctrl-C while it closes: it still gets its time.
            await asyncio.wait([self._task], timeout=until - loop.time())
            raise
        if self._said:
            return None
        if not self._task.done():
            await self._cancel()
            limit = duration_text(int(within_s * 1000))
            return LifespanError(f"the lifespan {self._name} did not close within {limit}")
        if self._task.cancelled() or self._task.exception() is not None:
            error = self._failure("failed at its close")
            return error if isinstance(error, LifespanError) else LifespanError(str(error))
        return None

    async def _cancel(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task], timeout=CANCELLED_S)

    def _failure(self, what: str) -> LifespanError | BadConfig:
        error = None if self._task.cancelled() else self._task.exception()
        if isinstance(error, BadConfig):
            return error
        why = "it was cancelled" if error is None else describe(error)
        failure = LifespanError(f"the lifespan {self._name} {what}: {why}")
        failure.__cause__ = error
        return failure

    async def _live(self) -> None:
        try:
            manager = self._lifespan.manager()
            async with manager if self._lifespan.is_async else _in_thread(manager) as value:
                self._opened.set_result(value)
                await self._closing.wait()
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code})") from error


def _called(function: Callable[[], Any]) -> Any:
    """Call it; a future can't carry a StopIteration, and whoever waits would wait for ever."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("it raised StopIteration") from error


@asynccontextmanager
async def _in_thread(manager: AbstractContextManager[Any]) -> AsyncIterator[Any]:
    """Enter and leave a context manager in one thread."""
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix="tickwheel-lifespan")
    entered = False

    def enter() -> Any:
        nonlocal entered
        value = _called(manager.__enter__)
        entered = True
        return value

    def leave() -> None:
        if entered:
            _called(lambda: manager.__exit__(None, None, None))

    try:
        yield await loop.run_in_executor(thread, enter)
    except asyncio.CancelledError:
        # The thread goes on: what it opens after all is closed again.
        thread.submit(leave)
        raise
    else:
        await loop.run_in_executor(thread, leave)
    finally:
        thread.shutdown(wait=False)
