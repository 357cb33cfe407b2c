"""The scheduler: fires each schedule's ticks, on every node, without a leader.

Each node looks at all schedules and fires what is due. The store takes only the first: `fire`
compares the schedule with what the node saw, adds the tick's job and moves the schedule on in one
step. A tick is fired a little before its time, so that its job is in a wheel when it is due; one
that must not overlap the tick before is fired at its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import BadSchedule
from tickwheel.job import Job
from tickwheel.notes import schedules_of
from tickwheel.schedule import (
    UNREADABLE,
    Overlap,
    Plan,
    Rule,
    Schedule,
    ahead_of,
    correction,
    heed_overlap,
    next_tick,
    plan,
    read_rule,
)
from tickwheel.span import moment
from tickwheel.store import Store, WorkerInfo
from tickwheel.tasks import Tasks

log = logging.getLogger("tickwheel")

# Schedules that others made or changed are seen after this long at the latest.
REFRESH_MS = 5_000
# The code's own schedules are compared with the store's again this often.
RECONCILE_MS = 60_000
# Schedules that are planned and fired at the same time: others get their turn in between.
AT_ONCE = 500
# How often a worker looks whether the others know of it.
KNOWN_S = 0.02


class Scheduler:
    """Fires ticks until it is cancelled."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        clock: StoreClock,
        contact: Contact,
        declared: Mapping[str, Rule],
        *,
        worker: str | None = None,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._contact = contact
        self._declared = declared
        # Whose scheduler it is, as the store knows it.
        self._worker = worker
        # What was read, by the schedule's name: the rule's text, and the rule where it is one.
        self._rules: dict[str, tuple[str, Rule | None]] = {}
        # Schedules whose next tick was found right: at which fence, and when.
        self._right: dict[str, tuple[int, int]] = {}
        # Schedules that no live worker declared at the last comparison.
        self._orphans: frozenset[str] = frozenset()

    @property
    def declared(self) -> tuple[str, ...]:
        """The names of the schedules that the code has."""
        return tuple(sorted(self._declared))

    async def run(self) -> None:
        await self._contact.insist(self._until_known, while_=lambda: True)
        await self._contact.insist(self._reconcile, while_=lambda: True)
        reconcile_ms = self._clock.now_ms() + RECONCILE_MS
        while True:
            schedules = await self._fire_due(await self._look())
            await asyncio.sleep(self._pause_ms(schedules) / 1000)
            if self._clock.now_ms() >= reconcile_ms:
                await self._contact.insist(self._reconcile_again, while_=lambda: True)
                reconcile_ms = self._clock.now_ms() + RECONCILE_MS

    async def _look(self) -> list[Schedule]:
        """All schedules that this release can read."""
        found = await self._contact.insist(lambda: schedules_of(self._store), while_=lambda: True)
        self._rules = {each.name: self._read(each) for each in found or ()}
        self._right = {name: self._right[name] for name in self._right if name in self._rules}
        return [each for each in found or () if self._rules[each.name][1] is not None]

    def _read(self, schedule: Schedule) -> tuple[str, Rule | None]:
        """Another release may have written it, or it is broken: the others must not suffer."""
        known = self._rules.get(schedule.name)
        if known is not None and known[0] == schedule.rule:
            return known
        try:
            return schedule.rule, read_rule(schedule.rule)
        except BadSchedule as error:
            return self._unreadable(schedule, error)

    def _unreadable(self, schedule: Schedule, error: Exception) -> tuple[str, None]:
        log.error("schedule %s does not tick: %s", schedule.name, error)
        return schedule.rule, None

    def _pause_ms(self, schedules: Sequence[Schedule]) -> int:
        """How long there is nothing to do."""
        now_ms = self._clock.now_ms()
        first_ms = now_ms + REFRESH_MS
        for each in schedules:
            # The rule is looked at only where it matters.
            if (
                each.next_ms is None
                or each.paused
                or each.next_ms >= first_ms + self._store.ahead_ms
            ):
                continue
            rule = self._rules[each.name][1]
            if rule is not None:
                first_ms = min(first_ms, each.next_ms - ahead_of(rule, self._store.ahead_ms))
        return max(first_ms - now_ms, 1)

    # --- Ticks

    async def _fire_due(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        """Fire what is due, many at the same time. Gives the schedules with the next ticks that
        they have now; one that somebody else has moved on is due still, and is read again."""
        moved: list[Schedule] = []
        for start in range(0, len(schedules), AT_ONCE):
            some = schedules[start : start + AT_ONCE]
            plans = dict(self._plans(some))
            if plans:
                fired = await self._fire_all([each for each in some if each.name in plans], plans)
                some = [fired.get(each.name, each) for each in some]
            moved += some
        return moved

    def _plans(self, schedules: Iterable[Schedule]) -> Iterator[tuple[str, Plan]]:
        for schedule in schedules:
            try:
                due = self._plan(schedule)
            except UNREADABLE as error:
                self._rules[schedule.name] = self._unreadable(schedule, error)
                continue
            if due is not None:
                yield schedule.name, due

    def _plan(self, schedule: Schedule) -> Plan | None:
        now_ms, ahead_ms = self._clock.now_ms(), self._store.ahead_ms
        due = plan(schedule, now_ms, ahead_ms)
        if due is not None:
            if due.missed:
                log.warning("schedule %s: %d missed ticks are left out", schedule.name, due.missed)
            if due.merged:
                words = "schedule %s: %d ticks are left out, a later one was due together with them"
                log.info(words, schedule.name, due.merged)
            return due
        return self._corrected(schedule, now_ms, ahead_ms)

    def _corrected(self, schedule: Schedule, now_ms: int, ahead_ms: int) -> Plan | None:
        """What once was right stays so until it changes, or the clock is set back."""
        rule = self._rules[schedule.name][1]
        fence, since_ms = self._right.get(schedule.name, (None, 0))
        if rule is None or (fence == schedule.fence and since_ms <= now_ms):
            return None
        right = correction(schedule, rule, now_ms, ahead_ms)
        if right is None:
            self._right[schedule.name] = (schedule.fence, now_ms)
            return None
        log.warning(
            "schedule %s: its next tick was %s, which its rule does not give: a clock was wrong; "
            "it goes on with %s",
            *(schedule.name, _told(schedule.next_ms), _told(right.next_ms)),
        )
        return right

    async def _fire_all(
        self, schedules: Sequence[Schedule], plans: Mapping[str, Plan]
    ) -> dict[str, Schedule]:
        """Those that we have moved on, by name."""
        plans = await self._heed_overlaps(schedules, plans)
        moved: dict[str, Schedule] = {}

        async def fire(schedule: Schedule) -> None:
            due = plans[schedule.name]
            try:
                fired = await self._contact.insist(
                    lambda: self._store.fire(schedule, due.jobs, next_ms=due.next_ms),
                    while_=lambda: True,
                )
            except Exception as error:
                # The store will never take it: its trouble alone.
                self._rules[schedule.name] = self._unreadable(schedule, error)
                return
            if fired:
                moved[schedule.name] = msgspec.structs.replace(schedule, next_ms=due.next_ms)

        if len(schedules) == 1:
            await fire(schedules[0])
        else:
            async with asyncio.TaskGroup() as group:
                for each in schedules:
                    group.create_task(fire(each))
        return moved

    async def _heed_overlaps(
        self, schedules: Sequence[Schedule], plans: Mapping[str, Plan]
    ) -> dict[str, Plan]:
        """Let the jobs of the ticks before have their way, as the rules say."""
        found = dict(plans)
        last = await self._last_jobs(schedules, plans)
        for schedule in schedules:
            rule, job = self._rules[schedule.name][1], last.get(schedule.last_id or "")
            if rule is None or job is None:
                continue
            due = heed_overlap(plans[schedule.name], rule.overlap, job)
            if len(due.jobs) < len(plans[schedule.name].jobs):
                words = "schedule %s: a tick is left out, %s has not ended"
                log.info(words, schedule.name, job.id)
            found[schedule.name] = due
        cancelled = [due.cancel for due in found.values() if due.cancel is not None]
        if cancelled:
            await self._contact.insist(
                lambda: self._store.cancel(cancelled, now_ms=self._clock.now_ms()),
                while_=lambda: True,
            )
        return found

    async def _last_jobs(
        self, schedules: Sequence[Schedule], plans: Mapping[str, Plan]
    ) -> dict[str, Job]:
        """The jobs of the last ticks, where they matter, by id."""
        ids = [
            each.last_id
            for each in schedules
            if each.last_id is not None
            and plans[each.name].jobs
            and (rule := self._rules[each.name][1]) is not None
            and rule.overlap is not Overlap.ALLOW
        ]
        if not ids:
            return {}
        found = await self._contact.insist(lambda: self._store.get(ids), while_=lambda: True)
        return {job.id: job for job in found or () if job is not None}

    # --- The code's own schedules

    async def _until_known(self) -> None:
        """Whoever deletes schedules spares those of workers that are known. So be known first."""
        while self._worker is not None:
            workers = await self._store.workers(now_ms=self._clock.now_ms())
            if any(each.name == self._worker for each in workers):
                return
            await asyncio.sleep(KNOWN_S)

    async def _reconcile(self) -> None:
        """At the start: make the store's schedules what the code says, and say what changed."""
        stored = {each.name: each for each in await schedules_of(self._store)}
        for name, rule in self._declared.items():
            await self._declare(name, rule, stored.get(name))
        # After the schedules: who made one of them was known before.
        workers = await self._store.workers(now_ms=self._clock.now_ms())
        self._orphans = self._orphaned(stored.values(), workers)
        if all(each.name == self._worker for each in workers):
            # Nobody else is there, so no deploy is under way in which somebody comes back.
            await self._forget([stored[name] for name in self._orphans])

    async def _reconcile_again(self) -> None:
        """While we run: what nobody declares for a while is gone from the code, and of those who
        declare the same schedule differently the youngest is right."""
        stored = {each.name: each for each in await schedules_of(self._store)}
        workers = await self._store.workers(now_ms=self._clock.now_ms())
        for name in _youngest_of(self._worker, workers, self._declared):
            if name in stored and _from_code(stored[name]):
                await self._declare(name, self._declared[name], stored[name])
        orphans = self._orphaned(stored.values(), workers)
        await self._forget([stored[name] for name in orphans & self._orphans])
        self._orphans = orphans

    def _orphaned(
        self, stored: Iterable[Schedule], workers: Iterable[WorkerInfo]
    ) -> frozenset[str]:
        """Schedules of this app's code that no live worker declares. One that runs a task of
        another app is another app's, and one that we can't read may be anybody's."""
        declared = {*self._declared, *_declared_by(workers)}
        ours = {task.name for task in self._tasks.all()}
        return frozenset(
            each.name
            for each in stored
            if each.name not in declared and (rule := _from_code(each)) and rule.task in ours
        )

    async def _forget(self, schedules: Sequence[Schedule]) -> None:
        for schedule in schedules:
            await self._store.delete_schedule(schedule.name)
            log.info("schedule %s is no longer in the code: deleted", schedule.name)
        if not schedules:
            return
        # A worker that declares one may have started meanwhile, and have seen it there still.
        declared = _declared_by(await self._store.workers(now_ms=self._clock.now_ms()))
        stored = {each.name for each in await schedules_of(self._store)}
        for schedule in schedules:
            if schedule.name in declared - stored:
                await self._store.put_schedule(schedule)
                log.info("schedule %s is in the code of a new worker: put back", schedule.name)

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


def _declared_by(workers: Iterable[WorkerInfo]) -> set[str]:
    return {name for worker in workers for name in worker.schedules}


def _youngest_of(
    worker: str | None, workers: Sequence[WorkerInfo], names: Iterable[str]
) -> list[str]:
    """Of these names, those that nobody declares who started after this worker."""
    ours = [(each.started_ms, each.name) for each in workers if each.name == worker]
    younger = [each for each in workers if ours and (each.started_ms, each.name) > ours[0]]
    return [name for name in names if ours and name not in _declared_by(younger)]


def _from_code(schedule: Schedule) -> Rule | None:
    """The rule of a schedule that a decorator made; None where it is none, or can't be read."""
    try:
        rule = read_rule(schedule.rule)
    except BadSchedule:
        return None
    return rule if rule.from_code else None


def _told(ms: int | None) -> str:
    return "none" if ms is None else f"{moment(ms):%Y-%m-%d %H:%M:%S}Z"
