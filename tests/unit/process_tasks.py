"""Tasks for the process tests: a child has to import them, so they are at the top of a module."""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tickwheel import App, GiveUp, Retry, Snooze, current_job

app = App("memory://")


@app.task(pool="process")
def decorated(a: int, b: int = 2) -> list[int]:
    """Its name leads the child to the task around the function."""
    return [a, b]


def where() -> int:
    return os.getpid()


def job_seen() -> bool:
    return current_job() is not None


def note_and_sleep(path: str, seconds: float) -> int:
    """Say who we are, then take a while."""
    Path(path).write_text(str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()


def leave(how: str) -> None:
    """End the process in the middle of a task."""
    if how == "sys.exit":
        sys.exit(3)
    if how == "os._exit":
        os._exit(4)
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(10)


class Picky(Exception):
    """Can be pickled, but not read back: it wants two arguments and passes on one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


class Unpicklable(Exception):
    """Holds what belongs to one process."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.lock = threading.Lock()


ERRORS: dict[str, Exception] = {
    "plain": ValueError("no luck"),
    "picky": Picky("paper", "out of it"),
    "unpicklable": Unpicklable("held"),
    "end of file": EOFError("the file ended"),
    "broken pipe": BrokenPipeError("somebody else's pipe"),
    "give up": GiveUp("enough"),
    "snooze": Snooze("1h"),
    "retry": Retry("1h", reason="busy"),
}


class Panic(BaseException):
    """As a panic of Rust code arrives."""


class Evil(Exception):
    """Nothing about it can be had."""

    def __str__(self) -> str:
        raise Panic("no words")

    def __reduce__(self) -> Any:
        raise Panic("no pickling")


# What must end neither the child nor its worker.
ESCAPES: dict[str, BaseException] = {
    "SystemExit: 3": SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "CancelledError": asyncio.CancelledError(),
    "Panic: at the disco": Panic("at the disco"),
    "StopIteration": StopIteration(),
    "Evil: (its message can't be read)": Evil(),
}


def fail(how: str) -> None:
    raise ERRORS[how]


def escape(how: str) -> None:
    raise ESCAPES[how]


def unpicklable_result() -> Any:
    return threading.Lock()


def evil_result() -> Any:
    return Evil()


def leave_with_a_process_behind(path: str, how: str) -> None:
    """End in the middle of a task; a process that was started before lives on."""
    if how == "program":
        pid = subprocess.Popen(["sleep", "60"], close_fds=False).pid
    else:
        # The C library's own fork runs none of Python's hooks.
        pid = os.fork() if how == "fork" else ctypes.CDLL(None).fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    Path(path).write_text(str(pid))
    os._exit(4)


def return_twice() -> int:
    """The classic slip with fork: both processes return."""
    os.fork()
    return os.getpid()


SIGNALS = """
import signal
for each in (signal.SIGINT, signal.SIGTERM):
    print(signal.getsignal(each) == signal.SIG_IGN)
"""


def signals_ignored_by_programs() -> list[str]:
    return subprocess.check_output([sys.executable, "-c", SIGNALS], text=True).split()


def survive_signals() -> int:
    for each in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), each)
    return os.getpid()


def in_more_processes(numbers: list[int], method: str) -> list[int]:
    # Leaving the pool ends its processes by SIGTERM.
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(abs, numbers)


def stop_iteration() -> object:
    return next(iter([]))


def sleep(seconds: float) -> None:
    time.sleep(seconds)
