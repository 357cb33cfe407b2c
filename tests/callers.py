"""Callers that wait for results of a worker in another process: how late each hears of the end."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tickwheel import App

# The first of their jobs ends after this long, the last one after this long again.
DELAY_S, SPREAD_S = 2.0, 3.0


def heard_late_s(
    url: str, folder: Path, callers: int, *, app: App, waiting: Callable[[], object] = lambda: None
) -> list[float]:
    """How long after its end was stored each of the callers had its result. `app` is on the store
    at `url`; `waiting` is called when all jobs are enqueued."""
    woke: dict[str, int] = {}

    @app.task
    async def echo(n: int) -> int:
        return n

    async def main() -> None:
        async def call(n: int) -> None:
            assert await jobs[n].result(timeout=120) == n
            woke[jobs[n].id] = time.monotonic_ns()

        async with app:
            due = [DELAY_S + SPREAD_S * n / callers for n in range(callers)]
            jobs = await asyncio.gather(
                *(echo.using(delay=delay).enqueue(n) for n, delay in enumerate(due))
            )
            waiting()
            await asyncio.gather(*map(call, range(callers)))

    record = folder / "record"
    with _worker(url, record):
        asyncio.run(main())
    ended = json.loads(record.read_text())
    return [(woke[id] - ended[id]) / 1e9 for id in woke]


@contextmanager
def _worker(url: str, record: Path) -> Iterator[None]:
    """Writes its record at the end."""
    process = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("ending_worker.py")],
        env={**os.environ, "TICKWHEEL_STORE": url, "RECORD": str(record)},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
