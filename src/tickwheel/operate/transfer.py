"""Move jobs and schedules from one store to another while workers run on both.

A job is in one store at a time. During the move the queues of the old store are paused, so that no
worker starts a job that is about to move. Each job is cancelled in the old store, added to the new
one with its counters and history, and then deleted from the old one. Jobs in transit are first
noted in the old store, so that the next move finishes one that was interrupted. A job that a worker
holds stays and ends there, or returns to waiting and is moved then. Records (API keys, the audit
log) stay behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from tickwheel.checks import NOTE
from tickwheel.clock import StoreClock
from tickwheel.errors import BadSchedule, StoreUnavailable
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.notes import Note, note_of, schedules_of
from tickwheel.schedule import MOVING_MS, Schedule, next_tick, unsealed_rule
from tickwheel.store import Query, Store

BATCH = 200
# A pause reaches every worker within this time; a claim under way at that point still succeeds.
PAUSE_S = 1.5
# How long a worker may take to release a job that it claimed at the last moment.
RELEASE_S = 60.0
POLL_S = 0.1


@dataclass(slots=True)
class Moved:
    """A move's progress."""

    jobs: int = 0
    schedules: int = 0
    # Ids that the new store already had: its own job stays, and the old store's is deleted.
    known: int = 0
    # Schedules that this release can't read; they stay.
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What would be moved, and what stays."""

    waiting: int
    running: int
    schedules: tuple[str, ...]
    # Schedules with the same name in the new store, which would be replaced.
    replaced: tuple[str, ...]
    # Schedules that this release can't read, which stay.
    unreadable: tuple[str, ...]
    # Jobs that an interrupted move left in transit.
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

    async def plan(self) -> TransferPlan:
        """What a move would do now; nothing is changed."""
        queues = await self._old.queues()
        readable, unreadable = _sorted_out(await schedules_of(self._old))
        names = tuple(each.name for each in readable)
        there = {each.name for each in await schedules_of(self._new)}
        return TransferPlan(
            waiting=sum(queue.waiting for queue in queues),
            running=sum(queue.running for queue in queues),
            schedules=names,
            replaced=tuple(name for name in names if name in there),
            unreadable=tuple(each.name for each in unreadable),
            unfinished=len((await note_of(self._old) or Note()).ids),
        )

    async def run(self) -> AsyncIterator[Moved]:
        """Move the schedules, then all waiting jobs; yields the progress after each step.

        Ends when nothing is left to move in the old store.
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
        """Queues that an operator paused in the old store stay paused in the new one."""
        for queue in await self._old.queues():
            if queue.paused and queue.name not in self._note.paused:
                await self._new.pause(queue.name, True)

    async def resume(self) -> None:
        """Resume the queues of the old store that this move paused."""
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
        # Jobs that someone else cancelled a moment before us stay cancelled.
        ours = [id for id in ids if by_id[id] in (CancelOutcome.CANCELLED, CancelOutcome.REQUESTED)]
        await self._write(Note(ours, self._note.paused))
        await self._until_ended([id for id in ours if by_id[id] is CancelOutcome.REQUESTED])
        await self._hand_over(await self._old.get(ours))

    async def _until_ended(self, ids: Sequence[str]) -> None:
        """Wait until jobs that were claimed at the last moment are released or end."""
        for _ in range(int(RELEASE_S / POLL_S)):
            if all(job is None or job.state.ended for job in await self._old.get(ids)):
                return
            await asyncio.sleep(POLL_S)
        raise StoreUnavailable(
            f"still waiting for jobs that were asked to stop: {len(ids)}; "
            "run the same command again to continue"
        )

    async def _hand_over(self, jobs: Sequence[Job | None]) -> None:
        """Finish the move of cancelled jobs: from here on they only exist in the new store."""
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
        """Stop its ticks here before they start there, so that no tick fires twice.

        If we are interrupted in between, it stays marked as moving and does not tick until the next
        move computes a new tick for it.
        """
        if schedule.next_ms in (None, MOVING_MS):
            next_ms = next_tick(unsealed_rule(schedule.rule), self._clock.now_ms())
        elif await self._old.fire(schedule, [], next_ms=MOVING_MS):
            next_ms = schedule.next_ms
        else:
            return  # it was fired or changed a moment ago: the next pass sees it
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
            unsealed_rule(schedule.rule)
        except BadSchedule:
            unreadable.append(schedule)
        else:
            readable.append(schedule)
    return readable, unreadable
