"""The NATS protocol, byte by byte: a scripted server that says exactly what each test wants."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.stores.nats import wire as nats_wire
from tickwheel.stores.nats.wire import Denied, Message, Wire, header, publish_line, status

INFO = b'INFO {"version":"2.15.0","max_payload":1048576,"headers":true}\r\n'

# Generous: on a busy machine it still happens, or it never does.
SOON_S = 10.0


T = TypeVar("T")


class Script:
    """A server that greets, answers pings, notes what it is told and says what a test wants."""

    def __init__(self) -> None:
        self.info = INFO
        self.heard: list[bytes] = []
        self.connections = 0
        self.answer: Callable[[Script, bytes], Awaitable[None]] = _nothing
        # Hears, but says no more than its greeting.
        self.silent = False
        self._writer: asyncio.StreamWriter | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._talks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._changed = asyncio.Event()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._talks, return_exceptions=True)

    @property
    def place(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    async def say(self, data: bytes) -> None:
        assert self._writer is not None
        self._writer.write(data)
        await self._writer.drain()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Return when a connection or a line from the client has made this true."""
        async with asyncio.timeout(SOON_S):
            while not happened():
                await self._changed.wait()

    async def connected(self, times: int) -> None:
        """Return when the client has connected so many times."""
        await self.until(lambda: self.connections >= times)

    async def hears(self, start: bytes, times: int = 1) -> None:
        """Return when so many lines that begin like this have come."""
        await self.until(lambda: sum(line.startswith(start) for line in self.heard) >= times)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def cut(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._talks.add(task)
        self.connections += 1
        self._writer = writer
        self._writers.append(writer)
        self._tell()
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await self._talk(reader, writer)
        writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self.info)
        while line := await reader.readline():
            if line.startswith((b"PUB", b"HPUB")):
                line += await reader.readexactly(int(line.split()[-1]) + 2)
            self.heard.append(line)
            self._tell()
            if line == b"PING\r\n" and not self.silent:
                writer.write(b"PONG\r\n")
            elif line.startswith((b"PUB", b"HPUB")):
                await self.answer(self, line)


async def _nothing(script: Script, line: bytes) -> None: ...


@contextlib.asynccontextmanager
async def talking() -> AsyncIterator[tuple[Script, Wire]]:
    script = Script()
    await script.open()
    wire = Wire([script.place])
    try:
        await wire.open()
        yield script, wire
    finally:
        await wire.close()
        await script.close()


def reads_of(wire: Wire) -> asyncio.Queue[bytes]:
    """What the client reads from now on, piece by piece; each has been handled when it is here."""
    reads: asyncio.Queue[bytes] = asyncio.Queue()
    parse = wire._parse

    def noted(data: bytes) -> bytes:
        # Who waits for it is resumed after this step of the reading task.
        reads.put_nowait(data)
        return parse(data)

    wire._parse = noted  # type: ignore[method-assign]
    return reads


async def soon(queue: asyncio.Queue[T]) -> T:
    async with asyncio.timeout(SOON_S):
        return await queue.get()


def reply_of(line: bytes) -> bytes:
    """The subject that the answer to a request goes to."""
    words = line.partition(b"\r\n")[0].split()
    return words[2]


def msg(subject: bytes, data: bytes, *, sid: bytes = b"1", reply: bytes = b"") -> bytes:
    return b"MSG %s %s %s%d\r\n%s\r\n" % (subject, sid, reply and reply + b" ", len(data), data)


def hmsg(subject: bytes, head: bytes, data: bytes, *, reply: bytes = b"") -> bytes:
    sizes = b"%d %d" % (len(head), len(head) + len(data))
    return b"HMSG %s 1 %s%s\r\n%s%s\r\n" % (subject, reply and reply + b" ", sizes, head, data)


# --- What we send


def test_a_publish() -> None:
    assert publish_line("a", b"xyz") == b"PUB a 3\r\nxyz\r\n"
    assert publish_line("a", b"", reply="r") == b"PUB a r 0\r\n\r\n"
    assert (
        publish_line("a", b"xyz", headers="K: v\r\n", reply="r")
        == b"HPUB a r 18 21\r\nNATS/1.0\r\nK: v\r\n\r\nxyz\r\n"
    )
    assert publish_line("é", "é".encode(), headers="K: é\r\n").startswith(
        b"HPUB \xc3\xa9 19 21\r\n"
    )


