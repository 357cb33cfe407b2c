"""A shop under load, and its books: who was told what, and whether all of it can be true.

Customers add and cancel, workers claim, extend and settle, each through a handle of its own. Each
worker knows one of two tasks, and parks the jobs of the other. All of them know that a step without
an answer may or may not have happened; the books hold only what was answered. At the end `judge`
compares the books with one another and with the store.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from stores import Harness, NatsHarness
from tickwheel import job as life
from tickwheel.errors import StoreUnavailable
from tickwheel.job import CancelOutcome, Job, Outcome, Settlement, State
from tickwheel.store import Store, open_store

T = TypeVar("T")

LEASE_MS = 1_500
TASKS = ("t", "u")
# A lease ends by the server's clock, which is ours: both are on this machine.
SLACK_MS = 20


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Words(NatsHarness):
    """The harness's short words and real time, for stores that the test opens by itself."""

    def __init__(self) -> None:
        Harness.__init__(self, "")


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[tuple[Words, Store]]:
    """An open store, with the words for it."""
    h = Words()
    h.store = open_store(url)
    await h.store.open()
    try:
        yield h, h.store
    finally:
        await h.store.close()


@dataclass
class Claim:
    job: Job
    begun_ms: int
    at_ms: int


@dataclass
class Books:
    """What was answered, with when."""

    dice: random.Random
    added: dict[str, int] = field(default_factory=dict)
    claims: defaultdict[str, list[Claim]] = field(default_factory=lambda: defaultdict(list))
    # By id and attempt: how it was settled, and what the answer was (None: there was none).
    settled: defaultdict[tuple[str, int], list[tuple[Outcome, bool | None]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    cancelled_ms: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    failures: int = 0
    open: bool = True
    closed_ms: int = 0

    @property
    def left(self) -> set[str]:
        return set(self.added) - self.done - set(self.cancelled_ms)

    def longest_pause_ms(self, since_ms: int, priority: int) -> int:
        """How long nothing of this priority was handed out, from then until the shop closed."""
        claims = [claim for mine in self.claims.values() for claim in mine]
        at = [claim.at_ms for claim in claims if claim.job.priority == priority]
        moments = [since_ms, *sorted(each for each in at if since_ms < each < self.closed_ms)]
        return max(b - a for a, b in pairwise([*moments, self.closed_ms]))

    # --- Who comes to the shop

    async def customer(self, store: Store, name: str) -> None:
        for n in itertools.count():
            if not self.open:
                return
            jobs = [self._job(f"{name}-{n}-{m}") for m in range(self.dice.randint(1, 20))]
            if await self._tried(store.add(jobs)) is not None:
                # False is "by you, before a lost reply": these ids are nobody else's.
                self.added |= {job.id: now_ms() for job in jobs}
            await asyncio.sleep(self.dice.uniform(0, 0.05))

    async def canceller(self, store: Store) -> None:
        while self.open:
            await asyncio.sleep(self.dice.uniform(0, 0.03))
            known = list(self.added)[-200:]
            if not known:
                continue
            id = self.dice.choice(known)
            answer = await self._tried(store.cancel([id], now_ms=now_ms()))
            if answer == [CancelOutcome.CANCELLED]:
                self.cancelled_ms.setdefault(id, now_ms())

    async def worker(self, store: Store, name: str, task: str) -> None:
        """Works until the shop is closed and nothing is left."""
        while self.open or self.left:
            begun_ms = now_ms()
            held = await self._tried(
                store.claim(
                    ["default"],
                    worker=name,
                    limit=25,
                    now_ms=begun_ms,
                    lease_ms=LEASE_MS,
                    tasks=[task],
                )
            )
            # Those of another task may be parked already, and nobody holds them.
            held = [job for job in held or () if not job.parked]
            for job in held:
                self.claims[job.id].append(Claim(job, begun_ms, now_ms()))
            if held:
                await self._work(store, held, task)
            else:
                await asyncio.sleep(0.02)

    async def _work(self, store: Store, held: list[Job], task: str) -> None:
        if self.open and self.dice.random() < 0.05:
            return  # it dies: its jobs are left to their leases
        if self.dice.random() < 0.2:
            # Through thick and thin: what could not be asked is held as before.
            found = await self._tried(store.extend(held, now_ms=now_ms(), lease_ms=LEASE_MS))
            held = held if found is None else [job for job in found if job is not None]
        if self.open and self.dice.random() < 0.02:
            await asyncio.sleep(LEASE_MS / 1000 + 0.1)  # it stands still, and settles too late
        await self._settle(store, [self._outcome(job, task) for job in held])

    async def _settle(self, store: Store, settlements: list[Settlement]) -> None:
        """Tried on while the leases hold, as a worker does."""
        end_ms = max((each.job.lease_until_ms or 0 for each in settlements), default=0)
        answers = None
        while settlements and answers is None:
            answers = await self._tried(store.settle(settlements, now_ms=now_ms()))
            if answers is None and now_ms() > end_ms:
                break
        for n, each in enumerate(settlements):
            taken = None if answers is None else answers[n]
            self.settled[each.job.id, each.job.attempt].append((each.outcome, taken))
            if taken and each.outcome is Outcome.DONE:
                self.done.add(each.job.id)

    def _outcome(self, job: Job, task: str) -> Settlement:
        at = now_ms()
        if job.task != task:
            return life.park(job, ended_ms=at)
        luck = self.dice.random() if self.open else 1
        if luck < 0.1:
            return life.retry(job, due_ms=at, error="bad luck", started_ms=at, ended_ms=at)
        if luck < 0.15:
            return life.release(job, ended_ms=at)
        return life.done(job, started_ms=at, ended_ms=at)

    def _job(self, id: str) -> Job:
        at = now_ms()
        due_ms = at + self.dice.choice([0, 0, 1_300, 2_000])
        priority = self.dice.choice([1, 1, 1, 2, 0])
        task = self.dice.choice(TASKS)
        return Job(id=id, task=task, payload="{}", due_ms=due_ms, created_ms=at, priority=priority)

    async def _tried(self, step: Awaitable[T]) -> T | None:
        """The answer; None where there was none. Any other exception is a failed test."""
        try:
            async with asyncio.timeout(90):
                return await step
        except StoreUnavailable:
            self.failures += 1
            await asyncio.sleep(0.02)
            return None

    # --- A day

    async def day(self, stores: list[Store], trouble: Callable[[], Awaitable[None]]) -> None:
        """Open the shop, let the trouble run its course, close, and work off what is left."""
        first, second, *others = stores
        async with asyncio.timeout(150), asyncio.TaskGroup() as group:
            for n, store in enumerate(others):
                group.create_task(self.worker(store, f"w{n}", TASKS[n % len(TASKS)]))
            group.create_task(self.customer(first, "a"))
            group.create_task(self.customer(second, "b"))
            group.create_task(self.canceller(second))
            try:
                await trouble()
            finally:
                self.open, self.closed_ms = False, now_ms()
            # A cancel without an answer may have ended a job.
            group.create_task(self._look_at_what_is_left(first))

    async def _look_at_what_is_left(self, store: Store) -> None:
        while self.left:
            await asyncio.sleep(0.5)
            ids = sorted(self.left)
            for id, job in zip(ids, await self._tried(store.get(ids)) or (), strict=False):
                if job is not None and job.state is State.CANCELLED:
                    self.cancelled_ms.setdefault(id, now_ms())
                elif job is not None and job.state is State.DONE:
                    self.done.add(id)

    # --- The judgement

    async def judge(self, store: Store) -> None:
        assert len(self.added) > 200, "no load"
        assert self.failures, "no trouble"
        ids = sorted(self.added)
        stored: dict[str, Job] = {}
        for at in range(0, len(ids), 300):
            for id, job in zip(
                ids[at : at + 300], await store.get(ids[at : at + 300]), strict=True
            ):
                assert job is not None, f"{id} was acknowledged, and is lost"
                stored[id] = job
        for id, job in stored.items():
            self._judge_end(id, job)
            self._judge_attempts(id, job)
        for id, mine in self.claims.items():
            for before, after in itertools.pairwise(sorted(mine, key=_attempt)):
                self._judge_pair(stored.get(id), before, after)

    def _judge_end(self, id: str, job: Job) -> None:
        assert job.state in (State.DONE, State.CANCELLED), f"{id} never ended: {job}"
        if job.state is State.DONE:
            assert id not in self.cancelled_ms, f"{id} was cancelled, and ran to its end"
            assert self.claims[id] or job.attempt, f"{id} is done, but nobody did it"
        ended = [
            attempt
            for (one, attempt), all_ in self.settled.items()
            if one == id and (Outcome.DONE, True) in all_
        ]
        assert len(ended) <= 1, f"{id} was settled as done by two attempts: {ended}"
        for claim in self.claims[id]:
            for attempt in ended:
                assert claim.job.attempt <= attempt, f"{id} was handed out after it was done"
            if (cancelled_ms := self.cancelled_ms.get(id)) is not None:
                assert claim.begun_ms <= cancelled_ms, f"{id} was handed out after its cancel"

    def _judge_attempts(self, id: str, job: Job) -> None:
        attempts = [claim.job.attempt for claim in self.claims[id]]
        assert len(set(attempts)) == len(attempts), (
            f"{id}: one attempt for two: {self.claims[id]}, "
            f"{[self.settled.get((id, each)) for each in attempts]}"
        )
        if len(job.history) < life.HISTORY_LIMIT and job.attempt:
            # Of several attempts in a row that never started, history keeps the last.
            kept = [run.attempt for run in job.history]
            unstarted = {run.attempt for run in job.history if run.started_ms is None}
            gaps = [b for a, b in pairwise([0, *kept]) if b != a + 1]
            assert set(gaps) <= unstarted, f"{id}: history and attempts differ: {job}"
            lost = sum(run.outcome is Outcome.LOST for run in job.history)
            # A cancel of a job whose lease had run out is a lost run, and no takeover.
            assert lost <= job.takeovers + (job.state is State.CANCELLED), f"{id}: {job}"
        told = {run.attempt: run.outcome for run in job.history}
        for attempt in attempts:
            for outcome, taken in self.settled.get((id, attempt), ()):
                if taken and attempt in told:
                    assert told[attempt] is outcome, f"{id}: {attempt} was {outcome}: {job}"
                if taken is False:
                    assert told.get(attempt) is not Outcome.DONE, f"{id}: refused, yet done"

    def _judge_pair(self, job: Job | None, before: Claim, after: Claim) -> None:
        """A second attempt follows a settle that gave the job back, or the end of a lease."""
        id, attempt = before.job.id, before.job.attempt
        answered = any(
            outcome is not Outcome.DONE and taken is not False
            for outcome, taken in self.settled.get((id, attempt), ())
        )
        # One whose reply was lost may be repeated only after others were settled: then it is
        # refused, although it was taken.
        told = [run.outcome for run in (job.history if job else ()) if run.attempt == attempt]
        given_back = answered or told in ([Outcome.RETRY], [Outcome.RELEASE], [Outcome.PARK])
        lease_ms = before.job.lease_until_ms or 0
        if not given_back:
            assert after.at_ms >= lease_ms - SLACK_MS, f"{id} was handed out to two at a time"


def _attempt(claim: Claim) -> int:
    return claim.job.attempt
