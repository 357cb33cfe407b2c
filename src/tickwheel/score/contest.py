"""The rules of the contest: which jobs come when, what is counted, what is required. Pure."""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import msgspec

from tickwheel.operate.flaws import early_by, second_runs

# Jobs per minute; how long before it is due each is asked for; how late it may be.
PER_MINUTE = 170
AHEAD_S = (10.0, 40.0)
LATEST_MS = 30_000
# How long a job takes.
TAKES_S = 0.02
# What a query costs.
LIST_COST, FAILED_LOCK_COST, SINGLE_COST = 100, 10, 1
# What Tickwheel should reach in ten minutes with five instances.
COST_GOAL, EFFICIENCY_GOAL_MS, GOAL_MINUTES, GOAL_INSTANCES = 10_000, 10.0, 10.0, 5
# How long the jobs of a killed instance may take longer: leases have to run out first.
RECOVERY_MS = 30_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A job that is asked for, in seconds after the start."""

    id: str
    at_s: float
    due_s: float


def arrivals(seed: int, minutes: float) -> list[Arrival]:
    """The jobs of a contest, in the order in which they come: the same for every entrant."""
    dice = random.Random(f"score {seed}")
    found: list[Arrival] = []
    at_s = 0.0
    while (at_s := at_s + dice.expovariate(PER_MINUTE / 60)) < minutes * 60:
        found.append(Arrival(f"job-{len(found):05}", at_s, at_s + dice.uniform(*AHEAD_S)))
    return found


@dataclass(frozen=True, slots=True)
class Kill:
    """An instance that is ended, in seconds after the start."""

    at_s: float
    instance: int
    number: signal.Signals


def kills(seed: int, minutes: float, instances: int) -> list[Kill]:
    """Who is ended when: three of five, by `kill -9` and by SIGTERM, by turns."""
    dice = random.Random(f"kills {seed}")
    victims = dice.sample(range(instances), round(instances * 3 / 5))
    numbers = [signal.SIGKILL, signal.SIGTERM] * len(victims)
    times = sorted(dice.uniform(0.2, 0.8) * minutes * 60 for _ in victims)
    return [Kill(*each) for each in zip(times, victims, numbers, strict=False)]


# --- The record


class Queries(msgspec.Struct, omit_defaults=True):
    """What an instance asked of its database or store."""

    lists: int = 0
    failed_locks: int = 0
    singles: int = 0
    # Not scored: what it wrote, one job or many in a call.
    writes: int = 0

    @property
    def cost(self) -> int:
        return (
            self.lists * LIST_COST
            + self.failed_locks * FAILED_LOCK_COST
            + self.singles * SINGLE_COST
        )

    def __add__(self, other: Queries) -> Queries:
        return Queries(
            self.lists + other.lists,
            self.failed_locks + other.failed_locks,
            self.singles + other.singles,
            self.writes + other.writes,
        )


class JobRun(msgspec.Struct):
    """One run, as the instance that ran it noted it. A run without an end was killed."""

    id: str
    instance: int
    started_ms: float
    due_ms: float = 0.0
    ended_ms: float | None = None
    # For the rules of `tickwheel verify`: each run counts as an attempt of its own.
    attempt: int = 0
    outcome: str = ""


# --- The result


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How an entrant did."""

    name: str
    where: str
    queries: Queries
    jobs: int
    # Jobs that ran to their end, those that never did, runs after another of the same job, and of
    # these the ones that a kill explains; runs that began too soon, and jobs that began too late.
    done: int
    lost: int
    doubled: int
    explained: int
    early: int
    too_late: int
    mean_ms: float
    deviation_ms: float
    worst_ms: float
    # How late each job was, by its due time in seconds after the start.
    lateness: Sequence[tuple[float, float]] = field(repr=False)

    @property
    def cost(self) -> int:
        return self.queries.cost

    @property
    def efficiency_ms(self) -> float:
        return self.mean_ms + self.deviation_ms

    @property
    def valid(self) -> bool:
        """Whether it did what is required."""
        unexplained = self.doubled - self.explained
        return not (self.lost or unexplained or self.early or self.too_late)


def judged(
    name: str,
    where: str,
    due_ms: Mapping[str, float],
    runs: Iterable[JobRun],
    queries: Queries,
    *,
    start_ms: float,
    killed_ms: Mapping[int, float],
) -> Result:
    """Judge the record of an entrant. `due_ms` has the jobs that it accepted; `killed_ms` when
    which instance was killed."""
    by_id: dict[str, list[JobRun]] = {id: [] for id in due_ms}
    for run in sorted(runs, key=lambda each: each.started_ms):
        by_id.setdefault(run.id, []).append(run)
    for id, mine in by_id.items():
        for attempt, run in enumerate(mine, 1):
            run.attempt, run.due_ms = attempt, due_ms.get(id, math.inf)
    doubles = [pair for mine in by_id.values() for pair in second_runs(mine)]
    firsts = [mine[0] for mine in by_id.values() if mine]
    late = [(run.due_ms, run.started_ms - run.due_ms) for run in firsts]
    allowed_ms = LATEST_MS + (RECOVERY_MS if killed_ms else 0)
    lateness = [ms for _, ms in late] or [0.0]
    return Result(
        name=name,
        where=where,
        queries=queries,
        jobs=len(due_ms),
        done=sum(any(run.ended_ms for run in mine) for mine in by_id.values()),
        lost=sum(not any(run.ended_ms for run in mine) for mine in by_id.values()),
        doubled=len(doubles),
        explained=sum(before.instance in killed_ms for before, _ in doubles),
        early=sum(early_by(run) > 0 for mine in by_id.values() for run in mine),
        too_late=sum(ms > allowed_ms for ms in lateness),
        mean_ms=fmean(lateness),
        deviation_ms=pstdev(lateness),
        worst_ms=max(lateness),
        lateness=[((due - start_ms) / 1000, ms) for due, ms in sorted(late)],
    )


def ranked(results: Iterable[Result]) -> list[Result]:
    """The best first: those that did what is required, by cost and lateness alike."""
    return sorted(results, key=lambda each: (not each.valid, _rank(each)))


def _rank(result: Result) -> float:
    """Ten times the cost weighs as much as ten times the lateness."""
    return math.log(max(result.cost, 1)) + math.log(max(result.efficiency_ms, 0.1))
