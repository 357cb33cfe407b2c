"""What a `postgresql://` URL says: where the server is, and how the store is to use it.

    postgresql://user:password@host:5432/database?schema=tickwheel&ahead=1s&timeout=15s&pool=4

Every other option is libpq's own (`sslmode`, `target_session_attrs`, ...) and goes to it as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tickwheel.errors import BadConfig, BadTime
from tickwheel.span import span_ms

OURS = ("schema", "ahead", "timeout", "pool")
# As many connections as one handle may want for its steps; one more listens for news.
POOL, POOL_MOST = 4, 64
# A name that needs no quotes anywhere, and room in it for what the server appends.
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
# A dead peer is noticed after 25 s at the latest, however quiet the line.
_ALIVE = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}


@dataclass(frozen=True, slots=True)
class Options:
    """A store URL, taken apart. Holds the password: `place` is what may be shown."""

    # As libpq takes it.
    conninfo: dict[str, str] = field(repr=False)
    place: str
    schema: str = "tickwheel"
    ahead_ms: int = 1000
    timeout_ms: int = 15_000
    pool: int = POOL

    @classmethod
    def of(cls, url: str) -> Options:
        base, _, query = url.partition("?")
        _check(base)
        parts = [part for part in query.split("&") if part]
        ours = {name: unquote(value) for name, value in map(_pair, parts) if name in OURS}
        theirs = [part for part in parts if _pair(part)[0] not in OURS]
        conninfo = _conninfo(base, theirs)
        return cls(
            conninfo=_with_defaults(conninfo, ours.get("timeout", "15s")),
            place=_place(conninfo),
            schema=_schema(ours.get("schema", "tickwheel")),
            ahead_ms=_span("ahead", ours.get("ahead", "1s")),
            timeout_ms=max(_span("timeout", ours.get("timeout", "15s")), 100),
            pool=_pool(ours.get("pool", str(POOL))),
        )


def _pair(part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    return name, value


def _conninfo(base: str, options: list[str]) -> dict[str, str]:
    try:
        # As they were written: libpq reads them a little differently than web servers do.
        found = conninfo_to_dict(f"{base}?{'&'.join(options)}" if options else base)
    except psycopg.ProgrammingError as error:
        unknown = [name for name, _ in map(_pair, options) if f'"{name}"' in str(error)]
        if unknown:
            raise BadConfig(
                f"unknown option {unknown[0]!r} in the store URL: there are {', '.join(OURS)}, "
                "and those of libpq such as sslmode"
            ) from None
        # Not in the driver's words: they may quote the password.
        raise _unreadable() from None
    return {name: str(value) for name, value in found.items() if value is not None}


def _check(base: str) -> None:
    """Refuse what comes of a password that was not quoted: a part of it where the port, the
    database or an option should be. What is shown later would show it."""
    try:
        found = conninfo_to_dict(base)
    except psycopg.ProgrammingError:
        raise _unreadable() from None
    ports = str(found.get("port") or "5432").split(",")
    if not all(port == "" or port.isdecimal() for port in ports):
        raise _unreadable()
    if set("@/") & set(str(found.get("dbname") or "")):
        raise _unreadable()


def _unreadable() -> BadConfig:
    return BadConfig(
        "the store URL can't be read: write postgresql://user:password@host:5432/database, "
        "with %40 for an @, %2F for a / and %3F for a ? in the password"
    )


def _with_defaults(conninfo: dict[str, str], timeout: str) -> dict[str, str]:
    timeout_ms = max(_span("timeout", timeout), 100)
    several = {"target_session_attrs": "read-write"} if "," in conninfo.get("host", "") else {}
    return {
        "application_name": "tickwheel",
        "client_encoding": "utf8",
        "connect_timeout": str(max(timeout_ms // 1000, 2)),
        "tcp_user_timeout": str(timeout_ms),
        **_ALIVE,
        **several,
        **conninfo,
    }


def _place(conninfo: dict[str, str]) -> str:
    """Which database on which host, fit to be shown."""
    host = conninfo.get("host") or conninfo.get("hostaddr") or "this machine"
    port = conninfo.get("port", "5432")
    where = host if "," in host or host.startswith("/") else f"{host}:{port}"
    return f"{where}/{conninfo['dbname']}" if conninfo.get("dbname") else where


def _schema(name: str) -> str:
    if not _SCHEMA.fullmatch(name) or name.startswith("pg_"):
        raise BadConfig(
            f"schema={name} in the store URL: small letters, digits and _, 63 at most, "
            "not beginning with a digit or pg_"
        )
    return name


def _span(name: str, text: str) -> int:
    try:
        return span_ms(text)
    except BadTime as error:
        raise BadConfig(f"{name} in the store URL: {error}") from None


def _pool(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= POOL_MOST:
        raise BadConfig(f"pool={text} in the store URL: a number from 1 to {POOL_MOST}")
    return int(text)
