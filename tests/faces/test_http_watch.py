"""Watching documents: what comes first, what changes, and what ends a stream."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from events import watching
from http_server import PATIENCE_S, problem, served, shop
from worker_process import Command, environment, folder, until

from tickwheel.errors import StoreUnavailable
from tickwheel.http import api as api_module, server, service, streaming, streams, watch
from tickwheel.http.asgi import OPERATIONS
from tickwheel.http.service import Service
from tickwheel.operate.keys import Keys

__all__ = ["folder"]

JOBS = "/v1/jobs?limit=10"
STATS = "/v1/stats"


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many streams the server counts."""
    made: list[streams.Streams] = []

    class Counted(streams.Streams):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(service, "Streams", Counted)
    return lambda: sum(each._open.total() for each in made)


# --- What is told


async def test_first_the_documents_and_then_what_changes(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add(id="first", delay="1h")
        async with watching(its.client, [JOBS, STATS]) as told:
            await told.until(lambda: len(told.documents) == 2)
            assert told.documents[JOBS] == (await its.get(JOBS)).json()
            assert told.documents[STATS] == (await its.get(STATS)).json()
            await its.add(id="second", delay="1h")
            await told.until(lambda: len(told.documents[JOBS]["jobs"]) == 2)
            await its.post("/v1/jobs/first/cancel")
            await told.until(lambda: told.documents[STATS]["cancelled"] == 1)
            await told.until(lambda: "cancelled" in str(told.documents[JOBS]))
            assert told.documents[JOBS] == (await its.get(JOBS)).json()
            assert told.problems == {}
        # Each is sent whole only once.
        assert sorted(data["path"] for name, data in told.events if name == "document") == [
            JOBS,
            STATS,
        ]


async def test_nothing_is_sent_for_what_stays_the_same_but_a_beat(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its, watching(its.client, ["/v1/queues"]) as told:
        assert (await told.next())[0] == "document"
        for _ in range(2):
            assert await told.next() == ("beat", {})


async def test_a_beat_comes_while_a_document_is_long_in_coming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "BEAT_S", 0.01)
    app = shop(tmp_path)
    gate = asyncio.Event()
    async with served(app) as its, app:
        store: Any = (await app.client()).store
        queues = store.queues

        async def slow() -> Any:
            await gate.wait()
            return await queues()

        monkeypatch.setattr(store, "queues", slow)
        async with watching(its.client, ["/v1/queues", "/v1/schedules"], every=60) as told:
            await told.until(lambda: ("beat", {}) in told.events)
            # The other one did not wait for it.
            await told.until(lambda: "/v1/schedules" in told.documents)
            assert "/v1/queues" not in told.documents
            gate.set()
            await told.until(lambda: "/v1/queues" in told.documents)


async def test_big_numbers_arrive_exactly(tmp_path: Path) -> None:
    big = 2**53 + 1
    async with served(shop(tmp_path)) as its, watching(its.client, [JOBS]) as told:
        await its.add(delay="1h", id="a", arguments={"order": big})
        await told.until(lambda: told.documents.get(JOBS, {}).get("jobs"))
        await its.add(delay="1h", id="b", arguments={"order": 10**40 + 1})
        await told.until(lambda: len(told.documents[JOBS]["jobs"]) == 2)
        orders = [job["arguments"]["order"] for job in told.documents[JOBS]["jobs"]]
        assert orders == [big, 10**40 + 1]


async def test_a_large_document_comes_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "COMPARED_BYTES", 10)
    async with served(shop(tmp_path)) as its, watching(its.client, [STATS]) as told:
        await told.next()
        await its.add(delay="1h")
        await told.until(lambda: told.documents[STATS]["waiting"] == 1)
        assert {name for name, _ in told.events} - {"beat"} == {"document"}


def test_a_document_comes_whole_if_that_is_shorter() -> None:
    said = watch._changed("/p", b'{"a":1,"b":2,"c":3}', b'{"d":4,"e":5,"f":6}')
    assert said == b'event: document\ndata: {"path":"/p","document":{"d":4,"e":5,"f":6}}\n\n'
    # Nor is it compared if it is too deep for that.
    deep = b"[" * 5000 + b"%d" + b"]" * 5000
    assert watch._changed("/p", deep % 1, deep % 2).startswith(b"event: document")  # type: ignore[union-attr]


