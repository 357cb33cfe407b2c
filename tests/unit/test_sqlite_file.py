"""The embedded store's file: transactions, versions, rights."""

from __future__ import annotations

import stat
from pathlib import Path

import apsw
import pytest

from tickwheel.errors import BadConfig, StoreIncompatible, StoreUnavailable
from tickwheel.store import open_store
from tickwheel.stores.sqlite.file import connect, in_transaction
from tickwheel.stores.sqlite.store import SqliteStore


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
