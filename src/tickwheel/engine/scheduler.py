"""The loop that fires the ticks of all schedules, on every node, without a leader.

Each node reads all schedules and fires what is due. The store accepts only the first: `fire`
compares the schedule with what the node read, adds the tick's job and advances the schedule in one
step. A tick is fired a little before its time, so that its job is in a wheel when it is due; a tick
that must not overlap the previous one is fired at its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from tickwheel.clock import StoreClock
from tickwheel.duration import moment_text
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.errors import BadSchedule
from tickwheel.job import Job
from tickwheel.notes import schedules_of
from tickwheel.registry import Registry
from tickwheel.schedule import (
    UNREADABLE,
    FirePlan,
    Overlap,
    Rule,
    Schedule,
    ahead_of,
    correction,
    next_tick,
    plan,
    read_rule,
    with_overlap,
)
from tickwheel.store import Store, WorkerInfo

log = logging.getLogger("tickwheel")

# Schedules that others added or changed are seen after this long at the latest.
REFRESH_MS = 5_000
# How often the code's own schedules are compared with the store's.
RECONCILE_MS = 60_000
# How many schedules are planned and fired together; other work gets a turn in between.
AT_ONCE = 500
# How often a worker checks whether the others know of it.
KNOWN_S = 0.02
# How often a schedule is declared again at once because others changed it.
TRIES = 20

# Schedules that running workers declare: their apps and names.
Held: TypeAlias = frozenset[tuple[str | None, str]]


class Scheduler:
    """Fires ticks until it is cancelled."""

    def __init__(
        self,
        store: Store,
        tasks: Registry,
        clock: StoreClock,
        reconnecting: Reconnecting,
        declared: Mapping[str, Rule],
        *,
        app: str | None = None,
        worker: str | None = None,
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._reconnecting = reconnecting
        self._declared = declared
        self.app = app
        # The worker's name in the store.
        self._worker = worker
        # What was read, by the schedule's name: the rule's text, and the rule if it can be read.
        self._rules: dict[str, tuple[str, Rule | None]] = {}
        # Schedules whose next tick was checked: at which fence, and when.
        self._checked: dict[str, tuple[int, int]] = {}
        # Schedules that no running worker declared at the last comparison.
        self._orphans: frozenset[str] = frozenset()
        # What running workers declared at the last comparison.
        self._held: Held = frozenset()

    @property
    def declared(self) -> tuple[str, ...]:
        """The names of the schedules in the code."""
        return tuple(sorted(self._declared))

    async def run(self) -> None:
        await self._reconnecting.forever(self._until_known)
        await self._reconnecting.forever(self._reconcile)
        reconcile_ms = self._clock.now_ms() + RECONCILE_MS
        while True:
            schedules = await self._fire_due(await self._read_all())
            await asyncio.sleep(self._pause_ms(schedules) / 1000)
            if self._clock.now_ms() >= reconcile_ms:
                await self._reconnecting.forever(self._reconcile_again)
                reconcile_ms = self._clock.now_ms() + RECONCILE_MS

    async def _read_all(self) -> list[Schedule]:
        """All schedules that this release can read."""
        found = await self._reconnecting.forever(lambda: schedules_of(self._store))
        self._rules = {each.name: self._read(each) for each in found}
        self._checked = {name: self._checked[name] for name in self._checked if name in self._rules}
        return [each for each in found if self._rules[each.name][1] is not None]

    def _read(self, schedule: Schedule) -> tuple[str, Rule | None]:
        """Another release may have written it, or it is broken: that must not affect the others."""
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
        """How long until there is something to do."""
        now_ms = self._clock.now_ms()
        first_ms = now_ms + REFRESH_MS
        for each in schedules:
            # The rule is read only if it matters.
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
        """Fire what is due, many at the same time. Returns the schedules with their new next ticks;
        one that another node advanced is still due here, and is read again."""
        moved: list[Schedule] = []
        for start in range(0, len(schedules), AT_ONCE):
            some = schedules[start : start + AT_ONCE]
            plans = dict(self._plans(some))
            if plans:
                fired = await self._fire_all([each for each in some if each.name in plans], plans)
                some = [fired.get(each.name, each) for each in some]
            moved += some
        return moved

    def _plans(self, schedules: Iterable[Schedule]) -> Iterator[tuple[str, FirePlan]]:
        for schedule in schedules:
            try:
                due = self._plan(schedule)
            except UNREADABLE as error:
                self._rules[schedule.name] = self._unreadable(schedule, error)
                continue
            if due is not None:
                yield schedule.name, due

    def _plan(self, schedule: Schedule) -> FirePlan | None:
        now_ms, ahead_ms = self._clock.now_ms(), self._store.ahead_ms
        due = plan(schedule, now_ms, ahead_ms)
        if due is not None:
            if due.missed:
                log.warning("schedule %s: missed ticks skipped: %d", schedule.name, due.missed)
            if due.merged:
                words = "schedule %s: ticks skipped, because a later one was due as well: %d"
                log.info(words, schedule.name, due.merged)
            return due
        return self._corrected(schedule, now_ms, ahead_ms)

    def _corrected(self, schedule: Schedule, now_ms: int, ahead_ms: int) -> FirePlan | None:
        """A tick that was right stays right until it changes, or the clock is set back."""
        rule = self._rules[schedule.name][1]
        fence, since_ms = self._checked.get(schedule.name, (None, 0))
        if rule is None or (fence == schedule.fence and since_ms <= now_ms):
            return None
        right = correction(schedule, rule, now_ms, ahead_ms)
        if right is None:
            self._checked[schedule.name] = (schedule.fence, now_ms)
            return None
        log.warning(
            "schedule %s: its next tick was %s, which does not match its rule (a clock was wrong); "
            "corrected to %s",
            *(schedule.name, moment_text(schedule.next_ms), moment_text(right.next_ms)),
        )
        return right

    async def _fire_all(
        self, schedules: Sequence[Schedule], plans: Mapping[str, FirePlan]
    ) -> dict[str, Schedule]:
        """The schedules that we advanced, by name."""
        plans = await self._apply_overlaps(schedules, plans)
        moved: dict[str, Schedule] = {}

        async def fire(schedule: Schedule) -> None:
            due = plans[schedule.name]
            jobs = [self._expiring(job) for job in due.jobs]
            try:
                fired = await self._reconnecting.forever(
                    lambda: self._store.fire(schedule, jobs, next_ms=due.next_ms)
                )
            except Exception as error:
                # The store will never accept it: that affects only this schedule.
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

    def _expiring(self, job: Job) -> Job:
        """The job of a tick, with the expiry that its task gives it."""
        task = self._tasks.find(job.task)
        if task is None or task.expires_ms is None:
            return job
        return msgspec.structs.replace(job, expires_ms=job.due_ms + task.expires_ms)

    async def _apply_overlaps(
        self, schedules: Sequence[Schedule], plans: Mapping[str, FirePlan]
    ) -> dict[str, FirePlan]:
        """Apply the overlap rules against the jobs of the previous ticks."""
        found = dict(plans)
        last = await self._last_jobs(schedules, plans)
        for schedule in schedules:
            rule, job = self._rules[schedule.name][1], last.get(schedule.last_id or "")
            if rule is None or job is None:
                continue
            due = with_overlap(plans[schedule.name], rule.overlap, job)
            if len(due.jobs) < len(plans[schedule.name].jobs):
                words = "schedule %s: skipped a tick, because %s has not ended"
                log.info(words, schedule.name, job.id)
            found[schedule.name] = due
        cancelled = [due.cancel for due in found.values() if due.cancel is not None]
        if cancelled:
            await self._reconnecting.forever(
                lambda: self._store.cancel(cancelled, now_ms=self._clock.now_ms())
            )
        return found

    async def _last_jobs(
        self, schedules: Sequence[Schedule], plans: Mapping[str, FirePlan]
    ) -> dict[str, Job]:
        """The jobs of the last ticks, if they matter, by id."""
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
        found = await self._reconnecting.forever(lambda: self._store.get(ids))
        return {job.id: job for job in found if job is not None}

    # --- The code's own schedules

    async def _until_known(self) -> None:
        """Wait until the store lists this worker: others then spare the schedules that it
        declares."""
        while self._worker is not None:
            workers = await self._store.workers(now_ms=self._clock.now_ms())
            if any(each.name == self._worker for each in workers):
                return
            await asyncio.sleep(KNOWN_S)

    async def _reconcile(self) -> None:
        """At the start: make the store's schedules match the code, and log what changed."""
        stored = {each.name: each for each in await schedules_of(self._store)}
        # Read after the schedules: a worker that declared one of them is listed by now.
        workers = await self._store.workers(now_ms=self._clock.now_ms())
        for name, rule in self._declared.items():
            await self._declare(name, rule, stored.get(name))
            if next_tick(rule, self._clock.now_ms()) is None:
                # Not refused: code must not fail to start because time has passed.
                log.warning("schedule %s has no more ticks: its end= has passed", name)
        self._held = _held_by(workers)
        self._orphans = self._orphaned(stored.values(), workers)
        if not any(each.name != self._worker and each.app in (None, self.app) for each in workers):
            # No other worker of this app is running, so there is no deploy in which an old one may
            # return. Where even the task is unknown, an app of the same name may have declared it.
            await self._forget(
                [stored[name] for name in self._orphans if self._knows(stored[name])]
            )

    async def _reconcile_again(self) -> None:
        """While we run: a schedule that no worker declares for a while is gone from the code; one
        that no worker of its app does belongs to the app that declares it; and if workers declare
        a schedule differently the youngest is right."""
        stored = {each.name: each for each in await schedules_of(self._store)}
        workers = await self._store.workers(now_ms=self._clock.now_ms())
        held = _held_by(workers)
        for name in _youngest_of(self._worker, workers, self._declared):
            if name in stored and _from_code(stored[name]):
                await self._declare(name, self._declared[name], stored[name], held | self._held)
        self._held = held
        orphans = self._orphaned(stored.values(), workers)
        await self._forget([stored[name] for name in orphans & self._orphans])
        self._orphans = orphans

    def _orphaned(
        self, stored: Iterable[Schedule], workers: Iterable[WorkerInfo]
    ) -> frozenset[str]:
        """Schedules of this app's code that no running worker declares. One that we can't read may
        belong to any app."""
        declared = {*self._declared, *_declared_by(workers)}
        return frozenset(
            each.name
            for each in stored
            if each.name not in declared and (rule := _from_code(each)) and self._ours(rule)
        )

    def _ours(self, rule: Rule) -> bool:
        """Whether our code declared it. An older release didn't say which app did; then it belongs
        to one that knows its task."""
        return rule.task in self._tasks.names if rule.app is None else rule.app == self.app

    def _knows(self, schedule: Schedule) -> bool:
        rule = _from_code(schedule)
        return rule is not None and rule.task in self._tasks.names

    async def _forget(self, schedules: Sequence[Schedule]) -> None:
        for schedule in schedules:
            await self._store.delete_schedule(schedule.name)
            words = "schedule %s is no longer in the code of %s; deleted"
            log.info(words, schedule.name, self.app or "this app")
        if not schedules:
            return
        # A worker that declares one may have started in the meantime, and still have seen it.
        declared = _declared_by(await self._store.workers(now_ms=self._clock.now_ms()))
        stored = {each.name for each in await schedules_of(self._store)}
        for schedule in schedules:
            if schedule.name in declared - stored:
                await self._store.put_schedule(schedule)
                log.info("schedule %s is in the code of a new worker; restored", schedule.name)

    async def _declare(
        self, name: str, rule: Rule, stored: Schedule | None, held: Held | None = None
    ) -> None:
        """Make the store's schedule match the code. One that another app declares is left to that
        app; without `held`, it is too early to tell which apps are gone."""
        for _ in range(TRIES):
            if stored is not None and stored.rule == rule.encode():
                return
            before = _from_code(stored) if stored is not None else None
            owner = before.app if before is not None else None
            if owner not in (None, rule.app) and (held is None or (owner, name) in held):
                words = "schedule %s is also declared by the app %s, which keeps it; "
                log.error(words + "give one of them another name=…", name, owner)
                return
            fresh = self._fresh(name, rule, stored, before)
            if stored is None:
                await self._store.put_schedule(fresh)
                log.info("schedule %s is new", name)
                return
            if await self._store.replace_schedule(fresh):
                # One that was put at run time is gone by this; perhaps another app put it.
                level = logging.WARNING if before is None else logging.INFO
                log.log(level, "schedule %s is changed to match the code", name)
                return
            # It was fired, or an operator changed it: that must not be undone.
            found = await schedules_of(self._store)
            stored = next((each for each in found if each.name == name), None)

    def _fresh(
        self, name: str, rule: Rule, stored: Schedule | None, before: Rule | None
    ) -> Schedule:
        next_ms = next_tick(rule, self._clock.now_ms())
        if stored is None:
            return Schedule(name=name, rule=rule.encode(), next_ms=next_ms)
        if before is not None and msgspec.structs.replace(before, app=rule.app) == rule:
            # Only the owner is new: a tick that was missed is still to be fired.
            next_ms = stored.next_ms
        # A schedule that an operator paused stays paused.
        return msgspec.structs.replace(stored, rule=rule.encode(), next_ms=next_ms)


def _declared_by(workers: Iterable[WorkerInfo]) -> set[str]:
    return {name for worker in workers for name in worker.schedules}


def _held_by(workers: Iterable[WorkerInfo]) -> Held:
    return frozenset((each.app, name) for each in workers for name in each.schedules)


def _youngest_of(
    worker: str | None, workers: Sequence[WorkerInfo], names: Iterable[str]
) -> list[str]:
    """Those of these names that no worker declares which started after this one."""
    ours = [(each.started_ms, each.name) for each in workers if each.name == worker]
    younger = [each for each in workers if ours and (each.started_ms, each.name) > ours[0]]
    return [name for name in names if ours and name not in _declared_by(younger)]


def _from_code(schedule: Schedule) -> Rule | None:
    """The rule of a schedule that a decorator made; None for others and unreadable ones."""
    try:
        rule = read_rule(schedule.rule)
    except BadSchedule:
        return None
    return rule if rule.from_code else None
