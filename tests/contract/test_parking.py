"""Parked jobs: put back by a worker that doesn't know their task, for one that does."""

from __future__ import annotations

import asyncio

import pytest
from waits import MINUTE, SOON_S, begun, spins

from stores import ODD_NAMES, Harness
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.store import Query

MAIL = ("mail",)


async def parked(h: Harness, *jobs: Job) -> list[Job]:
    """These jobs, after a worker that doesn't know their tasks has had them."""
    held = await h.claimed(*jobs)
    settlements = [h.settlement(Outcome.PARK, job) for job in held]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * len(jobs)
    return [await h.get(job.id) for job in jobs]


def mail(h: Harness, id: str = "job", *, priority: int = 1, delay_ms: int = 0) -> Job:
    return h.job(id, task="mail", priority=priority, delay_ms=delay_ms)


# --- Putting back


async def test_a_parked_job_waits_as_before_and_nothing_counts_against_it(h: Harness) -> None:
    added = mail(h)
    [job] = await parked(h, added)
    assert (job.state, job.parked, job.due_ms) == (State.WAITING, True, added.due_ms)
    assert (job.attempt, job.failures, job.takeovers, job.error) == (1, 0, 0, None)
    assert [run.outcome for run in job.history] == [Outcome.PARK]
    assert await h.counts() == {"waiting": 1}


async def test_parking_twice_is_parking_once(h: Harness) -> None:
    [held] = await h.claimed(mail(h))
    settlement = h.settlement(Outcome.PARK, held)
    assert await h.settle(settlement)
    assert await h.settle(settlement)
    assert len((await h.get()).history) == 1


async def test_one_batch_parks_some_and_ends_others(h: Harness) -> None:
    first, second, third = await h.claimed(mail(h, "a"), mail(h, "b"), h.job("c"))
    settlements = [
        h.settlement(Outcome.PARK, first),
        h.settlement(Outcome.DONE, second),
        h.settlement(Outcome.RELEASE, third),
    ]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * 3
    assert (await h.get("a")).parked
    assert not (await h.get("c")).parked
    assert await h.counts() == {"waiting": 2, "done": 1}
    assert await h.claim_ids() == ["c"]


async def test_a_job_that_was_asked_to_stop_is_cancelled_and_not_parked(h: Harness) -> None:
    [held] = await h.claimed(mail(h))
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.settle(h.settlement(Outcome.PARK, held))
    job = await h.get()
    assert (job.state, job.parked) == (State.CANCELLED, False)
    assert await h.claim(tasks=MAIL) == []


async def test_a_lost_lease_parks_nothing(h: Harness) -> None:
    [held] = await h.claimed(mail(h))
    await h.lose_leases()
    [taken] = await h.claim(worker="bob")
    assert not await h.settle(h.settlement(Outcome.PARK, held))
    assert taken.attempt == 2
    assert not (await h.get()).parked


# --- Claiming


async def test_only_a_worker_that_knows_the_task_gets_a_parked_job(h: Harness) -> None:
    await parked(h, mail(h))
    assert await h.claim() == []
    assert await h.claim(tasks=["other", "mai", "mail2"]) == []
    assert await h.claim(tasks=MAIL, queues=["elsewhere"]) == []
    [job] = await h.claim(tasks=["other", "mail"], worker="bob")
    assert (job.id, job.attempt, job.parked, job.worker) == ("job", 2, False, "bob")
    assert await h.counts() == {"running": 1}
    assert await h.claim(tasks=MAIL) == []


async def test_a_claim_that_is_repeated_gives_the_parked_jobs_that_it_took(h: Harness) -> None:
    await parked(h, mail(h, "a"), mail(h, "b"))
    first = await h.claim(tasks=MAIL, call=7)
    again = await h.claim(tasks=MAIL, call=7, again=True)
    assert {job.id for job in first} == {job.id for job in again} == {"a", "b"}


