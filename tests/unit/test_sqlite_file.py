"""The embedded store's file: transactions, versions, rights."""

from __future__ import annotations

import asyncio
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
from tickwheel.job import Job
from tickwheel.store import open_store
from tickwheel.stores.sqlite import steps
from tickwheel.stores.sqlite.file import connect, in_transaction
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


async def test_what_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_text("dear diary, " * 1000)
    with pytest.raises(StoreIncompatible, match="not a sound SQLite database"):
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
    with pytest.raises(StoreRefused, match=r"always will|no value of more than"):
        await failing(opened, monkeypatch, error)


async def failing(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("so it is")

    monkeypatch.setattr(steps, "add", fail)
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
            while "the store is away" not in caplog.text:
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
        ("sqlite:///jobs.db?sync=never", "full .* or normal"),
        ("sqlite:///jobs.db?fast=1", "unknown option 'fast'"),
        ("sqlite:///jobs.db?ahead=soon", "not a length of time"),
    ],
)
def test_a_wrong_url_is_refused_with_how_to_write_it(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url)
