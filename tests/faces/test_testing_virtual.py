"""Boxes on a virtual loop, where runs take time and overlap."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from box_tasks import NEVER, app, cancel_order
from boxes import DAY, MINUTE, START, after, outcomes

from tickwheel import (
    App,
)
from tickwheel.schedules import OverlapName
from tickwheel.testing import VirtualLoop, run_virtual, sandbox


def test_on_a_virtual_loop_the_times_of_loop_and_box_agree() -> None:
    mine = App(NEVER)

    @mine.task
    async def slow() -> None:
        await asyncio.sleep(90)

    @mine.task
    def plain() -> None:
        time.sleep(0.05)

    async def story() -> None:
        async with sandbox(mine, start=START) as box:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(60)
            assert box.now == START + MINUTE
            await slow.enqueue()
            await plain.using(delay="30s").enqueue()
            # Runs take time, so they go side by side, as on a worker.
            runs = await box.drain()
            assert [(run.task, run.at - START) for run in runs] == [
                ("slow", MINUTE),
                ("plain", 1.5 * MINUTE),
            ]
            assert box.now == START + 2.5 * MINUTE
            assert loop.time() == pytest.approx(150)
            await box.travel("1d")
            assert loop.time() == pytest.approx(86_550)
            assert box.now == START + 2.5 * MINUTE + DAY

    run_virtual(story())


def test_on_a_virtual_loop_runs_are_exact_to_the_millisecond() -> None:
    delays = [timedelta(milliseconds=137 * n + n * n) for n in range(1, 500)]

    async def story() -> None:
        await asyncio.sleep(0.1)
        async with sandbox(app, start=START) as box:
            for delay in delays:
                await cancel_order.using(delay=delay).enqueue(1)
            runs = await box.travel("1h")
            assert after(runs, "cancel_order") == delays

    run_virtual(story())


@pytest.mark.parametrize("overlap", ["allow", "skip", "cancel"])
def test_on_a_virtual_loop_runs_that_take_long_overlap(overlap: OverlapName) -> None:
    mine = App(NEVER)
    starts: list[datetime] = []
    ends: list[datetime] = []

    async def story() -> None:
        @mine.every("10s", overlap=overlap)
        async def slow() -> None:
            starts.append(box.now)
            await asyncio.sleep(25)
            ends.append(box.now)

        async with sandbox(mine, start=START) as box:
            runs = await box.travel("61s")
            gaps = {(b - a).total_seconds() for a, b in pairwise(starts)}
            assert gaps == {"allow": {10}, "skip": {30}, "cancel": {10}}[overlap]
            assert len(ends) == {"allow": 6, "skip": 2, "cancel": 1}[overlap]
            if overlap == "cancel":
                assert outcomes(runs) == ["release"] * 5 + ["done"]
                assert [job.state.value for job in box.jobs()] == ["cancelled"] * 5 + ["done"]

    run_virtual(story())


def test_on_a_virtual_loop_a_task_may_wait_for_another() -> None:
    mine = App(NEVER)

    @mine.task
    async def child() -> int:
        return 7

    @mine.task(timeout="10s", retries=0)
    async def parent() -> int:
        return await (await child.enqueue()).result()

    async def story() -> None:
        async with sandbox(mine, start=START) as box:
            job = await parent.enqueue()
            await box.drain()
            assert await job.result() == 7

    run_virtual(story())


def test_the_time_of_a_virtual_loop_stands_still_while_a_thread_works() -> None:
    async def story() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.timeout(0.01):
            await asyncio.to_thread(time.sleep, 0.1)
        await asyncio.sleep(3600)
        return await asyncio.to_thread(lambda: 7), loop.time()

    assert run_virtual(story()) == (7, 3600)
