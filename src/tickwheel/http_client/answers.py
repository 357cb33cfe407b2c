"""What the HTTP API's answers mean: values of our own types, or errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from tickwheel.client import JobInfo, JobPage
from tickwheel.duration import due_ms, moment_text
from tickwheel.errors import (
    AccessDenied,
    BadArguments,
    BadConfig,
    JobCancelled,
    JobFailed,
    ResultError,
    StoreError,
    StoreIncompatible,
    StoreUnavailable,
    TickwheelError,
    UnknownTask,
)
from tickwheel.http_client.requests import ApiRequest, HttpJob
from tickwheel.job import (
    EXPIRED,
    CancelOutcome,
    MoveOutcome,
    Priority,
    Progress,
    PutOutcome,
    Run,
    State,
)
from tickwheel.operate.documents import (
    JobDocument,
    QueueDocument,
    RunDocument,
    TaskDocument,
    WorkerCountsDocument,
)
from tickwheel.store import Finding, QueueInfo

T = TypeVar("T")

PROBLEM = "urn:tickwheel:problem:"
# How many characters of what is not a problem a message shows.
SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAnswer:
    """An answer as it came."""

    status: int
    body: bytes
    # Of the header Retry-After, if it has one.
    retry_after_s: float | None = None
    location: str = ""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class ProblemReceived(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, as the API says it (RFC 9457)."""

    type: str
    status: int
    detail: str = ""
    request_id: str = ""

    @property
    def code(self) -> str:
        return self.type.removeprefix(PROBLEM)


def read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreIncompatible(
            f"the server's answer can't be read ({error}); is it of a newer release?"
        ) from None


# --- Errors


def problem_in(received: ApiAnswer) -> ProblemReceived | None:
    """None if it isn't an answer of the API: a proxy's, or of another server."""
    try:
        found = msgspec.json.decode(received.body, type=ProblemReceived)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.type.startswith(PROBLEM) else None


def nothing_was_done(received: ApiAnswer) -> bool:
    """Whether the server refused it before it did anything, for lack of room or time."""
    problem = problem_in(received)
    return received.status == 429 or (problem is not None and problem.code == "overloaded")


def error_of(request: ApiRequest, received: ApiAnswer) -> TickwheelError:
    """The error that an answer without success means."""
    problem = problem_in(received)
    if problem is None:
        return _foreign(request, received)
    return error_of_problem(problem, request)


def error_of_problem(problem: ProblemReceived, request: ApiRequest) -> TickwheelError:
    words = problem.detail or problem.code
    kinds: dict[str, type[TickwheelError]] = {
        "unauthorized": AccessDenied,
        "forbidden": AccessDenied,
        "host-not-allowed": AccessDenied,
        "not-found": request.missing,
        "unknown-task": UnknownTask,
        "no-callbacks": BadConfig,
        "bad-request": request.invalid,
        "invalid": request.invalid,
        "too-large": BadArguments,
        "uri-too-long": BadArguments,
        "rate-limited": StoreUnavailable,
        "overloaded": StoreUnavailable,
        "store-unavailable": StoreUnavailable,
        "request-timeout": StoreUnavailable,
    }
    kind = kinds.get(problem.code, StoreError)
    if kind is StoreError:
        words = f"{words} (request {problem.request_id})"
    return kind(words)


def _foreign(request: ApiRequest, received: ApiAnswer) -> TickwheelError:
    status, said = received.status, received.body[:SHOWN].decode(errors="replace").strip()
    if 300 <= status < 400:
        return BadConfig(f"the server redirects to {received.location!r}: use that URL")
    if status in (401, 403, 407):
        return AccessDenied(f"status {status}, not from the API, but from a server before it")
    if status in (502, 503, 504, 429):
        return StoreUnavailable(f"the server is away: status {status}")
    return BadConfig(
        f"{request.method} {request.path.partition('?')[0]}: status {status}, which is not an "
        f"answer of the HTTP API; is the URL right? {said!r}"
    )


# --- Jobs


