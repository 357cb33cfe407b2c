"""Freezing processes, so that what a test does next finds them frozen."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

STOPS_WITHIN_S = 10


def freeze(pid: int) -> None:
    """Stop the process, and return when it has stopped.

    The signal alone is only a request: threads on other cores, or inside a system call, go on for a
    moment and may answer one more request.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + STOPS_WITHIN_S
    while not _stopped(pid):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not stop within {STOPS_WITHIN_S} s")
        time.sleep(0.001)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def _stopped(pid: int) -> bool:
    """Whether every thread is stopped; one that has ended meanwhile does nothing either."""
    return all(_state(thread) in "TtZX" for thread in Path(f"/proc/{pid}/task").iterdir())


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
