"""The PostgreSQL store on real servers: killed, cut off, half-open, deaf, and owned by others."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

import msgspec
import psycopg
import pytest

from postgres_server import BadLine, PostgresServer, shared_server
from tickwheel import App, job as life
from tickwheel.checks import LATEST_MS
from tickwheel.cli import main
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.limit import Rate
from tickwheel.store import Level, Query, open_store
from tickwheel.stores.postgres import rows
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.schema import parts_of
from tickwheel.stores.postgres.statements import adding
from tickwheel.stores.postgres.store import PostgresStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Generous: what is asked is whether it happens at all, on a busy machine too.
SOON_S = 20.0
MINUTE = 60_000
MIB = 1024**2


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of the test's own, as durable as a real one."""
    server = PostgresServer(fast=False)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.remove()


@pytest.fixture
def schema() -> Iterator[str]:
    name = f"fault_{secrets.token_hex(6)}"
    yield name
    shared_server().execute(f"drop schema if exists {name} cascade")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresStore]:
    store = open_store(url)
    assert isinstance(store, PostgresStore)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def now_of(store: PostgresStore) -> int:
    return await store.time_ns() // 1_000_000


def job(id: str, now_ms: int, *, queue: str = "default") -> Job:
    return Job(id=id, task="t", payload="{}", queue=queue, due_ms=now_ms, created_ms=now_ms)


async def claim(
    store: PostgresStore, *, limit: int = 10, lease_ms: int = 30_000, tasks: Sequence[str] = ()
) -> list[Job]:
    now_ms = await now_of(store)
    return await store.claim(
        ["default"], worker="w", limit=limit, now_ms=now_ms, lease_ms=lease_ms, tasks=tasks
    )


async def until(happened: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(SOON_S * 2):
            while not happened():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never: {what}") from None


async def taken(acknowledged: set[int], count: int) -> None:
    enough = len(acknowledged) + count
    await until(lambda: len(acknowledged) >= enough, f"{count} more jobs are taken")


# --- The server goes away


async def test_every_acknowledged_job_runs_though_the_server_is_killed(
    server: PostgresServer,
) -> None:
    app = App(f"{server.url}?timeout=3s")
    ran: Counter[int] = Counter()
    acknowledged: set[int] = set()
    over = False

    @app.task
    async def work(number: int) -> None:
        ran[number] += 1

    async def produce() -> None:
        number = 0
        while not over:
            number += 1
            with contextlib.suppress(StoreUnavailable):
                await work.enqueue(number)
                acknowledged.add(number)
            await asyncio.sleep(0.002)

    async with app, app.worker(concurrency=50, lease="3s"):
        producing = asyncio.create_task(produce())
        for _ in range(2):
            await taken(acknowledged, 100)
            await asyncio.to_thread(server.crash)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
        await taken(acknowledged, 100)
        over = True
        await producing
        await until(lambda: acknowledged <= set(ran), "every acknowledged job has run")


async def test_a_restart_between_two_steps_is_not_even_noticed(server: PostgresServer) -> None:
    async with opened(server.url) as store:
        await store.add([job("before", await now_of(store))])
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        assert await store.add([job("after", 1)]) == [True]


async def test_while_the_server_is_away_it_is_unavailable_and_named(
    server: PostgresServer,
) -> None:
    url = server.url.replace("postgres@", "postgres:s3cret@")
    async with opened(url) as store:
        await asyncio.to_thread(server.stop)
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port}") as raised:
            await store.queues()
        assert "s3cret" not in str(raised.value)
    with pytest.raises(StoreUnavailable, match="refused"):
        await open_store(url).open()


# --- The line goes bad


async def test_nodes_that_start_together_make_the_schema_once(schema: str) -> None:
    url = f"{shared_server().url}?schema={schema}"
    stores = [open_store(url) for _ in range(6)]
    try:
        await asyncio.gather(*(store.open() for store in stores))
        assert await stores[0].queues() == []
    finally:
        for store in stores:
            await store.close()


async def test_a_line_that_is_cut_fails_one_step_and_not_the_next(schema: str) -> None:
    async with BadLine(shared_server()) as line, opened(f"{line.url}?schema={schema}") as store:
        slow = asyncio.create_task(store._opened().run(_sleep, 30))
        await asyncio.sleep(0.2)
        line.cut()
        with pytest.raises(StoreUnavailable):
            await slow
        assert await store.add([job("a", 1)]) == [True]


async def _sleep(db: psycopg.AsyncConnection[object], seconds: float) -> None:
    await db.execute("select pg_sleep(%s)", (seconds,))


async def test_a_half_open_line_holds_nobody_for_long(schema: str) -> None:
    async with (
        BadLine(shared_server()) as line,
        opened(f"{line.url}?schema={schema}&timeout=1s") as store,
    ):
        line.stall()
        async with asyncio.timeout(SOON_S):
            with pytest.raises(StoreUnavailable, match="no answer within 1 s"):
                await store.add([job("a", 1)])
            assert await store.add([job("b", 1)]) == [True]


