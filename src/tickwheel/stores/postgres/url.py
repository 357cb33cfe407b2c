"""What a `postgresql://` URL says: where the server is, and how the store uses it.

    postgresql://user:password@host:5432/database?schema=tickwheel&ahead=1s&timeout=15s&pool=4

All other options are libpq's (`sslmode`, `target_session_attrs`, ...) and are passed on unchanged.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tickwheel.stores.url import StoreUrl, UrlOptions, unreadable

OPTIONS = ("schema", "ahead", "timeout", "pool")
# How many connections one handle may use for its steps; one more listens for notifications.
POOL, POOL_MOST = 4, 64
# A name that never needs quotes, and leaves room for what the server appends.
_SCHEMA = re.compile(r"(?!pg_)[a-z_][a-z0-9_]{0,62}")
_EXAMPLE = "postgresql://user:password@host:5432/database"
# A dead peer is noticed within 25 s, even on a quiet connection.
_ALIVE = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """Everything that a URL says. Holds the password: `where` is what may be shown."""

    # As libpq takes it.
    conninfo: dict[str, str] = field(repr=False)
    where: str
    schema: str = "tickwheel"
    ahead_ms: int = 1000
    timeout_ms: int = 15_000
    pool: int = POOL

    @classmethod
    def of(cls, url: str) -> PostgresOptions:
        """Raises BadConfig, never with the password in it."""
        parts = StoreUrl.of(url)
        options = UrlOptions(parts.query, OPTIONS, others="those of libpq such as sslmode")
        base = f"{parts.scheme}://{parts.location}"
        _check(base)
        conninfo = _conninfo(base, options)
        timeout_ms = max(options.duration_ms("timeout", "15s"), 100)
        return cls(
            conninfo=_with_defaults(conninfo, timeout_ms),
            where=_where(conninfo),
            schema=options.matching(
                *("schema", "tickwheel", _SCHEMA),
                "small letters, digits and _, at most 63, not beginning with a digit or pg_",
            ),
            ahead_ms=options.duration_ms("ahead", "1s"),
            timeout_ms=timeout_ms,
            pool=options.number("pool", POOL, least=1, most=POOL_MOST),
        )

    @property
    def secrets(self) -> tuple[str | None, ...]:
        """What no error may repeat."""
        return self.conninfo.get("password"), self.conninfo.get("sslpassword")


def _conninfo(base: str, options: UrlOptions) -> dict[str, str]:
    others = options.others
    try:
        # As they are written: libpq decodes them a little differently than web servers do.
        found = conninfo_to_dict(f"{base}?{'&'.join(others)}" if others else base)
    except psycopg.ProgrammingError as error:
        for name in (each.partition("=")[0] for each in others):
            if f'"{name}"' in str(error):
                raise options.unknown(name) from None
        # Not in the driver's words: they may quote the password.
        raise unreadable(_EXAMPLE) from None
    return {name: str(value) for name, value in found.items() if value is not None}


def _check(base: str) -> None:
    """Refuse a part of an unquoted password in place of the port or the database: `where` would
    show it."""
    try:
        found = conninfo_to_dict(base)
    except psycopg.ProgrammingError:
        raise unreadable(_EXAMPLE) from None
    ports = str(found.get("port") or "5432").split(",")
    if not all(port == "" or port.isdecimal() for port in ports):
        raise unreadable(_EXAMPLE)
    if set("@/") & set(str(found.get("dbname") or "")) or "@" in str(found.get("host") or ""):
        raise unreadable(_EXAMPLE)


def _with_defaults(conninfo: dict[str, str], timeout_ms: int) -> dict[str, str]:
    cluster = {"target_session_attrs": "read-write"} if "," in conninfo.get("host", "") else {}
    return {
        "application_name": "tickwheel",
        "client_encoding": "utf8",
        "connect_timeout": str(max(timeout_ms // 1000, 2)),
        "tcp_user_timeout": str(timeout_ms),
        **_ALIVE,
        **cluster,
        **conninfo,
    }


def _where(conninfo: dict[str, str]) -> str:
    """The host and the database, for people: no user, no password."""
    host = conninfo.get("host") or conninfo.get("hostaddr") or "this machine"
    port = conninfo.get("port", "5432")
    where = host if "," in host or host.startswith("/") else f"{host}:{port}"
    return f"{where}/{conninfo['dbname']}" if conninfo.get("dbname") else where
