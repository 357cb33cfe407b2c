"""Redis at its worst: servers that die, freeze, fill up or change role; connections that are cut or
go silent; replies that are lost after the server acted."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from certificates import certificate
from redis_server import RedisServer
from tickwheel import App
from tickwheel import job as life
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable
from tickwheel.job import Cancelled, Job, State
from tickwheel.schedule import Schedule
from tickwheel.store import Level, Query, Store, open_store
from tickwheel.stores.redis.health import durability_of, of_memory
from tickwheel.stores.redis.options import Options
from tickwheel.stores.redis.wire import translated, wrong
from tickwheel.throttle import Rate, admit

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
            with pytest.raises(StoreUnavailable, match=r"gave no answer within 0\.5 s"):
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


async def repeated(proxy: Proxy, step: Callable[[], Awaitable[object]]) -> object:
    """The answer to the repeat of a step whose first answer was lost."""
    proxy.lose_replies_to = b"\r\n"
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
        assert await repeated(proxy, step) == [Cancelled.TOO_LATE]
        assert [info.cancelled for info in await store.queues()] == [1]


async def test_a_fire_whose_reply_was_lost_happened_once(server: RedisServer) -> None:
    async with losing_replies(server) as (store, proxy):
        stored = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
        step = lambda: store.fire(stored, [job()], next_ms=NOW + 1)  # noqa: E731
        assert await repeated(proxy, step) is False
        [schedule] = await store.schedules()
        assert (schedule.next_ms, schedule.last_id) == (NOW + 1, "job")
        assert [info.waiting for info in await store.queues()] == [1]


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


# --- News


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only news end a wait."""
    monkeypatch.setattr("tickwheel.stores.redis.store.POLL_S", 600)


