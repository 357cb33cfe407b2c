"""Act on many jobs: find them page by page, cancel, move, rerun or delete them; say what it did."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tickwheel.client import Client
from tickwheel.job import CancelOutcome, Job, MoveOutcome, State
from tickwheel.operate.fingerprint import fingerprint
from tickwheel.store import Page, Query

# How many jobs one call to the store finds or changes.
BATCH = 1000
# How many jobs are looked at to find those that match, if no store has an index for it.
LOOK_MOST = 100_000


# --- Which jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs; None matches all."""

    states: Sequence[State] = ()
    queue: str | None = None
    task: str | None = None
    # A name and its value.
    meta: tuple[str, str] | None = None
    # Added or ended at this time or later.
    since_ms: int | None = None
    # From when until when (excluded) they are due, or if they have ended, did.
    from_ms: int | None = None
    until_ms: int | None = None
    # Whether the order of time matters, whatever the queue.
    in_order: bool = False
    # Whether they have failed before.
    retrying: bool = False
    # The worker that has them.
    worker: str | None = None
    # What they died of.
    fingerprint: str | None = None
    # Whether they have some text.
    has_text: Callable[[Job], bool] | None = None

    @property
    def narrow(self) -> bool:
        """Whether it leaves out anything, apart from states."""
        return self.choosy or any(
            each is not None
            for each in (self.queue, self.task, self.meta, self.from_ms, self.until_ms)
        )

    @property
    def choosy(self) -> bool:
        """Whether it says what no query can."""
        others = (self.since_ms, self.worker, self.fingerprint, self.has_text)
        return self.retrying or any(each is not None for each in others)

    @property
    def queries(self) -> list[Query]:
        ordered = self.in_order and self.from_ms is None and self.until_ms is None
        return [
            Query(
                state=state,
                queue=self.queue,
                task=self.task,
                meta=self.meta,
                from_ms=0 if ordered else self.from_ms,
                until_ms=self.until_ms,
            )
            for state in self.states or (None,)
        ]

    def keeps(self, job: Job) -> bool:
        """What no query can say."""
        return (
            (self.since_ms is None or max(job.created_ms, job.ended_ms or 0) >= self.since_ms)
            and (not self.retrying or job.failures > 0)
            and self.worker in (None, job.worker)
            and self.fingerprint in (None, fingerprint(job.task, job.error))
            and (self.has_text is None or self.has_text(job))
        )


def everything(_: Job) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Matching:
    """The jobs that match, by id, with their states; and whether there may be more."""

    states: dict[str, State]
    more: bool


async def find_jobs(
    client: Client,
    wanted: Filter,
    *,
    most: int,
    look_most: int | None = None,
    visible: Callable[[Job], bool] = everything,
) -> Matching:
    """The jobs that match now and are `visible`: about `most`, at most a page more. Looks at about
    `look_most` jobs to find them, or at all."""
    found: dict[str, State] = {}
    looked = 0
    for query in wanted.queries:
        cursor: str | None = None
        while True:
            if len(found) >= most or (look_most is not None and looked >= look_most):
                return Matching(found, True)
            page = await client.find(query, cursor=cursor, limit=BATCH)
            looked += max(page.looked, len(page.jobs))
            # Jobs that changed while we paged may appear twice.
            found |= {job.id: job.state for job in page.jobs if wanted.keeps(job) and visible(job)}
            cursor = page.cursor
            if cursor is None:
                break
    return Matching(found, False)


async def find_page(
    client: Client,
    wanted: Filter,
    *,
    cursor: str | None,
    limit: int,
    look_most: int = LOOK_MOST,
    look_s: float | None = None,
    visible: Callable[[Job], bool] = everything,
) -> Page:
    """Up to `limit` jobs that match and are `visible`. A store may return short pages: asks until
    it has no more, or has looked at `look_most`, or for `look_s` seconds."""
    [query] = wanted.queries
    jobs: list[Job] = []
    looked = 0
    choosy = wanted.choosy or visible is not everything
    enough = enough_looked(look_most, look_s)

    def keep(page: Page) -> list[Job]:
        return [job for job in page.jobs if wanted.keeps(job) and visible(job)]

    while len(jobs) < limit and not enough(looked):
        left = limit - len(jobs)
        size = BATCH if choosy else min(left, BATCH)
        page = await client.find(query, cursor=cursor, limit=size)
        kept = keep(page)
        if len(kept) > left:
            # Read again up to the last one that is wanted: the next page starts after it.
            size = page.jobs.index(kept[left - 1]) + 1
            page = await client.find(query, cursor=cursor, limit=size)
            kept = keep(page)
        jobs += kept
        looked += max(page.looked, len(page.jobs))
        cursor = page.cursor
        if cursor is None:
            break
    return Page(jobs=jobs, cursor=cursor, looked=looked)


def enough_looked(look_most: int, look_s: float | None) -> Callable[[int], bool]:
    """Whether so many jobs were enough to look at, or it took long enough."""
    now = asyncio.get_running_loop().time
    until = float("inf") if look_s is None else now() + look_s
    return lambda looked: looked >= look_most or (looked > 0 and now() >= until)


