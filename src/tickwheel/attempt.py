"""One attempt at a job: call the task where it belongs, and say what became of it.

An attempt never raises: however the task ended, the answer is a settlement.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from tickwheel.clock import StoreClock
from tickwheel.errors import BadArguments, GiveUp, Retry, Snooze
from tickwheel.hand import Held, Stop
from tickwheel.job import ENDED_WITH_WORKER, Job, Settlement, dead, done, release
from tickwheel.pool import NotStarted, ProcessPool
from tickwheel.retry import decide, describe
from tickwheel.span import span_text
from tickwheel.tasks import Definition, Pool, encode_result

T = TypeVar("T")

log = logging.getLogger("tickwheel")

# Where no child process can be started, this much later may be better.
NOT_STARTED_MS = 10_000

_current: contextvars.ContextVar[Held] = contextvars.ContextVar("tickwheel_job")


@dataclass(frozen=True, slots=True)
class JobContext:
    """What a running task may know of its own job."""

    _held: Held

    @property
    def job(self) -> Job:
        return self._held.job

    @property
    def stopping(self) -> bool:
        """Whether the run should end soon: it was cancelled, ran out of time, or lost its lease.

        An async task is interrupted anyway; a thread can't be, and may look at this instead.
        """
        return self._held.stop is not None


def current_job() -> JobContext | None:
    """The job that is running here; None outside a task, and in a task's own process."""
    held = _current.get(None)
    return None if held is None else JobContext(held)