async def test_names_of_any_kind_are_found_by_their_quoted_path(tmp_path: Path) -> None:
    id = "a/b?c=d&é <b>"
    path = f"/v1/jobs/{quote(id, safe='')}"
    async with served(shop(tmp_path)) as its:
        await its.add(id=id, delay="1h")
        async with watching(its.client, [path]) as told:
            await told.until(lambda: told.documents)
            assert told.documents[path]["id"] == id


# --- Problems


async def test_a_problem_of_one_path_is_its_own(tmp_path: Path) -> None:
    wrong = {
        "/v1/jobs/nope": "not-found",
        "/v1/jobs?limit=0": "bad-request",
        "/v1/nope": "not-found",
        "/v1/jobs/é": "bad-request",
        # Not for streams: no JSON, or no data.
        "/metrics": "not-found",
        "/v1/openapi.json": "not-found",
        "/v1/session": "not-found",
        "/healthz": "not-found",
        "/v1/watch?path=/v1/jobs": "not-found",
        "v1/jobs": "not-found",
    }
    async with served(shop(tmp_path)) as its, watching(its.client, [STATS, *wrong]) as told:
        await told.until(lambda: len(told.problems) == len(wrong) and told.documents)
        for path, code in wrong.items():
            assert told.problems[path]["type"] == f"urn:tickwheel:problem:{code}", path
        # Once, not again and again.
        before = len(told.events)
        await told.until(lambda: told.events[-1][0] == "beat")
        assert [name for name, _ in told.events[before:]] == ["beat"]
        await its.add(id="nope", delay="1h")
        await told.until(lambda: "/v1/jobs/nope" in told.documents)


async def test_while_the_store_is_away_the_stream_lives_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app, watching(its.client, ["/v1/queues", JOBS]) as told:
        await told.until(lambda: len(told.documents) == 2)
        store: Any = (await app.client()).store

        async def away(*_: object, **__: object) -> Any:
            raise StoreUnavailable("postgresql://ann:hunter2@db/shop: connection refused")

        with monkeypatch.context() as patch:
            patch.setattr(store, "queues", away)
            await told.until(lambda: "/v1/queues" in told.problems)
            assert told.problems["/v1/queues"]["status"] == 503
            assert "hunter2" not in str(told.events)
            await its.add(delay="1h")
            await told.until(lambda: told.documents[JOBS]["jobs"])
        del told.documents["/v1/queues"]
        await told.until(lambda: "/v1/queues" in told.documents)


async def test_a_bug_is_a_problem_of_its_path_without_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app:
        store: Any = (await app.client()).store

        async def broken() -> Any:
            raise ZeroDivisionError("secret words")

        with monkeypatch.context() as patch:
            patch.setattr(store, "queues", broken)
            async with watching(its.client, ["/v1/queues"]) as told:
                await told.until(lambda: told.problems)
        found = told.problems["/v1/queues"]
        assert found["status"] == 500 and "secret" not in str(found)
        assert found["detail"].split()[-1] in caplog.text


@pytest.mark.parametrize(
    "query, words",
    [
        ("", "'path' is missing"),
        ("every=0&path=/v1/stats", "'every'"),
        ("every=61&path=/v1/stats", "'every'"),
        ("every=1&every=2&path=/v1/stats", "given twice"),
        ("&".join(["path=/v1/stats"] * 17), "'path'"),
        ("path=", "'path'"),
    ],
)
async def test_what_can_not_be_watched_is_refused(
    tmp_path: Path, query: str, words: str, count: Callable[[], int]
) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.get(f"/v1/watch?{query}")
        assert words in problem(answer, 400, "bad-request")
        assert count() == 0


# --- Who may see what


