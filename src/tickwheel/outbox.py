"""The outbox: jobs for a store that is not the user's database, written in the user's transaction.

A small table in the user's database takes the jobs; a relay, in every worker or by itself, adds
them to the store and then deletes them. At least once, and the job's id makes it once: adding a job
again changes nothing. So any number of relays may run, and none needs a lock.

No row is ever dropped. What is no job, or what the store will never take, is set aside: it stays in
the table with the reason, relays no longer read it, and the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import (
    BadConfig,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from tickwheel.job import Job
from tickwheel.store import Store
from tickwheel.tasks import checked_job
from tickwheel.transaction import InFile, Statement

log = logging.getLogger("tickwheel")

T = TypeVar("T")

TABLE = "tickwheel_outbox"
# A relay reads at most this much at a time, but always one job.
BATCH = 500
BATCH_BYTES = 8 * 1024**2
# How long a job in the outbox waits for a look at most: that much later a job can start.
LOOK_S = 0.05

_encode = msgspec.json.encode
_as_job = msgspec.json.Decoder(Job).decode


class Row(NamedTuple):
    """What the table holds: a number that is never given twice, and a job as JSON text."""

    n: int
    job: str | bytes | None


class Handed(NamedTuple):
    """What became of the rows that a relay read."""

    over: int = 0
    aside: int = 0


class _Database(Protocol):
    """The user's database, through a connection of the relay's own."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def read(self) -> list[Row]: ...
    async def delete(self, numbers: Sequence[int]) -> None: ...

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        """Keep rows from the relays, with the reason; says for how many this was news."""

    async def count_aside(self) -> int: ...


class Outbox:
    """An outbox by the URL of the database that it is in."""

    def __init__(self, url: str, store: Store | None = None) -> None:
        scheme = url.partition("://")[0]
        self._path: Path | None = None
        if scheme in ("postgresql", "postgres"):
            self._dialect = "postgresql"
        elif scheme == "sqlite":
            self._dialect = "sqlite"
            self._path = Path(unquote(url.removeprefix("sqlite://").partition("?")[0])[1:])
        else:
            raise BadConfig(
                f"an outbox is in a postgresql:// or sqlite:// database, not {scheme or url!r}"
            )
        self._url = url
        # How many relays of this process have the database open.
        self._relays = 0
        if self._path and isinstance(store, InFile) and _same_file(self._path, store.path):
            raise BadConfig(
                f"the outbox is in {self._path}, the file of the store itself, which needs no "
                "outbox: leave it out and give connection= (an apsw one where this process has "
                "the store open), or keep the jobs in a file of their own"
            )

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """The statement that leaves these jobs for the relay."""
        if self._dialect == "sqlite" and driver == "apsw" and self._relays:
            raise BadConfig(
                f"a relay of this process has {self._path} open through Python's sqlite3, and "
                "apsw is another SQLite library: two of them on one file undo each other's locks. "
                "Give a connection of sqlite3's"
            )
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
        async with self._database() as database:
            await contact.insist(database.open, while_=going)
            while going():
                handed = await contact.insist(lambda: hand_over(database, store), while_=going)
                if not any(handed or ()):
                    await asyncio.sleep(LOOK_S)

    async def empty(self, store: Store) -> int:
        """Hand over all that is there now; says how many jobs that was."""
        async with self._database() as database:
            await database.open()
            total = 0
            while any(handed := await hand_over(database, store)):
                total += handed.over
            return total

    async def aside(self) -> int:
        """How many rows are set aside."""
        async with self._database() as database:
            await database.open()
            return await database.count_aside()

    @asynccontextmanager
    async def _database(self) -> AsyncIterator[_Database]:
        database = _Postgres(self._url) if self._path is None else _Sqlite(self._path)
        self._relays += 1
        try:
            yield database
        finally:
            await database.close()
            self._relays -= 1


async def hand_over(database: _Database, store: Store) -> Handed:
    """Add the oldest jobs of the outbox to the store, then forget them there."""
    jobs, reasons = _decoded(await database.read())
    if jobs:
        reasons |= await _add(store, jobs)
    added = [n for n, _ in jobs if n not in reasons]
    if added:
        await database.delete(added)
    if reasons and (new := await database.set_aside(reasons)):
        n = min(reasons)
        log.error("the outbox set aside %d rows of %s; row %d: %s", new, TABLE, n, reasons[n])
    return Handed(len(added), len(reasons))


