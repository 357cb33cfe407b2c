"""The PostgreSQL store's statements: each function is one step, on a given connection.

A step is one statement: one transaction and one round trip. Only if `tickwheel.job` needs the whole
job to decide (its lease ran out) is the job read first, and written if it has not changed since.
Nothing stays locked from one round trip to the next: if a node were cut off in between, the server
would keep its locks until TCP gives up.

A batch goes into a statement as one JSON text. A step names the rows that it changes in the order
of their ids, so that two batches never deadlock.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.batch import portions
from tickwheel.errors import StoreUnavailable
from tickwheel.ids import new_fence
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.limit import MS_NS, Rate, admit
from tickwheel.schedule import Schedule
from tickwheel.store import WorkerInfo
from tickwheel.stores.postgres import rows
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.rows import (
    ROW_BYTES,
    TRIES,
    encoded,
    new,
    record,
    write_jobs,
)

T = TypeVar("T")

# How many rows of counts are folded into few at once.
FOLD = 20_000

# --- Adding

# What `job.added` keeps of a job; the other columns have the defaults that it sets.
_ADDED = (
    "id", "task", "payload", "queue", "priority", "due_ms", "created_ms", "retries", "timeout_ms",
    "attempt", "failures", "takeovers", "worker", "error", "history",
)  # fmt: skip
# The same, of jobs that have one of these: columns that came later.
_WHOLE = (*_ADDED, "expires_ms", "meta", "progress", "traceback", "changes")


@cache
def _adding(schema: str, columns: tuple[str, ...]) -> str:
    return f"""
        insert into {schema}.job ({", ".join(columns)})
        select {", ".join(map(new, columns))} from {record(columns)}
        on conflict do nothing returning id"""


def adding(jobs: Sequence[Job], schema: str = "tickwheel") -> tuple[str, dict[str, Any]]:
    """The statement that adds these jobs, and its parameters, for any psycopg connection.

    It returns the ids that were added, in no order. In the caller's transaction, the jobs exist and
    workers are told about them once it is committed.
    """
    # Plain jobs can be added before the schema is upgraded: a web server of a new release may start
    # before the first worker. Only jobs from another store have progress or a traceback.
    whole = any(
        job.attempt or job.meta is not None or job.expires_ms is not None or job.changes
        for job in jobs
    )
    return _adding(schema, _WHOLE if whole else _ADDED), {"jobs": encoded(jobs)}


async def add(db: Connection, schema: str, jobs: Sequence[Job]) -> list[bool]:
    cursor = await db.execute(*adding(jobs, schema))
    if cursor.rowcount == len(jobs):
        return [True] * len(jobs)
    return life.which_added(jobs, [id for (id,) in await cursor.fetchall()])


# --- Operators' steps


@cache
def _cancelling(schema: str) -> str:
    return f"""
        with lost as materialized (
            select exists (
                select from {schema}.job
                where id = any(%(ids)s) and lease_until_ms <= %(now)s) as any)
        update {schema}.job set
            state = case state when 'waiting' then 'cancelled' else state end,
            ended_ms = case state when 'waiting' then %(now)s::bigint end,
            asked = state = 'running', priority = priority & 3
        where id = any(%(ids)s) and not (select lost.any from lost)
          and (state = 'waiting' or lease_until_ms > %(now)s) and not told
        returning id, state"""


async def cancel(
    db: Connection, schema: str, ids: Sequence[str], now_ms: int
) -> list[CancelOutcome]:
    named = sorted(set(ids))
    cursor = await db.execute(_cancelling(schema), {"ids": named, "now": now_ms})
    answers = {
        id: CancelOutcome.REQUESTED if state == State.RUNNING else CancelOutcome.CANCELLED
        for id, state in await cursor.fetchall()
    }
    if rest := [id for id in named if id not in answers]:
        answers |= await _cancel_each(db, schema, rest, now_ms)
    return [answers[id] for id in ids]


async def _cancel_each(
    db: Connection, schema: str, ids: Sequence[str], now_ms: int
) -> dict[str, CancelOutcome]:
    """Cancel jobs that have ended, are unknown, or whose lease has run out."""
    answers = dict.fromkeys(ids, CancelOutcome.UNKNOWN)
    rest = list(ids)
    for _ in range(TRIES):
        cursor = await db.execute(
            f"select id, {ROW_BYTES}, ended_ms is not null from {schema}.job where id = any(%s)",
            (rest,),
        )
        found = await cursor.fetchall()
        answers |= {id: CancelOutcome.TOO_LATE for id, _, ended in found if ended}
        live, rest = [(id, size) for id, size, ended in found if not ended], []
        for some in portions(live, itemgetter(1)):
            seen = await rows.marked(db, schema, [id for id, _ in some])
            told = {id: life.cancel(job, now_ms=now_ms) for id, (_, job) in seen.items()}
            changed = [(seen[id][0], job) for id, (_, job) in told.items()]
            written = await write_jobs(db, schema, changed)
            answers |= {id: answer for id, (answer, _) in told.items() if id in written}
            rest += [id for id in told if id not in written]
        if not rest:
            return answers
    raise StoreUnavailable(
        f"{len(rest)} jobs kept changing while they were being cancelled; try again"
    )


# Not the condition of the index of ended jobs: with that one, the server might go through all of
# them to find the few that are named.
_HAS_ENDED = "state in ('done', 'dead', 'cancelled')"


async def rerun(db: Connection, schema: str, ids: Sequence[str], now_ms: int) -> list[bool]:
    cursor = await db.execute(
        f"""update {schema}.job set state = 'waiting', priority = priority & 3, due_ms = %s,
                expires_ms = null, failures = 0, takeovers = 0, ended_ms = null, error = null,
                traceback = null, result = null
            where id = any(%s) and {_HAS_ENDED} returning id""",
        (now_ms, sorted(set(ids))),
    )
    ended = {id for (id,) in await cursor.fetchall()}
    return [id in ended for id in ids]


async def delete(db: Connection, schema: str, ids: Sequence[str]) -> list[bool]:
    cursor = await db.execute(
        f"delete from {schema}.job where id = any(%s) and {_HAS_ENDED} returning id",
        (sorted(set(ids)),),
    )
    ended = {id for (id,) in await cursor.fetchall()}
    return [id in ended for id in ids]


async def prune(
    db: Connection, schema: str, states: Sequence[State], before_ms: int, limit: int
) -> int:
    cursor = await db.execute(
        f"""delete from {schema}.job where ctid = any(array(
                select old.ctid
                from (select distinct queue from {schema}.tally) as known,
                     unnest(%s::{schema}.state[]) as wanted(state),
                     lateral (select ctid from {schema}.job
                              where state = wanted.state and queue = known.queue
                                and ended_ms < %s
                              order by ended_ms limit %s for update skip locked) as old
                limit %s))""",
        ([state.value for state in states], before_ms, limit, limit),
    )
    return cursor.rowcount


# --- Schedules


@cache
def _firing(schema: str) -> str:
    return f"""
        with moved as (
            update {schema}.schedule set next_ms = %(next)s,
                last_id = coalesce(%(last)s, last_id), fence = %(fence)s
            where name = %(name)s and fence = %(old)s returning name),
        fired as (
            insert into {schema}.job ({", ".join(_WHOLE)})
            select {", ".join(map(new, _WHOLE))} from {record(_WHOLE)}
            where exists (select from moved)
            on conflict do nothing)
        select count(*) from moved"""


async def fire(
    db: Connection, schema: str, schedule: Schedule, jobs: Sequence[Job], next_ms: int | None
) -> bool:
    cursor = await db.execute(
        _firing(schema),
        {
            "name": schedule.name,
            "old": schedule.fence,
            "next": next_ms,
            "last": jobs[-1].id if jobs else None,
            "fence": new_fence(),
            "jobs": encoded(jobs),
        },
    )
    return await cursor.fetchone() == (1,)


async def put_schedule(db: Connection, schema: str, schedule: Schedule) -> Schedule:
    # Random, so that no earlier schedule of the same name had it.
    schedule = msgspec.structs.replace(schedule, fence=new_fence())
    await db.execute(
        f"""insert into {schema}.schedule (name, rule, next_ms, paused, last_id, fence)
            values (%s, %s, %s, %s, %s, %s)
            on conflict (name) do update set
                rule = excluded.rule, next_ms = excluded.next_ms, paused = excluded.paused,
                last_id = excluded.last_id, fence = excluded.fence""",
        (
            schedule.name,
            schedule.rule,
            schedule.next_ms,
            schedule.paused,
            schedule.last_id,
            schedule.fence,
        ),
    )
    return schedule


async def replace_schedule(db: Connection, schema: str, schedule: Schedule) -> bool:
    cursor = await db.execute(
        f"""update {schema}.schedule
            set rule = %s, next_ms = %s, paused = %s, last_id = %s, fence = %s
            where name = %s and fence = %s""",
        (
            schedule.rule,
            schedule.next_ms,
            schedule.paused,
            schedule.last_id,
            new_fence(),
            schedule.name,
            schedule.fence,
        ),
    )
    return cursor.rowcount > 0


async def delete_schedule(db: Connection, schema: str, name: str) -> bool:
    cursor = await db.execute(f"delete from {schema}.schedule where name = %s", (name,))
    return cursor.rowcount > 0


# --- Records


async def put_records(
    db: Connection, schema: str, kind: str, records: Sequence[tuple[str, str]]
) -> None:
    # In one order, so that two who put the same records don't wait for each other.
    names, bodies = zip(*sorted(records), strict=True)
    await db.execute(
        f"""insert into {schema}.record
            select %s, name, body from unnest(%s::text[], %s::text[]) as new(name, body)
            on conflict (kind, name) do update set body = excluded.body""",
        (kind, list(names), list(bodies)),
    )


async def delete_records(db: Connection, schema: str, kind: str, names: Sequence[str]) -> list[str]:
    """Returns the names of those that there were."""
    cursor = await db.execute(
        f"delete from {schema}.record where kind = %s and name = any(%s) returning name",
        (kind, list(names)),
    )
    return [name for (name,) in await cursor.fetchall()]


# --- Queues and their counts


async def pause(db: Connection, schema: str, queue: str, paused: bool) -> None:
    if paused:
        await db.execute(
            f"insert into {schema}.paused values (%s) on conflict do nothing", (queue,)
        )
    else:
        await db.execute(
            f"""with gone as (delete from {schema}.paused where queue = %s returning queue)
                select {schema}.tell('q', queue) from gone""",
            (queue,),
        )


async def fold(db: Connection, schema: str) -> None:
    """Sum up many rows of counts in a few. Rows that another session is folding are skipped."""
    await db.execute(
        f"""with folded as (
                delete from {schema}.tally where ctid = any(array(
                    select ctid from {schema}.tally limit %s for update skip locked))
                returning queue, state, jobs)
            insert into {schema}.tally
            select queue, state, sum(jobs) from folded group by queue, state
            having sum(jobs) <> 0""",
        (FOLD,),
    )


# --- Workers and buckets


async def beat(db: Connection, schema: str, worker: WorkerInfo) -> None:
    """Note that the worker is alive, and delete workers that are gone."""
    await db.execute(
        f"""with gone as (
                delete from {schema}.worker where ctid = any(array(
                    select ctid from {schema}.worker
                    where name <> %(name)s and gone_ms < %(seen)s for update skip locked)))
            insert into {schema}.worker values (%(name)s, %(info)s, %(gone)s)
            on conflict (name) do update set info = excluded.info, gone_ms = excluded.gone_ms""",
        {
            "name": worker.name,
            "info": msgspec.json.encode(worker).decode(),
            "seen": worker.seen_ms,
            "gone": worker.seen_ms + worker.gone_after_ms,
        },
    )


async def remove_worker(db: Connection, schema: str, name: str) -> None:
    await db.execute(f"delete from {schema}.worker where name = %s", (name,))


async def throttle(db: Connection, schema: str, key: str, rate: Rate, now_ms: int) -> int:
    """`limit.admit` in one statement; if no token is left, the mark says how long to wait."""
    cost_ns = -(-rate.period_ms * MS_NS // rate.limit)
    now_ns = now_ms * MS_NS
    cursor = await db.execute(
        f"""insert into {schema}.bucket as b values (%(key)s, %(now)s + %(cost)s)
            on conflict (key) do update
            set full_at_ns = greatest(b.full_at_ns, %(now)s) + %(cost)s
            where greatest(b.full_at_ns, %(now)s) - %(spare)s <= %(now)s
            returning full_at_ns""",
        {"key": key, "now": now_ns, "cost": cost_ns, "spare": cost_ns * (rate.burst - 1)},
    )
    if await cursor.fetchone() is not None:
        return 0
    cursor = await db.execute(f"select full_at_ns from {schema}.bucket where key = %s", (key,))
    [mark] = await cursor.fetchone() or [None]
    return max(admit(mark, rate, now_ms)[1], 1)
