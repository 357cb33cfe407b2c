"""What users write: tasks, jobs, many jobs at once, and one app on several event loops."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from an_app import add, add_in_thread, app, waiting

from tickwheel import (
    App,
    BadArguments,
    CancelOutcome,
    Job,
    Priority,
    ResultTimeout,
    State,
    UnknownTask,
    UsageError,
    current_job,
)
from tickwheel.checks import LATEST_MS
from tickwheel.stores.memory import MemoryStore

__all__ = ["app"]

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001
SOON = datetime(2030, 1, 1, tzinfo=UTC)


async def test_a_task_can_be_called_like_the_function_it_is(app: App) -> None:
    task, threaded = app.task(add), app.task(name="other", retries=3)(add_in_thread)
    assert await task(1, b=2) == 3
    assert threaded(1, 2) == 3
    assert current_job() is None
    assert (task.name, threaded.name, repr(threaded)) == ("add", "other", "<task other>")
    assert (task.function, inspect.unwrap(task)) == (add, add)
    assert await app.queues() == []


async def test_an_enqueued_job_can_be_looked_at(app: App) -> None:
    task = app.task(add)
    job = await task.using(delay="30m", priority="high").enqueue(1, b=2)
    assert job.added
    assert repr(job) == f"<job {job.id}>"
    info = await job.info()
    assert (info.id, info.task, info.queue) == (job.id, "add", "default")
    assert (info.state, info.priority, info.payload) == (
        State.WAITING,
        Priority.HIGH,
        '{"a":1,"b":2}',
    )
    assert info.due - info.created == timedelta(minutes=30)
    assert info.created.utcoffset() == timedelta(0)
    assert (info.attempts, info.failures, info.history, info.error) == (0, 0, (), None)
    assert await app.job(job.id).info() == info
    with pytest.raises(ResultTimeout, match=r"is still waiting after 0\.01 s"):
        await job.result(timeout="10ms")
    assert await job.cancel() is CancelOutcome.CANCELLED
    assert (await job.info()).state is State.CANCELLED


async def test_a_time_that_has_passed_means_now(app: App) -> None:
    task = app.task(add)
    async with app.worker():
        for year in (1, 1969, 2000):
            job = await task.using(at=datetime(year, 1, 1, tzinfo=UTC)).enqueue(year)
            assert await job.result(timeout=5) == year


async def test_many_jobs_are_stored_in_the_order_they_are_given(app: App) -> None:
    task, other = app.task(add), app.task(name="other", queue="other")(add_in_thread)
    jobs = [task.using(delay=60).job(n) for n in range(2_500)]
    handles = await app.enqueue_many([*jobs, other.using(id="x").job(1)])
    assert [handle.id for handle in handles] == [*(job.id for job in jobs), "x"]
    assert all(handle.added for handle in handles)
    assert [(queue.name, queue.waiting) for queue in await app.queues()] == [
        ("default", 2_500),
        ("other", 1),
    ]
    # The same again is stored once: the ids are taken.
    again = await app.enqueue_many(jobs[:3])
    assert [handle.added for handle in again] == [False] * 3
    assert await waiting(app) == 2_501
    assert await app.enqueue_many([]) == []


async def test_the_same_id_twice_in_one_batch_is_one_job(app: App) -> None:
    task = app.task(add)
    handles = await app.enqueue_many([task.using(id="x").job(n) for n in (1, 2)])
    assert [handle.added for handle in handles] == [True, False]
    assert await waiting(app) == 1


async def test_a_job_of_another_app_is_refused_and_nothing_is_stored(app: App) -> None:
    task, alien = app.task(add), App("memory://").task(add_in_thread)
    with pytest.raises(UnknownTask, match="add_in_thread"):
        await app.enqueue_many([task.job(1), alien.job(1)])
    assert await app.queues() == []


@pytest.mark.parametrize(
    "jobs", [[5], ["id"], 5, {5: 5}.keys(), "text"], ids=["number", "id", "one", "view", "text"]
)
async def test_what_is_no_list_of_jobs_is_refused(app: App, jobs: Any) -> None:
    with pytest.raises(UsageError, match=r"created with task\.job"):
        await app.enqueue_many(jobs)
    with pytest.raises(UsageError, match=r"created with task\.job"):
        app.sync.enqueue_many(jobs)


@pytest.mark.parametrize(
    "change",
    [
        {"id": ""},
        {"id": "x" * 201},
        {"id": "two\nlines"},
        {"queue": "no such name"},
        {"priority": 4},
        {"due_ms": -1},
        {"due_ms": LATEST_MS + 1},
    ],
    ids=str,
)
async def test_a_job_that_was_changed_by_hand_is_checked(app: App, change: dict[str, Any]) -> None:
    job = msgspec.structs.replace(app.task(add).job(1), **change)
    with pytest.raises(UsageError):
        await app.enqueue_many([job])
    with pytest.raises(UsageError):
        app.sync.enqueue_many([job])
    assert await waiting(app) == 0


async def test_a_generator_of_jobs_is_taken_by_the_portion(app: App) -> None:
    task = app.task(add)
    stored: list[int] = []

    def made() -> Iterator[Job]:
        for n in range(9_000):
            if n % 1_000 == 0:
                stored.append(len(app._store._jobs))  # type: ignore[attr-defined]
            yield task.using(delay=60, id=f"{n}").job(n)

    handles = await app.enqueue_many(made())
    assert [handle.id for handle in handles] == [f"{n}" for n in range(9_000)]
    assert await waiting(app) == 9_000
    assert stored == [0] * 4 + [4_000] * 4 + [8_000]


async def test_what_a_generator_gave_before_its_mistake_is_stored(app: App) -> None:
    task = app.task(add)

    def made() -> Iterator[Any]:
        yield from (task.job(n) for n in range(4_000))
        yield "no job"

    with pytest.raises(BadArguments):
        await app.enqueue_many(made())
    assert await waiting(app) == 4_000


def test_a_generator_runs_in_the_thread_that_made_it(app: App) -> None:
    task = app.task(add)
    threads = set()

    def made() -> Iterator[Job]:
        threads.add(threading.get_ident())
        yield task.using(delay=60).job(1)

    assert len(app.sync.enqueue_many(made())) == 1
    assert threads == {threading.get_ident()}


# --- Several event loops


def test_an_app_outlives_its_event_loop(app: App) -> None:
    task = app.task(add)

    async def enqueue() -> int:
        await task.enqueue(1)
        return await waiting(app)

    async def work() -> int:
        async with app.worker():
            return await (await task.enqueue(1)).result(timeout=5)

    assert [asyncio.run(enqueue()) for _ in range(3)] == [1, 2, 3]
    assert asyncio.run(work()) == 1
    assert task.enqueue_sync(2).added
    app.sync.close()


def test_event_loops_in_several_threads_share_an_app(app: App) -> None:
    task = app.task(add)
    started = threading.Barrier(4)

    async def enqueue() -> None:
        started.wait(5)
        await asyncio.gather(*(task.enqueue(n) for n in range(50)))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(asyncio.run, enqueue()) for _ in range(4)]:
            done.result()
    assert asyncio.run(waiting(app)) == 200


class NosyLoop(asyncio.SelectorEventLoop):
    """Lets another thread start a loop at the moment in which it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.when_looked_at: Callable[[], object] | None = None

    def is_closed(self) -> bool:
        if (act := self.when_looked_at) is not None:
            self.when_looked_at = None
            act()
        return super().is_closed()


