"""Callers that wait for the end of jobs: one watch of the store for all of them.

A caller looks at its job once. If the job has not ended, the store tells the client when it may
have, and the client looks again. What is looked at together is read together.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
from collections.abc import Collection, Iterator, Sequence

from tickwheel.batch import BATCH_BYTES, Batcher
from tickwheel.clock import StoreClock
from tickwheel.errors import StoreError, StoreUnavailable
from tickwheel.job import Job
from tickwheel.store import Store, job_bytes

log = logging.getLogger("tickwheel")

# A watch lasts this long, or longer with many callers: this long for each of them. The next one
# begins with a look at all jobs, in case that a notification was lost.
WATCH_S, WATCH_EACH_S = 5.0, 0.0005
# The pause after a watch that failed doubles, up to the longest. Each ends with a look at all jobs.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
# How many jobs are read at once: fewer than a store can, so that if many end together the first
# callers go on while the others are read.
LOOK = 250
# How long a store may be away before the callers are told.
AWAY_S = 10.0
# What a job that was not looked at yet is taken to weigh, so that a first look is at a hundred.
UNKNOWN_BYTES = BATCH_BYTES // 100


class Ends:
    """The callers that wait on one client."""

    def __init__(self, store: Store, clock: StoreClock) -> None:
        self._store = store
        self._clock = clock
        # By id: an entry takes up a few hundred bytes.
        self._waiting: dict[str, list[asyncio.Future[Job | None]]] = {}
        # Jobs that are being looked at, and whether to do so again because of what was heard since.
        self._looked_at: dict[str, bool] = {}
        # Its room is not limited: a caller waits, there or here.
        self._looks: Batcher[str, Job | None] = Batcher(
            self._read,
            weigh=lambda _: self._weight,
            limit=LOOK,
            room=sys.maxsize,
            room_bytes=sys.maxsize,
        )
        self._weight = UNKNOWN_BYTES
        self._watching: asyncio.Task[None] | None = None
        self._warned = False
        # Since when the store has not answered, and the next look because of that.
        self._away_since: float | None = None
        self._again: asyncio.TimerHandle | None = None

    async def look(self, id: str) -> Job | None:
        """The job as it is now, read together with those of other callers."""
        return await self._looks.send(id)

    @contextlib.contextmanager
    def awaited(self, id: str) -> Iterator[asyncio.Future[Job | None]]:
        """A future for the job once it has ended, or None if it is unknown by then."""
        future: asyncio.Future[Job | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(id, []).append(future)
        if self._watching is None:
            # It begins with a look at all. It may outlive this caller, and needs nothing of its
            # context.
            self._watching = asyncio.create_task(self._watch(), context=contextvars.Context())
            self._watching.add_done_callback(self._watched)
        else:
            # It may have ended since the caller looked.
            self._told([id])
        try:
            yield future
        finally:
            self._leave(id, future)

    def _leave(self, id: str, future: asyncio.Future[Job | None]) -> None:
        if not future.cancel() and not future.cancelled():
            future.exception()  # nobody may have asked for it
        # Those whose future is done have left already.
        others = self._waiting.get(id, [])
        if future in others:
            others.remove(future)
            if not others:
                del self._waiting[id]
        if not self._waiting and self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def close(self) -> None:
        """Callers that still wait are told that the store is closed."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        for id in list(self._waiting):
            self._over(id, None, StoreUnavailable("the store is closed"))

    # --- Watching

    async def _watch(self) -> None:
        pause_s = 0.0
        while True:
            lasting_s = max(WATCH_S, WATCH_EACH_S * len(self._waiting))
            now_ms = self._clock.now_ms()
            try:
                await self._store.watch_ended(
                    self._waiting.keys(),
                    self._told,
                    now_ms=now_ms,
                    until_ms=now_ms + int(lasting_s * 1000),
                )
                pause_s = 0.0
                continue
            except StoreError as error:
                self._warn(error)
            pause_s = min(max(pause_s * 2, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            # If the store is away, this tells the callers.
            self._told(list(self._waiting))
            await asyncio.sleep(pause_s)

    def _watched(self, watching: asyncio.Task[None]) -> None:
        if self._watching is watching:
            self._watching = None
        if not watching.cancelled() and (error := watching.exception()) is not None:
            # A mistake of ours: nobody may wait for ever because of it.
            for id in list(self._waiting):
                self._over(id, None, error)

    def _warn(self, error: StoreError) -> None:
        """Once, and only of what will not pass by itself."""
        if not isinstance(error, StoreUnavailable) and not self._warned:
            self._warned = True
            log.warning("can't hear of the ends of jobs, so results come later: %s", error)

    def _told(self, ids: Collection[str]) -> None:
        """These may have ended."""
        for id in ids:
            if id in self._looked_at:
                self._looked_at[id] = True
            elif id in self._waiting:
                self._looked_at[id] = False
                self._looks.submit([id], self._looked)

    # --- Looking

    async def _read(self, ids: Sequence[str]) -> list[Job | None]:
        jobs = await self._store.get(ids)
        total = sum(job_bytes(job) for job in jobs if job is not None)
        # Jobs of a client are mostly alike; a look after large ones is small, just in case.
        self._weight = max(total // len(jobs), self._weight // 2, 1)
        return jobs

    def _looked(self, id: str, job: Job | None, error: BaseException | None) -> None:
        again = self._looked_at.pop(id)
        if isinstance(error, StoreUnavailable) and self._patient():
            return
        if error is None:
            self._away_since = None
        if error is not None or job is None or job.state.ended:
            self._over(id, job, error)
        elif again:
            self._told([id])

    def _patient(self) -> bool:
        """The store doesn't answer: look again soon, unless it has been away for long."""
        loop = asyncio.get_running_loop()
        if self._away_since is None:
            self._away_since = loop.time()
        if loop.time() - self._away_since > AWAY_S:
            return False
        if self._again is None:
            self._again = loop.call_later(LONGEST_PAUSE_S, self._look_again)
        return True

    def _look_again(self) -> None:
        self._again = None
        self._told(list(self._waiting))

    def _over(self, id: str, job: Job | None, error: BaseException | None) -> None:
        for future in self._waiting.pop(id, ()):
            if future.done():
                continue
            if error is None:
                future.set_result(job)
            elif isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
