"""Both clients of the HTTP API behind one face, and a proxy that makes trouble."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

from tickwheel import AsyncHttpClient, HttpClient

FaceName = Literal["sync", "async"]
FACES: list[FaceName] = ["sync", "async"]


class Face:
    """A client, and how to call it: a sync one blocks, so it is called in a thread."""

    def __init__(self, client: Any, blocks: bool) -> None:
        self.client = client
        self._blocks = blocks

    async def do(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self._blocks:
            return await asyncio.to_thread(call, *args, **options)
        return await call(*args, **options)

    async def all(self, **which: Any) -> list[Any]:
        """What `find_all` finds."""
        if self._blocks:
            return await asyncio.to_thread(lambda: list(self.client.find_all(**which)))
        return [info async for info in self.client.find_all(**which)]


@asynccontextmanager
async def facing(name: FaceName, url: str, **options: Any) -> AsyncIterator[Face]:
    if name == "sync":
        with HttpClient(url, **options) as client:
            yield Face(client, True)
    else:
        async with AsyncHttpClient(url, **options) as other:
            yield Face(other, False)


# --- A proxy

Trouble = Literal["drop", "lose", "silent", "trickle", "cut", "behead"] | bytes | None


def plain(status: str, *headers: str, body: bytes = b"") -> bytes:
    """An answer that is not of the API."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Proxy:
    """Passes each request on, unless there is trouble for it: one for each connection.

    `drop` closes the connection before the request is passed on; `lose` after it was answered,
    without the answer; `cut` in the answer's body and `behead` in its headers; `silent` and
    `trickle` never end; bytes are the answer.
    """

    def __init__(self, url: str) -> None:
        self._port = int(url.rpartition(":")[2])
        self.url = ""
        self.troubles: list[Trouble] = []
        # How many requests came, and how many connections were open at most.
        self.count = self.open = self.open_most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.open_most = max(self.open, self.open_most)
        try:
            while request := await self._request(reader):
                self.count += 1
                trouble = self.troubles.pop(0) if self.troubles else None
                if not await self._answer(trouble, request, reader, writer):
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _request(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        return head + await reader.readexactly(self._length(head))

    def _length(self, head: bytes) -> int:
        found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        return int(found[1]) if found else 0

    async def _answer(
        self,
        trouble: Trouble,
        request: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """False if the connection ends."""
        if trouble == "drop":
            return False
        if trouble == "silent":
            await reader.read()
            return False
        if trouble == "trickle":
            while not reader.at_eof():
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.01)
            return False
        answer = trouble if isinstance(trouble, bytes) else await self._passed_on(request)
        if trouble == "lose":
            return False
        ends = {"cut": len(answer) - 5, "behead": len(b"HTTP/1.1 200 OK\r\nda")}
        writer.write(answer[: ends[trouble]] if isinstance(trouble, str) else answer)
        await writer.drain()
        return trouble is None

    async def _passed_on(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(self._length(head))
        finally:
            writer.close()
            await writer.wait_closed()


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(url)
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        task.add_done_callback(running.discard)
        await proxy.serve(reader, writer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=64 * 1024 * 1024)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
