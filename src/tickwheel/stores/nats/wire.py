"""A thin NATS client: one connection that reconnects, and sends a request or batch in one write.

It knows the protocol and nothing of jobs. docs/adr/0013 says why we have our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tickwheel.concurrency import first_of
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.version import __version__

log = logging.getLogger("tickwheel")

# An answer that takes longer than this counts as lost.
ANSWER_S = 5.0
# How long to wait for a new connection, and for one that is being restored.
CONNECT_S = 5.0
RETURN_S = 2.0
# The pause before the next server is tried: doubled each time, up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
# A connection that is silent for this long gets a ping; after the same time again it is cut.
PING_S = 5.0
READ_BYTES = 256 * 1024
# With more than this unsent, the server has stopped reading.
UNSENT_BYTES = 64 * 1024 * 1024
# How many nodes of a cluster are remembered.
SERVERS = 32
# $JS.ACK.stream.consumer.delivered.stream-seq.consumer-seq.time.pending
ACK_PARTS = 9

_DENIED = re.compile(r"Permissions Violation for (Publish|Subscription) to \"([^\"]*)\"", re.I)


class NoAnswer(StoreUnavailable):
    """The server did not answer a request in time."""


class Denied(StoreError):
    """The server forbids this user something that the store needs."""


class Gone(StoreUnavailable):
    """Nobody answers for a consumer: it has no leader, was deleted, or never existed."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How we log in: `public` goes into CONNECT, and `sign` signs the server's nonce."""

    public: dict[str, str]
    sign: Callable[[bytes], str] | None = None


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message that arrived. Headers are raw; see `status` and `header`."""

    subject: str
    reply: str
    headers: bytes
    data: bytes


@dataclass(frozen=True, slots=True)
class _Subscription:
    """A subscription. In a group, one member gets each message; with `once`, the server ends the
    subscription after the first message."""

    subject: str
    group: str
    once: bool

    def line(self, sid: int) -> bytes:
        group = f"{self.group} " if self.group else ""
        end = f"UNSUB {sid} 1\r\n" if self.once else ""
        return f"SUB {self.subject} {group}{sid}\r\n{end}".encode()


@dataclass(slots=True, eq=False)
class _Pending:
    """A caller waits for an answer, or for several until `last` says that one is the last."""

    future: asyncio.Future[list[Message]]
    last: Callable[[Message], bool]
    sent: bytes
    got: list[Message]


def status(message: Message) -> int:
    """The status of a status message, such as 404; 0 for all others."""
    line = message.headers[8:12]
    return int(line) if line.strip().isdigit() else 0


def header(message: Message, name: bytes) -> str:
    """One header of a message; empty if it has none of that name."""
    if not message.headers:
        return ""
    start = message.headers.find(b"\r\n" + name + b": ")
    if start < 0:
        return ""
    start += len(name) + 4
    return message.headers[start : message.headers.index(b"\r\n", start)].decode()


def publish_line(subject: str, data: bytes, *, headers: str = "", reply: str = "") -> bytes:
    """One publish in the protocol's form; headers are `Name: value` lines, each with CRLF."""
    if not headers:
        return b"PUB %s %s%d\r\n%s\r\n" % (
            subject.encode(),
            reply.encode() + b" " if reply else b"",
            len(data),
            data,
        )
    head = f"NATS/1.0\r\n{headers}\r\n".encode()
    return b"HPUB %s %s%d %d\r\n%s%s\r\n" % (
        subject.encode(),
        reply.encode() + b" " if reply else b"",
        len(head),
        len(head) + len(data),
        head,
        data,
    )


