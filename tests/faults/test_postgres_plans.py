"""With two million jobs no step of the PostgreSQL store reads more than its share of them.

Whatever the statistics say: none, those of an empty table, those of a few jobs that were all
running or parked, and true ones. And whoever asks: our own sessions, with plans that they made
while there were no jobs; sessions behind a pooler, with the server's own settings; the users' own
ones, where our triggers run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import psycopg
import pytest

from postgres_server import BadLine, PostgresServer
from tickwheel import job as life
from tickwheel.job import ENDED, Job, State
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import Query, WorkerInfo, open_store
from tickwheel.stores.postgres.browse import next_claimable_ms
from tickwheel.stores.postgres.store import PostgresStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOBS = 2_000_000
# Rows and entries of indexes that a step may look at. The largest, a claim among lost jobs, looks
# at up to a thousand of each kind in each queue, and a few times over.
ROWS = 10_000
NOW = time.time_ns() // 1_000_000
QUEUES = ["default", "q1", "q2"]

# Nearly all wait in one queue with one priority and are due later, while most that were due have
# ended: an estimate from each of these alone is far off. A few are overdue, and a few of those that
# run have lost their holder.
LOAD = f"""
    insert into tickwheel.job (
        id, task, payload, queue, priority, due_ms, created_ms, state, fence, worker,
        lease_until_ms, watch_ms, ended_ms, meta)
    select lpad(n::text, 11, '0'), 't', '{{}}', queue,
        case when n %% 50 = 0 then n / 50 %% 4 else 1 end,
        case when state <> 'waiting' or n %% 1000 = 7 then {NOW} - 600000 - far
             else {NOW} + 10000 + far end,
        {NOW} - 1000, state::tickwheel.state, n, 'gone',
        case state when 'running' then until_ms end, case state when 'running' then until_ms end,
        case when state in ('done', 'dead', 'cancelled') then {NOW} - n end,
        case when n %% 20 in (1, 8) then '{{"batch": "all", "customer": "' || n / 100 || '"}}' end
    from (
        select n, (n::bigint * 7919 * 104729) %% 2000000000 as far,
            case when n %% 40 = 7 then 'q' || n %% 3 else 'default' end as queue,
            case n %% 40 when 6 then 'running' when 8 then 'dead' when 9 then 'cancelled'
                when 5 then 'done' else 'waiting' end as state,
            {NOW} + case when n %% 1000 = 6 then -n %% 50000 else 600000 + n %% 1000 end as until_ms
        from generate_series(%s::int, %s) as n) as made"""

# One in ten has meta, and nearly all of these the same.
ALL, ONE = ("batch", "all"), ("customer", "5000")

# Twenty tasks have as many jobs each, nearly all with one priority; those of the last are due last.
PARKED = 20_000
PARK = f"""
    insert into tickwheel.job (id, task, payload, queue, priority, due_ms, created_ms, attempt)
    select 'parked ' || n, 'parked' || n * 20 / %(parked)s, '{{}}',
        case when n %% 10 = 3 then 'q1' else 'default' end,
        case when n %% 50 = 0 then n / 50 %% 4 else 1 end - 4, {NOW} - 600000 + n, {NOW}, 1
    from generate_series(0, %(parked)s - 1) as n"""
# A worker knows a thousand tasks, and of those that are parked none, or the last.
IGNORANT = frozenset(f"known{n}" for n in range(1000))
KNOWING = IGNORANT | {"parked19"}

ALL_RUN = """
    update tickwheel.job
    set state = 'running', watch_ms = 1, lease_until_ms = 1, ended_ms = null"""


@dataclass
class Trial:
    """One session's steps, each with ids of its own."""

    store: PostgresStore
    name: str
    count: int = 0
    tagged: list[str] = field(default_factory=list)
    held: list[Job] = field(default_factory=list)

    def jobs(self, count: int) -> list[Job]:
        self.count += count
        numbers = range(self.count - count, self.count)
        return [
            Job(id=f"{self.name} {n}", task="t", payload="{}", due_ms=NOW, created_ms=NOW)
            for n in numbers
        ]


Step = Callable[[Trial], Awaitable[object]]


