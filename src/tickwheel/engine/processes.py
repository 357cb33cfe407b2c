"""Child processes for tasks that must be killable, or that need a core of their own.

A child that runs too long is killed and replaced, without affecting the others. The standard
library's pool can't do that: it has no way to end one task. See docs/adr/0006.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import importlib
import logging
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

import msgspec

from tickwheel.arguments import INJECTED, NotKept
from tickwheel.clock import MS_NS, SystemClock, sleep_blocking
from tickwheel.engine.context import Running, running
from tickwheel.errors import Partial, TickwheelError
from tickwheel.job import Job, Progress
from tickwheel.lifespan import Lifespan, lifespan_of
from tickwheel.retry import describe
from tickwheel.traceback import CARRIED_LIMIT, RemoteTraceback, raised, traceback_text

log = logging.getLogger("tickwheel")

R = TypeVar("R")
# Where the task raised, or by index where each error of a batch was raised: an exception loses its
# traceback on the way.
_Tracebacks = str | dict[int, str] | None
# Whether the task failed, what it returned or raised, and where.
_Reply = tuple[bool, Any, _Tracebacks]
# The job of a call, when its timeout would stop it had it begun at once, and that moment by the
# machine's monotonic clock.
_Sent = tuple[Job, int | None, int] | None

# A fresh interpreter: forking a process that has threads can deadlock the child.
_CONTEXT = multiprocessing.get_context("spawn")

# How many children may die before one of them begins the task, and how long that may take,
# including the start of an interpreter and the import of the task's module.
START_TRIES = 3
START_S = 60.0
# A child's end shows on its pipe, unless a process that it left behind keeps the pipe open.
POLL_S = 0.5
# How long a killed child may take to end.
GONE_S, GLANCE_S = 1.0, 0.005

# How long the tracebacks of one batch are, in total.
MOST_CARRIED = 1024 * 1024

# The child's message that it has read the call, found the function and is about to run it.
BEGAN = b"began"
# What its messages about the task's progress begin with; an answer, a pickle, never does.
PROGRESS = b"progress"
# The worker's message that no more calls will come.
END = b"end"


class ChildDied(TickwheelError):
    """The task's process ended during the run: killed, out of memory, or by os._exit."""


class NotStarted(ChildDied):
    """No child process got as far as running the task, so the task has not run."""


