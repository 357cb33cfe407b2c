"""One token bucket as one number: the generic cell rate algorithm (GCRA)."""

from __future__ import annotations

import msgspec

from tickwheel.errors import BadConfig

MS_NS = 1_000_000


class Rate(msgspec.Struct, frozen=True):
    """At most `limit` per `period_ms` on average, and `burst` at once."""

    limit: int
    period_ms: int
    burst: int = 1

    def __post_init__(self) -> None:
        if min(self.limit, self.period_ms, self.burst) < 1:
            raise BadConfig(f"{self}: limit, period and burst must each be at least 1")


def admit(full_at_ns: int | None, rate: Rate, now_ms: int) -> tuple[int, int]:
    """Take one token: returns the bucket's new mark, and how many milliseconds to wait (0: go).

    The mark is the time, in nanoseconds, when the bucket is full again; None is a bucket that was
    never used. If there is a wait, the mark stays as it was: asking costs nothing.
    """
    # Rounded up: over time, better one token too few than one too many.
    cost_ns = -(-rate.period_ms * MS_NS // rate.limit)
    now_ns = now_ms * MS_NS
    mark = max(now_ns, full_at_ns or 0)
    wait_ns = mark - cost_ns * (rate.burst - 1) - now_ns
    if wait_ns > 0:
        return mark, -(-wait_ns // MS_NS)
    return mark + cost_ns, 0
