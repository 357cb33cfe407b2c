"""The client: how programs and operators use a store, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from tickwheel.arguments import decode_result, plain_arguments
from tickwheel.batch import Batcher
from tickwheel.changes import IfExists, Put
from tickwheel.checks import checked_records
from tickwheel.clock import Clock, StoreClock
from tickwheel.concurrency import bounded_tasks
from tickwheel.duration import moment, moment_text
from tickwheel.ends import Ends
from tickwheel.envelope import GIVE_KEYS, is_sealed, readable
from tickwheel.errors import (
    BadArguments,
    JobCancelled,
    JobFailed,
    JobUnknown,
    ResultError,
    ResultTimeout,
    StoreUnavailable,
    shown,
)
from tickwheel.ids import new_fence
from tickwheel.job import (
    EXPIRED,
    CancelOutcome,
    Job,
    Move,
    MoveOutcome,
    Priority,
    Progress,
    PutOutcome,
    Run,
    State,
)
from tickwheel.registry import Definition
from tickwheel.store import (
    RECORDS_LIMIT,
    Page,
    Query,
    QueueInfo,
    Store,
    WorkerInfo,
    job_bytes,
    put_bytes,
)

A = TypeVar("A")

# The store's clock is read again when the last reading is this old.
MEASURE_S = 60.0
# A caller that is to tell what it sees of its job looks again after a third of the time that it has
# waited so far, so that a long wait costs few looks.
POLL_FIRST_S, POLL_LONGEST_S, POLL_GROWTH = 0.002, 0.5, 1.33
# How long a move waits for the worker that has the job.
MOVE_S = 2.0
# The pauses before a call is repeated whose repeats change nothing more.
AGAIN_S = (0.05, 0.2, 0.8)
# How long a job may take from an outbox to the store before it counts as unknown.
ARRIVE_S = 60.0
# How long the last look may take, when the time of a caller is up.
LAST_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A snapshot of a job; times are aware, in UTC.

    Arguments and result have the types of the task's annotations. If the app doesn't know the task,
    or they no longer fit it, they are plain JSON values.
    """

    id: str
    task: str
    queue: str
    priority: Priority
    state: State
    # By parameter name, without those that were left to their defaults.
    arguments: dict[str, Any]
    # The same as JSON text, as stored.
    payload: str
    due: datetime
    created: datetime
    # How many times it was claimed, how many runs failed, how many leases ran out.
    attempts: int
    failures: int
    takeovers: int
    worker: str | None
    # Set while it runs: until when its worker holds it, and whether it was asked to stop.
    lease_until: datetime | None
    cancel_requested: bool
    ended: datetime | None
    error: str | None
    # Where the last run failed, if it did: its traceback, without our own frames, cut to 8 kB.
    traceback: str | None
    # What the task returned, and the same as JSON text; None if it is not done.
    result: Any
    result_json: str | None
    history: tuple[Run, ...]
    # The strings that travel with it; empty if it has none.
    meta: dict[str, str]
    # From then on it is not started any more.
    expires: datetime | None
    # How far its last run said that it had come, if it did.
    progress: Progress | None

    @classmethod
    def of(cls, job: Job, definition: Definition | None = None) -> JobInfo:
        """`definition` is that of the job's task, if it is known."""
        job = readable(job)
        return cls(
            id=job.id,
            task=job.task,
            queue=job.queue,
            priority=Priority(job.priority),
            state=job.state,
            arguments=definition.arguments.by_name(job.payload)
            if definition
            else plain_arguments(job.payload),
            payload=job.payload,
            due=moment(job.due_ms),
            created=moment(job.created_ms),
            attempts=job.attempt,
            failures=job.failures,
            takeovers=job.takeovers,
            worker=job.worker,
            lease_until=None if job.lease_until_ms is None else moment(job.lease_until_ms),
            cancel_requested=job.cancel_requested,
            ended=None if job.ended_ms is None else moment(job.ended_ms),
            error=job.error,
            traceback=job.traceback,
            result=decode_result(job.result, definition.returns if definition else Any),
            result_json=job.result,
            history=job.history,
            meta=dict(job.meta or {}),
            expires=None if job.expires_ms is None else moment(job.expires_ms),
            progress=job.progress,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPage:
    """Some of the jobs that match, and where to continue; no cursor means that there are no
    more."""

    jobs: list[JobInfo]
    cursor: str | None


class Client:
    """Opens its store on first use. Belongs to the event loop that it was created on."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.clock = StoreClock(clock, own=store.own_clock)
        self._adding: Batcher[Job, bool] = Batcher(
            store.add, weigh=job_bytes, max_inflight=store.max_inflight
        )
        self._putting: Batcher[Put, PutOutcome] = Batcher(
            self._put_all, weigh=put_bytes, max_inflight=store.max_inflight
        )
        self._ends = Ends(store, self.clock)
        self._opening: asyncio.Task[None] | None = None
        self._open = False
        # How many users need it open, and whether to close it after the last one.
        self.users = 0
        self.unwanted = False

    async def open(self) -> None:
        """Open the store, once for all who wait for it. One who gives up does not wait for a store
        that is slow to open, nor does it have to start again for the next."""
        if self._open:
            return
        if self._opening is None:
            self._opening = asyncio.create_task(self._open_store())
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)

    async def _open_store(self) -> None:
        await self.store.open()
        await self.clock.measure(self.store.time_ns)
        self._open = True

    def _opened(self, opening: asyncio.Task[None]) -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # perhaps nobody waits for it any more

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        try:
            await self._adding.drained()
            await self._putting.drained()
        finally:
            self._open = False
            self._ends.close()
            await self.store.close()

    async def ready(self) -> None:
        """Open it if necessary, and measure the store's clock if the last reading is old."""
        if not self._open:
            await self.open()
        elif self.clock.stale(MEASURE_S):
            await self.clock.measure(self.store.time_ns)

    async def add(self, job: Job) -> bool:
        """Add one job, batched with others that are being added; False if its id is taken.

        An error in another job of the same batch is not raised here.
        """
        return await self._adding.send(job)

    async def add_many(self, portions: Iterable[Sequence[Job]]) -> list[bool]:
        """Add jobs in portions, as many at the same time as the store can use.

        Raises the first error of any portion. Jobs of other portions may be stored by then; adding
        all of them again adds those that are missing.
        """
        answers: dict[int, list[bool]] = {}

        async def add(number: int, jobs: Sequence[Job]) -> None:
            answers[number] = await self.store.add(jobs)

        async with bounded_tasks(self.store.max_inflight) as start:
            for number, jobs in enumerate(portions):
                await start(add(number, jobs))
        return [added for number in sorted(answers) for added in answers[number]]

    async def put(self, job: Job, if_exists: IfExists, *, request: int | None = None) -> PutOutcome:
        """Store a job under its id, whatever job has it. Tried again a few times if the store is
        away, which changes nothing more."""
        number = new_fence() if request is None else request
        return await self._putting.send(Put(job=job, if_exists=if_exists, request=number))

    async def put_many(self, jobs: Sequence[Job], if_exists: IfExists) -> list[PutOutcome]:
        return await self._put_all(
            [Put(job=job, if_exists=if_exists, request=new_fence()) for job in jobs]
        )

    async def _put_all(self, puts: Sequence[Put]) -> list[PutOutcome]:
        return await self._again(lambda: self.store.put(puts, now_ms=self.clock.now_ms()))

    async def move(
        self,
        ids: Sequence[str],
        *,
        due_ms: int | Sequence[int | None] | None = None,
        priority: int | None = None,
        queue: str | None = None,
    ) -> list[MoveOutcome]:
        """Change when and where jobs run; `due_ms` may be one time for all, or one for each."""
        times = [due_ms] * len(ids) if due_ms is None or isinstance(due_ms, int) else due_ms
        moves = [
            Move(id=id, request=new_fence(), due_ms=at, priority=priority, queue=queue)
            for id, at in zip(ids, times, strict=True)
        ]
        return await self._move(moves)

    async def _move(self, moves: Sequence[Move]) -> list[MoveOutcome]:
        return await self._again(lambda: self.store.move(moves, now_ms=self.clock.now_ms()))

    async def move_one(
        self, id: str, *, due_ms: int | None, priority: int | None, queue: str | None
    ) -> MoveOutcome:
        """The same for one job. If a worker has it, waits a moment for what that makes of it."""
        move = Move(id=id, request=new_fence(), due_ms=due_ms, priority=priority, queue=queue)
        [answer] = await self._move([move])
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + MOVE_S, POLL_FIRST_S
        while answer is MoveOutcome.REQUESTED and loop.time() < until:
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, POLL_LONGEST_S / 5)
            [job] = await self.store.get([id])
            if job is None or (job.state is State.RUNNING and job.started_ms is not None):
                return MoveOutcome.TOO_LATE
            if not job.told:
                # Decided: a repeat of the request tells how.
                [answer] = await self._move([move])
        return answer

    async def _again(self, call: Callable[[], Awaitable[list[A]]]) -> list[A]:
        """Repeat a call that is recognised as such."""
        for pause_s in AGAIN_S:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(pause_s)
        return await call()

    async def get(self, id: str) -> Job:
        [job] = await self.store.get([id])
        return _known(id, job)

    async def ended(
        self,
        id: str,
        timeout_s: float | None,
        *,
        in_outbox: bool = False,
        seen: Callable[[Job], None] | None = None,
    ) -> Job:
        """Wait until the job is done and return it; raises if it ends otherwise, or not in time.

        A job that is still in an outbox (`in_outbox`) may be unknown for a while. `seen` is called
        with the job each time it is found not to have ended.
        """
        loop = asyncio.get_running_loop()
        deadline = float("inf") if timeout_s is None else loop.time() + timeout_s
        try:
            # The last look, when the time is up, gets a moment of its own.
            async with asyncio.timeout(None if timeout_s is None else timeout_s + LAST_LOOK_S):
                if in_outbox and not await self._arrived(id, deadline):
                    raise ResultTimeout(f"job {id} has not left its outbox after {timeout_s:g} s")
                job = _known(id, await self._ends.look(id))
                if not job.state.ended:
                    job = await self._end_of(job, deadline, timeout_s, seen)
        except ResultTimeout:
            raise
        except TimeoutError:
            raise ResultTimeout(
                f"job {id}: the store did not say within {timeout_s:g} s whether it has ended"
            ) from None
        if job.state is State.DEAD:
            raise JobFailed(f"job {id} is dead: {readable(job).error}")
        if job.state is State.CANCELLED:
            if job.error == EXPIRED:
                words = f"expired: could not start by {moment_text(job.expires_ms)}"
                raise JobCancelled(f"job {id} {words}")
            raise JobCancelled(f"job {id} was cancelled")
        if job.error is not None:
            raise ResultError(f"job {id} is done, but {readable(job).error}")
        if is_sealed(job.result):
            raise ResultError(f"job {id} is done, but its result is encrypted; {GIVE_KEYS}")
        return job

    def awaiting(self, id: str) -> AbstractContextManager[asyncio.Future[Job | None]]:
        """A future for the job once it has ended, or None if it is unknown by then; for those who
        have looked at the job and found that it has not."""
        return self._ends.awaited(id)

    async def _end_of(
        self,
        job: Job,
        deadline: float,
        timeout_s: float | None,
        seen: Callable[[Job], None] | None,
    ) -> Job:
        """The job as it ends."""
        loop = asyncio.get_running_loop()
        pause_s = POLL_FIRST_S if seen is not None else float("inf")
        with self._ends.awaited(job.id) as end:
            while not job.state.ended:
                if seen is not None:
                    seen(job)
                left = deadline - loop.time()
                if left <= 0:
                    raise ResultTimeout(f"job {job.id} is still {job.state} after {timeout_s:g} s")
                wait_s = min(pause_s, left)
                await asyncio.wait([end], timeout=None if wait_s == float("inf") else wait_s)
                job = _known(job.id, end.result() if end.done() else await self._ends.look(job.id))
                pause_s = min(pause_s * POLL_GROWTH, POLL_LONGEST_S) if seen else pause_s
        return job

    async def _arrived(self, id: str, deadline: float) -> bool:
        """Wait until a job has come from an outbox, or has been given up; False at the deadline."""
        loop = asyncio.get_running_loop()
        given_up = loop.time() + ARRIVE_S
        while await self._ends.look(id) is None and loop.time() < given_up:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_FIRST_S)
        return True

    async def cancel(self, ids: Sequence[str]) -> list[CancelOutcome]:
        return await self.store.cancel(ids, now_ms=self.clock.now_ms())

    async def rerun(self, ids: Sequence[str]) -> list[bool]:
        return await self.store.rerun(ids, now_ms=self.clock.now_ms())

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self.store.delete(ids)

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self.store.find(query, cursor=cursor, limit=limit)

    async def queues(self) -> list[QueueInfo]:
        return await self.store.queues()

    async def parked(self) -> list[Job]:
        return await self.store.parked()

    async def pause(self, queue: str, paused: bool) -> None:
        await self.store.pause(queue, paused)

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        """Add or replace records; raises BadArguments for one that not every store can keep."""
        await self.store.put_records(kind, checked_records(kind, records))

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        if not 1 <= limit <= RECORDS_LIMIT:
            raise BadArguments(f"limit={shown(limit)}: must be from 1 to {RECORDS_LIMIT}")
        return await self.store.records(kind, after=after, limit=limit)

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        return await self.store.get_records(kind, names)

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        return await self.store.delete_records(kind, names)

    async def workers(self) -> list[WorkerInfo]:
        return await self.store.workers(now_ms=self.clock.now_ms())


def _known(id: str, job: Job | None) -> Job:
    if job is None:
        raise JobUnknown(f"no job has the id {shown(id)}: it was never added, or it was pruned")
    return job
