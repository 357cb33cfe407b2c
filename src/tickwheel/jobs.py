"""What users do with an app's jobs, queues and workers: add many, find, cancel, rerun, pause."""

from __future__ import annotations

import typing
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypeVar, overload

from tickwheel.access import StoreAccess
from tickwheel.batch import BATCH_BYTES, portions, weightless
from tickwheel.changes import IfExists
from tickwheel.checks import (
    ID_LIMIT,
    LATEST_MS,
    AnyIfExists,
    AnyPriority,
    checked_id,
    checked_job,
    checked_meta,
    checked_name,
    checked_options,
    if_exists_of,
)
from tickwheel.client import Client, JobInfo, JobPage
from tickwheel.duration import Duration
from tickwheel.errors import BadArguments, BadConfig, did_you_mean, shown
from tickwheel.job import CancelOutcome, Job, MoveOutcome, PutOutcome, State
from tickwheel.store import Query, QueueInfo, WorkerInfo, checked_text, job_bytes
from tickwheel.task import JobHandle, checked_move

R = TypeVar("R")

# How many jobs of `enqueue_many` are in transit at the same time, in one step or a few; and about
# BATCH_BYTES of them.
PORTION = 4000
# The most jobs on one page of `find`.
PAGE_MOST = 1000

NO_JOBS = "enqueue_many takes jobs, created with task.job(…)"

_ANSWERS: dict[bool | PutOutcome, PutOutcome] = {
    True: PutOutcome.ADDED,
    False: PutOutcome.KEPT,
    **{each: each for each in PutOutcome},
}
StateName = Literal["waiting", "running", "done", "dead", "cancelled"]
# A job, as its caller names it.
JobRef: TypeAlias = str | JobHandle[Any]


