"""Add jobs: one, or many of which each is checked and answered on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote

import msgspec

from tickwheel.changes import IfExists
from tickwheel.client import Client
from tickwheel.errors import BadArguments, BadTime, TickwheelError
from tickwheel.http.body import check_depth, decode
from tickwheel.http.forms import NewJob, NewJobs, RawJobs
from tickwheel.http.idempotency import (
    FINGERPRINT,
    check_same,
    derived_id,
    fingerprint,
    request_number,
    with_fingerprint,
)
from tickwheel.http.problems import Kind, Problem, ProblemDetails, problem_of, store_away
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.job import Job, PutOutcome
from tickwheel.masking import CALLBACK_TASK
from tickwheel.operate.audit import in_words
from tickwheel.operate.keys import Scope
from tickwheel.task import Task

table = Table()

BATCH_BYTES = 16 * 1024 * 1024
JOBS, BATCH = "/v1/jobs", "/v1/jobs/batch"
REPLAYED = {"Idempotent-Replay": "true"}


class Added(msgspec.Struct, frozen=True, kw_only=True):
    """A job's id, and whether it was added; if not, its id was taken already: `answer` says what
    became of that job (kept, replaced, follows)."""

    id: str
    added: bool
    answer: str = "added"


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job of a batch."""

    id: str | None
    added: bool
    answer: str | None = None
    problem: ProblemDetails | None = None


