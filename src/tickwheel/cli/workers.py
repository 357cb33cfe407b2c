"""`tickwheel workers`: list running workers, their queues and their load."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import Noun, Where, common
from tickwheel.cli.output import Column, emit_json, iso, relative, say, show_table

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
        emit_json({"workers": [_document(each) for each in found]})
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


def _document(worker: WorkerInfo) -> dict[str, object]:
    from tickwheel.duration import moment

    times = {name: iso(moment(getattr(worker, f"{name}_ms"))) for name in ("started", "seen")}
    kept = ("name", "app", "host", "pid", "version", "concurrency", "held", "running", "offset_ms")
    fields = msgspec.structs.asdict(worker)
    lists = {"queues": list(worker.queues), "tasks": worker.tasks and list(worker.tasks)}
    return {name: fields[name] for name in kept} | lists | times
