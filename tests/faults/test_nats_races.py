"""Steps on the same job at the same moment, hundreds of times, on a real NATS server.

Goal: whoever is first, both sides agree on it, and nothing is lost, doubled or run after its end.
The server takes part: it fires schedules and ends leases at moments of its own, up to a quarter of
a second late. Holders that believe their lease still runs are played by a clock that is behind.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from stores import NatsHarness
from tickwheel import job as life
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.schedule import Schedule
from tickwheel.store import Store
from tickwheel.stores.nats import delivery, stream as nats_stream

pytestmark = pytest.mark.slow

T = TypeVar("T")

HOUR_MS = 3_600_000
LEASE_MS = 700

# A claim checks that nothing else is stored for the id of a ready message, but not that the message
# is the last one: an earlier one, or one that the server wrote a moment too late, counts as well.


@pytest.fixture(params=["strict", "fast"])
def nats(request: pytest.FixtureRequest, runner: asyncio.Runner) -> Iterator[NatsHarness]:
    """A store of its own on a real server, whatever stores the other suites run on. Steps go in
    batches, or each for itself."""
    harness = NatsHarness(durability=request.param)
    runner.run(harness.open())
    yield harness
    runner.run(harness.close())


@pytest.fixture
def dice() -> random.Random:
    return random.Random(11)


async def after(seconds: float, step: Awaitable[T]) -> T:
    await asyncio.sleep(seconds)
    return await step


async def at(moment_ms: float, nats: NatsHarness) -> None:
    await asyncio.sleep(max(moment_ms - nats.now, 0) / 1000)


def batches(nats: NatsHarness, count: int, size: int) -> Iterator[list[Job]]:
    for n in range(0, count, size):
        yield [nats.job(f"job-{m:04}") for m in range(n, n + size)]


async def everything(
    nats: NatsHarness, *, seconds: float, worker: str = "bob", enough: int | None = None
) -> list[Job]:
    """All that can be claimed within a while, or so many."""
    held: list[Job] = []
    end_ms = nats.now + seconds * 1000
    while nats.now < end_ms and (enough is None or len(held) < enough):
        held += await nats.claim(200, worker=worker, lease_ms=60_000)
        await asyncio.sleep(0.02)
    return held


# --- Cancel


async def test_a_cancel_and_a_claim(nats: NatsHarness, dice: random.Random) -> None:
    twin = await nats.new_handle()
    seen: Counter[CancelOutcome] = Counter()
    for n in range(300):
        await nats.add(nats.job(f"{n}"))
        held, [answer] = await asyncio.gather(
            after(dice.uniform(0, 0.002), nats.claim()),
            after(dice.uniform(0, 0.002), twin.cancel([f"{n}"], now_ms=nats.now)),
        )
        assert answer is (CancelOutcome.REQUESTED if held else CancelOutcome.CANCELLED)
        seen[answer] += 1
        for job in held:
            assert await nats.settle(nats.done(job))
    assert len(seen) == 2, f"no race: {seen}"
    assert await nats.claim() == []


async def test_a_cancel_and_the_servers_own_fire(nats: NatsHarness, dice: random.Random) -> None:
    """What was cancelled never runs, not even if it is deleted before its ready message is seen."""
    twin = await nats.new_handle()
    due_ms = nats.now + 2_000
    jobs = [nats.job(f"{n}", delay_ms=due_ms - nats.now) for n in range(400)]
    await nats.add(*jobs)
    # The server fires them a second ahead of that, all within the next quarter of a second.
    await at(due_ms - 1_000, nats)
    answers = await asyncio.gather(
        *(
            after(dice.uniform(0, 0.3), (nats.store, twin)[n % 2].cancel([job.id], now_ms=nats.now))
            for n, job in enumerate(jobs)
        )
    )
    assert set(map(tuple, answers)) == {(CancelOutcome.CANCELLED,)}
    # A ready message that came too late counts until a claim finds that it is out of date.
    assert await nats.claim() == []
    assert await nats.counts() == {"cancelled": 400}
    await asyncio.sleep(0.5)
    for n in range(0, 400, 50):
        assert all(await nats.store.delete([f"{m}" for m in range(n, n + 50)]))
    assert await everything(nats, seconds=1) == []
    assert await nats.store.queues() == []


async def test_a_cancel_and_the_end_of_a_lease(nats: NatsHarness, dice: random.Random) -> None:
    """Asked or cancelled: either way nobody is handed the job again."""
    twin = await nats.new_handle()
    jobs = nats.jobs(200)
    await nats.add(*jobs)
    held = await nats.claim(200, lease_ms=LEASE_MS)
    assert len(held) == 200

    async def cancel(job: Job) -> CancelOutcome:
        await at((job.lease_until_ms or 0) + dice.uniform(-20, 300), nats)
        return (await twin.cancel([job.id], now_ms=nats.now))[0]

    answers = await asyncio.gather(*(cancel(job) for job in held))
    assert set(answers) <= {CancelOutcome.REQUESTED, CancelOutcome.CANCELLED}
    assert await everything(nats, seconds=1.5) == []
    assert await nats.counts() == {"cancelled": 200}


# --- The end of a lease


async def test_an_extend_at_the_very_end_of_the_lease(
    nats: NatsHarness, dice: random.Random
) -> None:
    """Who was told that it still holds the job does, and nobody else; no lease gets lost."""
    twin = await nats.new_handle()
    jobs = nats.jobs(300)
    await nats.add(*jobs)
    held = await nats.claim(300, lease_ms=LEASE_MS)

    async def extend(job: Job) -> Job | None:
        assert job.lease_until_ms is not None
        await at(job.lease_until_ms + dice.uniform(-20, 280), nats)
        behind_ms = job.lease_until_ms - 1
        lease_ms = nats.now + 5_000 - behind_ms
        return (await twin.extend([job], now_ms=behind_ms, lease_ms=lease_ms))[0]

    answers, taken = await asyncio.gather(
        asyncio.gather(*(extend(job) for job in held)), everything(nats, seconds=1.8)
    )
    ours = {job.id for job in answers if job is not None}
    # The server of a busy machine fires later still.
    taken += await everything(nats, seconds=2, enough=len(jobs) - len(ours) - len(taken))
    theirs = {job.id for job in taken}
    assert ours and theirs, "no race"
    assert ours & theirs == set(), "two holders of one attempt"
    assert ours | theirs == {job.id for job in jobs}, "a lease got lost"
    assert {job.attempt for job in taken} == {2}
    later = await everything(nats, seconds=20, enough=len(ours))
    assert {job.id for job in later} == ours, "a lease that was extended never ended"
    assert {job.attempt for job in later} == {2}


@pytest.mark.parametrize(
    "outcome", [Outcome.DONE, Outcome.RETRY, Outcome.RELEASE, Outcome.SNOOZE, Outcome.DEAD]
)
async def test_a_settle_at_the_very_end_of_the_lease(
    nats: NatsHarness, dice: random.Random, outcome: Outcome
) -> None:
    """One story per job: it was settled, or its lease ran out, never both and never neither."""
    twin = await nats.new_handle()
    jobs = nats.jobs(150)
    await nats.add(*jobs)
    held = await nats.claim(150, lease_ms=LEASE_MS)

    async def settle(job: Job) -> bool:
        assert job.lease_until_ms is not None
        await at(job.lease_until_ms + dice.uniform(-20, 280), nats)
        settlement = nats.settlement(outcome, job)
        return (await twin.settle([settlement], now_ms=job.lease_until_ms - 1))[0]

    answers, taken = await asyncio.gather(
        asyncio.gather(*(settle(job) for job in held)), everything(nats, seconds=2)
    )
    assert len(set(answers)) == 2, "no race"
    again = outcome not in (Outcome.DONE, Outcome.DEAD)
    expected = len(jobs) if again else answers.count(False)
    taken += await everything(nats, seconds=10, enough=expected - len(taken))
    by_id: defaultdict[str, list[Job]] = defaultdict(list)
    for job in taken:
        by_id[job.id].append(job)
    for job, was_taken in zip(held, answers, strict=True):
        found = by_id[job.id]
        assert len(found) == (again or not was_taken), "lost or doubled"
        for next_ in found:
            story = [outcome if was_taken else Outcome.LOST]
            assert [run.outcome for run in next_.history] == story
            assert (next_.attempt, next_.takeovers) == (2, int(not was_taken))


async def test_a_late_settle_and_a_takeover(nats: NatsHarness, dice: random.Random) -> None:
    twin = await nats.new_handle()
    jobs = nats.jobs(200)
    await nats.add(*jobs)
    held = await nats.claim(200, lease_ms=LEASE_MS)
    taken: dict[str, Job] = {}

    async def take_over() -> None:
        while len(taken) < len(jobs):
            for job in await nats.claim(20, worker="bob", lease_ms=60_000):
                assert job.id not in taken
                taken[job.id] = job
            await asyncio.sleep(0.005)

    async def settle_late(job: Job) -> bool:
        await at((job.lease_until_ms or 0) + dice.uniform(250, 500), nats)
        return (await twin.settle([nats.done(job)], now_ms=(job.lease_until_ms or 0) - 1))[0]

    async with asyncio.timeout(20):
        answers, _ = await asyncio.gather(
            asyncio.gather(*(settle_late(job) for job in held)), take_over()
        )
    assert not any(answers), "the old holder overwrote the new one's job"
    assert all(await nats.store.settle([nats.done(job) for job in taken.values()], now_ms=nats.now))
    for done in await nats.store.get([job.id for job in jobs]):
        assert done is not None
        assert [run.outcome for run in done.history] == [Outcome.LOST, Outcome.DONE]


async def test_two_handles_settle_the_same_claim(nats: NatsHarness, dice: random.Random) -> None:
    twin = await nats.new_handle()
    for batch in batches(nats, 300, 10):
        held = await nats.claimed(*batch)
        await asyncio.gather(
            *(after(dice.uniform(0, 0.002), nats.settle(nats.done(job))) for job in held),
            *(
                after(
                    dice.uniform(0, 0.002),
                    nats.settle(nats.settlement(Outcome.DEAD, job), store=twin),
                )
                for job in held
            ),
        )
        for job in await nats.store.get([job.id for job in batch]):
            assert job is not None and len(job.history) == 1
            assert job.state.value == job.history[0].outcome.value


# --- Add, rerun, delete, prune


async def test_an_id_added_by_several_handles(nats: NatsHarness, dice: random.Random) -> None:
    handles = [nats.store, *[await nats.new_handle() for _ in range(3)]]
    for n in range(200):
        job = nats.job(f"{n}", delay_ms=dice.choice([0, HOUR_MS]))
        answers = await asyncio.gather(
            *(after(dice.uniform(0, 0.001), store.add([job])) for store in handles)
        )
        assert sorted(answers) == [[False], [False], [False], [True]]
    assert await nats.counts() == {"waiting": 200}


async def test_an_add_and_a_delete(nats: NatsHarness, dice: random.Random) -> None:
    """An id is free again only when nothing of the job is left, not even a ready message."""
    twin = await nats.new_handle()
    for n in range(150):
        await nats.add(nats.job(f"{n}"))
        await nats.store.cancel([f"{n}"], now_ms=nats.now)
        [deleted], [added] = await asyncio.gather(
            after(dice.uniform(0, 0.002), twin.delete([f"{n}"])),
            after(dice.uniform(0, 0.002), nats.store.add([nats.job(f"{n}")])),
        )
        assert deleted
        held = await nats.claim()
        assert [job.id for job in held] == ([f"{n}"] if added else [])
        for job in held:
            assert await nats.settle(nats.done(job))


async def test_a_rerun_and_a_delete(nats: NatsHarness, dice: random.Random) -> None:
    twin = await nats.new_handle()
    for n in range(150):
        await nats.ended(State.DEAD, f"{n}")
        [rerun], [deleted] = await asyncio.gather(
            after(dice.uniform(0, 0.002), nats.store.rerun([f"{n}"], now_ms=nats.now)),
            after(dice.uniform(0, 0.002), twin.delete([f"{n}"])),
        )
        assert rerun is not deleted
        held = await nats.claim()
        assert [job.id for job in held] == ([f"{n}"] if rerun else [])
        for job in held:
            assert await nats.settle(nats.done(job))


async def test_a_rerun_and_a_prune(nats: NatsHarness, dice: random.Random) -> None:
    """A job that was put back runs, or had been forgotten before: a rerun is never in vain."""
    twin = await nats.new_handle()
    for n in range(200):
        await nats.ended(State.DEAD, f"{n}")
        [rerun], pruned = await asyncio.gather(
            after(dice.uniform(0, 0.002), nats.store.rerun([f"{n}"], now_ms=nats.now)),
            after(
                dice.uniform(0, 0.002),
                twin.prune([State.DEAD], before_ms=nats.now + 1_000, limit=10),
            ),
        )
        assert rerun is not bool(pruned)
        held = await nats.claim()
        assert [job.id for job in held] == ([f"{n}"] if rerun else []), "put back, and lost"
        for job in held:
            assert await nats.settle(nats.done(job))


async def test_nodes_that_fire_and_change_a_schedule(nats: NatsHarness) -> None:
    """A tick is fired once, and never once its schedule has been replaced."""
    twin = await nats.new_handle()
    fired = 0
    for n in range(100):
        schedule = await nats.store.put_schedule(Schedule(name="s", rule="{}", next_ms=n))
        answers, _ = await asyncio.gather(
            asyncio.gather(
                *(
                    store.fire(schedule, [nats.job(f"s@{n}")], next_ms=n + 1)
                    for store in (nats.store, twin, nats.store, twin)
                )
            ),
            after(0.0005 * (n % 4), twin.put_schedule(Schedule(name="s", rule="{}", next_ms=0))),
        )
        assert sum(answers) <= 1
        fired += sum(answers)
        assert (await nats.store.get([f"s@{n}"]) != [None]) is any(answers)
    assert fired > 0
    assert await nats.counts() == {"waiting": fired}


# --- A fire that is half done


# --- Spare ready messages


async def test_spare_tokens_are_neither_lost_nor_doubled(
    nats: NatsHarness, dice: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles that ask for one job of four priorities are sent four: three go back."""
    monkeypatch.setattr(delivery, "SPARE_S", 0.01)
    handles = [nats.store, *[await nats.new_handle() for _ in range(3)]]
    jobs = [nats.job(f"{n}", priority=n % 4) for n in range(400)]
    await nats.add(*jobs)
    ran: list[tuple[str, int]] = []
    done: set[str] = set()

    async def work(store: Store, worker: str) -> None:
        while len(done) < len(jobs):
            held = await nats.claim(1, store=store, worker=worker, lease_ms=60_000)
            for job in held:
                ran.append((job.id, job.attempt))
                assert job.id not in done, "handed out after its end"
                if job.attempt == 1 and dice.random() < 0.3:
                    assert await nats.settle(nats.retry(job), store=store)
                else:
                    assert await nats.settle(nats.done(job), store=store)
                    done.add(job.id)
            await asyncio.sleep(dice.choice([0, 0, 0.03]))

    async with asyncio.timeout(30):
        await asyncio.gather(*(work(store, f"{n}") for n, store in enumerate(handles)))
    assert len(set(ran)) == len(ran), "an attempt was handed out twice"
    assert await nats.counts() == {"done": 400}


