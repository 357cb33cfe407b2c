"""Who may do what: API keys, their scopes, rate limits, and access without keys."""

from __future__ import annotations

import hashlib
import ipaddress
from collections import OrderedDict
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from starlette.requests import Request

from tickwheel.errors import BadConfig
from tickwheel.http.problems import Kind, Problem
from tickwheel.job import Job
from tickwheel.limit import admit, parse_rate
from tickwheel.operate.keys import Key, Keys, Scope
from tickwheel.operate.sessions import Sessions

# No queue and no task can have this name: a key that may use it may use all.
ANY_NAME = "~"
# For how many keys the time of the next request is remembered.
KEYS_REMEMBERED = 10_000
KEY_LENGTH_MAX = 512
# How the name of a session's cookie begins.
COOKIE = "tickwheel_session"
# What proxies add to requests that they pass on.
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


# --- What a caller may do


class Caller:
    """Whoever sent a request: a key, or nobody in particular if there are no keys."""

    def __init__(self, key: Key | None) -> None:
        self.key = key

    @property
    def who(self) -> str:
        return "anonymous" if self.key is None else f"{self.key.id} ({self.key.name})"

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


async def identified(
    keys: Keys, sessions: Sessions, authorization: str | None, token: str | None
) -> Caller:
    """Who sent a request with this header, or else with this token of a session; raises Problem if
    it must be somebody and is not."""
    text = bearer(authorization)
    if text is not None:
        key = await keys.check(text)
        if key is None:
            raise unauthorized("the API key is unknown, revoked or expired")
        return Caller(key)
    key = None if token is None else await sessions.find(token)
    if key is None and await keys.any():
        ended = "the session has ended: sign in again"
        raise unauthorized(
            "send an API key: Authorization: Bearer tw_…" if token is None else ended
        )
    return Caller(key)


def session_token(request: Request) -> str | None:
    """The token of the session that a request is sent in; None if it is sent with a key."""
    if "authorization" in request.headers:
        return None
    return request.cookies.get(cookie_name(request))


def cookie_name(request: Request) -> str:
    """The name of the session's cookie here: at this path of this port.

    Browsers send the cookies of a host to all its ports, and those of a path to all paths below;
    by its name each dashboard knows its own. The path and the port are as the browser knows them.
    """
    origin = _origin(f"{request.url.scheme}://{request.headers.get('host', '')}")
    place = f"{origin[2] if origin else None}{request.scope.get('root_path', '')}"
    return f"{COOKIE}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def check_same_origin(request: Request) -> None:
    """Refuse a request that a page of another site may have made a browser send, with its cookie.

    Browsers say which site it was, all but some on plain HTTP; those say the page's origin.
    """
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None:
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        its = _origin(origin)
        site = "same-origin" if its is not None and its == _origin(own) else "cross-site"
    if site != "same-origin":
        raise Problem(
            Kind.CROSS_ORIGIN,
            "what is sent with a session's cookie must come from a page of this server; in "
            "programs, send the API key itself: Authorization: Bearer tw_…",
        )


def _origin(url: str) -> tuple[str, str, int | None] | None:
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        return parts.scheme, (parts.hostname or "").lower(), port
    except ValueError:
        return None


# --- Without keys: this machine only


def check_local(
    headers: Mapping[str, str], client: str | None, allowed: Collection[str], *, writes: bool
) -> None:
    """Refuse a request without a key that is not from this machine, or that a page of another site
    made a browser send.

    A site can make its own name lead to this machine (DNS rebinding), so the Host must be this
    machine's, or one of those `allowed`. A proxy on this machine passes on requests of others, so
    what it has forwarded must be for one of those. The client's address can't be chosen by the
    client; if it is unknown, it is not this machine.
    """
    host = _host(f"//{headers.get('host', '')}")
    forwarded = any(name in headers for name in FORWARDED)
    named = host in allowed or (is_loopback(host) and not forwarded)
    if not named or client is None or not is_loopback(client):
        raise Problem(
            Kind.HOST_NOT_ALLOWED,
            f"there are no API keys, so only this machine has access, and {host[:200]!r} is not a "
            "name of it; create a key, or start the server with --allow-host",
        )
    origin = headers.get("origin")
    if not writes or origin is None:
        return
    its_host = _host(origin)
    if its_host != host and its_host not in allowed and not is_loopback(its_host):
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


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, *, keys: bool) -> None:
    """Refuse to listen beyond this machine if anyone could do everything."""
    if keys or is_loopback(host):
        return
    raise BadConfig(
        f"--host {host} is reachable from other machines, and there are no API keys, so anyone "
        "could add and delete jobs; create one with `tickwheel keys create`, or listen on 127.0.0.1"
    )


# --- How often


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
        rate = parse_rate(caller.key.rate)
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