@pytest.fixture
def no_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was lost stays lost: only looking now and then ends a wait."""
    monkeypatch.setattr("tickwheel.stores.redis.news.AGAIN_S", 600)


async def ends_soon(waiting: asyncio.Task[None], step: Awaitable[object]) -> None:
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await step
    async with asyncio.timeout(SOON_S):
        await waiting


def waits(store: Store) -> asyncio.Task[None]:
    return asyncio.create_task(store.wait(["default"], now_ms=NOW, until_ms=NOW + 600_000))


@pytest.mark.usefixtures("no_poll")
async def test_news_alone_end_every_wait(server: RedisServer) -> None:
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
async def test_news_alone_tell_of_a_cancel(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        await store.add([job()])
        await claim(store)
        asking = asyncio.create_task(store.asked("ann", now_ms=NOW, until_ms=NOW + 600_000))
        await asyncio.sleep(0.2)
        await other.cancel(["job"], now_ms=NOW)
        async with asyncio.timeout(SOON_S):
            assert await asking == ["job"]


@pytest.mark.usefixtures("no_poll")
async def test_a_wait_is_told_of_what_it_missed_once_it_is_connected_again(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store, opened(server.url) as other:

        async def missed() -> None:
            assert server.command("CLIENT", "KILL", "TYPE", "pubsub").startswith(b":1")
            await other.add([job()])

        await ends_soon(waits(store), missed())


@pytest.mark.usefixtures("no_news")
async def test_a_wait_looks_for_itself_while_there_are_no_news(server: RedisServer) -> None:
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
            assert await asking == ["job"]


async def test_after_a_restart_waits_hear_news_again(server: RedisServer) -> None:
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


async def test_a_full_server_refuses_jobs_whole_and_can_be_pruned(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job(f"old {n}") for n in range(10)])
        await store.settle([done(held) for held in await claim(store)], now_ms=NOW)
        await store.add([job("held")])
        [held] = await claim(store)
        server.command("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(StoreUnavailable, match=r"OOM.*maxmemory"):
            await store.add([job("new")])
        with pytest.raises(StoreUnavailable, match="OOM"):
            await store.settle([done(held)], now_ms=NOW)
        assert (await store.get(["new"])) == [None]
        assert [found and found.state for found in await store.get(["held"])] == [State.RUNNING]
        # Making room is still possible.
        assert await store.prune([State.DONE], before_ms=NOW + 1, limit=100) == 10
        server.command("CONFIG", "SET", "maxmemory", "0")
        assert await store.settle([done(held)], now_ms=NOW) == [True]


async def test_a_server_that_may_drop_jobs_is_refused(tmp_path: Path) -> None:
    for server in running(tmp_path, maxmemory="100mb", maxmemory_policy="allkeys-lru"):
        store = open_store(server.url)
        with pytest.raises(StoreIncompatible, match="noeviction"):
            await store.open()
        async with opened(f"{server.url}?eviction=allowed") as store:
            memory = {each.about: each for each in await store.findings()}["memory"]
            assert (memory.level, "noeviction" in memory.fix) == (Level.BAD, True)


async def test_jobs_of_a_newer_release_are_refused(server: RedisServer) -> None:
    server.command("SET", "tw:{default}:schema", "2")
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
        assert "nobody says" in durability.summary
        assert "CONFIG GET" in durability.fixes[0]
        assert await store.findings()


async def a_whole_life(store: Store) -> None:
    """Every method once."""
    await store.add([job("a"), job("b"), job("c", due_ms=NOW + 60_000)])
    a, b = await claim(store)
    assert await store.extend([a, b], now_ms=NOW, lease_ms=LEASE)
    assert await store.cancel(["b", "c"], now_ms=NOW) == [Cancelled.ASKED, Cancelled.CANCELLED]
    assert await store.asked("ann", now_ms=NOW, until_ms=NOW) == ["b"]
    again = life.release(b, ended_ms=NOW)
    assert await store.settle([done(a), again], now_ms=NOW) == [True, True]
    assert await store.rerun(["b"], now_ms=NOW) == [True]
    await store.wait(["default"], now_ms=NOW, until_ms=NOW + 1000)
    assert await store.delete(["a"]) == [True]
    assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=10) == 1
    stored = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
    assert await store.fire(stored, [job("tick")], next_ms=None)
    assert await store.schedules() and await store.delete_schedule("s")
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
    with pytest.raises(StoreError, match="forbids"):
        await open_store(url).open()


# --- Cluster and TLS

# As the docs say, beside the rights that every server needs.
CLUSTER_RIGHTS = ("+cluster|slots", "+command")


async def test_a_cluster_serves_namespaces_on_any_of_its_nodes(tmp_path: Path) -> None:
    nodes = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        nodes.append(RedisServer(tmp_path / name, cluster_enabled="yes").start())
    try:
        for node, slots in zip(nodes, (range(8192), range(8192, 16384)), strict=True):
            assert node.command("CLUSTER", "ADDSLOTS", *map(str, slots)).startswith(b"+OK")
        nodes[0].command("CLUSTER", "MEET", "127.0.0.1", str(nodes[1].port))
        async with asyncio.timeout(SOON_S):
            while not all(b"cluster_state:ok" in each.command("CLUSTER", "INFO") for each in nodes):
                await asyncio.sleep(0.1)
        homes = set()
        for namespace in ("one", "two", "three", "four", "five"):
            rights = [word.replace("shop", namespace) for word in documented_rights()]
            for node in nodes:
                assert node.command(*rights, *CLUSTER_RIGHTS).startswith(b"+OK")
            at = f"tickwheel:a-long-password@127.0.0.1:{nodes[0].port}"
            async with opened(f"redis://{at}?cluster=true&namespace={namespace}") as store:
                await a_whole_life(store)
                assert await store.findings()
                assert (await store.durability()).fixes
            [home] = [
                each.port
                for each in nodes
                if each.command("EXISTS", f"tw:{{{namespace}}}:schema") == b":1\r\n"
            ]
            homes.add(home)
        assert len(homes) == 2
    finally:
        for node in nodes:
            node.stop()


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
        ("1", None, None, False, "nobody says"),
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
    assert len(found.fixes) == (1 if safe else 2)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (wrong.ReadOnlyError("You can't write against a replica"), StoreUnavailable, "READONLY"),
        (wrong.ResponseError("@user_script: -READONLY You can't"), StoreUnavailable, "READONLY"),
        (wrong.OutOfMemoryError("command not allowed"), StoreUnavailable, "raise maxmemory"),
        (wrong.ResponseError("MISCONF Redis is configured"), StoreUnavailable, "its disk"),
        (wrong.ResponseError("NOREPLICAS Not enough"), StoreUnavailable, "replicas"),
        (wrong.BusyLoadingError("Redis is loading"), StoreUnavailable, "reading its data"),
        (wrong.ClusterDownError("CLUSTERDOWN"), StoreUnavailable, "CLUSTERDOWN"),
        (wrong.ConnectionError("Error 111, s3cret"), StoreUnavailable, "can't be reached"),
        (wrong.TimeoutError("Timeout reading"), StoreUnavailable, "no answer within 10 s"),
        (TimeoutError(), StoreUnavailable, "no answer within 10 s"),
        (wrong.AuthenticationError("invalid password"), StoreError, "user and password"),
        (wrong.NoPermissionError("no permissions"), StoreError, "docs/redis.md"),
        (wrong.ResponseError("WRONGTYPE Operation"), StoreError, "WRONGTYPE"),
    ],
)
def test_each_error_says_what_to_do_and_never_the_password(
    error: Exception, kind: type[StoreError], words: str
) -> None:
    failure = translated(error, Options.of("redis://ann:s3cret@host"))
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