class BatchAdded(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs were added, and what became of each, in their order."""

    added: int
    results: list[BatchResult]


# --- From a form to a job


def new_job(incoming: Incoming, form: NewJob, route: str, index: int | None = None) -> Job:
    """The job that a form describes, checked. Raises Problem or UsageError."""
    task = _task(incoming, form)
    caller, service = incoming.caller, incoming.service
    if not caller.may(Scope.ENQUEUE, task=task):
        raise Problem(Kind.FORBIDDEN, f"the key may not use the task {task!r}")
    definition = service.definition(task)
    queue = form.queue or definition.queue
    if not caller.may(Scope.ENQUEUE, queue=queue, task=task):
        raise Problem(Kind.FORBIDDEN, f"the key may not use the queue {queue!r}")
    check_depth(form.arguments)
    check_depth(_request(form).get("body"))
    if form.if_exists not in (None, "keep") and form.id is None and definition.id_of is None:
        raise BadArguments("if_exists needs an id, which the job that it is about has")
    id, mark = form.id, None
    if incoming.idempotency_key is not None:
        if id is not None:
            raise Problem(Kind.INVALID, "give an id or an Idempotency-Key, not both")
        id = derived_id(caller.id, route, incoming.idempotency_key, index)
        mark = fingerprint(form)
    options: dict[str, Any] = {
        "delay": form.delay,
        "at": None if form.at is None else read_time("at", form.at),
        "id": id,
        "queue": form.queue,
        "priority": form.priority,
        "retries": form.retries,
        "timeout": form.timeout,
        "expires": _expires(form.expires),
        "meta": with_fingerprint(form.meta, mark),
    }
    job: Job
    if form.url is not None:
        job = service.app.callbacks.using(**options).job(form.url, **_request(form))
    else:
        call: Any = Task(service.app._access, definition).using(**options)
        job = call.job(**form.arguments)
    return job


def _task(incoming: Incoming, form: NewJob) -> str:
    """The name of the task."""
    if form.url is None:
        if form.task is None:
            raise BadArguments("give a task, or a url")
        if given := _request(form):
            raise BadArguments(f"{', '.join(given)}: only a job with a url has these")
        return form.task
    if form.task is not None or form.arguments:
        raise BadArguments("give a task with its arguments, or a url, not both")
    if incoming.service.app.callbacks is None:
        raise Problem(Kind.NO_CALLBACKS)
    return CALLBACK_TASK


def _request(form: NewJob) -> dict[str, Any]:
    """What the form says of an HTTP request."""
    parts = {name: getattr(form, name) for name in ("method", "headers", "on_done", "on_dead")}
    given = {name: value for name, value in parts.items() if value is not None}
    return given if form.body is msgspec.UNSET else {**given, "body": form.body}


def read_time(name: str, text: str) -> datetime:
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None:
        raise BadTime(f"{name}={text!r}: must be a time with its zone, as 2026-01-31T09:30:00Z")
    return at


def _expires(given: str | float | None) -> str | float | datetime | None:
    """A duration, or a moment."""
    if not isinstance(given, str):
        return given
    try:
        datetime.fromisoformat(given)
    except ValueError:
        return given
    return read_time("expires", given)


# --- One job


@table.operation(
    "POST",
    JOBS,
    scope=Scope.ENQUEUE,
    summary="Add a job",
    body=NewJob,
    answers={201: Added, 200: Added},
    problems=(
        *(Kind.UNKNOWN_TASK, Kind.NO_CALLBACKS),
        *(Kind.IDEMPOTENCY_IN_PROGRESS, Kind.IDEMPOTENCY_KEY_REUSED),
    ),
    idempotent=True,
)
async def add_job(incoming: Incoming) -> Reply:
    """It is durable when this answers. 200 if its id is taken, by whatever job: then nothing was
    added, unless `if_exists` says otherwise. With an Idempotency-Key, a repeat has the same answer,
    and `Idempotent-Replay: true`."""
    job = new_job(incoming, incoming.body, JOBS)
    incoming.target, incoming.detail = job.id, job.task
    location = f"{JOBS}/{quote(job.id, safe='')}"
    client = await incoming.service.client()
    how = _if_exists(incoming, incoming.body)
    if how is not IfExists.KEEP:
        answer = await _put(incoming, client, job, how, incoming.body.request)
        new = answer is PutOutcome.ADDED
        body = Added(id=job.id, added=new, answer=answer)
        return Reply(body, 201 if new else 200, location=location)
    if incoming.idempotency_key is None:
        added = await client.add(job)
        body = Added(id=job.id, added=added, answer=PutOutcome.ADDED if added else PutOutcome.KEPT)
        return Reply(body, 201 if added else 200, location=location)
    with _under_way(incoming, job.id):
        new = await _add_once(client, job, fingerprint(incoming.body))
    status, headers = (201, {}) if new else (200, REPLAYED)
    return Reply(Added(id=job.id, added=True), status, headers, location)


def _if_exists(incoming: Incoming, form: NewJob) -> IfExists:
    """What happens to the job that has the id. An Idempotency-Key makes an id of its own."""
    if incoming.idempotency_key is not None:
        if form.if_exists is not None or form.request is not None:
            raise Problem(
                Kind.INVALID, "give if_exists with a request, or an Idempotency-Key, not both"
            )
        return IfExists.KEEP
    if form.if_exists is not None:
        return IfExists(form.if_exists)
    name = CALLBACK_TASK if form.task is None else form.task
    return incoming.service.definition(name).if_exists


async def _put(
    incoming: Incoming, client: Client, job: Job, how: IfExists, request: str | None
) -> PutOutcome:
    """Store it under its id, unless the key may not touch the job that has it."""
    caller = incoming.caller
    [found] = await client.store.get([job.id])
    if found is not None and not caller.may(Scope.ENQUEUE, queue=found.queue, task=found.task):
        raise Problem(Kind.FORBIDDEN, f"the key may not replace the job {job.id[:80]!r}")
    number = None if request is None else request_number(caller.id, request)
    return await client.put(job, how, request=number)


@contextmanager
def _under_way(incoming: Incoming, id: str) -> Iterator[None]:
    """At most one request of this process adds a job by this id."""
    adding = incoming.service.adding
    if id in adding:
        raise Problem(Kind.IDEMPOTENCY_IN_PROGRESS, headers={"Retry-After": "1"})
    adding.add(id)
    try:
        yield
    finally:
        adding.discard(id)


async def _add_once(client: Client, job: Job, mark: str) -> bool:
    """Add it, or find the one that the same request added before: then False."""
    for _ in range(2):
        if await client.add(job):
            return True
        [found] = await client.store.get([job.id])
        if found is not None:
            check_same(found, mark)
            return False
        # Deleted in between: its id is free again.
    raise store_away("others keep changing the job of this Idempotency-Key; try again")


# --- Many


@table.operation(
    "POST",
    BATCH,
    scope=Scope.ENQUEUE,
    summary="Add up to 1,000 jobs",
    body=NewJobs,
    decode=RawJobs,
    body_limit=BATCH_BYTES,
    answers={200: BatchAdded},
    idempotent=True,
)
async def add_jobs(incoming: Incoming) -> Reply:
    """Each job is checked on its own: those that are refused have a problem, the others are added,
    in one step. With an Idempotency-Key, a repeat adds those that are missing."""
    checked = [_checked(incoming, raw, i) for i, raw in enumerate(incoming.body.jobs)]
    client = await incoming.service.client()
    for i, each in enumerate(checked):
        if isinstance(each, _Replacing):
            checked[i] = await _put_one(incoming, client, each)
    jobs = [each for each in checked if isinstance(each, Job)]
    incoming.detail = f"{len(checked)} jobs"
    added = await client.add_many([jobs]) if jobs else []
    incoming.detail = in_words({}, [job.id for job in jobs], sum(added), len(checked))
    taken = [job for job, new in zip(jobs, added, strict=True) if not new]
    repeated = await _repeated(incoming, client, taken) if incoming.idempotency_key else {}
    answers = (
        BatchResult(id=job.id, added=True, answer=PutOutcome.ADDED)
        if new
        else repeated.get(job.id) or _taken(job)
        for job, new in zip(jobs, added, strict=True)
    )
    results = [
        each if isinstance(each, BatchResult) else next(answers)
        for each in checked
        if not isinstance(each, _Replacing)
    ]
    new = sum(added) + sum(isinstance(each, BatchResult) and each.added for each in checked)
    return Reply(BatchAdded(added=new, results=results))


class _Replacing(msgspec.Struct, frozen=True):
    """A job of a batch that may replace another."""

    job: Job
    how: IfExists
    request: str | None


async def _put_one(incoming: Incoming, client: Client, put: _Replacing) -> BatchResult:
    try:
        answer = await _put(incoming, client, put.job, put.how, put.request)
    except Problem as problem:
        return _refused(incoming, problem, put.job.id)
    return BatchResult(id=put.job.id, added=answer is PutOutcome.ADDED, answer=answer)


def _checked(incoming: Incoming, raw: msgspec.Raw, index: int) -> Job | _Replacing | BatchResult:
    try:
        form = decode(bytes(raw), NewJob)
        job, how = new_job(incoming, form, BATCH, index), _if_exists(incoming, form)
        return job if how is IfExists.KEEP else _Replacing(job, how, form.request)
    except Problem as problem:
        return _refused(incoming, problem)
    except TickwheelError as error:
        return _refused(incoming, problem_of(error))


def _refused(incoming: Incoming, problem: Problem, id: str | None = None) -> BatchResult:
    return BatchResult(id=id, added=False, problem=problem.details(incoming.request_id))


def _taken(job: Job) -> BatchResult:
    return BatchResult(id=job.id, added=False, answer=PutOutcome.KEPT)


async def _repeated(
    incoming: Incoming, client: Client, taken: Sequence[Job]
) -> dict[str, BatchResult]:
    """What became of jobs with an Idempotency-Key whose ids were taken: by the same request, or by
    another."""
    results: dict[str, BatchResult] = {}
    for job, found in zip(taken, await client.store.get([job.id for job in taken]), strict=True):
        try:
            check_same(found or job, (job.meta or {})[FINGERPRINT])
            results[job.id] = BatchResult(id=job.id, added=True, answer=PutOutcome.ADDED)
        except Problem as problem:
            results[job.id] = _refused(incoming, problem, job.id)
    return results
