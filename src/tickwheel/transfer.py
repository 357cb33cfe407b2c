"""Moving jobs and schedules from one store to another, while workers run on both.

A job is in one place at a time. While the move lasts, the queues of the old store are paused, so
that nobody starts what is about to move. A job is cancelled where it was, added where it goes, with
its counters and history, and then deleted where it was. What is on its way is noted in the old
store first, so that a move that broke off is finished by the next one. A job that a worker has in
hand stays and ends, or comes back to wait and is moved then.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Cancelled, Job, State
from tickwheel.schedule import Rule, Schedule, next_tick
from tickwheel.store import Query, Store

# Kept in the old store as a schedule that never ticks, as every store can keep one.
NOTE = "tickwheel-transfer"
BATCH = 200
# A pause reaches every worker within this; what was being claimed then is claimed.
PAUSE_S = 1.5
# How long a job that was claimed at the last moment may take to be handed back.
ASKED_S = 60.0
LOOK_S = 0.1


@dataclass(slots=True)
class Moved:
    """How far a move has come."""

    jobs: int = 0
    schedules: int = 0
    # Ids that the new store had already: a job of that id is there, and the old one is gone.
    known: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to move, and what stays."""

    waiting: int
    running: int
    schedules: tuple[str, ...]
    # Schedules of that name in the new store, which would be replaced.
    replaced: tuple[str, ...]
    # Jobs that an earlier move left on their way.
    unfinished: int


class _Note(msgspec.Struct):
    """What has to be known to finish a move that broke off."""

    # Jobs on their way: those that are cancelled were cancelled by the move.
    ids: list[str] = msgspec.field(default_factory=list)
    # Queues that the move has paused.
    paused: list[str] = msgspec.field(default_factory=list)


class Transfer:
    """A move between two open stores."""

    def __init__(self, old: Store, new: Store, clock: StoreClock) -> None:
        self._old = old
        self._new = new
        # The old store's time.
        self._clock = clock
        self._note = _Note()
        self.moved = Moved()

    async def plan(self) -> Plan:
        """What a move would do now; nothing is changed."""
        queues = await self._old.queues()
        names = tuple(each.name for each in await self._schedules())
        there = {each.name for each in await self._new.schedules()}
        return Plan(
            waiting=sum(queue.waiting for queue in queues),
            running=sum(queue.running for queue in queues),
            schedules=names,
            replaced=tuple(name for name in names if name in there),
            unfinished=len((await self._noted()).ids),
        )

    async def run(self) -> AsyncIterator[Moved]:
        """Move the schedules, then all that waits; tells after each step how far it has come.

        Ends when a look at the old store finds nothing to move any more.
        """
        self._note = await self._noted()
        await self._hand_over(await self._old.get(self._note.ids))
        while schedules := await self._schedules():
            for schedule in schedules:
                await self._move_schedule(schedule)
                yield self.moved
        await self._pause()
        while jobs := await self._next():
            await self._move(jobs)
            yield self.moved
        await self.resume()
        yield self.moved

    # --- Queues

    async def _pause(self) -> None:
        queues = [queue.name for queue in await self._old.queues() if not queue.paused]
        await self._write(_Note(paused=[*self._note.paused, *queues]))
        for queue in queues:
            await self._old.pause(queue, True)
        if queues:
            await asyncio.sleep(PAUSE_S)

    async def resume(self) -> None:
        """Let the old store's queues go on as before the move."""
        for queue in self._note.paused:
            await self._old.pause(queue, False)
        await self._old.delete_schedule(NOTE)

    # --- Jobs

    async def _next(self) -> list[Job]:
        cursor: str | None = None
        while True:
            page = await self._old.find(Query(state=State.WAITING), cursor=cursor, limit=BATCH)
            cursor = page.cursor
            if page.jobs or cursor is None:
                return page.jobs

    async def _move(self, jobs: Sequence[Job]) -> None:
        ids = [job.id for job in jobs]
        await self._write(_Note(ids, self._note.paused))
        answers = await self._old.cancel(ids, now_ms=self._clock.now_ms())
        by_id = dict(zip(ids, answers, strict=True))
        # Whoever had cancelled some of them a moment before us meant it.
        ours = [id for id in ids if by_id[id] in (Cancelled.CANCELLED, Cancelled.ASKED)]
        await self._write(_Note(ours, self._note.paused))
        await self._until_ended([id for id in ours if by_id[id] is Cancelled.ASKED])
        await self._hand_over(await self._old.get(ours))

    async def _until_ended(self, ids: Sequence[str]) -> None:
        """Jobs that a worker claimed at the last moment are handed back, or they end."""
        for _ in range(int(ASKED_S / LOOK_S)):
            if all(job is None or job.state.ended for job in await self._old.get(ids)):
                return
            await asyncio.sleep(LOOK_S)
        raise StoreUnavailable(
            f"{len(ids)} jobs were asked to stop and go on running; the same command goes on"
        )

    async def _hand_over(self, jobs: Sequence[Job | None]) -> None:
        """Jobs that were cancelled for the move: from here on they can only be in the new store."""
        cancelled = [job for job in jobs if job is not None and job.state is State.CANCELLED]
        added = await self._new.add(cancelled)
        await self._old.delete([job.id for job in cancelled])
        self.moved.jobs += sum(added)
        self.moved.known += len(added) - sum(added)

    # --- Schedules

    async def _schedules(self) -> list[Schedule]:
        return [each for each in await self._old.schedules() if each.name != NOTE]

    async def _move_schedule(self, schedule: Schedule) -> None:
        """It ticks no more here before it ticks there, so no tick is fired twice.

        Should we break off in between, it has no next tick here: the next move finds a new one.
        """
        if schedule.next_ms is None:
            next_ms = next_tick(Rule.decode(schedule.rule), self._clock.now_ms())
        elif await self._old.fire(schedule, [], next_ms=None):
            next_ms = schedule.next_ms
        else:
            return  # it was fired or changed a moment ago: the next look has it
        await self._new.put_schedule(msgspec.structs.replace(schedule, fence=0, next_ms=next_ms))
        await self._old.delete_schedule(schedule.name)
        self.moved.schedules += 1

    # --- The note

    async def _write(self, note: _Note) -> None:
        self._note = note
        text = msgspec.json.encode(note).decode()
        await self._old.put_schedule(Schedule(name=NOTE, rule=text, next_ms=None, paused=True))

    async def _noted(self) -> _Note:
        for schedule in await self._old.schedules():
            if schedule.name == NOTE:
                return msgspec.json.decode(schedule.rule, type=_Note)
        return _Note()
