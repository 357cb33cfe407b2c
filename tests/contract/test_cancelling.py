"""cancel: ends what waits, asks the holder of what runs, and says which it was."""

from __future__ import annotations

import pytest

from stores import Harness
from tickwheel.job import ENDED, CancelOutcome, Outcome, State

AGAIN = (Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE)


async def cancel(h: Harness, id: str = "job") -> CancelOutcome:
    [answer] = await h.store.cancel([id], now_ms=h.now)
    return answer


# --- Waiting


async def test_a_job_that_was_ready_counts_as_cancelled_and_no_more(h: Harness) -> None:
    await h.add(h.job("a"), h.job("b"), h.job("c", priority=3))
    await h.store.cancel(["a", "c"], now_ms=h.now)
    assert await h.counts() == {"waiting": 1, "cancelled": 2}


async def test_a_waiting_job_is_cancelled_at_once(h: Harness) -> None:
    await h.add(h.job(delay_ms=3_600_000))
    assert await cancel(h) is CancelOutcome.CANCELLED
    job = await h.get()
    assert (job.state, job.attempt, job.history) == (State.CANCELLED, 0, ())
    assert h.near(job.ended_ms, h.now)
    assert await h.counts() == {"cancelled": 1}


async def test_a_job_that_is_due_is_cancelled_and_never_handed_out(h: Harness) -> None:
    await h.add(h.job("a"), h.job("b"))
    assert await cancel(h, "a") is CancelOutcome.CANCELLED
    assert await h.claim_ids() == ["b"]


async def test_a_job_that_could_be_claimed_before_is_not_handed_out_after(h: Harness) -> None:
    """The store may have noted it as ready by then."""
    await h.add(h.job("a"), h.job("b"), h.job("c"))
    [first] = await h.claim_ids(1)
    others = sorted({"a", "b", "c"} - {first})
    assert await cancel(h, others[0]) is CancelOutcome.CANCELLED
    assert await h.claim_ids() == [others[1]]


async def test_a_job_that_waits_for_its_retry_is_cancelled(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.retry(held))
    assert await cancel(h) is CancelOutcome.CANCELLED
    assert await h.claim() == []
    assert len((await h.get()).history) == 1


