"""How many jobs are in each state, and how late the store is with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tickwheel.client import Client
from tickwheel.job import Job, State
from tickwheel.operate.doctor import first_due_ms
from tickwheel.operate.documents import Time, iso_ms
from tickwheel.store import Query, QueueInfo, WorkerInfo


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts over all queues; `oldest_due` is when the first waiting job is due, and
    `oldest_late_ms` how long ago that was. What jobs are counted for is null for keys that may not
    see all tasks."""

    waiting: int | None
    running: int | None
    done: int | None
    dead: int | None
    cancelled: int | None
    queues: int
    paused_queues: int
    workers: int
    oldest_due: Time | None
    oldest_late_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a store stands: its workers, its queues, and one job of each task that is parked."""

    workers: Sequence[WorkerInfo]
    queues: Sequence[QueueInfo]
    parked: Sequence[Job]


async def standing(client: Client) -> Standing:
    workers, queues = await client.workers(), await client.queues()
    parked = await client.parked() if any(queue.waiting for queue in queues) else []
    return Standing(workers=workers, queues=queues, parked=parked)


async def stats_of(
    client: Client, found: Standing, sees: Callable[[str], bool], *, counted: bool = True
) -> Stats:
    """The counts of the queues for which `sees` is true; of jobs only if `counted`."""
    queues = [queue for queue in found.queues if sees(queue.name)]
    oldest_ms = await _oldest_ms(client, queues, found) if counted else None
    counts: dict[str, int | None] = {
        state.value: sum(getattr(queue, state) for queue in queues) if counted else None
        for state in State
    }
    late_ms = 0 if oldest_ms is None else max(client.clock.now_ms() - oldest_ms, 0)
    return Stats(
        waiting=counts["waiting"],
        running=counts["running"],
        done=counts["done"],
        dead=counts["dead"],
        cancelled=counts["cancelled"],
        queues=len(queues),
        paused_queues=sum(queue.paused for queue in queues),
        workers=sum(any(map(sees, worker.queues)) for worker in found.workers),
        oldest_due=None if oldest_ms is None else iso_ms(oldest_ms),
        oldest_late_ms=late_ms if counted else None,
    )


async def _oldest_ms(client: Client, queues: Sequence[QueueInfo], found: Standing) -> int | None:
    """When the first waiting job of these queues is due."""
    due: list[int] = []
    for queue in queues:
        if queue.waiting and not queue.paused:
            page = await client.find(Query(state=State.WAITING, queue=queue.name), limit=1)
            jobs = [*page.jobs, *(job for job in found.parked if job.queue == queue.name)]
            first_ms = first_due_ms(jobs, found.workers)
            due += [] if first_ms is None else [first_ms]
    return min(due, default=None)
