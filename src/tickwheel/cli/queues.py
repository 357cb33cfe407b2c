"""`tickwheel queues`: how many jobs stand where, and holding queues back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.loading import ask
from tickwheel.cli.options import Noun, Where, argument, common
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import QueueInfo

queues = Noun("queues", help="See how many jobs stand in each queue; pause and resume.")

_name = argument("name", metavar="QUEUE", about="The queue's name.")


@queues.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List queues with the number of jobs in each state. `tickwheel queues` does the same."""
    found = ask(where, lambda client: client.queues())
    if as_json:
        emit_json({"queues": [msgspec.structs.asdict(queue) for queue in found]})
    elif found:
        _show(found)
    else:
        say("no queues: no job was added yet")


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
    """Stop handing out a queue's jobs. Running ones go on, and jobs can still be added."""
    before = _set(name, True, where, as_json)
    if before is None:
        say(f"note: no job of {name} is in the store; check the name")


@queues.command()
@_name
@common
def resume(name: str, where: Where, as_json: bool) -> None:
    """Hand out a queue's jobs again."""
    before = _set(name, False, where, as_json)
    if before is None or not before.paused:
        say(f"note: {name} was not paused")


def _set(name: str, paused: bool, where: Where, as_json: bool) -> QueueInfo | None:
    """Pause or resume a queue; answers with the queue as it was, None where there was none."""
    from tickwheel.tasks import checked_name

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
