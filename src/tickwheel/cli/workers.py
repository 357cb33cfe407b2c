"""`tickwheel workers`: list running workers, their queues and their load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import Noun, Where, common
from tickwheel.cli.output import Column, emit_json, relative, say, show_table

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import WorkerInfo

workers = Noun("workers", help="List running workers and how busy they are.")


@workers.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List the workers that were seen recently. `tickwheel workers` does the same."""

    async def look(client: Client) -> tuple[list[WorkerInfo], int]:
        return await client.workers(), client.clock.now_ms()

    found, now_ms = ask(where, look)
    if as_json:
        from tickwheel.operate.documents import worker_document

        emit_json({"workers": [worker_document(each) for each in found]})
    elif found:
        _show(found, now_ms)
    else:
        say("no workers: start one with tickwheel worker MODULE:APP")


def _show(found: list[WorkerInfo], now_ms: int) -> None:
    show_table(
        [
            Column("WORKER"),
            Column("RUNNING", right=True),
            Column("HELD", right=True),
            Column("SLOTS", right=True),
            Column("QUEUES", whole=False),
            Column("STARTED"),
            Column("SEEN"),
            Column("CLOCK OFFSET", right=True),
        ],
        [
            (
                each.name,
                f"{each.running:,}",
                f"{each.held - each.running:,}",
                f"{each.concurrency:,}",
                ", ".join(each.queues),
                relative(each.started_ms, now_ms),
                relative(each.seen_ms, now_ms),
                # Less than a second does not matter: jobs follow the store's clock anyway.
                (f"{each.offset_ms / 1000:+.1f}s", "yellow") if abs(each.offset_ms) > 1000 else "",
            )
            for each in found
        ],
    )
