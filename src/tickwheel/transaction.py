"""One statement on a connection of the user's own, inside whatever transaction it is in.

Whose connection it is shows in the name of its type: nothing is imported for it. Drivers differ in
how a parameter is written and in whether they are awaited; both are settled here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.job import Job


class Statement(NamedTuple):
    """SQL with one parameter, written `%(jobs)s`; it may give back rows of one id each."""

    # "postgresql" or "sqlite".
    dialect: str
    sql: str
    jobs: str


@runtime_checkable
class Transactional(Protocol):
    """A place that jobs can be written to by a connection of the user's."""

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """The statement that adds these jobs; gives back the ids of those that were added.

        `driver` is the package that the connection is of. BadConfig where that won't do.
        """


@runtime_checkable
class InFile(Protocol):
    """A store whose jobs are in one file."""

    @property
    def path(self) -> Path: ...


# How each driver writes the parameter, and what it takes for it.
_STYLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "pyformat": ("%(jobs)s", lambda jobs: {"jobs": jobs}),
    "format": ("%s", lambda jobs: (jobs,)),
    "qmark": ("?", lambda jobs: (jobs,)),
    "numeric_dollar": ("$1", lambda jobs: (jobs,)),
    "named": (":jobs", lambda jobs: {"jobs": jobs}),
}
# Drivers that are known by the name of their package: the dialect they speak, and their style.
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
    """The package that a connection is of."""
    return type(connection).__module__.partition(".")[0].lstrip("_")


def run_sync(connection: Any, statement: Statement) -> list[str]:
    """Run the statement on a connection that is not awaited; gives the ids that came back."""
    if driver_of(connection) in ("asyncpg", "aiosqlite") or type(connection).__name__.startswith(
        "Async"
    ):
        raise BadConfig("this connection is an async one: await enqueue(…) instead")
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
    raise BadConfig(f"connection={connection!r}: known are {KNOWN}")


def _by_driver(connection: Any, package: str, statement: Statement) -> Any:
    dialect, style = _DRIVERS[package]
    sql, parameters = _written(statement, dialect, style)
    if package == "asyncpg":
        return connection.fetch(sql, *parameters)
    if package == "psycopg2":
        cursor = connection.cursor()
        cursor.execute(sql, parameters)
        return cursor
    return connection.execute(sql, parameters)


def _by_sqlalchemy(connection: Any, statement: Statement) -> Any:
    if type(connection).__name__.startswith("Async") or hasattr(connection, "sync_session"):
        return _by_async_sqlalchemy(connection, statement)
    # A session, or a scoped one, gives the connection of its transaction.
    if hasattr(connection, "connection") and callable(connection.connection):
        connection = connection.connection()
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
            f"this connection is to {dialect}, the jobs are in {statement.dialect}: "
            "give a connection to the same database, or the app an outbox there"
        )
    if style not in _STYLES:
        raise BadConfig(f"this driver writes parameters as {style}; known are {', '.join(_STYLES)}")
    mark, parameters = _STYLES[style]
    sql = statement.sql.replace("%(jobs)s", mark)
    # Where a percent sign means nothing special, it is not doubled.
    return sql if "format" in style else sql.replace("%%", "%"), parameters(statement.jobs)


def _ids(answer: Any) -> list[str]:
    """From rows, or a cursor that may have none to give."""
    if getattr(answer, "returns_rows", True) is False or _nothing(answer):
        return []
    rows = answer.fetchall() if hasattr(answer, "fetchall") else answer
    return [row[0] for row in rows or ()]


def _nothing(cursor: Any) -> bool:
    """Whether a cursor of a database driver has run something without rows."""
    try:
        return hasattr(cursor, "fetchall") and getattr(cursor, "description", 0) is None
    except Exception:  # apsw: a statement that is done can't be described any more
        return True


def _in_our_words(error: Exception, statement: Statement) -> Exception:
    """A table that is missing is the user's to make; everything else is the driver's own error."""
    words = str(error).lower()
    if "no such table" in words or "does not exist" in words:
        if "outbox" in words:
            make = "tickwheel outbox MODULE:APP makes it"
        else:
            make = "is it the database of the store? tickwheel migrate, or a worker, makes it"
        return StoreUnavailable(f"the table for jobs is missing here ({error}): {make}")
    return error
