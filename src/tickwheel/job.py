"""A job, and each step of its life as a pure function from job to job.

    add ──► WAITING ──claim──► RUNNING ──settle──► DONE, DEAD, or WAITING again
               └──── cancel ────┴────────────────► CANCELLED

Stores make these steps durable and atomic; what a step means is defined only here.
All times are whole milliseconds since the epoch, in UTC, by the store's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum, StrEnum
from typing import Protocol

import msgspec

# How many runs a job's history keeps; older ones are dropped, but still counted.
HISTORY_LIMIT = 20
# A job lost this many times in a row may be killing its workers: it is put on trial.
SUSPECT_AFTER = 2
# The error of a run whose worker was ended from within: by an interrupt, or with its event loop.
ENDED_WITH_WORKER = "its worker was ended while it ran"
# The error of a job that could not start in time.
EXPIRED = "expired"


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


class Added(StrEnum):
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


class Request(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that changed a job, and its answer: an Added or a MoveOutcome."""

    number: int
    answer: str


class Changes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What others have asked of a job since it was added: see `tickwheel.changes`."""

    # Counts the requests that changed it.
    count: int = 0
    # The last of them: a repeat changes nothing more, and is answered as the first was.
    requests: tuple[Request, ...] = ()
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
        """Whether its holder is to be told of a change."""
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


def done(
    job: Job, *, started_ms: int, ended_ms: int, result: str | None = None, error: str | None = None
) -> Settlement:
    """The task returned. `error` says why its result could not be stored, if so."""
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
    job: Job,
    *,
    due_ms: int,
    error: str,
    ended_ms: int,
    started_ms: int | None = None,
    traceback: str | None = None,
) -> Settlement:
    """The run failed, and the job runs again at `due_ms`."""
    return Settlement(
        job=job,
        outcome=Outcome.RETRY,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=due_ms,
        failed=True,
        error=error,
        traceback=traceback,
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
    """Release the job: its worker won't run it, or stopped it on request. Due as before, or not
    before `due_ms` if others should get their turn first."""
    return Settlement(
        job=job,
        outcome=Outcome.RELEASE,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=job.due_ms if due_ms is None else due_ms,
        error=error,
    )


def park(job: Job, *, ended_ms: int) -> Settlement:
    """Put the job back, as it was, for a worker that knows its task: it waits apart from the
    others, so that workers that don't know it are not handed it again."""
    return Settlement(
        job=job,
        outcome=Outcome.PARK,
        ended_ms=ended_ms,
        due_ms=job.due_ms,
        error=job.error,
        traceback=job.traceback,
    )


def expire(job: Job, *, ended_ms: int) -> Settlement:
    """The job could not start in time: it is CANCELLED."""
    return Settlement(
        job=job,
        outcome=Outcome.EXPIRE,
        ended_ms=ended_ms,
        due_ms=job.due_ms,
        error=EXPIRED,
        traceback=job.traceback,
    )


def dead(
    job: Job,
    *,
    error: str,
    ended_ms: int,
    started_ms: int | None = None,
    failed: bool = True,
    traceback: str | None = None,
) -> Settlement:
    """The job does not run again unless a person reruns it."""
    return Settlement(
        job=job,
        outcome=Outcome.DEAD,
        started_ms=started_ms,
        ended_ms=ended_ms,
        due_ms=job.due_ms,
        failed=failed,
        error=error,
        traceback=traceback,
    )


# --- The steps


def added(job: Job) -> Job:
    """The job as `add` stores it: waiting, with the counters, the last error and the history that
    it came with, but without what only its old store knew."""
    if not job.attempt and job.state is State.WAITING and not job.fence:
        return job
    return msgspec.structs.replace(
        job,
        state=State.WAITING,
        parked=False,
        fence=0,
        lease_until_ms=None,
        started_ms=None,
        cancel_requested=False,
        settled=None,
        ended_ms=None,
        result=None,
        changes=settled_changes(job.changes),
    )


def first_by_id(jobs: Iterable[Job]) -> dict[str, Job]:
    """The jobs that an `add` of them all tries to add: of equal ids, the first."""
    first: dict[str, Job] = {}
    for job in jobs:
        first.setdefault(job.id, job)
    return first


