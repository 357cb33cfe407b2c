"""Send one HTTP request for a callback, to a public address or one that is listed.

The address is judged where a connection is made, so it doesn't matter how it came about: written
in the URL, or by any answer of DNS.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import ssl
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tickwheel.callbacks.answers import READ_BYTES as START_BYTES
from tickwheel.callbacks.hosts import LINGER_MS, Hosts, Share, Wait
from tickwheel.callbacks.targets import Allowed, Target
from tickwheel.duration import duration_text
from tickwheel.errors import BadConfig

try:
    import aiohttp
    from aiohttp.abc import AbstractResolver, ResolveResult
    from yarl import URL
except ImportError:
    raise BadConfig("callbacks need aiohttp: pip install 'tickwheel[callbacks]'") from None

# Answers are read to their end, for the connection to be used again, but not further than this.
READ_BYTES, READ_S = 16 * 1024, 5.0
KEEP_ALIVE_S = 15.0
# Lookups block a thread each, one per host at a time.
LOOKUPS = 32


class AddressRefused(Exception):
    """The address may not be connected to."""


class Failed(Exception):
    """No answer came."""


@dataclass(slots=True)
class Received:
    """An answer as it came."""

    status: int
    start: bytes
    retry_after: str | None


@dataclass(slots=True)
class _Connecting:
    """One request, while it looks for a connection."""

    target: Target
    opened: int = 0
    refused: list[str] = field(default_factory=list)


_connecting: contextvars.ContextVar[_Connecting] = contextvars.ContextVar("tickwheel_callback")


# One that waits for a turn, and the worker that it takes a slot of.
_Turn = tuple[asyncio.Future[None], Share]


class Sender:
    """Sends the callbacks of one event loop."""

    def __init__(self, allowed: Allowed, hosts: Hosts, resolver: Any, connections: int) -> None:
        self.hosts = hosts
        self._allowed = allowed
        self._connections = connections
        # Those that wait for a host that is busy, by place.
        self._lingering: dict[str, deque[_Turn]] = {}
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._resolver = _Resolver() if resolver is None else None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # `hosts` counts
                resolver=self._resolver or resolver,
                socket_factory=self._socket,
                keepalive_timeout=KEEP_ALIVE_S,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            auto_decompress=False,
            trust_env=False,
        )

    async def close(self) -> None:
        await self._session.close()
        if self._resolver is not None:
            await self._resolver.close()

    async def enter(
        self, place: str, now_ms: Callable[[], int], share: Share | None = None
    ) -> Wait | None:
        """Wait a moment for a turn to send to this place; None if it has come."""
        share = share or self.hosts.share
        wait = self.hosts.enter(place, now_ms(), share)
        if wait is None or wait.broken:
            return wait
        if not self.hosts.may_linger(place, now_ms(), share):
            return wait
        return None if await self._lingered(place, now_ms, share) else wait

    async def _lingered(self, place: str, now_ms: Callable[[], int], share: Share) -> bool:
        """Wait for a moment until a call that leaves lets this one in; False if none did."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lingering = self._lingering.setdefault(place, deque())
        lingering.append((turn, share))
        share.lingering += 1
        try:
            async with asyncio.timeout(LINGER_MS / 1000):
                await turn
        except TimeoutError:
            return turn.done() and not turn.cancelled()
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(place, now_ms(), share, began_ms=now_ms(), trouble=None)
            raise
        finally:
            share.lingering -= 1
            if (turn, share) in lingering:
                lingering.remove((turn, share))
            if not lingering and self._lingering.get(place) is lingering:
                del self._lingering[place]
        return True

    def leave(
        self,
        place: str,
        now_ms: int,
        share: Share | None = None,
        *,
        began_ms: int,
        trouble: bool | None,
    ) -> None:
        """A call that has entered has ended: the next one of each worker goes in its place, if it
        may."""
        self.hosts.leave(place, now_ms, share, began_ms=began_ms, trouble=trouble)
        full: set[int] = set()
        for turn, its in tuple(self._lingering.get(place, ())):
            if turn.done() or id(its) in full:
                continue
            if self.hosts.enter(place, now_ms, its) is None:
                turn.set_result(None)
            else:
                full.add(id(its))

    async def send(
        self,
        target: Target,
        method: str,
        headers: Mapping[str, str],
        body: bytes,
        *,
        timeout_ms: int,
    ) -> Received:
        """Send a request and return the answer, whatever its status. Raises AddressRefused or
        Failed."""
        connecting = _Connecting(target)
        token = _connecting.set(connecting)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._exchange(target, method, headers, body)
        except TimeoutError:
            raise Failed(f"no answer within {duration_text(timeout_ms)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if connecting.refused and not connecting.opened:
                raise AddressRefused(connecting.refused[0]) from None
            raise Failed(_in_words(error)) from None
        finally:
            _connecting.reset(token)

    async def _exchange(
        self, target: Target, method: str, headers: Mapping[str, str], body: bytes
    ) -> Received:
        url = URL(target.url, encoded=True)
        if (url.scheme, url.raw_host, url.port) != (target.scheme, target.host, target.port):
            raise AddressRefused("its URL can be read in two ways")
        if len(self._sockets) > 2 * self._connections:
            headers = {**headers, "connection": "close"}  # too many are kept for later
        async with self._session.request(
            method,
            url,
            headers=headers,
            data=body or None,
            allow_redirects=False,
            skip_auto_headers=("content-type", "accept"),
        ) as response:
            start, whole = await _read(response)
            received = Received(response.status, start, response.headers.get("retry-after"))
            if not whole:
                response.close()
            return received

    def _socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for this address, if the request may connect to it."""
        family, kind, protocol, _, address = info
        connecting = _connecting.get()
        why = self._allowed.refusal(connecting.target, address[0])
        if why is not None:
            connecting.refused.append(why)
            raise OSError(None, "refused")
        connecting.opened += 1
        made = socket.socket(family, kind, protocol)
        self._sockets.add(made)
        return made


async def _read(response: aiohttp.ClientResponse) -> tuple[bytes, bool]:
    """The start of the answer, and whether it was read to its end. Its status is known: trouble
    with the rest changes nothing."""
    start, count = b"", 0
    try:
        async with asyncio.timeout(READ_S):
            while count < READ_BYTES:
                part = await response.content.read(4096)
                if not part:
                    return start[:START_BYTES], True
                count += len(part)
                if len(start) < START_BYTES:
                    start += part
    except (TimeoutError, aiohttp.ClientError, OSError):
        pass
    return start[:START_BYTES], False


def _in_words(error: BaseException) -> str:
    """What went wrong. Not the library's own words: they may have the whole URL."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name could not be resolved"
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed: {cause.reason or type(cause).__name__}"
    if isinstance(cause, OSError) and cause.errno:
        return socket.gaierror(cause.errno, cause.strerror or "").strerror or type(cause).__name__
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection without an answer"
    return f"no answer: {type(error).__name__}"


class _Resolver(AbstractResolver):
    """Asks the system, in threads of its own: slow names must not take those of the program."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="tickwheel-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _lookup, host, port, family)
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=each_family,
                proto=protocol,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for each_family, _, protocol, _, address in found
            # With an interface, or from a system without IPv6: no address that we connect to.
            if len(address) == 2 or not address[3]
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup(host: str, port: int, family: int) -> list[Any]:
    return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
