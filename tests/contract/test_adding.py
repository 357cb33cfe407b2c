"""add: each job once, whatever is repeated."""

from __future__ import annotations

import msgspec
import pytest

from stores import ODD_NAMES, Harness, unfenced
from tickwheel import job as life
from tickwheel.job import ENDED, Job, Outcome, State

MIB = 1024 * 1024


async def test_add_says_which_jobs_were_added(h: Harness) -> None:
    assert await h.store.add([h.job("a"), h.job("b")]) == [True, True]


async def test_adding_nothing_answers_nothing(h: Harness) -> None:
    assert await h.store.add([]) == []
    assert await h.queues() == []


async def test_an_added_job_waits(h: Harness) -> None:
    await h.add(h.job())
    job = await h.get()
    assert (job.state, job.attempt, job.failures, job.takeovers) == (State.WAITING, 0, 0, 0)
    assert (job.worker, job.lease_until_ms, job.ended_ms, job.cancel_requested) == (
        None,
        None,
        None,
        False,
    )
    assert job.history == ()


async def test_a_job_comes_back_as_it_was_added(h: Harness) -> None:
    job = Job(
        id="all fields",
        task="shop.cancel_order",
        payload='{"order": 42, "note": "naïve – 注文"}',
        queue="orders",
        priority=3,
        due_ms=h.now + 86_400_000,
        created_ms=h.now - 1,
        retries=7,
        timeout_ms=1500,
    )
    await h.add(job)
    assert unfenced(await h.get("all fields")) == job


@pytest.mark.parametrize("outcome", [Outcome.RETRY, Outcome.SNOOZE, Outcome.RELEASE])
async def test_a_job_that_was_tried_elsewhere_keeps_its_counters_and_history(
    h: Harness, outcome: Outcome
) -> None:
    """As it moves from one store to another."""
    [held] = await h.claimed(h.job("from another store"))
    await h.settle(h.settlement(outcome, held, delay_ms=3_600_000))
    tried = await h.get("from another store")
    moved = msgspec.structs.replace(tried, id="moved")
    await h.add(moved)
    assert await h.get("moved") == life.added(moved)
    assert (await h.get("moved")).attempt == 1
    # Only in the store it came from is its last settlement known.
    assert not await h.settle(h.done(msgspec.structs.replace(held, id="moved")))


async def test_a_job_that_is_added_waits_whatever_it_was(h: Harness) -> None:
    [held] = await h.claimed(h.job("running"))
    await h.add(msgspec.structs.replace(held, id="added", due_ms=h.now + 3_600_000))
    job = await h.get("added")
    assert (job.state, job.lease_until_ms, job.cancel_requested, job.attempt) == (
        State.WAITING,
        None,
        False,
        1,
    )


async def test_a_choice_of_no_retries_is_not_taken_for_no_choice(h: Harness) -> None:
    job = Job(id="job", task="t", payload="", due_ms=h.now, created_ms=h.now, retries=0)
    await h.add(job)
    assert (await h.get()).retries == 0
    assert (await h.get()).timeout_ms is None


async def test_a_taken_id_is_not_added_again(h: Harness) -> None:
    await h.add(h.job(payload='"first"'))
    assert await h.store.add([h.job(payload='"second"', queue="other")]) == [False]
    assert (await h.get()).payload == '"first"'
    assert await h.counts("other") == {}


async def test_repeating_an_add_changes_nothing_more(h: Harness) -> None:
    jobs = h.jobs(3)
    await h.add(*jobs)
    before = await h.store.get([job.id for job in jobs])
    assert await h.store.add(jobs) == [False, False, False]
    assert await h.store.get([job.id for job in jobs]) == before
    assert await h.counts() == {"waiting": 3}


async def test_of_two_jobs_with_one_id_in_a_batch_the_first_is_added(h: Harness) -> None:
    first, second = h.job(payload="1"), h.job(payload="2", queue="other")
    assert await h.store.add([first, second, first]) == [True, False, False]
    assert (await h.get()).payload == "1"
    assert await h.counts() == {"waiting": 1}
    assert await h.counts("other") == {}


async def test_a_batch_adds_what_is_new_and_answers_in_order(h: Harness) -> None:
    await h.add(h.job("b"), h.job("d"))
    batch = [h.job(id) for id in ("e", "d", "c", "b", "a", "c")]
    assert await h.store.add(batch) == [True, False, True, False, True, False]
    assert await h.counts() == {"waiting": 5}


