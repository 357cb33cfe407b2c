"""wait and asked: hints, but hints that come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import pytest
from waits import MINUTE, SOON_S, begun, spins

from stores import Harness
from tickwheel.job import State
from tickwheel.schedule import Schedule
from tickwheel.store import Store

# For what has to happen while a test really waits.
BRIEF_MS = 100


async def wait(
    h: Harness,
    queues: Sequence[str] = ("default",),
    *,
    ms: int = MINUTE,
    store: Store | None = None,
) -> None:
    await (store or h.store).wait(queues, now_ms=h.now, until_ms=h.now + ms)


async def asked(
    h: Harness, worker: str = "ann", *, ms: int = MINUTE, store: Store | None = None
) -> list[str]:
    """The answer, asked for again where the hint came early and empty."""
    while True:
        ids = await (store or h.store).asked(worker, now_ms=h.now, until_ms=h.now + ms)
        if ids or ms < MINUTE:
            return sorted(ids)


async def ends_by(h: Harness, step: Awaitable[object], *, store: Store | None = None) -> None:
    """A wait of a minute ends soon after this step."""
    async with asyncio.timeout(SOON_S):
        waiting: asyncio.Task[object] = asyncio.create_task(wait(h, store=store))
        await begun(waiting)
        await step
        await waiting


# --- Wait


async def test_a_wait_ends_at_once_where_there_is_work(h: Harness) -> None:
    await h.add(h.job())
    async with asyncio.timeout(SOON_S):
        await wait(h)


async def test_a_wait_ends_in_time_where_there_is_none(h: Harness) -> None:
    async with asyncio.timeout(SOON_S):
        await wait(h, ms=BRIEF_MS)
        await wait(h, ms=0)
        await wait(h, ms=-1000)


async def test_a_wait_for_no_queues_ends_in_time(h: Harness) -> None:
    await h.add(h.job())
    async with asyncio.timeout(SOON_S):
        await wait(h, [], ms=BRIEF_MS)


async def test_an_added_job_ends_a_wait(h: Harness) -> None:
    await ends_by(h, h.add(h.job()))
    assert await h.claim_ids() == ["job"]


async def test_a_job_added_by_another_handle_ends_a_wait(h: Harness) -> None:
    twin = await h.new_handle()
    await ends_by(h, twin.add([h.job()]))
    assert await h.claim_ids() == ["job"]


async def test_a_job_added_in_another_thread_ends_a_wait(h: Harness) -> None:
    async def add_from_there() -> None:
        twin = h.store.new_handle()
        await twin.open()
        await twin.add([h.job()])
        await twin.close()

    await ends_by(h, asyncio.to_thread(asyncio.run, add_from_there()))
    assert await h.claim_ids() == ["job"]


async def test_a_fired_job_ends_a_wait(h: Harness) -> None:
    stored = await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=h.now))
    await ends_by(h, h.store.fire(stored, [h.job()], next_ms=None))


async def test_a_job_that_falls_due_ends_a_wait(h: Harness) -> None:
    delay_ms = BRIEF_MS + h.step_ms
    await h.add(h.job(delay_ms=h.store.ahead_ms + delay_ms))
    async with asyncio.timeout(SOON_S):
        await wait(h)
    await h.pass_time(delay_ms)
    assert await h.claim_ids() == ["job"]


async def test_a_job_added_for_a_little_later_ends_a_wait(h: Harness) -> None:
    await ends_by(h, h.add(h.job(delay_ms=h.store.ahead_ms + BRIEF_MS)))


async def test_an_earlier_job_ends_a_wait_for_a_later_one(h: Harness) -> None:
    await h.add(h.job("later", delay_ms=h.store.ahead_ms + MINUTE))
    await ends_by(h, h.add(h.job("earlier")))
    assert await h.claim_ids() == ["earlier"]


async def test_a_lease_that_runs_out_ends_a_wait(h: Harness) -> None:
    await h.add(h.job())
    await h.claim(lease_ms=BRIEF_MS + h.step_ms)
    async with asyncio.timeout(SOON_S):
        await wait(h)
    await h.pass_time(BRIEF_MS + 2 * h.step_ms)
    assert await h.claim_ids(worker="bob") == ["job"]


async def test_a_job_that_is_released_ends_a_wait(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await ends_by(h, h.settle(h.retry(held)))
    assert await h.claim_ids() == ["job"]


async def test_a_job_that_is_released_by_another_handle_ends_a_wait(h: Harness) -> None:
    twin = await h.new_handle()
    [held] = await h.claimed(h.job())
    await ends_by(h, h.settle(h.retry(held), store=twin))


async def test_a_job_that_is_rerun_ends_a_wait(h: Harness) -> None:
    await h.ended(State.DEAD)
    await ends_by(h, h.store.rerun(["job"], now_ms=h.now))


async def test_a_queue_that_goes_on_ends_a_wait(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    await ends_by(h, h.store.pause("default", False))
    assert await h.claim_ids() == ["job"]


async def test_every_waiter_is_told(h: Harness) -> None:
    twin = await h.new_handle()
    async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
        for store in (h.store, h.store, twin, twin):
            group.create_task(wait(h, store=store))
        await asyncio.sleep(0)
        await h.add(h.job())


async def test_a_wait_can_be_given_up(h: Harness) -> None:
    waiting: asyncio.Task[object] = asyncio.create_task(wait(h))
    await begun(waiting)
    waiting.cancel()
    async with asyncio.timeout(SOON_S):
        await asyncio.wait([waiting])
    assert waiting.cancelled()
    await h.add(h.job())
    assert await h.claim_ids() == ["job"]


@pytest.mark.parametrize("what", ["nothing", "later", "running", "paused", "elsewhere", "ended"])
async def test_a_wait_does_not_spin_on_what_cannot_be_claimed(h: Harness, what: str) -> None:
    """A hint may come early now and then, but a loop around it must not run hot."""
    if what == "later":
        await h.add(h.job(delay_ms=h.store.ahead_ms + MINUTE))
    if what == "running":
        await h.claimed(h.job())
    if what in ("paused", "elsewhere"):
        await h.add(h.job(queue=what))
        await h.store.pause("paused", True)
    if what == "ended":
        await h.ended(State.DONE)
    hints = [await spins(wait(h, ["default", "paused"], ms=50)) for _ in range(4)]
    assert not all(hints)


# --- Asked


async def test_a_job_that_was_asked_to_stop_is_told_at_once(h: Harness) -> None:
    await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    async with asyncio.timeout(SOON_S):
        assert await asked(h) == ["job"]


async def test_a_cancel_is_told_to_a_holder_that_waits_for_it(h: Harness) -> None:
    await h.claimed(h.job())
    async with asyncio.timeout(SOON_S):
        waiting = asyncio.create_task(asked(h))
        await asyncio.sleep(0)
        await h.store.cancel(["job"], now_ms=h.now)
        assert await waiting == ["job"]


async def test_a_cancel_by_another_handle_is_told(h: Harness) -> None:
    twin = await h.new_handle()
    await h.claimed(h.job())
    async with asyncio.timeout(SOON_S):
        waiting = asyncio.create_task(asked(h))
        await asyncio.sleep(0)
        await twin.cancel(["job"], now_ms=h.now)
        assert await waiting == ["job"]


async def test_a_cancel_in_another_thread_is_told(h: Harness) -> None:
    async def cancel_from_there() -> None:
        twin = h.store.new_handle()
        await twin.open()
        await twin.cancel(["job"], now_ms=h.now)
        await twin.close()

    await h.claimed(h.job())
    async with asyncio.timeout(SOON_S):
        waiting = asyncio.create_task(asked(h))
        await asyncio.to_thread(asyncio.run, cancel_from_there())
        assert await waiting == ["job"]


async def test_only_the_jobs_of_this_worker_are_told(h: Harness) -> None:
    await h.claimed(h.job("of ann"), h.job("also of ann"), h.job("left alone"), worker="ann")
    await h.claimed(h.job("of bob"), worker="bob")
    await h.store.cancel(["of ann", "of bob", "also of ann"], now_ms=h.now)
    async with asyncio.timeout(SOON_S):
        assert await asked(h, "ann") == ["also of ann", "of ann"]
        assert await asked(h, "bob") == ["of bob"]


async def test_nothing_is_told_where_nothing_was_asked(h: Harness) -> None:
    await h.claimed(h.job("running"))
    await h.add(h.job("waiting", delay_ms=MINUTE))
    await h.store.cancel(["waiting"], now_ms=h.now)
    async with asyncio.timeout(SOON_S):
        assert await asked(h, ms=BRIEF_MS) == []
        assert await asked(h, ms=0) == []
        assert await asked(h, ms=-1000) == []


async def test_a_job_that_was_settled_is_told_no_more(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    await h.settle(h.retry(held))
    async with asyncio.timeout(SOON_S):
        assert await asked(h, ms=BRIEF_MS) == []


async def test_a_job_is_told_until_it_is_settled(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    async with asyncio.timeout(SOON_S):
        assert await asked(h) == ["job"]
        assert await h.extend(held) is not None
        assert await asked(h) == ["job"]


async def test_a_job_that_was_taken_over_is_told_to_its_new_holder(h: Harness) -> None:
    await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    await h.claim_one(worker="bob")
    await h.store.cancel(["job"], now_ms=h.now)
    async with asyncio.timeout(SOON_S):
        assert await asked(h, "bob") == ["job"]
        assert await asked(h, "ann", ms=BRIEF_MS) == []


async def test_asking_does_not_spin_where_nothing_was_asked(h: Harness) -> None:
    await h.claimed(h.job())
    hints = [await spins(asked(h, ms=50)) for _ in range(4)]
    assert not all(hints)
