"""Parked jobs in PostgreSQL: who is told, what a claim costs, older releases beside this one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest

from postgres_server import shared_server
from tickwheel import job as life
from tickwheel.job import Job, State
from tickwheel.store import open_store
from tickwheel.stores.postgres import claiming
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.schema import parts_of
from tickwheel.stores.postgres.statements import adding
from tickwheel.stores.postgres.store import PostgresStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SOON_S = 20.0
# The release before jobs could be parked.
BEFORE = 3


@pytest.fixture
def schema() -> Iterator[str]:
    name = f"parking_{secrets.token_hex(6)}"
    yield name
    shared_server().execute(f"drop schema if exists {name} cascade")


@asynccontextmanager
async def opened(schema: str) -> AsyncIterator[PostgresStore]:
    store = open_store(f"{shared_server().url}?schema={schema}")
    assert isinstance(store, PostgresStore)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def now_of(store: PostgresStore) -> int:
    return await store.time_ns() // 1_000_000


def job(id: str, now_ms: int, task: str = "t", **options: Any) -> Job:
    return Job(id=id, task=task, payload="{}", due_ms=now_ms, created_ms=now_ms, **options)


async def claim(
    store: PostgresStore,
    tasks: Collection[str] = (),
    *,
    limit: int = 1000,
    queues: Sequence[str] = ("default",),
) -> list[Job]:
    now_ms = await now_of(store)
    return await store.claim(
        queues, worker="w", limit=limit, now_ms=now_ms, lease_ms=60_000, tasks=tasks
    )


async def park(store: PostgresStore, *jobs: Job) -> None:
    """Add these jobs, and park them."""
    now_ms = await now_of(store)
    await store.add(jobs)
    queues = sorted({job.queue for job in jobs})
    held = await claim(store, queues=queues)
    assert {job.id for job in held} == {job.id for job in jobs}
    parked = [life.park(job, ended_ms=now_ms) for job in held]
    assert all(await store.settle(parked, now_ms=now_ms))


def make_older(schema: str) -> None:
    for part in parts_of(schema)[:BEFORE]:
        shared_server().execute(part)
    shared_server().execute(f"update {schema}.version set version = {BEFORE}")


# --- Who is told


async def test_only_workers_that_know_the_task_are_told(schema: str) -> None:
    async with opened(schema) as store:
        now_ms = await now_of(store)
        await store.add([job("a", now_ms, "mail"), job("b", now_ms, "bill"), job("c", now_ms)])
        a, b, c = sorted(await claim(store), key=lambda job: job.id)
        async with await psycopg.AsyncConnection.connect(
            shared_server().url, autocommit=True
        ) as db:
            await db.execute(f'listen "{schema}"'.encode())
            parked = [life.park(job, ended_ms=now_ms) for job in (a, b)]
            await store.settle(parked, now_ms=now_ms)
            await store.settle([life.release(c, ended_ms=now_ms)], now_ms=now_ms)
            shared_server().execute(f"select pg_notify('{schema}', 'end')")
            told = []
            async with asyncio.timeout(SOON_S):
                async for note in db.notifies():
                    if note.payload == "end":
                        break
                    told.append(note.payload)
    # The queue's workers are told of the one that was released.
    assert sorted(told) == ["qdefault", "tbill", "tmail"]


# --- What a claim costs


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The claims that were sent to the server."""
    sent: list[str] = []
    execute = psycopg.AsyncConnection.execute

    async def noted(self: Any, query: Any, *args: Any, **options: Any) -> Any:
        if "picked" in str(query):
            sent.append(str(query))
        return await execute(self, query, *args, **options)

    monkeypatch.setattr(psycopg.AsyncConnection, "execute", noted)
    return sent


@pytest.mark.parametrize("queues", [["default"], ["default", "other"]])
async def test_a_claim_is_one_statement_whether_jobs_are_parked_or_not(
    schema: str, statements: list[str], queues: list[str]
) -> None:
    async with opened(schema) as store:
        await claim(store, ["t"], queues=queues)
        assert len(statements) == 1
        await park(store, *(job(f"{n}", 1) for n in range(20)))
        # The first that sees them needs two.
        await claim(store, ["u"], queues=queues)
        del statements[:]
        for _ in range(3):
            assert await claim(store, ["u"], queues=queues) == []
        assert len(await claim(store, ["t"], queues=queues, limit=5)) == 5
        assert len(statements) == 4
        assert len(await claim(store, ["t"], queues=queues)) == 15
        await claim(store, ["t"], queues=queues)
        del statements[:]
        assert await claim(store, ["t"], queues=queues) == []
        assert len(statements) == 1 and "recursive" not in statements[0]


