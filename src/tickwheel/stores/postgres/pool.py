"""Connections to PostgreSQL: a few per handle, a time limit on every call, errors as ours.

docs/adr/0018 says why we don't use psycopg_pool.
"""

from __future__ import annotations

import asyncio
import random
import re
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg, waiting
from psycopg.pq import TransactionStatus

from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.masking import scrubbed
from tickwheel.stores.postgres.url import PostgresOptions

T = TypeVar("T")

# How often a step is tried if it runs into a deadlock.
TRIES = 5
# What the driver puts before the reason if it can't connect; our message names the server.
_PREFIX = re.compile(r"^(connection failed: )?(connection to server .*? failed: )?")
# How often a wait for the server wakes up to check for interrupts, for which we need no check.
LOOK_S = 60.0
# Our statements must use their indexes. A prepared statement keeps its plan from when there were
# few jobs, and reading all was cheapest, for some time after there are many. Behind a pooler these
# settings have no effect, but there nothing is prepared.
_SETTINGS = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}


class Connection(psycopg.AsyncConnection[tuple[Any, ...]]):
    """A connection that is closed when its user stops waiting.

    Psycopg would ask the server to cancel the statement and wait for the answer, ten seconds if the
    connection is dead. The server ends the statement anyway, at its own time limit.
    """

    async def wait(self, gen: Any, interval: float = LOOK_S, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, LOOK_S, timeout)
        except (asyncio.CancelledError, KeyboardInterrupt):
            self.pgconn.finish()
            raise


class Pool:
    """The connections of one handle."""

    def __init__(self, options: PostgresOptions) -> None:
        self._options = options
        self._timeout_s = options.timeout_ms / 1000
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(options.pool)
        self._open = True
        # Poolers refuse startup settings, and move a session from server to server.
        self._settings = True
        self.pooled = False

    async def close(self) -> None:
        self._open = False
        await self._drop_idle()

    async def run(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a step on a connection of its own, and again if it ran into a deadlock. If the server
        doesn't answer, it is unknown whether the step happened."""
        for trial in range(TRIES):
            try:
                return await self._once(step, args)
            except (pg.DeadlockDetected, pg.SerializationFailure) as error:
                if trial == TRIES - 1:
                    said = f"{self._options.where}: {self._words(error)}"
                    raise StoreUnavailable(said) from error
                await asyncio.sleep(random.uniform(0, 0.01 * 2**trial))
        raise AssertionError("unreachable")

    async def _once(self, step: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        try:
            async with asyncio.timeout(self._timeout_s), self._connection() as connection:
                return await step(connection, *args)
        except TimeoutError:
            await self._drop_idle()
            raise StoreUnavailable(
                f"{self._options.where}: no answer within {self._timeout_s:g} s"
            ) from None
        except (pg.DeadlockDetected, pg.SerializationFailure):
            raise
        except psycopg.Error as error:
            raise self._translated(error) from error

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
            # The only thing that an idle connection can receive is its end. So a step after a
            # restart of the server doesn't fail.
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
        # Whatever broke this connection has most likely broken the others.
        await self._drop_idle()

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    # --- Connecting

    async def connect(self) -> Connection:
        """A new connection, for the caller alone."""
        try:
            connection = await self._connect()
        except psycopg.Error as error:
            if "startup parameter" not in str(error) or not self._settings:
                raise self._translated(error) from None
            self._settings = False
            return await self.connect()
        try:
            await self._detect_pooler(connection)
        except BaseException:
            connection.pgconn.finish()
            raise
        return connection

    async def _connect(self) -> Connection:
        conninfo = dict(self._options.conninfo)
        if self._settings:
            timeout_ms = self._options.timeout_ms
            settings = _SETTINGS | {
                # Less than our own time limit: then it is known that the step did not happen.
                "statement_timeout": str(timeout_ms * 9 // 10),
                # While a reply can't be sent, the step goes on and keeps its locks.
                "tcp_user_timeout": str(timeout_ms),
            }
            ours = " ".join(f"-c {name}={value}" for name, value in settings.items())
            # The user's options come last, and win.
            conninfo["options"] = f"{ours} {conninfo.get('options', '')}".strip()
        return await Connection.connect(**conninfo, autocommit=True)  # type: ignore[arg-type]

    async def _detect_pooler(self, connection: Connection) -> None:
        """Detect a pooler: it invents the process number of the session. It may also look for a
        prepared statement on another server, so nothing is prepared then."""
        if not self.pooled:
            cursor = await connection.execute("select pg_backend_pid()")
            row = await cursor.fetchone()
            self.pooled = row is None or row[0] != connection.info.backend_pid
        if self.pooled:
            connection.prepare_threshold = None

    # --- Errors

    def _translated(self, error: psycopg.Error) -> Exception:
        """The driver's error as one of ours, chosen by what the caller can do about it."""
        said = f"{self._options.where}: {self._words(error)}"
        if isinstance(error, pg.DataError):
            return UsageError(f"PostgreSQL can't store this text: {self._words(error)}")
        if isinstance(error, pg.InsufficientPrivilege):
            return StoreError(f"{said}; grant the privileges in docs/postgresql.md")
        if isinstance(error, pg.UndefinedTable | pg.UndefinedFunction | pg.UndefinedColumn):
            return StoreIncompatible(f"{said}; run tickwheel migrate as the schema's owner")
        if isinstance(error, pg.ReadOnlySqlTransaction):
            return StoreUnavailable(f"{said}: this server is a replica, or was set to read-only")
        if _is_refusal(error):
            return StoreError(said)
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreUnavailable(said)
        return StoreError(said)

    def _words(self, error: psycopg.Error) -> str:
        """What the server said, on one line."""
        words = error.diag.message_primary or str(error) or type(error).__name__
        return scrubbed(_PREFIX.sub("", " ".join(words.split())), *self._options.secrets)


def _is_refusal(error: psycopg.Error) -> bool:
    """Whether the server is there but doesn't let us in, so that trying again won't help."""
    if error.sqlstate is not None:
        return error.sqlstate.startswith("28") or error.sqlstate == "3D000"
    # While connecting, the driver has no error code, only a message.
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
