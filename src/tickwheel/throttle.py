"""One token bucket as one number: the generic cell rate algorithm (GCRA)."""

from __future__ import annotations

import msgspec


class Rate(msgspec.Struct, frozen=True):
    """At most `limit` per `period_ms` on average, and `burst` at once."""

    limit: int
    period_ms: int
    burst: int = 1


def admit(full_at_us: int | None, rate: Rate, now_ms: int) -> tuple[int, int]:
    """Take one token: the bucket's new mark, and how many milliseconds to wait (0: go).

    The mark is the moment, in microseconds, when the bucket is full again; None is a bucket that
    was never used. While there is a wait the mark stays as it was, so that asking costs nothing.
    """
    cost_us = rate.period_ms * 1000 // rate.limit
    now_us = now_ms * 1000
    mark = max(now_us, full_at_us or 0)
    wait_us = mark - cost_us * (rate.burst - 1) - now_us
    if wait_us > 0:
        return mark, -(-wait_us // 1000)
    return mark + cost_us, 0
