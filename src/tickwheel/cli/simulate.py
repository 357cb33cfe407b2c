"""`tickwheel schedules simulate`: what would tick over a stretch of time, and where it gets tight.

The ticks are worked out from the rules alone: nothing is added, and past times do as well.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.loading import app_of, ask
from tickwheel.cli.options import COUNT, Verb, Where, common
from tickwheel.cli.output import Column, emit_json, iso, say, show_table
from tickwheel.errors import BadTime, StoreUnavailable
from tickwheel.span import due_ms, moment, span_ms, span_text

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.schedule import Rule, Schedule

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
DEFAULT_MS = DAY_MS
LONGEST_MS = 366 * DAY_MS
# Ticks that are worked out, a second of work or two; of these, --limit are printed.
TICKS_MOST = 50_000
# Names of others at the same moment that a row has room for.
NAMES_SHOWN = 3
# A zone's clock is looked at this often; no zone changes it twice within so short a time.
_LOOK = timedelta(hours=6)
_DAY = timedelta(days=1)


# --- Times as they are written


def now_ms() -> int:
    """The time by the clock of this machine."""
    from tickwheel.clock import MS_NS, SystemClock

    return SystemClock().now_ns() // MS_NS


def time_ms(option: str, text: str, zone: tzinfo | None) -> int:
    """An ISO time in milliseconds; without an offset a time of `zone`, or of this place."""
    try:
        written = datetime.fromisoformat(text)
        aware = written if written.tzinfo else _in_zone(written, zone)
        # The calendar ends soon after; ticks are looked for a little beyond what was asked.
        if not 1970 <= aware.year < 9000:
            raise ValueError(text)
        return due_ms(aware)
    except (ValueError, OverflowError):
        raise BadTime(f"{option} {text!r}: write an ISO time, as 2026-03-29T01:00") from None


def _in_zone(written: datetime, zone: tzinfo | None) -> datetime:
    return written.astimezone() if zone is None else written.replace(tzinfo=zone)


def wall(at: datetime, zone: tzinfo | None) -> str:
    """What a clock on the wall of the zone shows; None: of this place."""
    there = at.astimezone(zone)
    parts = f".{there.microsecond // 1000:03}" if there.microsecond else ""
    return there.strftime("%a %Y-%m-%d %H:%M:%S") + parts


def _stretch(start: str | None, end: str | None) -> tuple[int, int]:
    """From when until when, as asked for; BadTime where that is no stretch of time."""
    from tickwheel.clock import MS_NS, SystemClock

    start_ms = SystemClock().now_ns() // MS_NS if start is None else time_ms("--from", start, None)
    end_ms = _end_ms(end, start_ms)
    if end_ms <= start_ms:
        raise BadTime(f"--to {end!r} is not after --from, {iso(moment(start_ms))}")
    if end_ms - start_ms > LONGEST_MS:
        raise BadTime(
            f"from --from to --to is {span_text(end_ms - start_ms)}; "
            f"{span_text(LONGEST_MS)} is the longest that is simulated"
        )
    return start_ms, end_ms


def _end_ms(text: str | None, start_ms: int) -> int:
    if text is None:
        return start_ms + DEFAULT_MS
    try:
        return start_ms + span_ms(text)
    except BadTime:
        pass
    try:
        return time_ms("--to", text, None)
    except BadTime:
        raise BadTime(
            f"--to {text!r}: write an ISO time, as 2026-03-29T01:00, or how long, as 7d"
        ) from None


# --- What would tick: pure


@dataclass(frozen=True, slots=True)
class Change:
    """A zone's clock goes forward or back."""

    tz: str
    at: datetime
    # What the wall shows at that moment, and what it shows instead.
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
    change: Change | None
    # The other schedules that tick at the same moment.
    beside: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What ticks from a moment until another, the earlier first."""

    ticks: list[Tick]
    changes: list[Change]
    # The ticks from here on were not looked for: there were too many before.
    cut_ms: int | None


def simulate_rules(
    rules: Mapping[str, Rule], start_ms: int, end_ms: int, *, most: int = TICKS_MOST
) -> Simulation:
    """The ticks of these rules, by name, from the start on and before the end."""
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

    # As `next_tick` does, but the expression is read once.
    ticks = ticks_of(rule)
    last_ms = end_ms - 1 if rule.end_ms is None else min(end_ms - 1, rule.end_ms)
    tick_ms = ticks.next_ms(max(start_ms, rule.start_ms or 0) - 1)
    while tick_ms is not None and tick_ms <= last_ms:
        yield tick_ms, name
        tick_ms = ticks.next_ms(tick_ms)


def zone_of(rule: Rule) -> str:
    """The zone, also where the expression itself names it."""
    from tickwheel.cron import Cron

    return rule.tz or "UTC" if rule.cron is None else Cron.parse(rule.cron, rule.tz).tz


def clock_changes(tz: str, start_ms: int, end_ms: int) -> list[Change]:
    """The changes of the zone's clock on the days, there, that lie in this stretch of time."""
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


