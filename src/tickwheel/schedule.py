"""A schedule as data: its rule, which ticks are due, and which job each one adds. Pure.

A tick has a nominal time. Its job's id is made from the schedule's name and that time, so a tick
adds one job, however many nodes fire it.
"""

from __future__ import annotations

import functools
import hashlib
from collections import deque
from datetime import datetime
from enum import StrEnum
from typing import Protocol

import msgspec

from tickwheel import envelope
from tickwheel.checks import NAME_LIMIT
from tickwheel.cron import Cron, Every, zone_of
from tickwheel.duration import due_ms, moment
from tickwheel.errors import BadSchedule
from tickwheel.job import Job, Priority

# A tick fired up to this late was not missed: a restart takes a moment.
GRACE_MS = 60_000
# The most jobs that a schedule adds at once after an outage, whatever its own limit.
CATCH_UP_MOST = 10_000
# The next tick of a schedule that is being moved to another store: the end of the year 9999, so
# that it no longer ticks in this one. Set by compare-and-set like any other.
MOVING_MS = 253_402_300_799_000
# How far back to search for the latest missed ticks: first a minute, then ever farther.
_LOOKS_MS = (60_000, 3_600_000, 86_400_000, 32 * 86_400_000, 3_660 * 86_400_000)


class Misfire(StrEnum):
    """What happens to ticks that were not fired in time, because all nodes were down."""

    SKIP = "skip"  # none runs
    ONE = "one"  # the latest of them runs
    ALL = "all"  # each runs, the latest `misfire_limit` of them


class Overlap(StrEnum):
    """What happens to a tick while the previous tick's job has not ended."""

    ALLOW = "allow"  # both run
    SKIP = "skip"  # the new tick is skipped
    CANCEL = "cancel"  # the old job is cancelled


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A schedule as stored."""

    name: str
    # A Rule as JSON text. Opaque to stores.
    rule: str
    # The next tick; None if there are no more.
    next_ms: int | None
    paused: bool = False
    # The job of the last tick that was fired.
    last_id: str | None = None
    # Changed by the store with every write; `fire` compares it.
    fence: int = 0


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a schedule ticks, and which job each tick adds."""

    # One of the two.
    cron: str | None = None
    every_ms: int | None = None
    # None: the zone that the expression names, or UTC.
    tz: str | None = None
    start_ms: int | None = None
    end_ms: int | None = None

    task: str
    payload: str = "{}"
    # The parameter that receives the tick's nominal time, if the task has one.
    tick_parameter: str | None = None
    queue: str = "default"
    priority: int = Priority.NORMAL

    misfire: Misfire = Misfire.ONE
    misfire_limit: int = 100
    overlap: Overlap = Overlap.ALLOW
    # Each job is due at a random moment within this time after its tick.
    spread_ms: int = 0
    # Declared by a decorator: the code owns it, and updates it at the next start.
    from_code: bool = False
    # The app that declared it. None if an older release did, or nobody.
    app: str | None = None

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @staticmethod
    def decode(text: str) -> Rule:
        return msgspec.json.decode(text, type=Rule)


class Ticks(Protocol):
    def next_ms(self, after_ms: int) -> int | None: ...
    def explain(self) -> str: ...


def ticks_of(rule: Rule) -> Ticks:
    """The rule's ticks. Raises BadSchedule if the rule is invalid."""
    if (rule.cron is None) == (rule.every_ms is None):
        raise BadSchedule("a schedule must have either a cron expression or an interval")
    if rule.cron is not None:
        return _parsed(rule.cron, rule.tz)
    assert rule.every_ms is not None
    if rule.tz is not None:
        zone_of(rule.tz)  # its ticks don't depend on it, but it is where they are shown
    return Every.parse(rule.every_ms / 1000, anchor_ms=rule.start_ms or 0)


# Cached: parsing an expression costs more than finding the next tick, and happens at every tick.
_parsed = functools.lru_cache(16_384)(Cron.parse)

# What reading a broken rule, or one that another release wrote, may raise.
UNREADABLE = (ValueError, ArithmeticError, msgspec.MsgspecError)


