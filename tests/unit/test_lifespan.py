"""What a worker opens before its first job and closes after its last: `@app.lifespan`."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import around_tasks
import pytest

from tickwheel import (
    INJECTED,
    App,
    BadArguments,
    BadConfig,
    JobFailed,
    LifespanError,
    Outcome,
    State,
    current_job,
)
from tickwheel.clock import LoopClock
from tickwheel.engine import attempt
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import run_virtual

PATIENCE_S = 30


class Db:
    """A value that no JSON can carry."""

    def __init__(self) -> None:
        self.open = True


class Other:
    """Something else."""


@pytest.fixture
def app() -> App:
    return App("memory://")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What the processes of `around_tasks` noted."""
    path = tmp_path / "record"
    path.touch()
    monkeypatch.setenv(around_tasks.RECORD, str(path))
    return lambda: path.read_text().splitlines()


def words(record: list[str]) -> list[str]:
    """The record without the numbers of the processes."""
    return [line.rpartition(" ")[0] for line in record]


def opening(app: App) -> list[str]:
    """Give the app a lifespan; returns what happens to it."""
    story: list[str] = []

    @app.lifespan
    async def db() -> AsyncIterator[Db]:
        story.append("opened")
        db = Db()
        yield db
        db.open = False
        story.append("closed")

    return story


# --- Open, use, close


async def test_it_is_open_from_before_the_first_run_until_after_the_last(app: App) -> None:
    story = opening(app)
    started = asyncio.Event()

    @app.task
    async def use(db: Db = INJECTED) -> None:
        job = current_job()
        assert job is not None and job.state is db
        story.append("began")
        started.set()
        await asyncio.sleep(0.1)
        story.append(f"ended, {db.open}")

    await use.enqueue()
    async with app.worker():
        await started.wait()
    assert story == ["opened", "began", "ended, True", "closed"]


async def test_every_worker_opens_its_own(app: App) -> None:
    story = opening(app)
    async with app.worker(), app.worker():
        assert story == ["opened"] * 2
    async with app.worker():
        pass
    assert story == ["opened", "opened", "closed", "closed", "opened", "closed"]


async def test_without_a_lifespan_the_state_is_none(app: App) -> None:
    @app.task
    async def look() -> bool:
        job = current_job()
        assert job is not None
        return job.state is None

    job = await look.enqueue()
    async with app.worker():
        assert await job.result(timeout=PATIENCE_S) is True


async def test_a_thread_gets_the_same_value_as_the_loop(app: App) -> None:
    opening(app)
    seen: list[Any] = []

    @app.task
    def in_thread(n: int, db: Db = INJECTED) -> None:
        job = current_job()
        assert job is not None and job.state is db
        seen.append(db)

    @app.task
    async def on_loop(db: Db = INJECTED, n: int = 0) -> int:
        seen.append(db)
        return n

    async with app.worker():
        await (await in_thread.enqueue(1)).result(timeout=PATIENCE_S)
        assert await (await on_loop.enqueue(n=7)).result(timeout=PATIENCE_S) == 7
    assert len(seen) == 2 and seen[0] is seen[1] and isinstance(seen[0], Db)


async def test_a_sync_one_alone_is_opened_in_a_thread_and_closed_in_the_same(app: App) -> None:
    story: list[Any] = []

    @app.lifespan
    def db() -> Iterator[sqlite3.Connection]:
        story.append(threading.get_ident())
        # It refuses to be closed in another thread.
        with closing(sqlite3.connect(":memory:")) as connection:
            yield connection
        story.append("closed")

    @app.task
    async def look(db: sqlite3.Connection = INJECTED) -> bool:
        return isinstance(db, sqlite3.Connection)

    job = await look.enqueue()
    async with app.worker():
        assert await job.result(timeout=PATIENCE_S) is True
    assert len(story) == 2 and story[1] == "closed" and story[0] != threading.get_ident()


async def test_a_function_that_returns_a_context_manager_is_one(app: App) -> None:
    @app.lifespan
    @asynccontextmanager
    async def db() -> AsyncIterator[Db]:
        yield Db()

    @app.task
    async def look(db: Db = INJECTED) -> bool:
        return db.open

    job = await look.enqueue()
    async with app.worker():
        assert await job.result(timeout=PATIENCE_S) is True