def _change(tz: str, zone: tzinfo, at: datetime) -> Change:
    """The change between `at` and the next look."""
    from bisect import bisect_left

    before, after = _offset(at, zone), _offset(at + _LOOK, zone)
    # `at` may lie between two seconds; changes don't.
    at = at.replace(microsecond=0)
    seconds = bisect_left(
        range(_LOOK // timedelta(seconds=1) + 1),
        True,
        key=lambda second: _offset(at + timedelta(seconds=second), zone) == after,
    )
    when = at + timedelta(seconds=seconds)
    utc = when.replace(tzinfo=None)
    return Change(tz, when, utc + before, utc + after)


def _offset(at: datetime, zone: tzinfo) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta()


def _on_day(changes: list[Change], ms: int) -> Change | None:
    from zoneinfo import ZoneInfo

    for change in changes:
        if moment(ms).astimezone(ZoneInfo(change.tz)).date() in change.days:
            return change
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """An hour, a day or a month of this place, as the summary shows it."""

    title: str
    first_ms: int
    ticks: int
    most_at_once: int


def summary(ticks: list[Tick], start_ms: int, end_ms: int) -> list[Part]:
    """How many ticks fall into each hour; for a longer stretch into each day or month."""
    form = "%Y-%m"
    if end_ms - start_ms <= 62 * DAY_MS:
        form = "%a %Y-%m-%d"
    if end_ms - start_ms <= 48 * HOUR_MS:
        # With its offset: when the clock goes back an hour comes twice.
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
@click.option("--from", "start", metavar="TIME", help="From this ISO time on. Default: now.")
@click.option(
    "--to", "end", metavar="TIME", help="Until this ISO time, or for so long, as 7d. Default: 24h."
)
@click.option("--limit", metavar="N", type=COUNT, default=100, help="Print at most so many ticks.")
@common
def simulate(start: str | None, end: str | None, limit: int, where: Where, as_json: bool) -> None:
    """Print what ticks over a stretch of time. Nothing is added.

    Marks days on which a zone's clock changes, and schedules that tick at the same moment. With
    --app also for schedules that only the code has yet.
    """
    start_ms, end_ms = _stretch(start, end)
    rules, paused, unreadable = _rules(where)
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
        say(f"can't be read by this release, so left out: {', '.join(unreadable)}")
    if paused:
        say(f"paused, so left out: {', '.join(paused)}")
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
        say(f"note: only the schedules of the code: {error}")
        stored = []
    found = [ScheduleInfo.of(each) for each in stored]
    paused = [each.name for each in found if each.paused]
    # The code is the master of what it declares, and changes the store's at the next start.
    rules = {each.name: each.rule for each in found if each.rule is not None} | declared
    unreadable = [each.name for each in found if each.name not in rules]
    ticking = {name: rule for name, rule in rules.items() if name not in paused}
    return ticking, paused, unreadable


def _show(found: Simulation, rules: Mapping[str, Rule], limit: int, parts: list[Part]) -> None:
    for change in found.changes:
        day = f"{change.before:%a %Y-%m-%d}"
        say(f"{change.tz}: {change.words} on {day}")
    if not found.ticks:
        say("no ticks" if rules else "no schedules")
        return
    show_table(
        [Column("SCHEDULE"), Column("THERE"), Column("ZONE"), Column(_place()), Column("NOTE")],
        [_row(tick) for tick in found.ticks[:limit]],
    )
    left_out = len(found.ticks) - limit
    if left_out > 0:
        say(f"{left_out:,} more ticks are left out (--limit {limit}); all of them together:")
        show_table(
            [Column(_place()), Column("TICKS", right=True), Column("MOST AT ONCE", right=True)],
            [(part.title, f"{part.ticks:,}", f"{part.most_at_once:,}") for part in parts],
        )
    if found.cut_ms is not None:
        say(
            f"stopped after {len(found.ticks):,} ticks, at {iso(moment(found.cut_ms))}: "
            "ask for a shorter time"
        )


def _place() -> str:
    """What times of this place are called: most servers are on UTC."""
    here = datetime.fromtimestamp(0, UTC).astimezone()
    return "UTC" if here.tzname() == "UTC" else "HERE"


def _row(tick: Tick) -> tuple[Any, ...]:
    from zoneinfo import ZoneInfo

    at = moment(tick.ms)
    notes = []
    if tick.change is not None:
        notes.append(tick.change.words)
    if tick.beside:
        more = len(tick.beside) - NAMES_SHOWN
        names = ", ".join(tick.beside[:NAMES_SHOWN])
        notes.append(f"at once with {names}" + (f" and {more} more" if more > 0 else ""))
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