async def _add(trial: Trial) -> None:
    await trial.store.add(trial.jobs(10))


async def _claim(
    trial: Trial, *, queues: list[str], now_ms: int = NOW, tasks: frozenset[str] = IGNORANT
) -> None:
    trial.held = await trial.store.claim(
        queues, worker="w", limit=10, now_ms=now_ms, lease_ms=60_000, tasks=tasks
    )


async def _claim_parked(trial: Trial, *, queues: list[str], now_ms: int = NOW - 60_000) -> None:
    await _claim(trial, queues=queues, now_ms=now_ms, tasks=KNOWING)
    # Otherwise the step shows nothing. Lost jobs go first.
    assert now_ms == NOW or "parked19" in {job.task for job in trial.held}


async def _park(trial: Trial) -> None:
    parked = [life.park(job, ended_ms=NOW) for job in trial.held]
    await trial.store.settle(parked, now_ms=NOW - 60_000)


async def _extend(trial: Trial) -> None:
    await trial.store.extend(trial.held, now_ms=NOW, lease_ms=60_000)


async def _settle(trial: Trial) -> None:
    done = [life.done(job, started_ms=NOW, ended_ms=NOW) for job in trial.held]
    await trial.store.settle(done, now_ms=NOW)
    # And once more, as after a lost reply.
    await trial.store.settle(done, now_ms=NOW)


async def _cancel(trial: Trial) -> None:
    await trial.store.cancel(IDS, now_ms=NOW)


async def _fire(trial: Trial) -> None:
    rule = Schedule(name=trial.name, rule="{}", next_ms=NOW, paused=False)
    schedule = await trial.store.put_schedule(rule)
    await trial.store.fire(schedule, trial.jobs(1), next_ms=NOW + 1000)


async def _records(trial: Trial) -> None:
    await trial.store.put_records("key", dict.fromkeys(IDS, "text"))
    assert len(await trial.store.records("key", after=IDS[0], limit=10)) == 10
    assert await trial.store.get_records("key", IDS[:2]) == ["text"] * 2
    assert all(await trial.store.delete_records("key", IDS))


async def _find(trial: Trial, query: Query) -> None:
    page = await trial.store.find(query, limit=20)
    if page.cursor is not None:
        await trial.store.find(query, cursor=page.cursor, limit=20)


async def _beat(trial: Trial) -> None:
    await trial.store.beat(
        WorkerInfo(
            name=trial.name,
            host="h",
            pid=1,
            version="1",
            queues=("default",),
            concurrency=1,
            started_ms=NOW,
            seen_ms=NOW,
            gone_after_ms=1000,
        )
    )
    await trial.store.workers(now_ms=NOW)


async def _prune(trial: Trial) -> None:
    await trial.store.prune(ENDED, before_ms=NOW - 1_999_000, limit=100)


async def _add_tagged(trial: Trial) -> None:
    tagged = [msgspec.structs.replace(job, meta=dict([ALL, ONE])) for job in trial.jobs(10)]
    trial.tagged = [job.id for job in tagged]
    await trial.store.add(tagged)


async def _delete_tagged(trial: Trial) -> None:
    await trial.store.cancel(trial.tagged, now_ms=NOW)
    assert await trial.store.delete(trial.tagged) == [True] * 10


IDS = [f"{n:011}" for n in range(500_000, 500_030)]
PARKED_IDS = [f"parked {n}" for n in range(100)]

