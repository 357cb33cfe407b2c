"""What servers record of a store, in virtual time: nothing is counted twice, nothing is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from hypothesis import given, settings, strategies as st
from world import World, virtual

from tickwheel.client import Client
from tickwheel.operate.history import COARSE, FINE, GAP_MS, HOUR_S, KIND, TIERS, Point, Tier
from tickwheel.operate.recorder import Recorder, last_hour, points_of
from tickwheel.store import RECORDS_LIMIT, Store, WorkerCounts, WorkerInfo
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import FaultyStore


@asynccontextmanager
async def recording(world: World, line: FaultyStore | None = None) -> AsyncIterator[None]:
    """A server that records, on a line of its own to the store."""
    client = Client(cast(Store, line or FaultyStore(world.store)), world.clock)

    async def opened() -> Client:
        await client.ready()
        return client

    task = asyncio.create_task(Recorder(opened).run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def counted_app(world: World) -> Any:
    """A task of the app, which counts; and keeps its store open."""
    world.app.enable_metrics()

    @world.app.task(retries=0)
    async def work(fails: bool = False) -> None:
        if fails:
            raise ValueError("no luck")

    return work


async def run_some(work: Any, count: int, *, every_s: float = 1.0) -> None:
    for n in range(count):
        await work.enqueue(fails=n % 10 == 0)
        await asyncio.sleep(every_s)


async def points(world: World, tier: Tier) -> list[Point]:
    return await points_of(await world.app.client(), tier)


async def names(world: World) -> list[str]:
    found = await (await world.app.client()).records(KIND, limit=RECORDS_LIMIT)
    return [name for name, _ in found]


def test_every_run_is_in_the_history_once_whatever_the_tier() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        async with recording(world):
            await world.node()
            await run_some(work, 3_000)
            # Until all of it was rolled up.
            await asyncio.sleep(FINE.span_s + 30)
            for tier in TIERS:
                found = await points(world, tier)
                if tier is not FINE:
                    assert sum(each.done for each in found) == 2_700
                    assert sum(each.failed for each in found) == 300
                assert all(0 < each.done < 1.2 * each.over_s for each in found[1:-35])
            fine, tasks = await last_hour(await world.app.client())
            assert {each.at_s % 10 for each in fine} == {0} and len(fine) <= 360
            assert tasks["work"][1] == tasks["work"][2] <= 300

    virtual(story)


def test_several_servers_record_as_one() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        async with recording(world), recording(world), recording(world):
            await world.node()
            await run_some(work, 500)
            await asyncio.sleep(30)
            found = await points(world, FINE)
            assert sum(each.done for each in found) == 450
            assert len({each.at_s for each in found}) == len(found)

    virtual(story)


def test_a_server_that_comes_back_goes_on_where_the_last_one_stopped() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        await world.node()
        for _ in range(5):
            async with recording(world):
                await run_some(work, 50)
            # Nobody records for a minute, over the ends of stretches.
            await run_some(work, 60)
        async with recording(world):
            await asyncio.sleep(FINE.span_s + 30)
        for tier in TIERS:
            assert sum(each.done for each in await points(world, tier)) == 495
        found = await points(world, FINE)
        assert max(each.done / each.over_s for each in found if each.over_s) < 1.2

    virtual(story)


def test_a_worker_that_restarts_begins_with_nothing() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        async with recording(world):
            for _ in range(3):
                # Another process would have counts of its own.
                world.app._access.counts = None
                world.app.enable_metrics()
                node = await world.node()
                await run_some(work, 100)
                await asyncio.sleep(20)
                await node.stop()
            found = await points(world, FINE)
            assert sum(each.done for each in found) == 270

    virtual(story)


def test_a_store_that_is_away_leaves_a_gap_and_loses_no_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        line = FaultyStore(world.store)
        async with recording(world, line):
            await world.node()
            await run_some(work, 60)
            line.away = True
            await run_some(work, 120)
            line.away = False
            await run_some(work, 60)
            await asyncio.sleep(30)
            found = await points(world, FINE)
            assert sum(each.done for each in found) == 216
            times = [each.at_s for each in found]
            gaps = [b - a for a, b in itertools.pairwise(times)]
            assert 100 <= max(gaps) <= 140
            assert max(each.done / each.over_s for each in found if each.over_s) < 1.2

    virtual(story)
    assert not [each for each in caplog.records if "history" in each.getMessage()]


def test_lost_requests_and_replies_do_no_harm() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        line = FaultyStore(world.store, seed=7)
        async with recording(world, line):
            await asyncio.sleep(15)
            line.lose_requests = line.lose_replies = 0.1
            await world.node()
            await run_some(work, 400)
            line.lose_requests = line.lose_replies = 0
            await asyncio.sleep(FINE.span_s + 30)
        for tier in (FINE, *COARSE):
            assert sum(each.done for each in await points(world, tier)) == 360

    virtual(story)


def test_history_is_bounded() -> None:
    async def story(world: World) -> None:
        counted_app(world)
        async with recording(world):
            for _ in range(100):
                await asyncio.sleep(HOUR_S)
                kept = [name.partition(".")[0] for name in await names(world)]
                assert kept.count("10s") <= 2 * 13 + 1
                assert kept.count("5m") <= 14 and len(kept) <= 50
        assert len(await points(world, COARSE[0])) >= 285

    virtual(story)


def test_a_record_that_cannot_be_read_is_begun_again() -> None:
    async def story(world: World) -> None:
        work = counted_app(world)
        async with recording(world):
            await world.node()
            await run_some(work, 30)
            client = await world.app.client()
            await client.put_records(KIND, dict.fromkeys(await names(world), "{?"))
            await client.put_records(KIND, {"10s.what": "?", "else": "?"})
            await run_some(work, 30)
            assert len(await points(world, FINE)) >= 2

    virtual(story)


# --- Any order of things


class Model:
    """Processes that count, and servers that record, at chosen moments."""

    def __init__(self, seed: int) -> None:
        self.store = MemoryStore()
        self.now_ms = 1_800_000_000_000
        self.random = random.Random(seed)
        self.told: dict[str, WorkerCounts] = {}
        self.recorders: list[Recorder] = []
        self.worker_names: dict[str, str] = {}
        self.recorded_ms = self.now_ms

    def client(self) -> Client:
        client = Client(self.store, LaggingClock())
        client.clock.now_ms = lambda: self.now_ms  # type: ignore[method-assign]
        return client

    async def tell(self, worker: int, done: int, *, restart: bool) -> None:
        """A worker has done more, perhaps as a new process of the same name."""
        name = f"worker-{worker}"
        source = self.worker_names.get(name)
        if source is None or restart:
            source = self.worker_names[name] = f"source-{len(self.told)}"
            self.told[source] = WorkerCounts(source=source, since_ms=self.now_ms)
        before = self.told[source]
        tasks = {"work": (before.done + done, 0, 0)}
        self.told[source] = now = WorkerCounts(
            source=source, since_ms=before.since_ms, started=before.started + done,
            done=before.done + done, late=(before.done + done,), tasks=tasks,
        )  # fmt: skip
        await self.store.beat(
            WorkerInfo(
                name=source, host="host", pid=worker, version="1", queues=("default",),
                concurrency=1, started_ms=before.since_ms, seen_ms=self.now_ms,
                gone_after_ms=10**9, counts=now,
            )
        )  # fmt: skip

    async def record(self, server: int, *, restart: bool) -> None:
        while len(self.recorders) <= server:
            self.recorders.append(Recorder(_never))
        if restart:
            self.recorders[server] = Recorder(_never)
        await self.recorders[server].sample(self.client())
        self.recorded_ms = self.now_ms


class LaggingClock:
    """Not asked."""

    def now_ns(self) -> int:
        return 0

    def monotonic_ns(self) -> int:
        return 0


async def _never() -> Client:
    raise AssertionError("it is given a client")


steps = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.integers(1, 60_000), st.booleans()),
        st.tuples(st.just("tell"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("record"), st.integers(0, 2), st.booleans()),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps, st.integers(0, 1_000))
def test_each_run_is_counted_once_whoever_records_when(
    story: list[tuple[str, int, bool]], seed: int
) -> None:
    async def check() -> None:
        model = Model(seed)
        await model.record(0, restart=False)
        for what, number, again in story:
            if what == "pass":
                model.now_ms += number
                # No gap is longer than what is bridged.
                if model.now_ms - model.recorded_ms > GAP_MS - 120_000:
                    await model.record(0, restart=again)
            elif what == "tell":
                await model.tell(number, model.random.randint(0, 100), restart=again)
            else:
                await model.record(number, restart=again)
        model.now_ms += FINE.step_s * 1000
        await model.record(model.random.randint(0, 2), restart=model.random.random() < 0.5)
        client = model.client()
        found, tasks = await last_hour(client)
        true = sum(each.done for each in model.told.values())
        assert sum(each.done for each in found) == true
        assert sum(sum(each.late) for each in found) == true
        assert tasks.get("work", (0, 0, 0))[0] == true

    asyncio.run(check())
