"""extend and settle: only the holder of the current attempt, only while its lease runs."""

from __future__ import annotations

import msgspec
import pytest

from stores import Harness, unfenced
from tickwheel import job as life
from tickwheel.job import HISTORY_LIMIT, CancelOutcome, Job, Outcome, State

OUTCOMES = (Outcome.DONE, Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE, Outcome.DEAD)
AGAIN = (Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE)

# --- Extend


async def test_extend_moves_the_lease(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.pass_time(h.lease_ms // 2)
    extended = await h.extend(held)
    assert extended is not None
    assert h.near(extended.lease_until_ms, h.now + h.lease_ms)
    assert h.near((await h.get()).lease_until_ms, h.now + h.lease_ms)


async def test_extend_answers_with_the_job_as_it_stands(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload='{"a": 1}'))
    extended = await h.extend(held)
    assert unfenced(extended) == unfenced(await h.get())
    assert extended is not None
    assert (extended.attempt, extended.worker, extended.payload) == (1, "ann", '{"a": 1}')


async def test_an_extended_job_is_not_taken_over_at_its_old_lease_end(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.pass_time(h.lease_ms // 2)
    assert await h.extend(held)
    await h.pass_time(h.lease_ms // 2 + h.step_ms)
    assert await h.claim(worker="bob") == []


async def test_an_extended_job_is_taken_over_at_its_new_lease_end(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.pass_time(h.lease_ms // 2)
    assert await h.extend(held)
    await h.lose_leases()
    assert (await h.claim_one(worker="bob")).attempt == 2


async def test_a_lease_can_be_extended_again_and_again(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    for _ in range(3):
        await h.pass_time(h.lease_ms // 2)
        extended = await h.extend(held)
        assert extended is not None
        held = extended
    assert await h.settle(h.done(held))


async def test_repeating_an_extend_finds_the_job_still_ours(h: Harness) -> None:
    """The reply to the first was lost, so the repeat shows the fence from before it."""
    [held] = await h.claimed(h.job())
    assert await h.extend(held) is not None
    extended = await h.extend(held)
    assert extended is not None
    assert extended.attempt == held.attempt
    assert await h.counts() == {"running": 1}


async def test_a_holder_that_missed_the_reply_to_its_extend_can_settle(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.extend(held) is not None
    assert await h.settle(h.done(held))
    assert (await h.get()).state is State.DONE


async def test_a_lease_that_has_run_out_cannot_be_extended(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    assert await h.extend(lost) is None
    assert (await h.claim_one(worker="bob")).attempt == 2


async def test_at_the_moment_when_its_lease_ends_a_job_is_no_longer_held(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.pass_time(h.lease_ms)
    assert await h.extend(lost) is None
    assert not await h.settle(h.done(lost))


async def test_a_job_that_was_taken_over_cannot_be_extended_by_its_old_holder(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    held = await h.claim_one(worker="bob")
    assert await h.extend(lost, lease_ms=9 * h.lease_ms) is None
    assert (await h.get()).lease_until_ms == held.lease_until_ms
    assert await h.extend(held) is not None


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_settled_job_cannot_be_extended(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.settlement(outcome, held, delay_ms=h.lease_ms))
    before = await h.get()
    assert await h.extend(held) is None
    assert await h.get() == before


async def test_a_job_that_nobody_holds_cannot_be_extended(h: Harness) -> None:
    await h.add(h.job("waiting"))
    waiting = await h.get("waiting")
    unknown = h.never_claimed("unknown")
    answers = await h.store.extend([waiting, unknown], now_ms=h.now, lease_ms=h.lease_ms)
    assert answers == [None, None]
    assert await h.store.get(["unknown"]) == [None]


async def test_extend_answers_in_the_order_of_the_question(h: Harness) -> None:
    a, b, c, d = await h.claimed(*(h.job(id) for id in "abcd"))
    await h.settle(h.done(b))
    answers = await h.store.extend([d, b, a, c], now_ms=h.now, lease_ms=h.lease_ms)
    assert [job and job.id for job in answers] == ["d", None, "a", "c"]


async def test_extend_notes_when_the_holder_started_the_job(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert (await h.get()).started_ms is None
    started = msgspec.structs.replace(held, started_ms=h.now)
    extended = await h.extend(started)
    assert extended is not None and extended.started_ms == started.started_ms
    assert (await h.get()).started_ms == started.started_ms
    # The holder may take it back, too.
    assert await h.extend(msgspec.structs.replace(extended, started_ms=None))
    assert (await h.get()).started_ms is None


async def test_a_cancel_request_leaves_the_noted_start_alone(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.extend(msgspec.structs.replace(held, started_ms=h.now))
    await h.store.cancel(["job"], now_ms=h.now)
    job = await h.get()
    assert job.cancel_requested and job.started_ms is not None


async def test_a_takeover_remembers_whether_the_job_had_started(h: Harness) -> None:
    ran, held = await h.claimed(h.job("ran"), h.job("held"))
    started = msgspec.structs.replace(ran, started_ms=h.now)
    await h.store.extend([started, held], now_ms=h.now, lease_ms=h.lease_ms)
    await h.lose_leases()
    again = {job.id: job for job in await h.claim(worker="bob")}
    assert [run.started_ms for run in again["ran"].history] == [started.started_ms]
    assert [run.started_ms for run in again["held"].history] == [None]
    assert again["ran"].started_ms is None, "the new holder has not started it"


@pytest.mark.parametrize("outcome", AGAIN)
async def test_a_settled_job_has_no_start_noted(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job())
    extended = await h.extend(msgspec.structs.replace(held, started_ms=h.now))
    assert extended is not None
    await h.settle(h.settlement(outcome, extended))
    assert (await h.get()).started_ms is None


async def test_extending_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.extend([], now_ms=h.now, lease_ms=h.lease_ms) == []


# --- Settle: what it makes of a job


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_what_a_settlement_makes_of_a_job_is_written(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job(priority=2, payload='{"a": 1}'))
    settlement = h.settlement(outcome, held, delay_ms=5000)
    assert await h.settle(settlement)
    assert unfenced(await h.get()) == unfenced(life.settled(held, settlement))


async def test_a_done_job_keeps_its_result(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.done(held))
    job = await h.get()
    assert (job.state, job.result, job.error) == (State.DONE, '"as it was"', None)
    assert (job.lease_until_ms, job.failures) == (None, 0)
    assert h.near(job.ended_ms, h.now)


async def test_a_done_job_may_say_why_its_result_was_not_kept(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(life.done(held, started_ms=h.now, ended_ms=h.now, error="result too large"))
    job = await h.get()
    assert (job.state, job.result, job.error) == (State.DONE, None, "result too large")


async def test_a_retried_job_waits_until_it_is_due_again(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    later = h.now + h.store.ahead_ms + h.lease_ms
    settlement = life.retry(held, due_ms=later, error="boom", started_ms=h.now, ended_ms=h.now)
    assert await h.settle(settlement)
    job = await h.get()
    assert (job.state, job.due_ms, job.error, job.failures) == (State.WAITING, later, "boom", 1)
    assert (job.lease_until_ms, job.ended_ms) == (None, None)
    assert await h.claim() == []


async def test_a_snoozed_job_has_not_failed(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    later = h.now + h.lease_ms
    assert await h.settle(life.snooze(held, due_ms=later, ended_ms=h.now))
    job = await h.get()
    assert (job.state, job.due_ms, job.failures) == (State.WAITING, later, 0)


async def test_a_released_job_is_due_as_before_and_handed_out_again(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(life.release(held, ended_ms=h.now))
    job = await h.get()
    assert (job.state, job.due_ms, job.failures) == (State.WAITING, held.due_ms, 0)
    assert (await h.claim_one(worker="bob")).attempt == 2


async def test_a_job_released_before_its_due_time_keeps_it(h: Harness) -> None:
    [held] = await h.claimed(h.job(delay_ms=h.store.ahead_ms))
    await h.settle(life.release(held, ended_ms=h.now))
    assert (await h.claim_one()).due_ms == held.due_ms


async def test_a_dead_job_waits_for_a_person(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(life.dead(held, error="poison", ended_ms=h.now))
    job = await h.get()
    assert (job.state, job.error, job.failures) == (State.DEAD, "poison", 1)
    await h.lose_leases()
    assert await h.claim() == []


async def test_a_job_can_die_without_having_failed(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(life.dead(held, error="too many takeovers", ended_ms=h.now, failed=False))
    assert (await h.get()).failures == 0


async def test_history_shows_how_each_run_ended(h: Harness) -> None:
    await h.add(h.job())
    dues = []
    for outcome in (*AGAIN, Outcome.DONE):
        held = await h.claim_one(worker=f"for {outcome}")
        dues.append(held.due_ms)
        started_ms = h.now
        await h.pass_time(h.step_ms)
        settlement = h.settlement(outcome, held)
        assert await h.settle(settlement)
        run = (await h.get()).history[-1]
        assert (run.outcome, run.worker) == (outcome, f"for {outcome}")
        assert (run.error, run.ended_ms) == (settlement.error, settlement.ended_ms)
        assert run.started_ms == settlement.started_ms
        assert run.started_ms is None or run.started_ms >= started_ms
    history = (await h.get()).history
    assert [run.attempt for run in history] == [1, 2, 3, 4]
    assert [run.due_ms for run in history] == dues


async def test_long_errors_and_results_come_back_whole(h: Harness) -> None:
    text = "失敗 💥 \n\"quoted\" 'and' \\ " * 5000
    for outcome in (Outcome.DONE, Outcome.DEAD):
        id = f"{outcome}"
        await h.add(h.job(id))
        settlement = h.settlement(outcome, await h.claim_one(), text=text)
        assert await h.settle(settlement)
        job = await h.get(id)
        assert (job.result, job.error) == (settlement.result, settlement.error)
        assert job.history[-1].error == settlement.error


async def test_a_result_of_a_mebibyte_comes_back_whole(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    settlement = h.settlement(Outcome.DONE, held, text="0123456789abcdef" * 65_000)
    assert await h.settle(settlement)
    assert (await h.get()).result == settlement.result


# --- Settle: only by the holder


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_lost_lease_cannot_be_settled(h: Harness, outcome: Outcome) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    before = await h.get()
    assert not await h.settle(h.settlement(outcome, lost))
    assert await h.get() == before
    assert (await h.claim_one(worker="bob")).takeovers == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_job_that_was_taken_over_cannot_be_settled_by_its_old_holder(
    h: Harness, outcome: Outcome
) -> None:
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    held = await h.claim_one(worker="bob")
    before = await h.get()
    assert not await h.settle(h.settlement(outcome, lost))
    assert await h.get() == before
    assert await h.settle(h.done(held))
    assert (await h.get()).history[-1].worker == "bob"


async def test_an_old_holder_cannot_settle_a_job_that_has_ended_since(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    await h.settle(h.done(await h.claim_one(worker="bob")))
    before = await h.get()
    assert not await h.settle(h.settlement(Outcome.DEAD, lost))
    assert await h.get() == before


async def test_an_old_holder_cannot_settle_a_job_that_waits_again(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    await h.settle(h.retry(await h.claim_one(worker="bob"), delay_ms=h.lease_ms))
    before = await h.get()
    assert not await h.settle(h.done(lost))
    assert await h.get() == before


async def test_a_worker_that_took_over_from_itself_settles_only_its_new_attempt(
    h: Harness,
) -> None:
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    held = await h.claim_one(worker="ann")
    assert not await h.settle(h.settlement(Outcome.DEAD, lost))
    assert await h.settle(h.done(held))
    assert (await h.get()).state is State.DONE


async def test_a_settled_attempt_cannot_be_settled_otherwise(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.done(held))
    before = await h.get()
    await h.settle(h.settlement(Outcome.DEAD, held))
    await h.settle(h.retry(held))
    assert await h.get() == before


async def test_a_job_that_was_never_claimed_cannot_be_settled(h: Harness) -> None:
    await h.add(h.job())
    before = await h.get()
    assert not await h.settle(h.done(before))
    assert await h.get() == before


async def test_an_unknown_job_cannot_be_settled(h: Harness) -> None:
    unknown = h.never_claimed()
    assert not await h.settle(h.done(unknown))
    assert await h.store.get(["job"]) == [None]
    assert await h.queues() == []


async def test_settle_answers_in_the_order_of_the_question(h: Harness) -> None:
    [lost] = await h.claimed(h.job("lost"))
    await h.lose_leases()
    await h.claim_one(worker="bob")
    a, b = await h.claimed(h.job("a"), h.job("b"))
    unknown = h.never_claimed("unknown")
    settlements = [h.done(job) for job in (b, lost, unknown, a)]
    assert await h.store.settle(settlements, now_ms=h.now) == [True, False, False, True]
    assert await h.counts() == {"running": 1, "done": 2}


async def test_a_batch_settles_each_job_in_its_own_way(h: Harness) -> None:
    held = await h.claimed(*(h.job(outcome) for outcome in OUTCOMES))
    settlements = [h.settlement(outcome, job) for outcome, job in zip(OUTCOMES, held, strict=True)]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * 5
    assert await h.counts() == {"done": 1, "waiting": 3, "dead": 1}


async def test_many_runs_that_end_alike_are_each_written_as_if_alone(h: Harness) -> None:
    [failed] = await h.claimed(h.job("again"))
    assert await h.settle(h.retry(failed))
    again = await h.claim_one(worker="ann")
    held = await h.claimed(*(h.job(f"job-{n}", delay_ms=-n) for n in range(10)))
    assert await h.store.cancel(["job-0"], now_ms=h.now) == [CancelOutcome.REQUESTED]
    settlements = [h.done(job) for job in (*held, again)]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * 11
    for each in settlements:
        expected = life.settled(each.job, each)
        assert unfenced(await h.get(each.job.id)) == unfenced(expected)


async def test_of_many_runs_that_end_alike_only_the_holders_count(h: Harness) -> None:
    held = await h.claimed(*h.jobs(8))
    await h.lose_leases()
    taken = {job.id for job in await h.claim(4, worker="bob")}
    assert len(taken) == 4
    assert await h.store.settle([h.done(job) for job in held], now_ms=h.now) == [False] * 8
    assert "done" not in await h.counts()
    assert {job.id for job in await h.claim(worker="eve")} == {job.id for job in held} - taken


async def test_settling_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.settle([], now_ms=h.now) == []


# --- Settle: repeats after a lost reply


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_repeating_a_settle_answers_true_and_changes_nothing_more(
    h: Harness, outcome: Outcome
) -> None:
    [held] = await h.claimed(h.job())
    settlement = h.settlement(outcome, held)
    assert await h.settle(settlement)
    before = await h.get()
    assert await h.settle(settlement)
    assert await h.get() == before
    assert sum((await h.counts()).values()) == 1


async def test_repeating_a_settle_after_the_lease_would_have_ended_answers_true(
    h: Harness,
) -> None:
    [held] = await h.claimed(h.job())
    settlement = h.done(held)
    assert await h.settle(settlement)
    await h.lose_leases()
    assert await h.settle(settlement)


async def test_repeating_a_settle_inside_one_batch_settles_once(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    settlement = h.retry(held)
    assert await h.store.settle([settlement, settlement], now_ms=h.now) == [True, True]
    job = await h.get()
    assert (job.failures, len(job.history)) == (1, 1)
    assert await h.counts() == {"waiting": 1}


@pytest.mark.parametrize("first", [Outcome.DONE, Outcome.DEAD])
async def test_of_two_settlements_of_one_attempt_in_a_batch_the_first_counts(
    h: Harness, first: Outcome
) -> None:
    [held] = await h.claimed(h.job())
    both = [h.done(held), h.settlement(Outcome.DEAD, held)]
    if first is Outcome.DEAD:
        both.reverse()
    assert await h.store.settle(both, now_ms=h.now) == [True, True]
    job = await h.get()
    assert (job.state, len(job.history)) == (State(first), 1)


@pytest.mark.parametrize("lost_first", [True, False])
async def test_a_batch_settles_the_attempt_that_holds_and_not_the_lost_one(
    h: Harness, lost_first: bool
) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    held = await h.claim_one(worker="bob")
    both = [h.settlement(Outcome.DEAD, lost), h.done(held)]
    answers = [False, True]
    if not lost_first:
        both.reverse()
        answers.reverse()
    assert await h.store.settle(both, now_ms=h.now) == answers
    assert (await h.get()).state is State.DONE


@pytest.mark.parametrize("outcome", AGAIN)
async def test_repeating_a_settle_does_not_disturb_the_next_holder(
    h: Harness, outcome: Outcome
) -> None:
    [held] = await h.claimed(h.job(), worker="ann")
    settlement = h.settlement(outcome, held)
    assert await h.settle(settlement)
    await h.pass_time(h.step_ms)
    second = await h.claim_one(worker="bob")
    before = await h.get()
    assert await h.settle(settlement)
    assert await h.get() == before
    assert await h.settle(h.done(second))


async def test_repeating_a_settle_after_a_rerun_changes_nothing_more(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    settlement = h.done(held)
    await h.settle(settlement)
    await h.store.rerun(["job"], now_ms=h.now)
    before = await h.get()
    assert await h.settle(settlement)
    assert await h.get() == before


async def test_a_refused_settle_stays_refused(h: Harness) -> None:
    [lost] = await h.claimed(h.job())
    await h.lose_leases()
    assert not await h.settle(h.done(lost))
    assert not await h.settle(h.done(lost))
    held = await h.claim_one(worker="bob")
    assert await h.settle(h.done(held))
    assert not await h.settle(h.done(lost))


# --- An id used anew: attempts count from one again, so only the fence tells the holders apart


async def forgotten_and_added_again(h: Harness) -> Job:
    """A claim that was lost, on a job that has since ended, been deleted and been added anew."""
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    await h.settle(h.done(await h.claim_one(worker="bob")))
    await h.store.delete(["job"])
    await h.add(h.job())
    return lost


async def test_a_claim_from_before_a_delete_cannot_settle_the_new_job(h: Harness) -> None:
    lost = await forgotten_and_added_again(h)
    held = await h.claim_one(worker="cy")
    before = await h.get()
    assert not await h.settle(h.settlement(Outcome.DEAD, lost))
    assert await h.get() == before
    assert await h.settle(h.done(held))


async def test_a_claim_from_before_a_delete_cannot_extend_the_new_job(h: Harness) -> None:
    lost = await forgotten_and_added_again(h)
    held = await h.claim_one(worker="cy")
    assert await h.extend(lost, lease_ms=9 * h.lease_ms) is None
    assert (await h.get()).lease_until_ms == held.lease_until_ms


async def test_a_claim_from_before_a_delete_is_not_taken_for_a_repeat(h: Harness) -> None:
    lost = await forgotten_and_added_again(h)
    assert await h.settle(h.done(await h.claim_one(worker="cy")))
    assert not await h.settle(h.settlement(Outcome.DEAD, lost))


async def test_repeating_a_settle_does_not_settle_a_new_job_of_the_same_id(h: Harness) -> None:
    [held] = await h.claimed(h.job(), worker="ann")
    settlement = h.done(held)
    assert await h.settle(settlement)
    await h.store.delete(["job"])
    await h.add(h.job())
    await h.claim_one(worker="bob")
    before = await h.get()
    await h.settle(settlement)
    assert await h.get() == before


async def test_history_is_short_however_the_runs_ended(h: Harness) -> None:
    await h.add(h.job())
    for n in range(HISTORY_LIMIT + 2):
        await h.settle(h.settlement(AGAIN[n % 3], await h.claim_one()))
    assert len((await h.get()).history) == HISTORY_LIMIT
