"""What an app does around each run: `@app.middleware`."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import process_tasks
import pytest
import unruly

from tickwheel import (
    App,
    BadConfig,
    GiveUp,
    Job,
    JobContext,
    JobFailed,
    Outcome,
    Retry,
    RetryPolicy,
    Snooze,
    State,
    Task,
    current_job,
)
from tickwheel.clock import LoopClock
from tickwheel.engine.processes import NotStarted
from tickwheel.engine.surroundings import chained
from tickwheel.testing import run_virtual

PATIENCE_S = 30

CallNext = Callable[[], Awaitable[Any]]

ONCE_MORE = RetryPolicy(retries=1, first=0, jitter=0)


@pytest.fixture
def app() -> App:
    return App("memory://")


async def on_loop(a: int, b: int = 2) -> list[int]:
    return [a, b]


def off_loop(a: int, b: int = 2) -> list[int]:
    return [a, b]


async def fail(how: str) -> None:
    process_tasks.fail(how)


EACH = pytest.mark.parametrize("pool", ["async", "thread", "process"])


def pair(app: App, pool: Any) -> Task[..., Any, Any]:
    """A task that returns its two arguments, in this pool."""
    functions: dict[str, Any] = {
        "async": on_loop,
        "thread": off_loop,
        "process": process_tasks.decorated.function,
    }
    task: Task[..., Any, Any] = app.task(pool=pool, retries=ONCE_MORE)(functions[pool])
    return task


def failing(app: App, pool: Any) -> Task[..., Any, Any]:
    """A task that fails as it is told, in this pool."""
    function: Any = fail if pool == "async" else process_tasks.fail
    task: Task[..., Any, Any] = app.task(pool=pool, retries=ONCE_MORE)(function)
    return task


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.01)


# --- Around every run


@EACH
async def test_the_first_is_outermost_and_each_may_replace_the_value(app: App, pool: str) -> None:
    story: list[str] = []

    @app.middleware
    async def outer(job: JobContext, call_next: CallNext) -> Any:
        story.append(f"outer, {job.job.task}")
        value = await call_next()
        story.append("outer again")
        return {"sum": value}

    @app.middleware
    async def inner(job: JobContext, call_next: CallNext) -> Any:
        story.append("inner")
        value = await call_next()
        story.append("inner again")
        return sum(value)

    task = pair(app, pool)
    async with app.worker():
        job = await task.enqueue(3, b=4)
        assert await job.result(timeout=PATIENCE_S) == {"sum": 7}
    assert story == [f"outer, {task.name}", "inner", "inner again", "outer again"]


async def test_it_knows_the_job_and_the_state(app: App) -> None:
    seen: list[Any] = []

    @app.lifespan
    async def db() -> AsyncIterator[str]:
        yield "the pool"

    @app.middleware
    async def look(job: JobContext, call_next: CallNext) -> Any:
        seen.append((job.job.id, job.state, job.stopping, current_job() == job))
        return await call_next()

    task = pair(app, "thread")
    async with app.worker():
        job = await task.enqueue(1)
        await job.result(timeout=PATIENCE_S)
    assert seen == [(job.id, "the pool", False, True)]


def test_without_any_there_is_nothing_to_call() -> None:
    async def one(job: JobContext, call_next: CallNext) -> None: ...

    assert chained([]) is None
    assert chained([one]) is one


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_the_task_sees_context_variables_that_it_sets(app: App, pool: Any) -> None:
    @app.middleware
    async def set_it(job: JobContext, call_next: CallNext) -> Any:
        variable.set(job.job.id)
        return await call_next()

    async def read_async() -> str:
        return variable.get()

    function: Any = read_async if pool == "async" else variable_value
    task: Task[..., str, Any] = app.task(pool=pool)(function)
    async with app.worker():
        job = await task.enqueue()
        assert await job.result(timeout=PATIENCE_S) == job.id
    assert variable.get() == "unset"


def variable_value() -> str:
    return variable.get()


class Framework(App):
    """An app with something of its own around each run."""

    class around:
        async def __aenter__(self) -> None:
            STORY.append("entered")

        async def __aexit__(self, *_: object) -> None:
            STORY.append("left")

        def __enter__(self) -> None:
            STORY.append("entered")

        def __exit__(self, *_: object) -> None:
            STORY.append("left")


STORY: list[str] = []


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_what_a_framework_does_is_inside(pool: str) -> None:
    STORY.clear()
    app = Framework("memory://")

    @app.middleware
    async def note(job: JobContext, call_next: CallNext) -> Any:
        STORY.append("before")
        value = await call_next()
        STORY.append("after")
        return value

    task = pair(app, pool)
    async with app.worker():
        assert await (await task.enqueue(1)).result(timeout=PATIENCE_S) == [1, 2]
    assert STORY == ["before", "entered", "left", "after"]


# --- How a run ends


@EACH
async def test_what_it_raises_is_how_the_run_failed(app: App, pool: str) -> None:
    ran: list[Any] = []

    @app.middleware
    async def refuse(job: JobContext, call_next: CallNext) -> Any:
        ran.append(await call_next())
        raise PermissionError("not today")

    task = pair(app, pool)
    async with app.worker():
        job = await task.enqueue(1)
        with pytest.raises(JobFailed, match="PermissionError: not today"):
            await job.result(timeout=PATIENCE_S)
    info = await job.info()
    # By the task's own policy: it was retried once.
    assert [run.outcome for run in info.history] == [Outcome.RETRY, Outcome.DEAD]
    assert ran == [[1, 2], [1, 2]] and "refuse\n" in str(info.traceback)


@EACH
async def test_it_may_swallow_an_error(app: App, pool: str) -> None:
    @app.middleware
    async def swallow(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except ValueError as error:
            return str(error)

    task = failing(app, pool)
    async with app.worker():
        job = await task.enqueue("plain")
        assert await job.result(timeout=PATIENCE_S) == "no luck"
    assert (await job.info()).attempts == 1


@EACH
async def test_an_error_that_it_lets_pass_is_that_of_the_task(app: App, pool: str) -> None:
    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        return await call_next()

    task = failing(app, pool)
    async with app.worker():
        job = await task.enqueue("plain")
        with pytest.raises(JobFailed, match="ValueError: no luck"):
            await job.result(timeout=PATIENCE_S)
    assert (await job.info()).failures == 2


async def test_an_interrupt_that_a_thread_raises_is_a_failure_and_no_end(app: App) -> None:
    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        return await call_next()

    @app.task(retries=0)
    def interrupt() -> None:
        raise KeyboardInterrupt

    async with app.worker():
        job = await interrupt.enqueue()
        with pytest.raises(JobFailed, match="KeyboardInterrupt"):
            await job.result(timeout=PATIENCE_S)


@EACH
async def test_it_may_call_the_task_again(app: App, pool: str) -> None:
    calls: list[str] = []

    @app.middleware
    async def persist(job: JobContext, call_next: CallNext) -> Any:
        for _ in range(3):
            try:
                return await call_next()
            except ValueError as error:
                calls.append(str(error))
        return calls

    task = failing(app, pool)
    async with app.worker():
        job = await task.enqueue("plain")
        assert await job.result(timeout=PATIENCE_S) == ["no luck"] * 3
    assert (await job.info()).attempts == 1


async def test_it_need_not_call_the_task(app: App) -> None:
    @app.middleware
    async def skip(job: JobContext, call_next: CallNext) -> str:
        return "skipped"

    job = await failing(app, "thread").enqueue("plain")
    async with app.worker():
        assert await job.result(timeout=PATIENCE_S) == "skipped"


@EACH
@pytest.mark.parametrize(
    ("choice", "outcome"),
    [
        (Retry("1h"), Outcome.RETRY),
        (Snooze("1h"), Outcome.SNOOZE),
        (GiveUp("enough"), Outcome.DEAD),
    ],
    ids=["retry", "snooze", "give up"],
)
async def test_it_may_choose_as_a_task_may(
    app: App, pool: str, choice: Exception, outcome: Outcome
) -> None:
    @app.middleware
    async def choose(job: JobContext, call_next: CallNext) -> Any:
        await call_next()
        raise choice

    task = pair(app, pool)
    job = await task.enqueue(1)
    async with app.worker():
        async with asyncio.timeout(PATIENCE_S):
            while not (await job.info()).history:
                await asyncio.sleep(0.01)
    [run] = (await job.info()).history
    assert run.outcome is outcome


@EACH
async def test_it_sees_what_the_task_chooses(app: App, pool: str) -> None:
    seen: list[str] = []

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except (Retry, Snooze, GiveUp) as choice:
            seen.append(type(choice).__name__)
            raise

    task = failing(app, pool)
    async with app.worker():
        job = await task.enqueue("give up")
        with pytest.raises(JobFailed, match="enough"):
            await job.result(timeout=PATIENCE_S)
    assert seen == ["GiveUp"] and (await job.info()).attempts == 1


async def test_a_child_that_never_began_is_no_failure(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BaseException] = []

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except BaseException as error:
            seen.append(error)
            raise

    async def no_child(*_: Any, **__: Any) -> Any:
        raise NotStarted("no memory")

    monkeypatch.setattr("tickwheel.engine.processes.ProcessPool.run", no_child)
    job = await pair(app, "process").enqueue(1)
    async with app.worker():
        async with asyncio.timeout(PATIENCE_S):
            while not (await job.info()).history:
                await asyncio.sleep(0.01)
    assert [run.outcome for run in (await job.info()).history] == [Outcome.RELEASE]
    assert isinstance(seen[0], NotStarted)


# --- Timeouts: in virtual time, where a thread takes none


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize(("before_s", "after_s"), [(11, 0), (0, 11), (6, 6)])
def test_the_timeout_includes_it(pool: Any, before_s: float, after_s: float) -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        loop = asyncio.get_running_loop()
        ends: list[tuple[str, float]] = []

        @app.middleware
        async def slow(job: JobContext, call_next: CallNext) -> Any:
            began_s = loop.time()
            try:
                await asyncio.sleep(before_s)
                value = await call_next()
                await asyncio.sleep(after_s)
                return value
            except asyncio.CancelledError:
                ends.append(("cancelled", loop.time() - began_s))
                raise

        function: Any = on_loop if pool == "async" else off_loop
        task: Task[..., Any, Any] = app.task(pool=pool, timeout="10s", retries=0)(function)
        async with app.worker(guarded=False):
            job = await task.enqueue(1)
            with pytest.raises(JobFailed, match="ran longer than its timeout of 10s"):
                await job.result(timeout=60)
        [(how, after)] = ends
        assert how == "cancelled" and after == pytest.approx(10, abs=0.1)

    run_virtual(story())


@pytest.mark.parametrize("pool", ["async", "thread"])
def test_calling_the_task_again_gives_it_no_more_time(pool: Any) -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        calls: list[float] = []

        @app.middleware
        async def again(job: JobContext, call_next: CallNext) -> Any:
            while True:
                await call_next()
                calls.append(1)
                await asyncio.sleep(4)

        function: Any = on_loop if pool == "async" else off_loop
        task: Task[..., Any, Any] = app.task(pool=pool, timeout="10s", retries=0)(function)
        async with app.worker(guarded=False):
            job = await task.enqueue(1)
            with pytest.raises(JobFailed, match="ran longer than its timeout of 10s"):
                await job.result(timeout=60)
        assert len(calls) == 3

    run_virtual(story())


async def test_the_start_of_a_child_process_does_not_count(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNRULY", "slow")

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        return await call_next()

    task = app.task(pool="process", timeout="900ms", retries=0)(unruly.where)
    async with app.worker(processes=1):
        job = await task.enqueue()
        assert await job.result(timeout=PATIENCE_S) != os.getpid()


async def test_a_child_is_killed_at_the_timeout_and_the_middleware_hears_of_it(
    app: App, tmp_path: Path
) -> None:
    heard: list[str] = []

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    path = tmp_path / "pid"
    task = app.task(pool="process", timeout="500ms", retries=0)(process_tasks.note_and_sleep)
    async with app.worker(processes=1):
        job = await task.enqueue(str(path), 60)
        with pytest.raises(JobFailed, match="ran longer than its timeout of 500ms"):
            await job.result(timeout=PATIENCE_S)
        # On a slow machine it may be killed before it has noted who it is.
        if path.exists() and (pid := path.read_text()):
            await until(lambda: not Path(f"/proc/{pid}").exists())
    assert heard == ["cancelled"]


async def test_a_thread_that_runs_too_long_is_left_behind_and_counted_as_running(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        return await call_next()

    @app.task(timeout="100ms", retries=0)
    def hang() -> None:
        freed.wait(PATIENCE_S)

    try:
        async with app.worker():
            job = await hang.enqueue()
            with pytest.raises(JobFailed, match="ran longer than its timeout"):
                await job.result(timeout=PATIENCE_S)
        assert "its thread keeps running" in caplog.text
    finally:
        freed.set()


# --- Cancels and stops


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize("where", ["before", "after"])
async def test_a_cancel_interrupts_it_in_any_pool(app: App, pool: str, where: str) -> None:
    reached, heard = asyncio.Event(), list[str]()

    @app.middleware
    async def wait(job: JobContext, call_next: CallNext) -> Any:
        if where == "after":
            await call_next()
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    task = pair(app, pool)
    async with app.worker():
        job = await task.enqueue(1)
        async with asyncio.timeout(PATIENCE_S):
            await reached.wait()
            await job.cancel()
            while (await job.info()).state is not State.CANCELLED:
                await asyncio.sleep(0.01)
    assert heard == ["cancelled"]


async def test_a_cancel_of_an_async_task_goes_through_it(app: App) -> None:
    began, heard = asyncio.Event(), list[str]()

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        finally:
            heard.append("left")

    @app.task
    async def hang() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            heard.append("task left")

    async with app.worker():
        job = await hang.enqueue()
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            await job.cancel()
            while (await job.info()).state is not State.CANCELLED:
                await asyncio.sleep(0.01)
    assert heard == ["task left", "left"]


async def test_a_cancel_that_kills_a_child_goes_through_it(app: App, tmp_path: Path) -> None:
    path, heard = tmp_path / "pid", list[str]()

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except asyncio.CancelledError:
            heard.append("cancelled")
            raise

    task = app.task(pool="process")(process_tasks.note_and_sleep)
    async with app.worker(processes=1):
        job = await task.enqueue(str(path), 60)
        await until(lambda: path.exists() and path.read_text() != "")
        await job.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while (await job.info()).state is not State.CANCELLED:
                await asyncio.sleep(0.01)
    assert heard == ["cancelled"]


async def test_a_thread_that_is_asked_to_stop_is_not_interrupted(app: App) -> None:
    began, heard = threading.Event(), list[str]()

    @app.middleware
    async def watch(job: JobContext, call_next: CallNext) -> Any:
        value = await call_next()
        heard.append(value)
        return value

    @app.task
    def wait() -> str:
        job = current_job()
        assert job is not None
        began.set()
        until = time.monotonic() + PATIENCE_S
        while not job.stopping and time.monotonic() < until:
            time.sleep(0.01)
        return "saw it"

    async with app.worker():
        job = await wait.enqueue()
        assert await asyncio.to_thread(began.wait, PATIENCE_S)
        await job.cancel()
        assert await job.result(timeout=PATIENCE_S) == "saw it"
    assert heard == ["saw it"]


async def stored(app: App, id: str) -> Job:
    [job] = await (await app.client()).store.get([id])
    assert job is not None
    return job


@pytest.mark.parametrize("inside", [False, True])
async def test_a_job_is_released_for_now_unless_a_thread_still_runs_it(
    app: App, inside: bool
) -> None:
    reached, freed = threading.Event(), threading.Event()

    @app.middleware
    async def wait(job: JobContext, call_next: CallNext) -> Any:
        value = await call_next()
        reached.set()
        await asyncio.Event().wait()
        return value

    @app.task
    def task() -> None:
        if inside:
            reached.set()
            freed.wait(PATIENCE_S)

    try:
        async with app:
            job = await task.enqueue()
            before = await stored(app, job.id)
            async with app.worker(grace=0, lease="15s"):
                assert await asyncio.to_thread(reached.wait, PATIENCE_S)
            after = await stored(app, job.id)
    finally:
        freed.set()
    assert after.state is State.WAITING
    # Another worker must not start it while the thread is at it, for as long as a lease.
    assert (after.due_ms - before.due_ms >= 15_000) is inside


def test_one_that_ignores_cancellation_is_abandoned(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        freed = asyncio.Event()

        @app.middleware
        async def stubborn(job: JobContext, call_next: CallNext) -> Any:
            while not freed.is_set():
                try:
                    await freed.wait()
                except asyncio.CancelledError:
                    pass

        task: Task[..., Any, Any] = app.task(timeout="1s", retries=0)(off_loop)
        async with app.worker(guarded=False):
            job = await task.enqueue(1)
            with pytest.raises(JobFailed, match="ran longer than its timeout"):
                await job.result(timeout=10)
            freed.set()

    run_virtual(story())
    assert "ignored cancellation; abandoned" in caplog.text


async def test_its_failures_are_logged_with_the_job(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.middleware
    async def refuse(job: JobContext, call_next: CallNext) -> Any:
        raise PermissionError("not today")

    task = pair(app, "process")
    async with app.worker():
        job = await task.using(retries=0).enqueue(1)
        with pytest.raises(JobFailed):
            await job.result(timeout=PATIENCE_S)
    [error] = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert vars(error)["job_id"] == job.id and "not today" in error.getMessage()


# --- What a middleware may be


def test_what_is_not_a_middleware_is_refused_at_once(app: App) -> None:
    def plain(job: JobContext, call_next: CallNext) -> None: ...

    async def one(job: JobContext) -> None: ...

    async def three(job: JobContext, call_next: CallNext, more: int) -> None: ...

    async def generator(job: JobContext, call_next: CallNext) -> AsyncIterator[None]:
        yield

    each: Any
    for each in (plain, one, three, generator, 42, print):
        with pytest.raises(BadConfig, match="must be an async function of two parameters"):
            app.middleware(each)
    assert app.middlewares == []


def test_a_method_can_be_one(app: App) -> None:
    class Timing:
        async def __call__(self, job: JobContext, call_next: CallNext) -> Any:
            return await call_next()

        async def around(self, job: JobContext, call_next: CallNext) -> Any:
            return await call_next()

    timing = Timing()
    app.middleware(timing.around)
    assert app.middlewares == [timing.around]


tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


@pytest.mark.parametrize("slots", [1, 3])
async def test_what_a_run_keeps_in_its_context_is_not_for_the_next(app: App, slots: int) -> None:
    @app.middleware
    async def marked(job: JobContext, call_next: CallNext) -> Any:
        seen.append(tenant.get())
        tenant.set(job.id)
        return await call_next()

    @app.task
    async def on_the_loop() -> None:
        tenant.set("somebody")

    @app.task
    def in_a_thread() -> None:
        seen.append("" if tenant.get() == current_id() else tenant.get())

    def current_id() -> str:
        job = current_job()
        assert job is not None
        return job.id

    seen: list[str] = []
    jobs = [task.job() for _ in range(10) for task in (on_the_loop, in_a_thread)]
    handles = await app.enqueue_many(jobs)
    async with app.worker(concurrency=slots):
        for handle in handles:
            await handle.result(timeout=PATIENCE_S)
    assert set(seen) == {"nobody", ""}
