"""Where a Redis store is and how it is to be used: from its URL.

redis://user:password@host:6379/0?namespace=shop&ahead=1s&timeout=10s
rediss://host:6380?ca=ca.pem&cert=client.pem&key=client.key       over TLS
redis://host:7000?cluster=true                                    any node of a cluster
valkey:// and valkeys:// are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from tickwheel.config import close_to
from tickwheel.errors import BadConfig, BadTime
from tickwheel.span import span_ms

PORT = 6379
KNOWN = ("namespace", "db", "ahead", "timeout", "cluster", "eviction", "ca", "cert", "key")
FILES = ("ca", "cert", "key")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that a URL says. Shared by a store and its twins."""

    host: str
    port: int = PORT
    db: int = 0
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)
    namespace: str = "default"
    ahead_ms: int = 1_000
    # How long one call may take.
    timeout_s: float = 10.0
    cluster: bool = False
    # Whether the operator accepts that the server may drop jobs to make room.
    eviction_allowed: bool = False

    @classmethod
    def of(cls, url: str) -> Options:
        """Raises BadConfig, never with the password in it."""
        scheme, _, rest = url.partition("://")
        place, _, query = rest.partition("?")
        given = _query(query)
        authority, _, path = place.partition("/")
        login, at, address = authority.rpartition("@")
        user, colon, password = login.partition(":")
        host, port = _host(address)
        tls = scheme in ("rediss", "valkeys")
        files = {name: Path(given[name]) for name in FILES if given.get(name)}
        if files and not tls:
            raise BadConfig(f"{next(iter(files))}= is for TLS: write {scheme}s:// instead")
        cluster = _one_of("cluster", given, "false", ("false", "true")) == "true"
        return cls(
            host=host,
            port=port,
            db=_db(path, given, cluster),
            user=unquote(user) if at and user else None,
            password=unquote(password) if colon and password else None,
            tls=tls,
            files=_checked(files),
            namespace=_namespace(given.get("namespace", "default")),
            ahead_ms=_span("ahead", given, "1s", 0, 60_000),
            timeout_s=_span("timeout", given, "10s", 100, 300_000) / 1000,
            cluster=cluster,
            eviction_allowed=_one_of("eviction", given, "refused", ("refused", "allowed"))
            == "allowed",
        )

    @property
    def where(self) -> str:
        """The server, for people: no user, no password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" + (f"/{self.db}" if self.db else "")

    @property
    def root(self) -> str:
        """What all keys of this store begin with. The braces keep them in one slot of a cluster."""
        return f"tw:{{{self.namespace}}}:"


def _query(text: str) -> dict[str, str]:
    given = dict(parse_qsl(text, keep_blank_values=True))
    for name in given:
        if name not in KNOWN:
            raise BadConfig(
                f"a Redis URL has no option {name!r}{close_to(name, KNOWN)} "
                f"There are: {', '.join(KNOWN)}"
            )
    return given


def _host(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        host, port = address, str(PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65_536:
        raise BadConfig("a Redis URL names a host: redis://host:6379 or rediss://host:6380")
    return host.strip("[]"), int(port)


def _db(path: str, given: Mapping[str, str], cluster: bool) -> int:
    text = given.get("db") or path or "0"
    if not text.isdigit() or int(text) > 65_535:
        raise BadConfig(f"database {text!r}: it is a number, as in redis://host:6379/0")
    if cluster and int(text):
        raise BadConfig("a cluster has only database 0: use namespace= to keep jobs apart")
    return int(text)


def _namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise BadConfig(
            f"namespace {text!r}: it is made of letters, digits, '-', '_' and '.', 64 at most"
        )
    return text


def _one_of(name: str, given: Mapping[str, str], default: str, known: tuple[str, ...]) -> str:
    value = given.get(name, default)
    if value not in known:
        raise BadConfig(f"{name}={value}: it is {' or '.join(known)}")
    return value


def _span(name: str, given: Mapping[str, str], default: str, least: int, most: int) -> int:
    text = given.get(name, default)
    try:
        ms = span_ms(text)
    except BadTime as error:
        raise BadConfig(f"{name}: {error}") from None
    if not least <= ms <= most:
        raise BadConfig(f"{name}={text}: it is from {least}ms to {most // 1000}s")
    return ms


def _checked(files: Mapping[str, Path]) -> Mapping[str, Path]:
    for name, path in files.items():
        if not path.is_file():
            raise BadConfig(f"{name}={path}: there is no such file")
    if "key" in files and "cert" not in files:
        raise BadConfig("key= needs cert= beside it")
    return files
