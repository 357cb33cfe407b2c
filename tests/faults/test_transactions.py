"""Jobs inside the user's own transaction: they exist if and only if it commits.

Each way in is tried on both databases where it speaks to both. A way in writes a business row and
enqueues, then commits or rolls back.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import aiosqlite
import apsw
import asyncpg
import msgspec
import psycopg
import psycopg2
import pytest
import sqlalchemy
from psycopg.rows import dict_row, scalar_row
from psycopg2.extras import RealDictCursor
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postgres_server import shared_server
from stores import nats_server
from tickwheel import App, BadConfig, StoreUnavailable
from tickwheel.job import Job
from tickwheel.outbox import TABLE

BUSINESS = "create table if not exists orders (n integer)"
INSERT = "insert into orders values (1)"


class Abort(Exception):
    """Rolls a transaction back."""


# --- Ways in: each gives a connection inside a transaction, which Abort rolls back


@contextmanager
def by_sqlite3(where: str) -> Iterator[Any]:
    connection = sqlite3.connect(where, timeout=10)
    try:
        with connection:
            connection.execute("begin")
            connection.execute(INSERT)
            yield connection
    finally:
        connection.close()


@contextmanager
def by_apsw(where: str) -> Iterator[Any]:
    connection = apsw.Connection(where)
    connection.set_busy_timeout(10_000)
    try:
        with connection:
            connection.execute(INSERT)
            yield connection
    finally:
        connection.close()


@contextmanager
def by_psycopg(where: str) -> Iterator[Any]:
    with psycopg.connect(where) as connection:
        connection.execute(INSERT)
        yield connection


@contextmanager
def by_psycopg2(where: str) -> Iterator[Any]:
    connection = psycopg2.connect(where)
    try:
        with connection:
            connection.cursor().execute(INSERT)
            yield connection
    finally:
        connection.close()


def by_session(url: Callable[[str], str]) -> Callable[[str], Any]:
    @contextmanager
    def way(where: str) -> Iterator[Any]:
        engine = sqlalchemy.create_engine(url(where))
        try:
            with Session(engine) as session, session.begin():
                session.execute(sqlalchemy.text(INSERT))
                yield session
        finally:
            engine.dispose()

    return way


@contextmanager
def by_connection(where: str) -> Iterator[Any]:
    engine = sqlalchemy.create_engine(_psycopg_url(where))
    try:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text(INSERT))
            yield connection
    finally:
        engine.dispose()


@contextmanager
def by_django(where: str) -> Iterator[Any]:
    from django.db import transaction
    from django.db.utils import ConnectionHandler

    server = shared_server()
    postgres = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": "127.0.0.1",
        "PORT": server.port,
    }
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": where}
    chosen = postgres if where.startswith("postgresql") else sqlite
    _set_up_django()
    alias = secrets.token_hex(4)
    import django.db

    django.db.connections = django.db.transaction.connections = ConnectionHandler(
        {"default": chosen, alias: chosen}
    )
    connection = django.db.connections[alias]
    try:
        with transaction.atomic(using=alias):
            with connection.cursor() as cursor:
                cursor.execute(INSERT)
            yield connection
    finally:
        connection.close()


def _set_up_django() -> None:
    import django
    from django.conf import settings

    if not settings.configured:
        settings.configure(USE_TZ=True)
        django.setup()


def _psycopg_url(where: str) -> str:
    return where.replace("postgresql://", "postgresql+psycopg://")


def changed(enter: Callable[[str], Any], **settings: Any) -> Callable[[str], Any]:
    """The same way in, over a connection that gives other rows or takes other parameters."""

    @contextmanager
    def way(where: str) -> Iterator[Any]:
        with enter(where) as connection:
            for name, value in settings.items():
                setattr(connection, name, value)
            yield connection

    return way


def as_dict(cursor: Any, row: Any) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}


SYNC = {
    "sqlite3-dicts": ("sqlite", changed(by_sqlite3, row_factory=as_dict)),
    "sqlite3-values": ("sqlite", changed(by_sqlite3, row_factory=lambda _, row: row[0])),
    "sqlite3-bytes": ("sqlite", changed(by_sqlite3, text_factory=bytes)),
    "apsw-dicts": ("sqlite", changed(by_apsw, row_trace=lambda _, row: {"id": row[0]})),
    "psycopg-dicts": ("postgresql", changed(by_psycopg, row_factory=dict_row)),
    "psycopg-values": ("postgresql", changed(by_psycopg, row_factory=scalar_row)),
    "psycopg-raw": ("postgresql", changed(by_psycopg, cursor_factory=psycopg.RawCursor)),
    "psycopg2-dicts": ("postgresql", changed(by_psycopg2, cursor_factory=RealDictCursor)),
    "sqlite3": ("sqlite", by_sqlite3),
    "apsw": ("sqlite", by_apsw),
    "sqlalchemy-sqlite": ("sqlite", by_session(lambda where: f"sqlite:///{where}")),
    "django-sqlite": ("sqlite", by_django),
    "psycopg": ("postgresql", by_psycopg),
    "psycopg2": ("postgresql", by_psycopg2),
    "sqlalchemy-postgresql": ("postgresql", by_session(_psycopg_url)),
    "sqlalchemy-connection": ("postgresql", by_connection),
    "django-postgresql": ("postgresql", by_django),
}


@asynccontextmanager
async def by_aiosqlite(where: str) -> AsyncIterator[Any]:
    async with aiosqlite.connect(where, timeout=10) as connection:
        await connection.execute("begin")
        await connection.execute(INSERT)
        try:
            yield connection
        except BaseException:
            await connection.rollback()
            raise
        await connection.commit()


@asynccontextmanager
async def by_async_psycopg(where: str) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(where) as connection:
        await connection.execute(INSERT)
        yield connection


@asynccontextmanager
async def by_asyncpg(where: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(where)
    try:
        async with connection.transaction():
            await connection.execute(INSERT)
            yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def by_asyncpg_with_json(where: str) -> AsyncIterator[Any]:
    async with by_asyncpg(where) as connection:
        for kind in ("json", "jsonb"):
            await connection.set_type_codec(
                kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog"
            )
        yield connection


@asynccontextmanager
async def by_async_psycopg_with_dicts(where: str) -> AsyncIterator[Any]:
    async with by_async_psycopg(where) as connection:
        connection.row_factory = dict_row
        yield connection


def by_async_session(url: Callable[[str], str]) -> Callable[[str], Any]:
    @asynccontextmanager
    async def way(where: str) -> AsyncIterator[Any]:
        engine = create_async_engine(url(where))
        try:
            async with AsyncSession(engine) as session, session.begin():
                await session.execute(sqlalchemy.text(INSERT))
                yield session
        finally:
            await engine.dispose()

    return way


@asynccontextmanager
async def by_async_connection(where: str) -> AsyncIterator[Any]:
    engine = create_async_engine(where.replace("postgresql://", "postgresql+asyncpg://"))
    try:
        async with engine.begin() as connection:
            await connection.execute(sqlalchemy.text(INSERT))
            yield connection
    finally:
        await engine.dispose()


ASYNC: dict[str, tuple[str, Callable[[str], AbstractAsyncContextManager[Any]]]] = {
    "aiosqlite": ("sqlite", by_aiosqlite),
    "sqlalchemy-aiosqlite": (
        "sqlite",
        by_async_session(lambda where: f"sqlite+aiosqlite:///{where}"),
    ),
    "psycopg": ("postgresql", by_async_psycopg),
    "psycopg-dicts": ("postgresql", by_async_psycopg_with_dicts),
    "asyncpg": ("postgresql", by_asyncpg),
    "asyncpg-json": ("postgresql", by_asyncpg_with_json),
    "sqlalchemy-psycopg": ("postgresql", by_async_session(_psycopg_url)),
    "sqlalchemy-asyncpg": ("postgresql", by_async_connection),
}


# --- The places


class Place:
    """A database with a business table, an app whose jobs go along with it, and what became."""

    def __init__(self, dialect: str, folder: Path, *, outbox: bool) -> None:
        self.folder = folder
        if dialect == "sqlite":
            self.where = str(folder / "data.db")
            url = f"sqlite:///{self.where}"
            with sqlite3.connect(self.where) as db:
                db.execute(BUSINESS)
        else:
            server = shared_server()
            for sql in ("drop table if exists orders", BUSINESS, f"drop table if exists {TABLE}"):
                server.execute(sql)
            self.where = server.url
            url = f"{server.url}?schema=tx_{secrets.token_hex(4)}"
        namespace = secrets.token_hex(4)
        jobs = f"{nats_server().url}/{namespace}" if outbox else url
        self.app = App(jobs, outbox=url.partition("?")[0] if outbox else None)

        @self.app.task
        async def ship(order: int) -> int:
            return order

        self.ship = ship

    async def make(self) -> None:
        """Make the tables. Nothing stays open: see `SqliteStore.adding`."""
        async with self.app:
            await self.empty()

    async def empty(self) -> int:
        if self.app.outbox is None:
            return 0
        return await self.app.outbox.empty((await self.app.client()).store)

    def tagged(self) -> Job:
        """A job with meta and an expiry."""
        job: Job = self.ship.using(delay="1h", id="tagged").job(1)
        return msgspec.structs.replace(job, meta={"customer": "42"}, expires_ms=job.due_ms)

    async def has_tagged(self) -> bool:
        """Whether it is there as it was made, and found."""
        async with self.app:
            await self.empty()
            [stored] = await (await self.app.client()).store.get(["tagged"])
            found = await self.app.find(meta={"customer": "42"})
        assert stored is not None
        whole = (stored.meta, stored.expires_ms) == ({"customer": "42"}, stored.due_ms)
        return whole and [info.id for info in found.jobs] == ["tagged"]

    async def ids(self) -> list[str]:
        """One word for each job that waits."""
        async with self.app:
            await self.empty()
            found, cursor = [], None
            while True:
                page = await self.app.find(state="waiting", cursor=cursor, limit=1000)
                found += ["job" for _ in page.jobs]
                cursor = page.cursor
                if cursor is None:
                    return found


@pytest.fixture(params=[False, True], ids=["store", "outbox"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Makes a place."""

    def make(dialect: str) -> Place:
        return Place(dialect, tmp_path, outbox=request.param)

    nats_server()
    return make


