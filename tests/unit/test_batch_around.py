"""What is around a batch: one middleware call and one state for all of its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import process_tasks
import pytest

from tickwheel import (
    INJECTED,
    App,
    BadConfig,
    JobContext,
    JobFailed,
    Partial,
    Retry,
    RetryPolicy,
    current_job,
    current_jobs,
)

PATIENCE_S = 30
CallNext = Callable[[], Awaitable[Any]]


class Db:
    def __init__(self) -> None:
        self.seen: list[int] = []


def opened(app: App) -> Db:
    """The value of a lifespan of this app."""
    db = Db()

    @app.lifespan
    async def database() -> AsyncIterator[Db]:
        yield db

    return db


async def results(task: Any, *items: int) -> list[Any]:
    jobs = [await task.enqueue(item) for item in items]
    return await asyncio.gather(
        *(job.result(timeout=PATIENCE_S) for job in jobs), return_exceptions=True
    )


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_middleware_is_called_once_for_a_batch(pool: str) -> None:
    app, around = App("memory://"), []

    @app.middleware
    async def noted(job: JobContext, call_next: CallNext) -> Any:
        around.append([each.job.id for each in current_jobs()])
        assert job.id == around[-1][0]
        return [value + 1 for value in await call_next()]

    def tenfold(items: list[int]) -> list[int]:
        assert current_job() is None
        assert [each.job.id for each in current_jobs()] == around[-1]
        return [item * 10 for item in items]

    async def on_loop(items: list[int]) -> list[int]:
        return tenfold(items)

    def off_loop(items: list[int]) -> list[int]:
        return tenfold(items)

    task = app.batch(size=3, linger="10s")(on_loop if pool == "async" else off_loop)
    async with app.worker():
        assert await results(task, 1, 2, 3) == [11, 21, 31]
    assert [len(ids) for ids in around] == [3]


async def test_middleware_decides_how_a_batch_ends() -> None:
    app, calls = App("memory://"), []

    @app.middleware
    async def choose(job: JobContext, call_next: CallNext) -> Any:
        calls.append(len(current_jobs()))
        if len(calls) == 1:
            raise Retry(delay=0)
        try:
            return await call_next()
        except Partial as partial:
            return [str(partial.errors.get(n)) for n in range(len(current_jobs()))]

    @app.batch(size=2, linger="10s", retries=RetryPolicy(retries=1, first=0, jitter=0))
    async def fail_first(items: list[int]) -> list[str] | None:
        raise Partial({0: ValueError("odd")})

    async with app.worker():
        found = await results(fail_first, 1, 2)
    assert sorted(found) in (["None", "odd"], ["odd", "odd"])
    assert calls[0] == 2


async def test_a_middleware_that_fails_fails_all_jobs_of_a_batch() -> None:
    app = App("memory://")

    @app.middleware
    async def refuse(job: JobContext, call_next: CallNext) -> Any:
        raise RuntimeError("not today")

    @app.batch(size=2, linger="10s", retries=0)
    async def work(items: list[int]) -> None: ...

    async with app.worker():
        found = await results(work, 1, 2)
    assert [type(each) for each in found] == [JobFailed, JobFailed]
    assert all("not today" in str(each) for each in found)


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_a_batch_gets_the_value_of_the_lifespan(pool: str) -> None:
    app = App("memory://")
    db = opened(app)

    async def on_loop(items: list[int], db: Db = INJECTED) -> None:
        assert {each.state for each in current_jobs()} == {db}
        db.seen += items

    def off_loop(items: list[int], db: Db = INJECTED) -> None:
        assert {each.state for each in current_jobs()} == {db}
        db.seen += items

    task: Any = app.batch(size=3, linger="10s")(on_loop if pool == "async" else off_loop)
    async with app.worker():
        assert await results(task, 1, 2, 3) == [None] * 3
    assert sorted(db.seen) == [1, 2, 3]


def test_a_batch_takes_one_parameter_beside_the_value_of_the_lifespan() -> None:
    app = App("memory://")
    opened(app)
    with pytest.raises(BadConfig, match="exactly one parameter"):

        @app.batch()  # type: ignore[arg-type]
        async def odd(items: list[int], others: list[int], db: Db = INJECTED) -> None: ...


async def test_a_batch_in_a_process_is_no_single_job() -> None:
    app = App("memory://")
    task = app.batch(size=2, linger="10s", pool="process")(process_tasks.whose_batch)
    async with app.worker(processes=1):
        assert await results(task, 1, 2) == ["None 0", "None 0"]


async def test_a_batch_starts_before_one_of_its_members_expires() -> None:
    app, made = App("memory://"), []

    @app.batch(size=10, linger="20s")
    async def note(items: list[int]) -> None:
        made.append(items)

    async with app.worker():
        stays = await note.enqueue(1)
        expires = await note.using(expires="1s").enqueue(2)
        await asyncio.gather(*(job.result(timeout=PATIENCE_S) for job in (stays, expires)))
    assert made == [[1, 2]]


async def test_each_job_of_a_batch_says_its_own_progress() -> None:
    app = App("memory://")
    said = asyncio.Event()

    @app.batch(size=2, linger="10s")
    async def slow(items: list[int]) -> None:
        for part, job in zip((0.25, 0.75), current_jobs(), strict=True):
            job.progress(part)
        await said.wait()

    async with app.worker(), asyncio.timeout(PATIENCE_S):
        jobs = [await slow.enqueue(n) for n in (1, 2)]
        parts: list[float] = []
        while parts != [0.25, 0.75]:
            infos = [await job.info() for job in jobs]
            parts = sorted(info.progress.part for info in infos if info.progress)
            await asyncio.sleep(0.02)
        said.set()
        await asyncio.gather(*(job.result() for job in jobs))


async def test_the_job_of_a_middleware_is_the_first_of_the_batch() -> None:
    app = App("memory://")
    cancelled = asyncio.Event()
    stopping: list[bool] = []

    @app.middleware
    async def noted(job: JobContext, call_next: CallNext) -> Any:
        job.progress(0.5, "from the middleware")
        result = await call_next()
        stopping.append(job.stopping)
        return result

    @app.batch(size=2, linger="5s")
    async def both(items: list[int]) -> None:
        await cancelled.wait()
        while not current_jobs()[0].stopping:
            await asyncio.sleep(0.01)

    async with app.worker(), asyncio.timeout(PATIENCE_S):
        jobs = [await both.enqueue(n) for n in range(2)]
        while (progress := (await jobs[0].info()).progress) is None:
            await asyncio.sleep(0.01)
        await jobs[0].cancel()
        cancelled.set()
        await jobs[1].result()
    assert progress.words == "from the middleware"
    assert stopping == [True]