def which_added(jobs: Iterable[Job], ids: Iterable[str]) -> list[bool]:
    """The answer of an `add` that added these ids: of equal ids, the first was added."""
    left = set(ids)
    answers = []
    for job in jobs:
        answers.append(job.id in left)
        left.discard(job.id)
    return answers


def claimable_ms(job: Job, *, ahead_ms: int) -> int | None:
    """The moment from which the job can be claimed; None if it has ended."""
    if job.state is State.WAITING:
        return job.due_ms - ahead_ms
    return job.lease_until_ms


def claimed(job: Job, *, worker: str, fence: int, now_ms: int, lease_ms: int) -> Job:
    """The job as claimed by `worker`. A takeover from a lost worker is counted and recorded. If the
    job was asked to stop, it is CANCELLED instead; if it was replaced, or moved before it started,
    it is WAITING: neither must be handed out."""
    history, takeovers = job.history, job.takeovers
    if job.state is State.RUNNING:
        if job.told:
            job = taken_back(job)
            if job.state is State.WAITING:
                return job
        if job.cancel_requested:
            return cancelled(job, now_ms=now_ms)
        takeovers += 1
        history = remember(history, lost_run(job))
    return msgspec.structs.replace(
        job,
        state=State.RUNNING,
        parked=False,
        attempt=job.attempt + 1,
        fence=fence,
        takeovers=takeovers,
        worker=worker,
        lease_until_ms=now_ms + lease_ms,
        started_ms=None,
        progress=None,
        history=history,
    )


def held(claim: Claim, *, now_ms: int) -> bool:
    """Whether a worker's lease on the job still holds."""
    return (
        claim.state is State.RUNNING
        and claim.lease_until_ms is not None
        and claim.lease_until_ms > now_ms
    )


def holds(job: Job, claim: Claim | None, *, now_ms: int) -> bool:
    """Whether the holder of `job` still holds it, given what the store has for its id."""
    return claim is not None and claim.fence == job.fence and held(claim, now_ms=now_ms)


def as_held(job: Job, *, cancel_requested: bool, changes: Changes | None = None) -> Job:
    """The job as the store has it, made from its holder's copy: only the holder changes a job that
    it holds, except that others can ask it to stop, or for `changes`. Without these, nothing is
    pending."""
    if changes is None:
        changes = settled_changes(job.changes)
    if job.cancel_requested is cancel_requested and job.changes is changes:
        return job
    return msgspec.structs.replace(job, cancel_requested=cancel_requested, changes=changes)


def extended(job: Job, by: Job, *, now_ms: int, lease_ms: int) -> Job:
    """The job after its holder extended its lease. `by` is the holder's copy: it says when the job
    started, and how far it has come."""
    return msgspec.structs.replace(
        job,
        lease_until_ms=now_ms + lease_ms,
        started_ms=by.started_ms,
        progress=by.progress,
    )


def settled(job: Job, settlement: Settlement) -> Job:
    """The job after its holder settled it.

    A job that was asked to stop becomes CANCELLED instead of waiting to run again. One that was
    replaced becomes its `next`, however the run ended, and one that was moved moves, if it would
    wait again and has not started.
    """
    if job.told:
        return _settled_and_changed(job, settlement)
    state = settlement.state
    if job.cancel_requested and state is State.WAITING:
        state = State.CANCELLED
    return msgspec.structs.replace(
        job,
        state=state,
        parked=settlement.outcome is Outcome.PARK and state is State.WAITING,
        due_ms=settlement.due_ms,
        failures=job.failures + settlement.failed,
        lease_until_ms=None,
        started_ms=None,
        progress=settlement.job.progress,
        cancel_requested=False,
        settled=settlement.job.fence,
        ended_ms=settlement.ended_ms if state.ended else None,
        error=settlement.error,
        traceback=settlement.traceback,
        result=settlement.result,
        history=lengthened(job.history, settlement),
    )