async def test_giving_up_a_step_on_a_half_open_line_takes_no_time(schema: str) -> None:
    async with BadLine(shared_server()) as line, opened(f"{line.url}?schema={schema}") as store:
        line.stall()
        step = asyncio.create_task(store.queues())
        await asyncio.sleep(0.1)
        step.cancel()
        async with asyncio.timeout(2):
            await asyncio.wait([step])
        assert step.cancelled()


async def test_a_step_whose_reply_was_lost_can_be_repeated(schema: str) -> None:
    async with (
        BadLine(shared_server()) as line,
        opened(f"{line.url}?schema={schema}&pool=1") as store,
    ):
        now_ms = await now_of(store)
        line.lose_reply()
        with pytest.raises(StoreUnavailable):
            await store.add([job("a", now_ms)])
        assert await store.add([job("a", now_ms)]) == [False]

        line.lose_reply()
        with pytest.raises(StoreUnavailable):
            await store.claim(["default"], worker="w", limit=1, now_ms=now_ms, lease_ms=100)
        [held] = await store.claim(
            ["default"], worker="w", limit=1, now_ms=now_ms + 100, lease_ms=MINUTE
        )
        assert (held.attempt, held.takeovers) == (2, 1)

        done = life.done(held, started_ms=now_ms, ended_ms=now_ms)
        line.lose_reply()
        with pytest.raises(StoreUnavailable):
            await store.settle([done], now_ms=now_ms)
        assert await store.settle([done], now_ms=now_ms) == [True]
        [found] = await store.get(["a"])
        assert found is not None and (found.state, len(found.history)) == (State.DONE, 2)


async def test_a_lock_that_somebody_holds_ends_in_time(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}&timeout=1s") as store:
        with psycopg.connect(shared_server().url) as other:
            other.execute(f"lock table {schema}.job".encode())
            async with asyncio.timeout(SOON_S):
                with pytest.raises(StoreUnavailable):
                    await store.add([job("a", 1)])
        await store.add([job("a", 1)])
        assert await store.get(["a"]) != [None]


# --- A node is cut off in the middle of a step


@pytest.mark.parametrize("requests", range(1, 6))
async def test_a_worker_cut_off_in_a_takeover_holds_up_nobody(schema: str, requests: int) -> None:
    direct = f"{shared_server().url}?schema={schema}"
    async with BadLine(shared_server()) as line, opened(direct) as other:
        async with opened(f"{line.url}?schema={schema}&pool=1&timeout=1s") as store:
            now_ms = await now_of(store)
            await other.add([job("lost", now_ms)])
            [lost] = await claim(other, lease_ms=1)
            await other.add([job("waits", now_ms)])
            line.stall_after(requests)
            with contextlib.suppress(StoreUnavailable):
                await claim_at(store, lost.lease_until_ms or 0)
        # Long after the lease that the one who was cut off may have got.
        later_ms = now_ms + 10 * MINUTE
        assert await eventually_claimed(other, later_ms, 2) == {"lost", "waits"}


async def claim_at(store: PostgresStore, now_ms: int) -> list[Job]:
    return await store.claim(["default"], worker="w", limit=10, now_ms=now_ms, lease_ms=MINUTE)


async def eventually_claimed(store: PostgresStore, now_ms: int, count: int) -> set[str]:
    """What can be claimed within a few seconds, of so many jobs."""
    found: set[str] = set()
    for _ in range(100):
        found |= {each.id for each in await claim_at(store, now_ms)}
        if len(found) == count:
            break
        await asyncio.sleep(0.1)
    return found


@pytest.mark.parametrize("requests", range(1, 6))
async def test_who_is_cut_off_while_it_cancels_holds_up_nobody(schema: str, requests: int) -> None:
    direct = f"{shared_server().url}?schema={schema}"
    async with BadLine(shared_server()) as line, opened(direct) as other:
        async with opened(f"{line.url}?schema={schema}&pool=1&timeout=1s") as store:
            now_ms = await now_of(store)
            await other.add([job("lost", now_ms)])
            [lost] = await claim(other, lease_ms=1)
            line.stall_after(requests)
            with contextlib.suppress(StoreUnavailable):
                await store.cancel(["lost"], now_ms=lost.lease_until_ms or 0)
        async with asyncio.timeout(10):
            answers = await other.cancel(["lost"], now_ms=now_ms + MINUTE)
        assert answers in ([CancelOutcome.CANCELLED], [CancelOutcome.TOO_LATE])


def meanwhile(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], Awaitable[object]]) -> None:
    """Let something happen, once, after a step has read jobs and before it writes them."""
    read, happened = rows.marked, False

    async def marked(db: Connection, schema: str, ids: Sequence[str]) -> dict[str, tuple[str, Job]]:
        nonlocal happened
        found = await read(db, schema, ids)
        if not happened:
            happened = True
            await happen()
        return found

    monkeypatch.setattr(rows, "marked", marked)


