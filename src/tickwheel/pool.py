"""Child processes for tasks that must be endable, or that need a core of their own.

A child that runs too long is killed, alone, and replaced. The standard pool can't do that: it
knows no way to end one task. See docs/adr/0006.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from tickwheel.clock import sleep_blocking
from tickwheel.errors import TickwheelError
from tickwheel.retry import describe
from tickwheel.tasks import NotKept

R = TypeVar("R")
# Whether the task failed, and what it returned or raised.
Answer = tuple[bool, Any]

# A fresh interpreter: forking a process that has threads can deadlock the child.
_CONTEXT = multiprocessing.get_context("spawn")

# How many children may die before one of them begins the task, and how long that may take: it
# includes the start of an interpreter and the import of the task's module.
START_TRIES = 3
START_S = 60.0
# A child that is gone shows on its pipe, unless a process that it left behind keeps the pipe open.
LOOK_S = 0.5
# How long a killed child may take to be gone.
GONE_S, GLANCE_S = 1.0, 0.005

# The child's word that it has read the call, found the function and is about to run it.
BEGAN = b"began"


class ChildDied(TickwheelError):
    """The process that ran the task ended under it: killed, out of memory, or by os._exit."""


class NotStarted(ChildDied):
    """No child process got as far as running the task, so the task has not run."""


class ProcessPool:
    """Runs tasks in up to `size` child processes, started when first needed."""

    def __init__(self, size: int) -> None:
        self._free: list[_Child] = []
        self._all: set[_Child] = set()
        self._slots = asyncio.Semaphore(size)
        _pools.add(self)
        # One thread per child waits for its answer.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="tickwheel-child")

    async def run(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        """Call the function in a child. What it raises is raised here; a cancel kills the child.

        Calls `began` once a child is about to run the function. NotStarted says that none was.
        """
        async with self._slots:
            child, answer = await self._begin(function, args, kwargs)
            if answer is None:
                with self._or_killed(child):
                    began()
                    answer = await self._in_thread(child.answer)
            self._free.append(child)
        failed, value = answer
        if failed:
            raise value
        return value

    async def _begin(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> tuple[_Child, Answer | None]:
        """A child that has begun the call, or has answered it already: it can't be run there."""
        tries, why = 0, None
        try:
            async with asyncio.timeout(START_S):
                while tries < START_TRIES:
                    child = self._take()
                    # One that was killed while it was idle says nothing about the next.
                    tries += child.fresh
                    try:
                        with self._or_killed(child):
                            answer = await self._in_thread(child.begin, function, args, kwargs)
                        return child, answer
                    except ChildDied as error:
                        # It has not run anything, so another one may.
                        why = error
        except TimeoutError:
            raise NotStarted(
                f"its process was not ready within {START_S:g} s, so it did not run; "
                f"does the import of {function.__module__} hang?"
            ) from None
        raise NotStarted(f"it did not run, {START_TRIES} processes ended before they began: {why}")

    def _take(self) -> _Child:
        if self._free:
            return self._free.pop()
        child = _Child()
        self._all.add(child)
        return child

    async def _in_thread(self, step: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, step, *args)

    @contextlib.contextmanager
    def _or_killed(self, child: _Child) -> Iterator[None]:
        """A child whose answer nobody waits for any more is of no use."""
        try:
            yield
        except BaseException:
            self._drop(child)
            with contextlib.suppress(RuntimeError):  # closed: that has waited for it
                self._threads.submit(child.gone)
            raise

    def _drop(self, child: _Child) -> None:
        self._all.discard(child)
        child.kill()

    def close(self) -> None:
        """Kill what is left; running tasks are to be ended before."""
        children = list(self._all)
        for child in children:
            self._drop(child)
        self._free.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Killed together, they end together: this waits once, not once for each.
        for child in children:
            if not child.gone():
                break


