"""One token bucket as one number: the generic cell rate algorithm (GCRA); rates as text."""

from __future__ import annotations

import re

import msgspec

from tickwheel.duration import duration_ms
from tickwheel.errors import BadConfig, UsageError, shown

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


_RATE = re.compile(r"(\d{1,9})/(\S{1,20})")


def parse_rate(text: str) -> Rate:
    """A rate as people write it: "100/s", "10/m" or "5/30s". As many as that come at once."""
    found = _RATE.fullmatch(text) if isinstance(text, str) else None
    try:
        if found is not None:
            period = found[2] if found[2][0].isdigit() else f"1{found[2]}"
            return Rate(int(found[1]), duration_ms(period), burst=int(found[1]))
    except UsageError:
        pass
    raise BadConfig(f"{shown(text)} is not a rate; write for example '100/s', '10/m' or '5/30s'")
