"""An app with jobs in every state, as the browser tests look at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
from visits import poll

from tickwheel import App, current_job
from tickwheel.job import Job, dead
from tickwheel.store import WorkerInfo

BIG = 123456789012345678901234567890
# What names, ids, arguments and errors may contain: nothing of it is markup, or turns text around.
ODD = "a/b.c?d#e&f%20'\"<b>bold</b><script>alert(1)</script>\u202eevil\u2066 \N{PILE OF POO}é"
# An id must be printable.
ODD_ID = "a/b.c?d#e&f%20'\"<b>x</b> {{y}} \N{PILE OF POO}é"


class Shop:
    """An app and its tasks. Jobs of `hold` run until `released`."""

    def __init__(self, folder: Path) -> None:
        self.app = app = App(f"sqlite:///{folder}/jobs.db", name="shop")
        self.released = asyncio.Event()

        @app.task
        async def pack(order: int, note: str = "", password: str = "") -> dict[str, int]:
            return {"order": order}

        @app.task(queue="mail", retries=0)
        async def send(to: str) -> None:
            raise ValueError(f"no mailbox for {to!r}")

        @app.task(retries=3)
        async def fetch(url: str) -> None:
            raise ConnectionError(f"{url} does not answer")

        @app.task(queue="slow")
        async def hold() -> str:
            job = current_job()
            assert job is not None
            job.progress(0.4, "loading")
            await self.released.wait()
            return "released"

        @app.cron("0 2 * * *", tz="America/New_York")
        async def nightly() -> None: ...

        self.pack, self.send, self.fetch, self.hold = pack, send, fetch, hold

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """With a worker beside it."""
        async with self.app.worker(concurrency=10):
            try:
                yield
            finally:
                self.released.set()

    async def stock(self) -> None:
        """Add jobs; with a worker, they end up in every state."""
        at = timedelta(hours=1)
        await self.pack.using(id="order-1", meta={"customer": "42"}).enqueue(1, password="hunter2")
        await self.pack.using(id="order-2").enqueue(BIG, note="many")
        await self.pack.using(id="later-1", delay=at).enqueue(3)
        await self.pack.using(id="later-2", delay=at * 2, priority="high").enqueue(4)
        await self.pack.using(id="stopped-1", delay=at).enqueue(5)
        await self.app.cancel("stopped-1")
        for n in range(3):
            await self.send.using(id=f"mail-{n}").enqueue(f"user{n}")
        await self.fetch.using(id="fetch-1").enqueue("http://example")
        await self.hold.using(id="held-1").enqueue()

    async def settled(self, also: Mapping[str, str] | None = None) -> None:
        """Wait until the worker has dealt with what is due."""
        states = {"order-1": "done", "order-2": "done", "mail-2": "dead", "held-1": "running"}
        states |= also or {}

        async def reached() -> bool:
            infos = [await self.app.job(id).info() for id in states]
            found = {info.id: str(info.state) for info in infos if info is not None}
            fetched = await self.app.job("fetch-1").info()
            return found == states and fetched is not None and fetched.failures > 0

        await poll(reached)

    async def add_odd(self) -> None:
        """Jobs, a queue and a worker whose every text is odd, as another program may have stored
        them."""
        client = await self.app.client()
        store, now_ms = client.store, client.clock.now_ms()
        payload = msgspec.json.encode({ODD: ODD}).decode()
        whole = Job(
            id=ODD_ID, task=ODD, queue=ODD, payload=payload, meta={ODD: ODD},
            due_ms=now_ms + 3_600_000, created_ms=now_ms,
        )  # fmt: skip
        ended = msgspec.structs.replace(whole, id=f"dead {ODD_ID}", due_ms=now_ms)
        assert await store.add([whole, ended]) == [True, True]
        held = await store.claim([ODD], worker=ODD, limit=1, now_ms=now_ms, lease_ms=60_000)
        failed = dead(held[0], error=f"ValueError: {ODD}", started_ms=now_ms, ended_ms=now_ms)
        assert await store.settle([failed], now_ms=now_ms) == [True]
        await store.pause(ODD, True)
        await store.beat(
            WorkerInfo(
                name=ODD, host=ODD, pid=1, version="1", queues=(ODD,), tasks=(ODD,), app=ODD,
                concurrency=1, started_ms=now_ms, seen_ms=now_ms, gone_after_ms=600_000,
            )
        )  # fmt: skip
