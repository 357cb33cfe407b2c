"""HTTP callbacks, sent by real workers to real receivers on loopback."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import standardwebhooks
import trustme
from aiohttp.abc import AbstractResolver
from command_line import Cli, cli

from receiver import Receiver, Request, answer, receiving
from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    Job,
    JobHandle,
    RetryPolicy,
    State,
    StoreError,
    webhooks,
)
from tickwheel.callbacks import Answer, Callbacks
from tickwheel.errors import StoreUnavailable
from tickwheel.testing import sandbox

__all__ = ["cli"]

KEY = webhooks.new_key()
# Retries at once, as often as a test needs.
SOON = RetryPolicy(retries=2, first="10ms", factor=1, jitter=0)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PATIENCE_S = 30


def callbacks_to(receiver: Receiver, **options: Any) -> Callbacks:
    options = {"keys": KEY, "allow": [receiver.url], "retries": SOON, **options}
    return Callbacks(App("memory://", name="test"), **options)


@asynccontextmanager
async def working(callbacks: Callbacks, **options: Any) -> AsyncIterator[App]:
    app = callbacks._app
    async with app, app.worker(**options):
        yield app


async def ended(job: JobHandle[Any]) -> Any:
    """The job's info, once it has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while not (info := await job.info()).state.ended:
            await asyncio.sleep(0.005)
    return info


async def tried(job: JobHandle[Any], times: int = 1) -> Any:
    """The job's info, once so many of its runs have ended."""
    async with asyncio.timeout(PATIENCE_S):
        while len((info := await job.info()).history) < times:
            await asyncio.sleep(0.005)
    return info


# --- What the receiver gets


async def test_a_request_is_signed_and_says_which_job_it_is_of() -> None:
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver)):
        at = datetime.now(UTC)
        job = await callbacks.using(
            delay="100ms", id="order-42", queue="default", meta={"traceparent": TRACE}
        ).call(
            f"{receiver.url}/hooks?a=1",
            headers={"Authorization": "Bearer hunter22"},
            body={"order": 42},
        )
        result = await job.result(timeout=PATIENCE_S)
    assert (result.status, result.text) == (200, "") and result.ms >= 0
    [request] = receiver.requests
    assert (request.method, request.path) == ("POST", "/hooks?a=1")
    assert json.loads(request.body) == {"order": 42}
    headers = request.headers
    assert webhooks.verify(request.body, headers, KEY) == "order-42"
    standardwebhooks.Webhook(KEY).verify(request.body, headers)
    due, sent = (datetime.fromisoformat(headers[f"tickwheel-{x}"]) for x in ("due", "sent"))
    assert at < due <= sent and due.microsecond % 1000 == 0
    assert int(headers["webhook-timestamp"]) == int(sent.timestamp())
    expected = {
        "authorization": "Bearer hunter22",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "idempotency-key": "order-42",
        "tickwheel-job": "order-42",
        "tickwheel-queue": "default",
        "tickwheel-attempt": "1",
        "traceparent": TRACE,
    }
    assert expected.items() <= headers.items()
    assert headers["user-agent"].startswith("tickwheel/")
    assert "accept" not in headers and "cookie" not in headers


async def test_an_id_that_no_header_can_carry_is_hashed() -> None:
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver)):
        for id in ("a.b", "ü 1"):
            job = await callbacks.using(id=id).call(receiver.url)
            await job.result(timeout=PATIENCE_S)
    ids = [webhooks.verify(each.body, each.headers, KEY) for each in receiver.requests]
    assert len({*ids}) == 2 and all(id.startswith("job_") for id in ids)
    assert [each.headers["tickwheel-job"] for each in receiver.requests] == ["a.b", "%C3%BC%201"]


async def test_each_customer_can_have_a_key_of_their_own() -> None:
    own = {"7": webhooks.new_key(), "8": webhooks.new_key()}

    def key_of(job: Job) -> str:
        return own[(job.meta or {})["customer"]]

    async with receiving() as receiver, working(callbacks := callbacks_to(receiver, keys=key_of)):
        for count, customer in enumerate(own, start=1):
            using = callbacks.using(meta={"customer": customer})
            job = await using.call(receiver.url, on_done=f"{receiver.url}/done")
            await job.result(timeout=PATIENCE_S)
            await receiver.until(2 * count)
    keys = [own["7"], own["7"], own["8"], own["8"]]
    for request, key in zip(receiver.requests, keys, strict=True):
        assert webhooks.verify(request.body, request.headers, key)


