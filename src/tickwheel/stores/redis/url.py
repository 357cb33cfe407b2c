"""What a `redis://` URL says: where the server is, and how the store uses it.

    redis://user:password@host:6379/0?namespace=shop&ahead=1s&timeout=10s
    rediss://host:6380?ca=ca.pem&cert=client.pem&key=client.key       over TLS
    redis://host:7000?cluster=true                                    any node of a cluster

`valkey://` and `valkeys://` are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.errors import BadConfig
from tickwheel.stores.url import StoreUrl, UrlOptions

PORT = 6379
OPTIONS = ("namespace", "db", "ahead", "timeout", "cluster", "eviction", "ca", "cert", "key")
FILES = ("ca", "cert", "key")
_EXAMPLE = "redis://host:6379 or rediss://host:6380"
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Everything that a URL says. Shared by a store and its other handles."""

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
    def of(cls, url: str) -> RedisOptions:
        """Raises BadConfig, never with the password in it."""
        parts = StoreUrl.of(url)
        options = UrlOptions(parts.query, OPTIONS)
        server = parts.server(port=PORT, example=_EXAMPLE)
        if len(server.hosts) > 1:
            raise BadConfig(f"a Redis URL names one host: write {_EXAMPLE}")
        [(host, port)] = server.hosts
        cluster = options.one_of("cluster", "false", "true") == "true"
        return cls(
            host=host,
            port=port,
            db=_db(server.path, options, cluster),
            user=server.user or None,
            password=server.password or None,
            tls=parts.scheme in ("rediss", "valkeys"),
            files=_files(parts.scheme, options),
            namespace=options.matching(
                "namespace", "default", _NAMESPACE, "letters, digits, '-', '_' and '.', at most 64"
            ),
            ahead_ms=options.duration_ms("ahead", "1s", most_ms=60_000),
            timeout_s=options.duration_ms("timeout", "10s", least_ms=100, most_ms=300_000) / 1000,
            cluster=cluster,
            eviction_allowed=options.one_of("eviction", "refused", "allowed") == "allowed",
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


def _db(path: str, options: UrlOptions, cluster: bool) -> int:
    text = options.given.get("db") or path or "0"
    if not text.isdecimal() or int(text) > 65_535:
        if options.given.get("db"):
            raise options.wrong("db", "must be a number, as in redis://host:6379/0")
        raise BadConfig(f"database {text!r}: must be a number, as in redis://host:6379/0")
    if cluster and int(text):
        raise BadConfig("a cluster has only database 0: use namespace= to keep jobs apart")
    return int(text)


def _files(scheme: str, options: UrlOptions) -> Mapping[str, Path]:
    files = {name: Path(options.given[name]) for name in FILES if options.given.get(name)}
    if files and scheme in ("redis", "valkey"):
        raise BadConfig(f"{next(iter(files))}= is for TLS: write {scheme}s:// instead")
    for name, path in files.items():
        if not path.is_file():
            raise options.wrong(name, "there is no such file")
    if "key" in files and "cert" not in files:
        raise BadConfig("key= needs cert= as well")
    return files
