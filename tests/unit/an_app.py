"""An app for tests, a few functions for its tasks, and what its store holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tickwheel import (
    App,
)


@pytest.fixture
def app() -> App:
    return App("memory://")


async def add(a: int, b: int = 0) -> int:
    return a + b


def add_in_thread(a: int, b: int = 0) -> int:
    return a + b


async def waiting(app: App) -> int:
    return sum(queue.waiting for queue in await app.queues())


@pytest.fixture
def on_disk(tmp_path: Path) -> App:
    """An app whose store answers nothing once it is closed."""
    return App(f"sqlite:///{tmp_path}/jobs.db")


def is_open(app: App) -> bool:
    """Whether the running loop still has a client; a call would open another one."""
    return asyncio.get_running_loop() in app._access._clients
