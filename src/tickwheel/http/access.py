"""Who may do what: API keys, their scopes, rate limits, and access without keys.

What keeps keys and the audit log is behind protocols: `Keys` and `Audit`.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadConfig, BadTime
from tickwheel.http.problems import Kind, Problem
from tickwheel.job import Job
from tickwheel.limit import Rate, admit

# No queue and no task can have this name: a key that may use it may use all.
ANY_NAME = "~"
# For how many keys the time of the next request is remembered.
KEYS_REMEMBERED = 10_000
KEY_LENGTH_MAX = 512


class Scope(StrEnum):
    """What a key may do. Admin may do everything, operate includes read."""

    ENQUEUE = "enqueue"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


class Key(Protocol):
    """An API key, without its secret."""

    @property
    def id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def scopes(self) -> Collection[str]: ...
    @property
    def queues(self) -> Collection[str]: ...
    @property
    def tasks(self) -> Collection[str]: ...
    @property
    def created_ms(self) -> int: ...
    @property
    def expires_ms(self) -> int | None: ...
    @property
    def rate(self) -> str | None: ...

    def may(self, scope: Scope, *, queue: str | None = None, task: str | None = None) -> bool:
        """Whether it has the scope, for this queue and task if they are given."""


class Keys(Protocol):
    """Where API keys are kept."""

    async def check(self, text: str) -> Key | None:
        """The key with this text; None if it is unknown, revoked or expired."""

    async def any(self) -> bool:
        """Whether there is a key at all."""

    async def create(
        self,
        name: str,
        scopes: Sequence[Scope],
        *,
        queues: Sequence[str] = (),
        tasks: Sequence[str] = (),
        expires: Duration | None = None,
        rate: str | None = None,
    ) -> tuple[Key, str]:
        """A new key, and its text, which is not kept."""

    async def list(self) -> Sequence[Key]: ...

    async def revoke(self, id: str) -> bool:
        """False if there is no such key."""


class Entry(msgspec.Struct, frozen=True):
    """One write: who did what, when, from where, and how it ended. Never arguments or secrets."""

    at_ms: int
    who: str
    action: str
    target: str
    source: str
    outcome: str
    detail: str = ""


class Audit(Protocol):
    """Where the audit log is kept."""

    async def write(self, entries: Sequence[Entry]) -> None: ...

    async def list(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[Sequence[Entry], str | None]:
        """Entries, the newest first, and where to continue; no cursor means no more."""


# --- What a caller may do


class Caller:
    """Whoever sent a request: a key, or nobody in particular if there are no keys."""

    def __init__(self, key: Key | None) -> None:
        self.key = key

    @property
    def who(self) -> str:
        return "anonymous" if self.key is None else f"{self.key.name} ({self.key.id})"

    @property
    def id(self) -> str:
        return "" if self.key is None else self.key.id

    @property
    def admin(self) -> bool:
        return self.key is not None and self.key.may(Scope.ADMIN)

    def may(self, scope: Scope, *, queue: str | None = None, task: str | None = None) -> bool:
        return self.key is None or self.key.may(scope, queue=queue, task=task)

    def sees_all(self, scope: Scope) -> bool:
        return self.may(scope, queue=ANY_NAME, task=ANY_NAME)

    def sees(self, scope: Scope, job: Job) -> bool:
        return self.may(scope, queue=job.queue, task=job.task)


# --- Who it is


def bearer(authorization: str | None) -> str | None:
    """The key in the header; None if there is no header. Raises Problem for another scheme."""
    if authorization is None:
        return None
    scheme, _, text = authorization.partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text or len(text) > KEY_LENGTH_MAX:
        raise unauthorized("the header must be: Authorization: Bearer tw_…")
    return text


def unauthorized(detail: str) -> Problem:
    return Problem(
        Kind.UNAUTHORIZED, detail, headers={"WWW-Authenticate": 'Bearer realm="tickwheel"'}
    )


async def identified(keys: Keys | None, authorization: str | None) -> Caller:
    """Who sent a request with this header; raises Problem if it must be a key and is not."""
    text = bearer(authorization)
    if text is None:
        if keys is not None and await keys.any():
            raise unauthorized("send an API key: Authorization: Bearer tw_…")
        return Caller(None)
    key = None if keys is None else await keys.check(text)
    if key is None:
        raise unauthorized("the API key is unknown, revoked or expired")
    return Caller(key)


# --- Without keys: this machine only


def check_local(
    headers: Mapping[str, str], client: str | None, allowed: Collection[str], *, writes: bool
) -> None:
    """Refuse a request without a key that is not from this machine, or that a page of another site
    made a browser send.

    A site can make its own name lead to this machine (DNS rebinding), so the Host must be this
    machine's, or one of those `allowed`.
    """
    host = _host(f"//{headers.get('host', '')}")
    here = _is_loopback(host) and (client is None or _is_loopback(client))
    if not here and host not in allowed:
        raise Problem(
            Kind.HOST_NOT_ALLOWED,
            f"there are no API keys, so only this machine has access, and {host[:200]!r} is not a "
            "name of it; create a key, or start the server with --allow-host",
        )
    origin = headers.get("origin")
    if not writes or origin is None:
        return
    its_host = _host(origin)
    if its_host != host and its_host not in allowed and not _is_loopback(its_host):
        raise Problem(
            Kind.HOST_NOT_ALLOWED,
            f"a page of {its_host[:200]!r} may not do this; create a key, or start the server with "
            "--allow-host",
        )


def _host(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, *, keys: bool) -> None:
    """Refuse to listen beyond this machine if anyone could do everything."""
    if keys or _is_loopback(host):
        return
    raise BadConfig(
        f"--host {host} is reachable from other machines, and there are no API keys, so anyone "
        "could add and delete jobs; create a key first, or listen on 127.0.0.1"
    )


# --- How often

_RATE = re.compile(r"(\d{1,9})/(\d*)(ms|[smhd])")


def read_rate(text: str) -> Rate:
    """A key's rate: '100/s', '600/m', '50/10s'; as many may come at once. Raises BadConfig."""
    found = _RATE.fullmatch(text)
    try:
        if found is None:
            raise BadTime("")
        limit = int(found[1])
        return Rate(limit=limit, period_ms=duration_ms(f"{found[2] or 1}{found[3]}"), burst=limit)
    except (BadTime, BadConfig):
        raise BadConfig(f"rate={text[:80]!r}: write for example '100/s' or '50/10s'") from None


class RateLimits:
    """The rates of keys, in this process.

    Not by the store's `throttle`: that is a write for every request. Several servers each allow a
    key its rate.
    """

    def __init__(self) -> None:
        self._marks: OrderedDict[str, int] = OrderedDict()

    def check(self, caller: Caller, now_ms: int) -> None:
        """Count a request; raises Problem if it is one too many."""
        if caller.key is None or caller.key.rate is None:
            return
        rate = read_rate(caller.key.rate)
        mark, wait_ms = admit(self._marks.pop(caller.id, None), rate, now_ms)
        self._marks[caller.id] = mark
        while len(self._marks) > KEYS_REMEMBERED:
            self._marks.popitem(last=False)
        if wait_ms:
            wait_s = -(-wait_ms // 1000)
            raise Problem(
                Kind.RATE_LIMITED,
                f"the key {caller.key.name!r} may send {caller.key.rate}; wait {wait_s} s",
                headers={"Retry-After": str(wait_s)},
            )