async def test_a_takeover_leaves_alone_what_changed_since_it_was_read(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as store, opened(url) as other:
        now_ms = await now_of(store)
        await store.add([job("cancelled", now_ms), job("taken", now_ms)])
        await claim(store, lease_ms=1)
        await store.add([job("waits", now_ms + 10_000)])
        later_ms = now_ms + MINUTE

        async def change() -> None:
            await other.cancel(["cancelled"], now_ms=later_ms)
            [taken] = await other.claim(
                ["default"], worker="v", limit=1, now_ms=later_ms, lease_ms=MINUTE
            )
            assert taken.id == "taken"

        meanwhile(monkeypatch, change)
        assert [each.id for each in await claim_at(store, later_ms)] == ["waits"]
        cancelled, taken = await store.get(["cancelled", "taken"])
        assert cancelled is not None and cancelled.state is State.CANCELLED
        assert taken is not None and (taken.worker, taken.takeovers) == ("v", 1)


async def test_a_cancel_heeds_what_changed_since_it_looked(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as store, opened(url) as other:
        now_ms = await now_of(store)
        await store.add([job("lost", now_ms)])
        await claim(store, lease_ms=1)
        later_ms = now_ms + MINUTE
        meanwhile(monkeypatch, lambda: claim_at(other, later_ms))
        # It was taken over a moment before: so its new holder is asked.
        assert await store.cancel(["lost"], now_ms=later_ms) == [CancelOutcome.REQUESTED]
        [found] = await store.get(["lost"])
        assert found is not None and (found.state, found.cancel_requested) == (State.RUNNING, True)


async def test_a_reply_that_can_not_be_sent_locks_jobs_no_longer_than_the_time_limit(
    schema: str,
) -> None:
    direct = f"{shared_server().url}?schema={schema}"
    async with BadLine(shared_server()) as line, opened(direct) as other:
        async with opened(f"{line.url}?schema={schema}&pool=1&timeout=1s") as store:
            now_ms = await now_of(store)
            # More than the buffers of a connection hold.
            large = [
                msgspec.structs.replace(job(f"{n}", now_ms), payload=f'{{"x":"{"x" * MIB}"}}')
                for n in range(12)
            ]
            await other.add(large)
            line.stall_after(1)
            with pytest.raises(StoreUnavailable):
                await claim_at(store, now_ms)
        later_ms = now_ms + 10 * MINUTE
        assert len(await eventually_claimed(other, later_ms, len(large))) == len(large)


@pytest.mark.parametrize("requests", range(4, 9))
async def test_a_node_cut_off_while_it_makes_the_schema_holds_up_the_others_for_seconds(
    schema: str, requests: int
) -> None:
    async with BadLine(shared_server()) as line:
        line.stall_after(requests)
        with contextlib.suppress(StoreUnavailable):
            await open_store(f"{line.url}?schema={schema}&pool=1&timeout=1s").open()
        url = f"{shared_server().url}?schema={schema}"
        async with asyncio.timeout(SOON_S), opened(url) as store:
            assert await store.queues() == []


# --- News


async def wait_for_another(store: PostgresStore, url: str, id: str) -> float:
    """How long it takes for a wait to end after another handle added a job."""
    loop = asyncio.get_running_loop()
    now_ms = await now_of(store)
    waiting = asyncio.create_task(store.wait(["default"], now_ms=now_ms, until_ms=now_ms + MINUTE))
    # Longer than the first looks, which come soon after one another.
    await asyncio.sleep(1)
    assert not waiting.done()
    async with opened(url) as other:
        await other.add([job(id, now_ms)])
        start = loop.time()
    async with asyncio.timeout(SOON_S):
        await waiting
    took = loop.time() - start
    assert [each.id for each in await claim(store)] == [id]
    return took


def listeners(schema: str) -> list[tuple[object, ...]]:
    return shared_server().execute(
        f"select pid from pg_stat_activity where query = 'listen \"{schema}\"'"
    )


async def test_waits_go_on_when_their_listener_is_lost(schema: str) -> None:
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as store:
        await wait_for_another(store, url, "before")
        assert store._open_listener().hearing
        [(pid,)] = listeners(schema)
        shared_server().execute(f"select pg_terminate_backend({pid})")
        await until(lambda: store._open_listener().hearing is False, "the loss is noticed")
        await wait_for_another(store, url, "after")
        await until(lambda: store._open_listener().hearing is True, "it listens again")
        assert listeners(schema) != [(pid,)]


async def test_behind_a_transaction_pooler_waits_look_for_themselves(schema: str) -> None:
    direct = f"{shared_server().url}?schema={schema}"
    async with BadLine(shared_server()) as line:
        line.pooler = True
        async with opened(f"{line.url}?schema={schema}") as store:
            assert store._opened().pooled
            await until_deaf(store)
            assert await wait_for_another(store, direct, "a") < 5
            [finding] = [each for each in await store.findings() if each.about == "notifications"]
            assert finding.level is Level.WARN and "pooler" in finding.fix


async def until_deaf(store: PostgresStore) -> None:
    now_ms = await now_of(store)
    await store.wait(["default"], now_ms=now_ms, until_ms=now_ms)
    await until(lambda: store._open_listener().hearing is False, "no echo came")


async def test_behind_a_pooler_nothing_is_prepared(schema: str) -> None:
    async with BadLine(shared_server()) as line:
        line.pooler = True
        async with opened(f"{line.url}?schema={schema}&pool=1") as store:
            for n in range(20):
                await store.add([job(f"{n}", 1)])
            assert await store._opened().run(_prepared) == 0
    async with opened(f"{shared_server().url}?schema={schema}&pool=1") as store:
        for n in range(20):
            await store.add([job(f"{n}", 1)])
        assert await store._opened().run(_prepared) > 0


async def _prepared(db: psycopg.AsyncConnection[tuple[int]]) -> int:
    cursor = await db.execute("select count(*) from pg_prepared_statements")
    [count] = await cursor.fetchone() or [0]
    return count


async def test_a_cancel_by_another_handle_is_heard_at_once(schema: str) -> None:
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as store, opened(url) as other:
        now_ms = await now_of(store)
        await store.add([job("a", now_ms)])
        await claim(store)
        asked = asyncio.create_task(store.asked("w", now_ms=now_ms, until_ms=now_ms + MINUTE))
        await asyncio.sleep(1)
        await other.cancel(["a"], now_ms=now_ms)
        async with asyncio.timeout(SOON_S):
            assert await asked == {"a": "stop"}


def heard(schema: str, statement: str) -> list[str]:
    """What a listener is told while this is run and committed."""
    with psycopg.connect(shared_server().url, autocommit=True) as listener:
        listener.execute(f'listen "{schema}"'.encode())
        shared_server().execute(statement)
        return [note.payload for note in listener.notifies(timeout=0.3)]


async def test_notifications_are_sent_only_where_somebody_may_wait(schema: str) -> None:
    """Because commits that notify wait for one another."""
    async with opened(f"{shared_server().url}?schema={schema}"):
        enqueue = f"select {schema}.enqueue"
        assert heard(schema, f"{enqueue}('t', delay => '1 hour')") == []
        assert heard(schema, f"{enqueue}('t'), {schema}.enqueue('t')") == ["qdefault"]
        both = f"{enqueue}('t', queue => 'a'), {schema}.enqueue('t', queue => 'b')"
        assert heard(schema, both) == ["qa", "qb"]
        await asyncio.sleep(0.3)
        # Jobs are overdue there by now, so nobody waits for more.
        assert heard(schema, f"{enqueue}('t')") == []
        assert heard(schema, f"{enqueue}('t', queue => 'new')") == ["qnew"]


# --- Many at once


async def test_batches_that_meet_in_opposite_orders_end_well(schema: str) -> None:
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as one, opened(url) as two:
        for n in range(10):
            now_ms = await now_of(one)
            await one.add([job(f"{n}-{m:03}", now_ms) for m in range(200)])
            held = await claim(one, limit=200)
            ids = [each.id for each in held]
            done = [life.done(each, started_ms=now_ms, ended_ms=now_ms) for each in held]
            await asyncio.gather(
                one.extend(held, now_ms=now_ms, lease_ms=MINUTE),
                two.extend(held[::-1], now_ms=now_ms, lease_ms=MINUTE),
                one.cancel(ids[::-1], now_ms=now_ms),
                two.settle(done[::-1], now_ms=now_ms),
                one.settle(done, now_ms=now_ms),
                two.cancel(ids, now_ms=now_ms),
            )
            await asyncio.gather(
                one.rerun(ids, now_ms=now_ms + MINUTE), two.rerun(ids[::-1], now_ms=now_ms + MINUTE)
            )
            await asyncio.gather(one.cancel(ids, now_ms=now_ms), two.cancel(ids, now_ms=now_ms))
            await asyncio.gather(one.delete(ids), two.delete(ids[::-1]))
        assert await one.queues() == []


async def test_counts_stay_exact_while_they_are_folded(
    schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.stores.postgres.store.FOLD_STEPS", 3)
    url = f"{shared_server().url}?schema={schema}"

    async def work(store: PostgresStore, name: str) -> None:
        for n in range(40):
            now_ms = await now_of(store)
            await store.add([job(f"{name} {n} {m}", now_ms) for m in range(3)])
            held = await claim(store, limit=2)
            done = [life.done(each, started_ms=now_ms, ended_ms=now_ms) for each in held]
            await store.settle(done[:1], now_ms=now_ms)

    async with opened(url) as one, opened(url) as two:
        await asyncio.gather(*(work(s, f"{n}") for n, s in enumerate((one, two, one, two))))
        counted = {
            state: count
            for state, count in shared_server().execute(
                f"select state::text, count(*) from {schema}.job group by 1"
            )
        }
        [queue] = await one.queues()
        found = {str(s): getattr(queue, s) for s in State if getattr(queue, s)}
        assert found == counted
        [(rows,)] = shared_server().execute(f"select count(*) from {schema}.tally")
        assert isinstance(rows, int) and rows < 100


async def test_most_extends_touch_no_index(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}&pool=1") as store:
        now_ms = await now_of(store)
        await store.add([job(f"{n}", now_ms) for n in range(20)])
        held: list[Job] = await claim(store, limit=20, lease_ms=30_000)
        for third in range(1, 10):
            extended = await store.extend(held, now_ms=now_ms + third * 10_000, lease_ms=30_000)
            held = [each for each in extended if each is not None]
            assert len(held) == 20
        moved, hot = await store._opened().run(_updates, schema)
        # Of the 180 extends; the claim is an update that has to touch them.
        assert moved - 20 == 180
        assert hot >= 60


async def _updates(db: psycopg.AsyncConnection[tuple[int, int]], schema: str) -> tuple[int, int]:
    await db.execute("select pg_stat_force_next_flush()")
    cursor = await db.execute(
        """select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables
           where schemaname = %s and relname = 'job'""",
        (schema,),
    )
    return await cursor.fetchone() or (0, 0)


# --- Roles and versions


@pytest.fixture
def role() -> Iterator[str]:
    name = f"app_{secrets.token_hex(4)}"
    shared_server().execute(f"create role {name} login")
    yield name
    shared_server().execute(f"drop owned by {name}")
    shared_server().execute(f"drop role {name}")


def grants(schema: str, role: str) -> list[str]:
    """As docs/postgresql.md says."""
    return [
        f"grant usage on schema {schema} to {role}",
        f"grant select on {schema}.version, {schema}.job_meta to {role}",
        f"grant select, insert, update, delete on {schema}.job, {schema}.tally, {schema}.paused, "
        f"{schema}.schedule, {schema}.record, {schema}.worker, {schema}.bucket to {role}",
    ]


async def records_work(store: PostgresStore) -> None:
    await store.put_records("key", {"a": "1", "b": "2"})
    await store.put_records("key", {"a": "new"})
    assert await store.records("key") == [("a", "new"), ("b", "2")]
    assert await store.delete_records("key", ["b"]) == [True]


def url_of(role: str, schema: str) -> str:
    return f"{shared_server().url.replace('postgres@', role + '@')}?schema={schema}"


async def test_a_role_that_may_not_make_the_schema_says_who_has_to(schema: str, role: str) -> None:
    with pytest.raises(StoreIncompatible, match="run tickwheel migrate"):
        await open_store(url_of(role, schema)).open()


async def test_the_least_rights_are_enough_for_a_whole_life(schema: str, role: str) -> None:
    await PostgresStore.migrate(f"{shared_server().url}?schema={schema}", dry_run=False)
    for grant in grants(schema, role):
        shared_server().execute(grant)
    async with opened(url_of(role, schema)) as store:
        now_ms = await now_of(store)
        await store.add([msgspec.structs.replace(job("a", now_ms), meta={"customer": "42"})])
        [held] = await claim(store)
        assert await store.extend([held], now_ms=now_ms, lease_ms=MINUTE) != [None]
        assert [each.id for each in (await store.find(Query(meta=("customer", "42")))).jobs] == [
            "a"
        ]
        assert await store.settle([life.park(held, ended_ms=now_ms)], now_ms=now_ms) == [True]
        assert [each.id for each in await store.parked()] == ["a"]
        [held] = await claim(store, tasks=["t"])
        assert await store.settle(
            [life.done(held, started_ms=now_ms, ended_ms=now_ms)], now_ms=now_ms
        ) == [True]
        await store.pause("default", True)
        await store.pause("default", False)
        assert await store.prune([State.DONE], before_ms=now_ms + 1, limit=10) == 1
        await records_work(store)
        await store.durability()
        assert not [each for each in await store.findings() if each.level is Level.BAD]


async def test_without_its_rights_a_role_is_told_where_they_are_written(
    schema: str, role: str
) -> None:
    await PostgresStore.migrate(f"{shared_server().url}?schema={schema}", dry_run=False)
    for grant in grants(schema, role)[:2]:
        shared_server().execute(grant)
    async with opened(url_of(role, schema)) as store:
        with pytest.raises(StoreError, match=r"docs/postgresql\.md") as raised:
            await store.add([job("a", 1)])
        assert not isinstance(raised.value, StoreUnavailable)


async def test_a_newer_schema_is_refused(schema: str) -> None:
    url = f"{shared_server().url}?schema={schema}"
    await PostgresStore.migrate(url, dry_run=False)
    shared_server().execute(f"update {schema}.version set version = 99")
    with pytest.raises(StoreIncompatible, match="newer Tickwheel"):
        await open_store(url).open()
    with pytest.raises(StoreIncompatible, match="newer Tickwheel"):
        await PostgresStore.migrate(url, dry_run=False)


async def test_an_older_schema_is_for_its_owner_to_upgrade(
    schema: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{shared_server().url}?schema={schema}"
    await PostgresStore.migrate(url, dry_run=False)
    for grant in grants(schema, role):
        shared_server().execute(grant)

    known = len(parts_of(schema))

    def with_one_more(schema: str) -> list[str]:
        return [*parts_of(schema), f"create table {schema}.more ();"]

    monkeypatch.setattr("tickwheel.stores.postgres.schema.parts_of", with_one_more)
    words = rf"version {known} .* needs {known + 1}.*tickwheel migrate"
    with pytest.raises(StoreIncompatible, match=words):
        await open_store(url_of(role, schema)).open()
    before, after, sql = await PostgresStore.migrate(url, dry_run=True)
    assert (before, after) == (known, known + 1) and "more" in sql
    assert shared_server().execute(f"select to_regclass('{schema}.more')") == [(None,)]
    async with opened(url):
        [(version,)] = shared_server().execute(f"select version from {schema}.version")
        assert version == known + 1


OLDER = range(1, len(parts_of("tickwheel")))
BEFORE_RECORDS = next(n for n, part in enumerate(parts_of("tickwheel")) if ".record" in part)
BEFORE_META = next(n for n, part in enumerate(parts_of("tickwheel")) if "job_meta" in part)


def make_older(server: PostgresServer, schema: str, version: int) -> None:
    for part in parts_of(schema)[:version]:
        server.execute(part)
    server.execute(f"update {schema}.version set version = {version}")


@pytest.mark.parametrize("version", OLDER)
async def test_the_schema_of_an_older_release_is_upgraded_with_its_jobs(
    schema: str, role: str, version: int
) -> None:
    make_older(shared_server(), schema, version)
    shared_server().execute(f"grant usage on schema {schema} to {role}")
    shared_server().execute(f"grant execute on function {schema}.enqueue to {role}")
    shared_server().execute(f"select {schema}.enqueue('t', id => 'old')")
    url = f"{shared_server().url}?schema={schema}"
    async with opened(url) as store:
        shared_server().execute(f"select {schema}.enqueue('t', id => 'new')", user=role)
        assert [each.waiting for each in await store.queues()] == [2]
        held = await claim(store)
        assert {each.id for each in held} == {"old", "new"}
        now_ms = await now_of(store)
        parked = [life.park(each, ended_ms=now_ms) for each in held]
        assert await store.settle(parked, now_ms=now_ms) == [True, True]
        assert await claim(store) == []
        assert [each.waiting for each in await store.queues()] == [2]
        await records_work(store)
        known = len(parts_of(schema))
        assert await PostgresStore.migrate(url, dry_run=True) == (known, known, "")


async def test_who_could_read_jobs_before_an_upgrade_can_find_them_by_meta_after_it(
    schema: str, role: str
) -> None:
    make_older(shared_server(), schema, BEFORE_META)
    tables = ("version", "job", "tally", "paused", "schedule", "worker", "bucket")
    shared_server().execute(f"grant usage on schema {schema} to {role}")
    for table in tables:
        shared_server().execute(
            f"grant select, insert, update, delete on {schema}.{table} to {role}"
        )
    await PostgresStore.migrate(f"{shared_server().url}?schema={schema}", dry_run=False)
    async with opened(url_of(role, schema)) as store:
        now_ms = await now_of(store)
        tagged = [msgspec.structs.replace(job(id, now_ms), meta={"customer": "42"}) for id in "ab"]
        assert await store.add(tagged) == [True, True]
        assert CancelOutcome.CANCELLED in await store.cancel(["a"], now_ms=now_ms)
        assert await store.delete(["a"]) == [True]
        page = await store.find(Query(meta=("customer", "42")))
        assert [each.id for each in page.jobs] == ["b"]
        await records_work(store)


async def test_who_could_only_read_schedules_before_an_upgrade_can_only_read_records_after_it(
    schema: str, role: str
) -> None:
    make_older(shared_server(), schema, BEFORE_RECORDS)
    shared_server().execute(f"grant usage on schema {schema} to {role}")
    for table in ("version", "schedule"):
        shared_server().execute(f"grant select on {schema}.{table} to {role}")
    await PostgresStore.migrate(f"{shared_server().url}?schema={schema}", dry_run=False)
    async with opened(url_of(role, schema)) as store:
        assert await store.records("key") == []
        with pytest.raises(StoreError, match=r"docs/postgresql\.md"):
            await store.put_records("key", {"a": "1"})


# --- Logical replication


@pytest.fixture
def published() -> Iterator[PostgresServer]:
    """A server that publishes every table that there will ever be."""
    server = PostgresServer(fast=True, settings={"wal_level": "logical"})
    try:
        server.create()
        server.start()
        server.execute("create publication everything for all tables")
        yield server
    finally:
        server.remove()


async def test_every_table_may_be_published(
    published: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.stores.postgres.store.FOLD_STEPS", 3)
    async with opened(published.url) as store:
        now_ms = await now_of(store)
        for n in range(5):
            await store.add([msgspec.structs.replace(job(f"{n}", now_ms), meta={"n": "1"})])
            [held] = await claim(store)
            await store.settle([life.park(held, ended_ms=now_ms)], now_ms=now_ms)
            [held] = await claim(store, tasks=["t"])
            await store.settle([life.done(held, started_ms=now_ms, ended_ms=now_ms)], now_ms=now_ms)
        assert await store.prune([State.DONE], before_ms=now_ms + 1, limit=10) == 5
        await store.pause("q", True)
        await store.pause("q", False)
        await store.throttle("k", Rate(limit=1, period_ms=1000), now_ms=now_ms)
        await store.throttle("k", Rate(limit=1, period_ms=1000), now_ms=now_ms + 2000)
        await store.queues()
        assert not [each for each in await store.findings() if each.level is Level.BAD]
        [(rows,)] = published.execute("select count(*) from tickwheel.tally")
        assert rows == 0
    keyless = published.execute(
        """select relname from pg_class where relnamespace = 'tickwheel'::regnamespace
           and relkind = 'r' and not exists (
               select from pg_index where indrelid = pg_class.oid and indisprimary)"""
    )
    assert keyless == []


@pytest.mark.parametrize("version", OLDER)
async def test_an_older_schema_is_upgraded_where_it_is_published(
    published: PostgresServer, version: int
) -> None:
    published.execute("drop publication everything")
    make_older(published, "tickwheel", version)
    published.execute("create publication everything for all tables")
    async with opened(published.url) as store:
        assert await store.add([job("a", 1)]) == [True]


async def test_counts_that_can_not_be_folded_are_a_finding(
    schema: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tickwheel.stores.postgres.store.FOLD_STEPS", 1)
    await PostgresStore.migrate(f"{shared_server().url}?schema={schema}", dry_run=False)
    for grant in grants(schema, role):
        shared_server().execute(grant)
    shared_server().execute(f"revoke delete on {schema}.tally from {role}")
    async with opened(url_of(role, schema)) as store:
        # The step itself has happened, and says so.
        assert await store.add([job("a", 1)]) == [True]
        [counts] = [each for each in await store.findings() if each.about == "counts"]
        assert counts.level is Level.BAD and "permission denied" in counts.words
        shared_server().execute(f"grant delete on {schema}.tally to {role}")
        [counts] = [each for each in await store.findings() if each.about == "counts"]
        assert counts.level is Level.OK


async def test_a_wrong_password_is_no_passing_trouble(server: PostgresServer) -> None:
    server.execute("create role ann login password 'right'")
    server.execute("create role bob login")
    access = server.folder / "data" / "pg_hba.conf"
    access.write_text(f"host all ann 127.0.0.1/32 scram-sha-256\n{access.read_text()}")
    server.execute("select pg_reload_conf()")
    url = server.url.replace("postgres@", "ann:s3cret@")
    async with asyncio.timeout(SOON_S):
        # A reload takes a moment.
        while True:
            try:
                await open_store(url).open()
            except StoreIncompatible:
                await asyncio.sleep(0.05)
            except StoreError as error:
                assert not isinstance(error, StoreUnavailable)
                assert "password authentication failed" in str(error)
                assert "s3cret" not in str(error)
                break


# --- From SQL, and in the caller's own transaction


async def test_sql_enqueues_in_the_callers_transaction(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        with psycopg.connect(shared_server().url) as connection:
            statement = f"select {schema}.enqueue('mail', '{{\"to\": 1}}', id => 'x')".encode()
            connection.execute(statement)
            connection.rollback()
            assert await store.get(["x"]) == [None]
            assert connection.execute(statement).fetchone() == ("x",)
            assert connection.execute(statement).fetchone() == (None,)
            assert await claim(store) == []
        [held] = await claim(store)
        assert (held.id, held.task, held.payload) == ("x", "mail", '{"to": 1}')


async def test_sql_chooses_delay_queue_priority_and_due(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        now_ms = await now_of(store)
        [(id,)] = shared_server().execute(
            f"""select {schema}.enqueue('t', delay => '90 seconds', queue => 'q', priority => 3)"""
        )
        [(due,)] = shared_server().execute(
            f"select {schema}.enqueue('t', due => '2040-01-01 00:00:00Z')"
        )
        found, later = await store.get([str(id), str(due)])
        assert found is not None and later is not None
        assert (found.queue, found.priority, later.due_ms) == ("q", 3, 2_208_988_800_000)
        assert 90_000 <= found.due_ms - now_ms < 90_000 + SOON_S * 1000
        for wrong in ("payload => '[1]'", "priority => 7", "delay => null"):
            with pytest.raises(psycopg.Error):
                shared_server().execute(f"select {schema}.enqueue('t', {wrong})")


WRONG = {
    "task => null": "a name is",
    "task => ''": "a name is",
    "task => 'with space'": "a name is",
    "task => repeat('x', 129)": "a name is",
    "queue => null": "a name is",
    "queue => 'q/1'": "a name is",
    "queue => E'line\\n'": "a name is",
    "id => ''": "an id is",
    "id => repeat('x', 3000)": "an id is",
    "id => repeat('x', 201)": "an id is",
    "id => E'two\\nlines'": "an id is",
    "id => E'\\x1b[2J'": "an id is",
    "id => E'\\u202e'": "an id is",
    "priority => 4": "from 0",
    "priority => -1": "from 0",
    "priority => null": "from 0",
    "payload => null": "an object",
    "payload => '[1]'": "an object",
    "delay => null": "it is null",
    "delay => '-1 second'": "negative",
    "delay => '9000 years'": "1970 to 9999",
    "due => '10000-01-01Z'": "1970 to 9999",
    "due => 'infinity'": "1970 to 9999",
    "due => '-infinity'": "1970 to 9999",
    "due => '1969-12-31 23:59Z'": "1970 to 9999",
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_sql_is_refused_what_no_store_can_keep(schema: str, wrong: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        task = "" if wrong.startswith("task") else "'t', "
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=WRONG[wrong]):
            shared_server().execute(f"select {schema}.enqueue({task}{wrong})")
        assert await store.queues() == []


async def test_sql_takes_what_python_takes(schema: str) -> None:
    """Every character of every script that an id can have, and no other."""
    assigned = [c for n, c in enumerate(map(chr, range(1, 0x110000))) if _worth_trying(n, c)]
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        with psycopg.connect(shared_server().url, autocommit=True) as connection:
            connection.execute(TRIAL.format(schema=schema).encode())
            trial = f"select c from unnest(%s::text[]) as c where {schema}.takes(c)"
            taken = {c for (c,) in connection.execute(trial.encode(), (assigned,))}
        assert taken == {c for c in assigned if c.isprintable()}
        last = f"select {schema}.enqueue('t', id => 'last', due => '9999-12-31 23:59:59.999Z')"
        shared_server().execute(last)
        [found] = await store.get(["last"])
        assert found is not None and found.due_ms == LATEST_MS


def _worth_trying(n: int, c: str) -> bool:
    """Surrogates are no text, and which characters there are yet depends on the release of Python.
    Of letters, and of those for private use, there are very many alike."""
    kind = unicodedata.category(c)
    return kind not in ("Cs", "Cn") and (kind not in ("Lo", "Co") or n % 50 == 0)


TRIAL = """
    create function {schema}.takes(id text) returns boolean language plpgsql as $$
    begin
        -- Nothing is stored: the last thing to be checked is wrong.
        perform {schema}.enqueue('t', id => takes.id, due => 'infinity');
        return true;
    exception when invalid_parameter_value then
        return sqlerrm like 'due%';
    end $$"""


async def test_a_role_that_only_adds_jobs_needs_one_right(schema: str, role: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        shared_server().execute(f"grant usage on schema {schema} to {role}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            shared_server().execute(f"select {schema}.enqueue('t')", user=role)
        shared_server().execute(f"grant execute on function {schema}.enqueue to {role}")
        shared_server().execute(f"select {schema}.enqueue('t', id => 'a')", user=role)
        assert [each.id for each in await claim(store)] == ["a"]


async def test_jobs_are_added_on_any_connection_of_the_caller(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        now_ms = await now_of(store)
        with psycopg.connect(shared_server().url) as connection:
            statement, parameters = adding([job("a", now_ms)], schema)
            connection.execute(statement.encode(), parameters)
            connection.rollback()
            assert await store.get(["a"]) == [None]
            assert connection.execute(statement.encode(), parameters).fetchall() == [("a",)]
        assert [each.id for each in await claim(store)] == ["a"]


async def test_what_cannot_be_kept_is_refused_at_the_call(schema: str) -> None:
    async with opened(f"{shared_server().url}?schema={schema}") as store:
        with pytest.raises(UsageError):
            await store.add([job("with \0 in it", 1)])
        now_ms = await now_of(store)
        await store.add([job("a", now_ms)])
        [held] = await claim(store)
        # Errors quote anything.
        dead = life.dead(held, error="bad \0 byte", ended_ms=now_ms, traceback="at \0")
        assert await store.settle([dead], now_ms=now_ms) == [True]
        [found] = await store.get(["a"])
        assert found is not None
        assert (found.error, found.traceback) == ("bad \\x00 byte", "at \\x00")


# --- The command


def test_migrate_prints_what_it_would_run_and_says_what_it_did(
    schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["migrate", "--store", f"{shared_server().url}?schema={schema}"]
    assert main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr()
    assert f"create table {schema}.job" in dry.out and "nothing was run" in dry.err
    assert shared_server().execute(f"select to_regnamespace('{schema}')") == [(None,)]

    assert main(command) == 0
    assert f"created the schema, version {len(parts_of(schema))}" in capsys.readouterr().err
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_migrate_is_for_postgresql_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--store", "sqlite:///jobs.db"]) == 2
    assert "does not need migrate" in capsys.readouterr().err


def test_what_migrate_prints_can_be_run_by_hand(
    schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{shared_server().url}?schema={schema}"
    assert main(["migrate", "--store", url, "--dry-run"]) == 0
    shared_server().execute(capsys.readouterr().out)
    asyncio.run(_adds_one(url))


async def _adds_one(url: str) -> None:
    async with opened(url) as store:
        assert await store.add([job("a", 1)]) == [True]
