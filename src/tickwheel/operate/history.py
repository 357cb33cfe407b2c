"""History for charts: what workers have counted and how many jobs waited, in tiers. Pure.

The finest tier has a point for every ten seconds. A point of a coarser tier is made from those of
the tier before it, always from all of them, so making it twice changes nothing. Points are kept in
records of the store, some in each: a stretch. One of the finest tier also has what workers had
counted at its last point, so that whoever records the next one knows what came since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec

from tickwheel.engine.counts import BOUNDS_MS
from tickwheel.operate.quantiles import quantile
from tickwheel.store import QueueInfo, WorkerCounts, WorkerInfo

KIND = "history"
HOUR_S, DAY_S = 3_600, 86_400
# After a longer time without points, what was counted meanwhile is left out: it would be shown as
# of the last moment.
GAP_MS = 600_000
# By so much the clocks of workers may be wrong about which of two moments came first.
SLACK_MS = 2_000
# How much of what workers have counted is remembered, and how much of it fits into a record; a
# stretch has so many tasks.
SOURCES_MOST = 500
SEEN_BYTES = 32 * 1024
TASKS_MOST = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Points of one width, and how long they are kept."""

    name: str
    step_s: int
    # How many points a stretch has.
    points: int
    keep_s: int

    @property
    def span_s(self) -> int:
        return self.step_s * self.points

    def slot_s(self, at_s: int) -> int:
        return at_s // self.step_s * self.step_s

    def start_s(self, at_s: int) -> int:
        """When the stretch of this time begins."""
        return at_s // self.span_s * self.span_s

    def record(self, at_s: int) -> str:
        """The name of the record of the stretch of this time. Later ones come later."""
        return f"{self.name}.{self.start_s(at_s):012}"

    def records(self, now_s: int) -> list[str]:
        """The names of the records whose points are still wanted."""
        first = self.start_s(now_s - self.keep_s)
        return [self.record(at_s) for at_s in range(first, now_s + 1, self.span_s)]


FINE = Tier(name="10s", step_s=10, points=30, keep_s=HOUR_S)
COARSE = (
    Tier(name="5m", step_s=300, points=24, keep_s=DAY_S),
    Tier(name="30m", step_s=1_800, points=48, keep_s=7 * DAY_S),
    Tier(name="6h", step_s=21_600, points=120, keep_s=90 * DAY_S),
)
TIERS = (FINE, *COARSE)
# What people choose, and the tier that has it.
RANGES = dict(zip(("1h", "24h", "7d", "90d"), TIERS, strict=True))


class Point(msgspec.Struct, frozen=True, array_like=True):
    """What was seen in one slot of time."""

    # When the slot begins.
    at_s: int
    # How often jobs were counted, and how many there were on average.
    samples: int = 0
    waiting: float = 0
    running: float = 0
    # For how long workers told what follows; 0: nobody did.
    over_s: float = 0
    started: int = 0
    done: int = 0
    failed: int = 0
    dead: int = 0
    expired: int = 0
    # As in WorkerCounts.
    late: tuple[int, ...] = ()


Tasks = Mapping[str, tuple[int, int, int]]
Seen = Mapping[str, WorkerCounts]


