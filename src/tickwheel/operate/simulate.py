"""Which schedules tick in a time range, and which ticks coincide. Pure."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from itertools import chain, groupby, islice
from zoneinfo import ZoneInfo

from tickwheel.cron import Cron
from tickwheel.duration import moment
from tickwheel.errors import UnknownSchedule
from tickwheel.schedule import Rule, ticks_of
from tickwheel.schedules import ScheduleInfo

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
LONGEST_MS = 366 * DAY_MS
# The most ticks that are computed, which takes a second or two.
TICKS_MOST = 50_000
# How often a zone's clock is sampled; no zone changes it twice in so short a time.
_LOOK = timedelta(hours=6)
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ClockChange:
    """A zone's clock goes forward or back."""

    tz: str
    at: datetime
    # The wall clock before the change, and after it.
    before: datetime
    after: datetime

    @property
    def words(self) -> str:
        """'clocks go forward 02:00 → 03:00'."""
        form = "%H:%M" if self.before.date() == self.after.date() else "%Y-%m-%d %H:%M"
        way = "forward" if self.after > self.before else "back"
        return f"clocks go {way} {self.before.strftime(form)} → {self.after.strftime(form)}"

    @property
    def days(self) -> set[date]:
        return {self.before.date(), self.after.date()}


@dataclass(frozen=True, slots=True)
class Tick:
    """One schedule's tick."""

    ms: int
    name: str
    tz: str
    # The change of the zone's clock on this day, if there is one.
    change: ClockChange | None
    # The other schedules that tick at the same moment.
    beside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The ticks in a time range, in order."""

    ticks: list[Tick]
    changes: list[ClockChange]
    # Ticks from here on were not computed: there were too many before.
    cut_ms: int | None


def simulate_rules(
    rules: Mapping[str, Rule], start_ms: int, end_ms: int, *, most: int = TICKS_MOST
) -> Simulation:
    """The ticks of these rules, by name, from the start (included) to the end (excluded)."""
    streams = [_ticks(name, rule, start_ms, end_ms) for name, rule in rules.items()]
    found = list(islice(heapq.merge(*streams), most + 1))
    cut_ms = found.pop()[0] if len(found) > most else None
    zones = {name: zone_of(rule) for name, rule in rules.items()}
    changes = {tz: clock_changes(tz, start_ms, end_ms) for tz in sorted(set(zones.values()))}
    ticks = []
    for ms, group in groupby(found, key=lambda each: each[0]):
        names = [name for _, name in group]
        for name in names:
            others = tuple(each for each in names if each != name)
            ticks.append(Tick(ms, name, zones[name], _on_day(changes[zones[name]], ms), others))
    in_order = sorted(chain.from_iterable(changes.values()), key=lambda change: change.at)
    return Simulation(ticks, in_order, cut_ms)


def _ticks(name: str, rule: Rule, start_ms: int, end_ms: int) -> Iterator[tuple[int, str]]:
    # Like `next_tick`, but the expression is parsed once.
    ticks = ticks_of(rule)
    last_ms = end_ms - 1 if rule.end_ms is None else min(end_ms - 1, rule.end_ms)
    tick_ms = ticks.next_ms(max(start_ms, rule.start_ms or 0) - 1)
    while tick_ms is not None and tick_ms <= last_ms:
        yield tick_ms, name
        tick_ms = ticks.next_ms(tick_ms)


def zone_of(rule: Rule) -> str:
    """The rule's time zone, which the expression itself may name."""
    return rule.tz or "UTC" if rule.cron is None else Cron.parse(rule.cron, rule.tz).tz


def clock_changes(tz: str, start_ms: int, end_ms: int) -> list[ClockChange]:
    """The changes of the zone's clock on the local days in this range."""
    zone = ZoneInfo(tz)
    first, last = (moment(ms).astimezone(zone).date() for ms in (start_ms, end_ms - 1))
    at, end = moment(start_ms) - _DAY, moment(end_ms) + _DAY
    changes = []
    while at < end:
        if _offset(at, zone) != _offset(at + _LOOK, zone):
            change = _change(tz, zone, at)
            if any(first <= day <= last for day in change.days):
                changes.append(change)
        at += _LOOK
    return changes