class _Child:
    """One process, and our end of the pipe to it. `begin` and `answer` block: call them in a
    thread. Its descriptors are closed with the last reference, when no thread uses them."""

    def __init__(self) -> None:
        self._pipe, self._theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(self._theirs,), daemon=True)
        self._killed = False

    @property
    def fresh(self) -> bool:
        """Whether it has yet to be started."""
        return self._process.pid is None

    def alive(self) -> bool:
        return self._process.exitcode is None

    def begin(
        self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]
    ) -> Answer | None:
        """None once the child has begun the call; an answer where it can't be made."""
        try:
            call = pickle.dumps((function.__module__, function.__qualname__, (args, kwargs)))
        except BaseException as error:
            return True, RuntimeError(f"the arguments can't reach its process: {describe(error)}")
        try:
            if self.fresh:
                self._start()
            self._pipe.send_bytes(call)
        except OSError as error:
            raise self._died(error) from None
        said = self._receive()
        return None if said == BEGAN else _read(said)

    def answer(self) -> Answer:
        return _read(self._receive())

    def _start(self) -> None:
        self._process.start()
        self._theirs.close()
        if self._killed:
            # By somebody who came before there was anything to kill.
            self._process.kill()

    def _receive(self) -> bytes:
        signs: list[Connection | int] = [self._pipe, self._process.sentinel]
        while not (ready := wait(signs, LOOK_S)) and self.alive():
            pass
        try:
            # What it said before it died is still there.
            if self._pipe in ready or self._pipe.poll():
                return self._pipe.recv_bytes()
        except (EOFError, OSError):
            pass
        raise self._died()

    def _died(self, why: OSError | None = None) -> ChildDied:
        if self.fresh:
            return ChildDied(f"its process could not be started: {why}")
        if not self.gone():
            return ChildDied("its process closed the pipe to its worker")
        return ChildDied(f"its process died, exit code {self._process.exitcode}")

    def kill(self) -> None:
        """Never waits: see `gone`."""
        self._killed = True
        if not self.fresh:
            self._process.kill()

    def gone(self) -> bool:
        """Wait for its end, for a while, so that no zombie of it is left."""
        for _ in range(round(GONE_S / GLANCE_S)):
            if self.fresh or not self.alive():
                return True
            # Its sentinel doesn't say that its exit code can be read yet, nor, where a process that
            # it left behind holds it too, that it ended.
            sleep_blocking(GLANCE_S)
        return False


def _read(said: bytes) -> Answer:
    try:
        failed, value = pickle.loads(said)
    except BaseException as error:
        return True, RuntimeError(f"the answer of its process can't be read: {describe(error)}")
    return failed, value


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


@atexit.register
def _kill_what_is_left() -> None:
    """However the program ends: multiprocessing waits for its children, and ours ignore the
    SIGTERM that it sends them."""
    for pool in list(_pools):
        pool.close()


# --- In the child


def _serve(pipe: Connection) -> None:
    """The child's life: one call after the other, until our end of the pipe closes."""
    # Signals may go to the whole group; when to stop is the worker's decision, and it kills. A
    # handler, because programs that a task starts would inherit that a signal is ignored.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
    # The worker's children are daemons to multiprocessing, which lets no daemon have children.
    multiprocessing.current_process().daemon = False
    # The pipe is ours alone: who else had it could speak for us, and hide our end.
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=lambda: _on_its_own(pipe))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        pipe.send_bytes(_called(call, lambda: pipe.send_bytes(BEGAN)))


def _on_its_own(pipe: Connection) -> None:
    """A process that a task forked: multiprocessing ends its children by SIGTERM."""
    pipe.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with(parent: int) -> None:
    """Don't outlive the worker: its leases run out, and somebody else will run the job."""
    while os.getppid() == parent:
        sleep_blocking(1)
    os._exit(1)


def _called(call: bytes, begin: Callable[[], None]) -> bytes:
    """Make the call and pickle its answer; a task can't end its process by what it raises."""
    try:
        module, name, arguments = pickle.loads(call)
        args, kwargs = arguments
        function = _function(module, name)
    except BaseException as error:
        return _pickled((True, _carried(error)))
    begin()
    try:
        answer = (False, function(*args, **kwargs))
    except BaseException as error:
        answer = (True, _carried(error))
    return _pickled(answer)


def _carried(error: BaseException) -> Exception:
    """What is raised in the worker: nothing that would mean the worker itself there."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the task raised {describe(error)}")


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    # The module's name stands for the task around the function.
    function: Callable[..., Any] = getattr(found, "function", found)
    return function


def _pickled(answer: Answer) -> bytes:
    """The answer, or what can be said of it where it can't be pickled and read back."""
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except BaseException as error:
        failed, value = answer
        if not failed:
            # The work is done: that must not make it run again.
            return pickle.dumps((False, NotKept(f"it can't leave its process ({describe(error)})")))
        return pickle.dumps((True, RuntimeError(describe(value))))