async def test_a_parked_job_keeps_its_due_time_and_can_be_claimed_ahead_of_it(h: Harness) -> None:
    added = mail(h, delay_ms=h.store.ahead_ms - h.step_ms // 2)
    [job] = await parked(h, added)
    assert job.due_ms == added.due_ms > h.now
    [held] = await h.claim(tasks=MAIL)
    assert held.due_ms == added.due_ms


async def test_a_job_that_failed_before_keeps_its_error_while_parked(h: Harness) -> None:
    [held] = await h.claimed(mail(h))
    assert await h.settle(h.settlement(Outcome.RETRY, held, text="why", traceback="where"))
    [held] = await h.claim()
    assert await h.settle(h.settlement(Outcome.PARK, held))
    job = await h.get()
    assert (job.error, job.traceback, job.failures) == ("why", "where", 1)


async def test_priorities_count_between_parked_and_other_jobs(h: Harness) -> None:
    await parked(h, mail(h, "normal", priority=1), mail(h, "urgent", priority=3))
    await h.add(h.job("low", priority=0), h.job("high", priority=2))
    ids = [(await h.claim(1, tasks=MAIL))[0].id for _ in range(4)]
    assert ids == ["urgent", "high", "normal", "low"]


async def test_a_full_claim_takes_parked_and_other_jobs_together(h: Harness) -> None:
    await parked(h, *(mail(h, f"parked-{n}") for n in range(5)))
    others = h.jobs(5)
    await h.add(*others)
    known = [*MAIL, others[0].task]
    assert len(await h.claim(7, tasks=known)) == 7
    assert len(await h.claim(7, tasks=known)) == 3
    assert await h.counts() == {"running": 10}


async def test_a_paused_queue_hands_out_no_parked_jobs(h: Harness) -> None:
    await parked(h, mail(h))
    await h.store.pause("default", True)
    assert await h.claim(tasks=MAIL) == []
    await h.store.pause("default", False)
    assert len(await h.claim(tasks=MAIL)) == 1


async def test_a_job_that_was_parked_is_free_again_once_it_was_claimed(h: Harness) -> None:
    await parked(h, mail(h))
    [held] = await h.claim(tasks=MAIL)
    assert await h.settle(h.settlement(Outcome.RELEASE, held))
    assert not (await h.get()).parked
    [held] = await h.claim(worker="bob")
    await h.lose_leases()
    [held] = await h.claim(worker="cy")
    assert (held.attempt, held.takeovers) == (4, 1)


async def test_a_parked_job_can_be_parked_again(h: Harness) -> None:
    await parked(h, mail(h))
    for _ in range(3):
        [held] = await h.claim(tasks=MAIL)
        assert await h.settle(h.settlement(Outcome.PARK, held))
        assert await h.claim() == []
    assert (await h.get()).attempt == 4
    assert len(await h.claim(tasks=MAIL)) == 1


async def test_parked_jobs_are_still_there_when_a_store_is_opened_again(h: Harness) -> None:
    await parked(h, mail(h))
    if (await h.store.durability()).process_crash:
        await h.reopen()
    assert await h.claim() == []
    assert len(await h.claim(tasks=MAIL)) == 1


async def test_odd_names_of_tasks_are_kept_apart(h: Harness) -> None:
    names = [name for name in ODD_NAMES if len(name) <= 128]
    jobs = [h.job(f"job-{n}", task=name) for n, name in enumerate(names)]
    await parked(h, *jobs)
    for job in jobs:
        [found] = await h.claim(tasks=[job.task])
        assert (found.id, found.task) == (job.id, job.task)


async def test_a_worker_may_know_a_thousand_tasks_and_find_three_hundred_parked(h: Harness) -> None:
    jobs = [h.job(f"job-{n:03}", task=f"task-{n:03}") for n in range(300)]
    await parked(h, *jobs)
    known = frozenset(f"task-{n:03}" for n in range(1, 1000))
    found: set[str] = set()
    for _ in range(300):
        claimed = {job.id for job in await h.claim(100, tasks=known)}
        if not claimed:
            break
        found |= claimed
    assert found == {job.id for job in jobs[1:]}
    assert await h.claim(tasks=["task-000"]) != []


async def test_a_thousand_jobs_are_parked_and_claimed_again(h: Harness) -> None:
    jobs = [h.job(f"job-{n:04}", task="mail") for n in range(1000)]
    await parked(h, *jobs)
    assert await h.claim(1000) == []
    found: list[str] = []
    while batch := await h.claim(1000, tasks=MAIL):
        found += [job.id for job in batch]
    assert sorted(found) == [job.id for job in jobs]


# --- Operating


async def test_a_parked_job_can_be_cancelled(h: Harness) -> None:
    await parked(h, mail(h))
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.CANCELLED]
    assert await h.claim(tasks=MAIL) == []
    assert await h.store.parked() == []
    assert await h.counts() == {"cancelled": 1}


