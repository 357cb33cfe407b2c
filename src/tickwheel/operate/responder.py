"""A small HTTP server for a few GET requests: one request a connection, and everything bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass

from tickwheel.concurrency import cancel_all
from tickwheel.errors import BadConfig

log = logging.getLogger("tickwheel")

# How many bytes the head of a request may have, how long a whole exchange may take, and how many
# may go on at the same time. As many more are told so, and the rest is cut off.
HEAD_LIMIT = 16 * 1024
EXCHANGE_S = 10.0
LINGER_S = 1.0
CONNECTIONS = 32

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True)
class PlainResponse:
    """What is answered."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


# Called with the Accept header.
Route = Callable[[str], Awaitable[PlainResponse]]


@dataclass(frozen=True, slots=True)
class PlainRequest:
    """The part of a request that matters here."""

    method: str
    path: str
    accept: str


@contextlib.asynccontextmanager
async def responding(host: str, port: int, routes: Mapping[str, Route]) -> AsyncIterator[int]:
    """Answer requests for the duration of the block; yields the port. Raises BadConfig if the
    address can't be used."""
    exchanges: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        exchanges.add(task)
        try:
            if len(exchanges) > 2 * CONNECTIONS:
                writer.transport.abort()
            else:
                await _exchange(reader, writer, routes, crowded=len(exchanges) > CONNECTIONS)
        except asyncio.CancelledError:
            pass  # the server ends; nobody waits for this task
        finally:
            exchanges.discard(task)

    try:
        server = await asyncio.start_server(connected, host, port, limit=HEAD_LIMIT)
    except (OSError, UnicodeError) as error:
        raise BadConfig(f"http={host}:{port} can't be used: {error}") from None
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await cancel_all(*exchanges)
        await server.wait_closed()


async def _exchange(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    routes: Mapping[str, Route],
    *,
    crowded: bool,
) -> None:
    """One request and its answer. Clients that are slow or gone are given up."""
    try:
        async with asyncio.timeout(EXCHANGE_S):
            if crowded:
                response = PlainResponse(503, b"too many connections\n")
                head_only = False
            else:
                request = await _request(reader)
                head_only = isinstance(request, PlainRequest) and request.method == "HEAD"
                response = await _answer(request, routes)
            writer.write(encoded_response(response, head_only=head_only))
            await writer.drain()
            await _linger(reader, writer)
    except (TimeoutError, OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await writer.wait_closed()


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read what the client still sends: a socket that is closed with unread bytes is reset, and the
    client may lose the answer."""
    writer.write_eof()
    async with asyncio.timeout(LINGER_S):
        while await reader.read(HEAD_LIMIT):
            pass


async def _request(reader: asyncio.StreamReader) -> PlainRequest | PlainResponse:
    try:
        return parse_request(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        return PlainResponse(431, b"the request is too large\n")


async def _answer(
    request: PlainRequest | PlainResponse, routes: Mapping[str, Route]
) -> PlainResponse:
    if isinstance(request, PlainResponse):
        return request
    route = routes.get(request.path)
    if route is None:
        return PlainResponse(404, f"not found; there is {', '.join(routes)}\n".encode())
    if request.method not in ("GET", "HEAD"):
        return PlainResponse(405, b"use GET\n")
    try:
        return await route(request.accept)
    except Exception:
        log.exception("could not answer %s", request.path)
        return PlainResponse(500, b"an error occurred; the log has it\n")


def parse_request(head: bytes) -> PlainRequest | PlainResponse:
    """A request by its head, or the answer to one that is none."""
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1.") or not parts[1].startswith("/"):
        return PlainResponse(400, b"not an HTTP/1.1 request\n")
    accept = [
        value.strip()
        for name, colon, value in (line.partition(":") for line in lines[1:])
        if colon and name.lower() == "accept"
    ]
    return PlainRequest(parts[0], parts[1].partition("?")[0], ", ".join(accept))


def encoded_response(response: PlainResponse, *, head_only: bool = False) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {_REASONS[response.status]}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
        *(["Allow: GET, HEAD"] if response.status == 405 else []),
    ]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")
    return head if head_only else head + response.body
