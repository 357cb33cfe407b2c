"""Schedules that a full server failed to fire: it never tries again, so this does."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tickwheel.stores.nats import steps
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.room import Room
from tickwheel.stores.nats.steps import Layout, Standing
from tickwheel.stores.nats.stream import BATCH, Stream

log = logging.getLogger("tickwheel")

# Schedules of the server: waiting jobs, and leases.
KINDS = (*steps.WAITING, *steps.RUNNING, *steps.ASKED)
# How many pages are read in one go.
PAGES = 5
# The server fires within a quarter of a second, or later on a busy machine.
LATE_MS = 2_000


class Late:
    """Checks the schedules of a stream that was full, a part at a time."""

    def __init__(
        self, stream: Stream, layout: Layout, room: Room, jobs: Jobs, now_ms: Callable[[], int]
    ) -> None:
        self._stream = stream
        self._layout = layout
        self._room = room
        self._jobs = jobs
        self._now_ms = now_ms
        # Where to continue: a kind, and a sequence.
        self._kind, self._at = 0, 1

    async def check(self) -> None:
        """Check the next part. All is well after a full round that began with room in the store."""
        if not self._room.suspect:
            return
        if (self._kind, self._at) == (0, 1):
            self._room.suspect = self._room.is_tight()
        for _ in range(PAGES):
            subject = self._layout.of_kind(KINDS[self._kind], None)
            messages, more = await self._stream.page(subject, from_seq=self._at, limit=BATCH)
            late = [each for each in map(_standing, messages) if self._is_late(each)]
            if late and (pushed := await self._jobs.push(late)):
                log.warning(
                    "NATS: jobs made ready that the server missed while it was full: %d", pushed
                )
            if more:
                self._at = messages[-1][1] + 1
                continue
            self._kind, self._at = (self._kind + 1) % len(KINDS), 1
            if self._kind == 0:
                return
        self._room.suspect = True

    def _is_late(self, standing: Standing) -> bool:
        job = standing.job
        at_ms = job.lease_until_ms or self._layout.start_ms(job)
        return at_ms < self._now_ms() - LATE_MS


def _standing(message: tuple[str, int, bytes]) -> Standing:
    return steps.standing(*message)
