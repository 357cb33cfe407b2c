"""Which jobs a test expects, and what to say when there are others. Pure."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tickwheel.client import JobInfo
from tickwheel.errors import BadArguments, UsageError
from tickwheel.job import Priority
from tickwheel.span import Span, due_ms, moment, span_ms, span_text
from tickwheel.tasks import Definition, PriorityName, priority_of

# A message is for reading.
LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The jobs that a test means; None means any."""

    definition: Definition
    # The arguments as the function gets them, defaults among them.
    arguments: Mapping[str, Any] | None
    delay_ms: int | None
    due: datetime | None
    queue: str | None
    priority: Priority | None
    id: str | None

    def fits(self, job: JobInfo) -> bool:
        return (
            job.task == self.definition.name
            and self.due in (None, job.due)
            and self.queue in (None, job.queue)
            and self.priority in (None, job.priority)
            and self.id in (None, job.id)
            and (self.delay_ms is None or job.due - job.created == _span(self.delay_ms))
            and (self.arguments is None or self.arguments == _arguments(self.definition, job))
        )

    def __str__(self) -> str:
        chosen = {
            "delay": None if self.delay_ms is None else span_text(self.delay_ms),
            "at": self.due and self.due.isoformat(),
            "queue": self.queue,
            "priority": None if self.priority is None else self.priority.name.lower(),
            "id": self.id,
        }
        words = [f"{name}={value}" for name, value in chosen.items() if value is not None]
        arguments = "…" if self.arguments is None else _in_words(self.arguments)
        return " ".join([f"{self.definition.name}({arguments})", *(["with"] if words else [])]) + (
            " " + ", ".join(words) if words else ""
        )


def expected(
    definition: Definition,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    arguments: Mapping[str, Any] | None,
    delay: Span | None,
    at: datetime | None,
    queue: str | None,
    priority: PriorityName | None,
    id: str | None,
) -> Expected:
    """Check what a test asks for, so that a slip in it is an error and not a test that passes."""
    chosen = {"delay": delay, "at": at, "queue": queue, "priority": priority, "id": id}
    for name, value in chosen.items():
        if value is not None and name in definition.arguments.names and arguments is None:
            raise UsageError(
                f"{name}= could be the job's or the argument of {definition.name}(); "
                f"give the task's arguments as arguments={{{name!r}: …}}"
            )
    kwargs = {**kwargs, **(arguments or {})}
    given = bool(args or kwargs or arguments is not None)
    payload = definition.arguments.encode(args, kwargs, limit=sys.maxsize) if given else None
    return Expected(
        definition=definition,
        arguments=None if payload is None else _bound(definition, payload),
        delay_ms=None if delay is None else span_ms(delay),
        due=None if at is None else moment(due_ms(at)),
        queue=queue,
        priority=None if priority is None else priority_of(priority),
        id=id,
    )


def complaint(wanted: Expected, found: int, count: int | None, jobs: Sequence[JobInfo]) -> str:
    """Why the test fails, with what there is instead."""
    wish = "at least one job" if count is None else f"{count} job{'s' if count != 1 else ''}"
    head = f"expected {wish} {wanted}, found {found or 'none'}"
    if not jobs:
        return f"{head}; nothing was enqueued"
    lines = [f"  {_line(job)}" for job in jobs[:LISTED]]
    if len(jobs) > LISTED:
        lines.append(f"  and {len(jobs) - LISTED:,} more")
    return "\n".join([f"{head}; enqueued were:", *lines])


def _line(job: JobInfo) -> str:
    arguments = _in_words(msgspec.json.decode(job.payload))
    wait = (job.due - job.created) // timedelta(milliseconds=1)
    when = f"delay={span_text(wait)}" if wait > 0 else "due at once"
    return (
        f"{job.task}({arguments}) {when}, queue={job.queue}, "
        f"priority={job.priority.name.lower()}, id={job.id}"
    )


def _in_words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _span(ms: int) -> timedelta:
    return timedelta(milliseconds=ms)


def _arguments(definition: Definition, job: JobInfo) -> Mapping[str, Any] | None:
    try:
        return _bound(definition, job.payload)
    except BadArguments:
        return None


def _bound(definition: Definition, payload: str) -> Mapping[str, Any]:
    """By parameter: so it makes no difference how an argument was passed, or that it was left out
    where it is the default."""
    args, kwargs = definition.arguments.decode(payload)
    function: Callable[..., Any] = definition.function
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
