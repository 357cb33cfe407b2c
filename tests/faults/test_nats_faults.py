"""A NATS store on a bad line: requests and replies are lost, connections stall, users are refused.

Goal: after each of these every step is whole, a repeat of it changes nothing more, and an error
says what is wrong within its bound. Method: a real server behind a proxy that loses one message
after the other, in turn, until the whole step comes through.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats_books import Books, Words
from nats_lost import CASES, HOUR_MS, Case
from nats_raw import jetstream, raw_server
from proxy import Proxy, bad_line, subject_of

from stores import NatsHarness, nats_server
from tickwheel import App, JobHandle
from tickwheel.errors import StoreError, StoreIncompatible, StoreUnavailable, UsageError
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import Store, open_store
from tickwheel.stores.nats import (
    buckets,
    stream as nats_stream,
    wire as nats_wire,
)
from tickwheel.stores.nats.servers.process import start_server

# Waits are long: a busy machine takes its time to choose leaders.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# More messages than any step sends.
MOST = 60

# A ready message has the job as it was when it was written. Its claim checks that nothing else is
# stored for the id, but not that no later ready message was written: one that is delivered twice
# can count twice.


@pytest.fixture(autouse=True)
def started() -> None:
    """It can't be started from within the loop of a test."""
    nats_server()


@contextlib.asynccontextmanager
async def line() -> AsyncIterator[tuple[NatsHarness, Proxy, Store]]:
    """A harness with a good line, and a second handle on the same jobs behind a bad one."""
    h = NatsHarness()
    async with bad_line(nats_server().url) as proxy:
        await h.open()
        store = open_store(f"{proxy.url}/{h.namespace}")
        await store.open()
        try:
            yield h, proxy, store
        finally:
            proxy.heal()
            await store.close()
            await h.close()


# --- Lost messages


