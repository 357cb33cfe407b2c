"""The parts of a box that an app runs on: a clock, a store, clients, and calls from sync code.

Each is the real thing with something added: the clock moves when told to, the store remembers what
was enqueued, and a client reports what it has just added.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.changes import IfExists, Put
from tickwheel.client import Client, JobInfo
from tickwheel.clock import MS_NS, S_NS, Clock
from tickwheel.concurrency import first_of
from tickwheel.errors import UsageError
from tickwheel.ids import new_fence
from tickwheel.job import Job, Progress, PutOutcome, State
from tickwheel.registry import Registry
from tickwheel.store import Ask
from tickwheel.stores.memory import MemoryStore
from tickwheel.sync import Bridge
from tickwheel.testing.loop import VirtualLoop

R = TypeVar("R")
# Calls a plain function outside of the event loop.
Outside = Callable[[Callable[[], Any]], Awaitable[Any]]

WORKER = "sandbox"
# Nothing else claims in a box, so a lease never needs to run out: a hundred years.
LEASE_MS = 100 * 366 * 86_400_000


# Answers after which the job waits as it was given.
_RUN_NEXT = (PutOutcome.ADDED, PutOutcome.REPLACED)


class BoxClock:
    """Stands still until it is moved; on a virtual loop it follows the loop's time instead."""

    def __init__(self, start_ms: int, loop: VirtualLoop | None) -> None:
        self._ns = start_ms * MS_NS
        self._loop = loop
        self._loop_start_s = 0.0 if loop is None else loop.time()

    @property
    def virtual(self) -> bool:
        return self._loop is not None

    def now_ns(self) -> int:
        if self._loop is None:
            return self._ns
        # Whole microseconds: sums of floats are sometimes off by a nanosecond, and a nanosecond too
        # early is the previous millisecond.
        return self._ns + round((self._loop.time() - self._loop_start_s) * 1_000_000) * 1_000

    def monotonic_ns(self) -> int:
        return self.now_ns()

    def now_ms(self) -> int:
        return self.now_ns() // MS_NS

    async def move_to(self, ms: int) -> None:
        if self._loop is None:
            self._ns = max(ms * MS_NS, self._ns)
        else:
            await asyncio.sleep(max(ms * MS_NS - self.now_ns(), 0) / S_NS)


class BoxStore(MemoryStore):
    """`memory://` for one driver: jobs can be claimed at their due time, not a little before."""

    def __init__(self, clock: Clock, tasks: Registry) -> None:
        super().__init__(clock=clock, ahead_ms=0)
        self._tasks = tasks
        self.enqueued: list[JobInfo] = []

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added = await super().add(jobs)
        self.enqueued += [
            JobInfo.of(job, self._tasks.find(job.task))
            for job, new in zip(jobs, added, strict=True)
            if new
        ]
        return added

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        answers = await super().put(puts, now_ms=now_ms)
        self.enqueued += [
            JobInfo.of(each.job, self._tasks.find(each.job.task))
            for each, answer in zip(puts, answers, strict=True)
            if answer is not PutOutcome.KEPT
        ]
        return answers

    def all(self) -> list[Job]:
        """Every job, in the order in which they were added."""
        with self._lock:
            return list(self._jobs.values())

    def known_queues(self) -> list[str]:
        return list(self._counts)

    def next_due_ms(self, now_ms: int) -> int | None:
        """When the next job can be claimed."""
        with self._lock:
            return self._next_ms(self.known_queues(), (), now_ms)

    async def claim_next(self, now_ms: int) -> Job | None:
        """Claim the job to start now, from any queue that is not paused; those that have expired
        are cancelled on the way."""
        while jobs := await self.claim(
            self.known_queues(), worker=WORKER, limit=1, now_ms=now_ms, lease_ms=LEASE_MS
        ):
            [job] = jobs
            if job.expires_ms is None or job.expires_ms > now_ms:
                return job
            await self.settle([life.expire(job, ended_ms=now_ms)], now_ms=now_ms)
        return None

    def tell(self, job: Job, progress: Progress | None) -> Job:
        """Keep what a running job says of its progress; may be called on any thread."""
        told = msgspec.structs.replace(job, progress=progress)
        with self._lock:
            known = self._jobs.get(job.id)
            if known is not None and known.state is State.RUNNING and known.fence == job.fence:
                held = life.as_held(
                    told, cancel_requested=known.cancel_requested, changes=known.changes
                )
                self._put(held)
        return told

    def claim_this(self, id: str, now_ms: int) -> Job | None:
        """Claim this job, if it can be claimed now."""
        with self._lock:
            job = self._jobs[id]
            if job.state is not State.WAITING or job.due_ms > now_ms or job.queue in self._paused:
                return None
            taken = life.claimed(
                job, worker=WORKER, fence=new_fence(), now_ms=now_ms, lease_ms=LEASE_MS
            )
            self._put(taken)
        return taken

    def ids_to_stop(self) -> list[str]:
        return [id for id, ask in self.asks().items() if ask is Ask.STOP]

    def asks(self) -> dict[str, Ask]:
        with self._lock:
            return self._asked(WORKER)


