"""HTTP manners: limits, problems for every mistake, and what happens while the store is away."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import PATIENCE_S, problem, served, shop
from starlette.applications import Starlette
from starlette.routing import Mount

from tickwheel.errors import StoreUnavailable
from tickwheel.http import api as api_module, asgi, operating, server
from tickwheel.http.problems import PREFIX, Kind
from tickwheel.http.server import Listening, serving
from tickwheel.stores.sqlite.store import SqliteStore

JSON = {"Content-Type": "application/json"}
DOCS = Path(__file__).parents[2] / "docs"


async def raw(url: str, text: bytes) -> bytes:
    """What the server answers to these bytes, until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(text)
        await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


# --- What can't be read


@pytest.mark.parametrize(
    "body, status, code",
    [
        (b"", 400, "bad-request"),
        (b"{", 400, "bad-request"),
        (b"[]", 422, "invalid"),
        (b"null", 422, "invalid"),
        (b'{"task": "pack", "arguments": {"order": NaN}}', 400, "bad-request"),
        (b'{"task": "pack", "arguments": {"order": 1e999}}', 422, "invalid"),
        (b'{"task": "pack", "arguments": {"note": "\\ud800"}}', 400, "bad-request"),
        (b'{"task": "\xff"}', 400, "bad-request"),
        (
            b'{"task": "pack", "arguments": {"order": ' + b"[" * 70 + b"]" * 70 + b"}}",
            422,
            "invalid",
        ),
        (b'{"task": "pack", "arguments": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 422, "invalid"),
        (
            b'{"task": "pack", "arguments": {"note": "' + b"x" * 1024 * 1024 + b'"}}',
            413,
            "too-large",
        ),
    ],
)
async def test_a_body_that_can_not_be_a_job(
    tmp_path: Path, body: bytes, status: int, code: str
) -> None:
    async with served(shop(tmp_path)) as its:
        problem(await its.ask("POST", "/v1/jobs", content=body, headers=JSON), status, code)
        assert (await its.get("/v1/jobs")).json()["jobs"] == []


async def test_a_large_body_is_refused_before_it_is_sent_and_while_it_is(tmp_path: Path) -> None:
    head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    async with served(shop(tmp_path)) as its:
        by_length = await raw(its.url, f"{head}Content-Length: 9999999\r\n\r\n".encode())
        assert b"413" in by_length.splitlines()[0] and b"too-large" in by_length
        part = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        streamed = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + part * 17
        assert b"413" in (await raw(its.url, streamed)).splitlines()[0]
        # A batch may be larger.
        pad = {"jobs": [{"task": "pack", "arguments": {"order": 1, "note": "x" * 900_000}}] * 2}
        assert (await its.post("/v1/jobs/batch", pad)).json()["added"] == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {},
    ],
)
async def test_only_json_in_utf_8_is_read(tmp_path: Path, headers: dict[str, str]) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.ask("POST", "/v1/jobs", content=b"{}", headers=headers)
        problem(answer, 415, "unsupported-media-type")


async def test_urls_and_headers_have_limits(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        problem(await its.get(f"/v1/jobs?cursor={'x' * 9000}"), 414, "uri-too-long")
        problem(await its.get("/v1/jobs", headers={"X": "x" * 17_000}), 431, "headers-too-large")
        many = {f"X-{n}": "1" for n in range(70)}
        problem(await its.get("/v1/jobs", headers=many), 431, "headers-too-large")


async def test_headers_that_never_end_close_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(shop(tmp_path)) as its:
        head = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX: "
        assert await raw(its.url, head + b"x" * 70_000) == b""
        monkeypatch.setattr(server, "HEAD_S", 0.1)
        assert await raw(its.url, b"") == b""
        assert await raw(its.url, head) == b""
        # After a first request, too.
        first = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = await raw(its.url, first + head)
        assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "query, words",
    [
        ("limt=1", "no parameter 'limt' here; it has"),
        ("limit=1&limit=2", "given twice"),
        ("limit=0", "'limit'"),
        ("limit=x", "'limit'"),
        ("state=null", "'state'"),
        ("meta=customer", "name=value"),
        ("queue=%FF", "UTF-8"),
        ("&" * 40 + "limit=1", "query"),
    ],
)
async def test_a_query_is_checked(tmp_path: Path, query: str, words: str) -> None:
    async with served(shop(tmp_path)) as its:
        assert words in problem(await its.get(f"/v1/jobs?{query}"), 400, "bad-request")


