"""Large jobs: every step and every reply is bounded by bytes, not by count alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stores import Harness
from tickwheel.job import Job, Outcome, State
from tickwheel.store import Query

MB = 1_000_000
COUNT = 60
# What one reply may hold: 16 MiB, and some slack.
MOST = 20 * 1024 * 1024
LEASE_MS = 120_000

IDS = [f"large-{n:02}" for n in range(COUNT)]


def text(id: str) -> str:
    """A megabyte of JSON that is this job's alone."""
    return msgspec.json.encode(id * (MB // len(id))).decode()


def weight(jobs: Sequence[Job]) -> int:
    return sum(len(job.payload) + len(job.result or "") for job in jobs)


async def add_all(h: Harness) -> None:
    await h.add(*(h.job(id, payload=text(id), meta={"batch": "7"}) for id in IDS))


async def claim_all(h: Harness) -> list[Job]:
    """In as many claims as that takes; each of them brings some."""
    held: list[Job] = []
    while len(held) < COUNT:
        some = await h.claim(COUNT, lease_ms=LEASE_MS)
        assert some
        assert weight(some) <= MOST
        held += some
    return held


async def found(h: Harness, query: Query) -> list[Job]:
    """All that is found, page by page."""
    jobs: list[Job] = []
    cursor = None
    for _ in range(10 * COUNT):
        page = await h.store.find(query, cursor=cursor, limit=COUNT)
        assert weight(page.jobs) <= MOST
        jobs += page.jobs
        cursor = page.cursor
        if cursor is None:
            return jobs
    raise AssertionError("the pages have no end")


async def test_many_large_jobs_are_added_claimed_and_settled_and_none_is_lost(h: Harness) -> None:
    await add_all(h)
    held = await claim_all(h)
    assert sorted(job.id for job in held) == IDS
    assert all(job.payload == text(job.id) for job in held)
    outcomes = [h.settlement(Outcome.DONE, job, text=job.id * (MB // len(job.id))) for job in held]
    assert await h.store.settle(outcomes, now_ms=h.now) == [True] * COUNT
    assert await h.counts() == {"done": COUNT}
    jobs = [job for job in await h.store.get(IDS) if job is not None]
    assert [job.id for job in jobs] == IDS
    assert all(job.result == text(job.id) == job.payload for job in jobs)


async def test_large_jobs_are_found_page_by_page_in_every_state(h: Harness) -> None:
    await add_all(h)
    assert sorted(job.id for job in await found(h, Query(state=State.WAITING))) == IDS
    held = await claim_all(h)
    assert sorted(job.id for job in await found(h, Query(state=State.RUNNING))) == IDS
    outcomes = [h.settlement(Outcome.DEAD, job) for job in held]
    assert await h.store.settle(outcomes, now_ms=h.now) == [True] * COUNT
    assert sorted(job.id for job in await found(h, Query(state=State.DEAD))) == IDS
    assert sorted(job.id for job in await found(h, Query(task="task"))) == IDS
    assert sorted(job.id for job in await found(h, Query(meta=("batch", "7")))) == IDS


async def test_large_jobs_that_lost_their_worker_are_taken_over_a_portion_at_a_time(
    h: Harness,
) -> None:
    await add_all(h)
    held: set[str] = set()
    while len(held) < COUNT:
        held |= {job.id for job in await h.claim(COUNT, worker="bob")}
    await h.lose_leases()
    taken = await claim_all(h)
    assert sorted(job.id for job in taken) == IDS
    assert all(job.takeovers for job in taken)
    assert all(job.payload == text(job.id) for job in taken)


async def test_many_large_jobs_are_cancelled_put_back_and_deleted_in_one_call_each(
    h: Harness,
) -> None:
    await add_all(h)
    assert await h.store.cancel(IDS, now_ms=h.now) == ["cancelled"] * COUNT
    assert await h.store.cancel(IDS, now_ms=h.now) == ["too late"] * COUNT
    assert await h.store.rerun(IDS, now_ms=h.now) == [True] * COUNT
    assert await h.store.cancel([*IDS, "no such"], now_ms=h.now) == [
        *["cancelled"] * COUNT,
        "unknown",
    ]
    assert await h.store.delete([*IDS, "no such"]) == [*[True] * COUNT, False]
    assert await h.store.get(IDS) == [None] * COUNT


async def test_many_large_jobs_are_pruned_in_one_call(h: Harness) -> None:
    await add_all(h)
    await h.store.cancel(IDS, now_ms=h.now)
    before_ms = h.now + 10_000
    assert await h.store.prune([State.CANCELLED], before_ms=before_ms, limit=1_000) == COUNT
    assert await h.store.prune([State.CANCELLED], before_ms=before_ms, limit=1_000) == 0


async def test_more_ids_than_fit_into_one_step_are_answered_in_order(h: Harness) -> None:
    ids = [f"job-{n:04}" for n in range(2_500)]
    await h.add(*(h.job(id, delay_ms=3_600_000) for id in ids))
    asked = [*ids[:2_100], "no such", *ids[2_100:]]
    true = [id != "no such" for id in asked]
    assert [job and job.id for job in await h.store.get(asked)] == [
        id if known else None for id, known in zip(asked, true, strict=True)
    ]
    assert await h.store.cancel(asked, now_ms=h.now) == [
        "cancelled" if known else "unknown" for known in true
    ]
    assert await h.store.rerun(asked, now_ms=h.now + 3_600_000) == true
    await h.store.cancel(ids, now_ms=h.now)
    assert await h.store.delete(asked) == true