async def test_a_stream_shows_what_its_key_may_see(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.add(delay="1h", arguments={"order": 1, "password": "hunter2"})
        seen = await its.add("send", delay="1h", arguments={"to": "ann"})
        key = await its.key("read", queues=["mail"])
        paths = [JOBS, STATS, "/v1/keys", "/v1/audit", "/v1/doctor"]
        async with watching(its.client, paths, headers=key) as told:
            await told.until(lambda: len(told.documents) + len(told.problems) == len(paths))
            assert [job["id"] for job in told.documents[JOBS]["jobs"]] == [seen]
            assert told.documents[STATS]["waiting"] == 1
            for path in paths[2:]:
                assert told.problems[path]["type"] == "urn:tickwheel:problem:forbidden"
        async with watching(its.client, [JOBS], headers=await its.key("read")) as told:
            await told.until(lambda: told.documents)
            assert len(told.documents[JOBS]["jobs"]) == 2 and "hunter2" not in str(told.events)
        answer = await its.get(f"/v1/watch?path={STATS}", headers=await its.key("enqueue"))
        problem(answer, 403, "forbidden")


async def test_every_document_can_be_watched(tmp_path: Path) -> None:
    """From the table itself: none is forgotten, and none answers otherwise than to a request."""
    async with served(shop(tmp_path)) as its:
        await its.add(id="x", delay="1h")
        form = {"task": "pack", "arguments": {"order": 1}, "every": "1h"}
        await its.ask("PUT", "/v1/schedules/x", json=form)
        for each in OPERATIONS:
            if each.method != "GET" or each.scope is None or each.media != "application/json":
                continue
            path = each.path.replace("{id}", "x").replace("{name}", "x")
            asked = await its.get(path)
            async with watching(its.client, [path], every=60) as told:
                await told.until(lambda: told.documents or told.problems)
            if asked.status_code == 200:
                assert told.documents[path].keys() == asked.json().keys(), path
            else:
                assert told.problems[path]["status"] == asked.status_code, path


async def test_a_stream_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key("read")
        async with watching(its.client, [STATS], headers=key) as told:
            await told.next()
            keys = Keys(await its.app.client())
            [revoked] = [each for each in await keys.list() if each.scopes == ("read",)]
            await keys.revoke(revoked.id)
            assert (await told.to_its_end())[-1] == "end"
        problem(await its.get(f"/v1/watch?path={STATS}", headers=key), 401, "unauthorized")


async def test_a_stream_counts_once_for_the_rate_of_its_key(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key("read", rate="1/h")
        async with watching(its.client, [STATS, JOBS], headers=key) as told:
            await told.until(lambda: ("beat", {}) in told.events)
            assert len(told.documents) == 2 and told.problems == {}
        problem(await its.get(f"/v1/watch?path={STATS}", headers=key), 429, "rate-limited")


# --- Limits


async def test_streams_are_counted_and_no_more_than_the_limit_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[[], int]
) -> None:
    monkeypatch.setattr(streams, "STREAMS_OF_KEY", 1)
    monkeypatch.setattr(streams, "STREAMS_MOST", 2)
    path = f"/v1/watch?path={STATS}"
    async with served(shop(tmp_path), keys=True) as its:
        second, third = await its.key("read"), await its.key("read")
        async with watching(its.client, [STATS]) as told:
            await told.next()
            refused = await its.get(path)
            problem(refused, 429, "rate-limited")
            assert refused.headers["retry-after"] == "5"
            async with watching(its.client, [STATS], headers=second):
                problem(await its.get(path, headers=third), 503, "overloaded")
        async with asyncio.timeout(PATIENCE_S):
            while count():
                await asyncio.sleep(0.01)
        async with watching(its.client, [STATS]) as told:
            await told.next()


async def test_a_stream_has_room_for_so_many_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "STREAM_BYTES", 2000)
    async with served(shop(tmp_path)) as its, watching(its.client, [JOBS, STATS]) as told:
        await told.until(lambda: len(told.documents) == 2)
        id = await its.add(delay="1h", arguments={"order": 1, "note": "x" * 2000})
        await told.until(lambda: JOBS in told.problems)
        assert "ask for fewer" in told.problems[JOBS]["detail"]
        del told.documents[JOBS]
        await its.post(f"/v1/jobs/{id}/cancel")
        await its.ask("DELETE", f"/v1/jobs/{id}")
        await told.until(lambda: JOBS in told.documents)