# --- Commit and rollback


@pytest.mark.parametrize("way", SYNC)
def test_without_an_event_loop(place: Any, runner: asyncio.Runner, way: str) -> None:
    dialect, enter = SYNC[way]
    here = place(dialect)
    runner.run(here.make())
    with pytest.raises(Abort), enter(here.where) as connection:
        here.ship.using(connection=connection, delay="1h").enqueue_sync(1)
        raise Abort
    assert runner.run(here.ids()) == []
    with enter(here.where) as connection:
        job = here.ship.using(connection=connection, delay="1h", id="one").enqueue_sync(1)
        assert (job.id, job.added) == ("one", True)
    assert runner.run(here.ids()) == ["job"]
    with enter(here.where) as connection:
        jobs = [here.ship.using(delay="1h", id=id).job(1) for id in ("one", "two", "two")]
        handles = here.app.sync.enqueue_many(jobs, connection=connection)
        if here.app.outbox is None:
            assert [handle.added for handle in handles] == [False, True, False]
    assert runner.run(here.ids()) == ["job"] * 2
    with enter(here.where) as connection:
        here.app.sync.enqueue_many([here.tagged()], connection=connection)
    assert runner.run(here.has_tagged())


@pytest.mark.parametrize("way", ASYNC)
async def test_with_an_event_loop(place: Any, way: str) -> None:
    dialect, enter = ASYNC[way]
    here = place(dialect)
    await here.make()
    with pytest.raises(Abort):
        async with enter(here.where) as connection:
            await here.ship.using(connection=connection, delay="1h").enqueue(1)
            raise Abort
    assert await here.ids() == []
    async with enter(here.where) as connection:
        job = await here.ship.using(connection=connection, delay="1h", id="one").enqueue(1)
        assert (job.id, job.added) == ("one", True)
        jobs = [here.ship.using(delay="1h").job(n) for n in range(20)]
        await here.app.enqueue_many(jobs, connection=connection)
    assert await here.ids() == ["job"] * 21
    async with enter(here.where) as connection:
        await here.app.enqueue_many([here.tagged()], connection=connection)
    assert await here.has_tagged()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_worker_runs_the_job_soon_after_the_commit(place: Any, dialect: str) -> None:
    enter = SYNC[{"sqlite": "apsw", "postgresql": "psycopg"}[dialect]][1]
    here = place(dialect)
    if here.app.outbox is not None and dialect == "sqlite":
        enter = by_sqlite3
    async with here.app, here.app.worker(), asyncio.timeout(10):
        await here.empty()
        with enter(here.where) as connection:
            job = await here.ship.using(connection=connection).enqueue(7)
        assert await job.result() == 7


