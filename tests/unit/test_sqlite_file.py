"""The embedded store's file: transactions, versions, rights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import apsw
import msgspec
import pytest

from tickwheel import App
from tickwheel.errors import (
    BadConfig,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
)
from tickwheel.job import Job, State, park
from tickwheel.store import Query, open_store
from tickwheel.stores.sqlite import statements
from tickwheel.stores.sqlite.file import connect, has_store, in_transaction
from tickwheel.stores.sqlite.store import SqliteStore

JOB = Job(id="one", task="t", payload="{}", due_ms=0, created_ms=0)


@pytest.fixture
def opened(tmp_path: Path, runner: asyncio.Runner) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "jobs.db")
    runner.run(store.open())
    yield store
    runner.run(store.close())


def test_a_step_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    db = connect(tmp_path / "jobs.db", "full")
    db.execute("create table job (id)")

    def half_a_step() -> None:
        db.execute("insert into job values (1)")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_transaction(db, half_a_step)
    assert db.execute("select count(*) from job").get == 0
    in_transaction(db, db.execute, "insert into job values (2)")
    assert db.execute("select id from job").get == 2
    db.close()


async def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    await store.open()
    await store.close()
    assert stat.S_IMODE((tmp_path / "jobs.db").stat().st_mode) == 0o600


async def test_a_file_of_a_newer_release_is_refused_and_left_alone(tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "jobs.db"))
    db.pragma("user_version", 99)
    db.close()
    with pytest.raises(StoreIncompatible, match="newer Tickwheel"):
        await SqliteStore(tmp_path / "jobs.db").open()


PARTS = Path(statements.__file__).with_name("schema.sql").read_text().split("\n-- part ")[1:]


def file_of_schema(path: Path, version: int) -> None:
    """A file as a release with this schema left it, with a job in each state."""
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "wal")
    for part in PARTS[:version]:
        db.execute(part.partition("\n")[2])
    db.pragma("user_version", version)
    db.execute(
        """insert into job (id, task, payload, queue, priority, due_ms, created_ms, state, attempt,
                            fence, worker, lease_until_ms, ended_ms, error)
           values ('waiting', 't', '{}', 'q', 1, 0, 0, 'waiting', 1, 5, 'w', null, null, 'no'),
                  ('running', 't', '{}', 'q', 1, 0, 0, 'running', 1, 6, 'w', 5000, null, null),
                  ('dead', 't', '{}', 'q', 1, 0, 0, 'dead', 1, 7, 'w', null, 900, 'no')"""
    )
    db.close()


@pytest.mark.parametrize("version", range(1, len(PARTS)))
async def test_a_file_of_an_earlier_release_is_upgraded_with_its_jobs(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "jobs.db"
    file_of_schema(path, version)
    # Several processes may open it at the same time.
    stores = [SqliteStore(path) for _ in range(4)]
    await asyncio.gather(*(store.open() for store in stores))
    store = stores[0]
    waiting, running, ended = await store.get(["waiting", "running", "dead"])
    assert waiting is not None and running is not None and ended is not None
    assert (waiting.state, waiting.error, waiting.attempt) == (State.WAITING, "no", 1)
    assert (running.state, running.fence, running.lease_until_ms) == (State.RUNNING, 6, 5000)
    assert (ended.state, ended.ended_ms, ended.traceback) == (State.DEAD, 900, None)
    [queue] = await store.queues()
    assert (queue.waiting, queue.running, queue.dead) == (1, 1, 1)

    assert (waiting.meta, waiting.expires_ms, waiting.progress) == (None, None, None)
    tagged = Job(
        id="tagged", task="t", payload="{}", due_ms=9000, created_ms=0, meta={"customer": "42"}
    )
    assert await stores[3].add([tagged]) == [True]
    assert (await store.find(Query(meta=("customer", "42")))).jobs == [tagged]

    await store.put_records("key", {"a": "1"})
    assert await stores[2].records("key") == [("a", "1")]

    [held] = await store.claim(["q"], worker="w", limit=10, now_ms=1000, lease_ms=1000)
    parks = [park(held, ended_ms=1000), park(running, ended_ms=1000)]
    assert await store.settle(parks, now_ms=1000) == [True, True]
    for other in stores:
        assert await other.claim(["q"], worker="w", limit=10, now_ms=1000, lease_ms=1000) == []
    got = await stores[1].claim(
        ["q"], worker="w", limit=10, now_ms=1000, lease_ms=1000, tasks=["t"]
    )
    assert [job.id for job in got] == ["waiting", "running"]
    for other in stores:
        await other.close()


def test_plain_jobs_can_be_added_before_an_upgrade(tmp_path: Path) -> None:
    """By a program of this release with a connection of its own, before the first worker."""
    file_of_schema(tmp_path / "jobs.db", 1)
    sql, text = statements.adding(
        [Job(id="new", task="t", payload="{}", due_ms=0, created_ms=0, retries=1)]
    )
    db = apsw.Connection(str(tmp_path / "jobs.db"))
    assert db.execute(sql.replace("%(jobs)s", "?"), (text,)).fetchall() == [("new",)]
    db.close()


async def test_a_release_that_has_the_file_open_goes_on_after_an_upgrade(tmp_path: Path) -> None:
    """It writes and deletes jobs as ever; triggers keep what it doesn't know."""
    path = tmp_path / "jobs.db"
    file_of_schema(path, len(PARTS) - 1)
    older = apsw.Connection(str(path))
    assert older.execute("select count(*) from job").get == 3
    store = SqliteStore(path)
    await store.open()
    tagged = [
        Job(id=id, task="t", payload="{}", due_ms=0, created_ms=0, meta={"customer": "42"})
        for id in "ab"
    ]
    assert await store.add(tagged) == [True, True]
    await store.cancel(["a"], now_ms=1)
    older.execute(
        """insert into job (id, task, payload, queue, priority, due_ms, created_ms, retries,
                            timeout_ms)
           values ('c', 't', '{}', 'default', 1, 0, 0, null, null)"""
    )
    older.execute("delete from job where id = 'a'")
    older.close()
    assert (await store.find(Query(meta=("customer", "42")))).jobs == tagged[1:]
    [queue, _] = await store.queues()
    assert (queue.name, queue.waiting) == ("default", 2)
    await store.close()


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_text("dear diary, " * 1000)
    with pytest.raises(StoreIncompatible, match="not a valid SQLite database"):
        await SqliteStore(tmp_path / "jobs.db").open()


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no/such does not exist"):
        await SqliteStore(tmp_path / "no/such/jobs.db").open()


