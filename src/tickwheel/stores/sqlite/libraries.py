"""One SQLite library per file and process.

The store's SQLite (apsw) and Python's own (sqlite3, and with it SQLAlchemy, Django, aiosqlite) are
two libraries. POSIX locks belong to a process, so on one file in one process each releases the
other's locks, and one that believes it closed the last connection deletes the log under the other:
commits are lost. So a store doesn't open a file that another library here has open, and while the
store is open, `sqlite3.connect` to its file is refused.
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

# A file, whatever its name: its device and its inode.
Identity = tuple[int, int]

READ_WRITE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE

# A file that is being closed, or only read for a moment, is checked again.
LOOKS, LOOK_S = 5, 0.01

# The store's connections; a connection that is closed is no longer in `apsw.connections()`.
_ours: weakref.WeakKeyDictionary[apsw.Connection, Identity] = weakref.WeakKeyDictionary()
# The file name of each connection of this process, the user's too: a connection that is in use in
# another thread can't be asked for it.
_names: weakref.WeakKeyDictionary[apsw.Connection, str] = weakref.WeakKeyDictionary()
# Files that were open in the parent when this process was forked.
_inherited: set[Identity] = set()
# The file that a store is about to open.
_opening: Identity | None = None
_lock = threading.Lock()
_watching = False


def identity(path: str | bytes | os.PathLike[Any]) -> Identity | None:
    """Which file a path leads to; None if there is none, or none that we may see."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def file_of(db: apsw.Connection) -> Identity | None:
    """The file of one of the store's connections."""
    return _ours.get(db)


def open_alone(path: Path, flags: int = READ_WRITE) -> apsw.Connection:
    """A connection for the store to an existing file; BadConfig if another library has it open."""
    global _opening
    with _lock:
        _watch_sqlite3()
        file = _opening = identity(path)
        try:
            if file in _inherited:
                raise BadConfig(
                    f"this process was forked while its parent had {path} open, and SQLite can't "
                    "use the file in such a child: commits may be lost. Fork before the store is "
                    "first used, or close it first: app.sync.close()"
                )
            if file is not None and not _through_apsw(file) and _open_elsewhere(file):
                raise BadConfig(
                    f"something in this process has {path} open, perhaps Python's sqlite3, through "
                    "SQLAlchemy, Django or aiosqlite. The store has its own SQLite library, and "
                    "two of them on one file undo each other's locks: close it first, use apsw "
                    "instead, or keep the jobs in a file of their own, with "
                    "App(…, outbox='sqlite:///your.db')"
                )
            db = apsw.Connection(str(path), flags)
            if file is not None:
                _ours[db] = file
            return db
        finally:
            _opening = None


def is_open(path: Path) -> bool:
    """Whether this process has the file open as a store."""
    file = identity(path)
    return file is not None and _as_a_store(file)


def is_open_by_apsw(path: Path) -> bool:
    """Whether this process has the file open through apsw, as a store or otherwise."""
    file = identity(path)
    return file is not None and _through_apsw(file)


def _as_a_store(file: Identity) -> bool:
    return file == _opening or any(_ours.get(each) == file for each in apsw.connections())


def _through_apsw(file: Identity) -> bool:
    """Whether this process has the file open through our library, the user's connections too."""
    return any(file == (_ours.get(each) or _file_of(each)) for each in apsw.connections())


def _file_of(connection: apsw.Connection) -> Identity | None:
    """The file of one of the user's connections. One from before this module was imported must be
    asked for it."""
    if connection in _names:
        return identity(_names[connection])
    for _ in range(LOOKS):
        with contextlib.suppress(apsw.ThreadingViolationError, apsw.ConnectionClosedError):
            return identity(connection.filename)
        sleep_blocking(LOOK_S)
    return None


def _open_elsewhere(file: Identity) -> bool:
    """Whether a descriptor of this process is open on that file, and stays open."""
    for _ in range(LOOKS):
        if not any(_is_of(number, file) for number in _descriptors()):
            return False
        # A sqlite3 connection that nobody closed is in a cycle, and open until it is collected.
        gc.collect()
        sleep_blocking(LOOK_S)
    return True


def _descriptors() -> list[int]:
    # Windows has no such folder; its locks belong to handles, so two libraries do no harm.
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
    """Hear of each connection before Python makes it. An audit hook can't be removed again."""
    global _watching
    if not _watching and os.name == "posix":
        sys.addaudithook(_heard)
        _watching = True


def _heard(event: str, args: tuple[Any, ...]) -> None:
    # Called for every audit event of the interpreter, so it must be fast.
    if event == "sqlite3.connect":
        _refuse(args[0])


def _refuse(database: Any) -> None:
    for path in _paths(database):
        file = identity(path)
        if file is not None and _as_a_store(file):
            raise BadConfig(
                f"{os.fsdecode(path)} is open as a store in this process, and Python's sqlite3 is "
                "not the store's SQLite library: two libraries on one file undo each other's "
                "locks. Use an apsw connection, close the store first, or keep the jobs in a file "
                "of their own, with App(…, outbox='sqlite:///your.db')"
            )


def _paths(database: Any) -> list[bytes]:
    """The paths that a connection may open: the event doesn't tell whether `file:` is a URI."""
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
    """In the child, SQLite believes that it has the parent's locks, but it has none. And a thread
    that was about to open a store does not exist in the child."""
    global _lock, _opening
    _lock, _opening = threading.Lock(), None
    for each in apsw.connections():
        with contextlib.suppress(apsw.Error):
            file = _ours.get(each) or identity(each.filename)
            if file is not None:
                _inherited.add(file)


def _note(connection: apsw.Connection) -> None:
    _names[connection] = connection.filename


apsw.connection_hooks.append(_note)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
