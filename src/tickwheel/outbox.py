"""The outbox: write jobs in the user's transaction when the store is another database.

A small table in the user's database holds the jobs; a relay, in every worker or on its own, adds
them to the store and then deletes them. It delivers at least once, and the job's id makes it
exactly once: adding a job again changes nothing. So any number of relays may run, and none needs a
lock.

No row is ever dropped. A row that is not a job, or that the store will never accept, is set aside:
it stays in the table with the reason, relays no longer read it, and the others are not held up.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from tickwheel.checks import checked_job
from tickwheel.clock import StoreClock
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.errors import (
    BadConfig,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
    UsageError,
)
from tickwheel.job import Job
from tickwheel.masking import masked
from tickwheel.store import Store
from tickwheel.stores.url import StoreUrl
from tickwheel.transaction import InFile, Statement

log = logging.getLogger("tickwheel")

T = TypeVar("T")

TABLE = "tickwheel_outbox"
# A relay reads at most this much at a time, but always one job.
BATCH = 500
BATCH_BYTES = 8 * 1024**2
# The longest time between two reads of the outbox: a job can start that much later.
POLL_S = 0.05

_encode = msgspec.json.encode
_as_job = msgspec.json.Decoder(Job).decode


class Row(NamedTuple):
    """A row of the table: a number that is never reused, and a job as JSON text."""

    n: int
    job: str | bytes | None


class Relayed(NamedTuple):
    """How many of the rows that a relay read went to the store, and how many were set aside."""

    moved: int = 0
    aside: int = 0


class _Database(Protocol):
    """The user's database, through the relay's own connection."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def read(self) -> list[Row]: ...
    async def delete(self, numbers: Sequence[int]) -> None: ...

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        """Mark rows as refused, with the reason; returns how many were not marked before."""

    async def count_aside(self) -> int: ...


class Outbox:
    """An outbox, by the URL of its database."""

    def __init__(self, url: str, store: Store | None = None) -> None:
        parts = StoreUrl.of(url)
        self._path: Path | None = None
        if parts.scheme in ("postgresql", "postgres"):
            self._dialect = "postgresql"
        elif parts.scheme == "sqlite":
            self._dialect = "sqlite"
            self._path = Path(parts.file)
        else:
            raise BadConfig(
                f"an outbox must be in a postgresql:// or sqlite:// database, not {masked(url)!r}"
            )
        self._url = url
        # How many relays of this process have the database open.
        self._relays = 0
        if self._path and isinstance(store, InFile) and _same_file(self._path, store.path):
            raise BadConfig(
                f"the outbox is in {self._path}, the store's own file, which needs no "
                "outbox: remove it and use connection= (an apsw one if this process has "
                "the store open), or keep the jobs in a separate file"
            )

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """The statement that writes these jobs for the relay."""
        if self._dialect == "sqlite" and driver == "apsw" and self._relays:
            raise BadConfig(
                f"a relay in this process has {self._path} open with Python's sqlite3, and "
                "apsw is another SQLite library: two of them on one file break each other's locks. "
                "Use a sqlite3 connection"
            )
        rows = {
            "postgresql": "jsonb_array_elements_text(cast(%(jobs)s as jsonb))",
            "sqlite": "json_each(%(jobs)s)",
        }[self._dialect]
        texts = [_encode(job).decode() for job in jobs]
        sql = f"insert into {TABLE} (job) select value from {rows}"
        return Statement(self._dialect, sql, _encode(texts).decode())

    def __str__(self) -> str:
        return masked(self._url)

    async def relay(self, store: Store, clock: StoreClock, going: Callable[[], bool]) -> None:
        """Move jobs to the store while `going`; retries while a database is unreachable."""
        reconnecting = Reconnecting(clock)

        def stopped() -> bool:
            return not going()

        async with self._database() as database:
            await reconnecting.until(stopped, database.open)
            while going():
                relayed = await reconnecting.until(stopped, lambda: hand_over(database, store))
                if not any(relayed or ()):
                    await asyncio.sleep(POLL_S)

    async def empty(self, store: Store) -> int:
        """Move all jobs that are there now; returns how many."""
        async with self._database() as database:
            await database.open()
            total = 0
            while any(relayed := await hand_over(database, store)):
                total += relayed.moved
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


async def hand_over(database: _Database, store: Store) -> Relayed:
    """Add the oldest jobs of the outbox to the store, then delete them from the outbox."""
    jobs, reasons = _decoded(await database.read())
    if jobs:
        reasons |= await _add(store, jobs)
    added = [n for n, _ in jobs if n not in reasons]
    if added:
        await database.delete(added)
    if reasons and (new := await database.set_aside(reasons)):
        n = min(reasons)
        log.error("the outbox set aside %d rows of %s; row %d: %s", new, TABLE, n, reasons[n])
    return Relayed(len(added), len(reasons))


def _decoded(rows: Sequence[Row]) -> tuple[list[tuple[int, Job]], dict[int, str]]:
    """The jobs in these rows, and why some rows hold none."""
    jobs: list[tuple[int, Job]] = []
    reasons: dict[int, str] = {}
    for n, text in rows:
        try:
            jobs.append((n, checked_job(_as_job(text or b""))))
        except (msgspec.MsgspecError, UnicodeError, RecursionError, UsageError) as error:
            reasons[n] = f"not a job: {error}"
    return jobs, reasons


