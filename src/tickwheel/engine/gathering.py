"""Gather the due jobs of batch tasks, until a call is full or the first of them has waited enough.

Jobs that may run in one call gather together: those of one task, with the same timeout and the same
limit. A pure structure, which knows jobs by their ids.
"""

from __future__ import annotations

import math

from tickwheel.job import Job
from tickwheel.registry import BatchOptions, Definition, PoolName

# A due job: (-priority, due, order, id).
Entry = tuple[int, float, int, str]
# The task, the limit and the timeout of jobs that gather together.
Key = tuple[str, int, int | None]

# A job that expires while it lingers starts this long before.
IN_TIME_MS = 100
# Each failure of a job divides the size of its batch by four.
SHRINK_BITS = 2


class Gathering:
    """Due jobs that may run in one call. A heap: higher priority first, then earlier due."""

    __slots__ = ("count", "entries", "limit", "linger_ms", "pool", "ripe_ms")

    def __init__(self, pool: PoolName, limit: int, linger_ms: int) -> None:
        self.pool = pool
        self.limit = limit
        self.linger_ms = linger_ms
        # May have jobs that no longer wait; `count` doesn't.
        self.entries: list[Entry] = []
        self.count = 0
        # When the first of them has waited enough.
        self.ripe_ms = math.inf

    def add(self, job: Job, since_ms: int) -> None:
        """Count one more, which waits since then."""
        self.count += 1
        until_ms = lingers_until_ms(job, since_ms, self.linger_ms)
        if until_ms < self.ripe_ms:
            self.ripe_ms = until_ms

    def ripe(self, now_ms: int) -> bool:
        """Whether a call should start now."""
        return self.count >= self.limit or self.ripe_ms <= now_ms

    @property
    def calls(self) -> int:
        """How many calls, and so slots, its jobs need."""
        return -(-self.count // self.limit)

    @property
    def lacks(self) -> int:
        """How many more jobs its last call could take."""
        return -self.count % self.limit


def lingers_until_ms(job: Job, since_ms: int, linger_ms: int) -> int:
    """When a job that waits since then has waited enough: before it expires."""
    until_ms = since_ms + linger_ms
    return until_ms if job.expires_ms is None else min(until_ms, job.expires_ms - IN_TIME_MS)


def most_together(job: Job, definition: Definition, batch: BatchOptions) -> int:
    """How many jobs of a batch task may run in one call with this one.

    Fewer after each failure, and only among jobs that failed as often: so a job that makes its
    batch fail harms others only a few times. On its last chance a job runs alone.
    """
    if not job.failures:
        return batch.size
    policy = definition.policy
    rules = [rule.retries for rule in policy.on.values() if rule is not None]
    retries = min([policy.retries, *rules]) if job.retries is None else job.retries
    if job.failures >= retries:
        return 1
    return max(1, batch.size >> SHRINK_BITS * job.failures)
