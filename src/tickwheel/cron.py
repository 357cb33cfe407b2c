"""When a schedule ticks: a cron expression in a time zone, or an interval.

cronsim parses expressions and walks the calendar, here always without time zones. This module
decides what a clock change in the zone does to ticks; docs/cron.md has the rules.

Times are naive datetimes of two kinds. A *wall* time is what a clock on a wall in the zone shows: a
change skips some and repeats others. A *moment* is in UTC.

    Europe/Paris, 29 Mar 2026      at 01:00 UTC the wall goes from 02:00 to 03:00: 02:30 is skipped
    Europe/Paris, 25 Oct 2026      at 01:00 UTC it goes from 03:00 to 02:00: 02:30 comes twice
"""

from __future__ import annotations

import copy
import difflib
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadSchedule, BadTime

# Nothing longer is a schedule, and a parser's input should be bounded.
LENGTH_MAX = 256
# How far ahead to search for a tick. 29 Feb on a given weekday can be 40 years away, nothing is
# farther.
YEARS_MAX = 50

ALIASES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

# The name of each field, where cronsim keeps it, and which values it takes.
_FIELDS = (
    ("second", "seconds", "0-59"),
    ("minute", "minutes", "0-59"),
    ("hour", "hours", "0-23"),
    ("day of month", "days", "1-31, L (the last day), LW (the last Monday to Friday)"),
    ("month", "months", "1-12 or JAN-DEC"),
    (
        "day of week",
        "weekdays",
        "0-7 (0 and 7 are Sunday) or SUN-SAT, 5L (the last Friday), MON#1 (the first Monday)",
    ),
)
_UNITS_MS = (
    ("day", 86_400_000),
    ("hour", 3_600_000),
    ("minute", 60_000),
    ("second", 1000),
    ("ms", 1),
)
_ZONE_PREFIX = "CRON_TZ="
_ZONE_DEFAULT = "UTC"
# Files among the zones that can't be used: the machine's own choice, on which two nodes could
# disagree, and zones that count leap seconds, whose minutes don't start with those of UTC.
_NO_ZONES = ("localtime", "posixrules", "right/")

_EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)
# datetime's calendar ends with the year 9999, and a search must not run into its end.
_LAST_S = (_EPOCH.replace(year=9999 - 2 * YEARS_MAX) - _EPOCH) // timedelta(seconds=1)
_SECOND = timedelta(seconds=1)
_MS = timedelta(milliseconds=1)