def test_headers_and_status() -> None:
    plain = Message("s", "", b"NATS/1.0\r\nA: 1\r\nLong-Name: some words\r\n\r\n", b"")
    assert (header(plain, b"A"), header(plain, b"Long-Name")) == ("1", "some words")
    assert (header(plain, b"Name"), header(plain, b"B"), status(plain)) == ("", "", 0)
    ended = Message("s", "", b"NATS/1.0 404 No Messages\r\n\r\n", b"")
    assert (status(ended), header(ended, b"A")) == (404, "")
    bare = Message("s", "", b"NATS/1.0 503\r\n\r\n", b"")
    assert status(bare) == 503
    assert status(Message("s", "", b"", b"NATS/1.0 404")) == 0


async def test_who_we_are_comes_before_anything_else() -> None:
    async with talking() as (script, wire):
        assert script.heard[0].startswith(b"CONNECT {")
        assert b'"no_responders":true' in script.heard[0] and b'"headers":true' in script.heard[0]
        assert script.heard[1] == b"PING\r\n"
        wire.subscribe("news.*", lambda _: None)
        await script.hears(b"SUB news.* ")


# --- What arrives, in whatever pieces


STREAM = (
    msg(b"other", b"not \r\n ours", sid=b"77")
    + b"PING\r\n"
    + hmsg(b"news.a", b"NATS/1.0\r\nK: v\r\n\r\n", b"with\r\nheaders")
    + b"+OK\r\n"
    + msg(b"news.b", b"", reply=b"r.1")
    + b'INFO {"max_payload":99}\r\n'
    + msg(b"news.c", b"MSG news.x 1 3\r\nabc\r\n")
    + hmsg(b"news.d", b"NATS/1.0 404 No Messages\r\n\r\n", b"", reply=b"r.2")
)
EXPECTED = [
    ("news.a", "", b"with\r\nheaders"),
    ("news.b", "r.1", b""),
    ("news.c", "", b"MSG news.x 1 3\r\nabc\r\n"),
    ("news.d", "r.2", b""),
]


def parsed(*pieces: bytes) -> list[tuple[str, str, bytes]]:
    """What a connection that gets these pieces hands on."""
    wire = Wire([])
    found: list[tuple[str, str, bytes]] = []
    wire._by_sid[b"1"] = lambda m: found.append((m.subject, m.reply, m.data))
    sent: list[bytes] = []
    wire.send = sent.append  # type: ignore[method-assign,assignment]
    rest = b""
    for piece in pieces:
        rest = wire._parse(rest + piece)
    assert rest == b""
    assert sent == [b"PONG\r\n"]
    assert wire.info["max_payload"] == 99
    return found


def test_split_at_every_byte() -> None:
    assert parsed(STREAM) == EXPECTED
    for cut in range(1, len(STREAM)):
        assert parsed(STREAM[:cut], STREAM[cut:]) == EXPECTED, f"cut at {cut}"


def test_byte_by_byte() -> None:
    assert parsed(*(STREAM[n : n + 1] for n in range(len(STREAM)))) == EXPECTED


async def test_split_anywhere_on_a_real_connection() -> None:
    async with talking() as (script, wire):
        found: list[bytes] = []
        wire.subscribe("news.*", lambda m: found.append(m.data))
        await script.hears(b"SUB news.* ")
        sid = next(line.split()[-1] for line in script.heard if b"news" in line)
        data = msg(b"news.a", b"one\r\ntwo", sid=sid)
        reads = reads_of(wire)
        for cut in range(1, len(data)):
            await script.say(data[:cut])
            assert await soon(reads) == data[:cut]
            await script.say(data[cut:])
            await soon(reads)
        assert found == [b"one\r\ntwo"] * (len(data) - 1)


