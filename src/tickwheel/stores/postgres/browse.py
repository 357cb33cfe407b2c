"""What the PostgreSQL store only reads: each function is one query, on a given connection."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import msgspec

from tickwheel.batch import portions
from tickwheel.job import Job, State
from tickwheel.schedule import Schedule
from tickwheel.store import Ask, Page, Query, QueueInfo, SlotCounts, Slots, WorkerInfo
from tickwheel.stores.pager import MetaPager, Pager, Table
from tickwheel.stores.postgres import parking
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.rows import LEVELS, ROW_BYTES, jobs_of

# How many running jobs are checked for the lease that ends next: extended leases end later than
# `watch_ms` says.
SOONEST = 100
# So few jobs are read in one go, whatever their size.
FEW = 8

# --- By id, and what comes next


async def get(db: Connection, schema: str, ids: Sequence[str]) -> list[Job | None]:
    if len(ids) <= FEW:
        sizes: list[tuple[Any, ...]] = [(id, 0) for id in ids]
    else:
        cursor = await db.execute(
            f"select id, {ROW_BYTES} from {schema}.job where id = any(%s)", (list(ids),)
        )
        sizes = await cursor.fetchall()
    found: dict[str, Job] = {}
    for some in portions(sizes, itemgetter(1)):
        found |= {job.id: job for job in await jobs_of(db, schema, [id for id, _ in some])}
    return [found.get(id) for id in ids]


@cache
def _next(schema: str) -> str:
    return f"""
        with recursive {parking.heads(schema)}
        select min(since) from (
            select due_ms - %(ahead)s as since from known
            union all
            select free.since from unnest(%(queues)s::text[]) as mine(queue), lateral (
                select min(lease_until_ms) as since from (
                    select lease_until_ms from {schema}.job
                    where state = 'running' and job.queue = mine.queue
                    order by watch_ms limit {SOONEST}) as soonest
                union all
                select (select due_ms from {schema}.job
                        where state = 'waiting' and job.queue = mine.queue
                          and job.priority = level.priority
                        order by due_ms limit 1) - %(ahead)s
                from unnest(array{LEVELS}) as level(priority)) as free
            where not exists (
                select from {schema}.paused where paused.queue = mine.queue)) as claimable"""


async def next_claimable_ms(
    db: Connection, schema: str, queues: list[str], tasks: frozenset[str], ahead_ms: int
) -> int | None:
    where = {"queues": queues, "tasks": parking.names_of(tasks), "ahead": ahead_ms}
    cursor = await db.execute(_next(schema), where)
    [next_ms] = await cursor.fetchone() or [None]
    return next_ms


async def asked(db: Connection, schema: str, worker: str) -> dict[str, Ask]:
    cursor = await db.execute(
        f"""select id, asked from {schema}.job where asked and worker = %(worker)s
            union all
            select id, asked from {schema}.job
            where told and not asked and worker = %(worker)s and state = 'running'""",
        {"worker": worker},
    )
    return {id: Ask.STOP if stop else Ask.PUT_BACK for id, stop in await cursor.fetchall()}


async def time_ns(db: Connection) -> int:
    cursor = await db.execute("select (extract(epoch from clock_timestamp()) * 1e9)::bigint")
    [now_ns] = await cursor.fetchone() or [0]
    return int(now_ns)


# --- Page by page


@cache
def _tagged(schema: str) -> str:
    # The limits keep the server on the two keys, whatever its statistics say.
    return f"""
        with tagged as materialized (
            select n, id from {schema}.job_meta
            where name = %(name)s and value = %(value)s and n < %(below)s
            order by name desc, value desc, n desc limit %(limit)s)
        select found.*, tagged.n from tagged, lateral (
            select id, state::text, queue, task, coalesce(ended_ms, due_ms), {ROW_BYTES}
            from {schema}.job
            where job.id = tagged.id limit 1) as found
        order by tagged.n desc"""


async def find(db: Connection, schema: str, query: Query, cursor: str | None, limit: int) -> Page:
    table = Table(
        f"{schema}.job",
        key="id",
        size=ROW_BYTES,
        running="watch_ms",
        mark="%({})s",
        timed=partial(_timed, schema),
    )
    pager: Pager | MetaPager
    if query.meta is None:
        pager = Pager(table, query, cursor, limit)
    else:
        pager = MetaPager(table, _tagged(schema), query, cursor, limit)
    while (read := pager.next_read()) is not None:
        pager.take(await (await db.execute(*read)).fetchall())
    jobs = await _known(db, schema, pager.picked)
    return Page(jobs=jobs, cursor=pager.cursor, looked=pager.looked)


def _lanes(schema: str, state: str, *, queue: bool) -> tuple[str, str]:
    """The lanes, each one range of an index, and which jobs are in one. Parked jobs have a priority
    below 0."""
    queues = (
        "select %(queue)s::text as queue"
        if queue
        else f"select distinct queue from {schema}.tally where state = '{state}'"
    )
    if state != State.WAITING:
        inside = f"state = '{state}' and ended_ms is not null and job.queue = lane.queue"
        return queues, inside
    lanes = f"select queue, level from ({queues}) as mine, generate_series(-4, 3) as level"
    return lanes, "state = 'waiting' and job.queue = lane.queue and priority = lane.level"


@cache
def _timed(schema: str, state: str, *, queue: bool, after: bool) -> str:
    """See `pager.Timed`."""
    lanes, inside = _lanes(schema, state, queue=queue)
    ms, order, beyond = ("due_ms", "", ">") if state == State.WAITING else ("ended_ms", "desc", "<")
    behind = f"and ({ms}, n) {beyond} (%(ms)s, %(n)s)" if after else ""
    columns = "queue, priority" if state == State.WAITING else "state, queue"
    by = ", ".join(f"{each} {order}" for each in f"{columns}, {ms}, n".split(", "))
    return f"""
        select found.* from ({lanes}) as lane, lateral (
            select id, task, {ROW_BYTES}, {ms} as ms, n from {schema}.job
            where {inside} and {ms} >= %(from)s and {ms} < %(until)s {behind}
            order by {by} limit %(limit)s) as found
        order by ms {order}, n {order} limit %(limit)s"""


async def slot_counts(db: Connection, schema: str, slots: Slots) -> SlotCounts:
    """What comes after the last slot is the rest, and not counted."""
    lanes, inside = _lanes(schema, slots.state, queue=slots.queue is not None)
    ms = "due_ms" if slots.state is State.WAITING else "ended_ms"
    cursor = await db.execute(
        f"""select greatest(floor(({ms} - %(start)s) / %(width)s::numeric), -1)::int, count(*)
            from ({lanes}) as lane join {schema}.job on {inside} and {ms} < %(end)s group by 1
            union all
            select null, coalesce(sum(jobs), 0) from {schema}.tally
            where state = '{slots.state}' and queue = coalesce(%(queue)s, queue)""",
        {
            "queue": slots.queue,
            "start": slots.start_ms,
            "end": slots.end_ms,
            "width": slots.width_ms,
        },
    )
    found: dict[int | None, int] = {slot: int(jobs) for slot, jobs in await cursor.fetchall()}
    total = found.pop(None, 0)
    return SlotCounts(
        before=found.get(-1, 0),
        counts=[found.get(slot, 0) for slot in range(slots.count)],
        after=total - sum(found.values()),
    )


async def _known(db: Connection, schema: str, ids: Sequence[str]) -> list[Job]:
    found = {job.id: job for job in await jobs_of(db, schema, ids)} if ids else {}
    return [found[id] for id in ids if id in found]


# --- Parked jobs


async def parked(db: Connection, schema: str) -> list[Job]:
    """Of each queue and task, the parked job that is due first."""
    cursor = await db.execute(parking.first_jobs(schema))
    found = await get(db, schema, [id for (id,) in await cursor.fetchall()])
    return [job for job in found if job is not None and job.parked]


# --- Schedules, queues and workers


async def records(
    db: Connection, schema: str, kind: str, after: str, limit: int
) -> list[tuple[Any, ...]]:
    cursor = await db.execute(
        f"""select name, body from {schema}.record where kind = %s and name > %s
            order by name limit %s""",
        (kind, after, limit),
    )
    return await cursor.fetchall()


async def get_records(
    db: Connection, schema: str, kind: str, names: Sequence[str]
) -> list[str | None]:
    cursor = await db.execute(
        f"select name, body from {schema}.record where kind = %s and name = any(%s)",
        (kind, list(names)),
    )
    found = {name: body for name, body in await cursor.fetchall()}
    return [found.get(name) for name in names]


async def schedules(db: Connection, schema: str) -> list[Schedule]:
    cursor = await db.execute(
        f"""select name, rule, next_ms, paused, last_id, fence from {schema}.schedule
            order by name"""
    )
    names = ("name", "rule", "next_ms", "paused", "last_id", "fence")
    return [Schedule(**dict(zip(names, row, strict=True))) for row in await cursor.fetchall()]


async def queues(db: Connection, schema: str) -> tuple[list[QueueInfo], int]:
    """The queues, and how many rows their counts were the sum of."""
    cursor = await db.execute(
        f"""select queue, state::text, sum(jobs)::bigint, count(*) from {schema}.tally
            group by queue, state
            union all select queue, 'paused', 1, 0 from {schema}.paused"""
    )
    found: dict[str, dict[str, Any]] = {}
    rows = 0
    for queue, state, jobs, summed in await cursor.fetchall():
        rows += summed
        if jobs:
            found.setdefault(queue, {})[state] = True if state == "paused" else jobs
    return [QueueInfo(name=name, **found[name]) for name in sorted(found)], rows


async def workers(db: Connection, schema: str, now_ms: int) -> list[WorkerInfo]:
    cursor = await db.execute(
        f"select info from {schema}.worker where gone_ms > %s order by name", (now_ms,)
    )
    return [msgspec.json.decode(info, type=WorkerInfo) for (info,) in await cursor.fetchall()]
