"""Tasks that wait for other jobs while slots are short."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from world import World, virtual

from tickwheel import App, JobFailed, JobHandle
from tickwheel.engine import lending
from tickwheel.stores.memory import MemoryStore
from tickwheel.task import Task

Log = pytest.LogCaptureFixture


def a_parent(world: World) -> Task[[int], int, Any]:
    """A task that waits for the result of another job."""

    @world.app.task
    async def child(n: int) -> int:
        return n * 2

    @world.app.task(timeout="1m", retries=0)
    async def parent(n: int) -> int:
        return await (await child.enqueue(n)).result()

    return parent


def warnings(caplog: Log) -> list[str]:
    return [each.getMessage() for each in caplog.records if "no slot is free" in each.getMessage()]


def test_a_task_that_waits_for_its_child_lends_it_its_slot(caplog: Log) -> None:
    async def story(world: World) -> None:
        parent = a_parent(world)
        node = await world.node(concurrency=1)
        jobs = [await parent.enqueue(n) for n in range(5)]
        for n, job in enumerate(jobs):
            assert await job.result(timeout=30) == n * 2
        await asyncio.sleep(1)
        assert (node.worker.running, node.worker._hand.running) == (0, 0)
        assert node.worker._hand.lent_total == 0

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)
    # Once per task.
    [warning] = warnings(caplog)
    assert warning.startswith("parent ")
    assert "(child) while no slot is free, so its own is lent" in warning


def test_parents_on_all_slots_wait_for_all_their_children() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def child() -> int:
            await asyncio.sleep(0.1)
            return 1

        @world.app.task(timeout="1m", retries=0)
        async def parent() -> int:
            jobs = [await child.enqueue() for _ in range(10)]
            return sum(await asyncio.gather(*(job.result() for job in jobs)))

        await world.node(concurrency=3)
        jobs = [await parent.enqueue() for _ in range(6)]
        assert [await job.result(timeout=30) for job in jobs] == [10] * 6

    virtual(story)


def test_no_slot_is_lent_while_others_are_free(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def child() -> None:
            nodes.append(node.worker._hand.lent_total)

        @world.app.task
        async def parent() -> None:
            await (await child.enqueue()).result()

        nodes: list[int] = []
        node = await world.node(concurrency=2)
        await (await parent.enqueue()).result(timeout=30)
        assert nodes == [0]

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)
    assert warnings(caplog) == []


def test_nor_for_a_job_of_a_queue_that_the_worker_does_not_serve(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task(queue="other")
        async def child() -> None: ...

        @world.app.task
        async def parent() -> None:
            await (await child.enqueue()).result()

        node = await world.node(concurrency=1, queues=["default"])
        job = await parent.enqueue()
        await asyncio.sleep(5)
        assert node.worker._hand.lent_total == 0
        await world.node(queues=["other"])
        await job.result(timeout=30)

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)
    assert warnings(caplog) == []


def test_when_no_more_slots_can_be_lent_the_jobs_waited_for_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World) -> None:
        parent = a_parent(world)
        node = await world.node(concurrency=1)
        jobs = [await parent.enqueue(n) for n in range(5)]
        for n, job in enumerate(jobs):
            assert await job.result(timeout=60) == n * 2
        assert node.worker._hand.lent_total == 0

    monkeypatch.setattr(lending, "LEAST", 1)
    virtual(story)


def test_only_so_many_slots_are_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        alive = most = 0

        @world.app.task(timeout="1m", retries=0)
        async def endless(n: int) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)
            try:
                await (await endless.enqueue(n + 1)).result()
            finally:
                alive -= 1

        await world.node(concurrency=2)
        job = await endless.enqueue(0)
        with pytest.raises(JobFailed, match="longer than its timeout"):
            await job.result(timeout=600)
        assert most <= 2 + 3

    monkeypatch.setattr(lending, "LEAST", 3)
    virtual(story)


def test_a_lent_slot_comes_back_when_the_parent_ends_in_any_way() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def child() -> None:
            await asyncio.sleep(100)

        @world.app.task(retries=0, timeout="5s")
        async def parent() -> None:
            await (await child.enqueue()).result()

        @world.app.task
        async def quick() -> None: ...

        node = await world.node(concurrency=1)
        job = await parent.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=30)
        hand = node.worker._hand
        assert (hand.running, hand.lent_total) == (1, 0)
        await (await quick.enqueue()).result(timeout=200)
        await asyncio.sleep(1)
        assert (hand.running, hand.lent_total) == (0, 0)

    virtual(story)


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_a_thread_that_waits_for_its_child_lends_it_its_slot(
    concurrency: int, caplog: Log
) -> None:
    app = App(MemoryStore())

    @app.task
    def child(n: int) -> int:
        return n * 2

    @app.task(timeout="1m", retries=0)
    def parent(n: int) -> int:
        job: JobHandle[Any] = child.enqueue_sync(n)
        return int(app.sync.result(job)) + 1

    with caplog.at_level(logging.WARNING, "tickwheel"):
        async with app, app.worker(concurrency=concurrency, grace=0) as worker:
            jobs = [await parent.enqueue(n) for n in range(concurrency * 3)]
            results = [await job.result(timeout=30) for job in jobs]
            assert results == [n * 2 + 1 for n in range(concurrency * 3)]
            async with asyncio.timeout(10):
                while worker.running:
                    await asyncio.sleep(0.01)
            assert worker._hand.lent_total == 0
    assert len(warnings(caplog)) == 1
    assert "threads are busy" not in caplog.text
    app.sync.close()


async def test_a_slot_that_a_thread_lent_is_free_once_the_thread_is_abandoned() -> None:
    app = App(MemoryStore())
    over = asyncio.Event()

    @app.task
    async def child() -> None:
        await over.wait()

    @app.task(timeout="1s", retries=0)
    def parent() -> None:
        # Not for ever: nothing ends while a thread hangs.
        app.sync.result(child.enqueue_sync(), timeout=15)

    async with app, app.worker(concurrency=1, grace=0) as worker:
        job = await parent.enqueue()
        with pytest.raises(JobFailed, match="longer than its timeout"):
            await job.result(timeout=30)
        # Its thread still waits.
        slots = worker._hand.running, worker._hand.lent_total
        over.set()
        assert slots == (1, 0)
        async with asyncio.timeout(30):
            while worker.running:
                await asyncio.sleep(0.01)
        assert (worker._hand.running, worker._hand.lent_total) == (0, 0)
    app.sync.close()
