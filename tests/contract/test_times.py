"""find with a time range, and slot_counts: jobs by when they are due, or have ended."""

from __future__ import annotations

import pytest

from stores import Harness
from tickwheel.job import ENDED, Job, Outcome, State
from tickwheel.store import Query, SlotCounts, Slots
from tickwheel.stores.nats.store import NatsStore
from tickwheel.trust import unsealed

HOUR_MS = 3_600_000
MINUTE_MS = 60_000


async def found_by(h: Harness, query: Query, *, limit: int = 100) -> list[Job]:
    """All pages of a still store."""
    found: list[Job] = []
    cursor = None
    for _ in range(1000):
        page = await h.store.find(query, cursor=cursor, limit=limit)
        assert len(page.jobs) <= limit
        assert page.looked >= len(page.jobs)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the pages have no end")


def by_time(h: Harness) -> bool:
    """Whether the store has an index by time."""
    return not isinstance(unsealed(h.store), NatsStore)


async def add_scattered(h: Harness) -> list[Job]:
    """Jobs of several queues and priorities, one due each minute, and three at the same moment."""
    jobs = [
        h.job(
            f"{n:02}",
            queue=f"queue {n % 3}",
            priority=n % 4,
            task=f"task {n % 2}",
            delay_ms=HOUR_MS + min(n, 27) * MINUTE_MS,
            meta={"third": str(n % 3)},
        )
        for n in range(30)
    ]
    await h.add(*reversed(jobs))
    return jobs


@pytest.mark.parametrize("limit", [1, 4, 100])
async def test_waiting_jobs_are_found_by_when_they_are_due(h: Harness, limit: int) -> None:
    jobs = await add_scattered(h)
    query = Query(state=State.WAITING, from_ms=jobs[5].due_ms, until_ms=jobs[20].due_ms)
    found = [job.id for job in await found_by(h, query, limit=limit)]
    assert sorted(found) == [job.id for job in jobs[5:20]]
    if by_time(h):
        assert found == sorted(found)


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_jobs_due_at_the_same_moment_are_found_once_each(h: Harness, limit: int) -> None:
    jobs = await add_scattered(h)
    query = Query(from_ms=jobs[26].due_ms)
    found = [job.id for job in await found_by(h, query, limit=limit)]
    assert sorted(found) == ["26", "27", "28", "29"]


async def test_a_range_may_have_one_end_only(h: Harness) -> None:
    jobs = await add_scattered(h)
    early = await found_by(h, Query(until_ms=jobs[3].due_ms))
    late = await found_by(h, Query(from_ms=jobs[25].due_ms))
    assert sorted(job.id for job in early) == ["00", "01", "02"]
    assert sorted(job.id for job in late) == ["25", "26", "27", "28", "29"]


async def test_a_range_goes_with_all_other_filters(h: Harness) -> None:
    jobs = await add_scattered(h)
    from_ms, until_ms = jobs[6].due_ms, jobs[18].due_ms
    for other in (
        Query(queue="queue 1"),
        Query(task="task 0"),
        Query(queue="queue 2", task="task 1"),
        Query(meta=("third", "1")),
        Query(state=State.WAITING, task="task 1", meta=("third", "0")),
        Query(state=State.DONE),
        Query(queue="no such"),
    ):
        fields = {name: getattr(other, name) for name in ("state", "queue", "task", "meta")}
        expected = [
            job.id
            for job in jobs[6:18]
            if other.state in (None, State.WAITING)
            and other.queue in (None, job.queue)
            and other.task in (None, job.task)
            and other.has_meta(job)
        ]
        query = Query(**fields, from_ms=from_ms, until_ms=until_ms)
        for limit in (1, 5):
            found = [job.id for job in await found_by(h, query, limit=limit)]
            assert sorted(found) == expected


