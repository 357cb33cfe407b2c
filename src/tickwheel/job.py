"""A job, and each step of its life as a pure function from job to job.

    add ──► WAITING ──claim──► RUNNING ──settle──► DONE, DEAD, or WAITING again
               └──── cancel ────┴────────────────► CANCELLED

Stores make these steps durable and atomic; what a step means is written here and nowhere else.
All times are whole milliseconds since the epoch, in UTC, by the store's clock.
"""

from __future__ import annotations

import itertools
import os
import secrets
from enum import IntEnum, StrEnum

import msgspec

# How many runs a job remembers; older ones are forgotten, the counters are not.
HISTORY_LIMIT = 20
# A job that was lost this often in a row may be what kills its workers: it is put on trial.
SUSPECT_AFTER = 2
# What is said of a run whose worker was ended from within: by an interrupt, or with its event loop.
ENDED_WITH_WORKER = "its worker was ended while it ran"


class State(StrEnum):
    """Where a job stands. Scheduled, ready, retrying and held are views of these, not states."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = (State.DONE, State.DEAD, State.CANCELLED)


class Priority(IntEnum):
    """Among jobs that are due, higher goes first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2
    URGENT = 3


class Outcome(StrEnum):
    """How one run ended."""

    DONE = "done"
    RETRY = "retry"
    SNOOZE = "snooze"
    RELEASE = "release"
    DEAD = "dead"
    # Not settled by its worker, but found by the next claim: the lease had run out.
    LOST = "lost"


