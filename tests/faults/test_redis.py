"""Redis at its worst: servers that die, freeze, fill up or change role; connections that are cut or
go silent; replies that are lost after the server acted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from certificates import certificate
from redis_server import RedisServer
from tickwheel import App, job as life
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.limit import Rate, admit
from tickwheel.schedule import Schedule
from tickwheel.store import Level, Query, Store, WorkerInfo, open_store
from tickwheel.stores.redis import wire
from tickwheel.stores.redis.connections import errors
from tickwheel.stores.redis.health import as_fields, durability_of, of_memory
from tickwheel.stores.redis.url import RedisOptions
from tickwheel.stores.redis.wire import Wire, translated

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs" / "redis.md"
NOW = 1_800_000_000_000
LEASE = 30_000
SOON_S = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path, appendonly="yes", appendfsync="always")


def running(folder: Path, **settings: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, **settings)
    try:
        yield server.start()
    finally:
        server.stop()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def job(id: str = "job", *, payload: str = "{}", due_ms: int = NOW, queue: str = "default") -> Job:
    return Job(id=id, task="task", payload=payload, due_ms=due_ms, created_ms=NOW, queue=queue)


async def claim(store: Store, limit: int = 10) -> list[Job]:
    return await store.claim(["default"], worker="ann", limit=limit, now_ms=NOW, lease_ms=LEASE)


def done(held: Job) -> life.Settlement:
    return life.done(held, started_ms=NOW, ended_ms=NOW, result="1")


async def until_it_answers(call: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await call()
                return
            await asyncio.sleep(0.05)


class Proxy:
    """A way to the server that can be cut, can go silent, and can lose what the server answers."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self._target, self._tls = port, tls
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.lose_replies_to: bytes | None = None
        self.hold_back_replies_to: bytes | None = None
        self.port = 0

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self._open.set()
        self.cut()
        await asyncio.sleep(0.05)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def go_silent(self) -> None:
        """Nothing comes through any more, and nobody is told."""
        self._open.clear()

    def go_on(self) -> None:
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._target)
        mine = {writer, out}
        self._writers |= mine
        lost, late = asyncio.Event(), asyncio.Event()
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._pass_on(reader, out, lost, late, requests=True),
                self._pass_on(there, writer, lost, late, requests=False),
            )
        self._writers -= mine

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lost: asyncio.Event,
        late: asyncio.Event,
        *,
        requests: bool,
    ) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            if requests and self.lose_replies_to and self.lose_replies_to in data:
                lost.set()
            if requests and self.hold_back_replies_to and self.hold_back_replies_to in data:
                late.set()
            if not requests and late.is_set():
                await asyncio.sleep(0.3)
            if not requests and lost.is_set():
                # The server has acted and answered: here the answer ends.
                self.lose_replies_to = None
                break
            writer.write(data)
            await writer.drain()
        for each in (writer, *(() if requests else self._writers)):
            each.transport.abort()


# --- The server dies


async def test_nothing_acknowledged_is_lost_when_the_server_is_killed(server: RedisServer) -> None:
    async with opened(server.url) as store:
        durability = await store.durability()
        assert (durability.process_crash, durability.power_loss) == (True, True)
        acknowledged: list[str] = []
        for crash in range(3):
            adding = [asyncio.create_task(add_until_refused(store, f"{crash}-{n}", acknowledged))
                      for n in range(3)]  # fmt: skip
            await asyncio.sleep(0.4)
            server.kill()
            await asyncio.gather(*adding)
            server.start()
            found = await store.get(acknowledged)
            assert [id for id, job in zip(acknowledged, found, strict=True) if job is None] == []
        assert len(acknowledged) > 30
        # What was added but not acknowledged is there as a whole or not at all, and counted.
        [info] = await store.queues()
        assert info.waiting % 10 == 0 and info.waiting >= len(acknowledged)


async def add_until_refused(store: Store, name: str, acknowledged: list[str]) -> None:
    for n in range(1_000_000):
        jobs = [job(f"{name}-{n}-{k}") for k in range(10)]
        try:
            await store.add(jobs)
        except StoreUnavailable:
            return
        acknowledged += [job.id for job in jobs]


async def test_a_worker_carries_on_after_the_server_was_killed(server: RedisServer) -> None:
    app, ran = App(server.url), set()

    @app.task
    async def note(n: int) -> None:
        ran.add(n)

    async with app:
        await app.enqueue_many([note.using(delay=0.01 * n).job(n) for n in range(200)])
        async with asyncio.timeout(90), app.worker(concurrency=20, lease="3s"):
            while len(ran) < 50:
                await asyncio.sleep(0.01)
            server.kill()
            await asyncio.sleep(0.5)
            server.start()
            while len(ran) < 200:
                await asyncio.sleep(0.01)
    assert ran == set(range(200))