class ProcessPool:
    """Runs tasks in up to `size` child processes, started when first needed."""

    def __init__(self, size: int, lifespan: Lifespan | None = None) -> None:
        """Each child opens the lifespan before its first task."""
        self._lifespan = lifespan
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
        around: Callable[..., Any] | None = None,
        run: Running | None = None,
    ) -> Any:
        """Call the function in a child, inside `around`, as this run of a job. Its exceptions are
        raised here; cancelling kills the child.

        Calls `began` once a child is about to run the function. Raises NotStarted if none was.
        """
        sent: _Sent = None
        if run is not None and not run.called:
            sent = run.job, run.deadline_ms, SystemClock().monotonic_ns()
        async with self._slots:
            child, answer = await self._begin(function, args, kwargs, around, sent)
            if answer is None:
                with self._or_killed(child):
                    began()
                    answer = await self._in_thread(child.answer, run)
            self._free.append(child)
        failed, value, traceback = answer
        if not failed:
            return value
        if isinstance(traceback, dict):
            for index, text in traceback.items():
                _attach(value.errors[index], text)
        elif traceback is not None:
            _attach(value, traceback)
        raise value

    async def _begin(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        around: Callable[..., Any] | None,
        sent: _Sent,
    ) -> tuple[_Child, _Reply | None]:
        """A child that has begun the call, or that has already answered because it can't run it."""
        tries, why = 0, None
        try:
            async with asyncio.timeout(START_S):
                while tries < START_TRIES:
                    child = self._take()
                    # A child that was killed while idle says nothing about the next.
                    tries += child.fresh
                    try:
                        with self._or_killed(child):
                            answer = await self._in_thread(
                                child.begin, function, args, kwargs, around, sent
                            )
                        return child, answer
                    except ChildDied as error:
                        # It has not run anything, so another child may.
                        why = error
        except TimeoutError:
            raise NotStarted(
                f"its process was not ready within {START_S:g} s, so it did not run; "
                f"does the import of {function.__module__} hang, or the lifespan?"
            ) from None
        raise NotStarted(
            f"it did not run: {START_TRIES} processes ended before they began it: {why}"
        )

    def _take(self) -> _Child:
        if self._free:
            return self._free.pop()
        child = _Child(self._lifespan)
        self._all.add(child)
        return child

    async def _in_thread(self, step: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, step, *args)

    @contextlib.contextmanager
    def _or_killed(self, child: _Child) -> Iterator[None]:
        """Kill the child if nobody waits for its answer any more."""
        try:
            yield
        except BaseException:
            self._drop(child)
            with contextlib.suppress(RuntimeError):  # closed: `close` has waited for it
                self._threads.submit(child.gone)
            raise

    def _drop(self, child: _Child) -> None:
        self._all.discard(child)
        child.kill()

    async def end(self, within_s: float) -> None:
        """Let the children that are idle close their lifespan, if they have one, and end."""
        if self._lifespan is None or not self._free:
            return
        idle, self._free = self._free, []
        ended = await asyncio.gather(*(self._in_thread(each.end, within_s) for each in idle))
        if not all(ended):
            log.error("child processes did not close their lifespan in time; killed")

    def close(self) -> None:
        """Kill the remaining children; end running tasks first."""
        children = list(self._all)
        for child in children:
            self._drop(child)
        self._free.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)
        # Kill all, then wait: so the waits overlap.
        for child in children:
            if not child.gone():
                break


class _Child:
    """One process, and our end of the pipe to it. `begin` and `answer` block: call them in a
    thread. Its descriptors are closed with the last reference, when no thread uses them."""

    def __init__(self, lifespan: Lifespan | None) -> None:
        self._lifespan = None if lifespan is None else lifespan.function
        self._pipe, self._theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(self._theirs,), daemon=True)
        self._killed = False

    @property
    def fresh(self) -> bool:
        """Whether it has not been started yet."""
        return self._process.pid is None

    def alive(self) -> bool:
        return self._process.exitcode is None

    def begin(
        self,
        function: Callable[..., Any],
        args: list[Any],
        kwargs: dict[str, Any],
        around: Callable[..., Any] | None = None,
        sent: _Sent = None,
    ) -> _Reply | None:
        """None once the child has begun the call; an answer if it can't be made."""
        try:
            call = pickle.dumps((function.__module__, function.__qualname__, (args, kwargs)))
        except BaseException as error:
            problem = f"the arguments can't be sent to its process: {describe(error)}"
            return True, RuntimeError(problem), None
        try:
            if self.fresh:
                self._start()
            around_it = _place(around), _place(self._lifespan)
            self._pipe.send_bytes(pickle.dumps((*around_it, sent, call)))
        except OSError as error:
            raise self._died(error) from None
        said = self._receive()
        return None if said == BEGAN else _read(said)

    def answer(self, run: Running | None = None) -> _Reply:
        """What the task returned or raised. Until then, what it says of its progress is passed
        on."""
        while (said := self._receive()).startswith(PROGRESS):
            if run is not None:
                run.say(msgspec.json.decode(said.removeprefix(PROGRESS), type=Progress))
        return _read(said)

    def end(self, within_s: float) -> bool:
        """Ask it to end, and wait: False if it takes longer than this."""
        with contextlib.suppress(OSError):  # it has ended
            self._pipe.send_bytes(END)
        return bool(wait([self._process.sentinel], within_s))

    def _start(self) -> None:
        self._process.start()
        self._theirs.close()
        if self._killed:
            # Killed before there was a process to kill.
            self._process.kill()

    def _receive(self) -> bytes:
        signs: list[Connection | int] = [self._pipe, self._process.sentinel]
        while not (ready := wait(signs, POLL_S)) and self.alive():
            pass
        try:
            # What it sent before it died is still in the pipe.
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
        """Kill it. Never waits: see `gone`."""
        self._killed = True
        if not self.fresh:
            self._process.kill()

    def gone(self) -> bool:
        """Wait a while for its end, so that no zombie is left."""
        for _ in range(round(GONE_S / GLANCE_S)):
            if self.fresh or not self.alive():
                return True
            # Its sentinel doesn't mean that its exit code can be read yet, nor, if a process that
            # it left behind holds the sentinel too, that it ended.
            sleep_blocking(GLANCE_S)
        return False


