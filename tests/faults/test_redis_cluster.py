"""Redis Cluster while slots move from node to node: every step happens whole or not at all."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from processes import LEASE_S, Shop, running_shop, wait_until
from redis.crc import key_slot
from test_redis import (
    LEASE,
    NOW,
    SOON_S,
    a_whole_life,
    claim,
    documented_rights,
    done,
    job,
    opened,
    until_it_answers,
    worker,
)

from redis_server import RedisCluster, RedisServer, cli, id_of
from tickwheel import App, StoreUnavailable, job as life
from tickwheel.job import State
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import Query, Store
from tickwheel.stores.redis import cluster as followed, notify
from tickwheel.stores.redis.keys import FIXED

pytestmark = pytest.mark.slow

# As the docs say, beside the rights that every server needs.
CLUSTER_RIGHTS = ("+cluster|slots", "+asking")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[RedisCluster]:
    yield from running(tmp_path, 2)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[RedisCluster]:
    yield from running(tmp_path, 3)


def running(folder: Path, count: int, **settings: str) -> Iterator[RedisCluster]:
    cluster = RedisCluster(folder, count, **settings)
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that meets a moving slot says so at once; and no key expires meanwhile."""
    monkeypatch.setattr(followed, "PATIENCE_S", 0)
    monkeypatch.setattr(notify, "NOTED_S", 3600)


async def test_a_cluster_serves_namespaces_on_any_of_its_nodes(two: RedisCluster) -> None:
    homes = set()
    for namespace in ("one", "two", "three", "four", "five"):
        rights = [word.replace("shop", namespace) for word in documented_rights()]
        for node in two.nodes:
            assert node.command(*rights, *CLUSTER_RIGHTS).startswith(b"+OK")
        at = f"tickwheel:a-long-password@127.0.0.1:{two.nodes[0].port}"
        async with opened(f"redis://{at}?cluster=true&namespace={namespace}") as store:
            await a_whole_life(store)
            assert await store.findings()
            assert (await store.durability()).fixes
        homes.add(two.home_of(f"tw:{{{namespace}}}:schema").port)
    assert len(homes) == 2


async def test_a_node_of_a_cluster_is_not_taken_for_a_server_of_its_own(two: RedisCluster) -> None:
    async with opened(two.url):
        pass
    # One of them has the keys now: they may move.
    for node in two.nodes:
        with pytest.raises(Exception, match="cluster=true") as failure:
            async with opened(node.url):
                pass
        assert not isinstance(failure.value, StoreUnavailable)


async def test_a_replica_that_takes_over_is_found_although_the_node_in_the_url_is_gone(
    tmp_path: Path,
) -> None:
    for cluster in running(tmp_path, 3, cluster_node_timeout="1000"):
        async with opened(cluster.url):
            home = cluster.home_of("tw:{default}:schema")
        cluster.add_replica(home)
        async with opened(f"{home.url}?cluster=true&timeout=2s") as store:
            await store.add([job()])
            assert home.command("WAIT", "1", "5000") == b":1\r\n"
            home.kill()
            await until_it_answers(lambda: store.add([job("new")]))
            assert [info.waiting for info in await store.queues()] == [2]
            # What was the primary comes back as a replica.
            home.start()
            assert len(await claim(store)) == 2


# --- A slot that moves


