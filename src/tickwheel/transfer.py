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
from tickwheel.errors import BadSchedule, StoreUnavailable
from tickwheel.job import Cancelled, Job, State
from tickwheel.notes import NOTE, Note, note_of, schedules_of
from tickwheel.schedule import MOVING_MS, Schedule, next_tick, read_rule
from tickwheel.store import Query, Store

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
    # Schedules that this release can't read: they stay.
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to move, and what stays."""

    waiting: int
    running: int
    schedules: tuple[str, ...]
    # Schedules of that name in the new store, which would be replaced.
    replaced: tuple[str, ...]
    # Schedules that this release can't read, which stay.
    unreadable: tuple[str, ...]
    # Jobs that an earlier move left on their way.
    unfinished: int


class Transfer:
    """A move between two open stores."""

    def __init__(self, old: Store, new: Store, clock: StoreClock) -> None:
        self._old = old
        self._new = new
        # The old store's time.
        self._clock = clock
        self._note = Note()
        self.moved = Moved()

    async def plan(self) -> Plan:
        """What a move would do now; nothing is changed."""
        queues = await self._old.queues()
        readable, unreadable = _sorted_out(await schedules_of(self._old))
        names = tuple(each.name for each in readable)
        there = {each.name for each in await schedules_of(self._new)}
        return Plan(
            waiting=sum(queue.waiting for queue in queues),
            running=sum(queue.running for queue in queues),
            schedules=names,
            replaced=tuple(name for name in names if name in there),
            unreadable=tuple(each.name for each in unreadable),
            unfinished=len((await note_of(self._old) or Note()).ids),
        )

    async def run(self) -> AsyncIterator[Moved]:
        """Move the schedules, then all that waits; tells after each step how far it has come.

        Ends when a look at the old store finds nothing to move any more.
        """
        self._note = await note_of(self._old) or Note()
        await self._hand_over(await self._old.get(self._note.ids))
        while schedules := await self._movable():
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
        await self._write(Note(paused=[*self._note.paused, *queues]))
        for queue in queues:
            await self._old.pause(queue, True)
        await self._keep_paused()
        if queues:
            await asyncio.sleep(PAUSE_S)

    async def _keep_paused(self) -> None:
        """What an operator paused in the old store stays paused in the new one."""
        for queue in await self._old.queues():
            if queue.paused and queue.name not in self._note.paused:
                await self._new.pause(queue.name, True)

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
        await self._write(Note(ids, self._note.paused))
        answers = await self._old.cancel(ids, now_ms=self._clock.now_ms())
        by_id = dict(zip(ids, answers, strict=True))
        # Whoever had cancelled some of them a moment before us meant it.
        ours = [id for id in ids if by_id[id] in (Cancelled.CANCELLED, Cancelled.ASKED)]
        await self._write(Note(ours, self._note.paused))
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

    async def _movable(self) -> list[Schedule]:
        readable, unreadable = _sorted_out(await schedules_of(self._old))
        self.moved.unreadable = len(unreadable)
        return readable

    async def _move_schedule(self, schedule: Schedule) -> None:
        """It ticks no more here before it ticks there, so no tick is fired twice.

        Should we break off in between, it is marked as on its way, and ticks nowhere until the next
        move finds a new tick for it.
        """
        if schedule.next_ms in (None, MOVING_MS):
            next_ms = next_tick(read_rule(schedule.rule), self._clock.now_ms())
        elif await self._old.fire(schedule, [], next_ms=MOVING_MS):
            next_ms = schedule.next_ms
        else:
            return  # it was fired or changed a moment ago: the next look has it
        await self._new.put_schedule(msgspec.structs.replace(schedule, fence=0, next_ms=next_ms))
        await self._old.delete_schedule(schedule.name)
        self.moved.schedules += 1

    # --- The note

    async def _write(self, note: Note) -> None:
        self._note = note
        text = msgspec.json.encode(note).decode()
        await self._old.put_schedule(Schedule(name=NOTE, rule=text, next_ms=None, paused=True))


def _sorted_out(schedules: Sequence[Schedule]) -> tuple[list[Schedule], list[Schedule]]:
    """The schedules that this release can read, and those that it can't."""
    readable, unreadable = [], []
    for schedule in schedules:
        try:
            read_rule(schedule.rule)
        except BadSchedule:
            unreadable.append(schedule)
        else:
            readable.append(schedule)
    return readable, unreadable
