"""The scheduler: fires each schedule's ticks, on every node, without a leader.

Each node looks at all schedules and fires what is due. The store takes only the first: `fire`
compares the schedule with what the node saw, adds the tick's job and moves the schedule on in one
step. A tick is fired a little before its time, so that its job is in a wheel when it is due.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import BadSchedule
from tickwheel.schedule import Overlap, Plan, Rule, Schedule, next_tick, plan
from tickwheel.store import Store
from tickwheel.tasks import Tasks

log = logging.getLogger("tickwheel")

# Schedules that others made or changed are seen after this long at the latest.
REFRESH_MS = 5_000


class Scheduler:
    """Fires ticks until it is cancelled."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        clock: StoreClock,
        contact: Contact,
        declared: Mapping[str, Rule],
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._contact = contact
        self._declared = declared

    async def run(self) -> None:
        await self._contact.insist(self._reconcile, while_=lambda: True)
        while True:
            schedules = await self._contact.insist(self._store.schedules, while_=lambda: True)
            fired = [await self._fire_if_due(each) for each in schedules or ()]
            # What has fired has a new next tick, which has to be read before we know when to wake.
            if not any(fired):
                await asyncio.sleep(self._pause_ms(schedules or []) / 1000)

    def _pause_ms(self, schedules: list[Schedule]) -> int:
        now_ms = self._clock.now_ms()
        coming = [
            each.next_ms - self._store.ahead_ms - now_ms
            for each in schedules
            if each.next_ms is not None and not each.paused
        ]
        return max(min([*coming, REFRESH_MS]), 1)

    # --- One schedule

    async def _fire_if_due(self, schedule: Schedule) -> bool:
        due = self._plan(schedule)
        if due is None:
            return False
        if due.missed:
            log.warning("schedule %s: %d missed ticks are left out", schedule.name, due.missed)
        await self._contact.insist(lambda: self._fire(schedule, due), while_=lambda: True)
        return True

    async def _fire(self, schedule: Schedule, due: Plan) -> None:
        due = await self._heed_overlap(schedule, due)
        await self._store.fire(schedule, due.jobs, next_ms=due.next_ms)

    def _plan(self, schedule: Schedule) -> Plan | None:
        try:
            return plan(schedule, self._clock.now_ms(), self._store.ahead_ms)
        except (BadSchedule, msgspec.MsgspecError) as error:
            # Another release may have written it; the others must not suffer.
            log.error("schedule %s can't be read: %s", schedule.name, error)
            return None

    async def _heed_overlap(self, schedule: Schedule, due: Plan) -> Plan:
        """Let the job of the tick before have its way, as the rule says."""
        overlap = Rule.decode(schedule.rule).overlap
        if overlap is Overlap.ALLOW or schedule.last_id is None or not due.jobs:
            return due
        [last] = await self._store.get([schedule.last_id])
        if last is None or last.state.ended:
            return due
        if overlap is Overlap.SKIP:
            log.info("schedule %s: a tick is left out, %s has not ended", schedule.name, last.id)
            return Plan([], due.next_ms, due.missed)
        await self._store.cancel([last.id], now_ms=self._clock.now_ms())
        return due

    # --- The code's own schedules

    async def _reconcile(self) -> None:
        """Make the store's schedules what the code says, and say what changed."""
        stored = {each.name: each for each in await self._store.schedules()}
        for name, rule in self._declared.items():
            await self._declare(name, rule, stored.get(name))
        for name, schedule in stored.items():
            rule = Rule.decode(schedule.rule)
            ours = any(task.name == rule.task for task in self._tasks.all())
            # One that runs a task of another app is another app's.
            if rule.from_code and ours and name not in self._declared:
                await self._store.delete_schedule(name)
                log.info("schedule %s is no longer in the code: deleted", name)

    async def _declare(self, name: str, rule: Rule, stored: Schedule | None) -> None:
        if stored is not None and stored.rule == rule.encode():
            return
        next_ms = next_tick(rule, self._clock.now_ms())
        fresh = Schedule(name=name, rule=rule.encode(), next_ms=next_ms)
        if stored is not None:
            # What an operator paused stays paused.
            fresh = msgspec.structs.replace(fresh, paused=stored.paused, last_id=stored.last_id)
        await self._store.put_schedule(fresh)
        log.info("schedule %s is %s", name, "changed as in the code" if stored else "new")