@pytest.mark.parametrize("what", ["reply", "request"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_that_loses_a_message_can_be_repeated(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_stream, "ACK_WAIT_S", 1)
    asyncio.run(lose_each(CASES[name], what))


async def lose_each(case: Case, what: str) -> None:
    for nth in range(1, MOST):
        async with line() as (h, proxy, store):
            before = await case.before(h)
            (proxy.lose_reply if what == "reply" else proxy.lose_request)(nth)
            failed, answer = await insist(case, h, store, before)
            proxy.heal()
            await case.after(h, before, answer, failed)
            if not failed:
                assert nth > 1, "nothing was ever lost"
                return
    raise AssertionError("it never came through")


async def insist(case: Case, h: NatsHarness, store: Store, before: object) -> tuple[int, object]:
    failed = 0
    async with asyncio.timeout(15):
        while True:
            try:
                return failed, await case.step(h, store, before)
            except StoreUnavailable:
                failed += 1
                assert failed < 3, "one lost message made it fail again and again"


async def test_a_claim_whose_acks_are_lost_counts_its_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its worker dies after the claim: the ready message that it never acknowledged comes back,
    with the job as it was before. It must not be handed out in that state."""
    monkeypatch.setattr(nats_stream, "ACK_WAIT_S", 1)
    async with line() as (h, proxy, store):
        await h.add(h.job())
        proxy.to_server = lambda message: not subject_of(message).startswith("$JS.ACK.")
        [lost] = await h.claim(1, store=store, lease_ms=500)
        assert lost.attempt == 1
        await asyncio.sleep(2)  # its lease is over, and its ready message has come back
        [held] = await h.claim(1, worker="bob")
        assert (held.attempt, held.takeovers) == (2, 1)


# --- What else a step promises


async def test_the_jobs_of_a_tick_keep_their_order() -> None:
    async with line() as (h, _, store):
        schedule = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=1))
        assert await store.fire(schedule, [h.job(f"s@{n}") for n in range(5)], next_ms=2)
        assert await h.claim_ids() == [f"s@{n}" for n in range(5)]


async def test_a_slow_bucket_is_remembered_until_it_is_full_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One a day is one a day, although buckets are forgotten after an hour."""
    monkeypatch.setattr(buckets, "BUCKET_TTL_S", 1)
    async with line() as (h, _, store):
        rate = Rate(1, HOUR_MS)
        assert await store.throttle("key", rate, now_ms=h.now) == 0
        await asyncio.sleep(2.5)
        assert await store.throttle("key", rate, now_ms=h.now) > 0


# --- Half-open


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "ANSWER_S", 1.0)
    monkeypatch.setattr(nats_wire, "PING_S", 0.5)


async def test_a_half_open_connection_is_noticed_and_replaced(hasty: None) -> None:
    async with line() as (h, proxy, store):
        await h.add(h.job())
        proxy.stall()
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.get(["job"])
        assert time.monotonic() - start < 3
        async with asyncio.timeout(5):
            while await tried(store) is None:
                await asyncio.sleep(0.05)
        assert proxy.connections == 2
        assert [job.id for job in await h.claim(store=store)] == ["job"]


async def tried(store: Store) -> object:
    try:
        return await store.get(["job"])
    except StoreUnavailable:
        return None


async def test_many_calls_on_a_half_open_connection_all_end_in_time(hasty: None) -> None:
    async with line() as (h, proxy, store):
        [held] = await h.claimed(h.job())
        proxy.stall()
        start = time.monotonic()
        answers = await asyncio.gather(
            store.add([h.job("new")]),
            h.claim(store=store),
            store.extend([held], now_ms=h.now, lease_ms=1_000),
            store.settle([h.done(held)], now_ms=h.now),
            store.cancel(["job"], now_ms=h.now),
            store.queues(),
            return_exceptions=True,
        )
        assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
        assert time.monotonic() - start < 4


async def test_news_come_again_after_the_line_was_cut() -> None:
    async with line() as (h, proxy, store):
        assert await h.claim(store=store) == []
        for n in range(3):
            proxy.cut()
            waiting = asyncio.create_task(
                store.wait(["default"], now_ms=h.now, until_ms=h.now + 20_000)
            )
            await asyncio.sleep(0.5)
            await h.add(h.job(f"{n}"))
            async with asyncio.timeout(3):
                await waiting
            assert [job.id for job in await h.claim(store=store)] == [f"{n}"]


async def test_a_line_that_is_away_makes_calls_fail_within_seconds() -> None:
    async with line() as (h, proxy, store):
        proxy.refuses = True
        proxy.cut()
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.add([h.job()])
        assert time.monotonic() - start < 4
        proxy.heal()
        async with asyncio.timeout(5):
            while await tried(store) is None:
                await asyncio.sleep(0.05)
        assert await store.add([h.job()]) == [True]


# --- Refused


def users(folder: Path) -> str:
    return (
        jetstream(folder)
        + """
authorization { users: [
  { user: all, password: p }
  { user: nostream, password: p, permissions: { publish: { deny: "$JS.API.STREAM.>" } } }
  { user: nowrite, password: p, permissions: { publish: { deny: "tw.>" } } }
  { user: noinbox, password: p, permissions: { subscribe: { deny: "_INBOX_noinbox.>" } } }
  { user: noack, password: p, permissions: { publish: { deny: "$JS.ACK.>" } } }
] }
"""
    )


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("nostream", r"does not allow this user to publish to '\$JS.API.STREAM"),
        ("nowrite", r"does not allow this user to publish to 'tw\."),
        ("noinbox", r"does not allow this user to subscribe to '_INBOX"),
    ],
)
async def test_what_a_user_may_not_do_is_said_at_once(
    tmp_path: Path, user: str, words: str
) -> None:
    async with raw_server(tmp_path, users(tmp_path)) as place:
        async with opened(f"nats://all:p@{place}/ns"):
            pass
        start = time.monotonic()
        with pytest.raises(StoreError, match=words) as caught:
            await open_store(f"nats://{user}:p@{place}/ns").open()
        assert time.monotonic() - start < 3
        assert not isinstance(caught.value, StoreUnavailable), "it would be tried for ever"


