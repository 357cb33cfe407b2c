"""Procrastinate on PostgreSQL."""

from __future__ import annotations

from datetime import UTC, datetime

from procrastinate import App, PsycopgConnector
from record import URL, ran

app = App(connector=PsycopgConnector(conninfo=URL))


@app.task
async def nothing(n: int) -> None:
    ran(n)


async def open() -> None:
    app.open()
    await app.open_async()
    await app.schema_manager.apply_schema_async()


def add(n: int) -> None:
    nothing.defer(n=n)


async def add_async(n: int) -> None:
    await nothing.defer_async(n=n)


async def add_many(numbers: list[int], delay: float | None) -> None:
    later = nothing.configure(schedule_in={"seconds": int(delay)} if delay else None)
    await later.batch_defer_async(*({"n": n} for n in numbers))


async def add_at(n: int, due: float) -> None:
    await nothing.configure(schedule_at=datetime.fromtimestamp(due, UTC)).defer_async(n=n)
