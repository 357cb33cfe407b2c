"""What a store should do, said a second time: plain dicts, no store's code, no `tickwheel.job`.

An independent oracle: where it and a store disagree, one of the two has misread the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HISTORY = 20
ENDED = ("done", "dead", "cancelled")
UNSTARTED = {"lost", "release", "park", "expire"}


@dataclass
class Shift:
    """Where a job is to move; None leaves that as it is."""

    due: int | None = None
    priority: int | None = None
    queue: str | None = None


@dataclass
class Wish:
    """A job as a caller asks for it."""

    queue: str
    priority: int
    due: int
    task: str = "task"
    meta: dict[str, str] | None = None
    expires: int | None = None

    def shifted(self, to: Shift) -> Wish:
        due = self.due if to.due is None else to.due
        expires = self.expires
        if expires is not None and expires <= due:
            expires = due + max(expires - self.due, 1)
        queue = self.queue if to.queue is None else to.queue
        priority = self.priority if to.priority is None else to.priority
        return Wish(queue, priority, due, self.task, self.meta, expires)


@dataclass
class Record:
    """A job as the model sees it."""

    queue: str
    priority: int
    due: int
    task: str = "task"
    meta: dict[str, str] | None = None
    expires: int | None = None
    state: str = "waiting"
    parked: bool = False
    attempt: int = 0
    failures: int = 0
    takeovers: int = 0
    worker: str | None = None
    lease: int | None = None
    progress: float | None = None
    cancel_requested: bool = False
    ended: int | None = None
    error: str | None = None
    traceback: str | None = None
    result: str | None = None
    runs: list[tuple[int, str, str, int]] = field(default_factory=list)
    # What it becomes once its run has ended, or how it moves if that never starts.
    next: Wish | None = None
    move: Shift | None = None
    # The last requests that changed it, with their answers.
    asks: list[tuple[int, str]] = field(default_factory=list)

    def remember(self, number: int, answer: str) -> str:
        self.asks = [*self.asks, (number, answer)][-8:]
        return answer

    def become(self, wish: Wish) -> None:
        self.queue, self.priority, self.due = wish.queue, wish.priority, wish.due
        self.task, self.meta, self.expires = wish.task, wish.meta, wish.expires
        self.state, self.parked, self.failures, self.takeovers = "waiting", False, 0, 0
        self.lease = self.progress = self.ended = None
        self.error = self.traceback = self.result = None
        self.cancel_requested = False
        self.decide("moved")

    def shift(self, to: Shift) -> None:
        wish = Wish(self.queue, self.priority, self.due, self.task, self.meta, self.expires)
        wish = wish.shifted(to)
        self.queue, self.priority, self.due = wish.queue, wish.priority, wish.due
        self.expires, self.parked = wish.expires, False

    def decide(self, answer: str) -> None:
        """Nothing is pending any more."""
        self.next = self.move = None
        self.asks = [(n, answer if was == "requested" else was) for n, was in self.asks]

    def take_back(self) -> None:
        """Lost with something pending, and nobody had asked it to stop since."""
        self.note_lost()
        wish, to = self.next, self.move
        if wish is not None:
            self.become(wish)
        elif to is not None:
            self.state, self.lease, self.progress = "waiting", None, None
            self.takeovers += 1
            self.shift(to)
            self.decide("moved")

    @property
    def pending(self) -> bool:
        return self.next is not None or self.move is not None

    def note(self, run: tuple[int, str, str, int]) -> None:
        # In the model, jobs that are lost, released, parked or expired never started. Of several in
        # a row the last is kept; but the first two losses count against the job, so they stay.
        if self.runs and {run[2], self.runs[-1][2]} <= UNSTARTED:
            without = [*self.runs[:-1], run]
            if losses(without) == losses([*self.runs, run]):
                self.runs = self.runs[:-1]
        self.runs = [*self.runs, run][-HISTORY:]

    def note_lost(self) -> None:
        assert self.worker is not None
        self.note((self.attempt, self.worker, "lost", self.due))

    def held(self, now: int) -> bool:
        return self.state == "running" and self.lease is not None and now < self.lease

    def lost(self, now: int) -> bool:
        return self.state == "running" and not self.held(now)

    def end(self, state: str, now: int) -> None:
        self.state, self.ended, self.lease, self.cancel_requested = state, now, None, False
        self.parked = False
        self.decide("too late")

    def view(self) -> dict[str, Any]:
        return asdict(self)


def losses(runs: list[tuple[int, str, str, int]]) -> int:
    """How many losses count against a job: two at most, since the last run that says otherwise."""
    counted = 0
    for _, _, kind, _ in reversed(runs):
        if kind not in UNSTARTED - {"expire"}:
            break
        counted += kind == "lost"
    return min(counted, 2)


@dataclass(eq=False)
class Claim:
    """That a worker was handed a job. It keeps the record itself: an id may be used anew."""

    record: Record
    attempt: int
    worker: str
    due: int
    # Which of its settlements the store took, if any.
    taken: object = None


class Model:
    def __init__(self) -> None:
        self.jobs: dict[str, Record] = {}
        self.paused: set[str] = set()
        # Of each job that was settled, the attempt that was last settled.
        self.settled: dict[str, int] = {}
        # Each change of the schedule is a version of its own; None while there is no schedule.
        self.version: int | None = None
        self.versions = 0
        self.records: dict[str, str] = {}

    def add(self, id: str, record: Record) -> bool:
        if id in self.jobs:
            return False
        self.jobs[id] = record
        return True

    def claimable(
        self, queues: Sequence[str], tasks: Sequence[str], now: int, ahead: int
    ) -> set[str]:
        """What a claim may hand out."""
        return {
            id
            for id, job in self.jobs.items()
            if job.queue in queues
            and job.queue not in self.paused
            and not job.cancel_requested
            and not job.pending
            and (not job.parked or job.task in tasks)
            and (job.lost(now) or (job.state == "waiting" and job.due <= now + ahead))
        }

    def abandoned(self, queues: Sequence[str], now: int) -> set[str]:
        """Asked to stop and then lost: CANCELLED as soon as a claim comes across them. Or they were
        replaced or moved: then they wait as such."""
        return {
            id
            for id, job in self.jobs.items()
            if job.queue in queues
            and job.queue not in self.paused
            and (job.cancel_requested or job.pending)
            and job.lost(now)
        }

    def abandon(self, id: str, ended: int | None) -> None:
        """`ended` is when it was cancelled, if it was."""
        if ended is None:
            self.jobs[id].take_back()
        else:
            self.jobs[id].note_lost()
            self.jobs[id].end("cancelled", ended)

    # --- Identity and moves

    def put(self, id: str, number: int, wish: Wish, how: str, now: int) -> str:
        job = self.jobs.get(id)
        if job is None:
            job = self.jobs[id] = Record(**vars(wish))
            return job.remember(number, "added")
        known = dict(job.asks)
        if number in known:
            return known[number]
        if job.state in ENDED and how != "keep":
            job.become(wish)
            return job.remember(number, "added")
        if how != "replace":
            return "kept"
        if job.held(now):
            job.next, job.move = wish, None
            return job.remember(number, "follows")
        if job.state == "running":
            job.note_lost()
            job.decide("too late")
        job.become(wish)
        return job.remember(number, "replaced")

    def move(self, id: str, number: int, to: Shift, now: int) -> str:
        job = self.jobs.get(id)
        if job is None:
            return "unknown"
        known = dict(job.asks)
        if number in known:
            return known[number]
        if job.held(now):
            if job.next is not None:
                job.next = job.next.shifted(to)
                return job.remember(number, "moved")
            if job.cancel_requested:
                return "too late"
            first = job.move or Shift()
            job.move = Shift(
                first.due if to.due is None else to.due,
                first.priority if to.priority is None else to.priority,
                first.queue if to.queue is None else to.queue,
            )
            return job.remember(number, "requested")
        if job.state in ENDED or (job.cancel_requested and job.next is None):
            return "too late"
        if job.pending:
            job.take_back()
        elif job.state == "running":
            job.note_lost()
            job.state, job.lease, job.progress = "waiting", None, None
            job.takeovers += 1
        job.shift(to)
        return job.remember(number, "moved")

    def claim(self, id: str, worker: str, now: int, lease: int) -> Claim:
        job = self.jobs[id]
        if job.state == "running":
            job.takeovers += 1
            job.note_lost()
        job.state, job.worker, job.lease = "running", worker, now + lease
        job.parked, job.progress = False, None
        job.attempt += 1
        return Claim(record=job, attempt=job.attempt, worker=worker, due=job.due)

    def holds(self, id: str, claim: Claim, now: int) -> bool:
        job = self.jobs.get(id)
        return job is claim.record and job.attempt == claim.attempt and job.held(now)

    def extend(self, id: str, claim: Claim, now: int, lease: int, progress: float | None) -> bool:
        if not self.holds(id, claim, now):
            return False
        claim.record.lease, claim.record.progress = now + lease, progress
        return True

    def settle(
        self,
        id: str,
        claim: Claim,
        what: object,
        *,
        kind: str,
        now: int,
        due: int,
        error: str | None,
        traceback: str | None,
        result: str | None,
        progress: float | None,
    ) -> bool | None:
        """True or False is what the store must answer; None leaves it the choice."""
        job = claim.record
        if not self.holds(id, claim, now):
            if claim.taken is None:
                return False
            # Repeats are known until the next attempt is settled, or the job is forgotten.
            known = self.jobs.get(id) is job and self.settled[id] == claim.attempt
            return True if known and claim.taken is what else None
        claim.taken = what
        self.settled[id] = claim.attempt
        job.note((claim.attempt, claim.worker, kind, claim.due))
        job.due, job.error, job.traceback, job.result = due, error, traceback, result
        job.progress = progress
        job.failures += kind in ("retry", "dead")
        wish, to = job.next, job.move
        if wish is not None:
            job.become(wish)
            return True
        if kind in (*ENDED, "expire"):
            job.end("cancelled" if kind == "expire" else kind, now)
        elif job.cancel_requested:
            job.end("cancelled", now)
        else:
            job.state, job.lease, job.parked = "waiting", None, kind == "park"
            if to is not None and kind in ("release", "park"):
                job.shift(to)
                job.decide("moved")
            else:
                job.decide("too late")
        return True

    def cancel(self, id: str, now: int) -> str:
        job = self.jobs.get(id)
        if job is None:
            return "unknown"
        if job.state in ENDED:
            return "too late"
        if job.held(now):
            job.cancel_requested = True
            job.decide("too late")
            return "requested"
        if job.state == "running":
            job.note_lost()
        job.end("cancelled", now)
        return "cancelled"

    def rerun(self, id: str, now: int) -> bool:
        job = self.jobs.get(id)
        if job is None or job.state not in ENDED:
            return False
        job.state, job.due, job.ended = "waiting", now, None
        job.failures = job.takeovers = 0
        job.expires = job.error = job.traceback = job.result = None
        return True

    def delete(self, id: str) -> bool:
        if id not in self.jobs or self.jobs[id].state not in ENDED:
            return False
        del self.jobs[id]
        return True

    def prunable(self, states: list[str], before: int) -> set[str]:
        return {
            id
            for id, job in self.jobs.items()
            if job.state in states and job.ended is not None and job.ended < before
        }

    def move_schedule(self) -> int:
        self.versions += 1
        self.version = self.versions
        return self.version

    def counts(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {queue: {} for queue in self.paused}
        for job in self.jobs.values():
            states = found.setdefault(job.queue, {})
            states[job.state] = states.get(job.state, 0) + 1
        return found
