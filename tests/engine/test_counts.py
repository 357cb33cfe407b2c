"""What a worker counts, in virtual time: every number is exact."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace
from world import World, virtual

from tickwheel import GiveUp, JobCancelled, JobFailed, JobHandle, Retry, Snooze, StoreUnavailable
from tickwheel.clock import LoopClock
from tickwheel.engine.counts import (
    BOUNDS_MS,
    OTHER,
    STEPS,
    TASKS_TOLD,
    Counts,
    JobCounts,
    TaskCounts,
)
from tickwheel.objective import Objective, Tally
from tickwheel.store import WorkerCounts
from tickwheel.testing import FaultyStore


def counts_of(world: World) -> Counts:
    return world.app.enable_metrics()


def events(counts: JobCounts) -> dict[str, int]:
    found = {name: getattr(counts, name) for name in JobCounts.EVENTS}
    return {name: count for name, count in found.items() if count}


def buckets(counts: list[int]) -> dict[float, int]:
    """What is in each bucket, by its upper bound in milliseconds."""
    bounds = [*BOUNDS_MS, float("inf")]
    return {bound: count for bound, count in zip(bounds, counts, strict=True) if count}


async def over(*jobs: JobHandle[Any]) -> None:
    for job in jobs:
        try:
            await job.result(timeout=3600)
        except (JobFailed, JobCancelled):
            pass


def test_a_run_is_counted_with_its_lateness_and_its_time() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task(queue="mail")
        async def send(seconds: float) -> None:
            await asyncio.sleep(seconds)

        jobs = [
            await send.using(delay="1s").enqueue(0.2),
            await send.using(delay="10s").enqueue(3),
        ]
        await world.node()
        await over(*jobs)
        task = counts.tasks["send"]
        assert events(task.queues["mail"]) == {"added": 2, "started": 2, "done": 2}
        assert buckets(task.late) == {1: 2} and task.late_ms == 0
        assert buckets(task.took) == {250: 1, 5_000: 1} and task.took_ms == 3_200

    virtual(story)


def test_lateness_is_from_when_a_job_is_due_to_its_start() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)
        counts.set_objective(Objective(0.99, 1_500))

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(1.5)

        jobs = [await work.using(delay="1s").enqueue() for _ in range(3)]
        await world.node(concurrency=1)
        await over(*jobs)
        task = counts.tasks["work"]
        # They run one after the other: 0, 1500 and 3000 ms late.
        assert buckets(task.late) == {1: 1, 2_500: 1, 5_000: 1} and task.late_ms == 4_500
        assert task.tally == counts.tally == Tally(total=3, good=2)

    virtual(story)


def test_due_in_the_past_means_now() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None: ...

        await world.node()
        await over(await work.using(at=datetime(2001, 1, 1, tzinfo=UTC)).enqueue())
        assert counts.tasks["work"].late_ms == 0

    virtual(story)


def test_each_end_has_its_count() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)
        snoozed: list[None] = []

        @world.app.task(retries=2)
        async def fail() -> None:
            raise ValueError("no luck")

        @world.app.task
        async def give_up() -> None:
            raise GiveUp("never")

        @world.app.task
        async def asks() -> None:
            raise Retry("1s")

        @world.app.task
        async def later() -> None:
            if not snoozed:
                snoozed.append(None)
                raise Snooze("1s")

        @world.app.task(timeout=None)
        async def hang() -> None:
            await asyncio.Event().wait()

        await world.node(concurrency=10)
        hanging = await hang.enqueue()
        jobs = [
            await fail.enqueue(),
            await give_up.enqueue(),
            await asks.using(retries=0).enqueue(),
            await later.enqueue(),
        ]
        await over(*jobs)
        await hanging.cancel()
        await over(hanging)
        await asyncio.sleep(1)
        found = {name: events(task.queues["default"]) for name, task in counts.tasks.items()}
        assert found == {
            "fail": {"added": 1, "started": 3, "failed": 3, "retried": 2, "dead": 1},
            "give_up": {"added": 1, "started": 1, "failed": 1, "dead": 1},
            "asks": {"added": 1, "started": 1, "failed": 1, "dead": 1},
            "later": {"added": 1, "started": 2, "snoozed": 1, "done": 1},
            "hang": {"added": 1, "started": 1, "cancelled": 1},
        }
        # Retries are as punctual as first runs.
        assert buckets(counts.tasks["fail"].late) == {1: 3}

    virtual(story)


def test_a_job_that_expires_was_not_punctual() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)
        counts.set_objective(Objective(0.99, 100))

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(10)

        await world.node(concurrency=1)
        first = await work.enqueue()
        await asyncio.sleep(0.5)
        second = await work.using(expires="2s").enqueue()
        await over(first, second)
        assert events(counts.tasks["work"].queues["default"]) == {
            **{"added": 2, "started": 1},
            **{"done": 1, "expired": 1},
        }
        assert counts.tally == Tally(total=2, good=1)

    virtual(story)


def test_jobs_of_a_batch_are_counted_one_by_one() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.batch(size=10)
        async def index(items: list[int]) -> None: ...

        jobs = [await index.using(delay="1s").enqueue(n) for n in range(5)]
        await world.node()
        await over(*jobs)
        task = counts.tasks["index"]
        assert events(task.queues["default"]) == {"added": 5, "started": 5, "done": 5}
        assert sum(task.late) == sum(task.took) == 5

    virtual(story)


def test_a_second_run_for_the_same_due_time_says_nothing_about_punctuality() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(60)

        node = await world.node(grace_ms=0)
        job = await work.enqueue()
        await asyncio.sleep(30)
        await node.stop()
        await world.node()
        await over(job)
        task = counts.tasks["work"]
        assert events(task.queues["default"]) == {
            **{"added": 1, "started": 2},
            **{"released": 1, "done": 1},
        }
        assert buckets(task.late) == {1: 1}

    virtual(story)


def test_a_run_that_lost_its_lease_is_not_done() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(20)

        first = await world.node(lease_ms=5_000)
        job = await work.enqueue()
        await asyncio.sleep(1)
        first.line.away = True
        await asyncio.sleep(15)
        first.line.away = False
        await over(job)
        assert events(counts.tasks["work"].queues["default"]) == {
            **{"added": 1, "started": 2},
            **{"done": 1, "lost": 1},
        }

    virtual(story)


def test_an_outcome_that_the_store_refuses_does_not_count() -> None:
    class Refusing(FaultyStore):
        """Another attempt came first, it says."""

        async def settle(self, settlements: Any, *, now_ms: int) -> list[bool]:
            return [False] * len(settlements)

    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None: ...

        await work.enqueue()
        await world.node(line=Refusing(world.store))
        await asyncio.sleep(1)
        numbers = counts.numbers()
        found = events(numbers.tasks["work"].queues["default"])
        assert found["lost"] == found["started"] > 0 and "done" not in found

    virtual(story)


def test_the_jobs_of_schedules_are_added_too() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.every("10s")
        async def tick() -> None: ...

        await world.node(line=counted_line(world))
        await asyncio.sleep(35)
        task = counts.tasks["tick"].queues["default"]
        assert task.added >= 3 and task.done == 3

    virtual(story)


def counted_line(world: World) -> FaultyStore:
    """A line on which calls are counted, as on an app's own handle."""
    return FaultyStore(counts_of(world).counted(world.store))