def _decoded(rows: Sequence[Row]) -> tuple[list[tuple[int, Job]], dict[int, str]]:
    """The jobs in these rows, and why some rows hold none."""
    jobs: list[tuple[int, Job]] = []
    reasons: dict[int, str] = {}
    for n, text in rows:
        try:
            jobs.append((n, checked_job(_as_job(text or b""))))
        except (msgspec.MsgspecError, UnicodeError, UsageError) as error:
            reasons[n] = f"not a job: {error}"
    return jobs, reasons


async def _add(store: Store, jobs: Sequence[tuple[int, Job]]) -> dict[int, str]:
    """Add these jobs; says which of them the store will never take, and why."""
    refused = await _refused(store, jobs)
    for error in refused.values():
        # A store that takes none, and doesn't say that it is for what is in them, is broken.
        about_the_job = not isinstance(error, StoreError) or isinstance(error, StoreRefused)
        if not about_the_job and len(refused) == len(jobs):
            raise StoreUnavailable(f"the store takes no job from the outbox: {error}") from error
    return {n: f"{type(error).__name__}: {error}" for n, error in refused.items()}


async def _refused(store: Store, jobs: Sequence[tuple[int, Job]]) -> dict[int, Exception]:
    """Find the jobs that are refused by halves: to add the others again changes nothing."""
    try:
        await store.add([job for _, job in jobs])
        return {}
    except (StoreUnavailable, StoreIncompatible, OSError):
        raise
    except Exception as error:
        if len(jobs) == 1:
            return {jobs[0][0]: error}
    half = len(jobs) // 2
    return {**await _refused(store, jobs[:half]), **await _refused(store, jobs[half:])}


# --- The two databases