class AppJobs:
    """The part of an app that is about jobs, queues and workers; `app.sync` has the same."""

    def __init__(self, access: StoreAccess) -> None:
        self._access = access
        self.tasks = access.tasks

    async def client(self) -> Client:
        """The open client of the running event loop, with direct access to the store."""
        return await self._access.client()

    # --- Add

    async def enqueue_many(
        self,
        jobs: Iterable[Job],
        *,
        if_exists: AnyIfExists | None = None,
        connection: Any = None,
    ) -> list[JobHandle[Any]]:
        """Add many jobs, created with `task.job(…)`, in as few steps as the store can.

        A list is checked before any of it is stored. A generator is consumed in portions: jobs are
        created while earlier ones are being stored.

        `if_exists` is for all of them; without it, each task has its own, as in `@app.task`. With
        your own `connection` they are part of its transaction, as in `using`.
        """
        taken: list[Job] = []
        portions = self._portions(jobs, taken)
        how = None if if_exists is None else if_exists_of(if_exists)
        added: Sequence[bool | PutOutcome]
        if connection is None and how is None and not self.tasks.identified:
            added = await (await self.client()).add_many(portions)
        elif connection is None:
            added = await self._put_many(portions, how)
        else:
            added = []
            for portion in portions:
                self._refuse_replacing(portion, how)
                added += await self._access.add_within(connection, portion)
        in_outbox = connection is not None and self._access.outbox is not None
        return self._handles(taken, added, in_outbox=in_outbox)

    async def _put_many(
        self, portions: Iterable[Sequence[Job]], how: IfExists | None
    ) -> list[PutOutcome]:
        """Portion by portion: those of one id count in their order."""
        client = await self.client()
        answers: list[PutOutcome] = []
        for portion in portions:
            found: dict[int, PutOutcome] = {}
            for kind in IfExists:
                mine = [n for n, job in enumerate(portion) if self._how(job, how) is kind]
                jobs = [portion[n] for n in mine]
                if jobs and kind is IfExists.KEEP:
                    added = await client.add_many([jobs])
                    kept = [PutOutcome.ADDED if new else PutOutcome.KEPT for new in added]
                    found |= dict(zip(mine, kept, strict=True))
                elif jobs:
                    found |= dict(zip(mine, await client.put_many(jobs, kind), strict=True))
            answers += [found[n] for n in range(len(portion))]
        return answers

    def _how(self, job: Job, how: IfExists | None) -> IfExists:
        return self.tasks.get(job.task).if_exists if how is None else how

    def _refuse_replacing(self, jobs: Sequence[Job], how: IfExists | None) -> None:
        others = {self._how(job, how) for job in jobs} - {IfExists.KEEP}
        for each in others:
            raise BadConfig(
                f"if_exists={each.value!r} is not possible with connection=: enqueue them after "
                "the commit, or use if_exists='keep'"
            )

    def _portions(self, jobs: Iterable[Job], taken: list[Job]) -> Iterator[Sequence[Job]]:
        """Checked jobs, some at a time; those that were taken are appended to `taken`."""
        if not isinstance(jobs, Iterable):
            raise BadArguments(NO_JOBS)
        checked: Iterable[Job] = self._checked(jobs)
        weigh: Callable[[Job], int] = job_bytes
        if isinstance(jobs, Sequence):
            # They are in memory already; the store bounds the bytes of its steps.
            checked, weigh = list(checked), weightless
        inflight = self._access.store.max_inflight
        most, most_bytes = (each // inflight for each in (PORTION, BATCH_BYTES))
        for portion in portions(checked, weigh, most=max(1, most), most_bytes=most_bytes):
            taken += portion
            yield portion

    def _checked(self, jobs: Iterable[Job]) -> Iterator[Job]:
        # Thousands are alike: what they share is checked once, the rest without a call.
        task = queue = priority = meta = None
        for job in jobs:
            if not isinstance(job, Job):
                raise BadArguments(NO_JOBS)
            id = job.id
            if (
                job.task is not task
                or job.queue is not queue
                or job.priority is not priority
                or job.meta is not meta
                or not 0 <= job.due_ms <= LATEST_MS
                or not 0 < len(id) <= ID_LIMIT
                or not id.isprintable()
            ):
                self.tasks.get(job.task)
                checked_job(job)
                task, queue, priority, meta = job.task, job.queue, job.priority, job.meta
            yield job

    def _handles(
        self, jobs: Sequence[Job], added: Sequence[bool | PutOutcome], *, in_outbox: bool
    ) -> list[JobHandle[Any]]:
        return [
            JobHandle(self._access, job.id, _ANSWERS[new], in_outbox)
            for job, new in zip(jobs, added, strict=True)
        ]

    # --- Find

    def job(self, id: str) -> JobHandle[Any]:
        """A handle for a job by its id; nothing is looked up yet."""
        return JobHandle(self._access, checked_id(id))

    @checked_options
    async def find(
        self,
        *,
        state: StateName | State | None = None,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """A page of jobs that match; for the next one, pass the `cursor` of the last.

        `meta` is one name and its value, as `{"customer": "42"}`.
        A page may hold fewer than `limit` jobs although more follow: only a page without a cursor
        is the last. Jobs that change state in the meantime may be missed or seen twice.
        """
        query = checked_query(state, queue, task, meta)
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= PAGE_MOST:
            raise BadArguments(
                f"limit={shown(limit)}: must be a whole number from 1 to {PAGE_MOST:,}"
            )
        if cursor is not None:
            checked_text("cursor", cursor)
        return await self._page(query, cursor, limit)

    @checked_options
    def find_all(
        self,
        *,
        state: StateName | State | None = None,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> AsyncIterator[JobInfo]:
        """All jobs that match, read page by page: `async for info in app.find_all(state="dead")`.

        Jobs that change state in the meantime may be missed or seen twice.
        """
        return self._all(checked_query(state, queue, task, meta))

    async def _all(self, query: Query) -> AsyncIterator[JobInfo]:
        page = await self._page(query)
        while True:
            for info in page.jobs:
                yield info
            if page.cursor is None:
                return
            page = await self._page(query, page.cursor)

    async def _page(
        self, query: Query, cursor: str | None = None, limit: int = PAGE_MOST
    ) -> JobPage:
        page = await (await self.client()).find(query, cursor=cursor, limit=limit)
        return JobPage(jobs=[self._access.info_of(job) for job in page.jobs], cursor=page.cursor)

    # --- Cancel, rerun, delete: one job or many

    # A str is also an iterable of its letters, which nobody means: the first overload takes it.
    @overload
    async def cancel(self, jobs: JobRef) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, jobs: Iterable[JobRef]) -> list[CancelOutcome]: ...
    async def cancel(self, jobs: JobRef | Iterable[JobRef]) -> CancelOutcome | list[CancelOutcome]:
        """Cancel a job, by its id or handle, or several; returns what that achieved, for each."""
        ids = self._ids("cancel", jobs)
        answers = await (await self.client()).cancel(ids)
        return answers[0] if isinstance(jobs, str | JobHandle) else answers

    @checked_options
    async def move(
        self,
        jobs: JobRef | Iterable[JobRef],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        priority: AnyPriority | None = None,
        queue: str | None = None,
    ) -> MoveOutcome | list[MoveOutcome]:
        """Change when a job is due, its priority or its queue, or those of several; returns what
        that achieved, for each. Only for one job does it wait for a worker that has it."""
        ids = self._ids("move", jobs)
        client = await self.client()
        to = checked_move(delay, at, priority, queue, client.clock.now_ms())
        if isinstance(jobs, str | JobHandle):
            return await client.move_one(ids[0], **to)
        return await client.move(ids, **to)

    @overload
    async def rerun(self, jobs: JobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    async def rerun(self, jobs: Iterable[JobRef]) -> list[bool]: ...
    async def rerun(self, jobs: JobRef | Iterable[JobRef]) -> bool | list[bool]:
        """Run an ended job again now, by its id or handle, or several; False for one that has not
        ended or is unknown."""
        ids = self._ids("rerun", jobs)
        answers = await (await self.client()).rerun(ids)
        return answers[0] if isinstance(jobs, str | JobHandle) else answers

    @overload
    async def delete(self, jobs: JobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    async def delete(self, jobs: Iterable[JobRef]) -> list[bool]: ...
    async def delete(self, jobs: JobRef | Iterable[JobRef]) -> bool | list[bool]:
        """Delete an ended job, by its id or handle, or several; False for one that has not ended or
        is unknown."""
        ids = self._ids("delete", jobs)
        answers = await (await self.client()).delete(ids)
        return answers[0] if isinstance(jobs, str | JobHandle) else answers

    def _ids(self, step: str, jobs: Any) -> list[str]:
        """The ids of the jobs that a caller names."""
        if isinstance(jobs, str | JobHandle):
            return [self._id(step, jobs)]
        if not isinstance(jobs, Iterable) or isinstance(jobs, bytes | bytearray | Mapping):
            raise _not_a_job(step, jobs)
        return [self._id(step, job) for job in jobs]

    def _id(self, step: str, job: Any) -> str:
        if isinstance(job, JobHandle):
            return self._own(job).id
        if not isinstance(job, str):
            raise _not_a_job(step, job)
        return checked_text("id", job)

    def _own(self, job: JobHandle[R]) -> JobHandle[R]:
        if job._access is not self._access:
            raise BadArguments(
                f"the handle of job {job.id} is of another app; use that app, or pass the job's id"
            )
        return job

    # --- Queues and workers

    async def queues(self) -> list[QueueInfo]:
        """All queues with their counts."""
        return await (await self.client()).queues()

    async def pause(self, queue: str) -> None:
        """Pause a queue: workers claim no more of its jobs. Those that a worker holds by then still
        start, within about a second (in a batch, within its linger), and jobs can be added."""
        await (await self.client()).pause(checked_name("queue", queue), True)

    async def resume(self, queue: str) -> None:
        """Resume a queue: its jobs start again."""
        await (await self.client()).pause(checked_name("queue", queue), False)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that were seen recently."""
        return await (await self.client()).workers()


def checked_query(
    state: str | None, queue: str | None, task: str | None, meta: Mapping[str, str] | None
) -> Query:
    """The query for these arguments, checked."""
    known = typing.get_args(StateName)
    if state is not None and (not isinstance(state, str) or state not in known):
        hint = did_you_mean(state, known) if isinstance(state, str) else ""
        raise BadArguments(f"state={shown(state)}: must be one of {', '.join(known)}{hint}")
    for what, name in (("queue", queue), ("task", task)):
        if name is not None:
            checked_text(what, name)
    pairs = [*(checked_meta(meta) or {}).items()]
    if meta is not None and len(pairs) != 1:
        raise BadArguments(
            f"meta={shown(meta)}: must be one name and its value, as {{'customer': '42'}}"
        )
    return Query(
        state=None if state is None else State(state),
        queue=queue,
        task=task,
        meta=pairs[0] if pairs else None,
    )


def _not_a_job(step: str, given: Any) -> BadArguments:
    return BadArguments(
        f"{step}() takes a job's id, its handle, or a list of these, not {type(given).__name__}"
    )
