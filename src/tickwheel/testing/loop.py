"""An event loop with virtual time: an hour of waiting takes no time at all."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that, instead of waiting, moves its time to the next timer.

    While a thread works for it (`asyncio.to_thread`, `run_in_executor`) its time does not move.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self._clock_resolution: float
        self._threads = 0
        super().__init__(_JumpingSelector(self._jump, lambda: self._threads > 0))

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._threads += 1
        future.add_done_callback(self._thread_ended)
        return future

    async def shutdown_default_executor(self, *args: Any, **kwargs: Any) -> None:
        # This, too, waits for threads.
        self._threads += 1
        try:
            await super().shutdown_default_executor(*args, **kwargs)
        finally:
            self._threads -= 1

    def _thread_ended(self, _: object) -> None:
        self._threads -= 1

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError("deadlock: every task is waiting, and no timer will wake one")
        self._virtual_s += seconds
        # After some months a float has no nanoseconds left: a timer for now would never be due.
        self._clock_resolution = max(self._clock_resolution, 2 * math.ulp(self._virtual_s))


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(
        self, jump: Callable[[float | None], None], threads_work: Callable[[], bool]
    ) -> None:
        super().__init__()
        self._jump = jump
        self._threads_work = threads_work

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0 and self._threads_work():
            return super().select()
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
