"""Callers that wait for the end of jobs: one watch for all, and nothing is missed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from tickwheel import ends
from tickwheel.client import LAST_LOOK_S, Client
from tickwheel.clock import LoopClock
from tickwheel.errors import (
    JobCancelled,
    JobUnknown,
    ResultTimeout,
    StoreError,
    StoreUnavailable,
)
from tickwheel.job import Job, done
from tickwheel.store import Store
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import FaultyStore, run_virtual


class Line(FaultyStore):
    """Counts calls, and may keep notifications to itself or refuse to watch."""

    deaf = hanging = False
    refusal: Exception | None = None

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()
        self.read: list[int] = []

    def __getattr__(self, name: str) -> Any:
        step = super().__getattr__(name)

        async def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if self.hanging:
                await asyncio.Event().wait()
            if name == "get":
                self.read.append(len(args[0]))
            return await step(*args, **kwargs)

        return counted

    async def watch_ended(self, ids: Any, tell: Any, *, now_ms: int, until_ms: int) -> None:
        self.calls["watch_ended"] += 1
        if self.away:
            raise StoreUnavailable("the request was lost")
        if self.refusal is not None:
            raise self.refusal
        if self.deaf:
            tell(list(ids))
            await asyncio.sleep((until_ms - now_ms) / 1000)
        else:
            await self._store.watch_ended(ids, tell, now_ms=now_ms, until_ms=until_ms)


class Desk:
    """A client, its line to the store, and the store itself for everybody else."""

    def __init__(self) -> None:
        clock = LoopClock()
        self.store = MemoryStore(clock=clock)
        self.line = Line(self.store)
        self.client = Client(cast(Store, self.line), clock)

    async def add(self, *ids: str, payload: str = "{}") -> None:
        now_ms = self.client.clock.now_ms()
        jobs = [
            Job(
                id=id,
                task="task",
                payload=payload,
                queue="default",
                priority=1,
                due_ms=now_ms,
                created_ms=now_ms,
            )
            for id in ids
        ]
        await self.store.add(jobs)

    async def end(self, *ids: str) -> None:
        """End jobs, wherever they are, without a pause in between."""
        now_ms = self.client.clock.now_ms()
        # If they are large, a claim takes only some.
        while held := await self.store.claim(
            ["default"], worker="w", limit=1000, now_ms=now_ms, lease_ms=3_600_000
        ):
            mine = [done(job, started_ms=now_ms, ended_ms=now_ms, result="1") for job in held]
            await self.store.settle([each for each in mine if each.job.id in ids], now_ms=now_ms)

    async def waiting(self, *ids: str, **options: Any) -> list[asyncio.Task[Job]]:
        """Callers that have begun to wait."""
        options.setdefault("timeout_s", None)
        waiting = [asyncio.create_task(self.client.ended(id, **options)) for id in ids]
        await asyncio.sleep(1)
        assert not any(each.done() for each in waiting)
        return waiting

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left of callers that waited."""
        mine = self.client._ends
        return not mine._waiting and not mine._looked_at and mine._watching is None


