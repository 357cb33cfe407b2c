"""The embedded store's file: connections to it, threads for them, and news that it changed."""

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

# How often a waiting node looks at the file's change counter: a read of shared memory, 3 µs.
LOOK_S = 0.005
# How long a step may wait for another process's transaction before the store counts as away.
BUSY_S = 15.0
# Jobs in the file do not cost memory; this much of it is kept at hand, per connection.
CACHE_KIB = 8 * 1024


class Lane:
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
            # The folder of this process may be another one later.
            self._path, self._file = path.absolute(), file_of(self.db)

        await self._run(open_it)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What the work answers, of a file that is still in its place."""

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
    """SQLite goes on with a file that is removed or replaced: what it commits is then nowhere."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreUnavailable(
            f"{path} was removed while it was open, so nothing is stored: put that same file back, "
            "or restart this process to begin a new one"
        ) from None
    except OSError:  # we may no longer look: that says nothing of the file
        return
    if file not in (None, (found.st_dev, found.st_ino)):
        raise StoreError(
            f"{path} was replaced by another file while it was open, so nothing is stored: "
            "restart this process to use the new one"
        )


def check_log(path: Path, seen: Identity | None) -> Identity | None:
    """Which file the log is. While we have it open nobody may remove it: what is in a log that
    nobody else can see is lost. Another SQLite library in this process can do that."""
    found = identity(f"{path}-wal")
    if seen is not None and found != seen:
        raise StoreError(
            f"{path}-wal was removed or replaced while it was open, so nothing is stored: another "
            "SQLite library in this process may have done it, or somebody by hand. Restart this "
            "process"
        )
    return found


class Pulse:
    """Wakes waiters when the file changed: at once for this node, soon for other processes.

    SQLite keeps a counter of commits in shared memory; one task per store looks at it, and only
    while somebody waits.
    """

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._version = self._look()
        self._waiters: set[asyncio.Future[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self.count = 0

    def _look(self) -> int:
        version: int = self._db.pragma("data_version")
        return version

    def beat(self) -> None:
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def after(self, seen: int, *, until: float) -> bool:
        """Wait for a beat later than `seen`; False where `until` came first."""
        if self.count != seen:
            return True
        if until <= self._loop.time():
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        self._keep_looking()
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def _keep_looking(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._looked)

    def _looked(self) -> None:
        self._looking = None
        if not self._waiters:
            return
        self._keep_looking()
        with contextlib.suppress(apsw.Error):
            version = self._look()
            if version != self._version:
                self._version = version
                self.beat()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        # Whoever still waits finds the store closed when it looks again.
        self.beat()
        self._db.close()


def connect(path: Path, sync: str) -> apsw.Connection:
    if not path.resolve().parent.is_dir():
        raise BadConfig(f"the folder {path.resolve().parent} does not exist: create it first")
    # Jobs may carry secrets: the file is its owner's alone.
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreUnavailable(f"{path} can't be created: {error.strerror}") from None
    db = open_alone(path)
    try:
        db.set_busy_handler(_patiently)
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


def _patiently(tries: int) -> bool:
    """Wait for another process's transaction in steps of a millisecond: they are that short, and
    SQLite's own steps grow to 100."""
    sleep_blocking(0.001)
    return tries < BUSY_S * 1000


def migrate(db: apsw.Connection) -> None:
    parts = Path(__file__).with_name("schema.sql").read_text().split("\n-- part ")[1:]
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
    """A lease is a span of time: where the clock was set, its end is another moment now."""
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
    """How far the clock was set since somebody last looked; None where nobody has, or where the
    machine was started since."""
    if not _machine():
        return 0
    seen = db.execute("select machine, wall_ns from clock").fetchone()
    return moved_ms(wall_ns, seen[1]) if seen is not None and seen[0] == _machine() else None


@functools.cache
def _machine() -> str:
    """This start of this machine, with its own count of monotonic time; empty where the system
    doesn't say, and then no step of the clock can be told."""
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


# What a later try may find otherwise.
_PASSING = (
    apsw.AbortError, apsw.BusyError, apsw.CantOpenError, apsw.ConnectionClosedError,
    apsw.FullError, apsw.InterruptError, apsw.IOError, apsw.LockedError, apsw.NoMemError,
    apsw.PermissionsError, apsw.ProtocolError, apsw.ReadOnlyError, apsw.SchemaChangeError,
)  # fmt: skip


def _translated(work: Callable[[], T]) -> T:
    """Say in our words what went wrong in SQLite's."""
    try:
        return work()
    except _PASSING as error:
        raise StoreUnavailable(f"SQLite: {error}") from error
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise StoreIncompatible(f"the file is not a sound SQLite database: {error}") from error
    except apsw.TooBigError as error:
        raise StoreRefused(f"SQLite takes no value of more than 1 GB: {error}") from error
    except apsw.Error as error:
        raise StoreRefused(
            f"SQLite refuses a statement, and always will: {error}. The file was changed by "
            "somebody else, or this is a bug in Tickwheel: please report it"
        ) from error