async def test_without_keys_nothing_is_signed() -> None:
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver, keys=())):
        await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
    assert "webhook-signature" not in receiver.requests[0].headers
    assert "webhook-id" in receiver.requests[0].headers


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "POST", "HEAD"])
async def test_other_methods_and_any_bytes_can_be_sent(method: str) -> None:
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver)):
        body = None if method in ("GET", "HEAD") else b"\0\xff"
        job = await callbacks.call(receiver.url, method=method, body=body)
        await job.result(timeout=PATIENCE_S)
    [request] = receiver.requests
    assert (request.method, request.body) == (method, body or b"")
    assert webhooks.verify(request.body, request.headers, KEY)
    assert "content-type" not in request.headers


async def test_many_can_be_enqueued_at_once_and_use_few_connections() -> None:
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver)) as app:
        jobs = [callbacks.job(receiver.url, body=str(n)) for n in range(200)]
        for job in await app.enqueue_many(jobs):
            await job.result(timeout=PATIENCE_S)
    assert {each.body for each in receiver.requests} == {str(n).encode() for n in range(200)}
    assert len(receiver.requests) == 200 and receiver.connections <= 90
    assert receiver.open_connections == 0 or await closed(receiver)


async def closed(receiver: Receiver) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        while receiver.open_connections:
            await asyncio.sleep(0.005)
    return True


def test_callers_without_an_event_loop_can_enqueue() -> None:
    callbacks = Callbacks(App("memory://", name="test"), keys=KEY)
    with sandbox(callbacks._app) as box:
        callbacks.using(delay="1h", id="x").call_sync("https://example.com/", body="a")
        callbacks.call_sync("https://example.com/")
        [job] = [each for each in box.jobs() if each.id == "x"]
        assert job.arguments["url"] == "https://example.com/" and job.arguments["body"] == "a"


async def test_a_schedule_can_send_callbacks() -> None:
    async with receiving() as receiver, working(callbacks_to(receiver)) as app:
        await app.schedules.put(
            "nightly", task="http.call", every="1s", arguments={"url": f"{receiver.url}/tick"}
        )
        [request] = (await receiver.until(1))[:1]
    assert webhooks.verify(request.body, request.headers, KEY)


# --- What is refused at once


async def test_what_is_not_allowed_is_refused_when_the_job_is_made() -> None:
    callbacks = Callbacks(App("memory://", name="test"))
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"url": "http://127.0.0.1/"}, "loopback"),
        ({"url": "https://example.com:22/"}, "port 22"),
        ({"url": "https://example.com/", "method": "TRACE"}, "method"),
        ({"url": "https://example.com/", "headers": {"Host": "x"}}, "can't be set"),
        ({"url": "https://example.com/", "headers": {"a": "x\r\ny"}}, "line break"),
        ({"url": "https://example.com/", "body": b"x" * 300_000}, "300,000 bytes"),
        ({"url": "https://example.com/", "on_done": "http://[::1]/"}, "on_done: ::1 is a loop"),
        ({"url": "https://example.com/", "on_dead": "ftp://x"}, "on_dead: must start with"),
    ]
    with pytest.raises(BadArguments, match="did you mean body"):
        callbacks.job("https://example.com/", bodie=1)
    for arguments, why in mistakes:
        with pytest.raises(BadArguments, match=why):
            callbacks.job(**arguments)
        with pytest.raises(BadArguments, match=why):
            await callbacks.call(**arguments)
    async with callbacks._app as app:
        assert (await app.find()).jobs == []


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "secret"},
        {"keys": webhooks.new_key_pair()[1]},
        {"allow": "example.com"},
        {"allow": ["http://x/y"]},
        {"per_host": 0},
        {"connections": True},
        {"break_after": -1},
        {"timeout": "2h"},
        {"timeout": 0},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig):
        Callbacks(App("memory://", name="test"), **options)
    with pytest.raises(BadArguments, match="did you mean allow"):
        Callbacks(App("memory://", name="test"), alow=[])  # type: ignore[call-arg]


