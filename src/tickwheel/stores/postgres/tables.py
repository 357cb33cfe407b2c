"""The PostgreSQL store's smaller tables: schedules, queues and their counts, workers, buckets."""

from __future__ import annotations

from typing import Any

import msgspec

from tickwheel import job as life
from tickwheel.schedule import Schedule
from tickwheel.store import QueueInfo, WorkerInfo
from tickwheel.stores.postgres.steps import Link
from tickwheel.throttle import MS_NS, Rate, admit

# How many rows of counts are folded into few at once.
FOLD = 20_000

# --- Schedules


async def put_schedule(db: Link, schema: str, schedule: Schedule) -> Schedule:
    # Never a fence that an earlier schedule of the same name had.
    schedule = msgspec.structs.replace(schedule, fence=life.new_fence())
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


async def delete_schedule(db: Link, schema: str, name: str) -> bool:
    cursor = await db.execute(f"delete from {schema}.schedule where name = %s", (name,))
    return cursor.rowcount > 0


async def schedules(db: Link, schema: str) -> list[Schedule]:
    cursor = await db.execute(
        f"""select name, rule, next_ms, paused, last_id, fence from {schema}.schedule
            order by name"""
    )
    names = ("name", "rule", "next_ms", "paused", "last_id", "fence")
    return [Schedule(**dict(zip(names, row, strict=True))) for row in await cursor.fetchall()]


# --- Queues and their counts


async def pause(db: Link, schema: str, queue: str, paused: bool) -> None:
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


async def queues(db: Link, schema: str) -> tuple[list[QueueInfo], int]:
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


async def fold(db: Link, schema: str) -> None:
    """Make few rows of many counts. What another is folding is left to it."""
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


# --- Workers


async def beat(db: Link, schema: str, worker: WorkerInfo) -> None:
    """Those that are long gone are forgotten by the way."""
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


async def strike_off(db: Link, schema: str, name: str) -> None:
    await db.execute(f"delete from {schema}.worker where name = %s", (name,))


async def workers(db: Link, schema: str, now_ms: int) -> list[WorkerInfo]:
    cursor = await db.execute(
        f"select info from {schema}.worker where gone_ms > %s order by name", (now_ms,)
    )
    return [msgspec.json.decode(info, type=WorkerInfo) for (info,) in await cursor.fetchall()]


# --- Buckets


async def throttle(db: Link, schema: str, key: str, rate: Rate, now_ms: int) -> int:
    """`throttle.admit` in one statement; where it has no token to give, the mark says how long."""
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
