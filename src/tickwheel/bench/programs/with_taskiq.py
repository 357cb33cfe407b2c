"""taskiq on Redis."""

from __future__ import annotations

from datetime import UTC, datetime

from record import URL, ran
from taskiq import TaskiqScheduler
from taskiq_redis import ListRedisScheduleSource, RedisAsyncResultBackend, RedisStreamBroker

broker = RedisStreamBroker(url=URL).with_result_backend(
    RedisAsyncResultBackend(redis_url=URL, result_ex_time=600)
)
source = ListRedisScheduleSource(URL)
scheduler = TaskiqScheduler(broker, [source])


@broker.task
async def nothing(n: int) -> None:
    ran(n)


@broker.task
async def echo(n: int) -> int:
    ran(n)
    return n


async def open() -> None:
    await broker.startup()
    await source.startup()


async def add_async(n: int) -> None:
    await nothing.kiq(n)


async def add_at(n: int, due: float) -> None:
    await nothing.schedule_by_time(source, datetime.fromtimestamp(due, UTC), n)


async def call(n: int) -> int:
    task = await echo.kiq(n)
    result = await task.wait_result(timeout=10)
    value: int = result.return_value
    return value
