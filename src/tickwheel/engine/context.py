"""The job that is running here, as its task sees it: in a worker or in a child process."""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from tickwheel.duration import moment
from tickwheel.errors import BadArguments, shown
from tickwheel.job import Job, Progress
from tickwheel.store import checked_text

# How many characters the words of a progress may have.
WORDS_LIMIT = 200


class Running(Protocol):
    """A run, as far as its task may know it. The worker has `Held`; a child process has less."""

    @property
    def job(self) -> Job: ...
    @property
    def stop(self) -> object | None: ...
    @property
    def deadline_ms(self) -> int | None: ...
    @property
    def state(self) -> Any: ...
    @property
    def called(self) -> Sequence[Running]:
        """The jobs of a batch; none if it is the run of one job."""

    def say(self, progress: Progress) -> None: ...


running: contextvars.ContextVar[Running] = contextvars.ContextVar("tickwheel_job")


@dataclass(frozen=True, slots=True)
class JobContext:
    """A running task's view of its own job."""

    _run: Running

    @property
    def job(self) -> Job:
        """The job as it was claimed or last extended."""
        return self._run.job

    @property
    def id(self) -> str:
        return self._run.job.id

    @property
    def task(self) -> str:
        """The name of its task."""
        return self._run.job.task

    @property
    def attempt(self) -> int:
        """How many times the job was claimed, this time included."""
        return self._run.job.attempt

    @property
    def due(self) -> datetime:
        return moment(self._run.job.due_ms)

    @property
    def deadline(self) -> datetime | None:
        """When its timeout stops the run; None if it has no timeout."""
        ms = self._run.deadline_ms
        return None if ms is None else moment(ms)

    @property
    def meta(self) -> dict[str, str]:
        """The strings that travel with the job; a copy."""
        return dict(self._run.job.meta or {})

    @property
    def stopping(self) -> bool:
        """Whether the run should end soon: it was cancelled, timed out, or lost its lease.

        An async task is interrupted anyway; a thread can't be, and should check this instead. In a
        child process it is always False: that is killed.
        """
        return self._run.stop is not None

    @property
    def state(self) -> Any:
        """The value of the app's lifespan in this process; None without one."""
        return self._run.state

    def progress(self, part: float, words: str = "") -> None:
        """Say how far the run has come: from 0 to 1, and in a few words. May be called often and on
        any thread: the store hears of it within about a second."""
        self._run.say(checked_progress(part, words))


def current_job() -> JobContext | None:
    """The job that is running here; None outside a task, and in a batch."""
    run = running.get(None)
    return None if run is None or run.called else JobContext(run)


def current_jobs() -> list[JobContext]:
    """The jobs of the batch that is running here, in the order of its items; in another task its
    one job. None of them outside a task, and in a batch in a process of its own."""
    run = running.get(None)
    if run is None:
        return []
    return [JobContext(each) for each in run.called or (run,)]


def checked_progress(part: float, words: str) -> Progress:
    number = isinstance(part, int | float) and not isinstance(part, bool)
    if not number or not 0 <= part <= 1:
        raise BadArguments(f"progress({shown(part)}): must be a number from 0 to 1")
    if len(checked_text("words", words)) > WORDS_LIMIT:
        raise BadArguments(
            f"progress({part}, …): the words have {len(words):,} characters, and may have "
            f"{WORDS_LIMIT}"
        )
    if "\0" in words:
        raise BadArguments(f"progress({part}, …): the words have a NUL, which no store can keep")
    return Progress(float(part), str.__str__(words))