class AddedReceived(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job to add."""

    id: str | None
    added: bool
    # An older server doesn't say.
    answer: PutOutcome | None = None
    problem: ProblemReceived | None = None


class _AddedMany(msgspec.Struct, frozen=True, kw_only=True):
    results: list[AddedReceived]


def added_one(body: bytes, job: HttpJob) -> PutOutcome:
    return _answer(job, read(body, AddedReceived))


def added_many(
    body: bytes, jobs: Sequence[HttpJob], request: ApiRequest
) -> list[PutOutcome | TickwheelError]:
    """For each job, what became of it, or why it was refused."""
    results = read(body, _AddedMany).results
    if len(results) != len(jobs):
        raise StoreIncompatible(f"{len(results):,} answers for {len(jobs):,} jobs")
    return [
        _answer(job, result)
        if result.problem is None
        else error_of_problem(result.problem, request)
        for job, result in zip(jobs, results, strict=True)
    ]


def _answer(job: HttpJob, result: AddedReceived) -> PutOutcome:
    # An id of our own is taken only by the same job, if the first answer was lost.
    if result.added or not job.chosen:
        return PutOutcome.ADDED
    return result.answer or PutOutcome.KEPT


class _Jobs(msgspec.Struct, frozen=True, kw_only=True):
    jobs: list[JobDocument]
    cursor: str | None


def job_page(body: bytes) -> JobPage:
    found = read(body, _Jobs)
    return JobPage(jobs=[job_info(each) for each in found.jobs], cursor=found.cursor)


def job_info(job: JobDocument) -> JobInfo:
    """The same as in the store, except that secrets may be hidden."""
    try:
        return JobInfo(
            id=job.id,
            task=job.task,
            queue=job.queue,
            priority=Priority[job.priority.upper()],
            state=job.state,
            arguments=job.arguments if isinstance(job.arguments, dict) else {},
            payload=_text(job.arguments),
            due=datetime.fromisoformat(job.due),
            created=datetime.fromisoformat(job.created),
            attempts=job.attempts,
            failures=job.failures,
            takeovers=job.takeovers,
            worker=job.worker,
            lease_until=_time(job.lease_until),
            cancel_requested=job.cancel_requested,
            ended=_time(job.ended),
            error=job.error,
            traceback=job.traceback,
            result=job.result,
            result_json=None if job.result is None else _text(job.result),
            history=tuple(map(_run, job.history)),
            meta=job.meta,
            expires=_time(job.expires),
            progress=None
            if job.progress is None
            else Progress(part=job.progress.part, words=job.progress.words),
        )
    except (ValueError, KeyError) as error:
        raise StoreIncompatible(f"the server's answer can't be read: {error}") from None


def _run(run: RunDocument) -> Run:
    return Run(
        attempt=run.attempt,
        worker=run.worker,
        outcome=run.outcome,
        due_ms=_ms(run.due),
        started_ms=None if run.started is None else _ms(run.started),
        ended_ms=_ms(run.ended),
        error=run.error,
    )


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _ms(text: str) -> int:
    return due_ms(datetime.fromisoformat(text))


def result_of(info: JobInfo) -> Any:
    """What the task of an ended job returned; raises if it has not."""
    if info.state is State.DEAD:
        raise JobFailed(f"job {info.id} is dead: {info.error}")
    if info.state is State.CANCELLED:
        if info.error == EXPIRED and info.expires is not None:
            words = f"expired: could not start by {moment_text(due_ms(info.expires))}"
            raise JobCancelled(f"job {info.id} {words}")
        raise JobCancelled(f"job {info.id} was cancelled")
    if info.error is not None:
        raise ResultError(f"job {info.id} is done, but {info.error}")
    return info.result


# --- Changes of many


class _OutcomeReceived(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    outcome: str


class _ChangedReceived(msgspec.Struct, frozen=True, kw_only=True):
    changed: int
    more: bool
    results: list[_OutcomeReceived]


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkOutcome:
    """How many jobs were changed, the outcome for each id, and whether more match."""

    changed: int
    more: bool
    outcomes: dict[str, str]


def bulk_outcome(body: bytes) -> BulkOutcome:
    found = read(body, _ChangedReceived)
    outcomes = {each.id: each.outcome for each in found.results}
    return BulkOutcome(changed=found.changed, more=found.more, outcomes=outcomes)


def outcome_words(body: bytes, ids: Sequence[str]) -> list[str]:
    """What became of each of these jobs, in their order."""
    results = read(body, _ChangedReceived).results
    if [each.id for each in results] != list(ids):
        raise StoreIncompatible("the server's answer is about other jobs")
    return [each.outcome for each in results]


def cancel_outcome(word: str) -> CancelOutcome:
    try:
        return CancelOutcome(word.replace("_", " "))
    except ValueError:
        raise StoreIncompatible(f"the server's answer can't be read: {word!r}") from None


def move_outcome(word: str) -> MoveOutcome:
    try:
        return MoveOutcome(word.replace("_", " "))
    except ValueError:
        raise StoreIncompatible(f"the server's answer can't be read: {word!r}") from None


# --- Schedules, queues, workers


class RemoteSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a schedule; one that the server can't read has a `problem`, and no ticks."""

    name: str
    task: str = ""
    cron: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    # In plain words.
    explained: str = ""
    next: datetime | None = None
    paused: bool
    misfire: str | None = None
    overlap: str | None = None
    from_code: bool = False
    app: str | None = None
    last_id: str | None = msgspec.field(name="last_job")
    problem: str | None = None


class RemoteWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it last described itself."""

    name: str
    app: str | None
    host: str
    pid: int
    version: str
    concurrency: int
    held: int
    running: int
    # How far the node's clock is behind the store's.
    offset_ms: float
    queues: tuple[str, ...]
    # None: an older release, which didn't say.
    tasks: tuple[str, ...] | None
    started: datetime
    seen: datetime
    # None: its metrics are off, the key is limited, or an older release.
    counts: WorkerCountsDocument | None = None


def queue_info(queue: QueueDocument) -> QueueInfo:
    """A queue with its counts; raises AccessDenied if the key may not see them."""
    if queue.waiting is None:
        raise AccessDenied("the API key is limited to tasks, so it gets no counts of queues")
    counts = {state.value: getattr(queue, state) for state in State}
    return QueueInfo(name=queue.name, paused=queue.paused, **counts)


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """What the API lists, under the name that it has there."""

    schedules: list[RemoteSchedule] = []
    queues: list[QueueDocument] = []
    workers: list[RemoteWorker] = []
    tasks: list[TaskDocument] = []
    findings: list[Finding] = []


class TicksReceived(msgspec.Struct, frozen=True, kw_only=True):
    """The next ticks of a schedule."""

    ticks: list[TickReceived]


class TickReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A tick, in UTC."""

    at: datetime


class RunReceived(msgspec.Struct, frozen=True, kw_only=True):
    """The id of the job that a schedule added."""

    job: str