async def test_what_another_program_enqueued_is_checked_when_it_runs() -> None:
    async with receiving() as receiver:
        callbacks = Callbacks(App("memory://", name="test"), keys=KEY)
        async with working(callbacks):
            for arguments in (
                {"url": f"{receiver.url}/"},
                {"url": "https://example.com/", "headers": {"host": "x"}},
                {"url": "https://example.com/", "method": "CONNECT"},
            ):
                info = await ended(await callbacks.task.enqueue(**arguments))
                assert info.state is State.DEAD and info.failures == 1
        # Another port of an address that is listed.
        async with receiving() as other, working(callbacks := callbacks_to(other)):
            info = await ended(await callbacks.task.enqueue(f"{receiver.url}/"))
            assert info.state is State.DEAD and "not allowed" in info.error
    assert receiver.requests == []


# --- What answers mean


def each_status(status: int, *headers: str) -> Callable[[Request], bytes]:
    return lambda _: answer(status, b"some words", *headers)


@pytest.mark.parametrize("status", [300, 302, 307, 400, 401, 404, 410])
async def test_an_answer_that_will_not_change_is_the_end(status: int) -> None:
    elsewhere = "location: http://127.0.0.1:1/elsewhere"
    async with (
        receiving(each_status(status, elsewhere)) as receiver,
        working(callbacks := callbacks_to(receiver)),
    ):
        info = await ended(await callbacks.call(receiver.url))
    assert info.state is State.DEAD and len(receiver.requests) == 1
    assert f"127.0.0.1:{receiver.port} answered {status} in " in info.error
    assert info.error.endswith("ms: some words")


async def test_a_redirect_is_not_followed() -> None:
    async with receiving() as inner:
        there = f"location: {inner.url}/secret"
        async with (
            receiving(each_status(302, there)) as receiver,
            working(callbacks := callbacks_to(receiver)),
        ):
            assert (await ended(await callbacks.call(receiver.url))).state is State.DEAD
    assert inner.requests == []


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
async def test_an_answer_that_may_change_is_retried(status: int) -> None:
    answers = iter([answer(status), answer(status), answer(201, b"thanks")])
    async with (
        receiving(lambda _: next(answers)) as receiver,
        working(callbacks := callbacks_to(receiver)),
    ):
        job = await callbacks.call(receiver.url, body="x")
        result = await job.result(timeout=PATIENCE_S)
        info = await job.info()
    assert (result.status, result.text) == (201, "thanks")
    assert [each.outcome.value for each in info.history] == ["retry", "retry", "done"]
    assert f"answered {status} in" in (info.history[0].error or "")
    assert [each.headers["tickwheel-attempt"] for each in receiver.requests] == ["1", "2", "3"]
    # One request, sent three times.
    for name in ("webhook-id", "idempotency-key", "tickwheel-due"):
        assert len({each.headers[name] for each in receiver.requests}) == 1
    assert all(webhooks.verify(each.body, each.headers, KEY) for each in receiver.requests)


@pytest.mark.parametrize("asked", ["0", "Wed, 18 Nov 2020 06:00:00 GMT"])
async def test_retry_after_does_not_make_retries_come_sooner(asked: str) -> None:
    async with (
        receiving(each_status(503, f"retry-after: {asked}")) as receiver,
        working(callbacks := callbacks_to(receiver, retries=3)),
    ):
        info = await tried(await callbacks.call(receiver.url))
    wait_s = info.due.timestamp() - info.history[0].ended_ms / 1000
    assert info.state is State.WAITING and wait_s >= 4


async def test_retry_after_is_honoured() -> None:
    async with (
        receiving(each_status(429, "retry-after: 3600")) as receiver,
        working(callbacks := callbacks_to(receiver)),
    ):
        info = await tried(await callbacks.call(receiver.url))
    wait_s = info.due.timestamp() - info.history[0].ended_ms / 1000
    assert info.state is State.WAITING and 3600 <= wait_s < 3601


