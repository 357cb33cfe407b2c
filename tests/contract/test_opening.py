"""open, close, twin and time; and whether what `durability` says is so."""

from __future__ import annotations

import asyncio
import contextlib

from stores import Harness
from tickwheel.errors import StoreUnavailable
from tickwheel.job import State
from tickwheel.schedule import Schedule
from tickwheel.store import Level, QueueInfo


async def test_a_store_can_be_closed_twice(h: Harness) -> None:
    twin = await h.new_handle()
    await twin.close()
    await twin.close()


async def test_a_store_can_be_closed_before_it_is_opened(h: Harness) -> None:
    twin = h.store.new_handle()
    await twin.close()
    await twin.open()
    assert await h.queues(twin) == []
    await twin.close()


async def test_closing_one_handle_leaves_the_other_open(h: Harness) -> None:
    twin = await h.new_handle()
    await h.add(h.job())
    await twin.close()
    assert await h.claim_ids() == ["job"]


async def test_a_handle_can_be_opened_again_after_it_was_closed(h: Harness) -> None:
    twin = await h.new_handle()
    await twin.close()
    await twin.open()
    await h.add(h.job())
    assert [job and job.id for job in await twin.get(["job"])] == ["job"]


async def test_a_closed_handle_says_that_the_store_is_unavailable_or_works(h: Harness) -> None:
    twin = await h.new_handle()
    await twin.close()
    for step in (
        lambda: twin.add([h.job()]),
        lambda: twin.get(["job"]),
        lambda: h.queues(twin),
        lambda: twin.wait(["default"], now_ms=h.now, until_ms=h.now),
    ):
        with contextlib.suppress(StoreUnavailable):
            await step()


async def test_opening_keeps_what_is_there(h: Harness) -> None:
    await h.add(h.job())
    await h.new_handle()
    assert await h.counts() == {"waiting": 1}


async def test_a_twin_sees_and_works_on_the_same_jobs(h: Harness) -> None:
    twin = await h.new_handle()
    assert twin.ahead_ms == h.store.ahead_ms
    await h.add(h.job())
    [held] = await h.claim(store=twin)
    assert await h.get() == (await twin.get(["job"]))[0]
    assert await h.settle(h.done(held))
    assert (await h.queues(twin)) == [QueueInfo(name="default", done=1)]


async def test_a_twin_sees_the_same_schedules_and_pauses(h: Harness) -> None:
    twin = await h.new_handle()
    stored = await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=h.now))
    assert await twin.schedules() == [stored]
    assert await twin.fire(stored, [h.job()], next_ms=None)
    await twin.pause("default", True)
    assert await h.claim() == []


async def test_a_twin_serves_another_event_loop(h: Harness) -> None:
    await h.add(h.job())
    now = h.now

    async def there() -> list[str]:
        store = h.store.new_handle()
        await store.open()
        held = await store.claim(
            ["default"], worker="there", limit=1, now_ms=now, lease_ms=h.lease_ms
        )
        await store.settle([h.done(job) for job in held], now_ms=now)
        await store.close()
        return [job.id for job in held]

    assert await asyncio.to_thread(asyncio.run, there()) == ["job"]
    assert (await h.get()).state is State.DONE


async def test_many_handles_can_open_at_once(h: Harness) -> None:
    twins = [h.store.new_handle() for _ in range(5)]
    await asyncio.gather(*(twin.open() for twin in twins))
    await h.add(h.job())
    assert [await h.queues(twin) for twin in twins] == [[QueueInfo(name="default", waiting=1)]] * 5
    await asyncio.gather(*(twin.close() for twin in twins))


async def test_the_time_is_in_milliseconds_since_the_epoch(h: Harness) -> None:
    assert abs(await h.store.time_ns() // 1_000_000 - h.now) < 1000
    twin = await h.new_handle()
    assert abs(await twin.time_ns() // 1_000_000 - h.now) < 1000


async def test_what_is_said_to_survive_a_crash_is_there_when_the_store_is_reopened(
    h: Harness,
) -> None:
    if not (await h.store.durability()).process_crash:
        return
    await h.ended(State.DONE, "done")
    [held] = await h.claimed(h.job("running", payload='"注文"'))
    await h.add(h.job("waiting", delay_ms=3_600_000))
    await h.store.cancel(["running"], now_ms=h.now)
    await h.store.pause("held up", True)
    stored = await h.store.put_schedule(Schedule(name="s", rule="{}", next_ms=h.now))
    ids = ["done", "running", "waiting"]
    before = await h.store.get(ids)
    await h.reopen()
    assert await h.store.get(ids) == before
    assert await h.store.schedules() == [stored]
    assert await h.queues() == [
        QueueInfo(name="default", waiting=1, running=1, done=1),
        QueueInfo(name="held up", paused=True),
    ]
    assert await h.settle(h.done(held))


async def test_a_healthy_store_has_nothing_bad_to_tell(h: Harness) -> None:
    await h.add(h.job())
    bad = [finding for finding in await h.store.findings() if finding.level is Level.BAD]
    assert bad == []
