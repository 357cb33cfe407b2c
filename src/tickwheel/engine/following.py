"""Jobs that follow from the end of others: added before that end is written, so never missed.

Nothing follows from an end that comes too late: another worker has the job then. If a lease runs
out between that check and the end, one is added for an end that is then not written; its id should
be made of the first one's, so that it is one job whatever is repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.job import Job, Outcome, Settlement, State, snooze
from tickwheel.store import Store

log = logging.getLogger("tickwheel")

# What follows from how a job ended: done, or dead for whatever reason.
Follow = Callable[[Settlement], Job | None]

# How soon a job is tried again if what follows from its end could not be added.
AGAIN_MS = 5_000


def followed(store: Store, follow: Mapping[str, Follow]) -> Store:
    """The store as a worker uses it whose tasks have something that follows, by their names."""
    return cast(Store, FollowedStore(store, follow)) if follow else store


class FollowedStore:
    """Its `settle` also adds what follows; all else is the store's own."""

    def __init__(self, inner: Store, follow: Mapping[str, Follow]) -> None:
        self._inner = inner
        self._follow = follow

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        following = await self._held(settlements, self._following(settlements), now_ms)
        if following:
            try:
                await self._inner.add(list(following.values()))
            except StoreUnavailable:
                raise
            except StoreError as error:
                # The store is full, perhaps: the others can be settled all the same.
                log.error("%d jobs that follow could not be added: %s", len(following), error)
                settlements = [_again(each) if id(each) in following else each
                               for each in settlements]  # fmt: skip
        return await self._inner.settle(settlements, now_ms=now_ms)

    async def _held(
        self, settlements: Sequence[Settlement], following: dict[int, Job], now_ms: int
    ) -> dict[int, Job]:
        """Without what would follow from ends that the store is going to reject."""
        ends = [each.job for each in settlements if id(each) in following]
        if not ends:
            return following
        found = await self._inner.get([job.id for job in ends])
        late = {job.id for job, now in zip(ends, found, strict=True) if _lost(job, now, now_ms)}
        if late:
            log.warning("%d jobs ended too late: nothing follows from that", len(late))
        return {
            id(each): following[id(each)]
            for each in settlements
            if id(each) in following and each.job.id not in late
        }

    def _following(self, settlements: Sequence[Settlement]) -> dict[int, Job]:
        """What follows, by the settlement that it follows from."""
        found: dict[int, Job] = {}
        for each in settlements:
            follow = self._follow.get(each.job.task)
            if follow is None or each.outcome not in (Outcome.DONE, Outcome.DEAD):
                continue
            try:
                job = follow(each)
            except Exception:
                log.exception("%s %s: nothing follows from its end", each.job.task, each.job.id)
                continue
            if job is not None:
                found[id(each)] = job
        return found


def _lost(job: Job, now: Job | None, now_ms: int) -> bool:
    """Whether the holder of `job` has lost it for certain. What was read may be older than what the
    holder knows, and then says nothing: a job may follow in vain, but none is missed."""
    if now is None or now.attempt < job.attempt:
        return False
    if now.attempt > job.attempt or now.state is not State.RUNNING:
        return True
    return max(now.lease_until_ms or 0, job.lease_until_ms or 0) <= now_ms


def _again(settlement: Settlement) -> Settlement:
    """Run it again soon, even if this was its last failure."""
    return snooze(
        settlement.job,
        due_ms=settlement.ended_ms + AGAIN_MS,
        started_ms=settlement.started_ms,
        ended_ms=settlement.ended_ms,
    )
