"""`tickwheel migrate-jobs FROM TO`: move waiting jobs and schedules between any two stores."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.options import Verb, argument, as_output
from tickwheel.cli.output import FAILURE, OK, confirmed, emit_json, say, show_fields
from tickwheel.errors import BadConfig

if TYPE_CHECKING:
    from tickwheel.transfer import Moved, Plan, Transfer


@click.command("migrate-jobs", cls=Verb)
@argument("source", metavar="FROM", about="The store that the jobs are in, as a URL.")
@argument("target", metavar="TO", about="The store that they are to go to, as a URL.")
@click.option("--dry-run", is_flag=True, help="Only say what would be moved.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask.")
@as_output
def migrate_jobs(source: str, target: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Move waiting jobs and schedules from one store to another.

    Workers may go on with both; the queues of FROM are paused meanwhile. Jobs that run stay and end
    where they are. A move that breaks off is finished by the same command. Point the programs that
    add jobs at TO first.
    """
    import asyncio

    if source == target:
        raise BadConfig("FROM and TO are the same store")
    return asyncio.run(_migrate(source, target, dry_run, yes, as_json))


async def _migrate(source: str, target: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    from tickwheel.app import App
    from tickwheel.cli.loading import must_be_there, open_app
    from tickwheel.transfer import Transfer

    must_be_there(source)
    old, new = App(source), App(target)
    try:
        await open_app(old)
        await open_app(new)
        clients = await old.client(), await new.client()
        transfer = Transfer(clients[0].store, clients[1].store, clients[0].clock)
        plan = await transfer.plan()
        if dry_run:
            _show_plan(plan, as_json)
            return OK
        if not yes and not _agreed(plan):
            say("nothing was moved")
            return FAILURE
        moved = await _run(transfer, plan)
    finally:
        await old.__aexit__()
        await new.__aexit__()
    _show_moved(moved, as_json)
    return OK


def _agreed(plan: Plan) -> bool:
    if not sys.stdin.isatty():
        raise BadConfig("migrate-jobs needs --yes where nobody can be asked")
    return confirmed(f"move {plan.waiting:,} jobs and {len(plan.schedules):,} schedules?")


async def _run(transfer: Transfer, plan: Plan) -> Moved:
    """Move, with a bar on the terminal; it may grow, because jobs may still come in."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("moving jobs"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("jobs", total=plan.waiting + plan.unfinished)
        async for moved in transfer.run():
            done = moved.jobs + moved.known
            progress.update(bar, completed=done, total=max(done, plan.waiting + plan.unfinished))
    return transfer.moved


def _show_plan(plan: Plan, as_json: bool) -> None:
    if as_json:
        emit_json(msgspec.to_builtins(plan))
        return
    show_fields(
        [
            ("to move", f"{plan.waiting:,} jobs that wait, {len(plan.schedules):,} schedules"),
            ("to finish", f"{plan.unfinished:,} jobs of a move that broke off"),
            ("to stay", f"{plan.running:,} jobs that run"),
            ("replaced", ", ".join(plan.replaced) or "no schedules"),
            ("unreadable", ", ".join(plan.unreadable) or "no schedules"),
        ]
    )


def _show_moved(moved: Moved, as_json: bool) -> None:
    if as_json:
        emit_json(msgspec.to_builtins(moved))
        return
    click.echo(f"moved: {moved.jobs:,} jobs, {moved.schedules:,} schedules")
    if moved.known:
        say(f"{moved.known:,} ids were there already: those jobs are left as they are there")
    if moved.unreadable:
        say(f"{moved.unreadable:,} schedules can't be read by this release: they stay in FROM")
