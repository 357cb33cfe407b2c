"""One attempt at a job: call the task in its pool, and return how it ended.

An attempt never raises: however the task ends, the result is a settlement.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

from tickwheel.arguments import INJECTED, encode_result
from tickwheel.clock import StoreClock
from tickwheel.duration import duration_text
from tickwheel.engine import journal
from tickwheel.engine.context import JobContext, current_job, running
from tickwheel.engine.hand import Batch, Held, Stop, timeout_ms
from tickwheel.engine.lending import most_lent
from tickwheel.engine.processes import NotStarted, ProcessPool
from tickwheel.engine.surroundings import NO_SURROUNDINGS, Surroundings
from tickwheel.errors import GiveUp, Retry, Snooze
from tickwheel.job import ENDED_WITH_WORKER, Job, Settlement, dead, done, release
from tickwheel.registry import Definition, PoolName
from tickwheel.retry import Seen, allowed, decide, describe
from tickwheel.traceback import ERROR_LIMIT

__all__ = ["JobContext", "Runner", "current_job", "timeout_ms", "waiting"]

T = TypeVar("T")

log = logging.getLogger("tickwheel")

# How long to wait before another try if no child process can be started.
NOT_STARTED_MS = 10_000


@contextmanager
def waiting() -> Iterator[Callable[[Job], None] | None]:
    """A task that waits for another job tells here what it waits for: its slot may be needed to run
    that job. None outside a task."""
    held = running.get(None)
    # A child process lends nothing.
    tell = held.waiting if isinstance(held, Held) else None
    if tell is None:
        yield None
        return
    assert isinstance(held, Held)
    try:
        yield partial(tell, held)
    finally:
        tell(held, None)


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
        lent: Mapping[PoolName, int] | None = None,
        surroundings: Surroundings = NO_SURROUNDINGS,
        waits: Callable[[Held], None] = lambda _: None,
    ) -> None:
        """`ending` tells whether the worker itself is ending. `freed` is called, on any thread,
        when an abandoned thread ends while all others are busy. `lent` has the number of runs that
        wait for other jobs, by pool. `waits` is called when a run that has begun has to wait for a
        thread or a child process: its time stands still until it has begun again."""
        self._clock = clock
        self.now_ms = clock.now_ms
        lent = lent or {}
        # Twice as many: a thread can't be killed, so one that timed out stays while the next job
        # takes its place. More for those that wait for other jobs.
        self._threads = _Threads(
            threads * 2, freed, spare=most_lent(threads), lent=lambda: lent.get("thread", 0)
        )
        self._processes = ProcessPool(processes, surroundings.in_children)
        self._middleware = surroundings.middleware
        self._waits = waits
        self._children = processes
        self._in_children = 0
        # Runs that are about to take a thread or a child process.
        self._reserved: dict[PoolName, set[Held]] = {
            "async": set(),
            "thread": set(),
            "process": set(),
        }
        self._result_limit = result_limit
        self._lease_ms = lease_ms
        self._ending = ending

    def close(self) -> None:
        self._processes.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def end_children(self, within_s: float) -> None:
        """Let child processes that are idle close their lifespan."""
        await self._processes.end(within_s)

    def has_room(self, pool: PoolName) -> bool:
        """Whether a task of this pool would get a thread or a child process at once."""
        if pool == "async":
            return True
        if pool == "thread":
            return self._threads.busy + len(self._reserved["thread"]) < self._threads.size
        return self._in_children + len(self._reserved["process"]) < self._children

    def reserve(self, held: Held) -> None:
        """Reserve a thread or a child process for a run that is about to begin."""
        self._reserved[held.pool].add(held)

    def drop_reservation(self, held: Held) -> None:
        """The run has its thread or process now, or needs none any more."""
        self._reserved[held.pool].discard(held)

    async def attempt(
        self, held: Held, definition: Definition, began: Callable[[], None]
    ) -> Settlement:
        """Run the task; the settlement is for the job as it is held at the end.

        Calls `began` when the task's own time starts: if it needs a thread or a child process, once
        it has one.
        """
        running.set(held)
        try:
            args, kwargs = definition.arguments.decode(held.job.payload)
        except BaseException as error:
            # Also arguments that don't fit this version of the task: in a deploy, a retry may find
            # a worker whose version they fit.
            return self.raised(held, definition, error)
        if definition.injected:
            kwargs |= _injected(held, definition)
        try:
            if self._middleware is None:
                value = await self._call(held, definition, args, kwargs, began)
            else:
                value = await self._surrounded(held, definition, args, kwargs, began)
            return self.returned(held, definition, value)
        except BaseException as error:
            return self.raised(held, definition, error)

    async def call_batch(
        self, batch: Batch, definition: Definition, items: list[Any], began: Callable[[], None]
    ) -> Any:
        """Call a batch task once, with these items, inside the app's middleware."""
        running.set(batch)
        kwargs = _injected(batch, definition)
        if self._middleware is None:
            return await self._call(batch, definition, [items], kwargs, began)
        return await self._surrounded(batch, definition, [items], kwargs, began)

    def returned(
        self, held: Held, definition: Definition, value: Any, ended_ms: int | None = None
    ) -> Settlement:
        """Settle a run that returned, now or at `ended_ms`."""
        assert held.started_ms is not None
        result, problem = encode_result(value, limit=self._result_limit, returns=definition.returns)
        return done(
            held.job,
            started_ms=held.started_ms,
            ended_ms=self.now_ms() if ended_ms is None else ended_ms,
            result=result,
            error=problem,
        )

    def raised(
        self,
        held: Held,
        definition: Definition,
        error: BaseException,
        seen: Seen | None = None,
    ) -> Settlement:
        """Settle a run that ended with an exception, whatever its kind. If somebody has `seen` it,
        because it ended others before, it is not logged again."""
        if isinstance(error, GeneratorExit) and asyncio._get_running_loop() is None:
            raise error  # the loop has ended, and with it everything that could settle
        if isinstance(error, (Retry, Snooze, GiveUp)):
            return self._decided(held, definition, error, seen)
        cancelled = isinstance(error, asyncio.CancelledError)
        if held.stop is not None:
            # We stopped it: whatever it raised in response is not its failure.
            in_thread = cancelled and not held.outside
            return self.stopped(held, definition, error, in_thread=in_thread)
        if cancelled and self._ending():
            in_thread = not held.outside
            return self._released(held, definition, ENDED_WITH_WORKER, in_thread=in_thread)
        if isinstance(error, KeyboardInterrupt) and definition.pool == "async":
            # The program is being ended, and the signal hit one of our tasks.
            asyncio.get_running_loop().call_soon(_interrupt, error)
            return self.ended_with_worker(held, definition)
        if isinstance(error, NotStarted):
            return self._not_started(held, error)
        return self._decided(held, definition, error, seen)

    async def _surrounded(
        self,
        held: Held,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        """Call the task inside the app's middleware, whose time is the task's time."""
        assert self._middleware is not None
        on_loop, waits = definition.pool == "async", False

        def go_on() -> None:
            nonlocal waits
            if waits:
                waits = False
                began()

        async def call_next() -> Any:
            nonlocal waits
            held.outside = in_thread = False
            if not on_loop:
                waits = True
                self._waits(held)
            try:
                return await self._call(held, definition, args, kwargs, go_on)
            except asyncio.CancelledError:
                if definition.pool == "thread":
                    in_thread = True  # it can't be stopped, and keeps running
                raise
            finally:
                held.outside = not in_thread
                go_on()

        held.outside = True
        began()
        first = held.members[0] if held.members else held
        return await self._middleware(JobContext(first), call_next)

    def ended_with_worker(self, held: Held, definition: Definition) -> Settlement:
        return self._released(held, definition, ENDED_WITH_WORKER)

    async def _call(
        self,
        held: Held,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        if definition.pool == "async":
            if definition.around is None:
                began()
                return await definition.function(*args, **kwargs)
            async with definition.around():
                began()
                return await definition.function(*args, **kwargs)
        self.drop_reservation(held)
        if definition.pool == "process":
            return await self._in_child(held, definition, args, kwargs, began)
        loop = asyncio.get_running_loop()
        around = definition.around or contextlib.nullcontext
        call = partial(_in_thread, loop, began, around, definition.function, args, kwargs)
        context = contextvars.copy_context()
        return await loop.run_in_executor(self._threads, context.run, call)

    async def _in_child(
        self,
        held: Held,
        definition: Definition,
        args: list[Any],
        kwargs: dict[str, Any],
        began: Callable[[], None],
    ) -> Any:
        self._in_children += 1
        try:
            return await self._processes.run(
                definition.function, args, kwargs, began, definition.around, held
            )
        finally:
            self._in_children -= 1

    def stopped(
        self,
        held: Held,
        definition: Definition,
        raised: BaseException | None = None,
        *,
        in_thread: bool = False,
    ) -> Settlement:
        """Settle a run that we stopped, or could only abandon, perhaps in its thread. `raised` is
        what it raised when it was stopped."""
        if held.stop is Stop.TIMEOUT:
            return self._decided(held, definition, _timed_out(held.job, definition, raised))
        return self._released(held, definition, in_thread=in_thread)

    def _released(
        self,
        held: Held,
        definition: Definition,
        error: str | None = None,
        *,
        in_thread: bool = False,
    ) -> Settlement:
        """A thread that keeps running gets the length of a lease before the job starts
        elsewhere."""
        now_ms, due_ms = self._clock.now_ms(), held.job.due_ms
        if in_thread and definition.pool == "thread":
            due_ms = max(due_ms, now_ms + self._lease_ms)
        return release(
            held.job, started_ms=held.started_ms, ended_ms=now_ms, due_ms=due_ms, error=error
        )

    def _not_started(self, held: Held, error: NotStarted) -> Settlement:
        """The machine's problem, not the job's: retry a little later, here or elsewhere."""
        job = held.job
        why = error if error.__cause__ is not None else None
        log.error("%s %s: %s", job.task, job.id, error, exc_info=why, extra=journal.about(job))
        now_ms = self._clock.now_ms()
        due_ms = max(held.job.due_ms, now_ms + NOT_STARTED_MS)
        return release(held.job, ended_ms=now_ms, due_ms=due_ms, error=describe(error))

    def _decided(
        self,
        held: Held,
        definition: Definition,
        error: BaseException,
        seen: Seen | None = None,
    ) -> Settlement:
        job, policy = held.job, definition.policy
        started_ms, ended_ms = held.started_ms, self._clock.now_ms()
        assert started_ms is not None
        try:
            settlement = decide(
                job, error, policy, started_ms=started_ms, ended_ms=ended_ms, seen=seen
            )
        except Exception as mistake:
            # A Retry or Snooze with an invalid delay: the task's own mistake.
            reason = describe(mistake)
            if not isinstance(error, (Retry, Snooze)):
                # A policy of a class of the user's own.
                reason = f"{describe(error)}; then its retry policy failed: {reason}"
            return self.give_up(held, reason[:ERROR_LIMIT])
        if settlement.failed and seen is None:
            # Here, in the run's own context: tools keep there what they know about it.
            journal.failed(settlement, error, allowed=allowed(job, error, policy))
        return settlement

    def give_up(self, held: Held, reason: str, *, failed: bool = True) -> Settlement:
        """Settle a job that can't be run."""
        settlement = dead(
            held.job,
            error=reason,
            started_ms=held.started_ms,
            ended_ms=self._clock.now_ms(),
            failed=failed,
        )
        journal.failed(settlement, None)
        return settlement


def _injected(held: Held, definition: Definition) -> dict[str, Any]:
    """What the worker fills in. A child process has a value of its own."""
    state = INJECTED if definition.pool == "process" else held.state
    return dict.fromkeys(definition.injected, state)


def _timed_out(job: Job, definition: Definition, raised: BaseException | None) -> TimeoutError:
    limit = duration_text(timeout_ms(job, definition) or 0)
    kind = "task" if definition.batch is None else "batch"
    error = TimeoutError(
        f"ran longer than its timeout of {limit}; to change it, use @app.{kind}(timeout=…) "
        "or using(timeout=…)"
    )
    if isinstance(raised, asyncio.CancelledError):
        # It tells where the task was.
        return error.with_traceback(raised.__traceback__)
    error.__cause__ = raised
    return error


def _in_thread(
    loop: asyncio.AbstractEventLoop,
    began: Callable[[], None],
    around: Callable[[], AbstractContextManager[object]],
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
) -> Any:
    loop.call_soon_threadsafe(began)
    try:
        with around():
            return function(*args, **kwargs)
    except StopIteration as error:
        # A future can't carry it: the caller would wait forever.
        raise RuntimeError("the task raised StopIteration") from error


def _interrupt(error: KeyboardInterrupt) -> None:
    raise error


class _Threads(ThreadPoolExecutor):
    """Counts its calls until they really end, including those that nobody waits for any more."""

    def __init__(
        self, size: int, freed: Callable[[], None], *, spare: int, lent: Callable[[], int]
    ) -> None:
        super().__init__(size + spare, thread_name_prefix="tickwheel-task")
        self.size = size
        self._calls = 0
        self._lent = lent
        self._counting = threading.Lock()
        self._freed = freed

    @property
    def busy(self) -> int:
        """How many threads are in use, without those that wait for other jobs."""
        return self._calls - self._lent()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with self._counting:
            self._calls += 1
            full = self.busy == self.size
        call = super().submit(fn, *args, **kwargs)
        call.add_done_callback(self._over)
        if full:
            log.error(
                "all %d task threads are busy or hang in tasks that timed out: "
                "this worker can't start another plain-function task until one ends",
                self.size,
            )
        return call

    def _over(self, _: Future[Any]) -> None:
        with self._counting:
            was_full = self.busy >= self.size
            self._calls -= 1
        if was_full:
            self._freed()
