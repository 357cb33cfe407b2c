"""The text of metrics, the small HTTP server, and addresses."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_text

from tickwheel import App, BadConfig, StoreUnavailable, Task
from tickwheel.address import http_address, nth_address
from tickwheel.engine.counts import NAMES, OTHER
from tickwheel.operate import overview, responder
from tickwheel.operate.metrics import Metrics
from tickwheel.operate.overview import Overviews, bounded, view
from tickwheel.operate.responder import PlainRequest, PlainResponse, parse_request, responding
from tickwheel.store import QueueInfo
from tickwheel.stores.memory import MemoryStore

OPEN = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(text: bytes, parse: Any = parse_text) -> dict[Sample, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parse(text.decode())
        for sample in family.samples
    }


def shop(**options: Any) -> App:
    app = App(MemoryStore(), name="shop", **options)

    @app.task(queue="mail")
    async def send(to: str) -> None: ...

    return app


def send_of(app: App) -> Task[[str], None, Any]:
    return Task(app._access, app.tasks.get("send"))


# --- The text


async def test_a_worker_s_numbers_are_there_as_text_and_as_openmetrics() -> None:
    app = shop(objective="99% within 1h")
    metrics = Metrics(app)
    async with app, app.worker():
        await (await send_of(app).enqueue("a")).result(timeout=30)
        plain, plain_type = await metrics.text()
        open_, open_type = await metrics.text(OPEN)
    assert plain_type.startswith("text/plain")
    assert open_type.startswith("application/openmetrics-text") and open_.endswith(b"# EOF\n")
    for found in (samples(plain), samples(open_, parse_open)):
        both = ("queue", "mail"), ("task", "send")
        assert found["tickwheel_jobs_added_total", both] == 1
        assert found["tickwheel_jobs_done_total", both] == 1
        assert found["tickwheel_jobs_dead_total", both] == 0
        assert found["tickwheel_punctuality_seconds_count", both[1:]] == 1
        assert found["tickwheel_punctuality_seconds_bucket", (("le", "+Inf"), both[1])] == 1
        assert found["tickwheel_objective_ratio", ()] == 0.99
        assert found["tickwheel_objective_seconds", ()] == 3600
        assert found["tickwheel_objective_good_total", both[1:]] == 1
        assert found["tickwheel_store_up", ()] == 1
        assert found["tickwheel_queue_jobs", (("queue", "mail"), ("state", "done"))] == 1
        assert found["tickwheel_slots_free", (("pool", "async"),)] == 100
        assert found["tickwheel_store_calls_total", (("method", "settle"),)] == 1


@pytest.mark.parametrize(
    "accept", ["text/plain;version=x", "application/openmetrics-text;version="]
)
async def test_an_odd_accept_header_gets_an_answer(accept: str) -> None:
    app = shop()
    async with app:
        body, _ = await Metrics(app).text(accept)
    assert b"tickwheel_store_up 1.0" in body


async def test_without_an_objective_there_is_none() -> None:
    app = shop()
    async with app:
        body, _ = await Metrics(app).text()
    assert b"objective" not in body


async def test_a_store_that_does_not_answer_is_down_and_the_rest_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = shop()
    metrics = Metrics(app)

    async def away(self: Any) -> Any:
        raise StoreUnavailable("no")

    async def hangs(self: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(overview, "PATIENCE_S", 0.01)
    monkeypatch.setattr(overview, "FRESH_S", 0)
    async with app:
        await app.client()
        for broken in (away, hangs):
            monkeypatch.setattr("tickwheel.client.Client.queues", broken)
            found = samples((await metrics.text())[0])
            assert found["tickwheel_store_up", ()] == 0
            assert not [name for name, _ in found if name.startswith("tickwheel_queue")]
            assert ("tickwheel_empty_claims_total", ()) in found


async def test_the_store_is_asked_once_for_many_at_the_same_time() -> None:
    app = shop()
    counts = app.enable_metrics()
    overviews = Overviews(app)
    async with app:
        found = await asyncio.gather(*(overviews.get() for _ in range(20)))
        await overviews.get()
    assert counts.calls["queues"].count == 1
    assert all(each is found[0] for each in found)


def test_due_jobs_of_a_queue_and_the_oldest_of_them() -> None:
    app = shop()
    job = send_of(app).job("a")
    jobs = [msgspec.structs.replace(job, due_ms=due_ms) for due_ms in (1_000, 4_000, 9_000)]
    queue = QueueInfo(name="mail", waiting=3)
    found = view(queue, [], jobs, 5_000)
    assert (found.due, found.oldest_due_ms) == (2, 4_000)
    found = view(queue, [], None, 5_000)
    assert (found.due, found.oldest_due_ms) == (None, None)
    found = view(QueueInfo(name="mail"), [], None, 5_000)
    assert (found.due, found.oldest_due_ms) == (0, 0)


def test_queues_beyond_the_limit_are_counted_together() -> None:
    views = [view(QueueInfo(name=f"q{n:04}", dead=1), [], (), 0) for n in range(NAMES + 50)]
    found = bounded(views)
    assert len(found) == NAMES + 1
    assert found[-1].info.name == OTHER and found[-1].info.dead == 50


def test_without_the_library_the_extra_is_named() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import tickwheel.operate.metrics"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'tickwheel[metrics]'" in ended.stderr


# --- The server


async def ask(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def hello(accept: str) -> PlainResponse:
    return PlainResponse(200, f"hello {accept}\n".encode())


async def broken(accept: str) -> PlainResponse:
    raise RuntimeError("a secret")


ROUTES: Mapping[str, responder.Route] = {"/hello": hello, "/broken": broken}


@pytest.mark.parametrize(
    "request_, status, body",
    [
        (b"GET /hello HTTP/1.1\r\nACCEPT: a\r\naccept: b\r\n\r\n", 200, b"hello a, b\n"),
        (b"GET /hello?x=1 HTTP/1.0\r\n\r\n", 200, b"hello \n"),
        (b"HEAD /hello HTTP/1.1\r\n\r\n", 200, b""),
        (b"GET /other HTTP/1.1\r\n\r\n", 404, b"not found; there is /hello, /broken\n"),
        (b"POST /hello HTTP/1.1\r\n\r\n", 405, b"use GET\n"),
        (b"GET /broken HTTP/1.1\r\n\r\n", 500, b"an error occurred; the log has it\n"),
        (b"nonsense\r\n\r\n", 400, b"not an HTTP/1.1 request\n"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400, b"not an HTTP/1.1 request\n"),
        (b"\xff\x00 / HTTP/2\r\n\r\n", 400, b"not an HTTP/1.1 request\n"),
    ],
)
async def test_each_request_gets_its_answer(request_: bytes, status: int, body: bytes) -> None:
    async with responding("127.0.0.1", 0, ROUTES) as port:
        head, _, found = (await ask(port, request_)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and found == body
    assert b"\r\nConnection: close" in head


async def test_a_request_that_is_too_large_is_refused() -> None:
    async with responding("127.0.0.1", 0, ROUTES) as port:
        head = await ask(port, b"GET /hello HTTP/1.1\r\n" + b"x" * responder.HEAD_LIMIT)
    assert head.startswith(b"HTTP/1.1 431 ")


async def test_a_client_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responder, "EXCHANGE_S", 0.05)
    async with responding("127.0.0.1", 0, ROUTES) as port:
        assert await ask(port, b"GET /hel") == b""


async def test_too_many_connections_are_refused_and_the_end_waits_for_none() -> None:
    async with responding("127.0.0.1", 0, ROUTES) as port:
        silent = [
            await asyncio.open_connection("127.0.0.1", port) for _ in range(responder.CONNECTIONS)
        ]
        answer = await ask(port, b"GET /hello HTTP/1.1\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
    for reader, writer in silent:
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()


async def test_an_address_in_use_is_said() -> None:
    async with responding("127.0.0.1", 0, ROUTES) as port:
        with pytest.raises(BadConfig, match=f"http=127.0.0.1:{port} can't be used"):
            async with responding("127.0.0.1", port, ROUTES):
                pass


def test_a_request_is_read() -> None:
    assert parse_request(b"GET /a?b HTTP/1.1\r\nAccept: c\r\n\r\n") == PlainRequest(
        "GET", "/a", "c"
    )


# --- Addresses


@pytest.mark.parametrize(
    "text, host, port",
    [
        (":9100", "127.0.0.1", 9100),
        ("9100", "127.0.0.1", 9100),
        ("0.0.0.0:9100", "0.0.0.0", 9100),
        ("[::1]:9100", "::1", 9100),
        ("my-host.example:0", "my-host.example", 0),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int) -> None:
    assert http_address(text) == (host, port)


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":65536", ":99999", "a b:1", "http://host:1", "::1:80", "-1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match=r"^http="):
        http_address(text)


def test_each_process_has_a_port_of_its_own() -> None:
    assert [nth_address(":9100", n) for n in (1, 2, 3)] == [
        "127.0.0.1:9100",
        "127.0.0.1:9101",
        "127.0.0.1:9102",
    ]
    assert nth_address("[::1]:9100", 2) == "[::1]:9101"
    assert nth_address(":0", 2) == "127.0.0.1:0"
    with pytest.raises(BadConfig, match="3 processes need as many ports"):
        http_address(":65534", processes=3)