async def test_a_big_answer_in_many_pieces() -> None:
    body = bytes(range(256)) * 16 * 1024  # 4 MiB, with every byte there is

    async def answer(script: Script, line: bytes) -> None:
        await script.say(msg(reply_of(line), body))

    async with talking() as (script, wire):
        script.answer = answer
        found = await wire.request("big")
        assert found.data == body


async def test_a_thousand_answers_in_one_piece() -> None:
    async with talking() as (script, wire):
        waiting: list[bytes] = []

        async def answer(script: Script, line: bytes) -> None:
            waiting.append(reply_of(line))
            if len(waiting) == 1000:
                # In another order than they were asked.
                await script.say(b"".join(msg(each, each) for each in reversed(waiting)))

        script.answer = answer
        answers = await asyncio.gather(*(wire.request(f"s.{n}") for n in range(1000)))
        assert all(found.subject.encode() == found.data for found in answers)
        assert len({found.data for found in answers}) == 1000


# --- Several answers to one request


async def test_answers_gather_until_the_last() -> None:
    async with talking() as (script, wire):

        async def answer(script: Script, line: bytes) -> None:
            for n in range(3):
                await script.say(msg(reply_of(line), b"%d" % n))
            await script.say(hmsg(reply_of(line), b"NATS/1.0 204 EOB\r\n\r\n", b""))
            await script.say(msg(reply_of(line), b"too late"))

        script.answer = answer
        found = await wire.exchange(
            lambda reply: publish_line("s", b"", reply=reply), last=lambda m: status(m) != 0
        )
        assert [each.data for each in found] == [b"0", b"1", b"2", b""]
        await wire.request("again")


async def test_a_pull_ends_with_its_count_or_a_status() -> None:
    ack = b"$JS.ACK.S.C.1.%d.1.1700000000000000000.0"

    async with talking() as (script, wire):

        async def answer(script: Script, line: bytes) -> None:
            count = 3 if b'"batch":3' in line else 2
            for n in range(count):
                await script.say(msg(b"tw.x.%d" % n, b"job", reply=ack % n))
            if count < 3:
                await script.say(hmsg(reply_of(line), b"NATS/1.0 404 No Messages\r\n\r\n", b""))

        script.answer = answer
        for count, expected in [(3, (3, True)), (5, (2, False))]:
            messages, more = await wire.pull("S", "C", count, 9999)
            assert (len(messages), more) == expected


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("words", "left"), [(b"Message Size Exceeds MaxBytes", 3), (b"Batch Completed", 0)]
)
async def test_a_pull_that_ends_by_its_limits_has_all_that_was_delivered(
    words: bytes, left: int, early: bool
) -> None:
    """In a cluster the end of a pull can come before the messages that it counts."""
    ack = b"$JS.ACK.S.C.1.%d.1.1700000000000000000.0"

    async with talking() as (script, wire):

        async def answer(script: Script, line: bytes) -> None:
            said = b"NATS/1.0 409 %s\r\nNats-Pending-Messages: %d\r\n\r\n" % (words, left)
            end = hmsg(reply_of(line), said, b"")
            messages = [msg(b"tw.x.%d" % n, b"job", reply=ack % n) for n in range(5 - left)]
            for each in [end, *messages] if early else [*messages, end]:
                await script.say(each)

        script.answer = answer
        for _ in range(2):
            messages, more = await wire.pull("S", "C", 5, 40)
            assert ([each.subject for each in messages], more) == (
                [f"tw.x.{n}" for n in range(5 - left)],
                True,
            )


async def test_what_comes_after_a_pull_has_ended_is_not_dropped() -> None:
    async with talking() as (script, wire):
        strays: asyncio.Queue[str] = asyncio.Queue()
        wire.on_stray = lambda message: strays.put_nowait(message.subject)

        async def answer(script: Script, line: bytes) -> None:
            await script.say(hmsg(reply_of(line), b"NATS/1.0 404 No Messages\r\n\r\n", b""))
            await script.say(msg(b"tw.late", b"job", reply=b"$JS.ACK.S.C.1.5.1.17.0"))

        script.answer = answer
        assert await wire.pull("S", "C", 5, 9999) == ([], False)
        assert await soon(strays) == "tw.late"


