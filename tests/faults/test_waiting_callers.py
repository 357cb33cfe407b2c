"""Callers that wait for results of a worker in another process, and what it costs if none does."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import msgspec
import psycopg
import pytest
from redis.asyncio import Redis

from callers import heard_late_s
from postgres_server import shared_server
from stores import nats_server, redis_server
from tickwheel import App, JobCancelled, ends
from tickwheel.job import Job, done
from tickwheel.store import Store, open_store
from tickwheel.testing import FaultyStore

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch

CALLERS = 1000
# The median is 1 to 2 ms on a machine with nothing else to do. Callers that poll are late by 140 ms
# and more.
LATE_S = 0.05

URLS: dict[str, Callable[[Path], str]] = {
    "sqlite": lambda folder: f"sqlite:///{folder}/jobs.db",
    "postgres": lambda folder: f"{shared_server().url}?schema=results_{token_hex(6)}",
    "redis": lambda folder: f"{redis_server().url}?namespace={token_hex(6)}",
    "nats": lambda folder: f"{nats_server().url}/{token_hex(6)}",
}


class Counting(FaultyStore):
    def __init__(self, store: Store, calls: Counter[str]) -> None:
        super().__init__(store)
        self.calls = calls

    def new_handle(self) -> Counting:
        return Counting(self._store.new_handle(), self.calls)

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", URLS)
def test_a_thousand_callers_hear_of_the_end_soon_and_with_few_calls(
    kind: str, tmp_path: Path
) -> None:
    url, calls = URLS[kind](tmp_path), Counter[str]()
    app = App(cast(Store, Counting(open_store(url), calls)))
    late_s = heard_late_s(url, tmp_path, CALLERS, app=app, waiting=calls.clear)
    assert len(late_s) == CALLERS
    assert statistics.median(late_s) < LATE_S
    # Each end costs at most a read. Callers that polled made three to eighteen times as many.
    assert calls["get"] < 1.5 * CALLERS
    assert calls.total() < 1.5 * CALLERS


async def end_one(store: Store, id: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    job = Job(
        id=id,
        task="task",
        payload="{}",
        queue="default",
        priority=1,
        due_ms=now_ms,
        created_ms=now_ms,
    )
    assert await store.add([job]) == [True]
    [held] = await store.claim(["default"], worker="w", limit=1, now_ms=now_ms, lease_ms=60_000)
    settled = done(held, started_ms=now_ms, ended_ms=now_ms, result="1")
    assert await store.settle([settled], now_ms=now_ms) == [True]


async def test_nothing_is_sent_while_nobody_waits_on_redis() -> None:
    namespace = token_hex(6)
    store = open_store(f"{redis_server().url}?namespace={namespace}")
    await store.open()
    other = Redis.from_url(redis_server().url)
    channel = other.pubsub()
    await channel.subscribe(f"tw:{{{namespace}}}:ends")
    assert await channel.get_message(timeout=10) is not None
    await end_one(store, "unheard")
    # The note of somebody who waits.
    await other.set(f"tw:{{{namespace}}}:watched", "1")
    await end_one(store, "heard")
    message = await channel.get_message(timeout=10)
    assert message is not None and message["data"] == msgspec.msgpack.encode(["heard"])
    await channel.aclose()  # type: ignore[no-untyped-call,unused-ignore]
    await other.aclose()
    await store.close()


async def test_nothing_is_sent_while_nobody_waits_on_postgres() -> None:
    schema = f"results_{token_hex(6)}"
    store = open_store(f"{shared_server().url}?schema={schema}")
    await store.open()
    async with await psycopg.AsyncConnection.connect(shared_server().url, autocommit=True) as db:
        await db.execute(f'listen "{schema}:ends"')
        await end_one(store, "unheard")
        assert await (await db.execute(f"select {schema}.watch(30000)")).fetchone() == (True,)
        await end_one(store, "heard")
        heard = [each.payload async for each in db.notifies(timeout=10, stop_after=1)]
        assert heard == ['["heard"]']
    await store.close()


async def hears_after(url: str, cut: Callable[[], Awaitable[bool]], patch: Patch) -> None:
    """A caller hears of the end of its job even if its connection is cut while it waits."""
    # It does not just look again.
    patch.setattr(ends, "WATCH_S", 3600)
    app, other = App(url), open_store(url)
    await other.open()

    @app.task
    async def echo(n: int) -> int:
        return n

    async with app, asyncio.timeout(60):
        job = await echo.using(delay="1h").enqueue(1)
        waiting = asyncio.create_task(job.result())
        while not await cut():
            await asyncio.sleep(0.05)
        await other.cancel([job.id], now_ms=time.time_ns() // 1_000_000)
        with pytest.raises(JobCancelled):
            await waiting
    await other.close()


async def test_a_caller_outlives_its_connection_to_redis(monkeypatch: Patch) -> None:
    namespace, admin = token_hex(6), Redis.from_url(redis_server().url)
    channel = f"tw:{{{namespace}}}:ends"

    async def cut() -> bool:
        [(_, listening)] = await admin.pubsub_numsub(channel)
        return bool(listening and await admin.client_kill_filter(_type="pubsub"))

    await hears_after(f"{redis_server().url}?namespace={namespace}", cut, monkeypatch)
    await admin.aclose()


async def test_a_caller_outlives_its_connection_to_postgres(monkeypatch: Patch) -> None:
    schema = f"results_{token_hex(6)}"
    url = shared_server().url
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as admin:

        async def cut() -> bool:
            found = await admin.execute(
                # Until it is known to hear, it would look again by itself.
                """select pg_terminate_backend(pid) from pg_stat_activity
                   where query = %s and state_change < clock_timestamp() - interval '3 s'""",
                (f'listen "{schema}:ends"',),
            )
            return bool(await found.fetchall())

        await hears_after(f"{url}?schema={schema}", cut, monkeypatch)
