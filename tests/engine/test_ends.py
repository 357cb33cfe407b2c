"""Every way that a run can end: its slot is free, and its job settled as it should be."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from world import World, virtual

from tickwheel import (
    App,
    CancelOutcome,
    GiveUp,
    JobFailed,
    Outcome,
    Retry,
    State,
    current_job,
)
from tickwheel.engine.hand import Stop
from tickwheel.stores.memory import MemoryStore

# --- Every way that a run can end


class Panic(BaseException):
    """As extension modules raise them: not an Exception."""


@dataclass
class Unreadable:
    """Raises whatever it is asked."""

    def __post_init__(self) -> None:
        raise Panic("no")


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise ZeroDivisionError("hands off")


def hostile_result() -> Any:
    return Hostile()


RAISED: dict[str, Callable[[], BaseException]] = {
    "a panic": lambda: Panic("boom"),
    "GeneratorExit": GeneratorExit,
    "SystemExit": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
}


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize("what", RAISED)
def test_whatever_a_task_raises_its_slot_is_free_and_the_job_settled(what: str, pool: str) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def odd() -> None:
            raise RAISED[what]()

        @world.app.task(retries=0)
        def odd_thread() -> None:
            raise RAISED[what]()

        node = await world.node(concurrency=1)
        job = await (odd if pool == "async" else odd_thread).enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=10)
        assert (await job.info()).attempts == 1
        assert node.worker.running == 0

    virtual(story)


def test_a_result_that_raises_while_it_is_encoded_leaves_the_job_done() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def odd() -> Any:
            return hostile_result()

        node = await world.node(concurrency=1)
        job = await odd.enqueue()
        await asyncio.sleep(1)
        info = await job.info()
        assert info.state is State.DONE
        assert info.error is not None and "not kept" in info.error
        assert node.worker.running == 0

    virtual(story)


class Classless(Exception):
    """Nobody can tell what it is."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("no class")


