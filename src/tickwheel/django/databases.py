"""Which of Django's databases has the jobs, and how a job joins a transaction there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.db import DEFAULT_DB_ALIAS, connections, transaction

from tickwheel.errors import BadConfig, did_you_mean
from tickwheel.stores.url import StoreUrl

# What else of OPTIONS a connection of our own needs.
_OPTIONS = ("ssl", "gss", "target_session_attrs", "channel_binding", "passfile", "service")
# Names of this machine.
_LOCAL = ("", "localhost", "127.0.0.1", "::1")


class Transactions:
    """The transaction that the calling thread is in. `alias` is the database of the store or the
    outbox, if it is one of Django's."""

    def __init__(self, alias: str | None) -> None:
        self.alias = alias

    def connection(self) -> Any:
        if self.alias is None:
            return None
        connection = connections[self.alias]
        return connection if connection.in_atomic_block else None

    def on_commit(self, call: Callable[[], object]) -> bool:
        used = connections.all(initialized_only=True)
        open_ = [each.alias for each in used if each.in_atomic_block]
        if not open_:
            return False
        alias = DEFAULT_DB_ALIAS if DEFAULT_DB_ALIAS in open_ else open_[0]
        transaction.on_commit(call, using=alias)
        return True


def url_of(what: str, value: str) -> str:
    """The URL of a store or an outbox that is written as one, or as the name of a database."""
    if "://" in value:
        return value
    if value not in connections:
        raise BadConfig(
            f"TICKWHEEL[{what!r}] is {value!r}, which is neither a URL nor one of DATABASES"
            f"{did_you_mean(value, list(connections))}"
        )
    database = connections[value].settings_dict
    if _vendor(database) == "postgresql":
        return _postgres_url(database)
    if _vendor(database) == "sqlite":
        return f"sqlite:///{quote(str(Path(database['NAME']).absolute()))}"
    raise BadConfig(
        f"TICKWHEEL[{what!r}]: database {value!r} is neither PostgreSQL nor SQLite; give the URL "
        "of a store"
    )


def alias_of(url: str) -> str | None:
    """The name of the database that this URL leads to; None if it is none of Django's."""
    return next(
        (each for each in connections if _leads_to(url, connections[each].settings_dict)), None
    )


def _vendor(database: Mapping[str, Any]) -> str:
    engine = str(database["ENGINE"])
    if "postgis" in engine or "postgresql" in engine:
        return "postgresql"
    return "sqlite" if "sqlite3" in engine or "spatialite" in engine else engine


def _postgres_url(database: Mapping[str, Any]) -> str:
    login = quote(str(database["USER"] or ""), safe="")
    if database["PASSWORD"]:
        login += ":" + quote(str(database["PASSWORD"]), safe="")
    host = str(database["HOST"] or "")
    options = {
        name: str(value)
        for name, value in database["OPTIONS"].items()
        if name.startswith(_OPTIONS) and isinstance(value, (str, int, Path))
    }
    if host.startswith("/"):
        host, options = "", {"host": host, **options}
    port = f":{database['PORT']}" if database["PORT"] else ""
    place = f"{login}@{host}{port}" if login else f"{host}{port}"
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    return f"postgresql://{place}/{quote(str(database['NAME'] or ''), safe='')}{query}"


def _leads_to(url: str, database: Mapping[str, Any]) -> bool:
    parts = StoreUrl.of(url)
    if parts.scheme == "sqlite" and _vendor(database) == "sqlite":
        return Path(parts.file).resolve() == Path(database["NAME"]).resolve()
    if parts.scheme in ("postgresql", "postgres") and _vendor(database) == "postgresql":
        return _server_of(url) == _server_of(_postgres_url(database))
    return False


def _server_of(url: str) -> tuple[str, str, str]:
    from tickwheel.stores.postgres.url import PostgresOptions

    found = PostgresOptions.of(url).conninfo
    host = found.get("hostaddr") or found.get("host") or ""
    name = found.get("dbname") or found.get("user") or ""
    return "" if host in _LOCAL else host, found.get("port", "5432"), name
