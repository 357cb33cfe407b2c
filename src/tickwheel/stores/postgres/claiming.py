"""Claims in PostgreSQL: one statement, unless leases have run out or known jobs are parked."""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import Any

from tickwheel import job as life
from tickwheel.batch import BATCH, BATCH_BYTES, portions
from tickwheel.job import Job, State
from tickwheel.stores.postgres import parking, rows
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.rows import (
    LEVELS,
    ROW,
    ROW_BYTES,
    TRIES,
    job_of,
    write_jobs,
)

_PICKED = f"ctid, due_ms, n, {ROW_BYTES} as bytes"


def _waiting(schema: str, queue: str, level: int) -> str:
    """The waiting jobs of one queue and one priority, best first: one range of the index."""
    return f"""
        select {_PICKED} from {schema}.job
        where state = 'waiting' and queue = {queue} and priority = {level}
          and due_ms <= %(due)s and (select open from gate)
        order by due_ms, n limit %(limit)s for update skip locked"""


def _lost(schema: str, most: int, locked: str = "") -> str:
    """Up to `most` jobs of each queue whose leases have run out. It reads the head of the index,
    queue by queue: for a query of all queues, the server might read the whole table."""
    return f"""
        select late.* from unnest(%(queues)s::text[]) as mine(queue), lateral (
            select id, priority, lease_until_ms, n, {ROW_BYTES} as bytes from {schema}.job
            where state = 'running' and job.queue = mine.queue and watch_ms <= %(now)s
              and lease_until_ms <= %(now)s
            order by watch_ms, n limit {most} {locked}) as late
        where not exists (select from {schema}.paused where paused.queue = mine.queue)"""


@cache
def _picking(schema: str, several: bool, parked: bool = False) -> str:
    """The best jobs that can be claimed, locked, as many as fit in one reply. Rows that others have
    locked are skipped.

    The branches run one after the other, and only until there are enough. So with one queue, only
    rows that are taken are locked, unless jobs are large. With several queues, the best of each
    level are locked and the best of all are taken. Parked jobs go before others of their level:
    each of them was the best of its queue when it was parked.
    The update then finds them by ctid alone: with any other condition, the server might go along an
    index instead.
    """
    if not several:
        levels = [
            f"select * from ({_waiting(schema, '%(queue)s', level)}) as level{level}"
            for level in reversed(LEVELS)
        ]
    else:
        levels = [
            f"""(select ctid, due_ms, n, bytes from (
                    select best.* from unnest(%(queues)s::text[]) as mine(queue),
                    lateral ({_waiting(schema, "mine.queue", level)}) as best
                    where not exists (
                        select from {schema}.paused where paused.queue = mine.queue)
                 ) as level order by due_ms, n limit %(limit)s)"""
            for level in reversed(LEVELS)
        ]
    if parked:
        known = [f"({parking.best(schema, level, _PICKED)})" for level in reversed(LEVELS)]
        levels = [branch for pair in zip(known, levels, strict=True) for branch in pair]
    return _fitting(
        f"select ctid, bytes from ({' union all '.join(levels)}) as level limit %(limit)s"
    )


def _fitting(rows: str) -> str:
    """The first of these rows (ctid, bytes), as many as fit in one reply; at least one."""
    return f"""
        select ctid from (
            select ctid, sum(bytes) over (rows unbounded preceding) - bytes as before, bytes
            from ({rows}) as ranked) as summed
        where before = 0 or before + bytes <= {BATCH_BYTES}"""


@cache
def _claiming(schema: str, several: bool) -> str:
    """The usual claim. If leases have run out or jobs are parked, it says so and takes nothing."""
    paused = "false" if several else f"exists (select from {schema}.paused where queue = %(queue)s)"
    gate = f"""
        select lost, parked, not (paused or lost or parked) as open from (
            select {paused} as paused, exists ({_lost(schema, 1)}) as lost,
                {_parked(schema, several)} as parked) as found"""
    return f"with {_taking(schema, gate, _picking(schema, several))}"


@cache
def _claiming_parked(schema: str, several: bool) -> str:
    """The claim if jobs are parked. If leases have run out, it says so and takes nothing."""
    gate = f"""
        select lost, parked, not lost as open from (
            select exists ({_lost(schema, 1)}) as lost,
                {_parked(schema, several)} as parked) as found"""
    taking = _taking(schema, gate, _picking(schema, several=True, parked=True))
    return f"with recursive {parking.heads(schema)}, {taking}"


def _parked(schema: str, several: bool) -> str:
    """Whether jobs are parked in the queue. For several it is still one look: at all queues."""
    return parking.anything(schema, "" if several else "%(queue)s")