class Exits(Exception):
    """Ends the program of whoever reads its notes."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise SystemExit(5)


class Lazy(list[int]):
    def __getitem__(self, index: Any) -> Any:
        raise Panic("not yet")


@pytest.mark.parametrize("error", [Classless, Exits])
def test_an_error_that_raises_when_it_is_looked_at_fails_its_job(error: type[Exception]) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0, timeout=None)
        async def odd() -> None:
            raise error

        job = await odd.enqueue()
        await world.node()
        with pytest.raises(JobFailed):
            await job.result(timeout=5)

    virtual(story)


def test_a_list_that_raises_when_it_is_read_fails_its_batch() -> None:
    async def story(world: World) -> None:
        @world.app.batch(retries=0, timeout=None)
        async def lazy(items: list[int]) -> list[int]:
            return Lazy(items)

        jobs = [await lazy.enqueue(n) for n in range(3)]
        await world.node()
        for job in jobs:
            with pytest.raises(JobFailed, match="can't be read"):
                await job.result(timeout=5)

    virtual(story)


def test_an_argument_that_raises_while_it_is_read_fails_its_job_alone() -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def odd(value: Unreadable) -> None: ...

        @world.app.task
        async def fine() -> str:
            return "done"

        node = await world.node(concurrency=1)
        [job] = await world.app.enqueue_many([_with_payload(fine.job(), "odd", '{"value":{}}')])
        with pytest.raises(JobFailed, match="Panic"):
            await job.result(timeout=10)
        assert node.worker.running == 0
        assert await (await fine.enqueue()).result(timeout=10) == "done"

    virtual(story)


def _with_payload(job: Any, task: str, payload: str) -> Any:
    return msgspec.structs.replace(job, task=task, payload=payload)


@pytest.mark.parametrize("how", ["value", "error", "retry"])
def test_what_we_stopped_is_released_whatever_it_made_of_that(how: str) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def stubborn() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if how == "error":
                    raise RuntimeError("interrupted") from None
                if how == "retry":
                    raise Retry("1m") from None
                raise ValueError from None

        node = await world.node(grace_ms=1_000)
        job = await stubborn.enqueue()
        await asyncio.sleep(1)
        await node.stop()
        info = await job.info()
        # A task may still choose its outcome; with no retries left that is dead.
        assert info.state is (State.DEAD if how == "retry" else State.WAITING)
        assert info.failures == (how == "retry")

    virtual(story)


@pytest.mark.parametrize("pool", ["async", "thread"])
def test_jobs_in_hand_when_their_loop_ends_are_released_not_failed(pool: str) -> None:
    """A bare worker task at the end of `asyncio.run`: everything on the loop is cancelled."""
    store = MemoryStore()
    app = App(store)
    begun = threading.Event()

    @app.task(retries=0)
    async def slow() -> None:
        begun.set()
        await asyncio.sleep(3600)

    @app.task(retries=0)
    def slow_thread() -> None:
        begun.set()
        context = current_job()
        assert context is not None
        deadline = time.monotonic() + 20
        while not context.stopping and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("stopped")

    async def main() -> str:
        async def work() -> None:
            async with app.worker(guarded=False):
                await asyncio.sleep(3600)

        keep = asyncio.create_task(work())
        job = await (slow if pool == "async" else slow_thread).enqueue()
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert not keep.done()
        return job.id

    id = asyncio.run(main())

    async def look() -> Any:
        return (await store.get([id]))[0]

    job = asyncio.run(look())
    assert job.failures == 0
    assert job.state in (State.WAITING, State.RUNNING), job
    if pool == "async":
        assert (job.state, job.history[-1].outcome) == (State.WAITING, Outcome.RELEASE)


def test_an_interrupt_that_hits_a_task_ends_the_program_and_releases_the_job() -> None:
    store = MemoryStore()
    app = App(store)

    @app.task(retries=0)
    async def interrupted() -> None:
        raise KeyboardInterrupt

    ids = []

    async def main() -> None:
        async with app.worker(guarded=False):
            ids.append((await interrupted.enqueue()).id)
            await asyncio.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())

    async def look() -> Any:
        return (await store.get(ids))[0]

    job = asyncio.run(look())
    assert (job.state, job.failures) == (State.WAITING, 0)


def test_a_job_stopped_in_the_very_turn_of_its_start_is_settled_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(0.5)

        node = await world.node()
        runs = node.worker._runs
        start = runs.start
        stopped: list[Any] = []

        def start_and_stop(held: Any) -> None:
            start(held)
            if not stopped:
                stopped.append(held)
                runs.stop(held, Stop.RELEASE)

        runs.start = start_and_stop  # type: ignore[method-assign]
        job = await slow.enqueue()
        await job.result(timeout=2)
        assert (await job.info()).attempts == 2
        assert "ignored cancellation" not in caplog.text

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)


# --- Threads


async def _until(happened: Callable[[], bool], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.01)


@pytest.fixture
def hung() -> Any:
    """Threads that hang until the test is over."""
    free = threading.Event()
    yield free
    free.set()


async def test_a_job_that_finds_no_free_thread_is_not_failed_for_it(hung: threading.Event) -> None:
    app = App(MemoryStore())

    @app.task(timeout=0.2, retries=0)
    def hang() -> None:
        hung.wait(60)

    @app.task(timeout=0.2, retries=0)
    def fine() -> str:
        return "done"

    async with app, app.worker(concurrency=2, guarded=False, grace=0):
        # Twice as many threads as slots: all of them hang.
        for _ in range(2):
            for job in [await hang.enqueue() for _ in range(2)]:
                with pytest.raises(JobFailed, match="timeout"):
                    await job.result(timeout=20)
        waiting = await fine.enqueue()
        async with asyncio.timeout(20):
            while not (info := await waiting.info()).history:
                await asyncio.sleep(0.01)
        assert (info.history[0].outcome, info.failures) == (Outcome.RELEASE, 0)
        hung.set()
        assert await waiting.result(timeout=20) == "done"


async def test_a_cancelled_thread_job_still_times_out(hung: threading.Event) -> None:
    app = App(MemoryStore())

    @app.task(timeout=0.5, retries=0)
    def hang() -> None:
        hung.wait(60)

    async with app, app.worker(concurrency=1, guarded=False, grace=0) as worker:
        job = await hang.enqueue()
        await _until(lambda: worker.running == 1)
        assert await job.cancel() is CancelOutcome.REQUESTED
        await _until(lambda: worker.running == 0)
        async with asyncio.timeout(10):
            while not (await job.info()).state.ended:
                await asyncio.sleep(0.01)


# --- A choice of the task's


def test_giving_up_is_a_choice_also_when_asked_to_stop() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def picky() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise GiveUp("no more") from None

        await world.node()
        job = await picky.enqueue()
        await asyncio.sleep(1)
        await job.cancel()
        with pytest.raises(JobFailed, match="no more"):
            await job.result(timeout=10)

    virtual(story)


async def test_a_thread_that_outlasts_its_worker_has_the_time_of_a_lease(
    hung: threading.Event,
) -> None:
    """Its job is handed back, but not for at once: the thread still works on it."""
    store = MemoryStore()
    app = App(store)
    begun = threading.Event()

    @app.task(retries=0)
    def hang() -> None:
        begun.set()
        hung.wait(60)

    async with app:
        async with app.worker(guarded=False, grace=0.1, lease="5s"):
            job = await hang.enqueue()
            await _until(begun.is_set)
        info = await job.info()
    assert (info.state, info.failures) == (State.WAITING, 0)
    assert info.history[-1].outcome is Outcome.RELEASE
    left_s = info.due.timestamp() - info.history[-1].ended_ms / 1000
    assert 4.9 <= left_s <= 5.1
