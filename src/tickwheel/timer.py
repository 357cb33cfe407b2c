"""Timers for any asyncio program, on the wheel: made for the many that are mostly cancelled.

    timer = Timer()
    handle = timer.call_later(30, connection.close)
    ...
    handle.cancel()

`loop.call_later` keeps a heap: each timer costs a few comparisons in Python to add, and a cancelled
one stays in it. Here adding and cancelling are a dict operation each, and the loop itself carries
one timer, for whatever falls due first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, Self

from tickwheel.wheel import TimingWheel

# A herd that falls due in one moment is run in parts, so that the loop can do other things between.
PART = 1_000


class TimerHandle:
    """A callback that waits for its time."""

    __slots__ = ("_args", "_callback", "_timer", "when")

    def __init__(
        self, timer: Timer, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        # On the loop's clock, like `loop.time()`.
        self.when = when
        self._timer = timer
        # None once it was called or cancelled.
        self._callback: Callable[..., object] | None = callback
        self._args = args

    def cancel(self) -> bool:
        """Don't call it; False where it was called or cancelled before."""
        return self._timer.cancel(self)


class Timer:
    """Calls functions later, on the event loop it was made on. Never early."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wheel: TimingWheel[TimerHandle] = TimingWheel()
        self._herd: list[TimerHandle] = []
        self._armed: asyncio.TimerHandle | asyncio.Handle | None = None
        self._armed_ms = math.inf

    def __len__(self) -> int:
        return len(self._wheel) + sum(each._callback is not None for each in self._herd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call it `delay` seconds from now, or up to a few milliseconds later."""
        # Written so that a delay which is not a number fails too.
        if not 0 <= delay < math.inf:
            raise ValueError(f"a delay is a number of seconds, 0 or more; this is {delay!r}")
        return self.call_at(self._loop.time() + delay, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call it at `when` by the loop's clock; a time that has passed means now."""
        if not callable(callback):
            raise TypeError(f"{callback!r} can't be called")
        if not -math.inf < when < math.inf:
            raise ValueError(f"a time is a number on the scale of loop.time(); this is {when!r}")
        handle = TimerHandle(self, when, callback, args)
        due_ms = math.ceil(when * 1000)
        self._wheel.add(handle, due_ms)
        if due_ms < self._armed_ms:
            self._arm(due_ms)
        return handle

    def cancel(self, handle: TimerHandle) -> bool:
        """Don't call it; False where it was called or cancelled before."""
        # The loop's timer stays as it is: waking for nothing is cheaper than arming anew.
        self._wheel.remove(handle)
        waiting = handle._callback is not None
        handle._callback = None
        return waiting

    def close(self) -> None:
        """Forget everything that waits."""
        if self._armed is not None:
            self._armed.cancel()
        self._wheel, self._herd = TimingWheel(), []
        self._armed, self._armed_ms = None, math.inf

    def _arm(self, due_ms: int) -> None:
        if self._armed is not None:
            self._armed.cancel()
        self._armed_ms = due_ms
        self._armed = self._loop.call_at(due_ms / 1000, self._rang)

    def _rang(self) -> None:
        self._armed, self._armed_ms = None, math.inf
        self._herd += self._wheel.advance(math.floor(self._loop.time() * 1000))
        part = self._herd[:PART]
        del self._herd[:PART]
        for handle in part:
            self._call(handle)
        if self._herd:
            self._armed, self._armed_ms = self._loop.call_soon(self._rang), -math.inf
        elif (next_ms := self._wheel.next_ms()) is not None and next_ms < self._armed_ms:
            self._arm(next_ms)

    def _call(self, handle: TimerHandle) -> None:
        callback, handle._callback = handle._callback, None
        if callback is None:
            return  # cancelled by one that came before it in the herd
        try:
            callback(*handle._args)
        except Exception as error:
            # One callback's fault must not keep the others from their time.
            self._loop.call_exception_handler(
                {"message": f"a timer's callback failed: {callback!r}", "exception": error}
            )
