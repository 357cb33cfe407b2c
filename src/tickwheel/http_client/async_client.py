"""`AsyncHttpClient`: the verbs of an app, over the HTTP API.

Its coroutines need no event loop of their own: only the link waits.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Self, Unpack, overload

from tickwheel.batch import portions
from tickwheel.checks import AnyPriority, checked_id, checked_name, checked_options
from tickwheel.client import JobInfo, JobPage
from tickwheel.clock import MS_NS, SystemClock
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadArguments, BadConfig, JobsRefused, TickwheelError, shown
from tickwheel.http_client import answers, requests
from tickwheel.http_client.answers import BulkOutcome, Listing, RemoteWorker
from tickwheel.http_client.calls import HttpCall, HttpCallback
from tickwheel.http_client.exchange import Exchange, Link
from tickwheel.http_client.handles import (
    AsyncHttpDead,
    AsyncHttpJobHandle,
    HttpJobRef,
    change,
    change_matching,
    ids_of,
)
from tickwheel.http_client.links import ThreadLink
from tickwheel.http_client.requests import ApiRequest, HttpJob, WhichMatch
from tickwheel.http_client.schedules import AsyncHttpSchedules
from tickwheel.http_client.wire import KeptConnections, base_of, headers_of, tls_context
from tickwheel.ids import new_id
from tickwheel.job import CancelOutcome, MoveOutcome, PutOutcome, State
from tickwheel.jobs import StateName
from tickwheel.operate.documents import TaskDocument
from tickwheel.operate.stats import Stats
from tickwheel.store import Finding, QueueInfo

# How many jobs `find_all` reads at a time.
PAGE = 200


class AsyncHttpClient:
    """Jobs, schedules and queues of an app that is served elsewhere, by the HTTP API.

    `url` is where `tickwheel serve` listens, with its path if it is mounted below one; `key` an API
    key. A request takes at most `timeout`. One that could not be answered is repeated for at most
    `retry_for`, if that is safe. Certificates are verified, by the authorities in `ca_file` or by
    the system's. Close it, or use it as `async with`.
    """

    # How requests are sent.
    _link: Callable[[KeptConnections, int], Link] = ThreadLink

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
        if not isinstance(connections, int) or not 1 <= connections <= 1000:
            raise BadConfig(f"connections={shown(connections)}: must be from 1 to 1,000")
        timeout_ms = duration_ms(timeout)
        if not timeout_ms:
            raise BadConfig("timeout=0 leaves no time for an answer")
        base = base_of(url)
        clock = SystemClock()
        pool = KeptConnections(
            base,
            headers_of(key),
            tls_context(ca_file) if base.tls else None,
            most=connections,
            clock=clock,
        )
        self.url = url
        self._exchange = Exchange(
            self._link(pool, connections),
            clock,
            timeout_s=timeout_ms / 1000,
            retry_s=duration_ms(retry_for) / 1000,
            key=key,
        )
        self.schedules = AsyncHttpSchedules(self._exchange)
        self.dead = AsyncHttpDead(self._exchange)

    def __repr__(self) -> str:
        return f"<client of {self.url}>"

    async def _ask(self, request: ApiRequest) -> bytes:
        return await self._exchange.ask(request)

    def _new_id(self) -> str:
        return new_id(self._exchange.clock.now_ns() // MS_NS)

    # --- Add

    def task(self, name: str) -> HttpCall[Coroutine[Any, Any, AsyncHttpJobHandle]]:
        """A task of the served app: `await client.task("pack").enqueue(order=42)`."""
        return HttpCall(self._add, self._new_id, checked_name("task", name))

    @property
    def callbacks(self) -> HttpCallback[Coroutine[Any, Any, AsyncHttpJobHandle]]:
        """HTTP calls: `await client.callbacks.using(delay="30m").call("https://…")`."""
        return HttpCallback(self._add, self._new_id)

    async def _add(self, job: HttpJob) -> AsyncHttpJobHandle:
        body = await self._ask(requests.add_one(job))
        return AsyncHttpJobHandle(self._exchange, job.id, answers.added_one(body, job))

    async def enqueue_many(self, jobs: Iterable[HttpJob]) -> list[AsyncHttpJobHandle]:
        """Add many jobs, created with `task.job(…)`, up to 1,000 in one request.

        Each is added or refused on its own: if any was refused, JobsRefused is raised at the end,
        with the reasons and the handles of the others. After StoreUnavailable, call it again with
        the same jobs: those that were added are not added twice.
        """
        handles: dict[int, AsyncHttpJobHandle] = {}
        errors: dict[int, TickwheelError] = {}
        for portion in portions(
            _checked(jobs),
            lambda job: len(job.form),
            most=requests.JOBS_MOST,
            most_bytes=requests.JOBS_BYTES,
        ):
            request, start = requests.add_many(portion), len(handles) + len(errors)
            results = answers.added_many(await self._ask(request), portion, request)
            for index, (job, result) in enumerate(zip(portion, results, strict=True), start):
                if isinstance(result, PutOutcome):
                    handles[index] = AsyncHttpJobHandle(self._exchange, job.id, result)
                else:
                    errors[index] = result
        if errors:
            raise JobsRefused(errors, handles)
        return list(handles.values())

    # --- Find

    def job(self, id: str) -> AsyncHttpJobHandle:
        """A handle for a job by its id; nothing is looked up yet."""
        return AsyncHttpJobHandle(self._exchange, checked_id(id))

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
        """A page of jobs that match; for the next one, pass the `cursor` of the last. Only a page
        without a cursor is the last."""
        request = requests.find("/v1/jobs", state, queue, task, meta, limit, cursor)
        return answers.job_page(await self._ask(request))

    @checked_options
    async def find_all(
        self,
        *,
        state: StateName | State | None = None,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
    ) -> AsyncIterator[JobInfo]:
        """All jobs that match, read page by page: `async for info in client.find_all(…)`.

        Jobs that change state in the meantime may be missed or seen twice.
        """
        cursor: str | None = None
        while True:
            page = await self.find(
                state=state, queue=queue, task=task, meta=meta, limit=PAGE, cursor=cursor
            )
            for info in page.jobs:
                yield info
            cursor = page.cursor
            if cursor is None:
                return

    # --- Cancel, rerun, delete: one job or many

    # A str is also an iterable of its letters, which nobody means: the first overload takes it.
    @overload
    async def cancel(self, jobs: HttpJobRef) -> CancelOutcome: ...  # type: ignore[overload-overlap]
    @overload
    async def cancel(self, jobs: Iterable[HttpJobRef]) -> list[CancelOutcome]: ...
    async def cancel(
        self, jobs: HttpJobRef | Iterable[HttpJobRef]
    ) -> CancelOutcome | list[CancelOutcome]:
        """Cancel a job, by its id or handle, or several; returns what that achieved, for each."""
        ids = ids_of("cancel", jobs)
        outcomes = await change(self._exchange, "/v1/jobs/cancel", ids)
        found = [answers.cancel_outcome(each) for each in outcomes]
        return found[0] if isinstance(jobs, HttpJobRef) else found

    @overload
    async def rerun(self, jobs: HttpJobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    async def rerun(self, jobs: Iterable[HttpJobRef]) -> list[bool]: ...
    async def rerun(self, jobs: HttpJobRef | Iterable[HttpJobRef]) -> bool | list[bool]:
        """Run an ended job again now, by its id or handle, or several; False for one that has not
        ended or is unknown."""
        ids = ids_of("rerun", jobs)
        outcomes = await change(self._exchange, "/v1/jobs/rerun", ids)
        found = [each == "rerun" for each in outcomes]
        return found[0] if isinstance(jobs, HttpJobRef) else found

    @overload
    async def delete(self, jobs: HttpJobRef) -> bool: ...  # type: ignore[overload-overlap]
    @overload
    async def delete(self, jobs: Iterable[HttpJobRef]) -> list[bool]: ...
    async def delete(self, jobs: HttpJobRef | Iterable[HttpJobRef]) -> bool | list[bool]:
        """Delete an ended job, by its id or handle, or several; False for one that has not ended or
        is unknown."""
        ids = ids_of("delete", jobs)
        outcomes = await change(self._exchange, "/v1/jobs/delete", ids)
        found = [each == "deleted" for each in outcomes]
        return found[0] if isinstance(jobs, HttpJobRef) else found

    async def move(
        self,
        jobs: HttpJobRef | Iterable[HttpJobRef],
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        later: Duration | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
    ) -> MoveOutcome | list[MoveOutcome]:
        """Change when a job is due, its queue or its priority, or those of several; returns what
        that achieved, for each. With `later`, each is due that much later than before."""
        ids = ids_of("move", jobs)
        to = requests.destination(delay=delay, at=at, later=later, queue=queue, priority=priority)
        outcomes = await change(self._exchange, "/v1/jobs/move", ids, to=to)
        found = [answers.move_outcome(each) for each in outcomes]
        return found[0] if isinstance(jobs, HttpJobRef) else found

    async def move_matching(
        self,
        /,
        *,
        to: Mapping[str, Any],
        **which: Unpack[WhichMatch],
    ) -> BulkOutcome:
        """Move waiting jobs that match, as for `cancel_matching`; `to` has the options of `move`,
        as `to={"later": "2h"}`."""
        there = requests.destination(**to)
        return await change_matching(self._exchange, "/v1/jobs/move", which, there)

    async def cancel_matching(self, /, **which: Unpack[WhichMatch]) -> BulkOutcome:
        """Cancel waiting and running jobs that match `state`, `queue`, `task`, `meta` and `since`,
        at most `limit` (1,000). Repeat it while there are `more`."""
        return await change_matching(self._exchange, "/v1/jobs/cancel", which)

    async def rerun_matching(self, /, **which: Unpack[WhichMatch]) -> BulkOutcome:
        """Run ended jobs again that match, as for `cancel_matching`; `state` must be given."""
        return await change_matching(self._exchange, "/v1/jobs/rerun", which)

    async def delete_matching(self, /, **which: Unpack[WhichMatch]) -> BulkOutcome:
        """Delete ended jobs that match, as for `cancel_matching`; `state` must be given."""
        return await change_matching(self._exchange, "/v1/jobs/delete", which)

    # --- Queues, workers, tasks

    async def _list(self, what: str) -> Listing:
        return answers.read(await self._ask(requests.get(f"/v1/{what}")), Listing)

    async def queues(self) -> list[QueueInfo]:
        """All queues with their counts. Raises AccessDenied for a key that is limited to tasks."""
        return [answers.queue_info(each) for each in (await self._list("queues")).queues]

    async def pause(self, queue: str) -> None:
        """Pause a queue: workers claim no more of its jobs."""
        await self._ask(requests.post(f"/v1/queues/{checked_name('queue', queue)}/pause"))

    async def resume(self, queue: str) -> None:
        """Resume a queue: its jobs start again."""
        await self._ask(requests.post(f"/v1/queues/{checked_name('queue', queue)}/resume"))

    async def workers(self) -> list[RemoteWorker]:
        """The workers that were seen recently."""
        return (await self._list("workers")).workers

    async def tasks(self) -> list[TaskDocument]:
        """The tasks of the served app, with their parameters and defaults."""
        return (await self._list("tasks")).tasks

    async def stats(self) -> Stats:
        """How many jobs are in each state, and how late the first one is."""
        return answers.read(await self._ask(requests.get("/v1/stats")), Stats)

    async def doctor(self) -> list[Finding]:
        """What is guaranteed, what is wrong, and how to fix it."""
        return (await self._list("doctor")).findings

    # --- Close

    async def close(self) -> None:
        """Close the connections, once the requests under way have ended."""
        await self._exchange.link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _checked(jobs: Iterable[HttpJob]) -> Iterator[HttpJob]:
    if not isinstance(jobs, Iterable):
        raise BadArguments("enqueue_many takes jobs, created with client.task(…).job(…)")
    for job in jobs:
        if not isinstance(job, HttpJob):
            raise BadArguments("enqueue_many takes jobs, created with client.task(…).job(…)")
        yield job
