"""A NATS store whose parts fail one by one: consumers and streams that are gone, silent or behind.

Goal: what still works goes on without the part that doesn't, and what comes back is used again, by
the handles that were open all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from proxy import Proxy, bad_line, subject_of

from stores import NatsHarness, nats_server
from tickwheel import App
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job
from tickwheel.store import Query, Store, open_store
from tickwheel.stores.nats import delivery, notify, wire as nats_wire
from tickwheel.stores.nats.store import NatsStore
from tickwheel.stores.nats.stream import Stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SOON_S = 10.0


class Harness(NatsHarness):
    """Leases end in no test here."""

    lease_ms = 60_000


@pytest.fixture
def nats(runner: asyncio.Runner) -> Iterator[NatsHarness]:
    harness = Harness()
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


@contextlib.asynccontextmanager
async def line(**options: str) -> AsyncIterator[tuple[NatsHarness, Proxy, Store]]:
    """A harness with a good line, and a second handle on the same jobs behind a bad one."""
    h = Harness(**options)
    async with bad_line(nats_server().url) as proxy:
        await h.open()
        store = open_store(h._url.replace(nats_server().url, proxy.url))
        await store.open()
        try:
            yield h, proxy, store
        finally:
            proxy.heal()
            await store.close()
            await h.close()


@pytest.fixture(autouse=True)
def started() -> None:
    """It can't be started from within the loop of a test."""
    nats_server()


def stream_of(store: Store, shard: int = 0) -> Stream:
    assert isinstance(store, NatsStore)
    return store._shards[shard].stream


async def delete_consumer(store: Store, name: str) -> None:
    stream = stream_of(store)
    answer = await stream.api(f"CONSUMER.DELETE.{stream._name}.{name}")
    assert answer["success"]


async def delete_stream(store: Store, shard: int = 0) -> None:
    stream = stream_of(store, shard)
    answer = await stream.api(f"STREAM.DELETE.{stream._name}")
    assert answer["success"]


async def within(seconds: float, step: Callable[[], Awaitable[list[Job]]], count: int) -> list[str]:
    """The ids that steps give, repeated until there are so many, or none came for so long."""
    found: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while len(found) < count:
                found += [job.id for job in await step()]
                await asyncio.sleep(0.02)
    return sorted(found)


# --- Silent consumers


@pytest.mark.parametrize("silent", ["default-r2", "slow-r1"])
async def test_a_silent_consumer_keeps_no_claim_from_the_jobs_of_others(silent: str) -> None:
    async with line() as (h, proxy, store):
        for queue, priority in (("default", 2), ("slow", 1)):
            await h.add(h.job(f"first {queue}", queue=queue, priority=priority))
        queues = ("default", "slow")
        assert len(await h.claim(queues=queues, store=store)) == 2
        proxy.to_server = lambda message: not subject_of(message).endswith(silent)
        for n in range(8):
            await h.add(h.job(f"{n}"))
            start = time.monotonic()
            held = await h.claim(queues=queues, store=store)
            assert [job.id for job in held] == [f"{n}"]
            assert time.monotonic() - start < (1 if n == 0 else 0.2), "it waited for the silent one"
        queue, _, rank = silent.partition("-r")
        await h.add(h.job("late", queue=queue, priority=int(rank)))
        proxy.heal()
        claim = lambda: h.claim(queues=queues, store=store)  # noqa: E731
        assert await within(SOON_S, claim, 1) == ["late"]


async def test_a_claim_says_so_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "ANSWER_S", 0.5)
    async with line() as (h, proxy, store):
        await h.add(h.job())
        proxy.to_server = lambda message: "MSG.NEXT" not in subject_of(message)
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="did not answer"):
                await h.claim(store=store)
        proxy.heal()
        claim = lambda: h.claim(store=store)  # noqa: E731
        assert await within(SOON_S, claim, 1) == ["job"]


