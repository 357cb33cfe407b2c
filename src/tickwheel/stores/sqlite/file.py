"""The embedded store's file: connections to it, their threads, its schema and its clock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import apsw

from tickwheel.clock import moved_ms, sleep_blocking
from tickwheel.errors import (
    BadConfig,
    StoreError,
    StoreIncompatible,
    StoreRefused,
    StoreUnavailable,
)
from tickwheel.stores.sqlite.libraries import Identity, file_of, identity, open_alone

T = TypeVar("T")

# How long a step may wait for another process's transaction before the store is unavailable.
BUSY_S = 15.0
# How much of the file each connection keeps in memory, however many jobs there are.
CACHE_KIB = 8 * 1024


class ConnectionThread:
    """A connection and the one thread that uses it."""

    db: apsw.Connection

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tickwheel-sqlite-{name}")
        self._path: Path | None = None
        self._file: Identity | None = None
        # The log beside the file, once there is one.
        self._wal: Identity | None = None

    async def open(self, path: Path, sync: str) -> None:
        def open_it() -> None:
            self.db = connect(path, sync)
            # Absolute, because the process may change its folder later.
            self._path, self._file = path.absolute(), file_of(self.db)

        await self._run(open_it)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run the work, and check that the file is still in its place before its answer counts."""

        def run() -> T:
            answer = work(*args)
            if self._path is not None:
                check_in_place(self._path, self._file)
                self._wal = check_log(self._path, self._wal)
            return answer

        return await self._run(run)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _translated, work)

    async def close(self) -> None:
        if self._path is not None:
            await self._run(self.db.close)
        self._thread.shutdown(wait=False)


def check_in_place(path: Path, file: Identity | None) -> None:
    """Raise if the file was removed or replaced. SQLite doesn't notice: what it commits is lost."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreUnavailable(
            f"{path} was removed while it was open: what is written now goes to the removed file. "
            "Put that same file back, or restart this process to begin a new one"
        ) from None
    except OSError:  # we may no longer look, which says nothing about the file
        return
    if file not in (None, (found.st_dev, found.st_ino)):
        raise StoreError(
            f"{path} was replaced by another file while it was open: what is written now goes to "
            "the old one. Restart this process to use the new one"
        )


def check_log(path: Path, seen: Identity | None) -> Identity | None:
    """Which file the log is. Raises if it is no longer the one that we have open: what is in a
    removed log is lost. Another SQLite library in this process can cause that."""
    found = identity(f"{path}-wal")
    if seen is not None and found != seen:
        raise StoreError(
            f"{path}-wal was removed or replaced while it was open, by another SQLite library in "
            "this process or by hand: what is written now is lost. Restart this process"
        )
    return found


def connect(path: Path, sync: str) -> apsw.Connection:
    if not path.resolve().parent.is_dir():
        raise BadConfig(f"the folder {path.resolve().parent} does not exist: create it first")
    # Jobs may carry secrets, so only the owner may read the file.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreUnavailable(f"{path} can't be created: {error.strerror}") from None
    db = open_alone(path)
    try:
        db.set_busy_handler(_patiently)
        _refuse_foreign(db, path)
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", sync)
        db.pragma("cache_size", -CACHE_KIB)
        # Larger than SQLite's default, so that a busy store checkpoints less often; still bounded.
        db.pragma("wal_autocheckpoint", 4000)
        db.pragma("journal_size_limit", 64 * 1024 * 1024)
    except BaseException:
        db.close()
        raise
    return db


def has_store(path: Path) -> bool:
    """Whether a file has tables of ours, without a change to it. True for a file that can't be
    read: opening the store tells why."""
    try:
        db = open_alone(path, apsw.SQLITE_OPEN_READONLY)
    except apsw.Error:
        return True
    try:
        db.set_busy_handler(_patiently)
        return _is_ours(_tables(db)) or db.pragma("user_version") > len(_parts())
    except apsw.Error:
        return True
    finally:
        db.close()


def _refuse_foreign(db: apsw.Connection, path: Path) -> None:
    """Our tables may be beside those of the user's program, unless it has one of the same name or
    a schema version of its own."""
    # First, so that it isn't that of another process which creates our tables at this moment.
    version = db.pragma("user_version")
    tables = _tables(db)
    if _is_ours(tables):
        return
    if taken := sorted(tables.keys() & _OURS):
        uses = f"it has a table named {taken[0]}"
    elif tables and version:
        uses = f"it has its own user_version, {version}"
    else:
        return
    raise StoreIncompatible(
        f"{path} is a SQLite database of another program ({uses}), so it can't have the jobs: "
        "name another file"
    )


_OURS = {
    *("job", "tally", "paused", "schedule", "worker", "bucket", "clock", "job_meta"),
    "tickwheel_record",
}


def _tables(db: apsw.Connection) -> dict[str, str]:
    """The statement that created each table."""
    found: list[Any] = db.execute(
        "select lower(name), sql from sqlite_schema where type = 'table'"
    ).fetchall()
    return dict(found)


def _is_ours(tables: dict[str, str]) -> bool:
    return "lease_until_ms" in tables.get("job", "")


def _patiently(tries: int) -> bool:
    """Wait a millisecond for another process's transaction: most are that short, and the pauses of
    SQLite's own handler grow to 100 ms."""
    sleep_blocking(0.001)
    return tries < BUSY_S * 1000