@pytest.mark.parametrize("parked", ["elsewhere", "paused"])
async def test_a_claim_is_one_statement_where_other_queues_have_parked_jobs(
    schema: str, statements: list[str], parked: str
) -> None:
    async with opened(schema) as store:
        await park(store, job("a", 1, queue=parked))
        await store.pause("paused", True)
        queues = ["default", "paused"]
        await claim(store, ["t"], queues=queues)
        del statements[:]
        for _ in range(3):
            assert await claim(store, ["t"], queues=queues) == []
        assert len(statements) == 3


async def test_a_claim_locks_only_the_parked_jobs_that_it_takes(schema: str) -> None:
    tasks = [f"task{n}" for n in range(20)]

    async with opened(schema) as store:
        now_ms = await now_of(store)
        await park(store, *(job(f"{task} {n}", now_ms, task) for task in tasks for n in range(10)))
        under_way, end = asyncio.Event(), asyncio.Event()

        async def slow(db: Connection) -> int:
            where = {"worker": "slow", "call": 7, "now": now_ms, "due": now_ms, "limit": 10}
            async with db.transaction():
                taken, _ = await claiming.claim(
                    db, schema, ["default"], frozenset(tasks), where, 60_000, parked=True
                )
                under_way.set()
                await end.wait()
            return len(taken)

        async with asyncio.timeout(SOON_S), asyncio.TaskGroup() as group:
            first = group.create_task(store._opened().run(slow))
            await under_way.wait()
            second = await claim(store, tasks)
            end.set()
        assert (first.result(), len(second)) == (10, 190)


async def test_the_task_whose_job_has_waited_longest_goes_first(schema: str) -> None:
    async with opened(schema) as store:
        now_ms = await now_of(store)
        await park(
            store,
            job("first", now_ms - 300, "z"),
            job("second", now_ms - 200, "a"),
            job("last", now_ms - 100, "m"),
        )
        taken = [(await claim(store, ["a", "m", "z"], limit=1))[0].id for _ in range(3)]
    assert taken == ["first", "second", "last"]


# --- Older releases beside this one


async def test_nodes_that_start_together_upgrade_the_schema_once(schema: str) -> None:
    make_older(schema)
    shared_server().execute(f"select {schema}.enqueue('t', id => 'old')")
    stores = [open_store(f"{shared_server().url}?schema={schema}") for _ in range(6)]
    try:
        await asyncio.gather(*(store.open() for store in stores))
        [queue] = await stores[0].queues()
        assert (queue.name, queue.waiting) == ("default", 1)
    finally:
        for store in stores:
            await store.close()


async def test_a_new_job_can_be_added_before_the_schema_is_upgraded(schema: str) -> None:
    make_older(schema)
    with psycopg.connect(shared_server().url) as connection:
        statement, parameters = adding([job("a", 1)], schema)
        assert connection.execute(statement.encode(), parameters).fetchall() == [("a",)]
    async with opened(schema) as store:
        assert [job.id for job in await claim(store)] == ["a"]


# As that release had them.
OLD_CLAIM = """
    update {schema}.job set state = 'running', attempt = attempt + 1, fence = 1, worker = 'old',
        lease_until_ms = 9000000000000, watch_ms = 9000000000000
    where ctid = any(array(
        select ctid from {schema}.job
        where state = 'waiting' and queue = 'default' and priority = {level} and due_ms <= {now}
        order by due_ms, n limit 100 for update skip locked))
    returning id"""
OLD_CANCEL = """
    update {schema}.job set state = case state when 'waiting' then 'cancelled' else state end,
        ended_ms = case state when 'waiting' then {now} end, asked = state = 'running'
    where id = 'parked' returning id"""


async def test_a_worker_of_an_older_release_is_not_handed_parked_jobs(schema: str) -> None:
    async with opened(schema) as store:
        now_ms = await now_of(store)
        await park(store, job("parked", now_ms))
        await store.add([job("free", now_ms)])
        taken = [
            id
            for level in (3, 2, 1, 0)
            for (id,) in shared_server().execute(
                OLD_CLAIM.format(schema=schema, level=level, now=now_ms)
            )
        ]
        assert taken == ["free"]
        shared_server().execute(OLD_CANCEL.format(schema=schema, now=now_ms))
        [cancelled] = await store.get(["parked"])
        assert cancelled is not None
        assert (cancelled.state, cancelled.parked, cancelled.priority) == (
            State.CANCELLED,
            False,
            1,
        )
        assert await store.parked() == []
        assert await store.rerun(["parked"], now_ms=now_ms) == [True]
        assert [job.id for job in await claim(store)] == ["parked"]