async def test_what_a_silent_consumer_delivers_late_is_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its answer is held back for longer than a claim waits: it is not lost, and not doubled."""
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.05)
    async with line() as (h, proxy, store):
        await h.add(h.job("high", priority=2), h.job("normal"))
        assert len(await h.claim(store=store)) == 2
        await h.add(h.job("late", priority=2), h.job("other"))
        held_back: list[bytes] = []

        def hold(message: bytes) -> bool:
            if "MSG.NEXT" in subject_of(message) and subject_of(message).endswith("-r2"):
                held_back.append(message)
                return False
            return True

        proxy.to_server = hold
        assert [job.id for job in await h.claim(store=store)] == ["other"]
        waiting = asyncio.create_task(store.wait(["default"], now_ms=0, until_ms=10_000))
        await asyncio.sleep(0.2)
        proxy.heal()
        [ask] = held_back
        stream_of(store)._wire.send(ask)
        async with asyncio.timeout(0.9):
            await waiting
        assert [job.id for job in await h.claim(store=store)] == ["late"]
        assert await h.claim() == []


async def test_what_comes_late_is_for_those_who_asked_for_its_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "PATIENCE_S", 0.05)
    async with line() as (h, proxy, store):
        await h.add(h.job("one", queue="slow"), h.job("two"))
        queues = ("default", "slow")
        assert len(await h.claim(queues=queues, store=store)) == 2
        await h.add(h.job("late", queue="slow"))
        held_back: list[bytes] = []

        def hold(message: bytes) -> bool:
            if subject_of(message).endswith("slow-r1"):
                held_back.append(message)
                return False
            return True

        proxy.to_server = hold
        assert await h.claim(queues=queues, store=store) == []
        proxy.heal()
        stream_of(store)._wire.send(held_back[0])
        assert await h.claim(queues=["default"], store=store) == []
        assert [job.id for job in await h.claim(queues=["slow"], store=store)] == ["late"]


# --- Consumers that were deleted


@pytest.mark.parametrize("who", ["who had claimed", "who is new"])
async def test_a_consumer_that_was_deleted_is_made_again(nats: NatsHarness, who: str) -> None:
    await nats.add(nats.job("first", priority=2))
    assert await nats.claim_ids() == ["first"]
    await delete_consumer(nats.store, "default-r2")
    await nats.add(nats.job("stuck", priority=2))
    store = await nats.new_handle() if who == "who is new" else nats.store
    assert await within(SOON_S, lambda: nats.claim(store=store), 1) == ["stuck"]


async def test_a_consumer_that_was_deleted_is_made_again_beside_busy_ones(
    nats: NatsHarness,
) -> None:
    """Claims that never come back empty must not hide that one priority is stuck."""
    await nats.add(nats.job("first", priority=2))
    assert await nats.claim_ids() == ["first"]
    await delete_consumer(nats.store, "default-r2")
    await nats.add(nats.job("stuck", priority=2))
    seen: set[str] = set()
    end = time.monotonic() + SOON_S
    while "stuck" not in seen and time.monotonic() < end:
        await nats.add(nats.job(f"{time.monotonic_ns()}"))
        held = await nats.claim()
        assert held
        seen |= {job.id for job in held}
    assert "stuck" in seen


async def test_a_consumer_that_somebody_changed_is_set_right(nats: NatsHarness) -> None:
    await nats.add(nats.job("first"))
    assert await nats.claim_ids() == ["first"]
    stream = nats.store._first.stream  # type: ignore[attr-defined]
    found = await stream.consumer("default-r1")
    wish = {"stream_name": stream.name, "config": found["config"] | {"max_ack_pending": 1}}
    answer = await stream.api(f"CONSUMER.CREATE.{stream.name}.default-r1", wish)
    assert answer["config"]["max_ack_pending"] == 1
    async with asyncio.timeout(SOON_S):
        while (await stream.consumer("default-r1"))["config"]["max_ack_pending"] == 1:
            await nats.claim()
            await asyncio.sleep(0.1)


async def test_a_wait_ends_when_a_consumer_was_made_again(nats: NatsHarness) -> None:
    await nats.add(nats.job("first"))
    assert await nats.claim_ids() == ["first"]
    await delete_consumer(nats.store, "default-r1")
    await nats.add(nats.job("stuck"))
    assert await nats.claim() == []
    async with asyncio.timeout(SOON_S):
        await nats.store.wait(["default"], now_ms=0, until_ms=60_000)
    assert await nats.claim_ids() == ["stuck"]


async def test_a_consumer_that_is_made_again_is_paused_like_its_queue(nats: NatsHarness) -> None:
    await nats.add(nats.job("first", priority=2))
    assert await nats.claim_ids() == ["first"]
    await nats.store.pause("default", True)
    await delete_consumer(nats.store, "default-r2")
    await nats.add(nats.job("stuck", priority=2))
    assert await within(4, nats.claim, 1) == [], "it was handed out from a paused queue"
    assert await stream_of(nats.store).consumer("default-r2") is not None
    await nats.store.pause("default", False)
    assert await within(SOON_S, nats.claim, 1) == ["stuck"]


# --- Streams that were deleted


async def test_a_stream_that_was_deleted_is_said(nats: NatsHarness) -> None:
    await nats.add(nats.job())
    assert await nats.claim_ids() == ["job"]
    await delete_stream(nats.store)
    calls: list[Callable[[], Awaitable[Any]]] = [
        nats.claim,
        nats.store.time_ns,
        nats.store.queues,
        lambda: nats.store.add([nats.job("new")]),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable, match="was deleted"):
            await call()


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "unseen"])
async def test_a_stream_that_was_made_again_is_used_by_old_handles(
    nats: NatsHarness, seen: bool
) -> None:
    """Deleted and created by another node, or restored, while nobody looked or while all did."""
    old = await nats.new_handle()
    await nats.add(nats.job("first"))
    assert await nats.claim_ids() == ["first"]
    await delete_stream(nats.store)
    if seen:
        for store in (nats.store, old):
            with pytest.raises(StoreUnavailable):
                await nats.claim(store=store)
    other = open_store(nats._url)
    await other.open()
    try:
        assert await nats.store.add([nats.job("by an old handle")]) == [True]
        assert await within(SOON_S, lambda: nats.claim(store=old), 1) == ["by an old handle"]
        assert await other.add([nats.job("by a new handle")]) == [True]
        assert await within(SOON_S, nats.claim, 1) == ["by a new handle"]
    finally:
        await other.close()


async def test_a_worker_outlives_its_stream_and_goes_on_with_the_next(nats: NatsHarness) -> None:
    app = App(nats._url)
    ran: list[int] = []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)

    async def until(count: int) -> None:
        async with asyncio.timeout(30):
            while len(ran) < count:
                await asyncio.sleep(0.02)

    async with app, app.worker():
        await work.enqueue(1)
        await until(1)
        await delete_stream(nats.store)
        with pytest.raises(StoreUnavailable, match="was deleted"):
            await work.enqueue(2)
        await asyncio.sleep(1)
        await nats.reopen()
        await work.enqueue(3)
        await until(2)
    assert ran == [1, 3]


# --- Shards, one of which gives no answer


def silence(proxy: Proxy, namespace: str, shard: int) -> None:
    stream, prefix = f"TICKWHEEL-{namespace}-{shard}", f"tw.{namespace}.{shard}."

    def passes(message: bytes) -> bool:
        subject = subject_of(message)
        return stream not in subject.split(".") and not subject.startswith(prefix)

    proxy.to_server = passes


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "ANSWER_S", 1.0)


def of_shards(h: NatsHarness, store: Store, count: int) -> list[list[Job]]:
    """So many jobs for each shard."""
    assert isinstance(store, NatsStore)
    found: list[list[Job]] = [[] for _ in store._shards]
    while any(len(each) < count for each in found):
        job = h.job(secrets.token_hex(6))
        mine = found[store._shards.index(store._of_job(job.id))]
        if len(mine) < count:
            mine.append(job)
    return found


@pytest.mark.parametrize("how", ["silent", "gone"])
@pytest.mark.usefixtures("hasty")
async def test_a_shard_without_an_answer_keeps_nobody_from_the_others(how: str) -> None:
    async with line(shards="2") as (h, proxy, store):
        good, bad = of_shards(h, store, 20)
        await h.add(*good[:5], *bad[:5])
        held = await h.claim(10, store=store)
        assert len(held) == 10
        await h.add(*good[5:], *bad[5:])
        if how == "silent":
            silence(proxy, h.namespace, 1)
        else:
            await delete_stream(h.store, 1)
        claimed: list[Job] = []
        start = time.monotonic()
        for _ in range(15):
            claimed += await h.claim(1, store=store)
        assert {job.id for job in claimed} == {job.id for job in good[5:]}
        assert time.monotonic() - start < 3, "each claim waited for the shard that is away"
        # What is in hand there is kept for as long as its lease is known to last.
        answers = await store.extend(held, now_ms=h.now, lease_ms=30_000)
        ours = {job.id: job for job in answers if job is not None}
        assert len(ours) == 10
        for job in good[:5]:
            assert (ours[job.id].lease_until_ms or 0) > h.now + 20_000
        # The others are settled, whatever the caller is told.
        with pytest.raises(StoreUnavailable):
            await store.settle([h.done(job) for job in held], now_ms=h.now)
        found = await h.store.get([job.id for job in good[:5]])
        assert {job.state for job in found if job} == {"done"}


@pytest.mark.usefixtures("hasty")
async def test_jobs_of_a_shard_without_an_answer_are_missed_aloud() -> None:
    async with line(shards="3") as (h, proxy, store):
        shards = of_shards(h, store, 7)
        await h.add(*(job for jobs in shards for job in jobs))
        silence(proxy, h.namespace, 1)
        listed: list[str] = []
        cursor = None
        with pytest.raises(StoreUnavailable, match=f"TICKWHEEL-{h.namespace}-1"):
            while True:
                page = await store.find(Query(), cursor=cursor, limit=5)
                listed += [job.id for job in page.jobs]
                assert page.jobs or page.cursor
                cursor = page.cursor
                if cursor is None:
                    break
        assert sorted(listed) == sorted(job.id for n in (0, 2) for job in shards[n])


@pytest.mark.usefixtures("hasty")
async def test_a_wait_goes_on_past_a_shard_without_an_answer() -> None:
    async with line(shards="2") as (h, proxy, store):
        good, bad = of_shards(h, store, 3)
        await h.add(good[0], bad[0])
        assert len(await h.claim(10, store=store)) == 2
        silence(proxy, h.namespace, 1)
        start = time.monotonic()
        await store.wait(["default"], now_ms=0, until_ms=1_500)
        assert 1.4 < time.monotonic() - start < 4, "it ran hot, or for too long"
        waiting = asyncio.create_task(store.wait(["default"], now_ms=0, until_ms=60_000))
        await asyncio.sleep(0.3)
        await h.add(good[1])
        async with asyncio.timeout(2):
            await waiting
        proxy.heal()
        await h.add(bad[1])
        claim = lambda: h.claim(store=store)  # noqa: E731
        ids = sorted([good[1].id, bad[1].id])
        assert await within(SOON_S, claim, 2) == ids


# --- Who is told of a job


async def test_one_of_those_who_wait_is_told_of_a_job(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "FIRST_POLL_S", 60.0)
    stores = [await nats.new_handle() for _ in range(8)]
    await nats.add(nats.job("first"))
    assert await nats.claim_ids() == ["first"]
    for count in (1, 3, 8):
        waits = [asyncio.create_task(wait(store)) for store in stores]
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in waits)
        await nats.add(*(nats.job(f"{count}-{n}") for n in range(count)))
        await asyncio.sleep(0.3)
        told = [store for each, store in zip(waits, stores, strict=True) if each.done()]
        assert len(told) == count, "as many as there are jobs, and each once"
        taken = [await nats.claim(1, store=store) for store in told]
        assert all(len(each) == 1 for each in taken)
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def test_a_job_that_whoever_was_told_left_is_found_by_the_others(nats: NatsHarness) -> None:
    stores = [await nats.new_handle() for _ in range(4)]
    waits = [asyncio.create_task(wait(store)) for store in stores]
    await asyncio.sleep(0.5)
    await nats.add(nats.job())
    start = time.monotonic()
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(*waits)
    assert time.monotonic() - start < notify.POLL_S + 1


async def test_all_who_wait_are_told_when_a_queue_goes_on(nats: NatsHarness) -> None:
    stores = [await nats.new_handle() for _ in range(4)]
    for store in stores:
        assert await nats.claim(store=store) == []
    await nats.add(*nats.jobs(8))
    await nats.store.pause("default", True)
    waits = [asyncio.create_task(wait(store)) for store in stores]
    await asyncio.sleep(0.3)
    assert not any(each.done() for each in waits)
    await nats.store.pause("default", False)
    async with asyncio.timeout(0.5):
        await asyncio.gather(*waits)


async def wait(store: Store) -> None:
    await store.wait(["default"], now_ms=0, until_ms=60_000)
