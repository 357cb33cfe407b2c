"""Run one statement on the user's own connection, inside its current transaction.

The driver is recognized by the name of the connection's type: nothing is imported for it. Drivers
differ in how they write a parameter and in whether they are awaited; both are handled here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.job import Job


class Statement(NamedTuple):
    """SQL with one parameter, written `%(jobs)s`; it may return rows of one id each."""

    # "postgresql" or "sqlite".
    dialect: str
    sql: str
    jobs: str


@runtime_checkable
class Transactional(Protocol):
    """A database to which jobs can be written through the user's connection."""

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """The statement that adds these jobs and returns the ids of those that were added.

        `driver` is the package of the connection. Raises BadConfig if it can't be used.
        """


@runtime_checkable
class InFile(Protocol):
    """A store whose jobs are in one file."""

    @property
    def path(self) -> Path: ...


# How each driver writes the parameter, and what it accepts for it.
_STYLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "pyformat": ("%(jobs)s", lambda jobs: {"jobs": jobs}),
    "format": ("%s", lambda jobs: (jobs,)),
    "qmark": ("?", lambda jobs: (jobs,)),
    # As text: where the connection encodes JSON itself, it would encode ours again.
    "numeric_dollar": ("cast($1 as text)::json", lambda jobs: (jobs,)),
    "named": (":jobs", lambda jobs: {"jobs": jobs}),
}
# Drivers known by the name of their package: their dialect and their style.
_DRIVERS = {
    "psycopg": ("postgresql", "pyformat"),
    "psycopg2": ("postgresql", "pyformat"),
    "asyncpg": ("postgresql", "numeric_dollar"),
    "sqlite3": ("sqlite", "qmark"),
    "aiosqlite": ("sqlite", "qmark"),
    "apsw": ("sqlite", "qmark"),
}
KNOWN = "psycopg, asyncpg, sqlite3, apsw, aiosqlite, SQLAlchemy (session or connection), Django"


def driver_of(connection: Any) -> str:
    """The package of a connection."""
    return type(connection).__module__.partition(".")[0].lstrip("_")


def run_sync(connection: Any, statement: Statement) -> list[str]:
    """Run the statement on a connection that is not awaited; returns the resulting ids."""
    if driver_of(connection) in ("asyncpg", "aiosqlite") or type(connection).__name__.startswith(
        "Async"
    ):
        raise BadConfig("this connection is async; use await enqueue(…) instead")
    return _ids(_run(connection, statement))


async def run(connection: Any, statement: Statement) -> list[str]:
    """The same for any connection, awaited or not."""
    try:
        answer = _run(connection, statement)
        while inspect.isawaitable(answer):
            answer = await answer
        if not _nothing(answer) and inspect.iscoroutinefunction(getattr(answer, "fetchall", None)):
            answer = await answer.fetchall()
    except Exception as error:
        raise _in_our_words(error, statement) from error
    return _ids(answer)


def _run(connection: Any, statement: Statement) -> Any:
    """A cursor, rows, or an awaitable of either."""
    package = driver_of(connection)
    try:
        if package == "sqlalchemy":
            return _by_sqlalchemy(connection, statement)
        if package == "django" and hasattr(connection, "vendor"):
            return _by_django(connection, statement)
        if package in _DRIVERS:
            return _by_driver(connection, package, statement)
    except BadConfig:
        raise
    except Exception as error:
        raise _in_our_words(error, statement) from error
    # Not its repr: somebody may have given a URL with a password.
    kind = type(connection).__qualname__
    raise BadConfig(f"connection= is of type {kind}, which is not supported; these are: {KNOWN}")


def _by_driver(connection: Any, package: str, statement: Statement) -> Any:
    dialect, style = _DRIVERS[package]
    sql, parameters = _written(statement, dialect, style)
    if package == "asyncpg":
        return connection.fetch(sql, *parameters)
    if package == "psycopg":
        return _by_psycopg(connection, sql, parameters)
    if package == "psycopg2":
        from psycopg2.extensions import cursor as plain

        cursor = connection.cursor(cursor_factory=plain)
        cursor.execute(sql, parameters)
        return cursor
    return connection.execute(sql, parameters)


