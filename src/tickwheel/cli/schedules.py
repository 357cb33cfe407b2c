"""`tickwheel schedules`: list, run, pause, resume and delete schedules."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import COUNT, Noun, Where, argument, common
from tickwheel.cli.output import (
    NOT_FOUND,
    OK,
    Column,
    absolute,
    emit_json,
    relative,
    say,
    show_table,
)
from tickwheel.cli.simulate import simulate, wall
from tickwheel.cli.times import now_ms, time_ms
from tickwheel.duration import iso

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.schedules import ScheduleInfo, StoredSchedules

T = TypeVar("T")

# The width of a date, which is not split.
DATE = len("2026-01-31")

schedules = Noun("schedules", help="List, run, pause, resume and delete schedules.")

_name = argument("name", metavar="NAME", about="The schedule's name.")


@schedules.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List schedules with their next ticks. `tickwheel schedules` does the same."""

    async def look(client: Client) -> tuple[list[ScheduleInfo], int]:
        return await _of(client).list(), client.clock.now_ms()

    found, now_ms = ask(where, look)
    if as_json:
        from tickwheel.operate.documents import schedule_document

        emit_json({"schedules": [schedule_document(each) for each in found]})
        return
    if found:
        _show(found, now_ms)
    else:
        say("no schedules")
    for each in found:
        if each.problem is not None:
            say(f"schedule {each.name} does not tick: {each.problem}")


def _show(found: list[ScheduleInfo], now_ms: int) -> None:
    from zoneinfo import ZoneInfo

    from tickwheel.operate.simulate import zone_of

    zones = ["" if each.rule is None else zone_of(each.rule) for each in found]
    there = [_next(each, ZoneInfo(tz or "UTC")) for each, tz in zip(found, zones, strict=True)]
    here = [_next(each, None) for each in found]
    # If all schedules use the local time zone, one column is enough.
    elsewhere = there != here
    # A schedule in the code has the name of its task, unless told otherwise.
    named = any(each.task != each.name for each in found if each.problem is None)
    show_table(
        [
            Column("NAME"),
            *([Column("TASK")] if named else []),
            Column("TICKS", whole=False),
            Column("ZONE"),
            Column("NEXT IN ZONE", whole=False, least=DATE),
            *([Column("NEXT LOCAL", whole=False, least=DATE)] if elsewhere else []),
            Column("NEXT"),
        ],
        [
            (
                each.name,
                *([each.task] if named else []),
                # The zone has a column of its own.
                each.explained.removesuffix(f" ({zones[i]})")
                if each.problem is None
                else ("can't be read", "red"),
                zones[i],
                ("paused", "yellow") if each.paused else there[i],
                *(["" if each.paused else here[i]] if elsewhere else []),
                _away(each, now_ms),
            )
            for i, each in enumerate(found)
        ],
    )


def _next(schedule: ScheduleInfo, zone: tzinfo | None) -> str:
    if schedule.moving:
        return "moving"
    return "never" if schedule.next is None else wall(schedule.next, zone)


def _away(schedule: ScheduleInfo, now_ms: int) -> str:
    if schedule.next is None or schedule.paused or schedule.moving:
        return ""
    return relative(int(schedule.next.timestamp() * 1000), now_ms)


@schedules.command("next")
@argument("expression", metavar="EXPR", about="A cron expression, in quotes.")
@click.option("--tz", metavar="ZONE", help="The time zone, as in Europe/Paris. Default: UTC.")
@click.option("--count", metavar="N", type=COUNT, default=10, help="How many ticks to print.")
@click.option("--from", "start", metavar="TIME", help="Start after this ISO time. Default: now.")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["table", "json"]),
    default="table",
    help="Output format.",
)
def next_(expression: str, tz: str | None, count: int, start: str | None, output: str) -> None:
    """Print a cron expression's next ticks, in UTC and in its zone."""
    from zoneinfo import ZoneInfo

    from tickwheel.cron import Cron
    from tickwheel.duration import moment

    cron = Cron.parse(expression, tz)
    zone = ZoneInfo(cron.tz)
    tick_ms: int | None = now_ms() if start is None else time_ms("--from", start, zone)
    ticks: list[datetime] = []
    while len(ticks) < count and (tick_ms := cron.next_ms(tick_ms or 0)) is not None:
        ticks.append(moment(tick_ms))
    if output == "json":
        emit_json({"cron": expression, "tz": cron.tz, "ticks": [iso(tick) for tick in ticks]})
        return
    say(cron.explain())
    if ticks:
        show_table(
            [Column("UTC"), Column(cron.tz)],
            [(absolute(tick), wall(tick, zone)) for tick in ticks],
        )
    if len(ticks) < count:
        say("no more ticks" if ticks else "it never ticks")


schedules.add_command(simulate)


@schedules.command()
@_name
@common
def run(name: str, where: Where, as_json: bool) -> None:
    """Add a schedule's job once, now, in addition to its ticks. Prints the job's id."""
    id = _step(where, lambda them: them.run(name))
    if as_json:
        emit_json({"name": name, "job": id})
    else:
        click.echo(id)


@schedules.command()
@_name
@common
def pause(name: str, where: Where, as_json: bool) -> None:
    """Pause a schedule: no ticks until it is resumed."""
    _step(where, lambda them: them.pause(name))
    _say(name, "paused", as_json)


@schedules.command()
@_name
@common
def resume(name: str, where: Where, as_json: bool) -> None:
    """Resume a schedule at its next tick. Ticks missed while paused are skipped."""
    _step(where, lambda them: them.resume(name))
    _say(name, "resumed", as_json)


@schedules.command()
@_name
@common
def delete(name: str, where: Where, as_json: bool) -> int:
    """Delete a schedule. If the code declares it, the next worker to start adds it again."""
    deleted = _step(where, lambda them: them.delete(name))
    _say(name, "deleted" if deleted else "unknown", as_json)
    return OK if deleted else NOT_FOUND


def _say(name: str, what: str, as_json: bool) -> None:
    if as_json:
        emit_json({"name": name, "outcome": what})
    else:
        why = ": no schedule has this name" if what == "unknown" else ""
        click.echo(f"{name}: {what}{why}")


def _step(where: Where, step: Callable[[StoredSchedules], Coroutine[Any, Any, T]]) -> T:
    return ask(where, lambda client: step(_of(client)))


def _of(client: Client) -> StoredSchedules:
    from tickwheel.schedules import StoredSchedules

    async def opened() -> Client:
        return client

    return StoredSchedules(opened)
