"""throttle: one bucket for all nodes."""

from __future__ import annotations

import asyncio

from stores import ODD_NAMES, Harness
from tickwheel.limit import Rate
from tickwheel.store import Store

# So slow that no token comes back while a test runs.
HOURLY = Rate(limit=1, period_ms=3_600_000)


async def take(h: Harness, rate: Rate, key: str = "key", *, store: Store | None = None) -> int:
    return await (store or h.store).throttle(key, rate, now_ms=h.now)


async def test_the_first_token_is_there(h: Harness) -> None:
    assert await take(h, HOURLY) == 0


async def test_the_second_has_to_wait(h: Harness) -> None:
    await take(h, HOURLY)
    wait_ms = await take(h, HOURLY)
    assert 0 < wait_ms <= HOURLY.period_ms
    assert h.near(wait_ms, HOURLY.period_ms)


async def test_after_the_wait_the_token_is_there(h: Harness) -> None:
    rate = Rate(limit=1, period_ms=400)
    await take(h, rate)
    await h.pass_time(await take(h, rate))
    assert await take(h, rate) == 0
    assert await take(h, rate) > 0


async def test_before_the_wait_is_over_it_is_not(h: Harness) -> None:
    await take(h, HOURLY)
    first = await take(h, HOURLY)
    await h.pass_time(h.step_ms)
    second = await take(h, HOURLY)
    assert 0 < second < first


async def test_asking_while_there_is_a_wait_takes_nothing(h: Harness) -> None:
    rate = Rate(limit=1, period_ms=400)
    await take(h, rate)
    for _ in range(20):
        assert 0 < await take(h, rate) <= 400
    await h.pass_time(400)
    assert await take(h, rate) == 0


async def test_a_burst_is_let_through_at_once(h: Harness) -> None:
    rate = Rate(limit=1, period_ms=3_600_000, burst=5)
    assert [await take(h, rate) for _ in range(5)] == [0] * 5
    assert await take(h, rate) > 0


async def test_a_bucket_never_holds_more_than_its_burst(h: Harness) -> None:
    rate = Rate(limit=1, period_ms=100, burst=2)
    await take(h, rate)
    await h.pass_time(1000)
    rare = Rate(limit=1, period_ms=3_600_000, burst=2)
    assert [await take(h, rare) for _ in range(2)] == [0, 0]
    assert await take(h, rare) > 0


async def test_on_average_no_more_than_the_limit_gets_through(h: Harness) -> None:
    rate = Rate(limit=4, period_ms=400, burst=2)
    taken, start_ms = 0, h.now
    while taken < 10:
        wait_ms = await take(h, rate)
        if wait_ms:
            await h.pass_time(wait_ms)
        else:
            taken += 1
    # Two at once, and eight more at one per 100 ms.
    assert h.now - start_ms >= 800 - h.slack_ms


async def test_each_key_has_a_bucket_of_its_own(h: Harness) -> None:
    assert [await take(h, HOURLY, key) for key in ODD_NAMES] == [0] * len(ODD_NAMES)
    assert all([await take(h, HOURLY, key) for key in ODD_NAMES])


async def test_a_bucket_is_shared_by_all_handles(h: Harness) -> None:
    twin = await h.new_handle()
    assert await take(h, HOURLY) == 0
    assert await take(h, HOURLY, store=twin) > 0


async def test_handles_that_race_for_a_bucket_get_no_more_than_it_holds(h: Harness) -> None:
    twin = await h.new_handle()
    rate = Rate(limit=1, period_ms=3_600_000, burst=5)
    waits = await asyncio.gather(
        *(take(h, rate, store=store) for store in (h.store, twin) for _ in range(10))
    )
    assert waits.count(0) == 5
