"""`SealedStore`: any store, with jobs and schedules sealed on the way in and opened on the way out.

Whoever uses it sees plain jobs; the store sees texts. A claimed job that can't be trusted is dead
before the claim returns, and the caller never sees it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import msgspec

from tickwheel.changes import Put
from tickwheel.envelope import REFUSED
from tickwheel.job import Job, Move, MoveOutcome, PutOutcome, Settlement, dead, release
from tickwheel.schedule import Schedule
from tickwheel.store import Page, Query, Store
from tickwheel.transaction import Statement, Transactional
from tickwheel.trust.seals import Refused, TooEarly, Trust, extended, restored

log = logging.getLogger("tickwheel")

# How often a move is signed anew, because its job keeps changing.
TRIES = 5
# How many refused jobs of one claim are logged, each with its reason.
LOGGED = 10


def sealed(store: Store, trust: Trust | None) -> Store:
    """The store as a program with these keys uses it; without keys, the store itself."""
    if trust is None:
        return store
    kind = SealedDatabase if isinstance(store, Transactional) else SealedStore
    return cast(Store, kind(store, trust))


def unsealed(store: Store) -> Store:
    """The store without its wrapper: jobs and schedules go in and out as they are. For those who
    move them on, and must not vouch for them."""
    return store.inner if isinstance(store, SealedStore) else store


def seal_all(store: Store, jobs: Sequence[Job]) -> list[Job]:
    """The jobs as this store would seal them."""
    return store.seal_all(jobs) if isinstance(store, SealedStore) else list(jobs)


class SealedStore:
    """What has to do with jobs or schedules is here; all else is the store's own."""

    # Who is told of jobs that were refused, and are dead.
    on_refused: Callable[[Sequence[Settlement]], None] | None = None

    def __init__(self, inner: Store, trust: Trust) -> None:
        self.inner = inner
        self._trust = trust

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def new_handle(self) -> Store:
        inner = self.inner.new_handle()
        return cast(Store, self) if inner is self.inner else sealed(inner, self._trust)

    # --- Jobs

    def seal_all(self, jobs: Sequence[Job]) -> list[Job]:
        return [self._trust.seal(job) for job in jobs]

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        return await self.inner.add(self.seal_all(jobs))

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        stored = [msgspec.structs.replace(each, job=self._trust.seal(each.job)) for each in puts]
        return await self.inner.put(stored, now_ms=now_ms)

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        """What is signed has to be signed anew, as it is stored at that moment."""
        answers: dict[int, MoveOutcome] = {}
        left = dict(enumerate(moves))
        for _ in range(TRIES):
            # Each job once: the second move of a job is signed after the first.
            once = {move.id: n for n, move in reversed(left.items())}
            found = await self.inner.get(list(once))
            signed = [
                left[n] if job is None else self._trust.move(job, left[n])
                for n, job in zip(once.values(), found, strict=True)
            ]
            for n, answer in zip(
                once.values(), await self.inner.move(signed, now_ms=now_ms), strict=True
            ):
                answers[n] = answer
            unsigned = {n for n in once.values() if answers[n] is MoveOutcome.SIGNED}
            left = {n: each for n, each in left.items() if n in unsigned or n not in answers}
            if not left:
                break
        return [answers[n] for n in range(len(moves))]

    async def claim(
        self,
        queues: Sequence[str],
        *,
        worker: str,
        limit: int,
        now_ms: int,
        lease_ms: int,
        tasks: Collection[str] = (),
        call: int | None = None,
        again: bool = False,
    ) -> list[Job]:
        jobs = await self.inner.claim(
            queues,
            worker=worker,
            limit=limit,
            now_ms=now_ms,
            lease_ms=lease_ms,
            tasks=tasks,
            call=call,
            again=again,
        )
        opened, unfit = self._sorted_out(jobs, now_ms)
        if unfit:
            # If that fails, the caller repeats the claim and gets the same jobs again.
            await self.inner.settle(unfit, now_ms=now_ms)
            _tell(unfit)
            if self.on_refused is not None:
                self.on_refused([each for each in unfit if each.state.ended])
        return opened

    def _sorted_out(self, jobs: Sequence[Job], now_ms: int) -> tuple[list[Job], list[Settlement]]:
        """The jobs that may run, and what becomes of the others."""
        opened: list[Job] = []
        unfit: list[Settlement] = []
        for job in jobs:
            try:
                # One that the store has parked is held by nobody.
                opened.append(job if job.parked else self._trust.open(job))
            except Refused as refused:
                unfit.append(dead(job, error=f"{REFUSED}{refused}", ended_ms=now_ms, failed=False))
            except TooEarly as early:
                words = "put back: it came before the time that was signed"
                unfit.append(release(job, due_ms=early.due_ms, ended_ms=now_ms, error=words))
        return opened, unfit

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        stored = [restored(job) for job in jobs]
        answers = await self.inner.extend(stored, now_ms=now_ms, lease_ms=lease_ms)
        return [
            None if answer is None else extended(job, answer)
            for job, answer in zip(jobs, answers, strict=True)
        ]

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        stored = [self._trust.settlement(settlement) for settlement in settlements]
        return await self.inner.settle(stored, now_ms=now_ms)

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        jobs = await self.inner.get(ids)
        return [None if job is None else self._trust.browse(job) for job in jobs]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        page = await self.inner.find(query, cursor=cursor, limit=limit)
        jobs = [self._trust.browse(job) for job in page.jobs]
        return msgspec.structs.replace(page, jobs=jobs)

    async def parked(self) -> list[Job]:
        return [self._trust.browse(job) for job in await self.inner.parked()]

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        stored = await self.inner.put_schedule(self._trust.seal_schedule(schedule))
        return self._trust.open_schedule(stored)

    async def replace_schedule(self, schedule: Schedule) -> bool:
        return await self.inner.replace_schedule(self._trust.seal_schedule(schedule))

    async def schedules(self) -> list[Schedule]:
        return [self._trust.open_schedule(each) for each in await self.inner.schedules()]

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        stored = self._trust.seal_schedule(schedule)
        return await self.inner.fire(stored, self.seal_all(jobs), next_ms=next_ms)


class SealedDatabase(SealedStore):
    """The same for a store to which jobs can be written through the user's connection."""

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        inner = cast(Transactional, self.inner)
        return inner.adding(self.seal_all(jobs), driver=driver)


def _tell(unfit: Sequence[Settlement]) -> None:
    for settlement in unfit[:LOGGED]:
        job = settlement.job
        level = logging.ERROR if settlement.state.ended else logging.WARNING
        log.log(level, "%s %s: %s", job.task, job.id, settlement.error)
    if len(unfit) > LOGGED:
        log.error("jobs of the same claim that were refused as well: %d", len(unfit) - LOGGED)
