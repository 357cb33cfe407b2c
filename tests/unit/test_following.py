"""What follows from the end of a job, and from none that comes too late."""

from __future__ import annotations

import pytest

from tickwheel.engine.following import followed
from tickwheel.job import Job, Settlement, dead, done
from tickwheel.stores.memory import MemoryStore

LEASE_MS = 1_000
NOW_MS = 1_800_000_000_000


def follow(settlement: Settlement) -> Job:
    return job(f"{settlement.job.id}:{settlement.outcome.value}", "told")


def job(id: str, task: str = "call") -> Job:
    return Job(id=id, task=task, payload="{}", due_ms=NOW_MS, created_ms=NOW_MS)


async def claimed(store: MemoryStore, at_ms: int = NOW_MS) -> Job:
    [found] = await store.claim(["default"], worker="w", limit=1, now_ms=at_ms, lease_ms=LEASE_MS)
    return found


def end(of: Job, at_ms: int, how: str) -> Settlement:
    if how == "done":
        return done(of, started_ms=at_ms, ended_ms=at_ms, result="1")
    return dead(of, started_ms=at_ms, ended_ms=at_ms, error="no answer")


async def opened() -> MemoryStore:
    store = MemoryStore()
    await store.open()
    await store.add([job("a")])
    return store


@pytest.mark.parametrize("how", ["done", "dead"])
async def test_a_job_follows_from_an_end_once(how: str) -> None:
    store = await opened()
    its = followed(store, {"call": follow})
    held = await claimed(store)
    ended = end(held, NOW_MS + 1, how)
    for _ in range(2):  # an answer may be lost, and the end is written again
        assert await its.settle([ended], now_ms=NOW_MS + 1) == [True]
    [told] = await store.get([f"a:{how}"])
    assert told is not None


@pytest.mark.parametrize("since", ["lease over", "taken over", "ended"])
async def test_nothing_follows_from_an_end_that_comes_too_late(since: str) -> None:
    store = await opened()
    its = followed(store, {"call": follow})
    frozen = await claimed(store)
    late_ms = NOW_MS + LEASE_MS + 1
    if since != "lease over":
        other = await claimed(store, late_ms)
        assert other.attempt == frozen.attempt + 1
        if since == "ended":
            assert await its.settle([end(other, late_ms, "done")], now_ms=late_ms) == [True]
    before = {found.id for found in await every(store)}
    assert await its.settle([end(frozen, late_ms, "dead")], now_ms=late_ms) == [False]
    assert {found.id for found in await every(store)} == before


async def every(store: MemoryStore) -> list[Job]:
    found = await store.get(["a", "a:done", "a:dead"])
    return [each for each in found if each is not None]


async def test_a_read_that_is_older_than_the_claim_does_not_lose_what_follows() -> None:
    store = await opened()
    old = await store.get(["a"])
    held = await claimed(store)

    async def get(ids: object) -> list[Job | None]:
        return old

    read, store.get = store.get, get  # type: ignore[method-assign]
    its = followed(store, {"call": follow})
    assert await its.settle([end(held, NOW_MS + 1, "dead")], now_ms=NOW_MS + 1) == [True]
    assert (await read(["a:dead"])) != [None]
