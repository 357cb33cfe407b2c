"""`HttpClient`: the client for callers without an event loop, under the same names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, overload

from tickwheel.checks import checked_name, checked_options
from tickwheel.client import JobInfo
from tickwheel.duration import Duration
from tickwheel.errors import JobsRefused
from tickwheel.http_client.async_client import PAGE, AsyncHttpClient
from tickwheel.http_client.calls import HttpCall, HttpCallback
from tickwheel.http_client.handles import AsyncHttpDead, AsyncHttpJobHandle, ids_of
from tickwheel.http_client.links import BlockingLink
from tickwheel.http_client.requests import HttpJob
from tickwheel.http_client.schedules import AsyncHttpSchedules
from tickwheel.job import CancelOutcome, MoveOutcome, PutOutcome, State
from tickwheel.jobs import StateName

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)


def finished(work: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine that is never suspended."""
    try:
        work.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    work.close()
    raise AssertionError("a blocking call was suspended")


class _Blocks(Protocol[A_co]):
    """Calls an async API and blocks until it has answered."""

    @property
    def _api(self) -> A_co: ...


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[_Blocks[A], P], R]:
    """The method, with the same parameters, for callers that don't await."""

    @functools.wraps(method)
    def call(self: _Blocks[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return finished(method(self._api, *args, **kwargs))

    return call


class HttpJobHandle:
    """A job as the client's caller holds it: read its state, wait for its result, cancel it."""

    __slots__ = ("_api",)

    def __init__(self, api: AsyncHttpJobHandle) -> None:
        self._api = api

    @property
    def id(self) -> str:
        return self._api.id

    @property
    def answer(self) -> PutOutcome:
        """What became of the call: added, kept, replaced or follows."""
        return self._api.answer

    @property
    def added(self) -> bool:
        """Whether this call has added a job; if not, `answer` says what became of the one that had
        its id."""
        return self._api.added

    def __repr__(self) -> str:
        return repr(self._api)

    info = _blocking(AsyncHttpJobHandle.info)
    result = _blocking(AsyncHttpJobHandle.result)
    cancel = _blocking(AsyncHttpJobHandle.cancel)
    move = _blocking(AsyncHttpJobHandle.move)
    rerun = _blocking(AsyncHttpJobHandle.rerun)
    delete = _blocking(AsyncHttpJobHandle.delete)
    explain = _blocking(AsyncHttpJobHandle.explain)


# A job, as its caller names it.
HeldJob = str | HttpJobHandle


class HttpSchedules:
    """`client.schedules`: as in an app, but a schedule is known only as the API shows it."""

    def __init__(self, api: AsyncHttpSchedules) -> None:
        self._api = api

    put = _blocking(AsyncHttpSchedules.put)
    get = _blocking(AsyncHttpSchedules.get)
    list = _blocking(AsyncHttpSchedules.list)
    next = _blocking(AsyncHttpSchedules.next)
    pause = _blocking(AsyncHttpSchedules.pause)
    resume = _blocking(AsyncHttpSchedules.resume)
    run = _blocking(AsyncHttpSchedules.run)
    delete = _blocking(AsyncHttpSchedules.delete)


class HttpDead:
    """`client.dead`: dead jobs. Whatever is asked for, all other jobs are left alone."""

    def __init__(self, api: AsyncHttpDead) -> None:
        self._api = api

    find = _blocking(AsyncHttpDead.find)
    rerun = _blocking(AsyncHttpDead.rerun)
    delete = _blocking(AsyncHttpDead.delete)


class _Unsuspended(AsyncHttpClient):
    """A client whose coroutines are never suspended."""

    _link = BlockingLink


class HttpClient:
    """Jobs, schedules and queues of an app that is served elsewhere, by the HTTP API.

    `url` is where `tickwheel serve` listens, with its path if it is mounted below one; `key` an API
    key. A request takes at most `timeout`. One that could not be answered is repeated for at most
    `retry_for`, if that is safe. Certificates are verified, by the authorities in `ca_file` or by
    the system's. Threads may share a client. Close it, or use it as `with`.
    """

    @checked_options
    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout: Duration = "15s",
        retry_for: Duration = "30s",
        ca_file: str | os.PathLike[str] | None = None,
        connections: int = 10,
    ) -> None:
        self._api = _Unsuspended(
            url,
            key=key,
            timeout=timeout,
            retry_for=retry_for,
            ca_file=ca_file,
            connections=connections,
        )
        self.url = url
        self.schedules = HttpSchedules(self._api.schedules)
        self.dead = HttpDead(self._api.dead)

    def __repr__(self) -> str:
        return repr(self._api)

    # --- Add

    def task(self, name: str) -> HttpCall[HttpJobHandle]:
        """A task of the served app: `client.task("pack").enqueue(order=42)`."""
        return HttpCall(self._add, self._api._new_id, checked_name("task", name))

    @property
    def callbacks(self) -> HttpCallback[HttpJobHandle]:
        """HTTP calls: `client.callbacks.using(delay="30m").call("https://…")`."""
        return HttpCallback(self._add, self._api._new_id)

    def _add(self, job: HttpJob) -> HttpJobHandle:
        return HttpJobHandle(finished(self._api._add(job)))

    def enqueue_many(self, jobs: Iterable[HttpJob]) -> list[HttpJobHandle]:
        """Add many jobs, created with `task.job(…)`, up to 1,000 in one request.

        Each is added or refused on its own: if any was refused, JobsRefused is raised at the end,
        with the reasons and the handles of the others. After StoreUnavailable, call it again with
        the same jobs: those that were added are not added twice.
        """
        try:
            return list(map(HttpJobHandle, finished(self._api.enqueue_many(jobs))))
        except JobsRefused as error:
            handles = {index: HttpJobHandle(each) for index, each in error.handles.items()}
            raise JobsRefused(error.errors, handles) from None

    # --- Find

    def job(self, id: str) -> HttpJobHandle:
        """A handle for a job by its id; nothing is looked up yet."""
        return HttpJobHandle(self._api.job(id))

    find = _blocking(AsyncHttpClient.find)

    @checked_options
    def find_all(
        self,
        *,
        state: StateName | State | None = None,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> Iterator[JobInfo]:
        """All jobs that match, read page by page: `for info in client.find_all(state="dead")`.

        Jobs that change state in the meantime may be missed or seen twice.
        """
        cursor: str | None = None
        while True:
            page = self.find(
                state=state, queue=queue, task=task, meta=meta, limit=PAGE, cursor=cursor
            )
            yield from page.jobs
            cursor = page.cursor
            if cursor is None:
                return

    # --- Cancel, rerun, delete: one job or many

    @overload
    def cancel(self, jobs: HeldJob) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    def cancel(self, jobs: Iterable[HeldJob]) -> list[CancelOutcome]: ...
    def cancel(self, jobs: HeldJob | Iterable[HeldJob]) -> CancelOutcome | list[CancelOutcome]:
        """Cancel a job, by its id or handle, or several; returns what that achieved, for each."""
        found = finished(self._api.cancel(_ids("cancel", jobs)))
        return found[0] if isinstance(jobs, HeldJob) else found

    def move(self, jobs: HeldJob | Iterable[HeldJob], **to: Any) -> MoveOutcome | list[MoveOutcome]:
        """Change when a job is due (`delay`, `at`, `later`), its `queue` or its `priority`, or
        those of several; returns what that achieved, for each."""
        found = finished(self._api.move(_ids("move", jobs), **to))
        assert isinstance(found, list)
        return found[0] if isinstance(jobs, HeldJob) else found

    move_matching = _blocking(AsyncHttpClient.move_matching)

    @overload
    def rerun(self, jobs: HeldJob) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    def rerun(self, jobs: Iterable[HeldJob]) -> list[bool]: ...
    def rerun(self, jobs: HeldJob | Iterable[HeldJob]) -> bool | list[bool]:
        """Run an ended job again now, by its id or handle, or several; False for one that has not
        ended or is unknown."""
        found = finished(self._api.rerun(_ids("rerun", jobs)))
        return found[0] if isinstance(jobs, HeldJob) else found

    @overload
    def delete(self, jobs: HeldJob) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    def delete(self, jobs: Iterable[HeldJob]) -> list[bool]: ...
    def delete(self, jobs: HeldJob | Iterable[HeldJob]) -> bool | list[bool]:
        """Delete an ended job, by its id or handle, or several; False for one that has not ended or
        is unknown."""
        found = finished(self._api.delete(_ids("delete", jobs)))
        return found[0] if isinstance(jobs, HeldJob) else found

    cancel_matching = _blocking(AsyncHttpClient.cancel_matching)
    rerun_matching = _blocking(AsyncHttpClient.rerun_matching)
    delete_matching = _blocking(AsyncHttpClient.delete_matching)

    # --- Queues, workers, tasks

    queues = _blocking(AsyncHttpClient.queues)
    pause = _blocking(AsyncHttpClient.pause)
    resume = _blocking(AsyncHttpClient.resume)
    workers = _blocking(AsyncHttpClient.workers)
    tasks = _blocking(AsyncHttpClient.tasks)
    stats = _blocking(AsyncHttpClient.stats)
    doctor = _blocking(AsyncHttpClient.doctor)

    # --- Close

    close = _blocking(AsyncHttpClient.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ids(step: str, jobs: HeldJob | Iterable[HeldJob]) -> list[str]:
    return ids_of(step, [jobs] if isinstance(jobs, HeldJob) else jobs)
