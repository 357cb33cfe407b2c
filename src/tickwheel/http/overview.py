"""What a dashboard shows first: how the store stands, how it stood, and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tickwheel.client import Client
from tickwheel.config import unknown_variables
from tickwheel.engine.counts import BOUNDS_MS
from tickwheel.errors import StoreError
from tickwheel.http.access import ANY_NAME, Caller
from tickwheel.http.operating import seen_stats
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.service import Service
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.masking import masked
from tickwheel.objective import Objective
from tickwheel.operate.calls import CallRate
from tickwheel.operate.doctor import (
    examine_jobs,
    examine_store,
    of_durability,
    of_variables,
    of_versions,
)
from tickwheel.operate.documents import Time, iso_ms
from tickwheel.operate.history import (
    RANGES,
    History,
    Point,
    Tasks,
    failures_of,
    history,
    late_ms,
    merged,
    per_second,
)
from tickwheel.operate.keys import Scope
from tickwheel.operate.quantiles import share_within
from tickwheel.operate.recorder import last_hour, points_of
from tickwheel.operate.stats import Standing, Stats, standing
from tickwheel.store import Durability, Finding, Level, Size
from tickwheel.unserved import unserved_tasks
from tickwheel.version import __version__

table = Table()

# How long what was read is kept: how jobs stand, their history, and what the doctor finds.
STANDING_S, HISTORY_S, PROBLEMS_S, STORE_S = 1.0, 5.0, 30.0, 5.0
MINUTE_S = 60
FAILURES_MOST, PROBLEMS_MOST = 50, 20


# --- Documents


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Per second, over the last minute; null if it is unknown."""

    started: float | None = None
    done: float | None = None
    failed: float | None = None
    dead: float | None = None


class PunctualityDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How long after they were due runs have started in the last hour, and which share of them, and
    of the jobs that expired, within the objective. Estimates, from counts in buckets."""

    p50_ms: float | None = None
    p99_ms: float | None = None
    share: float | None = None
    started: int | None = None


class ObjectiveDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How punctual runs should be."""

    text: str
    share: float
    within_ms: int


