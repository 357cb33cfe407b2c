"""Progress, in virtual time: soon visible, and never more than a call a second."""

from __future__ import annotations

import asyncio
import math
from itertools import pairwise
from typing import Any

import pytest
from world import Counting, World, virtual

from tickwheel import BadArguments, JobContext, Progress, State, current_job
from tickwheel.testing import FaultyStore


def context() -> JobContext:
    found = current_job()
    assert found is not None
    return found


def test_what_a_task_says_once_is_visible_within_a_second() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            await asyncio.sleep(0.5)
            context().progress(0.4, "loading")
            await asyncio.sleep(60)

        await world.node()
        job = await load.enqueue()
        await asyncio.sleep(0.4)
        assert (await job.info()).progress is None
        await asyncio.sleep(1)
        assert (await job.info()).progress == Progress(0.4, "loading")

    virtual(story)


def test_the_last_word_counts_and_stays_after_the_end() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            for n in range(10):
                context().progress(n / 10, f"part {n}")
            await asyncio.sleep(1.5)

        await world.node()
        job = await load.enqueue()
        await asyncio.sleep(1.2)
        assert (await job.info()).progress == Progress(0.9, "part 9")
        await job.result()
        assert (await job.info()).progress == Progress(0.9, "part 9")

    virtual(story)


def test_a_worker_tells_of_all_progress_in_one_call_a_second() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load(n: int) -> None:
            for step in range(300):
                context().progress(step / 300)
                await asyncio.sleep(0.1)

        line = Counting(world.store, world)
        await world.node(line=line, lease_ms=60_000)
        jobs = [await load.enqueue(n) for n in range(20)]
        silent = world.now_ms
        await asyncio.sleep(19.95)
        told = [ms for ms, _ in line.extends]
        # In 20 seconds: the first at once, then one a second; no third of a lease has passed.
        assert 19 <= len(told) <= 20
        assert all(after - before >= 1000 for before, after in pairwise(told))
        assert told[0] - silent < 1000
        assert {count for _, count in line.extends[1:]} == {20}
        parts = [(await job.info()).progress for job in jobs]
        assert all(each is not None and each.part > 0.6 for each in parts)

    virtual(story)


def test_silent_jobs_cost_no_extra_call() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def quiet() -> None:
            await asyncio.sleep(100)

        @world.app.task
        async def load() -> None:
            await asyncio.sleep(1)
            context().progress(0.5)
            await asyncio.sleep(100)

        line = Counting(world.store, world)
        await world.node(line=line, lease_ms=15_000)
        for _ in range(5):
            await quiet.enqueue()
        await load.enqueue()
        await asyncio.sleep(4)
        assert [count for _, count in line.extends] == [1]
        await asyncio.sleep(26)
        # The leases of all are extended as ever.
        assert 5 <= len([count for _, count in line.extends if count >= 5]) <= 7
        assert len([count for _, count in line.extends if count == 1]) <= 2

    virtual(story)


def test_a_job_that_reports_all_the_time_takes_no_lease_from_the_others() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            for n in range(100):
                context().progress(n / 100)
                await asyncio.sleep(0.05)

        @world.app.task
        async def quiet() -> str:
            await asyncio.sleep(5)
            return "mine"

        await world.node(lease_ms=600)
        await world.node(lease_ms=600)
        loud, silent = await load.enqueue(), await quiet.enqueue()
        assert await silent.result() == "mine"
        await loud.result()
        assert [(await job.info()).takeovers for job in (loud, silent)] == [0, 0]

    virtual(story)


def test_the_progress_of_a_run_is_not_that_of_the_next() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            if context().attempt == 1:
                context().progress(0.7, "nearly")
            await asyncio.sleep(10)

        first = await world.node(lease_ms=3_000)
        job = await load.enqueue()
        await asyncio.sleep(2)
        assert (await job.info()).progress == Progress(0.7, "nearly")
        first.crash()
        await world.node(lease_ms=3_000)
        await asyncio.sleep(5)
        info = await job.info()
        assert (info.attempts, info.state, info.progress) == (2, State.RUNNING, None)

    virtual(story)


def test_progress_goes_on_after_the_store_was_away() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            for n in range(100):
                context().progress(n / 100)
                await asyncio.sleep(0.1)

        line = FaultyStore(world.store)
        await world.node(line=line)
        job = await load.enqueue()
        await asyncio.sleep(2)
        line.away = True
        await asyncio.sleep(3)
        line.away = False
        await asyncio.sleep(4)
        progress = (await job.info()).progress
        assert progress is not None and progress.part > 0.7
        await job.result()

    virtual(story)


@pytest.mark.parametrize("part", [-0.1, 1.1, 10**400, math.nan, math.inf, "0.4", None, True])
def test_a_progress_that_is_not_from_0_to_1_is_refused(part: Any) -> None:
    refused(part, "", "must be a number from 0 to 1")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (7, "must be a str"),
        ("x" * 201, "201 characters, and may have 200"),
        ("\ud800", "lone surrogate"),
        ("a\0b", "NUL"),
    ],
)
def test_words_that_can_not_be_kept_are_refused(words: Any, why: str) -> None:
    refused(0.5, words, why)


def refused(part: Any, words: Any, why: str) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def load() -> None:
            context().progress(0, "")
            context().progress(1, "x" * 200)
            with pytest.raises(BadArguments, match=why):
                context().progress(part, words)

        await world.node()
        await (await load.enqueue()).result(timeout=5)

    virtual(story)


def test_the_deadline_is_when_the_timeout_stops_the_run() -> None:
    async def story(world: World) -> None:
        seen: list[float] = []

        @world.app.task(timeout="30s")
        async def note() -> None:
            deadline = context().deadline
            assert deadline is not None
            seen.append(deadline.timestamp() * 1000 - world.now_ms)
            await asyncio.sleep(40)

        await world.node()
        job = await note.using(retries=0).enqueue()
        start = world.now_ms
        await world.until(lambda: dead(job), within_s=60)
        assert abs(seen[0] - 30_000) <= 2
        assert world.now_ms - start < 30_200
        await (await note.using(timeout="1m").enqueue()).result()
        assert abs(seen[1] - 60_000) <= 2

    async def dead(job: Any) -> bool:
        return (await job.info()).state is State.DEAD

    virtual(story)


def test_without_a_timeout_there_is_no_deadline() -> None:
    async def story(world: World) -> None:
        @world.app.task(timeout=None)
        async def note() -> bool:
            return context().deadline is None

        await world.node()
        assert await (await note.enqueue()).result()

    virtual(story)
