"""One stream, with everything that works on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from tickwheel.concurrency import bounded_tasks
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job, Priority
from tickwheel.store import WorkerInfo, job_bytes
from tickwheel.stores.nats.browse import Finder, alive
from tickwheel.stores.nats.changing import Changing
from tickwheel.stores.nats.delivery import ALL, Delivery, message_bytes
from tickwheel.stores.nats.jobs import PARALLEL, Jobs
from tickwheel.stores.nats.late import Late
from tickwheel.stores.nats.parked import Arrivals, Parked, arrivals_of
from tickwheel.stores.nats.records import Records
from tickwheel.stores.nats.room import FEW_BYTES, Room
from tickwheel.stores.nats.schedules import Schedules
from tickwheel.stores.nats.steps import Layout, ReadyMessage, Standing, Step, subject_part
from tickwheel.stores.nats.stream import BATCH, Stream
from tickwheel.stores.nats.url import NatsOptions
from tickwheel.stores.nats.wire import Wire

# How often a claim takes more messages because some turned out to be out of date.
ROUNDS = 3


class Shard:
    """One stream, with everything that works on it."""

    def __init__(
        self,
        wire: Wire,
        options: NatsOptions,
        number: int,
        now_ms: Callable[[], int],
        notify_full: Callable[[], None],
        notify_parked: Callable[[int, Arrivals], None],
    ) -> None:
        self.layout = Layout(options.namespace, number, options.ahead_ms)
        self.stream = Stream(
            wire,
            self.layout,
            replicas=options.replicas,
            shards=options.shards,
            singly=options.durability == "fast",
        )
        self.room = Room(self.stream, self.layout, notify_full)
        self.jobs = Jobs(self.stream, self.layout, self.room, now_ms)
        self.changing = Changing(self.stream, self.layout, self.room, self.jobs, now_ms)
        self.jobs.on_overtaken = self.changing.overtaken
        self.late = Late(self.stream, self.layout, self.room, self.jobs, now_ms)
        self.schedules = Schedules(self.stream, self.layout, self.room, self.jobs)
        self.records = Records(self.stream, self.layout, self.room)
        self.parked = Parked(self.stream, self.layout, now_ms)
        self.delivery = Delivery(wire, self.stream, self.layout, self.jobs, self.parked)
        self.finder = Finder(self.stream, self.layout, self.jobs, self.parked)

        self._number = number
        self._notify_parked = notify_parked

    def notify_parked(self, jobs: Sequence[Job], seqs: Mapping[str, int]) -> None:
        """Tell whoever knows the tasks of these jobs that they were parked."""
        arrivals = arrivals_of(jobs, seqs)
        if arrivals:
            self.parked.arrived(arrivals)
            self._notify_parked(self._number, arrivals)

    async def prepare(self, jobs: Sequence[Job]) -> None:
        """Prepare for these jobs: each queue and priority needs a consumer before its first add."""
        if self.stream.unsafe:
            raise StoreUnavailable(self.stream.unsafe)
        for queue, priority in {(job.queue, str(job.priority)) for job in jobs}:
            await self.stream.ensure_source(queue, priority)

    async def claim(
        self,
        queues: list[str],
        *,
        worker: str,
        limit: int,
        most_bytes: int,
        now_ms: int,
        lease_ms: int,
        tasks: Collection[str],
        call: int | None,
    ) -> list[Job]:
        """Claim up to `limit` jobs of these queues, of about `most_bytes`; parked ones only of
        these tasks."""
        if self.room.is_tight():
            most_bytes = min(most_bytes, FEW_BYTES)
            limit = min(limit, FEW_BYTES // 1024)
        claimed: list[Job] = []

        async def claim(messages: Sequence[ReadyMessage]) -> None:
            some, seqs = await self.jobs.claim(
                messages,
                worker=worker,
                now_ms=now_ms,
                lease_ms=lease_ms,
                tasks=tasks,
                call=call,
                leave=self.delivery.keep,
            )
            claimed.extend(some)
            self.notify_parked([job for job in some if job.parked], seqs)

        async def claim_parked(found: Sequence[Standing]) -> tuple[list[Job], list[Standing]]:
            return await self.jobs.claim_parked(
                found, worker=worker, now_ms=now_ms, lease_ms=lease_ms, call=call
            )

        await self.late.check()
        if tasks:
            await self.parked.refresh()
        for rank in self.parked.ranks(queues, tasks):
            # Ready jobs of a higher priority come first.
            if rank < max(Priority):
                wanted = limit - len(claimed)
                _, most_bytes = await self._claim_round(claim, queues, wanted, most_bytes, rank)
            some = await self.parked.claim(
                rank,
                queues,
                tasks,
                wanted=limit - len(claimed),
                most_bytes=most_bytes,
                claim=claim_parked,
            )
            claimed += some
            most_bytes -= sum(map(job_bytes, some))
        for _ in range(ROUNDS):
            wanted, most_bytes = await self._claim_round(
                claim, queues, limit - len(claimed), most_bytes
            )
            if wanted or len(claimed) == limit:
                break
        return claimed

    # --- Workers: those of a namespace are in one shard

    async def beat(self, worker: WorkerInfo) -> None:
        subject = f"{self.layout.prefix}.w.{subject_part(worker.name)}"
        if worker.gone_after_ms <= 0:
            await self.stream.purge(subject)
            return
        # In whole seconds, so it may expire a little late; `workers` leaves it out by then.
        ttl_s = worker.gone_after_ms // 1000 + 1
        step = Step(subject, f"Nats-TTL: {ttl_s}s\r\n", msgspec.json.encode(worker))
        await self.room.store(step)

    async def workers(self, now_ms: int) -> list[WorkerInfo]:
        found = await self.stream.all_of(f"{self.layout.prefix}.w.*")
        return alive([body for _, _, body in found], now_ms)

    async def _claim_round(
        self,
        claim: Callable[[Sequence[ReadyMessage]], Coroutine[Any, Any, None]],
        queues: list[str],
        wanted: int,
        most_bytes: int,
        above: int = ALL,
    ) -> tuple[int, int]:
        """Take up to `wanted` ready messages with a priority above this one and claim their jobs,
        one batch while the next one comes; returns how many messages and bytes are still wanted."""
        async with bounded_tasks(PARALLEL) as start:
            while wanted and most_bytes > 0:
                portion = min(wanted, BATCH)
                messages = await self.delivery.take(queues, portion, most_bytes, above)
                if messages:
                    await start(claim(messages))
                wanted -= len(messages)
                most_bytes -= sum(map(message_bytes, messages))
                if len(messages) < portion:
                    break
        return wanted, most_bytes
