"""Three NATS nodes with replicas, whose leader is killed, frozen and cut off under load.

Goal: what was acknowledged survives any one node, and each step happens once, whoever leads.
Method: the shop of `nats_books`, trouble for the node that leads the stream, and a judgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats_books import Books, Words, now_ms
from nats_partition import NODES, partitioned
from processes import running_shop

from freezing import freeze, thaw
from tickwheel import App, State, Task
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.job import CancelOutcome
from tickwheel.store import Store, open_store
from tickwheel.stores.nats import stream as nats_stream, wire as nats_wire
from tickwheel.stores.nats.servers.cluster import Cluster, start_cluster
from tickwheel.stores.nats.servers.process import Server
from tickwheel.stores.nats.store import NatsStore

# Waits are long: a busy machine takes its time to choose leaders.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SOON_S = 90.0
# Hand-outs go on within this, however long a node that was away needs to catch up.
SOON_MS = 8_000


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that stand still are noticed sooner, so that a test shows many of them."""
    monkeypatch.setattr(nats_wire, "ANSWER_S", 2.0)
    monkeypatch.setattr(nats_wire, "PING_S", 1.0)
    monkeypatch.setattr(nats_stream, "ACK_WAIT_S", 3)


@contextlib.asynccontextmanager
async def three(folder: Path) -> AsyncIterator[Cluster]:
    nodes = await start_cluster(folder, durability="fast")
    try:
        yield nodes
    finally:
        for node in nodes.nodes:
            with contextlib.suppress(ProcessLookupError):
                thaw(node.pid)
        await nodes.stop()


@contextlib.asynccontextmanager
async def handles(url: str, count: int) -> AsyncIterator[list[Store]]:
    async with contextlib.AsyncExitStack() as stack:
        stores: list[Store] = []
        for _ in range(count):
            store = await opened(url)
            stack.push_async_callback(store.close)
            stores.append(store)
        yield stores


async def opened(url: str) -> Store:
    """A cluster that has just begun may need a moment for its first stream."""
    async with asyncio.timeout(SOON_S):
        while True:
            store = open_store(url)
            try:
                await store.open()
                return store
            except StoreError:
                await asyncio.sleep(0.2)


async def leader(store: Store) -> str:
    """The name of the node that leads the stream."""
    assert isinstance(store, NatsStore)
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                about = (await store._first.stream.info())["cluster"]
                if about.get("leader"):
                    name: str = about["leader"]
                    return name
            await asyncio.sleep(0.1)


async def whole(store: Store) -> None:
    """Wait until every replica is up to date: the next node may only then be taken away."""
    assert isinstance(store, NatsStore)
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                about = (await store._first.stream.info())["cluster"]
                peers = about.get("replicas") or []
                if len(peers) == 2 and all(
                    each.get("current") and not each.get("offline") for each in peers
                ):
                    return
            await asyncio.sleep(0.1)


async def let_lead(store: Store, consumer: str, server: str) -> None:
    """Let a server lead a consumer, if the others agree on it soon."""
    assert isinstance(store, NatsStore)
    stream = store._first.stream
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(15):
            while True:
                with contextlib.suppress(StoreError):
                    about = await stream.consumer(consumer)
                    if about is not None and about["cluster"].get("leader") == server:
                        return
                    wish = {"placement": {"preferred": server}}
                    await stream.api(f"CONSUMER.LEADER.STEPDOWN.{stream._name}.{consumer}", wish)
                await asyncio.sleep(0.2)


def named(nodes: Cluster, name: str) -> Server:
    [node] = [node for node in nodes.nodes if node.name == name]
    return node


# --- Under load


async def killed(node: Server, dice: random.Random) -> None:
    await node.kill()
    await asyncio.sleep(dice.uniform(0.5, 2))
    await node.start()


async def frozen(node: Server, dice: random.Random) -> None:
    """Long enough that the others choose another leader."""
    freeze(node.pid)
    await asyncio.sleep(dice.uniform(5, 7))
    thaw(node.pid)


