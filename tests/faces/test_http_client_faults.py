"""The clients of the HTTP API when servers, connections and answers fail."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from http_faces import FACES, FaceName, Trouble, facing, plain, proxied
from http_server import PATIENCE_S, served, shop
from worker_process import Command, folder, until

from certificates import certificate
from tickwheel import (
    AccessDenied,
    App,
    BadConfig,
    HttpClient,
    JobsRefused,
    ResultTimeout,
    StoreError,
    StoreIncompatible,
    StoreUnavailable,
)
from tickwheel.http.server import Listening, serving
from tickwheel.http_client import exchange, wire
from tickwheel.http_client.exchange import pause_before

__all__ = ["folder"]

both = pytest.mark.parametrize("name", FACES)
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")

OVERLOADED = plain(
    "503 Service Unavailable",
    body=b'{"type":"urn:tickwheel:problem:overloaded","status":503,"detail":"full"}',
)
AWAY = plain(
    "503 Service Unavailable",
    body=b'{"type":"urn:tickwheel:problem:store-unavailable","status":503,"detail":"no word"}',
)


# --- Repeated


@both
@pytest.mark.parametrize(
    "trouble",
    [
        "drop",
        "lose",
        "cut",
        "behead",
        OVERLOADED,
        plain("503 Service Unavailable"),
        plain("429 Too Many Requests", "Retry-After: 0"),
    ],
    ids=["drop", "lose", "cut", "behead", "overloaded", "503", "429"],
)
async def test_a_job_is_added_once_whatever_happens_to_its_request(
    tmp_path: Path, name: FaceName, trouble: Trouble
) -> None:
    async with served(shop(tmp_path)) as its, proxied(its.url) as proxy:
        async with facing(name, proxy.url) as face:
            pack = face.client.task("pack").using(delay="1h")
            proxy.troubles = [trouble, trouble]
            assert (await face.do(pack.enqueue, order=1)).added
            proxy.troubles = [trouble, trouble]
            handles = await face.do(
                face.client.enqueue_many, [pack.job(order=2), pack.job(order=3)]
            )
            assert [each.added for each in handles] == [True, True]
        assert proxy.count == 6
        found = [info.arguments["order"] async for info in its.app.find_all()]
        assert sorted(found) == [1, 2, 3]


@both
async def test_a_connection_that_was_closed_while_idle_is_replaced(
    tmp_path: Path, name: FaceName
) -> None:
    async with served(shop(tmp_path)) as its, proxied(its.url) as proxy:
        async with facing(name, proxy.url, retry_for=0) as face:
            await face.do(face.client.queues)
            proxy.troubles = ["drop"]
            await face.do(face.client.queues)
        assert proxy.count == 3


@both
async def test_what_would_happen_twice_is_not_repeated(tmp_path: Path, name: FaceName) -> None:
    async with (
        served(shop(tmp_path)) as its,
        proxied(its.url) as proxy,
        facing(name, proxy.url) as face,
    ):
        client = face.client
        await face.do(client.schedules.put, "s", "pack", every="1h", arguments={"order": 1})
        job = await face.do(client.task("pack").using(delay="1h").enqueue, order=1)
        for verb, args in (
            (client.schedules.run, ("s",)),
            (client.schedules.delete, ("s",)),
            (client.cancel, (job,)),
            (client.rerun, (job,)),
            (client.delete, (job,)),
        ):
            proxy.count, proxy.troubles = 0, ["lose"]
            with pytest.raises(StoreUnavailable, match="unknown whether it acted"):
                await face.do(verb, *args)
            assert proxy.count == 1
        # The server can't say whether it acted, because its store didn't answer.
        proxy.count, proxy.troubles = 0, [AWAY]
        with pytest.raises(StoreUnavailable, match="no word"):
            await face.do(client.cancel, job)
        assert proxy.count == 1
        # The server says that it did nothing: then it is repeated.
        proxy.count, proxy.troubles = 0, [OVERLOADED]
        await face.do(client.cancel, "nope")
        assert proxy.count == 2


@both
@pytest.mark.parametrize(
    "answer, kind, words",
    [
        (plain("500 Internal Server Error"), BadConfig, "is the URL right"),
        (plain("404 Not Found", body=b"<html>"), BadConfig, "is the URL right"),
        (plain("502 Bad Gateway"), StoreUnavailable, "status 502"),
        (plain("302 Found", "Location: https://else"), BadConfig, "redirects to 'https://else'"),
        (plain("403 Forbidden"), AccessDenied, "not from the API"),
        (plain("200 OK", body=b"<html>"), StoreIncompatible, "can't be read"),
        (plain("200 OK", body=b'{"queues": [{}]}'), StoreIncompatible, "name"),
        (
            plain("500 Oh", body=b'{"type":"urn:tickwheel:problem:internal","status":500,'
                  b'"detail":"bug","request_id":"r1"}'),
            StoreError,
            r"bug \(request r1\)",
        ),
    ],
)  # fmt: skip
async def test_nothing_else_is_repeated(
    tmp_path: Path, name: FaceName, answer: bytes, kind: Any, words: str
) -> None:
    async with served(shop(tmp_path)) as its, proxied(its.url) as proxy:
        async with facing(name, proxy.url) as face:
            proxy.troubles = [answer]
            with pytest.raises(kind, match=words):
                await face.do(face.client.queues)
        assert proxy.count == 1


@both
async def test_a_server_that_asks_for_too_much_time_gets_none(
    tmp_path: Path, name: FaceName
) -> None:
    async with served(shop(tmp_path)) as its, proxied(its.url) as proxy:
        async with facing(name, proxy.url) as face:
            proxy.troubles = [plain("429 Too Many Requests", "Retry-After: 3600")]
            with pytest.raises(StoreUnavailable, match="429"):
                await face.do(face.client.queues)
        assert proxy.count == 1


@both
async def test_a_rate_is_waited_for(tmp_path: Path, name: FaceName) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.key("read", rate="2/s")
        async with facing(name, its.url, key=its.texts[-1]) as face:
            for _ in range(4):
                await face.do(face.client.queues)


def test_pauses_grow_within_bounds() -> None:
    assert [pause_before(tries, 0.0, 60, 1.0) for tries in range(3)] == [0.1, 0.2, 0.4]
    assert pause_before(100, 0.0, 60, 1.0) == 5.0
    assert pause_before(0, 0.0, 60, 0.0) == 0.05
    assert pause_before(0, 7.0, 60, 0.0) == 7.0
    assert pause_before(0, 7.0, 7.0, 0.0) is None
    assert pause_before(0, None, 60, 0.0) is None


# --- Limits


@both
@pytest.mark.parametrize("trouble", ["silent", "trickle"])
async def test_a_server_that_never_finishes_its_answer(
    tmp_path: Path, name: FaceName, trouble: Trouble
) -> None:
    async with (
        served(shop(tmp_path)) as its,
        proxied(its.url) as proxy,
        facing(name, proxy.url, timeout="200ms", retry_for=0) as face,
    ):
        proxy.troubles = [trouble]
        with pytest.raises(StoreUnavailable, match="timed out"):
            await face.do(face.client.queues)
        proxy.troubles = [trouble]
        with pytest.raises(StoreUnavailable, match="timed out"):
            await face.do(face.client.cancel, "nope")


@both
async def test_nobody_listens(name: FaceName) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with facing(name, f"http://127.0.0.1:{port}", retry_for="300ms") as face:
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1 port {port}: .*refused"):
            await face.do(face.client.queues)
        with pytest.raises(ResultTimeout, match="did not say within 0"):
            await face.do(face.client.job("x").result, timeout=0)


@both
async def test_a_huge_answer_is_not_read(
    tmp_path: Path, name: FaceName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ANSWER_BYTES", 10_000)
    async with served(shop(tmp_path)) as its, facing(name, its.url) as face:
        job = await face.do(face.client.task("pack").using(delay="1h").enqueue, order=1)
        assert await face.do(job.info)
        big = face.client.task("pack").using(delay="1h", id="big")
        await face.do(big.enqueue, order=1, note="x" * 10_000)
        with pytest.raises(StoreError, match="more than 10,000 bytes"):
            await face.do(face.client.job("big").info)
        assert await face.do(job.info)


async def test_threads_share_a_few_connections(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its, proxied(its.url) as proxy:
        with HttpClient(proxy.url, connections=2) as client, ThreadPoolExecutor(8) as threads:
            work = [asyncio.wrap_future(threads.submit(client.queues)) for _ in range(40)]
            assert await asyncio.gather(*work) == [[]] * 40
        assert (proxy.count, proxy.open_most) == (40, 2)


# --- TLS and paths


@both
async def test_certificates_are_verified(tmp_path: Path, name: FaceName) -> None:
    ca, cert, key = certificate(tmp_path / "tls")
    listening = Listening(port=0, tls_cert=str(cert), tls_key=str(key))
    async with serving(shop(tmp_path).http(), listening) as url:
        async with facing(name, url, ca_file=ca) as face:
            job = await face.do(face.client.task("pack").using(delay="1h").enqueue, order=1)
            assert (await face.do(job.info)).arguments == {"order": 1}
        async with facing(name, url) as face:
            with pytest.raises(BadConfig, match=r"is not trusted.*ca_file="):
                await face.do(face.client.queues)


@both
async def test_an_api_that_is_mounted_below_a_path(tmp_path: Path, name: FaceName) -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    outer = Starlette(routes=[Mount("/tick", shop(tmp_path).http())])
    async with serving(outer, Listening(port=0)) as url:
        async with facing(name, f"{url}/tick/") as face:
            job = await face.do(
                face.client.task("pack").using(id="a b/c", delay="1h").enqueue, order=1
            )
            assert (await face.do(job.info)).id == "a b/c"
        async with facing(name, f"{url}/tock") as face:
            with pytest.raises(BadConfig, match="is the URL right"):
                await face.do(face.client.queues)


# --- Secrets


@both
async def test_the_key_is_in_no_message(
    tmp_path: Path, name: FaceName, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    key = "tw_0123456789abcdef_" + "k" * 40
    echo = b'{"type":"urn:tickwheel:problem:invalid","status":422,"detail":"%s"}' % key.encode()
    async with (
        served(shop(tmp_path)) as its,
        proxied(its.url) as proxy,
        facing(name, proxy.url, key=key) as face,
    ):
        proxy.troubles = [plain("503 Oh", body=key.encode()), plain("422 Oh", body=echo)]
        with pytest.raises(Exception, match=r"\*\*\*") as refused:
            await face.do(face.client.queues)
        proxy.troubles = [plain("418 Oh", body=key.encode())]
        with pytest.raises(BadConfig) as strange:
            await face.do(face.client.queues)
        said = f"{refused.value!r} {strange.value!r} {face.client!r}"
    records = [each for each in caplog.records if each.name.startswith(exchange.log.name)]
    assert records, "this test has gone blind"
    assert key not in said + "".join(each.getMessage() for each in records)


# --- A server that is killed


@pytest.mark.slow
@posix
@both
async def test_a_server_killed_among_many_jobs_adds_none_twice_and_loses_none(
    folder: Path, name: FaceName
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    total, kill = 6000, threading.Event()
    argv = ("serve", "shop:app", "--port", port)

    def killed_and_started_again() -> Command:
        with Command(folder, *argv) as first:
            first.until_it_says("/v1/openapi.json")
            ready.set()
            assert kill.wait(PATIENCE_S)
        return Command(folder, *argv)

    ready = threading.Event()
    restarting = asyncio.create_task(asyncio.to_thread(killed_and_started_again))
    assert await asyncio.to_thread(ready.wait, PATIENCE_S)
    async with facing(name, f"http://127.0.0.1:{port}") as face:
        mark = face.client.task("mark").using(delay="1h")

        def jobs() -> Any:
            for number in range(total):
                if number == 2500:
                    kill.set()
                yield mark.job(name=str(number))

        handles = await face.do(face.client.enqueue_many, jobs())
    with await restarting as second:
        until(lambda: "/v1/openapi.json" in second.said, "the second server")
    assert len(handles) == total and all(each.added for each in handles)
    app = App(f"sqlite:///{folder}/jobs.db", name="shop")
    async with app:
        found = [info.arguments["name"] async for info in app.find_all()]
    assert sorted(map(int, found)) == list(range(total))


def test_the_words_of_a_refusal() -> None:
    refused = JobsRefused({1: StoreError("x")}, {0: object()})
    assert re.fullmatch("1 of 2 jobs were refused; number 1: x", str(refused))
