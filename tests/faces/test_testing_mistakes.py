"""Boxes: before, after, and mistakes."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from box_tasks import NEVER, app, cancel_order
from boxes import DAY, HOUR, START, outcomes

from tickwheel import (
    App,
    BadArguments,
    BadTime,
    JobUnknown,
    UsageError,
)
from tickwheel.testing import Box, sandbox


async def test_afterwards_the_app_is_on_its_own_store_and_time_again(tmp_path: Path) -> None:
    mine = App(f"sqlite:///{tmp_path}/jobs.db")

    @mine.task
    async def work(n: int) -> None: ...

    async with mine:
        before = await work.enqueue(1)
        async with sandbox(mine, start=START) as box:
            with pytest.raises(JobUnknown):
                await before.info()
            inside = await work.enqueue(2)
            async with sandbox(mine, start=START + DAY) as inner:
                await work.enqueue(3)
                assert [job.payload for job in inner.jobs()] == ['{"n":3}']
            await box.travel("1h")
            assert [job.payload for job in box.jobs()] == ['{"n":2}']
        assert (await before.info()).state == "waiting"
        with pytest.raises(RuntimeError, match="oops"):
            async with sandbox(mine):
                raise RuntimeError("oops")
        assert (await before.info()).state == "waiting"
        with pytest.raises(JobUnknown):
            await inside.info()
        assert [queue.waiting for queue in await mine.queues()] == [1]
    # What happened in the box can still be looked at.
    assert outcomes(box.runs) == ["done"]
    box.assert_enqueued(work, 2)


def test_wrong_options_and_times_are_refused() -> None:
    mine = App("memory://")
    options: dict[str, Any] = {"inlin": True}
    with pytest.raises(BadArguments, match=r"^sandbox\(\) has no option 'inlin'; did you mean inl"):
        sandbox(mine, **options)
    with sandbox(mine) as box, pytest.raises(BadTime, match="<int> is more than 10 years"):
        box.travel(10**5000)


def test_without_a_loop_the_app_is_on_its_own_store_again(tmp_path: Path) -> None:
    mine = App(f"sqlite:///{tmp_path}/jobs.db")

    @mine.task
    def work() -> None: ...

    before = work.enqueue_sync()
    with sandbox(mine, start=START) as box:
        work.enqueue_sync()
        assert len(box.drain()) == 1
    assert abs(work.job().created_ms / 1000 - time.time()) < 3600
    assert mine.sync.info(before).state == "waiting"
    assert [queue.waiting for queue in mine.sync.queues()] == [1]
    mine.sync.close()


async def test_an_app_that_was_first_used_in_a_box_lives_in_real_time_afterwards() -> None:
    mine = App("memory://")

    @mine.task
    async def work() -> None: ...

    async with sandbox(mine, start=START):
        await work.enqueue()
    job = await work.enqueue()
    assert abs(datetime.now(UTC) - (await job.info()).created) < HOUR
    assert [queue.waiting for queue in await mine.queues()] == [1]


async def test_without_a_start_the_box_begins_now() -> None:
    async with sandbox(app) as box:
        assert abs(box.now - datetime.now(UTC)) < HOUR


async def test_mistakes_are_said_in_one_line() -> None:
    async with sandbox(app, start=START) as box:
        with pytest.raises(BadTime, match="negative"):
            await box.travel(timedelta(hours=-1))
        with pytest.raises(BadTime, match=r"until=2026-02-28.* has passed.*only moves forward"):
            await box.travel(until=START - DAY)
        with pytest.raises(BadTime, match="pass a duration"):
            await box.travel()
        await box.travel(until=START + DAY)
        assert box.now == START + DAY
    for late in (box.travel("1h"), box.drain(), box.outage("1h")):
        with pytest.raises(UsageError, match="this box has ended"):
            await late
    with pytest.raises(UsageError, match="use async with"), sandbox(app):
        pass
    with pytest.raises(BadTime, match="must be an aware datetime"):
        sandbox(app, start=datetime(2026, 3, 1))  # noqa: DTZ001
    with pytest.raises(UsageError, match="takes an App"):
        sandbox(cancel_order)  # type: ignore[arg-type]
    once = sandbox(app)
    async with once:
        pass
    with pytest.raises(UsageError, match="can be entered only once"):
        async with once:
            pass


async def test_a_box_makes_one_journey_at_a_time() -> None:
    mine = App(NEVER)
    boxes: list[Box] = []

    @mine.task
    async def work() -> None:
        await boxes[0].travel("1h")

    async with sandbox(mine) as box:
        boxes.append(box)
        await work.enqueue()
        await box.drain()
        assert [str(error) for error in box.errors] == [
            "this box is already busy; call travel, drain or outage one at a time"
        ]


async def test_a_storm_of_jobs_ends_with_the_name_of_its_task() -> None:
    mine = App(NEVER)

    @mine.task
    async def again(delay: int) -> None:
        await again.using(delay=delay).enqueue(delay)

    @mine.task
    async def innocent() -> None: ...

    async with sandbox(mine, limit=200) as box:
        await innocent.enqueue()
        await again.enqueue(0)
        with pytest.raises(UsageError, match=r"200 runs in one go, 199 of them of 'again'"):
            await box.drain()
    async with sandbox(mine, limit=200) as box:
        await again.enqueue(1)
        assert len(await box.travel("199s")) == 200
        assert len(await box.travel("100s")) == 100
        with pytest.raises(UsageError, match="'again'"):
            await box.travel("1h")
    async with sandbox(mine, inline=True) as box:
        with pytest.raises(UsageError, match="'again' runs inline in a job that runs inline"):
            await again.enqueue(0)


def test_a_storm_of_inline_jobs_ends_without_an_event_loop_too() -> None:
    mine = App(NEVER)

    @mine.task
    def again() -> None:
        again.enqueue_sync()

    with sandbox(mine, inline=True), pytest.raises(UsageError, match="'again' runs inline"):
        again.enqueue_sync()


async def test_a_journey_that_is_given_up_hands_its_job_back() -> None:
    mine = App(NEVER)
    naps = [60.0, 0.0]

    @mine.task
    async def work() -> None:
        await asyncio.sleep(naps.pop(0))

    async with sandbox(mine) as box:
        await work.enqueue()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await box.drain()
        assert outcomes(await box.drain()) == ["done"]
