"""put: what becomes of the job that has the id, and that no update is lost."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from stores import Harness
from tickwheel.changes import IfExists, Put
from tickwheel.ids import new_fence
from tickwheel.job import ENDED, CancelOutcome, Job, Outcome, PutOutcome, State
from tickwheel.store import Ask, Query

HOUR = 3_600_000
OUTCOMES = (
    *(Outcome.DONE, Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE, Outcome.PARK),
    *(Outcome.DEAD, Outcome.EXPIRE),
)


def asks_for(job: Job) -> dict[str, object]:
    """What the caller of a job asked for."""
    names = ("id", "task", "payload", "queue", "priority", "due_ms", "created_ms", "retries")
    more = ("timeout_ms", "expires_ms", "meta")
    return {name: getattr(job, name) for name in (*names, *more)}


def other(h: Harness, *, delay_ms: int = 2 * HOUR, queue: str = "other") -> Job:
    """A job with the same id that differs in all that a caller can choose."""
    return Job(
        id="job",
        task="another",
        payload='{"new": true}',
        queue=queue,
        priority=3,
        due_ms=h.now + delay_ms,
        created_ms=h.now + 1,
        retries=7,
        timeout_ms=1500,
        expires_ms=h.now + delay_ms + HOUR,
        meta={"customer": "2"},
    )


# --- Under a free id


@pytest.mark.parametrize("if_exists", IfExists)
async def test_under_a_free_id_the_job_is_added(h: Harness, if_exists: IfExists) -> None:
    new = other(h)
    assert await h.put(new, if_exists) is PutOutcome.ADDED
    job = await h.get()
    assert (job.state, job.attempt, job.history) == (State.WAITING, 0, ())
    assert asks_for(job) == asks_for(new)
    assert await h.all_counts() == {"other": {"waiting": 1}}


async def test_a_job_that_was_put_runs_as_any_other(h: Harness) -> None:
    await h.put(h.job(payload="1"))
    held = await h.claim_one()
    assert held.payload == "1"
    extended = await h.extend(held)
    assert extended is not None
    assert await h.settle(h.done(extended))
    assert (await h.get()).state is State.DONE


async def test_putting_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.put([], now_ms=h.now) == []
    assert await h.queues() == []


# --- Keep and renew


@pytest.mark.parametrize("if_exists", ["keep", "renew"])
async def test_a_waiting_job_is_kept(h: Harness, if_exists: str) -> None:
    await h.add(h.job(delay_ms=HOUR))
    before = await h.get()
    assert await h.put(other(h), if_exists) is PutOutcome.KEPT
    assert await h.get() == before
    assert await h.all_counts() == {"default": {"waiting": 1}}


@pytest.mark.parametrize("if_exists", ["keep", "renew"])
async def test_a_running_job_is_kept(h: Harness, if_exists: str) -> None:
    [held] = await h.claimed(h.job())
    assert await h.put(other(h), if_exists) is PutOutcome.KEPT
    assert await h.settle(h.done(held))
    assert (await h.get()).state is State.DONE


@pytest.mark.parametrize("state", ENDED)
async def test_a_job_that_has_ended_is_kept_by_keep(h: Harness, state: State) -> None:
    before = await h.ended(state)
    assert await h.put(other(h), "keep") is PutOutcome.KEPT
    assert await h.get() == before


@pytest.mark.parametrize("if_exists", ["renew", "replace"])
@pytest.mark.parametrize("state", ENDED)
async def test_a_job_that_has_ended_makes_way(h: Harness, state: State, if_exists: str) -> None:
    old = await h.ended(state)
    new = other(h)
    assert await h.put(new, if_exists) is PutOutcome.ADDED
    job = await h.get()
    assert asks_for(job) == asks_for(new)
    assert (job.state, job.failures, job.takeovers) == (State.WAITING, 0, 0)
    assert (job.ended_ms, job.error, job.traceback, job.result) == (None, None, None, None)
    assert job.attempt == old.attempt
    assert [run.outcome for run in job.history] == [run.outcome for run in old.history]
    assert await h.all_counts() == {"other": {"waiting": 1}}


async def test_a_renewed_job_runs_again_and_its_attempts_go_on(h: Harness) -> None:
    await h.ended(State.DONE)
    assert await h.put(h.job(payload="2"), "renew") is PutOutcome.ADDED
    [held] = await h.claim_soon()
    assert (held.payload, held.attempt) == ("2", 2)
    assert await h.settle(h.done(held))
    assert [run.attempt for run in (await h.get()).history] == [1, 2]


# --- Replace a waiting job


async def test_a_waiting_job_takes_all_that_is_new(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR, meta={"customer": "1"}))
    new = other(h)
    assert await h.put(new) is PutOutcome.REPLACED
    assert asks_for(await h.get()) == asks_for(new)
    assert await h.all_counts() == {"other": {"waiting": 1}}


async def test_a_job_that_was_put_off_is_not_handed_out(h: Harness) -> None:
    """It could have been claimed before: the store may have noted it as ready."""
    await h.add(h.job("a"), h.job("job"), h.job("b"))
    assert await h.put(h.job(delay_ms=HOUR)) is PutOutcome.REPLACED
    assert sorted(await h.claim_ids()) == ["a", "b"]


async def test_a_job_that_was_put_forward_is_handed_out(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR))
    assert await h.put(h.job(payload="now")) is PutOutcome.REPLACED
    [held] = await h.claim_soon()
    assert (held.payload, held.attempt) == ("now", 1)


async def test_a_ready_job_is_handed_out_as_it_is_now(h: Harness) -> None:
    await h.add(h.job(payload="old"))
    assert await h.put(h.job(payload="new")) is PutOutcome.REPLACED
    [held] = await h.claim_soon()
    assert held.payload == "new"
    assert await h.settle(h.done(held))
    assert await h.counts() == {"done": 1}


async def test_a_ready_job_of_another_queue_is_handed_out_there_and_only_there(
    h: Harness,
) -> None:
    await h.add(h.job(payload="old"))
    assert await h.put(h.job(payload="new", queue="other", priority=2)) is PutOutcome.REPLACED
    [held] = await h.claim_soon(queues=["default", "other"])
    assert (held.payload, held.queue) == ("new", "other")
    assert await h.claim(queues=["default", "other"]) == []
    assert await h.all_counts() == {"other": {"running": 1}}


async def test_a_job_that_waits_for_its_retry_has_all_retries_again(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.settle(h.retry(held, delay_ms=HOUR))
    assert await h.put(h.job(payload="new", delay_ms=HOUR)) is PutOutcome.REPLACED
    job = await h.get()
    assert (job.payload, job.failures, job.error, job.attempt) == ("new", 0, None, 1)
    assert [run.outcome for run in job.history] == [Outcome.RETRY]


async def test_a_parked_job_is_replaced(h: Harness) -> None:
    [held] = await h.claimed(h.job(task="unknown"))
    await h.settle(h.settlement(Outcome.PARK, held))
    assert await h.put(h.job(payload="new", task="unknown")) is PutOutcome.REPLACED
    assert not (await h.get()).parked
    assert await h.counts() == {"waiting": 1}
    [again] = await h.claim_soon()
    assert again.payload == "new"
    assert await h.store.parked() == []


async def test_a_job_of_a_paused_queue_is_replaced(h: Harness) -> None:
    await h.add(h.job())
    await h.store.pause("default", True)
    assert await h.put(h.job(payload="new")) is PutOutcome.REPLACED
    assert await h.claim() == []
    await h.store.pause("default", False)
    [held] = await h.claim_soon()
    assert held.payload == "new"


async def test_a_job_is_found_by_its_new_meta_only(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR, meta={"customer": "1", "kind": "x"}))
    await h.put(h.job(delay_ms=HOUR, meta={"customer": "2"}))

    async def found(name: str, value: str) -> list[str]:
        page = await h.store.find(Query(meta=(name, value)))
        return [job.id for job in page.jobs]

    assert await found("customer", "2") == ["job"]
    assert await found("customer", "1") == await found("kind", "x") == []
    await h.put(h.job(delay_ms=HOUR))
    assert await found("customer", "2") == []


async def test_a_replaced_job_can_be_cancelled_rerun_and_deleted(h: Harness) -> None:
    await h.add(h.job(delay_ms=HOUR))
    await h.put(h.job(queue="other", meta={"a": "b"}))
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.CANCELLED]
    assert await h.all_counts() == {"other": {"cancelled": 1}}
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    [held] = await h.claim_soon(queues=["other"])
    assert await h.settle(h.done(held))
    assert await h.store.delete(["job"]) == [True]
    assert await h.all_counts() == {}


# --- Replace a running job


@pytest.mark.parametrize("outcome", OUTCOMES)
async def test_a_running_job_runs_once_more_however_it_ends(h: Harness, outcome: Outcome) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    new = other(h)
    assert await h.put(new) is PutOutcome.FOLLOWS
    running = await h.get()
    assert (running.state, running.payload, running.worker) == (State.RUNNING, "old", "ann")
    assert await h.all_counts() == {"default": {"running": 1}}
    assert await h.settle(h.settlement(outcome, held, traceback="at x"))
    job = await h.get()
    assert asks_for(job) == asks_for(new)
    assert (job.state, job.parked, job.failures, job.attempt) == (State.WAITING, False, 0, 1)
    assert (job.error, job.traceback, job.result, job.lease_until_ms) == (None, None, None, None)
    assert [run.outcome for run in job.history] == [outcome]
    assert await h.all_counts() == {"other": {"waiting": 1}}


async def test_what_follows_is_handed_out_when_it_is_due(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    await h.put(h.job(payload="new"))
    assert await h.claim(worker="bob") == []
    assert await h.settle(h.done(held))
    [follower] = await h.claim_soon(worker="bob")
    assert (follower.payload, follower.attempt) == ("new", 2)
    assert await h.settle(h.done(follower))
    assert (await h.get()).state is State.DONE


async def test_of_several_that_follow_the_last_one_runs(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="0"))
    for n in range(1, 4):
        assert await h.put(h.job(payload=str(n), delay_ms=HOUR)) is PutOutcome.FOLLOWS
    assert await h.settle(h.done(held))
    assert (await h.get()).payload == "3"


async def test_a_running_job_that_has_a_follower_is_kept_by_renew(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="0"))
    await h.put(h.job(payload="1", delay_ms=HOUR))
    assert await h.put(h.job(payload="2", delay_ms=HOUR), "renew") is PutOutcome.KEPT
    await h.settle(h.done(held))
    assert (await h.get()).payload == "1"


async def test_its_holder_keeps_a_job_that_has_a_follower(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    await h.put(h.job(payload="new", delay_ms=HOUR))
    extended = await h.extend(held)
    assert extended is not None
    assert (extended.payload, extended.told, extended.cancel_requested) == ("old", True, False)
    again = await h.extend(extended)
    assert again is not None and again.told
    assert await h.settle(h.done(again))
    assert (await h.get()).payload == "new"


async def test_a_follower_comes_after_an_extend_too(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    extended = await h.extend(held)
    assert extended is not None
    assert await h.put(h.job(payload="new", delay_ms=HOUR)) is PutOutcome.FOLLOWS
    assert await h.settle(h.done(extended))
    assert (await h.get()).payload == "new"


async def test_repeating_the_settle_of_a_followed_job_changes_nothing_more(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.put(h.job(payload="new", delay_ms=HOUR))
    settlement = h.done(held)
    assert await h.settle(settlement)
    before = await h.get()
    assert await h.settle(settlement)
    assert await h.get() == before


async def test_one_that_follows_leaves_the_others_of_a_batch_alone(h: Harness) -> None:
    held = await h.claimed(h.job("a"), h.job("job"), h.job("b"))
    await h.put(h.job(payload="new", delay_ms=HOUR))
    answers = await h.store.settle([h.done(job) for job in held], now_ms=h.now)
    assert answers == [True, True, True]
    assert await h.counts() == {"done": 2, "waiting": 1}


async def test_the_progress_of_the_run_is_not_that_of_what_follows(h: Harness) -> None:
    from tickwheel.job import Progress

    [held] = await h.claimed(h.job())
    extended = await h.extend(msgspec.structs.replace(held, progress=Progress(0.5, "half")))
    assert extended is not None
    await h.put(h.job(delay_ms=HOUR))
    assert (await h.get()).progress == Progress(0.5, "half")
    assert await h.settle(h.done(extended))
    assert (await h.get()).progress is None


# --- Lost with its worker


async def test_the_follower_of_a_lost_job_takes_its_place(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    await h.put(h.job(payload="new"))
    await h.lose_leases()
    [job] = await h.claim(worker="bob") or await h.claim_soon(worker="bob")
    assert (job.payload, job.attempt, job.worker) == ("new", 2, "bob")
    assert [run.outcome for run in job.history] == [Outcome.LOST]
    assert not await h.settle(h.done(held))
    assert await h.settle(h.done(job))


async def test_the_follower_of_a_lost_job_waits_until_it_is_due(h: Harness) -> None:
    await h.claimed(h.job(payload="old"))
    await h.put(h.job(payload="new", delay_ms=HOUR, queue="other"))
    await h.lose_leases()
    assert await h.claim(worker="bob", queues=["default", "other"]) == []
    job = await h.get()
    assert (job.state, job.payload, job.queue) == (State.WAITING, "new", "other")
    assert await h.all_counts() == {"other": {"waiting": 1}}


async def test_a_job_whose_lease_has_run_out_is_replaced_at_once(h: Harness) -> None:
    [held] = await h.claimed(h.job(payload="old"))
    await h.lose_leases()
    assert await h.put(h.job(payload="new", delay_ms=HOUR)) is PutOutcome.REPLACED
    assert not await h.settle(h.done(held))
    assert await h.extend(held) is None
    assert await h.claim(worker="bob") == []
    job = await h.get()
    assert (job.state, job.payload) == (State.WAITING, "new")
    assert [run.outcome for run in job.history] == [Outcome.LOST]


# --- With a cancel


async def test_a_cancel_drops_what_follows(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.put(h.job(payload="new"))
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.REQUESTED]
    job = await h.get()
    assert job.cancel_requested and not job.told
    assert await h.settle(h.settlement(Outcome.RELEASE, held))
    assert (await h.get()).state is State.CANCELLED
    assert await h.counts() == {"cancelled": 1}


async def test_what_comes_after_a_cancel_follows_it(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.put(h.job(payload="new", delay_ms=HOUR)) is PutOutcome.FOLLOWS
    job = await h.get()
    assert job.cancel_requested and job.told
    extended = await h.extend(held)
    assert extended is not None and extended.cancel_requested and extended.told
    assert await h.settle(h.settlement(Outcome.RELEASE, extended))
    job = await h.get()
    assert (job.state, job.payload, job.cancel_requested) == (State.WAITING, "new", False)


# --- Telling the holder


async def test_the_holder_is_told_that_its_job_was_replaced(h: Harness) -> None:
    await h.claimed(h.job("job"), h.job("other"))
    await h.put(h.job(payload="new"))
    found = await h.store.asked("ann", now_ms=h.now, until_ms=h.now)
    assert found == {"job": Ask.PUT_BACK}
    assert await h.store.asked("bob", now_ms=h.now, until_ms=h.now) == {}


async def test_the_holder_is_told_at_once(h: Harness) -> None:
    await h.claimed(h.job())
    waiting = asyncio.create_task(h.store.asked("ann", now_ms=h.now, until_ms=h.now + 60_000))
    await asyncio.sleep(0.05)
    await h.put(h.job(payload="new"))
    async with asyncio.timeout(20):
        assert await waiting == {"job": Ask.PUT_BACK}


async def test_what_the_holder_knows_does_not_end_its_wait(h: Harness) -> None:
    await h.claimed(h.job())
    await h.put(h.job(payload="new"))
    known = {"job": Ask.PUT_BACK}
    waiting = asyncio.create_task(
        h.store.asked("ann", now_ms=h.now, until_ms=h.now + 60_000, known=known)
    )
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await h.store.cancel(["job"], now_ms=h.now)
    async with asyncio.timeout(20):
        assert await waiting == {"job": Ask.STOP}


async def test_nobody_is_told_of_a_job_once_it_is_settled(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    await h.put(h.job(payload="new", delay_ms=HOUR))
    await h.settle(h.done(held))
    assert await h.store.asked("ann", now_ms=h.now, until_ms=h.now) == {}


# --- Repeats


async def test_repeating_a_put_changes_nothing_more(h: Harness) -> None:
    assert await h.put(h.job(delay_ms=HOUR), request=1) is PutOutcome.ADDED
    before = await h.get()
    assert await h.put(h.job(delay_ms=HOUR), request=1) is PutOutcome.ADDED
    assert await h.get() == before
    assert await h.put(h.job(payload="2", delay_ms=HOUR), request=2) is PutOutcome.REPLACED
    before = await h.get()
    assert await h.put(h.job(payload="2", delay_ms=HOUR), request=2) is PutOutcome.REPLACED
    assert await h.get() == before


async def test_repeating_a_put_does_not_undo_that_of_another(h: Harness) -> None:
    await h.add(h.job(payload="0", delay_ms=HOUR))
    assert await h.put(h.job(payload="a", delay_ms=HOUR), request=1) is PutOutcome.REPLACED
    assert await h.put(h.job(payload="b", delay_ms=HOUR), request=2) is PutOutcome.REPLACED
    assert await h.put(h.job(payload="a", delay_ms=HOUR), request=1) is PutOutcome.REPLACED
    assert (await h.get()).payload == "b"


@pytest.mark.parametrize("if_exists", ["renew", "replace"])
async def test_repeating_a_put_whose_job_has_ended_does_not_run_it_again(
    h: Harness, if_exists: str
) -> None:
    assert await h.put(h.job(), if_exists, request=1) is PutOutcome.ADDED
    assert await h.settle(h.done(await h.claim_one()))
    assert await h.put(h.job(), if_exists, request=1) is PutOutcome.ADDED
    assert (await h.get()).state is State.DONE
    assert await h.put(h.job(payload="2"), if_exists, request=2) is PutOutcome.ADDED
    [held] = await h.claim_soon()
    assert await h.settle(h.done(held))
    assert await h.put(h.job(payload="2"), if_exists, request=2) is PutOutcome.ADDED
    assert (await h.get()).state is State.DONE


async def test_repeating_a_put_that_follows_runs_it_once(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    assert await h.settle(h.done(held))
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    [follower] = await h.claim_soon()
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    assert await h.settle(h.done(follower))
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    assert (await h.get()).state is State.DONE


async def test_repeating_a_put_that_a_cancel_dropped_does_not_bring_it_back(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    await h.store.cancel(["job"], now_ms=h.now)
    await h.settle(h.settlement(Outcome.RELEASE, held))
    assert await h.put(h.job(payload="new"), request=1) is PutOutcome.FOLLOWS
    assert (await h.get()).state is State.CANCELLED


# --- Batches


async def test_puts_of_one_batch_count_one_after_the_other(h: Harness) -> None:
    await h.add(h.job("b", delay_ms=HOUR))
    puts = [
        Put(job=h.job(id, payload=str(n), delay_ms=HOUR), if_exists=how, request=new_fence())
        for n, (id, how) in enumerate(
            [
                ("a", IfExists.RENEW),
                ("b", IfExists.RENEW),
                ("a", IfExists.REPLACE),
                ("b", IfExists.REPLACE),
                ("a", IfExists.KEEP),
            ]
        )
    ]
    answers = await h.store.put(puts, now_ms=h.now)
    assert answers == ["added", "kept", "replaced", "replaced", "kept"]
    assert [(await h.get(id)).payload for id in ("a", "b")] == ["2", "3"]
    assert await h.counts() == {"waiting": 2}


async def test_a_thousand_jobs_are_put_at_once(h: Harness) -> None:
    jobs = h.jobs(1000, delay_ms=HOUR)
    await h.add(*jobs[::2])
    puts = [Put(job=job, if_exists=IfExists.REPLACE, request=new_fence()) for job in jobs]
    assert await h.store.put(puts, now_ms=h.now) == ["replaced", "added"] * 500
    assert await h.counts() == {"waiting": 1000}


# --- Races


async def test_of_puts_at_once_none_is_lost_while_the_job_runs(h: Harness) -> None:
    """Each is either what was replaced or what ran: the last one written runs last."""
    [held] = await h.claimed(h.job(payload="0"))
    handles = [h.store, await h.new_handle(), await h.new_handle()]

    async def put(n: int) -> PutOutcome:
        ask = Put(
            job=h.job(payload=str(n), delay_ms=HOUR),
            if_exists=IfExists.REPLACE,
            request=new_fence(),
        )
        [answer] = await handles[n % 3].put([ask], now_ms=h.now)
        return answer

    async def settle() -> bool:
        return await h.settle(h.done(held))

    answers = await asyncio.gather(*(put(n) for n in range(1, 7)), settle())
    assert answers[-1] is True
    assert set(answers[:-1]) <= {PutOutcome.FOLLOWS, PutOutcome.REPLACED, PutOutcome.ADDED}
    job = await h.get()
    assert job.state is State.WAITING and job.payload in "123456"
    assert job.changes is not None and job.changes.count == 6


async def test_a_replace_and_a_claim_at_once_agree_on_what_runs(h: Harness) -> None:
    """If the old one runs, the new one follows."""
    for n in range(12):
        id = f"job-{n}"
        await h.add(h.job(id, payload="old"))
        second = await h.new_handle()
        ask = Put(
            job=h.job(id, payload="new", delay_ms=HOUR),
            if_exists=IfExists.REPLACE,
            request=new_fence(),
        )
        claiming = asyncio.create_task(h.claim(store=second, worker="bob"))
        [answer] = await h.store.put([ask], now_ms=h.now)
        claimed = [job for job in await claiming if job.id == id]
        if claimed:
            assert (answer, claimed[0].payload) == (PutOutcome.FOLLOWS, "old")
            assert await h.settle(h.done(claimed[0]), store=second)
        else:
            assert answer is PutOutcome.REPLACED
        job = await h.get(id)
        assert (job.state, job.payload) == (State.WAITING, "new")
