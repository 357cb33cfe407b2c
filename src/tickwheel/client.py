"""The client: what programs and operators ask of a store, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from tickwheel.batch import Batcher, few_at_a_time
from tickwheel.clock import Clock, StoreClock
from tickwheel.errors import JobCancelled, JobFailed, JobUnknown, ResultError, ResultTimeout
from tickwheel.job import Cancelled, Job, Priority, Run, State
from tickwheel.span import moment
from tickwheel.store import Page, Query, QueueInfo, Store, WorkerInfo, job_bytes

# The store's clock is asked again when the last answer is this old.
MEASURE_S = 60.0
# A caller that waits for a result looks again after a third of the time it has waited so far, so
# it learns of the end late by a third at most, and a long wait costs few looks.
LOOK_FIRST_S, LOOK_LONGEST_S, LOOK_GROWTH = 0.002, 0.5, 1.33
# How long a job may take from an outbox to the store before it is taken for unknown.
ARRIVE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as it stood when it was asked for; times are aware, in UTC."""

    id: str
    task: str
    queue: str
    priority: Priority
    state: State
    # The arguments as JSON text.
    payload: str
    due: datetime
    created: datetime
    # How often it was claimed, how many runs failed, how many leases ran out.
    attempts: int
    failures: int
    takeovers: int
    worker: str | None
    # Set while it runs: until when its worker holds it, and whether it was asked to stop.
    lease_until: datetime | None
    asked: bool
    ended: datetime | None
    error: str | None
    # What the task returned, as JSON text.
    result: str | None
    history: tuple[Run, ...]

    @classmethod
    def of(cls, job: Job) -> JobInfo:
        return cls(
            id=job.id,
            task=job.task,
            queue=job.queue,
            priority=Priority(job.priority),
            state=job.state,
            payload=job.payload,
            due=moment(job.due_ms),
            created=moment(job.created_ms),
            attempts=job.attempt,
            failures=job.failures,
            takeovers=job.takeovers,
            worker=job.worker,
            lease_until=None if job.lease_until_ms is None else moment(job.lease_until_ms),
            asked=job.asked,
            ended=None if job.ended_ms is None else moment(job.ended_ms),
            error=job.error,
            result=job.result,
            history=job.history,
        )


class Client:
    """Opens its store on first use. Belongs to the event loop that it was made on."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = StoreClock(clock, own=store.own_clock)
        self._adding: Batcher[Job, bool] = Batcher(store.add, weigh=job_bytes, lanes=store.lanes)
        self._opening = asyncio.Lock()
        self._open = False
        # Who must not find it closed, and whether somebody wants it closed after them.
        self.users = 0
        self.unwanted = False

    async def open(self) -> None:
        async with self._opening:
            if not self._open:
                await self.store.open()
                await self.clock.measure(self.store.time_ns)
                self._open = True

    async def close(self) -> None:
        try:
            await self._adding.drained()
        finally:
            self._open = False
            await self.store.close()

    async def ready(self) -> None:
        """Open if need be, with a fresh idea of the store's clock."""
        if not self._open:
            await self.open()
        elif self.clock.stale(MEASURE_S):
            await self.clock.measure(self.store.time_ns)

    async def add(self, job: Job) -> bool:
        """Add one job, together with whatever else is being added; False where its id is taken.

        An error of another job in the same batch is not raised here.
        """
        return await self._adding.send(job)

    async def add_many(self, portions: Iterable[Sequence[Job]]) -> list[bool]:
        """Add jobs by the portion, as many of them at the same time as the store likes.

        Raises the first error of any portion. Jobs of other portions may be stored by then; to add
        all of them again adds those that are missing.
        """
        answers: dict[int, list[bool]] = {}

        async def add(number: int, jobs: Sequence[Job]) -> None:
            answers[number] = await self.store.add(jobs)

        async with few_at_a_time(self.store.lanes) as start:
            for number, jobs in enumerate(portions):
                await start(add(number, jobs))
        return [added for number in sorted(answers) for added in answers[number]]

    async def get(self, id: str) -> Job:
        [job] = await self.store.get([id])
        if job is None:
            raise JobUnknown(f"no job has the id {id!r}: it was never added, or it was pruned")
        return job

    async def ended(self, id: str, timeout_s: float | None, *, on_its_way: bool = False) -> Job:
        """The job, once it is done; an error that says how else it ended, or that it has not.

        One that is on its way here from an outbox may be unknown for a while.
        """
        if on_its_way:
            await self._arrived(id, timeout_s)
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        pause_s = LOOK_FIRST_S
        while not (job := await self.get(id)).state.ended:
            left = float("inf") if deadline is None else deadline - loop.time()
            if left <= 0:
                raise ResultTimeout(f"job {id} is still {job.state} after {timeout_s:g} s")
            await asyncio.sleep(min(pause_s, left))
            pause_s = min(pause_s * LOOK_GROWTH, LOOK_LONGEST_S)
        if job.state is State.DEAD:
            raise JobFailed(f"job {id} is dead: {job.error}")
        if job.state is State.CANCELLED:
            raise JobCancelled(f"job {id} was cancelled")
        if job.error is not None:
            raise ResultError(f"job {id} is done, but {job.error}")
        return job

    async def _arrived(self, id: str, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (ARRIVE_S if timeout_s is None else min(timeout_s, ARRIVE_S))
        while loop.time() < deadline:
            if await self.store.get([id]) != [None]:
                return
            await asyncio.sleep(LOOK_FIRST_S)

    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        return await self.store.cancel(ids, now_ms=self.clock.now_ms())

    async def rerun(self, ids: Sequence[str]) -> list[bool]:
        return await self.store.rerun(ids, now_ms=self.clock.now_ms())

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self.store.delete(ids)

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self.store.find(query, cursor=cursor, limit=limit)

    async def queues(self) -> list[QueueInfo]:
        return await self.store.queues()

    async def pause(self, queue: str, paused: bool) -> None:
        await self.store.pause(queue, paused)

    async def workers(self) -> list[WorkerInfo]:
        return await self.store.workers(now_ms=self.clock.now_ms())
