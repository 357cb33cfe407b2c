"""Stores without a server of their own: their clock is the machine's, and somebody may set it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tickwheel.clock import S_NS, SystemClock
from tickwheel.job import Job
from tickwheel.store import Store, open_store


class SettableClock(SystemClock):
    set_by_s = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + int(self.set_by_s * S_NS)

    def now_ms(self) -> int:
        return self.now_ns() // 1_000_000


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture(params=["memory://", "sqlite:///{}/jobs.db"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found: str = request.param.format(tmp_path)
    return found


@asynccontextmanager
async def opened(url: str, clock: SettableClock) -> AsyncIterator[Store]:
    store = open_store(url, clock=clock)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def claim(store: Store, clock: SettableClock, worker: str) -> list[Job]:
    return await store.claim(
        ["default"], worker=worker, limit=10, now_ms=clock.now_ms(), lease_ms=10_000
    )


def job(clock: SettableClock) -> Job:
    now_ms = clock.now_ms()
    return Job(id="job", task="task", payload="{}", due_ms=now_ms, created_ms=now_ms)


@pytest.mark.parametrize("step_s", [-3_600, 3_600])
async def test_leases_move_along_when_the_clock_is_set(
    url: str, clock: SettableClock, step_s: int
) -> None:
    async with opened(url, clock) as store:
        assert store.own_clock
        await store.add([job(clock)])
        [held] = await claim(store, clock, "ann")
        assert held.lease_until_ms is not None
        clock.set_by_s = step_s
        assert await claim(store, clock, "bob") == []
        # As long as before, and no longer: the holder can extend it, and it ends.
        [extended] = await store.extend([held], now_ms=clock.now_ms(), lease_ms=10_000)
        assert extended is not None and extended.lease_until_ms is not None
        assert abs(extended.lease_until_ms - clock.now_ms() - 10_000) < 1_000
        clock.set_by_s -= step_s
        assert await claim(store, clock, "bob") == []
        [seen] = await store.get(["job"])
        assert seen is not None and seen.lease_until_ms is not None
        assert abs(seen.lease_until_ms - clock.now_ms() - 10_000) < 1_000
        [taken] = await store.claim(
            ["default"], worker="bob", limit=1, now_ms=seen.lease_until_ms, lease_ms=10_000
        )
        assert taken.takeovers == 1


async def test_a_clock_that_is_corrected_bit_by_bit_was_not_set(
    url: str, clock: SettableClock
) -> None:
    async with opened(url, clock) as store:
        await store.add([job(clock)])
        [held] = await claim(store, clock, "ann")
        clock.set_by_s = 0.02
        assert await claim(store, clock, "bob") == []
        [seen] = await store.get(["job"])
        assert seen is not None and seen.lease_until_ms == held.lease_until_ms
