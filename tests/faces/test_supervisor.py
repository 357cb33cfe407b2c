"""`--processes`: children that die are replaced, and none outlives its parent.

The first half drives a supervisor in this process, with children that are one line of Python. The
second half is the real command with real workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from worker_process import SHOP, Command, enqueue, look, until

from tickwheel.operate import supervisor
from tickwheel.operate.supervisor import Supervisor, how_it_ended

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")


# --- With children of one line


def python(code: str) -> Callable[[int, int], Sequence[str]]:
    return lambda pipe, number: [sys.executable, "-c", code, str(pipe)]


async def eventually(condition: Callable[[], object], what: str) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
    assert condition(), what


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(supervisor, "FIRST_S", 0.01)
    monkeypatch.setattr(supervisor, "LONGEST_S", 0.04)
    caplog.set_level(logging.INFO, "tickwheel")


@pytest.mark.parametrize("code", [2, 3])
async def test_a_child_that_dies_is_replaced_after_a_growing_pause(
    caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Whatever a job may end its process with."""
    several = Supervisor(python(f"import sys; sys.exit({code})"), processes=1, grace_s=1)
    running = asyncio.create_task(several.run())
    await eventually(lambda: len(caplog.messages) >= 4, "four deaths")
    several._signalled(signal.SIGTERM)
    assert await running == 0
    pauses = [re.search(r"in (\w+)$", text) for text in caplog.messages[:4]]
    assert [found and found[1] for found in pauses] == ["10ms", "20ms", "40ms", "40ms"]
    assert re.match(rf"process 1 \(pid \d+\) exited with code {code}; ", caplog.messages[0])


async def test_the_pause_is_short_again_once_a_child_has_lived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "HEALTHY_S", 0)
    several = Supervisor(python("import sys; sys.exit(3)"), processes=1, grace_s=1)
    running = asyncio.create_task(several.run())
    await eventually(lambda: len(caplog.messages) >= 3, "three deaths")
    several._signalled(signal.SIGTERM)
    assert await running == 0
    assert all(text.endswith("in 10ms") for text in caplog.messages[:3])


async def test_a_usage_error_stops_all(tmp_path: Path) -> None:
    # The first to come makes a usage error, the other one would live on.
    code = f"""
import os, sys, time
try:
    os.mkdir({str(tmp_path / "first")!r})
except FileExistsError:
    time.sleep(600)
sys.exit(78)
"""
    assert await Supervisor(python(code), processes=2, grace_s=1).run() == 2


async def test_what_can_not_be_started_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    several = Supervisor(lambda pipe, number: ["/nowhere/python"], processes=2, grace_s=1)
    assert await several.run() == 1
    assert "could not start process 1" in caplog.messages[0]


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open({ready!r}, "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "signals, code",
    [([signal.SIGTERM], 1), ([signal.SIGTERM, signal.SIGINT], 130)],
)
async def test_a_child_that_will_not_stop_is_killed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    signals: list[signal.Signals],
    code: int,
) -> None:
    # In time after one signal, at once after two.
    monkeypatch.setattr(supervisor, "AFTER_GRACE_S", 0.1 if len(signals) == 1 else 600)
    ready = tmp_path / "ready"
    several = Supervisor(python(STUBBORN.format(ready=str(ready))), processes=1, grace_s=0.1)
    running = asyncio.create_task(several.run())
    await eventually(ready.exists, "the child")
    for number in signals:
        several._signalled(number)
    async with asyncio.timeout(10):
        assert await running == code
    assert any("killing process" in text for text in caplog.messages)


# Reads its pipe until it is told that this is enough, and says if nothing came, not even its end.
PIPE_READER = """
import os, select, sys
from pathlib import Path
folder, pipe = Path({folder!r}), int(sys.argv[1])
(folder / "reading").touch()
while not (folder / "enough").exists():
    if select.select([pipe], [], [], 0.01)[0]:
        sys.exit("the pipe has ended")
if not select.select([pipe], [], [], 0)[0]:
    (folder / "open").touch()
os.read(pipe, 1)
"""


async def test_the_pipe_stays_open_while_the_parent_lives(tmp_path: Path) -> None:
    several = Supervisor(python(PIPE_READER.format(folder=str(tmp_path))), processes=1, grace_s=1)
    running = asyncio.create_task(several.run())
    await eventually((tmp_path / "reading").exists, "the child")
    (tmp_path / "enough").touch()
    await eventually((tmp_path / "open").exists, "the child's word that its pipe is open")
    several._signalled(signal.SIGTERM)
    assert await running == 0


