"""One attempt at a job: call the task where it belongs, and say what became of it.

An attempt never raises: however the task ended, the answer is a settlement.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tickwheel.clock import StoreClock
from tickwheel.errors import BadArguments, GiveUp, Retry, Snooze
from tickwheel.hand import Held, Stop
from tickwheel.job import Job, Settlement, dead, done, release
from tickwheel.pool import ProcessPool
from tickwheel.retry import decide
from tickwheel.span import span_text
from tickwheel.tasks import Definition, encode_result

log = logging.getLogger("tickwheel")

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
        self, clock: StoreClock, *, threads: int, processes: int, result_limit: int
    ) -> None:
        self._clock = clock
        # Twice the slots: a thread can't be ended, so one that ran out of time keeps its place
        # while the next job takes the slot.
        self._threads = ThreadPoolExecutor(threads * 2, thread_name_prefix="tickwheel-task")
        self._processes = ProcessPool(processes)
        self._result_limit = result_limit

    def close(self) -> None:
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def attempt(
        self, held: Held, definition: Definition, began: Callable[[], None]
    ) -> Settlement:
        """Run the task; the settlement is for the job as it is in hand at the end.

        Calls `began` when the task's own time starts: where it needs a child process, once it has
        one.
        """
        assert held.started_ms is not None
        _current.set(held)
        try:
            args, kwargs = definition.arguments.decode(held.job.payload)
        except BadArguments as error:
            # No retry can mend it; a person, or a newer worker, can.
            return self.give_up(held, str(error))
        try:
            value = await self._call(definition, args, kwargs, began)
        except asyncio.CancelledError as error:
            return (
                self.stopped(held, definition)
                if held.stop
                else self._raised(held, definition, error)
            )
        except (Exception, SystemExit) as error:
            # A task that calls sys.exit means itself, not its worker.
            return self._raised(held, definition, error)
        result, problem = encode_result(value, limit=self._result_limit)
        return done(
            held.job,
            started_ms=held.started_ms,
            ended_ms=self._clock.now_ms(),
            result=result,
            error=problem,
        )

    async def _call(
        self,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        if definition.pool == "process":
            return await self._processes.run(definition.function, args, kwargs, began)
        began()
        if definition.pool == "async":
            return await definition.function(*args, **kwargs)
        call = functools.partial(_in_thread, definition.function, args, kwargs)
        context = contextvars.copy_context()
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, call)

    def stopped(self, held: Held, definition: Definition) -> Settlement:
        """Settle a run that we ended, or could only leave behind."""
        if held.stop is Stop.TIMEOUT:
            limit = timeout_ms(held.job, definition)
            error = TimeoutError(f"ran longer than its timeout of {span_text(limit or 0)}")
            return self._raised(held, definition, error)
        return release(held.job, started_ms=held.started_ms, ended_ms=self._clock.now_ms())

    def _raised(self, held: Held, definition: Definition, error: BaseException) -> Settlement:
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
            return self.give_up(held, f"{mistake}")

    def give_up(self, held: Held, reason: str, *, failed: bool = True) -> Settlement:
        """Settle a job that can't be run."""
        return dead(
            held.job,
            error=reason,
            started_ms=held.started_ms,
            ended_ms=self._clock.now_ms(),
            failed=failed,
        )


def _in_thread(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        # A future can't carry it: whoever waits would wait for ever.
        raise RuntimeError("the task raised StopIteration") from error


def timeout_ms(job: Job, definition: Definition) -> int | None:
    return definition.timeout_ms if job.timeout_ms is None else job.timeout_ms
