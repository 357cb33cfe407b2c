"""Jobs as callers hold them, over the HTTP API; many jobs at once; dead jobs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Unpack

from tickwheel.batch import portions
from tickwheel.checks import AnyPriority, checked_id, checked_options
from tickwheel.client import JobInfo, JobPage
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadArguments, JobUnknown, ResultTimeout, StoreUnavailable
from tickwheel.http_client import answers, requests
from tickwheel.http_client.answers import BulkOutcome
from tickwheel.http_client.exchange import Exchange
from tickwheel.http_client.requests import WhichMatch
from tickwheel.job import CancelOutcome, MoveOutcome, PutOutcome
from tickwheel.operate.documents import ExplanationDocument, JobDocument

# `result` lets the server wait for so long at once, but no longer than for this part of the time
# that a request may take.
WAIT_S, WAIT_PART = 30.0, 0.6
# If the server didn't wait, because it stops, it is asked again after a pause, which doubles.
PAUSE_FIRST_S, PAUSE_LONGEST_S = 0.05, 2.0
# How long the last look may take, when the time of a caller is up.
LAST_LOOK_S = 1.0


class AsyncHttpJobHandle:
    """A job as the client's caller holds it: read its state, wait for its result, cancel it."""

    __slots__ = ("_exchange", "answer", "id")

    def __init__(self, exchange: Exchange, id: str, answer: PutOutcome = PutOutcome.ADDED) -> None:
        self.id = id
        # What became of the call: added, kept, replaced or follows.
        self.answer = answer
        self._exchange = exchange

    @property
    def added(self) -> bool:
        """Whether this call has added a job. If not, its id was taken: `answer` says what became of
        the job that had it."""
        return self.answer is PutOutcome.ADDED

    def __repr__(self) -> str:
        return f"<job {self.id}>" if self.added else f"<job {self.id} {self.answer}>"

    async def info(self) -> JobInfo:
        """State, due time, attempts, error and history. Raises JobUnknown if it was pruned."""
        return await self._info(None)

    async def _info(self, within_s: float | None, wait_s: float = 0.0) -> JobInfo:
        path = f"/v1/jobs/{requests.part(self.id)}"
        query = {"wait": f"{int(wait_s * 1000)}ms"} if wait_s >= 0.001 else None
        request = requests.get(path, query, missing=JobUnknown)
        body = await self._exchange.ask(request, within_s)
        return answers.job_info(answers.read(body, JobDocument))

    async def result(self, timeout: Duration | None = None) -> Any:  # noqa: ASYNC109 (a Duration)
        """Wait until the job is done and return what its task returned, as plain JSON values.

        The server answers as soon as it has ended. Raises ResultTimeout, JobFailed (it is dead),
        JobCancelled, or ResultError if the result could not be stored.
        """
        exchange, pause_s = self._exchange, PAUSE_FIRST_S
        timeout_s = float("inf") if timeout is None else duration_ms(timeout) / 1000
        until_s = exchange.now_s() + timeout_s
        while True:
            asked_s = exchange.now_s()
            wait_s = max(min(until_s - asked_s, WAIT_S, exchange.timeout_s * WAIT_PART), 0.0)
            info = await self._look(until_s - asked_s, timeout_s, wait_s)
            if info.state.ended:
                return answers.result_of(info)
            now_s = exchange.now_s()
            if now_s >= until_s:
                raise ResultTimeout(f"job {self.id} is still {info.state} after {timeout_s:g} s")
            if now_s - asked_s < wait_s / 2:
                await exchange.link.sleep(min(pause_s, until_s - now_s))
                pause_s = min(pause_s * 2, PAUSE_LONGEST_S)

    async def _look(self, left_s: float, timeout_s: float, wait_s: float) -> JobInfo:
        within_s = max(left_s, LAST_LOOK_S)
        started_s = self._exchange.now_s()
        try:
            return await self._info(within_s, wait_s)
        except StoreUnavailable as error:
            if self._exchange.now_s() - started_s < left_s:
                raise
            raise ResultTimeout(
                f"job {self.id}: the server did not say within {timeout_s:g} s whether it has "
                f"ended: {error}"
            ) from None

    async def cancel(self) -> CancelOutcome:
        """Cancel the job; returns what that achieved."""
        [outcome] = await change(self._exchange, "/v1/jobs/cancel", [self.id])
        return answers.cancel_outcome(outcome)

    async def move(
        self,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
    ) -> MoveOutcome:
        """Change when it is due, its queue or its priority; returns what that achieved."""
        to = requests.destination(delay=delay, at=at, queue=queue, priority=priority)
        [outcome] = await change(self._exchange, "/v1/jobs/move", [self.id], to=to)
        return answers.move_outcome(outcome)

    async def rerun(self) -> bool:
        """Run it again now; False if it has not ended or is unknown."""
        [outcome] = await change(self._exchange, "/v1/jobs/rerun", [self.id])
        return outcome == "rerun"

    async def delete(self) -> bool:
        """Delete it; False if it has not ended or is unknown."""
        [outcome] = await change(self._exchange, "/v1/jobs/delete", [self.id])
        return outcome == "deleted"

    async def explain(self) -> ExplanationDocument:
        """Why it waits, who holds it, when it runs or how it ended, and what can be done."""
        path = f"/v1/jobs/{requests.part(self.id)}/explain"
        body = await self._exchange.ask(requests.get(path, missing=JobUnknown))
        return answers.read(body, ExplanationDocument)