async def test_acks_that_are_forbidden_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for an ack, so nobody else would say why each job comes again and again."""
    h = Words()
    async with (
        raw_server(tmp_path, users(tmp_path)) as place,
        opened(f"nats://noack:p@{place}/ns") as store,
    ):
        await store.add([h.job()])
        with caplog.at_level(logging.WARNING), contextlib.suppress(StoreError):
            await h.claim(store=store)
            await asyncio.sleep(0.2)
    assert "$JS.ACK" in caplog.text


@pytest.mark.parametrize("login", ["all:wrong@", "nobody:p@", ""])
async def test_a_wrong_password_is_said_at_once_and_not_repeated(
    tmp_path: Path, login: str
) -> None:
    async with raw_server(tmp_path, users(tmp_path)) as place:
        with pytest.raises(StoreError, match="Authorization Violation") as caught:
            await open_store(f"nats://{login}{place}/ns").open()
    assert "wrong" not in str(caught.value)
    assert not isinstance(caught.value, StoreUnavailable)


async def test_a_server_without_jetstream_is_said(tmp_path: Path) -> None:
    async with raw_server(tmp_path, "") as place:
        with pytest.raises(StoreError, match="JetStream"):
            await open_store(f"nats://{place}").open()


async def test_an_account_without_jetstream_is_said(tmp_path: Path) -> None:
    accounts = "accounts { A: { users: [{user: a, password: p}] } }"
    async with raw_server(tmp_path, jetstream(tmp_path) + accounts) as place:
        with pytest.raises(StoreError, match="JetStream"):
            await open_store(f"nats://a:p@{place}").open()


async def test_nobody_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_wire, "CONNECT_S", 1.0)
    async with raw_server(tmp_path, "") as place:
        pass
    with pytest.raises(StoreUnavailable, match=place):
        await open_store(f"nats://{place}").open()


async def test_a_job_too_large_for_the_server_is_refused_by_size(tmp_path: Path) -> None:
    h = Words()
    async with (
        raw_server(tmp_path, jetstream(tmp_path)) as place,  # takes 1 MiB, as most do
        opened(f"nats://{place}/ns") as store,
    ):
        with pytest.raises(ValueError, match="max_payload"):
            await store.add([h.job(payload="x" * (1 << 20))])
        assert await store.add([h.job()]) == [True], "the connection survived it"
        # One among many: nothing is stored, so that a caller may repeat what is good.
        many = [h.job(f"large-{n}", payload="x" * 900_000) for n in range(20)]
        many.append(h.job("too large", payload="x" * (1 << 20)))
        with pytest.raises(ValueError, match="max_payload"):
            await store.add(many)
        assert await store.get([job.id for job in many]) == [None] * 21


async def test_a_job_too_large_for_the_server_fails_alone(tmp_path: Path) -> None:
    async with raw_server(tmp_path, jetstream(tmp_path)) as place:
        app = App(f"nats://{place}/ns", payload_limit=2 << 20)

        @app.task
        async def take(text: str) -> None: ...

        async with app:
            texts = ["x" * (1 << 20) if n == 42 else "x" for n in range(100)]
            answers = await asyncio.gather(*map(take.enqueue, texts), return_exceptions=True)
            stored = await app.find(limit=200)
    [refused] = [each for each in answers if isinstance(each, BaseException)]
    assert refused is answers[42] and isinstance(refused, UsageError)
    assert all(each.added for each in answers if isinstance(each, JobHandle))
    assert len(stored.jobs) == 99


async def test_an_old_server_is_refused() -> None:
    async with speaking(b'INFO {"version":"2.11.4","headers":true,"max_payload":1048576}') as place:
        with pytest.raises(StoreIncompatible, match=r"2\.11\.4.*2\.15 or later"):
            await open_store(f"nats://{place}").open()


async def test_something_else_than_nats_is_said() -> None:
    async with speaking(b"HTTP/1.1 400 Bad Request") as place:
        with pytest.raises(StoreUnavailable, match="is not a NATS server"):
            await open_store(f"nats://{place}").open()


@contextlib.asynccontextmanager
async def speaking(greeting: bytes) -> AsyncIterator[str]:
    """A server that greets, and answers every ping."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting + b" \r\n")
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = open_store(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


# --- The server is killed


async def test_a_deleted_record_is_not_back_after_the_server_was_killed(tmp_path: Path) -> None:
    server = await start_server(tmp_path / "server", durability="strict")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        store = await stack.enter_async_context(opened(server.url))
        for n in range(5):
            await store.put_records("key", {"kept": f"{n}", f"revoked-{n}": "secret"})
            assert await store.delete_records("key", [f"revoked-{n}"]) == [True]
            await server.kill()
            await server.start()
            async with asyncio.timeout(30):
                while True:
                    with contextlib.suppress(StoreUnavailable):
                        assert await store.records("key") == [("kept", f"{n}")]
                        break
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("seed", range(2))
async def test_a_server_killed_again_and_again_loses_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times `kill -9` under load. A server that is killed forgets what it had delivered."""
    monkeypatch.setattr(nats_stream, "ACK_WAIT_S", 2)
    dice = random.Random(seed)
    books = Books(dice)
    server = await start_server(tmp_path / "server", durability="strict")

    async def trouble() -> None:
        for _ in range(5):
            await asyncio.sleep(dice.uniform(0.5, 1.5))
            await server.kill()
            await asyncio.sleep(dice.uniform(0, 0.5))
            await server.start()
        await asyncio.sleep(0.5)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(server.stop)
        stores = [await stack.enter_async_context(opened(server.url)) for _ in range(6)]
        await books.day(stores, trouble)
        await books.judge(stores[0])
