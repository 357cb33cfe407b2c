"""Boxes for jobs that run inline, and for code without an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from box_tasks import NEVER, app, cancel_order
from boxes import HOUR, HOURLY, START, after, outcomes

from tickwheel import (
    App,
    GiveUp,
    Snooze,
    current_job,
)
from tickwheel.testing import sandbox

# --- Inline


async def test_inline_a_job_that_is_due_runs_inside_enqueue() -> None:
    mine = App(NEVER)
    ran: list[str] = []

    @mine.task
    async def child(name: str) -> str:
        ran.append(name)
        return name

    @mine.task
    async def parent() -> str:
        job = await child.enqueue("child")
        ran.append("parent")
        return await job.result(timeout=1)

    async with sandbox(mine, start=START, inline=True) as box:
        job = await parent.enqueue()
        assert ran == ["child", "parent"]
        assert await job.result() == "child"
        await mine.enqueue_many([child.job("a"), child.using(delay="1h").job("c"), child.job("b")])
        assert ran[2:] == ["a", "b"]
        assert outcomes(box.runs) == ["done"] * 4
        assert await box.drain() == []
        await box.travel("1h")
        assert ran[4:] == ["c"]
        assert current_job() is None


async def test_inline_errors_are_raised_at_the_caller() -> None:
    mine = App(NEVER)

    @mine.task(retries=HOURLY)
    def work(error: str) -> None:
        raise {"value": ValueError("oh"), "give up": GiveUp("no"), "snooze": Snooze("1h")}[error]

    async with sandbox(mine, start=START, inline=True) as box:
        with pytest.raises(ValueError, match="oh"):
            await work.enqueue("value")
        with pytest.raises(GiveUp, match="no"):
            await work.enqueue("give up")
        await work.enqueue("snooze")
        assert outcomes(box.runs) == ["retry", "dead", "snooze"]
        # The one that failed is retried as ever.
        assert outcomes(await box.travel("1h")) == ["retry", "snooze"]


# --- Without an event loop


def test_plain_code_finds_its_tasks_on_its_own_thread() -> None:
    mine = App(NEVER)
    here = threading.get_ident()
    ran: list[str] = []

    async def answer() -> str:
        return "from a loop of its own"

    @mine.task
    def plain() -> None:
        assert threading.get_ident() == here
        child.enqueue_sync(asyncio.run(answer()))
        ran.append("plain")

    @mine.task
    async def child(word: str) -> str:
        assert threading.get_ident() == here
        context = current_job()
        assert context is not None and context.job.task == "child"
        ran.append(word)
        await asyncio.sleep(0)
        return word

    for inline, order in (
        (False, ["plain", "from a loop of its own"]),
        (True, ["from a loop of its own", "plain"]),
    ):
        ran.clear()
        with sandbox(mine, start=START, inline=inline) as box:
            job = plain.enqueue_sync()
            box.assert_enqueued(plain)
            box.drain()
            assert ran == order
            assert mine.sync.info(job).state == "done"
            assert box.errors == []
            assert current_job() is None


def test_inline_errors_are_raised_at_the_plain_caller() -> None:
    mine = App(NEVER)

    @mine.task
    async def work() -> None:
        raise ValueError("oh")

    with sandbox(mine, inline=True), pytest.raises(ValueError, match="oh"):
        work.enqueue_sync()


def test_other_threads_may_enqueue() -> None:
    with sandbox(app, start=START, inline=True) as box:
        threads = [threading.Thread(target=cancel_order.enqueue_sync, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes(box.runs) == ["done"] * 5


async def test_a_plain_task_in_an_async_box_may_enqueue() -> None:
    mine = App(NEVER)

    @mine.task
    def plain() -> None:
        child.using(delay="1h").enqueue_sync()

    @mine.task
    def child() -> None: ...

    async with sandbox(mine, start=START) as box:
        await plain.enqueue()
        assert after(await box.travel("1d"), "child") == [HOUR]