class FailingTask(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a task's jobs in the last hour: how many are done, runs that failed, and how
    many are dead."""

    task: str
    done: int
    failed: int
    dead: int


class UnservedHere(msgspec.Struct, frozen=True, kw_only=True):
    """A task with waiting jobs that no running worker of its queue knows."""

    queue: str
    task: str
    since: Time


class OverviewDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How jobs stand now, how punctual they were, and what needs a person."""

    # The store's time.
    now: Time
    stats: Stats
    rates: Rates
    punctuality: PunctualityDocument
    objective: ObjectiveDocument | None
    workers: int
    # Those that tell what they count.
    reporting: int
    failures: list[FailingTask]
    unserved: list[UnservedHere]
    problems: list[Finding]
    paused: list[str]


class HistoryRange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How far back."""

    range: Literal["1h", "24h", "7d", "90d"] = "1h"


class StoreDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What the store is, what it guarantees, how large it is, and how it answers this server."""

    # Its URL, without secrets.
    name: str
    kind: str
    version: str
    durability: Durability
    sizes: list[Size]
    findings: list[Finding]
    calls: list[CallRate]


# --- Overview


@table.operation(
    "GET",
    "/v1/overview",
    scope=Scope.READ,
    summary="See how everything stands",
    answers={200: OverviewDocument},
)
async def get_overview(incoming: Incoming) -> Reply:
    """How jobs stand, rates over the last minute, punctuality and failures of the last hour, and
    what needs a person. Rates and punctuality are null if no worker tells what it counts, for keys
    with limits to queues or tasks, and for the first seconds of a server."""
    incoming.service.record()
    client, caller, recent = (
        await incoming.service.client(),
        incoming.caller,
        incoming.service.recent,
    )
    found = await recent.get("standing", STANDING_S, lambda: standing(client))
    sees_all = caller.sees_all(Scope.READ)
    stats = await recent.get(
        ("stats", sees_all or caller.id),
        STANDING_S,
        lambda: seen_stats(caller, client, found),
    )
    points, tasks = await recent.get("hour", HISTORY_S, lambda: last_hour(client))
    problems: list[Finding] = []
    if sees_all:
        problems = await recent.get("problems", PROBLEMS_S, lambda: _problems(client))
    objective = incoming.service.app.objective
    now_s = client.clock.now_ms() // 1000
    return Reply(
        OverviewDocument(
            now=iso_ms(client.clock.now_ms()),
            stats=stats,
            rates=rates(points, now_s) if sees_all else Rates(),
            punctuality=punctuality(points, objective) if sees_all else PunctualityDocument(),
            objective=None if objective is None else _objective(objective),
            workers=stats.workers,
            reporting=_reporting(found, caller),
            failures=failing(tasks, caller),
            unserved=_unserved(found, caller),
            problems=problems,
            paused=[
                each.name
                for each in found.queues
                if each.paused and caller.may(Scope.READ, queue=each.name)
            ],
        )
    )


def rates(points: Sequence[Point], now_s: int) -> Rates:
    """Over the points of the last minute."""
    minute = merged([each for each in points if each.at_s > now_s - MINUTE_S], now_s)
    return Rates(
        **{name: per_second(minute, name) for name in ("started", "done", "failed", "dead")}
    )


def punctuality(points: Sequence[Point], objective: Objective | None) -> PunctualityDocument:
    """Of all these points. A job that expired was not punctual."""
    hour = merged(points, 0)
    if not hour.over_s:
        return PunctualityDocument()
    share = None
    total = sum(hour.late) + hour.expired
    if objective is not None and total:
        within = share_within(BOUNDS_MS, hour.late, objective.within_ms) or 0.0
        share = round(within * sum(hour.late) / total, 6)
    return PunctualityDocument(
        p50_ms=late_ms(hour, 0.5), p99_ms=late_ms(hour, 0.99), share=share, started=hour.started
    )


def failing(tasks: Tasks, caller: Caller) -> list[FailingTask]:
    """Tasks with failures, the most first. The counts of a task are of all its queues."""
    found = [
        FailingTask(task=task, done=done, failed=failed, dead=dead)
        for task, (done, failed, dead) in sorted(
            tasks.items(), key=lambda each: (failures_of(each[1]), each[0])
        )
        if (failed or dead) and caller.may(Scope.READ, queue=ANY_NAME, task=task)
    ]
    return found[:FAILURES_MOST]


def _objective(objective: Objective) -> ObjectiveDocument:
    return ObjectiveDocument(
        text=str(objective), share=objective.ratio, within_ms=objective.within_ms
    )


def _reporting(found: Standing, caller: Caller) -> int:
    return sum(
        worker.counts is not None
        and any(caller.may(Scope.READ, queue=queue) for queue in worker.queues)
        for worker in found.workers
    )


def _unserved(found: Standing, caller: Caller) -> list[UnservedHere]:
    return [
        UnservedHere(queue=each.queue, task=each.task, since=iso_ms(each.since_ms))
        for each in unserved_tasks(found.parked, found.workers)
        if caller.may(Scope.READ, queue=each.queue, task=each.task)
    ]


async def _problems(client: Client) -> list[Finding]:
    """The worst first. That a store could be stronger is said where it is about the store."""
    try:
        durability = of_durability(await client.store.durability())
        found = [each for each in durability if each.level is Level.BAD]
        found += await examine_store(client) + await examine_jobs(client, brief=True)
    except StoreError as error:
        # What can be read is shown.
        return [Finding(Level.BAD, "store", f"it could not be examined: {error}")]
    bad = [each for each in found if each.level is Level.BAD]
    return (bad + [each for each in found if each.level is Level.WARN])[:PROBLEMS_MOST]


# --- History


@table.operation(
    "GET",
    "/v1/history",
    scope=Scope.READ,
    summary="See how it stood",
    query=HistoryRange,
    answers={200: History},
)
async def get_history(incoming: Incoming) -> Reply:
    """Points of 10 seconds, 5 minutes, 30 minutes or 6 hours, as servers have recorded them. For
    keys without limits to queues or tasks."""
    _check_sees_all(incoming)
    client, tier = await incoming.service.client(), RANGES[incoming.query.range]
    points = await incoming.service.recent.get(
        ("history", tier.name), HISTORY_S, lambda: points_of(client, tier)
    )
    return Reply(history(tier, points, client.clock.now_ms() // 1000))


# --- The store


@table.operation(
    "GET", "/v1/store", scope=Scope.READ, summary="Describe the store", answers={200: StoreDocument}
)
async def get_store(incoming: Incoming) -> Reply:
    """What it guarantees, how large it is, and the calls of this server. For keys without limits to
    queues or tasks."""
    _check_sees_all(incoming)
    found = await incoming.service.recent.get(
        "store", STORE_S, lambda: _described(incoming.service)
    )
    return Reply(found)


async def _described(service: Service) -> StoreDocument:
    client = await service.client()
    url = service.app.url
    return StoreDocument(
        name=masked(url) or "the app's own store",
        kind=url.partition(":")[0].lower(),
        version=__version__,
        durability=await client.store.durability(),
        sizes=await client.store.sizes(),
        findings=[
            *await examine_store(client),
            *of_versions(),
            *of_variables(unknown_variables()),
        ],
        calls=service.calls.rates(),
    )


def _check_sees_all(incoming: Incoming) -> None:
    if not incoming.caller.sees_all(Scope.READ):
        raise Problem(Kind.FORBIDDEN, "the key may not see all queues and tasks")
