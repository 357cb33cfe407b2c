"""Late answers and set clocks: no run beside another, none early, no lease lost."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from world import Line, World, virtual

from tickwheel import (
    State,
    current_job,
)

# --- Leases


@pytest.mark.parametrize("pool", ["async", "thread"])
@pytest.mark.parametrize("locked_s", [12, 14, 16, 18, 25])
def test_a_worker_never_runs_a_job_beside_itself(locked_s: int, pool: str) -> None:
    async def story(world: World) -> None:
        inside: Counter[str] = Counter()
        most: Counter[str] = Counter()
        ended = threading.Event()

        def enter(id: str) -> None:
            inside[id] += 1
            most[id] = max(most[id], inside[id])

        @world.app.task
        async def slow() -> None:
            context = current_job()
            assert context is not None
            enter(context.job.id)
            try:
                await asyncio.sleep(40)
            finally:
                inside[context.job.id] -= 1

        @world.app.task
        def slow_thread() -> None:
            context = current_job()
            assert context is not None
            enter(context.job.id)
            ended.wait(0.3)
            inside[context.job.id] -= 1

        line = Line(world.store)
        await world.node(line=line)
        job = await (slow if pool == "async" else slow_thread).enqueue()
        await asyncio.sleep(4)
        line.free = asyncio.Event()
        await asyncio.sleep(locked_s)
        line.free.set()
        line.free = None
        await job.result(timeout=600)
        assert set(most.values()) == {1}, "a second run started beside the first"

    virtual(story)


def test_a_job_is_not_started_while_a_lost_run_of_it_winds_up_here() -> None:
    async def story(world: World) -> None:
        inside = most = runs = 0

        @world.app.task
        async def stubborn() -> None:
            nonlocal inside, most, runs
            inside, runs = inside + 1, runs + 1
            most = max(most, inside)
            try:
                await asyncio.sleep(8)
            except asyncio.CancelledError:
                await asyncio.sleep(4)
                raise
            finally:
                inside -= 1

        node = await world.node(lease_ms=3_000)
        job = await stubborn.enqueue()
        await asyncio.sleep(1)
        node.line.away = True
        await asyncio.sleep(4)
        node.line.away = False
        await job.result(timeout=120)
        assert (most, runs) == (1, 2)

    virtual(story)


# --- The clock


@pytest.mark.parametrize("step_s", [-7_200, -2, -0.2, 0.2, 2, 7_200])
def test_no_job_starts_early_by_a_clock_that_was_set(step_s: float) -> None:
    async def story(world: World) -> None:
        started: dict[int, int] = {}

        @world.app.task
        async def note(due_ms: int) -> None:
            started[due_ms] = world.now_ms

        await world.node()
        due = [world.now_ms + 5_000, world.now_ms + 5_500, world.now_ms + 20_000]
        jobs = [await note.using(delay=(ms - world.now_ms) / 1000).enqueue(ms) for ms in due]
        # The first two are in a wheel when the clock is set.
        await asyncio.sleep(4.7)
        world.set_clock(step_s)
        await asyncio.sleep(30 + max(-step_s, 0))
        assert sorted(started) == due
        assert [ms for ms in due if started[ms] < ms] == [], "early"
        if step_s < 0:
            assert [ms for ms in due if started[ms] > ms + 5] == [], "late"
        assert {(await job.info()).attempts for job in jobs} == {1}, "a lease was given up"

    virtual(story)


def test_a_job_that_waits_for_a_slot_is_not_early_when_the_clock_is_set_back() -> None:
    async def story(world: World) -> None:
        started = []

        @world.app.task
        async def work(seconds: float) -> None:
            started.append(world.now_ms)
            await asyncio.sleep(seconds)

        # A worker that ends many jobs claims more than it can start.
        quick = [work.job(0) for _ in range(20)]
        await world.app.enqueue_many(
            [*quick, work.job(1.5), work.using(delay=1, id="waits").job(0)]
        )
        await world.node(concurrency=1)
        await asyncio.sleep(1.2)
        waits = await world.app.job("waits").info()
        assert waits.state is State.RUNNING, "it is held, and waits for a slot"
        world.set_clock(-60)
        due_ms = waits.due.timestamp() * 1000
        await asyncio.sleep(90)
        assert len(started) == 22
        assert due_ms <= started[-1] <= due_ms + 2_000

    virtual(story)


@pytest.mark.parametrize("step_s", [-3_600, 3_600, 5])
def test_no_lease_is_lost_when_the_clock_is_set(step_s: float) -> None:
    async def story(world: World) -> None:
        @world.app.task(timeout="2m")
        async def slow() -> None:
            await asyncio.sleep(60)

        for _ in range(3):
            await world.node(lease_ms=4_000)
        jobs = [await slow.enqueue() for _ in range(20)]
        await asyncio.sleep(5)
        world.set_clock(step_s)
        await asyncio.sleep(70)
        infos = [await job.info() for job in jobs]
        assert {info.state for info in infos} == {State.DONE}
        assert {(info.attempts, info.takeovers) for info in infos} == {(1, 0)}

    virtual(story)


@pytest.mark.parametrize("step_s", [-3_600, 3_600])
def test_a_run_times_out_when_it_should_although_the_clock_is_set(step_s: float) -> None:
    async def story(world: World) -> None:
        ended: list[float] = []

        @world.app.task(timeout="10s", retries=0)
        async def slow() -> None:
            try:
                await asyncio.sleep(600)
            finally:
                ended.append(asyncio.get_running_loop().time())

        await world.node()
        start = asyncio.get_running_loop().time()
        job = await slow.enqueue()
        await asyncio.sleep(4)
        world.set_clock(step_s)
        await asyncio.sleep(10)
        assert [round(each - start) for each in ended] == [10]
        assert (await job.info()).state is State.DEAD

    virtual(story)


def test_a_lease_still_ends_after_the_clock_was_set_back() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(10)

        dies = await world.node(lease_ms=4_000)
        job = await slow.enqueue()
        await asyncio.sleep(1)
        dies.crash()
        world.set_clock(-3_600)
        other = await world.node(lease_ms=4_000)
        await asyncio.sleep(6)
        info = await job.info()
        assert (info.takeovers, info.worker) == (1, other.name)

    virtual(story)