class Cancelled(StrEnum):
    """What a cancel achieved."""

    CANCELLED = "cancelled"  # it will never run
    ASKED = "asked"  # a worker has it and is told to stop it
    TOO_LATE = "too late"  # it had ended
    UNKNOWN = "unknown"  # no such job


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt at a job, as its history shows it."""

    attempt: int
    worker: str
    outcome: Outcome
    due_ms: int
    # None where the task never started, or where a lost worker had not told the store.
    started_ms: int | None = None
    ended_ms: int
    error: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request to run one task once. Immutable: each step of its life is a new value."""

    id: str
    task: str
    # The arguments as JSON text, by parameter name. Opaque to stores.
    payload: str
    queue: str = "default"
    priority: int = Priority.NORMAL
    due_ms: int
    created_ms: int
    # What the caller chose for this job; None leaves it to the task.
    retries: int | None = None
    timeout_ms: int | None = None

    state: State = State.WAITING
    # Counts claims and never goes back, so no two holders of a job share a number.
    attempt: int = 0
    # The store's proof that a holder still holds: opaque, of this one claim, and an extend may
    # move it. Unlike the attempt it can't come again when an id is used anew.
    fence: int = 0
    # Runs that failed (they drive the retry policy) and leases that ran out.
    failures: int = 0
    takeovers: int = 0
    # Who holds the job, and until when. Set while RUNNING; the worker's name stays afterwards.
    worker: str | None = None
    lease_until_ms: int | None = None
    # When the holder started it, as far as an extend has told the store.
    started_ms: int | None = None
    # A cancel came while the job was RUNNING: it may finish, but it will not run again.
    asked: bool = False
    # The fence that was last settled: how a repeated settle is recognised.
    settled: int | None = None
    ended_ms: int | None = None
    error: str | None = None
    # What the task returned, as JSON text.
    result: str | None = None
    history: tuple[Run, ...] = ()


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How an attempt ended, as data: made by `done`, `retry`, `snooze`, `release` and `dead`."""

    # The job as it was claimed or last extended: its attempt and fence prove that we hold it.
    job: Job
    outcome: Outcome
    ended_ms: int
    started_ms: int | None = None
    # When the job is next due, where it goes back to waiting.
    due_ms: int
    failed: bool = False
    error: str | None = None
    result: str | None = None

    @property
    def state(self) -> State:
        if self.outcome is Outcome.DONE:
            return State.DONE
        if self.outcome is Outcome.DEAD:
            return State.DEAD
        return State.WAITING


def done(
    job: Job, *, started_ms: int, ended_ms: int, result: str | None = None, error: str | None = None
) -> Settlement:
    """The task returned. `error` says why its result could not be kept, if it could not."""
    return Settlement(
        job=job,
        outcome=Outcome.DONE,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=job.due_ms,
        result=result,
        error=error,
    )


def retry(
    job: Job, *, due_ms: int, error: str, ended_ms: int, started_ms: int | None = None
) -> Settlement:
    """The run failed, and the job is to run again at `due_ms`."""
    return Settlement(
        job=job,
        outcome=Outcome.RETRY,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=due_ms,
        failed=True,
        error=error,
    )


def snooze(job: Job, *, due_ms: int, ended_ms: int, started_ms: int | None = None) -> Settlement:
    """The task asked to run later; not a failure."""
    return Settlement(
        job=job,
        outcome=Outcome.SNOOZE,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=due_ms,
    )


def release(
    job: Job,
    *,
    ended_ms: int,
    started_ms: int | None = None,
    due_ms: int | None = None,
    error: str | None = None,
) -> Settlement:
    """Hand the job back: its worker won't run it, or stopped it on request. Due as before, or not
    before `due_ms` where others should get their turn first."""
    return Settlement(
        job=job,
        outcome=Outcome.RELEASE,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=job.due_ms if due_ms is None else due_ms,
        error=error,
    )


def dead(
    job: Job, *, error: str, ended_ms: int, started_ms: int | None = None, failed: bool = True
) -> Settlement:
    """The job is not to run again by itself; it waits for a person."""
    return Settlement(
        job=job,
        outcome=Outcome.DEAD,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=job.due_ms,
        failed=failed,
        error=error,
    )


# --- The steps


def added(job: Job) -> Job:
    """The job as `add` stores it: one that waits, with the counters, the last error and the
    history that it comes with. What only the store it came from knows is left behind."""
    if not job.attempt and job.state is State.WAITING and not job.fence:
        return job
    return msgspec.structs.replace(
        job,
        state=State.WAITING,
        fence=0,
        lease_until_ms=None,
        started_ms=None,
        asked=False,
        settled=None,
        ended_ms=None,
        result=None,
    )


def claimed(job: Job, *, worker: str, fence: int, now_ms: int, lease_ms: int) -> Job:
    """The job in the hand of `worker`. Taking over from a lost one is counted and remembered."""
    history, takeovers = job.history, job.takeovers
    if job.state is State.RUNNING:
        takeovers += 1
        history = remember(history, lost_run(job))
    return msgspec.structs.replace(
        job,
        state=State.RUNNING,
        attempt=job.attempt + 1,
        fence=fence,
        takeovers=takeovers,
        worker=worker,
        lease_until_ms=now_ms + lease_ms,
        started_ms=None,
        history=history,
    )


def settled(job: Job, settlement: Settlement) -> Job:
    """The job after its holder settled it.

    A job that was asked to stop goes to CANCELLED where it would have waited to run again.
    """
    state = settlement.state
    if job.asked and state is State.WAITING:
        state = State.CANCELLED
    return msgspec.structs.replace(
        job,
        state=state,
        due_ms=settlement.due_ms,
        failures=job.failures + settlement.failed,
        lease_until_ms=None,
        started_ms=None,
        asked=False,
        settled=settlement.job.fence,
        ended_ms=settlement.ended_ms if state.ended else None,
        error=settlement.error,
        result=settlement.result,
        history=remember(job.history, run_of(settlement)),
    )


def cancelled(job: Job, *, now_ms: int) -> Job:
    """The job cancelled while no live worker held it."""
    history = job.history
    if job.state is State.RUNNING:
        history = remember(history, lost_run(job))
    return msgspec.structs.replace(
        job,
        state=State.CANCELLED,
        lease_until_ms=None,
        started_ms=None,
        asked=False,
        ended_ms=now_ms,
        history=history,
    )


def rerun(job: Job, *, now_ms: int) -> Job:
    """An ended job put back to run now, with all its retries; attempts go on counting."""
    return msgspec.structs.replace(
        job,
        state=State.WAITING,
        due_ms=now_ms,
        failures=0,
        takeovers=0,
        ended_ms=None,
        error=None,
        result=None,
    )


def held(job: Job, *, now_ms: int) -> bool:
    """Whether some worker's lease on the job still runs."""
    return (
        job.state is State.RUNNING
        and job.lease_until_ms is not None
        and job.lease_until_ms > now_ms
    )