async def test_a_job_of_a_paused_queue_is_cancelled(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    assert await cancel(h) is CancelOutcome.CANCELLED
    await h.store.pause("default", False)
    assert await h.claim() == []


# --- Running


async def test_the_holder_of_a_running_job_is_asked_to_stop_it(h: Harness) -> None:
    await h.claimed(h.job())
    assert await cancel(h) is CancelOutcome.REQUESTED
    job = await h.get()
    assert (job.state, job.cancel_requested, job.worker) == (State.RUNNING, True, "ann")
    assert await h.counts() == {"running": 1}


async def test_extend_tells_that_the_job_was_asked_to_stop(h: Harness) -> None:
    asked, left_alone = await h.claimed(h.job("asked"), h.job("left alone"))
    await cancel(h, "asked")
    answers = await h.store.extend([asked, left_alone], now_ms=h.now, lease_ms=h.lease_ms)
    assert [job and job.cancel_requested for job in answers] == [True, False]


async def test_asking_does_not_shorten_the_lease(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    assert (await h.get()).lease_until_ms == held.lease_until_ms
    assert await h.claim(worker="bob") == []


@pytest.mark.parametrize("outcome", AGAIN)
async def test_a_job_asked_to_stop_is_cancelled_where_it_would_have_waited_again(
    h: Harness, outcome: Outcome
) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    assert await h.settle(h.settlement(outcome, held))
    job = await h.get()
    assert (job.state, job.cancel_requested, job.lease_until_ms) == (State.CANCELLED, False, None)
    assert h.near(job.ended_ms, h.now)
    assert job.history[-1].outcome is outcome
    assert await h.claim() == []
    assert await h.counts() == {"cancelled": 1}


@pytest.mark.parametrize("outcome", [Outcome.DONE, Outcome.DEAD])
async def test_a_job_asked_to_stop_may_come_to_its_own_end(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    assert await h.settle(h.settlement(outcome, held))
    job = await h.get()
    assert (job.state.value, job.cancel_requested) == (outcome.value, False)


@pytest.mark.parametrize("outcome", AGAIN)
async def test_an_extended_job_that_was_asked_to_stop_is_cancelled_too(
    h: Harness, outcome: Outcome
) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    extended = await h.extend(held)
    assert extended is not None
    assert await h.settle(h.settlement(outcome, extended))
    assert (await h.get()).state is State.CANCELLED


async def test_repeating_the_settle_of_an_asked_job_answers_true(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    settlement = h.retry(held)
    assert await h.settle(settlement)
    before = await h.get()
    assert await h.settle(settlement)
    assert await h.get() == before


async def test_an_asked_job_is_not_handed_out_when_its_lease_runs_out(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    await h.lose_leases()
    assert await h.claim(worker="bob") == []
    job = await h.get()
    assert (job.state, job.cancel_requested, job.attempt) == (State.CANCELLED, False, 1)
    assert (job.lease_until_ms, job.takeovers) == (None, 0)
    assert job.ended_ms is not None and job.ended_ms >= (held.lease_until_ms or 0)
    assert await h.counts() == {"cancelled": 1}


async def test_history_shows_that_the_worker_of_an_asked_job_was_lost(h: Harness) -> None:
    await h.claimed(h.job(), worker="ann")
    await cancel(h)
    await h.lose_leases()
    await h.claim(worker="bob")
    [run] = (await h.get()).history
    assert (run.outcome, run.worker, run.attempt) == (Outcome.LOST, "ann", 1)


async def test_the_holder_that_lost_an_asked_job_can_neither_extend_nor_settle_it(
    h: Harness,
) -> None:
    [held] = await h.claimed(h.job())
    await cancel(h)
    await h.lose_leases()
    assert await h.extend(held) is None
    assert not await h.settle(h.done(held))
    await h.claim(worker="bob")
    before = await h.get()
    assert await h.extend(held) is None
    assert not await h.settle(h.done(held))
    assert await h.get() == before


async def test_an_asked_job_takes_no_other_job_with_it(h: Harness) -> None:
    await h.claimed(h.job("asked"), h.job("lost"))
    await cancel(h, "asked")
    await h.lose_leases()
    await h.add(h.job("new"))
    assert sorted(await h.claim_ids(worker="bob")) == ["lost", "new"]


# --- Lost: nobody is there to be asked


async def test_a_job_whose_lease_has_run_out_is_cancelled_at_once(h: Harness) -> None:
    await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    assert await cancel(h) is CancelOutcome.CANCELLED
    job = await h.get()
    assert (job.state, job.cancel_requested) == (State.CANCELLED, False)
    assert [run.outcome for run in job.history] == [Outcome.LOST]
    assert await h.claim(worker="bob") == []


@pytest.mark.parametrize("outcome", [Outcome.DONE, *AGAIN, Outcome.DEAD])
async def test_a_cancel_that_came_first_refuses_the_late_settle(
    h: Harness, outcome: Outcome
) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    await cancel(h)
    before = await h.get()
    assert not await h.settle(h.settlement(outcome, lost))
    assert await h.get() == before


async def test_a_cancel_that_came_first_refuses_the_late_extend(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    await cancel(h)
    assert await h.extend(lost) is None
    assert (await h.get()).state is State.CANCELLED


async def test_a_job_that_was_taken_over_asks_its_new_holder(h: Harness) -> None:
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    held = await h.claim_one(worker="bob")
    assert await cancel(h) is CancelOutcome.REQUESTED
    assert await h.extend(lost) is None
    extended = await h.extend(held)
    assert extended is not None and extended.cancel_requested


# --- Too late, unknown


@pytest.mark.parametrize("state", ENDED)
async def test_a_job_that_has_ended_is_too_late_to_cancel(h: Harness, state: State) -> None:
    before = await h.ended(state)
    await h.pass_time(h.step_ms)
    assert await cancel(h) is CancelOutcome.TOO_LATE
    assert await h.get() == before


async def test_an_unknown_job_cannot_be_cancelled(h: Harness) -> None:
    assert await cancel(h) is CancelOutcome.UNKNOWN
    await h.add(h.job())


# --- Repeats and batches


async def test_repeating_the_cancel_of_a_waiting_job_changes_nothing_more(h: Harness) -> None:
    await h.add(h.job())
    await cancel(h)
    before = await h.get()
    await h.pass_time(h.step_ms)
    await cancel(h)
    assert await h.get() == before
    assert await h.counts() == {"cancelled": 1}


async def test_repeating_the_cancel_of_a_running_job_asks_once(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert [await cancel(h), await cancel(h)] == [CancelOutcome.REQUESTED, CancelOutcome.REQUESTED]
    assert await h.counts() == {"running": 1}
    assert await h.settle(h.done(held))


async def test_cancel_answers_in_the_order_of_the_question(h: Harness) -> None:
    await h.ended(State.DONE, "ended")
    await h.claimed(h.job("running"))
    await h.add(h.job("waiting"))
    answers = await h.store.cancel(["waiting", "no such", "ended", "running"], now_ms=h.now)
    assert answers == [
        CancelOutcome.CANCELLED,
        CancelOutcome.UNKNOWN,
        CancelOutcome.TOO_LATE,
        CancelOutcome.REQUESTED,
    ]


async def test_an_id_named_twice_is_cancelled_once(h: Harness) -> None:
    await h.add(h.job())
    first, second = await h.store.cancel(["job", "job"], now_ms=h.now)
    assert first is CancelOutcome.CANCELLED
    assert second in (CancelOutcome.CANCELLED, CancelOutcome.TOO_LATE)
    assert await h.counts() == {"cancelled": 1}


async def test_cancelling_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.cancel([], now_ms=h.now) == []


async def test_a_thousand_jobs_are_cancelled_at_once(h: Harness) -> None:
    jobs = h.jobs(1000, delay_ms=3_600_000)
    await h.add(*jobs)
    answers = await h.store.cancel([job.id for job in jobs], now_ms=h.now)
    assert answers == [CancelOutcome.CANCELLED] * 1000
    assert await h.counts() == {"cancelled": 1000}
