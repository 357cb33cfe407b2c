"""A NATS server that was killed: it forgets what it dropped, delivered and heard a moment before.

Goal: no job is lost behind a schedule that is over, runs again after its end, or loses a run from
its history. Method: what a killed server leaves is put there by hand, on a real one; and a server
is killed under load in test_nats_faults.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest

from stores import NatsHarness, nats_server
from tickwheel import job as life
from tickwheel.errors import StoreUnavailable
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.stores.nats import records, steps
from tickwheel.stores.nats.shard import Shard
from tickwheel.stores.nats.steps import ReadyMessage, Step
from tickwheel.stores.nats.store import NatsStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LEASE_MS = 60_000


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


def shard(store: object) -> Shard:
    assert isinstance(store, NatsStore)
    return store._shards[0]


async def write(nats: NatsHarness, *messages: tuple[str, Job]) -> None:
    """Let messages of a job stand as they are, without a check: what is over never fires."""
    layout = shard(nats.store).layout
    for kind, job in messages:
        step = layout.step(job, None, now_ms=nats.now)
        if kind:
            subject = f"{layout.prefix}.t.{kind}.{job.queue}.{job.id}"
            target = layout.ready_subject(job)
            headers = f"Nats-Schedule: {steps.NEVER}\r\nNats-Schedule-Target: {target}\r\n"
            step = Step(subject, headers, step.body)
        assert await shard(nats.store).stream.store([step])


async def left_of(nats: NatsHarness, id: str) -> list[str]:
    """The kinds of message that stand for a job."""
    found = await shard(nats.store).stream.last_of([shard(nats.store).layout.anywhere(id)])
    return sorted(subject.rsplit(".", 4)[-4:-2][-1] for subject, _, _ in found)


def held_by_ann(nats: NatsHarness, job: Job, *, lease_ms: int = LEASE_MS) -> Job:
    return life.claimed(job, worker="ann", fence=7, now_ms=nats.now, lease_ms=lease_ms)


# --- Schedules that were dropped


@pytest.mark.parametrize("kinds", ["s", "l", "m", "sm"])
async def test_a_job_is_claimed_although_its_last_schedule_stands_again(
    nats: NatsHarness, kinds: str
) -> None:
    job = nats.job("job")
    await nats.store.add([job])
    [held] = await nats.claim(1, lease_ms=LEASE_MS)
    back = life.settled(held, life.release(held, ended_ms=nats.now))
    assert await nats.settle(life.release(held, ended_ms=nats.now))
    # In the order in which they were written.
    await write(nats, *[(kind, job if kind == "s" else held) for kind in kinds], ("", back))
    [again] = await nats.claim(1, lease_ms=LEASE_MS)
    assert (again.attempt, again.takeovers) == (2, 0)
    assert [run.outcome for run in again.history] == [Outcome.RELEASE]
    assert await nats.store.extend([again], now_ms=nats.now, lease_ms=LEASE_MS) != [None]
    assert await nats.settle(nats.done(again))
    [found] = await nats.store.get(["job"])
    assert found is not None and found.state is State.DONE
    assert await left_of(nats, "job") == ["d"]


async def test_a_lease_runs_out_although_an_older_schedule_stands_again(nats: NatsHarness) -> None:
    job = nats.job("job")
    await nats.store.add([job])
    await nats.claim(1, lease_ms=LEASE_MS)
    await write(nats, ("s", job), ("", held_by_ann(nats, job, lease_ms=500)))
    async with asyncio.timeout(20):
        while not (taken := await nats.claim(1, worker="bob", lease_ms=LEASE_MS)):
            await asyncio.sleep(0.05)
    assert (taken[0].attempt, taken[0].takeovers) == (2, 1)


async def test_a_cancel_heeds_what_counts(nats: NatsHarness) -> None:
    job = nats.job("job")
    held = held_by_ann(nats, job)
    back = life.settled(held, life.release(held, ended_ms=nats.now))
    await write(nats, ("l", held), ("", back))
    assert await nats.store.cancel(["job"], now_ms=nats.now) == [CancelOutcome.CANCELLED]
    assert await nats.claim(1) == []
    [found] = await nats.store.get(["job"])
    assert found is not None and (found.state, found.attempt) == (State.CANCELLED, 1)


async def test_a_rerun_is_not_undone(nats: NatsHarness) -> None:
    await nats.add(nats.job("job"))
    [held] = await nats.claim(1)
    await nats.settle(nats.done(held))
    ended = (await shard(nats.store).stream.read(["job"]))["job"]
    # The two messages of a rerun, of which the second drops the first; here it doesn't.
    layout, again = shard(nats.store).layout, life.rerun(ended.job, now_ms=nats.now)
    [first, _] = layout.revive(ended, again, now_ms=nats.now)
    assert await shard(nats.store).stream.store([first])
    await write(nats, ("", again))
    [found] = await nats.claim(1)
    assert found.attempt == 2


@pytest.mark.parametrize("way", ["prune", "delete"])
async def test_nothing_outlives_an_ended_job(nats: NatsHarness, way: str) -> None:
    job = nats.job("job")
    held = held_by_ann(nats, job)
    await write(nats, ("s", job), ("m", held), ("", life.settled(held, nats.done(held))))
    assert await left_of(nats, "job") == ["d", "m", "s"]
    if way == "prune":
        assert await nats.store.prune([State.DONE], before_ms=nats.now + 1_000, limit=10) == 1
    else:
        assert await nats.store.delete(["job"]) == [True]
    assert await left_of(nats, "job") == []
    assert await nats.store.get(["job"]) == [None]


# --- Tokens that were delivered to two


async def delivered_to_two(nats: NatsHarness) -> tuple[NatsStore, list[ReadyMessage]]:
    """A second handle with a message in its hand; the server forgot that, and delivered it to the
    first one, which claimed the job and gave it back since."""
    other = await nats.new_handle()
    assert isinstance(other, NatsStore)
    await nats.add(nats.job("job"))
    messages = await shard(other).delivery.take(["default"], 1)
    first = shard(nats.store)
    same = [msgspec.structs.replace(t, connection=first.stream.connection) for t in messages]
    [held] = await claimed(first, same)
    assert await nats.settle(life.release(held, ended_ms=nats.now))
    return other, messages


async def claimed(
    by: Shard, messages: list[ReadyMessage], left: list[ReadyMessage] | None = None
) -> list[Job]:
    jobs, _ = await by.jobs.claim(
        messages,
        worker="bob",
        now_ms=by.jobs._now_ms(),
        lease_ms=LEASE_MS,
        tasks=(),
        call=None,
        leave=([] if left is None else left).extend,
    )
    return jobs


async def lose_connection(store: NatsStore) -> None:
    before = shard(store).stream.connection
    await cut(store)
    async with asyncio.timeout(10):
        while shard(store).stream.connection == before or not await store.get(["x"]):
            await asyncio.sleep(0.01)


async def cut(store: NatsStore) -> None:
    assert store._wire is not None and store._wire._writer is not None
    store._wire._writer.transport.abort()


async def test_a_message_from_before_a_lost_connection_is_looked_up_first(
    nats: NatsHarness,
) -> None:
    other, messages = await delivered_to_two(nats)
    await lose_connection(other)
    assert await claimed(shard(other), messages) == []
    [again] = await nats.claim(1)
    assert again.attempt == 2


async def test_a_claim_does_not_outlive_its_connection(nats: NatsHarness) -> None:
    """It would wait for the next one, over which its messages are in doubt."""
    other, messages = await delivered_to_two(nats)
    await cut(other)
    left: list[ReadyMessage] = []
    with pytest.raises(StoreUnavailable):
        await claimed(shard(other), messages, left)
    assert left == messages
    [again] = await nats.claim(1)
    assert again.attempt == 2


async def test_what_is_delivered_after_a_lost_connection_is_in_doubt(nats: NatsHarness) -> None:
    other = await nats.new_handle()
    assert isinstance(other, NatsStore)
    await nats.add(nats.job("old"))
    await lose_connection(other)
    [message] = await shard(other).delivery.take(["default"], 1)
    assert shard(other).stream.doubts(message)
    assert [job.id for job in await claimed(shard(other), [message])] == ["old"]


async def test_a_message_in_doubt_is_claimed_only_as_it_was_seen(nats: NatsHarness) -> None:
    """Between the look and the claim another one claims the job and gives it back."""
    other = await nats.new_handle()
    assert isinstance(other, NatsStore)
    await nats.add(nats.job("job"))
    [message] = await shard(other).delivery.take(["default"], 1)
    stream, first = shard(other).stream, shard(nats.store)
    read = stream.read

    async def late(ids: object) -> dict[str, steps.Standing]:
        seen = await read(ids)  # type: ignore[arg-type]
        same = msgspec.structs.replace(message, connection=first.stream.connection)
        [held] = await claimed(first, [same])
        assert await nats.settle(life.release(held, ended_ms=nats.now))
        stream.read = read  # type: ignore[method-assign]
        return seen

    stream.read = late  # type: ignore[method-assign]
    assert await claimed(shard(other), [msgspec.structs.replace(message, again=True)]) == []
    [again] = await nats.claim(1)
    assert again.attempt == 2


# --- Records


async def test_a_deleted_record_is_not_back_when_its_removal_is_forgotten(
    nats: NatsHarness,
) -> None:
    """What takes its place is stored, as every message is, before the delete returns."""
    await nats.store.put_records("key", {"revoked": "1", "kept": "2"})
    await nats.store.delete_records("key", ["revoked"])
    stream, prefix = shard(nats.store).stream, shard(nats.store).layout.prefix
    [(_, _, body)] = await stream.last_of([f"{prefix}.n.key-revoked.revoked"])
    assert body == b""
    assert await nats.store.records("key") == [("kept", "2")]


async def test_what_a_deleted_record_leaves_goes_by_itself(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "GONE", "Nats-TTL: 1s\r\n")
    await nats.store.put_records("key", {"longer-than-8": "1"})
    assert await nats.store.delete_records("key", ["longer-than-8"]) == [True]
    async with asyncio.timeout(30):
        # Also the note of its group, once a page has found no record in it.
        while await messages_of_records(nats):
            assert await nats.store.records("key") == []
            await asyncio.sleep(0.1)
    await nats.store.put_records("key", {"longer-than-8": "2"})
    assert await nats.store.records("key") == [("longer-than-8", "2")]


async def messages_of_records(nats: NatsHarness) -> list[str]:
    stream, prefix = shard(nats.store).stream, shard(nats.store).layout.prefix
    found = await stream.last_of([f"{prefix}.n.*.*", f"{prefix}.g.*.*"])
    return [subject for subject, _, _ in found]


async def test_a_note_is_kept_if_a_record_comes_while_a_page_finds_none(
    nats: NatsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nats.store.put_records("key", {"a": "1"})
    stream, prefix = shard(nats.store).stream, shard(nats.store).layout.prefix
    await stream.purge(f"{prefix}.n.key-a.a")
    purge = stream.purge

    async def put_first(subject: str, *, before_seq: int | None = None) -> int:
        await other.put_records("key", {"a": "2"})
        return await purge(subject, before_seq=before_seq)

    other = await nats.new_handle()
    monkeypatch.setattr(stream, "purge", put_first)
    assert await nats.store.records("key") == []
    assert await other.records("key") == [("a", "2")]
