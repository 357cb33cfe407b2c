"""`app.sync`: the app for callers without an event loop, under the same names."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from tickwheel.access import StoreAccess
from tickwheel.changes import IfExists
from tickwheel.checks import AnyIfExists, checked_options, if_exists_of
from tickwheel.client import JobInfo
from tickwheel.duration import Duration
from tickwheel.errors import BadArguments
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.jobs import AppJobs, JobRef, StateName, checked_query
from tickwheel.schedules import AppSchedules
from tickwheel.store import Query
from tickwheel.task import JobHandle

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


class _Sync(Protocol[A_co]):
    """Calls an async API and blocks until it has answered."""

    @property
    def _api(self) -> A_co: ...
    @property
    def _access(self) -> StoreAccess: ...


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Sync[A], P], R]:
    """The method, with the same parameters, for callers that don't await."""

    @functools.wraps(method)
    def call(self: _Sync[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._access.run_sync(method(self._api, *args, **kwargs))

    return call


class SyncSchedules:
    """`app.sync.schedules`."""

    def __init__(self, schedules: AppSchedules, access: StoreAccess) -> None:
        self._api = schedules
        self._access = access

    put = _blocking(AppSchedules.put)
    list = _blocking(AppSchedules.list)
    pause = _blocking(AppSchedules.pause)
    resume = _blocking(AppSchedules.resume)
    run = _blocking(AppSchedules.run)
    delete = _blocking(AppSchedules.delete)


class SyncApp:
    """`app.sync`: the app for callers without an event loop. Each call blocks until it is done."""

    def __init__(self, jobs: AppJobs, schedules: AppSchedules, access: StoreAccess) -> None:
        self._api = jobs
        self._access = access
        self.schedules = SyncSchedules(schedules, access)

    # --- Jobs

    def enqueue_many(
        self,
        jobs: Iterable[Job],
        *,
        if_exists: AnyIfExists | None = None,
        connection: Any = None,
    ) -> list[JobHandle[Any]]:
        """Add many jobs, created with `task.job(…)`, in as few steps as the store can."""
        # Consume a generator here: it may use objects that belong to this thread.
        taken: list[Job] = []
        portions = list(self._api._portions(jobs, taken))
        access, api = self._access, self._api
        how = None if if_exists is None else if_exists_of(if_exists)
        replaces = {api._how(job, how) for job in taken} - {IfExists.KEEP}
        if connection is None and not replaces:
            connection = access.joined()
        if connection is None and taken and self._after_commit(taken, how):
            return self._api._handles(taken, [True] * len(taken), in_outbox=True)
        if connection is None:
            return self._call(self._api.enqueue_many(taken, if_exists=how))
        api._refuse_replacing(taken, how)
        added = [access.add_within_sync(connection, portion) for portion in portions]
        flat = list(itertools.chain.from_iterable(added))
        return self._api._handles(taken, flat, in_outbox=access.outbox is not None)

    def _after_commit(self, jobs: list[Job], how: IfExists | None) -> bool:
        """Add these once the caller's transaction is committed; False if it has none."""
        if self._access.ambient is None:
            return False
        kinds = {
            each: [job for job in jobs if self._api._how(job, how) is each] for each in IfExists
        }
        return all([self._access.after_commit(mine, each) for each, mine in kinds.items() if mine])

    def info(self, job: JobRef) -> JobInfo:
        """What `job.info()` returns."""
        return self._call(self._handle(job).info())

    def result(self, job: JobHandle[R], timeout: Duration | None = None) -> R:
        """What `job.result()` returns."""
        handle: JobHandle[R] = self._handle(job)
        return self._call(handle.result(timeout))

    find = _blocking(AppJobs.find)

    @checked_options
    def find_all(
        self,
        *,
        state: StateName | State | None = None,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> Iterator[JobInfo]:
        """All jobs that match, read page by page: `for info in app.sync.find_all(state="dead")`."""
        return self._all(checked_query(state, queue, task, meta))

    def _all(self, query: Query) -> Iterator[JobInfo]:
        page = self._call(self._api._page(query))
        while True:
            yield from page.jobs
            if page.cursor is None:
                return
            page = self._call(self._api._page(query, page.cursor))

    @overload
    def cancel(self, jobs: JobRef) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, jobs: Iterable[JobRef]) -> list[CancelOutcome]: ...
    def cancel(self, jobs: JobRef | Iterable[JobRef]) -> CancelOutcome | list[CancelOutcome]:
        """Cancel a job, by its id or handle, or several; returns what that achieved, for each."""
        work: Coroutine[Any, Any, CancelOutcome | list[CancelOutcome]] = self._api.cancel(
            self._taken("cancel", jobs)
        )
        return self._call(work)

    move = _blocking(AppJobs.move)

    @overload
    def rerun(self, jobs: JobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    def rerun(self, jobs: Iterable[JobRef]) -> list[bool]: ...
    def rerun(self, jobs: JobRef | Iterable[JobRef]) -> bool | list[bool]:
        """Run an ended job again now, by its id or handle, or several; False for one that has not
        ended or is unknown."""
        work: Coroutine[Any, Any, bool | list[bool]] = self._api.rerun(self._taken("rerun", jobs))
        return self._call(work)

    @overload
    def delete(self, jobs: JobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    def delete(self, jobs: Iterable[JobRef]) -> list[bool]: ...
    def delete(self, jobs: JobRef | Iterable[JobRef]) -> bool | list[bool]:
        """Delete an ended job, by its id or handle, or several; False for one that has not ended or
        is unknown."""
        work: Coroutine[Any, Any, bool | list[bool]] = self._api.delete(self._taken("delete", jobs))
        return self._call(work)

    # --- Queues and workers

    queues = _blocking(AppJobs.queues)
    pause = _blocking(AppJobs.pause)
    resume = _blocking(AppJobs.resume)
    workers = _blocking(AppJobs.workers)

    def close(self) -> None:
        """Close the store that the calls above opened, once those of other threads have ended. It
        opens again when needed."""
        self._call(self._close_unused())

    async def _close_unused(self) -> None:
        self._access.close_unused()

    def _taken(self, step: str, jobs: JobRef | Iterable[JobRef]) -> JobRef | list[str]:
        # Consume a generator here: it may use objects that belong to this thread, or this API.
        return jobs if isinstance(jobs, str | JobHandle) else self._api._ids(step, jobs)

    def _handle(self, job: JobRef) -> JobHandle[Any]:
        if isinstance(job, JobHandle):
            return self._api._own(job)
        if not isinstance(job, str):
            raise BadArguments(f"give a job's id or its handle, not {type(job).__name__}")
        return self._api.job(job)

    def _call(self, work: Coroutine[Any, Any, R]) -> R:
        return self._access.run_sync(work)
