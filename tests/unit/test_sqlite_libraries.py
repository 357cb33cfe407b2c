"""One SQLite library per file and process: the store's and Python's own undo each other's locks."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite
import apsw
import pytest
import sqlalchemy

from tickwheel import App, BadConfig
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.errors import StoreError
from tickwheel.job import Job
from tickwheel.outbox import Outbox, _Sqlite
from tickwheel.stores.memory import MemoryStore
from tickwheel.stores.sqlite.store import SqliteStore


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "jobs.db"


async def made(file: Path) -> SqliteStore:
    """A store whose file exists, closed again."""
    store = SqliteStore(file)
    await store.open()
    await store.close()
    return store


def a_job(id: str) -> Job:
    return Job(id=id, task="task", payload="{}", due_ms=0, created_ms=0)


# --- sqlite3 first


async def test_a_store_is_not_opened_on_a_file_that_sqlite3_has_open(file: Path) -> None:
    store = await made(file)
    with closing(sqlite3.connect(file)) as db:
        db.execute("select count(*) from job")
        with pytest.raises(BadConfig, match=r"has .*jobs.db open.*close it first"):
            await store.open()
        # Nothing of it is left open either.
        assert str(file) not in [each.filename for each in apsw.connections()]
        db.execute("select count(*) from job")
    await store.open()
    await store.close()


async def test_a_file_is_known_by_any_of_its_names(file: Path) -> None:
    await made(file)
    os.link(file, file.parent / "linked.db")
    with closing(sqlite3.connect("linked.db")), pytest.raises(BadConfig):
        await SqliteStore(file).open()


async def test_a_connection_that_nobody_can_use_any_more_is_not_in_the_way(file: Path) -> None:
    store = await made(file)

    def forgetful() -> None:
        with sqlite3.connect(file) as db:
            db.execute("select count(*) from job")

    forgetful()
    await store.open()
    await store.close()


async def test_a_plain_file_handle_is_in_the_way_too(file: Path) -> None:
    # To close it would let go of the store's locks.
    store = await made(file)
    with file.open("rb"), pytest.raises(BadConfig):
        await store.open()


async def test_an_app_is_not_opened_in_the_middle_of_a_transaction(file: Path) -> None:
    app = App(f"sqlite:///{file}")

    @app.task
    def ship(order: int) -> None: ...

    async with app:
        pass
    with closing(sqlite3.connect(file)) as db:
        ship.using(connection=db, delay="1h").enqueue_sync(1)
        with pytest.raises(BadConfig):
            await app.queues()
        db.commit()
    async with app:
        assert [queue.waiting for queue in await app.queues()] == [1]


# --- The store first

WAYS: dict[str, Callable[[Path], Any]] = {
    "text": lambda file: sqlite3.connect(str(file)),
    "path": lambda file: sqlite3.connect(file),
    "bytes": lambda file: sqlite3.connect(bytes(file)),
    "relative": lambda _: sqlite3.connect("jobs.db"),
    "class": lambda file: sqlite3.Connection(str(file)),
    "uri": lambda file: sqlite3.connect(f"file:{file}?mode=ro", uri=True),
    "uri-host": lambda file: sqlite3.connect(f"file://localhost{file}#x", uri=True),
    "uri-relative": lambda _: sqlite3.connect("file:jo%62s.db", uri=True),
    "symlink": lambda _: sqlite3.connect("symlink.db"),
    "hard-link": lambda _: sqlite3.connect("linked.db"),
    "sqlalchemy": lambda file: sqlalchemy.create_engine(f"sqlite:///{file}").connect(),
}


@pytest.mark.parametrize("way", WAYS)
async def test_sqlite3_is_refused_while_the_store_is_open(file: Path, way: str) -> None:
    store = SqliteStore(file)
    await store.open()
    (file.parent / "symlink.db").symlink_to(file)
    os.link(file, file.parent / "linked.db")
    with pytest.raises(BadConfig, match=r"is open as a store in this process.*apsw"):
        WAYS[way](file)
    sqlite3.connect(file.parent / "other.db").close()
    sqlite3.connect(":memory:").close()
    await store.close()
    WAYS[way](file).close()


async def test_aiosqlite_is_refused_while_the_store_is_open(file: Path) -> None:
    store = SqliteStore(file)
    await store.open()
    with pytest.raises(BadConfig, match="is open as a store in this process"):
        async with aiosqlite.connect(file):
            pass
    await store.close()
    async with aiosqlite.connect(file) as db:
        await db.execute("select 1")


async def test_apsw_is_welcome(file: Path) -> None:
    with closing(apsw.Connection(str(file))):
        store, twin = SqliteStore(file), SqliteStore(file)
        await store.open()
        await twin.open()
        with closing(apsw.Connection(str(file))):
            await twin.close()
        await store.close()


@asynccontextmanager
async def busy(file: Path) -> AsyncIterator[None]:
    """A connection of the user's to this file is busy in another thread."""
    with closing(apsw.Connection(str(file))) as connection:
        begun, over = threading.Event(), threading.Event()

        def wait(*_: Any) -> int:
            begun.set()
            return over.wait(10)

        connection.create_scalar_function("wait", wait)
        query = asyncio.create_task(asyncio.to_thread(connection.execute, "select wait()"))
        await asyncio.to_thread(begun.wait, 10)
        try:
            yield
        finally:
            over.set()
            await query


