"""Lengths of time and due times as people write them: "30m", 90, timedelta, aware datetime."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from tickwheel.errors import BadTime

Span = str | float | timedelta

# Farther than this is a slip of the keyboard (seconds for milliseconds), not a plan.
FARTHEST_MS = 10 * 366 * 86_400_000

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])\s*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def span_ms(span: Span) -> int:
    """The span in milliseconds, rounded up so that nothing comes early."""
    ms = _exact_ms(span)
    if not ms.is_finite():
        raise BadTime(f"{span!r} is not a length of time")
    if ms < 0:
        raise BadTime(f"{span!r} is negative; a length of time is 0 or more")
    if ms > FARTHEST_MS:
        raise BadTime(f"{span!r} is more than 10 years; numbers are seconds, or write '30m', '2h'")
    return math.ceil(ms)


def _exact_ms(span: Span) -> Decimal:
    """Decimals, because 2.007 * 1000 as floats is a hair more than 2007, to be rounded up."""
    if isinstance(span, timedelta):
        return Decimal(span // timedelta(microseconds=1)) / 1000
    if isinstance(span, str):
        return _parsed_ms(span)
    if isinstance(span, (int, float)) and not isinstance(span, bool):
        return Decimal(span if isinstance(span, int) else float.__repr__(span)) * 1000
    raise BadTime(f"{span!r} is not a length of time; write seconds, '30m' or a timedelta")


def _parsed_ms(text: str) -> Decimal:
    total, end = Decimal(), 0
    for part in _PART.finditer(text.strip()):
        if part.start() != end:
            break
        total += Decimal(part[1]) * _UNITS_MS[part[2]]
        end = part.end()
    if end == 0 or end != len(text.strip()):
        raise BadTime(f"{text!r} is not a length of time; write for example '90s', '30m', '1h30m'")
    return total


def due_ms(at: datetime) -> int:
    """A due time in milliseconds since the epoch, rounded up."""
    if not isinstance(at, datetime):
        raise BadTime(f"at={at!r} is not a datetime")
    if at.tzinfo is None or at.utcoffset() is None:
        raise BadTime(
            f"at={at.isoformat()} has no time zone; "
            "write datetime.now(UTC) + …, or give the datetime a tzinfo"
        )
    return math.ceil((at - _EPOCH) / timedelta(milliseconds=1))


def moment(ms: int) -> datetime:
    """Milliseconds since the epoch as an aware UTC datetime."""
    return _EPOCH + timedelta(milliseconds=ms)


def span_text(ms: int) -> str:
    """A span for people: '850ms', '4.2s', '12m', '3h 20m', '5d 2h'."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}s".replace(".0s", "s")
    for unit, size, below in (("d", 86_400_000, "h"), ("h", 3_600_000, "m"), ("m", 60_000, "s")):
        if ms >= size:
            rest = ms % size // _UNITS_MS[below]
            return f"{ms // size}{unit} {rest}{below}" if rest else f"{ms // size}{unit}"
    raise AssertionError(ms)
