"""Times and durations, as people type them."""

from __future__ import annotations

from datetime import datetime, tzinfo

from tickwheel.duration import FARTHEST_MS, due_ms, duration_ms, parsed_ms
from tickwheel.errors import BadTime


def now_ms() -> int:
    """The time on this machine's clock."""
    from tickwheel.clock import MS_NS, SystemClock

    return SystemClock().now_ns() // MS_NS


def time_ms(option: str, text: str, zone: tzinfo | None) -> int:
    """An ISO time in milliseconds; without an offset it is in `zone`, or in local time."""
    written = _written(text)
    if written is None:
        raise BadTime(f"{option} {text!r} is not an ISO time (2026-03-29T01:00)")
    # Years first: others may be beyond the calendar in another zone. The calendar ends soon after,
    # and ticks are computed a little beyond the end.
    if 1969 <= written.year <= 9000:
        aware = written if written.tzinfo else _in_zone(written, zone)
        if 1970 <= aware.year < 9000:
            return due_ms(aware)
    raise BadTime(f"{option} {text!r} is out of range: from the year 1970 to 8999")


def _written(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _in_zone(written: datetime, zone: tzinfo | None) -> datetime:
    return written.astimezone() if zone is None else written.replace(tzinfo=zone)


def from_ms(option: str, text: str, start_ms: int, *, sign: int = 1) -> int:
    """An ISO time, or a duration from `start_ms` on, or back if `sign` is -1."""
    if _written(text) is not None:
        return time_ms(option, text, None)
    try:
        ms = parsed_ms(text)
    except BadTime:
        raise BadTime(
            f"{option} {text!r} is neither an ISO time (2026-03-29T01:00) nor a duration (7d)"
        ) from None
    if ms > FARTHEST_MS:
        raise BadTime(f"{option} {text!r} is out of range: more than 10 years")
    return start_ms + sign * duration_ms(text)


def since_ms(option: str, text: str | None) -> int | None:
    return None if text is None else from_ms(option, text, now_ms(), sign=-1)
