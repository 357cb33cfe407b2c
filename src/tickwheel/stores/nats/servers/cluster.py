"""A small cluster on this machine: servers that replicate to each other, for tests and trials."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
from pathlib import Path

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.stores.nats.servers.conf import HOST, Routes, ServerSettings
from tickwheel.stores.nats.servers.process import POLL_S, START_S, PortTaken, Server

# How often a cluster is started on other ports, because another program took one of its ports.
CLUSTER_TRIES = 5


class Cluster:
    """The running servers of one cluster."""

    def __init__(self, nodes: list[Server], patience_s: float) -> None:
        self.nodes = nodes
        self._patience_s = patience_s

    @property
    def url(self) -> str:
        """One URL with the addresses of all nodes, as the store takes it."""
        login, at, _ = self.nodes[0].url.rpartition("@")
        addresses = [re.sub(r"^nats://(.*@)?", "", node.url) for node in self.nodes]
        return (login + at if at else "nats://") + ",".join(addresses)

    async def leader(self) -> Server | None:
        """The node that leads the cluster, according to the others; None if there is none."""
        for node in self.nodes:
            about = await node.monitor("jsz") if node.alive else None
            name = ((about or {}).get("meta_cluster") or {}).get("leader")
            for other in self.nodes:
                if other.name == name and other.alive:
                    return other
        return None

    async def ready(self) -> None:
        """Wait until most nodes run, have a leader, and are healthy and up to date.

        Raises StoreUnavailable.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        while not await self._is_ready():
            if asyncio.get_running_loop().time() > deadline:
                words = "; ".join(f"{node.name} logged: {node.last_words()}" for node in self.nodes)
                raise StoreUnavailable(
                    f"the NATS cluster was not ready within {self._patience_s:g} s; {words}"
                )
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        await asyncio.gather(*(node.stop() for node in self.nodes))

    async def _is_ready(self) -> bool:
        live = [node for node in self.nodes if node.alive]
        # A leader that has lost the others needs seconds to notice.
        if len(live) * 2 <= len(self.nodes) or await self.leader() is None:
            return False
        return all([await node.monitor("healthz") for node in live])


async def start_cluster(
    folder: str | Path,
    n: int = 3,
    *,
    durability: str = "strict",
    secure: bool = False,
    patience_s: float = START_S,
) -> Cluster:
    """Start `n` servers in subfolders of this folder, and wait until they have elected a leader.

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
        settings = ServerSettings(
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
    """Free ports. All are bound at the same time, so that none comes up twice."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
