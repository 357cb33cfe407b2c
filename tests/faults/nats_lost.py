"""Every step of a store with the messages that it may lose: one case per step.

A case has three parts: what stands before the step, the step, and what must be true after it,
however often it failed and was repeated on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from stores import NatsHarness
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import Store, WorkerInfo

HOUR_MS = 3_600_000
SHORT_LEASE_MS = 600
# One token an hour and three at once: what a repeat takes shows.
RATE = Rate(1, HOUR_MS, burst=5)


@dataclass(frozen=True)
class Case:
    before: Callable[[NatsHarness], Awaitable[Any]]
    step: Callable[[NatsHarness, Store, Any], Awaitable[Any]]
    # The harness, what `before` gave, the last answer, and how often the step failed before it.
    after: Callable[[NatsHarness, Any, Any, int], Awaitable[None]]


async def nothing(h: NatsHarness) -> None: ...


# --- Adding and claiming


async def add(h: NatsHarness, store: Store, _: None) -> list[bool]:
    jobs = [h.job("now"), h.job("soon", delay_ms=HOUR_MS), h.job("later", delay_ms=HOUR_MS)]
    return await store.add(jobs)


async def added(h: NatsHarness, _: None, answers: list[bool], failed: int) -> None:
    assert failed or answers == [True, True, True]
    assert len(set(answers)) == 1, "a part of it was added"
    assert await h.counts() == {"waiting": 3}
    assert await h.claim_ids() == ["now"]
    assert await h.claim() == []


async def three_due(h: NatsHarness) -> None:
    await h.add(*h.jobs(3))


async def claim(h: NatsHarness, store: Store, _: None) -> list[Job]:
    return await h.claim(3, store=store, lease_ms=SHORT_LEASE_MS)


async def claimed(h: NatsHarness, _: None, held: list[Job], failed: int) -> None:
    """Each comes back within a lease, or the time from delivery to claim: both are short."""
    assert failed or len(held) == 3
    found = list(held)
    async with asyncio.timeout(10):
        while len({job.id for job in found}) < 3:
            found += await h.claim(1)
            await asyncio.sleep(0.05)
    for job in found:
        assert job.attempt == 1 + job.takeovers, "an attempt that nobody counted"
    assert len({(job.id, job.attempt) for job in found}) == len(found)


async def three_parked(h: NatsHarness) -> None:
    held = await h.claimed(*h.jobs(3))
    parked = [h.settlement(Outcome.PARK, job) for job in held]
    assert await h.store.settle(parked, now_ms=h.now) == [True] * 3


async def claim_parked(h: NatsHarness, store: Store, _: None) -> list[Job]:
    return await h.claim(3, store=store, lease_ms=SHORT_LEASE_MS, tasks=[h.job().task])


async def claimed_parked(h: NatsHarness, _: None, held: list[Job], failed: int) -> None:
    """Each is handed out at once, or comes back within a lease, and is parked no more."""
    assert failed or len(held) == 3
    found = list(held)
    async with asyncio.timeout(10):
        while len({job.id for job in found}) < 3:
            found += await h.claim(1, tasks=[h.job().task])
            await asyncio.sleep(0.05)
    for job in found:
        assert job.attempt == 2 + job.takeovers, "an attempt that nobody counted"
    assert len({(job.id, job.attempt) for job in found}) == len(found)
    assert await h.store.parked() == []


# --- In hand


async def one_in_hand(h: NatsHarness) -> Job:
    [held] = await h.claimed(h.job())
    return held


async def extend(h: NatsHarness, store: Store, held: Job) -> Job | None:
    [extended] = await store.extend([held], now_ms=h.now, lease_ms=h.lease_ms)
    return extended


async def extended(h: NatsHarness, _: Job, answer: Job | None, failed: int) -> None:
    assert answer is not None, "the holder was told that it lost the job"
    assert await h.counts() == {"running": 1}
    assert await h.settle(h.done(answer))
    assert [run.outcome for run in (await h.get()).history] == [Outcome.DONE]


def settle(outcome: Outcome, delay_ms: int = 0) -> Case:
    async def step(h: NatsHarness, store: Store, held: Job) -> bool:
        settlement = h.settlement(outcome, held, delay_ms=delay_ms)
        return (await store.settle([settlement], now_ms=h.now))[0]

    async def after(h: NatsHarness, held: Job, taken: bool, failed: int) -> None:
        assert taken, "its own settlement was refused to the holder"
        job = await h.get()
        assert [run.outcome for run in job.history] == [outcome]
        assert job.failures == (outcome in (Outcome.RETRY, Outcome.DEAD))
        assert sum((await h.counts()).values()) == 1
        if job.state is State.WAITING and not delay_ms:
            [again] = await h.claim(1, tasks=[job.task] if job.parked else ())
            assert again.attempt == 2
        assert await h.claim() == []

    return Case(one_in_hand, step, after)


# --- The operator's steps


async def cancel(h: NatsHarness, store: Store, _: Any) -> CancelOutcome:
    return (await store.cancel(["job"], now_ms=h.now))[0]


async def one_later(h: NatsHarness) -> None:
    await h.add(h.job(delay_ms=HOUR_MS))


async def one_due(h: NatsHarness) -> None:
    await h.add(h.job())


async def cancelled(h: NatsHarness, _: None, answer: CancelOutcome, failed: int) -> None:
    assert answer is CancelOutcome.CANCELLED or (failed and answer is CancelOutcome.TOO_LATE)
    assert await h.claim() == []
    assert await h.counts() == {"cancelled": 1}


async def asked(h: NatsHarness, held: Job, answer: CancelOutcome, failed: int) -> None:
    assert answer is CancelOutcome.REQUESTED
    assert await h.store.asked("ann", now_ms=h.now, until_ms=h.now) == {"job": "stop"}
    assert await h.settle(h.retry(held))
    assert await h.counts() == {"cancelled": 1}


async def two_dead(h: NatsHarness) -> None:
    await h.ended(State.DEAD, "job")
    await h.ended(State.DEAD, "other")


async def rerun(h: NatsHarness, store: Store, _: None) -> list[bool]:
    return await store.rerun(["job", "other"], now_ms=h.now)


async def run_again(h: NatsHarness, _: None, answers: list[bool], failed: int) -> None:
    assert failed or answers == [True, True]
    held = await h.claim()
    assert sorted((job.id, job.attempt) for job in held) == [("job", 2), ("other", 2)]
    assert await h.counts() == {"running": 2}


async def delete(h: NatsHarness, store: Store, _: None) -> list[bool]:
    return await store.delete(["job", "other"])


async def deleted(h: NatsHarness, _: None, answers: list[bool], failed: int) -> None:
    assert failed or answers == [True, True]
    await gone(h)


async def prune(h: NatsHarness, store: Store, _: None) -> int:
    return await store.prune([State.DEAD], before_ms=h.now + 1_000, limit=10)


async def pruned(h: NatsHarness, _: None, count: int, failed: int) -> None:
    assert failed or count == 2
    await gone(h)


async def gone(h: NatsHarness) -> None:
    assert await h.store.get(["job", "other"]) == [None, None]
    assert await h.store.queues() == []
    await h.add(h.job())
    assert (await h.claim_one()).attempt == 1


# --- Schedules


async def a_schedule(h: NatsHarness) -> Schedule:
    return await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=1))


async def put_schedule(h: NatsHarness, store: Store, _: None) -> Schedule:
    return await store.put_schedule(Schedule(name="s", rule="{}", next_ms=1))


async def put(h: NatsHarness, _: None, schedule: Schedule, failed: int) -> None:
    assert await h.store.schedules() == [schedule]
    assert await h.store.fire(schedule, [], next_ms=2), "its fence was no good"


async def delete_schedule(h: NatsHarness, store: Store, _: Schedule) -> bool:
    return await store.delete_schedule("s")


async def no_schedule(h: NatsHarness, _: Schedule, answer: bool, failed: int) -> None:
    assert failed or answer
    assert await h.store.schedules() == []


async def two_records(h: NatsHarness) -> None:
    await h.store.put_records("key", {"a": "1", "other-group": "2"})


async def put_records(h: NatsHarness, store: Store, _: None) -> None:
    await store.put_records("key", {"a": "1", "b": "2", "other-group": "3"})


async def have_records(h: NatsHarness, *_: object) -> None:
    assert await h.store.records("key") == [("a", "1"), ("b", "2"), ("other-group", "3")]


async def delete_records(h: NatsHarness, store: Store, _: None) -> list[bool]:
    return await store.delete_records("key", ["a", "other-group"])


async def no_records(h: NatsHarness, _: None, answer: list[bool], failed: int) -> None:
    assert failed or answer == [True, True]
    assert await h.store.records("key") == []


async def fire(h: NatsHarness, store: Store, schedule: Schedule) -> bool:
    return await store.fire(schedule, [h.job("s@1"), h.job("s@2")], next_ms=2)


async def fired(h: NatsHarness, _: Schedule, answer: bool, failed: int) -> None:
    assert failed or answer
    [schedule] = await h.store.schedules()
    assert (schedule.next_ms, schedule.last_id) == (2, "s@2")
    assert sorted(await h.claim_ids()) == ["s@1", "s@2"]
    assert await h.claim() == []


# --- Operating


async def pause(h: NatsHarness, store: Store, _: None) -> None:
    await store.pause("default", True)


async def paused(h: NatsHarness, *_: object) -> None:
    assert [queue.paused for queue in await h.store.queues()] == [True]
    assert await h.claim() == []


async def one_paused(h: NatsHarness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)


async def go_on(h: NatsHarness, store: Store, _: None) -> None:
    await store.pause("default", False)


async def went_on(h: NatsHarness, *_: object) -> None:
    assert [queue.paused for queue in await h.store.queues()] == [False]
    assert await h.claim_ids() == ["job"]


def worker(h: NatsHarness) -> WorkerInfo:
    return WorkerInfo(
        name="ann",
        host="here",
        pid=1,
        version="0",
        queues=("default",),
        concurrency=1,
        started_ms=h.now,
        seen_ms=h.now,
        gone_after_ms=30_000,
    )


async def beat(h: NatsHarness, store: Store, _: None) -> None:
    await store.beat(worker(h))


async def known(h: NatsHarness, *_: object) -> None:
    assert [each.name for each in await h.store.workers(now_ms=h.now)] == ["ann"]


async def one_worker(h: NatsHarness) -> None:
    await h.store.beat(worker(h))


async def strike_off(h: NatsHarness, store: Store, _: None) -> None:
    await store.beat(msgspec.structs.replace(worker(h), gone_after_ms=0))


async def struck_off(h: NatsHarness, *_: object) -> None:
    assert await h.store.workers(now_ms=h.now) == []


async def throttle(h: NatsHarness, store: Store, _: None) -> int:
    return await store.throttle("key", RATE, now_ms=h.now)


async def throttled(h: NatsHarness, _: None, wait_ms: int, failed: int) -> None:
    """A repeat may take a token more, rather than let one too many through."""
    assert wait_ms == 0
    left = 0
    while not await h.store.throttle("key", RATE, now_ms=h.now):
        left += 1
    assert RATE.burst - 1 - failed <= left <= RATE.burst - 1


CASES = {
    "add": Case(nothing, add, added),
    "claim": Case(three_due, claim, claimed),
    "claim parked": Case(three_parked, claim_parked, claimed_parked),
    "extend": Case(one_in_hand, extend, extended),
    "settle done": settle(Outcome.DONE),
    "settle dead": settle(Outcome.DEAD),
    "settle retry later": settle(Outcome.RETRY, HOUR_MS),
    "settle retry now": settle(Outcome.RETRY),
    "settle snooze": settle(Outcome.SNOOZE, HOUR_MS),
    "settle release": settle(Outcome.RELEASE),
    "settle park": settle(Outcome.PARK),
    "cancel waiting": Case(one_later, cancel, cancelled),
    "cancel ready": Case(one_due, cancel, cancelled),
    "cancel running": Case(one_in_hand, cancel, asked),
    "rerun": Case(two_dead, rerun, run_again),
    "delete": Case(two_dead, delete, deleted),
    "prune": Case(two_dead, prune, pruned),
    "put_schedule": Case(nothing, put_schedule, put),
    "delete_schedule": Case(a_schedule, delete_schedule, no_schedule),
    "put_records": Case(nothing, put_records, have_records),
    "delete_records": Case(two_records, delete_records, no_records),
    "fire": Case(a_schedule, fire, fired),
    "pause": Case(one_due, pause, paused),
    "go on": Case(one_paused, go_on, went_on),
    "beat": Case(nothing, beat, known),
    "strike off": Case(one_worker, strike_off, struck_off),
    "throttle": Case(nothing, throttle, throttled),
}
