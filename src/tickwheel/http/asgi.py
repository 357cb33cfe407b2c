"""The API as an ASGI app: its operations as routes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import lru_cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tickwheel.app import App
from tickwheel.config import setting
from tickwheel.errors import StoreError
from tickwheel.http import (
    adding,
    admin,
    counting,
    jobs,
    operating,
    overview,
    schedules,
    session,
    watch,
)
from tickwheel.http.access import cookie_name
from tickwheel.http.api import OPENAPI, Api, problem_response
from tickwheel.http.openapi import document
from tickwheel.http.problems import Kind
from tickwheel.http.service import Service
from tickwheel.http.table import Incoming, Operation, Reply, Table

log = logging.getLogger("tickwheel.http")

# How long the store may take to open before the server starts without it.
OPEN_S = 10.0

_description = Table()


@_description.operation(
    "GET", OPENAPI, scope=None, summary="Describe the API", answers={200: dict[str, Any]}
)
async def get_openapi(incoming: Incoming) -> Reply:
    """This document: OpenAPI 3.1."""
    return Reply(_document(incoming.root, cookie_name(incoming.request)))


@lru_cache(maxsize=16)
def _document(root: str, cookie: str) -> dict[str, Any]:
    return document(OPERATIONS, root, cookie)


_TABLES = (adding, jobs, counting, schedules, operating, overview, admin, session, watch)
OPERATIONS: Sequence[Operation] = (
    *(operation for each in _TABLES for operation in each.table),
    *_description,
)


def asgi_app(
    app: App,
    *,
    allow_hosts: Sequence[str] = (),
    redact: Sequence[str] | None = None,
    takes_any_task: bool = False,
    pages: Sequence[BaseRoute] = (),
) -> ASGIApp:
    """The API of an app, which can be served alone or mounted in another app, with other `pages`.

    Opens the app's store on first use; if its lifespan is run, from its start to its end. Turns the
    app's metrics on.
    """
    # Before the store is opened, if it is not: all its calls are counted then.
    app.enable_metrics()
    service = Service(
        app,
        redact=setting("redact") if redact is None else redact,
        takes_any_task=takes_any_task,
    )
    api = Api(service, OPERATIONS, allow_hosts=allow_hosts)
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    # A path without a name in it comes before one that would match it too.
    routes = [
        Route(path, _endpoint(api, methods), methods=list(methods))
        for path, methods in sorted(by_path.items(), key=lambda each: "{" in each[0])
    ]
    inner = Starlette(
        routes=[*routes, *pages],
        lifespan=lambda _: _opened(service),
        exception_handlers={HTTPException: _unrouted},
    )
    inner.router.redirect_slashes = False
    return _with_quoted_path(inner)


def _endpoint(api: Api, methods: dict[str, Operation]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        method = "GET" if request.method == "HEAD" else request.method
        return await api.respond(methods[method], request)

    return endpoint


@contextlib.asynccontextmanager
async def _opened(service: Service) -> AsyncIterator[None]:
    """Keep the store open, and record its history. One that is away now may come back: then the
    first request opens it."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(OPEN_S):
                await stack.enter_async_context(service.app)
        except (StoreError, OSError) as error:
            why = "it does not answer" if isinstance(error, TimeoutError) else error
            log.warning("the store is unreachable: %s", why)
        service.record()
        try:
            yield
        finally:
            await service.stop_recording()


async def _unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    kind = Kind.METHOD_NOT_ALLOWED if error.status_code == 405 else Kind.NOT_FOUND
    detail = f"{request.method} {request.url.path[:200]}"
    words = f"no operation is {detail}; {OPENAPI} lists all"
    # Nobody reads its body, if it has one.
    return problem_response(kind, words, {**(error.headers or {}), "Connection": "close"})


def _with_quoted_path(inner: ASGIApp) -> ASGIApp:
    """Route by the path as it was sent: in an id, a quoted slash is no separator."""

    async def quoted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("raw_path"):
            path = scope["raw_path"].partition(b"?")[0].decode("latin-1")
            scope = {**scope, "path": path}
        await inner(scope, receive, send)

    return quoted
