"""The shape of a job: its states, its fields, what its runs leave, what others may ask of it.

Data only; `tickwheel.job` has the steps of its life, and re-exports all of this.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Protocol

import msgspec


class State(StrEnum):
    """A job's state. Scheduled, ready, retrying and held are views of these, not states."""

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
    """Among due jobs, higher priority goes first."""

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
    # Its worker doesn't know the task; put back for one that does.
    PARK = "park"
    DEAD = "dead"
    # It could not start in time, and was cancelled instead.
    EXPIRE = "expire"
    # Not settled by its worker; the next claim found that the lease had run out.
    LOST = "lost"
    # One that only a newer release knows; the job can be read and run all the same.
    OTHER = "other"

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        return cls.OTHER if isinstance(value, str) else None


class CancelOutcome(StrEnum):
    """What a cancel achieved."""

    CANCELLED = "cancelled"  # it will never run
    REQUESTED = "requested"  # a worker has it and is told to stop it
    TOO_LATE = "too late"  # it had already ended
    UNKNOWN = "unknown"  # no such job


class PutOutcome(StrEnum):
    """What became of a job that was put under an id."""

    ADDED = "added"  # the id was free, or its job had ended and made way
    KEPT = "kept"  # the job that has the id stays as it is
    REPLACED = "replaced"  # the job that waited under the id is now this one
    FOLLOWS = "follows"  # the job under the id runs: this one runs once that has ended


class MoveOutcome(StrEnum):
    """What a move achieved."""

    MOVED = "moved"
    REQUESTED = "requested"  # a worker has it and is told; moved if it has not started
    TOO_LATE = "too late"  # it had started or ended
    UNKNOWN = "unknown"  # no such job
    SIGNED = "signed"  # it is signed, and whoever asked can't sign it as it would be


class Run(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One attempt at a job, as its history shows it."""

    attempt: int
    worker: str
    outcome: Outcome
    due_ms: int
    # None if the task never started, or if a lost worker had not told the store.
    started_ms: int | None = None
    ended_ms: int
    error: str | None = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """How far a running task says that it has come: from 0 to 1, and in words."""

    part: float
    words: str = ""

    def __str__(self) -> str:
        """'40%: loading'. Never all of it unless it is."""
        percent = f"{int(self.part * 100)}%"
        return f"{percent}: {self.words}" if self.words else percent


class Move(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A request to change when or where a job runs; None leaves that as it is."""

    id: str
    # Unique to this request, so that a repeat is recognised: from `new_fence`.
    request: int
    due_ms: int | None = None
    priority: int | None = None
    queue: str | None = None
    # For a signed job: its payload and expiry as they must be, and the payload that it was signed
    # anew from.
    sealed: Sealed | None = None


class Sealed(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of a signed job, before a move and after it; and its expiry after it."""

    before: str
    after: str
    expires_ms: int | None


class Answered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that changed a job, and its answer: a PutOutcome or a MoveOutcome."""

    number: int
    answer: str


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What others have asked of a job since it was added: see `tickwheel.changes`."""

    # Counts the requests that changed it.
    count: int = 0
    # The last of them: a repeat changes nothing more, and is answered as the first was.
    requests: tuple[Answered, ...] = ()
    # While it is RUNNING: the job that it becomes when the run has ended.
    next: Job | None = None
    # While it is RUNNING: how it moves if the run never starts.
    move: Move | None = None

    @property
    def pending(self) -> bool:
        """Whether something is still to be done, by the settlement of the run or its takeover."""
        return self.next is not None or self.move is not None


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
    # From this moment on it is not started any more.
    expires_ms: int | None = None
    # The caller's own strings, by name, which travel with the job.
    meta: dict[str, str] | None = None

    state: State = State.WAITING
    # WAITING, but only for workers that know its task: one that doesn't has put it back.
    parked: bool = False
    # Counts claims and never goes back, so no two holders of a job share a number.
    attempt: int = 0
    # The store's proof that a holder still holds the job: opaque, unique to one claim, and an
    # extend may change it. Unlike the attempt, it is not repeated when an id is reused.
    fence: int = 0
    # Runs that failed (these drive the retry policy) and leases that ran out.
    failures: int = 0
    takeovers: int = 0
    # Who holds the job, and until when. Set while RUNNING; the worker's name stays afterwards.
    worker: str | None = None
    lease_until_ms: int | None = None
    # When the holder started it, once an extend has told the store.
    started_ms: int | None = None
    # What the last run said of its progress, once an extend has told the store.
    progress: Progress | None = None
    # It was cancelled while RUNNING: it may finish, but it will not run again.
    cancel_requested: bool = msgspec.field(default=False, name="asked")
    # The fence that was last settled: how a repeated settle is recognised.
    settled: int | None = None
    ended_ms: int | None = None
    error: str | None = None
    # Where the last run failed, if it did: shortened, the user's frames first.
    traceback: str | None = None
    # What the task returned, as JSON text.
    result: str | None = None
    history: tuple[Run, ...] = ()
    # None unless others have asked for something. The last field, because it may contain a job.
    changes: Changes | None = None

    @property
    def told(self) -> bool:
        """Whether its holder has to be told of a change."""
        return self.changes is not None and self.changes.pending


class Claim(Protocol):
    """What decides whether a holder still holds its job. A Job is one; a store that doesn't read
    whole jobs may have less."""

    @property
    def state(self) -> State: ...
    @property
    def fence(self) -> int: ...
    @property
    def lease_until_ms(self) -> int | None: ...
    @property
    def cancel_requested(self) -> bool: ...
    @property
    def settled(self) -> int | None: ...
    @property
    def changes(self) -> Changes | None: ...


class Settlement(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How an attempt ended, as data: see `done`, `retry`, `snooze`, `release`, `park`, `dead` and
    `expire`."""

    # The job as it was claimed or last extended: its attempt and fence prove that we hold it.
    job: Job
    outcome: Outcome
    ended_ms: int
    started_ms: int | None = None
    # When the job is due next, if it goes back to waiting.
    due_ms: int
    failed: bool = False
    error: str | None = None
    traceback: str | None = None
    result: str | None = None

    @property
    def state(self) -> State:
        return _ENDS.get(self.outcome, State.WAITING)


_ENDS = {
    Outcome.DONE: State.DONE, Outcome.DEAD: State.DEAD, Outcome.EXPIRE: State.CANCELLED
}  # fmt: skip
