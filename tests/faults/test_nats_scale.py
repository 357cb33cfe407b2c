"""Many jobs and several workers on a real NATS server: shared evenly, run once, held by nobody.

Bounds are generous: what is asked is whether work moves at all, on a busy machine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats_books import Words
from processes import LEASE_S, Shop, running_shop

from stores import NatsHarness, nats_server
from tickwheel import App, Outcome, State, Task
from tickwheel.errors import StoreError
from tickwheel.job import CancelOutcome, Job
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import Query, Store, open_store
from tickwheel.stores.nats.servers.process import Server
from tickwheel.stores.nats.store import NatsStore

pytestmark = pytest.mark.slow

SOON_S = 60.0
MINUTES_30_MS = 30 * 60_000
DAYS_30_MS = 30 * 86_400_000


@pytest.fixture
def server() -> Server:
    return nats_server()


@pytest.fixture
def url(server: Server) -> str:
    return f"{server.url}/{secrets.token_hex(6)}"


@pytest.fixture
def shop(tmp_path: Path, url: str) -> Iterator[Shop]:
    with running_shop(tmp_path) as shop:
        shop.env["TICKWHEEL_STORE"] = url
        yield shop


async def until(happened: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(SOON_S):
            while not happened():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {SOON_S} s: {what}") from None


# --- A queue group


async def test_three_workers_share_ten_thousand_jobs_and_run_each_once(url: str) -> None:
    ran: list[tuple[int, int]] = []
    count = 10_000

    def app_of(number: int) -> App:
        app = App(url)

        @app.task
        async def work(n: int) -> None:
            ran.append((n, number))
            await asyncio.sleep(0.02)

        return app

    apps = [app_of(number) for number in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app)
            await stack.enter_async_context(app.worker(concurrency=20))
        call: Task[[int], Any, Any] = Task(apps[0]._access, apps[0].tasks.get("work"))
        await apps[0].enqueue_many([call.job(n) for n in range(count)])
        await until(lambda: len(ran) >= count, f"all {count} jobs")
        await asyncio.sleep(0.5)
        [queue] = await apps[0].queues()
        assert (queue.done, queue.waiting, queue.running) == (count, 0, 0)
    assert len(ran) == count
    assert sorted(n for n, _ in ran) == list(range(count))
    shares = Counter(number for _, number in ran)
    for number in range(3):
        assert shares[number] == pytest.approx(count / 3, rel=0.2), shares


async def test_the_jobs_of_a_killed_worker_go_to_the_others(shop: Shop, url: str) -> None:
    app = App(url)

    @app.task
    async def work(seconds: float) -> int: ...  # type: ignore[empty-body]

    async with app:
        workers = [shop.worker() for _ in range(3)]
        handles = await app.enqueue_many([work.job(1.0) for _ in range(120)])
        await until(
            lambda: len({each.pid for each in shop.events("start")}) == 3, "a share for each"
        )
        await until(lambda: len(shop.events("start")) >= 100, "starts")
        workers[0].kill()
        killed = time.time()
        await until(lambda: len({each.id for each in shop.events("end")}) == 120, "all done")
        infos = [await handle.info() for handle in handles]
    taken_over = {info.id for info in infos if info.takeovers}
    assert taken_over, "it held nothing when it was killed"
    again = [each for each in shop.events("start") if each.id in taken_over and each.at > killed]
    late = max(each.at for each in again) - killed
    assert late < LEASE_S + 2, f"taken over only after {late:.2f} s"
    for info in infos:
        assert info.attempts == 1 + info.takeovers
        assert info.state is State.DONE
        assert [run.outcome for run in info.history][:-1] == [Outcome.LOST] * info.takeovers


# --- A far future


async def test_a_hundred_thousand_jobs_in_the_far_future_cost_no_worker_anything(
    shop: Shop, url: str
) -> None:
    words = Words()
    store = open_store(url)
    await store.open()
    try:
        worker = shop.worker()
        await worker_is_there(store, words)
        before_kb = memory_kb(worker.pid)
        for start in range(0, 100_000, 10_000):
            jobs = [far(words, n) for n in range(start, start + 10_000)]
            assert all(await store.add(jobs))
        await asyncio.sleep(1)
        assert await pending_acks(store) == 0
        [info] = await store.workers(now_ms=words.now)
        assert (info.held, info.running) == (0, 0)
        assert memory_kb(worker.pid) - before_kb < 15_000
        [queue] = await store.queues()
        assert queue.waiting == 100_000
        late_s = await asyncio.gather(*(lateness(shop, store, words, n) for n in range(10)))
        assert sorted(late_s)[8] < 0.1, f"late among 100,000: {late_s}"
        assert min(late_s) >= 0
        assert len((await store.find(Query(state=State.WAITING), limit=100)).jobs) == 100
        assert await pending_acks(store) == 0
        assert not worker.died()
    finally:
        await store.close()


def far(words: Words, n: int) -> Job:
    return words.job(f"far-{n}", delay_ms=MINUTES_30_MS if n % 2 else DAYS_30_MS, task="work")


async def lateness(shop: Shop, store: Store, words: Words, n: int) -> float:
    """How late a job that is due among all the others starts, in seconds."""
    id = f"due-{n}"
    job = words.job(id, delay_ms=1_700 + 100 * n, task="work", payload='{"seconds": 0}')
    assert await store.add([job]) == [True]
    await until(lambda: any(each.id == id for each in shop.events("start")), f"start of {id}")
    [start] = [each for each in shop.events("start") if each.id == id]
    return start.at - job.due_ms / 1000


async def worker_is_there(store: Store, words: Words) -> None:
    async with asyncio.timeout(SOON_S):
        while not await store.workers(now_ms=words.now):
            await asyncio.sleep(0.05)


async def pending_acks(store: Store) -> int:
    assert isinstance(store, NatsStore)
    consumers = await store._first.stream.list_consumers()
    assert consumers
    return sum(each["num_ack_pending"] for each in consumers)


def memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError("no VmRSS")


# --- Shards


@pytest.fixture
def sharded(server: Server, runner: asyncio.Runner) -> Iterator[NatsHarness]:
    harness = NatsHarness(shards="3")
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


async def test_jobs_stay_where_they_are_whatever_was_asked_before(sharded: NatsHarness) -> None:
    ids = [f"{n}" for n in range(60)]
    await sharded.add(*(sharded.job(id) for id in ids))
    for _ in range(4):
        assert await sharded.claim(0) == []
        found = await sharded.store.get(ids)
        assert [job.id for job in found if job] == ids
    assert await sharded.store.add([sharded.job(id) for id in ids]) == [False] * 60
    assert await sharded.counts() == {"waiting": 60}


async def test_the_life_of_jobs_in_three_shards(sharded: NatsHarness) -> None:
    ids = [f"{n}" for n in range(60)]
    twin = await sharded.new_handle()
    await sharded.add(*(sharded.job(id) for id in ids))
    held = await sharded.claim(20)
    assert len(held) == 20
    assert all(await twin.extend(held, now_ms=sharded.now, lease_ms=30_000))
    assert all(await twin.settle([sharded.done(job) for job in held], now_ms=sharded.now))
    rest = [id for id in ids if id not in {job.id for job in held}]
    assert set(await twin.cancel(rest[:20], now_ms=sharded.now)) == {CancelOutcome.CANCELLED}
    assert await sharded.counts() == {"waiting": 20, "done": 20, "cancelled": 20}
    assert all(await sharded.store.rerun(rest[:20], now_ms=sharded.now))
    assert len(await sharded.claim(100)) == 40
    pages, cursor = [], None
    while True:
        page = await twin.find(Query(state=State.RUNNING), cursor=cursor, limit=7)
        pages += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(pages) == sorted(rest)
    assert await twin.prune([State.DONE], before_ms=sharded.now + 1_000, limit=100) == 20
    assert await sharded.store.delete(ids) == [False] * 60


async def test_claims_at_once_on_one_handle_of_three_shards(sharded: NatsHarness) -> None:
    await sharded.add(*sharded.jobs(300))
    claims = await asyncio.gather(*(sharded.claim(30, worker=f"{n}") for n in range(6)))
    claims += [await sharded.claim(300)]
    held = [job.id for jobs in claims for job in jobs]
    assert len(held) == len(set(held)) == 300
    assert await sharded.counts() == {"running": 300}


async def test_a_tick_fires_beside_its_schedule_in_any_shard(sharded: NatsHarness) -> None:
    twin = await sharded.new_handle()
    names = [f"nightly-{n}" for n in range(12)]
    for name in names:
        await sharded.store.put_schedule(Schedule(name=name, rule="{}", next_ms=1))
    assert sorted(each.name for each in await twin.schedules()) == sorted(names)
    for schedule in await sharded.store.schedules():
        tick = sharded.job(f"{schedule.name}@2030-01-01T00:00:00Z")
        answers = await asyncio.gather(
            *(store.fire(schedule, [tick], next_ms=2) for store in (sharded.store, twin))
        )
        assert sorted(answers) == [False, True]
    assert {each.next_ms for each in await twin.schedules()} == {2}
    assert len(await sharded.claim(100)) == 12


async def test_what_is_not_of_a_shard_is_found_by_every_handle(sharded: NatsHarness) -> None:
    """Workers, buckets and pauses, after any number of claims."""
    twin = await sharded.new_handle()
    await sharded.add(*sharded.jobs(9))
    rate = Rate(1, 3_600_000, burst=3)
    waits = []
    for n in range(4):
        waits.append(await (sharded.store, twin)[n % 2].throttle("key", rate, now_ms=sharded.now))
        await sharded.claim(0)
        await twin.queues()
    assert [wait > 0 for wait in waits] == [False, False, False, True]
    await sharded.store.pause("default", True)
    assert await sharded.claim(store=twin) == []
    await twin.pause("default", False)
    assert len(await sharded.claim(100)) == 9


async def test_a_worker_on_three_shards(server: Server) -> None:
    url = f"{server.url}/{secrets.token_hex(6)}?shards=3"
    app = App(url)
    ran: list[int] = []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    @app.every("1s")
    async def tick() -> None:
        ran.append(-1)

    async with app, app.worker(concurrency=20):
        await app.enqueue_many([work.using(delay=0.002 * n).job(n) for n in range(1_000)])
        await until(lambda: len(set(ran)) == 1_001, "all jobs and a tick")
        for n in range(20):
            await work.enqueue(2_000 + n)
        await until(lambda: len(set(ran)) == 1_021, "single jobs")
    assert len([n for n in ran if n >= 0]) == 1_020, "each once"


async def test_another_number_of_shards_is_refused(sharded: NatsHarness) -> None:
    """Ids would be looked for in the wrong stream: jobs lost from sight, and added twice."""
    store = open_store(sharded._url.replace("shards=3", "shards=2"))
    try:
        with pytest.raises(StoreError, match="shards"):
            await store.open()
    finally:
        await store.close()
