"""`tickwheel worker --log-format json`, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from worker_process import Command

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX"),
]

SHOP = """
from tickwheel import App
app = App("memory://")

def charge() -> None:
    raise ValueError("no such order")

@app.every("1s")
async def tick() -> None: ...

@app.every("1s")
async def tock() -> None:
    charge()
"""


@pytest.mark.parametrize("command", [("worker",), ("worker", "--processes", "2"), ("dev",)])
def test_each_line_of_the_log_is_an_object(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    name, *rest = command
    with Command(tmp_path, name, "shop:app", *rest, "--log-format", "json") as worker:
        worker.until_it_says("failed (1 of 6)")
        worker.until_it_says("done in")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        lines: list[dict[str, Any]] = [json.loads(line) for line in worker.said.splitlines()]
    [first, *_] = [line for line in lines if line.get("outcome") == "retry"]
    assert (first["task"], first["queue"], first["attempt"]) == ("tock", "default", 1)
    assert first["job_id"] in first["message"]
    assert first["exception"].splitlines()[-1] == "ValueError: no such order"
    assert "engine/attempt.py" not in first["exception"]
    done = [line for line in lines if line.get("outcome") == "done"]
    assert {line["task"] for line in done} == {"tick"}
    assert all(line["took_ms"] >= 0 and line["late_ms"] >= 0 for line in done)


def test_a_failure_is_shown_without_our_frames(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    with Command(tmp_path, "worker", "shop:app") as worker:
        worker.until_it_says("ValueError: no such order\n")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        said = worker.said
    assert 'shop.py", line 6, in charge' in said
    assert "tickwheel/engine" not in said
