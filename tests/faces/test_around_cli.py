"""Lifespans and middleware under the real commands: `tickwheel worker` and `tickwheel dev`."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from worker_process import Command, enqueue, look, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix", reason="needs POSIX"),
]

SHOP = """
import asyncio, os, sys, time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from tickwheel import INJECTED, App

app = App("sqlite:///jobs.db")

class Db:
    pass

class File:
    pass

def note(what: str) -> None:
    with open("record", "a") as record:
        record.write(f"{what} {os.getpid()}\\n")

@app.lifespan
async def db() -> AsyncIterator[Db]:
    note("db opened")
    ON_START
    yield Db()
    ON_CLOSE
    note("db closed")

@app.lifespan
def file() -> Iterator[File]:
    note("file opened")
    yield File()
    note("file closed")

@app.middleware
async def noted(job, call_next):
    note(f"before {job.job.task}")
    value = await call_next()
    note(f"after {job.job.task}")
    return [value]

@app.task
async def on_loop(db: Db = INJECTED) -> str:
    return type(db).__name__

@app.task
def in_thread(db: Db = INJECTED) -> str:
    return type(db).__name__

@app.task(pool="process")
def in_child(file: File = INJECTED) -> str:
    return type(file).__name__
"""


def shop(folder: Path, *, start: str = "pass", close: str = "pass") -> None:
    (folder / "shop.py").write_text(SHOP.replace("ON_START", start).replace("ON_CLOSE", close))
    (folder / "record").touch()


def record(folder: Path) -> list[str]:
    """What happened, without the numbers of the processes."""
    return [line.rpartition(" ")[0] for line in (folder / "record").read_text().splitlines()]


def pids(folder: Path, what: str) -> set[str]:
    lines = (folder / "record").read_text().splitlines()
    return {line.rpartition(" ")[2] for line in lines if line.startswith(what)}


@pytest.mark.parametrize("command", ["worker", "dev"])
def test_they_are_around_the_runs_of_every_pool(
    command: str, tmp_path: Path, runner: asyncio.Runner
) -> None:
    shop(tmp_path)
    tasks = ("on_loop", "in_thread", "in_child")
    ids = [enqueue(tmp_path, runner, task) for task in tasks]
    with Command(tmp_path, command, "shop:app", "--task-processes", "1") as worker:
        until(lambda: all(look(tmp_path, runner, id).state == "done" for id in ids), "the jobs")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0, worker.said
    results = [look(tmp_path, runner, id).result for id in ids]
    assert results == [["Db"], ["Db"], ["File"]]
    story = record(tmp_path)
    assert story[0] == "db opened" and story[-2:] == ["file closed", "db closed"]
    assert sorted(story[1:-2]) == sorted(
        ["file opened", *(f"{when} {task}" for when in ("before", "after") for task in tasks)]
    )
    # The middleware is in the worker's process, whatever the task's pool.
    assert pids(tmp_path, "before") == pids(tmp_path, "db") != pids(tmp_path, "file")


def test_each_of_several_processes_opens_its_own(tmp_path: Path) -> None:
    shop(tmp_path)
    with Command(tmp_path, "worker", "shop:app", "--processes", "2") as worker:
        until(lambda: record(tmp_path).count("db opened") == 2, "two lifespans")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0, worker.said
    assert record(tmp_path).count("db closed") == 2 and len(pids(tmp_path, "db opened")) == 2


def test_one_that_fails_ends_the_command_with_one_line(
    tmp_path: Path, runner: asyncio.Runner
) -> None:
    shop(tmp_path, start="raise ConnectionError('no database')")
    id = enqueue(tmp_path, runner, "on_loop")
    with Command(tmp_path, "worker", "shop:app") as worker:
        assert worker.code() == 1
        said = worker.said
    problem = "the lifespan shop.db failed at its start: ConnectionError: no database"
    assert said.splitlines()[-1] == f"error: {problem}"
    # The log has the traceback, and only that of the user's code is of interest.
    assert f"ERROR   tickwheel: {problem}\nTraceback" in said
    assert "raise ConnectionError('no database')" in said
    assert look(tmp_path, runner, id).attempts == 0


def test_under_a_supervisor_one_that_fails_is_tried_again(tmp_path: Path) -> None:
    shop(
        tmp_path,
        start="if record_of().count('db opened') < 3: raise ConnectionError('no database')",
    )
    with (tmp_path / "shop.py").open("a") as module:
        module.write("\ndef record_of() -> str:\n    return Path('record').read_text()\n")
    with Command(tmp_path, "worker", "shop:app", "--processes", "2") as worker:
        worker.until_it_says("started, serving")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0, worker.said
    assert "restarting it in" in worker.said


@pytest.mark.parametrize("how", ["await asyncio.sleep(600)", "await asyncio.to_thread(nap)"])
def test_one_that_hangs_at_its_start_ends_with_the_signal(
    how: str, tmp_path: Path, runner: asyncio.Runner
) -> None:
    shop(tmp_path, start=how)
    with (tmp_path / "shop.py").open("a") as module:
        module.write("\ndef nap() -> None:\n    time.sleep(600)\n")
    id = enqueue(tmp_path, runner, "on_loop")
    with Command(tmp_path, "worker", "shop:app") as worker:
        until(lambda: record(tmp_path), "the start")
        worker.signal(signal.SIGINT)
        assert worker.code() == 0, worker.said
    assert "stopped" in worker.said and "Traceback" not in worker.said
    assert look(tmp_path, runner, id).attempts == 0


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("await asyncio.sleep(600)", "the lifespan shop.db did not close within 2s"),
        ("raise OSError('gone')", "the lifespan shop.db failed at its close: OSError: gone"),
    ],
)
def test_one_that_does_not_close_is_logged_and_keeps_nobody(
    how: str, said: str, tmp_path: Path, runner: asyncio.Runner
) -> None:
    shop(tmp_path, close=how)
    id = enqueue(tmp_path, runner, "on_loop")
    with Command(tmp_path, "worker", "shop:app", "--grace", "0s") as worker:
        until(lambda: look(tmp_path, runner, id).state == "done", "the job")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0, worker.said
    assert said in worker.said


def test_a_slow_close_is_waited_for(tmp_path: Path) -> None:
    shop(tmp_path, close="await asyncio.sleep(1)")
    with Command(tmp_path, "worker", "shop:app") as worker:
        worker.until_it_says("tasks ")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0, worker.said
    assert record(tmp_path) == ["db opened", "db closed"]


def test_a_mistake_in_one_waits_for_its_fix_in_dev(tmp_path: Path) -> None:
    shop(tmp_path, start="raise ConnectionError('no database')")
    with Command(tmp_path, "dev", "shop:app") as dev:
        dev.until_it_says("it restarts when a file changes")
        assert "failed at its start: ConnectionError: no database" in dev.said
        shop(tmp_path)
        dev.until_it_says("started, serving")
        dev.signal(signal.SIGINT)
        assert dev.code() == 0, dev.said
    assert record(tmp_path)[-1] == "db closed"
