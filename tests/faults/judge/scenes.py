"""The stores that are judged: their servers, their URLs, and what can go wrong with all of them.

A further store, or a further fault of one, is a method here and its name in `server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from freezing import freeze, thaw
from judge.faults import DISK, LINE, PROCESS
from postgres_server import PostgresServer
from redis_server import RedisCluster, RedisServer
from tickwheel.stores.nats.servers.cluster import Cluster, start_cluster
from tickwheel.stores.nats.servers.process import Server, start_server

# No file of a process grows beyond that while its disk is full. The record's are smaller.
FULL_BYTES = 128 * 1024


class Scene:
    """A store to be judged, in this folder."""

    # What can go wrong with a process, its line to the store included, and with the server.
    process: ClassVar[tuple[str, ...]] = (*PROCESS, *LINE)
    server: ClassVar[tuple[str, ...]] = ("killed", "restarted", "frozen", "full")
    # Those of the server that must cost nobody a lease, and so explain nothing.
    harmless: ClassVar[tuple[str, ...]] = ()
    # Ways to enqueue beyond the usual ones.
    ways: ClassVar[tuple[str, ...]] = ("outbox",)
    # How long after a fault clients may still feel it: until they have connected again.
    aftermath_s: ClassVar[float] = 3.0
    # A process that is frozen may hold what all others need.
    freezes_all: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0

    @property
    def has_line(self) -> bool:
        return not set(LINE).isdisjoint(self.process)

    @property
    def outbox(self) -> str:
        return f"sqlite:///{self.folder}/outbox.db"

    def url(self, port: int) -> str:
        """The store's URL through this port."""
        raise NotImplementedError

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def killed(self, seconds: float) -> None:
        """Killed, and back after that long."""
        raise NotImplementedError

    async def restarted(self, seconds: float) -> None:
        """Stopped in an orderly way, and back after that long."""
        raise NotImplementedError

    async def frozen(self, seconds: float) -> None:
        raise NotImplementedError

    async def full(self, seconds: float) -> None:
        """It takes nothing more."""
        raise NotImplementedError

    async def resharded(self, seconds: float) -> None:
        """The store's keys move to another node, one by one, for so long."""
        raise NotImplementedError


class Sqlite(Scene):
    process = (*PROCESS, *DISK)
    server = ()
    ways = ("outbox", "transaction", "rolled back")
    aftermath_s = 1.0
    # Frozen in mid-write it holds the file's lock.
    freezes_all = True

    def url(self, port: int) -> str:
        return f"sqlite:///{self.folder}/jobs.db"


class Redis(Scene):
    # A full server goes on with the jobs that it has.
    harmless = ("full",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server = RedisServer(folder, appendonly="yes", appendfsync="always")

    def url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}?timeout=2s"

    async def open(self) -> None:
        self._server.start()
        self.port = self._server.port

    async def close(self) -> None:
        self._server.stop()

    async def killed(self, seconds: float) -> None:
        await self._ended(self._server.kill, seconds)

    async def restarted(self, seconds: float) -> None:
        await self._ended(self._server.stop, seconds)

    async def _ended(self, end: Callable[[], None], seconds: float) -> None:
        await asyncio.to_thread(end)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._server.start)

    async def frozen(self, seconds: float) -> None:
        self._server.freeze()
        await asyncio.sleep(seconds)
        self._server.thaw()

    async def full(self, seconds: float) -> None:
        self._server.command("CONFIG", "SET", "maxmemory", "1")
        await asyncio.sleep(seconds)
        self._server.command("CONFIG", "SET", "maxmemory", "0")


class RedisSlots(Scene):
    """A cluster whose slots move. Clients talk to its nodes themselves, so there is no line of
    theirs to be cut."""

    process = tuple(PROCESS)
    server = ("resharded",)
    harmless = ("resharded",)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cluster = RedisCluster(folder, 3, appendonly="yes", appendfsync="always")
        self._home: RedisServer | None = None

    def url(self, port: int) -> str:
        return f"redis://127.0.0.1:{port}?cluster=true&namespace=shop&timeout=2s"

    async def open(self) -> None:
        await asyncio.to_thread(self._cluster.start)
        self.port = self._cluster.nodes[0].port

    async def close(self) -> None:
        self._cluster.stop()

    async def resharded(self, seconds: float) -> None:
        cluster, key = self._cluster, "tw:{shop}:schema"
        source = self._home or cluster.home_of(key)
        target = cluster.nodes[(cluster.nodes.index(source) + 1) % len(cluster.nodes)]
        slot = cluster.slot_of(key)
        keys = await asyncio.to_thread(cluster.begin_move, slot, source, target)
        for each in keys:
            await asyncio.to_thread(cluster.move, each, source, target)
            await asyncio.sleep(seconds / len(keys))
        await asyncio.to_thread(cluster.end_move, slot, target)
        self._home = target


