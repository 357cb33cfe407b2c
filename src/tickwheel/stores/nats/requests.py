"""Requests to the holders of jobs: to stop them, or to put them back. Told, and looked up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from tickwheel.concurrency import first_of
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job
from tickwheel.store import Ask, Asks
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.shard import Shard
from tickwheel.stores.nats.wire import Wire, publish_line


class Requests:
    """What the workers of one handle are asked for."""

    def __init__(self, namespace: str) -> None:
        self._subject = f"tw-news.{namespace}.asked"
        self.wire: Wire | None = None
        # Set when a job of this worker gets a request, by worker.
        self._events: dict[str, asyncio.Event] = {}

    def event(self, worker: str) -> asyncio.Event:
        event = self._events.get(worker)
        if event is None:
            event = self._events[worker] = asyncio.Event()
            self._open_wire.subscribe(self._of(worker), lambda _: event.set())
        return event

    async def asked(
        self,
        worker: str,
        look: Callable[[dict[str, Ask]], Awaitable[None]],
        known: Asks,
        wait_s: float,
    ) -> dict[str, Ask]:
        """Wait until `look`, which reads the store, finds something that is not known."""
        requested = self.event(worker)
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while True:
            requested.clear()
            asks: dict[str, Ask] = {}
            await look(asks)
            left = end - loop.time()
            if asks.items() - known.items() or left <= 0:
                return asks
            await first_of(requested.wait(), timeout_s=left)

    def tell(self, jobs: Iterable[Job]) -> None:
        """Tell the holders of these jobs."""
        for worker in {job.worker for job in jobs if job.worker}:
            self._open_wire.send(publish_line(self._of(worker), b""))

    def reconnected(self) -> None:
        """Nobody told us what happened meanwhile."""
        for event in self._events.values():
            event.set()

    def close(self) -> None:
        self._events.clear()
        self.wire = None

    def _of(self, worker: str) -> str:
        return f"{self._subject}.{steps.subject_part(worker)}"

    @property
    def _open_wire(self) -> Wire:
        if self.wire is None:
            raise StoreUnavailable("the store is closed")
        return self.wire


async def gather(shard: Shard, worker: str, asks: dict[str, Ask]) -> None:
    """What this worker is asked for, of the jobs of one shard."""
    subjects = [shard.layout.of_kind(kind, None) for kind in steps.ASKED]
    for standing in await shard.jobs.gathered(*subjects):
        job = standing.job
        if job.worker == worker:
            asks[job.id] = Ask.STOP if job.cancel_requested else Ask.PUT_BACK
