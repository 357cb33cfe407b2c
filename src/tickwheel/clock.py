"""The only module that reads the time.

A node's clock may be wrong, and it may jump. The store's clock is what counts, so a node measures
how far its own is off and from then on counts with the monotonic clock, which never jumps. If the
store uses the node's own clock, a jump is noticed before anything is decided by it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

# Three round trips: the quickest of them gives the tightest bound.
SAMPLES = 3
# A wall clock that moved this far against the monotonic one was set, or the machine slept.
JUMP_NS = 50_000_000

MS_NS = 1_000_000
S_NS = 1_000_000_000


class Clock(Protocol):
    """A node's own clock. Nanoseconds as integers, so that sums are never rounded."""

    def now_ns(self) -> int:
        """Since the epoch, UTC. May jump."""

    def monotonic_ns(self) -> int:
        """Never goes back; starts at an unknown value."""


class SystemClock:
    """The clock of this machine."""

    now_ns = staticmethod(time.time_ns)
    monotonic_ns = staticmethod(time.monotonic_ns)


class LoopClock:
    """The time of the running event loop, so that a virtual loop moves everything."""

    def __init__(self, start_ns: int = 1_800_000_000 * S_NS) -> None:
        self._start_ns = start_ns

    def now_ns(self) -> int:
        return self._start_ns + self.monotonic_ns()

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * S_NS)


class StoreClock:
    """The store's time as this node knows it without asking: never ahead of the real one.

    A reply that says *t* proves that the store's clock had reached *t* when the reply arrived.
    Counting from that moment gives a lower bound, late by at most the reply's travel time.

    A store without a server has no clock but the node's own, so there is nothing to measure: with
    `own=True` every reading is of that clock, and a step of it (it was set, or the machine slept)
    is noticed at the next reading, before anything is decided by it.
    """

    def __init__(self, clock: Clock, *, own: bool = False) -> None:
        self._clock = clock
        self._own = own
        # Until the first measurement, use the node's own clock.
        self._base_ns = self._wall_ns = clock.now_ns() - clock.monotonic_ns()
        self._measured_ns = clock.monotonic_ns()
        # Called with how far the clock was set, in milliseconds, on the thread of this object.
        self.on_step: list[Callable[[int], None]] = []
        self._thread = threading.get_ident()

    def now_ns(self) -> int:
        monotonic_ns = self._clock.monotonic_ns()
        if not self._own:
            return monotonic_ns + self._base_ns
        now_ns = self._clock.now_ns()
        # The same as `moved_ms`, inlined: this runs several times per job.
        if not -JUMP_NS <= now_ns - monotonic_ns - self._wall_ns <= JUMP_NS:
            wall_ns = now_ns - monotonic_ns
            self._stepped(moved_ms(wall_ns, self._wall_ns), wall_ns)
        return now_ns

    def _stepped(self, step_ms: int, wall_ns: int) -> None:
        if threading.get_ident() != self._thread:
            return  # the next reading on our own thread sees it as well
        self._wall_ns = wall_ns
        for react in self.on_step:
            react(step_ms)

    def now_ms(self) -> int:
        """The last whole millisecond: jobs due by then are due."""
        return self.now_ns() // MS_NS

    def next_ms(self) -> int:
        """The next whole millisecond: delays count from here, so that they are never short."""
        return -(-self.now_ns() // MS_NS)

    def monotonic_ns(self) -> int:
        """For measuring durations, even if the clock is set in the meantime."""
        return self._clock.monotonic_ns()

    def monotonic_ms(self) -> int:
        return self._clock.monotonic_ns() // MS_NS

    @property
    def offset_ms(self) -> float:
        """How far this node's own clock is behind the store's (negative: ahead)."""
        if self._own:
            return 0
        return (self._base_ns - self._clock.now_ns() + self._clock.monotonic_ns()) / MS_NS

    def stale(self, after_s: float) -> bool:
        """Whether the last measurement is old, or the node's clock was set since."""
        if self._own:
            return False
        now_ns, monotonic_ns = self._clock.now_ns(), self._clock.monotonic_ns()
        jumped = abs(now_ns - monotonic_ns - self._wall_ns) > JUMP_NS
        return jumped or monotonic_ns - self._measured_ns > after_s * S_NS

    async def measure(self, store_time_ns: Callable[[], Awaitable[int]]) -> None:
        """Ask the store for its time, and count from its answer."""
        if self._own:
            return
        bases = []
        for _ in range(SAMPLES):
            answer_ns = await store_time_ns()
            bases.append(answer_ns - self._clock.monotonic_ns())
        self._base_ns = max(bases)
        self._measured_ns = self._clock.monotonic_ns()
        self._wall_ns = self._clock.now_ns() - self._measured_ns


def wall_ns(clock: Clock) -> int:
    """How far a clock is from its monotonic count: changes when it is set."""
    return clock.now_ns() - clock.monotonic_ns()


def moved_ms(now_ns: int, seen_ns: int | None) -> int:
    """How far a clock was set between two readings of `wall_ns`; less than a jump counts as
    nothing, because a time service corrects a clock gradually."""
    if seen_ns is None or abs(now_ns - seen_ns) <= JUMP_NS:
        return 0
    return round((now_ns - seen_ns) / MS_NS)


def sleep_blocking(seconds: float) -> None:
    """Sleep in a thread that runs no event loop."""
    time.sleep(seconds)
