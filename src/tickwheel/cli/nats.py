"""`tickwheel nats`: NATS servers to try things on, and a configuration for real ones."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.options import COUNT, Group, as_output
from tickwheel.cli.output import emit_json, say, show_fields
from tickwheel.errors import BadConfig, StoreUnavailable

if TYPE_CHECKING:
    import asyncio

    from tickwheel.stores.nats.server import Cluster, Server

nats = Group(
    "nats",
    help="Run NATS servers on this machine; configure real ones.",
    no_args_is_help=False,
)

# How long a node of a cluster that was killed stays away, so that one can watch the others.
AWAY_S = 10.0
# Copies of each job in a cluster: with three, one may be lost.
REPLICAS = 3

_folder = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tickwheel-nats"),
    help="Where jobs are kept; made if it is missing.",
)
_durability = click.option(
    "--durability",
    type=click.Choice(["strict", "fast"]),
    default="strict",
    help="fast loses up to a second of jobs when the power fails.",
)


# --- One server


@nats.command()
@_folder
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(1, 65535),
    help="Default: the one it had last, or any free one.",
)
@_durability
@as_output
def up(folder: Path, port: int | None, durability: str, as_json: bool) -> None:
    """Run a server on this machine until Ctrl-C.

    It prints what other programs here need to use it, all at the same time.
    """
    import asyncio

    asyncio.run(_up(folder, port, durability, as_json))


async def _up(folder: Path, port: int | None, durability: str, as_json: bool) -> None:
    from tickwheel.clock import first_of
    from tickwheel.stores.nats.conf import ANY_PORT
    from tickwheel.stores.nats.server import start

    server = await start(folder, durability=durability, port=port or ANY_PORT, secure=True)
    asked = _asked_to_stop()
    try:
        if as_json:
            emit_json({**_document(server), "durability": durability})
        else:
            show_fields(
                [
                    ("folder", str(server.folder)),
                    ("durability", durability),
                    ("pid", str(server.pid)),
                ],
                stderr=True,
            )
            _show_url(f"{server.url}?durability={durability}")
        await first_of(asked.wait(), server.ended())
        if not asked.is_set():
            raise StoreUnavailable(f"the server ended by itself; it said: {server.last_words()}")
    finally:
        await server.stop()
    say("stopped")


# --- A cluster


@nats.command()
@_folder
@click.option("--nodes", metavar="N", type=COUNT, default=3, help="How many servers.")
@_durability
@as_output
def cluster(folder: Path, nodes: int, durability: str, as_json: bool) -> None:
    """Run several servers, to try a fail-over.

    They replicate to one another, until Ctrl-C. A node that is killed is back after a while.
    """
    import asyncio

    asyncio.run(_cluster(folder, nodes, durability, as_json))


async def _cluster(folder: Path, nodes: int, durability: str, as_json: bool) -> None:
    from tickwheel.stores.nats.server import cluster

    made = await cluster(folder, nodes, durability=durability, secure=True)
    asked = _asked_to_stop()
    try:
        if as_json:
            documents = [_document(node) for node in made.nodes]
            emit_json(
                {"url": _store_url(made, durability), "durability": durability, "nodes": documents}
            )
        else:
            _show_cluster(made, await made.leader(), durability)
        await _keep_alive(made, asked)
    finally:
        await made.stop()
    say("stopped")


def _show_cluster(made: Cluster, leader: Server | None, durability: str) -> None:
    show_fields(
        [
            (node.name, f"pid {node.pid}{', the leader' if node is leader else ''}")
            for node in made.nodes
        ],
        stderr=True,
    )
    _show_url(_store_url(made, durability))
    if leader is not None:
        say(f"to try a fail-over: kill -9 {leader.pid}  (it is back after {AWAY_S:g} s)")


def _store_url(made: Cluster, durability: str) -> str:
    """As the store takes it: with as many copies of each job as are of use here."""
    return f"{made.url}?durability={durability}&replicas={min(len(made.nodes), REPLICAS)}"


async def _keep_alive(made: Cluster, asked: asyncio.Event) -> None:
    """Start nodes again a while after they were killed, until told to stop."""
    from tickwheel.clock import first_of

    while not asked.is_set():
        await first_of(asked.wait(), *(node.ended() for node in made.nodes))
        for node in made.nodes:
            if not node.alive and not asked.is_set():
                say(f"{node.name} is gone; it is started again in {AWAY_S:g} s")
        await first_of(asked.wait(), timeout_s=AWAY_S)
        for node in made.nodes:
            if not node.alive and not asked.is_set():
                await node.start()
                say(f"{node.name} is back: pid {node.pid}")


# --- What both of them print and wait for


def _document(server: Server) -> dict[str, Any]:
    return {
        "name": server.name,
        "url": server.url,
        "pid": server.pid,
        "folder": str(server.folder),
    }


def _show_url(url: str) -> None:
    """The one line on stdout: to be pasted into the shell of the next program."""
    click.echo(f"export TICKWHEEL_STORE={shlex.quote(url)}")


def _asked_to_stop() -> asyncio.Event:
    import asyncio

    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    return asked


# --- A configuration


@nats.command()
@click.option(
    "--hosts",
    metavar="A,B,C",
    default="nats-1,nats-2,nats-3",
    help="The machines of the cluster; one alone is a server without replicas.",
)
@click.option("--name", metavar="NAME", help="The server's name. Default: the first host.")
@click.option("--namespace", metavar="NAME", default="default", help="As in the store's URL.")
@click.option("--shards", metavar="N", type=COUNT, default=1, help="As in the store's URL.")
@_durability
@click.option(
    "--tls",
    metavar="DIR",
    default="/etc/nats/tls",
    help="The folder of server.crt, server.key and ca.crt.",
)
@click.option("--no-tls", is_flag=True, help="For private networks: nothing is encrypted.")
def conf(
    hosts: str,
    name: str | None,
    namespace: str,
    shards: int,
    durability: str,
    tls: str,
    no_tls: bool,
) -> None:
    """Print a configuration for production.

    It has comments, users by role, TLS, limits and a cluster. Print it once for each server, with
    its --name.
    """
    from tickwheel.stores.nats.production import production_text, variables

    machines = tuple(_host(part.strip()) for part in hosts.split(","))
    click.echo(
        production_text(
            name=_host(name or machines[0]),
            hosts=machines,
            durability=durability,
            tls=None if no_tls else _path(tls),
            namespace=_namespace(namespace),
            shards=shards,
        ),
        nl=False,
    )
    if len(machines) % 2 == 0:
        say(f"note: {len(machines)} servers survive no more losses than {len(machines) - 1}")
    say(f"set in the server's environment: {' '.join(variables())}")


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise BadConfig(
            f"{text!r} can't be a server's name or host: write it as nats-1.example.com"
        )
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise BadConfig(f"--namespace {text!r}: letters, digits, - and _, 64 at most")
    return text


def _path(text: str) -> str:
    if not text.isprintable() or '"' in text or "\\" in text:
        raise BadConfig(f"--tls {text!r}: a path without quotes and backslashes, please")
    return text
