"""What others may ask of a job that exists: to make way for another of its id, or to move.

Pure steps, like those in `tickwheel.job`: from a job, or none, to an answer and the job that is
left, which is the same object if nothing changes. Each request has a number. A job keeps those of
the last few that changed it, so a repeat after a lost reply is recognised, even if another request
or a run came in between.

|           | keep | renew            | replace                                        |
|-----------|------|------------------|------------------------------------------------|
| unknown   | added | added           | added                                          |
| waiting   | kept | kept             | replaced                                       |
| running   | kept | kept             | follows: it runs to its end, then the new one  |
| has ended | kept | added            | added                                          |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

import msgspec

from tickwheel import job as life
from tickwheel.envelope import is_signed
from tickwheel.job import Answered, Changes, Job, Move, MoveOutcome, PutOutcome, State

# How many requests a job remembers.
REMEMBERED = 8

_replace = msgspec.structs.replace


class IfExists(StrEnum):
    """What happens to the job that already has the id of a new one."""

    KEEP = "keep"  # it stays, whatever its state
    RENEW = "renew"  # it stays if it waits or runs; if it has ended, it makes way
    REPLACE = "replace"  # it makes way; if it runs, once it has ended


class Put(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request to store a job under its id."""

    job: Job
    if_exists: IfExists
    # Unique to this request: from `new_fence`.
    request: int


def put(job: Job | None, new: Put, *, now_ms: int, held_now: bool | None = None) -> _Put:
    """What a put achieves, given the job that has its id.

    Whether a worker holds that job is up to its lease, unless the store knows better (`held_now`).
    """
    if job is None:
        return PutOutcome.ADDED, _noted(life.added(new.job), new.request, PutOutcome.ADDED)
    if (answer := _answer(job, new.request)) is not None:
        return PutOutcome(answer), job
    if job.state.ended and new.if_exists is not IfExists.KEEP:
        return PutOutcome.ADDED, _renewed(job, new, PutOutcome.ADDED)
    if new.if_exists is not IfExists.REPLACE:
        return PutOutcome.KEPT, job
    if job.state is State.WAITING:
        return PutOutcome.REPLACED, _renewed(job, new, PutOutcome.REPLACED)
    if _held(job, now_ms, held_now):
        noted = _noted(job, new.request, PutOutcome.FOLLOWS)
        changes = _replace(_changes(noted), next=life.added(new.job), move=None)
        return PutOutcome.FOLLOWS, _replace(noted, changes=changes)
    return PutOutcome.REPLACED, _renewed(life.lost(job), new, PutOutcome.REPLACED)


def move(job: Job | None, to: Move, *, now_ms: int, held_now: bool | None = None) -> _Moved:
    """What a move achieves, given the job that has its id."""
    if job is None:
        return MoveOutcome.UNKNOWN, job
    if (answer := _answer(job, to.request)) is not None:
        return MoveOutcome(answer), job
    if job.state.ended:
        return MoveOutcome.TOO_LATE, job
    if job.state is State.RUNNING and _held(job, now_ms, held_now):
        return _move_held(job, to)
    waiting = job if job.state is State.WAITING else _taken_back(job)
    if waiting is None:
        return MoveOutcome.TOO_LATE, job
    if not _fits(to, waiting):
        return MoveOutcome.SIGNED, job
    noted = _noted(waiting, to.request, MoveOutcome.MOVED)
    return MoveOutcome.MOVED, life.moved(noted, to, noted.changes)


def _move_held(job: Job, to: Move) -> _Moved:
    """A worker has it. The store can't know whether it has started: so its holder is told, and
    either puts it back, which moves it, or lets it run."""
    next = None if job.changes is None else job.changes.next
    if next is None and (job.cancel_requested or job.started_ms is not None):
        return MoveOutcome.TOO_LATE, job
    if not _fits(to, job if next is None else next):
        return MoveOutcome.SIGNED, job
    if next is not None:
        # The run goes on; what follows it moves.
        noted = _noted(job, to.request, MoveOutcome.MOVED)
        later = _replace(_changes(noted), next=life.moved(next, to, None))
        return MoveOutcome.MOVED, _replace(noted, changes=later)
    noted = _noted(job, to.request, MoveOutcome.REQUESTED)
    asked = _replace(_changes(noted), move=_together(_changes(noted).move, to))
    return MoveOutcome.REQUESTED, _replace(noted, changes=asked)


