"""rerun, delete and prune: what becomes of jobs that have ended."""

from __future__ import annotations

import msgspec
import pytest

from stores import Harness
from tickwheel import job as life
from tickwheel.job import ENDED, CancelOutcome, Outcome, State

# --- Rerun


@pytest.mark.parametrize("state", ENDED)
async def test_an_ended_job_is_put_back_to_run_now(h: Harness, state: State) -> None:
    await h.ended(state)
    await h.pass_time(h.step_ms)
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    job = await h.get()
    assert (job.state, job.ended_ms) == (State.WAITING, None)
    assert h.near(job.due_ms, h.now)
    assert await h.counts() == {"waiting": 1}
    await h.pass_time(h.step_ms)
    assert await h.claim_ids() == ["job"]


async def test_a_rerun_job_has_all_its_retries_again(h: Harness) -> None:
    await h.claimed(h.job())
    await h.lose_leases()
    held = await h.claim_one()
    await h.settle(life.dead(held, error="boom", ended_ms=h.now))
    before = await h.get()
    assert (before.failures, before.takeovers, before.error) == (1, 1, "boom")
    await h.store.rerun(["job"], now_ms=h.now)
    job = await h.get()
    assert (job.failures, job.takeovers, job.error) == (0, 0, None)


async def test_a_rerun_job_forgets_its_result_and_keeps_its_history(h: Harness) -> None:
    before = await h.ended(State.DONE)
    assert before.result is not None
    await h.store.rerun(["job"], now_ms=h.now)
    job = await h.get()
    assert (job.result, job.history) == (None, before.history)


async def test_a_rerun_job_no_longer_expires(h: Harness) -> None:
    soon = msgspec.structs.replace(h.job(), expires_ms=h.now + 60_000)
    [held] = await h.claimed(soon)
    await h.settle(life.expire(held, ended_ms=h.now))
    assert (await h.get()).error == life.EXPIRED
    await h.store.rerun(["job"], now_ms=h.now)
    job = await h.get()
    assert (job.expires_ms, job.error) == (None, None)


async def test_the_attempts_of_a_rerun_job_go_on_counting(h: Harness) -> None:
    before = await h.ended(State.DEAD)
    await h.store.rerun(["job"], now_ms=h.now)
    await h.pass_time(h.step_ms)
    assert (await h.claim_one()).attempt == before.attempt + 1


async def test_a_rerun_job_can_come_to_another_end(h: Harness) -> None:
    await h.ended(State.DEAD)
    await h.store.rerun(["job"], now_ms=h.now)
    await h.pass_time(h.step_ms)
    assert await h.settle(h.done(await h.claim_one()))
    assert await h.counts() == {"done": 1}


async def test_a_job_that_was_asked_to_stop_is_no_longer_asked_after_a_rerun(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    await h.settle(h.retry(held))
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    await h.pass_time(h.step_ms)
    again = await h.claim_one()
    assert not again.cancel_requested
    await h.settle(h.retry(again))
    assert (await h.get()).state is State.WAITING


async def test_a_job_that_has_not_ended_cannot_be_rerun(h: Harness) -> None:
    await h.claimed(h.job("running"))
    await h.add(h.job("waiting"))
    before = await h.store.get(["running", "waiting"])
    assert await h.store.rerun(["running", "waiting"], now_ms=h.now) == [False, False]
    assert await h.store.get(["running", "waiting"]) == before


async def test_repeating_a_rerun_changes_nothing_more(h: Harness) -> None:
    await h.ended(State.DEAD)
    await h.store.rerun(["job"], now_ms=h.now)
    before = await h.get()
    assert await h.store.rerun(["job"], now_ms=h.now) == [False]
    assert await h.get() == before
    assert await h.counts() == {"waiting": 1}


async def test_rerun_answers_in_the_order_of_the_question(h: Harness) -> None:
    await h.ended(State.DONE, "done")
    await h.ended(State.DEAD, "dead")
    await h.add(h.job("waiting"))
    ids = ["dead", "no such", "waiting", "done"]
    assert await h.store.rerun(ids, now_ms=h.now) == [True, False, False, True]
    assert await h.counts() == {"waiting": 3}


async def test_a_job_of_a_paused_queue_can_be_rerun_and_stays_put(h: Harness) -> None:
    await h.ended(State.DONE)
    await h.store.pause("default", True)
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    await h.pass_time(h.step_ms)
    assert await h.claim() == []


# --- Delete


@pytest.mark.parametrize("state", ENDED)
async def test_an_ended_job_is_forgotten_at_once(h: Harness, state: State) -> None:
    await h.ended(state)
    assert await h.store.delete(["job"]) == [True]
    assert await h.store.get(["job"]) == [None]
    assert await h.queues() == []


async def test_a_job_that_has_not_ended_cannot_be_deleted(h: Harness) -> None:
    [held] = await h.claimed(h.job("running"))
    await h.add(h.job("waiting", delay_ms=3_600_000))
    assert await h.store.delete(["running", "waiting"]) == [False, False]
    assert await h.counts() == {"running": 1, "waiting": 1}
    assert await h.settle(h.done(held))


async def test_a_lost_job_cannot_be_deleted(h: Harness) -> None:
    await h.claimed(h.job())
    await h.lose_leases()
    assert await h.store.delete(["job"]) == [False]
    assert await h.claim_ids(worker="bob") == ["job"]


async def test_repeating_a_delete_changes_nothing_more(h: Harness) -> None:
    await h.ended(State.DONE, "a")
    await h.ended(State.DONE, "b")
    assert await h.store.delete(["a"]) == [True]
    assert await h.store.delete(["a"]) == [False]
    assert await h.counts() == {"done": 1}


async def test_delete_answers_in_the_order_of_the_question(h: Harness) -> None:
    await h.ended(State.DONE, "done")
    await h.ended(State.CANCELLED, "cancelled")
    await h.add(h.job("waiting"))
    ids = ["cancelled", "waiting", "no such", "done"]
    assert await h.store.delete(ids) == [True, False, False, True]
    assert await h.counts() == {"waiting": 1}


async def test_a_deleted_job_is_neither_cancelled_nor_rerun_nor_settled(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.done(held))
    await h.store.delete(["job"])
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.UNKNOWN]
    assert await h.store.rerun(["job"], now_ms=h.now) == [False]
    await h.settle(h.settlement(Outcome.DEAD, held))
    assert await h.store.get(["job"]) == [None]
    assert await h.queues() == []


