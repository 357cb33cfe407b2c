"""List, put, pause, resume, run and delete schedules; try expressions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import dropwhile
from urllib.parse import quote
from zoneinfo import ZoneInfo

import msgspec

from tickwheel.checks import NAME_LIMIT, checked_name
from tickwheel.duration import due_ms, duration_ms, iso, moment
from tickwheel.errors import BadTime
from tickwheel.http.adding import JOBS, read_time
from tickwheel.http.body import check_depth
from tickwheel.http.forms import LastTicks, NewSchedule, NextTicks, Preview, Range
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.job import Job, State
from tickwheel.operate.documents import (
    ScheduleDocument,
    Time,
    iso_ms,
    job_document,
)
from tickwheel.operate.keys import Scope
from tickwheel.operate.simulate import (
    DAY_MS,
    LONGEST_MS,
    ClockChange,
    Tick,
    changes_on,
    simulate_rules,
    ticking,
    zone_of,
)
from tickwheel.schedule import Rule, last_ticks, next_tick, tick_id, ticks_of
from tickwheel.schedules import AppSchedules, ScheduleInfo, make_rule

table = Table()

PATH = "/v1/schedules/{name}"


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """All schedules, by name."""

    schedules: list[ScheduleDocument]


class ScheduleOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to a schedule."""

    name: str
    outcome: str


class ScheduleRun(msgspec.Struct, frozen=True, kw_only=True):
    """The job that was added."""

    name: str
    job: str


class TickTime(msgspec.Struct, frozen=True, kw_only=True):
    """A tick, in UTC and on the wall clock of the schedule's zone; and in words, whether that clock
    changes on this day."""

    at: Time
    there: Time
    change: str | None