class Stretch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The points of a record; in the finest tier, with more."""

    points: tuple[Point, ...] = ()
    # By task, what ended in all this time: done, failed, dead.
    tasks: dict[str, tuple[int, int, int]] = {}
    # What workers had counted at the last point, and when that was.
    seen: list[WorkerCounts] = []
    seen_ms: int | None = None

    @property
    def last_s(self) -> int:
        return self.points[-1].at_s if self.points else 0


EMPTY = Stretch()


# --- A sample


def sources(workers: Iterable[WorkerInfo]) -> dict[str, WorkerCounts]:
    """What each process has counted, however many workers it has: as it told last."""
    told = sorted((each for each in workers if each.counts), key=lambda each: each.seen_ms)
    return {each.counts.source: each.counts for each in told if each.counts is not None}


def gained(now: WorkerCounts, before: WorkerCounts | None, before_ms: int) -> WorkerCounts:
    """What a process has counted since `before`, which was seen at `before_ms`.

    A process that was not seen then, and has begun since, began with nothing, and so did one whose
    counts have become less. If another one was not seen, it is unknown what it had counted, and
    nothing is gained.
    """
    if before is None and now.since_ms < before_ms - SLACK_MS:
        return WorkerCounts(source=now.source, since_ms=now.since_ms)
    if before is None or now.started < before.started or now.done < before.done:
        return now
    return WorkerCounts(
        source=now.source,
        since_ms=now.since_ms,
        started=now.started - before.started,
        done=now.done - before.done,
        failed=max(now.failed - before.failed, 0),
        dead=max(now.dead - before.dead, 0),
        expired=max(now.expired - before.expired, 0),
        late=tuple(max(a - b, 0) for a, b in zip_longest(now.late, before.late, fillvalue=0)),
        tasks=_minus(now.tasks, before.tasks),
    )


def _minus(now: Tasks, before: Tasks) -> dict[str, tuple[int, int, int]]:
    found = {}
    for task, (done, failed, dead) in now.items():
        was = before.get(task, (0, 0, 0))
        gain = (max(done - was[0], 0), max(failed - was[1], 0), max(dead - was[2], 0))
        if any(gain):
            found[task] = gain
    return found


def sampled(
    last: Stretch,
    remembered: Seen,
    workers: Sequence[WorkerInfo],
    queues: Iterable[QueueInfo],
    now_ms: int,
) -> tuple[Point, Tasks]:
    """The point of this moment, and what ended by task, since the last point of `last`. What it
    does not know of workers may be `remembered`."""
    told = sources(workers)
    gains: list[WorkerCounts] = []
    over_ms = now_ms - last.seen_ms if last.seen_ms is not None else 0
    if last.seen_ms is not None and 0 < over_ms <= GAP_MS and (told or not workers):
        seen = {each.source: each for each in last.seen}
        # What is remembered may be of a later moment, so not of processes that have begun since.
        older = {
            source: each
            for source, each in remembered.items()
            if each.since_ms < last.seen_ms - SLACK_MS
        }
        before = {**older, **seen}
        gains = [gained(each, before.get(each.source), last.seen_ms) for each in told.values()]
    else:
        over_ms = 0
    counted = list(queues)
    point = Point(
        at_s=FINE.slot_s(now_ms // 1000),
        samples=1,
        waiting=sum(each.waiting for each in counted),
        running=sum(each.running for each in counted),
        over_s=over_ms / 1000,
        **{name: sum(getattr(each, name) for each in gains) for name in _COUNTS},
        late=_added_late(each.late for each in gains),
    )
    return point, added_tasks(each.tasks for each in gains)


_COUNTS = ("started", "done", "failed", "dead", "expired")


def remember(before: Seen, told: Seen) -> dict[str, WorkerCounts]:
    """What processes have counted, also those that were silent this time: they may come back."""
    silent = [each for each in before if each not in told]
    room = max(SOURCES_MOST - len(told), 0)
    return {**{each: before[each] for each in silent[len(silent) - room :]}, **told}


def grown(stretch: Stretch, point: Point, tasks: Tasks, seen: Seen, now_ms: int) -> Stretch:
    """The stretch with one more point, in bounds: those with most failures stay."""
    most = sorted(
        added_tasks((stretch.tasks, tasks)).items(), key=lambda each: failures_of(each[1])
    )
    kept: list[WorkerCounts] = []
    size = 0
    # Those that were told last come first.
    for each in reversed(list(seen.values())):
        size += len(msgspec.json.encode(each)) + 1
        if size > SEEN_BYTES:
            break
        kept.append(each)
    return Stretch(
        points=with_point(stretch, point).points,
        tasks=dict(most[:TASKS_MOST]),
        seen=kept,
        seen_ms=now_ms,
    )


def failures_of(counts: tuple[int, int, int]) -> tuple[int, int]:
    """By which tasks are ordered: most failures first, then those that run most."""
    done, failed, dead = counts
    return -(failed + dead), -done


# --- Merging


def merged(points: Sequence[Point], at_s: int) -> Point:
    """All of them as one: counts are added, and numbers of jobs are means."""
    samples = sum(each.samples for each in points)
    return Point(
        at_s=at_s,
        samples=samples,
        waiting=sum(each.waiting * each.samples for each in points) / max(samples, 1),
        running=sum(each.running * each.samples for each in points) / max(samples, 1),
        over_s=sum(each.over_s for each in points),
        **{name: sum(getattr(each, name) for each in points) for name in _COUNTS},
        late=_added_late(each.late for each in points),
    )


def _added_late(found: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(each) for each in zip_longest(*found, fillvalue=0))


def added_tasks(found: Iterable[Tasks]) -> dict[str, tuple[int, int, int]]:
    sums: dict[str, tuple[int, int, int]] = {}
    for tasks in found:
        for task, (done, failed, dead) in tasks.items():
            was = sums.get(task, (0, 0, 0))
            sums[task] = (was[0] + done, was[1] + failed, was[2] + dead)
    return sums


def with_point(stretch: Stretch, point: Point) -> Stretch:
    """The stretch with this point, in place of the one of its time if there is one."""
    others = [each for each in stretch.points if each.at_s != point.at_s]
    points = sorted([*others, point], key=lambda each: each.at_s)
    return msgspec.structs.replace(stretch, points=tuple(points))


def rolled_up(fine: Stretch, coarse: Sequence[Stretch]) -> list[Stretch]:
    """The stretches of the coarser tiers around this one of the finest, with their points of its
    time made again."""
    found: list[Stretch] = []
    source, at_s = fine, FINE.start_s(fine.last_s)
    for tier, stretch in zip(COARSE, coarse, strict=True):
        slot_s = tier.slot_s(at_s)
        points = [each for each in source.points if tier.slot_s(each.at_s) == slot_s]
        source = with_point(stretch, merged(points, slot_s))
        found.append(source)
    return found


# --- Records


def encoded(stretch: Stretch) -> str:
    return msgspec.json.encode(stretch).decode()


def decoded(text: str | None) -> Stretch:
    """Empty for what another release stored and this one can't read."""
    try:
        return EMPTY if text is None else _decoder.decode(text)
    except msgspec.MsgspecError:
        return EMPTY


