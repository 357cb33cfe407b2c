"""`tickwheel schedules simulate`: what ticks in a time range, and which ticks coincide.

The ticks are computed from the rules alone: nothing is added, and past times work too.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.load_app import app_of, ask
from tickwheel.cli.options import COUNT, Verb, Where, common
from tickwheel.cli.output import Column, emit_json, iso, say, show_table
from tickwheel.cli.times import from_ms, now_ms, time_ms
from tickwheel.duration import duration_text, moment
from tickwheel.errors import BadTime, StoreUnavailable, UnknownSchedule

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.schedule import Rule, Schedule

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
DEFAULT_MS = DAY_MS
LONGEST_MS = 366 * DAY_MS
# The most ticks that are computed, which takes a second or two; --limit of them are printed.
TICKS_MOST = 50_000
# How many names of schedules that tick at the same moment a row shows.
NAMES_SHOWN = 3
# How often a zone's clock is sampled; no zone changes it twice in so short a time.
_LOOK = timedelta(hours=6)
_DAY = timedelta(days=1)


# --- Times


def wall(at: datetime, zone: tzinfo | None) -> str:
    """The wall clock time in the zone; None: local time."""
    there = at.astimezone(zone)
    parts = f".{there.microsecond // 1000:03}" if there.microsecond else ""
    return there.strftime("%a %Y-%m-%d %H:%M:%S") + parts


def _time_range(start: str | None, end: str | None) -> tuple[int, int]:
    """The start and end from the options; BadTime if they make no valid range."""
    start_ms = now_ms() if start is None else time_ms("--from", start, None)
    end_ms = start_ms + DEFAULT_MS if end is None else from_ms("--to", end, start_ms)
    if end_ms <= start_ms:
        raise BadTime(f"--to {end!r} is not after --from, {iso(moment(start_ms))}")
    if end_ms - start_ms > LONGEST_MS:
        raise BadTime(
            f"--from and --to are {duration_text(end_ms - start_ms)} apart; "
            f"the longest range is {duration_text(LONGEST_MS)}"
        )
    return start_ms, end_ms


# --- What would tick: pure


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
    from tickwheel.schedule import ticks_of

    # Like `next_tick`, but the expression is parsed once.
    ticks = ticks_of(rule)
    last_ms = end_ms - 1 if rule.end_ms is None else min(end_ms - 1, rule.end_ms)
    tick_ms = ticks.next_ms(max(start_ms, rule.start_ms or 0) - 1)
    while tick_ms is not None and tick_ms <= last_ms:
        yield tick_ms, name
        tick_ms = ticks.next_ms(tick_ms)


def zone_of(rule: Rule) -> str:
    """The rule's time zone, which the expression itself may name."""
    from tickwheel.cron import Cron

    return rule.tz or "UTC" if rule.cron is None else Cron.parse(rule.cron, rule.tz).tz


def clock_changes(tz: str, start_ms: int, end_ms: int) -> list[ClockChange]:
    """The changes of the zone's clock on the local days in this range."""
    from zoneinfo import ZoneInfo

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


def _change(tz: str, zone: tzinfo, at: datetime) -> ClockChange:
    """The change between `at` and the next sample."""
    from bisect import bisect_left

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
    from zoneinfo import ZoneInfo

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


# --- The command


@click.command("simulate", cls=Verb)
@click.option("--from", "start", metavar="TIME", help="Start at this ISO time. Default: now.")
@click.option(
    "--to",
    "end",
    metavar="TIME",
    help="End at this ISO time, or after a duration (7d). Default: 24h.",
)
@click.option(
    "--name", "names", metavar="NAME", multiple=True, help="Only this schedule; may be repeated."
)
@click.option("--limit", metavar="N", type=COUNT, default=100, help="Print at most N ticks.")
@common
def simulate(
    start: str | None,
    end: str | None,
    names: tuple[str, ...],
    limit: int,
    where: Where,
    as_json: bool,
) -> None:
    """Print the ticks in a time range, without adding jobs.

    Marks days on which a zone's clock changes, and schedules that tick at the same moment. With
    --app it includes schedules that only the code declares so far.
    """
    start_ms, end_ms = _time_range(start, end)
    rules, paused, unreadable = _named(names, *_rules(where))
    found = simulate_rules(rules, start_ms, end_ms)
    parts = summary(found.ticks, start_ms, end_ms)
    if as_json:
        emit_json(
            _document(found, rules, limit, parts)
            | {
                "from": iso(moment(start_ms)),
                "to": iso(moment(end_ms)),
                "paused": paused,
                "unreadable": unreadable,
            }
        )
        return
    if unreadable:
        say(f"skipped, because this release can't read them: {', '.join(unreadable)}")
    if paused:
        say(f"skipped, because they are paused: {', '.join(paused)}")
    _show(found, rules, limit, parts)