# --- What was done to each


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The outcome for one job: a stable word for programs, words for people, and whether it is
    what was wanted."""

    id: str
    outcome: str
    words: str
    ok: bool = True

    @classmethod
    def unknown(cls, id: str) -> JobAnswer:
        return cls(id, UNKNOWN, "unknown: no job has this id", ok=False)


UNKNOWN = "unknown"

# Does something to jobs by their ids.
Act = Callable[[Client, Sequence[str]], Awaitable[list[JobAnswer]]]

_CANCELLED = {
    CancelOutcome.CANCELLED: ("cancelled", "cancelled: it will not run", True),
    CancelOutcome.REQUESTED: ("requested", "requested: its worker is told to stop it", True),
    CancelOutcome.TOO_LATE: ("too_late", "too late: it has already ended", False),
    CancelOutcome.UNKNOWN: (UNKNOWN, "unknown: no job has this id", False),
}


async def in_batches(act: Act, client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    """Act on all of them, some at a time."""
    answers: list[JobAnswer] = []
    for start in range(0, len(ids), BATCH):
        answers += await act(client, ids[start : start + BATCH])
    return answers


async def cancel_jobs(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    outcomes = await client.cancel(ids)
    return [JobAnswer(id, *_CANCELLED[each]) for id, each in zip(ids, outcomes, strict=True)]


_MOVED = {
    MoveOutcome.MOVED: ("moved", "moved", True),
    MoveOutcome.REQUESTED: (
        "requested",
        "requested: its worker is told, and puts it back unless it has started",
        True,
    ),
    MoveOutcome.TOO_LATE: ("too_late", "too late: it has started or ended", False),
    MoveOutcome.UNKNOWN: (UNKNOWN, "unknown: no job has this id", False),
    MoveOutcome.SIGNED: (
        "signed",
        "signed: only a program with the signing key can move it",
        False,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where jobs are to move; None leaves that as it is."""

    due_ms: int | None = None
    # By how much later they are due than before; negative for sooner.
    later_ms: int | None = None
    priority: int | None = None
    queue: str | None = None


def move_jobs(to: Destination) -> Act:
    """Moves jobs there."""

    async def move(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
        due: int | list[int | None] | None = to.due_ms
        if to.later_ms is not None:
            found = await client.store.get(ids)
            due = [None if job is None else max(job.due_ms + to.later_ms, 0) for job in found]
        if len(ids) == 1:
            [at] = due if isinstance(due, list) else [due]
            one = await client.move_one(ids[0], due_ms=at, priority=to.priority, queue=to.queue)
            outcomes = [one]
        else:
            outcomes = await client.move(ids, due_ms=due, priority=to.priority, queue=to.queue)
        return [JobAnswer(id, *_MOVED[each]) for id, each in zip(ids, outcomes, strict=True)]

    return move


async def rerun_jobs(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    """Run ended jobs again now."""
    return await _ended(client, ids, await client.rerun(ids), "rerun", "rerun: it is due now")


async def delete_jobs(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    """Delete ended jobs permanently."""
    return await _ended(client, ids, await client.delete(ids), "deleted", "deleted")


async def _ended(
    client: Client, ids: Sequence[str], changed: Sequence[bool], outcome: str, words: str
) -> list[JobAnswer]:
    found = await client.store.get(ids)
    answers = []
    for id, done, job in zip(ids, changed, found, strict=True):
        if done:
            answers.append(JobAnswer(id, outcome, words))
        elif job is None:
            answers.append(JobAnswer.unknown(id))
        else:
            answers.append(JobAnswer(id, "not_ended", f"not ended: it is {job.state}", ok=False))
    return answers


# --- The same for dead jobs only


async def rerun_dead(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    return await _of_dead(client, ids, client.rerun, "rerun", ": it is due now")


async def delete_dead(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
    return await _of_dead(client, ids, client.delete, "deleted", "")


async def _of_dead(
    client: Client,
    ids: Sequence[str],
    step: Callable[[Sequence[str]], Awaitable[list[bool]]],
    outcome: str,
    meaning: str,
) -> list[JobAnswer]:
    # The store accepts any ended job.
    jobs = await client.store.get(ids)
    states = [None if job is None else job.state for job in jobs]
    dead = [id for id, state in zip(ids, states, strict=True) if state is State.DEAD]
    done = {id for id, did in zip(dead, await step(dead), strict=True) if did}
    return [
        JobAnswer(id, outcome, outcome + meaning) if id in done else _not_done(id, state)
        for id, state in zip(ids, states, strict=True)
    ]


def _not_done(id: str, state: State | None) -> JobAnswer:
    if state is None:
        return JobAnswer.unknown(id)
    if state is State.DEAD:
        return JobAnswer(id, "changed", "changed in the meantime: it is no longer dead", ok=False)
    return JobAnswer(id, "not_dead", f"not dead: it is {state}", ok=False)
