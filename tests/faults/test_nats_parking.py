"""Parked jobs on a real NATS server: races for them, news that is lost, and what a crash leaves.

Goal: a parked job is handed to one worker that knows its task, whatever was lost on the way, and
costs the workers that don't know it nothing. Lost messages and killed servers are in
test_nats_faults.py.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import pytest

from stores import NatsHarness, nats_server
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.store import Query, Store
from tickwheel.stores.nats import parked as nats_parked
from tickwheel.stores.nats.parked import Part
from tickwheel.stores.nats.shard import Shard
from tickwheel.stores.nats.steps import Line, Step, line_of
from tickwheel.stores.nats.store import NatsStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

T = TypeVar("T")

MAIL = ("mail",)
MINUTE = 60_000


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """It can't be started from within the loop of a test."""
    nats_server()


@pytest.fixture(params=["strict", "fast"])
def nats(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[NatsHarness]:
    """A store of its own on a real server. Steps go in batches, or each for itself."""
    harness = NatsHarness(durability=request.param)
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


def shard(store: Store) -> Shard:
    assert isinstance(store, NatsStore)
    return store._shards[0]


async def park(nats: NatsHarness, *jobs: Job, store: Store | None = None) -> None:
    store = store or nats.store
    await nats.store.add(jobs)
    held: list[Job] = []
    async with asyncio.timeout(30):
        while len(held) < len(jobs):
            held += await nats.claim(1000, store=store, lease_ms=MINUTE)
    settlements = [nats.settlement(Outcome.PARK, job) for job in held]
    assert all(await store.settle(settlements, now_ms=nats.now))


def mails(nats: NatsHarness, count: int) -> list[Job]:
    return [nats.job(f"mail-{n:05}", task="mail") for n in range(count)]


async def after(seconds: float, step: Awaitable[T]) -> T:
    await asyncio.sleep(seconds)
    return await step


async def messages(nats: NatsHarness, subject: str) -> int:
    return len(await shard(nats.store).stream.all_of(subject))


# --- Several at the same time


async def test_workers_that_claim_at_the_same_time_get_each_parked_job_once(
    nats: NatsHarness,
) -> None:
    stores = [nats.store, *[await nats.new_handle() for _ in range(3)]]
    await park(nats, *mails(nats, 600))
    found: list[Job] = []

    async def work(store: Store, name: str) -> None:
        while held := await nats.claim(25, store=store, worker=name, tasks=MAIL, lease_ms=MINUTE):
            found.extend(held)

    async with asyncio.timeout(60):
        while len(found) < 600:
            await asyncio.gather(*(work(store, f"w{n}") for n, store in enumerate(stores)))
    assert len({job.id for job in found}) == len(found) == 600
    assert {job.attempt for job in found} == {2}
    assert await nats.counts() == {"running": 600}
    settlements = [nats.done(job) for job in found]
    assert all(await nats.store.settle(settlements, now_ms=nats.now))


async def test_a_cancel_and_a_claim_of_a_parked_job(nats: NatsHarness) -> None:
    twin, dice = await nats.new_handle(), random.Random(3)
    seen: set[CancelOutcome] = set()
    for n in range(100):
        await park(nats, nats.job(f"{n}", task="mail"))
        held, [answer] = await asyncio.gather(
            after(dice.uniform(0, 0.003), nats.claim(tasks=MAIL)),
            after(dice.uniform(0, 0.003), twin.cancel([f"{n}"], now_ms=nats.now)),
        )
        assert answer is (CancelOutcome.REQUESTED if held else CancelOutcome.CANCELLED)
        seen.add(answer)
        for job in held:
            assert await nats.settle(nats.done(job))
    assert len(seen) == 2, f"no race: {seen}"


async def test_a_job_is_parked_at_the_very_end_of_its_lease(nats: NatsHarness) -> None:
    """The ready message that the lease leaves is no second copy of the job."""
    jobs = mails(nats, 60)
    await nats.add(*jobs)
    held = await nats.claim(100, lease_ms=700)
    dice = random.Random(5)

    async def settle(job: Job) -> bool:
        wait_ms = (job.lease_until_ms or 0) + dice.uniform(-60, 120) - nats.now
        await asyncio.sleep(max(wait_ms, 0) / 1000)
        # Its clock is behind.
        before_ms = (job.lease_until_ms or 0) - 1
        return (await nats.store.settle([nats.settlement(Outcome.PARK, job)], now_ms=before_ms))[0]

    answers = await asyncio.gather(*map(settle, held))
    assert any(answers)
    await asyncio.sleep(0.5)
    found: list[Job] = []
    async with asyncio.timeout(20):
        while len(found) < 60:
            found += await nats.claim(100, worker="bob", tasks=MAIL, lease_ms=MINUTE)
    assert len({job.id for job in found}) == 60
    taken = dict(zip([job.id for job in held], answers, strict=True))
    for job in found:
        assert (job.attempt, job.takeovers) == (2, 0 if taken[job.id] else 1)
    assert await nats.claim(100, worker="cy", tasks=MAIL) == []
    assert await nats.counts() == {"running": 60}


# --- News


async def test_a_worker_finds_a_parked_job_that_nobody_told_it_of(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await nats.new_handle()
    assert await nats.claim(store=other, tasks=MAIL) == []
    monkeypatch.setattr(NatsStore, "_notify_parked", lambda *_: None)
    for n in range(3):
        await park(nats, nats.job(f"{n}", task="mail"))
        async with asyncio.timeout(5):
            await other.wait(["default"], now_ms=nats.now, until_ms=nats.now + MINUTE, tasks=MAIL)
            # Its first wait may end for the job as it was before it was parked.
            while not (held := await nats.claim(store=other, tasks=MAIL, lease_ms=MINUTE)):
                await asyncio.sleep(0.02)
        assert [job.id for job in held] == [f"{n}"]


async def test_a_worker_is_told_of_a_job_that_a_claim_parked(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await nats.new_handle()
    assert await nats.claim(store=other, tasks=MAIL) == []
    # Nobody looks by itself.
    monkeypatch.setattr(nats_parked, "LOOK_S", 3600)
    await nats.add(nats.job("job", task="mail"))
    async with asyncio.timeout(20):
        while not (found := await nats.claim(tasks=["bill"])):
            await asyncio.sleep(0.02)
        assert [(job.id, job.parked) for job in found] == [("job", True)]
        while not (held := await nats.claim(store=other, tasks=MAIL)):
            await other.wait(["default"], now_ms=nats.now, until_ms=nats.now + MINUTE, tasks=MAIL)
    assert [job.id for job in held] == ["job"]


async def test_a_busy_worker_finds_a_parked_job_that_nobody_told_it_of(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that claims and claims, and never waits."""
    other = await nats.new_handle()
    assert await nats.claim(store=other, tasks=MAIL) == []
    monkeypatch.setattr(NatsStore, "_notify_parked", lambda *_: None)
    await park(nats, nats.job("job", task="mail"))
    async with asyncio.timeout(5):
        while not (held := await nats.claim(1, store=other, tasks=MAIL)):
            await asyncio.sleep(0.02)
    assert [job.id for job in held] == ["job"]


async def test_a_worker_hears_of_jobs_that_were_parked_while_it_was_cut_off(
    nats: NatsHarness,
) -> None:
    other = await nats.new_handle()
    assert await nats.claim(store=other, tasks=MAIL) == []
    assert isinstance(other, NatsStore) and other._wire is not None
    waiting = asyncio.create_task(
        other.wait(["default"], now_ms=nats.now, until_ms=nats.now + MINUTE, tasks=MAIL)
    )
    assert other._wire._writer is not None
    other._wire._writer.close()
    await park(nats, nats.job("job", task="mail"))
    async with asyncio.timeout(10):
        await waiting
        while not (held := await nats.claim(store=other, tasks=MAIL, lease_ms=MINUTE)):
            await asyncio.sleep(0.02)
    assert [job.id for job in held] == ["job"]


async def test_a_paused_queue_with_parked_jobs_keeps_nobody_awake(nats: NatsHarness) -> None:
    await park(nats, nats.job("job", task="mail"))
    await nats.store.pause("default", True)
    assert await nats.claim(tasks=MAIL) == []
    loop = asyncio.get_running_loop()
    begun = loop.time()
    until_ms = nats.now + 2_500
    waits = 0
    while nats.now < until_ms:
        await nats.store.wait(["default"], now_ms=nats.now, until_ms=until_ms, tasks=MAIL)
        assert await nats.claim(tasks=MAIL) == []
        waits += 1
    assert waits <= 5, f"{waits} waits ended in {loop.time() - begun:.1f} s"
    await nats.store.pause("default", False)
    async with asyncio.timeout(5):
        while not await nats.claim(tasks=MAIL):
            await nats.store.wait(
                ["default"], now_ms=nats.now, until_ms=nats.now + MINUTE, tasks=MAIL
            )


async def test_many_parked_jobs_cost_a_worker_that_does_not_know_them_nothing(
    nats: NatsHarness,
) -> None:
    for n in range(0, 20_000, 1_000):
        await park(nats, *(nats.job(f"mail-{m:05}", task="mail") for m in range(n, n + 1_000)))
    other = await nats.new_handle()
    assert await nats.claim(100, store=other, tasks=["bill"]) == []
    assert isinstance(other, NatsStore) and other._wire is not None
    wire, sent, received = other._wire, 0, 0
    exchange = wire.exchange

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal sent, received
        sent += 1
        answer = await exchange(*args, **kwargs)  # type: ignore[arg-type]
        received += sum(len(each.data) for each in answer)
        return answer

    wire.exchange = counted  # type: ignore[method-assign, assignment]
    until_ms, waits = nats.now + 3_000, 0
    while nats.now < until_ms:
        await other.wait(["default"], now_ms=nats.now, until_ms=until_ms, tasks=["bill"])
        assert await nats.claim(100, store=other, tasks=["bill"]) == []
        waits += 1
    assert waits <= 3, "it was kept awake"
    assert sent < 100 and received < 100_000, f"{sent} requests, {received:,} bytes"
    # Beside them a job that it knows is found as fast as ever, and who knows them gets them.
    await nats.add(nats.job("bill", task="bill"))
    [bill] = await nats.claim(store=other, tasks=["bill"], lease_ms=MINUTE)
    assert bill.id == "bill"
    assert len(await nats.claim(1000, tasks=MAIL, lease_ms=MINUTE)) == 1000
    assert await nats.counts() == {"waiting": 19_000, "running": 1_001}


# --- What a crash leaves


async def test_a_parked_message_that_stands_again_is_not_claimed_and_goes(
    nats: NatsHarness,
) -> None:
    """A server that was killed has forgotten that a claim removed it."""
    await park(nats, nats.job("job", task="mail"), nats.job("other", task="mail"))
    ghost = await nats.get("job")
    held = {job.id: job for job in await nats.claim(tasks=MAIL)}
    assert await nats.settle(nats.done(held["job"]))
    layout, stream = shard(nats.store).layout, shard(nats.store).stream
    step = layout.step(ghost, None, now_ms=nats.now)
    # In the stream the ghost comes before the end; only its sequence can't be set by hand.
    assert await stream.store([layout.note(line_of(ghost))])
    done = await stream.last_of([layout.truth("job")])
    assert await stream.store([step])
    assert await stream.store([Step(done[0][0], "", done[0][2])])
    other = await nats.new_handle()
    async with asyncio.timeout(20):
        while await messages(nats, layout.parked(line_of(ghost))):
            # Parts of a line may overlap.
            for last in (10**9, 10**9 + 1):
                shard(other).parked.arrived({line_of(ghost): Part(1, last)})
            assert await nats.claim(store=other, tasks=MAIL) == []
            await asyncio.sleep(0.05)
    assert (await nats.get("job")).state is State.DONE
    assert await nats.store.parked() == []
    assert await nats.counts() == {"done": 1, "running": 1}


async def test_the_note_of_an_empty_line_goes_and_one_with_jobs_stays(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_parked, "NOTE_MS", 500)
    await park(nats, nats.job("a", task="mail"), nats.job("b", task="bill"))
    layout = shard(nats.store).layout
    assert await messages(nats, layout.notes) == 2
    assert len(await nats.claim(tasks=MAIL)) == 1
    async with asyncio.timeout(10):
        while await messages(nats, layout.notes) == 2:
            await nats.claim(tasks=MAIL)
            await asyncio.sleep(0.05)
    bill = Line("default", 1, "bill")
    [(subject, seq, _)] = await shard(nats.store).stream.all_of(layout.notes)
    assert subject == layout.note_subject(bill)
    # Also if somebody took its line for empty.
    await shard(nats.store).parked._tidy(bill, seq)
    assert await messages(nats, layout.notes) == 1
    await nats.store.cancel(["b"], now_ms=nats.now)
    assert await nats.store.parked() == []
    assert await messages(nats, layout.notes) == 0
    await park(nats, nats.job("c", task="mail"))
    other = await nats.new_handle()
    assert len(await nats.claim(store=other, tasks=MAIL)) == 1


async def test_a_job_and_its_note_are_stored_together(nats: NatsHarness) -> None:
    """Or neither: a job without a note would be found by nobody who comes later."""
    await nats.add(nats.job("job", task="mail"))
    [held] = await nats.claim()
    stream, seen = shard(nats.store).stream, []
    put = stream.put

    async def spied(groups: list[list[Step]], **more: object) -> object:
        seen.append([len(group) for group in groups])
        return await put(groups, **more)  # type: ignore[arg-type]

    stream.put = spied  # type: ignore[method-assign, assignment]
    assert await nats.settle(nats.settlement(Outcome.PARK, held))
    assert seen == [[2]]


# --- Operating


async def test_pages_of_parked_jobs_have_each_once(nats: NatsHarness) -> None:
    queues = ["a", "b", "dots.in it", "z"]
    jobs = [nats.job(f"{n}", task=f"task-{n % 3}", queue=queues[n % 4]) for n in range(40)]
    await nats.add(*jobs)
    held = await nats.claim(100, queues=queues)
    settlements = [nats.settlement(Outcome.PARK, job) for job in held]
    assert all(await nats.store.settle(settlements, now_ms=nats.now))
    for query in (Query(), Query(state=State.WAITING), Query(state=State.WAITING, task="task-1")):
        ids: list[str] = []
        cursor: str | None = None
        while True:
            page = await nats.store.find(query, cursor=cursor, limit=3)
            ids += [job.id for job in page.jobs]
            if (cursor := page.cursor) is None:
                break
        wanted = [job.id for job in jobs if query.task in (None, job.task)]
        assert sorted(ids) == sorted(wanted)


async def test_parked_jobs_in_several_shards() -> None:
    h = NatsHarness(shards="3")
    await h.open()
    try:
        await park(h, *mails(h, 60))
        assert await h.claim(100) == []
        assert [(job.queue, job.task) for job in await h.store.parked()] == [("default", "mail")]
        assert await h.counts() == {"waiting": 60}
        other = await h.new_handle()
        found: set[str] = set()
        while held := await h.claim(100, store=other, tasks=MAIL):
            found |= {job.id for job in held}
        assert len(found) == 60
    finally:
        await h.close()
