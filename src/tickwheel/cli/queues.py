"""`tickwheel queues`: list, pause and resume queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import Noun, Where, argument, common
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import QueueInfo
    from tickwheel.unserved import UnservedTask

queues = Noun("queues", help="List queues with job counts; pause and resume them.")

_name = argument("name", metavar="QUEUE", about="The queue's name.")


@queues.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List queues with the number of jobs in each state. `tickwheel queues` does the same."""
    from tickwheel.operate.documents import queue_document
    from tickwheel.unserved import unserved_tasks

    async def look(client: Client) -> tuple[list[QueueInfo], list[UnservedTask], int]:
        unknown = unserved_tasks(await client.parked(), await client.workers())
        return await client.queues(), unknown, client.clock.now_ms()

    found, unknown, now_ms = ask(where, look)
    if as_json:
        emit_json({"queues": [queue_document(queue, unknown) for queue in found]})
    elif found:
        _show(found)
        for task in unknown:
            say(f"warning: {task.words(now_ms)}")
    else:
        say("no queues: no job has been added yet")


def _show(found: list[QueueInfo]) -> None:
    show_table(
        [
            Column("QUEUE", whole=False),
            *(Column(state.upper(), right=True) for state in State),
            Column("PAUSED"),
        ],
        [
            (
                queue.name,
                *(_count(queue, state) for state in State),
                ("paused", "yellow") if queue.paused else "",
            )
            for queue in found
        ],
    )


def _count(queue: QueueInfo, state: State) -> tuple[str, str]:
    count: int = getattr(queue, state)
    return f"{count:,}", "dim" if not count else "red" if state is State.DEAD else ""


@queues.command()
@_name
@common
def pause(name: str, where: Where, as_json: bool) -> None:
    """Pause a queue: no more of its jobs start. Running jobs continue, and jobs can still be
    added."""
    before = _set(name, True, where, as_json)
    if before is None:
        say(f"note: the store has no jobs in {name}; check the name")


@queues.command()
@_name
@common
def resume(name: str, where: Where, as_json: bool) -> None:
    """Resume a queue: its jobs start again."""
    before = _set(name, False, where, as_json)
    if before is None or not before.paused:
        say(f"note: {name} was not paused")


def _set(name: str, paused: bool, where: Where, as_json: bool) -> QueueInfo | None:
    """Pause or resume a queue; returns the queue as it was, or None if there was none."""
    from tickwheel.checks import checked_name

    checked_name("queue", name)

    async def step(client: Client) -> QueueInfo | None:
        before = {queue.name: queue for queue in await client.queues()}
        await client.pause(name, paused)
        return before.get(name)

    before = ask(where, step)
    if as_json:
        emit_json({"name": name, "paused": paused})
    else:
        click.echo(f"{name}: {'paused' if paused else 'resumed'}")
    return before