class _Transition(NamedTuple):
    """A change of the zone's clock: the wall times from `start` until `end` are skipped by it if
    the clock went forward, and come twice if it went back."""

    moment: datetime
    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone. Equal if text and zone are; may be shared by threads."""

    # The expression as it was written, with single spaces and without CRON_TZ=, so that
    # Cron.parse(cron.text, cron.tz) == cron.
    text: str
    tz: str
    # Only ever copied: walking moves it.
    _walker: CronSim = field(repr=False, compare=False)
    _zone: ZoneInfo = field(repr=False, compare=False)
    # Whether it names its hours and minutes one by one: a clock change must neither skip nor repeat
    # these.
    _fixed: bool = field(repr=False, compare=False)

    @classmethod
    def parse(cls, text: str, tz: str | None = None) -> Cron:
        """Parse five fields, six with seconds first, or an alias; `CRON_TZ=zone` may come first. If
        neither names a zone, it is UTC.

        Raises BadSchedule, which says what is wrong and what is allowed."""
        words, name = _split_zone(text, tz)
        zone = zone_of(name)
        expression = " ".join(words)
        fields = _six_fields(expression)
        _check_fields(expression, fields)
        minute_and_hour = "".join(fields[1:3])
        fixed = "*" not in minute_and_hour and "/" not in minute_and_hour
        return cls(expression, name, _walker(fields), zone, fixed)

    def next_ms(self, after_ms: int) -> int | None:
        """The first tick strictly after this moment, in milliseconds since the epoch.

        Depends only on the expression, the zone's rules and `after_ms`. There is no tick before the
        epoch. None if there is no tick within 50 years: on 30 Feb, for example."""
        after_s = max(after_ms // 1000, -1)
        if after_s > _LAST_S:
            return None
        local = datetime.fromtimestamp(after_s, self._zone)
        tick = self._next_fixed(local) if self._fixed else self._next_wildcard(local)
        return None if tick is None else (tick - _EPOCH) // _MS

    def explain(self) -> str:
        """The expression in plain words, with the zone: 'At 02:00 every day (Europe/Paris)'."""
        return f"{self._walker.explain()} ({self.tz})"

    def _next_fixed(self, local: datetime) -> datetime | None:
        """The next tick if each wall time ticks once: skipped ones when the gap ends, repeated ones
        the first time."""
        wall = local.replace(tzinfo=None, fold=0)
        if local.fold:
            # This hour is the repeated one: all of it has ticked.
            wall = self._transition(wall).end - _SECOND
        found = self._match(wall)
        if found is None:
            return None
        before, after = self._offsets(found)
        return self._transition(found).moment if before < after else found - before

    def _next_wildcard(self, local: datetime) -> datetime | None:
        """The next tick if only the wall time counts: skipped times don't tick, repeated ones tick
        twice."""
        wall = local.replace(tzinfo=None, fold=0)
        before, after = self._offsets(wall)
        moment = wall - (after if local.fold else before)
        if before > after and not local.fold:
            change = self._transition(wall)
            found = self._match(wall)
            if found is not None and found < change.end:
                return found - before
            # Nothing is left until the clock goes back: search again from where it goes back to.
            wall, moment = change.start - _SECOND, change.moment - _SECOND
        # cronsim bounds one search, but each skipped time starts another.
        while (found := self._match(wall)) and found.year <= local.year + YEARS_MAX:
            before, after = self._offsets(found)
            if before >= after:
                first = found - before
                return first if first > moment else found - after
            wall = self._transition(found).end - _SECOND
        return None

    def _match(self, wall: datetime) -> datetime | None:
        """The first wall time after this one that the expression matches."""
        walker = copy.copy(self._walker)
        walker.dt = wall
        return next(walker, None)

    def _offsets(self, wall: datetime) -> tuple[timedelta, timedelta]:
        """The offsets to UTC that a wall time may have. They are equal except near a change, where
        they are the offsets before and after it: rising if the time is skipped, falling if it comes
        twice."""
        zone = self._zone
        before = wall.replace(tzinfo=zone).utcoffset()
        after = wall.replace(tzinfo=zone, fold=1).utcoffset()
        assert before is not None and after is not None
        return before, after

    def _transition(self, wall: datetime) -> _Transition:
        """The clock change that skips or repeats this wall time."""
        before, after = self._offsets(wall)
        # Read with one offset the wall time is a moment before the change, and with the other one
        # at or after it.
        early, late = sorted((wall - before, wall - after))
        seconds = bisect_left(
            range((late - early) // _SECOND),
            True,
            key=lambda second: self._offset_at(early + second * _SECOND) == after,
        )
        moment = early + seconds * _SECOND
        return _Transition(moment, moment + min(before, after), moment + max(before, after))

    def _offset_at(self, moment: datetime) -> timedelta | None:
        return moment.replace(tzinfo=UTC).astimezone(self._zone).utcoffset()


@dataclass(frozen=True, slots=True)
class Every:
    """Ticks at the anchor and then at every whole interval since: no clock change matters."""

    interval_ms: int
    anchor_ms: int = 0

    def __post_init__(self) -> None:
        if self.interval_ms < 1:
            raise BadSchedule("an interval can't be 0; write for example '30s', '15m', '1h'")

    @classmethod
    def parse(cls, interval: Duration, anchor_ms: int = 0) -> Every:
        """Read '15m', seconds or a timedelta, rounded up to milliseconds.

        With the anchor at the epoch, the default, '15m' ticks on the quarters of each hour of UTC
        on every node. Raises BadSchedule."""
        try:
            return cls(duration_ms(interval), anchor_ms)
        except BadTime as error:
            raise BadSchedule(f"not an interval: {error}") from None

    def next_ms(self, after_ms: int) -> int:
        """The first tick strictly after this moment, in milliseconds since the epoch."""
        passed = (after_ms - self.anchor_ms) // self.interval_ms
        return self.anchor_ms + max(passed + 1, 0) * self.interval_ms

    def explain(self) -> str:
        """The interval in plain words: 'Every 1 hour 30 minutes'."""
        words, rest = [], self.interval_ms
        for unit, size in _UNITS_MS:
            count, rest = divmod(rest, size)
            if count:
                words.append(
                    f"{count} {unit}" if count == 1 or unit == "ms" else f"{count} {unit}s"
                )
        return f"Every {' '.join(words)}"


# --- Parsing expressions and zones


def _split_zone(text: str, tz: str | None) -> tuple[list[str], str]:
    """The words of the expression, and its zone, from whichever of the two names one."""
    for given in (text,) if tz is None else (text, tz):
        if not isinstance(given, str):
            raise BadSchedule(f"{given!r} is not a string; write for example '0 2 * * *', tz='UTC'")
        if len(given) > LENGTH_MAX:
            raise BadSchedule(
                f"{given[:40]!r}… has {len(given)} characters; the limit is {LENGTH_MAX}"
            )
    words = text.split()
    if not words or not words[0].startswith(_ZONE_PREFIX):
        return words, _ZONE_DEFAULT if tz is None else tz
    prefixed = words[0].removeprefix(_ZONE_PREFIX)
    if tz not in (None, prefixed):
        raise BadSchedule(f"{text!r} names one zone and tz={tz!r} another; leave one of them out")
    return words[1:], prefixed


def zone_of(tz: str) -> ZoneInfo:
    """The zone of this name. Raises BadSchedule."""
    try:
        if tz.startswith(_NO_ZONES):
            raise ValueError(tz)
        return ZoneInfo(tz)
    except (LookupError, ValueError, OSError):
        known = {each.lower(): each for each in available_timezones() - {tz}}
        near = difflib.get_close_matches(tz.lower(), known, n=1, cutoff=0.7)
        hint = f" (did you mean {known[near[0]]!r}?)" if near else ""
        raise BadSchedule(
            f"{tz!r} is not a time zone; write Area/City as in 'Europe/Paris' or 'Asia/Taipei', "
            f"or 'UTC'{hint}"
        ) from None


def _six_fields(expression: str) -> list[str]:
    """The fields, seconds first, in upper case and with aliases expanded."""
    if expression.startswith("@"):
        spelled = ALIASES.get(expression.lower())
        if spelled is None:
            raise BadSchedule(
                f"{expression!r} is not an alias; the aliases are {', '.join(ALIASES)}"
            )
        expression = spelled
    if not expression.isascii():
        # Outside ASCII, upper() can turn other letters into plain ones.
        raise BadSchedule(
            f"{expression!r} has characters that are not allowed in a cron expression"
        )
    fields = expression.upper().split()
    if len(fields) not in (5, 6):
        count = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
        raise BadSchedule(
            f"{expression!r} has {count}; write five, 'minute hour day-of-month "
            "month day-of-week' as in '0 2 * * *', or six with seconds first"
        )
    return fields if len(fields) == 6 else ["0", *fields]


def _check_fields(expression: str, fields: list[str]) -> None:
    for position, written in enumerate(fields):
        for term in written.split(","):
            if not _readable(position, term):
                name, _, values = _FIELDS[position]
                hint = "; a range goes from low to high" if "-" in term else ""
                raise BadSchedule(
                    f"{expression!r}: {term!r} is not a valid {name}; use * and {values}, "
                    f"in ranges (2-5), steps (*/2, 2-9/3) and lists (2,4,5){hint}"
                )


def _readable(position: int, term: str) -> bool:
    """Whether cronsim can parse this term of a field, and parses it as meant."""
    base, step, _ = term.partition("/")
    if not term:
        return False
    try:
        _values(position, term)
        # A step after a single value runs to the field's end (5/15). After L it would be ignored,
        # and after a range of one value (3-3/5) it would run past the end of that range.
        if step and len(_values(position, base)) == 1:
            return base.isalnum() and not base.startswith("L")
        return True
    except CronSimError:
        return False


def _values(position: int, term: str) -> set[object]:
    fields = ["*"] * 6
    fields[position] = term
    values: set[object] = getattr(CronSim(" ".join(fields), _EPOCH), _FIELDS[position][1])
    return values


def _walker(fields: list[str]) -> CronSim:
    """cronsim rejects a day that none of the months has. Here that is just an expression without
    ticks, so the months are set after the rest has been parsed."""
    walker = CronSim(" ".join([*fields[:4], "*", fields[5]]), _EPOCH)
    walker.months = CronSim(f"0 0 1 {fields[4]} *", _EPOCH).months
    walker.parts = fields
    return walker
