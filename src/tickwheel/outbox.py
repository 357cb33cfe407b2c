"""The outbox: jobs for a store that is not the user's database, written in the user's transaction.

A small table in the user's database takes the jobs; a relay, in every worker or by itself, adds
them to the store and then deletes them. At least once, and the job's id makes it once: adding a job
again changes nothing. So any number of relays may run, and none needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.job import Job
from tickwheel.store import Store
from tickwheel.transaction import Statement

log = logging.getLogger("tickwheel")

TABLE = "tickwheel_outbox"
BATCH = 500
# How long a job in the outbox waits for a look at most: that much later a job can start.
LOOK_S = 0.05

_encode = msgspec.json.encode
_as_job = msgspec.json.Decoder(Job).decode


class _Database(Protocol):
    """The user's database, through a connection of the relay's own."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def read(self) -> list[tuple[int, str]]: ...
    async def delete(self, numbers: Sequence[int]) -> None: ...


class Outbox:
    """An outbox by the URL of the database that it is in."""

    def __init__(self, url: str) -> None:
        scheme = url.partition("://")[0]
        if scheme in ("postgresql", "postgres"):
            self._dialect = "postgresql"
        elif scheme == "sqlite":
            self._dialect = "sqlite"
        else:
            raise BadConfig(
                f"an outbox is in a postgresql:// or sqlite:// database, not {scheme or url!r}"
            )
        self._url = url

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """The statement that leaves these jobs for the relay."""
        rows = {
            "postgresql": "jsonb_array_elements_text(cast(%(jobs)s as jsonb))",
            "sqlite": "json_each(%(jobs)s)",
        }[self._dialect]
        texts = [_encode(job).decode() for job in jobs]
        sql = f"insert into {TABLE} (job) select value from {rows}"
        return Statement(self._dialect, sql, _encode(texts).decode())

    def __str__(self) -> str:
        where = urlsplit(self._url)
        hidden = f":{where.password}@" if where.password else "@"
        return self._url.replace(hidden, ":***@" if where.password else "@")

    async def relay(self, store: Store, clock: StoreClock, going: Callable[[], bool]) -> None:
        """Hand jobs over for as long as `going`; what can't be reached is tried again."""
        contact = Contact(clock)
        database = self._database()
        try:
            await contact.insist(database.open, while_=going)
            while going():
                handed = await contact.insist(lambda: hand_over(database, store), while_=going)
                if not handed:
                    await asyncio.sleep(LOOK_S)
        finally:
            await database.close()

    async def empty(self, store: Store) -> int:
        """Hand over all that is there now; says how many jobs that was."""
        database = self._database()
        try:
            await database.open()
            total = 0
            while handed := await hand_over(database, store):
                total += handed
            return total
        finally:
            await database.close()

    def _database(self) -> _Database:
        return _Sqlite(self._url) if self._dialect == "sqlite" else _Postgres(self._url)


async def hand_over(database: _Database, store: Store) -> int:
    """Add the oldest jobs of the outbox to the store, then forget them there; says how many."""
    rows = await database.read()
    jobs = []
    for _, text in rows:
        try:
            jobs.append(_as_job(text))
        except msgspec.MsgspecError as error:
            log.error("the outbox holds something that is no job, and drops it: %s", error)
    if jobs:
        await store.add(jobs)
    if rows:
        await database.delete([number for number, _ in rows])
    return len(rows)


# --- The two databases


class _Sqlite:
    """Through Python's own module, as most users' connections: two SQLite libraries in one process
    must not open the same file, for each undoes the other's locks."""

    def __init__(self, url: str) -> None:
        self._path = Path(unquote(url.removeprefix("sqlite://").partition("?")[0])[1:])
        self._db: sqlite3.Connection | None = None

    async def open(self) -> None:
        await self._run(f"create table if not exists {TABLE} (n integer primary key, job text)")

    async def close(self) -> None:
        if self._db is not None:
            await asyncio.to_thread(self._db.close)

    async def read(self) -> list[tuple[int, str]]:
        return await self._run(f"select n, job from {TABLE} order by n limit {BATCH}")

    async def delete(self, numbers: Sequence[int]) -> None:
        query = f"delete from {TABLE} where n in (select value from json_each(?))"
        await self._run(query, (_encode(list(numbers)).decode(),))

    async def _run(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        def run() -> list[Any]:
            try:
                if self._db is None:
                    self._db = sqlite3.connect(self._path, timeout=5, check_same_thread=False)
                with self._db:
                    return list(self._db.execute(sql, parameters))
            except sqlite3.Error as error:
                raise StoreUnavailable(f"the outbox in {self._path}: {error}") from error

        return await asyncio.to_thread(run)


class _Postgres:
    def __init__(self, url: str) -> None:
        from tickwheel.stores.postgres.url import Options

        self._options = Options.of(url)
        self._db: Any = None

    async def open(self) -> None:
        await self._run(
            f"create table if not exists {TABLE} "
            "(n bigint generated always as identity primary key, job text not null)"
        )

    async def close(self) -> None:
        if self._db is not None:
            await self._db.close()

    async def read(self) -> list[tuple[int, str]]:
        cursor = await self._run(f"select n, job from {TABLE} order by n limit {BATCH}")
        rows: list[tuple[int, str]] = await cursor.fetchall()
        return rows

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._run(f"delete from {TABLE} where n = any(%s)", (list(numbers),))

    async def _run(self, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
        import psycopg

        try:
            if self._db is None or self._db.closed:
                conninfo: Any = self._options.conninfo
                self._db = await psycopg.AsyncConnection.connect(autocommit=True, **conninfo)
            return await self._db.execute(sql, parameters)
        except psycopg.Error as error:
            raise StoreUnavailable(f"the outbox at {self._options.place}: {error}") from error
