"""move: when and where a job runs, changed in place; and what can't be changed any more."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stores import Harness
from tickwheel.ids import new_fence
from tickwheel.job import ENDED, CancelOutcome, Job, Move, MoveOutcome, Outcome, PutOutcome, State
from tickwheel.store import Ask

HOUR = 3_600_000


# --- Waiting


async def test_a_waiting_job_moves(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR, meta={"a": "b"}))
    before = await h.get()
    assert await h.move(due_ms=h.now + 2 * HOUR, priority=3, queue="other") is MoveOutcome.MOVED
    job = await h.get()
    assert (job.queue, job.priority) == ("other", 3)
    assert h.near(job.due_ms, h.now + 2 * HOUR)
    assert (job.payload, job.meta, job.created_ms) == (
        before.payload,
        before.meta,
        before.created_ms,
    )
    assert await h.all_counts() == {"other": {"waiting": 1}}


@pytest.mark.parametrize("what", ["due_ms", "priority", "queue"])
async def test_what_is_not_named_stays(h: Harness, what: str) -> None:
    await h.add(h.job(delay_ms=HOUR))
    before = await h.get()
    to: dict[str, object] = {"due_ms": h.now + 2 * HOUR, "priority": 2, "queue": "other"}
    ask = msgspec.convert({"id": "job", "request": 1, what: to[what]}, Move)
    assert await h.store.move([ask], now_ms=h.now) == [MoveOutcome.MOVED]
    after = await h.get()
    assert {
        name
        for name in ("due_ms", "priority", "queue", "state", "attempt", "history")
        if getattr(after, name) != getattr(before, name)
    } == {what}


async def test_a_job_that_moves_later_is_not_handed_out(h: Harness) -> None:
    await h.add(h.job("a"), h.job("job"))
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.MOVED
    assert await h.claim_ids() == ["a"]


async def test_a_job_that_moves_to_now_is_handed_out(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR))
    assert await h.move(due_ms=h.now) is MoveOutcome.MOVED
    [held] = await h.claim_soon()
    assert await h.settle(h.done(held))
    assert await h.counts() == {"done": 1}


async def test_a_job_moves_back_and_forth(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR))
    for n in (3, 2, 5, 1):
        assert await h.move(due_ms=h.now + n * HOUR) is MoveOutcome.MOVED
    assert await h.move(due_ms=h.now) is MoveOutcome.MOVED
    assert [job.id for job in await h.claim_soon()] == ["job"]
    assert await h.claim() == []


async def test_a_ready_job_moves_to_another_queue(h: Harness) -> None:
    await h.add(h.job())
    assert await h.move(queue="other") is MoveOutcome.MOVED
    [held] = await h.claim_soon(queues=["default", "other"])
    assert held.queue == "other"
    assert await h.claim(queues=["default", "other"]) == []
    assert await h.all_counts() == {"other": {"running": 1}}


async def test_a_job_that_waits_for_its_retry_moves_and_keeps_its_failures(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.retry(held, delay_ms=HOUR))
    assert await h.move(due_ms=h.now + 5 * HOUR) is MoveOutcome.MOVED
    job = await h.get()
    assert (job.failures, job.error, len(job.history)) == (1, "as it was", 1)


async def test_a_parked_job_moves(h: Harness) -> None:
    [held] = await h.claimed(h.job(task="unknown"))
    await h.settle(h.settlement(Outcome.PARK, held))
    assert await h.move(queue="other") is MoveOutcome.MOVED
    [again] = await h.claim_soon(queues=["other"])
    assert again.task == "unknown"
    assert await h.store.parked() == []


async def test_an_expiry_that_would_be_over_moves_along(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR, expires_ms=h.now + 2 * HOUR))
    before = await h.get()
    assert before.expires_ms is not None
    await h.move(due_ms=before.due_ms + HOUR // 2)
    assert (await h.get()).expires_ms == before.expires_ms
    await h.move(due_ms=before.due_ms + 10 * HOUR)
    assert (await h.get()).expires_ms == before.due_ms + 10 * HOUR + HOUR // 2


# --- Held


async def test_the_holder_of_a_job_is_asked_to_put_it_back(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.REQUESTED
    asked = await h.store.asked("ann", now_ms=h.now, until_ms=h.now)
    assert asked == {"job": Ask.PUT_BACK}
    extended = await h.extend(held)
    assert extended is not None and extended.told and not extended.cancel_requested
    assert (await h.get()).state is State.RUNNING


async def test_a_job_that_is_put_back_unstarted_has_moved(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    due_ms = h.now + HOUR
    assert await h.move(due_ms=due_ms, queue="other", request=1) is MoveOutcome.REQUESTED
    assert await h.settle(h.settlement(Outcome.RELEASE, held))
    job = await h.get()
    assert (job.state, job.due_ms, job.queue, job.told) == (State.WAITING, due_ms, "other", False)
    assert await h.claim(queues=["default", "other"]) == []
    assert await h.all_counts() == {"other": {"waiting": 1}}
    assert await h.move(due_ms=due_ms, request=1) is MoveOutcome.MOVED


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.RETRY, Outcome.SNOOZE, Outcome.DEAD])
async def test_a_job_that_had_started_has_not_moved(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job())
    assert await h.move(due_ms=h.now + 9 * HOUR, request=1) is MoveOutcome.REQUESTED
    settlement = h.settlement(outcome, held, delay_ms=HOUR)
    assert await h.settle(settlement)
    job = await h.get()
    assert (job.due_ms, job.queue, job.told) == (settlement.due_ms, "default", False)
    assert await h.move(due_ms=h.now, request=1) is MoveOutcome.TOO_LATE
    assert await h.get() == job


async def test_a_job_that_is_known_to_have_started_is_too_late_to_move(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.extend(msgspec.structs.replace(held, started_ms=h.now)) is not None
    before = await h.get()
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.TOO_LATE
    assert await h.get() == before


async def test_two_moves_of_a_held_job_both_count(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    due_ms = h.now + HOUR
    assert await h.move(queue="other") is MoveOutcome.REQUESTED
    assert await h.move(due_ms=due_ms) is MoveOutcome.REQUESTED
    await h.settle(h.settlement(Outcome.RELEASE, held))
    job = await h.get()
    assert (job.queue, job.due_ms) == ("other", due_ms)


async def test_a_lost_job_that_was_to_move_moves(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.move(due_ms=h.now + HOUR)
    await h.lose_leases()
    assert await h.claim(worker="bob") == []
    assert (await h.get()).state is State.WAITING
    assert not await h.settle(h.done(held))
    assert await h.counts() == {"waiting": 1}


async def test_a_lost_job_that_had_started_is_taken_over_where_it_is(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.move(due_ms=h.now + HOUR)
    assert await h.extend(msgspec.structs.replace(held, started_ms=h.now)) is not None
    await h.lose_leases()
    [job] = await h.claim(worker="bob")
    assert (job.attempt, job.takeovers, job.told) == (2, 1, False)


async def test_a_job_whose_lease_has_run_out_moves_at_once(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.lose_leases()
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.MOVED
    assert not await h.settle(h.done(held))
    assert await h.claim(worker="bob") == []
    job = await h.get()
    assert (job.state, job.takeovers) == (State.WAITING, 1)
    assert [run.outcome for run in job.history] == [Outcome.LOST]


async def test_a_cancel_drops_a_move(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.move(due_ms=h.now + HOUR)
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.REQUESTED]
    assert await h.settle(h.settlement(Outcome.RELEASE, held))
    assert (await h.get()).state is State.CANCELLED


async def test_a_job_that_was_asked_to_stop_is_too_late_to_move(h: Harness) -> None:
    await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.TOO_LATE


async def test_what_follows_a_run_moves_while_it_goes_on(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    assert await h.put(h.job(payload="new")) is PutOutcome.FOLLOWS
    due_ms = h.now + HOUR
    assert await h.move(due_ms=due_ms, queue="other") is MoveOutcome.MOVED
    assert await h.settle(h.done(held))
    job = await h.get()
    assert (job.payload, job.queue, job.due_ms) == ("new", "other", due_ms)


async def test_a_replace_counts_after_a_move(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    await h.move(queue="other")
    assert await h.put(h.job(payload="new", delay_ms=HOUR)) is PutOutcome.FOLLOWS
    await h.settle(h.settlement(Outcome.RELEASE, held))
    job = await h.get()
    assert (job.payload, job.queue) == ("new", "default")


# --- Too late, unknown, repeats


@pytest.mark.parametrize("state", ENDED)
async def test_a_job_that_has_ended_is_too_late_to_move(h: Harness, state: State) -> None:
    before = await h.ended(state)
    assert await h.move(due_ms=h.now + HOUR) is MoveOutcome.TOO_LATE
    assert await h.get() == before


async def test_an_unknown_job_cannot_move(h: Harness) -> None:
    assert await h.move(due_ms=h.now) is MoveOutcome.UNKNOWN
    assert await h.store.move([], now_ms=h.now) == []


async def test_repeating_a_move_changes_nothing_more(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR))
    assert await h.move(queue="a", request=1) is MoveOutcome.MOVED
    assert await h.move(queue="b", request=2) is MoveOutcome.MOVED
    before = await h.get()
    assert await h.move(queue="a", request=1) is MoveOutcome.MOVED
    assert await h.get() == before


async def test_moves_answer_in_the_order_of_the_question(h: Harness) -> None:
    await h.ended(State.DONE, "ended")
    await h.claimed(h.job("running"))
    await h.add(h.job("waiting", delay_ms=HOUR))
    moves = [
        Move(id=id, request=new_fence(), due_ms=h.now + HOUR)
        for id in ("waiting", "no such", "ended", "running", "waiting")
    ]
    answers = await h.store.move(moves, now_ms=h.now)
    assert answers == ["moved", "unknown", "too late", "requested", "moved"]


async def test_a_thousand_jobs_move_at_once(h: Harness) -> None:
    jobs = h.jobs(1000, delay_ms=HOUR)
    await h.add(*jobs)
    moves = [Move(id=job.id, request=new_fence(), queue="other") for job in jobs]
    assert await h.store.move(moves, now_ms=h.now) == [MoveOutcome.MOVED] * 1000
    assert await h.all_counts() == {"other": {"waiting": 1000}}


# --- Races


async def test_a_move_and_a_claim_at_once_agree(h: Harness) -> None:
    """Either it has moved and nobody has it, or its holder is asked."""
    second = await h.new_handle()

    async def claim() -> list[Job]:
        return await h.claim(store=second, worker="bob")

    for n in range(12):
        id = f"job-{n}"
        await h.add(h.job(id))
        claiming = asyncio.create_task(claim())
        ask = Move(id=id, request=new_fence(), due_ms=h.now + HOUR)
        [answer] = await h.store.move([ask], now_ms=h.now)
        claimed = [job for job in await claiming if job.id == id]
        assert answer is (MoveOutcome.REQUESTED if claimed else MoveOutcome.MOVED)
        for job in claimed:
            assert await h.settle(h.settlement(Outcome.RELEASE, job), store=second)
        assert (await h.get(id)).due_ms == ask.due_ms
        assert await h.claim(worker="cy") == []
