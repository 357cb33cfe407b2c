"""A job, and each step of its life as a pure function from job to job.

    add ──► WAITING ──claim──► RUNNING ──settle──► DONE, DEAD, or WAITING again
               └──── cancel ────┴────────────────► CANCELLED

Stores make these steps durable and atomic; what a step means is defined only here.
All times are whole milliseconds since the epoch, in UTC, by the store's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from tickwheel.shape import (
    ENDED as ENDED,
    Answered as Answered,
    CancelOutcome as CancelOutcome,
    Changes as Changes,
    Claim as Claim,
    Job as Job,
    Move as Move,
    MoveOutcome as MoveOutcome,
    Outcome as Outcome,
    Priority as Priority,
    Progress as Progress,
    PutOutcome as PutOutcome,
    Run as Run,
    Sealed as Sealed,
    Settlement as Settlement,
    State as State,
)

# How many runs a job's history keeps; older ones are dropped, but still counted.
HISTORY_LIMIT = 20
# A job lost this many times in a row may be killing its workers: it is put on trial.
SUSPECT_AFTER = 2
# The error of a run whose worker was ended from within: by an interrupt, or with its event loop.
ENDED_WITH_WORKER = "its worker was ended while it ran"
# The error of a job that could not start in time.
EXPIRED = "expired"


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
        parked=False,
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
            Answered(each.number, answer) if each.answer == MoveOutcome.REQUESTED else each
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