async def never(_: Request) -> bytes | None:
    return None


def cut(request: Request) -> bytes:
    request.writer.transport.abort()
    return b""


async def garbage(_: Request) -> bytes:
    return b"no HTTP at all\r\n\r\n connection: close"


@pytest.mark.parametrize(
    "answers, why",
    [(never, "no answer within 200ms"), (cut, "closed|reset|answer"), (garbage, "no answer: ")],
)
async def test_no_answer_is_retried_and_then_the_end(answers: Any, why: str) -> None:
    async with (
        receiving(answers) as receiver,
        working(callbacks := callbacks_to(receiver, timeout="200ms", retries=1)),
    ):
        info = await tried(await callbacks.using(retries=0).call(receiver.url))
    assert info.state is State.DEAD and info.failures == 1
    assert any(word in info.error for word in why.split("|")), info.error


async def test_a_port_that_is_closed_is_retried() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        callbacks = Callbacks(App("memory://", name="test"), allow=[url], retries=SOON)
        async with working(callbacks):
            info = await ended(await callbacks.call(url))
    assert info.failures == 3 and "onnect" in info.error


async def test_a_certificate_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("localhost").configure_cert(context)
    async with receiving(tls=context) as receiver:
        url = f"https://localhost:{receiver.port}"
        callbacks = Callbacks(App("memory://", name="test"), allow=[url], retries=SOON)
        async with working(callbacks):
            info = await tried(await callbacks.call(url))
    assert "its certificate is not valid" in info.history[0].error and receiver.requests == []


async def test_only_the_start_of_an_answer_is_read() -> None:
    sent = 0

    async def endless(request: Request) -> bytes:
        nonlocal sent
        request.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while True:
            request.writer.write(b"10000\r\n" + b"x" * 65_536 + b"\r\n")
            await request.writer.drain()
            sent += 65_536

    async with receiving(endless) as receiver, working(callbacks := callbacks_to(receiver)):
        result = await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
        await closed(receiver)
    assert result.text == "x" * 1024
    assert sent < 20_000_000, "more than the buffers on the way can hold"


async def test_nothing_is_decompressed() -> None:
    bomb = gzip.compress(b"0" * 10_000_000)
    async with (
        receiving(lambda _: answer(200, bomb, "content-encoding: gzip")) as receiver,
        working(callbacks := callbacks_to(receiver)),
    ):
        result = await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
    assert "0000" not in result.text and len(result.text) <= 1024


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with receiving() as receiver, working(callbacks := callbacks_to(receiver)):
        await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)


# --- Addresses behind names