async def a_store_with_everything(
    store: Store, cluster: RedisCluster
) -> dict[str, Callable[[], Awaitable[object]]]:
    """Something in every key that all steps name; answers with each step on several keys."""
    await store.add([job(id) for id in ("done", "held", "asked", "parked", "known")])
    held = {each.id: each for each in await claim(store, 5)}
    parked = [life.park(held[id], ended_ms=NOW) for id in ("parked", "known")]
    await store.settle([done(held["done"]), *parked], now_ms=NOW)
    await store.cancel(["asked"], now_ms=NOW)
    await store.add([job("waiting"), job("elsewhere", queue="other"), job("cancelled")])
    await store.cancel(["cancelled"], now_ms=NOW)
    await store.pause("other", True)
    schedule = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
    await store.put_records("key", {"a": "1"})
    await store.beat(worker("ann"))
    await somebody_waits(store, cluster)
    rate = Rate(limit=1, period_ms=1000)
    await store.throttle("key", rate, now_ms=NOW)
    return {
        "add": lambda: store.add([job("new", queue="new"), job("newer")]),
        "claim": lambda: claim(store),
        "claim what is parked": lambda: store.claim(
            ["default"], worker="bob", limit=1, now_ms=NOW, lease_ms=LEASE, tasks=["task"]
        ),
        "take over": lambda: store.claim(
            ["default"], worker="bob", limit=9, now_ms=NOW + LEASE, lease_ms=LEASE
        ),
        "wait": lambda: store.wait(["default"], now_ms=NOW, until_ms=NOW + 50),
        "extend": lambda: store.extend([held["held"]], now_ms=NOW, lease_ms=LEASE + 1),
        "settle": lambda: store.settle([done(held["held"])], now_ms=NOW),
        "park": lambda: store.settle([life.park(held["held"], ended_ms=NOW)], now_ms=NOW),
        "cancel": lambda: store.cancel(["waiting", "held"], now_ms=NOW),
        "cancel what is parked": lambda: store.cancel(["parked"], now_ms=NOW),
        "rerun": lambda: store.rerun(["cancelled"], now_ms=NOW),
        "delete": lambda: store.delete(["done"]),
        "fire": lambda: store.fire(schedule, [job("tick")], next_ms=NOW + 1),
        "put a schedule": lambda: store.put_schedule(Schedule(name="t", rule="{}", next_ms=NOW)),
        "put records": lambda: store.put_records("key", {"b": "2"}),
        "records": lambda: store.records("key"),
        "delete records": lambda: store.delete_records("key", ["a"]),
        "pause": lambda: store.pause("default", True),
        "throttle": lambda: store.throttle("key", rate, now_ms=NOW + 2000),
        "beat": lambda: store.beat(worker("bob")),
        "get": lambda: store.get(["waiting"]),
        "parked": store.parked,
    }


async def somebody_waits(store: Store, cluster: RedisCluster) -> None:
    home = cluster.home_of("tw:{default}:job")
    waiting = asyncio.create_task(store.wait(["idle"], now_ms=NOW, until_ms=NOW + 600_000))
    watching = asyncio.create_task(
        store.watch_ended(["done"], lambda ids: None, now_ms=NOW, until_ms=NOW + 600_000)
    )
    async with asyncio.timeout(SOON_S):
        for name in ("sleep", "watched"):
            while home.command("EXISTS", f"tw:{{default}}:{name}") != b":1\r\n":
                await asyncio.sleep(0.02)
    waiting.cancel()
    watching.cancel()
    await asyncio.wait([waiting, watching])


async def all_of(store: Store) -> object:
    ids = [
        *("done", "held", "asked", "waiting", "elsewhere", "cancelled", "new", "newer", "tick"),
        *("parked", "known"),
    ]
    workers = await store.workers(now_ms=NOW)
    records = await store.get_records("key", ["a", "b"])
    return await store.get(ids), await store.queues(), await store.schedules(), records, workers


@pytest.mark.usefixtures("no_patience")
async def test_no_step_begins_on_a_slot_of_which_some_keys_have_moved(two: RedisCluster) -> None:
    """Whichever of its keys are here and which there."""
    async with opened(two.url) as store:
        steps = await a_store_with_everything(store, two)
        before = await all_of(store)
        source = two.home_of("tw:{default}:job")
        [target] = [node for node in two.nodes if node is not source]
        slot = two.slot_of("tw:{default}:job")
        keys = sorted(two.begin_move(slot, source, target))
        assert {f"tw:{{default}}:{name}" for name in FIXED} - set(keys) == {"tw:{default}:none"}
        for key in keys:
            for name, step in steps.items():
                with pytest.raises(StoreUnavailable, match="moved") as failure:
                    await step()
                assert "--cluster fix" in str(failure.value), name
            two.move(key, source, target)
        two.end_move(slot, target)
        assert await all_of(store) == before
        for step in steps.values():
            await step()
        found = await store.get(["held", "new", "cancelled", "done"])
        assert [each and each.state for each in found] == [
            *(State.RUNNING, State.WAITING, State.WAITING, None)
        ]


async def test_a_command_on_one_key_follows_it_to_the_other_node(two: RedisCluster) -> None:
    """ASKING holds only on the connection on which it was sent, and here many are in use."""
    async with opened(two.url) as store:
        await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
        await store.add([job()])
        source = two.home_of("tw:{default}:job")
        [target] = [node for node in two.nodes if node is not source]
        slot = two.slot_of("tw:{default}:job")
        await asyncio.gather(*(store.schedules() for _ in range(12)))
        for key in two.begin_move(slot, source, target):
            two.move(key, source, target)
            found = await asyncio.gather(*(store.schedules() for _ in range(12)))
            assert [[each.name for each in some] for some in found] == [["s"]] * 12
        two.end_move(slot, target)
        assert [each.name for each in await store.schedules()] == ["s"]
        assert len((await store.find(Query())).jobs) == 1