class BoxClient(Client):
    """Reports the jobs that it has just added, and waits for that call before it returns."""

    def __init__(
        self, store: BoxStore, clock: Clock, added: Callable[[Sequence[Job]], Awaitable[None]]
    ) -> None:
        super().__init__(store, clock)
        self._added = added

    async def add(self, job: Job) -> bool:
        new = await super().add(job)
        await self._added([job] if new else [])
        return new

    async def put(self, job: Job, if_exists: IfExists, *, request: int | None = None) -> PutOutcome:
        answer = await super().put(job, if_exists, request=request)
        await self._added([job] if answer in _RUN_NEXT else [])
        return answer

    async def put_many(self, jobs: Sequence[Job], if_exists: IfExists) -> list[PutOutcome]:
        answers = await super().put_many(jobs, if_exists)
        new = [job for job, each in zip(jobs, answers, strict=True) if each in _RUN_NEXT]
        await self._added(new)
        return answers

    async def add_many(self, portions: Iterable[Sequence[Job]]) -> list[bool]:
        given = list(portions)
        new = await super().add_many(given)
        jobs = itertools.chain.from_iterable(given)
        await self._added([job for job, added in zip(jobs, new, strict=True) if added])
        return new


class CallerLoops:
    """Runs coroutines for callers without an event loop, on the caller's thread.

    So an async task has what a plain one has: the test's thread, with its connections and
    transactions. On the box's own thread there is one loop for all, as on a worker.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    @property
    def at_home(self) -> bool:
        """Whether this is the box's own thread."""
        return threading.get_ident() == self._thread

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        with self._here() as runner:
            return runner.run(work, context=contextvars.copy_context())

    def run_in_turns(self, work: Callable[[Outside], Coroutine[Any, Any, R]]) -> R:
        """Run a coroutine that has plain functions called on this thread while its event loop
        stands still: they may not block a loop that runs."""
        calls: list[Callable[[], None]] = []
        asked = asyncio.Event()

        async def outside(function: Callable[[], Any]) -> Any:
            answer = asyncio.get_running_loop().create_future()
            context = contextvars.copy_context()
            calls.append(lambda: _answer(answer, context, function))
            asked.set()
            return await answer

        async def until_asked() -> None:
            await first_of(asyncio.wait([task]), asked.wait())

        with self._here() as runner:
            context = contextvars.copy_context()
            task = runner.get_loop().create_task(work(outside), context=context)
            while not task.done():
                runner.run(until_asked())
                asked.clear()
                while calls:
                    calls.pop(0)()
            return task.result()

    @contextmanager
    def _here(self) -> Iterator[asyncio.Runner]:
        if self.at_home:
            yield self._runner
        else:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                yield runner

    def close(self) -> None:
        self._runner.close()


def _answer(
    answer: asyncio.Future[Any], context: contextvars.Context, function: Callable[[], Any]
) -> None:
    try:
        value = context.run(function)
    except StopIteration:
        # A future can't carry it.
        answer.set_exception(RuntimeError("the task raised StopIteration"))
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(value)


class BoxBridge(Bridge):
    """Runs `enqueue_sync` and `app.sync` on the caller's thread, outside of any event loop."""

    def __init__(self, call: Callable[[Coroutine[Any, Any, Any]], Any], own: Bridge) -> None:
        super().__init__()
        self._call = call
        self._own = own

    def is_here(self) -> bool:
        return self._own.is_here()

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        # If a loop runs here, waiting would block it: use another thread.
        value: R = self._own.call(work) if on_a_loop() else self._call(work)
        return value


def on_a_loop() -> bool:
    """Whether an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def off_any_loop() -> None:
    if on_a_loop():
        raise UsageError("an event loop is running here; use async with sandbox(app)")


def by_hand(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never has to wait, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    work.close()
    raise RuntimeError("it had to wait")