def _parts() -> list[str]:
    return Path(__file__).with_name("schema.sql").read_text().split("\n-- part ")[1:]


def migrate(db: apsw.Connection) -> None:
    parts = _parts()
    with _transaction(db):
        version = db.pragma("user_version")
        if version > len(parts):
            raise StoreIncompatible(
                f"the file was written by a newer Tickwheel (schema {version}, this one knows "
                f"{len(parts)}): upgrade Tickwheel, or use another file"
            )
        for part in parts[version:]:
            db.execute(part.partition("\n")[2])
        db.pragma("user_version", len(parts))


def follow_clock(db: apsw.Connection, wall_ns: int) -> None:
    """Leases are durations: when the clock is set, their ends move with it."""
    step_ms = clock_step_ms(db, wall_ns)
    if step_ms:
        db.execute(
            "update job set lease_until_ms = lease_until_ms + ? where state = 'running'",
            (step_ms,),
        )
    if step_ms != 0:
        db.execute("delete from clock")
        db.execute("insert into clock values (?, ?)", (_machine(), wall_ns))


def clock_step_ms(db: apsw.Connection, wall_ns: int) -> int | None:
    """How far the clock was set since it was last read; None if it never was, or if the machine was
    restarted since."""
    if not _machine():
        return 0
    seen = db.execute("select machine, wall_ns from clock").fetchone()
    return moved_ms(wall_ns, seen[1]) if seen is not None and seen[0] == _machine() else None


@functools.cache
def _machine() -> str:
    """Identifies this boot of this machine, and with it its monotonic clock. Empty if the system
    doesn't tell; then a clock that was set can't be noticed."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def in_transaction(db: apsw.Connection, step: Callable[..., T], *args: Any) -> T:
    with _transaction(db):
        return step(*args)


@contextlib.contextmanager
def _transaction(db: apsw.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


# A later try may succeed.
_PASSING = (
    apsw.AbortError, apsw.BusyError, apsw.CantOpenError, apsw.ConnectionClosedError,
    apsw.FullError, apsw.InterruptError, apsw.IOError, apsw.LockedError, apsw.NoMemError,
    apsw.PermissionsError, apsw.ProtocolError, apsw.SchemaChangeError,
)  # fmt: skip


def _translated(work: Callable[[], T]) -> T:
    """Raise SQLite's errors as ours."""
    try:
        return work()
    except apsw.ReadOnlyError as error:
        raise StoreUnavailable(
            f"SQLite can't write to the file: {error}; this user needs the right to write to it "
            "and to its folder"
        ) from error
    except _PASSING as error:
        raise StoreUnavailable(f"SQLite: {error}") from error
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise StoreIncompatible(f"the file is not a valid SQLite database: {error}") from error
    except apsw.TooBigError as error:
        raise StoreRefused(f"SQLite accepts no value larger than 1 GB: {error}") from error
    except apsw.Error as error:
        raise StoreRefused(
            f"SQLite refuses a statement, and a retry won't help: {error}. Either another program "
            "changed the file, or this is a bug in Tickwheel: please report it"
        ) from error
