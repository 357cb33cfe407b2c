"""`tickwheel schedules`: what ticks when, and holding schedules back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tickwheel.cli.loading import ask
from tickwheel.cli.options import COUNT, Noun, Where, argument, common
from tickwheel.cli.output import (
    NOT_FOUND,
    OK,
    Column,
    absolute,
    emit_json,
    iso,
    relative,
    say,
    show_table,
)
from tickwheel.cli.simulate import now_ms, simulate, time_ms, wall, zone_of

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.schedules import ScheduleInfo, Schedules

T = TypeVar("T")

schedules = Noun("schedules", help="See what ticks when; run, pause, resume, delete.")

_name = argument("name", metavar="NAME", about="The schedule's name.")


@schedules.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List schedules with their next ticks. `tickwheel schedules` does the same."""

    async def look(client: Client) -> tuple[list[ScheduleInfo], int]:
        return await _of(client).list(), client.clock.now_ms()

    found, now_ms = ask(where, look)
    if as_json:
        emit_json({"schedules": [_document(each) for each in found]})
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

    zones = ["" if each.rule is None else zone_of(each.rule) for each in found]
    there = [_next(each, ZoneInfo(tz or "UTC")) for each, tz in zip(found, zones, strict=True)]
    here = [_next(each, None) for each in found]
    # Where all schedules go by the clock of this place, one of the two times says it all.
    elsewhere = there != here
    show_table(
        [
            Column("NAME"),
            Column("TASK"),
            Column("TICKS", whole=False),
            Column("ZONE"),
            Column("NEXT THERE"),
            *([Column("NEXT HERE")] if elsewhere else []),
            Column("NEXT"),
        ],
        [
            (
                each.name,
                each.task,
                each.explained if each.problem is None else ("can't be read", "red"),
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


def _document(schedule: ScheduleInfo) -> dict[str, Any]:
    from zoneinfo import ZoneInfo

    rule = schedule.rule
    if rule is None:
        return {
            "name": schedule.name,
            "paused": schedule.paused,
            "last_job": schedule.last_id,
            "problem": schedule.problem,
        }
    tz = zone_of(rule)
    there = None if schedule.next is None else schedule.next.astimezone(ZoneInfo(tz))
    return {
        "name": schedule.name,
        "task": schedule.task,
        "cron": rule.cron,
        "every_ms": rule.every_ms,
        "tz": tz,
        "explained": schedule.explained,
        "next": None if schedule.next is None else iso(schedule.next),
        "next_there": None if there is None else there.isoformat(timespec="milliseconds"),
        "paused": schedule.paused,
        "misfire": rule.misfire.value,
        "overlap": rule.overlap.value,
        "from_code": rule.from_code,
        "last_job": schedule.last_id,
        "problem": None,
    }


@schedules.command("next")
@argument("expression", metavar="EXPR", about="A cron expression, in quotes.")
@click.option("--tz", metavar="ZONE", help="The time zone, as Europe/Paris. Default: UTC.")
@click.option("--count", metavar="N", type=COUNT, default=10, help="How many ticks.")
@click.option("--from", "start", metavar="TIME", help="After this ISO time. Default: now.")
@click.option(
    "--output", "-o", type=click.Choice(["table", "json"]), default="table", help="How to print."
)
def next_(expression: str, tz: str | None, count: int, start: str | None, output: str) -> None:
    """Print the next ticks of a cron expression. In UTC and in its zone."""
    from zoneinfo import ZoneInfo

    from tickwheel.cron import Cron
    from tickwheel.span import moment

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
    show_table(
        [Column("UTC"), Column(cron.tz)],
        [(absolute(tick), wall(tick, zone)) for tick in ticks],
    )
    if len(ticks) < count:
        say("no more ticks")


schedules.add_command(simulate)


@schedules.command()
@_name
@common
def run(name: str, where: Where, as_json: bool) -> None:
    """Add a schedule's job once, now, beside its ticks. Prints the job's id."""
    id = _step(where, lambda them: them.run(name))
    if as_json:
        emit_json({"name": name, "job": id})
    else:
        click.echo(id)


@schedules.command()
@_name
@common
def pause(name: str, where: Where, as_json: bool) -> None:
    """Let no tick fire until it is resumed."""
    _step(where, lambda them: them.pause(name))
    _say(name, "paused", as_json)


@schedules.command()
@_name
@common
def resume(name: str, where: Where, as_json: bool) -> None:
    """Go on with the first tick from now on. What was missed is not made up for."""
    _step(where, lambda them: them.resume(name))
    _say(name, "resumed", as_json)


@schedules.command()
@_name
@common
def delete(name: str, where: Where, as_json: bool) -> int:
    """Forget a schedule. One that the code declares comes back when a worker starts."""
    deleted = _step(where, lambda them: them.delete(name))
    _say(name, "deleted" if deleted else "unknown", as_json)
    return OK if deleted else NOT_FOUND


def _say(name: str, what: str, as_json: bool) -> None:
    if as_json:
        emit_json({"name": name, "outcome": what})
    else:
        click.echo(f"{name}: {what}")


def _step(where: Where, step: Callable[[Schedules], Coroutine[Any, Any, T]]) -> T:
    return ask(where, lambda client: step(_of(client)))


def _of(client: Client) -> Schedules:
    from tickwheel.schedules import Schedules

    async def opened() -> Client:
        return client

    return Schedules(opened)
