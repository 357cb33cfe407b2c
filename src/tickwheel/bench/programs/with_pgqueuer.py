"""PgQueuer on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import asyncpg
from pgqueuer import AsyncpgDriver, AsyncpgPoolDriver, PgQueuer, Queries
from record import URL, ran

_queries: list[Any] = []


@asynccontextmanager
async def main() -> AsyncIterator[PgQueuer]:
    """For `pgq run`."""
    connection = await asyncpg.connect(URL)
    pgq = PgQueuer(AsyncpgDriver(connection))

    @pgq.entrypoint("nothing")
    async def nothing(job: Any) -> None:
        ran(int(job.payload))

    yield pgq
    await connection.close()


async def open() -> None:
    pool = await asyncpg.create_pool(URL)
    _queries.append(Queries(AsyncpgPoolDriver(pool)))
    await _queries[0].install()


async def add_async(n: int) -> None:
    await _queries[0].enqueue("nothing", b"%d" % n)


async def add_many(numbers: list[int], delay: float | None) -> None:
    count = len(numbers)
    await _queries[0].enqueue(
        ["nothing"] * count,
        [b"%d" % n for n in numbers],
        [0] * count,
        execute_after=[timedelta(seconds=delay) if delay else None] * count,
    )


async def add_at(n: int, due: float) -> None:
    delay = timedelta(seconds=due - time.time())
    await _queries[0].enqueue("nothing", b"%d" % n, execute_after=delay)
