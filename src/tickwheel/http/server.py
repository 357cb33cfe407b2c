"""Serve an ASGI app in the running event loop: listen, answer, finish what is under way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tickwheel.errors import BadConfig
from tickwheel.http.api import problem_response
from tickwheel.http.problems import RETRY_AFTER_S, Kind
from tickwheel.http.streams import STOPPING

log = logging.getLogger("tickwheel.http")

# Connections that wait to be accepted, and how long an idle one is kept.
BACKLOG = 1024
IDLE_S = 30
# More connections than this are refused.
CONNECTIONS_MOST = 5_000
# How large the request line and headers may be before they are complete, and how long they take.
HEAD_BYTES = 64 * 1024
HEAD_S = 10.0
# How long a client may leave an answer unread.
READ_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 8484
    # Take another port if this one is in use.
    or_any: bool = False
    root_path: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    # Proxies whose word about the client's address is taken.
    forwarded_allow_ips: str | None = None
    # How long requests under way may take when it stops.
    grace_s: float = 10.0

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert else "http"


class _Protocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers are too large, or too long in coming:
    the server itself keeps whatever arrives."""

    _head_bytes = 0
    _in_head = True
    # Whether a request began in what has just arrived.
    _begun = False
    _giving_up: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_unread()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._begun, self._head_bytes = True, True, 0
        if self._giving_up is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._begun = False
        super().data_received(data)
        if self._in_head and not self._begun:
            # What came together with the end of the request before counts as none.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read. Its answer is kept in memory only for so long."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread()

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait_for_head(self) -> None:
        self._giving_up = self.loop.call_later(HEAD_S, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The answer to the request before comes first.
            self._wait_for_head()
        else:
            self.transport.close()

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


class _Server(uvicorn.Server):
    """Signals are not its business: the process has its own way to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listening: Listening) -> AsyncIterator[str]:
    """Serve for the duration of the block, which gets the URL. Then stop listening, end streams,
    and let the requests under way finish."""
    stopping = asyncio.Event()
    config = _config(_stoppable(app, stopping), listening)
    bound = _bound(listening)
    try:
        server = _Server(config)
        running = asyncio.create_task(server.serve(sockets=[bound]), name="tickwheel-http")
        try:
            await _started(server, running)
            yield url_of(listening, bound)
        finally:
            stopping.set()
            server.should_exit = True
            await asyncio.wait([running])
        await running
    finally:
        bound.close()


def _stoppable(app: ASGIApp, stopping: asyncio.Event) -> ASGIApp:
    """The same app, whose requests know when the server stops, and have an answer if it can't wait
    for them any longer."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        extensions = {**(scope.get("extensions") or {}), STOPPING: stopping}
        try:
            await app({**scope, "extensions": extensions}, receive, noting)
        except asyncio.CancelledError:
            # The server does that when the grace is over.
            if started or not stopping.is_set():
                raise
            headers = {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"}
            await problem_response(Kind.STOPPING, "", headers)(scope, receive, send)

    return answered


async def _started(server: _Server, running: asyncio.Task[None]) -> None:
    while not server.started:
        if running.done():
            await running
            raise BadConfig("the HTTP server did not start; its log says why")
        await asyncio.sleep(0.005)


def _bound(listening: Listening) -> socket.socket:
    try:
        return bind(listening.host, listening.port)
    except BadConfig:
        if not listening.or_any:
            raise
        return bind(listening.host, 0)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises BadConfig if that can't be."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Its protocol must be named: asyncio sends small answers at once (TCP_NODELAY) only on
        # connections of which it knows that they are TCP; others wait 40 ms for the client.
        bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except (OSError, OverflowError) as error:
        raise _unusable(host, port, error) from error
    try:
        if os.name == "posix":
            # Connections of a server that has just stopped don't block the port.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
        return bound
    except (OSError, OverflowError) as error:
        bound.close()
        raise _unusable(host, port, error) from error


def _unusable(host: str, port: int, error: Exception) -> BadConfig:
    return BadConfig(
        f"can't listen on {host} port {port}: {error}; choose another --port or --host"
    )


def url_of(listening: Listening, bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{listening.scheme}://{host}:{port}{listening.root_path}"


def _config(app: ASGIApp, listening: Listening) -> uvicorn.Config:
    if (listening.tls_cert is None) != (listening.tls_key is None):
        raise BadConfig("TLS needs both --tls-cert and --tls-key")
    more: dict[str, Any] = {}
    if listening.tls_cert is not None:
        more = {"ssl_certfile": listening.tls_cert, "ssl_keyfile": listening.tls_key}
    config = uvicorn.Config(
        app,
        loop="none",
        http=_Protocol,
        ws="none",
        # Ours has no queries and no secrets.
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        server_header=False,
        root_path=listening.root_path,
        proxy_headers=listening.forwarded_allow_ips is not None,
        forwarded_allow_ips=listening.forwarded_allow_ips or "",
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=max(1, round(listening.grace_s)),
        limit_concurrency=CONNECTIONS_MOST,
        backlog=BACKLOG,
        **more,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise BadConfig(
            f"--tls-cert {listening.tls_cert!r} and --tls-key can't be used: {error}"
        ) from error
    return config
