"""How often a process calls its store, and how long that takes, over the last minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from tickwheel.clock import S_NS, Clock
from tickwheel.engine.counts import CALL_BOUNDS_US, WAITS, CallCounts, Counts
from tickwheel.operate.quantiles import quantile

WINDOW_S = 60
# How far apart looks are kept at least.
APART_S = 10


class CallRate(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one method of the store: over the last minute, and since the process started. How
    long those take that wait for something to happen says nothing about the store."""

    method: str
    per_s: float
    mean_ms: float | None
    p99_ms: float | None
    count: int
    errors: int


class RecentCalls:
    """The calls that a process has counted. Look at it now and then: it knows of the last minute
    what it has seen."""

    def __init__(self, counts: Counts, clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._looks: deque[tuple[float, Mapping[str, CallCounts]]] = deque()
        self.look()

    def look(self) -> None:
        """Remember what was counted until now."""
        now_s = self._clock.monotonic_ns() / S_NS
        if not self._looks or now_s - self._looks[-1][0] >= APART_S:
            self._looks.append((now_s, self._counts.from_any_thread().calls))
        # One that is older stays, for the beginning of the minute.
        while len(self._looks) > 1 and now_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def rates(self) -> list[CallRate]:
        """Of each method that was ever called."""
        self.look()
        now_s, now = self._clock.monotonic_ns() / S_NS, self._counts.from_any_thread().calls
        then_s, then = self._looks[0]
        return [
            call_rate(method, each, then[method], now_s - then_s)
            for method, each in now.items()
            if each.count
        ]


def call_rate(method: str, now: CallCounts, then: CallCounts, seconds: float) -> CallRate:
    """From what was counted now and `seconds` ago."""
    count = now.count - then.count
    buckets = [a - b for a, b in zip(now.buckets, then.buckets, strict=True)]
    p99_us = quantile(CALL_BOUNDS_US, buckets, 0.99)
    timed = method not in WAITS and count > 0
    return CallRate(
        method=method,
        per_s=round(count / seconds, 3) if seconds else 0,
        mean_ms=round((now.total_us - then.total_us) / count / 1000, 3) if timed else None,
        p99_ms=round(p99_us / 1000, 3) if timed and p99_us is not None else None,
        count=now.count,
        errors=now.errors,
    )
