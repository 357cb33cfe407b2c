"""A bad line to a NATS server: it can be cut, stall in both directions, or lose single messages.

It knows just enough of the protocol to tell one message from the next.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

READ_BYTES = 64 * 1024
# What may still arrive after the first message that is swallowed, before the line is cut.
GRACE_S = 0.02

# Whether a message may go on.
Rule = Callable[[bytes], bool]


class Proxy:
    """Stands between clients and one server. `seen` counts the requests that came through.

    With `raw` it looks into nothing: for lines between servers, and to others than NATS.
    """

    def __init__(self, url: str, *, raw: bool = False) -> None:
        self._raw = raw
        login, at, place = url.partition("://")[2].rpartition("@")
        host, _, port = place.partition(":")
        self._login = login + at
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        # One for each connection; not set where it stalls.
        self._flowing: set[asyncio.Event] = set()
        self.refuses = False
        self.seen = 0
        self.connections = 0
        self.to_server: Rule = lambda _: True
        self.to_client: Rule = lambda _: True

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"nats://{self._login}127.0.0.1:{self._port}"

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    # --- Faults

    def cut(self) -> None:
        """End every connection, as a crashed machine in between would."""
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        """Half-open: pass nothing on over the connections that are there, and don't end them."""
        for flowing in self._flowing:
            flowing.clear()

    def flow(self) -> None:
        for flowing in self._flowing:
            flowing.set()

    def heal(self) -> None:
        """Be a good line again."""
        self.refuses = False
        self.to_server = self.to_client = lambda _: True
        self.flow()

    def lose_reply(self, nth: int) -> None:
        """Let the n-th request from now on through, but not its answer: the line is cut then."""
        at = self.seen + nth
        muted = False

        def to_client(_: bytes) -> bool:
            if self.seen < at:
                return True
            nonlocal muted
            if not muted:
                muted = True
                asyncio.get_running_loop().call_later(GRACE_S, self._cut_and_heal)
            return False

        self.to_client = to_client

    def lose_request(self, nth: int) -> None:
        """Cut the line just before the n-th request from now on."""
        at = self.seen + nth

        def to_server(message: bytes) -> bool:
            if self.seen < at or not is_request(message):
                return True
            self._cut_and_heal()
            return False

        self.to_server = to_server

    def _cut_and_heal(self) -> None:
        self.heal()
        self.cut()

    # --- The line

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        flowing = asyncio.Event()
        flowing.set()
        self._flowing.add(flowing)
        up = asyncio.create_task(self._pump(reader, far_writer, flowing, self._upwards))
        down = asyncio.create_task(self._pump(far_reader, writer, flowing, self._downwards))
        self._pumps |= {up, down}
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.transport.abort()
            up.cancel()
            down.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self._writers -= ends
            self._pumps -= {up, down}
            self._flowing.discard(flowing)

    def _upwards(self, message: bytes) -> bool:
        self.seen += not self._raw and is_request(message)
        return self.to_server(message)

    def _downwards(self, message: bytes) -> bool:
        return self.to_client(message)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        flowing: asyncio.Event,
        rule: Rule,
    ) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_BYTES):
                await flowing.wait()
                messages, rest = ([data], b"") if self._raw else split(rest + data)
                passed = b"".join(each for each in messages if rule(each))
                if writer.transport.is_closing():
                    return
                writer.write(passed)
                await writer.drain()


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole messages of the protocol at the front of these bytes, and the rest."""
    messages = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        after = end + 2
        words = data[at:end].split()
        if words and words[0].upper() in (b"PUB", b"HPUB", b"MSG", b"HMSG"):
            after += int(words[-1]) + 2
            if after > len(data):
                break
        messages.append(data[at:after])
        at = after
    return messages, data[at:]


def subject_of(message: bytes) -> str:
    """The subject that a message is published to; empty for all others."""
    words = message.partition(b"\r\n")[0].split()
    return words[1].decode() if words and words[0] in (b"PUB", b"HPUB") else ""


def is_request(message: bytes) -> bool:
    """Whether somebody waits for an answer to this."""
    words = message.partition(b"\r\n")[0].split()
    if not words or words[0] not in (b"PUB", b"HPUB"):
        return False
    return len(words) == (5 if words[0] == b"HPUB" else 4)


@contextlib.asynccontextmanager
async def bad_line(url: str) -> AsyncIterator[Proxy]:
    proxy = Proxy(url)
    await proxy.open()
    try:
        yield proxy
    finally:
        await proxy.close()
