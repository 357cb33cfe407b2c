"""The decisions of a job's life that the contract suite sees only through a store."""

from __future__ import annotations

from tickwheel import job as life
from tickwheel.job import CancelOutcome, Job, State

NOW = 1_800_000_000_000


def new(id: str = "job", payload: str = "{}") -> Job:
    return Job(id=id, task="task", payload=payload, due_ms=NOW, created_ms=NOW)


def running(job: Job | None = None, *, fence: int = 7) -> Job:
    return life.claimed(job or new(), worker="ann", fence=fence, now_ms=NOW, lease_ms=1000)


def test_of_equal_ids_the_first_is_added() -> None:
    first, second, other = new(payload="1"), new(payload="2"), new("other")
    assert life.first_by_id([first, second, other]) == {"job": first, "other": other}
    assert life.which_added([first, second, other], ["job"]) == [True, False, False]


def test_a_job_can_be_claimed_a_little_before_it_is_due_or_when_its_lease_has_run_out() -> None:
    assert life.claimable_ms(new(), ahead_ms=100) == NOW - 100
    assert life.claimable_ms(running(), ahead_ms=100) == NOW + 1000
    _, ended = life.cancel(new(), now_ms=NOW)
    assert life.claimable_ms(ended, ahead_ms=100) is None


def test_a_holder_holds_with_its_fence_and_until_its_lease_runs_out() -> None:
    mine, other = running(fence=7), running(fence=8)
    assert life.holds(mine, mine, now_ms=NOW + 999)
    assert not life.holds(mine, mine, now_ms=NOW + 1000)
    assert not life.holds(mine, other, now_ms=NOW)
    assert not life.holds(mine, None, now_ms=NOW)


def test_a_cancel_that_changes_nothing_leaves_the_same_object() -> None:
    outcome, asked = life.cancel(running(), now_ms=NOW)
    assert (outcome, asked.state) == (CancelOutcome.REQUESTED, State.RUNNING)
    again, same = life.cancel(asked, now_ms=NOW)
    assert again is CancelOutcome.REQUESTED and same is asked
    ended = life.cancelled(new(), now_ms=NOW)
    too_late, same = life.cancel(ended, now_ms=NOW)
    assert too_late is CancelOutcome.TOO_LATE and same is ended


def test_a_store_may_know_better_than_the_lease_that_a_job_is_lost() -> None:
    outcome, job = life.cancel(running(), now_ms=NOW, held_now=False)
    assert (outcome, job.state) == (CancelOutcome.CANCELLED, State.CANCELLED)


def test_a_lost_job_that_was_asked_to_stop_is_cancelled_by_the_next_claim() -> None:
    asked = life.as_held(running(), cancel_requested=True)
    after = life.claimed(asked, worker="bob", fence=8, now_ms=NOW + 2000, lease_ms=1000)
    assert (after.state, after.ended_ms, after.attempt) == (State.CANCELLED, NOW + 2000, 1)
    assert [run.worker for run in after.history] == ["ann"]


def test_both_outcomes_of_a_settlement_are_one_unless_the_job_would_wait_again() -> None:
    held = running()
    plain, stopped = life.settled_either_way(life.done(held, started_ms=NOW, ended_ms=NOW))
    assert plain is stopped and plain.state is State.DONE
    plain, stopped = life.settled_either_way(life.release(held, ended_ms=NOW))
    assert (plain.state, stopped.state) == (State.WAITING, State.CANCELLED)
    assert not plain.cancel_requested and not stopped.cancel_requested


def test_a_settle_sees_the_cancel_request_that_only_the_store_knows_of() -> None:
    held = running()
    claims = {held.id: life.as_held(held, cancel_requested=True)}
    answers, changes = life.settle([life.release(held, ended_ms=NOW)], claims, now_ms=NOW)
    assert answers == [True]
    assert changes["job"].state is State.CANCELLED
