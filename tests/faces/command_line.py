"""Run commands in this process, on a store with a job in every state."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tickwheel
from tickwheel import App
from tickwheel.cli import main
from tickwheel.job import CancelOutcome


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., Said]


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Cli]:
    """Run a command in an empty folder, on the store `jobs.db` there unless it says otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKWHEEL_STORE", "sqlite:///jobs.db")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    known = set(sys.modules)

    def run(*argv: str) -> Said:
        # Python does not know yet of files that a test wrote a moment ago.
        importlib.invalidate_caches()
        capsys.readouterr()
        code = main(argv)
        out, err = capsys.readouterr()
        return Said(code, out, err)

    yield run
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def one_error(said: Said) -> str:
    """The one line that a user's mistake is answered with."""
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("error: ")
    return line


class Shop:
    """A store with a job in every state, made through an app."""

    def __init__(self, folder: Path) -> None:
        self.app = App(f"sqlite:///{folder}/jobs.db")
        self.ids: dict[str, str] = {}

    async def fill(self) -> None:
        app = self.app

        @app.task
        async def pack(order: int, note: str = "") -> dict[str, int]:
            return {"order": order}

        @app.task(queue="mail", retries=0)
        async def send(to: str) -> None:
            raise ValueError(f"no mailbox for {to}")

        async with app:
            done = await pack.using(id="order-1").enqueue(1, note="grüße")
            dead = await send.enqueue("ann@example.org")
            async with app.worker(guarded=False):
                await done.result(timeout=10)
                with pytest.raises(tickwheel.JobFailed):
                    await dead.result(timeout=10)
            waiting = await pack.using(delay="30m").enqueue(2)
            cancelled = await pack.using(delay="1h", priority="high").enqueue(3)
            assert await cancelled.cancel() is CancelOutcome.CANCELLED
        self.ids = {
            "done": done.id,
            "dead": dead.id,
            "waiting": waiting.id,
            "cancelled": cancelled.id,
        }


@pytest.fixture
def ids(tmp_path: Path, runner: asyncio.Runner) -> dict[str, str]:
    """The ids of a job that waits, one that is done, one dead and one cancelled."""
    shop = Shop(tmp_path)
    runner.run(shop.fill())
    return shop.ids