async def test_a_call_waits_a_little_for_keys_that_are_on_their_way(two: RedisCluster) -> None:
    async with opened(two.url) as store:
        await store.add([job()])
        source = two.home_of("tw:{default}:job")
        [target] = [node for node in two.nodes if node is not source]
        slot = two.slot_of("tw:{default}:job")
        keys = two.begin_move(slot, source, target)
        adding = asyncio.create_task(store.add([job("new")]))
        for key in keys:
            two.move(key, source, target)
        await asyncio.sleep(0.2)
        assert not adding.done()
        two.end_move(slot, target)
        assert await adding == [True]
        assert [info.waiting for info in await store.queues()] == [2]


# --- Under load

QUEUES = 100
MOVED = 24
ROUNDS = 10


def namespace_on(node: int, nodes: int) -> str:
    """One whose slot is among the first of this node: those are the first that redis-cli moves."""
    first = node * -(-16_384 // nodes)
    names = (f"shop-{n}" for n in range(100_000))
    return next(
        name for name in names if 0 <= key_slot(f"tw:{{{name}}}:".encode()) - first < MOVED - 4
    )


def reshard(cluster: RedisCluster, source: RedisServer, target: RedisServer) -> None:
    """As operators do, but a key at a time, so that it takes longer."""
    wait_until(lambda: ask_cli(cluster, "check")[0], within_s=20, what="nodes that agree")
    moved, said = ask_cli(
        *(cluster, "reshard", "--cluster-from", id_of(source), "--cluster-to", id_of(target)),
        *("--cluster-slots", str(MOVED), "--cluster-yes", "--cluster-pipeline", "1"),
    )
    assert moved, said


def ask_cli(cluster: RedisCluster, command: str, *options: str) -> tuple[bool, str]:
    at = f"127.0.0.1:{cluster.nodes[0].port}"
    run = subprocess.run(
        [cli(), "--cluster", command, at, *options], capture_output=True, text=True, timeout=60
    )
    return run.returncode == 0, run.stdout[-1000:] + run.stderr


class Customer(threading.Thread):
    """Enqueues all the time, and notes what was acknowledged."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.acknowledged: list[str] = []
        self._url, self._over = url, threading.Event()

    def run(self) -> None:
        app = App(self._url)

        @app.task
        async def work(seconds: float) -> int: ...  # type: ignore[empty-body]

        n = 0
        while not self._over.wait(0.02):
            n += 1
            jobs = [
                work.using(id=f"job-{n}-{k}", queue=f"q{(n + k) % QUEUES}").job(0.01)
                for k in range(5)
            ]
            try:
                handles = app.sync.enqueue_many(jobs)
            except StoreUnavailable:
                continue
            self.acknowledged += [handle.id for handle in handles]
        app.sync.close()

    def stop(self) -> None:
        self._over.set()
        self.join(30)


def test_slots_that_move_back_and_forth_under_load_lose_nothing_and_end_no_worker(
    three: RedisCluster, tmp_path: Path
) -> None:
    namespace = namespace_on(0, 3)
    url = f"{three.url}&namespace={namespace}"
    first, second, _ = three.nodes
    with running_shop(tmp_path) as shop:
        shop.env["TICKWHEEL_STORE"] = url
        queues = ",".join(f"q{n}" for n in range(QUEUES))
        workers = [shop.worker("--queues", queues) for _ in range(2)]
        customer = Customer(url)
        customer.start()
        try:
            wait_until(lambda: len(shop.events("end")) > 50, within_s=20, what="work")
            for n in range(ROUNDS):
                source, target = (second, first) if n % 2 else (first, second)
                reshard(three, source, target)
                assert three.home_of(f"tw:{{{namespace}}}:job") is target
                time.sleep(LEASE_S / 3)
        finally:
            customer.stop()
        ids = set(customer.acknowledged)
        wait_until(
            lambda: ids <= {event.id for event in shop.events("end")},
            within_s=30 + 2 * LEASE_S,
            what=f"all of {len(ids)} done",
        )
        assert not any(worker.died() for worker in workers), workers[0].log + workers[1].log
        assert_second_runs_are_counted(shop)
        assert len(ids) > 500


def assert_second_runs_are_counted(shop: Shop) -> None:
    """A job that ran again was lost with its lease: its attempts are told apart."""
    starts = Counter((event.id, event.attempt) for event in shop.events("start"))
    assert [start for start, count in starts.items() if count > 1] == []
