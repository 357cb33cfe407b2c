"""Celery on Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from celery import Celery, group
from record import URL, ran

app = Celery("bench", broker=URL, backend=URL)
# Its guide to optimizing asks for a high multiplier if tasks are short.
app.conf.worker_prefetch_multiplier = 64


@app.task(ignore_result=True)
def nothing(n: int) -> None:
    ran(n)


@app.task
def echo(n: int) -> int:
    ran(n)
    return n


def add(n: int) -> None:
    nothing.delay(n)


def add_many(numbers: list[int], delay: float | None) -> None:
    eta = datetime.now(UTC) + timedelta(seconds=delay) if delay else None
    group(nothing.s(n) for n in numbers).apply_async(eta=eta)


def add_at(n: int, due: float) -> None:
    nothing.apply_async((n,), eta=datetime.fromtimestamp(due, UTC))


def call(n: int) -> int:
    result: int = echo.delay(n).get(timeout=10)
    return result