async def test_a_lifespan_may_use_the_store(app: App) -> None:
    @app.task
    async def greet() -> str:
        return "hello"

    @app.lifespan
    async def at_start() -> AsyncIterator[None]:
        await greet.using(id="first").enqueue()
        yield

    async with app.worker():
        assert await app.job("first").result(timeout=PATIENCE_S) == "hello"


# --- Child processes


async def test_each_pool_gets_the_value_of_its_own_lifespan(
    record: Callable[[], list[str]],
) -> None:
    app = around_tasks.app
    async with app, app.worker(processes=1):
        jobs = [
            await around_tasks.on_loop.enqueue(1),
            await around_tasks.in_thread.enqueue(n=2),  # type: ignore[call-arg]
        ]
        children = [await around_tasks.in_child.enqueue(n) for n in (3, 4)]
        results = [await job.result(timeout=PATIENCE_S) for job in jobs]
        assert results == [[1, "Pool", "Pool"], [2, "Pool", "Pool"]]
        results = [await job.result(timeout=PATIENCE_S) for job in children]
        assert results == [[3, "File"], [4, "File"]]
    # Once per child, before its first task, and closed before the worker's own.
    assert words(record()) == [
        *("pool opened", "file opened", "ran", "ran", "file closed", "pool closed")
    ]
    pids = {line.rpartition(" ")[2] for line in record() if not line.startswith("pool")}
    assert len(pids) == 1