async def test_a_frozen_server_is_unavailable_and_then_back(server: RedisServer) -> None:
    async with opened(f"{server.url}?timeout=500ms") as store:
        await store.add([job()])
        server.freeze()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1"):
                await store.add([job("other")])
        server.thaw()
        await until_it_answers(lambda: store.add([job("other")]))
        assert [info.waiting for info in await store.queues()] == [2]


async def test_scripts_that_the_server_forgot_are_sent_again(server: RedisServer) -> None:
    async with opened(server.url) as store:
        assert server.command("SCRIPT", "FLUSH").startswith(b"+OK")
        assert await store.add([job()]) == [True]
        assert [held.id for held in await claim(store)] == ["job"]


# --- The way there


async def test_a_cut_connection_is_unavailable_once_and_then_replaced(server: RedisServer) -> None:
    async with Proxy(server.port) as proxy, opened(proxy.url) as store:
        for n in range(5):
            await store.add([job(f"{n}")])
            proxy.cut()
            await asyncio.sleep(0.02)
        await until_it_answers(store.queues)
        [info] = await store.queues()
        assert info.waiting == 5


async def test_a_silent_connection_ends_in_time(server: RedisServer) -> None:
    """Half-open: packets go nowhere and no error comes back."""
    async with Proxy(server.port) as proxy, opened(f"{proxy.url}?timeout=500ms") as store:
        await store.add([job()])
        proxy.go_silent()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(StoreUnavailable, match=r"did not answer within 0\.5 s"):
                await store.get(["job"])
        proxy.go_on()
        await until_it_answers(store.queues)
        assert [found and found.id for found in await store.get(["job"])] == ["job"]


async def test_a_store_that_is_not_there_is_named_without_the_password() -> None:
    store = open_store("redis://ann:s3cret@127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable) as failure:
        await store.open()
    assert "127.0.0.1:1" in str(failure.value)
    assert "s3cret" not in str(failure.value)
    await store.close()


async def test_a_wait_can_be_given_up_at_any_moment(server: RedisServer) -> None:
    """Also in the one in which the driver would lose the cancel."""
    for turns in range(50):
        async with opened(server.url) as store:
            for hint in (
                store.asked("ann", now_ms=NOW, until_ms=NOW + 600_000),
                store.wait(["default"], now_ms=NOW, until_ms=NOW + 600_000),
            ):
                waiting: asyncio.Task[object] = asyncio.create_task(hint)
                for _ in range(turns):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting], timeout=SOON_S)
                assert waiting.cancelled(), turns


# --- Replies that are lost after the server acted


@asynccontextmanager
async def losing_replies(server: RedisServer) -> AsyncIterator[tuple[Store, Proxy]]:
    async with Proxy(server.port) as proxy, opened(proxy.url) as store:
        yield store, proxy


async def repeated(
    proxy: Proxy, step: Callable[[], Awaitable[object]], lost: bytes = b"\r\n"
) -> object:
    """The answer to the repeat of a step whose first answer was lost."""
    proxy.lose_replies_to = lost
    with pytest.raises(StoreUnavailable):
        await step()
    assert proxy.lose_replies_to is None, "no reply was lost"
    return await step()


async def test_an_add_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        assert await repeated(proxy, lambda: store.add([job("a"), job("b")])) == [False, False]
        assert [info.waiting for info in await store.queues()] == [2]


async def test_a_settle_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        await store.add([job("done"), job("again")])
        settlements = [
            done(held)
            if held.id == "done"
            else life.retry(held, due_ms=NOW + 5, error="boom", ended_ms=NOW)
            for held in await claim(store)
        ]
        step = lambda: store.settle(settlements, now_ms=NOW)  # noqa: E731
        assert await repeated(proxy, step) == [True, True]
        found = {each.id: each for each in await store.get(["done", "again"]) if each}
        assert (found["done"].state, len(found["done"].history)) == (State.DONE, 1)
        assert (found["again"].failures, len(found["again"].history)) == (1, 1)


