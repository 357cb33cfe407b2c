"""Schedules as programs and operators handle them: made, changed, paused, run and deleted."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tickwheel.errors import BadSchedule, UsageError
from tickwheel.notes import refuse_note, schedules_of
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
from tickwheel.span import Span, due_ms, moment, span_ms
from tickwheel.store import checked_text
from tickwheel.tasks import Definition, checked_name

if TYPE_CHECKING:
    from tickwheel.client import Client

MisfireName = Literal["skip", "one", "all"]
OverlapName = Literal["allow", "skip", "cancel"]

# A parameter of this name is given the tick's nominal time.
TICK = "tick"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """A schedule as it stood when it was asked for.

    One that this release can't read has a `problem` and no rule; it never ticks.
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
        """Whether it is on its way to another store, and ticks no more in this one."""
        return self.next == moment(MOVING_MS)

    def following(self, count: int, *, after: datetime) -> list[datetime]:
        """The next ticks after a moment."""
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
    every: Span | None = None,
    tz: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    arguments: Mapping[str, Any] | None = None,
    misfire: MisfireName = "one",
    misfire_limit: int = 100,
    overlap: OverlapName = "allow",
    spread: Span = 0,
    from_code: bool = False,
    payload_limit: int,
) -> Rule:
    """A rule for this task, checked whole: BadSchedule or BadArguments say what is wrong."""
    given = dict(arguments or {})
    wants_tick = TICK in definition.arguments.names and TICK not in given
    payload = definition.arguments.encode(
        (), given | ({TICK: moment(0)} if wants_tick else {}), limit=payload_limit
    )
    rule = Rule(
        cron=cron,
        every_ms=None if every is None else span_ms(every),
        tz=tz,
        start_ms=None if start is None else due_ms(start),
        end_ms=None if end is None else due_ms(end),
        task=definition.name,
        payload=payload,
        tick_parameter=TICK if wants_tick else None,
        queue=definition.queue,
        priority=definition.priority,
        misfire=_choice(Misfire, "misfire", misfire),
        misfire_limit=_checked_limit(misfire_limit),
        overlap=_choice(Overlap, "overlap", overlap),
        spread_ms=span_ms(spread),
        from_code=from_code,
    )
    if next_tick(rule, 0) is None:
        raise BadSchedule(f"{cron or every!r} never ticks; is there such a day, before its end?")
    return rule


def _choice(kind: Any, what: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise BadSchedule(f"{what}={value!r}: it is one of {known}") from None


def _checked_limit(limit: int) -> int:
    if not isinstance(limit, int) or not 1 <= limit <= 10_000:
        raise BadSchedule(f"misfire_limit={limit!r}: it is from 1 to 10,000")
    return limit


class Schedules:
    """The schedules of one store, those of the code among them.

    `client` gives the client to ask, open: a program's may have to be opened first.
    """

    def __init__(self, client: Callable[[], Coroutine[Any, Any, Client]]) -> None:
        self._client = client

    async def list(self) -> list[ScheduleInfo]:
        """All schedules, by name."""
        return [ScheduleInfo.of(each) for each in await self._all()]

    async def put_rule(self, name: str, rule: Rule) -> ScheduleInfo:
        """Make a schedule, or change the one of that name. Its next tick is the first from now."""
        client = await self._client()
        name = checked_name("schedule", name)
        stored = await self._find(name)
        fresh = Schedule(
            name=name,
            rule=rule.encode(),
            next_ms=next_tick(rule, client.clock.now_ms()),
            last_id=None if stored is None else stored.last_id,
        )
        return ScheduleInfo.of(await client.store.put_schedule(fresh))

    async def pause(self, name: str) -> None:
        """Let no tick fire until it is resumed; ticks of the meantime are not made up for."""
        client = await self._client()
        paused = msgspec.structs.replace(await self._known(name), paused=True)
        await client.store.put_schedule(paused)

    async def resume(self, name: str) -> None:
        """Go on with the first tick from now on."""
        client = await self._client()
        schedule = await self._known(name)
        next_ms = next_tick(_readable(schedule), client.clock.now_ms())
        resumed = msgspec.structs.replace(schedule, paused=False, next_ms=next_ms)
        await client.store.put_schedule(resumed)

    async def delete(self, name: str) -> bool:
        """Forget a schedule; False where there was none. One of the code comes back at a start."""
        checked_text("name", name)
        refuse_note(name)
        return await (await self._client()).store.delete_schedule(name)

    async def run(self, name: str) -> str:
        """Add its job once, now, beside its ticks; gives the job's id."""
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
            raise UsageError(f"no schedule is named {name!r}; there are: {known}")
        return schedule

    async def _find(self, name: str) -> Schedule | None:
        return next((each for each in await self._all() if each.name == name), None)

    async def _all(self) -> builtins.list[Schedule]:
        return await schedules_of((await self._client()).store)


def _readable(schedule: Schedule) -> Rule:
    try:
        return read_rule(schedule.rule)
    except BadSchedule as error:
        raise BadSchedule(
            f"schedule {schedule.name!r}: {error}; put it again or delete it"
        ) from None


class AppSchedules(Schedules):
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

    async def put(self, name: str, task: str, **options: Any) -> ScheduleInfo:
        """Make a schedule for a task, or change the one of that name.

        Options as for `@app.cron` and `@app.every`: cron or every, tz, start, end, arguments,
        misfire, misfire_limit, overlap, spread. Its next tick is the first one from now on.
        """
        definition = self._definition(task)
        rule = make_rule(definition, payload_limit=self._payload_limit, **options)
        return await self.put_rule(name, rule)
