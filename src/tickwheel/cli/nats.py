"""`tickwheel nats`: run NATS servers for development, print a configuration for production."""

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

    from tickwheel.stores.nats.servers.cluster import Cluster
    from tickwheel.stores.nats.servers.process import Server

nats = Group(
    "nats",
    help="Run NATS servers here; print a production configuration.",
    no_args_is_help=False,
)

# How long a killed node of a cluster stays down, so that you can watch the others take over.
AWAY_S = 10.0
# Copies of each job in a cluster: with three, one server may be lost.
REPLICAS = 3

_folder = click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("tickwheel-nats"),
    help="Where jobs are stored; created if missing.",
)
_durability = click.option(
    "--durability",
    type=click.Choice(["strict", "fast"]),
    default="strict",
    help="fast can lose up to a second of jobs on power loss.",
)


# --- One server


@nats.command()
@_folder
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(1, 65535),
    help="Default: the last port used, or any free port.",
)
@_durability
@as_output
def up(folder: Path, port: int | None, durability: str, as_json: bool) -> None:
    """Run a server on this machine until Ctrl-C.

    Prints the setting that programs on this machine need to use it. Any number of them can.
    """
    import asyncio

    asyncio.run(_up(folder, port, durability, as_json))


async def _up(folder: Path, port: int | None, durability: str, as_json: bool) -> None:
    from tickwheel.concurrency import first_of
    from tickwheel.stores.nats.servers.conf import ANY_PORT
    from tickwheel.stores.nats.servers.process import start_server

    server = await start_server(folder, durability=durability, port=port or ANY_PORT, secure=True)
    stopping = _stop_signal()
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
        await first_of(stopping.wait(), server.ended())
        if not stopping.is_set():
            raise StoreUnavailable(
                f"the server exited unexpectedly; its last log line: {server.last_words()}"
            )
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
    """Run a cluster on this machine, to try a failover.

    The servers replicate to each other, and run until Ctrl-C. A killed node is restarted after a
    while.
    """
    import asyncio

    asyncio.run(_cluster(folder, nodes, durability, as_json))


async def _cluster(folder: Path, nodes: int, durability: str, as_json: bool) -> None:
    from tickwheel.stores.nats.servers.cluster import start_cluster

    made = await start_cluster(folder, nodes, durability=durability, secure=True)
    stopping = _stop_signal()
    try:
        if as_json:
            documents = [_document(node) for node in made.nodes]
            emit_json(
                {"url": _store_url(made, durability), "durability": durability, "nodes": documents}
            )
        else:
            _show_cluster(made, await made.leader(), durability)
        await _keep_alive(made, stopping)
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
        say(f"to try a failover: kill -9 {leader.pid}  (it is restarted after {AWAY_S:g} s)")


def _store_url(made: Cluster, durability: str) -> str:
    """The store's URL, with as many copies of each job as make sense here."""
    return f"{made.url}?durability={durability}&replicas={min(len(made.nodes), REPLICAS)}"


async def _keep_alive(made: Cluster, stopping: asyncio.Event) -> None:
    """Restart nodes a while after they were killed, until told to stop."""
    from tickwheel.concurrency import first_of

    while not stopping.is_set():
        await first_of(stopping.wait(), *(node.ended() for node in made.nodes))
        for node in made.nodes:
            if not node.alive and not stopping.is_set():
                say(f"{node.name} is down; restarting it in {AWAY_S:g} s")
        await first_of(stopping.wait(), timeout_s=AWAY_S)
        for node in made.nodes:
            if not node.alive and not stopping.is_set():
                await node.start()
                say(f"{node.name} is back, pid {node.pid}")


# --- Shared by both


def _document(server: Server) -> dict[str, Any]:
    return {
        "name": server.name,
        "url": server.url,
        "pid": server.pid,
        "folder": str(server.folder),
    }


def _show_url(url: str) -> None:
    """The one line on stdout, to be pasted into the shell of the next program."""
    click.echo(f"export TICKWHEEL_STORE={shlex.quote(url)}")


def _stop_signal() -> asyncio.Event:
    import asyncio

    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    return stopping


# --- A configuration


@nats.command()
@click.option(
    "--hosts",
    metavar="A,B,C",
    default="nats-1,nats-2,nats-3",
    help="The hosts of the cluster; with one host there are no replicas.",
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
@click.option("--no-tls", is_flag=True, help="Don't encrypt; for private networks only.")
def conf(
    hosts: str,
    name: str | None,
    namespace: str,
    shards: int,
    durability: str,
    tls: str,
    no_tls: bool,
) -> None:
    """Print a server configuration for production.

    It has comments, users by role, TLS, limits and a cluster. Run this once for each server, with
    its --name.
    """
    from tickwheel.stores.nats.servers.production import production_text, variables

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
        say(f"note: {len(machines)} servers tolerate no more failures than {len(machines) - 1}")
    say(f"set in the server's environment: {' '.join(variables())}")


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", text):
        raise BadConfig(
            f"{text!r} is not a valid server name or host; write it like nats-1.example.com"
        )
    return text


def _namespace(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text):
        raise BadConfig(f"--namespace {text!r}: use letters, digits, - and _, at most 64")
    return text


def _path(text: str) -> str:
    if not text.isprintable() or '"' in text or "\\" in text:
        raise BadConfig(f"--tls {text!r}: the path must not contain quotes or backslashes")
    return text