def _settled_and_changed(job: Job, settlement: Settlement) -> Job:
    changes = job.changes
    assert changes is not None
    moves = changes.move is not None and settlement.started_ms is None
    after = settled(msgspec.structs.replace(job, changes=None), settlement)
    if changes.next is not None:
        return renewed(after, changes.next, decided(changes, MoveOutcome.MOVED))
    if not moves or after.state is not State.WAITING:
        late = decided(changes, MoveOutcome.TOO_LATE)
        return msgspec.structs.replace(after, changes=late)
    assert changes.move is not None
    return moved(after, changes.move, decided(changes, MoveOutcome.MOVED))


def just_done(settlement: Settlement) -> bool:
    """Whether the task returned and there is nothing more to tell, as almost always: the end, the
    result and the history are all that the job gets, also if it was asked to stop."""
    done = settlement.outcome is Outcome.DONE
    return done and settlement.error is None and settlement.job.progress is None


def settled_either_way(settlement: Settlement) -> tuple[Job, Job]:
    """The settled job if it was not asked to stop, and if it was: for a store whose server picks
    one of them. The same object twice if that makes no difference."""
    job = settlement.job
    plain = settled(as_held(job, cancel_requested=False), settlement)
    if plain.state.ended:
        return plain, plain
    return plain, settled(as_held(job, cancel_requested=True), settlement)


def settle(
    settlements: Iterable[Settlement], claims: Mapping[str, Claim], *, now_ms: int
) -> tuple[list[bool], dict[str, Job]]:
    """The answers to a batch of settlements, and the jobs that it changes, by id.

    `claims` has what the store knows, by id. The settlements count one after the other, so of two
    for one attempt the first is written, and both are answered with True.
    """
    answers: list[bool] = []
    changes: dict[str, Job] = {}
    for settlement in settlements:
        job = settlement.job
        claim = changes.get(job.id) or claims.get(job.id)
        if claim is not None and claim.settled == job.fence:
            answers.append(True)
        elif claim is not None and holds(job, claim, now_ms=now_ms):
            current = as_held(job, cancel_requested=claim.cancel_requested, changes=claim.changes)
            changes[job.id] = settled(current, settlement)
            answers.append(True)
        else:
            answers.append(False)
    return answers, changes


def cancel(job: Job, *, now_ms: int, held_now: bool | None = None) -> tuple[CancelOutcome, Job]:
    """What a cancel achieves, and the job that it leaves: the same object if nothing changes.

    Whether a worker holds the job is up to its lease, unless the store knows better (`held_now`).
    """
    if job.state.ended:
        return CancelOutcome.TOO_LATE, job
    if held(job, now_ms=now_ms) if held_now is None else held_now:
        return CancelOutcome.REQUESTED, as_held(job, cancel_requested=True)
    return CancelOutcome.CANCELLED, cancelled(job, now_ms=now_ms)


def cancelled(job: Job, *, now_ms: int) -> Job:
    """The job, cancelled while no live worker held it."""
    history = job.history
    if job.state is State.RUNNING:
        history = remember(history, lost_run(job))
    return msgspec.structs.replace(
        job,
        state=State.CANCELLED,
        parked=False,
        lease_until_ms=None,
        started_ms=None,
        cancel_requested=False,
        ended_ms=now_ms,
        history=history,
        changes=settled_changes(job.changes),
    )


def rerun(job: Job, *, now_ms: int) -> Job:
    """An ended job put back to run now, with all retries and no expiry; attempts keep counting."""
    return msgspec.structs.replace(
        job,
        state=State.WAITING,
        due_ms=now_ms,
        expires_ms=None,
        failures=0,
        takeovers=0,
        ended_ms=None,
        error=None,
        traceback=None,
        result=None,
    )


# --- Changes that others have asked for: see `tickwheel.changes`


def renewed(job: Job, new: Job, changes: Changes) -> Job:
    """A job that does not run any more, as `new`, which has its id: with all retries, but attempts
    keep counting and the history goes on."""
    return msgspec.structs.replace(
        added(new),
        attempt=job.attempt,
        fence=job.fence,
        failures=0,
        takeovers=0,
        worker=job.worker,
        progress=None,
        settled=job.settled,
        error=None,
        traceback=None,
        history=job.history,
        changes=changes,
    )