class Resolver(AbstractResolver):
    """Answers with the next of these addresses each time, and with the last from then on."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = [*answers]
        self.asked: list[str] = []

    async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            {
                "hostname": host,
                "host": each,
                "port": port,
                "family": socket.AF_INET6 if ":" in each else socket.AF_INET,
                "proto": 0,
                "flags": socket.AI_NUMERICHOST,
            }
            for each in found
        ]

    async def close(self) -> None: ...


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"],
)
@pytest.mark.parametrize("listed", [True, False])
async def test_a_public_name_that_leads_inside_is_dead_at_once(address: str, listed: bool) -> None:
    async with receiving() as receiver:
        callbacks = Callbacks(
            App("memory://", name="test"),
            allow=[f"evil.example.com:{receiver.port}"] if listed else None,
            resolver=Resolver([address]),
        )
        port = receiver.port if listed else 8080
        async with working(callbacks):
            info = await ended(await callbacks.call(f"http://evil.example.com:{port}/"))
    assert info.state is State.DEAD and info.failures == 1
    assert f"evil.example.com:{port} is refused: {address} is a" in info.error
    assert receiver.requests == [] and receiver.connections == 0


async def test_a_name_is_judged_by_each_of_its_addresses_at_each_attempt() -> None:
    """A name whose first answer is harmless, and whose second is not."""
    async with receiving(host="0.0.0.0") as receiver:
        resolver = Resolver(["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2", "127.0.0.1"])
        url = f"http://rebind.example.com:{receiver.port}"
        callbacks = Callbacks(
            App("memory://", name="test"),
            allow=[url, f"127.0.0.1:{receiver.port}"],
            resolver=resolver,
        )
        states = []
        for _ in range(3):
            async with working(callbacks):
                states.append((await ended(await callbacks.call(url))).state)
    assert states == [State.DONE, State.DEAD, State.DONE]
    peers = {each.writer.get_extra_info("sockname")[0] for each in receiver.requests}
    assert len(receiver.requests) == 2 and peers == {"127.0.0.1"}


async def test_a_name_that_can_not_be_resolved_is_retried() -> None:
    class Unknown(Resolver):
        async def resolve(self, host: str, port: int = 0, family: Any = 0) -> Any:
            raise OSError(None, "no such name")

    callbacks = Callbacks(App("memory://", name="test"), retries=SOON, resolver=Unknown([]))
    async with working(callbacks):
        info = await tried(await callbacks.call("https://nowhere.example.com/"))
    assert "its name could not be resolved" in info.history[0].error


async def test_a_private_name_that_is_listed_leads_inside() -> None:
    async with receiving(host="localhost") as receiver:
        url = f"http://localhost:{receiver.port}"
        callbacks = Callbacks(App("memory://", name="test"), allow=[url])
        async with working(callbacks):
            await (await callbacks.call(url)).result(timeout=PATIENCE_S)
    assert len(receiver.requests) == 1


# --- What follows


async def test_the_end_is_posted_once() -> None:
    async with (
        receiving(lambda r: answer(404 if r.path == "/bad" else 200, b"word")) as receiver,
        working(callbacks := callbacks_to(receiver)) as app,
    ):
        ends: Any = {"on_done": f"{receiver.url}/done?t=1", "on_dead": f"{receiver.url}/dead"}
        good = await callbacks.using(id="good").call(f"{receiver.url}/good?secret=1", **ends)
        bad = await callbacks.using(id="bad").call(f"{receiver.url}/bad", **ends)
        [done] = await receiver.until(1, "/done?t=1")
        [dead] = await receiver.until(1, "/dead")
        await ended(bad)
        # A second end of the same kind posts nothing new.
        await app.rerun([good, bad])
        await receiver.until(2, "/good?secret=1")
        await receiver.until(2, "/bad")
        for job in (good, bad):
            await ended(job)
    assert len(receiver.to("/done?t=1")) == len(receiver.to("/dead")) == 1
    assert webhooks.verify(done.body, done.headers, KEY) == "good:done"
    told = json.loads(done.body)
    assert told["type"] == "job.done" and told["data"]["status"] == 200
    assert told["data"]["url"] == f"{receiver.url}/good" and told["data"]["id"] == "good"
    assert webhooks.verify(dead.body, dead.headers, KEY) == "bad:dead"
    assert "answered 404" in json.loads(dead.body)["data"]["error"]


async def test_on_dead_is_posted_when_the_retries_are_used_up() -> None:
    async with (
        receiving(lambda r: answer(503 if r.path == "/bad" else 200)) as receiver,
        working(callbacks := callbacks_to(receiver)),
    ):
        await callbacks.call(
            f"{receiver.url}/bad",
            on_dead=f"{receiver.url}/dead",
            on_done=f"{receiver.url}/done",
        )
        [dead] = await receiver.until(1, "/dead")
    assert len(receiver.to("/bad")) == 3 and receiver.to("/done") == []
    assert json.loads(dead.body)["data"]["attempts"] == 3


async def lose(app: App, times: int) -> None:
    """Let the workers of the only job die while they run it."""
    store = (await app.client()).store
    for n in range(times):
        now_ms = (await app.client()).clock.now_ms() - (times - n) * 1_000
        [job] = await store.claim(["default"], worker=f"w{n}", limit=1, now_ms=now_ms, lease_ms=500)
        started = msgspec.structs.replace(job, started_ms=now_ms)
        assert await store.extend([started], now_ms=now_ms, lease_ms=500) != [None]


async def test_on_dead_is_posted_for_a_job_that_is_dead_because_its_workers_died() -> None:
    async with (
        receiving() as receiver,
        (callbacks := callbacks_to(receiver))._app as app,
    ):
        await callbacks.using(id="killer", at=datetime(2020, 1, 1, tzinfo=UTC)).call(
            receiver.url, on_dead=f"{receiver.url}/dead"
        )
        await lose(app, times=5)
        async with app.worker():
            [dead] = await receiver.until(1, "/dead")
    assert receiver.to("/") == [], "it is not called again"
    told = json.loads(dead.body)
    assert webhooks.verify(dead.body, dead.headers, KEY) == "killer:dead"
    assert "died or froze 5 times" in told["data"]["error"] and told["data"]["attempts"] == 5


async def test_on_dead_is_posted_for_arguments_that_do_not_fit_and_for_failing_middleware() -> None:
    async with receiving() as receiver, (callbacks := callbacks_to(receiver))._app as app:

        @app.middleware
        async def around(job: Any, call_next: Any) -> Any:
            if job.id == "outside":
                raise RuntimeError("no such tenant")
            return await call_next()

        good = callbacks.using(id="unfit", retries=0).job(
            receiver.url, on_dead=f"{receiver.url}/dead"
        )
        payload = json.dumps(json.loads(good.payload) | {"headers": 5})
        unfit = msgspec.structs.replace(good, payload=payload)
        outside = msgspec.structs.replace(good, id="outside")
        await app.enqueue_many([unfit, outside])
        async with app.worker():
            dead = await receiver.until(2, "/dead")
    told = {each["id"]: each["error"] for each in (json.loads(r.body)["data"] for r in dead)}
    assert "no such tenant" in told["outside"] and "headers" in told["unfit"]
    assert receiver.to("/") == []


async def test_nothing_is_posted_for_a_job_that_is_put_off_or_cancelled() -> None:
    async with (
        receiving(lambda r: answer(503)) as receiver,
        working(callbacks := callbacks_to(receiver, retries=RetryPolicy(first="1h"))) as app,
    ):
        ends: Any = {"on_done": f"{receiver.url}/end", "on_dead": f"{receiver.url}/end"}
        job = await callbacks.call(receiver.url, **ends)
        await tried(job)
        await job.cancel()
        assert (await ended(job)).state is State.CANCELLED
        assert len((await app.find()).jobs) == 1


async def test_an_end_is_not_written_until_what_follows_is_added() -> None:
    async with receiving() as receiver, (callbacks := callbacks_to(receiver))._app as app:
        store, adding = (await app.client()).store, 0
        add, full = store.add, StoreError("the store is full")

        async def failing(jobs: Any) -> Any:
            nonlocal adding
            adding += any(job.id == "a:done" for job in jobs)
            if 0 < adding <= 3:
                raise StoreUnavailable("away") if adding < 3 else full
            return await add(jobs)

        store.add = failing  # type: ignore[method-assign]
        job = await callbacks.using(id="a").call(receiver.url, on_done=f"{receiver.url}/done")
        other = await callbacks.using(id="b").call(receiver.url)
        async with app.worker():
            assert (await ended(other)).state is State.DONE
            [run] = (await tried(job)).history
            assert run.outcome == "snooze", "it runs again, because nothing follows yet"
            await receiver.until(1, "/done")
            assert (await ended(job)).state is State.DONE
    assert adding == 4


# --- Hosts that fail


async def test_a_host_that_keeps_failing_is_left_alone_and_costs_no_retries() -> None:
    healthy = asyncio.Event()

    async def answers(request: Request) -> bytes:
        return answer(200 if healthy.is_set() else 503)

    async with (
        receiving(answers) as receiver,
        working(callbacks := callbacks_to(receiver, break_after=2, break_for="300ms")),
    ):
        first = [await callbacks.using(retries=50).call(receiver.url) for _ in range(2)]
        await receiver.until(2)
        for job in first:
            await tried(job)
        others = [await callbacks.using(retries=0).call(receiver.url) for _ in range(20)]
        for job in others:
            info = await tried(job)
            assert info.history[0].outcome.value in ("snooze", "dead")
        healthy.set()
        infos = [await ended(job) for job in others]
    # Of those without retries, at most the probes were lost.
    assert sum(info.state is State.DONE for info in infos) >= 18
    assert all(info.failures == 0 for info in infos if info.state is State.DONE)


# --- Secrets


def test_secrets_are_not_in_logs_errors_or_lists(
    cli: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tickwheel")

    def echo(request: Request) -> bytes:
        said = request.headers["authorization"].encode() + request.headers["x-api-key"].encode()
        return answer(404, said)

    async def main() -> str:
        async with receiving(echo) as receiver:
            callbacks = Callbacks(App("sqlite:///jobs.db", name="test"), allow=[receiver.url])
            async with working(callbacks):
                job = await callbacks.using(id="secretive").call(
                    f"{receiver.url}/?token=hunter21",
                    headers={"authorization": "Bearer hunter22", "x-api-key": "hunter23"},
                    body={"password": "hunter24"},
                )
                return str((await ended(job)).error)

    error = asyncio.run(main())
    assert "hunter" not in error and "***" in error
    assert caplog.text and "hunter" not in caplog.text
    for command in (["jobs", "list"], ["jobs", "show", "secretive"]):
        for form in ([], ["-o", "json"]):
            shown = cli(*command, *form).out
            assert "http.call" in shown and "hunter" not in shown


# --- What is open


async def test_an_apps_own_lifespan_keeps_working_and_all_is_closed_at_the_end() -> None:
    events: list[str] = []
    async with receiving() as receiver:
        app = App("memory://", name="test")

        @app.lifespan
        async def own() -> AsyncIterator[str]:
            events.append("opened")
            yield "value"
            events.append("closed")

        callbacks = Callbacks(app, allow=[receiver.url])
        for _ in range(2):
            async with app, app.worker():
                await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
                assert receiver.open_connections == 1
            await closed(receiver)
        assert len(callbacks._senders) == 0
    assert events == ["opened", "closed"] * 2 and receiver.connections == 2


async def test_workers_of_one_loop_share_what_is_open() -> None:
    async with receiving() as receiver:
        callbacks = callbacks_to(receiver)
        async with callbacks._app as app, app.worker():
            async with app.worker():
                await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
            await (await callbacks.call(receiver.url)).result(timeout=PATIENCE_S)
    assert receiver.connections == 1


async def test_a_host_that_hangs_leaves_slots_of_a_small_worker_beside_a_large_one() -> None:
    async with receiving(lambda _: None) as hanging, receiving() as other:
        callbacks = callbacks_to(other, allow=[hanging.url, other.url])
        app = callbacks._app
        async with (
            app,
            app.worker(queues=["small"], concurrency=4, grace=0),
            app.worker(queues=["large"], concurrency=40, grace=0),
        ):
            small = callbacks.using(queue="small")
            stuck = await app.enqueue_many([small.job(hanging.url) for _ in range(8)])
            await hanging.until(2)
            await (await small.call(other.url)).result(timeout=PATIENCE_S)
            await app.cancel(stuck)
    assert len(hanging.requests) == 2


async def test_in_a_sandbox_a_callback_is_sent_too() -> None:
    async with receiving() as receiver:
        callbacks = callbacks_to(receiver)
        async with sandbox(callbacks._app) as box:
            await callbacks.using(delay="1h").call(receiver.url, on_done=f"{receiver.url}/done")
            [run, _] = await box.travel("1h")
            assert run.result == Answer(200, run.result.ms)
            assert len(receiver.to("/done")) == 1
        await closed(receiver)


def test_only_workers_need_the_http_client(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys; sys.modules['aiohttp'] = None\n"
        "from tickwheel import App, BadConfig\n"
        "from tickwheel.callbacks import Callbacks\n"
        "app = App('memory://'); callbacks = Callbacks(app)\n"
        "async def main():\n"
        "    async with app:\n"
        "        print(await callbacks.call('https://example.com/'))\n"
        "        try:\n"
        "            async with app.worker(): pass\n"
        "        except BadConfig as error: print(error)\n"
        "asyncio.run(main())\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<job " in ran.stdout and "pip install 'tickwheel[callbacks]'" in ran.stdout
