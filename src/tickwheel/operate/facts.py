"""What is known about a job at one moment: the job, its queue, the running workers."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from tickwheel.client import Client
from tickwheel.duration import duration_text, moment_text
from tickwheel.engine.options import WorkerOptions
from tickwheel.envelope import readable
from tickwheel.job import Job, Run
from tickwheel.notes import schedules_of
from tickwheel.registry import Registry
from tickwheel.schedule import Schedule
from tickwheel.store import QueueInfo, WorkerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A job, and its surroundings, at one moment."""

    job: Job
    # Its queue; None if the store has no queue of that name.
    queue: QueueInfo | None
    # The workers that are running.
    workers: Sequence[WorkerInfo]
    schedules: Sequence[Schedule]
    now_ms: int
    # How many times its workers may die before the job is dead.
    takeovers: int
    # How many times its task is retried, if the app is known.
    task_retries: int | None = None
    # The options that lead a command to the same store: ["--store", "sqlite:///jobs.db"].
    where: Sequence[str] = ()
    # The app, as on a worker's command line.
    app: str = "MODULE:APP"

    @property
    def retries(self) -> int | None:
        return self.task_retries if self.job.retries is None else self.job.retries

    @property
    def serving(self) -> list[WorkerInfo]:
        """The workers that serve its queue and know its task."""
        return [worker for worker in self.of_queue if worker.knows(self.job.task)]

    @property
    def of_queue(self) -> list[WorkerInfo]:
        return [worker for worker in self.workers if self.job.queue in worker.queues]

    @property
    def holder(self) -> WorkerInfo | None:
        return next((each for each in self.workers if each.name == self.job.worker), None)

    @property
    def last(self) -> Run | None:
        return self.job.history[-1] if self.job.history else None

    def at(self, ms: int) -> str:
        """'2026-01-31 09:30:00Z (in 29m)'."""
        return f"{moment_text(ms)} ({self.away(ms)})"

    def away(self, ms: int) -> str:
        whole_ms = abs(ms - self.now_ms) // 1000 * 1000
        if not whole_ms:
            return "just now"
        return (
            f"in {duration_text(whole_ms)}"
            if ms > self.now_ms
            else f"{duration_text(whole_ms)} ago"
        )

    def pending(self) -> list[str]:
        """What others have asked for while a worker has the job."""
        changes = self.job.changes
        if changes is None or not changes.pending:
            return []
        if changes.next is not None:
            due = self.away(changes.next.due_ms)
            return [
                "It was replaced: if it has started, it runs to its end; then it runs once more, "
                f"with the new arguments, due {due}."
            ]
        return ["It is to move: its worker puts it back unless it has started."]

    def command(self, *words: str, about: str | None = None) -> str:
        """The command for the shell; `about` is an id or a queue, and may look like an option."""
        if about is None:
            return shlex.join(["tickwheel", *words, *self.where])
        if about.startswith("-"):
            return shlex.join(["tickwheel", *words, *self.where, "--", about])
        return shlex.join(["tickwheel", *words, about, *self.where])


async def facts_of(
    client: Client, job: Job, tasks: Registry, *, where: Sequence[str] = (), app: str = "MODULE:APP"
) -> Facts:
    """The facts about this job now. `tasks` are those of the app, as far as it is known."""
    queues = {queue.name: queue for queue in await client.queues()}
    task = tasks.find(job.task)
    return Facts(
        job=readable(job),
        queue=queues.get(job.queue),
        workers=await client.workers(),
        schedules=await schedules_of(client.store),
        now_ms=client.clock.now_ms(),
        takeovers=WorkerOptions(queues=()).takeovers,
        task_retries=None if task is None else task.policy.retries,
        where=where,
        app=app,
    )
