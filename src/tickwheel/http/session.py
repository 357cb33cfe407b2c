"""Signing in with an API key, for browsers: from then on a cookie stands for it."""

from __future__ import annotations

import logging
from typing import Annotated
from urllib.parse import quote

import msgspec
from msgspec import Meta

from tickwheel.http.access import (
    KEY_LENGTH_MAX,
    Caller,
    check_same_origin,
    cookie_name,
    unauthorized,
)
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.version import __version__

log = logging.getLogger("tickwheel.http")

table = Table()


class EnvironmentDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Which of several environments this is, and its colour."""

    name: str
    colour: str | None


class SessionDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks, and what they may do."""

    # Whether there are API keys: without any, this machine has access, and nobody has a name.
    keys: bool
    who: str | None
    scopes: list[str]
    # Not for strangers.
    app: str | None
    store: str
    version: str
    environment: EnvironmentDocument | None


class SignIn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key to sign in with."""

    key: Annotated[str, Meta(min_length=1, max_length=KEY_LENGTH_MAX)]


@table.operation(
    "GET",
    "/v1/session",
    scope=None,
    summary="Say who is signed in",
    answers={200: SessionDocument},
)
async def get_session(incoming: Incoming) -> Reply:
    """By an API key, or by the cookie of a session; nobody is an answer too."""
    return Reply(await _document(incoming, await _caller(incoming)))


@table.operation(
    "POST",
    "/v1/session",
    scope=None,
    summary="Sign in",
    body=SignIn,
    answers={200: SessionDocument},
    problems=(Kind.UNAUTHORIZED, Kind.RATE_LIMITED),
)
async def sign_in(incoming: Incoming) -> Reply:
    """With an API key, for browsers: the answer sets a cookie, and requests with it may do what the
    key may do. They can change things only from pages of this server."""
    headers = incoming.request.headers
    if "origin" in headers or "sec-fetch-site" in headers:
        # Or another site could sign somebody in with a key of its own.
        check_same_origin(incoming.request)
    key = await (await incoming.service.keys()).check(incoming.body.key)
    if key is None:
        client = incoming.request.client
        log.warning("a sign-in from %s failed", client.host if client else "-")
        raise unauthorized("the API key is unknown, revoked or expired")
    incoming.caller = Caller(key)
    incoming.api.count(incoming.caller)
    incoming.admitted = True
    sessions = await incoming.service.sessions()
    await sessions.end(incoming.request.cookies.get(cookie_name(incoming.request), ""))
    token = await sessions.start(key)
    cookie = _cookie(incoming, token, sessions.lifetime_ms // 1000)
    return Reply(await _document(incoming, incoming.caller), headers=cookie)


@table.operation(
    "DELETE",
    "/v1/session",
    scope=None,
    summary="Sign out",
    answers={200: SessionDocument},
)
async def sign_out(incoming: Incoming) -> Reply:
    """End the session of the cookie, and delete it."""
    if token := incoming.request.cookies.get(cookie_name(incoming.request)):
        sessions = await incoming.service.sessions()
        if key := await sessions.find(token):
            incoming.caller, incoming.admitted = Caller(key), True
        await sessions.end(token)
    return Reply(await _document(incoming, None), headers=_cookie(incoming, "", 0))


async def _caller(incoming: Incoming) -> Caller | None:
    """Whoever asks; None if they have no access."""
    try:
        return await incoming.api.identify(incoming.request)
    except Problem as problem:
        if problem.kind in (Kind.UNAUTHORIZED, Kind.HOST_NOT_ALLOWED):
            return None
        raise


async def _document(incoming: Incoming, caller: Caller | None) -> SessionDocument:
    service = incoming.service
    key = None if caller is None else caller.key
    name, _, colour = service.environment.partition(":")
    return SessionDocument(
        keys=await (await service.keys()).any(),
        who=None if key is None else key.name,
        scopes=[] if key is None else [str(scope) for scope in key.scopes],
        app=None if caller is None else service.app.name,
        # Without its host and its password.
        store="" if caller is None else service.app.url.partition(":")[0] or "its own store",
        version=__version__,
        environment=EnvironmentDocument(name=name, colour=colour or None) if name else None,
    )


def _cookie(incoming: Incoming, token: str, lifetime_s: int) -> dict[str, str]:
    """Not for scripts, not for other sites, not for other paths, and over HTTPS not without it."""
    secure = "; Secure" if incoming.request.url.scheme == "https" else ""
    path = quote(incoming.root, safe="/%") or "/"
    rules = f"Path={path}; Max-Age={lifetime_s}; HttpOnly; SameSite=Strict{secure}"
    return {"Set-Cookie": f"{cookie_name(incoming.request)}={token}; {rules}"}