def test_store_calls_are_counted_and_timed_and_claims_that_found_nothing() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        class Slow:
            ahead_ms = 1_000
            max_inflight = 1
            own_clock = True

            def __getattr__(self, name: str) -> Any:
                async def step(*args: Any, **kwargs: Any) -> Any:
                    await asyncio.sleep(0.2)
                    if name == "queues":
                        raise StoreUnavailable("no")
                    return []

                return step

        store = counts.counted(Slow())
        assert store.ahead_ms == 1_000
        await store.claim(["default"], worker="w", limit=1, now_ms=0, lease_ms=1)
        await store.schedules()
        with pytest.raises(StoreUnavailable):
            await store.queues()
        assert counts.empty_claims == 1
        called = {name: each for name, each in counts.calls.items() if each.count}
        assert {name: (each.count, each.errors) for name, each in called.items()} == {
            "claim": (1, 0),
            "schedules": (1, 0),
            "queues": (1, 1),
        }
        assert all(each.total_us == 200_000 for each in called.values())
        assert {"add", "settle", "wait", "time_ns"} <= set(STEPS)
        assert not {"open", "close", "new_handle"} & set(STEPS)

    virtual(story)


def test_a_worker_says_what_it_holds_and_how_many_slots_are_free() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(10)

        await work.using(delay="60s").enqueue()
        jobs = [await work.enqueue() for _ in range(2)]
        node = await world.node(concurrency=5, threads=3, processes=2)
        await asyncio.sleep(1)
        [gauges] = [ask() for ask in counts.workers.values()]
        assert gauges.name == node.name and gauges.queues == ("default",)
        assert (gauges.wheel, gauges.ready, gauges.held) == (0, 0, 2)
        assert gauges.used == {"async": 2, "thread": 0, "process": 0}
        assert gauges.free == {"async": 3, "thread": 3, "process": 2}
        await over(*jobs)
        await asyncio.sleep(49.5)
        [gauges] = [ask() for ask in counts.workers.values()]
        assert (gauges.wheel, gauges.held, gauges.used["async"]) == (1, 1, 0)
        await node.stop()
        assert counts.workers == {}

    virtual(story)


