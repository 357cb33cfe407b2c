"""Dramatiq on Redis."""

from __future__ import annotations

import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from record import URL, ran

broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL)))
dramatiq.set_broker(broker)


@dramatiq.actor
def nothing(n: int) -> None:
    ran(n)


@dramatiq.actor(store_results=True)
def echo(n: int) -> int:
    ran(n)
    return n


def add(n: int) -> None:
    nothing.send(n)


def add_many(numbers: list[int], delay: float | None) -> None:
    ms = int(delay * 1000) if delay else None
    dramatiq.group([nothing.message(n) for n in numbers]).run(delay=ms)


def add_at(n: int, due: float) -> None:
    nothing.send_with_options(args=(n,), delay=round((due - time.time()) * 1000))


def call(n: int) -> int:
    result: int = echo.send(n).get_result(block=True, timeout=10_000)
    return result
