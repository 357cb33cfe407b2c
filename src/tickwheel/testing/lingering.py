"""The jobs of batch tasks that a box holds until their batch is full, or has waited enough."""

from __future__ import annotations

from tickwheel.engine.gathering import Key, lingers_until_ms, most_together
from tickwheel.job import Job
from tickwheel.registry import Registry


class Lingering:
    """Claimed jobs of batch tasks that have not started, in the order of their claims."""

    def __init__(self, tasks: Registry) -> None:
        self._tasks = tasks
        # With the moment at which each has waited enough.
        self._jobs: dict[Key, list[tuple[Job, int]]] = {}

    def add(self, job: Job, now_ms: int) -> bool:
        """Hold a job of a batch task; False if it is of another task."""
        task = self._tasks.find(job.task)
        if task is None or task.batch is None:
            return False
        key = (job.task, most_together(job, task, task.batch), job.timeout_ms)
        until_ms = lingers_until_ms(job, now_ms, task.batch.linger_ms)
        self._jobs.setdefault(key, []).append((job, until_ms))
        return True

    def take(self, now_ms: int | None) -> list[Job]:
        """Take out a batch that is full or has waited enough; with None, any. None of them: []."""
        for key, held in self._jobs.items():
            _, limit, _ = key
            ripe_ms = min(until_ms for _, until_ms in held)
            if len(held) >= limit or now_ms is None or ripe_ms <= now_ms:
                taken, left = held[:limit], held[limit:]
                self._jobs[key] = left
                if not left:
                    del self._jobs[key]
                return [job for job, _ in taken]
        return []

    def next_ms(self) -> int | None:
        """When the next of them has waited enough."""
        return min((until_ms for held in self._jobs.values() for _, until_ms in held), default=None)
