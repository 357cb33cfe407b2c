"""Schedules in one stream: one message each, moved on in one step with the jobs of a tick."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job, first_by_id
from tickwheel.schedule import Schedule
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.jobs import TRIES, Jobs
from tickwheel.stores.nats.room import Room
from tickwheel.stores.nats.steps import Check, Layout, Step
from tickwheel.stores.nats.stream import BATCH_BYTES, Stream

_replace = msgspec.structs.replace
_as_schedule = msgspec.json.Decoder(Schedule).decode


class Schedules:
    """The schedules of one stream."""

    def __init__(self, stream: Stream, layout: Layout, room: Room, jobs: Jobs) -> None:
        self._stream = stream
        self._layout = layout
        self._room = room
        self._jobs = jobs

    def _subject(self, name: str) -> str:
        return f"{self._layout.prefix}.k.{steps.subject_part(name)}"

    async def put(self, schedule: Schedule) -> Schedule:
        body = msgspec.json.encode(_replace(schedule, fence=0))
        seq = await self._room.store(Step(self._subject(schedule.name), "", body))
        assert seq is not None
        return _replace(schedule, fence=seq)

    async def replace(self, schedule: Schedule) -> bool:
        """Put it in place of the one that was read. False if somebody else has fired, changed or
        deleted that."""
        if schedule.fence == 0:
            return False  # it was never read from this store
        return await self._room.store(self._after(schedule)) is not None

    async def delete(self, name: str) -> bool:
        return bool(await self._stream.purge(self._subject(name)))

    async def all(self) -> list[Schedule]:
        found = await self._stream.all_of(f"{self._layout.prefix}.k.*")
        return [_replace(_as_schedule(body), fence=seq) for _, seq, body in found]

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        """Add the jobs of a tick and move the schedule on, in one step. False if somebody else has
        fired or changed the schedule."""
        if schedule.fence == 0:
            return False  # it was never read from this store
        move = self._move(schedule, jobs, next_ms)
        left = first_by_id(jobs)
        for _ in range(TRIES):
            adds = self._jobs.new(left.values())
            if not self._fit(adds):
                if not await self._is_open(schedule):
                    return False
                left = await self._add_half(left)
            elif await self._store(adds, move):
                return True
            elif not await self._is_open(schedule):
                return False
            else:
                left = await self._without_taken(left)
        raise StoreUnavailable("other processes kept changing this schedule; try again")

    def _move(self, schedule: Schedule, jobs: Sequence[Job], next_ms: int | None) -> Step:
        """The message that moves a schedule on to its next tick, if nobody has changed it."""
        last_id = jobs[-1].id if jobs else schedule.last_id
        return self._after(_replace(schedule, next_ms=next_ms, last_id=last_id))

    def _after(self, schedule: Schedule) -> Step:
        """The message that replaces the schedule that was read with this fence."""
        subject = self._subject(schedule.name)
        check = Check(subject, schedule.fence)
        return Step(subject, check.headers, msgspec.json.encode(_replace(schedule, fence=0)))

    def _fit(self, adds: Sequence[Step]) -> bool:
        """Whether these and the schedule fit into one batch."""
        size = sum(len(each.body) for each in adds)
        return len(adds) < self._stream.batch and size <= BATCH_BYTES

    async def _is_open(self, schedule: Schedule) -> bool:
        """Whether nobody has fired or changed the schedule."""
        found = await self._stream.last_of([self._subject(schedule.name)])
        return any(seq == schedule.fence for _, seq, _ in found)

    async def _add_half(self, jobs: dict[str, Job]) -> dict[str, Job]:
        """Add the first half of these jobs ahead of the tick; returns the others."""
        ids = list(jobs)
        half = len(ids) // 2
        await self._jobs.add([jobs[id] for id in ids[:half]])
        return {id: jobs[id] for id in ids[half:]}

    async def _store(self, adds: list[Step], move: Step) -> bool:
        await self._room.admit([move, *adds])
        # The schedule last: a server that is full may store only the first messages of a batch.
        [seq] = await self._room.add([[*adds, move]])
        return seq is not None

    async def _without_taken(self, jobs: dict[str, Job]) -> dict[str, Job]:
        """Those of these jobs whose id is not taken."""
        taken = await self._stream.read(jobs)
        return {id: job for id, job in jobs.items() if id not in taken}