async def _add(store: Store, jobs: Sequence[tuple[int, Job]]) -> dict[int, str]:
    """Add these jobs; returns which of them the store will never accept, and why."""
    refused = await _refused(store, jobs)
    for error in refused.values():
        # A store that accepts none, and doesn't say that their content is the reason, is broken.
        about_the_job = not isinstance(error, StoreError) or isinstance(error, StoreRefused)
        if not about_the_job and len(refused) == len(jobs):
            raise StoreUnavailable(f"the store accepts no job from the outbox: {error}") from error
    return {n: f"{type(error).__name__}: {error}" for n, error in refused.items()}


async def _refused(store: Store, jobs: Sequence[tuple[int, Job]]) -> dict[int, Exception]:
    """Find the refused jobs by bisection: adding the others again changes nothing."""
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
    """Uses Python's own module, like most users' connections: two SQLite libraries in one process
    must not open the same file, because each breaks the other's locks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db: sqlite3.Connection | None = None
        # One thread: a connection must not be closed while a call that nobody waits for uses it.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tickwheel-outbox")

    async def open(self) -> None:
        # Imported only here: it takes time, and programs without SQLite don't need it.
        from tickwheel.stores.sqlite.libraries import is_open_by_apsw

        if is_open_by_apsw(self._path):
            raise BadConfig(
                f"this process has {self._path} open with apsw, and the outbox is read "
                "with Python's sqlite3: two SQLite libraries on one file break each other's "
                "locks. Use sqlite3 for that file in this process"
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
                    # Text that is not UTF-8 is not a job; we report that ourselves.
                    self._db.text_factory = bytes
                return work(self._db)
            except sqlite3.Error as error:
                words = f"the outbox in {self._path}: {error}"
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                    raise StoreUnavailable(words) from error
                raise StoreError(words) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


# Errors that may pass. Any other is a mistake, which a retry would only repeat.
_PASSING = {
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_ABORT, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_SCHEMA,
}  # fmt: skip

# Without `autoincrement` SQLite reuses the numbers of deleted rows, and a relay that is about to
# delete those would delete rows that nobody has read. An old release created such tables, and its
# relay may still run: no row gets a number that it can hold.
_BEYOND = 1_000_000


def _make_table(db: sqlite3.Connection) -> None:
    if not _up_to_date(db):
        with _transaction(db):
            # Another relay may have done it while this one waited for the lock.
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


# One transaction, under a lock, because two relays that create a table at the same moment fail. An
# identity column never reuses a number, so rows can be deleted by `n`.
_MAKE_IN_POSTGRES = f"""
    select pg_advisory_xact_lock(hashtext('{TABLE}'));
    create table if not exists {TABLE} (
        n bigint generated always as identity primary key, job text not null);
    alter table {TABLE} add column if not exists refused text;
    create index if not exists {TABLE}_ready on {TABLE} (n) where refused is null
"""


class _Postgres:
    def __init__(self, url: str) -> None:
        from tickwheel.stores.postgres.pool import Pool
        from tickwheel.stores.postgres.url import PostgresOptions

        self._pool = Pool(replace(PostgresOptions.of(url), pool=1))

    async def open(self) -> None:
        # Check first: creating would take a lock that waits for every open transaction.
        known = await self._rows(
            "select 1 from pg_attribute where attrelid = to_regclass(%s) and attname = 'refused'",
            (TABLE,),
        )
        if not known:
            await self._run(_execute, _MAKE_IN_POSTGRES)

    async def close(self) -> None:
        await self._pool.close()

    async def read(self) -> list[Row]:
        rows = await self._rows(
            f"""select n, job from {TABLE} where n in (
                    select n from (
                        select n, size, sum(size) over (order by n) as total from (
                            select n, octet_length(job) as size from {TABLE}
                            where refused is null order by n limit {BATCH}) as oldest) as sized
                    where total <= {BATCH_BYTES} or total = size)
                order by n"""
        )
        return [Row(*row) for row in rows]

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._run(_execute, f"delete from {TABLE} where n = any(%s)", (list(numbers),))

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        changed = await self._rows(
            f"""update {TABLE} set refused = new.reason
                from unnest(%s::bigint[], %s::text[]) as new (n, reason)
                where {TABLE}.n = new.n and refused is null returning 1""",
            # PostgreSQL's text can hold every character but this.
            (list(reasons), [reason.replace("\0", "�") for reason in reasons.values()]),
        )
        return len(changed)

    async def count_aside(self) -> int:
        [[count]] = await self._rows(f"select count(*) from {TABLE} where refused is not null")
        return int(count)

    async def _rows(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return await self._run(_fetch, sql, parameters)

    async def _run(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            return await self._pool.run(step, *args)
        except StoreError as error:
            raise type(error)(f"the outbox at {error}") from error


async def _execute(db: Any, sql: str, parameters: tuple[Any, ...] = ()) -> Any:
    # Several statements fit in one call only if there are no parameters at all.
    return await db.execute(sql, parameters or None)


async def _fetch(db: Any, sql: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = await (await _execute(db, sql, parameters)).fetchall()
    return rows