class Wire:
    """One connection to a server or cluster. While it is down, calls fail with StoreUnavailable."""

    def __init__(
        self,
        servers: Sequence[tuple[str, int]],
        *,
        credentials: Credentials | None = None,
        tls: ssl.SSLContext | None = None,
        inbox: str = "_INBOX",
    ) -> None:
        self._servers = list(servers)
        self._credentials = credentials or Credentials({})
        self._tls = tls
        self._inbox = f"{inbox}.{secrets.token_hex(8)}"
        self._numbers = itertools.count(1)
        self._pending: dict[str, _Pending] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._by_sid: dict[bytes, Callable[[Message], None]] = {}
        self._running: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._up = asyncio.Event()
        self._failure: StoreError | None = None
        # Why no answer can reach us.
        self._deaf: Denied | None = None
        self.was_up = False
        # The number of the connection: each new one has the next.
        self.connection = 0
        self.info: dict[str, Any] = {}
        # Called each time the connection has come up.
        self.on_up: Callable[[], None] = lambda: None
        # Called with messages that a stream delivered and nobody waits for any more.
        self.on_stray: Callable[[Message], None] = lambda _: None
        self._pulls: dict[str, _Pending] = {}

    # --- Open and close

    async def open(self) -> None:
        """Connect. Raises at once if the server refuses us, or else after a few seconds."""
        if self._running is None:
            self.subscribe(f"{self._inbox}.>", self._answered)
            self._running = asyncio.create_task(self._run(), name="tickwheel-nats")
        await first_of(self._up.wait(), asyncio.shield(self._running), timeout_s=CONNECT_S)
        if not self._up.is_set():
            failure = self._failure or StoreUnavailable("no NATS server answers")
            await self.close()
            raise failure

    async def close(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        self._subscriptions.clear()
        self._by_sid.clear()
        self._drop("the store is closed")

    # --- Talking

    def send(self, data: bytes) -> None:
        """Send without waiting. Raises if the connection is down."""
        if self._writer is None or self._writer.is_closing() or not self._up.is_set():
            why = f": {self._failure}" if self._failure else ""
            raise StoreUnavailable(f"the connection to NATS is down{why}")
        if self._writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            raise StoreUnavailable("the NATS server has stopped reading")
        self._writer.write(data)

    async def request(
        self, subject: str, data: bytes = b"", headers: str = "", *, connection: int | None = None
    ) -> Message:
        """Send one message and wait for its one answer."""
        [answer] = await self.exchange(
            lambda reply: publish_line(subject, data, headers=headers, reply=reply),
            connection=connection,
        )
        return answer

    async def exchange(
        self,
        line: Callable[[str], bytes],
        *,
        last: Callable[[Message], bool] = lambda _: True,
        got: list[Message] | None = None,
        pull: str = "",
        connection: int | None = None,
    ) -> list[Message]:
        """Send what `line` makes of a reply subject; returns the answers up to the last one.

        They gather in `got`. With `pull`, what that consumer delivers is part of the answer. With
        `connection`, it is sent over this one or not at all.
        """
        await self._returned()
        if connection not in (None, self.connection):
            raise StoreUnavailable("the connection to NATS was lost")
        if self._deaf is not None:
            raise self._deaf
        number = str(next(self._numbers))
        sent = line(f"{self._inbox}.{number}")
        future: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        pending = _Pending(future, last, sent, [] if got is None else got)
        self._pending[number] = pending
        if pull:
            self._pulls[pull] = pending
        try:
            self.send(sent)
            async with asyncio.timeout(ANSWER_S):
                return await future
        except TimeoutError:
            raise NoAnswer(f"NATS did not answer within {ANSWER_S:g} s") from None
        finally:
            del self._pending[number]
            if pull:
                del self._pulls[pull]

    async def pull(
        self, stream: str, consumer: str, count: int, most_bytes: int
    ) -> tuple[list[Message], bool]:
        """The messages that a consumer has now, up to `count` and `most_bytes`; and whether it may
        have more. If the first message alone is larger, nothing comes. Only one pull per consumer
        at a time. Raises Gone if nobody answers for the consumer."""
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        request = b'{"batch":%d,"max_bytes":%d,"no_wait":true}' % (count, most_bytes)
        got: list[Message] = []
        coming, cut = count, False

        def last(message: Message) -> bool:
            nonlocal coming, cut
            if message.reply:
                coming -= 1
            elif left := header(message, b"Nats-Pending-Messages"):
                # The end of a pull with a limit of bytes: so many messages are not coming. In a
                # cluster it can arrive before the others.
                coming -= int(left)
                cut = _TOO_LARGE in message.headers
            else:
                return True
            return coming == 0

        try:
            await self.exchange(
                lambda reply: publish_line(subject, request, reply=reply),
                last=last,
                got=got,
                pull=f"{stream}.{consumer}",
            )
        except BaseException:
            # Also if the caller gave up: nobody else gets what was delivered for a long while.
            for message in got:
                self.on_stray(message)
            raise
        messages = [message for message in got if message.reply]
        if not messages and got and (status(got[-1]) == 503 or _DELETED in got[-1].headers):
            raise Gone(f"consumer {consumer} of stream {stream} does not exist or has no leader")
        return messages, cut or len(messages) == count

    def subscribe(
        self,
        subject: str,
        handle: Callable[[Message], None],
        *,
        group: str = "",
        once: bool = False,
    ) -> int:
        """Hand every message on this subject to `handle`, also after a reconnect; in a group, one
        member gets each message. Returns an id for `unsubscribe`."""
        sid = next(self._numbers)

        def hear_once(message: Message) -> None:
            self._forget(sid)
            handle(message)

        self._subscriptions[sid] = subscription = _Subscription(subject, group, once)
        self._by_sid[str(sid).encode()] = hear_once if once else handle
        with contextlib.suppress(StoreUnavailable):  # it is sent when the connection is up
            self.send(subscription.line(sid))
        return sid

    def unsubscribe(self, sid: int) -> None:
        if self._forget(sid):
            with contextlib.suppress(StoreUnavailable):  # the server forgot it with the connection
                self.send(b"UNSUB %d\r\n" % sid)

    def _forget(self, sid: int) -> bool:
        self._by_sid.pop(str(sid).encode(), None)
        return self._subscriptions.pop(sid, None) is not None

    async def _returned(self) -> None:
        """Wait a moment for a connection that is down."""
        if self._running is None:
            raise StoreUnavailable("the store is closed")
        if not self._up.is_set():
            await first_of(self._up.wait(), timeout_s=RETURN_S)

    # --- Connect and reconnect

    async def _run(self) -> None:
        """Connect again and again until cancelled, or until the first connection is refused."""
        pause_s = FIRST_PAUSE_S
        for turn in itertools.count():
            # Not itertools.cycle: that would miss servers that are learned later.
            host, port = self._servers[turn % len(self._servers)]
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader = await self._connect(host, port)
                pause_s = FIRST_PAUSE_S
                await self._serve(reader)
            except (OSError, EOFError, TimeoutError) as error:
                words = str(error) or "no answer"
                self._failure = StoreUnavailable(f"nats://{host}:{port}: {words}")
            except StoreError as error:
                self._failure = error
                if not self.was_up:
                    return
            except Exception as error:
                # The server sent something invalid; a new connection may help.
                log.exception("NATS: reconnecting after an unexpected error")
                self._failure = StoreUnavailable(f"nats://{host}:{port}: {error!r}")
            finally:
                self._drop("the connection to NATS was lost")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)

    async def _connect(self, host: str, port: int) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(host, port)
        line = await reader.readline()
        if not line.startswith(b"INFO "):
            raise StoreUnavailable(f"nats://{host}:{port} is not a NATS server")
        self.info = msgspec.json.decode(line[5:])
        if self._tls is not None or self.info.get("tls_required"):
            context = self._tls or ssl.create_default_context()
            await self._writer.start_tls(context, server_hostname=host)
        self._writer.write(b"CONNECT " + msgspec.json.encode(self._hello()) + b"\r\nPING\r\n")
        # A refusal comes before the answer to our ping.
        while not (line := await reader.readline()).startswith(b"PONG"):
            if not line:
                raise EOFError("the server closed the connection")
            if line.startswith(b"-ERR"):
                raise Denied(f"nats://{host}:{port} refuses the connection: {_words(line)}")
        self._learn_servers()
        self._deaf = None
        for sid, subscription in self._subscriptions.items():
            self._writer.write(subscription.line(sid))
        self.was_up = True
        self.connection += 1
        self._up.set()
        self.on_up()
        return reader

    def _hello(self) -> dict[str, Any]:
        hello: dict[str, Any] = {
            "verbose": False,
            "pedantic": False,
            "headers": True,
            "no_responders": True,
            "lang": "python",
            "version": __version__,
            "protocol": 1,
            "name": "tickwheel",
            "tls_required": self._tls is not None,
            **self._credentials.public,
        }
        if self._credentials.sign is not None and (nonce := self.info.get("nonce")):
            hello["sig"] = self._credentials.sign(nonce.encode())
        return hello

    def _learn_servers(self) -> None:
        """A cluster lists the addresses of its other nodes."""
        for address in self.info.get("connect_urls") or ():
            host, _, port = address.rpartition(":")
            server = (host.strip("[]"), int(port))
            if server not in self._servers and len(self._servers) < SERVERS:
                self._servers.append(server)

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        """Read until the connection ends, or doesn't answer a ping."""
        rest, silent = b"", False
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    data = await reader.read(READ_BYTES)
            except TimeoutError:
                if silent:
                    raise EOFError("the server stopped answering") from None
                silent = True
                self.send(b"PING\r\n")
                continue
            if not data:
                raise EOFError("the server closed the connection")
            silent = False
            rest = self._parse(rest + data if rest else data)

    def _drop(self, words: str) -> None:
        """Close the connection, and fail the calls that wait for an answer."""
        self._up.clear()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(StoreUnavailable(words))

    # --- What arrives

    def _parse(self, data: bytes) -> bytes:
        """Handle every complete message; returns the rest."""
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            kind = data[at]
            if kind in (_H, _M):
                words = data[at:end].split()
                size = int(words[-1])
                start = end + 2
                if len(data) < start + size + 2:
                    break
                at = start + size + 2
                self._arrived(words, kind == _H, data[start : start + size])
            else:
                self._handle_line(data[at:end])
                at = end + 2
        return data[at:]

    def _arrived(self, words: list[bytes], with_headers: bool, content: bytes) -> None:
        # MSG subject sid [reply] size; HMSG subject sid [reply] size-of-headers size
        sizes = 2 if with_headers else 1
        reply = words[3].decode() if len(words) == 4 + sizes else ""
        split = int(words[-2]) if with_headers else 0
        handle = self._by_sid.get(words[2])
        if handle is not None:
            handle(Message(words[1].decode(), reply, content[:split], content[split:]))

    def _answered(self, message: Message) -> None:
        if message.subject.startswith(self._inbox):
            # After the number comes which of several messages was answered.
            number = message.subject[len(self._inbox) + 1 :].partition(".")[0]
            pending = self._pending.get(number)
        else:
            # A message that a stream delivers has the subject that it has in the stream.
            pending = self._pulls.get(_consumer(message.reply))
        if pending is None or pending.future.done():
            if message.reply:
                self.on_stray(message)
            return
        pending.got.append(message)
        if pending.last(message):
            pending.future.set_result(pending.got)

    def _handle_line(self, line: bytes) -> None:
        if line == b"PING":
            self.send(b"PONG\r\n")
        elif line.startswith(b"INFO "):
            self.info |= msgspec.json.decode(line[5:])
            self._learn_servers()
        elif line.startswith(b"-ERR"):
            self._refused(_words(line))

    def _refused(self, words: str) -> None:
        """The only answer to a forbidden publish is this line: fail the call that sent it."""
        denied = _DENIED.search(words)
        if denied is None:
            log.warning("NATS: %s", words)
            return
        publish, subject = denied[1].lower() == "publish", denied[2]
        what = "publish to" if publish else "subscribe to"
        failure = Denied(f"NATS does not allow this user to {what} {subject!r}")
        # Without its inbox, the client never gets any answer.
        deaf = not publish and subject.startswith(self._inbox)
        if deaf:
            self._deaf = failure
        sent = b"PUB " + subject.encode() + b" "
        someone_waits = False
        for pending in self._pending.values():
            if (deaf or (publish and sent in pending.sent)) and not pending.future.done():
                pending.future.set_exception(failure)
                someone_waits = True
        if not someone_waits:
            log.error("%s", failure)


_H, _M = ord("H"), ord("M")
_TOO_LARGE = b"409 Message Size Exceeds MaxBytes"
_DELETED = b"409 Consumer Deleted"


def _consumer(ack: str) -> str:
    """Stream and consumer of an ack subject: $JS.ACK.stream.consumer.…, or with a domain first.
    Streams may have consumers of the same name."""
    parts = ack.split(".")
    return ".".join(parts[2:4] if len(parts) == ACK_PARTS else parts[4:6])


def delivered(message: Message) -> tuple[int, int, int]:
    """The sequence of a delivered message in its stream; how often it was delivered, including this
    time; and when it was stored, in ns."""
    parts = message.reply.split(".")
    at = 4 if len(parts) == ACK_PARTS else 6
    return int(parts[at + 1]), int(parts[at]), int(parts[at + 3])


def _words(line: bytes) -> str:
    return line[5:].decode(errors="replace").strip().strip("'")