def _attach(error: Any, traceback: str) -> None:
    with contextlib.suppress(Exception):  # its class may not allow it
        error.__cause__ = RemoteTraceback(traceback)


def _place(function: Callable[..., Any] | None) -> tuple[str, str] | None:
    return None if function is None else (function.__module__, function.__qualname__)


def _read(said: bytes) -> _Reply:
    try:
        failed, value, traceback = pickle.loads(said)
    except BaseException as error:
        problem = f"its process sent an answer that can't be read: {describe(error)}"
        return True, RuntimeError(problem), None
    return failed, value, traceback


_pools: weakref.WeakSet[ProcessPool] = weakref.WeakSet()


@atexit.register
def _kill_what_is_left() -> None:
    """At exit: multiprocessing waits for its children, and ours ignore the SIGTERM that it
    sends."""
    for pool in list(_pools):
        pool.close()


# --- In the child


def _serve(pipe: Connection) -> None:
    """Serve one call after the other, until the worker's end of the pipe closes."""
    # Signals may go to the whole group; the worker decides when to stop, and kills us. A handler,
    # because programs that a task starts would inherit an ignored signal.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
    # To multiprocessing the worker's children are daemons, which may not have children.
    multiprocessing.current_process().daemon = False
    # No other process may have the pipe: it could answer for us, and hide our end.
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=lambda: _on_its_own(pipe))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, OSError):
            call = END
        if call == END:
            break
        run = _InChild(pipe)
        answer = contextvars.copy_context().run(_surrounded, call, run)
        run.end()
        pipe.send_bytes(answer)
    _lifespan.close()


def _on_its_own(pipe: Connection) -> None:
    """In a process that a task forked: multiprocessing ends its children by SIGTERM."""
    pipe.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with(parent: int) -> None:
    """Don't outlive the worker: its leases run out, and another worker runs the job."""
    while os.getppid() == parent:
        sleep_blocking(1)
    os._exit(1)


class _InChild:
    """The run of one call: what its task may know of its job, and tell."""

    # A child that has to stop is killed.
    stop = None
    called = ()

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        # Threads of the task may say their progress too, even after its end.
        self._speaking = threading.Lock()
        self._over = False
        self._told: Progress | None = None
        self._sent: _Sent = None
        self.deadline_ms: int | None = None

    @property
    def job(self) -> Job:
        assert self._sent is not None
        return self._sent[0]

    @property
    def state(self) -> Any:
        return _lifespan.state

    def of(self, sent: _Sent) -> None:
        """The run is of this job, if of any."""
        self._sent = sent
        if sent is not None:
            running.set(self)

    def begin(self) -> None:
        """Its own time starts now: what came before was the start of the process, and imports."""
        _, deadline_ms, since_ns = self._sent or (None, None, 0)
        if deadline_ms is not None:
            waited_ms = (SystemClock().monotonic_ns() - since_ns) // MS_NS
            self.deadline_ms = deadline_ms + waited_ms
        self._pipe.send_bytes(BEGAN)

    def say(self, progress: Progress) -> None:
        if self._pipe.closed:
            return  # in a process that the task forked
        with self._speaking, contextlib.suppress(OSError):  # the worker is gone
            if not self._over and progress != self._told:
                self._told = progress
                self._pipe.send_bytes(PROGRESS + msgspec.json.encode(progress))

    def end(self) -> None:
        with self._speaking:
            self._over = True


