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

from tickwheel import App, GiveUp, Partial, Retry, Snooze, current_job, current_jobs

app = App("memory://")


@app.task(pool="process")
def decorated(a: int, b: int = 2) -> list[int]:
    """Its name leads the child to the task around the function."""
    return [a, b]


@app.batch(pool="process", retries=0)
def halve(numbers: list[int]) -> list[int]:
    """Fails those that are odd."""
    halves, errors = [0] * len(numbers), {}
    for index, number in enumerate(numbers):
        try:
            halves[index] = _half(number)
        except ValueError as error:
            errors[index] = error
    raise Partial(errors, halves)


def _half(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


@app.batch(pool="process", retries=0)
def unpicklable(numbers: list[int]) -> list[int]:
    class Odd(Exception):
        """Nobody else can import it."""

    raise Partial({i: Odd("no") for i, n in enumerate(numbers) if n}, numbers)


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
    """End in the middle of a task; a process that was started before keeps running."""
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


def fail_and_ask_again() -> None:
    try:
        raise ERRORS["plain"]
    except ValueError as error:
        raise Retry("1h") from error


def what_it_knows() -> dict[str, Any]:
    """All that a task may know of its job."""
    context = current_job()
    assert context is not None
    return {
        "id": context.id,
        "job": context.job.id,
        "task": context.task,
        "attempt": context.attempt,
        "due": context.due.timestamp(),
        "deadline": context.deadline and context.deadline.timestamp(),
        "meta": context.meta,
        "stopping": context.stopping,
    }


def say_and_wait(path: str) -> None:
    """Say the progress once, then go on until the file is there."""
    context = current_job()
    assert context is not None
    for n in range(100):
        context.progress(n / 250, "counting")
    context.progress(0.4, "loading")
    deadline = time.monotonic() + 60
    while not Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def say_wrong() -> str:
    context = current_job()
    assert context is not None
    try:
        context.progress(2)
    except ValueError as error:
        return type(error).__name__
    return "accepted"


_kept: list[Any] = []


def say_after_the_end() -> None:
    """Leave a thread behind that keeps saying the progress of a job that has ended."""
    context = current_job()
    assert context is not None
    _kept.append(context)

    def go_on() -> None:
        for n in range(2_000):
            context.progress(n / 2_000, "from the grave")
            time.sleep(0.001)

    threading.Thread(target=go_on, daemon=True).start()


def say_in_a_fork() -> int:
    """A process that the task forked has no pipe to the worker."""
    context = current_job()
    assert context is not None
    pid = os.fork()
    if pid == 0:
        try:
            context.progress(0.5, "from a fork")
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def whose_batch(items: list[int]) -> list[str]:
    return [f"{current_job()} {len(current_jobs())}" for _ in items]
