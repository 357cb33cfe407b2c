"""One instance of one entrant: `python -m tickwheel.score.instance ENTRANT NUMBER URL FOLDER`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from tickwheel.score.entrants import BY_KEY, serve
from tickwheel.score.notes import Notebook

# How often it looks whether whoever started it is still there.
LOOK_S = 1.0


async def _main(key: str, number: str, url: str, folder: str) -> None:
    notes, stop = Notebook(Path(folder), int(number)), asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, stop.set)
    others = [asyncio.create_task(each) for each in (notes.keep_counts(), _orphaned(stop))]
    try:
        await serve(BY_KEY[key], url, notes, stop)
    finally:
        for task in others:
            task.cancel()
        notes.write_counts()


async def _orphaned(stop: asyncio.Event) -> None:
    """Stop if whoever started it is gone."""
    parent = os.getppid()
    while not stop.is_set():
        await asyncio.sleep(LOOK_S)
        if os.getppid() != parent:
            stop.set()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main(*sys.argv[1:]))
