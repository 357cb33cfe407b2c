"""Entrants that run Tickwheel on a store, and how their queries are counted.

The contest wants to know what a database is asked. So calls are counted where they leave for it:

    claim, find             a list query, whatever it finds
    get, parked             a single-job query
    a look for the time at which the next job can be claimed, or for cancel requests
                            a single-job query: it reads the first entry of an index
    writes                  not scored, as for all entrants
    clock, heartbeats, schedules
                            not scored: no job is read

NATS hands out messages, and nobody searches. There, a job that a pull returns is a single-job
query, a pull that returns none is a failed lock, and each other request to JetStream is a
single-job query, except for one that reads many jobs: that is a list query.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from tickwheel.app import App
from tickwheel.engine.counts import Counts
from tickwheel.score.contest import Queries
from tickwheel.score.notes import Notebook
from tickwheel.stores.waiting import Waiters

TASK = "score"
LISTS, SINGLES = ("claim", "find"), ("get", "parked")
WRITES = (
    *("add", "extend", "settle", "cancel", "rerun", "delete", "prune", "put_schedule", "fire"),
    *("replace_schedule", "delete_schedule", "put_records", "delete_records", "pause", "beat"),
)

# Requests to JetStream's API, but for those that pull or write.
_REQUESTS = re.compile(rb"^H?PUB (\$JS\.API\.(?!CONSUMER\.MSG\.NEXT|STREAM\.PURGE)\S+)", re.M)
_MANY = b'"multi_last"'


def app_on(url: str, notes: Notebook | None = None) -> App:
    """The app of all Tickwheel entrants. Without notes it only adds jobs."""
    app = App(url, name="score")

    @app.task(name=TASK)
    async def score() -> None:
        from tickwheel import current_job

        context = current_job()
        assert context is not None and notes is not None
        await notes.run(context.job.id)

    return app


async def work(url: str, notes: Notebook, stop: asyncio.Event) -> None:
    """Run jobs until told to stop."""
    app = app_on(url, notes)
    counts, asked = app.enable_metrics(), Queries()
    on_nats = url.startswith("nats")
    (_count_nats if on_nats else _count_looks)(asked)

    async def add_up() -> None:
        while True:
            _sum(notes.queries, counts, asked, on_nats)
            await asyncio.sleep(0.1)

    async with app, app.worker():
        notes.ready()
        adding_up = asyncio.create_task(add_up())
        await stop.wait()
    adding_up.cancel()
    _sum(notes.queries, counts, asked, on_nats)


def _sum(queries: Queries, counts: Counts, asked: Queries, on_nats: bool) -> None:
    calls = {name: each.count for name, each in counts.calls.items()}
    singles = sum(calls[name] for name in SINGLES)
    queries.lists = asked.lists + (0 if on_nats else sum(calls[name] for name in LISTS))
    queries.failed_locks = asked.failed_locks
    queries.singles = asked.singles + (0 if on_nats else singles)
    queries.writes = sum(calls[name] for name in WRITES)


def _count_looks(asked: Queries) -> None:
    """Count the looks of waits: there the store is asked without a call of its own."""
    until_due = Waiters.until_due
    Look = Callable[[int], Awaitable[int | None]]

    async def counted(self: Waiters, topics: Any, next_ms: Look, **more: Any) -> None:
        async def look(now_ms: int) -> int | None:
            asked.singles += 1
            return await next_ms(now_ms)

        await until_due(self, topics, look, **more)

    Waiters.until_due = counted  # type: ignore[method-assign]


def _count_nats(asked: Queries) -> None:
    """Count what goes to the server, and what pulls return."""
    from tickwheel.stores.nats.wire import Wire

    send, pull = Wire.send, Wire.pull

    def counted_send(self: Wire, data: bytes) -> None:
        if b"$JS.API." in data:
            many = data.count(_MANY)
            asked.lists += many
            asked.singles += max(len(_REQUESTS.findall(data)) - many, 0)
        send(self, data)

    async def counted_pull(self: Wire, *args: Any, **kwargs: Any) -> Any:
        messages, more = await pull(self, *args, **kwargs)
        asked.singles += len(messages)
        asked.failed_locks += not messages
        return messages, more

    Wire.send = counted_send  # type: ignore[method-assign]
    Wire.pull = counted_pull  # type: ignore[method-assign]
