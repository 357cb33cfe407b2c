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
JUMP_S = 0.05


class Clock(Protocol):
    """A node's own clock."""

    def now(self) -> float:
        """Seconds since the epoch, UTC. May jump."""

    def monotonic(self) -> float:
        """Seconds that only ever grow, from an unknown start."""


class SystemClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class LoopClock:
    """The time of the running event loop, so that a virtual loop carries everything with it."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._start = start

    def now(self) -> float:
        return self._start + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


class StoreClock:
    """The store's time, as this node can know it without asking: never ahead of it.

    A reply that says *t* proves that the store's clock had reached *t* when the reply arrived.
    Counting on from that moment gives a lower bound, late by at most the reply's travel time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Until the first measurement the node's own clock has to do.
        self._base = clock.now() - clock.monotonic()
        self._wall = self._base
        self._measured_at = clock.monotonic()

    def now(self) -> float:
        """Seconds since the epoch by the store's clock."""
        return self._clock.monotonic() + self._base

    def now_ms(self) -> int:
        """The same in whole milliseconds, rounded down."""
        return int(self.now() * 1000)

    @property
    def offset_s(self) -> float:
        """How far this node's own clock is behind the store's (negative: ahead)."""
        return self._base - (self._clock.now() - self._clock.monotonic())

    def stale(self, after_s: float) -> bool:
        """Whether the last measurement is old, or the node's clock was set since."""
        drift = self._clock.now() - self._clock.monotonic() - self._wall
        return abs(drift) > JUMP_S or self._clock.monotonic() - self._measured_at > after_s

    async def measure(self, store_time_ms: Callable[[], Awaitable[float]]) -> None:
        """Ask the store for its time, and count on from its answer."""
        bases = []
        for _ in range(SAMPLES):
            answer = await store_time_ms() / 1000
            bases.append(answer - self._clock.monotonic())
        self._base = max(bases)
        self._wall = self._clock.now() - self._clock.monotonic()
        self._measured_at = self._clock.monotonic()


def sleep_blocking(seconds: float) -> None:
    """Sleep in a thread that is no event loop's."""
    time.sleep(seconds)
