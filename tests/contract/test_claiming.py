"""claim: each job to one worker, none too soon, the best first."""

from __future__ import annotations

import pytest

from stores import Harness, unfenced
from tickwheel.job import HISTORY_LIMIT, Outcome, Priority, State

# --- What a claim hands out


async def test_a_due_job_is_handed_out(h: Harness) -> None:
    await h.add(h.job())
    job = await h.claim_one(worker="ann")
    assert (job.id, job.state, job.worker, job.attempt) == ("job", State.RUNNING, "ann", 1)


async def test_a_claimed_job_is_leased_for_as_long_as_asked(h: Harness) -> None:
    await h.add(h.job())
    job = await h.claim_one()
    assert h.near(job.lease_until_ms, h.now + h.lease_ms)


async def test_a_claim_hands_out_the_job_as_the_store_has_it(h: Harness) -> None:
    added = h.job(queue="orders", payload='{"a": 1}', priority=2)
    await h.add(added)
    job = await h.claim_one(queues=["orders"])
    assert unfenced(job) == unfenced(await h.get())
    assert (job.payload, job.priority, job.due_ms) == ('{"a": 1}', 2, added.due_ms)


async def test_a_claimed_job_is_not_handed_out_again(h: Harness) -> None:
    await h.claimed(h.job())
    assert await h.claim(worker="bob") == []


async def test_a_claim_takes_no_more_than_its_limit(h: Harness) -> None:
    await h.add(*h.jobs(5))
    assert len(await h.claim(2)) == 2
    assert await h.counts() == {"waiting": 3, "running": 2}
    assert len(await h.claim(10)) == 3
    assert await h.claim(10) == []


async def test_a_claim_of_none_takes_none(h: Harness) -> None:
    await h.add(h.job())
    assert await h.claim(0) == []
    assert await h.counts() == {"waiting": 1}


@pytest.mark.parametrize("state", [State.DONE, State.DEAD, State.CANCELLED])
async def test_an_ended_job_is_never_handed_out(h: Harness, state: State) -> None:
    await h.ended(state)
    await h.lose_leases()
    assert await h.claim() == []


async def test_a_thousand_jobs_are_handed_out_and_settled_at_once(h: Harness) -> None:
    await h.add(*h.jobs(1000))
    held = await h.claim(1000)
    assert len({job.id for job in held}) == 1000
    extended = await h.store.extend(held, now_ms=h.now, lease_ms=h.lease_ms)
    assert [job and job.id for job in extended] == [job.id for job in held]
    settlements = [h.done(job) for job in extended if job]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * 1000
    assert await h.counts() == {"done": 1000}


async def test_what_a_claim_leaves_in_other_queues_still_counts_as_waiting(h: Harness) -> None:
    queues = ["one", "two", "three"]
    await h.add(*(h.job(f"{queue}-{n}", queue=queue) for queue in queues for n in range(2)))
    [held] = await h.claim(1, queues=queues)
    for queue in queues:
        counts = {"waiting": 1, "running": 1} if queue == held.queue else {"waiting": 2}
        assert await h.counts(queue) == counts


# --- Once more, after the reply was lost


