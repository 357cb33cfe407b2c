"""How one looks at the jobs of the PostgreSQL store: by id, page by page, and what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec

from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.errors import BadConfig
from tickwheel.job import ENDED, Job, State
from tickwheel.store import Page, Query
from tickwheel.stores.postgres.steps import LEVELS, ROW_BYTES, Link, jobs_of

# How many jobs one page looks at when it is filtered by something that no index knows.
SCAN = 1000
# How many of the leases that end next are looked at: those that were extended end later.
SOONEST = 100
# So few jobs are read at once, whatever their size.
FEW = 8

# --- What comes next, and by id


async def get(db: Link, schema: str, ids: Sequence[str]) -> list[Job | None]:
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
        select min(since) from unnest(%(queues)s::text[]) as mine(queue), lateral (
            select min(lease_until_ms) as since from (
                select lease_until_ms from {schema}.job
                where state = 'running' and job.queue = mine.queue
                order by watch_ms limit {SOONEST}) as soonest
            union all
            select (select due_ms from {schema}.job
                    where state = 'waiting' and job.queue = mine.queue
                      and job.priority = level.priority
                    order by due_ms limit 1) - %(ahead)s
            from unnest(array{LEVELS}) as level(priority)) as claimable
        where not exists (select from {schema}.paused where paused.queue = mine.queue)"""


async def next_claimable_ms(db: Link, schema: str, queues: list[str], ahead_ms: int) -> int | None:
    cursor = await db.execute(_next(schema), {"queues": queues, "ahead": ahead_ms})
    [next_ms] = await cursor.fetchone() or [None]
    return next_ms


async def asked(db: Link, schema: str, worker: str) -> list[str]:
    cursor = await db.execute(f"select id from {schema}.job where asked and worker = %s", (worker,))
    return [id for (id,) in await cursor.fetchall()]


async def time_ns(db: Link) -> int:
    cursor = await db.execute("select (extract(epoch from clock_timestamp()) * 1e9)::bigint")
    [now_ns] = await cursor.fetchone() or [0]
    return int(now_ns)


# --- Page by page

# The order in which `find` goes through each state: along the index that the state has anyway.
# Waiting: what comes next, first; ended: what ended last, first.
_ALONG = {
    State.WAITING: (("queue", "priority", "due_ms", "n"), ">", "asc"),
    State.RUNNING: (("queue", "watch_ms", "n"), ">", "asc"),
    **{state: (("queue", "ended_ms", "n"), "<", "desc") for state in ENDED},
}


async def find(db: Link, schema: str, query: Query, cursor: str | None, limit: int) -> Page:
    states = [query.state] if query.state else list(State)
    at, key = _parse_cursor(cursor)
    if at is not None:
        states = states[states.index(at) :] if at in states else []
    picked: list[str] = []
    looked = total = 0
    for state in states:
        most = SCAN - looked if query.task is not None else limit - len(picked)
        for id, task, size, *found in await _keys(db, schema, state, query, key, most):
            key, looked = found, looked + 1
            if query.task in (None, task):
                picked.append(id)
                total += size
            if len(picked) == limit or looked == SCAN or total >= BATCH_BYTES:
                jobs = await _known(db, schema, picked)
                return Page(jobs=jobs, cursor=msgspec.json.encode([state, *key]).decode())
        key = None
    return Page(jobs=await _known(db, schema, picked))


def _parse_cursor(cursor: str | None) -> tuple[State | None, list[Any] | None]:
    if cursor is None:
        return None, None
    try:
        at, *key = msgspec.json.decode(cursor, type=list[Any])
        state = State(at)
        if len(key) == len(_ALONG[state][0]):
            return state, key
    except (msgspec.DecodeError, ValueError):
        pass
    raise BadConfig(f"{cursor!r} is not a cursor that a page gave")


async def _keys(
    db: Link, schema: str, state: State, query: Query, after: list[Any] | None, limit: int
) -> list[tuple[Any, ...]]:
    columns, beyond, order = _ALONG[state]
    # The state is written out: a partial index is used only where its condition is in the query.
    conditions = [f"state = '{state}'"]
    if state.ended:
        conditions.append("ended_ms is not null")
    if query.queue is not None:
        conditions.append("queue = %(queue)s")
    if after is not None:
        marks = ", ".join(f"%(k{i})s" for i in range(len(columns)))
        conditions.append(f"({', '.join(columns)}) {beyond} ({marks})")
    cursor = await db.execute(
        f"""select id, task, {ROW_BYTES}, {", ".join(columns)} from {schema}.job
            where {" and ".join(conditions)}
            order by {", ".join(f"{column} {order}" for column in columns)} limit %(limit)s""",
        {"limit": limit, "queue": query.queue}
        | {f"k{i}": value for i, value in enumerate(after or [])},
    )
    return await cursor.fetchall()


async def _known(db: Link, schema: str, ids: Sequence[str]) -> list[Job]:
    found = {job.id: job for job in await jobs_of(db, schema, ids)} if ids else {}
    return [found[id] for id in ids if id in found]