STEPS: dict[str, Step] = {
    "claim from one queue, with lost jobs": partial(_claim, queues=["default"]),
    "claim from several queues, with lost jobs": partial(_claim, queues=QUEUES),
    # Before any lease has run out.
    "claim from one queue": partial(_claim, queues=["default"], now_ms=NOW - 60_000),
    "claim from several queues": partial(_claim, queues=QUEUES, now_ms=NOW - 60_000),
    "extend": _extend,
    "settle": _settle,
    "add": _add,
    "add again": lambda trial: trial.store.add(trial.jobs(0) or [trial.jobs(1)[0]] * 2),
    "cancel": _cancel,
    "rerun": lambda trial: trial.store.rerun(IDS[:10], now_ms=NOW),
    "delete": lambda trial: trial.store.delete(IDS[10:20]),
    "prune": _prune,
    "prune nothing": lambda trial: trial.store.prune(ENDED, before_ms=1, limit=100),
    "wait": lambda trial: trial.store._run(next_claimable_ms, QUEUES, KNOWING, 1000),
    "parked": lambda trial: trial.store.parked(),
    "asked": lambda trial: trial.store.asked("w", now_ms=NOW, until_ms=NOW),
    "fire": _fire,
    "records": _records,
    "get": lambda trial: trial.store.get(IDS),
    "queues": lambda trial: trial.store.queues(),
    "beat": _beat,
    "throttle": lambda trial: trial.store.throttle("k", Rate(limit=1, period_ms=1), now_ms=NOW),
    **{f"find {state}": partial(_find, query=Query(state=state)) for state in State},
    **{
        f"find {state} of a queue": partial(_find, query=Query(state=state, queue="q1"))
        for state in State
    },
    "find by meta": partial(_find, query=Query(meta=ALL)),
    "find by rare meta": partial(_find, query=Query(meta=ONE)),
    "find by meta and state": partial(_find, query=Query(meta=ALL, state=State.DEAD)),
    "find by meta what there is not": partial(_find, query=Query(meta=ALL, queue="none")),
    "add with meta": _add_tagged,
    "delete with meta": _delete_tagged,
    "findings": lambda trial: trial.store.findings(),
}

# Once jobs are parked.
WITH_PARKED: dict[str, Step] = {
    "claim what is parked": partial(_claim_parked, queues=["default"]),
    "park": _park,
    "claim what is parked in several queues": partial(_claim_parked, queues=QUEUES),
    "park again": _park,
    "claim what is parked, with lost jobs": partial(_claim_parked, queues=QUEUES, now_ms=NOW),
    **{name: step for name, step in STEPS.items() if name.startswith(("claim", "find waiting"))},
    **{name: STEPS[name] for name in ("settle", "wait", "parked", "add")},
    "cancel what is parked": lambda trial: trial.store.cancel(PARKED_IDS, now_ms=NOW),
    "rerun what was parked": lambda trial: trial.store.rerun(PARKED_IDS, now_ms=NOW),
}


# --- The server, and how much is read there


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    settings = {"autovacuum": "off", "shared_buffers": "256MB", "max_wal_size": "2GB"}
    server = PostgresServer(fast=True, settings=settings | {"synchronous_commit": "off"})
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()


def load(server: PostgresServer, first: int, last: int) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(LOAD.encode(), (first, last))


def park(server: PostgresServer, parked: int) -> None:
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(PARK.encode(), {"parked": parked})


def forget_statistics(server: PostgresServer, rows: int) -> None:
    """As after a load; with `rows` 0 as if somebody had analyzed the table while it was empty."""
    for table, fill in (("job", 85), ("job_meta", 100)):
        server.execute(f"delete from pg_statistic where starelid = 'tickwheel.{table}'::regclass")
        server.execute(
            f"""update pg_class set relpages = 0, relallvisible = 0, reltuples = {rows}
                where oid = 'tickwheel.{table}'::regclass"""
        )
        # Otherwise sessions go on with what they know.
        server.execute(f"alter table tickwheel.{table} set (fillfactor = {fill})")


Reads = dict[str, tuple[int, int]]


async def reads(db: psycopg.AsyncConnection[tuple[str, int, int]]) -> Reads:
    """Of each table: how often it was read through, and how many rows and entries were read."""
    await db.execute("select pg_stat_force_next_flush()")
    cursor = await db.execute(
        """select relname, seq_scan, seq_tup_read + coalesce((
               select sum(idx_tup_read) from pg_stat_user_indexes as i
               where i.relid = t.relid), 0)::bigint
           from pg_stat_user_tables as t where schemaname = 'tickwheel'"""
    )
    return {name: (scans, rows) for name, scans, rows in await cursor.fetchall()}


def too_much(before: Reads, after: Reads) -> str:
    """What was read too much of between two looks."""
    found = []
    for name, (scans, rows) in after.items():
        scans, rows = scans - before[name][0], rows - before[name][1]
        if rows > ROWS or (name in ("job", "job_meta") and scans):
            found.append(f"{name}: {scans} scans, {rows:,} rows")
    return ", ".join(found)