async def test_a_child_that_can_not_open_it_costs_the_job_nothing(
    record: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(around_tasks.MISCHIEF, "fail")
    app = around_tasks.app
    async with app, app.worker(processes=1):
        job = await around_tasks.in_child.enqueue(1)
        async with asyncio.timeout(PATIENCE_S):
            while not (await job.info()).history:
                await asyncio.sleep(0.01)
        info = await job.info()
        await job.cancel()
    problem = "the lifespan around_tasks.file failed in its process: OSError: no such file"
    [run] = info.history
    assert run.outcome is Outcome.RELEASE and problem in str(run.error)
    # Another child, here or elsewhere, tries again a little later.
    assert info.state is State.WAITING and info.failures == 0 and "ran" not in words(record())
    assert round(info.due.timestamp() * 1000) - run.ended_ms == attempt.NOT_STARTED_MS
    assert any(problem in each.getMessage() and each.exc_info for each in caplog.records)


@pytest.mark.parametrize("mischief", ["hang", "fail at close"])
async def test_a_child_that_can_not_close_it_is_ended_all_the_same(
    mischief: str,
    record: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(around_tasks.MISCHIEF, mischief)
    app = around_tasks.app
    async with app:
        job = await around_tasks.in_child.enqueue(1)
        async with asyncio.timeout(PATIENCE_S), app.worker(processes=1, grace=0):
            await job.result(timeout=PATIENCE_S)
        assert (await job.info()).state is State.DONE
    last = "file hangs" if mischief == "hang" else "file closed"
    assert words(record())[-2:] == [last, "pool closed"]
    killed = "child processes did not close their lifespan in time; killed" in caplog.text
    assert killed is (mischief == "hang")
    assert ("OSError: the disk is full" in capfd.readouterr().err) is not killed


async def test_a_child_killed_at_a_timeout_does_not_close_it(
    record: Callable[[], list[str]],
) -> None:
    app = around_tasks.app
    async with app, app.worker(processes=1):
        job = await around_tasks.too_slow.enqueue()
        with pytest.raises(JobFailed, match="ran longer than its timeout"):
            await job.result(timeout=PATIENCE_S)
        again = await around_tasks.in_child.enqueue(1)
        assert await again.result(timeout=PATIENCE_S) == [1, "File"]
    counts = words(record())
    assert counts.count("file opened") == 2 and counts.count("file closed") == 1


# --- It fails, hangs, is slow


class Untouched(MemoryStore):
    """Nothing may be claimed from it."""

    async def claim(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a job was claimed")


async def fails() -> AsyncIterator[Db]:
    raise ConnectionError("no database")
    yield Db()


def fails_sync() -> Iterator[Db]:
    raise ConnectionError("no database")
    yield Db()


@pytest.mark.parametrize("function", [fails, fails_sync])
async def test_one_that_fails_at_its_start_keeps_the_worker_from_starting(
    function: Callable[[], Any],
) -> None:
    app = App(Untouched())
    app.lifespan(function)

    @app.task
    async def use() -> None: ...

    job = await use.enqueue()
    problem = rf"{function.__name__} failed at its start: ConnectionError: no database"
    with pytest.raises(LifespanError, match=problem) as caught:
        async with app.worker():
            raise AssertionError("it started")
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert (await job.info()).attempts == 0


def test_one_that_hangs_at_its_start_is_told_of_and_can_be_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story: list[str] = []

    async def virtually() -> None:
        app = App("memory://", clock=LoopClock())
        loop = asyncio.get_running_loop()

        @app.lifespan
        async def db() -> AsyncIterator[Db]:
            try:
                await asyncio.sleep(3600)
                yield Db()
            finally:
                story.append("left")

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20), app.worker(guarded=False):
                raise AssertionError("it started")
        assert loop.time() == pytest.approx(20, abs=0.1)
        assert story == ["left"]

    run_virtual(virtually())
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert re.search(r"the lifespan .*db is still starting", warning.getMessage())


def test_a_start_of_less_than_ten_seconds_is_nothing_to_tell(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def virtually() -> None:
        app = App("memory://", clock=LoopClock())

        @app.lifespan
        async def db() -> AsyncIterator[None]:
            await asyncio.sleep(9)
            yield

        async with app.worker(guarded=False):
            pass

    run_virtual(virtually())
    assert "still starting" not in caplog.text


async def test_a_sync_one_that_opens_after_all_is_closed_again(app: App) -> None:
    entering, freed, closed = threading.Event(), threading.Event(), threading.Event()

    @app.lifespan
    def db() -> Iterator[None]:
        entering.set()
        freed.wait(PATIENCE_S)
        yield
        closed.set()

    async def work() -> None:
        async with app.worker():
            raise AssertionError("it started")

    task = asyncio.create_task(work())
    await asyncio.to_thread(entering.wait, PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    freed.set()
    assert await asyncio.to_thread(closed.wait, PATIENCE_S)


def test_jobs_are_settled_before_it_is_closed_and_a_slow_close_is_waited_for() -> None:
    seen: list[State] = []

    async def virtually() -> None:
        app = App("memory://", clock=LoopClock())

        @app.task
        async def slow() -> None:
            await asyncio.sleep(5)

        @app.lifespan
        async def db() -> AsyncIterator[None]:
            yield
            seen.append((await job.info()).state)
            await asyncio.sleep(15)
            seen.append((await job.info()).state)

        async with app:
            job = await slow.enqueue()
            async with app.worker(guarded=False, grace="30s"):
                await asyncio.sleep(1)
            assert seen == [State.DONE, State.DONE]

    run_virtual(virtually())


@pytest.mark.parametrize("stubborn", [False, True])
def test_one_that_hangs_at_its_close_gets_the_rest_of_the_grace(
    stubborn: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def virtually() -> None:
        app = App("memory://", clock=LoopClock())
        loop = asyncio.get_running_loop()
        freed = asyncio.Event()

        @app.task
        async def slow() -> None:
            await asyncio.sleep(5)

        @app.lifespan
        async def db() -> AsyncIterator[None]:
            yield
            while not freed.is_set():
                try:
                    await freed.wait()
                except asyncio.CancelledError:
                    if not stubborn:
                        raise

        async with app:
            job = await slow.enqueue()
            async with app.worker(guarded=False, grace="30s"):
                await asyncio.sleep(1)
                stopped_s = loop.time()
            assert loop.time() - stopped_s == pytest.approx(31 if stubborn else 30, abs=0.2)
            assert (await job.info()).state is State.DONE
            freed.set()

    run_virtual(virtually())
    assert re.search(r"the lifespan .*db did not close within 2\d(\.\d+)?s", caplog.text)


def test_without_grace_it_still_gets_a_moment() -> None:
    closed: list[bool] = []

    async def virtually() -> None:
        app = App("memory://", clock=LoopClock())

        @app.lifespan
        async def db() -> AsyncIterator[None]:
            yield
            await asyncio.sleep(1.9)
            closed.append(True)

        async with app.worker(guarded=False, grace=0):
            pass

    run_virtual(virtually())
    assert closed == [True]


async def test_one_that_is_being_closed_gets_its_time_although_the_program_is_interrupted(
    app: App,
) -> None:
    closing, may_close, story = asyncio.Event(), asyncio.Event(), []

    @app.lifespan
    async def db() -> AsyncIterator[None]:
        yield
        closing.set()
        await may_close.wait()
        story.append("closed")

    async def program() -> None:
        async with app.worker():
            pass

    running = asyncio.create_task(program())
    await closing.wait()
    running.cancel()
    asyncio.get_running_loop().call_soon(may_close.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert story == ["closed"]


async def test_one_that_fails_while_its_worker_runs_is_told_once(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    fails = asyncio.Event()

    @app.lifespan
    async def db() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:

            async def fail() -> None:
                await fails.wait()
                raise OSError("the socket is gone")

            group.create_task(fail())
            yield

    with pytest.raises(LifespanError, match="failed while its worker was running"):
        async with app.worker():
            fails.set()
            await asyncio.sleep(PATIENCE_S)
    assert "at its close" not in caplog.text


async def test_one_that_fails_at_its_close_is_logged(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.lifespan
    async def db() -> AsyncIterator[None]:
        yield
        raise OSError("the socket is gone")

    @app.task
    async def use() -> None: ...

    job = await use.enqueue()
    async with app.worker():
        await job.result(timeout=PATIENCE_S)
    [error] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "db failed at its close: OSError: the socket is gone" in error.getMessage()
    assert error.exc_info is not None and isinstance(error.exc_info[1], OSError)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_it_is_closed_however_the_block_ends(app: App, how: str) -> None:
    story = opening(app)
    working = asyncio.Event()

    async def work() -> None:
        async with app.worker():
            working.set()
            if how == "failed":
                raise LookupError("of the block")
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await working.wait()
    if how == "cancelled":
        task.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else LookupError):
        await task
    assert story == ["opened", "closed"]


async def test_one_that_fails_while_the_worker_runs_ends_the_worker(app: App) -> None:
    broken = asyncio.Event()

    async def listen() -> None:
        await broken.wait()
        raise ConnectionError("lost")

    @app.lifespan
    async def listener() -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            group.create_task(listen())
            yield

    with pytest.raises(LifespanError, match="failed while its worker was running"):
        async with asyncio.timeout(PATIENCE_S), app.worker():
            broken.set()
            await asyncio.Event().wait()


async def test_one_that_exits_does_not_end_the_program(app: App) -> None:
    @app.lifespan
    async def db() -> AsyncIterator[None]:
        raise SystemExit(3)
        yield

    with pytest.raises(LifespanError, match=r"it called sys.exit\(3\)"):
        async with app.worker():
            raise AssertionError("it started")


# --- The parameter


async def test_what_is_filled_in_is_no_argument(app: App) -> None:
    opening(app)

    @app.task
    async def use(a: int, db: Db = INJECTED, *, b: int = 0) -> int:
        return a + b + db.open

    @app.task
    async def first(db: Db, a: int, b: int = 2) -> list[int]:
        return [a, b]

    job = await use.enqueue(1, b=5)
    info = await job.info()
    assert (info.payload, info.arguments) == ('{"a":1,"b":5}', {"a": 1, "b": 5})
    other = await first.enqueue(7)  # type: ignore[call-arg, arg-type]
    async with app.worker():
        assert await job.result(timeout=PATIENCE_S) == 7
        assert await other.result(timeout=PATIENCE_S) == [7, 2]


async def test_it_can_not_be_enqueued(app: App) -> None:
    opening(app)

    @app.task
    async def use(a: int, db: Db = INJECTED) -> None: ...

    with pytest.raises(BadArguments, match="'db' is filled in by the worker; leave it out"):
        await use.enqueue(1, db=Db())
    with pytest.raises(BadArguments, match="too many positional arguments"):
        await use.enqueue(1, Db())


async def test_a_direct_call_needs_it(app: App) -> None:
    opening(app)

    @app.task
    async def use(a: int, db: Db = INJECTED) -> bool:
        return db.open

    assert await use(1, Db()) and await use(1, db=Db())
    with pytest.raises(BadArguments, match=r"use\(\): only a worker fills in 'db'; in a direct"):
        await use(1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        await use(db=Db())  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="'open': only a worker fills in this parameter"):
        await use.function(1)


def test_a_subclass_or_a_built_in_type_is_an_argument(app: App) -> None:
    @app.lifespan
    async def names() -> AsyncIterator[str]:
        yield "x"

    @app.task
    async def greet(name: str) -> None: ...

    assert greet.definition.arguments.names == {"name"}


def test_a_task_that_takes_it_must_come_after_it(app: App) -> None:
    with pytest.raises(BadConfig, match="value of a lifespan, declare that before the task"):

        @app.task
        async def too_early(db: Db) -> None: ...

    with pytest.raises(BadConfig, match="'db' is INJECTED, but its annotation is not the class"):

        @app.task
        async def marked(db: Db = INJECTED) -> None: ...

    @app.task
    async def untyped(db: Model) -> None: ...

    with pytest.raises(BadConfig, match="task 'untyped' takes the value of a lifespan; declare"):

        @app.lifespan
        async def models() -> AsyncIterator[Model]:
            yield Model()


@dataclass
class Model:
    """A value that JSON could carry."""


def test_a_late_async_one_does_not_take_over_what_a_sync_one_fills_in(app: App) -> None:
    @app.lifespan
    def other() -> Iterator[Other]:
        yield Other()

    @app.task
    def use(other: Other = INJECTED) -> None: ...

    with pytest.raises(BadConfig, match="declare all lifespans before it"):
        opening(app)


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_only_a_sync_one_reaches_child_processes(app: App, pool: Any) -> None:
    opening(app)
    if pool == "thread":
        assert app.task(pool=pool)(in_any_pool).definition.injected == ("db",)
    else:
        with pytest.raises(BadConfig, match="yields where it runs"):
            app.task(pool=pool)(in_any_pool)


def in_any_pool(db: Db = INJECTED) -> None: ...


def test_it_is_passed_by_name(app: App) -> None:
    opening(app)

    def by_position(db: Db, /) -> None: ...

    def before_the_rest(db: Db, *rest: int) -> None: ...

    for function in (by_position, before_the_rest):
        with pytest.raises(BadConfig, match="passed by name; write it after \\*"):
            app.task(function)

    def after_the_rest(*rest: int, db: Db) -> None: ...

    assert app.task(after_the_rest).definition.injected == ("db",)


# --- What a lifespan may be


def test_what_is_not_a_lifespan_is_refused_at_once(app: App) -> None:
    async def no_yield() -> None: ...

    async def wants(app: App) -> AsyncIterator[None]:
        yield

    with pytest.raises(BadConfig, match="no_yield must yield once"):
        app.lifespan(no_yield)
    with pytest.raises(BadConfig, match="wants can't have parameters"):
        app.lifespan(wants)  # type: ignore[type-var]
    with pytest.raises(BadConfig, match="needs a function that you define"):
        app.lifespan(Db)
    opening(app)
    with pytest.raises(BadConfig, match="already has the async lifespan"):
        opening(app)


async def test_a_function_that_returns_nothing_is_refused_at_the_start(app: App) -> None:
    @app.lifespan
    def nothing() -> None: ...

    with pytest.raises(BadConfig, match="must yield once, or return an async context manager"):
        async with app.worker():
            raise AssertionError("it started")


async def test_child_processes_must_be_able_to_import_it(app: App) -> None:
    @app.lifespan
    def db() -> Iterator[None]:
        yield

    app.task(pool="process")(at_the_top)
    with pytest.raises(BadConfig, match=r"child processes open the lifespan .*db, and must import"):
        async with app.worker():
            raise AssertionError("it started")


def at_the_top() -> None: ...


@pytest.mark.parametrize("turns", range(8))
async def test_a_stop_at_any_moment_of_the_start_closes_what_was_opened(turns: int) -> None:
    app, told = App("memory://"), []

    @app.lifespan
    async def noted() -> AsyncIterator[None]:
        told.append("open")
        yield
        told.append("close")

    async def serve() -> None:
        async with app.worker():
            await asyncio.sleep(60)

    serving = asyncio.create_task(serve())
    while not told and not serving.done():
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    serving.cancel()
    await asyncio.wait([serving], timeout=PATIENCE_S)
    assert told == ["open", "close"]


async def test_a_sync_one_that_raises_stop_iteration_fails_at_once() -> None:
    app = App("memory://")

    class Odd:
        def __enter__(self) -> None:
            raise StopIteration

        def __exit__(self, *_: object) -> None: ...

    @app.lifespan
    def odd() -> AbstractContextManager[None]:
        return Odd()

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(LifespanError, match="StopIteration"):
            async with app.worker():
                pass