async def test_apsw_is_welcome_while_it_is_busy_in_another_thread(file: Path) -> None:
    await (await made(file)).close()
    async with busy(file):
        store = SqliteStore(file)
        try:
            await store.open()
            await store.add([a_job("job")])
        finally:
            await store.close()


async def test_an_outbox_can_be_opened_while_a_connection_to_another_file_is_busy(
    file: Path, tmp_path: Path
) -> None:
    async with busy(file):
        outbox = _Sqlite(tmp_path / "outbox.db")
        await outbox.open()
        await outbox.close()


async def test_stores_may_open_and_close_at_the_same_time(file: Path) -> None:
    async def often() -> None:
        for _ in range(10):
            store = SqliteStore(file)
            await store.open()
            await store.close()

    await asyncio.gather(*(often() for _ in range(4)))


async def test_other_processes_are_free(file: Path) -> None:
    store = SqliteStore(file)
    await store.open()
    try:
        look = "import sqlite3; print(*sqlite3.connect('jobs.db').execute('pragma user_version'))"
        said = await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", look])
        assert said != b"(0,)\n"
    finally:
        await store.close()


FORKED = """
import os, sys
from tickwheel import App, BadConfig

app = App("sqlite:///jobs.db")

@app.task
def nothing() -> None: ...

def add() -> None:
    nothing.using(delay="1h").enqueue_sync()

add()
if sys.argv[1] == "closed":
    app.sync.close()
child = os.fork()
if child == 0:
    try:
        add()
        add()
    except BadConfig as error:
        print("refused:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
add()
app.sync.close()
app.sync.queues()
print([queue.waiting for queue in app.sync.queues()], flush=True)
app.sync.close()
"""


@pytest.mark.parametrize("before", ["open", "closed"])
def test_a_forked_child_stores_jobs_or_says_that_it_cannot(file: Path, before: str) -> None:
    """Its SQLite believes that it has the parent's locks: jobs that it acknowledged vanished."""
    said = subprocess.check_output(
        [sys.executable, "-c", FORKED, before], text=True, timeout=60, stderr=subprocess.STDOUT
    )
    if before == "open":
        assert "refused: this process was forked while its parent had" in said
        assert said.endswith("[2]\n")
    else:
        assert said == "[4]\n"


async def test_nothing_is_acknowledged_once_the_log_is_gone(file: Path) -> None:
    """Whoever took it away: what is in a log that nobody else sees is lost."""
    store = await made(file)
    await store.open()
    try:
        await store.add([a_job("before")])
        Path(f"{file}-wal").unlink()
        with pytest.raises(StoreError, match="-wal was removed or replaced"):
            await store.add([a_job("after")])
    finally:
        await store.close()


# --- The outbox


@pytest.mark.parametrize(
    ("store", "outbox"),
    [
        ("sqlite:///jobs.db", "sqlite:///jobs.db"),
        ("sqlite:///jobs.db?sync=normal", "sqlite:///./folder/../jobs.db"),
        ("sqlite:///jobs.db", "sqlite:///symlink.db"),
        ("sqlite:///jobs.db", "sqlite:///linked.db"),
    ],
)
async def test_an_outbox_in_the_file_of_the_store_is_refused(
    file: Path, store: str, outbox: str
) -> None:
    await made(file)
    (file.parent / "folder").mkdir()
    (file.parent / "symlink.db").symlink_to(file)
    os.link(file, file.parent / "linked.db")
    with pytest.raises(BadConfig, match="needs no outbox"):
        App(store, outbox=outbox)
    with pytest.raises(BadConfig, match="needs no outbox"):
        App(SqliteStore(file), outbox=outbox)
    App(store, outbox="sqlite:///shop.db")


async def test_a_relay_and_apsw_are_kept_apart(file: Path) -> None:
    outbox = Outbox("sqlite:///shop.db")
    store = MemoryStore()
    with (
        closing(apsw.Connection("shop.db")),
        pytest.raises(BadConfig, match=r"shop.db open with apsw"),
    ):
        await outbox.empty(store)
    going = True
    relay = asyncio.create_task(outbox.relay(store, StoreClock(SystemClock()), lambda: going))
    try:
        async with asyncio.timeout(10):
            while not file.with_name("shop.db").stat().st_size:
                await asyncio.sleep(0.01)
        with pytest.raises(BadConfig, match="relay"):
            outbox.adding([], driver="apsw")
        outbox.adding([], driver="sqlite3")
    finally:
        going = False
        await relay
    outbox.adding([], driver="apsw")
