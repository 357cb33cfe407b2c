"""A worker inside a program: `app.worker()`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from an_app import add, app

from tickwheel import (
    App,
    GiveUp,
    Job,
    JobFailed,
    Outcome,
    RetryPolicy,
    State,
    StoreError,
)
from tickwheel.clock import LoopClock
from tickwheel.job import Settlement
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import run_virtual

__all__ = ["app"]


def test_a_worker_works_while_its_block_lasts_and_then_stops_gracefully() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())

        @app.task
        async def slow(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return seconds

        before = await slow.enqueue(1)
        async with app.worker(guarded=False, concurrency=2) as worker:
            assert await before.result(timeout=2) == 1
            assert [info.name for info in await app.workers()] == [worker.name]
            running = await slow.enqueue(10)
            await asyncio.sleep(1)
        assert (await running.info()).state is State.DONE
        assert await app.workers() == []
        after = await slow.enqueue(1)
        await asyncio.sleep(60)
        assert (await after.info()).state is State.WAITING

    run_virtual(story())


class Broken(RetryPolicy):
    def delay_ms(self, failures: int, rand: Any = None) -> int:
        raise LookupError("no such delay")


async def test_a_policy_that_fails_does_not_replace_the_error(app: App) -> None:
    @app.task(retries=Broken())
    async def fail() -> None:
        raise ValueError("no luck")

    job = await fail.enqueue()
    async with app.worker():
        words = "ValueError: no luck; then its retry policy failed: LookupError: no such delay"
        with pytest.raises(JobFailed, match=words):
            await job.result(timeout=10)


def test_a_worker_serves_the_queues_it_is_given_or_those_of_the_tasks() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        task = app.task(queue="mail")(add)
        mail, other = await task.enqueue(1), await task.using(queue="other").enqueue(2)
        async with app.worker(guarded=False):
            assert await mail.result(timeout=1) == 1
        async with app.worker(guarded=False, queues=["other"]):
            assert await other.result(timeout=1) == 2
            third = await task.enqueue(3)
            await asyncio.sleep(10)
            assert (await third.info()).state is State.WAITING

    run_virtual(story())


def test_a_failed_job_says_why_and_can_be_put_back() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        fixed = False

        @app.task
        async def fragile() -> str:
            if not fixed:
                raise GiveUp("the printer is off")
            return "printed"

        async with app.worker(guarded=False):
            job = await fragile.enqueue()
            with pytest.raises(JobFailed, match=f"job {job.id} is dead: the printer is off"):
                await job.result()
            fixed = True
            assert await app.rerun([job.id]) == [True]
            assert await job.result() == "printed"
            assert [run.outcome for run in (await job.info()).history] == [
                Outcome.DEAD,
                Outcome.DONE,
            ]

    run_virtual(story())


class BrokenStore(MemoryStore):
    """Fails in a way that no store should: not StoreUnavailable, so nobody tries again."""

    async def claim(self, queues: Sequence[str], **_: Any) -> list[Job]:
        await asyncio.sleep(1)
        raise StoreError("the file is gone")


def innermost(error: BaseException) -> list[BaseException]:
    """What an exception group holds, however deep; other exceptions are themselves."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in innermost(each)]
    return [error]


def test_a_worker_that_fails_cancels_its_block_and_says_why() -> None:
    async def story() -> None:
        clock = LoopClock()
        app = App(BrokenStore(clock=clock), clock=clock)
        reached = []
        with pytest.raises(Exception) as caught:
            async with app.worker(guarded=False):
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    reached.append(asyncio.get_running_loop().time())
                    raise
        assert reached == [1]
        assert [str(each) for each in innermost(caught.value)] == ["the file is gone"]

    run_virtual(story())


def test_a_block_that_raises_ends_its_worker_too() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        task = app.task(add)
        with pytest.raises(Exception) as caught:
            async with app.worker(guarded=False):
                raise LookupError("mine")
        assert [str(each) for each in innermost(caught.value)] == ["mine"]
        job = await task.enqueue(1)
        await asyncio.sleep(60)
        assert (await job.info()).state is State.WAITING

    run_virtual(story())


async def test_what_a_block_raises_reaches_the_caller_as_it_is(app: App) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with app.worker():
            raise LookupError("mine")


async def test_what_a_block_raises_keeps_its_cause(app: App) -> None:
    cause = KeyError("why")
    with pytest.raises(LookupError, match="mine") as caught:
        async with app.worker():
            raise LookupError("mine") from cause
    assert caught.value.__cause__ is cause


class RefusingStore(MemoryStore):
    """Can't write the first outcome that it is given, and says so in no way that was agreed."""

    refused = False

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        if not self.refused:
            self.refused = True
            raise StoreError("the row is too big")
        return await super().settle(settlements, now_ms=now_ms)


def test_an_outcome_that_the_store_refuses_is_said_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        clock = LoopClock()
        app = App(RefusingStore(clock=clock), clock=clock)
        task = app.task(add)
        async with app.worker(guarded=False):
            assert await (await task.enqueue(1)).result(timeout=60) == 1

    with caplog.at_level("WARNING", "tickwheel"):
        run_virtual(story())
    assert "the row is too big" in caplog.text


def test_a_worker_whose_block_raised_is_not_listed_any_more() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        with pytest.raises(LookupError):
            async with app.worker(guarded=False):
                await asyncio.sleep(1)
                raise LookupError("mine")
        assert await app.workers() == []

    run_virtual(story())