def _taking(schema: str, gate: str, picking: str) -> str:
    return f"""
        gate as materialized ({gate}),
        picked as materialized ({picking}),
        taken as (
            update {schema}.job set state = 'running', priority = priority & 3,
                attempt = attempt + 1, fence = %(call)s, worker = %(worker)s,
                lease_until_ms = %(until)s, watch_ms = %(until)s, progress = null
            where ctid = any(array(select ctid from picked))
            returning job.n, {ROW})
        select gate.lost, gate.parked, taken.* from gate left join taken on true"""


async def claim(
    db: Connection,
    schema: str,
    queues: list[str],
    tasks: frozenset[str],
    where: dict[str, Any],
    lease_ms: int,
    *,
    parked: bool,
) -> tuple[list[Job], bool]:
    """The jobs, and whether any are parked; if it was known that some are, that saves a statement.

    `where` has worker, call, now, due (the latest) and limit.
    """
    until = where["now"] + lease_ms
    where = where | {"queues": queues, "queue": queues[0], "until": until}
    several = len(queues) > 1
    rows: list[tuple[Any, ...]] = []
    if not parked:
        rows = await (await db.execute(_claiming(schema, several), where)).fetchall()
        parked = rows[0][1]
    where["tasks"] = parking.names_of(tasks)
    if parked:
        rows = await (await db.execute(_claiming_parked(schema, several), where)).fetchall()
    [lost, parked, *_] = rows[0]
    if lost:
        return await _claim_with_lost(db, schema, tasks, where, lease_ms), parked
    taken = [(row[2], job_of(row[3:])) for row in rows if row[2] is not None]
    # An update returns its rows in no order.
    taken.sort(key=lambda each: (-each[1].priority, each[1].due_ms, each[0]))
    return [job for _, job in taken], parked


async def claimed_by(
    db: Connection, schema: str, queues: list[str], worker: str, call: int
) -> list[Job]:
    """The jobs that the claim with this number took. Reads all running jobs, which is fine because
    it is rare: only after a lost reply."""
    cursor = await db.execute(
        f"""select {ROW} from {schema}.job where state = 'running' and queue = any(%(queues)s)
            and worker = %(worker)s and fence = %(call)s""",
        {"queues": queues, "worker": worker, "call": call},
    )
    return [job_of(row) for row in await cursor.fetchall()]


@cache
def _ranking(schema: str) -> str:
    """The best jobs that can be claimed, lost ones included. Rows that others have locked are
    skipped. The reply is small, so these locks are held only briefly."""
    return f"""
        with recursive {parking.heads(schema)},
        gate as materialized (select true as open),
        picked as materialized ({_picking(schema, several=True, parked=True)}),
        waiting as materialized (
            select id, priority & 3 as priority, due_ms - %(ahead)s as since, n,
                {ROW_BYTES} as bytes
            from {schema}.job where ctid = any(array(select ctid from picked)))
        select id, bytes from (
            select id, priority, lease_until_ms as since, n, bytes
            from ({_lost(schema, BATCH, "for update skip locked")}) as lost
            union all select * from waiting) as best
        order by priority desc, since, n limit %(limit)s"""


async def _claim_with_lost(
    db: Connection, schema: str, tasks: frozenset[str], where: dict[str, Any], lease_ms: int
) -> list[Job]:
    """A claim if some leases have run out: rare, so each job is read, decided and written.

    Nothing is locked in between, so a worker that is cut off then blocks nobody. A job that changed
    after it was read is left alone.
    """
    where = where | {"ahead": where["due"] - where["now"]}
    for _ in range(TRIES):
        best = await (await db.execute(_ranking(schema), where)).fetchall()
        ids = [id for id, _ in next(portions(best, itemgetter(1)), [])]
        seen = await rows.marked(db, schema, ids)
        changes = [
            (mark, _claimed(job, where, lease_ms))
            for mark, job in (seen[id] for id in ids if id in seen)
            if _claimable(job, tasks, where)
        ]
        written = await write_jobs(db, schema, changes, "skip locked")
        if written or not best:
            taken = [job for _, job in changes if job.id in written]
            return [job for job in taken if job.state is State.RUNNING]
    return []


def _claimable(job: Job, tasks: frozenset[str], where: dict[str, Any]) -> bool:
    if job.parked and job.task not in tasks:
        return False
    since_ms = life.claimable_ms(job, ahead_ms=where["ahead"])
    return since_ms is not None and since_ms <= where["now"]


def _claimed(job: Job, where: dict[str, Any], lease_ms: int) -> Job:
    return life.claimed(
        job, worker=where["worker"], fence=where["call"], now_ms=where["now"], lease_ms=lease_ms
    )