async def test_streams_of_one_key_share_what_they_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path)
    # The recorder reads them too.
    monkeypatch.setattr(Service, "record", lambda _: None)
    async with served(app, keys=True) as its, app, AsyncExitStack() as stack:
        other = await its.key("read")
        told = [
            await stack.enter_async_context(watching(its.client, ["/v1/queues"], headers=headers))
            for headers in (None, None, None, other)
        ]
        for each in told:
            await each.next()
        store: Any = (await app.client()).store
        queues, gate, asked = store.queues, asyncio.Event(), 0

        async def slow() -> Any:
            nonlocal asked
            asked += 1
            await gate.wait()
            return await queues()

        monkeypatch.setattr(store, "queues", slow)
        await its.add(queue="new", delay="1h")
        # All of them are reading now: they hear no more than beats that say so.
        for each in told:
            async with asyncio.timeout(PATIENCE_S):
                while each.events[-2:] != [("beat", {})] * 2:
                    await each.next()
        assert asked == 2
        gate.set()
        for each in told:
            async with asyncio.timeout(PATIENCE_S):
                while "new" not in str(each.documents):
                    await each.next()


async def test_a_client_that_goes_away_ends_its_stream(
    tmp_path: Path, count: Callable[[], int]
) -> None:
    async with served(shop(tmp_path)) as its:
        host, port = its.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"GET /v1/watch?every=60&path={STATS} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(PATIENCE_S):
            while not count():
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while count():
                await asyncio.sleep(0.01)


# Our server closes such a connection; in another one, the stream gives up.
@pytest.mark.parametrize("module, name", [(server, "READ_S"), (streaming, "SEND_S")])
async def test_a_client_that_does_not_read_is_dropped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[], int],
    module: ModuleType,
    name: str,
) -> None:
    monkeypatch.setattr(module, name, 0.2)
    # More than the system keeps for a connection.
    monkeypatch.setattr(watch, "STREAM_BYTES", 64 * 1024 * 1024)
    async with served(shop(tmp_path)) as its:
        for n in range(50):
            await its.add(arguments={"order": n, "note": "x" * 250_000}, delay="1h")
        host, port = its.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        head = f"GET /v1/watch?every=1&path={quote(JOBS + '0')} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(PATIENCE_S):
            while not count():
                await asyncio.sleep(0.01)
            while count():
                await asyncio.sleep(0.01)
        writer.close()


# --- The end


async def test_a_stream_ends_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LONGEST_S", 0.1)
    async with served(shop(tmp_path)) as its, watching(its.client, [STATS], every=60) as told:
        assert (await told.to_its_end())[-1] == "end"


async def test_a_stream_outlives_the_time_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(shop(tmp_path)) as its:
        monkeypatch.setattr(api_module, "REQUEST_S", 0.5)
        async with watching(its.client, [STATS]) as told:
            await told.until(lambda: told.events.count(("beat", {})) == 3)


async def test_a_head_request_has_no_events(tmp_path: Path, count: Callable[[], int]) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.ask("HEAD", f"/v1/watch?path={STATS}")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.status_code, answer.content) == (200, b"")
        assert count() == 0


async def test_a_server_that_stops_ends_its_streams_at_once(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with app, AsyncExitStack() as stack:
        its = await stack.enter_async_context(served(app))
        async with httpx.AsyncClient(base_url=its.url, timeout=PATIENCE_S) as own:
            async with watching(own, [STATS], every=60) as told:
                await told.next()
                closing = asyncio.create_task(stack.aclose())
                assert await told.to_its_end() == ["end"]
            # Its grace is ten seconds; nothing used them up.
            await asyncio.wait_for(closing, 5)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
async def test_sigterm_ends_streams_at_once(folder: Path) -> None:
    with Command(folder, "serve", "shop:app", "--port", "0") as process:
        await asyncio.to_thread(until, lambda: "pid " in process.said, "the banner")
        url = next(line.split()[1] for line in process.said.splitlines() if "dashboard" in line)
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            watching(client, [STATS], every=60) as told,
        ):
            await told.next()
            process.signal(signal.SIGTERM)
            assert await told.to_its_end() == ["end"]
        assert await asyncio.to_thread(process.code) == 0


ELSEWHERE = """
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount
from shop import app
site = Starlette(routes=[Mount("/tick", app.dashboard())])
uvicorn.run(site, port=0, log_level="info")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
async def test_in_another_server_streams_do_not_hold_up_its_end(folder: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ELSEWHERE),
        cwd=folder,
        env=environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while not (found := re.search(rb"http://[\d.]+:\d+", await process.stderr.readline())):
                pass
        url = f"{found[0].decode()}/tick"
        async with (
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
            watching(client, [STATS], every=60) as told,
        ):
            await told.next()
            process.terminate()
            assert await told.to_its_end() == ["end"]
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