@pytest.mark.parametrize(("fault", "times"), [(killed, 3), (frozen, 1)])
async def test_the_leader_is_lost_again_and_again(
    tmp_path: Path, fault: Callable[[Server, random.Random], Awaitable[None]], times: int
) -> None:
    dice = random.Random(3)
    books = Books(dice)
    async with three(tmp_path) as nodes, handles(f"{nodes.url}/ns?replicas=3", 6) as stores:
        struck: list[str] = []

        async def trouble() -> None:
            for _ in range(times):
                await asyncio.sleep(dice.uniform(0.5, 1))
                name = await leader(stores[0])
                await fault(named(nodes, name), dice)
                await whole(stores[0])
                struck.append(name)

        await books.day(stores, trouble)
        await books.judge(stores[0])
    assert len(struck) == times


async def test_the_leader_is_cut_off_with_its_clients(tmp_path: Path) -> None:
    """It goes on answering those who reach it alone: nothing that it says may be believed unless
    the others agreed."""
    dice = random.Random(4)
    books = Books(dice)
    async with partitioned(tmp_path) as nodes:
        url = f"{nodes.url()}/ns?replicas=3"
        async with handles(url, 2) as others, contextlib.AsyncExitStack() as stack:
            # Each node has clients of its own that know no other one.
            stores = list(others)
            for name in NODES:
                mine = await stack.enter_async_context(
                    handles(f"{nodes.url(name)}/ns?replicas=3", 1)
                )
                stores += mine

            async def trouble() -> None:
                await asyncio.sleep(1)
                name = await leader(stores[0])
                nodes.cut_off(name)
                await asyncio.sleep(7)
                nodes.rejoin(name)
                # It is behind, and may still be chosen to hand out jobs: here it is.
                await let_lead(stores[0], "default-r1", name)
                led_ms.append(now_ms())
                await asyncio.sleep(SOON_MS / 1000 + 2)

            led_ms: list[int] = []
            await books.day(stores, trouble)
            await books.judge(stores[0])
            pause_ms = books.longest_pause_ms(led_ms[0], priority=1)
            assert pause_ms < SOON_MS, f"nothing was handed out for {pause_ms} ms"


# --- Races, where the leader checks what is still on its way to the others


async def test_steps_on_one_job_from_three_nodes_agree(tmp_path: Path) -> None:
    nats = Words()
    async with three(tmp_path) as nodes, handles(f"{nodes.url}/ns?replicas=3", 3) as stores:
        for n in range(100):
            job = nats.job(f"{n}")
            answers = await asyncio.gather(*(store.add([job]) for store in stores))
            assert sum(added for [added] in answers) == 1
            held, [first], [second] = await asyncio.gather(
                nats.claim(store=stores[0]),
                stores[1].cancel([job.id], now_ms=nats.now),
                stores[2].cancel([job.id], now_ms=nats.now),
            )
            if held:
                assert {first, second} == {CancelOutcome.REQUESTED}
                settled = await asyncio.gather(
                    *(store.settle([nats.done(held[0])], now_ms=nats.now) for store in stores)
                )
                assert settled == [[True]] * 3
            else:
                assert sorted([first, second]) == [CancelOutcome.CANCELLED, CancelOutcome.TOO_LATE]
        assert await nats.claim(store=stores[0]) == []
        [queue] = await stores[0].queues()
        assert (queue.done + queue.cancelled, queue.waiting, queue.running) == (100, 0, 0)


async def test_rerun_prune_and_delete_work_with_replicas(tmp_path: Path) -> None:
    nats = Words()
    async with three(tmp_path) as nodes, handles(f"{nodes.url}/ns?replicas=3", 2) as stores:
        one, other = stores
        ids = [f"{n}" for n in range(40)]
        assert all(await one.add([nats.job(id, delay_ms=3_600_000) for id in ids]))
        answers = await other.cancel(ids, now_ms=nats.now)
        assert set(answers) == {CancelOutcome.CANCELLED}
        reran = await asyncio.gather(
            one.rerun(ids, now_ms=nats.now), other.rerun(ids, now_ms=nats.now)
        )
        assert [a + b for a, b in zip(*reran, strict=True)] == [1] * 40
        held = await nats.claim(40, store=one)
        assert sorted(job.id for job in held) == sorted(ids)
        assert all(await other.settle([nats.done(job) for job in held], now_ms=nats.now))
        assert await other.delete(ids[:20]) == [True] * 20
        assert await one.prune([State.DONE], before_ms=nats.now + 1_000, limit=100) == 20
        assert await other.queues() == []


