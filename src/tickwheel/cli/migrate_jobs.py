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
    from tickwheel.operate.transfer import Moved, Transfer, TransferPlan


@click.command("migrate-jobs", cls=Verb)
@argument("source", metavar="FROM", about="The URL of the store to move jobs from.")
@argument("target", metavar="TO", about="The URL of the store to move them to.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
@as_output
def migrate_jobs(source: str, target: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Move waiting jobs and schedules from one store to another.

    Workers may keep running on both stores; the queues of FROM are paused during the move. Running
    jobs stay and end in FROM, and so do API keys and the audit log. If a move is interrupted, run
    the same command again to finish it. Point the programs that add jobs at TO first.
    """
    import asyncio

    if source == target:
        raise BadConfig("FROM and TO are the same store")
    if target.lower().startswith("memory:"):
        raise BadConfig("TO is memory://, which ends with this command: its jobs would be lost")
    return asyncio.run(_migrate(source, target, dry_run, yes, as_json))


async def _migrate(source: str, target: str, dry_run: bool, yes: bool, as_json: bool) -> int:
    from tickwheel.app import App
    from tickwheel.cli.auditing import audited
    from tickwheel.cli.load_app import must_be_there, open_app
    from tickwheel.operate.transfer import Transfer

    must_be_there(source)
    # Without keys: sealed jobs move as they are, and unsigned ones are not signed on the way.
    old, new = (App(url, signing_keys=(), encryption_keys=()) for url in (source, target))
    async with audited(old, open_app) as source_client, audited(new, open_app) as target_client:
        transfer = Transfer(source_client.store, target_client.store, source_client.clock)
        plan = await transfer.plan()
        if dry_run:
            _show_plan(plan, as_json)
            return OK
        if not yes and not _agreed(plan):
            say("nothing was moved")
            return FAILURE
        moved = await _run(transfer, plan)
    _show_moved(moved, as_json)
    return OK


def _agreed(plan: TransferPlan) -> bool:
    if not sys.stdin.isatty():
        raise BadConfig("migrate-jobs needs --yes when stdin is not a terminal")
    return confirmed(
        f"move {_count(plan.waiting, 'job')} and {_count(len(plan.schedules), 'schedule')}?"
    )


async def _run(transfer: Transfer, plan: TransferPlan) -> Moved:
    """Move with a progress bar, whose total may grow because jobs may still be added."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("moving jobs"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("jobs", total=plan.waiting + plan.unfinished)
        async for moved in transfer.run():
            done = moved.jobs + moved.known
            progress.update(bar, completed=done, total=max(done, plan.waiting + plan.unfinished))
    return transfer.moved


def _show_plan(plan: TransferPlan, as_json: bool) -> None:
    if as_json:
        emit_json(msgspec.to_builtins(plan))
        return
    show_fields(
        [
            (
                "to move",
                f"{_count(plan.waiting, 'waiting job')}, {_count(len(plan.schedules), 'schedule')}",
            ),
            ("to finish", f"{_count(plan.unfinished, 'job')} of an interrupted move"),
            ("to stay", _count(plan.running, "running job")),
            ("to replace", ", ".join(plan.replaced) or "no schedules"),
            ("unreadable", ", ".join(plan.unreadable) or "no schedules"),
        ]
    )


def _show_moved(moved: Moved, as_json: bool) -> None:
    if as_json:
        emit_json(msgspec.to_builtins(moved))
        return
    click.echo(f"moved: {_count(moved.jobs, 'job')}, {_count(moved.schedules, 'schedule')}")
    if moved.known:
        say(f"already in TO, and unchanged there: {_count(moved.known, 'job')}")
    if moved.unreadable:
        unreadable = _count(moved.unreadable, "schedule")
        say(f"left in FROM, because this release can't read them: {unreadable}")


def _count(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