# --- The outbox alone


@pytest.fixture
def outbox(runner: asyncio.Runner, tmp_path: Path) -> Iterator[Place]:
    here = Place("sqlite", tmp_path, outbox=True)
    runner.run(here.make())
    yield here
    runner.run(here.app.__aexit__())


def left(here: Place) -> int:
    with sqlite3.connect(here.where) as db:
        [[count]] = db.execute(f"select count(*) from {TABLE}")
    return int(count)


async def test_a_crash_between_commit_and_relay_loses_nothing(outbox: Place) -> None:
    with by_sqlite3(outbox.where) as connection:
        outbox.ship.using(connection=connection, id="one").enqueue_sync(1)
    # Whoever was to relay it died. The next one does.
    assert left(outbox) == 1
    assert await outbox.empty() == 1
    assert left(outbox) == 0
    assert await outbox.ids() == ["job"]


async def test_a_crash_between_handing_over_and_forgetting_doubles_nothing(
    outbox: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_sqlite3(outbox.where) as connection:
        for n in range(3):
            outbox.ship.using(connection=connection, delay="1h").enqueue_sync(n)

    async def die(*_: object) -> None:
        raise StoreUnavailable("killed")

    with monkeypatch.context() as patched:
        patched.setattr("tickwheel.outbox._Sqlite.delete", die)
        with pytest.raises(StoreUnavailable):
            await outbox.empty()
    assert left(outbox) == 3
    assert await outbox.ids() == ["job"] * 3
    assert left(outbox) == 0


async def test_a_store_that_is_away_loses_nothing(
    outbox: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with by_sqlite3(outbox.where) as connection:
        outbox.ship.using(connection=connection, delay="1h").enqueue_sync(1)
    store = (await outbox.app.client()).store

    async def away(*_: object) -> None:
        raise StoreUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(store, "add", away)
        with pytest.raises(StoreUnavailable):
            await outbox.empty()
    assert left(outbox) == 1
    assert await outbox.ids() == ["job"]


async def test_several_relays_double_nothing(outbox: Place) -> None:
    with by_sqlite3(outbox.where) as connection:
        jobs = [outbox.ship.using(delay="1h").job(n) for n in range(700)]
        outbox.app.sync.enqueue_many(jobs, connection=connection)
    await asyncio.gather(*(outbox.empty() for _ in range(4)))
    assert await outbox.ids() == ["job"] * 700
    assert left(outbox) == 0


async def test_what_is_no_job_does_not_hold_up_the_others(outbox: Place) -> None:
    with by_sqlite3(outbox.where) as connection:
        connection.execute(f"insert into {TABLE} (job) values ('nonsense')")
        outbox.ship.using(connection=connection, delay="1h").enqueue_sync(1)
    assert await outbox.ids() == ["job"]
    assert left(outbox) == 1


# --- Mistakes


def test_mistakes_are_told(tmp_path: Path) -> None:
    here = Place("sqlite", tmp_path, outbox=False)
    app = App("memory://")

    @app.task
    def nothing() -> None: ...

    with sqlite3.connect(here.where) as connection:
        with pytest.raises(BadConfig, match="give the app an outbox"):
            nothing.using(connection=connection).enqueue_sync()
        with pytest.raises(StoreUnavailable, match="table for jobs is missing"):
            here.ship.using(connection=connection).enqueue_sync(1)
        with pytest.raises(BadConfig, match="an outbox must be in a postgresql"):
            App("memory://", outbox="nats://host")
    with pytest.raises(BadConfig, match="is not supported; these are: psycopg"):
        here.ship.using(connection=object()).enqueue_sync(1)
    with pytest.raises(BadConfig, match="of type str, which is not") as told:
        here.ship.using(connection="postgresql://ann:hunter2@host/shop").enqueue_sync(1)
    assert "hunter2" not in str(told.value)
    engine = sqlalchemy.create_engine("sqlite://")
    with pytest.raises(BadConfig, match="give a connection or a session"):
        here.ship.using(connection=engine).enqueue_sync(1)
    other = psycopg.connect(shared_server().url)
    with other, pytest.raises(BadConfig, match="to postgresql, but the jobs are in sqlite"):
        here.ship.using(connection=other).enqueue_sync(1)


async def test_two_sqlite_libraries_are_kept_apart(tmp_path: Path) -> None:
    here = Place("sqlite", tmp_path, outbox=False)
    async with here.app:
        # A connection to another file, which may have attached this one.
        with (
            closing(sqlite3.connect(":memory:")) as it,
            pytest.raises(BadConfig, match="use an apsw connection"),
        ):
            here.ship.using(connection=it).enqueue_sync(1)


async def test_an_async_connection_has_to_be_awaited(tmp_path: Path) -> None:
    here = Place("sqlite", tmp_path, outbox=False)
    async with aiosqlite.connect(here.where) as connection:
        with pytest.raises(BadConfig, match="await enqueue"):
            here.ship.using(connection=connection).enqueue_sync(1)