@asynccontextmanager
async def a_spare(nats: NatsHarness) -> AsyncIterator[tuple[Store, Store]]:
    """One handle has the ready message of the job `low` as a spare; the other doesn't see it."""
    holder, other = nats.store, await nats.new_handle()
    await nats.add(nats.job("high", priority=2), nats.job("low", priority=0))
    [high] = await nats.claim(1, store=holder, lease_ms=60_000)
    assert high.id == "high"
    yield holder, other


async def test_a_spare_token_that_cannot_go_back_takes_no_other_with_it(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go back in one batch, which is refused whole: the innocent one must not be spent."""
    monkeypatch.setattr(delivery, "SPARE_S", 0.2)
    await nats.add(nats.job("innocent"))
    async with a_spare(nats) as (_, other):
        assert await other.cancel(["low"], now_ms=nats.now) == [CancelOutcome.CANCELLED]
        await asyncio.sleep(0.6)
        assert (await nats.get("innocent")).state is State.WAITING
        assert [job.id for job in await nats.claim(1, store=other)] == ["innocent"]


async def test_a_spare_message_of_a_job_that_was_cancelled_and_deleted(nats: NatsHarness) -> None:
    async with a_spare(nats) as (holder, other):
        assert await other.cancel(["low"], now_ms=nats.now) == [CancelOutcome.CANCELLED]
        assert await other.delete(["low"]) == [True]
        assert await nats.claim(1, store=holder) == [], "it was to run never"


async def test_a_spare_message_of_a_job_that_was_cancelled_and_pruned(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "SPARE_S", 0.2)
    async with a_spare(nats) as (_, other):
        assert await other.cancel(["low"], now_ms=nats.now) == [CancelOutcome.CANCELLED]
        assert await other.prune([State.CANCELLED], before_ms=nats.now + 1_000, limit=9) == 1
        await asyncio.sleep(0.5)  # it is put back by now
        assert await nats.claim(1, store=other) == [], "it was to run never"


@pytest.mark.parametrize("spare_s", [2.0, 60.0], ids=["put back", "claimed"])
async def test_a_spare_token_that_others_were_handed_meanwhile(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch, spare_s: float
) -> None:
    """After a process was frozen, or a server forgot what it delivered, the same ready message is
    delivered twice. What the second holder made of the job must stand."""
    monkeypatch.setattr(nats_stream, "ACK_WAIT_S", 1)
    monkeypatch.setattr(delivery, "SPARE_S", spare_s)
    async with a_spare(nats) as (holder, other):
        await asyncio.sleep(1.3)
        [low] = await nats.claim(1, store=other, worker="bob")
        assert await nats.settle(nats.retry(low), store=other)
        if spare_s < 60:
            await asyncio.sleep(spare_s)
            holder = other
        [again] = await nats.claim(1, store=holder)
        assert (again.id, again.attempt, again.failures) == ("low", 2, 1)
        assert [run.outcome for run in again.history] == [Outcome.RETRY]


async def test_a_claim_that_is_given_up_leaves_its_jobs_to_others(
    nats: NatsHarness, dice: random.Random
) -> None:
    """Cancelled in the middle, it may cost a lease, but not the time of a redelivery."""
    twin = await nats.new_handle()
    jobs = nats.jobs(60)
    await nats.add(*jobs)
    for _ in range(60):
        claim = asyncio.create_task(nats.claim(1, lease_ms=LEASE_MS))
        await asyncio.sleep(dice.uniform(0, 0.004))
        claim.cancel()
        await asyncio.gather(claim, return_exceptions=True)
    found: set[str] = set()
    end_ms = nats.now + 5_000
    while len(found) < len(jobs) and nats.now < end_ms:
        found |= {job.id for job in await nats.claim(100, store=twin, lease_ms=60_000)}
        await asyncio.sleep(0.05)
    assert len(found) == len(jobs), "messages were dropped: their jobs are half a minute late"


async def test_claims_at_the_same_time_on_one_handle(nats: NatsHarness) -> None:
    await nats.add(*nats.jobs(300))
    claims = await asyncio.gather(*(nats.claim(30, worker=f"{n}") for n in range(12)))
    held = [job.id for jobs in claims for job in jobs]
    assert len(held) == len(set(held)) == 300


def test_the_clock_that_is_behind_is_what_the_races_rest_on() -> None:
    """A settle by a right clock is refused before it is sent: then nothing here would race."""
    job = Job(id="j", task="t", payload="{}", due_ms=0, created_ms=0)
    held = life.claimed(job, worker="w", fence=1, now_ms=0, lease_ms=100)
    assert life.held(held, now_ms=99) and not life.held(held, now_ms=100)