def _taken_back(job: Job) -> Job | None:
    """A job whose lease has run out, as it waits; None if it was asked to stop."""
    if job.told:
        job = life.taken_back(job)
    if job.state is State.WAITING:
        return job
    return None if job.cancel_requested else life.lost(job)


def _fits(to: Move, job: Job) -> bool:
    """Whether a job that is signed is so as it would be after the move."""
    if not is_signed(job.payload):
        return True
    return to.sealed is not None and to.sealed.before == job.payload


def _together(first: Move | None, second: Move) -> Move:
    """A move after another that is still pending."""
    if first is None:
        return second
    return _replace(
        second,
        due_ms=first.due_ms if second.due_ms is None else second.due_ms,
        priority=first.priority if second.priority is None else second.priority,
        queue=first.queue if second.queue is None else second.queue,
    )


def _held(job: Job, now_ms: int, held_now: bool | None) -> bool:
    return life.held(job, now_ms=now_ms) if held_now is None else held_now


def _renewed(job: Job, new: Put, answer: PutOutcome) -> Job:
    noted = _noted(job, new.request, answer)
    return life.renewed(job, new.job, _changes(noted))


# --- Requests


def _noted(job: Job, request: int, answer: PutOutcome | MoveOutcome) -> Job:
    """The job with one more request. What was pending stays so, unless the job waits."""
    before = job.changes or Changes()
    if job.state is not State.RUNNING:
        before = life.settled_changes(before) or before
    changes = _replace(
        before,
        count=before.count + 1,
        requests=(*before.requests, Answered(request, answer))[-REMEMBERED:],
    )
    return _replace(job, changes=changes)


def _changes(job: Job) -> Changes:
    assert job.changes is not None
    return job.changes


def _answer(job: Job, request: int) -> str | None:
    """The answer to this request, if the job has seen it before."""
    for each in () if job.changes is None else job.changes.requests:
        if each.number == request:
            return each.answer
    return None


# --- Several at once, for stores that read jobs, decide and write


A = TypeVar("A")
_Put = tuple[PutOutcome, Job]
_Moved = tuple[MoveOutcome, Job | None]


class Asked(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Requests of one kind for one job, in their order."""

    asks: tuple[Put | Move, ...]

    @property
    def bytes(self) -> int:
        """About how many bytes the jobs to put take."""
        return sum(len(ask.job.payload) for ask in self.asks if isinstance(ask, Put))

    def of(
        self, job: Job | None, *, now_ms: int, held_now: bool | None = None
    ) -> tuple[list[PutOutcome | MoveOutcome], Job | None]:
        """The answers, and the job that is left."""
        answers: list[PutOutcome | MoveOutcome] = []
        for ask in self.asks:
            answer: PutOutcome | MoveOutcome
            if isinstance(ask, Put):
                answer, job = put(job, ask, now_ms=now_ms, held_now=held_now)
            else:
                answer, job = move(job, ask, now_ms=now_ms, held_now=held_now)
            answers.append(answer)
        return answers, job


def by_id(asks: Iterable[Put | Move]) -> dict[str, Asked]:
    """The requests by the id of their job, in the order of the ids' first ones."""
    found: dict[str, tuple[Put | Move, ...]] = {}
    for ask in asks:
        id = ask.job.id if isinstance(ask, Put) else ask.id
        found[id] = (*found.get(id, ()), ask)
    return {id: Asked(asks=mine) for id, mine in found.items()}


def in_order(asks: Iterable[Put | Move], answers: Mapping[str, list[A]]) -> list[A]:
    """The answers in the order of the requests; `answers` has them by id."""
    left = {id: iter(each) for id, each in answers.items()}
    return [next(left[ask.job.id if isinstance(ask, Put) else ask.id]) for ask in asks]
