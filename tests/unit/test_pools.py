"""Tasks in real threads and real processes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import process_tasks
import pytest
import unruly

from tickwheel import (
    App,
    JobFailed,
    JobHandle,
    Outcome,
    ResultError,
    RetryPolicy,
    State,
    Task,
    current_job,
)
from tickwheel.arguments import NotKept
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.engine import processes as pools
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.processes import ChildDied, NotStarted, ProcessPool
from tickwheel.engine.worker import Worker
from tickwheel.stores.memory import MemoryStore

# So long may a step take on a slow machine before the test gives up.
PATIENCE_S = 30


@asynccontextmanager
async def working(app: App, store: MemoryStore, **options: Any) -> AsyncIterator[Worker]:
    """A worker with options that `app.worker` leaves to the machine."""
    clock = SystemClock()
    store_clock = StoreClock(clock)
    options = {"queues": app.tasks.queues(), "grace_ms": 0, **options}
    worker = Worker(store, app.tasks, store_clock, clock, WorkerOptions(**options), guarded=False)
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run())
        try:
            yield worker
        finally:
            worker.stop()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def app(store: MemoryStore) -> App:
    return App(store)


async def ended_badly(job: JobHandle[Any]) -> str:
    """Why the job is dead."""
    with pytest.raises(JobFailed) as caught:
        await job.result(timeout=PATIENCE_S)
    return str(caught.value).split(" is dead: ", 1)[1]


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- Threads


async def test_a_plain_function_runs_off_the_loop_and_knows_its_job(
    app: App, store: MemoryStore
) -> None:
    @app.task
    def look(n: int) -> tuple[str, int, str]:
        context = current_job()
        assert context is not None and not context.stopping
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return context.job.id, threading.get_ident(), context.job.payload

    async with working(app, store):
        jobs = [await look.enqueue(n) for n in range(5)]
        seen = [await job.result(timeout=PATIENCE_S) for job in jobs]
    assert [id for id, _, _ in seen] == [job.id for job in jobs]
    assert threading.get_ident() not in [thread for _, thread, _ in seen]
    assert [payload for _, _, payload in seen] == [f'{{"n":{n}}}' for n in range(5)]
    assert current_job() is None


async def test_the_loop_goes_on_while_a_thread_is_busy(app: App, store: MemoryStore) -> None:
    freed = threading.Event()

    @app.task
    def wait() -> bool:
        return freed.wait(PATIENCE_S)

    @app.task
    async def free() -> None:
        freed.set()

    async with working(app, store):
        job = await wait.enqueue()
        await free.enqueue()
        assert await job.result(timeout=PATIENCE_S) is True


async def test_a_thread_that_fails_is_settled_like_any_task(app: App, store: MemoryStore) -> None:
    @app.task(retries=RetryPolicy(retries=1, first=0, jitter=0))
    def fail() -> None:
        raise ValueError("no luck")

    async with working(app, store):
        job = await fail.enqueue()
        assert await ended_badly(job) == "ValueError: no luck"
    assert (await job.info()).attempts == 2


async def test_a_thread_that_runs_too_long_is_told_so_and_loses_its_slot(
    app: App, store: MemoryStore
) -> None:
    stopped, left = threading.Event(), threading.Event()

    @app.task(timeout="50ms", retries=0)
    def hang() -> None:
        context = current_job()
        assert context is not None
        while not context.stopping:
            time.sleep(0.005)
        stopped.set()
        left.wait(PATIENCE_S)

    @app.task
    def next_one() -> str:
        return "ran"

    try:
        async with working(app, store, concurrency=1):
            job = await hang.enqueue()
            assert "TimeoutError: ran longer than its timeout of 50ms;" in await ended_badly(job)
            # The thread is still there, but its slot is not taken.
            second = await next_one.enqueue()
            assert await second.result(timeout=PATIENCE_S) == "ran"
            await until(stopped.is_set)
    finally:
        left.set()
    [run] = (await job.info()).history
    assert run.outcome is Outcome.DEAD
    assert run.started_ms is not None and run.ended_ms - run.started_ms >= 50


async def test_what_a_thread_does_after_its_timeout_changes_nothing(
    app: App, store: MemoryStore
) -> None:
    left, returned = threading.Event(), threading.Event()

    @app.task(timeout="20ms", retries=0)
    def late() -> str:
        left.wait(PATIENCE_S)
        returned.set()
        return "too late"

    @app.task
    def next_one() -> str:
        return "ran"

    async with working(app, store):
        job = await late.enqueue()
        await ended_badly(job)
        left.set()
        await until(returned.is_set)
        # What it returned has reached the worker by the time that a later job has ended.
        assert await (await next_one.enqueue()).result(timeout=PATIENCE_S) == "ran"
        assert (await job.info()).state is State.DEAD


async def test_a_thread_that_raises_stop_iteration_fails_at_once(
    app: App, store: MemoryStore
) -> None:
    # The classic slip: `next` on an empty iterator.
    task = app.task(retries=0, timeout="500ms")(process_tasks.stop_iteration)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with working(app, store):
        assert "StopIteration" in await ended_badly(await task.enqueue())


@pytest.mark.parametrize("kind", ["thread", "async"])
def test_a_task_that_calls_sys_exit_fails_alone(app: App, store: MemoryStore, kind: str) -> None:
    def leave() -> None:
        sys.exit(3)

    async def leave_async() -> None:
        sys.exit(3)

    task: Task[[], None, Any]
    task = app.task(retries=0)(leave) if kind == "thread" else app.task(retries=0)(leave_async)

    async def story() -> None:
        async with working(app, store):
            assert "SystemExit: 3" in await ended_badly(await task.enqueue())

    asyncio.run(story())


# --- Processes: the first task in one takes as long as an interpreter to start


async def test_a_process_task_runs_in_another_process_that_is_used_again(
    app: App, store: MemoryStore
) -> None:
    where = app.task(pool="process")(process_tasks.where)
    seen = app.task(pool="process")(process_tasks.job_seen)
    async with working(app, store, processes=1):
        first, second = [await (await where.enqueue()).result(timeout=PATIENCE_S) for _ in range(2)]
        # The job stays here: what it holds can't be told across.
        assert await (await seen.enqueue()).result(timeout=PATIENCE_S) is True
    assert first == second != os.getpid()
    assert not alive(first)


async def test_a_task_decorated_in_its_module_is_found_by_the_child() -> None:
    app = process_tasks.app
    async with app.worker(concurrency=1):
        job = await process_tasks.decorated.enqueue(1, b=5)
        assert await job.result(timeout=PATIENCE_S) == [1, 5]
        job = await process_tasks.decorated.enqueue(1)
        assert await job.result(timeout=PATIENCE_S) == [1, 2]
    assert process_tasks.decorated(3) == [3, 2]


@pytest.mark.slow
async def test_a_timeout_kills_exactly_that_process_and_the_next_job_runs(
    app: App, store: MemoryStore, tmp_path: Path
) -> None:
    hang = app.task(name="hang", pool="process", timeout=2, retries=0)(process_tasks.note_and_sleep)
    slow = app.task(name="slow", pool="process")(process_tasks.note_and_sleep)
    where = app.task(pool="process")(process_tasks.where)
    async with working(app, store, processes=2):
        hung = await hang.enqueue(str(tmp_path / "hung"), 60)
        bystander = await slow.enqueue(str(tmp_path / "slow"), 3)
        assert "TimeoutError: ran longer than its timeout of 2s;" in await ended_badly(hung)
        victim = int((tmp_path / "hung").read_text())
        await until(lambda: not alive(victim))
        # The other process has not noticed, and the next job has one to run in.
        witness = await bystander.result(timeout=PATIENCE_S)
        assert witness == int((tmp_path / "slow").read_text())
        pids = {await (await where.enqueue()).result(timeout=PATIENCE_S) for _ in range(3)}
    assert victim not in pids
    assert (await bystander.info()).attempts == 1


@pytest.mark.parametrize(("how", "code"), [("os._exit", 4), ("SIGSEGV", -11), ("SIGKILL", -9)])
async def test_a_task_that_ends_its_process_fails_with_the_reason_and_the_next_runs(
    app: App, store: MemoryStore, how: str, code: int
) -> None:
    leave = app.task(pool="process", retries=0)(process_tasks.leave)
    where = app.task(pool="process")(process_tasks.where)
    async with working(app, store, processes=1):
        job = await leave.enqueue(how)
        assert await ended_badly(job) == f"ChildDied: its process died, exit code {code}"
        assert await (await where.enqueue()).result(timeout=PATIENCE_S) != os.getpid()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("plain", "ValueError: no luck"),
        ("picky", "RuntimeError: Picky: paper: out of it"),
        ("unpicklable", "RuntimeError: Unpicklable: held"),
        # These are also what a dead child looks like from here.
        ("end of file", "EOFError: the file ended"),
        ("broken pipe", "BrokenPipeError: somebody else's pipe"),
        ("give up", "enough"),
    ],
)
async def test_what_a_process_task_raises_is_told_even_where_it_cannot_travel(
    app: App, store: MemoryStore, how: str, words: str
) -> None:
    fail = app.task(pool="process", retries=0)(process_tasks.fail)
    async with working(app, store, processes=1):
        assert await ended_badly(await fail.enqueue(how)) == words


async def settled_again(app: App, store: MemoryStore, how: str) -> tuple[Outcome, str | None]:
    fail = app.task(pool="process")(process_tasks.fail)
    async with working(app, store, processes=1):
        job = await fail.enqueue(how)
        async with asyncio.timeout(PATIENCE_S):
            while not (info := await job.info()).history:
                await asyncio.sleep(0.01)
    assert (info.state, info.due.timestamp() > time.time() + 3500) == (State.WAITING, True)
    return info.history[0].outcome, info.history[0].error


async def test_a_process_task_may_ask_to_be_run_later(app: App, store: MemoryStore) -> None:
    assert await settled_again(app, store, "snooze") == (Outcome.SNOOZE, None)


async def test_a_process_task_may_ask_for_a_retry_and_say_why(app: App, store: MemoryStore) -> None:
    assert await settled_again(app, store, "retry") == (Outcome.RETRY, "busy")


async def test_a_result_that_cannot_leave_its_process_says_so(app: App, store: MemoryStore) -> None:
    task = app.task(pool="process", retries=0)(process_tasks.unpicklable_result)
    async with working(app, store, processes=1):
        job = await task.enqueue()
        with pytest.raises(ResultError, match="not kept: it can't be sent from its process"):
            await job.result(timeout=PATIENCE_S)
        # The work is done, and not repeated.
        assert (await job.info()).state is State.DONE


@pytest.mark.slow
async def test_waiting_for_a_process_does_not_use_up_the_time_of_a_job(
    app: App, store: MemoryStore, tmp_path: Path
) -> None:
    slow = app.task(pool="process", timeout=2, retries=0)(process_tasks.note_and_sleep)
    async with working(app, store, processes=1):
        # Each needs a second and has two; together they need four.
        jobs = [await slow.enqueue(str(tmp_path / "pid"), 1) for _ in range(4)]
        for job in jobs:
            await job.result(timeout=PATIENCE_S)


@asynccontextmanager
async def a_pool(size: int = 1) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(size)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield pool
    finally:
        pool.close()


async def ran(pool: ProcessPool, function: Callable[..., Any], *args: Any) -> Any:
    return await pool.run(function, list(args), {}, lambda: None)


@pytest.mark.parametrize("how", list(process_tasks.ESCAPES))
async def test_nothing_that_a_process_task_raises_ends_its_process(how: str) -> None:
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        with pytest.raises(RuntimeError, match=f"{re.escape(how)}$"):
            await ran(pool, process_tasks.escape, how)
        assert await ran(pool, process_tasks.where) == child


async def test_a_result_whose_pickling_panics_is_not_kept() -> None:
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        value = await ran(pool, process_tasks.evil_result)
        assert isinstance(value, NotKept) and "Panic: no pickling" in value.why
        assert await ran(pool, process_tasks.where) == child


@pytest.mark.parametrize("word", ["plain", "unpicklable", "picky"])
async def test_a_traceback_crosses_from_the_process_of_its_task(
    app: App, store: MemoryStore, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = app.task(pool="process", retries=0)(process_tasks.fail)
    async with working(app, store, processes=1):
        job = await task.enqueue(word)
        await ended_badly(job)
        info = await job.info()
    told = (info.traceback or "").splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert re.match(r'  File ".*process_tasks.py", line \d+, in fail$', told[1])
    assert "processes.py" not in (info.traceback or "")
    assert told[1] in caplog.text


async def test_so_does_that_of_what_made_a_task_ask_for_a_retry(
    app: App, store: MemoryStore
) -> None:
    task = app.task(pool="process")(process_tasks.fail_and_ask_again)
    async with working(app, store, processes=1):
        job = await task.enqueue()
        async with asyncio.timeout(PATIENCE_S):
            while not (await job.info()).failures:
                await asyncio.sleep(0.01)
        info = await job.info()
    assert info.error == "the task asked for a retry"
    assert info.traceback is not None
    assert info.traceback.endswith("ValueError: no luck")


async def test_an_argument_that_cannot_be_pickled_is_a_failure_of_its_task_alone() -> None:
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        with pytest.raises(RuntimeError, match="the arguments can't be sent to its process: Panic"):
            await ran(pool, process_tasks.note_and_sleep, process_tasks.Evil(), 0)
        assert await ran(pool, process_tasks.where) == child


async def test_an_idle_process_that_was_killed_costs_the_next_job_nothing(
    app: App, store: MemoryStore
) -> None:
    where = app.task(pool="process", retries=0)(process_tasks.where)
    async with working(app, store, processes=1):
        idle = await (await where.enqueue()).result(timeout=PATIENCE_S)
        os.kill(idle, signal.SIGKILL)
        assert await (await where.enqueue()).result(timeout=PATIENCE_S) != idle


async def test_more_idle_processes_may_be_killed_than_starts_are_tried() -> None:
    async with a_pool(pools.START_TRIES + 1) as pool:
        sleeps = [ran(pool, process_tasks.note_and_sleep, os.devnull, 1) for _ in range(4)]
        idle = await asyncio.gather(*sleeps)
        assert len(set(idle)) == pools.START_TRIES + 1
        for pid in idle:
            os.kill(pid, signal.SIGKILL)
        assert await ran(pool, process_tasks.where) not in idle


async def test_a_process_that_ends_before_the_task_began_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UNRULY", f"dies-once {tmp_path / 'died'}")
    began: list[int] = []
    async with a_pool() as pool:
        assert await pool.run(unruly.where, [], {}, lambda: began.append(1)) != os.getpid()
    assert (began, (tmp_path / "died").exists()) == ([1], True)


async def test_where_no_process_can_start_the_error_says_so_and_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNRULY", "dies")
    began: list[int] = []
    async with a_pool() as pool:
        with pytest.raises(NotStarted, match=r"did not run: 3 processes ended .* exit code 7"):
            await pool.run(unruly.where, [], {}, lambda: began.append(1))
        assert await ran(pool, process_tasks.where) != os.getpid()
    assert began == []


async def test_an_import_that_hangs_does_not_hold_its_place_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNRULY", "hangs")
    async with a_pool() as pool:
        hung = await ran(pool, process_tasks.where)
        monkeypatch.setattr(pools, "START_S", 0.5)
        with pytest.raises(NotStarted, match=r"within 0.5 s, .* does the import of unruly hang"):
            await ran(pool, unruly.where)
        monkeypatch.undo()
        assert await ran(pool, process_tasks.where) != hung
        await until(lambda: not alive(hung))


async def test_an_import_that_raises_is_a_failure_of_its_task_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNRULY", "raises")
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        with pytest.raises(RuntimeError, match="the task raised KeyboardInterrupt"):
            await ran(pool, unruly.where)
        assert await ran(pool, process_tasks.where) == child


async def test_starting_a_process_does_not_use_up_the_time_of_a_job(
    app: App, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNRULY", "slow")
    where = app.task(pool="process", timeout="900ms", retries=0)(unruly.where)
    async with working(app, store, processes=1):
        assert await (await where.enqueue()).result(timeout=PATIENCE_S) != os.getpid()


@pytest.mark.parametrize("how", ["program", "fork", "fork without hooks"])
async def test_a_process_that_a_dead_task_left_behind_does_not_hold_its_place(
    tmp_path: Path, how: str
) -> None:
    note = tmp_path / "pid"
    async with a_pool() as pool:
        try:
            async with asyncio.timeout(10):
                with pytest.raises(ChildDied, match="exit code 4"):
                    await ran(pool, process_tasks.leave_with_a_process_behind, str(note), how)
                assert await ran(pool, process_tasks.where) != os.getpid()
            assert alive(int(note.read_text()))
        finally:
            os.kill(int(note.read_text()), signal.SIGKILL)


async def test_a_forked_process_that_returns_cannot_speak_for_the_task() -> None:
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        assert [await ran(pool, process_tasks.return_twice) for _ in range(3)] == [child] * 3
        assert await ran(pool, process_tasks.where) == child


async def test_programs_that_a_task_starts_inherit_no_ignored_signals() -> None:
    async with a_pool() as pool:
        ignored = await ran(pool, process_tasks.signals_ignored_by_programs)
        assert ignored == ["False", "False"]


async def test_signals_to_the_group_end_no_process_task() -> None:
    async with a_pool() as pool:
        child = await ran(pool, process_tasks.survive_signals)
        assert await ran(pool, process_tasks.where) == child


@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_a_process_task_may_use_multiprocessing(method: str) -> None:
    async with a_pool() as pool:
        answer = await ran(pool, process_tasks.in_more_processes, [-1, 2, -3], method)
        assert answer == [1, 2, 3]


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 50])
async def test_a_cancel_at_any_moment_frees_the_child_at_once(turns: int, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    async with a_pool() as pool:
        run = asyncio.create_task(ran(pool, process_tasks.note_and_sleep, str(note), 60))
        for _ in range(turns):
            await asyncio.sleep(0)
        if turns == 50:
            await until(note.exists)
        run.cancel()
        # The cancel waits for nothing: not for the end of the process, not for a thread.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert run.cancelled()
        assert await ran(pool, process_tasks.where) != os.getpid()
        if note.exists():
            await until(lambda: not alive(int(note.read_text())))


async def test_a_process_that_is_killed_before_anybody_waits_for_it_leaves_no_zombie() -> None:
    def began() -> None:
        raise asyncio.CancelledError

    async with a_pool() as pool:
        child = await ran(pool, process_tasks.where)
        with pytest.raises(asyncio.CancelledError):
            await pool.run(process_tasks.where, [], {}, began)
        await until(lambda: not alive(child))
        assert await ran(pool, process_tasks.where) != child


async def test_a_process_task_that_raises_stop_iteration_fails_at_once() -> None:
    async with a_pool() as pool:
        with pytest.raises(RuntimeError, match="the task raised StopIteration"):
            await ran(pool, process_tasks.stop_iteration)
