"""Lifespans and middleware in a box, with and without an event loop, and in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from tickwheel import (
    INJECTED,
    App,
    JobContext,
    LifespanError,
    Outcome,
    Retry,
    State,
    Task,
    UsageError,
    current_job,
)
from tickwheel.testing import run_virtual, sandbox

CallNext = Callable[[], Awaitable[Any]]


class Db:
    """What a lifespan opens."""


class File:
    """What the one of child processes opens."""


class Shop:
    """An app with a lifespan of each kind, a task of each pool, and a record."""

    def __init__(self) -> None:
        self.app = app = App("sqlite:///jobs.db")
        self.story: list[str] = []

        @app.lifespan
        async def db() -> AsyncIterator[Db]:
            await asyncio.sleep(0)
            self.story.append("db opened")
            yield Db()
            await asyncio.sleep(0)
            self.story.append("db closed")

        @app.lifespan
        def file() -> Iterator[File]:
            self.story.append("file opened")
            yield File()
            self.story.append("file closed")

        @app.task
        async def on_loop(n: int, db: Db = INJECTED) -> list[Any]:
            return [n, type(db).__name__, self.state()]

        @app.task
        def in_thread(n: int, db: Db = INJECTED) -> list[Any]:
            return [n, type(db).__name__, self.state()]

        self.on_loop, self.in_thread = on_loop, in_thread
        self.in_child = app.task(pool="process")(in_child)

    @staticmethod
    def state() -> str:
        job = current_job()
        assert job is not None
        return type(job.state).__name__


def in_child(n: int, file: File = INJECTED) -> list[Any]:
    return [n, type(file).__name__, Shop.state()]


RESULTS = [[1, "Db", "Db"], [2, "Db", "Db"], [3, "File", "File"]]
OPENED, CLOSED = ["db opened", "file opened"], ["file closed", "db closed"]


@pytest.mark.parametrize("virtual", [False, True])
def test_a_lifespan_is_opened_for_the_first_run_and_closed_with_the_box(virtual: bool) -> None:
    shop = Shop()

    async def story() -> None:
        async with sandbox(shop.app) as box:
            await shop.on_loop.enqueue(1)
            await shop.in_thread.enqueue(2)
            await shop.in_child.enqueue(3)
            box.assert_enqueued(shop.on_loop, 1)
            assert shop.story == []
            runs = await box.drain()
            assert [run.result for run in runs] == RESULTS
            await shop.on_loop.enqueue(4)
            await box.drain()
            assert sorted(shop.story) == OPENED
        assert sorted(shop.story[2:]) == sorted(CLOSED)

    run_virtual(story()) if virtual else asyncio.run(story())


def test_without_an_event_loop_too() -> None:
    shop = Shop()
    with sandbox(shop.app) as box:
        shop.on_loop.enqueue_sync(1)
        shop.in_thread.enqueue_sync(2)
        shop.in_child.enqueue_sync(3)
        assert shop.story == []
        assert [run.result for run in box.drain()] == RESULTS
        assert shop.story == OPENED
    assert sorted(shop.story[2:]) == sorted(CLOSED)


def test_a_sync_lifespan_is_on_the_thread_of_the_test() -> None:
    app = App()
    threads: list[int] = []

    @app.lifespan
    def db() -> Iterator[None]:
        threads.append(threading.get_ident())
        yield
        threads.append(threading.get_ident())

    @app.task
    def work() -> None: ...

    with sandbox(app, inline=True):
        work.enqueue_sync()
    assert threads == [threading.get_ident()] * 2


async def test_a_box_that_runs_nothing_opens_nothing() -> None:
    shop = Shop()
    async with sandbox(shop.app) as box:
        await shop.on_loop.using(delay="1h").enqueue(1)
        await box.drain()
    assert shop.story == []


def failing() -> tuple[App, Task[[], None, None]]:
    app = App()

    @app.lifespan
    async def db() -> AsyncIterator[Db]:
        raise ConnectionError("no database")
        yield Db()

    return app, app.task(work)


def work() -> None: ...


@pytest.mark.parametrize("inline", [False, True])
async def test_one_that_fails_is_raised_in_the_test_and_the_job_waits(inline: bool) -> None:
    app, task = failing()
    async with sandbox(app, inline=inline) as box:
        with pytest.raises(LifespanError, match="failed at its start: ConnectionError"):
            await task.enqueue()
            await box.drain()
        assert [job.state for job in box.jobs()] == [State.WAITING]


async def test_one_that_fails_when_it_is_closed_is_raised_in_the_test() -> None:
    app = App()

    @app.lifespan
    async def db() -> AsyncIterator[None]:
        yield
        raise OSError("gone")

    @app.task
    async def work() -> None: ...

    with pytest.raises(LifespanError, match="failed at its close: OSError: gone"):
        async with sandbox(app, inline=True):
            await work.enqueue()


# --- Middleware

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class Watched:
    """An app with middleware and a task of each pool."""

    def __init__(self) -> None:
        self.app = app = App()
        self.story: list[str] = []

        @app.middleware
        async def outer(job: JobContext, call_next: CallNext) -> Any:
            await asyncio.sleep(0)
            self.story.append("outer")
            variable.set(job.job.task)
            value = await call_next()
            await asyncio.sleep(0)
            return {"value": value}

        @app.middleware
        async def inner(job: JobContext, call_next: CallNext) -> Any:
            self.story.append("inner")
            return await call_next()

        @app.task
        async def on_loop() -> str:
            await asyncio.sleep(0)
            return variable.get()

        @app.task
        def in_thread() -> str:
            return variable.get()

        self.tasks: list[Task[..., Any, Any]]
        self.tasks = [on_loop, in_thread, app.task(pool="process", name="in_child")(in_middle)]


def in_middle() -> str:
    return variable.get()


VALUES = [{"value": name} for name in ("on_loop", "in_thread", "in_child")]


@pytest.mark.parametrize("how", ["loop", "virtual", "none", "inline"])
def test_middleware_is_around_each_run(how: str) -> None:
    watched = Watched()

    async def story() -> list[Any]:
        async with sandbox(watched.app) as box:
            for task in watched.tasks:
                await task.enqueue()
            return [run.result for run in await box.drain()]

    if how in ("loop", "virtual"):
        results = run_virtual(story()) if how == "virtual" else asyncio.run(story())
    else:
        with sandbox(watched.app, inline=how == "inline") as box:
            for task in watched.tasks:
                task.enqueue_sync()
            box.drain()
            results = [run.result for run in box.runs]
    assert sorted(results, key=str) == sorted(VALUES, key=str)
    assert sorted(watched.story) == ["inner"] * 3 + ["outer"] * 3
    assert variable.get() == "unset"


def test_a_plain_task_is_on_the_thread_of_the_test_and_outside_of_any_loop() -> None:
    app = Watched().app

    @app.task
    def second() -> int:
        return 2

    @app.task
    def first() -> int:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        second.enqueue_sync()
        return threading.get_ident()

    with sandbox(app, inline=True) as box:
        first.enqueue_sync()
        assert [run.result for run in box.runs] == [{"value": threading.get_ident()}, {"value": 2}]


@pytest.mark.parametrize("loop", [False, True])
def test_a_run_says_what_the_middleware_made_of_it(loop: bool) -> None:
    app = App()

    @app.middleware
    async def judge(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except KeyError:
            return "swallowed"
        except ValueError as error:
            raise Retry("1h") from error
        except LookupError as error:
            raise PermissionError("not today") from error

    @app.task
    def fail(how: str) -> None:
        raise {"key": KeyError("a"), "value": ValueError("b"), "look": IndexError("c")}[how]

    async def story() -> list[Any]:
        async with sandbox(app) as box:
            for how in ("key", "value", "look"):
                await fail.enqueue(how)
            return await box.drain()

    if loop:
        runs = asyncio.run(story())
    else:
        with sandbox(app) as box:
            for how in ("key", "value", "look"):
                fail.enqueue_sync(how)
            runs = box.drain()
    swallowed, retried, refused = runs
    assert (swallowed.outcome, swallowed.result) == (Outcome.DONE, "swallowed")
    assert swallowed.exception is None and not swallowed.failed
    assert isinstance(retried.exception, Retry) and not retried.failed
    assert isinstance(refused.exception, PermissionError) and refused.failed
    assert refused.error == "PermissionError: not today"


def test_the_timeout_includes_it_in_virtual_time() -> None:
    app = App()

    @app.middleware
    async def slow(job: JobContext, call_next: CallNext) -> Any:
        await asyncio.sleep(6)
        await call_next()
        await asyncio.sleep(6)

    @app.task(timeout="10s", retries=0)
    def work() -> None: ...

    async def story() -> None:
        async with sandbox(app) as box:
            start = box.now
            await work.enqueue()
            [run] = await box.drain()
            assert isinstance(run.exception, TimeoutError)
            assert (box.now - start).total_seconds() == 10

    run_virtual(story())


def test_the_timeout_of_an_async_task_without_a_loop_includes_it() -> None:
    app = App()

    @app.middleware
    async def hang(job: JobContext, call_next: CallNext) -> Any:
        await asyncio.Event().wait()

    @app.task(timeout="100ms", retries=0)
    async def work() -> None: ...

    with sandbox(app) as box:
        work.enqueue_sync()
        [run] = box.drain()
        assert isinstance(run.exception, TimeoutError)


async def test_an_async_lifespan_is_not_opened_on_another_thread() -> None:
    shop = Shop()
    async with sandbox(shop.app, inline=True):
        with pytest.raises(UsageError, match="is async and can't be opened on this thread"):
            await asyncio.to_thread(shop.in_thread.enqueue_sync, 1)
        await shop.on_loop.enqueue(1)
        await asyncio.to_thread(shop.in_thread.enqueue_sync, 1)
