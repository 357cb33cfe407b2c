"""A receiver of callbacks in a process of its own, which fails some requests and stalls others.

Which ones depends on the id and the attempt alone. Prints its port; at the end of its input, what
it got of each id: "ok", "fail" and "stall", in this order.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib

FAILS, STALLS = 10, 5  # of 100
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
FAIL = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"


def fate(id: str, attempt: str) -> str:
    number = zlib.crc32(f"{id} {attempt}".encode()) % 100
    return "fail" if number < FAILS else "stall" if number < FAILS + STALLS else "ok"


class Connection(asyncio.Protocol):
    got: dict[str, list[str]]
    open = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""
        Connection.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        Connection.open -= 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        headers = dict(line.lower().split(": ", 1) for line in head.decode().split("\r\n")[1:])
        size = int(headers.get("content-length", "0"))
        if len(rest) < size:
            return
        self._buffer = rest[size:]
        id = headers["webhook-id"]
        what = fate(id, headers["tickwheel-attempt"])
        self.got.setdefault(id, []).append(what)
        if what != "stall":
            self._transport.write(OK if what == "ok" else FAIL)


async def main() -> None:
    Connection.got = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Connection, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    print(json.dumps({"got": Connection.got, "open": Connection.open}), flush=True)


asyncio.run(main())