# --- Settings of a stream that others rely on


async def test_a_handle_that_asks_for_fewer_replicas_takes_none_away(tmp_path: Path) -> None:
    """A dashboard with a shorter URL must not make everybody's jobs less safe."""
    async with (
        three(tmp_path) as nodes,
        handles(f"{nodes.url}/ns?replicas=3", 1),
        handles(f"{nodes.url}/ns", 1) as [plain],
    ):
        assert isinstance(plain, NatsStore)
        assert (await plain._first.stream.info())["config"]["num_replicas"] == 3
        assert (await plain.durability()).machine_loss


# --- Workers in processes of their own


async def test_a_worker_says_once_that_the_store_is_away_and_once_that_it_is_back(
    tmp_path: Path,
) -> None:
    with running_shop(tmp_path) as shop:
        async with three(tmp_path / "nodes") as nodes:
            url = f"{nodes.url}/ns?replicas=3"
            shop.env["TICKWHEEL_STORE"] = url
            async with handles(url, 1) as [store]:
                app = App(url)

                @app.task
                async def work(seconds: float) -> int: ...  # type: ignore[empty-body]

                async with app:
                    await app.enqueue_many([work.job(0.0) for _ in range(20)])
                    workers = [shop.worker(), shop.worker()]
                    await until(lambda: len(shop.events("end")) == 20, "work")
                    # Nobody leads with two of three gone: the store is unreachable for everybody.
                    gone = nodes.nodes[:2]
                    for node in gone:
                        await node.kill()
                    await until(
                        lambda: all("calls to the store fail" in each.log for each in workers),
                        "away",
                    )
                    for node in gone:
                        await node.start()
                    await until(
                        lambda: all("calls to the store succeed" in each.log for each in workers),
                        "back",
                    )
                    await whole(store)
                    await enqueue_at_last(app, 20)
                    await until(lambda: len(shop.events("end")) >= 40, "work again")
                await asyncio.sleep(3)
            for each in workers:
                assert not each.died(), each.log
                assert each.log.count("calls to the store fail") == 1, each.log
                assert each.log.count("calls to the store succeed") == 1, each.log
        ids = [event.id for event in shop.events("end")]
        assert len(ids) == len(set(ids)) == 40


async def enqueue_at_last(app: App, count: int) -> None:
    call: Task[[float], Any, Any] = Task(app._access, app.tasks.get("work"))
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(StoreUnavailable):
                await app.enqueue_many([call.using(id=f"again-{n}").job(0.0) for n in range(count)])
                return
            await asyncio.sleep(0.2)


async def until(happened: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(SOON_S):
            while not happened():
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {SOON_S} s: {what}") from None


# --- Records


async def test_records_survive_the_leader_and_what_was_deleted_stays_so(tmp_path: Path) -> None:
    async with three(tmp_path) as nodes, handles(f"{nodes.url}/ns?replicas=3", 2) as (here, there):
        await here.put_records("key", {f"{n:04}-{n % 7}": str(n) for n in range(300)})
        gone = [f"{n:04}-{n % 7}" for n in range(0, 300, 2)]
        # Whoever asks next sees it, whichever replica is behind.
        assert await here.delete_records("key", gone) == [True] * len(gone)
        assert await there.get_records("key", gone) == [None] * len(gone)
        left = [(f"{n:04}-{n % 7}", str(n)) for n in range(1, 300, 2)]
        assert await there.records("key", limit=200) == left
        await whole(here)
        name = await leader(here)
        [node] = [each for each in nodes.nodes if each.name == name]
        await node.kill()
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    assert await there.records("key", limit=200) == left
                    break
                await asyncio.sleep(0.2)
