"""`app.schedules`: what users do with schedules: list, put, pause, resume, run, delete."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import msgspec

from tickwheel.checks import checked_name, checked_options
from tickwheel.client import Client
from tickwheel.duration import Duration, due_ms, duration_ms, moment, moment_text
from tickwheel.errors import BadArguments, BadSchedule, StoreUnavailable, UnknownSchedule
from tickwheel.notes import refuse_note, schedules_of
from tickwheel.registry import Definition
from tickwheel.schedule import (
    MOVING_MS,
    UNREADABLE,
    Misfire,
    Overlap,
    Rule,
    Schedule,
    job_of,
    next_tick,
    read_rule,
    ticks_of,
)
from tickwheel.store import checked_text
from tickwheel.task import Task

MisfireName = Literal["skip", "one", "all"]
OverlapName = Literal["allow", "skip", "cancel"]

# A parameter of this name receives the tick's nominal time.
TICK = "tick"
# How often a change is tried while others change the same schedule.
TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """A snapshot of a schedule.

    A schedule that this release can't read has a `problem` and no rule; it does not tick.
    """

    name: str
    task: str
    rule: Rule | None
    # In plain words.
    explained: str
    next: datetime | None
    paused: bool
    last_id: str | None
    problem: str | None = None

    @classmethod
    def of(cls, schedule: Schedule) -> ScheduleInfo:
        try:
            rule = read_rule(schedule.rule)
            return cls(
                name=schedule.name,
                task=rule.task,
                rule=rule,
                explained=ticks_of(rule).explain(),
                next=None if schedule.next_ms is None else moment(schedule.next_ms),
                paused=schedule.paused,
                last_id=schedule.last_id,
            )
        except UNREADABLE as error:
            return cls(
                name=schedule.name,
                task="",
                rule=None,
                explained="",
                next=None,
                paused=schedule.paused,
                last_id=schedule.last_id,
                problem=str(error),
            )

    @property
    def moving(self) -> bool:
        """Whether it is being moved to another store, and no longer ticks in this one."""
        return self.next == moment(MOVING_MS)

    def following(self, count: int, *, after: datetime) -> list[datetime]:
        """The next ticks after this time."""
        found: list[datetime] = []
        if self.rule is None:
            return found
        tick_ms: int | None = int(after.timestamp() * 1000)
        while len(found) < count and (tick_ms := next_tick(self.rule, tick_ms or 0)) is not None:
            found.append(moment(tick_ms))
        return found


def make_rule(
    definition: Definition,
    *,
    cron: str | None = None,
    every: Duration | None = None,
    tz: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    arguments: Mapping[str, Any] | None = None,
    misfire: MisfireName = "one",
    misfire_limit: int = 100,
    overlap: OverlapName = "allow",
    spread: Duration = 0,
    from_code: bool = False,
    payload_limit: int,
) -> Rule:
    """A rule for this task, fully checked: raises BadSchedule or BadArguments."""
    for what, text in (("cron", cron), ("tz", tz)):
        if text is not None and not isinstance(text, str):
            raise BadSchedule(f"{what}={text!r}: must be a str")
    if arguments is not None and not isinstance(arguments, Mapping):
        raise BadArguments(f"arguments={arguments!r}: must be a dict, by parameter name")
    given = dict(arguments or {})
    wants_tick = TICK in definition.arguments.single and TICK not in given
    payload = definition.arguments.encode(
        (), given | ({TICK: moment(0)} if wants_tick else {}), limit=payload_limit
    )
    rule = Rule(
        cron=cron,
        every_ms=None if every is None else duration_ms(every),
        tz=tz,
        start_ms=None if start is None else _bound_ms("start", start),
        end_ms=None if end is None else _bound_ms("end", end),
        task=definition.name,
        payload=payload,
        tick_parameter=TICK if wants_tick else None,
        queue=definition.queue,
        priority=definition.priority,
        misfire=_choice(Misfire, "misfire", misfire),
        misfire_limit=_checked_limit(misfire_limit),
        overlap=_choice(Overlap, "overlap", overlap),
        spread_ms=duration_ms(spread),
        from_code=from_code,
    )
    if next_tick(rule, 0) is None:
        raise BadSchedule(
            f"{cron or every!r} never ticks: there is no such day, or it ends before its first tick"
        )
    # What is stored must be readable.
    return read_rule(rule.encode())


def _bound_ms(name: str, at: datetime) -> int:
    ms = due_ms(at, name)
    if not 0 <= ms <= MOVING_MS:
        raise BadSchedule(
            f"{name}={at.isoformat()}: must be in the years 1970 to 9999; "
            f"leave it out for a schedule without {'a' if name == 'start' else 'an'} {name}"
        )
    return ms


def _choice(kind: Any, what: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise BadSchedule(f"{what}={value!r}: must be one of {known}") from None


def _checked_limit(limit: int) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= 10_000:
        raise BadSchedule(f"misfire_limit={limit!r}: must be from 1 to 10,000")
    return limit


class StoredSchedules:
    """The schedules of one store, including those declared in code.

    `client` returns an open client; a program's client may have to be opened first.
    """

    def __init__(self, client: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._client = client

    async def list(self) -> list[ScheduleInfo]:
        """All schedules, by name."""
        return [ScheduleInfo.of(each) for each in await self._all()]

    async def put_rule(self, name: str, rule: Rule) -> ScheduleInfo:
        """Add a schedule, or replace the one of that name. Its next tick is the first from now
        on."""
        client = await self._client()
        name = checked_name("schedule", name)
        for _ in range(TRIES):
            stored = await self._find(name)
            next_ms = next_tick(rule, client.clock.now_ms())
            if next_ms is None:
                raise BadSchedule(
                    f"schedule {name!r} has no tick from now until its end, "
                    f"{moment_text(rule.end_ms)}; give a later end=, or none"
                )
            fresh = Schedule(name=name, rule=rule.encode(), next_ms=next_ms)
            if stored is None:
                return ScheduleInfo.of(await client.store.put_schedule(fresh))
            fresh = msgspec.structs.replace(fresh, last_id=stored.last_id, fence=stored.fence)
            if await client.store.replace_schedule(fresh):
                return ScheduleInfo.of(fresh)
        raise _contended(name)

    async def pause(self, name: str) -> None:
        """Stop its ticks until it is resumed; ticks missed in the meantime are skipped."""
        await self._change(name, lambda found: msgspec.structs.replace(found, paused=True))

    async def resume(self, name: str) -> None:
        """Resume with the first tick from now on."""
        clock = (await self._client()).clock

        def resumed(found: Schedule) -> Schedule:
            next_ms = next_tick(_readable(found), clock.now_ms())
            return msgspec.structs.replace(found, paused=False, next_ms=next_ms)

        await self._change(name, resumed)

    async def _change(self, name: str, change: Callable[[Schedule], Schedule]) -> None:
        """Others may change, fire or delete it at the same time: none of that is undone."""
        client = await self._client()
        for _ in range(TRIES):
            if await client.store.replace_schedule(change(await self._known(name))):
                return
        raise _contended(name)

    async def delete(self, name: str) -> bool:
        """Delete a schedule; False if there was none. One in code returns when a worker starts."""
        checked_text("name", name)
        refuse_note(name)
        return await (await self._client()).store.delete_schedule(name)

    async def run(self, name: str) -> str:
        """Add its job once, now, in addition to its ticks; returns the job's id."""
        client = await self._client()
        schedule = await self._known(name)
        now_ms = client.clock.next_ms()
        rule = msgspec.structs.replace(_readable(schedule), spread_ms=0)
        try:
            job = job_of(schedule, rule, now_ms, now_ms)
        except msgspec.MsgspecError as error:
            raise BadSchedule(f"schedule {name!r}: its arguments can't be read: {error}") from None
        await client.add(job)
        return job.id

    async def _known(self, name: str) -> Schedule:
        refuse_note(name)
        schedule = await self._find(name)
        if schedule is None:
            known = ", ".join(each.name for each in await self.list()) or "none"
            raise UnknownSchedule(f"no schedule is named {name!r}; the schedules are: {known}")
        return schedule

    async def _find(self, name: str) -> Schedule | None:
        return next((each for each in await self._all() if each.name == name), None)

    async def _all(self) -> builtins.list[Schedule]:
        return await schedules_of((await self._client()).store)