async def test_a_job_that_was_cancelled_while_parked_runs_again_for_anybody(h: Harness) -> None:
    await parked(h, mail(h))
    await h.store.cancel(["job"], now_ms=h.now)
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    assert not (await h.get("job")).parked
    assert await h.claim_ids() == ["job"]


async def test_parked_jobs_are_found_like_others_that_wait(h: Harness) -> None:
    await parked(h, mail(h, "a"))
    await h.add(h.job("b"))
    page = await h.store.find(Query(state=State.WAITING, queue="default"))
    assert {job.id: job.parked for job in page.jobs} == {"a": True, "b": False}


async def test_parked_tells_one_job_of_each_queue_and_task(h: Harness) -> None:
    assert await h.store.parked() == []
    await parked(
        h,
        mail(h, "a"),
        mail(h, "b"),
        h.job("c", task="bill"),
        h.job("d", task="mail", queue="orders"),
    )
    await h.add(h.job("e", task="free"))
    found = await h.store.parked()
    assert sorted((job.queue, job.task) for job in found) == [
        ("default", "bill"),
        ("default", "mail"),
        ("orders", "mail"),
    ]
    assert all(job.parked and job.history[-1].outcome is Outcome.PARK for job in found)
    await h.claim(tasks=["mail", "bill", "free"])
    assert [job.id for job in await h.store.parked()] == ["d"]


# --- Parked by the store itself


async def foreign(h: Harness, *jobs: Job) -> list[Job]:
    """These jobs, after a claim by a worker that knows only `mail`: the store may park them
    itself."""
    await h.add(*jobs)
    held = [job for job in await h.claim(len(jobs), tasks=MAIL) if not job.parked]
    settlements = [h.settlement(Outcome.PARK, job) for job in held if job.task not in MAIL]
    assert await h.store.settle(settlements, now_ms=h.now) == [True] * len(settlements)
    return [await h.get(job.id) for job in jobs]


async def test_a_claim_leaves_a_job_of_another_task_parked(h: Harness) -> None:
    bill, letter = await foreign(h, h.job("bill", task="bill"), mail(h, "letter"))
    assert (bill.state, bill.parked, bill.lease_until_ms) == (State.WAITING, True, None)
    assert (bill.attempt, bill.failures, bill.takeovers) == (1, 0, 0)
    assert [run.outcome for run in bill.history] == [Outcome.PARK]
    assert letter.state is State.RUNNING
    assert await h.claim(tasks=MAIL) == []
    [held] = await h.claim(tasks=["bill"], worker="bob")
    assert (held.id, held.attempt) == ("bill", 2)
    assert await h.settle(h.done(held))


async def test_a_job_of_another_task_whose_worker_was_lost_is_a_takeover(h: Harness) -> None:
    await h.claimed(h.job("bill", task="bill"))
    await h.lose_leases()
    found = [job for job in await h.claim(tasks=MAIL) if not job.parked]
    for held in found:
        assert await h.settle(h.settlement(Outcome.PARK, held))
    bill = await h.get("bill")
    assert (bill.parked, bill.takeovers, bill.attempt) == (True, 1, 2)
    assert [run.outcome for run in bill.history] == [Outcome.LOST, Outcome.PARK]