async def test_what_a_lost_pull_had_got_is_not_dropped() -> None:
    async with talking() as (script, wire):
        strays: list[str] = []
        wire.on_stray = lambda message: strays.append(message.subject)

        async def answer(script: Script, line: bytes) -> None:
            await script.say(msg(b"tw.one", b"job", reply=b"$JS.ACK.S.C.1.5.1.17.0"))
            await soon(reads)
            script.cut()

        reads = reads_of(wire)
        script.answer = answer
        with pytest.raises(StoreUnavailable):
            await wire.pull("S", "C", 5, 9999)
        assert strays == ["tw.one"]


async def test_what_a_pull_that_was_given_up_had_got_is_not_dropped() -> None:
    async with talking() as (script, wire):
        strays: list[str] = []
        wire.on_stray = lambda message: strays.append(message.subject)

        async def answer(script: Script, line: bytes) -> None:
            await script.say(msg(b"tw.one", b"job", reply=b"$JS.ACK.S.C.1.5.1.17.0"))

        script.answer = answer
        reads = reads_of(wire)
        pull = asyncio.create_task(wire.pull("S", "C", 5, 9999))
        await soon(reads)
        pull.cancel()
        await asyncio.gather(pull, return_exceptions=True)
        assert strays == ["tw.one"]


async def test_pulls_of_two_streams_at_once_are_told_apart() -> None:
    """Shards have consumers of the same names."""
    async with talking() as (script, wire):
        asked: list[bytes] = []

        async def answer(script: Script, line: bytes) -> None:
            asked.append(line.split(b".")[5])
            # Once both are asked, the second one answers first.
            for stream in reversed(asked) if len(asked) == 2 else ():
                ack = b"$JS.ACK.%s.C.1.1.1.17.0" % stream
                await script.say(msg(b"tw." + stream, b"job", reply=ack))

        script.answer = answer
        (one, _), (two, _) = await asyncio.gather(
            wire.pull("S1", "C", 1, 9999), wire.pull("S2", "C", 1, 9999)
        )
        assert [each.subject for each in one] == ["tw.S1"]
        assert [each.subject for each in two] == ["tw.S2"]


# --- Refusals


async def test_a_forbidden_publish_fails_at_once_and_alone() -> None:
    async with talking() as (script, wire):

        async def answer(script: Script, line: bytes) -> None:
            subject = line.split()[1]
            if subject == b"secret.s":
                words = b'Permissions Violation for Publish to "secret.s"'
                await script.say(b"-ERR '%s'\r\n" % words)
            else:
                # The refusal of the other has arrived by now.
                await soon(reads)
                await script.say(msg(reply_of(line), b"fine"))

        reads = reads_of(wire)
        script.answer = answer
        # Before an answer would be given up.
        async with asyncio.timeout(nats_wire.ANSWER_S / 2):
            denied, fine = await asyncio.gather(
                wire.request("secret.s"), wire.request("secret.so"), return_exceptions=True
            )
        assert isinstance(denied, Denied) and "publish to 'secret.s'" in str(denied)
        assert isinstance(fine, Message) and fine.data == b"fine"


async def test_a_connection_refused_at_first_is_not_tried_again() -> None:
    script = Script()
    script.info = INFO + b"-ERR 'Authorization Violation'\r\n"
    await script.open()
    wire = Wire([script.place])
    with pytest.raises(Denied, match="Authorization Violation"):
        await wire.open()
    assert script.connections == 1
    await wire.close()
    await script.close()


