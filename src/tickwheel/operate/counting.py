"""How many jobs match a filter, and how many are due in each part of a time range."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tickwheel.checks import LATEST_MS
from tickwheel.client import Client
from tickwheel.job import Job, State
from tickwheel.operate.bulk import BATCH, Filter, enough_looked, everything
from tickwheel.store import Query, SlotCounts, Slots, time_ms


@dataclass(frozen=True, slots=True)
class Counted:
    """How many jobs match, or at least how many; and how many were looked at to tell."""

    count: int
    exact: bool
    looked: int


async def count_jobs(
    client: Client,
    wanted: Filter,
    *,
    look_most: int,
    look_s: float | None = None,
    visible: Callable[[Job], bool] = everything,
) -> Counted:
    """How many jobs match and are `visible`: by the store's counts, by its index of time, or by a
    look at up to `look_most` of them."""
    plain = wanted.task is None and wanted.meta is None and not wanted.choosy
    if plain and visible is everything:
        if wanted.from_ms is None and wanted.until_ms is None:
            return await _by_queue(client, wanted)
        counted = await _by_time(client, wanted)
        if counted is not None:
            return counted
    enough = enough_looked(look_most, look_s)
    count = looked = 0
    for query in wanted.queries:
        cursor: str | None = None
        while not enough(looked):
            page = await client.find(query, cursor=cursor, limit=BATCH)
            looked += max(page.looked, len(page.jobs))
            count += sum(wanted.keeps(job) and visible(job) for job in page.jobs)
            cursor = page.cursor
            if cursor is None:
                break
        else:
            return Counted(count, False, looked)
    return Counted(count, True, looked)


async def _by_queue(client: Client, wanted: Filter) -> Counted:
    count = sum(
        getattr(queue, state)
        for queue in await client.queues()
        if wanted.queue in (None, queue.name)
        for state in wanted.states or State
    )
    return Counted(count, True, 0)


async def _by_time(client: Client, wanted: Filter) -> Counted | None:
    """None where there is no index by time."""
    if not wanted.states or State.RUNNING in wanted.states:
        return None
    start_ms = wanted.from_ms or 0
    end_ms = LATEST_MS + 1 if wanted.until_ms is None else wanted.until_ms
    count = 0
    for state in wanted.states if start_ms < end_ms else ():
        slots = Slots(
            state=state, queue=wanted.queue, start_ms=start_ms, width_ms=end_ms - start_ms, count=1
        )
        found = await client.store.slot_counts(slots)
        if found is None:
            return None
        count += found.counts[0]
    return Counted(count, True, 0)


@dataclass(frozen=True, slots=True)
class SlotsCounted:
    """How many jobs are due in each slot; and how many were looked at, if there is no index."""

    counts: SlotCounts
    exact: bool
    looked: int


async def count_slots(
    client: Client,
    slots: Slots,
    *,
    look_most: int,
    look_s: float | None = None,
    visible: Callable[[Job], bool] = everything,
) -> SlotsCounted:
    """By the store's index of time, or by a look at up to `look_most` jobs."""
    if visible is everything:
        found = await client.store.slot_counts(slots)
        if found is not None:
            return SlotsCounted(found, True, 0)
    query = Query(state=slots.state, queue=slots.queue)
    enough = enough_looked(look_most, look_s)
    counts, looked = Counter[int](), 0
    cursor: str | None = None
    while not enough(looked):
        page = await client.find(query, cursor=cursor, limit=BATCH)
        looked += max(page.looked, len(page.jobs))
        seen = (job for job in page.jobs if visible(job))
        counts.update((time_ms(job) - slots.start_ms) // slots.width_ms for job in seen)
        cursor = page.cursor
        if cursor is None:
            break
    sums = SlotCounts(
        before=sum(jobs for slot, jobs in counts.items() if slot < 0),
        counts=[counts[slot] for slot in range(slots.count)],
        after=sum(jobs for slot, jobs in counts.items() if slot >= slots.count),
    )
    return SlotsCounted(sums, cursor is None, looked)
