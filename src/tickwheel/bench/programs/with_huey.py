"""Huey on Redis or SQLite."""

from __future__ import annotations

import time

from huey import RedisHuey, SqliteHuey
from record import URL, ran

if URL.startswith("redis:"):
    huey = RedisHuey("bench", url=URL)
else:
    huey = SqliteHuey("bench", filename=URL.removeprefix("sqlite:///"))


@huey.task()
def nothing(n: int) -> None:
    ran(n)


@huey.task()
def echo(n: int) -> int:
    ran(n)
    return n


def add(n: int) -> None:
    nothing(n)


def add_at(n: int, due: float) -> None:
    nothing.schedule((n,), delay=due - time.time())


def call(n: int) -> int:
    result: int = echo(n).get(blocking=True, timeout=10)
    return result
