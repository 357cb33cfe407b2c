"""Jobs that are replaced and moved while a worker has them, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from world import Line, World, virtual

from tickwheel import MoveOutcome, PutOutcome, RetryPolicy, State, Task, current_job
from tickwheel.engine.hand import Held
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Changes, Job, Outcome

Story = Callable[[World], Coroutine[Any, Any, None]]


class Record:
    """A task that notes what it runs, and when."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.started: list[tuple[int, str]] = []
        self.ended: list[str] = []

        @world.app.task(retries=RetryPolicy(retries=3, first=1), if_exists="replace")
        async def work(note: str, seconds: float = 0) -> None:
            job = current_job()
            assert job is not None and world.now_ms >= job.job.due_ms, "started early"
            self.started.append((world.now_ms, note))
            await asyncio.sleep(seconds)
            self.ended.append(note)

        self.work: Task[[str, float], None, Any] = work

    @property
    def notes(self) -> list[str]:
        return [note for _, note in self.started]


def story(tell: Callable[[World, Record], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def test() -> None:
        virtual(lambda world: tell(world, Record(world)))

    test.__name__, test.__doc__ = tell.__name__, tell.__doc__
    return test


@story
async def test_a_job_in_the_wheel_moves_and_does_not_start_before(
    world: World, record: Record
) -> None:
    await world.node()
    handle = await record.work.using(delay=0.8).enqueue("a", 0)
    await asyncio.sleep(0.4)
    assert (await world.stored(handle.id)).state is State.RUNNING  # in the wheel
    before_ms = world.now_ms
    assert await handle.move(delay=5) is MoveOutcome.MOVED
    assert world.now_ms - before_ms < 500
    await asyncio.sleep(4.5)
    assert record.started == []
    await asyncio.sleep(1)
    [(at_ms, _)] = record.started
    assert at_ms == (await world.stored(handle.id)).due_ms


@story
async def test_a_job_in_the_wheel_can_start_sooner(world: World, record: Record) -> None:
    await world.node()
    handle = await record.work.using(delay=0.9).enqueue("a", 0)
    await asyncio.sleep(0.2)
    assert await handle.move(delay=0) is MoveOutcome.MOVED
    await asyncio.sleep(0.3)
    assert record.notes == ["a"]


@story
async def test_a_job_that_has_started_is_too_late_to_move_and_runs_on(
    world: World, record: Record
) -> None:
    await world.node()
    handle = await record.work.enqueue("a", 30)
    await asyncio.sleep(1)
    before_ms = world.now_ms
    assert await handle.move(delay="1h") is MoveOutcome.TOO_LATE
    assert world.now_ms - before_ms < 1000
    await asyncio.sleep(30)
    assert record.ended == ["a"]
    assert (await world.stored(handle.id)).state is State.DONE


@story
async def test_a_running_job_that_is_replaced_ends_and_runs_once_more(
    world: World, record: Record
) -> None:
    await world.node()
    call = record.work.using(id="sync")
    assert (await call.enqueue("1", 10)).answer is PutOutcome.ADDED
    await asyncio.sleep(1)
    for note in "234":
        assert (await call.enqueue(note, 0)).answer is PutOutcome.FOLLOWS
        await asyncio.sleep(1)
    assert record.notes == ["1"]
    await asyncio.sleep(10)
    assert record.notes == record.ended == ["1", "4"]
    job = await world.stored("sync")
    assert (job.state, job.attempt) == (State.DONE, 2)


@story
async def test_a_job_in_the_wheel_that_is_replaced_never_starts_as_it_was(
    world: World, record: Record
) -> None:
    await world.node()
    call = record.work.using(id="sync", delay=0.8)
    await call.enqueue("old", 0)
    await asyncio.sleep(0.4)
    assert (await call.enqueue("new", 0)).answer is PutOutcome.FOLLOWS
    await asyncio.sleep(3)
    assert record.notes == ["new"]


@story
async def test_a_worker_does_not_ask_again_and_again_about_a_long_run(
    world: World, record: Record
) -> None:
    """No polling while what follows waits for the end of the run."""
    calls = 0

    class Counted(Line):
        def __getattr__(self, name: str) -> Any:
            nonlocal calls
            calls += name == "asked"
            return super().__getattr__(name)

    await world.node(line=Counted(world.store))
    await record.work.using(id="sync").enqueue("1", 60)
    await asyncio.sleep(1)
    await record.work.using(id="sync").enqueue("2", 0)
    await asyncio.sleep(1)
    before = calls
    await asyncio.sleep(50)
    assert calls - before < 15


@story
async def test_a_replaced_job_that_is_cancelled_later_stops(world: World, record: Record) -> None:
    """The request to stop gets through although the worker knows of the other."""
    await world.node()
    handle = await record.work.using(id="sync").enqueue("1", 60)
    await asyncio.sleep(1)
    await record.work.using(id="sync").enqueue("2", 0)
    await asyncio.sleep(1)
    await handle.cancel()
    await asyncio.sleep(1)
    assert (await world.stored("sync")).state is State.CANCELLED
    await asyncio.sleep(60)
    assert record.notes == ["1"] and record.ended == []


@story
async def test_a_job_whose_worker_dies_is_followed_all_the_same(
    world: World, record: Record
) -> None:
    node = await world.node(lease_ms=4000)
    await record.work.using(id="sync").enqueue("1", 60)
    await asyncio.sleep(1)
    await record.work.using(id="sync").enqueue("2", 0)
    node.crash()
    await world.node(lease_ms=4000)
    await asyncio.sleep(10)
    assert record.notes == ["1", "2"]
    job = await world.stored("sync")
    assert job.state is State.DONE
    assert [run.outcome for run in job.history] == [Outcome.LOST, Outcome.DONE]


@story
async def test_a_worker_that_lost_its_lease_unnoticed_runs_what_follows(
    world: World, record: Record
) -> None:
    """It claims its own job again: that is not the run that is still going on."""
    line = Line(world.store)
    node = await world.node(line=line, lease_ms=4000)
    assert node.line is line
    await record.work.using(id="sync").enqueue("1", 12)
    await asyncio.sleep(1)
    line.away = True
    await asyncio.sleep(5)
    await record.work.using(id="sync").enqueue("2", 0)
    line.away = False
    await asyncio.sleep(30)
    assert record.notes[-1] == "2"
    assert (await world.stored("sync")).state is State.DONE


@pytest.mark.parametrize("seed", range(6))
def test_no_update_is_lost_whatever_breaks(seed: int) -> None:
    """Of the updates of each id, the last one that was acknowledged runs last, and to its end."""
    dice = random.Random(seed)

    async def tell(world: World) -> None:
        record = Record(world)
        last: dict[str, str] = {}

        async def start() -> Any:
            line = Line(
                world.store, lose_requests=0.05, lose_replies=0.05, seed=dice.randrange(10**9)
            )
            return await world.node(line=line, lease_ms=4000, concurrency=5)

        nodes = [await start() for _ in range(3)]
        for n in range(150):
            id = f"sync-{dice.randrange(5)}"
            call = record.work.using(id=id, delay=dice.choice([0, 0, 0.5, 1.5, 5]))
            note = f"{id} {n}"
            try:
                await call.enqueue(note, dice.choice([0, 0.1, 2, 6]))
                last[id] = note
            except StoreUnavailable:
                continue
            if dice.random() < 0.3:
                await world.app.job(id).move(delay=dice.choice([0, 1, 3]))
            if dice.random() < 0.1:
                victim = dice.randrange(3)
                nodes[victim].crash()
                nodes[victim] = await start()
            await asyncio.sleep(dice.choice([0, 0.05, 0.5, 2]))
        await asyncio.sleep(300)
        for id, note in last.items():
            assert (await world.stored(id)).state is State.DONE
            assert [each for each in record.ended if each.startswith(f"{id} ")][-1] == note

    virtual(tell)


def test_a_claim_is_for_the_run_that_goes_on_only_if_nothing_has_changed() -> None:
    """A worker may claim a job again whose lease ran out unnoticed, while its run goes on."""
    plain = Job(id="a", task="work", payload="{}", due_ms=0, created_ms=0)

    def changed(count: int, *, pending: bool = False) -> Job:
        changes = Changes(count=count, next=plain if pending else None)
        return msgspec.structs.replace(plain, changes=changes)

    assert not Held(plain).replaced_by(plain)
    assert not Held(changed(1)).replaced_by(changed(1))
    assert Held(plain).replaced_by(changed(1))
    assert Held(changed(1)).replaced_by(changed(2))
    assert Held(changed(2, pending=True)).replaced_by(changed(2))
