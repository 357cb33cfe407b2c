"""What the store says about queues and workers, read at most every few seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tickwheel.app import App
from tickwheel.client import Client
from tickwheel.engine.counts import NAMES, OTHER
from tickwheel.errors import StoreError
from tickwheel.job import Job, State
from tickwheel.store import Query, QueueInfo, WorkerInfo
from tickwheel.unserved import UnservedTask, unserved_tasks

log = logging.getLogger("tickwheel")

# How long what was read is good for, and how long reading may take.
FRESH_S = 5.0
PATIENCE_S = 3.0
# Of so many queues with waiting jobs, so many jobs are looked at, to see which are due.
QUEUES_READ = 20
JOBS_READ = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """A queue, and the running workers that serve it."""

    info: QueueInfo
    workers: int = 0
    # How many of the jobs that were looked at are due, and for how long the first has been. None:
    # the queue was not looked at.
    due: int | None = None
    oldest_due_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The store at one moment; nothing is known about one that does not answer."""

    up: bool
    queues: Sequence[QueueView] = ()
    workers: int = 0
    unserved: Sequence[UnservedTask] = ()


class Overviews:
    """What an app's store says, kept for a few seconds. Belongs to one event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._reading = asyncio.Lock()
        self._last: Overview | None = None
        self._until_s = 0.0

    async def get(self) -> Overview:
        """The overview: a fresh one, or that of a moment ago. Never raises a StoreError."""
        loop = asyncio.get_running_loop()
        async with self._reading:
            if self._last is None or loop.time() >= self._until_s:
                self._last = await self._read()
                self._until_s = loop.time() + FRESH_S
            return self._last

    async def _read(self) -> Overview:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await read_overview(await self._app.client())
        except (StoreError, TimeoutError) as error:
            log.debug("metrics without those of the store: %r", error)
            return Overview(up=False)


async def read_overview(client: Client) -> Overview:
    """Read everything, with a bounded number of calls."""
    now_ms = client.clock.now_ms()
    queues, workers = await client.queues(), await client.workers()
    parked = await client.parked()
    waiting = sorted((each for each in queues if each.waiting), key=lambda each: -each.waiting)
    found: dict[str, list[Job]] = {}
    for queue in waiting[:QUEUES_READ]:
        page = await client.find(Query(state=State.WAITING, queue=queue.name), limit=JOBS_READ)
        more = [job for job in parked if job.queue == queue.name]
        found[queue.name] = list({job.id: job for job in (*page.jobs, *more)}.values())
    return Overview(
        up=True,
        queues=bounded([view(each, workers, found.get(each.name), now_ms) for each in queues]),
        workers=len(workers),
        unserved=unserved_tasks(parked, workers)[:NAMES],
    )


def view(
    queue: QueueInfo, workers: Sequence[WorkerInfo], jobs: Sequence[Job] | None, now_ms: int
) -> QueueView:
    """A queue with some of its waiting jobs; None: they are unknown."""
    if not queue.waiting:
        jobs = ()
    due_ms = None if jobs is None else [job.due_ms for job in jobs if job.due_ms <= now_ms]
    return QueueView(
        info=queue,
        workers=sum(queue.name in worker.queues for worker in workers),
        due=None if due_ms is None else len(due_ms),
        oldest_due_ms=None if due_ms is None else now_ms - min(due_ms, default=now_ms),
    )


def bounded(views: Sequence[QueueView]) -> list[QueueView]:
    """The first queues by name, and the jobs of the others as those of one queue."""
    kept, rest = list(views[:NAMES]), views[NAMES:]
    if rest:
        states = (State.WAITING, State.RUNNING, State.DONE, State.DEAD, State.CANCELLED)
        sums = {str(state): sum(getattr(each.info, state) for each in rest) for state in states}
        kept.append(
            QueueView(
                info=QueueInfo(name=OTHER, **sums),
                workers=min(each.workers for each in rest),
            )
        )
    return kept