def _contended(name: str) -> StoreUnavailable:
    return StoreUnavailable(f"other processes kept changing the schedule {name!r}; try again")


def _readable(schedule: Schedule) -> Rule:
    try:
        return read_rule(schedule.rule)
    except BadSchedule as error:
        raise BadSchedule(
            f"schedule {schedule.name!r}: {error}; put it again or delete it"
        ) from None


class AppSchedules(StoredSchedules):
    """`app.schedules`: for a program, which knows its tasks by name."""

    def __init__(
        self,
        client: Callable[[], Coroutine[Any, Any, Client]],
        definition: Callable[[str], Definition],
        payload_limit: int,
    ) -> None:
        super().__init__(client)
        self._definition = definition
        self._payload_limit = payload_limit

    @checked_options
    async def put(
        self,
        name: str,
        task: str | Task[..., Any, Any],
        *,
        cron: str | None = None,
        every: Duration | None = None,
        tz: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
        misfire: MisfireName = "one",
        misfire_limit: int = 100,
        overlap: OverlapName = "allow",
        spread: Duration = 0,
    ) -> ScheduleInfo:
        """Add a schedule for a task, or for the task of that name; replaces a schedule of the same
        name.

        Give `cron` or `every`; the other options are those of `@app.cron`. Its next tick is the
        first one from now on.
        """
        rule = make_rule(
            self._definition(task.name if isinstance(task, Task) else task),
            cron=cron,
            every=every,
            tz=tz,
            start=start,
            end=end,
            arguments=arguments,
            misfire=misfire,
            misfire_limit=misfire_limit,
            overlap=overlap,
            spread=spread,
            payload_limit=self._payload_limit,
        )
        return await self.put_rule(name, rule)
