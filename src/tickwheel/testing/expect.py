"""Match the jobs that a test expects, and describe what was found instead. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import msgspec

from tickwheel.checks import AnyPriority, priority_of
from tickwheel.client import JobInfo
from tickwheel.duration import Duration, due_ms, duration_ms, duration_text, moment
from tickwheel.errors import BadArguments, UsageError
from tickwheel.job import Priority
from tickwheel.registry import Definition

# How many jobs a message lists.
LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The jobs that a test expects; None means any."""

    definition: Definition
    # The arguments as the function gets them, including defaults.
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
            and (self.delay_ms is None or job.due - job.created == _delay(self.delay_ms))
            and (self.arguments is None or self.arguments == _arguments(self.definition, job))
        )

    def __str__(self) -> str:
        chosen = {
            "delay": None if self.delay_ms is None else duration_text(self.delay_ms),
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
    delay: Duration | None,
    at: datetime | None,
    queue: str | None,
    priority: AnyPriority | None,
    id: str | None,
) -> Expected:
    """Check a test's expectation, so that a mistake in it is an error and not a passing test."""
    chosen = {"delay": delay, "at": at, "queue": queue, "priority": priority, "id": id}
    for name, value in chosen.items():
        if value is not None and name in definition.arguments.names and arguments is None:
            raise UsageError(
                f"{name}= could be an option of the job or an argument of {definition.name}(); "
                f"pass the task's arguments as arguments={{{name!r}: …}}"
            )
    kwargs = {**kwargs, **(arguments or {})}
    given = bool(args or kwargs or arguments is not None)
    payload = definition.arguments.encode(args, kwargs, limit=sys.maxsize) if given else None
    return Expected(
        definition=definition,
        arguments=None if payload is None else _bound(definition, payload),
        delay_ms=None if delay is None else duration_ms(delay),
        due=None if at is None else moment(due_ms(at)),
        queue=queue,
        priority=None if priority is None else priority_of(priority),
        id=id,
    )


def complaint(wanted: Expected, found: int, count: int | None, jobs: Sequence[JobInfo]) -> str:
    """Why the test fails, and what was found instead."""
    how_many = "at least one job" if count is None else f"{count} job{'s' if count != 1 else ''}"
    head = f"expected {how_many} {wanted}, found {found or 'none'}"
    if not jobs:
        return f"{head}; nothing was enqueued"
    lines = [f"  {_line(job)}" for job in jobs[:LISTED]]
    if len(jobs) > LISTED:
        lines.append(f"  and {len(jobs) - LISTED:,} more")
    return "\n".join([f"{head}; these were enqueued:", *lines])


def _line(job: JobInfo) -> str:
    arguments = _in_words(msgspec.json.decode(job.payload))
    wait = (job.due - job.created) // timedelta(milliseconds=1)
    when = f"delay={duration_text(wait)}" if wait > 0 else "due at once"
    return (
        f"{job.task}({arguments}) {when}, queue={job.queue}, "
        f"priority={job.priority.name.lower()}, id={job.id}"
    )


def _in_words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _delay(ms: int) -> timedelta:
    return timedelta(milliseconds=ms)


def _arguments(definition: Definition, job: JobInfo) -> Mapping[str, Any] | None:
    try:
        return _bound(definition, job.payload)
    except BadArguments:
        return None


def _bound(definition: Definition, payload: str) -> Mapping[str, Any]:
    """By parameter: so it makes no difference how an argument was passed, or whether a default was
    omitted."""
    args, kwargs = definition.arguments.decode(payload)
    bound = definition.arguments.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments
