"""RQ on Redis."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from record import URL, ran
from redis import Redis
from rq import Queue

queue = Queue(connection=Redis.from_url(URL))


def nothing(n: int) -> None:
    ran(n)


def echo(n: int) -> int:
    ran(n)
    return n


def add(n: int) -> None:
    queue.enqueue(nothing, n)


def add_many(numbers: list[int], delay: float | None) -> None:
    if delay is None:
        queue.enqueue_many([Queue.prepare_data(nothing, (n,)) for n in numbers])
        return
    for n in numbers:
        queue.enqueue_in(timedelta(seconds=delay), nothing, n)


def add_at(n: int, due: float) -> None:
    queue.enqueue_at(datetime.fromtimestamp(due, UTC), nothing, n)


def call(n: int) -> int:
    result = queue.enqueue(echo, n).latest_result(timeout=10)
    assert result is not None, "no result within 10 s"
    value: int = result.return_value
    return value