# A job, as its caller names it.
HttpJobRef = str | AsyncHttpJobHandle


# --- Many jobs


def ids_of(step: str, jobs: Any) -> list[str]:
    """The ids of the jobs that a caller names, by id or handle."""
    if isinstance(jobs, HttpJobRef):
        jobs = [jobs]
    if not isinstance(jobs, Iterable) or isinstance(jobs, bytes | bytearray | Mapping):
        raise BadArguments(f"{step} takes a job's id, its handle, or a list of these")
    named: list[Any] = [getattr(job, "id", job) for job in jobs]
    return [checked_id(id) for id in named]


async def change(exchange: Exchange, path: str, ids: Sequence[str], **more: Any) -> list[str]:
    """What became of each, in their order."""
    outcomes: list[str] = []
    for portion in portions(list(ids), most=requests.JOBS_MOST):
        body = await exchange.ask(requests.change(path, portion, **more))
        outcomes += answers.outcome_words(body, portion)
    return outcomes


async def change_matching(
    exchange: Exchange, path: str, which: WhichMatch, to: Mapping[str, Any] | None = None
) -> BulkOutcome:
    request = requests.change_matching(path, **which, to=to)
    return answers.bulk_outcome(await exchange.ask(request))


class AsyncHttpDead:
    """`client.dead`: dead jobs. Whatever is asked for, all other jobs are left alone."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    @checked_options
    async def find(
        self,
        *,
        queue: str | None = None,
        task: str | None = None,
        meta: Mapping[str, str] | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> JobPage:
        """A page of them, newest first."""
        request = requests.find("/v1/dead", None, queue, task, meta, limit, cursor)
        return answers.job_page(await self._exchange.ask(request))

    async def rerun(
        self, /, jobs: Iterable[HttpJobRef] | None = None, **which: Unpack[WhichMatch]
    ) -> BulkOutcome:
        """Run them again now: these jobs, or those that match `queue`, `task`, `meta` and `since`,
        at most `limit`; without any of these, all."""
        return await self._change("/v1/dead/rerun", jobs, which)

    async def delete(
        self, /, jobs: Iterable[HttpJobRef] | None = None, **which: Unpack[WhichMatch]
    ) -> BulkOutcome:
        """Delete them: these jobs, or those that match, as for `rerun`."""
        return await self._change("/v1/dead/delete", jobs, which)

    async def _change(
        self, path: str, jobs: Iterable[HttpJobRef] | None, which: WhichMatch
    ) -> BulkOutcome:
        if jobs is None:
            return await change_matching(self._exchange, path, which)
        if which:
            raise BadArguments("give jobs, or say which match, not both")
        ids = ids_of(path.rpartition("/")[2], jobs)
        outcomes = dict(zip(ids, await change(self._exchange, path, ids), strict=True))
        changed = sum(each in ("rerun", "deleted") for each in outcomes.values())
        return BulkOutcome(changed=changed, more=False, outcomes=outcomes)
