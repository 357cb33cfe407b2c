"""`tickwheel queues`: how many jobs stand where, and holding queues back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tickwheel.cli.loading import ask
from tickwheel.cli.options import AppOption, Noun, OutputOption, StoreOption
from tickwheel.cli.output import Column, Output, emit_json, say, show_table
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import QueueInfo

noun = typer.Typer(cls=Noun, help="See how many jobs stand in each queue; pause and resume.")

Name = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue's name.")]


@noun.command("list")
def list_(
    store: StoreOption = None, app: AppOption = None, output: OutputOption = Output.TABLE
) -> None:
    """List queues with the number of jobs in each state. `tickwheel queues` does the same."""
    queues = ask(store, app, lambda client: client.queues())
    if output is Output.JSON:
        emit_json({"queues": [msgspec.structs.asdict(queue) for queue in queues]})
    elif queues:
        _show(queues)
    else:
        say("no queues: no job was added yet")


def _show(queues: list[QueueInfo]) -> None:
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
            for queue in queues
        ],
    )


def _count(queue: QueueInfo, state: State) -> tuple[str, str]:
    count: int = getattr(queue, state)
    return f"{count:,}", "dim" if not count else "red" if state is State.DEAD else ""


@noun.command()
def pause(
    name: Name,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop handing out a queue's jobs. Running ones go on, and jobs can still be added."""
    before = _set(name, True, store, app, output)
    if before is None:
        say(f"note: no job of {name} is in the store; check the name")


@noun.command()
def resume(
    name: Name,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Hand out a queue's jobs again."""
    before = _set(name, False, store, app, output)
    if before is None or not before.paused:
        say(f"note: {name} was not paused")


def _set(
    name: str, paused: bool, store: str | None, app: str | None, output: Output
) -> QueueInfo | None:
    """Pause or resume a queue; answers with the queue as it was, None where there was none."""
    from tickwheel.tasks import checked_name

    checked_name("queue", name)

    async def step(client: Client) -> QueueInfo | None:
        before = {queue.name: queue for queue in await client.queues()}
        await client.pause(name, paused)
        return before.get(name)

    before = ask(store, app, step)
    if output is Output.JSON:
        emit_json({"name": name, "paused": paused})
    else:
        typer.echo(f"{name}: {'paused' if paused else 'resumed'}")
    return before
