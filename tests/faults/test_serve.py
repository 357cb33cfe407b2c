"""`tickwheel serve` under load: stopped, killed, and with its store away. Nothing acknowledged is
lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from redis_server import RedisServer
from tickwheel import App

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="needs POSIX")]

PATIENCE_S = 30
CLIENTS = 8
# How many jobs are acknowledged before the fault.
BEFORE = 200


class Served:
    """`tickwheel serve` for a store alone, in a process of its own."""

    def __init__(self, folder: Path, store: str, *options: str) -> None:
        self._log = folder / "serve.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tickwheel", "serve", "--store", store),
                    *("--port", "0", "--log-level", "warning", *options),
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def url(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert self.process.poll() is None, self.log
                if found := re.search(r"api +(http://\S+)/v1/openapi.json", self.log):
                    return found[1]
                await asyncio.sleep(0.02)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


@asynccontextmanager
async def serving(folder: Path, store: str, *options: str) -> AsyncIterator[tuple[Served, str]]:
    server = Served(folder, store, *options)
    try:
        yield server, await server.url()
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(PATIENCE_S)


@dataclass
class Load:
    """Clients that add jobs one after the other, each with its own Idempotency-Key."""

    url: str
    # By key, the id of each job that was acknowledged; keys whose answer never came; refusals.
    acknowledged: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(CLIENTS):
                group.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE_S) as client:
            for count in range(100_000):
                key = f"{number}-{count}"
                try:
                    answer = await add(client, key)
                except httpx.TransportError:
                    self.unknown.append(key)
                    return
                if answer.status_code != 201:
                    self.refused.append(answer.status_code)
                    return
                self.acknowledged[key] = answer.json()["id"]


async def add(client: httpx.AsyncClient, key: str) -> httpx.Response:
    form = {"task": "pack", "arguments": {"order": key}, "delay": "1h"}
    return await client.post("/v1/jobs", json=form, headers={"Idempotency-Key": key})


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.005)


async def stored(store: str) -> set[str]:
    async with App(store) as app:
        return {job.id async for job in app.find_all()}


async def test_a_stop_under_load_answers_what_it_has_accepted(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with serving(tmp_path, store) as (server, url):
        load = Load(url)
        running = asyncio.create_task(load.run())
        await until(lambda: len(load.acknowledged) >= BEFORE)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 0, server.log
        await running
    assert load.refused == []
    assert set(load.acknowledged.values()) <= await stored(store)


async def test_a_request_under_way_is_answered_before_it_stops(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with serving(tmp_path, store) as (server, url):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"task": "pack", "id": "late", "delay": "1h"}'
        head = "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:5])
        await writer.drain()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/readyz")).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: not listening(host, int(port)))
        writer.write(body[5:])
        async with asyncio.timeout(PATIENCE_S):
            assert b" 201 " in await reader.readline()
        assert await server.ended() == 0, server.log
        writer.close()
    assert await stored(store) == {"late"}


async def test_a_killed_server_loses_nothing_and_a_repeat_adds_nothing_twice(
    tmp_path: Path,
) -> None:
    store = f"sqlite:///{tmp_path}/jobs.db"
    async with serving(tmp_path, store) as (server, url):
        load = Load(url)
        running = asyncio.create_task(load.run())
        await until(lambda: len(load.acknowledged) >= BEFORE)
        server.process.kill()
        await running
    assert load.unknown and set(load.acknowledged.values()) <= await stored(store)
    async with (
        serving(tmp_path, store) as (_, url),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for key in [*load.unknown, *list(load.acknowledged)[:20]]:
            answer = await add(client, key)
            assert answer.status_code in (200, 201)
            assert load.acknowledged.setdefault(key, answer.json()["id"]) == answer.json()["id"]
    assert await stored(store) == set(load.acknowledged.values())


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, f"sqlite:///{tmp_path}/jobs.db") as (server, url):
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        # A request that never arrives completely keeps it from stopping.
        writer.write(b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n")
        writer.write(b"Content-Type: application/json\r\n\r\n{")
        await writer.drain()
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/readyz")).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: not listening(host, int(port)))
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 143
        writer.close()


def listening(host: str, port: int) -> bool:
    import socket

    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


async def test_a_store_that_is_killed_is_away_and_then_back(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path, appendonly="yes", appendfsync="always").start()
    try:
        async with (
            serving(tmp_path, f"{redis.url}?timeout=1s") as (_, url),
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client,
        ):
            first = await add(client, "first")
            assert first.status_code == 201
            redis.kill()
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.headers["retry-after"]) == (503, "2")
            refused = await add(client, "second")
            assert refused.status_code == 503
            assert refused.json()["type"] == "urn:tickwheel:problem:store-unavailable"
            assert (await client.get("/healthz")).status_code == 200
            # Whoever is on call should see it, although it says who may.
            async with asyncio.timeout(PATIENCE_S):
                while "tickwheel_store_up 0.0" not in (await client.get("/metrics")).text:
                    await asyncio.sleep(0.2)
            redis.start()
            async with asyncio.timeout(PATIENCE_S):
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.05)
            assert (await add(client, "second")).status_code in (200, 201)
            assert (await client.get(first.headers["location"])).status_code == 200
    finally:
        redis.kill()
