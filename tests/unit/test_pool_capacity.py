"""Each pool has a capacity of its own: jobs that wait for one pool hold up no other."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import process_tasks
import pytest

from tickwheel import App, JobFailed
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.worker import Worker
from tickwheel.stores.memory import MemoryStore


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


# --- Threads


class Crowd:
    """Counts how many threads are in it, and lets them out when told."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.out = threading.Event()
        self.inside = self.most = self.total = 0

    def enter(self) -> None:
        with self._lock:
            self.inside += 1
            self.total += 1
            self.most = max(self.most, self.inside)
        self.out.wait(60)
        with self._lock:
            self.inside -= 1


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.out.set()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.01)


async def test_threads_have_a_limit_of_their_own(crowd: Crowd) -> None:
    app = App(MemoryStore())
    task = app.task(name="stay")(crowd.enter)

    @app.task
    async def free() -> str:
        return "done"

    async with app, app.worker(threads=3, guarded=False, grace=0):
        jobs = await app.enqueue_many([task.job() for _ in range(50)])
        await until(lambda: crowd.inside == 3)
        # Behind far more of them than there are threads.
        assert await (await free.enqueue()).result(timeout=10) == "done"
        assert crowd.inside == 3
        crowd.out.set()
        for job in jobs:
            await job.result(timeout=30)
    assert (crowd.total, crowd.most) == (50, 3)


async def test_by_default_there_are_as_many_threads_as_in_an_executor(crowd: Crowd) -> None:
    app = App(MemoryStore())
    task = app.task(name="stay")(crowd.enter)
    with ThreadPoolExecutor() as executor:
        usual = executor._max_workers
    async with app, app.worker(guarded=False, grace=0):
        jobs = await app.enqueue_many([task.job() for _ in range(60)])
        await until(lambda: crowd.inside == usual)
        crowd.out.set()
        for job in jobs:
            await job.result(timeout=30)
    assert crowd.most == usual


async def test_a_worker_whose_tasks_need_threads_claims_no_more_than_it_can_start(
    crowd: Crowd,
) -> None:
    store = MemoryStore()
    app = App(store)
    task = app.task(name="stay")(crowd.enter)
    async with asyncio.TaskGroup() as group:
        worker = a_worker(app, store, threads=3)
        group.create_task(worker.run())
        made = [task.job() for _ in range(50)]
        # Overdue: of jobs that are due in a moment, a worker may hold more than it can start.
        overdue = [msgspec.structs.replace(job, due_ms=job.due_ms - 1000) for job in made]
        jobs = await app.enqueue_many(overdue)
        await until(lambda: crowd.inside == 3)
        [queue] = await store.queues()
        assert queue.running == 3
        # The others are there for a worker that can start them.
        other = a_worker(app, store, threads=47)
        group.create_task(other.run())
        await until(lambda: crowd.inside == 50)
        crowd.out.set()
        for job in jobs:
            await job.result(timeout=30)
        worker.stop()
        other.stop()


async def test_threads_that_hang_after_a_timeout_give_up_their_place_but_only_so_many(
    crowd: Crowd,
) -> None:
    app = App(MemoryStore())
    hang = app.task(name="hang", timeout=0.1, retries=0)(crowd.enter)

    async with app, app.worker(threads=2, guarded=False, grace=0):
        jobs = await app.enqueue_many([hang.job() for _ in range(6)])
        for job in jobs[:4]:
            with pytest.raises(JobFailed, match="timeout"):
                await job.result(timeout=20)
        # Twice as many threads as may run hang, and no more are started.
        assert crowd.total == 4
        assert [(await job.info()).failures for job in jobs[4:]] == [0, 0]
        crowd.out.set()
        for job in jobs[4:]:
            await job.result(timeout=20)