_REFUSED = '{"tickwheel:refused":'


def refused_rule(why: str) -> str:
    """Stands for a stored rule that can't be trusted: whoever reads it is told why."""
    return f"{_REFUSED}{msgspec.json.encode(why).decode()}}}"


def unsealed_rule(text: str) -> Rule:
    """A stored rule, whoever wrote it, and with its arguments encrypted if they are: to be moved
    or looked at. Raises BadSchedule."""
    return _checked_rule(envelope.bare(text) or text)


def read_rule(text: str) -> Rule:
    """A stored rule. Raises BadSchedule if this release can't read it, or it can't be trusted."""
    if text.startswith(_REFUSED):
        raise BadSchedule(f"{envelope.REFUSED}{msgspec.json.decode(text)['tickwheel:refused']}")
    if envelope.is_sealed(text) or envelope.is_sealed((rule := _checked_rule(text)).payload):
        raise BadSchedule(f"it is sealed; {envelope.GIVE_KEYS}")
    return rule


def _checked_rule(text: str) -> Rule:
    try:
        rule = Rule.decode(text)
        ticks_of(rule)
        Priority(rule.priority)
        for name in ("every_ms", "start_ms", "end_ms", "spread_ms"):
            if not 0 <= (getattr(rule, name) or 0) <= MOVING_MS:
                raise BadSchedule(f"its {name} is {getattr(rule, name)}")
        for name in ("queue", "task"):
            if (
                not 0 < len(getattr(rule, name)) <= NAME_LIMIT
                or not getattr(rule, name).isprintable()
            ):
                raise BadSchedule(f"its {name} is not a valid name")
    except UNREADABLE as error:
        raise BadSchedule(f"this release can't read it: {error}") from None
    return rule


def next_tick(rule: Rule, after_ms: int) -> int | None:
    """The first tick after this time, within the rule's start and end."""
    if rule.start_ms is not None:
        after_ms = max(after_ms, rule.start_ms - 1)
    tick_ms = ticks_of(rule).next_ms(after_ms)
    if tick_ms is None or (rule.end_ms is not None and tick_ms > rule.end_ms):
        return None
    return tick_ms


class FirePlan(msgspec.Struct, frozen=True):
    """What to do with a schedule now: add these jobs, and continue at that tick."""

    jobs: list[Job]
    next_ms: int | None
    # How many ticks were skipped because they were not fired in time.
    missed: int = 0
    # How many were skipped because they were due together with a later one, which runs.
    merged: int = 0
    # A job to cancel first.
    cancel: str | None = None


def ahead_of(rule: Rule, ahead_ms: int) -> int:
    """How long before its time a tick is fired. Zero if the previous tick's job matters: it may
    still end by then."""
    return ahead_ms if rule.overlap is Overlap.ALLOW else 0


def plan(schedule: Schedule, now_ms: int, ahead_ms: int) -> FirePlan | None:
    """The plan for the schedule's due ticks; None if none is due within `ahead_ms`.

    Missed ticks follow the misfire policy. The others, late by less than the grace, all run. But if
    they must not overlap, only the latest of all these runs.
    """
    if schedule.paused or schedule.next_ms is None or schedule.next_ms > now_ms + ahead_ms:
        return None
    rule = read_rule(schedule.rule)
    until_ms = now_ms + ahead_of(rule, ahead_ms)
    if schedule.next_ms > until_ms:
        return None
    missed = _missed(rule, schedule.next_ms, now_ms - GRACE_MS)
    wanted = {Misfire.SKIP: 0, Misfire.ONE: 1, Misfire.ALL: rule.misfire_limit}[rule.misfire]
    fired = missed[-wanted:] if wanted else []
    after_ms = max(schedule.next_ms - 1, now_ms - GRACE_MS)
    next_ms = next_tick(rule, after_ms)
    while next_ms is not None and next_ms <= until_ms and len(fired) < CATCH_UP_MOST:
        fired.append(next_ms)
        next_ms = next_tick(rule, next_ms)
    alone = rule.overlap is not Overlap.ALLOW
    jobs = [job_of(schedule, rule, tick_ms, now_ms) for tick_ms in (fired[-1:] if alone else fired)]
    left_out = max(len(missed) - wanted, 0)
    return FirePlan(jobs, next_ms, missed=left_out, merged=len(fired) - len(jobs))


