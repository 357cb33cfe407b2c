"""Each pool has places of its own: jobs that wait for one hold up nobody else."""

from __future__ import annotations

import asyncio
from collections import Counter

import process_tasks
import pytest

from tickwheel import App
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.stores.memory import MemoryStore
from tickwheel.worker import Worker, WorkerOptions


def a_worker(app: App, store: MemoryStore, *queues: str, **options: int) -> Worker:
    clock = SystemClock()
    return Worker(
        store,
        app.tasks,
        StoreClock(clock, own=True),
        clock,
        WorkerOptions(queues=["default", *queues], grace_ms=0, **options),
        guarded=False,
    )


@pytest.mark.slow
async def test_jobs_that_wait_for_a_child_process_hold_up_no_others() -> None:
    store = MemoryStore()
    app = App(store)
    sleep = app.task(pool="process")(process_tasks.sleep)

    @app.task
    async def nothing() -> str:
        return "done"

    async with asyncio.TaskGroup() as group:
        worker = a_worker(app, store, processes=1, concurrency=20)
        group.create_task(worker.run())
        for _ in range(100):
            await sleep.enqueue(0.5)
        # Behind far more jobs than the worker has slots.
        job = await nothing.enqueue()
        assert await job.result(timeout=10) == "done"
        worker.stop()


@pytest.mark.slow
async def test_jobs_that_wait_for_a_child_process_go_to_a_worker_that_has_one() -> None:
    store = MemoryStore()
    app = App(store)
    sleep = app.task(pool="process")(process_tasks.sleep)

    async with asyncio.TaskGroup() as group:
        first = a_worker(app, store, "a", processes=1)
        second = a_worker(app, store, "b", processes=1)
        group.create_task(first.run())
        group.create_task(second.run())
        # Each has a child process before it matters: starting one takes a while.
        for queue in ("a", "b"):
            await (await sleep.using(queue=queue).enqueue(0)).result(timeout=60)
        # One of the two claims them all.
        jobs = await app.enqueue_many([sleep.job(0.4) for _ in range(24)])
        for job in jobs:
            await job.result(timeout=60)
        by = Counter([(await job.info()).worker for job in jobs])
        first.stop()
        second.stop()
    assert min(by[first.name], by[second.name]) >= 6, by
