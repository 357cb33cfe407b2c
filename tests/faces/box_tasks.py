"""An app for the tests of boxes. Its store can't be opened, so nothing may ever reach it."""

from __future__ import annotations

import os

from tickwheel import App

NEVER = "sqlite:////nowhere/at/all/jobs.db"
app = App(NEVER)


@app.task
async def cancel_order(order_id: int, why: str = "late") -> str:
    return f"{order_id} cancelled: {why}"


@app.task(queue="mail", priority="low")
def send_mail(to: str, *, id: int = 0) -> None: ...


@app.task(pool="process")
def where_it_runs() -> int:
    return os.getpid()


async def place_order(order_id: int) -> None:
    """What a user's test is about: code that enqueues as always."""
    await cancel_order.using(delay="30m").enqueue(order_id)
