"""Tasks for the process tests: a child has to import them, so they are at the top of a module."""

from __future__ import annotations

import os
import signal
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


def fail(how: str) -> None:
    raise ERRORS[how]


def unpicklable_result() -> Any:
    return threading.Lock()


def stop_iteration() -> object:
    return next(iter([]))


def sleep(seconds: float) -> None:
    time.sleep(seconds)