class TickRun(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a tick; without a state, there is no job: it was skipped, or pruned since."""

    tick: Time
    id: str
    state: State | None
    started: Time | None
    ended: Time | None
    lateness_ms: int | None
    error: str | None


class TickRuns(msgspec.Struct, frozen=True, kw_only=True):
    """The last ticks, newest first."""

    runs: list[TickRun]


class TickList(msgspec.Struct, frozen=True, kw_only=True):
    """The next ticks, and the rule in words."""

    explained: str
    tz: str
    ticks: list[TickTime]


class SimulatedTick(msgspec.Struct, frozen=True, kw_only=True):
    """What ticks, and when; whether the zone's clock changes that day; what ticks as well."""

    schedule: str
    task: str
    at: Time
    tz: str
    there: Time
    change: str | None
    beside: list[str]


class SimulatedTicks(msgspec.Struct, frozen=True, kw_only=True):
    """The ticks in a time range; `cut_at`: from there on they were not computed."""

    start: Time
    end: Time
    ticks: list[SimulatedTick]
    cut_at: Time | None
    paused: list[str]
    unreadable: list[str]


# --- Which the caller may see


def _sees(incoming: Incoming, schedule: ScheduleInfo) -> bool:
    rule = schedule.rule
    if rule is None:
        return incoming.caller.sees_all(incoming.scope)
    return incoming.caller.may(incoming.scope, queue=rule.queue, task=rule.task)


async def _all(incoming: Incoming) -> list[ScheduleInfo]:
    await incoming.service.client()
    return await incoming.service.app.schedules.list()


async def _find(incoming: Incoming, name: str) -> ScheduleInfo | None:
    return next((each for each in await _all(incoming) if each.name == name), None)


async def _known(incoming: Incoming) -> ScheduleInfo:
    """The schedule that the path names; raises Problem if there is none that the caller may see."""
    name = incoming.path["name"]
    found = await _find(incoming, name)
    if found is None or not _sees(incoming, found):
        raise _no_schedule(name)
    return found


def _no_schedule(name: str) -> Problem:
    return Problem(Kind.NOT_FOUND, f"no schedule is named {name[:NAME_LIMIT]!r}")


# --- Look


@table.operation(
    "GET",
    "/v1/schedules",
    scope=Scope.READ,
    summary="List schedules",
    answers={200: ScheduleList},
)
async def list_schedules(incoming: Incoming) -> Reply:
    """Also those that code declares, once a worker has started."""
    found = [each for each in await _all(incoming) if _sees(incoming, each)]
    return Reply(ScheduleList(schedules=[_document(incoming, each) for each in found]))


@table.operation(
    "GET", PATH, scope=Scope.READ, summary="Get a schedule", answers={200: ScheduleDocument}
)
async def get_schedule(incoming: Incoming) -> Reply:
    """Its rule, in words too, and its next tick."""
    return Reply(_document(incoming, await _known(incoming)))


def _document(incoming: Incoming, schedule: ScheduleInfo) -> ScheduleDocument:
    return incoming.service.redaction.schedule(schedule, incoming.caller)


# --- Change


@table.operation(
    "PUT",
    PATH,
    scope=Scope.OPERATE,
    summary="Add or replace a schedule",
    body=NewSchedule,
    answers={200: ScheduleDocument, 201: ScheduleDocument},
    problems=(Kind.UNKNOWN_TASK,),
)
async def put_schedule(incoming: Incoming) -> Reply:
    """Its next tick is the first from now on. One that code declares is replaced again by the next
    worker that starts."""
    name = checked_name("schedule", incoming.path["name"])
    rule = _rule(incoming, incoming.body)
    incoming.detail = rule.task
    before = await _find(incoming, name)
    if before is not None and not _sees(incoming, before):
        raise Problem(Kind.FORBIDDEN, f"the key may not change the schedule {name!r}")
    put = await incoming.service.app.schedules.put_rule(name, rule)
    document = _document(incoming, put)
    if before is not None:
        return Reply(document)
    return Reply(document, 201, location=f"/v1/schedules/{quote(name, safe='')}")


def _rule(incoming: Incoming, form: NewSchedule) -> Rule:
    caller, service = incoming.caller, incoming.service
    if not caller.may(Scope.OPERATE, task=form.task):
        raise Problem(Kind.FORBIDDEN, f"the key may not use the task {form.task!r}")
    definition = service.definition(form.task)
    if not caller.may(Scope.OPERATE, queue=definition.queue, task=form.task):
        raise Problem(Kind.FORBIDDEN, f"the key may not use the queue {definition.queue!r}")
    check_depth(form.arguments)
    return make_rule(
        definition,
        cron=form.cron,
        every=form.every,
        tz=form.tz,
        start=None if form.start is None else read_time("start", form.start),
        end=None if form.end is None else read_time("end", form.end),
        arguments=form.arguments,
        misfire=form.misfire,
        misfire_limit=form.misfire_limit,
        overlap=form.overlap,
        spread=form.spread,
        payload_limit=service.app.payload_limit,
    )


async def _step(
    incoming: Incoming, step: Callable[[AppSchedules, str], Awaitable[object]], outcome: str
) -> Reply:
    name = (await _known(incoming)).name
    if await step(incoming.service.app.schedules, name) is False:
        raise _no_schedule(name)
    return Reply(ScheduleOutcome(name=name, outcome=outcome))


@table.operation(
    "DELETE",
    PATH,
    scope=Scope.OPERATE,
    summary="Delete a schedule",
    answers={200: ScheduleOutcome},
)
async def delete_schedule(incoming: Incoming) -> Reply:
    """One that code declares comes back when a worker starts."""
    return await _step(incoming, AppSchedules.delete, "deleted")


@table.operation(
    "POST",
    f"{PATH}/pause",
    scope=Scope.OPERATE,
    summary="Pause a schedule",
    answers={200: ScheduleOutcome},
)
async def pause_schedule(incoming: Incoming) -> Reply:
    """No ticks until it is resumed; those missed are skipped."""
    return await _step(incoming, AppSchedules.pause, "paused")


@table.operation(
    "POST",
    f"{PATH}/resume",
    scope=Scope.OPERATE,
    summary="Resume a schedule",
    answers={200: ScheduleOutcome},
    problems=(Kind.INVALID,),
)
async def resume_schedule(incoming: Incoming) -> Reply:
    """With the first tick from now on."""
    return await _step(incoming, AppSchedules.resume, "resumed")


@table.operation(
    "POST",
    f"{PATH}/run",
    scope=Scope.OPERATE,
    summary="Run a schedule now",
    answers={201: ScheduleRun},
    problems=(Kind.INVALID,),
)
async def run_schedule(incoming: Incoming) -> Reply:
    """Adds its job once, in addition to its ticks."""
    name = (await _known(incoming)).name
    id = await incoming.service.app.schedules.run(name)
    incoming.detail = id
    return Reply(ScheduleRun(name=name, job=id), 201, location=f"{JOBS}/{quote(id, safe='')}")


# --- Ticks


@table.operation(
    "GET",
    f"{PATH}/next",
    scope=Scope.READ,
    summary="List a schedule's next ticks",
    query=NextTicks,
    answers={200: TickList},
    problems=(Kind.INVALID,),
)
async def next_ticks(incoming: Incoming) -> Reply:
    """As its rule says, also while it is paused."""
    found = await _known(incoming)
    if found.rule is None:
        raise Problem(Kind.INVALID, f"its rule can't be read: {found.problem}")
    return await _ticks(incoming, found.rule)


@table.operation(
    "GET",
    f"{PATH}/runs",
    scope=Scope.READ,
    summary="List a schedule's last ticks",
    query=LastTicks,
    answers={200: TickRuns},
    problems=(Kind.INVALID,),
)
async def last_runs(incoming: Incoming) -> Reply:
    """What became of each tick of its rule as it is now, newest first, back to the first that has a
    job."""
    found = await _known(incoming)
    rule = found.rule
    if rule is None:
        raise Problem(Kind.INVALID, f"its rule can't be read: {found.problem}")
    client = await incoming.service.client()
    now_ms, count = client.clock.now_ms(), incoming.query.count
    ticks = await asyncio.to_thread(last_ticks, rule, rule.start_ms or 0, now_ms, count)
    jobs = await client.store.get([tick_id(found.name, ms) for ms in ticks])
    runs = [_tick_run(found.name, ms, job) for ms, job in zip(ticks, jobs, strict=True)]
    # Before that, perhaps there was no schedule.
    runs = list(dropwhile(lambda run: run.state is None, runs))
    return Reply(TickRuns(runs=runs[::-1]))


def _tick_run(name: str, tick_ms: int, job: Job | None) -> TickRun:
    """The run that counts is the last that started."""
    document = None if job is None else job_document(job)
    started_ms = None if job is None else job.started_ms
    if job is not None and started_ms is None:
        known = [run.started_ms for run in job.history if run.started_ms is not None]
        started_ms = known[-1] if known else None
    return TickRun(
        tick=iso_ms(tick_ms),
        id=tick_id(name, tick_ms),
        state=None if job is None else job.state,
        started=None if started_ms is None else iso_ms(started_ms),
        ended=None if document is None else document.ended,
        lateness_ms=None if job is None or started_ms is None else started_ms - job.due_ms,
        error=None if document is None else document.error,
    )


@table.operation(
    "GET",
    "/v1/preview",
    scope=Scope.READ,
    summary="Try an expression",
    query=Preview,
    answers={200: TickList},
    problems=(Kind.INVALID,),
)
async def preview(incoming: Incoming) -> Reply:
    """The next ticks of a cron expression or an interval, without a schedule."""
    query = incoming.query
    every = None if query.every is None else duration_ms(query.every)
    return await _ticks(incoming, Rule(cron=query.cron, every_ms=every, tz=query.tz, task="-"))


async def _ticks(incoming: Incoming, rule: Rule) -> Reply:
    client = await incoming.service.client()
    query = incoming.query
    after_ms = client.clock.now_ms() if query.after is None else _past(query.after)
    explained, zone = ticks_of(rule).explain(), zone_of(rule)
    found = await _in_thread(lambda stop: following(rule, after_ms, query.count, stop))
    changes = await asyncio.to_thread(changes_on, zone, found)
    ticks = [_tick_time(moment(ms), ZoneInfo(zone), changes.get(ms)) for ms in found]
    return Reply(TickList(explained=explained, tz=zone, ticks=ticks))


def following(rule: Rule, after_ms: int, count: int, stop: threading.Event) -> list[int]:
    """The next ticks. A rare one takes long to find, so it can be stopped between two."""
    found: list[int] = []
    tick_ms: int | None = after_ms
    while len(found) < count and not stop.is_set():
        tick_ms = next_tick(rule, tick_ms or 0)
        if tick_ms is None:
            break
        found.append(tick_ms)
    return found


async def _in_thread(search: Callable[[threading.Event], list[int]]) -> list[int]:
    """Search elsewhere than on the event loop; stops if nobody waits any more."""
    stop = threading.Event()
    try:
        return await asyncio.to_thread(search, stop)
    finally:
        stop.set()


def _tick_time(at: datetime, zone: ZoneInfo, change: ClockChange | None) -> TickTime:
    there = at.astimezone(zone).isoformat(timespec="milliseconds")
    return TickTime(at=iso(at), there=there, change=None if change is None else change.words)


def _past(text: str) -> int:
    """A time from which ticks are searched: the calendar ends a little later."""
    at = read_time("time", text)
    if not 1970 < at.year < 9000:
        raise BadTime(f"{text!r} is out of range: from the year 1971 to 8999")
    return due_ms(at)


@table.operation(
    "GET",
    "/v1/simulation",
    scope=Scope.READ,
    summary="Simulate schedules",
    query=Range,
    answers={200: SimulatedTicks},
    problems=(Kind.INVALID, Kind.NOT_FOUND),
)
async def simulate_schedules(incoming: Incoming) -> Reply:
    """What ticks in a time range, and what ticks at the same moment. Nothing is added."""
    query = incoming.query
    client = await incoming.service.client()
    start_ms = client.clock.now_ms() if query.start is None else _past(query.start)
    end_ms = start_ms + DAY_MS if query.end is None else _past(query.end)
    if not start_ms < end_ms <= start_ms + LONGEST_MS:
        raise BadTime("end must be after start, by at most 366 days")
    seen = [each for each in await _all(incoming) if _sees(incoming, each)]
    declared = {
        name: rule
        for name, rule in incoming.service.app.declared.items()
        if incoming.caller.may(Scope.READ, queue=rule.queue, task=rule.task)
    }
    wanted = ticking(seen, declared).named([query.name] if query.name else [])
    found = await asyncio.to_thread(
        simulate_rules, wanted.rules, start_ms, end_ms, most=query.limit
    )
    return Reply(
        SimulatedTicks(
            start=iso_ms(start_ms),
            end=iso_ms(end_ms),
            ticks=[_simulated(tick, wanted.rules[tick.name].task) for tick in found.ticks],
            cut_at=None if found.cut_ms is None else iso_ms(found.cut_ms),
            paused=wanted.paused,
            unreadable=wanted.unreadable,
        )
    )


def _simulated(tick: Tick, task: str) -> SimulatedTick:
    time = _tick_time(moment(tick.ms), ZoneInfo(tick.tz), tick.change)
    return SimulatedTick(
        schedule=tick.name,
        task=task,
        at=time.at,
        tz=tick.tz,
        there=time.there,
        change=time.change,
        beside=list(tick.beside),
    )
