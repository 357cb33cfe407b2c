"""One SQLite library per file and process.

The store's SQLite (apsw) and Python's own (sqlite3, and with it SQLAlchemy, Django, aiosqlite) are
two libraries. POSIX locks belong to a process, so on one file in one process each lets go of the
other's locks, and whichever closes last in its own view deletes the log under the other: commits
vanish. So a store is not opened on a file that something else here has open, and while it is open
`sqlite3.connect` to that file is refused.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import apsw

from tickwheel.clock import sleep_blocking
from tickwheel.errors import BadConfig

# A file by whatever name: its device and its number there.
Identity = tuple[int, int]

# What is being closed, or is only looked at, is gone after a moment.
LOOKS, LOOK_S = 5, 0.01

# The store's connections; a connection that is closed is no longer in `apsw.connections()`.
_ours: weakref.WeakKeyDictionary[apsw.Connection, Identity] = weakref.WeakKeyDictionary()
# Files that were open in the parent when this process was forked.
_inherited: set[Identity] = set()
# The file that a store is about to open.
_opening: Identity | None = None
_lock = threading.Lock()
_watching = False


def identity(path: str | bytes | os.PathLike[Any]) -> Identity | None:
    """Which file a path leads to; None where there is none, or none that we may see."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def file_of(db: apsw.Connection) -> Identity | None:
    """The file that a connection of the store's was opened on."""
    return _ours.get(db)


def open_alone(path: Path) -> apsw.Connection:
    """A connection of the store's to a file that exists; BadConfig where another library has it."""
    global _opening
    with _lock:
        _watch_sqlite3()
        file = _opening = identity(path)
        try:
            if file in _inherited:
                raise BadConfig(
                    f"this process was forked while its parent had {path} open, and SQLite can't "
                    "use a file in such a child: what it commits may vanish. Fork before the "
                    "store is first used, or close it before: app.sync.close()"
                )
            if file is not None and not _through_apsw(file) and _open_elsewhere(file):
                raise BadConfig(
                    f"something in this process has {path} open: Python's sqlite3 perhaps, also "
                    "by way of SQLAlchemy, Django or aiosqlite. The store brings a SQLite library "
                    "of its own, and two of them on one file undo each other's locks: close it "
                    "first, use apsw instead, or keep the jobs in a file of their own, with "
                    "App(…, outbox='sqlite:///your.db')"
                )
            db = apsw.Connection(str(path))
            if file is not None:
                _ours[db] = file
            return db
        finally:
            _opening = None


def is_open(path: Path) -> bool:
    """Whether this process has the file open as a store."""
    file = identity(path)
    return file is not None and _as_a_store(file)


def _as_a_store(file: Identity) -> bool:
    return file == _opening or any(_ours.get(each) == file for each in apsw.connections())


def _through_apsw(file: Identity) -> bool:
    """Whether this process has the file open through our library, the user's connections too."""
    return any(file == (_ours.get(each) or _file_of(each)) for each in apsw.connections())


def _file_of(connection: apsw.Connection) -> Identity | None:
    """The file of a connection of the user's, which may be at work in another thread."""
    for _ in range(LOOKS):
        with contextlib.suppress(apsw.ThreadingViolationError, apsw.ConnectionClosedError):
            return identity(connection.filename)
        sleep_blocking(LOOK_S)
    return None


def _open_elsewhere(file: Identity) -> bool:
    """Whether any descriptor of this process is of that file, and stays so."""
    for _ in range(LOOKS):
        if not any(_is_of(number, file) for number in _descriptors()):
            return False
        # A connection of sqlite3's that nobody closed is in a cycle, and open until that is found.
        gc.collect()
        sleep_blocking(LOOK_S)
    return True


def _descriptors() -> list[int]:
    # On Windows there is no such folder; locks belong to handles there and harm nobody.
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/dev/fd")]
    return []


def _is_of(descriptor: int, file: Identity) -> bool:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == file


def _watch_sqlite3() -> None:
    """Python tells of each connection before it is made; who listens can't be removed again."""
    global _watching
    if not _watching and os.name == "posix":
        sys.addaudithook(_heard)
        _watching = True


def _heard(event: str, args: tuple[Any, ...]) -> None:
    # Every event of the interpreter comes by here.
    if event == "sqlite3.connect":
        _refuse(args[0])


def _refuse(database: Any) -> None:
    for path in _paths(database):
        file = identity(path)
        if file is not None and _as_a_store(file):
            raise BadConfig(
                f"{os.fsdecode(path)} is open as a store in this process, and Python's sqlite3 is "
                "another SQLite library than the store's: two of them on one file undo each "
                "other's locks. Give an apsw connection, close the store first, or keep the jobs "
                "in a file of their own, with App(…, outbox='sqlite:///your.db')"
            )


def _paths(database: Any) -> list[bytes]:
    """What a connection may open; the event doesn't say whether `file:` means a URI."""
    if not isinstance(database, str | bytes | os.PathLike):
        return []
    path = os.fsencode(database)
    if not path.startswith(b"file:"):
        return [path]
    uri = path.removeprefix(b"file:").partition(b"#")[0].partition(b"?")[0]
    if uri.startswith(b"//"):
        uri = b"/" + uri[2:].partition(b"/")[2]
    return [path, unquote_to_bytes(uri)]


def _after_fork() -> None:
    """SQLite believes that the child has the parent's locks, which it has not. And another thread
    may have been about to open a store: it is not in the child."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), None
    for each in apsw.connections():
        with contextlib.suppress(apsw.Error):
            file = _ours.get(each) or identity(each.filename)
            if file is not None:
                _inherited.add(file)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
