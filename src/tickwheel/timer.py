"""Timers for any asyncio program, on the wheel: for many timers, most of them cancelled.

    timer = Timer()
    handle = timer.call_later(30, connection.close)
    ...
    handle.cancel()

`loop.call_later` keeps its timers in a heap, which compares them in Python, and keeps the cancelled
ones too. Here adding and cancelling are a few dict operations, and the loop itself has one timer:
for the earliest due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from math import inf
from typing import Any, Self

from tickwheel.wheel import TimingWheel

# Many callbacks due at one moment are called in parts, so that the loop can do other work in
# between.
PART = 1_000
# About 30,000 years. Beyond that, a float of seconds can't tell one millisecond from the next.
END_S = 1e12


class TimerHandle:
    """A callback that is not due yet."""

    __slots__ = ("_args", "_callback", "_timer")

    def __init__(
        self, timer: Timer, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._timer = timer
        # None once it was called or cancelled, which also drops its references.
        self._callback: Callable[..., object] | None = callback
        self._args = args

    def cancel(self) -> bool:
        """Don't call it; False if it was already called or cancelled."""
        return self._timer.cancel(self)


class Timer:
    """Calls functions later, on the event loop that it was created on: never early, and at the next
    whole millisecond of `loop.time()` if the loop is free.

    Callbacks run in the context that the timer was created in; for another one, pass `context.run,
    callback`. Like the loop's own timers, it belongs to the loop's thread.
    """

    def __init__(self, width_ms: int = 1_000) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()
        self._wheel: TimingWheel[TimerHandle] = TimingWheel(width_ms)
        self._alarm: asyncio.TimerHandle | None = None
        # When the alarm goes off. While callbacks run it is "before all", so that none sets the
        # alarm.
        self._alarm_ms: float = inf
        self._closed = False

    def __len__(self) -> int:
        """How many callbacks are pending."""
        return len(self._wheel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_later(
        self, delay_s: float, callback: Callable[..., object], *args: Any
    ) -> TimerHandle:
        """Call it `delay_s` seconds from now."""
        if not 0 <= delay_s < END_S:  # also false for NaN
            raise ValueError(f"a delay must be a finite number of at least 0, not {delay_s!r}")
        return self._add(self._loop.time() + delay_s, callback, args)

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Call it at `when_s` by `loop.time()`; a past time means at the next turn of the loop."""
        if not -END_S < when_s < END_S:
            raise ValueError(
                f"a time must be a finite number on the scale of loop.time(), not {when_s!r}"
            )
        return self._add(when_s, callback, args)

    def cancel(self, handle: TimerHandle) -> bool:
        """Don't call it; False if it was already called or cancelled."""
        if handle._timer is not self:
            raise ValueError("this handle belongs to another timer")
        if handle._callback is None:
            return False
        handle._callback, handle._args = None, ()
        # The alarm stays: waking once for nothing costs less than setting it each time.
        self._wheel.remove(handle)
        return True

    def close(self) -> None:
        """Drop all pending callbacks: nothing is called from now on."""
        self._closed = True
        self._wheel = TimingWheel()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _add(
        self, when_s: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> TimerHandle:
        if not callable(callback):
            raise TypeError(f"a callback must be callable, not {callback!r}")
        if self._closed:
            raise RuntimeError("this timer is closed")
        handle = TimerHandle(self, callback, args)
        due_ms = _first_ms_from(when_s)
        self._wheel.add(handle, due_ms)
        if due_ms < self._alarm_ms:
            self._set_alarm(due_ms)
        return handle

    def _set_alarm(self, due_ms: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ms = due_ms
        self._alarm = self._loop.call_at(due_ms / 1000, self._ring, context=self._context)

    def _ring(self) -> None:
        self._alarm, self._alarm_ms = None, -inf
        now_ms = _last_ms_until(self._loop.time())
        part = self._wheel.advance(now_ms, PART)
        part.reverse()
        try:
            while part and not self._closed:
                self._call(part.pop())
        finally:
            # Something is left only if a callback ended the program or closed the timer.
            while part and not self._closed:
                self._wheel.add(part.pop(), now_ms)
            self._alarm_ms = inf
            # If more is already due, this goes off at the next turn of the loop.
            if (next_ms := self._wheel.next_ms()) is not None:
                self._set_alarm(next_ms)

    def _call(self, handle: TimerHandle) -> None:
        callback, args = handle._callback, handle._args
        if callback is None:
            return  # cancelled by a callback before it
        handle._callback, handle._args = None, ()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            # One callback's error must not delay the others.
            self._loop.call_exception_handler(
                {"message": f"a timer's callback failed: {callback!r}", "exception": error}
            )


# n / 1000 * 1000 is not always n. Both of these return n for n / 1000 seconds: otherwise an alarm
# could go off, find nothing due yet, and be set for the same moment, forever if time is virtual.


def _first_ms_from(seconds: float) -> int:
    near_ms = round(seconds * 1000)
    return near_ms if near_ms / 1000 >= seconds else near_ms + 1


def _last_ms_until(seconds: float) -> int:
    near_ms = round(seconds * 1000)
    return near_ms if near_ms / 1000 <= seconds else near_ms - 1