def _same_file(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


class _Sqlite:
    """Through Python's own module, as most users' connections: two SQLite libraries in one process
    must not open the same file, because each undoes the other's locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        # One thread: what is closed must not be in use any more, although nobody waits for it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tickwheel-outbox")

    async def open(self) -> None:
        apsw = sys.modules.get("apsw")
        for each in apsw.connections() if apsw else ():
            if each.filename and _same_file(Path(each.filename), self._path):
                raise BadConfig(
                    f"this process has {self._path} open through apsw, and the outbox is read "
                    "through Python's sqlite3: two SQLite libraries on one file undo each other's "
                    "locks. Use sqlite3 for it in this process"
                )
        await self._run(_make_table)

    async def close(self) -> None:
        def close() -> None:
            if self._db is not None:
                self._db.close()

        closing = self._thread.submit(close)
        self._thread.shutdown(wait=False)
        await asyncio.wrap_future(closing)

    async def read(self) -> list[Row]:
        def read(db: sqlite3.Connection) -> list[Row]:
            rows: list[Row] = []
            size = 0
            query = f"select n, job from {TABLE} where refused is null order by n limit {BATCH}"
            for row in db.execute(query):
                size += len(row[1] or b"")
                if rows and size > BATCH_BYTES:
                    break
                rows.append(Row(*row))
            return rows

        return await self._run(read)

    async def delete(self, numbers: Sequence[int]) -> None:
        query = f"delete from {TABLE} where n in (select value from json_each(?))"
        text = _encode(list(numbers)).decode()
        await self._run(lambda db: db.execute(query, (text,)))

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        query = f"update {TABLE} set refused = ? where n = ? and refused is null"
        rows = [(reason, n) for n, reason in reasons.items()]

        def set_aside(db: sqlite3.Connection) -> int:
            with _transaction(db):
                return db.executemany(query, rows).rowcount

        return await self._run(set_aside)

    async def count_aside(self) -> int:
        query = f"select count(*) from {TABLE} where refused is not null"
        [count] = await self._run(lambda db: db.execute(query).fetchone())
        return int(count)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            try:
                if self._db is None:
                    self._db = sqlite3.connect(
                        self._path, timeout=5, check_same_thread=False, isolation_level=None
                    )
                    # What is not UTF-8 is no job; it is for us to say so.
                    self._db.text_factory = bytes
                return work(self._db)
            except sqlite3.Error as error:
                words = f"the outbox in {self._path}: {error}"
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                    raise StoreUnavailable(words) from error
                raise StoreError(words) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


# What a later try may find otherwise. Every other error is a mistake.
_PASSING = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_SCHEMA,
}  # fmt: skip

# Without `autoincrement` SQLite gives the numbers of deleted rows again, and a relay that is about
# to delete those would delete rows that nobody has read. Tables of such a kind were made once, and
# a relay of that release may still run: no number that it can hold is given to a row.
_BEYOND = 1_000_000


def _make_table(db: sqlite3.Connection) -> None:
    if not _up_to_date(db):
        with _transaction(db):
            # Another relay may have done it while this one waited for its turn.
            if not _up_to_date(db):
                _renew_table(db)


def _columns(db: sqlite3.Connection) -> list[bytes]:
    return [name for _, name, *_ in db.execute(f"pragma table_info({TABLE})")]


def _up_to_date(db: sqlite3.Connection) -> bool:
    query = "select sql from sqlite_master where type = 'table' and name = ?"
    found = db.execute(query, (TABLE,)).fetchone()
    return found is not None and b"autoincrement" in found[0] and b"refused" in _columns(db)


def _renew_table(db: sqlite3.Connection) -> None:
    columns = _columns(db)
    new = f"{TABLE}_new"
    db.execute(f"create table {new} (n integer primary key autoincrement, job text, refused text)")
    if columns:
        refused = "refused" if b"refused" in columns else "null"
        db.execute(f"insert into {new} (n) select {_BEYOND} + ifnull(max(n), 0) from {TABLE}")
        db.execute(f"delete from {new}")
        db.execute(
            f"insert into {new} (job, refused) select job, {refused} from {TABLE} order by n"
        )
        db.execute(f"drop table {TABLE}")
    db.execute(f"alter table {new} rename to {TABLE}")
    db.execute(f"create index {TABLE}_ready on {TABLE} (n) where refused is null")


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


# One transaction, under a lock, because two relays that make a table at the same moment fail. An
# identity never gives a number twice, so `n` may say what to delete.
_MAKE_IN_POSTGRES = f"""
    select pg_advisory_xact_lock(hashtext('{TABLE}'));
    create table if not exists {TABLE} (
        n bigint generated always as identity primary key, job text not null);
    alter table {TABLE} add column if not exists refused text;
    create index if not exists {TABLE}_ready on {TABLE} (n) where refused is null
"""


class _Postgres:
    def __init__(self, url: str) -> None:
        from tickwheel.stores.postgres.url import Options

        self._options = Options.of(url)
        self._db: Any = None

    async def open(self) -> None:
        # To ask first spares the table a lock that would wait for every open transaction.
        cursor = await self._run(
            "select 1 from pg_attribute where attrelid = to_regclass(%s) and attname = 'refused'",
            (TABLE,),
        )
        if await cursor.fetchone() is None:
            await self._run(_MAKE_IN_POSTGRES)

    async def close(self) -> None:
        if self._db is not None:
            await self._db.close()

    async def read(self) -> list[Row]:
        cursor = await self._run(
            f"""select n, job from {TABLE} where n in (
                    select n from (
                        select n, size, sum(size) over (order by n) as total from (
                            select n, octet_length(job) as size from {TABLE}
                            where refused is null order by n limit {BATCH}) as oldest) as sized
                    where total <= {BATCH_BYTES} or total = size)
                order by n"""
        )
        return [Row(*row) for row in await cursor.fetchall()]

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._run(f"delete from {TABLE} where n = any(%s)", (list(numbers),))

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        cursor = await self._run(
            f"""update {TABLE} set refused = new.reason
                from unnest(%s::bigint[], %s::text[]) as new (n, reason)
                where {TABLE}.n = new.n and refused is null""",
            # A text of PostgreSQL's holds everything but this.
            (list(reasons), [reason.replace("\0", "�") for reason in reasons.values()]),
        )
        return int(cursor.rowcount)

    async def count_aside(self) -> int:
        cursor = await self._run(f"select count(*) from {TABLE} where refused is not null")
        [count] = await cursor.fetchone()
        return int(count)

    async def _run(self, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
        import psycopg

        try:
            if self._db is None or self._db.closed:
                conninfo: Any = self._options.conninfo
                self._db = await psycopg.AsyncConnection.connect(autocommit=True, **conninfo)
            # Several statements go in one call only where there are no parameters at all.
            return await self._db.execute(sql, parameters or None)
        except (psycopg.OperationalError, psycopg.InterfaceError, psycopg.InternalError) as error:
            raise StoreUnavailable(f"the outbox at {self._options.place}: {error}") from error
        except psycopg.Error as error:
            raise StoreError(f"the outbox at {self._options.place}: {error}") from error