# --- Prune


async def ended_at_different_times(h: Harness, count: int) -> list[int]:
    """Jobs "0", "1", ... that ended one step after the other, and when each did."""
    moments = []
    for n in range(count):
        job = await h.ended(State.DONE, f"{n}")
        assert job.ended_ms is not None
        moments.append(job.ended_ms)
        await h.pass_time(h.step_ms)
    return moments


async def ids(h: Harness, *names: str) -> list[str]:
    """Which of these jobs the store still has."""
    return [job.id for job in await h.store.get(names) if job]


async def test_prune_forgets_what_ended_before_a_moment(h: Harness) -> None:
    await ended_at_different_times(h, 3)
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=100) == 3
    assert await h.queues() == []
    assert await ids(h, "0", "1", "2") == []


async def test_prune_never_forgets_what_ended_at_that_moment_or_later(h: Harness) -> None:
    moments = await ended_at_different_times(h, 4)
    pruned = await h.store.prune([State.DONE], before_ms=moments[2], limit=100)
    assert pruned <= 2
    assert (await ids(h, "0", "1", "2", "3"))[-2:] == ["2", "3"]
    assert await h.counts() == {"done": 4 - pruned}


async def test_a_job_that_ended_by_a_clock_that_is_ahead_keeps_no_other_from_being_pruned(
    h: Harness,
) -> None:
    jobs = h.jobs(5)
    held = await h.claimed(*jobs)
    for n, each in enumerate(held):
        ended_ms = h.now + (3_600_000 if n in (0, 2) else 0)
        assert await h.settle(life.done(each, started_ms=h.now, ended_ms=ended_ms))
    await h.pass_time(h.step_ms)
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=100) == 3
    left = [job and job.id for job in await h.store.get([job.id for job in jobs])]
    assert left == [jobs[0].id, None, jobs[2].id, None, None]
    assert await h.counts() == {"done": 2}


async def test_prune_forgets_no_more_than_its_limit(h: Harness) -> None:
    await ended_at_different_times(h, 5)
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=2) == 2
    assert await h.counts() == {"done": 3}
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=2) == 2
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=2) == 1
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=2) == 0


async def test_the_limit_of_a_prune_is_for_all_queues_and_states_together(h: Harness) -> None:
    for state in ENDED:
        for queue in ("a", "b"):
            await h.ended(state, f"{state} {queue}", queue=queue)
    await h.pass_time(h.step_ms)
    assert await h.store.prune(ENDED, before_ms=h.now, limit=4) == 4
    assert await h.store.prune(ENDED, before_ms=h.now, limit=4) == 2


async def test_a_limit_of_none_forgets_none(h: Harness) -> None:
    await ended_at_different_times(h, 1)
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=0) == 0
    assert await h.counts() == {"done": 1}


@pytest.mark.parametrize("state", ENDED)
async def test_prune_forgets_only_the_states_it_is_given(h: Harness, state: State) -> None:
    for each in ENDED:
        await h.ended(each, each)
    await h.pass_time(h.step_ms)
    assert await h.store.prune([state], before_ms=h.now, limit=100) == 1
    assert await h.store.get([state]) == [None]
    assert await h.counts() == {other: 1 for other in ENDED if other is not state}


async def test_pruning_no_states_forgets_nothing(h: Harness) -> None:
    await ended_at_different_times(h, 1)
    assert await h.store.prune([], before_ms=h.now, limit=100) == 0


async def test_jobs_that_wait_or_run_are_never_pruned(h: Harness) -> None:
    [held] = await h.claimed(h.job("running"))
    await h.claimed(h.job("lost"))
    await h.add(h.job("waiting"))
    far = h.now + 3_600_000
    assert await h.store.prune(list(State), before_ms=far, limit=100) == 0
    assert await h.counts() == {"running": 2, "waiting": 1}
    assert await h.settle(h.done(held))


async def test_a_rerun_job_is_not_pruned_for_its_former_end(h: Harness) -> None:
    await h.ended(State.DEAD)
    await h.store.rerun(["job"], now_ms=h.now)
    await h.pass_time(h.step_ms)
    assert await h.store.prune(ENDED, before_ms=h.now, limit=100) == 0
    assert await h.claim_ids() == ["job"]


async def test_a_thousand_jobs_are_pruned_at_once(h: Harness) -> None:
    jobs = h.jobs(1000, delay_ms=3_600_000)
    await h.add(*jobs)
    await h.store.cancel([job.id for job in jobs], now_ms=h.now)
    await h.pass_time(h.step_ms)
    assert await h.store.prune([State.CANCELLED], before_ms=h.now, limit=5000) == 1000
    assert await h.queues() == []
