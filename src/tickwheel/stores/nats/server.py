"""NATS servers of our own: one on a folder, one shared by several processes, a small cluster.

What a caller may rely on:

- A server listens on loopback alone, and two servers never run on one folder: the server itself
  holds the folder's lock for as long as it lives, however its life ends.
- It lives no longer than the process that started it, even if that is killed: see
  `watcher.py`. Where the whole machine goes down, `strict` keeps all that was acknowledged,
  `fast` loses up to the last second.
- Every wait has a limit. A server that can't be started says why, in its own last words.

POSIX only.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
from pathlib import Path

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.stores.nats.conf import ANY_PORT, HOST, Routes, Settings
from tickwheel.stores.nats.process import (
    LOOK_S,
    START_S,
    Address,
    FolderTaken,
    PortTaken,
    Server,
    look,
    read_address,
)

__all__ = ["Cluster", "Embedded", "FolderTaken", "Server", "cluster", "embedded", "start"]

# How often a cluster is tried on other ports, where somebody was quicker to take one.
CLUSTER_TRIES = 5


# --- One server


async def start(
    folder: str | Path,
    *,
    durability: str = "strict",
    port: int = ANY_PORT,
    secure: bool = False,
    patience_s: float = START_S,
) -> Server:
    """Start a server on this folder, which is made if it is missing, and wait until it answers.

    `secure` asks for a password, which is part of the server's URL: without it anybody who has an
    account on this machine can read and write all jobs. Port and password stay the same from one
    start to the next where they can.

    Raises FolderTaken (a StoreUnavailable), StoreUnavailable, BadConfig.
    """
    server = Server(
        Settings(folder=Path(folder), durability=durability, port=port),
        secure=secure,
        patience_s=patience_s,
    )
    await server.start()
    return server


# --- One server for several processes


class Embedded:
    """The server of a folder, shared by all processes that open the folder.

    The first one starts it, the others join it. It ends with the handle that started it, or with
    that handle's process. Whoever calls `ensure` next starts it again, with all that was
    acknowledged and on the same port where that is still free, so that the others' clients find it
    by themselves. Until then it is away: nobody takes over unless somebody asks.
    """

    def __init__(
        self, folder: str | Path, *, durability: str = "strict", patience_s: float = START_S
    ) -> None:
        self._durability = durability
        self._patience_s = patience_s
        settings = Settings(folder=Path(folder), durability=durability)
        self._server = Server(settings, secure=True, patience_s=patience_s)
        self.folder = self._server.folder
        self._turn = asyncio.Lock()

    @property
    def owner(self) -> bool:
        """Whether the server that runs is one that this handle started."""
        return self._server.alive

    async def ensure(self) -> str:
        """Join the server or start it; gives its URL. Cheap where it runs; fine to repeat.

        Raises StoreUnavailable, BadConfig.
        """
        async with self._turn:
            return await self._start_or_join()

    async def close(self) -> None:
        """Stop the server if this handle started it; the others' is left alone."""
        async with self._turn:
            await self._server.stop()

    async def _start_or_join(self) -> str:
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while asyncio.get_running_loop().time() < deadline:
            try:
                await self._server.start()
                return self._server.url
            except FolderTaken:
                address = read_address(self.folder)
            if address is not None and await _answers(address):
                self._must_be_as_safe(address)
                return address.url
            await asyncio.sleep(LOOK_S)
        raise StoreUnavailable(
            f"a NATS server holds {self.folder} but gave no answer for {self._patience_s:g} s"
        )

    def _must_be_as_safe(self, address: Address) -> None:
        if self._durability == "strict" and address.durability != "strict":
            raise BadConfig(
                f"the NATS server on {self.folder} (pid {address.pid}) was started with durability "
                f"{address.durability}: ask for that, or stop it and start it again as strict"
            )


def embedded(folder: str | Path, *, durability: str = "strict") -> Embedded:
    """A handle to the server of this folder; `await handle.ensure()` starts or joins it."""
    return Embedded(folder, durability=durability)


async def _answers(address: Address) -> bool:
    """Whether it is still that server which listens there, and not whoever got the port next."""
    about = await look(address.monitor, "varz")
    return isinstance(about, dict) and about.get("server_id") == address.server


# --- A cluster


class Cluster:
    """Servers on this machine that replicate to one another, for tests and for trying things."""

    def __init__(self, nodes: list[Server], patience_s: float) -> None:
        self.nodes = nodes
        self._patience_s = patience_s

    @property
    def url(self) -> str:
        """One URL with the addresses of all nodes, as the store takes it."""
        login, at, _ = self.nodes[0].url.rpartition("@")
        places = [re.sub(r"^nats://(.*@)?", "", node.url) for node in self.nodes]
        return (login + at if at else "nats://") + ",".join(places)

    async def leader(self) -> Server | None:
        """The node that decides where streams live, as the live ones see it; None if unknown."""
        for node in self.nodes:
            about = await node.look("jsz") if node.alive else None
            name = ((about or {}).get("meta_cluster") or {}).get("leader")
            for other in self.nodes:
                if other.name == name and other.alive:
                    return other
        return None

    async def ready(self) -> None:
        """Wait until most nodes live, have a leader, and are healthy and up to date.

        Raises StoreUnavailable.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while not await self._is_ready():
            if asyncio.get_running_loop().time() > deadline:
                words = "; ".join(f"{node.name} said: {node.last_words()}" for node in self.nodes)
                raise StoreUnavailable(
                    f"the NATS cluster was not ready within {self._patience_s:g} s; {words}"
                )
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))

    async def _is_ready(self) -> bool:
        live = [node for node in self.nodes if node.alive]
        # A leader that has lost the others takes seconds to notice.
        if len(live) * 2 <= len(self.nodes) or await self.leader() is None:
            return False
        return all([await node.look("healthz") for node in live])


async def cluster(
    folder: str | Path,
    n: int = 3,
    *,
    durability: str = "strict",
    secure: bool = False,
    patience_s: float = START_S,
) -> Cluster:
    """Start `n` servers in subfolders of this one, and wait until they have chosen a leader.

    Raises FolderTaken (a StoreUnavailable), StoreUnavailable, BadConfig.
    """
    if n < 1:
        raise BadConfig("a cluster needs at least 1 node; 3 survive the loss of one")
    password = secrets.token_hex(16) if secure else None
    for tries_left in reversed(range(CLUSTER_TRIES)):
        made = _nodes(Path(folder), n, durability, password, patience_s)
        try:
            await _start_all(made)
            await made.ready()
            return made
        except PortTaken:
            await made.stop()
            if not tries_left:
                raise
        except BaseException:
            await made.stop()
            raise
    raise AssertionError("the last try returns or raises")


def _nodes(
    folder: Path, n: int, durability: str, password: str | None, patience_s: float
) -> Cluster:
    ports = _free_ports(n)
    nodes = []
    for i, port in enumerate(ports, start=1):
        settings = Settings(
            folder=folder / f"n{i}",
            name=f"n{i}",
            durability=durability,
            password=password,
            routes=Routes(name="tickwheel", port=port, peers=tuple(ports)),
        )
        nodes.append(Server(settings, patience_s=patience_s))
    return Cluster(nodes, patience_s)


async def _start_all(made: Cluster) -> None:
    started = await asyncio.gather(*(node.start() for node in made.nodes), return_exceptions=True)
    for outcome in started:
        if outcome is not None:
            raise outcome


def _free_ports(n: int) -> list[int]:
    """Ports that nobody listens on now. Held all at once, or one could come up twice."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
