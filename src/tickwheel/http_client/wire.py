"""HTTP/1.1 over a few connections that are kept open: blocking, bounded in time and in bytes."""

from __future__ import annotations

import functools
import http.client
import io
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tickwheel.arguments import MIB
from tickwheel.clock import S_NS, Clock
from tickwheel.errors import BadConfig, StoreRefused, shown
from tickwheel.http_client.answers import ApiAnswer
from tickwheel.http_client.requests import ApiRequest
from tickwheel.version import __version__

ANSWER_BYTES = 64 * MIB
# A connection that was idle for longer may have been closed by the server, or a proxy.
IDLE_NS = 3 * S_NS


class NotSent(Exception):
    """The request did not reach the server, so nothing was done."""


class NoAnswer(Exception):
    """The request may have reached the server."""


# --- Where it is


@dataclass(frozen=True, slots=True)
class Base:
    """A server, and the path that its API is below."""

    tls: bool
    host: str
    port: int
    prefix: str


def base_of(url: str) -> Base:
    """Raises BadConfig; a URL with a login is never shown."""
    if not isinstance(url, str):
        raise BadConfig(f"the API's URL must be a str, not {type(url).__name__}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadConfig(f"the API's URL can't be read: {error}") from None
    if parts.username is not None or parts.password is not None:
        raise BadConfig("the API's URL has a login; leave it out, and give key='tw_…'")
    wrong = parts.query or parts.fragment or not url.isascii() or not url.isprintable()
    if parts.scheme not in ("http", "https") or not parts.hostname or wrong or " " in url:
        raise BadConfig(f"{shown(url)}: must be as https://jobs.example.com or with a path")
    tls = parts.scheme == "https"
    return Base(tls, parts.hostname, port or (443 if tls else 80), parts.path.rstrip("/"))


def headers_of(key: str | None) -> dict[str, str]:
    """The headers of every request. Raises BadConfig if the key can't be sent."""
    headers = {"Accept": "application/json", "User-Agent": f"tickwheel/{__version__}"}
    if key is None:
        return headers
    if not isinstance(key, str) or not key.isascii() or not key.isprintable() or " " in key:
        # Not shown: it may be a key, and a line too many.
        raise BadConfig("the API key must be text without spaces or line ends, as tw_…")
    return {**headers, "Authorization": f"Bearer {key}"}


def tls_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Verifies the server's certificate, by the system's authorities or those in the file."""
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else Path(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise BadConfig(f"ca_file={str(ca_file)!r} can't be used: {error}") from None


# --- KeptConnections


class KeptConnections:
    """At most `most` connections to one server. Any thread may send."""

    def __init__(
        self,
        base: Base,
        headers: dict[str, str],
        tls: ssl.SSLContext | None,
        *,
        most: int,
        clock: Clock,
    ) -> None:
        self._base = base
        self._headers = headers
        self._tls = tls
        self._most = most
        self._clock = clock
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._room = threading.Semaphore(self._most)
        # With the time since which it is idle; the last one used is the first to be used again.
        self._idle: list[tuple[http.client.HTTPConnection, int]] = []
        self._closed = False

    def send(self, request: ApiRequest, until_ns: int) -> ApiAnswer:
        """The answer. Raises NotSent or NoAnswer; BadConfig if the server can't be trusted."""
        if os.getpid() != self._pid:
            # After a fork: the connections are the parent's.
            self._start()
        self.check_open()
        if not self._room.acquire(timeout=self._left_s(until_ns)):
            raise NotSent(f"all {self._most} connections are in use")
        try:
            return self._send(request, until_ns)
        finally:
            self._room.release()

    def check_open(self) -> None:
        if self._closed:
            raise BadConfig("the client is closed; create another")

    def _send(self, request: ApiRequest, until_ns: int) -> ApiAnswer:
        # What must not be repeated gets a connection that is certainly open.
        used = self._taken() if request.repeatable else None
        if used is not None:
            try:
                return self._exchange(used, request, until_ns)
            except NoAnswer:
                # It was closed while it was idle, and so were the others, probably.
                self._drop_idle()
                if self._left_s(until_ns) <= 0:
                    raise
        return self._exchange(self._connected(until_ns), request, until_ns)

    def _connected(self, until_ns: int) -> http.client.HTTPConnection:
        base, timeout_s = self._base, self._left_s(until_ns)
        if timeout_s <= 0:
            raise NotSent("no time was left to send it")
        connection: http.client.HTTPConnection
        if self._tls is None:
            connection = http.client.HTTPConnection(base.host, base.port, timeout=timeout_s)
        else:
            connection = http.client.HTTPSConnection(
                base.host, base.port, timeout=timeout_s, context=self._tls
            )
        try:
            connection.connect()
            return connection
        except ssl.SSLCertVerificationError as error:
            connection.close()
            raise BadConfig(
                f"the certificate of {base.host} is not trusted: {error.verify_message}; "
                "give the file of its authority as ca_file="
            ) from None
        except (OSError, UnicodeError) as error:
            connection.close()
            raise NotSent(f"{base.host} port {base.port}: {_words(error)}") from None

    def _exchange(
        self, connection: http.client.HTTPConnection, request: ApiRequest, until_ns: int
    ) -> ApiAnswer:
        kept = False
        try:
            received, kept = self._asked(connection, request, until_ns)
            return received
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(_words(error)) from None
        finally:
            if kept:
                self._keep(connection)
            else:
                connection.close()

    def _asked(
        self, connection: http.client.HTTPConnection, request: ApiRequest, until_ns: int
    ) -> tuple[ApiAnswer, bool]:
        """The answer, and whether the connection can be used again."""
        timed: Any = functools.partial(_timed_response, lambda: self._left_s(until_ns))
        connection.response_class = timed
        assert connection.sock is not None
        connection.sock.settimeout(max(self._left_s(until_ns), 0.001))
        headers = dict(self._headers)
        if request.body is not None:
            headers["Content-Type"] = "application/json"
        complete = True
        try:
            connection.request(
                request.method, self._base.prefix + request.path, request.body, headers
            )
        except (BrokenPipeError, ConnectionResetError):
            # It may have answered before it had all of the body.
            complete = False
        response = connection.getresponse()
        with response:
            # Headers that were cut short look like an answer without a length.
            whole = response.length is not None or response.chunked
            body = response.read(ANSWER_BYTES + 1)
            if len(body) > ANSWER_BYTES:
                raise StoreRefused(
                    f"the answer has more than {ANSWER_BYTES:,} bytes; ask for fewer with limit="
                )
            if response.length or (not whole and response.status < 300):
                raise http.client.IncompleteRead(body, response.length)
            received = ApiAnswer(
                status=response.status,
                body=body,
                retry_after_s=_seconds(response.getheader("Retry-After")),
                location=response.getheader("Location") or "",
            )
            return received, complete and response.isclosed() and connection.sock is not None

    def _taken(self) -> http.client.HTTPConnection | None:
        """A connection that is open, as far as can be told."""
        oldest_ns = self._clock.monotonic_ns() - IDLE_NS
        with self._lock:
            while self._idle:
                connection, since_ns = self._idle.pop()
                if since_ns >= oldest_ns:
                    return connection
                connection.close()
        return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if self._closed:
                connection.close()
            else:
                self._idle.append((connection, self._clock.monotonic_ns()))

    def _drop_idle(self) -> None:
        with self._lock:
            for connection, _ in self._idle:
                connection.close()
            self._idle.clear()

    def _left_s(self, until_ns: int) -> float:
        return max(until_ns - self._clock.monotonic_ns(), 0) / S_NS

    def close(self) -> None:
        """Requests under way end first; each closes its own connection."""
        self._closed = True
        self._drop_idle()


def _timed_response(
    left_s: Callable[[], float], sock: socket.socket, **more: Any
) -> http.client.HTTPResponse:
    timed: Any = _TimedSocket(sock, left_s)
    return http.client.HTTPResponse(timed, **more)


class _TimedSocket:
    """A socket for reading an answer: all of it within the time that is left, however slowly it
    comes."""

    def __init__(self, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._sock = sock
        self._left_s = left_s

    def makefile(self, mode: str) -> io.BufferedReader:
        raw = self._sock.makefile(mode, buffering=0)  # type: ignore[call-overload]
        return io.BufferedReader(_TimedReader(raw, self._sock, self._left_s))


class _TimedReader(io.RawIOBase):
    def __init__(self, raw: Any, sock: socket.socket, left_s: Callable[[], float]) -> None:
        self._raw = raw
        self._sock = sock
        self._left_s = left_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._left_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left_s)
        read: int | None = self._raw.readinto(buffer)
        return read

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__


def _seconds(text: str | None) -> float | None:
    """Of Retry-After. A date, which our server never sends, counts as none."""
    return float(text) if text and text.isdecimal() and len(text) < 10 else None
