"""What can be wrong with the runs of a job: missed, late, early, doubled. Pure.

    missed    it should have started by now, or it can't start any more
    late      it started later after it was due than is allowed
    early     it started before it was due
    doubled   it started again, although the run before had neither failed nor asked for that

The rules at the top take runs from any record: a job's history, or what tests noted themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Protocol, TypeVar

from tickwheel.duration import duration_text, moment_text
from tickwheel.envelope import readable
from tickwheel.job import ENDED_WITH_WORKER, EXPIRED, Job, Outcome, Run, State

# --- Rules for runs


class Ran(Protocol):
    """One run of a job. Times are in milliseconds since the epoch."""

    @property
    def attempt(self) -> int: ...
    @property
    def due_ms(self) -> float: ...
    @property
    def started_ms(self) -> float | None: ...
    @property
    def ended_ms(self) -> float | None: ...
    @property
    def outcome(self) -> str: ...


R = TypeVar("R", bound=Ran)

# After these a job runs again because it failed, or asked for it.
CHOSEN = (Outcome.RETRY, Outcome.SNOOZE)
# After these only a person can make it run again.
_ENDS = (Outcome.DONE, Outcome.DEAD, Outcome.EXPIRE)


def early_by(run: Ran) -> float:
    """How long before it was due the run started; 0 if it did not."""
    return 0 if run.started_ms is None else max(run.due_ms - run.started_ms, 0)


def first_starts(runs: Iterable[R]) -> Iterator[R]:
    """For each time at which the job was due, the run that started first: what lateness is
    about."""
    before: Ran | None = None
    for run in runs:
        if run.started_ms is None:
            continue
        if before is None or before.due_ms != run.due_ms or before.outcome in CHOSEN:
            yield run
        before = run


def second_runs(runs: Iterable[R]) -> Iterator[tuple[R, R]]:
    """Runs that started although one before had started for the same wish, which had neither
    failed nor asked for another; with that one."""
    for before, after in pairwise(run for run in runs if run.started_ms is not None):
        if before.outcome in CHOSEN:
            continue
        put_back = before.ended_ms is not None and after.due_ms >= before.ended_ms
        if before.outcome in _ENDS and put_back:
            continue  # somebody ran it again on purpose
        yield before, after


def repeated_attempts(attempts: Iterable[int]) -> dict[int, int]:
    """The attempts that come more than once, and how often: each claim has a number of its own."""
    return {attempt: count for attempt, count in Counter(attempts).items() if count > 1}


def unrecorded_attempts(job: Job) -> set[int]:
    """The attempts that are missing in a job's history. Of several in a row that never started only
    the last is kept."""
    known, before = set(), 0
    for run in job.history:
        known |= (
            set(range(before + 1, run.attempt + 1)) if run.started_ms is None else {run.attempt}
        )
        before = run.attempt
    last = job.attempt - (job.state is State.RUNNING)
    return set(range(1, last + 1)) - known


# --- Flaws


class FlawKind(StrEnum):
    """What can be wrong. Programs rely on these values."""

    MISSED = "missed"
    LATE = "late"
    EARLY = "early"
    DOUBLED = "doubled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Something that was wrong with one run, or with one tick."""

    kind: FlawKind
    # The id of the job, or the one that the job of the tick would have had.
    id: str
    due_ms: int
    # How much: how late or early it was, or how long it has been missing.
    by_ms: int
    # What happened; and what explains it, as far as the store can tell, or nothing.
    words: str
    why: str = ""
    attempt: int | None = None
    worker: str | None = None
    started_ms: int | None = None
    # The schedule whose tick has no job, if it is about that; else None.
    schedule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Which time is verified, and as of when; and what counts as late."""

    since_ms: int
    until_ms: int
    now_ms: int
    late_after_ms: int

    def has(self, ms: float) -> bool:
        return self.since_ms <= ms < self.until_ms

    def past(self, ms: int) -> bool:
        """Whether what should have happened then is late by now."""
        return ms + self.late_after_ms < self.now_ms


def runs_of(job: Job) -> tuple[Run, ...]:
    """The runs of a job, with the one that is under way, if the store knows that it has started."""
    if job.state is not State.RUNNING or job.started_ms is None:
        return job.history
    now = Run(
        attempt=job.attempt,
        worker=job.worker or "",
        outcome=Outcome.OTHER,
        due_ms=job.due_ms,
        started_ms=job.started_ms,
        ended_ms=job.lease_until_ms or job.started_ms,
    )
    return (*job.history, now)


def flaws_of(job: Job, span: Span) -> Iterator[Flaw]:
    """What is wrong with the runs of a job that were due in this span, and with what did not
    run."""
    runs = runs_of(job)
    yield from _missed(job, span)
    for run in runs:
        if span.has(run.due_ms) and (early_ms := early_by(run)) > 0:
            yield _early(job, run, int(early_ms))
    for run in first_starts(runs):
        # Due in the past means now.
        late_ms = (run.started_ms or 0) - max(run.due_ms, job.created_ms)
        if span.has(run.due_ms) and late_ms > span.late_after_ms:
            yield _late(job, run, late_ms)
    for before, after in second_runs(runs):
        if span.has(after.due_ms):
            yield _doubled(job, before, after)
    for attempt, count in repeated_attempts(run.attempt for run in runs).items():
        yield _repeated(job, attempt, count)


# --- Missed


def _missed(job: Job, span: Span) -> Iterator[Flaw]:
    if not span.has(job.due_ms):
        return
    words = why = ""
    until_ms = span.now_ms
    if job.state.ended:
        until_ms = job.ended_ms or span.now_ms
        words, why = _never_ran(job)
    elif job.state is State.WAITING and span.past(job.due_ms):
        words = f"was due {moment_text(job.due_ms)} and has not started"
    elif job.state is State.RUNNING and span.past(job.lease_until_ms or 0):
        ago = duration_text(span.now_ms - (job.lease_until_ms or 0))
        words = f"was lost by its worker {ago} ago and has not been taken over"
    if words:
        yield Flaw(
            kind=FlawKind.MISSED,
            id=job.id,
            due_ms=job.due_ms,
            by_ms=max(until_ms - job.due_ms, 0),
            words=words,
            why=why,
            attempt=job.attempt or None,
            worker=job.worker,
        )


def _never_ran(job: Job) -> tuple[str, str]:
    """What is wrong with a job that has ended, if it ended without a run; and why that is."""
    if job.state is State.CANCELLED and job.error == EXPIRED:
        return f"expired: it had not started by {moment_text(job.expires_ms)}", _delays(job, None)
    unstarted = all(run.started_ms is None for run in job.history)
    if job.state is State.DEAD and unstarted and not unrecorded_attempts(job):
        return "is dead, and no run of it is known to have started", readable(job).error or ""
    if job.state is State.DONE and all(run.outcome != Outcome.DONE for run in job.history):
        return "is done, but none of its runs was", ""
    return "", ""


# --- Late, early, doubled


def _flaw(kind: FlawKind, job: Job, run: Run, by_ms: int, words: str, why: str = "") -> Flaw:
    return Flaw(
        kind=kind,
        id=job.id,
        due_ms=run.due_ms,
        by_ms=by_ms,
        words=words,
        why=why,
        attempt=run.attempt,
        worker=run.worker,
        started_ms=run.started_ms,
    )


def _late(job: Job, run: Run, late_ms: int) -> Flaw:
    words = f"was due {moment_text(run.due_ms)} and started {duration_text(late_ms)} late"
    return _flaw(FlawKind.LATE, job, run, late_ms, words, _delays(job, run))


def _early(job: Job, run: Run, early_ms: int) -> Flaw:
    words = f"was due {moment_text(run.due_ms)} and started {duration_text(early_ms)} early"
    return _flaw(FlawKind.EARLY, job, run, early_ms, words)


def _delays(job: Job, late: Run | None) -> str:
    """What kept a run from starting, of what was tried before for the same due time."""
    due_ms = job.due_ms if late is None else late.due_ms
    before = [
        run
        for run in job.history
        if run.due_ms == due_ms and (late is None or run.attempt < late.attempt)
    ]
    return " ".join(dict.fromkeys(words for run in before if (words := _setback(run))))


def _setback(run: Run) -> str:
    if run.outcome is Outcome.LOST:
        return (
            f"Worker {run.worker} had it and died, froze or lost the store; its lease ran out at "
            f"{moment_text(run.ended_ms)}."
        )
    if run.outcome is Outcome.RELEASE:
        if run.error == ENDED_WITH_WORKER:
            return f"Worker {run.worker} ended while it ran."
        return f"Worker {run.worker} released it at {moment_text(run.ended_ms)}."
    if run.outcome is Outcome.PARK:
        return f"Worker {run.worker} doesn't know its task."
    return ""


def _doubled(job: Job, before: Run, after: Run) -> Flaw:
    started_ms, ended_ms = after.started_ms or 0, before.ended_ms
    words = (
        f"started again at {moment_text(started_ms)} (attempt {after.attempt}), after attempt "
        f"{before.attempt} had started at {moment_text(before.started_ms)}"
    )
    if before.outcome is not Outcome.LOST and started_ms < ended_ms:
        words += f", and before that ended at {moment_text(ended_ms)}"
    by_ms = started_ms - (before.started_ms or 0)
    return _flaw(FlawKind.DOUBLED, job, after, by_ms, words, _setback(before))


def _repeated(job: Job, attempt: int, count: int) -> Flaw:
    [*runs] = (run for run in runs_of(job) if run.attempt == attempt)
    return _flaw(FlawKind.DOUBLED, job, runs[-1], 0, f"has {count} runs of attempt {attempt}")