def test_a_loop_may_start_while_another_one_starts(app: App) -> None:
    task = app.task(add)
    # A thread that may have to wait for ours, so ours waits for it but a moment.
    thread = threading.Thread(target=lambda: asyncio.run(enqueue(2)))

    async def enqueue(n: int) -> None:
        await task.enqueue(n)

    def start_another() -> None:
        thread.start()
        thread.join(0.2)

    with asyncio.Runner(loop_factory=NosyLoop) as runner:
        runner.run(enqueue(0))
        loop = runner.get_loop()
        assert isinstance(loop, NosyLoop)
        loop.when_looked_at = start_another
        try:
            asyncio.run(enqueue(1))
        finally:
            thread.join(5)
    assert asyncio.run(waiting(app)) == 3


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_loop_that_was_closed_while_it_waited_does_not_disturb_the_others(
    kind: str, tmp_path: Path
) -> None:
    app = App("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/jobs.db")
    task = app.task(add)
    loop = asyncio.new_event_loop()
    # It would complain of the tasks that we abandon.
    loop.set_exception_handler(lambda loop, context: None)

    async def begin_to_wait() -> list[asyncio.Task[Any]]:
        store = (await app.client()).store
        waits = (
            store.wait(["default"], now_ms=0, until_ms=60_000),
            store.asked("worker", now_ms=0, until_ms=60_000),
        )
        tasks = [loop.create_task(wait) for wait in waits]
        # Calls that begin later have their answers: these wait by now.
        for _ in range(3):
            await store.get(["none"])
        return tasks

    abandoned = loop.run_until_complete(begin_to_wait())
    loop.close()
    assert task.enqueue_sync(1).added
    assert task.enqueue_sync(2).added
    assert asyncio.run(waiting(app)) == 2
    assert not any(each.done() for each in abandoned)
    app.sync.close()


async def test_a_wait_may_be_collected_as_garbage_in_the_middle_of_a_step() -> None:
    store = MemoryStore()
    waits = [
        store.wait(["default"], now_ms=0, until_ms=60_000),
        store.asked("worker", now_ms=0, until_ms=60_000),
    ]
    for wait in waits:
        wait.send(None)
    finished = threading.Event()

    def step() -> None:
        with store._lock:
            for wait in waits:
                wait.close()
        finished.set()

    threading.Thread(target=step, daemon=True).start()
    assert await asyncio.to_thread(finished.wait, 5)
    assert not store._waiters.anyone