async def test_why_a_connection_is_refused_later_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The password was changed: calls should say so, and not only that the server is away."""
    monkeypatch.setattr(nats_wire, "RETURN_S", 0.1)
    async with talking() as (script, wire):
        script.info = INFO + b"-ERR 'Authorization Violation'\r\n"
        script.cut()
        # It has been refused once, and tries again.
        await script.connected(3)
        with pytest.raises(StoreError, match="Authorization Violation"):
            await wire.request("s")


# --- The connection, lost and found


async def test_whoever_waits_for_an_answer_learns_that_it_will_not_come() -> None:
    async with talking() as (script, wire):
        waiting = [asyncio.create_task(wire.request(f"s.{n}")) for n in range(3)]
        await script.hears(b"PUB s.", times=3)
        script.cut()
        async with asyncio.timeout(nats_wire.ANSWER_S / 2):
            answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, StoreUnavailable) for each in answers), answers


async def test_subscriptions_and_requests_go_on_over_the_next_connection() -> None:
    async def answer(script: Script, line: bytes) -> None:
        await script.say(msg(reply_of(line), b"here"))

    async with talking() as (script, wire):
        script.answer = answer
        ups: list[int] = []
        wire.on_up = lambda: ups.append(1)
        wire.subscribe("news.*", lambda _: None)
        for lost in range(1, 4):
            script.heard.clear()
            script.cut()
            await script.connected(lost + 1)
            assert (await wire.request("s")).data == b"here"
            subscribed = [line for line in script.heard if line.startswith(b"SUB")]
            assert len(subscribed) == 2
        assert len(ups) == 3


async def test_a_server_that_stays_silent_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "PING_S", 0.1)
    async with talking() as (script, _):
        script.silent = True
        script.info = INFO + b"PONG\r\n"
        await script.connected(3)


async def test_an_answer_that_does_not_come_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "ANSWER_S", 0.1)
    async with talking() as (_, wire):
        with pytest.raises(StoreUnavailable, match="did not answer within"):
            await wire.request("s")
        assert wire._pending == {}


async def test_nodes_that_are_told_of_later_are_tried_when_the_first_is_gone() -> None:
    """Also after the connection was lost and found before."""
    other = Script()
    await other.open()
    script = Script()
    await script.open()
    wire = Wire([script.place])
    try:
        await wire.open()
        ups: asyncio.Queue[bool] = asyncio.Queue()
        wire.on_up = lambda: ups.put_nowait(True)
        script.cut()
        await soon(ups)
        reads = reads_of(wire)
        await script.say(b'INFO {"connect_urls":["%s:%d"]}\r\n' % (b"127.0.0.1", other.place[1]))
        await soon(reads)
        await script.close()
        await other.connected(1)
    finally:
        await wire.close()
        await other.close()


@pytest.mark.parametrize(
    "nonsense",
    [
        pytest.param(b"MSG \r\n", id="a message without a size"),
        pytest.param(b"MSG a 1 x\r\n", id="a size that is none"),
        pytest.param(b"INFO nothing\r\n", id="no JSON"),
        pytest.param(b"HMSG a 1 99 3\r\nabc\r\n", id="headers longer than all"),
        pytest.param(b"GARBAGE\r\n", id="an unknown word"),
        pytest.param(b"\r\n", id="an empty line"),
    ],
)
async def test_nonsense_does_not_end_it_for_good(nonsense: bytes) -> None:
    """At worst the client reconnects."""

    async def answer(script: Script, line: bytes) -> None:
        await script.say(msg(reply_of(line), b"here"))

    async with talking() as (script, wire):
        reads = reads_of(wire)
        await script.say(nonsense)
        await soon(reads)
        script.answer = answer
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    assert (await wire.request("s")).data == b"here"
                    return


async def test_a_handler_that_fails_does_not_end_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: Message) -> None:
        raise ValueError("no job at all")

    async def answer(script: Script, line: bytes) -> None:
        await script.say(msg(reply_of(line), b"here"))

    async with talking() as (script, wire):
        wire.on_stray = fail
        with caplog.at_level(logging.ERROR):
            reads = reads_of(wire)
            await script.say(msg(b"tw.stray", b"not a job", reply=b"$JS.ACK.S.C.1.5.1.17.0"))
            await soon(reads)
        script.answer = answer
        async with asyncio.timeout(SOON_S):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    assert (await wire.request("s")).data == b"here"
                    return


async def test_closing_ends_everything_and_may_be_repeated() -> None:
    async with talking() as (script, wire):
        waiting = asyncio.create_task(wire.request("s"))
        await script.hears(b"PUB s ")
        await wire.close()
        await wire.close()
        with pytest.raises(StoreUnavailable):
            await waiting
        with pytest.raises(StoreUnavailable, match="closed"):
            await wire.request("s")
