"""Two handles at once, on one event loop and in threads: each step whole, each job once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stores import Harness
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.schedule import Schedule
from tickwheel.store import Store

T = TypeVar("T")


async def in_threads(h: Harness, count: int, work: Callable[[Store, int], Awaitable[T]]) -> list[T]:
    """The same work on a handle of its own in each of several threads, all at once."""

    async def there(n: int) -> T:
        store = h.store.new_handle()
        await store.open()
        try:
            return await work(store, n)
        finally:
            await store.close()

    return await asyncio.gather(*(asyncio.to_thread(asyncio.run, there(n)) for n in range(count)))


async def test_a_job_added_by_both_handles_is_added_once(h: Harness) -> None:
    twin = await h.new_handle()
    jobs = h.jobs(50)
    answers = await asyncio.gather(
        h.store.add(jobs), twin.add(jobs[::-1]), h.store.add(jobs), twin.add(jobs)
    )
    answers[1].reverse()
    assert [sum(added) for added in zip(*answers, strict=True)] == [1] * 50
    assert await h.counts() == {"waiting": 50}


async def test_each_job_goes_to_one_of_the_claims(h: Harness) -> None:
    twin = await h.new_handle()
    await h.add(*h.jobs(60))
    claims = await asyncio.gather(
        *(h.claim(10, worker=f"{n}", store=(h.store, twin)[n % 2]) for n in range(8))
    )
    assert Counter(job.id for jobs in claims for job in jobs) == Counter(
        job.id for job in h.jobs(60)
    )
    assert await h.counts() == {"running": 60}


async def test_each_lost_job_goes_to_one_of_the_claims(h: Harness) -> None:
    twin = await h.new_handle()
    await h.claimed(*h.jobs(20))
    await h.lose_leases()
    claims = await asyncio.gather(
        *(h.claim(10, worker=f"{n}", store=(h.store, twin)[n % 2]) for n in range(6))
    )
    held = [job for jobs in claims for job in jobs]
    assert len({job.id for job in held}) == len(held) == 20
    assert {job.attempt for job in held} == {2}


async def test_of_two_settlements_of_one_attempt_one_counts(h: Harness) -> None:
    """A worker that settles twice by mistake still leaves one run, not a mixture of two."""
    twin = await h.new_handle()
    [held] = await h.claimed(h.job())
    await asyncio.gather(
        h.settle(h.done(held)), h.settle(h.settlement(Outcome.DEAD, held), store=twin)
    )
    job = await h.get()
    assert len(job.history) == 1
    assert job.state.value == job.history[0].outcome.value
    assert (job.result is None) == (job.state is State.DEAD)


async def test_a_cancel_and_a_claim_agree_on_who_was_first(h: Harness) -> None:
    twin = await h.new_handle()
    for n in range(20):
        await h.add(h.job(f"{n}"))
        held, [answer] = await asyncio.gather(h.claim(), twin.cancel([f"{n}"], now_ms=h.now))
        assert answer is (CancelOutcome.REQUESTED if held else CancelOutcome.CANCELLED)
        for job in held:
            assert await h.settle(h.done(job))


async def test_a_cancel_and_a_settle_agree_on_who_was_first(h: Harness) -> None:
    twin = await h.new_handle()
    for n in range(20):
        [held] = await h.claimed(h.job(f"{n}"))
        taken, [answer] = await asyncio.gather(
            h.settle(h.retry(held, delay_ms=3_600_000)), twin.cancel([f"{n}"], now_ms=h.now)
        )
        assert taken
        # Before the settle it asked, after it the job waited: cancelled either way.
        assert answer in (CancelOutcome.REQUESTED, CancelOutcome.CANCELLED)
        assert (await h.get(f"{n}")).state is State.CANCELLED
    assert await h.counts() == {"cancelled": 20}


async def test_a_tick_is_fired_by_one_of_many_nodes(h: Harness) -> None:
    twin = await h.new_handle()
    await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=h.now))
    for tick in range(5):
        [schedule] = await h.store.schedules()
        fired = await asyncio.gather(
            *(
                store.fire(schedule, [h.job(f"{tick} by {n}")], next_ms=h.now + tick)
                for n, store in enumerate((h.store, twin) * 4)
            )
        )
        assert fired.count(True) == 1
    assert await h.counts() == {"waiting": 5}


async def test_a_rerun_is_done_by_one_of_the_handles(h: Harness) -> None:
    twin = await h.new_handle()
    await h.ended(State.DEAD)
    answers = await asyncio.gather(
        h.store.rerun(["job"], now_ms=h.now), twin.rerun(["job"], now_ms=h.now)
    )
    assert sorted(answers) == [[False], [True]]
    assert await h.counts() == {"waiting": 1}


async def test_a_rerun_and_a_delete_agree_on_who_was_first(h: Harness) -> None:
    twin = await h.new_handle()
    for n in range(10):
        await h.ended(State.DONE, f"{n}")
        [rerun], [deleted] = await asyncio.gather(
            h.store.rerun([f"{n}"], now_ms=h.now), twin.delete([f"{n}"])
        )
        assert rerun is not deleted
        assert (await h.store.get([f"{n}"]) == [None]) is deleted
        await h.store.cancel([f"{n}"], now_ms=h.now)


async def test_each_job_is_pruned_by_one_of_the_handles(h: Harness) -> None:
    twin = await h.new_handle()
    jobs = h.jobs(40, delay_ms=3_600_000)
    await h.add(*jobs)
    await h.store.cancel([job.id for job in jobs], now_ms=h.now)
    await h.pass_time(h.step_ms)
    pruned = await asyncio.gather(
        *(
            store.prune([State.CANCELLED], before_ms=h.now, limit=15)
            for store in (h.store, twin) * 3
        )
    )
    assert sum(pruned) == 40
    assert await h.queues() == []


async def test_threads_that_add_the_same_jobs_add_each_once(h: Harness) -> None:
    jobs = h.jobs(40)

    async def add(store: Store, n: int) -> list[bool]:
        return [added for job in jobs for added in await store.add([job])]

    answers = await in_threads(h, 4, add)
    assert [sum(added) for added in zip(*answers, strict=True)] == [1] * 40
    assert await h.counts() == {"waiting": 40}


async def test_threads_that_work_off_a_queue_run_each_job_once(h: Harness) -> None:
    await h.add(*h.jobs(200))
    now = h.now

    async def work(store: Store, n: int) -> list[Job]:
        worked: list[Job] = []
        while held := await store.claim(
            ["default"], worker=f"{n}", limit=7, now_ms=now, lease_ms=h.lease_ms
        ):
            answers = await store.settle([h.done(job) for job in held], now_ms=now)
            assert all(answers)
            worked += held
        return worked

    worked = [job for jobs in await in_threads(h, 4, work) for job in jobs]
    assert len({job.id for job in worked}) == len(worked) == 200
    assert {job.attempt for job in worked} == {1}
    assert await h.counts() == {"done": 200}