def test_names_are_bounded() -> None:
    async def story(world: World) -> None:
        counts = counts_of(world)

        @world.app.task
        async def work() -> None: ...

        job = work.job()
        counts.added([replace(job, task=f"task-{n}") for n in range(1_000)], [True] * 1_000)
        assert len(counts.tasks) == 201
        assert counts.tasks[OTHER].queues["default"].added == 800
        counts.added([replace(job, queue=f"queue-{n}") for n in range(1_000)], [True] * 1_000)
        other: TaskCounts = counts.tasks[OTHER]
        assert len(other.queues) == 201 and other.queues[OTHER].added == 801
        for n in range(100):
            counts.added(
                [replace(job, task=f"task-{n}", queue=f"queue-{q}") for q in range(50)], [True] * 50
            )
        pairs = sum(len(task.queues) for task in counts.tasks.values())
        assert pairs <= 1_000 + 201
        total = sum(each.added for task in counts.tasks.values() for each in task.queues.values())
        assert total == 7_000

    virtual(story)


def test_an_app_counts_nothing_unless_it_is_told_to() -> None:
    async def story(world: World) -> None:
        assert world.app.counts is None
        client = await world.app.client()
        assert type(client.store) is type(world.store)

    virtual(story)


# --- What a worker tells the store


async def told(world: World) -> WorkerCounts:
    """The same counts, from every worker: they are of one process."""
    found = {repr(each.counts): each.counts for each in await world.app.workers()}
    [counts] = found.values()
    assert counts is not None
    return counts


def test_a_worker_tells_the_store_what_was_counted() -> None:
    async def story(world: World) -> None:
        counts_of(world)

        @world.app.task
        async def work() -> None:
            await asyncio.sleep(1.5)

        @world.app.task(queue="mail", retries=1)
        async def fail() -> None:
            raise ValueError("no luck")

        @world.app.task
        async def never() -> None: ...

        begun_ms = world.clock.now_ns() // 1_000_000
        jobs = [await work.using(delay="1s").enqueue() for _ in range(3)]
        await world.node(concurrency=1, queues=["default"])
        await over(*jobs)
        await world.node(queues=["mail"])
        await over(await fail.enqueue())
        await asyncio.sleep(10)
        found = await told(world)
        assert (found.started, found.done, found.failed, found.dead) == (5, 3, 2, 1)
        assert found.tasks == {"work": (3, 0, 0), "fail": (0, 2, 1)}
        # 0, 1500 and 3000 ms late; and the two that failed.
        assert buckets([*found.late, *[0] * (len(BOUNDS_MS) + 1 - len(found.late))]) == {
            **{1: 3, 2_500: 1, 5_000: 1},
        }
        assert found.late[-1] and abs(found.since_ms - begun_ms) <= 10

    virtual(story)


def test_a_worker_without_metrics_tells_no_counts() -> None:
    async def story(world: World) -> None:
        await world.node()
        await asyncio.sleep(10)
        [worker] = await world.app.workers()
        assert worker.counts is None

    virtual(story)


def test_what_a_worker_tells_is_bounded_and_only_grows() -> None:
    counts = Counts(LoopClock())
    for n in range(TASKS_TOLD + 50):
        counts.know(f"task-{n}", "default")
    counts.tasks[f"task-{TASKS_TOLD}"].queues["default"].failed = 3
    counts.tasks[f"task-{TASKS_TOLD + 1}"].queues["default"].dead = 1
    before = counts.told(0)
    assert before.tasks == {OTHER: (0, 3, 1)}
    # Others that begin later don't move them.
    for n in range(TASKS_TOLD):
        counts.tasks[f"task-{n}"].queues["default"].done = 1
    after = counts.told(0)
    assert len(after.tasks) == TASKS_TOLD + 1 and after.tasks[OTHER] == (0, 3, 1)
    assert after.source == before.source