class Runner:
    """Runs attempts on the event loop, in threads and in child processes."""

    def __init__(
        self,
        clock: StoreClock,
        *,
        threads: int,
        processes: int,
        result_limit: int,
        lease_ms: int = 0,
        ending: Callable[[], bool] = lambda: False,
        freed: Callable[[], None] = lambda: None,
    ) -> None:
        """`ending` says whether the worker itself is being ended. `freed` is called, on any thread,
        when a thread that was left behind has come to its end and all others were busy."""
        self._clock = clock
        # Twice the slots: a thread can't be ended, so one that ran out of time keeps its place
        # while the next job takes the slot.
        self._threads = _Threads(threads * 2, freed)
        self._processes = ProcessPool(processes)
        self._children = processes
        self._in_children = 0
        # Runs that were promised a place and have not taken it yet.
        self._promised: dict[Pool, set[Held]] = {"async": set(), "thread": set(), "process": set()}
        self._result_limit = result_limit
        self._lease_ms = lease_ms
        self._ending = ending

    def close(self) -> None:
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def has_room(self, pool: Pool) -> bool:
        """Whether a task of this pool would start at once."""
        if pool == "async":
            return True
        if pool == "thread":
            return self._threads.calls + len(self._promised["thread"]) < self._threads.size
        return self._in_children + len(self._promised["process"]) < self._children

    def promise(self, held: Held) -> None:
        """Keep a place for a run that is about to begin."""
        self._promised[held.pool].add(held)

    def keep_no_place(self, held: Held) -> None:
        """The run has its place now, or needs none."""
        self._promised[held.pool].discard(held)

    async def attempt(
        self, held: Held, definition: Definition, began: Callable[[], None]
    ) -> Settlement:
        """Run the task; the settlement is for the job as it is in hand at the end.

        Calls `began` when the task's own time starts: where it needs a thread or a child process,
        once it has one.
        """
        _current.set(held)
        try:
            args, kwargs = definition.arguments.decode(held.job.payload)
        except BadArguments as error:
            # No retry can cure it; a person, or a newer worker, can.
            return self.give_up(held, str(error))
        except BaseException as error:
            return self.raised(held, definition, error)
        try:
            return self._returned(held, await self._call(held, definition, args, kwargs, began))
        except BaseException as error:
            return self.raised(held, definition, error)

    def _returned(self, held: Held, value: Any) -> Settlement:
        assert held.started_ms is not None
        result, problem = encode_result(value, limit=self._result_limit)
        return done(
            held.job,
            started_ms=held.started_ms,
            ended_ms=self._clock.now_ms(),
            result=result,
            error=problem,
        )

    def raised(self, held: Held, definition: Definition, error: BaseException) -> Settlement:
        """Settle a run that ended with an exception, whatever its kind."""
        if isinstance(error, GeneratorExit) and asyncio._get_running_loop() is None:
            raise error  # the loop is gone, and with it everything that could settle
        if isinstance(error, (Retry, Snooze, GiveUp)):
            return self._decided(held, definition, error)
        cancelled = isinstance(error, asyncio.CancelledError)
        if held.stop is not None:
            # We ended it: what it made of that is not its failure.
            return self.stopped(held, definition, in_thread=cancelled)
        if cancelled and self._ending():
            return self._released(held, definition, ENDED_WITH_WORKER, in_thread=True)
        if isinstance(error, KeyboardInterrupt) and definition.pool == "async":
            # Somebody wants to end the program, and hit a task of ours.
            asyncio.get_running_loop().call_soon(_interrupt, error)
            return self._released(held, definition, ENDED_WITH_WORKER)
        if isinstance(error, NotStarted):
            return self._not_started(held, error)
        return self._decided(held, definition, error)

    async def _call(
        self,
        held: Held,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        if definition.pool == "async":
            began()
            return await definition.function(*args, **kwargs)
        self.keep_no_place(held)
        if definition.pool == "process":
            return await self._in_child(definition, args, kwargs, began)
        loop = asyncio.get_running_loop()
        call = functools.partial(_in_thread, loop, began, definition.function, args, kwargs)
        context = contextvars.copy_context()
        return await loop.run_in_executor(self._threads, context.run, call)

    async def _in_child(
        self,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        self._in_children += 1
        try:
            return await self._processes.run(definition.function, args, kwargs, began)
        finally:
            self._in_children -= 1

    def stopped(self, held: Held, definition: Definition, *, in_thread: bool = False) -> Settlement:
        """Settle a run that we ended, or could only leave behind, maybe in its thread."""
        if held.stop is Stop.TIMEOUT:
            limit = timeout_ms(held.job, definition)
            error = TimeoutError(f"ran longer than its timeout of {span_text(limit or 0)}")
            return self._decided(held, definition, error)
        return self._released(held, definition, in_thread=in_thread)

    def _released(
        self,
        held: Held,
        definition: Definition,
        error: str | None = None,
        *,
        in_thread: bool = False,
    ) -> Settlement:
        """A thread that goes on is given the time of a lease before the job starts elsewhere."""
        now_ms, due_ms = self._clock.now_ms(), held.job.due_ms
        if in_thread and definition.pool == "thread":
            due_ms = max(due_ms, now_ms + self._lease_ms)
        return release(
            held.job, started_ms=held.started_ms, ended_ms=now_ms, due_ms=due_ms, error=error
        )

    def _not_started(self, held: Held, error: NotStarted) -> Settlement:
        """The machine's trouble, not the job's: it is tried again a little later, here or
        elsewhere."""
        log.error("job %s (%s): %s", held.job.id, held.job.task, error)
        now_ms = self._clock.now_ms()
        due_ms = max(held.job.due_ms, now_ms + NOT_STARTED_MS)
        return release(held.job, ended_ms=now_ms, due_ms=due_ms, error=describe(error))

    def _decided(self, held: Held, definition: Definition, error: BaseException) -> Settlement:
        started_ms, ended_ms = held.started_ms, self._clock.now_ms()
        assert started_ms is not None
        if not isinstance(error, (Retry, Snooze, GiveUp)):
            # The store keeps one line; where in the user's code it was, the log tells.
            where = error if error.__traceback__ else None
            log.warning("job %s (%s) failed", held.job.id, held.job.task, exc_info=where)
        try:
            return decide(
                held.job, error, definition.policy, started_ms=started_ms, ended_ms=ended_ms
            )
        except Exception as mistake:
            # A Retry or Snooze with a delay that is none: the task's own slip.
            return self.give_up(held, describe(mistake))

    def give_up(self, held: Held, reason: str, *, failed: bool = True) -> Settlement:
        """Settle a job that can't be run."""
        return dead(
            held.job,
            error=reason,
            started_ms=held.started_ms,
            ended_ms=self._clock.now_ms(),
            failed=failed,
        )


def _in_thread(
    loop: asyncio.AbstractEventLoop,
    began: Callable[[], None],
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    loop.call_soon_threadsafe(began)
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        # A future can't carry it: whoever waits would wait for ever.
        raise RuntimeError("the task raised StopIteration") from error


def _interrupt(error: KeyboardInterrupt) -> None:
    raise error


class _Threads(ThreadPoolExecutor):
    """Counts its calls until they are really over, also those that nobody waits for any more."""

    def __init__(self, size: int, freed: Callable[[], None]) -> None:
        super().__init__(size, thread_name_prefix="tickwheel-task")
        self.size = size
        self.calls = 0
        self._counting = threading.Lock()
        self._freed = freed

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._counting:
            full = self.calls + 1 == self.size
            self.calls += 1
        call = super().submit(fn, *args, **kwargs)
        call.add_done_callback(self._over)
        if full:
            log.error(
                "all %d threads for tasks are busy or hang in tasks that ran out of time: "
                "no further task of this kind can start in this worker",
                self.size,
            )
        return call

    def _over(self, _: Future[Any]) -> None:
        with self._counting:
            was_full = self.calls == self.size
            self.calls -= 1
        if was_full:
            self._freed()


def timeout_ms(job: Job, definition: Definition) -> int | None:
    return definition.timeout_ms if job.timeout_ms is None else job.timeout_ms
