"""Meta, expiry and progress, as operators see them: commands, and a worker's process and log."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins
from worker_process import Command, environment, until

from tickwheel.cli import explain as explain_command
from tickwheel.cli.views import show_job
from tickwheel.job import Job, Outcome, Progress, Run, State
from tickwheel.operate.documents import explanation_document, job_document
from tickwheel.operate.explain import explain
from tickwheel.operate.facts import Facts

NOW = 1_800_000_000_000  # 2027-01-15 08:00:00Z


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {"id": "j", "task": "pack", "payload": "{}"}
    return Job(**fields | {"due_ms": NOW - 1000, "created_ms": NOW - 60_000} | changes)


RUNNING = job(
    state=State.RUNNING,
    worker="w1",
    attempt=1,
    lease_until_ms=NOW + 9000,
    started_ms=NOW - 900,
    meta={"tenant": "acme", "customer": "4\n2"},
    expires_ms=NOW + 60_000,
    progress=Progress(0.999, "loading"),
)


def facts(of: Job) -> Facts:
    return Facts(job=of, queue=None, workers=[], schedules=[], now_ms=NOW, takeovers=5)


def test_a_job_is_shown_with_its_meta_expiry_and_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_job(RUNNING, NOW)
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    at = lines.index(["meta", "customer=4 2"])
    assert lines[at + 1] == ["tenant=acme"]
    # Not all of it, if it isn't.
    assert ["progress", "99%: loading"] in lines
    [expires] = [line for line in lines if line[0] == "expires"]
    assert expires[1].startswith("2027-01-15 08:01:00")
    show_job(job(), NOW)
    plain = capsys.readouterr().out
    assert not any(word in plain for word in ("meta", "expires", "progress"))


def test_programs_get_the_same() -> None:
    document = to_builtins(job_document(RUNNING))
    assert document["meta"] == {"tenant": "acme", "customer": "4\n2"}
    assert document["expires"] == "2027-01-15T08:01:00.000Z"
    assert document["progress"] == {"part": 0.999, "words": "loading"}
    plain = to_builtins(job_document(job()))
    assert (plain["meta"], plain["expires"], plain["progress"]) == ({}, None, None)


def test_explain_shows_the_meta(capsys: pytest.CaptureFixture[str]) -> None:
    explain_command._show(facts(RUNNING), explain(facts(RUNNING)))
    said = capsys.readouterr().out
    assert "customer=4 2" in said and "tenant=acme" in said and "99%: loading" in said
    found = explanation_document(facts(RUNNING), explain(facts(RUNNING)))
    document = to_builtins(found)
    assert document["meta"] == {"tenant": "acme", "customer": "4\n2"}
    assert document["progress"] == {"part": 0.999, "words": "loading"}
    assert document["expires"] == "2027-01-15T08:01:00.000Z"


def test_an_expired_job_shows_why_it_was_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(attempt=1, worker="w1", outcome=Outcome.EXPIRE, due_ms=NOW, ended_ms=NOW)
    show_job(
        job(
            state=State.CANCELLED, error="expired", expires_ms=NOW - 5, ended_ms=NOW, history=(run,)
        ),
        NOW,
    )
    said = capsys.readouterr().out
    assert "expired" in said and "expire " in said


# --- A worker's process

SHOP = """
import asyncio, json
from pathlib import Path
from tickwheel import App, current_job

app = App("memory://", inherit_meta=True)

def note(name: str) -> None:
    context = current_job()
    context.progress(0.5, name)
    known = [context.id, context.task, context.attempt, context.meta, context.stopping]
    times = [context.due.timestamp(), context.deadline.timestamp()]
    path = Path(f"{name}.json")
    path.with_suffix(".part").write_text(json.dumps([known, times]))
    path.with_suffix(".part").rename(path)

@app.task
async def on_loop() -> None:
    note("on_loop")

@app.task
def in_thread() -> None:
    note("in_thread")

@app.task(pool="process")
def in_process() -> None:
    note("in_process")

@app.task
async def start() -> None:
    for task in (on_loop, in_thread, in_process):
        await task.enqueue()

@app.every("1s", name="first")
@app.task(retries=0)
async def first() -> None:
    if not Path("started").exists():
        Path("started").touch()
        await app.pause("default")
        call = start.using(meta={"customer": "42"})
        await on_loop.using(id="late", expires="500ms").enqueue()
        await call.enqueue()
        await asyncio.sleep(1)
        await app.resume("default")
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_a_worker_process_tells_its_tasks_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    names = ("on_loop", "in_thread", "in_process")
    with Command(tmp_path, "worker", "shop:app", "--log-format", "json") as worker:
        for name in names:
            until((tmp_path / f"{name}.json").exists, name, seconds=60)
        worker.until_it_says("expired: could not start by")
        for name in names:
            worker.until_it_says(f'"message":"{name} ')
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        lines: list[dict[str, Any]] = [json.loads(line) for line in worker.said.splitlines()]
    for name in names:
        known, (due, deadline) = json.loads((tmp_path / f"{name}.json").read_text())
        assert known[1:] == [name, 1, {"customer": "42"}, False]
        assert 3600 <= deadline - due < 3600 + 60
        [line] = [each for each in lines if each.get("job_id") == known[0]]
        assert (line["outcome"], line["meta"]) == ("done", {"customer": "42"})
    [late] = [line for line in lines if line.get("outcome") == "expire"]
    assert (late["job_id"], late["level"]) == ("late", "info")


# --- The page


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "context.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    said = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0, said.stderr
