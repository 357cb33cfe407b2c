"""A worker's options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tickwheel.pools import usual_processes, usual_threads
from tickwheel.registry import PoolName

POOLS: tuple[PoolName, ...] = ("async", "thread", "process")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """A worker's options; every number has its unit in its name."""

    queues: Sequence[str]
    # How many jobs run at the same time.
    concurrency: int = 100
    # How long a claim holds without being extended; after that, a dead worker's jobs are taken
    # over.
    lease_ms: int = 15_000
    # How long running jobs may take to finish once the worker is asked to stop.
    grace_ms: int = 30_000
    # A job that was lost with its worker this many times in a row is dead: it kills its workers.
    takeovers: int = 5
    # How many plain functions run at the same time; by default as many as in Python's own executor.
    threads: int = field(default_factory=usual_threads)
    # Child processes for tasks with pool="process".
    processes: int = field(default_factory=usual_processes)
    # How many claimed jobs may wait in memory, and how many bytes their arguments may take.
    hold: int = 10_000
    hold_bytes: int = 256 * 1024 * 1024
    # How long ended jobs are kept.
    retention_ms: int = 7 * 86_400_000
    dead_retention_ms: int = 90 * 86_400_000
    result_limit: int = 1024 * 1024

    def slots(self, pool: PoolName) -> int:
        """How many tasks of this pool can run at the same time."""
        if pool == "async":
            return self.concurrency
        return self.threads if pool == "thread" else self.processes

    def free(self, used: Mapping[PoolName, int], running: int) -> dict[PoolName, int]:
        """How many more tasks of each pool could start while so many run."""
        rest = max(self.concurrency - running, 0)
        return {pool: min(rest, max(self.slots(pool) - used[pool], 0)) for pool in POOLS}

    def most(self, pools: Collection[PoolName]) -> int:
        """How many jobs can run at the same time if their tasks run in these pools."""
        return min(self.concurrency, sum(map(self.slots, pools or POOLS)))
