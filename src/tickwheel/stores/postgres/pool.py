"""Connections to PostgreSQL: a few per handle, each call bounded, each failure in our words."""

from __future__ import annotations

import asyncio
import random
import re
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import waiting
from psycopg.pq import TransactionStatus

from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.stores.postgres.url import Options

T = TypeVar("T")

# Steps that met one another in a deadlock are taken again this often.
TRIES = 5
# How the driver begins when it could not connect; our own words name the place.
_PREFIX = re.compile(r"^(connection failed: )?(connection to server .*? failed: )?")
# How often a wait for the server looks whether anything else happened: nothing else does.
LOOK_S = 60.0
# Our statements go along their indexes, whatever the statistics of a young table say.
_SETTINGS = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}


class Connection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection that is thrown away when its user gives up waiting.

    Psycopg would ask the server to cancel the statement and wait for its answer, for ten seconds
    where the line is dead. The server's own time limit ends the statement as well.
    """

    async def wait(self, gen: Any, interval: float = LOOK_S, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, LOOK_S, timeout)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.pgconn.finish()
            raise


class Pool:
    """The connections of one handle."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._timeout_s = options.timeout_ms / 1000
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(options.pool)
        self._open = True
        # Poolers refuse settings at the start, and move a session from server to server.
        self._settings = True
        self.pooled = False

    async def close(self) -> None:
        self._open = False
        await self._drop_idle()

    async def run(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Take a step on a connection of its own. It may be taken again where it met another in a
        deadlock; where the server gives no answer it is unknown whether it happened."""
        for trial in range(TRIES):
            try:
                return await self._once(step, args)
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                if trial == TRIES - 1:
                    raise StoreUnavailable(f"{self._options.place}: {_words(error)}") from error
                await asyncio.sleep(random.uniform(0, 0.01 * 2**trial))
        raise AssertionError("unreachable")

    async def _once(self, step: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as connection:
                return await step(connection, *args)
        except TimeoutError:
            await self._drop_idle()
            raise StoreUnavailable(
                f"{self._options.place}: no answer within {self._timeout_s:g} s"
            ) from None
        except (pg.DeadlockDetected, pg.SerializationFailure):
            raise
        except psycopg.Error as error:
            raise self._told(error) from error

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        async with self._room:
            if not self._open:
                raise StoreUnavailable("the store is closed")
            connection = self._usable() or await self.connect()
            try:
                yield connection
            finally:
                await self._give_back(connection)

    def _usable(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            # Nothing is due on an idle line but its end: so a restart of the server is no news to
            # the step that comes after it.
            if not connection.closed and not _readable(connection):
                return connection
            connection.pgconn.finish()
        return None

    async def _give_back(self, connection: Connection) -> None:
        idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
        if idle and self._open:
            self._idle.append(connection)
            return
        connection.pgconn.finish()
        # Whatever ended this one has most likely ended the others.
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    # --- Connecting

    async def connect(self) -> Connection:
        """A further connection, for the caller alone."""
        try:
            connection = await self._connect()
        except psycopg.Error as error:
            if "startup parameter" not in str(error) or not self._settings:
                raise self._told(error) from None
            self._settings = False
            return await self.connect()
        try:
            await self._get_to_know(connection)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection

    async def _connect(self) -> Connection:
        conninfo = dict(self._options.conninfo)
        if self._settings:
            # A little less than our own patience: then it is known that the step did not happen.
            settings = _SETTINGS | {"statement_timeout": str(self._options.timeout_ms * 9 // 10)}
            ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
            # The user's come last, and win.
            conninfo["options"] = f"{ours} {conninfo.get('options', '')}".strip()
        return await Connection.connect(**conninfo, autocommit=True)  # type: ignore[arg-type]

    async def _get_to_know(self, connection: Connection) -> None:
        """A pooler invents the number of the process that serves us. What is prepared on one
        server it may look for on another."""
        if not self.pooled:
            cursor = await connection.execute("select pg_backend_pid()")
            row = await cursor.fetchone()
            self.pooled = row is None or row[0] != connection.info.backend_pid
        if self.pooled:
            connection.prepare_threshold = None

    # --- Errors

    def _told(self, error: psycopg.Error) -> Exception:
        """The driver's error in our words: by what the caller can do about it."""
        said = f"{self._options.place}: {_words(error)}"
        if isinstance(error, pg.DataError):
            return UsageError(f"PostgreSQL can't keep this text: {_words(error)}")
        if isinstance(error, pg.InsufficientPrivilege):
            return StoreError(f"{said}; grant it as docs/postgresql.md says")
        if isinstance(error, pg.UndefinedTable | pg.UndefinedFunction | pg.UndefinedColumn):
            return StoreIncompatible(f"{said}; run tickwheel migrate as the schema's owner")
        if isinstance(error, pg.ReadOnlySqlTransaction):
            return StoreUnavailable(f"{said}: this server is a replica, or was told not to write")
        if _is_refusal(error):
            return StoreError(said)
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreUnavailable(said)
        return StoreError(said)


def _words(error: psycopg.Error) -> str:
    """What the server said, on one line; it never repeats a password."""
    words = error.diag.message_primary or str(error) or type(error).__name__
    return _PREFIX.sub("", " ".join(words.split()))


def _is_refusal(error: psycopg.Error) -> bool:
    """Whether the server is there and doesn't let us in: trying again is of no use."""
    if error.sqlstate is not None:
        return error.sqlstate.startswith("28") or error.sqlstate == "3D000"
    # While it connects the driver knows no code, only words.
    words = str(error)
    return any(
        part in words
        for part in (
            "authentication failed",
            "no password supplied",
            "no pg_hba.conf entry",
            'database "',
            'role "',
            "unrecognized configuration parameter",
            "SSL was required",
            "does not support SSL",
            "certificate verify failed",
        )
    ) and not any(part in words for part in ("starting up", "shutting down", "recovery mode"))


def _readable(connection: Connection) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection.pgconn.socket, selectors.EVENT_READ)
        return bool(selector.select(0))