def changes_on(tz: str, ticks_ms: Iterable[int]) -> dict[int, ClockChange]:
    """The change of the zone's clock on the local day of each of these ticks, if there is one."""
    zone = ZoneInfo(tz)
    days: dict[date, ClockChange | None] = {}
    found: dict[int, ClockChange] = {}
    for ms in ticks_ms:
        day = moment(ms).astimezone(zone).date()
        if day not in days:
            days[day] = _on_day(clock_changes(tz, ms, ms + 1), ms)
        if (change := days[day]) is not None:
            found[ms] = change
    return found


def _change(tz: str, zone: tzinfo, at: datetime) -> ClockChange:
    """The change between `at` and the next sample."""
    before, after = _offset(at, zone), _offset(at + _LOOK, zone)
    # `at` may fall between two whole seconds; changes don't.
    at = at.replace(microsecond=0)
    seconds = bisect_left(
        range(_LOOK // timedelta(seconds=1) + 1),
        True,
        key=lambda second: _offset(at + timedelta(seconds=second), zone) == after,
    )
    when = at + timedelta(seconds=seconds)
    utc = when.replace(tzinfo=None)
    return ClockChange(tz, when, utc + before, utc + after)


def _offset(at: datetime, zone: tzinfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta()


def _on_day(changes: list[ClockChange], ms: int) -> ClockChange | None:
    for change in changes:
        if moment(ms).astimezone(ZoneInfo(change.tz)).date() in change.days:
            return change
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """An hour, day or month of local time, as the summary shows it."""

    title: str
    first_ms: int
    ticks: int
    most_at_once: int


def summary(ticks: list[Tick], start_ms: int, end_ms: int) -> list[Part]:
    """The number of ticks in each hour; for longer ranges in each day or month."""
    form = "%Y-%m"
    if end_ms - start_ms <= 62 * DAY_MS:
        form = "%a %Y-%m-%d"
    if end_ms - start_ms <= 48 * HOUR_MS:
        # With its offset: when the clock goes back, an hour comes twice.
        form = "%a %Y-%m-%d %H:00 %z"
    parts = []
    for title, group in groupby(
        ticks, key=lambda tick: moment(tick.ms).astimezone().strftime(form)
    ):
        of_part = list(group)
        at_once = max(len(tick.beside) + 1 for tick in of_part)
        parts.append(Part(title, of_part[0].ms, len(of_part), at_once))
    return parts


# --- Which rules


@dataclass(frozen=True, slots=True)
class Ticking:
    """The rules that tick, by name, and the names of those that are paused or can't be read."""

    rules: dict[str, Rule]
    paused: list[str]
    unreadable: list[str]

    def named(self, names: Collection[str]) -> Ticking:
        """Only those of these names; all if there are none. Raises UnknownSchedule."""
        if not names:
            return self
        known = sorted({*self.rules, *self.paused, *self.unreadable})
        for name in names:
            if name not in known:
                raise UnknownSchedule(
                    f"no schedule is named {name!r}; the schedules are: "
                    f"{', '.join(known) or 'none'}"
                )
        return Ticking(
            {name: rule for name, rule in self.rules.items() if name in names},
            [name for name in self.paused if name in names],
            [name for name in self.unreadable if name in names],
        )


def ticking(stored: Iterable[ScheduleInfo], declared: Mapping[str, Rule]) -> Ticking:
    """What ticks of the schedules in a store and those that the code declares."""
    found = list(stored)
    paused = [each.name for each in found if each.paused]
    # The code owns what it declares, and updates the store at the next start.
    rules = {each.name: each.rule for each in found if each.rule is not None} | {**declared}
    unreadable = [each.name for each in found if each.name not in rules]
    return Ticking(
        {name: rule for name, rule in rules.items() if name not in paused}, paused, unreadable
    )
