"""Time comes from here and from nowhere else.

A node's clock may be wrong, and it may jump. What counts is the store's clock, so a node measures
how far its own is off and from then on counts with the monotonic clock, which never jumps.
"""

from __future__ import annotations

import asyncio
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
    """A node's own clock. Nanoseconds as integers, so that no sum of them is ever rounded."""

    def now_ns(self) -> int:
        """Since the epoch, UTC. May jump."""

    def monotonic_ns(self) -> int:
        """Only ever grows, from an unknown start."""


class SystemClock:
    """The clock of this machine."""

    def now_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


class LoopClock:
    """The time of the running event loop, so that a virtual loop carries everything with it."""

    def __init__(self, start_ns: int = 1_800_000_000 * S_NS) -> None:
        self._start_ns = start_ns

    def now_ns(self) -> int:
        return self._start_ns + self.monotonic_ns()

    def monotonic_ns(self) -> int:
        return round(asyncio.get_running_loop().time() * S_NS)


class StoreClock:
    """The store's time, as this node can know it without asking: never ahead of it.

    A reply that says *t* proves that the store's clock had reached *t* when the reply arrived.
    Counting on from that moment gives a lower bound, late by at most the reply's travel time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Until the first measurement the node's own clock has to do.
        self._base_ns = self._wall_ns = clock.now_ns() - clock.monotonic_ns()
        self._measured_ns = clock.monotonic_ns()

    def now_ns(self) -> int:
        return self._clock.monotonic_ns() + self._base_ns

    def now_ms(self) -> int:
        """The last whole millisecond: what is due by then is due."""
        return self.now_ns() // MS_NS

    def next_ms(self) -> int:
        """The next whole millisecond: what a delay counts from, so that it is never short."""
        return -(-self.now_ns() // MS_NS)

    @property
    def offset_ms(self) -> float:
        """How far this node's own clock is behind the store's (negative: ahead)."""
        return (self._base_ns - self._clock.now_ns() + self._clock.monotonic_ns()) / MS_NS

    def stale(self, after_s: float) -> bool:
        """Whether the last measurement is old, or the node's clock was set since."""
        now_ns, monotonic_ns = self._clock.now_ns(), self._clock.monotonic_ns()
        jumped = abs(now_ns - monotonic_ns - self._wall_ns) > JUMP_NS
        return jumped or monotonic_ns - self._measured_ns > after_s * S_NS

    async def measure(self, store_time_ns: Callable[[], Awaitable[int]]) -> None:
        """Ask the store for its time, and count on from its answer."""
        bases = []
        for _ in range(SAMPLES):
            answer_ns = await store_time_ns()
            bases.append(answer_ns - self._clock.monotonic_ns())
        self._base_ns = max(bases)
        self._measured_ns = self._clock.monotonic_ns()
        self._wall_ns = self._clock.now_ns() - self._measured_ns


def sleep_blocking(seconds: float) -> None:
    """Sleep in a thread that is no event loop's."""
    time.sleep(seconds)


async def first_of(*waits: Awaitable[object], timeout_s: float | None = None) -> None:
    """Wait for whichever comes first, and let go of the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
