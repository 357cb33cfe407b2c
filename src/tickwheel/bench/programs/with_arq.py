"""arq on Redis."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from record import URL, ran

settings = RedisSettings.from_dsn(URL)
_pools: list[Any] = []


async def nothing(context: Any, n: int) -> None:
    ran(n)


async def echo(context: Any, n: int) -> int:
    ran(n)
    return n


class WorkerSettings:
    functions = (nothing, echo)
    redis_settings = settings


async def open() -> None:
    _pools.append(await create_pool(settings))


async def add_async(n: int) -> None:
    await _pools[0].enqueue_job("nothing", n)


async def add_at(n: int, due: float) -> None:
    await _pools[0].enqueue_job("nothing", n, _defer_until=datetime.fromtimestamp(due, UTC))


async def call(n: int) -> int:
    job = await _pools[0].enqueue_job("echo", n)
    result: int = await job.result(timeout=10)
    return result