async def tried(trial: Trial, steps: dict[str, Step]) -> list[str]:
    """Take each step; those that read too much."""
    guilty = []
    pool = trial.store._opened()
    for name, step in steps.items():
        before = await pool.run(reads)
        await step(trial)
        if found := too_much(before, await pool.run(reads)):
            guilty.append(f"{trial.name}: {name}: {found}")
    return guilty


@asynccontextmanager
async def session(url: str, name: str, *, prepared: bool) -> AsyncIterator[Trial]:
    """A handle with one connection, which prepares every statement at its first use, or none."""
    store = open_store(url)
    assert isinstance(store, PostgresStore)
    await store.open()
    [connection] = store._opened()._idle
    connection.prepare_threshold = 0 if prepared else None
    try:
        yield Trial(store, name)
    finally:
        await store.close()


async def enqueue_by_sql(db: psycopg.AsyncConnection[tuple[str, int, int]], name: str) -> list[str]:
    before = await reads(db)
    # Often enough for the trigger to keep its plan.
    for _ in range(10):
        await db.execute("select tickwheel.enqueue('t'), tickwheel.enqueue('t', queue => 'empty')")
    found = too_much(before, await reads(db))
    return [f"{name}: enqueue: {found}"] if found else []


# --- The test


async def test_no_step_reads_more_than_its_share_of_two_million_jobs(
    server: PostgresServer,
) -> None:
    ours = f"{server.url}?pool=1&options=-c%20plan_cache_mode%3Dforce_generic_plan"
    async with BadLine(server) as line, AsyncExitStack() as stack:
        line.pooler = True
        pooled = await stack.enter_async_context(
            session(f"{line.url}?pool=1", "pooled", prepared=False)
        )
        old = await stack.enter_async_context(session(ours, "old plans", prepared=True))
        user = await psycopg.AsyncConnection.connect(server.url, autocommit=True)
        await stack.enter_async_context(user)
        guilty: list[str] = []

        async def try_all(statistics: str, steps: dict[str, Step] = STEPS) -> None:
            async with session(ours, "generic plans", prepared=True) as new:
                for trial in (pooled, old, new):
                    guilty.extend(f"{statistics}: {words}" for words in await tried(trial, steps))
            async with await psycopg.AsyncConnection.connect(server.url, autocommit=True) as new:
                for db, name in ((user, "old user"), (new, "new user")):
                    found = await enqueue_by_sql(db, name)
                    guilty.extend(f"{statistics}: {words}" for words in found)

        await asyncio.to_thread(load, server, 1, 20)
        server.execute(ALL_RUN)
        park(server, 20)
        server.execute("vacuum analyze tickwheel.job, tickwheel.job_meta")
        # Plans for few jobs, which nothing throws away when many come.
        await tried(old, STEPS | WITH_PARKED)
        await enqueue_by_sql(user, "user")
        server.execute("delete from tickwheel.job where id like 'parked%'")
        await asyncio.to_thread(load, server, 21, JOBS)
        await try_all("of a few that run or are parked")
        forget_statistics(server, -1)
        await try_all("none")
        forget_statistics(server, 0)
        await try_all("of an empty table")
        await asyncio.to_thread(server.execute, "analyze tickwheel.job, tickwheel.job_meta")
        await try_all("true")
        await asyncio.to_thread(server.execute, "vacuum tickwheel.job, tickwheel.job_meta")
        await try_all("true, after a vacuum")
        await asyncio.to_thread(park, server, PARKED)
        await try_all("of before jobs were parked", WITH_PARKED)
        forget_statistics(server, -1)
        await try_all("none, with parked jobs", WITH_PARKED)
        forget_statistics(server, 0)
        await try_all("of an empty table, with parked jobs", WITH_PARKED)
        await asyncio.to_thread(server.execute, "analyze tickwheel.job, tickwheel.job_meta")
        await try_all("true, with parked jobs", WITH_PARKED)
        assert not guilty, "\n".join(guilty)