async def test_an_operation_without_parameters_takes_none(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        assert "'all'" in problem(await its.get("/v1/queues?all=1"), 400, "bad-request")


async def test_paths_and_methods_that_no_operation_has(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        for path in ("/", "/v1", "/v2/jobs", "/v1/jobs/", "/v1//jobs", "/v1/jobs/a/b/c"):
            problem(await its.get(path), 404, "not-found")
        refused = await its.ask("PATCH", "/v1/jobs")
        problem(refused, 405, "method-not-allowed")
        assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}


async def test_a_body_that_does_not_arrive_ends_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    text = f"{head}Content-Length: 10\r\nConnection: close\r\n\r\n{{"
    async with served(shop(tmp_path)) as its:
        await its.add()
        monkeypatch.setattr(api_module, "REQUEST_S", 0.2)
        answer = await raw(its.url, text.encode())
        assert b"408" in answer.splitlines()[0] and b"request-timeout" in answer


async def test_too_many_requests_at_once_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(shop(tmp_path)) as its:
        monkeypatch.setattr(api_module, "REQUESTS_MOST", 0)
        refused = await its.get("/v1/queues")
        problem(refused, 503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        monkeypatch.undo()
        monkeypatch.setattr(api_module, "BODIES_MOST", 5)
        problem(await its.post("/v1/jobs", {"task": "pack"}), 503, "overloaded")
        monkeypatch.undo()
        await its.add()


# --- The store


async def test_a_store_that_is_slow_to_open_holds_up_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, opens = asyncio.Event(), 0
    open_store = SqliteStore.open

    async def slowly(store: SqliteStore) -> None:
        nonlocal opens
        opens += 1
        waiting = asyncio.ensure_future(opened.wait())
        # A disk that hangs can't be told to stop.
        while not waiting.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(waiting)
        await open_store(store)

    monkeypatch.setattr(SqliteStore, "open", slowly)
    monkeypatch.setattr(asgi, "OPEN_S", 0.05)
    app = shop(tmp_path).http()
    async with (
        serving(app, Listening(port=0)) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        monkeypatch.setattr(api_module, "REQUEST_S", 0.05)
        problem(await client.get("/v1/queues"), 503, "store-unavailable")
        opened.set()
        monkeypatch.undo()
        assert (await client.get("/v1/queues")).status_code == 200
    assert opens == 1


async def test_while_the_store_is_away_it_says_so_and_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app:
        await its.add(id="before")
        client = await app.client()
        store: Any = client.store

        async def away(*_: object, **__: object) -> Any:
            raise StoreUnavailable("postgresql://ann:hunter2@db/shop: connection refused")

        for name in ("get", "time_ns", "find", "queues", "cancel"):
            monkeypatch.setattr(store, name, away)
        monkeypatch.setattr(client._adding, "_flush", away)
        assert (await its.get("/healthz")).status_code == 200
        problem(await its.get("/readyz"), 503, "store-unavailable")
        form = {"task": "pack", "arguments": {"order": 1}}
        for answer in (
            await its.post("/v1/jobs", form),
            await its.get("/v1/jobs"),
            await its.get("/v1/queues"),
            await its.post("/v1/jobs/before/cancel"),
        ):
            problem(answer, 503, "store-unavailable")
            assert answer.headers["retry-after"] == "2"
            assert "hunter2" not in answer.text
        monkeypatch.undo()
        assert (await its.get("/readyz")).status_code == 200
        await its.add()


async def test_no_request_waits_longer_than_its_time_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_module, "REQUEST_S", 0.2)
    monkeypatch.setattr(operating, "READY_S", 0.1)
    app = shop(tmp_path)
    async with served(app) as its, app:
        store: Any = (await app.client()).store

        async def hang(*_: object, **__: object) -> Any:
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            for name in ("time_ns", "queues"):
                patch.setattr(store, name, hang)
            problem(await its.get("/readyz"), 503, "store-unavailable")
            assert "0.2 s" in problem(await its.get("/v1/queues"), 503, "store-unavailable")


async def test_a_bug_is_a_problem_without_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app:
        store: Any = (await app.client()).store

        async def broken() -> Any:
            raise ZeroDivisionError("secret words")

        with monkeypatch.context() as patch:
            patch.setattr(store, "queues", broken)
            answer = await its.get("/v1/queues")
        assert "secret" not in problem(answer, 500, "internal")
        assert answer.headers["x-request-id"] in caplog.text


# --- Described


def test_every_problem_is_documented() -> None:
    page = (DOCS / "problems.md").read_text()
    for kind in Kind:
        assert f"| `{PREFIX}{kind.code}` | {kind.status} | {kind.title}. {kind.meaning} |" in page


async def test_every_operation_is_described(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.get("/v1/openapi.json")
        found = answer.json()
    assert found["openapi"] == "3.1.0"
    operations = [each for path in found["paths"].values() for each in path.values()]
    assert len(operations) == len({each["operationId"] for each in operations}) > 30
    for each in operations:
        assert each["summary"] and each["description"], each["operationId"]
    assert found["components"]["schemas"]["NewJob"]["additionalProperties"] is False


async def test_it_works_below_another_path(tmp_path: Path) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    app = shop(tmp_path)
    outer = Starlette(routes=[Mount("/jobs-api", app.http())])
    transport = httpx.ASGITransport(outer, client=("127.0.0.1", 1))
    async with app, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        form = {"task": "pack", "arguments": {"order": 1}, "id": "a/b"}
        answer = await client.post("/jobs-api/v1/jobs", json=form)
        assert answer.status_code == 201, answer.text
        assert answer.headers["location"] == "/jobs-api/v1/jobs/a%2Fb"
        assert (await client.get(answer.headers["location"])).json()["id"] == "a/b"


# --- The end


async def test_a_server_does_not_end_before_the_requests_under_way(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with app, AsyncExitStack() as stack:
        its = await stack.enter_async_context(served(app))
        client = await app.client()
        add, gate, reached = client.store.add, asyncio.Event(), asyncio.Event()

        async def slow(jobs: Any) -> Any:
            reached.set()
            await gate.wait()
            return await add(jobs)

        client._adding._flush = slow
        form = {"task": "pack", "arguments": {"order": 1}}
        async with httpx.AsyncClient(base_url=its.url, timeout=PATIENCE_S) as own:
            first = asyncio.create_task(own.post("/v1/jobs", json=form))
            await asyncio.wait_for(reached.wait(), PATIENCE_S)
            closing = asyncio.create_task(stack.aclose())
            async with asyncio.timeout(PATIENCE_S):
                while await accepts(its.url):
                    await asyncio.sleep(0.01)
            # Were it not to wait, it would end now.
            await asyncio.wait([closing], timeout=0.3)
            assert not closing.done()
            gate.set()
            assert (await first).status_code == 201
            await asyncio.wait_for(closing, PATIENCE_S)


async def accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


async def test_an_answer_that_nobody_reads_is_not_kept_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "READ_S", 0.2)
    lost, before = asyncio.Queue[Any](), server._Protocol.connection_lost

    def noted(self: Any, error: Exception | None) -> None:
        lost.put_nowait(self.client)
        before(self, error)

    async with served(shop(tmp_path)) as its:
        for n in range(40):
            await its.add(arguments={"order": n, "note": "x" * 250_000}, delay="1h")
        monkeypatch.setattr(server._Protocol, "connection_lost", noted)
        host, port = its.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"GET /v1/jobs?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ours = writer.get_extra_info("sockname")
        async with asyncio.timeout(PATIENCE_S):
            while await lost.get() != ours:
                pass
        writer.close()


async def test_the_document_says_below_which_path_the_api_is(tmp_path: Path) -> None:
    app = shop(tmp_path)
    mounted = Starlette(routes=[Mount("/tick", app.http())])
    transport = httpx.ASGITransport(mounted)
    async with app, httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        document = (await client.get("/tick/v1/openapi.json")).json()
    assert document["servers"] == [{"url": "/tick"}]
