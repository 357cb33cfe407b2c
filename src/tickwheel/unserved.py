"""Find the tasks that no running worker knows, so that their jobs wait. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tickwheel.duration import duration_text
from tickwheel.job import Job, Outcome
from tickwheel.store import WorkerInfo


@dataclass(frozen=True, slots=True)
class UnservedTask:
    """A task with waiting jobs in a queue, of whose running workers none knows it."""

    queue: str
    task: str
    # When a worker last put one of the jobs back; one of them.
    since_ms: int
    job: str

    def words(self, now_ms: int) -> str:
        since = duration_text(max(now_ms - self.since_ms, 0) // 1000 * 1000)
        return f"no running worker of queue {self.queue} knows task {self.task} (for {since})"


def unserved_tasks(parked: Iterable[Job], workers: Sequence[WorkerInfo]) -> list[UnservedTask]:
    """Those among parked jobs, by queue and task. None if no worker is running: that is a finding
    of its own."""
    if not workers:
        return []
    found = [
        UnservedTask(job.queue, job.task, parked_since_ms(job), job.id)
        for job in parked
        if not known(job.task, job.queue, workers)
    ]
    return sorted(found, key=lambda each: (each.queue, each.task))


def known(task: str, queue: str, workers: Iterable[WorkerInfo]) -> bool:
    """Whether a running worker serves the queue and knows the task."""
    return any(queue in worker.queues and worker.knows(task) for worker in workers)


def parked_since_ms(job: Job) -> int:
    """When the job was put back by a worker that doesn't know its task."""
    parked = [run.ended_ms for run in job.history if run.outcome is Outcome.PARK]
    return parked[-1] if parked else job.due_ms