async def test_ended_jobs_are_found_by_when_they_ended(h: Harness) -> None:
    ends: list[Job] = []
    for n, queue in enumerate(("b", "a", "b")):
        await h.add(h.job(f"{n}", queue=queue))
        held = await h.claim_one(queues=[queue])
        await h.pass_time(max(h.step_ms, 20))
        await h.settle(h.settlement(Outcome.DEAD, held))
        [job] = await h.store.get([held.id])
        assert job is not None
        ends.append(job)
        await h.pass_time(max(h.step_ms, 20))
    times = [job.ended_ms for job in ends]
    assert None not in times
    since = await found_by(h, Query(state=State.DEAD, from_ms=times[1]), limit=1)
    before = await found_by(h, Query(state=State.DEAD, until_ms=times[2]), limit=1)
    assert {job.id for job in since} == {"1", "2"}
    assert {job.id for job in before} == {"0", "1"}
    if by_time(h):
        assert [job.id for job in since] == ["2", "1"]
        assert [job.id for job in before] == ["1", "0"]


async def test_running_jobs_are_found_by_when_they_are_due(h: Harness) -> None:
    await h.claimed(h.job("early", delay_ms=-MINUTE_MS), h.job("late"))
    query = Query(state=State.RUNNING, until_ms=h.now - MINUTE_MS // 2)
    assert [job.id for job in await found_by(h, query, limit=1)] == ["early"]


async def test_a_range_shows_every_state(h: Harness) -> None:
    for state in ENDED:
        await h.ended(state, state)
    await h.claimed(h.job("running"))
    await h.add(h.job("waiting", delay_ms=HOUR_MS))
    for limit in (1, 2, 100):
        found = await found_by(h, Query(from_ms=h.now - HOUR_MS), limit=limit)
        assert {job.id for job in found} == set(State)
        assert len(found) == 5


async def test_parked_jobs_are_found_and_counted(h: Harness) -> None:
    [held] = await h.claimed(h.job(task="strange"))
    await h.settle(h.settlement(Outcome.PARK, held))
    await h.add(h.job("other"))
    query = Query(state=State.WAITING, from_ms=h.now - HOUR_MS, until_ms=h.now + HOUR_MS)
    assert {job.id for job in await found_by(h, query, limit=1)} == {"job", "other"}
    assert await found_by(h, Query(state=State.WAITING, until_ms=h.now - HOUR_MS)) == []
    slots = Slots(state=State.WAITING, start_ms=h.now - HOUR_MS, width_ms=2 * HOUR_MS, count=1)
    if by_time(h):
        assert await h.store.slot_counts(slots) == SlotCounts(before=0, counts=[2], after=0)


# --- Counts


async def test_jobs_are_counted_by_slots(h: Harness) -> None:
    jobs = await add_scattered(h)
    start_ms = jobs[2].due_ms
    slots = Slots(state=State.WAITING, start_ms=start_ms, width_ms=10 * MINUTE_MS, count=2)
    counts = await h.store.slot_counts(slots)
    if not by_time(h):
        assert counts is None
        return
    assert counts == SlotCounts(before=2, counts=[10, 10], after=8)
    one = Slots(
        state=State.WAITING, queue="queue 0", start_ms=start_ms, width_ms=MINUTE_MS, count=3
    )
    assert await h.store.slot_counts(one) == SlotCounts(before=1, counts=[0, 1, 0], after=8)


async def test_slots_may_be_empty_or_odd(h: Harness) -> None:
    if not by_time(h):
        return
    empty = Slots(state=State.WAITING, start_ms=h.now, width_ms=7, count=3)
    assert await h.store.slot_counts(empty) == SlotCounts(before=0, counts=[0, 0, 0], after=0)
    await h.add(*(h.job(f"{n}", delay_ms=n) for n in (-1, 0, 6, 7, 20, 21)))
    slots = Slots(state=State.WAITING, start_ms=h.now - h.slack_ms, width_ms=7, count=3)
    if h.slack_ms == 0:
        assert await h.store.slot_counts(slots) == SlotCounts(before=1, counts=[2, 1, 1], after=1)
    else:
        found = await h.store.slot_counts(slots)
        assert found is not None
        assert found.before + sum(found.counts) + found.after == 6


async def test_ended_jobs_are_counted_by_slots(h: Harness) -> None:
    if not by_time(h):
        return
    for n in range(3):
        await h.ended(State.DONE, f"{n}")
    await h.ended(State.CANCELLED, "cancelled")
    await h.add(h.job("waiting"))
    slots = Slots(state=State.DONE, start_ms=h.now - HOUR_MS, width_ms=HOUR_MS, count=2)
    found = await h.store.slot_counts(slots)
    assert found is not None
    assert (found.before, sum(found.counts), found.after) == (0, 3, 0)
