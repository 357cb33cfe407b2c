"""Lend the slots of runs that wait for other jobs, so that these can run.

A task that waits for the result of another job takes up a slot without using it. If all slots are
taken like that, none of the jobs waited for can start, and everything waits for its timeout.

So such a run lends its slot, if the job that it waits for could use it here; when it goes on, there
may be one run too many for a while. As many slots can be lent as the worker has, or LEAST; then
tasks that are known to wait are left to others, so that the jobs waited for get their turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from tickwheel.engine.hand import Hand, Held
from tickwheel.engine.journal import about
from tickwheel.job import Job, State
from tickwheel.registry import PoolName, Registry

log = logging.getLogger("tickwheel")

# How many slots may be lent, even if the worker has fewer.
LEAST = 100


class Lending:
    """Decides for one worker when a slot is lent."""

    def __init__(
        self,
        hand: Hand,
        tasks: Registry,
        *,
        queues: Sequence[str],
        slots: int,
        has_room: Callable[[PoolName], bool],
        lent: Callable[[], None],
    ) -> None:
        """`lent` is called when a slot has become free."""
        self._hand = hand
        self._tasks = tasks
        self._queues = queues
        self._slots = slots
        self._has_room = has_room
        self._lent = lent
        self._loop = asyncio.get_running_loop()
        # The tasks that have waited like this; they were warned about.
        self._waiters: set[str] = set()

    def waiting(self, held: Held, job: Job | None) -> None:
        """A run waits for another job, or with None, no longer does. May be called on any thread:
        a plain function waits in its own."""
        if asyncio._get_running_loop() is self._loop:
            self._lend_or_take_back(held, job)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._lend_or_take_back, held, job)

    def _lend_or_take_back(self, held: Held, job: Job | None) -> None:
        if job is None:
            self._hand.take_back(held)
        elif not held.lent and held.run is not None and self._needs_slot(job):
            self._warn(held.job, job)
            if not self._full():
                self._hand.lend(held)
                self._lent()

    def _full(self) -> bool:
        return self._hand.lent_total >= most_lent(self._slots)

    def defers(self, held: Held) -> bool:
        """Whether a job should not start now, because its task would wait and could not lend its
        slot."""
        return held.job.task in self._waiters and self._full()

    def _needs_slot(self, job: Job) -> bool:
        """Whether the job has not started, could run here, and finds no slot."""
        if job.state is not State.WAITING and not self._hand.holds_unstarted(job.id):
            return False
        if job.queue not in self._queues:
            return False
        definition = self._tasks.find(job.task)
        if definition is None:
            return False
        return self._hand.running >= self._slots or not self._has_room(definition.pool)

    def _warn(self, job: Job, awaited: Job) -> None:
        """Once per task."""
        if job.task in self._waiters:
            return
        self._waiters.add(job.task)
        log.warning(
            "%s %s: waits for job %s (%s) while no slot is free, so its own is lent until it goes "
            "on; use a queue with a worker of its own for %s, or raise the concurrency",
            job.task,
            job.id,
            awaited.id,
            awaited.task,
            awaited.task,
            extra=about(job),
        )


def most_lent(slots: int) -> int:
    return max(slots, LEAST)