def _by_psycopg(connection: Any, sql: str, parameters: Any) -> Any:
    """On a cursor of our own: the connection's may take other parameters or give other rows."""
    import psycopg

    awaited = isinstance(connection, psycopg.AsyncConnection)
    kind: Any = psycopg.AsyncCursor if awaited else psycopg.Cursor
    return kind(connection, row_factory=psycopg.rows.tuple_row).execute(sql, parameters)


def _by_sqlalchemy(connection: Any, statement: Statement) -> Any:
    if type(connection).__name__.startswith("Async") or hasattr(connection, "sync_session"):
        return _by_async_sqlalchemy(connection, statement)
    # A session, or a scoped one, has the connection of its transaction.
    if hasattr(connection, "connection") and callable(connection.connection):
        connection = connection.connection()
    if not hasattr(connection, "exec_driver_sql"):
        raise BadConfig("connection= is a SQLAlchemy engine; give a connection or a session of it")
    dialect = connection.dialect
    sql, parameters = _written(statement, dialect.name, dialect.paramstyle)
    return connection.exec_driver_sql(sql, parameters)


async def _by_async_sqlalchemy(connection: Any, statement: Statement) -> Any:
    # An async session has a connection to await; an async connection is one.
    if hasattr(connection, "sync_session"):
        connection = await connection.connection()
    dialect = connection.dialect
    sql, parameters = _written(statement, dialect.name, dialect.paramstyle)
    return await connection.exec_driver_sql(sql, parameters)


def _by_django(connection: Any, statement: Statement) -> Any:
    sql, parameters = _written(statement, connection.vendor, "format")
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall() if cursor.description else []


def _written(statement: Statement, dialect: str, style: str) -> tuple[str, Any]:
    if dialect != statement.dialect:
        raise BadConfig(
            f"this connection is to {dialect}, but the jobs are in {statement.dialect}; "
            "use a connection to the same database, or give the app an outbox there"
        )
    if style not in _STYLES:
        raise BadConfig(
            f"parameter style {style} is not supported; these are: {', '.join(_STYLES)}"
        )
    mark, parameters = _STYLES[style]
    sql = statement.sql.replace("%(jobs)s", mark)
    # If a percent sign has no special meaning, it is not doubled.
    return sql if "format" in style else sql.replace("%%", "%"), parameters(statement.jobs)


def _ids(answer: Any) -> list[str]:
    """The ids from rows, or from a cursor that may have none."""
    if getattr(answer, "returns_rows", True) is False or _nothing(answer):
        return []
    rows = answer.fetchall() if hasattr(answer, "fetchall") else answer
    return [_first(row) for row in rows or ()]


def _first(row: Any) -> str:
    """The one value of a row, whatever the connection makes of rows: tuples, mappings, values."""
    if isinstance(row, Mapping):
        row = next(iter(row.values()))
    elif not isinstance(row, (str, bytes)):
        row = row[0]
    return row.decode() if isinstance(row, bytes) else str(row)


def _nothing(cursor: Any) -> bool:
    """Whether a cursor of a database driver has run something without rows."""
    try:
        return hasattr(cursor, "fetchall") and getattr(cursor, "description", 0) is None
    except Exception:  # apsw: a finished statement can't be described any more
        return True


def _in_our_words(error: Exception, statement: Statement) -> Exception:
    """Explain a missing table, which the user must create; pass on all other errors."""
    words = str(error).lower()
    if "no such table" in words or "does not exist" in words:
        if "outbox" in words:
            make = "run tickwheel outbox MODULE:APP to create it"
        else:
            make = "if this is the store's database, run tickwheel migrate or a worker to create it"
        return StoreUnavailable(f"the table for jobs is missing ({error}); {make}")
    return error
