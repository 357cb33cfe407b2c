"""What a store should do, said a second time: plain dicts, no store's code, no `tickwheel.job`.

An independent oracle: where it and a store disagree, one of the two has misread the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

HISTORY = 20
ENDED = ("done", "dead", "cancelled")


@dataclass
class Record:
    """A job as the model sees it."""

    queue: str
    priority: int
    due: int
    state: str = "waiting"
    attempt: int = 0
    failures: int = 0
    takeovers: int = 0
    worker: str | None = None
    lease: int | None = None
    asked: bool = False
    ended: int | None = None
    error: str | None = None
    result: str | None = None
    runs: list[tuple[int, str, str, int]] = field(default_factory=list)

    def note(self, run: tuple[int, str, str, int]) -> None:
        # In the model, jobs that are lost or released never started. Of several in a row the last
        # is kept; but the first two losses count against the job, so they stay.
        if self.runs and {run[2], self.runs[-1][2]} <= {"lost", "release"}:
            counted = 0
            for _, _, kind, _ in reversed(self.runs[:-1]):
                if kind not in ("lost", "release"):
                    break
                counted += kind == "lost"
            if self.runs[-1][2] == "release" or counted >= 2 or (counted == 1 and run[2] == "lost"):
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
        self.state, self.ended, self.lease, self.asked = state, now, None, False

    def view(self) -> dict[str, Any]:
        return asdict(self)


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

    def add(self, id: str, record: Record) -> bool:
        if id in self.jobs:
            return False
        self.jobs[id] = record
        return True

    def claimable(self, queues: Sequence[str], now: int, ahead: int) -> set[str]:
        """What a claim may hand out."""
        return {
            id
            for id, job in self.jobs.items()
            if job.queue in queues
            and job.queue not in self.paused
            and not job.asked
            and (job.lost(now) or (job.state == "waiting" and job.due <= now + ahead))
        }

    def abandoned(self, queues: Sequence[str], now: int) -> set[str]:
        """Asked to stop and then lost: CANCELLED as soon as a claim comes across them."""
        return {
            id
            for id, job in self.jobs.items()
            if job.queue in queues and job.queue not in self.paused and job.asked and job.lost(now)
        }

    def abandon(self, id: str, ended: int) -> None:
        self.jobs[id].note_lost()
        self.jobs[id].end("cancelled", ended)

    def claim(self, id: str, worker: str, now: int, lease: int) -> Claim:
        job = self.jobs[id]
        if job.state == "running":
            job.takeovers += 1
            job.note_lost()
        job.state, job.worker, job.lease = "running", worker, now + lease
        job.attempt += 1
        return Claim(record=job, attempt=job.attempt, worker=worker, due=job.due)

    def holds(self, id: str, claim: Claim, now: int) -> bool:
        job = self.jobs.get(id)
        return job is claim.record and job.attempt == claim.attempt and job.held(now)

    def extend(self, id: str, claim: Claim, now: int, lease: int) -> bool:
        if not self.holds(id, claim, now):
            return False
        claim.record.lease = now + lease
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
        result: str | None,
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
        job.due, job.error, job.result = due, error, result
        job.failures += kind in ("retry", "dead")
        if kind in ENDED:
            job.end(kind, now)
        elif job.asked:
            job.end("cancelled", now)
        else:
            job.state, job.lease = "waiting", None
        return True

    def cancel(self, id: str, now: int) -> str:
        job = self.jobs.get(id)
        if job is None:
            return "unknown"
        if job.state in ENDED:
            return "too late"
        if job.held(now):
            job.asked = True
            return "asked"
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
        job.error = job.result = None
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
