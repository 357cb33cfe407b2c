"""What to ask the HTTP API: requests as data, made from checked arguments. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict
from urllib.parse import quote, urlencode

import msgspec

from tickwheel.arguments import MIB, json_of
from tickwheel.checks import (
    AnyIfExists,
    AnyPriority,
    checked_id,
    checked_meta,
    checked_name,
    checked_options,
    if_exists_of,
    priority_of,
)
from tickwheel.duration import Duration, due_ms, duration_ms, iso, moment
from tickwheel.errors import (
    BadArguments,
    BadTime,
    StoreError,
    TickwheelError,
    UsageError,
    shown,
)
from tickwheel.job import State
from tickwheel.jobs import PAGE_MOST, StateName, checked_query
from tickwheel.retry import checked_retries

# How many jobs one request adds or names, and about how many bytes they have.
JOBS_MOST = 1000
JOBS_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request, below the client's URL."""

    method: str
    # Quoted, with its query.
    path: str
    body: bytes | None = field(default=None, repr=False)
    # Whether doing it twice is the same as doing it once, with the same answer.
    repeatable: bool = True
    # What it means if there is no such thing, and if a value is wrong.
    missing: type[TickwheelError] = StoreError
    invalid: type[UsageError] = BadArguments


def get(path: str, query: Mapping[str, Any] | None = None, **more: Any) -> ApiRequest:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    mark = "?" if given else ""
    return ApiRequest(method="GET", path=f"{path}{mark}{urlencode(given, quote_via=quote)}", **more)


def post(path: str, body: Any = None, **more: Any) -> ApiRequest:
    text = None if body is None else msgspec.json.encode(body)
    return ApiRequest(method="POST", path=path, body=text, **more)


def part(name: str) -> str:
    """An id or a name as one part of a path, whatever is in it."""
    # A proxy may take one or two dots for a folder.
    return quote(name, safe="") if name.strip(".") else name.replace(".", "%2E")


# --- Jobs to add


@dataclass(frozen=True, slots=True)
class HttpJob:
    """A job for `enqueue_many`; nothing is sent yet. Adding it twice adds it once."""

    id: str
    # As the API takes it.
    form: bytes = field(repr=False)
    # Whether the caller chose the id, which another job may have.
    chosen: bool = False


class JobOptions(TypedDict, total=False):
    """The options of `using`."""

    delay: Duration | None
    at: datetime | None
    queue: str | None
    priority: AnyPriority | None
    id: str | None
    retries: int | None
    timeout: Duration | None
    expires: Duration | datetime | None
    meta: Mapping[str, str] | None
    if_exists: AnyIfExists | None


class WhichMatch(TypedDict, total=False):
    """Which jobs to change; all that are given must match."""

    state: StateName | State | None
    queue: str | None
    task: str | None
    meta: Mapping[str, str] | None
    # Added or ended since this time.
    since: datetime | None
    limit: int


@checked_options
def job_options(
    *,
    delay: Duration | None = None,
    at: datetime | None = None,
    queue: str | None = None,
    priority: AnyPriority | None = None,
    id: str | None = None,
    retries: int | None = None,
    timeout: Duration | None = None,
    expires: Duration | datetime | None = None,
    meta: Mapping[str, str] | None = None,
    if_exists: AnyIfExists | None = None,
) -> dict[str, Any]:
    """The options of `using`, checked, as the API takes them."""
    if delay is not None and at is not None:
        raise BadTime("use delay= or at=, not both")
    if if_exists is not None and id is None:
        raise BadArguments(f"if_exists={shown(if_exists)} needs an id: using(id=…)")
    return _given(
        delay=_duration(delay),
        at=time_text("at", at),
        queue=None if queue is None else checked_name("queue", queue),
        priority=None if priority is None else priority_of(priority).name.lower(),
        id=None if id is None else checked_id(id),
        retries=None if retries is None else checked_retries(retries),
        timeout=_duration(timeout),
        expires=time_text("expires", expires)
        if isinstance(expires, datetime)
        else _duration(expires),
        meta=checked_meta(meta),
        if_exists=None if if_exists is None else str(if_exists_of(if_exists)),
    )