def with_overlap(due: FirePlan, overlap: Overlap, last: Job | None) -> FirePlan:
    """The plan, adjusted for the job of the last tick."""
    if overlap is Overlap.ALLOW or not due.jobs or last is None or last.state.ended:
        return due
    last_ms, tick_ms = tick_of(last.id), tick_of(due.jobs[-1].id)
    if last_ms is not None and tick_ms is not None and last_ms >= tick_ms:
        # A node with a wrong clock fired that tick, which is still in the future.
        return due
    if overlap is Overlap.SKIP:
        return msgspec.structs.replace(due, jobs=[])
    return msgspec.structs.replace(due, cancel=last.id)


def correction(schedule: Schedule, rule: Rule, now_ms: int, ahead_ms: int) -> FirePlan | None:
    """A plan that corrects a next tick that does not match the rule, because the node that set it
    had a wrong clock. None if the tick is right, or if it is too early to tell."""
    next_ms = schedule.next_ms
    sure_ms = now_ms + ahead_ms + GRACE_MS
    if schedule.paused or next_ms == MOVING_MS or (next_ms is not None and next_ms <= sure_ms):
        return None
    latest_ms = next_tick(rule, sure_ms)
    if next_ms == latest_ms or (next_ms and latest_ms and next_ms < latest_ms):
        return None
    return FirePlan([], next_tick(rule, now_ms))


def _missed(rule: Rule, first_ms: int, until_ms: int) -> list[int]:
    """The latest ticks from `first_ms` on, up to `until_ms`, at most as many as may run."""
    limit = min(max(rule.misfire_limit, 1), CATCH_UP_MOST)
    return last_ticks(rule, first_ms, until_ms, limit)


def last_ticks(rule: Rule, first_ms: int, until_ms: int, limit: int) -> list[int]:
    """The latest ticks from `first_ms` on, up to `until_ms`, at most `limit`.

    Searches from ever earlier moments: a schedule that ticks each second and was down for a month
    has millions of ticks, of which only the last few are needed.
    """
    if first_ms > until_ms:
        return []
    found: deque[int] = deque(maxlen=limit)
    for look_ms in _LOOKS_MS:
        found.clear()
        start_ms = max(first_ms - 1, until_ms - look_ms)
        tick_ms = next_tick(rule, start_ms)
        while tick_ms is not None and tick_ms <= until_ms:
            found.append(tick_ms)
            tick_ms = next_tick(rule, tick_ms)
        if start_ms < first_ms or len(found) == limit:
            break
    return list(found)


def job_of(schedule: Schedule, rule: Rule, tick_ms: int, now_ms: int) -> Job:
    """The one job of a tick."""
    id = tick_id(schedule.name, tick_ms)
    payload = rule.payload
    if rule.tick_parameter is not None:
        arguments = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        arguments[rule.tick_parameter] = msgspec.Raw(msgspec.json.encode(_iso(tick_ms)))
        payload = msgspec.json.encode(arguments).decode()
    return Job(
        id=id,
        task=rule.task,
        payload=payload,
        queue=rule.queue,
        priority=rule.priority,
        due_ms=tick_ms + _spread(id, rule.spread_ms),
        created_ms=now_ms,
    )


def tick_id(schedule: str, tick_ms: int) -> str:
    """The id of the job of a tick."""
    return f"{schedule}@{_iso(tick_ms)}"


def tick_of(id: str) -> int | None:
    """The tick that a job was added for, by its id; None if no schedule added it."""
    try:
        return due_ms(datetime.fromisoformat(id.rpartition("@")[2]))
    except ValueError:
        return None


def _spread(id: str, spread_ms: int) -> int:
    """A moment within the spread: random for each tick, and the same on every node."""
    digest = hashlib.blake2b(id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % (spread_ms + 1)


def _iso(ms: int) -> str:
    return moment(ms).isoformat(timespec="milliseconds" if ms % 1000 else "seconds")[:-6] + "Z"
