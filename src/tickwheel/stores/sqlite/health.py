"""What the embedded store's file survives now, and what an operator should know about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import apsw

from tickwheel.store import Durability, Finding, Level, Size

# With less free space than this, the disk will soon refuse jobs.
LITTLE_ROOM = 200 * 1024**2


def durability(db: apsw.Connection, path: Path) -> Durability:
    full = db.pragma("synchronous") >= 2
    kind = _file_system(path)
    fixes = []
    if not full:
        fixes.append("remove sync=normal from the store URL: power loss can undo the last commits")
    if kind in ("tmpfs", "ramfs"):
        fixes.append(f"{path} is on {kind}, in memory: move it to a disk")
    if kind in ("nfs", "nfs4", "cifs", "smb3", "9p"):
        fixes.append(f"{path} is on {kind}: SQLite's locks need a local disk")
    return Durability(
        process_crash=True,
        power_loss=full and kind not in ("tmpfs", "ramfs"),
        machine_loss=False,
        summary=f"SQLite {apsw.sqlite_lib_version()}, WAL, "
        f"synchronous={'FULL' if full else 'NORMAL'}, {path}" + (f" on {kind}" if kind else ""),
        fixes=tuple(fixes),
    )


def findings(db: apsw.Connection, path: Path) -> list[Finding]:
    """The file's size, its free pages, and the space left on its disk."""
    size = db.pragma("page_count") * db.pragma("page_size")
    free = db.pragma("freelist_count") * db.pragma("page_size")
    room = shutil.disk_usage(path.resolve().parent).free
    scarce = room < max(LITTLE_ROOM, size // 10)
    words = f"{_size(size)}, {_size(free)} of it unused; {_size(room)} left on its disk"
    fix = "free some space: a full disk refuses every job" if scarce else ""
    return [Finding(Level.BAD if scarce else Level.OK, "file", words, fix)]


def sizes(db: apsw.Connection, path: Path) -> list[Size]:
    page = db.pragma("page_size")
    log = path.with_name(f"{path.name}-wal")
    return [
        Size("File", db.pragma("page_count") * page),
        Size("Unused in the file", db.pragma("freelist_count") * page),
        Size("Write-ahead log", log.stat().st_size if log.exists() else 0),
        Size("Left on its disk", shutil.disk_usage(path.resolve().parent).free),
    ]


def _size(size: int) -> str:
    if size < 1024**3:
        return f"{size / 1024**2:,.1f} MiB"
    return f"{size / 1024**3:,.1f} GiB"


def _file_system(path: Path) -> str:
    """The kind of file system that the path is on; empty if the system doesn't tell."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    folder = path.resolve().parent
    best = max(
        (line.split() for line in mounts if folder.is_relative_to(line.split()[1])),
        key=lambda fields: len(fields[1]),
        default=["", "", ""],
    )
    return best[2]
