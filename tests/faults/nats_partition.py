"""A cluster of three NATS servers whose lines to one another can be taken away.

Every route goes through a proxy of its own. A node that is cut off still serves its clients, and
may believe for a while that it leads: that is what a frozen process does not show.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from nats_raw import raw_server
from proxy import Proxy

NODES = ("n1", "n2", "n3")


class Partition:
    """Three nodes, by name: where clients connect, and who can reach whom."""

    def __init__(self, places: dict[str, str], lines: dict[tuple[str, str], Proxy]) -> None:
        self._places = places
        self._lines = lines

    def url(self, *names: str) -> str:
        return "nats://" + ",".join(self._places[name] for name in names or NODES)

    def cut_off(self, name: str) -> None:
        for proxy in self._of(name):
            proxy.refuses = True
            proxy.cut()

    def rejoin(self, name: str) -> None:
        for proxy in self._of(name):
            proxy.refuses = False

    def _of(self, name: str) -> Iterator[Proxy]:
        return (proxy for ends, proxy in self._lines.items() if name in ends)


@contextlib.asynccontextmanager
async def partitioned(folder: Path) -> AsyncIterator[Partition]:
    ports = dict(zip(NODES, free_ports(len(NODES)), strict=True))
    lines: dict[tuple[str, str], Proxy] = {}
    async with contextlib.AsyncExitStack() as stack:
        for one in NODES:
            for other in NODES:
                if one != other:
                    proxy = Proxy(f"nats://127.0.0.1:{ports[other]}", raw=True)
                    await proxy.open()
                    stack.push_async_callback(proxy.close)
                    lines[one, other] = proxy
        started = await asyncio.gather(
            *(_node(stack, folder / name, name, ports[name], lines) for name in NODES)
        )
        yield Partition(dict(zip(NODES, started, strict=True)), lines)


async def _node(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    name: str,
    port: int,
    lines: dict[tuple[str, str], Proxy],
) -> str:
    routes = ", ".join(
        f'"{proxy.url}"' for (one, _), proxy in lines.items() if one == name
    ).replace("nats://", "nats-route://")
    # Nodes tell one another their addresses; this one leads nowhere, so that no line is secret.
    conf = f"""
server_name: {name}
jetstream {{ store_dir: "{folder}/js", sync_interval: always }}
cluster {{
  name: test, listen: "127.0.0.1:{port}", advertise: "127.0.0.1:1", no_advertise: true
  connect_retries: 0, routes: [{routes}]
}}
"""
    return await stack.enter_async_context(raw_server(folder, conf))


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