_decoder = msgspec.json.Decoder(Stretch)


def expired(name: str, now_s: int) -> bool:
    """Whether a record of this name is of no more use."""
    tiers = {each.name: each for each in TIERS}
    tier, _, start = name.partition(".")
    if tier not in tiers or not start.isdecimal():
        return True
    return int(start) + tiers[tier].span_s < now_s - tiers[tier].keep_s


# --- What is shown


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Points of equal distance, the newest last; null where nothing is known. Done, failed and dead
    are per second."""

    times: list[int]
    done: list[float | None]
    failed: list[float | None]
    dead: list[float | None]
    waiting: list[float | None]
    running: list[float | None]
    p50_ms: list[float | None]
    p99_ms: list[float | None]


def history(tier: Tier, points: Iterable[Point], now_s: int) -> History:
    """These points on the time axis of their tier, which ends now."""
    by_time = {each.at_s: each for each in points}
    end_s = tier.slot_s(now_s)
    if end_s not in by_time:
        # It is not over.
        end_s -= tier.step_s
    times = list(range(end_s - tier.keep_s + tier.step_s, end_s + 1, tier.step_s))
    found = [by_time.get(each) for each in times]
    return History(
        times=times,
        done=[per_second(each, "done") for each in found],
        failed=[per_second(each, "failed") for each in found],
        dead=[per_second(each, "dead") for each in found],
        waiting=[None if each is None else round(each.waiting, 1) for each in found],
        running=[None if each is None else round(each.running, 1) for each in found],
        p50_ms=[late_ms(each, 0.5) for each in found],
        p99_ms=[late_ms(each, 0.99) for each in found],
    )


def per_second(point: Point | None, name: str) -> float | None:
    if point is None or not point.over_s:
        return None
    return round(float(getattr(point, name)) / point.over_s, 3)


def late_ms(point: Point | None, share: float) -> float | None:
    return None if point is None else quantile(BOUNDS_MS, point.late, share)
