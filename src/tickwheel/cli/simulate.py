"""`tickwheel schedules simulate`: what ticks in a time range, and which ticks coincide.

The ticks are computed from the rules alone: nothing is added, and past times work too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.load_app import app_of, ask
from tickwheel.cli.options import COUNT, Verb, Where, common
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.cli.times import from_ms, now_ms, time_ms
from tickwheel.duration import duration_text, iso, moment
from tickwheel.errors import BadTime, StoreUnavailable

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.operate.simulate import Part, Simulation, Tick, Ticking
    from tickwheel.schedule import Rule, Schedule

DEFAULT_MS = 86_400_000
# How many names of schedules that tick at the same moment a row shows.
NAMES_SHOWN = 3


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
    from tickwheel.operate.simulate import LONGEST_MS

    if end_ms - start_ms > LONGEST_MS:
        raise BadTime(
            f"--from and --to are {duration_text(end_ms - start_ms)} apart; "
            f"the longest range is {duration_text(LONGEST_MS)}"
        )
    return start_ms, end_ms


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
    from tickwheel.operate.simulate import simulate_rules, summary

    start_ms, end_ms = _time_range(start, end)
    wanted = _ticking(where).named(names)
    rules, paused, unreadable = wanted.rules, wanted.paused, wanted.unreadable
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


def _ticking(where: Where) -> Ticking:
    from tickwheel.notes import schedules_of
    from tickwheel.operate.simulate import ticking
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
    return ticking(map(ScheduleInfo.of, stored), declared)


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