@pytest.mark.parametrize(
    "code, words",
    [
        (0, "exited with code 0"),
        (-9, "was killed by SIGKILL"),
        (-63, "was killed by signal 63"),
    ],
)
def test_how_it_ended(code: int, words: str) -> None:
    assert how_it_ended(code) == words


# --- With real workers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def started(command: Command, count: int) -> list[int]:
    """The pids of the first `count` workers, once they have started."""

    def pids() -> list[int]:
        return [int(pid) for pid in re.findall(r"\[(\d+)\] tickwheel: started", command.said)]

    until(lambda: len(pids()) >= count, f"{count} workers")
    return pids()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/status").read_text() if Path("/proc/self").exists() else ""
    except (ProcessLookupError, FileNotFoundError):
        return False
    # A zombie has ended, even if nobody has asked for its exit code yet.
    return "\nState:\tZ" not in status


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_jobs_go_on(folder: Path, runner: asyncio.Runner) -> None:
    with Command(folder, "worker", "shop", "--processes", "2", "--lease", "1s") as command:
        first, second = started(command, 2)
        os.kill(first, signal.SIGKILL)
        command.until_it_says(f"(pid {first}) was killed by SIGKILL; restarting it in 500ms")
        *_, third = started(command, 3)
        os.kill(second, signal.SIGKILL)
        id = enqueue(folder, runner, "mark", name="packed")
        until((folder / "packed").exists, "the job")
        until(lambda: look(folder, runner, id).state == "done", "its outcome")
        assert third not in (first, second)
        command.signal(signal.SIGTERM)
        assert command.code() == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(
    folder: Path, runner: asyncio.Runner, number: signal.Signals
) -> None:
    id = enqueue(folder, runner, "nap", seconds=1)
    with Command(folder, "worker", "shop", "--processes", "2") as command:
        pids = started(command, 2)
        until((folder / "napping").exists, "the job's start")
        command.signal(number)
        assert command.code() == 0
        assert command.said.count("running, grace 30s\n") == 2
        assert not any(alive(pid) for pid in pids)
    assert look(folder, runner, id).state == "done"


@pytest.mark.slow
def test_a_worker_that_is_signalled_twice_still_stops_gracefully(
    folder: Path, runner: asyncio.Runner
) -> None:
    """Service managers signal every process of the group, and so does the parent."""
    id = enqueue(folder, runner, "nap", seconds=1)
    with Command(folder, "worker", "shop", "--processes", "2") as command:
        pids = started(command, 2)
        until((folder / "napping").exists, "the job's start")
        for pid in (command.process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        assert command.code() == 0
    assert look(folder, runner, id).state == "done"


@pytest.mark.slow
def test_a_second_signal_kills_all(folder: Path, runner: asyncio.Runner) -> None:
    enqueue(folder, runner, "nap", seconds=600)
    with Command(folder, "worker", "shop", "--processes", "2") as command:
        pids = started(command, 2)
        until((folder / "napping").exists, "the job's start")
        command.signal(signal.SIGTERM)
        command.until_it_says("signal again to kill them")
        command.signal(signal.SIGTERM)
        assert command.code(10) == 143
        assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_no_worker_outlives_its_parent(folder: Path, runner: asyncio.Runner) -> None:
    with Command(folder, "worker", "shop", "--processes", "2") as command:
        pids = started(command, 2)
        # Workers that are replaced hold the pipe as well.
        os.kill(pids[0], signal.SIGKILL)
        pids = started(command, 3)
        command.process.kill()
        until(lambda: not any(alive(pid) for pid in pids), "the workers' end", seconds=10)
        assert command.said.count("the parent process has ended") == 2


@pytest.mark.slow
def test_an_app_that_can_not_be_used_stops_everything(folder: Path) -> None:
    (folder / "broken.py").write_text("import not_there\n")
    with Command(folder, "worker", "broken", "--processes", "2") as command:
        begun = time.monotonic()
        assert command.code() == 2
        assert time.monotonic() - begun < 15
        assert "error: broken.py:1: No module named 'not_there'" in command.said
        assert "Traceback" not in command.said