class Postgres(Scene):
    ways = ("outbox", "transaction", "rolled back")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server = PostgresServer(fast=True)

    @property
    def outbox(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres?timeout=2s"

    def url(self, port: int) -> str:
        return f"postgresql://postgres@127.0.0.1:{port}/postgres?timeout=2s"

    async def open(self) -> None:
        await asyncio.to_thread(self._server.create)
        await asyncio.to_thread(self._server.start)
        self.port = self._server.port

    async def close(self) -> None:
        await asyncio.to_thread(self._server.remove)

    async def killed(self, seconds: float) -> None:
        await asyncio.to_thread(self._server.crash)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._server.start)

    async def restarted(self, seconds: float) -> None:
        await asyncio.to_thread(self._server.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._server.start)

    async def frozen(self, seconds: float) -> None:
        frozen = self._server.processes()
        for pid in frozen:
            _signal(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for pid in frozen:
            _signal(pid, signal.SIGCONT)

    async def full(self, seconds: float) -> None:
        """As hosted servers do it when their disk is full: they let nobody write."""
        await asyncio.to_thread(self._read_only, "on")
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._read_only, "off")

    def _read_only(self, value: str) -> None:
        self._server.execute(f"alter system set default_transaction_read_only = {value}")
        self._server.execute("select pg_reload_conf()")


class Nats(Scene):
    """Its disk is not filled here: the server gives JetStream up then, until it is restarted."""

    server = ("killed", "restarted", "frozen")
    # It waits for 5 s for an answer, which is longer than a lease lasts here.
    aftermath_s = 6.0
    _server: Server

    def url(self, port: int) -> str:
        return f"nats://127.0.0.1:{port}?durability=strict"

    async def open(self) -> None:
        self._server = await start_server(self.folder / "nats", durability="strict")
        self.port = int(self._server.url.rpartition(":")[2])

    async def close(self) -> None:
        await self._server.stop()

    async def killed(self, seconds: float) -> None:
        await self._server.kill()
        await asyncio.sleep(seconds)
        await self._server.start()

    async def restarted(self, seconds: float) -> None:
        await self._server.stop()
        await asyncio.sleep(seconds)
        await self._server.start()

    async def frozen(self, seconds: float) -> None:
        freeze(self._server.pid)
        await asyncio.sleep(seconds)
        thaw(self._server.pid)


class NatsCluster(Scene):
    """Three servers. What goes wrong goes wrong with one of them, each in its turn; clients know
    them all, so there is no line of theirs to be cut."""

    process = tuple(PROCESS)
    server = ("killed", "restarted", "frozen")
    # A new leader is chosen meanwhile, and those who were away catch up.
    aftermath_s = 15.0
    _cluster: Cluster

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._turns = itertools.count()

    def url(self, port: int) -> str:
        return f"{self._cluster.url}?durability=strict&replicas=3"

    async def open(self) -> None:
        self._cluster = await start_cluster(self.folder / "nats", 3, durability="strict")

    async def close(self) -> None:
        await self._cluster.stop()

    def _next(self) -> Server:
        return self._cluster.nodes[next(self._turns) % len(self._cluster.nodes)]

    async def killed(self, seconds: float) -> None:
        node = self._next()
        await node.kill()
        await asyncio.sleep(seconds)
        await node.start()

    async def restarted(self, seconds: float) -> None:
        node = self._next()
        await node.stop()
        await asyncio.sleep(seconds)
        await node.start()

    async def frozen(self, seconds: float) -> None:
        node = self._next()
        freeze(node.pid)
        await asyncio.sleep(seconds)
        thaw(node.pid)


SCENES: dict[str, type[Scene]] = {
    "sqlite": Sqlite,
    "redis": Redis,
    "redis-cluster": RedisSlots,
    "postgres": Postgres,
    "nats": Nats,
}
# Those that take a machine for themselves: only when they are named.
MORE: dict[str, type[Scene]] = {"nats-cluster": NatsCluster}


async def full_disk(pid: int, seconds: float) -> None:
    """Let no file of this process grow, as if its disk were full."""
    with contextlib.suppress(ProcessLookupError):
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, unlimited[1]))
        await asyncio.sleep(seconds)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)


def _signal(pid: int, which: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, which)