def moved(job: Job, move: Move, changes: Changes | None) -> Job:
    """A waiting job with the due time, priority and queue that the move asks for. An expiry that
    would then be over when it is due moves with it."""
    due_ms = job.due_ms if move.due_ms is None else move.due_ms
    expires_ms = job.expires_ms
    if expires_ms is not None and expires_ms <= due_ms:
        expires_ms = due_ms + max(expires_ms - job.due_ms, 1)
    return msgspec.structs.replace(
        job,
        payload=job.payload if move.sealed is None else move.sealed.after,
        queue=job.queue if move.queue is None else move.queue,
        priority=job.priority if move.priority is None else move.priority,
        due_ms=due_ms,
        expires_ms=expires_ms if move.sealed is None else move.sealed.expires_ms,
        parked=False,
        changes=changes,
    )


def taken_back(job: Job) -> Job:
    """A RUNNING job whose lease has run out, with what is pending decided: WAITING if it was
    replaced or moved; still RUNNING if it had started, or was asked to stop, before it could
    move."""
    changes = job.changes
    assert changes is not None and job.state is State.RUNNING
    if changes.next is not None:
        return renewed(lost(job), changes.next, decided(changes, MoveOutcome.MOVED))
    if job.started_ms is None and not job.cancel_requested and changes.move is not None:
        return moved(lost(job), changes.move, decided(changes, MoveOutcome.MOVED))
    return msgspec.structs.replace(job, changes=decided(changes, MoveOutcome.TOO_LATE))


def lost(job: Job) -> Job:
    """A RUNNING job whose lease has run out, as it waits for any worker: counted and recorded."""
    return msgspec.structs.replace(
        job,
        state=State.WAITING,
        takeovers=job.takeovers + 1,
        lease_until_ms=None,
        started_ms=None,
        progress=None,
        cancel_requested=False,
        history=remember(job.history, lost_run(job)),
    )


def settled_changes(changes: Changes | None) -> Changes | None:
    """The changes without those that are pending, which come too late."""
    if changes is None or not changes.pending:
        return changes
    return decided(changes, MoveOutcome.TOO_LATE)


def decided(changes: Changes, answer: MoveOutcome) -> Changes:
    """The changes once nothing is pending any more; moves that were requested have this answer."""
    return Changes(
        count=changes.count,
        requests=tuple(
            Request(each.number, answer) if each.answer == MoveOutcome.REQUESTED else each
            for each in changes.requests
        ),
    )


def lengthened(history: tuple[Run, ...], settlement: Settlement) -> tuple[Run, ...]:
    job = settlement.job
    run = Run(
        attempt=job.attempt,
        worker=job.worker or "",
        outcome=settlement.outcome,
        due_ms=job.due_ms,
        started_ms=settlement.started_ms,
        ended_ms=settlement.ended_ms,
        error=None if settlement.outcome is Outcome.PARK else settlement.error,
    )
    return remember(history, run)


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
        # A job may be released or lost before it starts many times in a row; that must not push its
        # runs out of the history, so only the last such entry is kept if the one before counts for
        # nothing.
        shorter = (*history[:-1], run)
        if losses(shorter) == losses(longer):
            longer = shorter
    return longer[-HISTORY_LIMIT:]


# --- Poison


def losses(history: tuple[Run, ...], *, survivor: str = "") -> int:
    """How many times in a row, since its last complete run, a job was lost with its worker, or
    ended with it.

    The first losses count for every job that the worker held: it is unknown which of them killed
    it. A suspect is put on trial, and the store is told, so from then on a loss counts only if the
    job had started: a job that a worker merely held is not to blame. A release by a worker that was
    told to stop counts for neither side, nor does an outcome that is unknown here, nor a lease that
    ran out for `survivor`: a worker that is alive was not killed.
    """
    count = 0
    for run in history:
        if run.outcome is Outcome.LOST:
            killed = count < SUSPECT_AFTER or run.started_ms is not None
            count += killed and run.worker != survivor
        elif run.outcome is Outcome.RELEASE:
            count += run.error == ENDED_WITH_WORKER
        elif run.outcome not in (Outcome.PARK, Outcome.OTHER):
            count = 0
    return count


def suspect(job: Job, *, survivor: str = "") -> bool:
    """Whether the job may be killing its workers."""
    return losses(job.history, survivor=survivor) >= SUSPECT_AFTER
