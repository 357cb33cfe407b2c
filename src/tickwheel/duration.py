"""Durations and due times as people write them: "30m", 90, timedelta, aware datetime."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from tickwheel.errors import BadTime, shown

Duration = str | float | timedelta

# Anything longer is a mistake (milliseconds for seconds), not a plan.
FARTHEST_MS = 10 * 366 * 86_400_000

# How many characters a duration may have as text.
TEXT_LIMIT = 100

_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])\s*")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)


def duration_ms(duration: Duration) -> int:
    """The duration in milliseconds, rounded up so that nothing is early."""
    if type(duration) is int and 0 <= duration <= FARTHEST_MS // 1000:
        return duration * 1000
    ms = _exact_ms(duration)
    if not ms.is_finite():
        raise BadTime(f"{shown(duration)} is not a duration")
    if ms < 0:
        raise BadTime(f"{shown(duration)} is negative; a duration must be 0 or more")
    if ms > FARTHEST_MS:
        raise BadTime(
            f"{shown(duration)} is more than 10 years; numbers are seconds, or write '30m', '2h'"
        )
    return math.ceil(ms)


def _exact_ms(duration: Duration) -> Decimal:
    """As a Decimal: with floats, 2.007 * 1000 is slightly more than 2007 and would round up."""
    if isinstance(duration, timedelta):
        return Decimal(duration // timedelta(microseconds=1)) / 1000
    if isinstance(duration, str):
        return parsed_ms(duration)
    if isinstance(duration, int) and not isinstance(duration, bool):
        return Decimal(max(-1, min(duration, FARTHEST_MS))) * 1000  # too long either way
    if isinstance(duration, float):
        return Decimal(float.__repr__(duration)) * 1000
    raise BadTime(f"{shown(duration)} is not a duration; write seconds, '30m' or a timedelta")


def parsed_ms(text: str) -> Decimal:
    """What the text says, however long."""
    total, end = Decimal(), 0
    for part in _PART.finditer(text.strip() if len(text) <= TEXT_LIMIT else ""):
        if part.start() != end:
            break
        total += Decimal(part[1]) * _UNITS_MS[part[2]]
        end = part.end()
    if end == 0 or end != len(text.strip()):
        raise BadTime(f"{shown(text)} is not a duration; write for example '90s', '30m', '1h30m'")
    return total


def due_ms(at: datetime, name: str = "at") -> int:
    """A due time in milliseconds since the epoch, rounded up; errors call it `name`."""
    if not isinstance(at, datetime):
        raise BadTime(f"{name}={shown(at)} is not a datetime")
    if at.tzinfo is None or at.utcoffset() is None:
        raise BadTime(
            f"{name}={at.isoformat()} has no time zone; "
            "write datetime.now(UTC) + …, or give the datetime a tzinfo"
        )
    return math.ceil((at - _EPOCH) / timedelta(milliseconds=1))


def moment(ms: int) -> datetime:
    """Milliseconds since the epoch as an aware UTC datetime. Other programs may have stored a time
    that no calendar has: the last moment of the year 9999 stands for all later ones."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return _LAST if ms > 0 else _FIRST


def iso(at: datetime) -> str:
    """A UTC time in ISO 8601, to the millisecond: 2026-01-31T09:30:00.000Z."""
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(ms: int | None) -> str:
    """A moment as text, '2026-01-31 09:30:00Z'; 'none' for None."""
    return "none" if ms is None else f"{moment(ms):%Y-%m-%d %H:%M:%S}Z"


def duration_text(ms: int) -> str:
    """A duration as text: '850ms', '4.2s', '12m', '3h 20m', '5d 2h'."""
    if ms < 1000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f}s".replace(".0s", "s")
    for unit, size, below in (("d", 86_400_000, "h"), ("h", 3_600_000, "m"), ("m", 60_000, "s")):
        if ms >= size:
            rest = ms % size // _UNITS_MS[below]
            return f"{ms // size}{unit} {rest}{below}" if rest else f"{ms // size}{unit}"
    raise AssertionError(ms)
