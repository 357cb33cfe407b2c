"""A real file, locked by somebody else for longer than a lease."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import apsw
import pytest

from tickwheel import App, State

pytestmark = pytest.mark.slow


async def test_a_worker_on_a_file_that_somebody_had_locked_runs_its_jobs_once(
    tmp_path: Path,
) -> None:
    """Longer than a lease: the extends that waited must not have been in vain."""
    path = tmp_path / "jobs.db"
    app = App(f"sqlite:///{path}")
    running = most = runs = 0

    @app.task
    async def slow() -> None:
        nonlocal running, most, runs
        running, runs = running + 1, runs + 1
        most = max(most, running)
        try:
            await asyncio.sleep(6)
        finally:
            running -= 1

    def lock(seconds: float) -> None:
        db = apsw.Connection(str(path))
        db.set_busy_timeout(5_000)
        db.execute("begin immediate")
        threading.Event().wait(seconds)
        db.execute("rollback")
        db.close()

    async with app, app.worker(lease="2s"):
        job = await slow.enqueue()
        while not running:
            await asyncio.sleep(0.01)
        for seconds in (1.5, 2.5):
            await asyncio.to_thread(lock, seconds)
            await asyncio.sleep(0.5)
        await job.result(timeout=30)
        info = await job.info()
    assert most == 1, "a second run started beside the first"
    assert info.state is State.DONE
