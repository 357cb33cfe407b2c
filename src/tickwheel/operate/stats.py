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
    `oldest_late_ms` how long ago that was."""

    waiting: int
    running: int
    done: int
    dead: int
    cancelled: int
    queues: int
    paused_queues: int
    workers: int
    oldest_due: Time | None
    oldest_late_ms: int


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


async def stats_of(client: Client, sees: Callable[[str], bool]) -> Stats:
    """The counts of the queues for which `sees` is true."""
    return await stats_from(client, await standing(client), sees)


async def stats_from(client: Client, found: Standing, sees: Callable[[str], bool]) -> Stats:
    """The same, of a store whose standing was read a moment ago."""
    workers = found.workers
    queues = [queue for queue in found.queues if sees(queue.name)]
    due: list[int] = []
    for queue in queues:
        if queue.waiting and not queue.paused:
            page = await client.find(Query(state=State.WAITING, queue=queue.name), limit=1)
            jobs = [*page.jobs, *(job for job in found.parked if job.queue == queue.name)]
            first_ms = first_due_ms(jobs, workers)
            due += [] if first_ms is None else [first_ms]
    oldest_ms = min(due, default=None)
    return Stats(
        **{state.value: sum(getattr(queue, state) for queue in queues) for state in State},
        queues=len(queues),
        paused_queues=sum(queue.paused for queue in queues),
        workers=sum(any(map(sees, worker.queues)) for worker in workers),
        oldest_due=None if oldest_ms is None else iso_ms(oldest_ms),
        oldest_late_ms=0 if oldest_ms is None else max(client.clock.now_ms() - oldest_ms, 0),
    )