def run_of(settlement: Settlement) -> Run:
    job = settlement.job
    return Run(
        attempt=job.attempt,
        worker=job.worker or "",
        outcome=settlement.outcome,
        due_ms=job.due_ms,
        started_ms=settlement.started_ms,
        ended_ms=settlement.ended_ms,
        error=settlement.error,
    )


def lost_run(job: Job) -> Run:
    assert job.lease_until_ms is not None
    return Run(
        attempt=job.attempt,
        worker=job.worker or "",
        outcome=Outcome.LOST,
        due_ms=job.due_ms,
        started_ms=job.started_ms,
        ended_ms=job.lease_until_ms,
        error="the lease ran out: its worker died, froze or lost the store",
    )


def remember(history: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    longer = (*history, run)
    if history and run.started_ms is None and history[-1].started_ms is None:
        # A job may be handed back or lost unstarted many times in a row, and must not forget its
        # runs for that: the last time says it all, where the one before counts for nothing.
        shorter = (*history[:-1], run)
        if losses(shorter) == losses(longer):
            longer = shorter
    return longer[-HISTORY_LIMIT:]


def handed_back(job: Job, *, by: str, since_ms: int) -> bool:
    """Whether this worker gave the job back unstarted since then, and nobody else had it since."""
    last = job.history[-1] if job.history else None
    return last is not None and _unstarted(last) and last.worker == by and last.ended_ms > since_ms


def _unstarted(run: Run) -> bool:
    """Whether it was handed back without having started."""
    return run.outcome is Outcome.RELEASE and run.started_ms is None


# --- Poison


def losses(history: tuple[Run, ...], *, survivor: str = "") -> int:
    """How often in a row, since it last ran to an end, a job was lost with its worker, or ended
    with it.

    The first losses count for every job that the worker held: which of them was to blame is not
    known. A suspect is put on trial, and the store is told, so from then on a loss counts only
    where it had started: what merely waited in the hand of a worker is not to blame. To be handed
    back by a worker that was told to stop says nothing either way, nor does a lease that ran out
    for `survivor`: a worker that is alive was not killed.
    """
    count = 0
    for run in history:
        if run.outcome is Outcome.LOST:
            killed = count < SUSPECT_AFTER or run.started_ms is not None
            count += killed and run.worker != survivor
        elif run.outcome is Outcome.RELEASE:
            count += run.error == ENDED_WITH_WORKER
        else:
            count = 0
    return count


def suspect(job: Job, *, survivor: str = "") -> bool:
    """Whether the job may be what kills its workers."""
    return losses(job.history, survivor=survivor) >= SUSPECT_AFTER


def new_fence() -> int:
    """A number that no other claim has; small enough for a JSON number anywhere."""
    return secrets.randbits(53)


class _Ids:
    """Ids of this process: the time, a random tag of the process, and a count.

    They sort by the time they were made and neighbours differ in their last digits only, so that
    every index grows at one end.
    """

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        self._tag = secrets.token_hex(5)
        self._counter = itertools.count(secrets.randbits(20))

    def new(self, now_ms: int) -> str:
        return f"{now_ms:011x}{self._tag}{next(self._counter) & 0xFFFFFF:06x}"


_ids = _Ids()
# A forked process would go on with the tag and the count of its parent.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.start_anew)


def new_id(now_ms: int) -> str:
    """A fresh id."""
    return _ids.new(now_ms)
