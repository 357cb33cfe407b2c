"""What an app lives on inside a box: a clock, a store and clients, and a way in for sync callers.

All of it is the real thing with something added: the clock moves when it is told to, the store
remembers what was enqueued, and a client tells what it has just added.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tickwheel import job as life
from tickwheel.bridge import Bridge
from tickwheel.client import Client, JobInfo
from tickwheel.clock import MS_NS, S_NS, Clock
from tickwheel.errors import UsageError
from tickwheel.job import Job, State
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing.loop import VirtualLoop

R = TypeVar("R")

WORKER = "sandbox"
# Nobody else claims in a box, so no lease ever has to run out: a hundred years.
LEASE_MS = 100 * 366 * 86_400_000


class BoxClock:
    """Stands still until it is moved; on a virtual loop it goes with the loop's time instead."""

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
        # Whole microseconds: sums of floats are off by a nanosecond now and then, and a nanosecond
        # too early is the millisecond before.
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
    """`memory://` for one driver: it hands out each job at its due time, not a little before."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock, ahead_ms=0)
        self.enqueued: list[JobInfo] = []

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added = await super().add(jobs)
        self.enqueued += [JobInfo.of(job) for job, new in zip(jobs, added, strict=True) if new]
        return added

    def all(self) -> list[Job]:
        """Every job, in the order in which they were added."""
        with self._lock:
            return list(self._jobs.values())

    def known_queues(self) -> list[str]:
        return list(self._counts)

    def next_due_ms(self, now_ms: int) -> int | None:
        """When the next job can be claimed."""
        with self._lock:
            return self._next_ms(self.known_queues(), now_ms)

    async def claim_next(self, now_ms: int) -> Job | None:
        """The job to start now, of any queue that is not paused."""
        jobs = await self.claim(
            self.known_queues(), worker=WORKER, limit=1, now_ms=now_ms, lease_ms=LEASE_MS
        )
        return jobs[0] if jobs else None

    def claim_this(self, id: str, now_ms: int) -> Job | None:
        """This job, if it could be claimed now."""
        with self._lock:
            job = self._jobs[id]
            if job.state is not State.WAITING or job.due_ms > now_ms or job.queue in self._paused:
                return None
            taken = life.claimed(
                job, worker=WORKER, fence=life.new_fence(), now_ms=now_ms, lease_ms=LEASE_MS
            )
            self._put(taken)
        return taken

    def asked_to_stop(self) -> list[str]:
        with self._lock:
            return self._asked_of(WORKER)


class BoxClient(Client):
    """Tells which jobs it has just added, and lets that have its way before it answers."""

    def __init__(
        self, store: BoxStore, clock: Clock, added: Callable[[Sequence[Job]], Awaitable[None]]
    ) -> None:
        super().__init__(store, clock)
        self._added = added

    async def add(self, job: Job) -> bool:
        new = await super().add(job)
        await self._added([job] if new else [])
        return new

    async def add_many(self, portions: Iterable[Sequence[Job]]) -> list[bool]:
        given = list(portions)
        new = await super().add_many(given)
        jobs = itertools.chain.from_iterable(given)
        await self._added([job for job, added in zip(jobs, new, strict=True) if added])
        return new


class Loops:
    """Runs coroutines for callers without an event loop, on the thread that they call from.

    So an async task finds what a plain one finds: the thread of the test, with its connections and
    transactions. On the thread of the box it is one loop for all, as on a worker.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        context = contextvars.copy_context()
        if threading.get_ident() == self._thread:
            return self._runner.run(work, context=context)
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(work, context=context)

    def close(self) -> None:
        self._runner.close()


class BoxBridge(Bridge):
    """Serves `enqueue_sync` and `app.sync` on the thread that calls, outside of any event loop."""

    def __init__(self, call: Callable[[Coroutine[Any, Any, Any]], Any], own: Bridge) -> None:
        super().__init__()
        self._call = call
        self._own = own

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        # Where a loop runs, waiting here would block it: that takes another thread.
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
        raise UsageError("an event loop runs here; write: async with sandbox(app)")


def by_hand(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that never has to wait, without an event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    work.close()
    raise RuntimeError("it had to wait")
