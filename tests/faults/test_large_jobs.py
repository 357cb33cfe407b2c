"""Large jobs through real stores, from enqueue to result."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from stores import KNOWN
from tickwheel import App
from tickwheel.job import State

MB = 1_000_000
COUNT = 300


@pytest.mark.parametrize("name", ["postgres", "nats"])
def test_hundreds_of_large_jobs_run_once_each_and_the_store_keeps_up(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, runner: asyncio.Runner
) -> None:
    """As many slots as jobs, so that every batch could be as large as all of them together."""
    h = KNOWN[name](tmp_path)
    runner.run(h.open())
    try:
        runner.run(run_all(h._url))
    finally:
        runner.run(h.close())
    assert "calls to the store fail" not in caplog.text


async def run_all(url: str) -> None:
    runs: Counter[int] = Counter()
    all_ran = asyncio.Event()
    app = App(url)

    @app.task
    async def measure(n: int, text: str) -> int:
        runs[n] += 1
        if len(runs) == COUNT:
            all_ran.set()
        return len(text)

    async with app, asyncio.timeout(60):
        handles = await app.enqueue_many(measure.job(n, "x" * MB) for n in range(COUNT))
        async with app.worker(concurrency=COUNT):
            await all_ran.wait()
        paged = [info async for info in app.find_all()]
        got = await (await app.client()).store.get([handle.id for handle in handles])
    assert runs == dict.fromkeys(range(COUNT), 1)
    assert Counter(job.state for job in paged) == {State.DONE: COUNT}
    assert [job and job.id for job in got] == [handle.id for handle in handles]