async def test_a_claim_that_is_repeated_gives_what_it_took(h: Harness) -> None:
    await h.add(*h.jobs(5))
    first = await h.claim(3, call=7)
    await h.pass_time(h.lease_ms // 2)
    second = await h.claim(3, call=7, again=True)
    assert {job.id for job in second} == {job.id for job in first}
    for job in second:
        assert (job.attempt, job.takeovers, job.history) == (1, 0, ())
        assert h.near(job.lease_until_ms, h.now + h.lease_ms)
    assert await h.counts() == {"waiting": 2, "running": 3}
    assert await h.store.settle([h.done(job) for job in second], now_ms=h.now) == [True] * 3


async def test_a_claim_that_is_repeated_though_it_took_nothing_takes_what_there_is(
    h: Harness,
) -> None:
    assert await h.claim(3, call=7) == []
    await h.add(*h.jobs(2))
    assert len(await h.claim(3, call=7, again=True)) == 2


async def test_a_claim_that_is_repeated_gives_nothing_that_has_gone_on(h: Harness) -> None:
    await h.add(*h.jobs(3))
    settled, kept, gone = await h.claim(3, call=7)
    assert await h.settle(h.done(settled))
    assert await h.settle(h.settlement(Outcome.RELEASE, gone))
    [other] = await h.claim(1, worker="bob", call=8)
    assert other.id == gone.id
    [again] = await h.claim(3, call=7, again=True)
    assert again.id == kept.id


async def test_a_claim_that_is_repeated_after_its_lease_is_a_new_one(h: Harness) -> None:
    await h.add(h.job())
    await h.claim(call=7)
    await h.lose_leases()
    [second] = await h.claim(call=7, again=True)
    assert (second.attempt, second.takeovers) == (2, 1)


async def test_a_job_that_was_asked_to_stop_says_so_when_its_claim_is_repeated(
    h: Harness,
) -> None:
    await h.add(h.job())
    await h.claim(call=7)
    await h.store.cancel(["job"], now_ms=h.now)
    [again] = await h.claim(call=7, again=True)
    assert again.cancel_requested


# --- From which queues


async def test_a_claim_leaves_other_queues_alone(h: Harness) -> None:
    await h.add(h.job("mine", queue="mine"), h.job("other", queue="other"))
    assert await h.claim_ids(queues=["mine"]) == ["mine"]
    assert await h.counts("other") == {"waiting": 1}


async def test_a_claim_takes_from_all_its_queues(h: Harness) -> None:
    await h.add(*(h.job(name, queue=name) for name in "abcd"))
    assert sorted(await h.claim_ids(queues=["d", "a", "b"])) == ["a", "b", "d"]


async def test_a_queue_named_twice_is_one_queue(h: Harness) -> None:
    await h.add(*h.jobs(3))
    assert len(await h.claim(2, queues=["default", "default"])) == 2


async def test_an_unknown_queue_has_nothing(h: Harness) -> None:
    await h.add(h.job())
    assert await h.claim(queues=["unknown"]) == []
    assert await h.claim(queues=[]) == []
    assert await h.claim_ids(queues=["unknown", "default"]) == ["job"]


# --- When


async def test_a_job_is_handed_out_ahead_of_its_due_time(h: Harness) -> None:
    await h.add(h.job(delay_ms=h.store.ahead_ms))
    assert await h.claim_ids() == ["job"]


async def test_a_job_is_not_handed_out_earlier_than_that(h: Harness) -> None:
    await h.add(h.job(delay_ms=h.store.ahead_ms + h.step_ms))
    assert await h.claim() == []
    await h.pass_time(h.step_ms)
    assert await h.claim_ids() == ["job"]


async def test_a_retry_is_not_handed_out_earlier_either(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.retry(held, delay_ms=h.store.ahead_ms + h.step_ms))
    assert await h.claim() == []
    await h.pass_time(h.step_ms)
    assert await h.claim_ids() == ["job"]


async def test_a_caller_whose_clock_is_ahead_makes_no_job_early_for_others(h: Harness) -> None:
    await h.add(h.job(delay_ms=h.store.ahead_ms + h.lease_ms))
    in_an_hour = h.now + 3_600_000
    await h.store.claim(
        ["another"], worker="fast", limit=10, now_ms=in_an_hour, lease_ms=h.lease_ms
    )
    assert await h.claim(worker="right") == []


async def test_a_caller_whose_clock_is_ahead_ends_no_lease_for_others(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    in_an_hour = h.now + 3_600_000
    await h.store.claim(
        ["another"], worker="fast", limit=10, now_ms=in_an_hour, lease_ms=h.lease_ms
    )
    assert await h.claim(worker="right") == []
    assert await h.extend(held) is not None
    assert await h.settle(h.done(held))


async def test_a_caller_whose_clock_is_ahead_ends_no_asked_job_of_other_queues(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    in_an_hour = h.now + 3_600_000
    await h.store.claim(
        ["another"], worker="fast", limit=10, now_ms=in_an_hour, lease_ms=h.lease_ms
    )
    assert (await h.get()).state is State.RUNNING
    assert await h.settle(h.done(held))


# --- In which order


async def test_jobs_are_handed_out_in_the_order_in_which_they_fall_due(h: Harness) -> None:
    ahead, step = h.store.ahead_ms, h.step_ms
    await h.add(*(h.job(f"{n}", delay_ms=ahead + n * step) for n in (3, 1, 5, 2, 4)))
    await h.pass_time(5 * step)
    assert await h.claim_ids() == ["1", "2", "3", "4", "5"]


async def test_the_order_holds_across_queues(h: Harness) -> None:
    ahead, step = h.store.ahead_ms, h.step_ms
    await h.add(
        *(h.job(f"{n}", delay_ms=ahead + n * step, queue="ab"[n % 2]) for n in (3, 1, 4, 2))
    )
    await h.pass_time(4 * step)
    assert await h.claim_ids(queues=["a", "b"]) == ["1", "2", "3", "4"]


async def test_the_order_holds_over_several_claims(h: Harness) -> None:
    ahead, step = h.store.ahead_ms, h.step_ms
    await h.add(*(h.job(f"{n}", delay_ms=ahead + n * step) for n in (4, 2, 1, 3)))
    await h.pass_time(4 * step)
    assert [await h.claim_ids(1) for _ in range(4)] == [["1"], ["2"], ["3"], ["4"]]


async def test_higher_priority_goes_first(h: Harness) -> None:
    await h.add(*(h.job(priority.name, priority=priority) for priority in Priority))
    assert await h.claim_ids() == ["URGENT", "HIGH", "NORMAL", "LOW"]


async def test_priority_goes_before_due_order(h: Harness) -> None:
    ahead, step = h.store.ahead_ms, h.step_ms
    await h.add(
        h.job("low, first due", delay_ms=ahead + step, priority=Priority.LOW),
        h.job("high, due last", delay_ms=ahead + 3 * step, priority=Priority.HIGH),
        h.job("high, due before", delay_ms=ahead + 2 * step, priority=Priority.HIGH),
    )
    await h.pass_time(3 * step)
    assert await h.claim_ids(1) == ["high, due before"]
    assert await h.claim_ids(2) == ["high, due last", "low, first due"]


async def test_priority_goes_before_queue_order(h: Harness) -> None:
    await h.add(
        h.job("normal", queue="first"), h.job("urgent", queue="second", priority=Priority.URGENT)
    )
    assert await h.claim_ids(1, queues=["first", "second"]) == ["urgent"]


async def test_a_job_of_high_priority_waits_for_its_time_all_the_same(h: Harness) -> None:
    later = h.store.ahead_ms + h.lease_ms
    await h.add(h.job("urgent", priority=Priority.URGENT, delay_ms=later), h.job("low", priority=0))
    assert await h.claim_ids() == ["low"]


async def test_a_lost_job_keeps_its_priority(h: Harness) -> None:
    await h.claimed(h.job("urgent", priority=Priority.URGENT))
    await h.lose_leases()
    await h.add(h.job("high", priority=Priority.HIGH), h.job("low", priority=Priority.LOW))
    assert await h.claim_ids(worker="bob") == ["urgent", "high", "low"]


async def test_of_lost_jobs_the_highest_priority_is_first_and_not_the_first_lost(
    h: Harness,
) -> None:
    await h.claimed(h.job("low", priority=0))
    await h.pass_time(h.step_ms)
    await h.claimed(h.job("high", priority=2))
    await h.lose_leases()
    assert await h.claim_ids(1, worker="bob") == ["high"]
    assert await h.claim_ids(1, worker="bob") == ["low"]


async def test_a_lost_job_comes_after_what_could_be_claimed_before_it(h: Harness) -> None:
    await h.claimed(h.job("lost"))
    due_before_the_lease_ends = h.store.ahead_ms + h.lease_ms - h.step_ms
    await h.add(h.job("waiting", delay_ms=due_before_the_lease_ends))
    await h.lose_leases()
    assert await h.claim_ids(1, worker="bob") == ["waiting"]
    assert await h.claim_ids(1, worker="bob") == ["lost"]


async def test_a_lost_job_comes_before_what_could_be_claimed_after_it(h: Harness) -> None:
    await h.claimed(h.job("lost"))
    due_after_the_lease_ends = h.store.ahead_ms + h.lease_ms + h.step_ms
    await h.add(h.job("waiting", delay_ms=due_after_the_lease_ends))
    await h.pass_time(h.lease_ms + 2 * h.step_ms)
    assert await h.claim_ids(worker="bob") == ["lost", "waiting"]


# --- Takeovers


async def test_a_job_is_not_taken_over_before_its_lease_has_run_out(h: Harness) -> None:
    await h.claimed(h.job())
    await h.pass_time(h.lease_ms - h.step_ms)
    assert await h.claim(worker="bob") == []


async def test_a_job_whose_lease_has_run_out_is_taken_over(h: Harness) -> None:
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    job = await h.claim_one(worker="bob")
    assert (job.worker, job.state, job.attempt) == ("bob", State.RUNNING, lost.attempt + 1)
    assert h.near(job.lease_until_ms, h.now + h.lease_ms)
    assert await h.counts() == {"running": 1}


async def test_a_worker_may_take_over_from_itself(h: Harness) -> None:
    await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    job = await h.claim_one(worker="ann")
    assert (job.attempt, job.takeovers) == (2, 1)


async def test_a_takeover_is_counted_and_is_not_a_failure(h: Harness) -> None:
    await h.claimed(h.job())
    for takeovers in (1, 2):
        await h.lose_leases()
        job = await h.claim_one(worker="bob")
        assert (job.takeovers, job.failures, job.attempt) == (takeovers, 0, takeovers + 1)


async def test_the_first_claim_is_no_takeover(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert (held.takeovers, held.history) == (0, ())
    await h.settle(h.retry(held))
    assert (await h.claim_one()).takeovers == 0


async def test_history_shows_the_run_that_was_lost(h: Harness) -> None:
    [lost] = await h.claimed(h.job(), worker="ann")
    await h.lose_leases()
    job = await h.claim_one(worker="bob")
    [run] = job.history
    assert (run.outcome, run.worker, run.attempt) == (Outcome.LOST, "ann", 1)
    assert (run.due_ms, run.started_ms) == (lost.due_ms, None)
    assert h.near(run.ended_ms, lost.lease_until_ms or 0)
    assert run.error is not None and "lease" in run.error
    assert unfenced(await h.get()) == unfenced(job)


async def test_history_keeps_the_last_runs_and_the_counters_go_on(h: Harness) -> None:
    await h.add(h.job())
    runs = HISTORY_LIMIT + 5
    for _ in range(runs):
        assert await h.settle(h.retry(await h.claim_one()))
    job = await h.get()
    assert (job.attempt, job.failures) == (runs, runs)
    assert [run.attempt for run in job.history] == list(range(6, runs + 1))


# --- Attempt and fence


async def test_every_claim_has_an_attempt_one_higher_and_a_fence_of_its_own(h: Harness) -> None:
    [first] = await h.claimed(h.job())
    await h.settle(h.retry(first))
    second = await h.claim_one()
    await h.lose_leases()
    third = await h.claim_one()
    await h.settle(h.done(third))
    await h.store.rerun(["job"], now_ms=h.now)
    await h.pass_time(h.step_ms)
    fourth = await h.claim_one()
    claims = [first, second, third, fourth]
    assert [job.attempt for job in claims] == [1, 2, 3, 4]
    assert len({job.fence for job in claims}) == 4


# --- Pause


async def test_a_paused_queue_hands_out_nothing(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    assert await h.claim() == []
    assert await h.counts() == {"waiting": 1}


async def test_a_paused_queue_hands_out_no_lost_job_either(h: Harness) -> None:
    await h.claimed(h.job())
    await h.store.pause("default", True)
    await h.lose_leases()
    assert await h.claim(worker="bob") == []
    await h.store.pause("default", False)
    assert (await h.claim_one(worker="bob")).takeovers == 1


async def test_a_paused_queue_hands_out_no_job_of_a_priority_that_is_new(h: Harness) -> None:
    await h.add(h.job("normal"))
    await h.store.pause("default", True)
    await h.add(h.job("urgent", priority=3))
    assert await h.claim() == []
    await h.store.pause("default", False)
    assert await h.claim_ids() == ["urgent", "normal"]


async def test_a_paused_queue_holds_up_no_other(h: Harness) -> None:
    await h.add(h.job("held", queue="held", priority=3), h.job("free", queue="free"))
    await h.store.pause("held", True)
    assert await h.claim_ids(queues=["held", "free"]) == ["free"]


async def test_jobs_of_a_paused_queue_become_due_all_the_same(h: Harness) -> None:
    ahead, step = h.store.ahead_ms, h.step_ms
    await h.add(*(h.job(f"{n}", delay_ms=ahead + n * step) for n in (2, 1)))
    await h.store.pause("default", True)
    await h.pass_time(2 * step)
    assert await h.claim() == []
    await h.store.pause("default", False)
    await h.pass_time(step)
    assert await h.claim_ids() == ["1", "2"]


async def test_a_job_claimed_before_the_pause_can_be_extended_and_settled(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.pause("default", True)
    extended = await h.extend(held)
    assert extended is not None
    assert await h.settle(h.done(extended))