async def test_an_extend_whose_reply_was_lost_can_be_repeated(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        await store.add([job()])
        [held] = await claim(store)
        step = lambda: store.extend([held], now_ms=NOW + 1, lease_ms=LEASE)  # noqa: E731
        answer = await repeated(proxy, step)
        assert isinstance(answer, list) and answer[0].lease_until_ms == NOW + 1 + LEASE


async def test_a_cancel_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        await store.add([job()])
        step = lambda: store.cancel(["job"], now_ms=NOW)  # noqa: E731
        assert await repeated(proxy, step, lost=b"\r\ncancel\r\n") == [CancelOutcome.TOO_LATE]
        assert [info.cancelled for info in await store.queues()] == [1]


async def test_a_fire_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        stored = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
        step = lambda: store.fire(stored, [job()], next_ms=NOW + 1)  # noqa: E731
        assert await repeated(proxy, step) is False
        [schedule] = await store.schedules()
        assert (schedule.next_ms, schedule.last_id) == (NOW + 1, "job")
        assert [info.waiting for info in await store.queues()] == [1]


async def test_a_put_of_records_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        await repeated(proxy, lambda: store.put_records("key", {"a": "1"}))
        assert await store.records("key") == [("a", "1")]
        assert await repeated(proxy, lambda: store.delete_records("key", ["a"])) == [False]
        assert await store.records("key") == []


async def test_a_claim_whose_reply_was_lost_costs_one_lease(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        await store.add([job()])
        assert await repeated(proxy, lambda: claim(store)) == []
        [held] = await store.claim(
            ["default"], worker="bob", limit=1, now_ms=NOW + LEASE, lease_ms=LEASE
        )
        assert (held.attempt, held.takeovers) == (2, 1)


async def test_an_extend_is_not_answered_before_a_settle_that_it_comes_after(
    server: RedisServer,
) -> None:
    """Else a holder would take for lost what it has just settled itself."""
    async with losing_replies(server) as (store, proxy):
        await store.add([job()])
        [held] = await claim(store)
        proxy.hold_back_replies_to = b"settle"
        settling = asyncio.create_task(store.settle([done(held)], now_ms=NOW))
        await asyncio.sleep(0.1)
        assert await store.extend([held], now_ms=NOW, lease_ms=LEASE) == [None]
        assert settling.done() and await settling == [True]


# --- Notifications


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only notifications end a wait."""
    monkeypatch.setattr("tickwheel.stores.redis.notify.POLL_S", 600)


@pytest.fixture
def no_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was lost stays lost: only looking now and then ends a wait."""
    monkeypatch.setattr("tickwheel.stores.redis.notify.RECONNECT_S", 600)


async def ends_soon(waiting: asyncio.Task[None], step: Awaitable[object]) -> None:
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await step
    async with asyncio.timeout(SOON_S):
        await waiting


def waits(store: Store) -> asyncio.Task[None]:
    return asyncio.create_task(store.wait(["default"], now_ms=NOW, until_ms=NOW + 600_000))


@pytest.mark.usefixtures("no_poll")
async def test_notifications_alone_end_every_wait(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        for waiting in (store, other):
            both = [waits(store), waits(waiting)]
            await ends_soon(both[0], other.add([job()]))
            await both[1]
            [held] = await claim(other)
            retry = life.retry(held, due_ms=NOW, error="boom", ended_ms=NOW)
            await ends_soon(waits(store), other.settle([retry], now_ms=NOW))
            await other.cancel(["job"], now_ms=NOW)
            await ends_soon(waits(store), other.rerun(["job"], now_ms=NOW))
            await other.pause("default", True)
            await ends_soon(waits(store), other.pause("default", False))
            await other.cancel(["job"], now_ms=NOW)
            await other.delete(["job"])


@pytest.mark.usefixtures("no_poll")
async def test_notifications_alone_tell_of_a_cancel(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        await store.add([job()])
        await claim(store)
        asking = asyncio.create_task(store.asked("ann", now_ms=NOW, until_ms=NOW + 600_000))
        await asyncio.sleep(0.2)
        await other.cancel(["job"], now_ms=NOW)
        async with asyncio.timeout(SOON_S):
            assert await asking == {"job": "stop"}


@pytest.mark.usefixtures("no_poll")
async def test_a_wait_is_told_of_what_it_missed_once_it_is_connected_again(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store, opened(server.url) as other:

        async def missed() -> None:
            assert server.command("CLIENT", "KILL", "TYPE", "pubsub").startswith(b":1")
            await other.add([job()])

        await ends_soon(waits(store), missed())


@pytest.mark.usefixtures("no_notifications")
async def test_a_wait_looks_for_itself_without_notifications(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store, opened(server.url) as other:

        async def missed() -> None:
            assert server.command("CLIENT", "KILL", "TYPE", "pubsub").startswith(b":1")
            await other.add([job()])

        await ends_soon(waits(store), missed())


async def test_a_wait_ends_although_its_connection_was_killed(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        for n in range(3):
            waiting = asyncio.create_task(
                store.wait(["default"], now_ms=NOW, until_ms=NOW + 60_000)
            )
            await asyncio.sleep(0.1)
            assert server.command("CLIENT", "KILL", "TYPE", "pubsub").startswith(b":1")
            await other.add([job(f"{n}")])
            async with asyncio.timeout(SOON_S):
                await waiting
            assert len(await claim(store)) == 1


async def test_a_cancel_is_told_although_the_connection_was_killed(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        await store.add([job()])
        await claim(store)
        asking = asyncio.create_task(store.asked("ann", now_ms=NOW, until_ms=NOW + 60_000))
        await asyncio.sleep(0.1)
        assert server.command("CLIENT", "KILL", "TYPE", "pubsub").startswith(b":1")
        await other.cancel(["job"], now_ms=NOW)
        async with asyncio.timeout(SOON_S):
            assert await asking == {"job": "stop"}


async def test_after_a_restart_waits_are_notified_again(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        waiting = asyncio.create_task(keep_waiting(store))
        await asyncio.sleep(0.1)
        server.kill()
        server.start()
        async with asyncio.timeout(SOON_S):
            while b"pubsub" not in server.command("CLIENT", "LIST", "TYPE", "pubsub") and (
                b"sub=1" not in server.command("CLIENT", "LIST", "TYPE", "pubsub")
            ):
                await asyncio.sleep(0.05)
            await until_it_answers(lambda: other.add([job()]))
            await waiting


async def keep_waiting(store: Store) -> None:
    while True:
        with contextlib.suppress(StoreUnavailable):
            await store.wait(["default"], now_ms=NOW, until_ms=NOW + 60_000)
            return
        await asyncio.sleep(0.05)


async def test_adds_that_nobody_waits_for_publish_nothing(server: RedisServer) -> None:
    async with opened(server.url) as store:
        before = published(server)
        for n in range(20):
            await store.add([job(f"{n}")])
        assert published(server) == before


def published(server: RedisServer) -> int:
    """How often PUBLISH was called."""
    stats = server.command("INFO", "commandstats").decode()
    line = next((line for line in stats.splitlines() if "cmdstat_publish:" in line), "calls=0,")
    return int(line.partition("calls=")[2].partition(",")[0])


# --- Servers that refuse


async def test_a_primary_that_became_a_replica_is_unavailable(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job()])
        server.command("REPLICAOF", "127.0.0.1", "1")
        with pytest.raises(StoreUnavailable, match="READONLY"):
            await store.add([job("other")])
        server.command("REPLICAOF", "NO", "ONE")
        assert await store.add([job("other")]) == [True]


async def test_a_full_server_refuses_jobs_whole_and_goes_on_with_those_it_has(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        stored = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
        await store.put_records("key", {"a": "1"})
        await store.add([job(f"old {n}") for n in range(10)])
        await store.settle([done(held) for held in await claim(store)], now_ms=NOW)
        await store.add([job("a"), job("b"), job("c", due_ms=NOW + 60_000)])
        server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match=r"OOM.*maxmemory"):
            await store.add([job("new")])
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.fire(stored, [job("new")], next_ms=NOW + 1)
        assert (await store.get(["new"])) == [None]
        assert await store.schedules() == [stored]
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.put_records("key", {"b": "2"})
        assert await store.records("key") == [("a", "1")]
        assert await store.delete_records("key", ["a"]) == [True]
        # All else is part of a job's way to its end, or of an operator's.
        async with opened(server.url) as late:
            a, b = await claim(late)
        assert None not in await store.extend([a, b], now_ms=NOW, lease_ms=LEASE)
        asked = [CancelOutcome.REQUESTED, CancelOutcome.CANCELLED]
        assert await store.cancel(["b", "c"], now_ms=NOW) == asked
        assert await store.asked("ann", now_ms=NOW, until_ms=NOW) == {"b": "stop"}
        again = life.retry(b, due_ms=NOW, error="boom", ended_ms=NOW)
        assert await store.settle([done(a), again], now_ms=NOW) == [True, True]
        assert await store.rerun(["b"], now_ms=NOW) == [True]
        await store.wait(["other"], now_ms=NOW, until_ms=NOW + 10)
        await store.pause("other", True)
        await store.put_schedule(Schedule(name="t", rule="{}", next_ms=NOW))
        assert await store.throttle("key", Rate(limit=1, period_ms=1000), now_ms=NOW) == 0
        await store.beat(worker("ann"))
        assert [each.name for each in await store.workers(now_ms=NOW)] == ["ann"]
        assert await store.prune([State.DONE], before_ms=NOW + 1, limit=100) == 11
        assert await store.delete(["c"]) == [True]


def worker(name: str) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        host="here",
        pid=1,
        version="1",
        queues=("default",),
        concurrency=1,
        started_ms=NOW,
        seen_ms=NOW,
        gone_after_ms=LEASE,
    )


async def test_workers_drain_a_full_server_each_job_once_and_then_there_is_room(
    server: RedisServer,
) -> None:
    app, ran = App(server.url), Counter[int]()

    @app.task
    async def note(n: int, text: str) -> None:
        ran[n] += 1
        # Longer than a lease, for some of them.
        await asyncio.sleep(1.5 if n % 50 == 0 else 0)

    async with app:
        await note.enqueue(0, "")
        used = int(as_fields(server.command("INFO", "memory"))["used_memory"])
        server.command("CONFIG", "SET", "maxmemory", str(used + 4_000_000))
        stored = 1
        with pytest.raises(StoreUnavailable, match="OOM"):
            while True:
                await note.enqueue(stored, "x" * 4_000)
                stored += 1
        async with asyncio.timeout(90), app.worker(concurrency=50, lease="1s"):
            while sum(each.done for each in await app.queues()) < stored:
                await asyncio.sleep(0.05)
        assert ran == Counter(range(stored)) and stored > 300
        async with opened(server.url) as store:
            far = 2 * NOW
            assert await store.prune([State.DONE], before_ms=far, limit=10 * stored) == stored
        await note.enqueue(stored, "x" * 4_000)


async def test_a_server_that_may_drop_jobs_is_refused(tmp_path: Path) -> None:
    for server in running(tmp_path, maxmemory="100mb", maxmemory_policy="allkeys-lru"):
        store = open_store(server.url)
        with pytest.raises(StoreIncompatible, match="noeviction"):
            await store.open()
        async with opened(f"{server.url}?eviction=allowed") as store:
            memory = {each.about: each for each in await store.findings()}["memory"]
            assert (memory.level, "noeviction" in memory.fix) == (Level.BAD, True)


async def test_jobs_of_a_newer_release_are_refused(server: RedisServer) -> None:
    server.command("SET", "tw:{default}:schema", "3")
    with pytest.raises(StoreIncompatible, match="newer"):
        await open_store(server.url).open()
    async with opened(f"{server.url}?namespace=other") as store:
        assert await store.queues() == []


async def test_a_wrong_password_is_an_error_that_does_not_repeat_it(server: RedisServer) -> None:
    server.command("CONFIG", "SET", "requirepass", "right")
    for login in ("ann:wr0ng@", ":wr0ng@", ""):
        store = open_store(f"redis://{login}127.0.0.1:{server.port}")
        with pytest.raises(StoreError) as failure:
            await store.open()
        assert not isinstance(failure.value, StoreUnavailable)
        assert "wr0ng" not in str(failure.value)
    async with opened(f"redis://:right@127.0.0.1:{server.port}") as store:
        assert await store.queues() == []


# --- Rights


def documented_rights() -> list[str]:
    """The ACL of the docs, for a user `tickwheel` and the namespace `shop`."""
    [line] = [line for line in DOCS.read_text().splitlines() if line.startswith("ACL SETUSER")]
    return line.split()


async def test_the_documented_rights_are_enough_for_everything(server: RedisServer) -> None:
    assert server.command(*documented_rights()).startswith(b"+OK")
    url = f"redis://tickwheel:a-long-password@127.0.0.1:{server.port}?namespace=shop"
    async with opened(url) as store:
        await a_whole_life(store)
        assert "every write" in (await store.durability()).summary
        assert await store.findings()
    with pytest.raises(StoreError, match="ACL"):
        await open_store(url.replace("shop", "elsewhere")).open()


async def test_a_server_that_keeps_its_settings_to_itself_is_used(server: RedisServer) -> None:
    """As hosted ones do."""
    server.command(*documented_rights(), "-config", "-slowlog")
    url = f"redis://tickwheel:a-long-password@127.0.0.1:{server.port}?namespace=shop"
    async with opened(url) as store:
        durability = await store.durability()
        assert not durability.process_crash
        assert "unknown how often" in durability.summary
        assert "CONFIG GET" in durability.fixes[0]
        assert await store.findings()


async def a_whole_life(store: Store) -> None:
    """Every method once."""
    await store.add([job("a"), job("b"), job("c", due_ms=NOW + 60_000)])
    a, b = await claim(store)
    assert await store.extend([a, b], now_ms=NOW, lease_ms=LEASE)
    assert await store.cancel(["b", "c"], now_ms=NOW) == [
        CancelOutcome.REQUESTED,
        CancelOutcome.CANCELLED,
    ]
    assert await store.asked("ann", now_ms=NOW, until_ms=NOW) == {"b": "stop"}
    again = life.release(b, ended_ms=NOW)
    assert await store.settle([done(a), again], now_ms=NOW) == [True, True]
    assert await store.rerun(["b"], now_ms=NOW) == [True]
    await store.wait(["default"], now_ms=NOW, until_ms=NOW + 1000)
    [b] = await claim(store)
    assert await store.settle([life.park(b, ended_ms=NOW)], now_ms=NOW) == [True]
    assert [each.id for each in await store.parked()] == ["b"]
    await store.wait(["default"], now_ms=NOW, until_ms=NOW + 1000, tasks=["task"])
    [b] = await store.claim(
        ["default"], worker="ann", limit=9, now_ms=NOW, lease_ms=LEASE, tasks=["task"]
    )
    assert await store.settle([life.release(b, ended_ms=NOW)], now_ms=NOW) == [True]
    assert await store.delete(["a"]) == [True]
    assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=10) == 1
    stored = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
    assert await store.fire(stored, [job("tick")], next_ms=None)
    assert await store.schedules() and await store.delete_schedule("s")
    await store.put_records("key", {"a": "1"})
    assert await store.records("key") == [("a", "1")]
    assert await store.get_records("key", ["a"]) == ["1"]
    assert await store.delete_records("key", ["a"]) == [True]
    page = await store.find(Query(), limit=1)
    page = await store.find(Query(), limit=1, cursor=page.cursor)
    assert len(page.jobs) == 1
    await store.pause("default", True)
    await store.pause("default", False)
    assert [info.waiting for info in await store.queues()] == [2]
    assert await store.throttle("key", Rate(limit=1, period_ms=1000), now_ms=NOW) == 0
    assert await store.workers(now_ms=NOW) == []
    assert await store.time_ns() > 0


async def test_a_right_that_lacks_is_found_when_the_store_is_opened(server: RedisServer) -> None:
    server.command(*documented_rights(), "-zrem")
    url = f"redis://tickwheel:a-long-password@127.0.0.1:{server.port}?namespace=shop"
    with pytest.raises(StoreError, match="denies a permission"):
        await open_store(url).open()


# --- TLS


async def test_a_server_behind_tls_is_used_and_checked(server: RedisServer, tmp_path: Path) -> None:
    ca, cert, key = certificate(tmp_path / "right")
    other, _, _ = certificate(tmp_path / "other")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    async with Proxy(server.port, tls=context) as proxy:
        async with opened(f"rediss://127.0.0.1:{proxy.port}?ca={ca}") as store:
            await a_whole_life(store)
        for options in (f"?ca={other}", ""):
            with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
                await open_store(f"rediss://127.0.0.1:{proxy.port}{options}").open()


# --- What the script does for itself


async def test_the_bucket_in_the_script_is_that_of_the_pure_function(server: RedisServer) -> None:
    """Nanoseconds since the epoch don't fit into Lua's numbers: so compare to the last of them."""
    rates = [
        Rate(limit=limit, period_ms=period_ms, burst=burst)
        for limit in (1, 3, 7, 999_999_937)
        for period_ms in (1, 1000, 86_400_000)
        for burst in (1, 2, 1000)
    ]
    async with opened(server.url) as store:
        for n, rate in enumerate(rates):
            mark, now_ms = None, NOW
            for _ in range(12):
                mark, expected = admit(mark, rate, now_ms)
                assert await store.throttle(f"{n}", rate, now_ms=now_ms) == expected, rate
                now_ms += secrets.randbelow(2 * rate.period_ms // rate.limit + 2)


# Refuses to touch a key that the call didn't name, as some hosted servers do.
STRICT = """
local named = {}
for _, key in ipairs(KEYS) do named[key] = true end
local call = function(command, ...)
  for i, key in ipairs({...}) do
    if command ~= 'PUBLISH' and (i == 1 or command == 'EXISTS') and not named[key] then
      error(command .. ' on ' .. key .. ', which is not in KEYS')
    end
  end
  return redis.call(command, ...)
end
"""


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = wire.SCRIPT.replace("local call = redis.call\n", STRICT)
    assert strict != wire.SCRIPT
    monkeypatch.setattr(wire, "SCRIPT", strict)
    monkeypatch.setattr(wire, "SHA", hashlib.sha1(strict.encode()).hexdigest())


@pytest.mark.usefixtures("strict")
async def test_every_step_names_all_keys_that_it_touches(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await a_whole_life(store)
        # A cancel of what nobody holds any more, and a takeover of what was asked to stop.
        for queue in ("one", "two"):
            await store.add([job(f"{queue} {n}", queue=queue) for n in range(3)])
            held = await store.claim([queue], worker="bob", limit=2, now_ms=NOW, lease_ms=LEASE)
            await store.cancel([held[0].id, "unknown"], now_ms=NOW)
        late = NOW + LEASE + 1
        both = ["one", "two"]
        assert await store.cancel(["one 1"], now_ms=late) == [CancelOutcome.CANCELLED]
        assert len(await store.claim(both, worker="cid", limit=9, now_ms=late, lease_ms=1)) == 3
        assert await store.asked("bob", now_ms=NOW, until_ms=NOW) == {}
        await store.beat(worker("bob"))
        assert await store.rerun(["one 0", "two 0", "one 1"], now_ms=late) == [True] * 3
        assert await store.cancel(["one 0", "two 0"], now_ms=late)
        assert await store.delete(["one 0", "two 0"]) == [True, True]


@pytest.mark.usefixtures("strict")
async def test_a_job_that_moved_to_another_queue_meanwhile_is_found_there(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted and added again between the two looks of a cancel."""
    async with opened(server.url) as store, opened(server.url) as other:
        await store.add([job(), job("first")])
        step = Wire.step

        async def between(wire: Wire, name: str, *args: Any, **rest: Any) -> Any:
            answer = await step(wire, name, *args, **rest)
            if name == "places":
                monkeypatch.setattr(Wire, "step", step)
                await other.cancel(["job"], now_ms=NOW)
                await other.delete(["job"])
                await other.add([job(queue="elsewhere")])
            return answer

        monkeypatch.setattr(Wire, "step", between)
        assert await store.cancel(["first", "job"], now_ms=NOW) == [CancelOutcome.CANCELLED] * 2
        counts = {info.name: (info.waiting, info.cancelled) for info in await store.queues()}
        assert counts == {"default": (0, 1), "elsewhere": (0, 1)}


# --- Many queues


def work_of(server: RedisServer) -> tuple[int, int]:
    """How many commands ran, and how many of them were scripts or came from outside of them."""
    lines = server.command("INFO", "commandstats").decode().split("\r\n")
    calls = {
        line.partition(":")[0]: int(line.partition("calls=")[2].partition(",")[0])
        for line in lines
        if line.startswith("cmdstat_")
    }
    return sum(calls.values()), calls["cmdstat_evalsha"]


async def test_no_step_goes_through_all_of_many_queues_at_once(server: RedisServer) -> None:
    """A script holds the server up: what grows with the number of queues is done in portions."""
    async with opened(server.url) as store:
        names = [f"queue {n:04}" for n in range(1050)]
        await store.add([job(name, queue=name) for name in names])
        await store.cancel(names[::2], now_ms=NOW)
        await store.pause("empty", True)
        for step in (
            store.queues,
            lambda: store.find(Query(task="another")),
            lambda: store.find(Query(state=State.DEAD)),
            lambda: store.prune([State.DEAD, State.DONE], before_ms=NOW + 1, limit=1000),
        ):
            server.command("CONFIG", "RESETSTAT")
            await step()
            commands, scripts = work_of(server)
            assert scripts > 10 and commands / scripts < 1500
        infos = await store.queues()
        assert [info.name for info in infos] == ["empty", *names]
        assert [(info.waiting, info.cancelled) for info in infos[1:]] == [(0, 1), (1, 0)] * 525
        assert infos[0].paused


async def test_pages_go_through_all_of_many_queues(server: RedisServer) -> None:
    async with opened(server.url) as store:
        names = [f"queue {n:03}" for n in range(250)]
        await store.add([job(f"{n} {name}", queue=name) for name in names for n in range(3)])
        await store.cancel([f"1 {name}" for name in names], now_ms=NOW)
        waiting = [f"{n} {name}" for name in names for n in (0, 2)]
        for limit in (7, 100, 1000):
            seen: list[tuple[str, str]] = []
            cursor: str | None = None
            while True:
                page = await store.find(Query(), cursor=cursor, limit=limit)
                seen += [(each.state, each.id) for each in page.jobs]
                cursor = page.cursor
                if cursor is None:
                    break
                assert len(page.jobs) == limit
            assert seen == [("waiting", id) for id in waiting] + [
                ("cancelled", f"1 {name}") for name in names
            ]
        assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=120) == 120
        assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=1000) == 130
        assert await store.cancel(waiting, now_ms=NOW)
        assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=1000) == 500
        assert await store.queues() == []


async def test_queues_of_an_older_layout_are_found(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job(queue="old")])
    server.command("DEL", "tw:{default}:names")
    server.command("SADD", "tw:{default}:queues", "old")
    server.command("SADD", "tw:{default}:paused", "still")
    server.command("SET", "tw:{default}:schema", "1")
    for _ in range(2):
        async with opened(server.url) as store:
            found = [(info.name, info.waiting) for info in await store.queues()]
            assert found == [("old", 1), ("still", 0)]
    assert server.command("EXISTS", "tw:{default}:queues") == b":0\r\n"


async def test_large_jobs_are_handed_out_and_paged_a_few_at_a_time(server: RedisServer) -> None:
    async with opened(server.url) as store:
        ids = [f"{n:02}" for n in range(40)]
        await store.add([job(id, payload="x" * 1024 * 1024) for id in ids])
        paged: list[str] = []
        cursor: str | None = None
        while True:
            page = await store.find(Query(), cursor=cursor, limit=40)
            assert 0 < len(page.jobs) < 25
            paged += [each.id for each in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(paged) == ids
        claimed: list[str] = []
        while held := await claim(store, 40):
            assert len(held) < 25
            claimed += [each.id for each in held]
        assert claimed == ids


async def test_ended_jobs_are_paged_on_although_the_last_one_seen_is_gone(
    server: RedisServer,
) -> None:
    """They are paged backwards, and many of them ended in the same moment."""
    async with opened(server.url) as store:
        ids = [f"{n:02}" for n in range(30)]
        await store.add([job(id) for id in ids])
        await store.cancel(ids[:10], now_ms=NOW)
        await store.cancel(ids[10:], now_ms=NOW + 1)
        seen: list[str] = []
        cursor: str | None = None
        for n in range(100):
            page = await store.find(Query(state=State.CANCELLED), cursor=cursor, limit=4)
            seen += [each.id for each in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
            if n % 2:
                await store.delete(seen[-2:])
        assert sorted(seen) == ids
        assert set(seen[:20]) == set(ids[10:])


async def test_cancels_and_reruns_in_turn_leave_few_lines(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job()])
        for n in range(50):
            await store.cancel(["job"], now_ms=NOW + n)
            await store.rerun(["job"], now_ms=NOW + n)
        assert server.command("HSTRLEN", "tw:{default}:since", "job") == b":15\r\n"
        [found] = await store.get(["job"])
        assert found is not None
        assert (found.state, found.due_ms) == (State.WAITING, NOW + 49)


async def test_an_id_without_its_job_holds_up_no_others(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job("a"), job("b")])
        server.command("HDEL", "tw:{default}:job", "a")
        assert [held.id for held in await claim(store)] == ["b"]
        assert [info.waiting for info in await store.queues()] == [0]


# --- What the store says of itself


@pytest.mark.parametrize(
    ("aof", "fsync", "save", "safe", "words"),
    [
        ("1", "always", "", True, "every write"),
        ("1", "everysec", "", False, "lose the last second"),
        ("1", "no", "", False, "half a minute"),
        ("1", None, None, False, "unknown how often"),
        ("0", "everysec", "3600 1", False, "since the last one"),
        ("0", None, None, False, "since the last snapshot"),
        ("0", "everysec", "", False, "loses all jobs"),
    ],
)
def test_durability_says_what_a_crash_loses(
    aof: str, fsync: str | None, save: str | None, safe: bool, words: str
) -> None:
    found = durability_of({"aof_enabled": aof, "redis_version": "7.2.0"}, fsync, save)
    assert (found.process_crash, found.power_loss, found.machine_loss) == (safe, safe, False)
    assert words in found.summary
    assert found.window_ms == (1000 if (aof, fsync) == ("1", "everysec") else None)
    assert len(found.fixes) == (1 if safe else 2)


NON_LOCAL = "Error running script: Script attempted to access a non local key in a cluster node"


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (errors.ReadOnlyError("You can't write against a replica"), StoreUnavailable, "READONLY"),
        (errors.ResponseError("@user_script: -READONLY You can't"), StoreUnavailable, "READONLY"),
        (errors.OutOfMemoryError("command not allowed"), StoreUnavailable, "raise maxmemory"),
        (errors.ResponseError("MISCONF Redis is configured"), StoreUnavailable, "its disk"),
        (errors.ResponseError("NOREPLICAS Not enough"), StoreUnavailable, "replicas"),
        (errors.BusyLoadingError("Redis is loading"), StoreUnavailable, "loading its data"),
        (errors.ClusterDownError("Hash slot not served"), StoreUnavailable, "CLUSTERDOWN"),
        (errors.ResponseError("@user_script: CLUSTERDOWN"), StoreUnavailable, "CLUSTERDOWN"),
        (errors.TryAgainError("Multiple keys request"), StoreUnavailable, "being moved"),
        (errors.ResponseError(NON_LOCAL), StoreUnavailable, "being moved"),
        (errors.ConnectionError("Error 111, s3cret"), StoreUnavailable, "can't be reached"),
        (errors.TimeoutError("Timeout reading"), StoreUnavailable, "not answer within 10 s"),
        (TimeoutError(), StoreUnavailable, "not answer within 10 s"),
        (errors.AuthenticationError("invalid password"), StoreError, "user and password"),
        (errors.NoPermissionError("no permissions"), StoreError, "docs/redis.md"),
        (errors.ResponseError("WRONGTYPE Operation"), StoreError, "WRONGTYPE"),
    ],
)
def test_each_error_says_what_to_do_and_never_the_password(
    error: Exception, kind: type[StoreError], words: str
) -> None:
    failure = translated(error, RedisOptions.of("redis://ann:s3cret@host"))
    assert type(failure) is kind
    assert words in str(failure) and "host:6379" in str(failure)
    assert "s3cret" not in str(failure)


def test_dropped_keys_and_little_memory_are_bad_news() -> None:
    assert of_memory({"used_memory": "10", "evicted_keys": "1"}).level is Level.BAD
    assert of_memory({"used_memory": "90", "maxmemory": "100"}).level is Level.BAD
    assert of_memory({"used_memory": "10", "maxmemory": "100"}).level is Level.OK


def test_a_driver_that_lacks_is_named() -> None:
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from tickwheel.store import open_store\n"
        "open_store('redis://localhost')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "BadConfig" in run.stderr
    assert "pip install 'tickwheel[redis]'" in run.stderr


async def test_connecting_causes_no_error_on_the_server(server: RedisServer) -> None:
    """An older one refuses CLIENT SETINFO, and its refusal could be taken for another answer."""
    async with opened(server.url) as store:
        await store.queues()
    assert b"errorstat_ERR" not in server.command("INFO", "errorstats")


FORKING = """
import gc, os, sys, time
from tickwheel import App

app = App(sys.argv[1])

@app.task
def f(n: int) -> None: ...

f.enqueue_sync(1)
for n in range(3):
    child = os.fork()
    if not child:
        f.enqueue_sync(10 + n)
        gc.collect()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    start = time.monotonic()
    f.enqueue_sync(2 + n)
    assert time.monotonic() - start < 5, "the parent no longer read its own connection"
print(sum(queue.waiting for queue in app.sync.queues()))
"""


def test_a_forked_child_leaves_its_parents_connection_alone(server: RedisServer) -> None:
    url = f"{server.url}?namespace=forking"
    command = [sys.executable, "-c", FORKING, url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (said.returncode, said.stdout, said.stderr) == (0, "7\n", "")
