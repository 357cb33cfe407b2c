"""Child processes for tasks that must be endable, or that need a core of their own.

A child that runs too long is killed, alone, and replaced. The standard pool can't do that: it
knows no way to end one task. See docs/adr/0006.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from tickwheel.clock import sleep_blocking
from tickwheel.errors import TickwheelError
from tickwheel.retry import describe

# A fresh interpreter: forking a process that has threads can deadlock the child.
_CONTEXT = multiprocessing.get_context("spawn")


class ChildDied(TickwheelError):
    """The process that ran the task ended under it: killed, out of memory, or by sys.exit."""


class ProcessPool:
    """Runs tasks in up to `size` child processes, started when first needed."""

    def __init__(self, size: int) -> None:
        self._free: list[_Child] = []
        self._all: set[_Child] = set()
        self._slots = asyncio.Semaphore(size)
        # One thread per child waits for its answer.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="tickwheel-child")

    async def run(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        """Call the function in a child. What it raises is raised here; a cancel kills the child."""
        async with self._slots:
            child = self._free.pop() if self._free else self._start()
            began()
            loop = asyncio.get_running_loop()
            answer = loop.run_in_executor(self._threads, child.call, function, args, kwargs)
            try:
                value = await asyncio.shield(answer)
            except ChildDied:
                self._drop(child)
                raise
            except asyncio.CancelledError:
                self._drop(child)
                # The thread comes back as soon as it sees that the child is gone.
                with contextlib.suppress(BaseException):
                    await asyncio.shield(answer)
                raise
            except BaseException:
                self._free.append(child)
                raise
            self._free.append(child)
            return value

    def _start(self) -> _Child:
        child = _Child()
        self._all.add(child)
        return child

    def _drop(self, child: _Child) -> None:
        self._all.discard(child)
        child.kill()

    def close(self) -> None:
        """Kill what is left; running tasks are to be ended before."""
        for child in list(self._all):
            self._drop(child)
        self._free.clear()
        self._threads.shutdown(wait=False)


class _Child:
    """One process, and our end of the pipe to it."""

    def __init__(self) -> None:
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        reference = (function.__module__, function.__qualname__)
        try:
            self._pipe.send_bytes(pickle.dumps((reference, args, kwargs)))
            failed, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            raise ChildDied(f"its process died, exit code {code}") from None
        if failed:
            raise value
        return value

    def kill(self) -> None:
        self._process.kill()
        self._process.join(5)
        self._pipe.close()


def _serve(pipe: Connection) -> None:
    """The child's life: one call after the other, until our end of the pipe closes."""
    # Signals may go to the whole group; when to stop is the worker's decision, and it kills.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            (module, name), args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = (False, _function(module, name)(*args, **kwargs))
        except StopIteration:
            # A future can't carry it: whoever waits would wait for ever.
            answer = (True, RuntimeError("the task raised StopIteration"))
        except Exception as error:
            answer = (True, error)
        pipe.send_bytes(_pickled(answer))


def _end_with(parent: int) -> None:
    """Don't outlive the worker: its leases run out, and somebody else will run the job."""
    while os.getppid() == parent:
        sleep_blocking(1)
    os._exit(1)


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    # The module's name stands for the task around the function.
    function: Callable[..., Any] = getattr(found, "function", found)
    return function


def _pickled(answer: tuple[bool, Any]) -> bytes:
    """The answer, or what can be said of it where it can't be pickled and read back."""
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except Exception as error:
        failed, value = answer
        text = describe(value) if failed else f"the result can't leave its process: {error}"
        return pickle.dumps((True, RuntimeError(text)))