def _surrounded(said: bytes, run: _InChild) -> bytes:
    """Make the call inside what a framework does around it, if anything. That is entered before the
    task is imported and its arguments are read, and both may need it."""
    try:
        place, lifespan, sent, call = pickle.loads(said)
        run.of(sent)
        if place is None:
            _lifespan.open(lifespan)
            return _called(call, run.begin)
        with _function(*place)():
            _lifespan.open(lifespan)
            return _called(call, run.begin)
    except BaseException as error:
        return _pickled((True, _for_the_worker(error), _traceback(error)))


class _ChildLifespan:
    """The app's lifespan in this child process."""

    def __init__(self) -> None:
        self.state: Any = None
        self._stack = contextlib.ExitStack()
        self._open = False

    def open(self, place: tuple[str, str] | None) -> None:
        """Open it before the first task. One that fails is tried again with the next."""
        if place is None or self._open:
            return
        name = ".".join(place)
        try:
            manager = lifespan_of(_function(*place)).manager()
            self.state = self._stack.enter_context(manager)
        except BaseException as error:
            problem = f"it did not run: the lifespan {name} failed in its process"
            raise NotStarted(f"{problem}: {describe(error)}") from error
        self._open = True

    def close(self) -> None:
        try:
            self._stack.close()
        except BaseException:
            log.exception("the lifespan failed at its close, in a child process")


_lifespan = _ChildLifespan()


def _called(call: bytes, begin: Callable[[], None]) -> bytes:
    """Make the call and pickle its answer; no exception of the task ends the process."""
    try:
        module, name, arguments = pickle.loads(call)
        args, kwargs = arguments
        function = _function(module, name)
        for each, value in kwargs.items():
            if value is INJECTED:
                kwargs[each] = _lifespan.state
    except BaseException as error:
        return _pickled((True, _for_the_worker(error), _traceback(error)))
    begin()
    try:
        answer = (False, function(*args, **kwargs), None)
    except BaseException as error:
        return _pickled((True, _for_the_worker(error), _traceback(error)))
    return _pickled(answer)


def _for_the_worker(error: BaseException) -> Exception:
    """The error to raise in the worker: never one that would stop the worker itself."""
    if isinstance(error, Partial):
        return _parts_for_the_worker(error)
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the task raised {describe(error)}")


def _parts_for_the_worker(error: Partial) -> Partial:
    """Each part by itself: one that can't be sent must not fail the jobs of the others."""
    errors = {index: _sendable(_for_the_worker(each)) for index, each in error.errors.items()}
    results = error.results
    try:
        pickle.loads(pickle.dumps(results))
    except BaseException as problem:
        # Their work is done.
        why = NotKept(f"it can't be sent from its process ({describe(problem)})")
        results = [why] * len(results or ())
    return Partial(errors, results)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except BaseException:
        return RuntimeError(describe(error))


def _traceback(error: BaseException) -> _Tracebacks:
    if isinstance(error, Partial):
        limit = min(CARRIED_LIMIT, MOST_CARRIED // (len(error.errors) or 1))
        texts = {index: _text(each, limit) for index, each in error.errors.items()}
        return {index: text for index, text in texts.items() if text is not None}
    return _text(error, CARRIED_LIMIT)


def _text(error: BaseException, limit: int) -> str | None:
    cause = raised(error)
    return None if cause is None else traceback_text(cause, limit=limit)


def _function(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    # The name in the module refers to the task around the function.
    function: Callable[..., Any] = getattr(found, "function", found)
    return function


def _pickled(answer: _Reply) -> bytes:
    """The answer, or a description of it if it can't be pickled and read back."""
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
        return data
    except BaseException as error:
        failed, value, traceback = answer
        if not failed:
            # The work is done: this must not make it run again.
            problem = f"it can't be sent from its process ({describe(error)})"
            return pickle.dumps((False, NotKept(problem), None))
        return pickle.dumps((True, RuntimeError(describe(value)), traceback))
