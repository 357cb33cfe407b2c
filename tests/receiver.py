"""A receiver of HTTP requests on loopback, whose answers a test writes byte by byte."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    # Path and query.
    path: str
    # Names in lower case.
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter


def answer(status: int = 200, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


# What to send back; None: nothing, and keep the connection open.
Answers = Callable[[Request], "bytes | Awaitable[bytes | None] | None"]


@dataclass
class Receiver:
    """Notes every request. By default each is accepted."""

    answers: Answers = lambda _: answer()
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    _open: set[asyncio.Task[Any]] = field(default_factory=set)
    _came: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_connections(self) -> int:
        return len(self._open)

    def to(self, path: str) -> list[Request]:
        return [each for each in self.requests if each.path == path]

    async def until(self, count: int, path: str | None = None) -> list[Request]:
        """Wait for so many requests, of this path or of all."""

        def those() -> list[Request]:
            return self.requests if path is None else self.to(path)

        async with asyncio.timeout(30), self._came:
            await self._came.wait_for(lambda: len(those()) >= count)
        return those()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        self.connections += 1
        try:
            while True:
                request = await _read(reader, writer)
                self.requests.append(request)
                async with self._came:
                    self._came.notify_all()
                given = self.answers(request)
                sent = given if isinstance(given, bytes | None) else await given
                if sent is None:
                    await reader.read()  # until the other side closes
                    return
                writer.write(sent)
                await writer.drain()
                if b"connection: close" in sent:
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def close(self) -> None:
        for task in [*self._open]:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in head[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(method, path, headers, body, writer)


@asynccontextmanager
async def receiving(
    answers: Answers | None = None, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    receiver = Receiver() if answers is None else Receiver(answers)
    server = await asyncio.start_server(receiver.serve, host, 0, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        await receiver.close()
