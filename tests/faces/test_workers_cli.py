"""`tickwheel workers`, on a real file."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tickwheel import App
from tickwheel.cli import main


def test_workers_are_listed_while_they_live(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)

    @app.task(queue="mail")
    async def send() -> None: ...

    async def work() -> None:
        async with app, app.worker(concurrency=7) as worker:
            while not await app.workers():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(look, worker.name)

    def look(name: str) -> None:
        assert main(["workers", "--store", url]) == 0
        out = capsys.readouterr().out
        assert name in out and "default, mail" in out
        assert main(["workers", "list", "--store", url, "-o", "json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["workers"]
        assert (found["name"], found["concurrency"]) == (name, 7)
        assert found["started"].endswith("Z")

    asyncio.run(work())
    assert main(["workers", "--store", url]) == 0
    assert "no workers" in capsys.readouterr().err
