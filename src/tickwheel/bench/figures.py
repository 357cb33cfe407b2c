"""Figures: what is measured, in which unit, which is better; medians, spreads and comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tickwheel.bench.catalogue import OURS


@dataclass(frozen=True, slots=True)
class Measure:
    """One kind of figure."""

    key: str
    title: str
    unit: str
    # Whether a higher figure is better.
    more: bool = True


MEASURES = {
    each.key: each
    for each in (
        Measure("enqueue_sync", "enqueue, one after the other, sync", "jobs/s"),
        Measure("enqueue_async", "enqueue, one after the other, async", "jobs/s"),
        Measure("enqueue_at_once", "enqueue, many at once, async", "jobs/s"),
        Measure("enqueue_bulk", "enqueue in bulk, 1,000 a call", "jobs/s"),
        Measure("drain_one", "drain, one process", "jobs/s"),
        Measure("drain_several", "drain, several processes", "jobs/s"),
        Measure("drain_batches", "drain in batches of 100, one process", "jobs/s"),
        Measure("cpu_worker", "CPU of the worker per job", "µs", more=False),
        Measure("cpu_server", "CPU of the server per job", "µs", more=False),
        Measure("start_p50", "enqueue to start, idle worker, p50", "ms", more=False),
        Measure("start_p99", "enqueue to start, idle worker, p99", "ms", more=False),
        Measure("result_p50", "enqueue to result, p50", "ms", more=False),
        Measure("result_p99", "enqueue to result, p99", "ms", more=False),
        Measure("late_light_p50", "off its due time, light load, p50", "ms", more=False),
        Measure("late_light_p99", "off its due time, light load, p99", "ms", more=False),
        Measure("late_heavy_p50", "off its due time, heavy load, p50", "ms", more=False),
        Measure("late_heavy_p99", "off its due time, heavy load, p99", "ms", more=False),
        Measure("early", "started before they were due", "jobs", more=False),
        Measure("missing", "not started in time to be seen", "jobs", more=False),
        Measure("memory_idle", "worker memory, empty store", "MB", more=False),
        Measure("memory", "worker memory", "MB", more=False),
        Measure("server_memory", "server memory", "MB", more=False),
        Measure("fill", "fill the store with later jobs", "jobs/s"),
        Measure("enqueue", "enqueue, one after the other", "jobs/s"),
        Measure("drain", "drain, one process", "jobs/s"),
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Reading:
    """What a figure is of: a measure, and how many jobs waited for later meanwhile, if that was
    part of it."""

    key: str
    waiting: int | None = None

    @property
    def measure(self) -> Measure:
        return MEASURES[self.key]

    @property
    def title(self) -> str:
        if self.waiting is None:
            return self.measure.title
        return f"{self.measure.title}, {self.waiting:,} waiting"


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of several rounds."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass(slots=True)
class Figures:
    """All figures of a run: by subject, by reading, one value for each round; and why some are
    missing."""

    values: dict[str, dict[Reading, list[float]]] = field(default_factory=dict)
    # By subject and key of the measure, or "" for all of them.
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    # Which subject failed to do what, and why.
    failures: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, subject: str, reading: Reading, value: float | None) -> None:
        if value is not None:
            self.values.setdefault(subject, {}).setdefault(reading, []).append(value)

    def excuse(self, subject: str, key: str, reason: str) -> None:
        self.reasons.setdefault(subject, {}).setdefault(key, reason)

    def fail(self, subject: str, what: str, keys: Sequence[str], reason: str) -> None:
        """These figures are missing, in one round at least, although they should be there."""
        self.failures.append((subject, what, " ".join(reason.split())))
        for key in keys:
            self.excuse(subject, key, "it failed")

    def spread(self, subject: str, reading: Reading) -> Spread | None:
        values = self.values.get(subject, {}).get(reading)
        return Spread.of(values) if values else None

    def readings(self) -> list[Reading]:
        """In the order of the measures, then by how many waited."""
        found = {reading for by_row in self.values.values() for reading in by_row}
        order = {key: at for at, key in enumerate(MEASURES)}
        return sorted(found, key=lambda reading: (order[reading.key], reading.waiting or 0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tickwheel and the best peer on the same store."""

    store: str
    reading: Reading
    ours: float
    peer: str
    theirs: float

    @property
    def factor(self) -> float:
        """How many times better Tickwheel is; below 1, the peer is better."""
        above, below = (
            (self.ours, self.theirs) if self.reading.measure.more else (self.theirs, self.ours)
        )
        return above / below if below > 0 else float("inf")


def comparisons(
    figures: Figures, stores: Mapping[str, Iterable[str]], readings: Iterable[Reading]
) -> list[Comparison]:
    """For each store, with the libraries on it, and each reading: against the best peer that has
    this figure."""
    found = []
    for store, libraries in stores.items():
        for reading in readings:
            ours = figures.spread(f"{OURS} · {store}", reading)
            peers = [
                (spread.median, library)
                for library in libraries
                if library != OURS and (spread := figures.spread(f"{library} · {store}", reading))
            ]
            if ours is not None and peers:
                theirs, peer = (max if reading.measure.more else min)(peers)
                found.append(Comparison(store, reading, ours.median, peer, theirs))
    return found