def _rules(where: Where) -> tuple[dict[str, Rule], list[str], list[str]]:
    """The rules that tick, by name, and the names of those that are paused or can't be read."""
    from tickwheel.notes import schedules_of
    from tickwheel.schedules import ScheduleInfo

    declared = app_of(where).declared

    async def look(client: Client) -> list[Schedule]:
        return await schedules_of(client.store)

    try:
        stored = ask(where, look)
    except StoreUnavailable as error:
        if not declared:
            raise
        say(f"note: showing only the schedules in the code: {error}")
        stored = []
    found = [ScheduleInfo.of(each) for each in stored]
    paused = [each.name for each in found if each.paused]
    # The code owns what it declares, and updates the store at the next start.
    rules = {each.name: each.rule for each in found if each.rule is not None} | declared
    unreadable = [each.name for each in found if each.name not in rules]
    ticking = {name: rule for name, rule in rules.items() if name not in paused}
    return ticking, paused, unreadable


def _named(
    names: tuple[str, ...], rules: dict[str, Rule], paused: list[str], unreadable: list[str]
) -> tuple[dict[str, Rule], list[str], list[str]]:
    """Only those of these names; all if there are none."""
    if not names:
        return rules, paused, unreadable
    known = sorted({*rules, *paused, *unreadable})
    for name in names:
        if name not in known:
            raise UnknownSchedule(
                f"no schedule is named {name!r}; the schedules are: {', '.join(known) or 'none'}"
            )
    return (
        {name: rule for name, rule in rules.items() if name in names},
        [name for name in paused if name in names],
        [name for name in unreadable if name in names],
    )


def _show(found: Simulation, rules: Mapping[str, Rule], limit: int, parts: list[Part]) -> None:
    for change in found.changes:
        day = f"{change.before:%a %Y-%m-%d}"
        say(f"{change.tz}: {change.words} on {day}")
    if not found.ticks:
        say("no ticks" if rules else "no schedules")
        return
    show_table(
        [
            Column("SCHEDULE"),
            Column("IN ZONE"),
            Column("ZONE"),
            Column(_local_heading()),
            Column("NOTE"),
        ],
        [_row(tick) for tick in found.ticks[:limit]],
    )
    left_out = len(found.ticks) - limit
    if left_out > 0:
        say(f"{left_out:,} more ticks are not shown (--limit {limit}); totals:")
        show_table(
            [
                Column(_local_heading()),
                Column("TICKS", right=True),
                Column("MOST AT ONCE", right=True),
            ],
            [(part.title, f"{part.ticks:,}", f"{part.most_at_once:,}") for part in parts],
        )
    if found.cut_ms is not None:
        say(
            f"stopped after {len(found.ticks):,} ticks, at {iso(moment(found.cut_ms))}; "
            "choose a shorter range"
        )


def _local_heading() -> str:
    """The heading for local times: most servers use UTC."""
    here = datetime.fromtimestamp(0, UTC).astimezone()
    return "UTC" if here.tzname() == "UTC" else "LOCAL"


def _row(tick: Tick) -> tuple[Any, ...]:
    from zoneinfo import ZoneInfo

    at = moment(tick.ms)
    notes = []
    if tick.change is not None:
        notes.append(tick.change.words)
    if tick.beside:
        more = len(tick.beside) - NAMES_SHOWN
        names = ", ".join(tick.beside[:NAMES_SHOWN])
        notes.append(f"same time as {names}" + (f" and {more} more" if more > 0 else ""))
    note = "; ".join(notes), "yellow"
    return tick.name, wall(at, ZoneInfo(tick.tz)), tick.tz, wall(at, None), note


def _document(
    found: Simulation, rules: Mapping[str, Rule], limit: int, parts: list[Part]
) -> dict[str, Any]:
    return {
        "ticks": [_tick_document(tick, rules[tick.name]) for tick in found.ticks[:limit]],
        "left_out": max(len(found.ticks) - limit, 0),
        "cut_at": None if found.cut_ms is None else iso(moment(found.cut_ms)),
        "changes": [
            {"tz": each.tz, "at": iso(each.at), "words": each.words} for each in found.changes
        ],
        "summary": [
            {
                "part": part.title,
                "first": iso(moment(part.first_ms)),
                "ticks": part.ticks,
                "most_at_once": part.most_at_once,
            }
            for part in parts
        ],
    }


def _tick_document(tick: Tick, rule: Rule) -> dict[str, Any]:
    from zoneinfo import ZoneInfo

    at = moment(tick.ms)
    return {
        "schedule": tick.name,
        "task": rule.task,
        "at": iso(at),
        "tz": tick.tz,
        "there": at.astimezone(ZoneInfo(tick.tz)).isoformat(timespec="milliseconds"),
        "change": None if tick.change is None else tick.change.words,
        "beside": list(tick.beside),
    }
