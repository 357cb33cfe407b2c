"""A shop, and commands on it in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tickwheel
from tickwheel import App, JobInfo
from tickwheel.ids import new_id
from tickwheel.job import Job

SHOP = """
import asyncio, atexit, os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tickwheel import App

app = App("sqlite:///jobs.db")

@app.task
async def mark(name: str) -> None:
    Path(name).write_text(str(os.getpid()))

@app.task
def nap(seconds: float) -> None:
    Path("napping").touch()
    time.sleep(seconds)
    Path("rested").touch()

@app.task
async def to_thread(seconds: float) -> None:
    Path("napping").touch()
    await asyncio.to_thread(time.sleep, seconds)

@app.task
async def block(seconds: float) -> None:
    Path("napping").touch()
    time.sleep(seconds)

pool = ThreadPoolExecutor(1)

@app.task
async def pooled() -> None:
    atexit.register(Path("left").touch)
    pool.submit(time.sleep, 0).result()

@app.task
async def leave(behind: bool) -> None:
    if not behind:
        raise SystemExit(2)
    asyncio.get_running_loop().call_soon(sys.exit, 2)
"""


def environment() -> dict[str, str]:
    """For child processes: our package, and nothing that would change what they print."""
    ours = str(Path(tickwheel.__file__).parents[1])
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return known | {"PYTHONPATH": ours}


def until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


class Command:
    """`python -m tickwheel …` in a folder, and what it has said so far."""

    def __init__(self, folder: Path, *argv: str, **env: str) -> None:
        self._log = folder / f"log-{time.monotonic_ns()}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tickwheel", *argv],
                cwd=folder,
                env=environment() | env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    @property
    def said(self) -> str:
        return self._log.read_text()

    def until_it_says(self, words: str) -> None:
        until(lambda: words in self.said or self.process.poll() is not None, words)
        assert words in self.said

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def took_its_signals(self) -> bool:
        """Whether the kernel has delivered all signals to the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*(\w+)$", status, re.MULTILINE)
        return not any(int(mask, 16) for mask in pending)

    def code(self, seconds: float = 20) -> int:
        return self.process.wait(seconds)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def enqueue(folder: Path, runner: asyncio.Runner, task: str, **arguments: Any) -> str:
    """Add a job for one of the shop's tasks, as another process would."""

    async def add() -> str:
        app = App(f"sqlite:///{folder}/jobs.db")
        async with app:
            now_ms = time.time_ns() // 1_000_000
            job = Job(
                id=new_id(now_ms),
                task=task,
                payload=json.dumps(arguments),
                due_ms=now_ms,
                created_ms=now_ms,
            )
            await (await app.client()).add(job)
            return job.id

    return runner.run(add())


def look(folder: Path, runner: asyncio.Runner, id: str) -> JobInfo:
    async def info() -> JobInfo:
        async with App(f"sqlite:///{folder}/jobs.db") as app:
            return await app.job(id).info()

    return runner.run(info())
