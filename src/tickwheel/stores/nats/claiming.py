"""One claim: what becomes of the jobs of some ready or parked messages.

A ready message is a hint. It counts while nothing is stored under `t` for its job, which a claim
checks, and while no later one has replaced it, which the server can't check at the same time. One
that was delivered to this handle alone can't have been replaced. If there is a doubt, the job is
read first, and the claim then checks that nothing at all has changed since.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from tickwheel import job as life
from tickwheel.job import Job, State
from tickwheel.stores.nats.fitting import LEAST, Fitter
from tickwheel.stores.nats.steps import (
    Check,
    Layout,
    ReadyMessage,
    Standing,
    Step,
    line_of,
    standing_of,
    version,
)

# How often a job that others keep changing is tried; then it is left for later.
PATIENCE = 8


class ClaimBatch:
    """What one call claims, from messages that were delivered to this handle."""

    def __init__(
        self,
        layout: Layout,
        fitter: Fitter,
        take: Callable[[Job], Job],
        *,
        now_ms: int,
        exact: bool,
    ) -> None:
        self._layout = layout
        self._fitter = fitter
        self._take = take
        self._now_ms = now_ms
        # Whether a check may name the ready message. In a cluster it may not: see `Layout.truth`.
        self._exact = exact
        self._tries: Counter[str] = Counter()
        # Where jobs were stored that were in doubt, or whose claim was refused.
        self._seen: dict[str, Standing] = {}
        # What each job becomes.
        self.jobs: dict[str, Job] = {}
        self.left: list[ReadyMessage] = []
        # Those whose jobs were claimed as they were before somebody changed them.
        self.overtaken: list[ReadyMessage] = []

    def begin(
        self,
        messages: Sequence[ReadyMessage],
        doubted: Sequence[ReadyMessage],
        seen: dict[str, Standing],
    ) -> dict[str, ReadyMessage]:
        """The messages to claim, by job: all but the doubted ones that are out of date."""
        self._seen = seen
        spent = [each for each in doubted if not counts(each, seen.get(each.standing.job.id))]
        good = [each for each in messages if each not in spent] if spent else messages
        self.jobs = {each.standing.job.id: self._take(each.standing.job) for each in good}
        return {each.standing.job.id: each for each in good}

    def write(self, message: ReadyMessage) -> list[Step]:
        """What claims or parks a job; if that is too large, what ends it."""
        before = message.standing.job
        job = self.jobs[before.id]
        found = self._fitter.fit(job, self._step, LEAST + len(message.standing.subject))
        if found is None:
            # Nobody has held it: it ends as it was.
            ending = job if job.state.ended else before
            found = self._fitter.end(ending, self._step, now_ms=self._now_ms)
        self.jobs[before.id], step = found
        return [self._layout.note(line_of(job)), step] if found[0].parked else [step]

    def _step(self, job: Job) -> Step:
        layout, seen = self._layout, self._seen.get(job.id)
        check = layout.only_ready(job.id)
        if seen is not None and self._exact:
            check = Check(layout.anywhere(job.id), seen.seq)
        return layout.step(job, check, now_ms=self._now_ms)

    def replan(self, message: ReadyMessage, seen: Standing | None) -> ReadyMessage | None:
        """The message, to be tried again after its claim was refused; None drops or leaves it."""
        id = message.standing.job.id
        if seen is None or not counts(message, seen):
            if seen is not None and version(seen.job) < version(message.standing.job):
                self.overtaken.append(message)
            return None
        self._seen[id] = seen
        self._tries[id] += 1
        if self._tries[id] > PATIENCE:
            self.left.append(message)
            return None
        return message

    def parked(self, todo: Iterable[str]) -> set[str]:
        """Those of these that are parked instead of claimed."""
        return {id for id in todo if self.jobs[id].parked}

    def taken(self, seqs: dict[str, int]) -> list[Job]:
        """The jobs that were claimed or parked, by the sequences of the messages that did it."""
        return [
            job if job.parked else msgspec.structs.replace(job, fence=seqs[id])
            for id, job in self.jobs.items()
            if id in seqs and (job.parked or job.state is State.RUNNING)
        ]


class ParkedBatch:
    """What one call claims, from parked jobs. A check names exactly what was found."""

    def __init__(
        self,
        layout: Layout,
        fitter: Fitter,
        found: Sequence[Standing],
        take: Callable[[Job], Job],
        *,
        now_ms: int,
    ) -> None:
        self._layout = layout
        self._fitter = fitter
        self._now_ms = now_ms
        self._tries: Counter[str] = Counter()
        self._subjects: dict[str, str] = {}
        # What each job becomes.
        self.jobs = {each.job.id: take(each.job) for each in found}

    def write(self, standing: Standing) -> list[Step]:
        """The message that claims a job; if it is too large, the one that ends the job."""

        def step_of(job: Job) -> Step:
            return self._layout.step_from(standing, job, now_ms=self._now_ms)

        id = standing.job.id
        fit = self._fitter.fit(self.jobs[id], step_of, LEAST + len(standing.subject))
        found = fit or self._fitter.end(standing.job, step_of, now_ms=self._now_ms)
        self.jobs[id], step = found
        self._subjects[id] = step.subject
        return [step]

    def replan(self, standing: Standing, seen: Standing | None) -> Standing | None:
        """The same again, if it was refused because of others or for want of room; None drops it
        after a few times, or if it has moved."""
        self._tries[standing.job.id] += 1
        if seen is None or (seen.subject, seen.seq) != (standing.subject, standing.seq):
            return None
        return standing if self._tries[standing.job.id] <= PATIENCE else None

    def held(self, seqs: dict[str, int]) -> list[Standing]:
        """The jobs that were claimed, by the sequences of the messages that claimed them."""
        return [
            standing_of(msgspec.structs.replace(self.jobs[id], fence=seq), self._subjects[id], seq)
            for id, seq in seqs.items()
            if self.jobs[id].state is State.RUNNING
        ]


def taking(
    worker: str, now_ms: int, lease_ms: int, tasks: Collection[str] = ()
) -> Callable[[Job], Job]:
    """What a claim by this worker makes of a job. If there are `tasks`, it parks jobs of others."""

    def take(job: Job) -> Job:
        mine = life.claimed(job, worker=worker, fence=0, now_ms=now_ms, lease_ms=lease_ms)
        if not tasks or job.task in tasks or mine.state is not State.RUNNING:
            return mine
        return life.settled(mine, life.park(mine, ended_ms=now_ms))

    return take


def counts(message: ReadyMessage, seen: Standing | None) -> bool:
    """Whether a ready message is all that counts for its job now."""
    return seen is not None and not seen.kind and seen.seq == message.standing.seq


def same_claim(job: Job, tried: Job) -> bool:
    """Whether this is the claim that we wrote. No two claims of a job share an attempt, but its id
    may be reused."""
    return (job.attempt, job.worker, job.created_ms) == (
        tried.attempt,
        tried.worker,
        tried.created_ms,
    )
