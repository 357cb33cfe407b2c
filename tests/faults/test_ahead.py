"""A long `ahead`: claims come together, and what is due at once still ends a wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from stores import KNOWN, Harness
from tickwheel.store import Store

AHEAD_MS = 20_000
# How long a test gives a notification; if one was sent before anybody listened, the next counts. In
# all less than the slack, which ends a wait as well.
PATIENCE_S, TRIES = 2.0, 5
LOOKED_S = 0.5

each_store = pytest.mark.parametrize("name", ["sqlite", "redis", "postgres"])


class Ahead:
    """Two handles on a store that hands out jobs long before they are due."""

    def __init__(self, h: Harness, other: Store) -> None:
        self.h, self.other = h, other

    @classmethod
    async def open(cls, name: str, folder: Path) -> Ahead:
        h = KNOWN[name](folder)
        await h.open()
        other = await h.new_handle()
        h.store.ahead_ms = other.ahead_ms = AHEAD_MS
        return cls(h, other)

    def wait(self, ms: int) -> asyncio.Task[None]:
        now = self.h.now
        return asyncio.create_task(self.other.wait(["default"], now_ms=now, until_ms=now + ms))


async def ended(task: asyncio.Task[None], seconds: float) -> bool:
    done, _ = await asyncio.wait([task], timeout=seconds)
    return bool(done)


@each_store
async def test_a_wait_lets_jobs_come_together_until_the_first_is_nearly_due(
    name: str, tmp_path: Path
) -> None:
    ahead = await Ahead.open(name, tmp_path)
    h = ahead.h
    await h.add(h.job("first", delay_ms=2_500), h.job("second", delay_ms=9_000))
    start = asyncio.get_running_loop().time()
    await asyncio.wait_for(ahead.wait(60_000), 30)
    assert asyncio.get_running_loop().time() - start > 0.9, "it did not wait for others"
    assert await h.claim_ids() == ["first", "second"]
    await h.close()


@each_store
async def test_a_job_that_is_due_at_once_ends_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only a notification can end the wait.
    monkeypatch.setattr("tickwheel.stores.redis.notify.POLL_S", 3600.0)
    for each in ("FIRST_S", "HEARING_S", "DEAF_S"):
        monkeypatch.setattr(f"tickwheel.stores.postgres.notify.{each}", 3600.0)
    ahead = await Ahead.open(name, tmp_path)
    h = ahead.h
    for round_ in range(2):
        # It can be claimed already, but there is time.
        await h.add(h.job(f"later-{round_}", delay_ms=AHEAD_MS - 1))
        waiting = ahead.wait(3_600_000)
        # It has looked by then.
        assert not await ended(waiting, LOOKED_S), "it ended although nothing was due"
        for n in range(TRIES):
            await h.add(h.job(f"now-{round_}-{n}"))
            if await ended(waiting, PATIENCE_S):
                break
            # While a job is overdue, a store need not tell of others.
            assert f"now-{round_}-{n}" in await h.claim_ids(100)
        assert waiting.done(), "nothing woke it"
        await h.claim_ids(100)
    await h.close()
