"""Behind `tickwheel dev`: run one worker process and replace it when a file changes.

The worker is a process of its own, so that each restart is clean, and a module that can't be
imported ends only that process.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tickwheel.cli.logs import set_up_logs
from tickwheel.cli.output import OK, show_fields
from tickwheel.cli.work import Work
from tickwheel.concurrency import first_of
from tickwheel.duration import duration_ms
from tickwheel.errors import BadConfig
from tickwheel.operate.supervisor import WorkerProcess, how_it_ended, on_signals
from tickwheel.version import __version__

log = logging.getLogger("tickwheel")

# Polling modification times is enough for a folder that a person edits, and works everywhere.
POLL_S = 0.5
# More files than this are not one person's code; the rest are not watched.
FILES = 5_000
SUFFIXES = (".py", ".toml")
SKIPPED = {"__pycache__", "node_modules", "site-packages"}

Stamps = dict[str, int]


def reload(work: Work) -> int:
    """Run the worker until told to stop; returns the exit code."""
    if os.name != "posix":
        raise BadConfig("dev needs a POSIX system; use tickwheel worker instead")
    set_up_logs(replace(work.settings, log_level="info"))
    if work.settings.log_format == "text":
        show_fields(
            [
                ("tickwheel", f"{__version__}, development"),
                ("app", work.target),
                *_api(work),
                ("watching", f"{', '.join(f'*{suffix}' for suffix in SUFFIXES)} in {os.getcwd()}"),
            ],
            stderr=True,
        )
    return asyncio.run(_reload(work))


def _api(work: Work) -> list[tuple[str, str]]:
    if work.port is None:
        return []
    url = f"http://127.0.0.1:{work.port}"
    return [("dashboard", f"{url}/"), ("api", f"{url}/v1/openapi.json")]


async def _reload(work: Work) -> int:
    stopping = asyncio.Event()
    with on_signals(lambda _: stopping.set()):
        while not stopping.is_set():
            await _until_changed(work, stopping)
    return OK


async def _until_changed(work: Work, stopping: asyncio.Event) -> None:
    """Keep a worker running until a file changes or we stop; if it ends, wait for a change."""
    seen = stamps(Path())
    patience_s = duration_ms(work.settings.grace) / 1000 + 5
    async with WorkerProcess(work.command, patience_s=patience_s) as child:
        changed = asyncio.ensure_future(_changed(seen))
        ended = asyncio.ensure_future(child.ended())
        await first_of(stopping.wait(), asyncio.shield(changed), asyncio.shield(ended))
        if ended.done() and not stopping.is_set():
            log.warning(
                "the worker %s; it restarts when a file changes", how_it_ended(ended.result())
            )
            await first_of(stopping.wait(), asyncio.shield(changed))
        if changed.done() and not stopping.is_set():
            log.info("changed: %s; restarting", ", ".join(changed.result()))
        changed.cancel()
        ended.cancel()


async def _changed(seen: Stamps) -> list[str]:
    """Wait for changes; returns the names of the changed files."""
    while True:
        await asyncio.sleep(POLL_S)
        if names := differing(seen, stamps(Path())):
            return names


def differing(before: Stamps, now: Stamps) -> list[str]:
    """The first few files that were added, removed or modified."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))[
        :5
    ]


def stamps(folder: Path) -> Stamps:
    """The modification time of every watched file."""
    found: Stamps = {}
    for path in _watched(folder):
        try:
            found[str(path)] = path.stat().st_mtime_ns
        except OSError:
            continue  # deleted after it was listed
        if len(found) == FILES:
            break
    return found


def _watched(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        # Virtual environments and tools use hidden folders, or mark theirs.
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in SKIPPED
            and not (Path(root) / name / "pyvenv.cfg").exists()
        ]
        yield from (Path(root) / name for name in files if name.endswith(SUFFIXES))
