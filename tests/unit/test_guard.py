"""A task that blocks the event loop is named at once. In real time: the guard is a thread."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from tickwheel import App
from tickwheel.engine import leases
from tickwheel.stores.memory import MemoryStore

Log = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> Iterator[None]:
    monkeypatch.setattr(leases, "BLOCKED_S", 0.3)
    monkeypatch.setattr(leases, "LOOK_S", 0.05)
    with caplog.at_level(logging.WARNING, "tickwheel"):
        yield


def named(caplog: Log) -> list[str]:
    return [each.getMessage() for each in caplog.records if "blocks the" in each.getMessage()]


def block_until_named(caplog: Log, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not named(caplog) and time.monotonic() < deadline:
        time.sleep(0.01)


async def test_a_task_that_blocks_the_loop_is_named_while_it_does(caplog: Log) -> None:
    app = App(MemoryStore())

    @app.task
    async def hog() -> list[str]:
        block_until_named(caplog)
        return named(caplog)

    async with app, app.worker(lease="5m", grace=0):
        [line] = await (await hog.enqueue()).result(timeout=30)
    assert line.startswith("task 'hog' blocks the event loop for more than 0.3s at ")
    assert "test_guard.py:" in line
    # Its leases were not at risk.
    assert "extends its leases" not in caplog.text


async def test_the_same_line_of_code_is_not_named_again_at_once(caplog: Log) -> None:
    app = App(MemoryStore())

    @app.task
    async def hog() -> None:
        time.sleep(0.8)

    async with app, app.worker(lease="5m", grace=0):
        for _ in range(3):
            await (await hog.enqueue()).result(timeout=30)
    assert len(named(caplog)) == 1


async def test_a_task_that_waits_is_not_named(caplog: Log) -> None:
    app = App(MemoryStore())

    @app.task
    async def waits() -> None:
        await asyncio.sleep(0.8)

    @app.task
    def in_a_thread() -> None:
        time.sleep(0.8)

    async with app, app.worker(lease="5m", grace=0):
        jobs = [await waits.enqueue(), await in_a_thread.enqueue()]
        for job in jobs:
            await job.result(timeout=30)
    assert named(caplog) == []
