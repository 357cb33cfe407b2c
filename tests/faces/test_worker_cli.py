"""`tickwheel worker` and other commands, in processes of their own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from worker_process import Command, enqueue, environment, folder, look, until

import tickwheel

__all__ = ["folder"]


@pytest.mark.slow
def test_a_worker_runs_jobs_and_stops_when_told(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "mark", name="packed")
    with Command(folder, "worker", "shop:app", "--concurrency", "7") as worker:
        until(lambda: look(folder, runner, id).state == "done", "the job")
        assert (folder / "packed").read_text() == str(worker.process.pid)
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        said = worker.said
    for line in (
        rf"tickwheel +{re.escape(tickwheel.__version__)}",
        r"app +shop:app",
        r"store +sqlite:///jobs\.db",
        r"queues +default",
        r"concurrency +7",
        rf"pid +{worker.process.pid}",
        r"tasks +block, leave, mark, nap, pooled, to_thread",
        r"\S+ \S+Z INFO    tickwheel: stopping: 0 running, grace 30s; signal again to end at once",
    ):
        assert re.search(f"^{line}$", said, re.MULTILINE), (line, said)
    assert "\x1b" not in said


@pytest.mark.slow
def test_an_idle_thread_pool_does_not_spoil_the_exit(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "pooled")
    with Command(folder, "worker", "shop:app") as worker:
        until(lambda: look(folder, runner, id).state == "done", "the job")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        assert "threads still running" not in worker.said
    # What the program registered for its exit was called.
    assert (folder / "left").exists()


@pytest.mark.slow
def test_running_jobs_may_finish(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "nap", seconds=1.5)
    with Command(folder, "worker", "shop") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGINT)
        worker.until_it_says("stopping: 1 running, grace 30s")
        assert worker.code() == 0
    assert (folder / "rested").exists()
    assert look(folder, runner, id).state == "done"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nap", "block"])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it_at_once(
    folder: Path, runner: asyncio.Runner, task: str, number: signal.Signals, code: int
) -> None:
    enqueue(folder, runner, task, seconds=600)
    with Command(folder, "worker", "shop") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGTERM)
        # A task that blocks the event loop keeps it from saying anything.
        if task == "block":
            until(worker.took_its_signals, "the first signal")
        else:
            worker.until_it_says("stopping: 1 running")
        worker.signal(number)
        assert worker.code(10) == code
        assert "killed by a second signal" in worker.said


@pytest.mark.slow
@pytest.mark.parametrize("task", ["nap", "to_thread"])
def test_a_hung_thread_does_not_hang_the_exit(
    folder: Path, runner: asyncio.Runner, task: str
) -> None:
    enqueue(folder, runner, task, seconds=600)
    with Command(folder, "worker", "shop", "--grace", "100ms") as worker:
        until((folder / "napping").exists, "the job's start")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        assert "threads still running" in worker.said
        assert worker.said.endswith("tickwheel: stopped\n")


@pytest.mark.slow
def test_a_task_that_exits_fails_alone(folder: Path, runner: asyncio.Runner) -> None:
    id = enqueue(folder, runner, "leave", behind=False)
    with Command(folder, "worker", "shop") as worker:
        until(lambda: look(folder, runner, id).failures, "the failure")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0


@pytest.mark.slow
def test_what_a_task_left_behind_and_exits_is_no_usage_error(
    folder: Path, runner: asyncio.Runner
) -> None:
    enqueue(folder, runner, "leave", behind=True)
    with Command(folder, "worker", "shop") as worker:
        assert worker.code() == 1
        assert "called sys.exit(2)" in worker.said


# What the installed script does.
INSTALLED = "import sys; from tickwheel.cli import main; sys.exit(main())"


@pytest.mark.slow
def test_the_current_folder_is_searched_by_the_installed_command(
    folder: Path, runner: asyncio.Runner
) -> None:
    enqueue(folder, runner, "mark", name="packed")
    # -P: Python itself adds no folder to its path.
    result = subprocess.run(
        [sys.executable, "-P", "-c", INSTALLED, "queues", "--app", "shop:app"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("QUEUE")


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(folder: Path, runner: asyncio.Runner) -> None:
    for _ in range(3):
        enqueue(folder, runner, "mark", name="packed")
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(
        [sys.executable, "-m", "tickwheel", "jobs", "--store", "sqlite:///jobs.db"],
        cwd=folder,
        env=environment(),
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    os.close(write)
    assert (result.returncode, result.stderr) == (1, "")


MAIL = """
from shop import app

@app.task
async def letter() -> None: ...
"""


@pytest.mark.slow
def test_a_worker_imports_the_modules_that_have_its_tasks(folder: Path) -> None:
    for name in ("mail", "parcels", "stamps"):
        (folder / f"{name}.py").write_text(MAIL.replace("letter", name))
    shop = folder / "shop.py"
    shop.write_text(shop.read_text().replace('jobs.db"', 'jobs.db", imports=["stamps"]'))
    options = ("--import", "mail", "--import", "parcels", "--threads", "3")
    with Command(folder, "worker", "shop:app", *options) as worker:
        worker.until_it_says("tasks")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        assert re.search(
            r"^tasks +.*mail, mark, nap, parcels, pooled, stamps", worker.said, re.MULTILINE
        )
        assert re.search(r"^threads +3$", worker.said, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("mial", "no module named 'mial' in "),
        ("mail/letters.py", "'mail/letters.py' is a path; name the module"),
        ("mail:app", "'mail:app' is an app; --import takes a module, as in shop.mail"),
        ("mail", "mail.py:4: "),
    ],
)
def test_a_module_that_can_not_be_imported_is_named(folder: Path, module: str, words: str) -> None:
    (folder / "mail.py").write_text("\n\n\n1 / 0\n")
    with Command(folder, "worker", "shop:app", "--import", module) as worker:
        assert worker.code() == 2
        assert f"error: {words}" in worker.said


@pytest.mark.slow
def test_every_process_of_a_worker_gets_the_options(folder: Path) -> None:
    (folder / "mail.py").write_text(MAIL)
    (folder / "tickwheel.toml").write_text('imports = ["mail"]\ntask_processes = 3\n')
    from tickwheel.cli.work import Work
    from tickwheel.config import load

    flags = {"imports": (), "threads": 5, "concurrency": 9}
    settings = load(flags, environ={}, folder=folder).settings
    command = Work("shop:app", settings).command(7)
    assert " ".join(command[3:]).startswith(
        "worker shop:app --import mail --concurrency 9 --threads 5 --task-processes 3 --lease 15s"
    )
    with Command(folder, *command[3:-2]) as worker:
        worker.until_it_says("letter")


@pytest.mark.slow
def test_a_worker_on_a_store_in_memory_warns_once(folder: Path) -> None:
    shop = folder / "shop.py"
    shop.write_text(shop.read_text().replace("sqlite:///jobs.db", "memory://"))
    with Command(folder, "worker", "shop:app") as worker:
        worker.until_it_says("its jobs are lost when this process ends, and no other")
        worker.signal(signal.SIGTERM)
        assert worker.code() == 0
        assert worker.said.count("WARNING") == 1