def at_a_desk(story: Callable[[Desk], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        desk = Desk()
        await story(desk)
        await asyncio.sleep(0)
        assert desk.at_rest

    def test() -> None:
        run_virtual(main())

    test.__doc__ = story.__doc__
    return test


def now() -> float:
    return asyncio.get_running_loop().time()


@at_a_desk
async def test_all_callers_share_one_watch_and_their_reads(desk: Desk) -> None:
    ids = [f"{n:04}" for n in range(1000)]
    await desk.add(*ids)
    waiting = await desk.waiting(*ids)
    assert desk.line.calls["watch_ended"] == 1
    start = now()
    await desk.end(*ids)
    assert {job.id for job in await asyncio.gather(*waiting)} == set(ids)
    assert now() == start
    assert desk.line.calls["watch_ended"] == 1
    # A look at first, when a caller joins, when the watch begins, and at the end: at many at once.
    assert sum(desk.line.read) <= 4000
    assert desk.line.calls["get"] < 50


@at_a_desk
async def test_a_long_wait_costs_a_look_now_and_then(desk: Desk) -> None:
    ids = [f"{n:04}" for n in range(1000)]
    await desk.add(*ids)
    waiting = await desk.waiting(*ids)
    before = desk.line.calls.total()
    await asyncio.sleep(60)
    assert desk.line.calls.total() - before <= (60 / ends.WATCH_S + 1) * (1000 / ends.LOOK + 1)
    for each in waiting:
        each.cancel()


@at_a_desk
async def test_a_job_that_has_ended_needs_no_watch(desk: Desk) -> None:
    await desk.add("job")
    await desk.end("job")
    assert (await desk.client.ended("job", None)).result == "1"
    assert desk.line.calls == {"get": 1}


@at_a_desk
async def test_a_job_that_ends_between_two_looks_is_not_missed(desk: Desk) -> None:
    """The second caller joins a watch that has told of everything already."""
    await desk.add("first", "second")
    [first] = await desk.waiting("first")
    read = desk.line._store.get

    async def read_and_end(ids: Sequence[str]) -> list[Job | None]:
        found = await read(ids)
        if "second" in ids:
            await desk.end("second")
        return found

    desk.store.get = read_and_end  # type: ignore[method-assign]
    start = now()
    await desk.client.ended("second", None)
    assert now() == start
    first.cancel()


@at_a_desk
async def test_an_end_that_is_heard_during_a_look_leads_to_another_look(desk: Desk) -> None:
    await desk.add("job")
    [waiting] = await desk.waiting("job")
    read = desk.store.get

    async def read_late(ids: Sequence[str]) -> list[Job | None]:
        found = await read(ids)
        await asyncio.sleep(0.5)
        return found

    desk.store.get = read_late  # type: ignore[method-assign]
    desk.client._ends._told(["job"])
    await asyncio.sleep(0.25)
    start = now()
    await desk.end("job")
    await waiting
    assert now() - start < 1


@at_a_desk
async def test_a_lost_notification_makes_a_result_a_little_late(desk: Desk) -> None:
    await desk.add("job")
    desk.line.deaf = True
    [waiting] = await desk.waiting("job")
    start = now()
    await desk.end("job")
    await waiting
    assert now() - start <= ends.WATCH_S


@pytest.mark.parametrize("refusal", [StoreError("denied"), StoreUnavailable("cut")])
def test_where_no_watch_works_jobs_are_looked_at_often(
    refusal: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    @at_a_desk
    async def story(desk: Desk) -> None:
        await desk.add("job")
        desk.line.refusal = refusal
        [waiting] = await desk.waiting("job")
        start = now()
        await desk.end("job")
        await waiting
        assert now() - start <= ends.LONGEST_PAUSE_S

    story()
    said = [each.getMessage() for each in caplog.records]
    lasting = not isinstance(refusal, StoreUnavailable)
    assert [each for each in said if "can't hear of the ends" in each] == (
        ["can't hear of the ends of jobs, so results come later: denied"] if lasting else []
    )


@at_a_desk
async def test_callers_hear_that_the_store_is_away(desk: Desk) -> None:
    await desk.add("job")
    [waiting] = await desk.waiting("job")
    desk.line.away = True
    start = now()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(waiting, 60)
    assert ends.AWAY_S <= now() - start <= ends.AWAY_S + ends.WATCH_S
    desk.line.away = False
    await desk.end("job")
    await desk.client.ended("job", None)


@at_a_desk
async def test_callers_outlast_a_store_that_is_away_for_a_moment(desk: Desk) -> None:
    ids = [f"job-{n}" for n in range(20)]
    await desk.add(*ids)
    waiting = await desk.waiting(*ids)
    for _ in range(4):
        desk.line.away = True
        await asyncio.sleep(ends.AWAY_S * 0.9)
        desk.line.away = False
        await asyncio.sleep(ends.WATCH_S * 2)
    await desk.end(*ids)
    async with asyncio.timeout(ends.WATCH_S * 2):
        assert [job.id for job in await asyncio.gather(*waiting)] == ids


@at_a_desk
async def test_a_timeout_is_kept_although_the_store_does_not_answer(desk: Desk) -> None:
    await desk.add("job")
    [waiting] = await desk.waiting("job", timeout_s=3.0)
    desk.line.hanging = True
    start = now()
    with pytest.raises(ResultTimeout, match="did not say within 3 s"):
        await waiting
    assert now() - start <= 3 + LAST_LOOK_S
    start = now()
    with pytest.raises(ResultTimeout, match="did not say within 2 s"):
        await desk.client.ended("job", 2.0)
    assert now() - start <= 2 + LAST_LOOK_S


@at_a_desk
async def test_a_job_that_stays_in_its_outbox_is_waited_for_once(desk: Desk) -> None:
    start = now()
    with pytest.raises(ResultTimeout, match="has not left its outbox after 2 s"):
        await desk.client.ended("job", 2.0, in_outbox=True)
    assert now() - start < 2.1
    adding = asyncio.get_running_loop().call_later(
        1.5, lambda: asyncio.ensure_future(desk.add("job"))
    )
    start = now()
    with pytest.raises(ResultTimeout, match="still waiting after 2 s"):
        await desk.client.ended("job", 2.0, in_outbox=True)
    assert now() - start < 2.1
    adding.cancel()


@at_a_desk
async def test_a_mistake_in_a_store_reaches_the_callers(desk: Desk) -> None:
    await desk.add("job")
    desk.line.refusal = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        await desk.client.ended("job", None)
    desk.line.refusal = None
    [waiting] = await desk.waiting("job")
    await desk.end("job")
    await waiting


@at_a_desk
async def test_callers_are_told_that_the_store_is_closed(desk: Desk) -> None:
    await desk.client.open()
    await desk.add("job")
    [waiting] = await desk.waiting("job")
    start = now()
    await desk.client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await waiting
    assert now() == start


@at_a_desk
async def test_a_caller_that_is_cancelled_leaves_nothing_behind(desk: Desk) -> None:
    await desk.add("a", "b")
    a, other, b = await desk.waiting("a", "a", "b")
    a.cancel()
    await asyncio.wait([a])
    assert set(desk.client._ends._waiting) == {"a", "b"}
    other.cancel()
    await asyncio.wait([other])
    assert set(desk.client._ends._waiting) == {"b"}
    b.cancel()
    await asyncio.wait([b])
    assert desk.at_rest


@at_a_desk
async def test_callers_of_one_job_don_t_disturb_each_other(desk: Desk) -> None:
    await desk.add("job")
    [patient] = await desk.waiting("job")
    with pytest.raises(ResultTimeout, match=r"job job is still waiting after 2 s"):
        await desk.client.ended("job", 2)
    await desk.end("job")
    assert (await patient).result == "1"


@at_a_desk
async def test_a_job_that_is_deleted_as_soon_as_it_ends_is_unknown(desk: Desk) -> None:
    await desk.add("job")
    [waiting] = await desk.waiting("job")
    await desk.end("job")
    await desk.store.delete(["job"])
    with pytest.raises(JobUnknown):
        await waiting


@at_a_desk
async def test_a_job_that_is_put_back_as_soon_as_it_ends_is_waited_for(desk: Desk) -> None:
    await desk.add("job")
    [waiting] = await desk.waiting("job")
    await desk.store.cancel(["job"], now_ms=0)
    await desk.store.rerun(["job"], now_ms=0)
    await asyncio.sleep(60)
    await desk.store.cancel(["job"], now_ms=0)
    with pytest.raises(JobCancelled):
        await waiting


@at_a_desk
async def test_what_is_seen_of_a_job_is_told_often(desk: Desk) -> None:
    """A task that waits lends its slot according to it."""
    await desk.add("job")
    seen: list[Job] = []
    [waiting] = await desk.waiting("job", seen=seen.append)
    assert len(seen) > 5
    seen.clear()
    await asyncio.sleep(60)
    assert 100 < len(seen) < 200
    await desk.end("job")
    start = now()
    await waiting
    assert now() == start


@at_a_desk
async def test_large_jobs_are_read_few_at_a_time(desk: Desk) -> None:
    ids = [f"{n:03}" for n in range(100)]
    await desk.add(*ids, payload="x" * 1_000_000)
    # The first look learns how large they are.
    await asyncio.gather(*(asyncio.wait_for(_tried(desk, id), 1) for id in ids))
    desk.line.read.clear()
    waiting = await desk.waiting(*ids)
    assert sum(desk.line.read) >= 200
    assert max(desk.line.read) <= 16
    await desk.end(*ids)
    await asyncio.gather(*waiting)
    assert max(desk.line.read) <= 16


async def _tried(desk: Desk, id: str) -> None:
    with pytest.raises(ResultTimeout):
        await desk.client.ended(id, 0)