async def test_a_file_that_cannot_be_made_is_said_so() -> None:
    with pytest.raises(StoreUnavailable, match="can't be created"):
        await SqliteStore("/proc/jobs.db").open()


async def test_a_closed_store_says_that_it_is_closed(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    await store.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.queues()


# --- A bug is not an absence

PASSING = [
    apsw.BusyError, apsw.LockedError, apsw.IOError, apsw.FullError, apsw.CantOpenError,
    apsw.ProtocolError, apsw.InterruptError, apsw.NoMemError, apsw.ReadOnlyError,
]  # fmt: skip
FINAL = [
    apsw.SQLError, apsw.MisuseError, apsw.TooBigError, apsw.MismatchError, apsw.ConstraintError,
    apsw.RangeError, apsw.ThreadingViolationError,
]  # fmt: skip


@pytest.mark.parametrize("error", PASSING)
async def test_what_may_pass_is_an_absence(
    opened: SqliteStore, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with pytest.raises(StoreUnavailable):
        await failing(opened, monkeypatch, error)


@pytest.mark.parametrize("error", FINAL)
async def test_what_no_retry_can_cure_is_said_so(
    opened: SqliteStore, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with pytest.raises(StoreRefused, match=r"retry won't help|no value larger than"):
        await failing(opened, monkeypatch, error)


async def failing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("so it is")

    monkeypatch.setattr(statements, "add", fail)
    await store.add([JOB])


async def test_a_worker_on_a_file_without_its_tables_ends_and_says_why(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10), app, app.worker(queues=["default"]):
            other = apsw.Connection(str(tmp_path / "jobs.db"))
            other.execute("drop table paused")
            other.close()
            await asyncio.sleep(60)
    assert caught.group_contains(StoreRefused, match="no such table: paused")


# --- A file that is no longer in its place


async def test_nothing_is_acknowledged_on_a_file_that_was_removed(
    opened: SqliteStore, tmp_path: Path
) -> None:
    await opened.add([JOB])
    (tmp_path / "jobs.db").rename(tmp_path / "away.db")
    for call in (
        lambda: opened.add([msgspec.structs.replace(JOB, id="two")]),
        lambda: opened.claim(["q"], worker="w", limit=1, now_ms=0, lease_ms=1000),
        lambda: opened.get(["one"]),
    ):
        with pytest.raises(StoreUnavailable, match="was removed while it was open"):
            await call()
    # Put back, it is the store again: every step may be repeated.
    (tmp_path / "away.db").rename(tmp_path / "jobs.db")
    assert await opened.add([msgspec.structs.replace(JOB, id="three")]) == [True]
    assert await opened.add([JOB]) == [False]


async def test_nothing_is_acknowledged_on_a_file_that_was_replaced(
    opened: SqliteStore, tmp_path: Path
) -> None:
    await opened.add([JOB])
    shutil.copy(tmp_path / "jobs.db", tmp_path / "backup.db")
    (tmp_path / "backup.db").replace(tmp_path / "jobs.db")
    with pytest.raises(StoreError, match="was replaced by another file") as caught:
        await opened.add([msgspec.structs.replace(JOB, id="two")])
    assert not isinstance(caught.value, StoreUnavailable)


async def test_a_worker_on_a_removed_file_says_so_and_goes_on_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    with caplog.at_level(logging.WARNING, "tickwheel"):
        async with asyncio.timeout(30), app, app.worker():
            assert await (await double.enqueue(1)).result() == 2
            (tmp_path / "jobs.db").rename(tmp_path / "away.db")
            with pytest.raises(StoreUnavailable, match="was removed"):
                await double.enqueue(2)
            while "calls to the store fail" not in caplog.text:
                await asyncio.sleep(0.01)
            (tmp_path / "away.db").rename(tmp_path / "jobs.db")
            assert await (await double.enqueue(3)).result() == 6
    assert "jobs.db was removed while it was open" in caplog.text


async def test_a_store_does_not_mind_that_the_folder_of_the_process_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore("jobs.db")
    await store.open()
    monkeypatch.chdir("/")
    assert await store.add([JOB]) == [True]
    await store.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
        ("sqlite:///jobs.db?sync=never", "must be full or normal"),
        ("sqlite:///jobs.db?fast=1", "unknown option 'fast'"),
        ("sqlite:///jobs.db?ahead=soon", "not a duration"),
    ],
)
def test_a_wrong_url_is_refused_with_how_to_write_it(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url)


# --- Files of other programs


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("create table job (name text)", "it has a table named job"),
        ("create table Worker (name text)", "it has a table named worker"),
        ("create table orders (n); pragma user_version = 2", "it has its own user_version, 2"),
    ],
)
async def test_a_file_whose_tables_clash_is_refused_and_left_alone(
    tmp_path: Path, script: str, words: str
) -> None:
    path = tmp_path / "customers.db"
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.execute(script)
    before = path.read_bytes()
    with pytest.raises(StoreIncompatible, match="of another program") as refused:
        await SqliteStore(path).open()
    assert words in str(refused.value) and "name another file" in str(refused.value)
    assert path.read_bytes() == before


async def test_a_store_may_be_in_a_file_with_other_tables(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with contextlib.closing(apsw.Connection(str(path))) as db:
        db.execute("create table orders (n)")
    assert not has_store(path)
    for _ in range(2):
        store = SqliteStore(path)
        await store.open()
        await store.close()
    assert has_store(path)


async def test_a_file_that_may_not_be_written_is_told_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        # Root, who may run this test, may write to any file.
        raise apsw.ReadOnlyError("attempt to write a readonly database")

    monkeypatch.setattr("tickwheel.stores.sqlite.store.migrate", refuse)
    with pytest.raises(StoreUnavailable, match="this user needs the right to write to it"):
        await SqliteStore(tmp_path / "jobs.db").open()