async def test_whoever_knows_the_task_hears_of_a_job_that_a_claim_parked(h: Harness) -> None:
    other = await h.new_handle()
    async with asyncio.timeout(SOON_S):
        await other.wait(["default"], now_ms=h.now, until_ms=h.now + 1, tasks=["bill"])
        waiting = asyncio.create_task(
            other.wait(["default"], now_ms=h.now, until_ms=h.now + MINUTE, tasks=["bill"])
        )
        await begun(waiting)
        await foreign(h, h.job("bill", task="bill"))
        await waiting
        while not await h.claim(store=other, tasks=["bill"]):
            await other.wait(["default"], now_ms=h.now, until_ms=h.now + MINUTE, tasks=["bill"])


# --- Waiting


async def wait(h: Harness, *tasks: str, ms: int = MINUTE) -> None:
    await h.store.wait(["default"], now_ms=h.now, until_ms=h.now + ms, tasks=tasks)


async def test_a_worker_that_knows_the_task_hears_of_a_parked_job_at_once(h: Harness) -> None:
    other = await h.new_handle()
    await h.add(mail(h))
    [held] = await h.claim(store=other)
    async with asyncio.timeout(SOON_S):
        waiting: asyncio.Task[object] = asyncio.create_task(wait(h, "mail", "other"))
        await begun(waiting)
        await h.settle(h.settlement(Outcome.PARK, held), store=other)
        await waiting
    assert [job.id for job in await h.claim(tasks=MAIL)] == ["job"]


async def test_a_worker_that_comes_later_finds_a_parked_job_at_once(h: Harness) -> None:
    await parked(h, mail(h))
    async with asyncio.timeout(SOON_S):
        await wait(h, "mail")


async def test_nobody_else_is_kept_awake_by_a_parked_job(h: Harness) -> None:
    await parked(h, mail(h))
    # What a step has just changed may still end one wait, or two.
    for _ in range(3):
        await wait(h, "other", ms=50)
    assert not await spins(wait(h, "other", ms=50))


# --- Tracebacks


@pytest.mark.parametrize("outcome", [Outcome.RETRY, Outcome.DEAD])
async def test_the_traceback_of_a_failure_is_kept(h: Harness, outcome: Outcome) -> None:
    text = 'Traceback:\n  File "shop.py", line 1, in täsk\n' + "x" * 8000
    [held] = await h.claimed(h.job())
    assert await h.settle(h.settlement(outcome, held, traceback=text))
    assert (await h.get()).traceback == text
    page = await h.store.find(Query())
    assert [job.traceback for job in page.jobs] == [text]


async def test_a_traceback_goes_with_the_error_that_it_belongs_to(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.settlement(Outcome.RETRY, held, traceback="first"))
    [held] = await h.claim()
    assert held.traceback == "first"
    extended = await h.extend(held)
    assert extended is not None and extended.traceback == "first"
    assert await h.settle(h.done(extended))
    assert (await h.get()).traceback is None


async def test_a_rerun_forgets_the_traceback(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.settlement(Outcome.DEAD, held, traceback="why"))
    assert await h.store.rerun(["job"], now_ms=h.now) == [True]
    assert (await h.get()).traceback is None


async def test_a_job_that_comes_from_another_store_brings_its_traceback(h: Harness) -> None:
    [held] = await h.claimed(h.job())
    assert await h.settle(h.settlement(Outcome.RETRY, held, traceback="there"))
    job = await h.get()
    assert await h.store.cancel(["job"], now_ms=h.now) == [CancelOutcome.CANCELLED]
    assert await h.store.delete(["job"]) == [True]
    await h.add(job)
    assert (await h.get()).traceback == "there"
