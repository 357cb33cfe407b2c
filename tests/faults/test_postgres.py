"""The PostgreSQL store on real servers: killed, cut off, half-open, deaf, and owned by others."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest

from postgres_server import BadLine, PostgresServer, shared_server
from tickwheel import App
from tickwheel import job as life
from tickwheel.cli import main
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.job import Job, State
from tickwheel.store import Level, open_store
from tickwheel.stores.postgres.schema import parts_of
from tickwheel.stores.postgres.steps import adding
from tickwheel.stores.postgres.store import PostgresStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# Generous: what is asked is whether it happens at all, on a busy machine too.
SOON_S = 20.0
MINUTE = 60_000


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


async def claim(store: PostgresStore, *, limit: int = 10, lease_ms: int = 30_000) -> list[Job]:
    now_ms = await now_of(store)
    return await store.claim(["default"], worker="w", limit=limit, now_ms=now_ms, lease_ms=lease_ms)


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
        assert store._opened_news().hearing
        [(pid,)] = listeners(schema)
        shared_server().execute(f"select pg_terminate_backend({pid})")
        await until(lambda: store._opened_news().hearing is False, "the loss is noticed")
        await wait_for_another(store, url, "after")
        await until(lambda: store._opened_news().hearing is True, "it listens again")
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
    await until(lambda: store._opened_news().hearing is False, "no echo came")


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
            assert await asked == ["a"]


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
        f"grant select on {schema}.version to {role}",
        f"grant select, insert, update, delete on {schema}.job, {schema}.tally, {schema}.paused, "
        f"{schema}.schedule, {schema}.worker, {schema}.bucket to {role}",
    ]


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
        await store.add([job("a", now_ms)])
        [held] = await claim(store)
        assert await store.extend([held], now_ms=now_ms, lease_ms=MINUTE) != [None]
        assert await store.settle(
            [life.done(held, started_ms=now_ms, ended_ms=now_ms)], now_ms=now_ms
        ) == [True]
        await store.pause("default", True)
        await store.pause("default", False)
        assert await store.prune([State.DONE], before_ms=now_ms + 1, limit=10) == 1
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
        more = f"create table {schema}.more (); update {schema}.version set version = {known + 1}"
        return [*parts_of(schema), more]

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
        dead = life.dead(held, error="bad \0 byte", ended_ms=now_ms)
        assert await store.settle([dead], now_ms=now_ms) == [True]
        [found] = await store.get(["a"])
        assert found is not None and found.error == "bad \\x00 byte"


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
    assert f"made the schema, at version {len(parts_of(schema))}" in capsys.readouterr().err
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_migrate_is_for_postgresql_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "--store", "sqlite:///jobs.db"]) == 2
    assert "needs no migrate" in capsys.readouterr().err


def test_what_migrate_prints_can_be_run_by_hand(schema: str) -> None:
    for part in parts_of(schema):
        shared_server().execute(part)
    asyncio.run(_adds_one(f"{shared_server().url}?schema={schema}"))


async def _adds_one(url: str) -> None:
    async with opened(url) as store:
        assert await store.add([job("a", 1)]) == [True]
