"""watch_ended: a hint that jobs have ended, soon after they did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager

import pytest
from waits import MINUTE, SOON_S

from stores import ODD_NAMES, Harness
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job, Outcome
from tickwheel.store import Store


class Watched:
    """What a watch of these jobs has told."""

    def __init__(self, *ids: str) -> None:
        self.ids = dict.fromkeys(ids)
        self.told: list[str] = []
        self._news = asyncio.Event()

    def tell(self, ids: Collection[str]) -> None:
        self.told += ids
        self._news.set()

    async def until(self, ids: Iterable[str]) -> None:
        """Until all of these were told."""
        async with asyncio.timeout(SOON_S):
            while not set(ids).issubset(self.told):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watching(
    h: Harness, *ids: str, store: Store | None = None, ms: int = MINUTE
) -> AsyncIterator[Watched]:
    """A watch that has told what there was to tell at its beginning."""
    watched = Watched(*ids)
    watch = asyncio.create_task(
        (store or h.store).watch_ended(
            watched.ids.keys(), watched.tell, now_ms=h.now, until_ms=h.now + ms
        )
    )
    # Hints at the beginning may name any of them, and come a few times.
    await asyncio.sleep(0.3)
    watched.told.clear()
    try:
        yield watched
        assert not watch.done()
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.DEAD])
async def test_a_watch_tells_of_a_job_that_was_settled(h: Harness, outcome: Outcome) -> None:
    twin = await h.new_handle()
    [job] = await h.claimed(h.job())
    async with watching(h, "job") as here, watching(h, "job", store=twin) as there:
        assert await h.settle(h.settlement(outcome, job))
        await here.until(["job"])
        await there.until(["job"])


async def test_a_watch_tells_of_a_job_that_was_cancelled(h: Harness) -> None:
    twin = await h.new_handle()
    await h.add(h.job())
    async with watching(h, "job", store=twin) as there:
        await h.store.cancel(["job"], now_ms=h.now)
        await there.until(["job"])


async def test_a_watch_tells_of_a_job_that_ends_because_it_was_asked_to_stop(h: Harness) -> None:
    twin = await h.new_handle()
    [job] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    async with watching(h, "job", store=twin) as there:
        assert await h.settle(h.settlement(Outcome.RELEASE, job))
        await there.until(["job"])


async def test_a_watch_begins_with_what_had_ended_before(h: Harness) -> None:
    await h.add(h.job("a"), h.job("b"))
    await h.store.cancel(["a", "b"], now_ms=h.now)
    watched = Watched("a", "b", "unknown")
    watch = asyncio.create_task(
        h.store.watch_ended(watched.ids.keys(), watched.tell, now_ms=h.now, until_ms=h.now + MINUTE)
    )
    await watched.until(["a", "b", "unknown"])
    watch.cancel()


async def test_a_watch_does_not_tell_of_other_jobs(h: Harness) -> None:
    await h.add(h.job("a"), h.job("b"))
    async with watching(h, "b") as watched:
        await h.store.cancel(["a", "b"], now_ms=h.now)
        await watched.until(["b"])
        assert set(watched.told) == {"b"}


async def test_jobs_may_join_and_leave_a_watch(h: Harness) -> None:
    twin = await h.new_handle()
    await h.add(*(h.job(id) for id in "abc"))
    async with watching(h, "a", store=twin) as watched:
        watched.ids["b"] = None
        del watched.ids["a"]
        watched.told.clear()
        await h.store.cancel(["a"], now_ms=h.now)
        await h.store.cancel(["b"], now_ms=h.now)
        await watched.until(["b"])
        assert set(watched.told) == {"b"}


async def test_a_watch_tells_of_many_jobs_that_end_together(h: Harness) -> None:
    twin = await h.new_handle()
    jobs = await h.claimed(*h.jobs(900))
    async with watching(h, *(job.id for job in jobs), store=twin) as watched:
        answers = await h.store.settle([h.done(job) for job in jobs], now_ms=h.now)
        assert all(answers)
        await watched.until(watched.ids)


async def test_a_watch_tells_of_jobs_with_long_and_odd_ids(h: Harness) -> None:
    twin = await h.new_handle()
    names = [*ODD_NAMES, *(f"{n:0200}" for n in range(400))]
    await h.add(*map(h.job, names))
    async with watching(h, *names, store=twin) as watched:
        await h.store.cancel(names, now_ms=h.now)
        await watched.until(names)


async def test_watches_of_one_handle_are_independent(h: Harness) -> None:
    a, b = await h.claimed(h.job("a"), h.job("b"))
    async with watching(h, "a") as first:
        async with watching(h, "b") as second:
            assert await h.settle(h.done(b))
            await second.until(["b"])
        assert "b" not in first.told
        assert await h.settle(h.done(a))
        await first.until(["a"])


async def test_a_watch_ends_in_time(h: Harness) -> None:
    await h.add(h.job())
    for ms in (100, 0, -1000):
        async with asyncio.timeout(SOON_S):
            await h.store.watch_ended(["job"], lambda ids: None, now_ms=h.now, until_ms=h.now + ms)


async def test_a_watch_of_a_closed_store_is_refused(h: Harness) -> None:
    twin = await h.new_handle()
    if twin is h.store:
        return  # it can't be closed
    await twin.close()
    with pytest.raises(StoreUnavailable):
        await twin.watch_ended(["job"], lambda ids: None, now_ms=h.now, until_ms=h.now + MINUTE)


async def test_a_watch_tells_again_of_a_job_that_ends_again(h: Harness) -> None:
    twin = await h.new_handle()
    await h.add(h.job())
    async with watching(h, "job", store=twin) as watched:
        await h.store.cancel(["job"], now_ms=h.now)
        await watched.until(["job"])
        assert await h.store.rerun(["job"], now_ms=h.now) == [True]
        job: Job = await h.claim_one()
        watched.told.clear()
        assert await h.settle(h.done(job))
        await watched.until(["job"])
