"""Jobs that kill their workers: found out, and no innocent one beside them suffers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from world import Node, World, virtual

from tickwheel import (
    App,
    JobFailed,
    JobHandle,
    Snooze,
    State,
    current_job,
)
from tickwheel.stores.memory import MemoryStore

# --- By dying


class Fleet:
    """Workers that are replaced as soon as they die, as a supervisor does."""

    def __init__(self, world: World, size: int, **options: Any) -> None:
        self._world, self._options = world, options
        self._size = size
        self.deaths = 0
        self._nodes: dict[str, Node] = {}

    async def start(self) -> None:
        for _ in range(self._size):
            await self._one()

    async def _one(self) -> None:
        node = await self._world.node(**self._options)
        self._nodes[node.name] = node

    def kill_this_one(self) -> None:
        """Called by a task: its own worker dies on the spot, and another one is started."""
        context = current_job()
        assert context is not None and context.job.worker is not None
        self._nodes.pop(context.job.worker).crash()
        self.deaths += 1
        self._restart = asyncio.get_running_loop().create_task(self._one())


@pytest.mark.parametrize("workers", [1, 2])
def test_one_job_that_kills_its_workers_dies_alone(workers: int) -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, workers, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.01)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs = [await innocent.enqueue(n) for n in range(50)]
        bad = await killer.enqueue()
        jobs += [await innocent.enqueue(n) for n in range(50, 99)]
        await fleet.start()
        with pytest.raises(JobFailed, match="died or froze 5 times"):
            await bad.result(timeout=600)
        assert [await job.result(timeout=600) for job in jobs] == list(range(99))
        assert fleet.deaths == 5
        assert {(await job.info()).failures for job in jobs} == {0}

    virtual(story)


def test_a_killer_that_strikes_late_is_found_among_jobs_that_run_long() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 1, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(20)
            return n

        @world.app.task
        async def killer() -> None:
            await asyncio.sleep(8)
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs = [await innocent.enqueue(n) for n in range(9)]
        bad = await killer.enqueue()
        await fleet.start()
        with pytest.raises(JobFailed, match="died or froze 5 times"):
            await bad.result(timeout=3600)
        assert [await job.result(timeout=3600) for job in jobs] == list(range(9))

    virtual(story)


def test_many_killers_take_no_innocent_job_along() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 2, lease_ms=3_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.5)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        jobs: list[JobHandle[int]] = []
        bad = []
        for n in range(60):
            jobs.append(await innocent.using(delay=n).enqueue(n))
            if n % 10 == 0:
                bad.append(await killer.using(delay=n).enqueue())
        await fleet.start()
        assert [await job.result(timeout=3600) for job in jobs] == list(range(60))
        for job in bad:
            with pytest.raises(JobFailed, match="died or froze 5 times"):
                await job.result(timeout=3600)

    virtual(story)


def test_a_run_that_ends_clears_the_suspicion() -> None:
    """A job that snoozes for months sees many workers die, one deploy at a time."""

    async def story(world: World) -> None:
        runs = []

        @world.app.task
        async def month_after_month() -> None:
            runs.append(world.now_ms)
            await asyncio.sleep(30)
            raise Snooze("30d")

        job = await month_after_month.enqueue()
        for _ in range(12):
            dies = await world.node(lease_ms=2_000)
            await asyncio.sleep(10)
            dies.crash()
            stays = await world.node(lease_ms=2_000)
            await asyncio.sleep(60)
            await stays.stop()
            await asyncio.sleep(30 * 86_400)
        info = await job.info()
        assert (info.state, info.takeovers) == (State.WAITING, 12)
        assert len(runs) == 24

    virtual(story)


def test_ordinary_jobs_go_on_while_a_long_one_is_suspected() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def long() -> None:
            await asyncio.sleep(7_200)

        @world.app.task
        async def quick() -> str:
            return "done"

        job = await long.using(timeout="3h").enqueue()
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(5)
            node.crash()
            await asyncio.sleep(5)
        await world.node(lease_ms=2_000)
        await asyncio.sleep(5)
        assert (await job.info()).state is State.RUNNING
        other = await quick.enqueue()
        assert await other.result(timeout=10) == "done", "it waited for the suspect"
        await asyncio.sleep(60)
        for _ in range(10):
            other = await quick.enqueue()
            assert await other.result(timeout=0.1) == "done"

    virtual(story)


def test_what_a_worker_holds_is_handed_back_before_a_trial() -> None:
    """Were its worker killed now, what merely waits there would be lost with the suspect."""

    async def story(world: World) -> None:
        @world.app.task
        async def work(seconds: float) -> None:
            await asyncio.sleep(seconds)

        suspect = await work.enqueue(5)
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(1)
            node.crash()
            await asyncio.sleep(3)
        await work.using(delay=0.9).enqueue(0)
        other = await work.using(delay=0.9).enqueue(0)
        await world.node(lease_ms=2_000)
        await asyncio.sleep(0.5)
        assert (await suspect.info()).state is State.RUNNING
        assert (await other.info()).state is State.WAITING
        await suspect.result(timeout=30)
        await other.result(timeout=30)

    virtual(story)


# --- In other ways, and innocent ones by the dozen


async def interrupt() -> None:
    raise KeyboardInterrupt


async def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)


async def exit_in_a_subtask() -> None:
    async def leave() -> None:
        raise SystemExit(1)

    await asyncio.gather(leave())


ENDINGS: dict[str, Callable[[], Any]] = {
    "an interrupt": interrupt,
    "cancelling all": cancel_all,
    "an exit in a subtask": exit_in_a_subtask,
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_job_that_ends_its_worker_from_within_is_found_out_too(how: str) -> None:
    """Not killed, but cancelled with its event loop: each time another worker is started."""
    store = MemoryStore()
    app = App(store)

    @app.task
    async def ends() -> None:
        await ENDINGS[how]()

    @app.task
    async def innocent(n: int) -> int:
        await asyncio.sleep(0.02)
        return n

    async def main(ids: list[str]) -> bool:
        async with app.worker(guarded=False):
            for _ in range(500):
                jobs = await store.get(ids)
                if all(job is not None and job.state.ended for job in jobs):
                    return True
                await asyncio.sleep(0.01)
        return False

    async def enqueue() -> list[str]:
        bad = await ends.enqueue()
        return [bad.id, *[(await innocent.enqueue(n)).id for n in range(10)]]

    ids = asyncio.run(enqueue())
    for _ in range(12):
        with contextlib.suppress(KeyboardInterrupt, SystemExit, asyncio.CancelledError):
            if asyncio.run(main(ids)):
                break

    async def look() -> list[Any]:
        return list(await store.get(ids))

    bad, *others = asyncio.run(look())
    assert (bad.state, bad.failures) == (State.DEAD, 0), bad
    assert {(job.state, job.failures) for job in others} == {(State.DONE, 0)}


def test_jobs_that_were_lost_twice_by_no_fault_of_theirs_run_side_by_side() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow(n: int) -> int:
            await asyncio.sleep(15)
            return n

        jobs = [await slow.enqueue(n) for n in range(50)]
        for _ in range(2):
            node = await world.node(lease_ms=2_000)
            await asyncio.sleep(5)
            node.crash()
            await asyncio.sleep(3)
        start = world.now_ms
        await world.node(lease_ms=2_000)
        assert [await job.result(timeout=600) for job in jobs] == list(range(50))
        assert world.now_ms - start < 90_000

    virtual(story)


def test_many_killers_all_end_dead() -> None:
    async def story(world: World) -> None:
        fleet = Fleet(world, 1, lease_ms=1_000)

        @world.app.task
        async def innocent(n: int) -> int:
            await asyncio.sleep(0.1)
            return n

        @world.app.task
        async def killer() -> None:
            fleet.kill_this_one()
            await asyncio.sleep(3600)

        bad = [await killer.enqueue() for _ in range(25)]
        jobs = [await innocent.enqueue(n) for n in range(25)]
        await fleet.start()
        for job in bad:
            with pytest.raises(JobFailed, match="died or froze 5 times"):
                await job.result(timeout=3600)
        assert [await job.result(timeout=3600) for job in jobs] == list(range(25))
        assert fleet.deaths <= 2 + 25 * 3

    virtual(story)