async def test_an_id_stays_taken_while_its_job_runs(h: Harness) -> None:
    await h.claimed(h.job())
    assert await h.store.add([h.job()]) == [False]
    assert await h.counts() == {"running": 1}


@pytest.mark.parametrize("state", ENDED)
async def test_an_id_stays_taken_after_its_job_ended(h: Harness, state: State) -> None:
    await h.ended(state)
    assert await h.store.add([h.job()]) == [False]
    assert (await h.get()).state is state


async def test_an_id_is_free_again_once_its_job_is_deleted(h: Harness) -> None:
    await h.ended(State.DONE)
    await h.store.delete(["job"])
    await h.add(h.job(payload='"again"'))
    job = await h.get()
    assert (job.state, job.payload, job.history) == (State.WAITING, '"again"', ())


async def test_an_id_is_free_again_once_its_job_is_pruned(h: Harness) -> None:
    await h.ended(State.DONE)
    await h.pass_time(h.step_ms)
    assert await h.store.prune([State.DONE], before_ms=h.now, limit=10) == 1
    await h.add(h.job())


async def test_a_thousand_jobs_are_added_at_once(h: Harness) -> None:
    await h.add(*h.jobs(1000, delay_ms=3_600_000))
    assert await h.counts() == {"waiting": 1000}


async def test_of_a_thousand_jobs_only_the_new_ones_are_added(h: Harness) -> None:
    jobs = h.jobs(1000, delay_ms=3_600_000)
    await h.add(*jobs[::2])
    assert await h.store.add(jobs) == [False, True] * 500
    assert await h.counts() == {"waiting": 1000}


async def test_odd_ids_are_ids_of_their_own(h: Harness) -> None:
    await h.add(*(h.job(id, payload=f'"{n}"') for n, id in enumerate(ODD_NAMES)))
    found = await h.store.get(ODD_NAMES)
    assert [job and (job.id, job.payload) for job in found] == [
        (id, f'"{n}"') for n, id in enumerate(ODD_NAMES)
    ]


async def test_jobs_with_odd_ids_go_through_their_whole_life(h: Harness) -> None:
    count = len(ODD_NAMES)
    held = await h.claimed(*(h.job(id) for id in ODD_NAMES))
    assert all(await h.store.extend(held, now_ms=h.now, lease_ms=h.lease_ms))
    settlements = [h.done(job) for job in held]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * count
    assert await h.store.rerun(ODD_NAMES, now_ms=h.now) == [True] * count
    assert await h.store.cancel(ODD_NAMES, now_ms=h.now) == ["cancelled"] * count
    assert await h.store.delete(ODD_NAMES) == [True] * count
    assert await h.store.get(ODD_NAMES) == [None] * count


async def test_odd_queue_names_are_queues_of_their_own(h: Harness) -> None:
    await h.add(*(h.job(f"in {queue}", queue=queue) for queue in ODD_NAMES))
    for queue in ODD_NAMES:
        assert await h.claim_ids(queues=[queue]) == [f"in {queue}"]
    assert {info.name for info in await h.queues()} == set(ODD_NAMES)


async def test_a_payload_of_a_mebibyte_comes_back_whole(h: Harness) -> None:
    payload = '"' + "0123456789abcdef" * (MIB // 16 - 1) + '"'
    await h.add(h.job(payload=payload))
    assert (await h.get()).payload == payload
    assert (await h.claim_one()).payload == payload


OPAQUE = ["", "not JSON", "{'\"\\", '"\\u0000"', "注文\n\t🕰️", "null", "1"]


@pytest.mark.parametrize("payload", OPAQUE)
async def test_a_payload_is_opaque(h: Harness, payload: str) -> None:
    await h.add(h.job(payload=payload))
    assert (await h.get()).payload == payload
    assert (await h.claim_one()).payload == payload


async def test_a_job_may_be_due_long_ago_or_in_the_year_9999(h: Harness) -> None:
    far = 253_402_300_799_000
    await h.add(h.job("past", delay_ms=1 - h.now), h.job("far", delay_ms=far - h.now))
    assert (await h.get("far")).due_ms == far
    assert await h.claim_ids() == ["past"]


async def test_a_job_due_after_the_last_calendar_day_harms_no_other(h: Harness) -> None:
    """Nobody can enqueue one, but another program may have stored it, and it may be moved here."""
    far = h.job("far", delay_ms=10**15)
    await h.add(far, h.job("now"))
    assert await h.claim_ids() == ["now"]
    assert (await h.get("far")).due_ms == far.due_ms
