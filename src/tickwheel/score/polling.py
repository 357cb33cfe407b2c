"""Entrants that poll a table in PostgreSQL, as many applications do.

All of them survive a dead instance: a job whose lock is older than LOCK_S is free again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg

from tickwheel.score.notes import Notebook, now_ms

# How long an instance may have a job until others may take it.
LOCK_S = 15.0
# How many jobs one query lists.
LIST_MOST = 1_000
# How far beyond its next look an instance prepares jobs: a look may come late.
MARGIN_S = 1.0

_SCHEMA = """
create table if not exists score_{name} (
    id text primary key, due_ms bigint not null,
    state smallint not null default 0, -- 0 waiting, 1 locked, 2 done
    until_ms bigint not null default 0 -- the lock's end
);
create index if not exists score_{name}_due on score_{name} (due_ms) where state < 2
"""
_FREE = "(state = 0 or (state = 1 and until_ms < %(now)s))"
_LIST = f"""select id from score_{{name}} where {_FREE} and due_ms <= %(now)s
    order by due_ms limit {LIST_MOST}"""
_LOCK = f"update score_{{name}} set state = 1, until_ms = %(until)s where id = %(id)s and {_FREE}"
_PREPARE = f"""update score_{{name}} set state = 1, until_ms = greatest(due_ms, %(now)s) + %(lock)s
    where id in (select id from score_{{name}} where {_FREE} and due_ms <= %(until)s
                 order by due_ms limit {LIST_MOST} for update skip locked)
    returning id, due_ms"""
_DONE = "update score_{name} set state = 2 where id = %(id)s"
_RELEASE = "update score_{name} set state = 0 where state = 1 and id = any(%(ids)s)"


class PolledTable:
    """The table of one entrant, over one connection."""

    def __init__(self, db: psycopg.AsyncConnection[Any], name: str) -> None:
        self._db, self._name = db, name

    async def create(self) -> None:
        await self._db.execute(_SCHEMA.format(name=self._name).encode())

    async def add(self, id: str, due_ms: int) -> None:
        await self._run("insert into score_{name} (id, due_ms) values (%(id)s, %(due)s)",
                        id=id, due=due_ms)  # fmt: skip

    async def due(self) -> list[str]:
        """The jobs that are due and free."""
        cursor = await self._run(_LIST, now=int(now_ms()))
        return [id for (id,) in await cursor.fetchall()]

    async def lock(self, id: str) -> bool:
        now = int(now_ms())
        cursor = await self._run(_LOCK, id=id, now=now, until=now + int(LOCK_S * 1000))
        return cursor.rowcount == 1

    async def prepare(self, ahead_s: float) -> list[tuple[str, int]]:
        """Lock the jobs that are due within so many seconds, and that nobody else is locking."""
        now = int(now_ms())
        until, lock = now + int(ahead_s * 1000), int(LOCK_S * 1000)
        cursor = await self._run(_PREPARE, now=now, until=until, lock=lock)
        return [(id, due_ms) for id, due_ms in await cursor.fetchall()]

    async def done(self, id: str) -> None:
        await self._run(_DONE, id=id)

    async def release(self, ids: list[str]) -> None:
        await self._run(_RELEASE, ids=ids)

    async def close(self) -> None:
        await self._db.close()

    async def _run(self, statement: str, **given: object) -> psycopg.AsyncCursor[Any]:
        return await self._db.execute(statement.format(name=self._name).encode(), given)


async def opened(url: str, name: str) -> PolledTable:
    return PolledTable(await psycopg.AsyncConnection.connect(url, autocommit=True), name)


async def poll(table: PolledTable, notes: Notebook, stop: asyncio.Event, *, every_s: float) -> None:
    """List what is due, lock each job, run those that it got."""
    queries = notes.queries

    async def work(id: str) -> None:
        await notes.run(id)
        await table.done(id)
        queries.writes += 1

    async with asyncio.TaskGroup() as running:

        async def look() -> None:
            queries.lists += 1
            for id in await table.due():
                if await table.lock(id):
                    queries.writes += 1
                    running.create_task(work(id))
                else:
                    queries.failed_locks += 1

        notes.ready()
        await _each(every_s, look, stop)


async def prepare(
    table: PolledTable, notes: Notebook, stop: asyncio.Event, *, every_s: float
) -> None:
    """Lock what is due soon in one step, and let a timer start each job at its time."""
    queries = notes.queries
    waiting: dict[str, asyncio.Task[None]] = {}

    async def work(id: str, due_ms: int) -> None:
        left_s = (due_ms - now_ms()) / 1000
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = (due_ms - now_ms()) / 1000
        running.append(asyncio.create_task(_ended(id)))
        waiting.pop(id, None)

    async def _ended(id: str) -> None:
        await notes.run(id)
        await table.done(id)
        queries.writes += 1

    async def look() -> None:
        queries.lists += 1
        for id, due_ms in await table.prepare(every_s + MARGIN_S):
            queries.writes += 1
            waiting[id] = asyncio.create_task(work(id, due_ms))

    running: list[asyncio.Task[None]] = []
    notes.ready()
    await _each(every_s, look, stop)
    for task in waiting.values():
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await table.release(list(waiting))


async def _each(every_s: float, look: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
    """Look again and again until told to stop; instances don't look at the same moment."""
    loop = asyncio.get_running_loop()
    at = loop.time() + random.random() * every_s
    while True:
        try:
            async with asyncio.timeout_at(at):
                await stop.wait()
            return
        except TimeoutError:
            await look()
            at = max(at + every_s, loop.time())
