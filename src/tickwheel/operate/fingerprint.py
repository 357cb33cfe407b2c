"""Cause dead jobs by what went wrong: the same task and the same error, but for ids and numbers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from tickwheel.job import Job

# Errors may be long; what tells them apart comes first.
MESSAGE_MOST = 500
PLACEHOLDER = "…"

# What differs between two errors of the same kind: quoted texts, addresses and ids, numbers.
_VARIES = re.compile(
    r"""
      '(?:[^'\\\n]|\\.){0,200}' | "(?:[^"\\\n]|\\.){0,200}" | `[^`\n]{0,200}`
    | \b0[xX][0-9a-fA-F]+\b
    | \b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b
    | \b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{8,}\b
    | \b(?=\w*\d)[A-Za-z0-9_]{16,}\b
    | [-+]?\d+(?:[.,:]\d+)*
    """,
    re.VERBOSE,
)


def generalized(error: str) -> str:
    """The error without what differs from job to job."""
    return _VARIES.sub(PLACEHOLDER, error[:MESSAGE_MOST])


def fingerprint(task: str, error: str | None) -> str:
    """The same for jobs that died of the same cause, as far as words can tell."""
    text = f"{task}\n{generalized(error or '')}"
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()


@dataclass(slots=True)
class Cause:
    """Dead jobs with the same fingerprint."""

    fingerprint: str
    task: str
    error: str
    # The one that died last.
    sample: Job
    count: int = 0
    first_ms: int = 0
    last_ms: int = 0
    queues: set[str] = field(default_factory=set)


class Groups:
    """Dead jobs, grouped as they are read."""

    def __init__(self) -> None:
        self._by_error: dict[tuple[str, str | None], str] = {}
        self._groups: dict[str, Cause] = {}

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            mark = self._by_error.get((job.task, job.error))
            if mark is None:
                mark = self._by_error[job.task, job.error] = fingerprint(job.task, job.error)
            self._take(mark, job, job.ended_ms or 0)

    def _take(self, mark: str, job: Job, ended_ms: int) -> None:
        group = self._groups.get(mark)
        if group is None:
            error = generalized(job.error or "")
            group = self._groups[mark] = Cause(mark, job.task, error, job, first_ms=ended_ms)
        group.count += 1
        group.queues.add(job.queue)
        group.first_ms = min(group.first_ms, ended_ms)
        if ended_ms >= group.last_ms:
            group.last_ms, group.sample = ended_ms, job

    def largest_first(self) -> list[Cause]:
        return sorted(self._groups.values(), key=lambda each: (-each.count, -each.last_ms))