@checked_options
def destination(
    *,
    delay: Duration | None = None,
    at: datetime | None = None,
    later: Duration | None = None,
    queue: str | None = None,
    priority: AnyPriority | None = None,
) -> dict[str, Any]:
    """Where jobs are to move, checked, as the API takes it."""
    if sum(each is not None for each in (delay, at, later)) > 1:
        raise BadTime("use one of delay=, at= and later=")
    to = _given(
        delay=_duration(delay),
        at=time_text("at", at),
        later=_duration(later),
        queue=None if queue is None else checked_name("queue", queue),
        priority=None if priority is None else priority_of(priority).name.lower(),
    )
    if not to:
        raise BadArguments("move where? Give delay=, at=, later=, queue= or priority=")
    return to


def task_job(
    task: str, arguments: Mapping[str, Any], options: Mapping[str, Any], id: str
) -> HttpJob:
    """A job of a task, with this id unless the options have one."""
    values = json_of(f"{task}()", dict(arguments))
    return _job(options, id, {"task": task, "arguments": msgspec.Raw(values)})


def callback_job(
    url: str, request: Mapping[str, Any], options: Mapping[str, Any], id: str
) -> HttpJob:
    """An HTTP call as a job."""
    if isinstance(request.get("body"), bytes | bytearray | memoryview):
        raise BadArguments("the body of a call by this API is text or JSON, not bytes")
    form = {name: msgspec.Raw(json_of(name, value)) for name, value in request.items()}
    return _job(options, id, {"url": url, **form})


def _job(options: Mapping[str, Any], id: str, what: dict[str, Any]) -> HttpJob:
    # The id is new each time: it also names the request, so that a repeat changes nothing more.
    named = {"request": id} if "if_exists" in options else {}
    form = msgspec.json.encode({"id": id, **named, **options, **what})
    if len(form) > MIB:
        raise BadArguments(
            f"the job takes {len(form):,} bytes as JSON, and the API takes {MIB:,}; store the data "
            "elsewhere and pass its id"
        )
    return HttpJob(options.get("id", id), form, "id" in options)


def add_one(job: HttpJob) -> ApiRequest:
    return ApiRequest(method="POST", path="/v1/jobs", body=job.form)


def add_many(jobs: Sequence[HttpJob]) -> ApiRequest:
    body = b'{"jobs":[' + b",".join(job.form for job in jobs) + b"]}"
    return ApiRequest(method="POST", path="/v1/jobs/batch", body=body)


# --- Find and change


def find(
    path: str,
    state: str | None,
    queue: str | None,
    task: str | None,
    meta: Mapping[str, str] | None,
    limit: int,
    cursor: str | None,
) -> ApiRequest:
    query = checked_query(state, queue, task, meta)
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= PAGE_MOST:
        raise BadArguments(f"limit={shown(limit)}: must be a whole number from 1 to {PAGE_MOST:,}")
    return get(
        path,
        {
            "state": query.state,
            "queue": queue,
            "task": task,
            "meta": None if query.meta is None else "=".join(query.meta),
            "limit": limit,
            "cursor": cursor,
        },
    )


def change(path: str, ids: Sequence[str], **more: Any) -> ApiRequest:
    return post(path, {"ids": ids, **more}, repeatable=False)


@checked_options
def change_matching(
    path: str,
    *,
    state: StateName | State | None = None,
    queue: str | None = None,
    task: str | None = None,
    meta: Mapping[str, str] | None = None,
    since: datetime | None = None,
    limit: int = JOBS_MOST,
    to: Mapping[str, Any] | None = None,
) -> ApiRequest:
    checked_query(state, queue, task, meta)
    wanted = _given(
        state=None if state is None else str(state),
        queue=queue,
        task=task,
        meta=None if meta is None else dict(meta),
        since=time_text("since", since),
    )
    return post(path, _given(filter=wanted, limit=limit, to=to), repeatable=False)


# --- Schedules


def schedule_path(name: str, step: str = "") -> str:
    return f"/v1/schedules/{part(checked_name('schedule', name))}{step}"


def schedule_form(
    task: str,
    *,
    every: Duration | None,
    start: datetime | None,
    end: datetime | None,
    arguments: Mapping[str, Any] | None,
    spread: Duration,
    **more: Any,
) -> bytes:
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadArguments(f"arguments={shown(arguments)}: must be a dict, by parameter name")
    return json_of(
        "the schedule",
        _given(
            task=task,
            every=_duration(every),
            start=time_text("start", start),
            end=time_text("end", end),
            arguments=None if arguments is None else dict(arguments),
            spread=_duration(spread),
            **more,
        ),
    )


# --- Values


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _duration(given: Duration | None) -> str | None:
    return None if given is None else f"{duration_ms(given)}ms"


def time_text(name: str, at: datetime | None) -> str | None:
    return None if at is None else iso(moment(due_ms(at, name)))
