"""Tickwheel on any of its stores."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime

from record import URL, ran

from tickwheel import App

app = App(URL)
_open = AsyncExitStack()


@app.task
async def nothing(n: int) -> None:
    ran(n)


@app.task
async def echo(n: int) -> int:
    ran(n)
    return n


@app.batch(size=100)
async def together(items: list[int]) -> None:
    for n in items:
        ran(n)


async def open() -> None:
    await app.__aenter__()


def add(n: int) -> None:
    nothing.enqueue_sync(n)


async def add_async(n: int) -> None:
    await nothing.enqueue(n)


async def add_many(numbers: list[int], delay: float | None) -> None:
    call = nothing.using(delay=delay or 0)
    await app.enqueue_many(call.job(n) for n in numbers)


async def add_batch(numbers: list[int]) -> None:
    await app.enqueue_many(together.job(n) for n in numbers)


async def add_at(n: int, due: float) -> None:
    await nothing.using(at=datetime.fromtimestamp(due, UTC)).enqueue(n)


async def call(n: int) -> int:
    job = await echo.enqueue(n)
    return await job.result(timeout=10)


if URL.startswith("memory:"):
    # Its jobs are in this process only.

    async def work() -> None:
        await _open.enter_async_context(app.worker())

    async def rest() -> None:
        await _open.aclose()
