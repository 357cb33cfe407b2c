"""The measurements: each starts a subject on an empty store and adds its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tickwheel.bench.catalogue import Subject
from tickwheel.bench.figures import Figures, Row, quantile
from tickwheel.bench.plan import Plan
from tickwheel.bench.processes import Cast, SubjectFailed, cast, cpu_s, memory_mb
from tickwheel.bench.servers import Server
from tickwheel.clock import sleep_blocking

AT_ONCE, BULK = 1_000, 1_000
START_S = 30.0
# Filling a store with jobs for later takes as long as this many a second would, at most.
SLOWEST_FILL = 1_000
SETTLE_S = 0.5
GAP_S = 0.05
# How long before the first of some jobs is due they are added.
LEAD_S = 1.5


@dataclass(frozen=True, slots=True)
class Scene:
    """A subject in one round, with what it needs to start."""

    subject: Subject
    server: Server
    environment: Path | None
    plan: Plan
    figures: Figures

    def start(self) -> AbstractContextManager[Cast]:
        """On an empty store."""
        return cast(self.subject, self.server.fresh(), self.environment, self.server.pids)

    def add(self, key: str, value: float | None, waiting: int | None = None) -> None:
        self.figures.add(self.subject.name, Row(key, waiting), value)

    def lacks(self, part: str, *keys: str) -> bool:
        """Whether the library has no such part; then the figures are excused."""
        reason = self.subject.lacks.get(part)
        if reason is not None:
            for key in keys:
                self.figures.excuse(self.subject.name, key, reason)
        return reason is not None

    @contextmanager
    def trying(self, *keys: str) -> Iterator[None]:
        """A failure in here costs these figures, and no others."""
        try:
            yield
        except SubjectFailed as failure:
            for key in keys:
                self.figures.excuse(self.subject.name, key, str(failure))


# --- Adding


def adding(scene: Scene) -> None:
    """One after the other, many at once, in bulk; no worker runs."""
    seconds = scene.plan.enqueue_s
    parts: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("enqueue_sync", "add", "one_by_one", {"how": "add"}),
        ("enqueue_async", "add_async", "one_by_one", {"how": "add_async"}),
        ("enqueue_at_once", "add_async", "at_once", {"count": AT_ONCE}),
        ("enqueue_bulk", "add_many", "in_bulk", {"count": BULK}),
    )
    with scene.start() as cast:
        for key, part, what, details in parts:
            if scene.lacks(part, key):
                continue
            with scene.trying(key):
                # The first call of a kind opens connections.
                warm = {"count": 10} if "count" in details else {}
                cast.ask(what, within_s=START_S, seconds=0.001, **(details | warm))
                answer = cast.ask(what, within_s=seconds + START_S, seconds=seconds, **details)
                scene.add(key, answer["rate"])


# --- Draining


def draining(scene: Scene) -> None:
    with scene.start() as cast:
        drain(scene, cast, 1, "drain_one", costs=True)


def draining_by_several(scene: Scene) -> None:
    if scene.plan.processes > 1 and not scene.lacks("processes", "drain_several"):
        with scene.start() as cast:
            drain(scene, cast, scene.plan.processes, "drain_several")


def draining_batches(scene: Scene) -> None:
    if scene.subject.ours:
        with scene.start() as cast:
            drain(scene, cast, 1, "drain_batches", batch=True)
    else:
        scene.figures.excuse(scene.subject.name, "drain_batches", "no batches")


def drain(
    scene: Scene,
    cast: Cast,
    processes: int,
    key: str,
    *,
    waiting: int | None = None,
    costs: bool = False,
    batch: bool = False,
) -> None:
    """Fill the queue, start the workers, and count runs from the first to the last."""
    plan = scene.plan
    answer = cast.ask(
        "fill",
        within_s=plan.fill_s + START_S,
        count=plan.drain,
        seconds=plan.fill_s,
        later=False,
        batch=batch,
    )
    count = answer["count"]
    cast.start_workers(processes)
    first = cast.ask("until_ran", within_s=START_S + 10, count=1, seconds=START_S)
    if not first["runs"]:
        raise SubjectFailed(f"nothing ran within {START_S:g} s")
    before = [cpu_s(cast.worker_pids), cpu_s(cast.server_pids)]
    last = cast.ask("until_ran", within_s=plan.drain_s + 30, count=count, seconds=plan.drain_s)
    after = [cpu_s(cast.worker_pids), cpu_s(cast.server_pids)]
    scene.add(key, rate(last["times"], last["runs"]), waiting)
    ran = last["runs"] - first["runs"]
    if costs and ran:
        for name, start, end in zip(("cpu_worker", "cpu_server"), before, after, strict=True):
            if start is not None and end is not None:
                scene.add(name, (end - start) * 1e6 / ran)


def rate(times: list[int], runs: int) -> float | None:
    """Runs a second from the first to the last of these times; None if there are too few."""
    took_ns = times[-1] - times[0] if times else 0
    return (runs - 1) * 1e9 / took_ns if took_ns > 0 else None


# --- With an idle worker


def idling(scene: Scene) -> None:
    """Enqueue to start, the round trip of a result, and memory."""
    plan = scene.plan
    with scene.start() as cast:
        cast.start_workers()
        cast.probe(START_S)
        sleep_blocking(SETTLE_S)
        scene.add("memory_idle", memory_mb(cast.worker_pids))
        with scene.trying("start_p50", "start_p99"):
            answer = cast.ask(
                "starts",
                within_s=plan.starts * GAP_S * 20 + 60,
                count=plan.starts,
                gap_s=GAP_S,
                patience_s=15,
            )
            _quantiles(scene, "start", answer["ms"])
        if not scene.lacks("call", "result_p50", "result_p99"):
            with scene.trying("result_p50", "result_p99"):
                answer = cast.ask(
                    "calls", within_s=plan.calls_s + 30, count=plan.calls, seconds=plan.calls_s
                )
                _quantiles(scene, "result", answer["ms"])


def _quantiles(scene: Scene, key: str, samples: list[float], waiting: int | None = None) -> None:
    if samples:
        scene.add(f"{key}_p50", quantile(samples, 0.5), waiting)
        scene.add(f"{key}_p99", quantile(samples, 0.99), waiting)


# --- With many waiting


def punctuality(scene: Scene, waiting: int) -> None:
    """How late jobs start while many others wait for later, and what waiting costs in memory."""
    plan = scene.plan
    with scene.start() as cast:
        fill_later(scene, cast, waiting)
        cast.start_workers()
        cast.probe(START_S + waiting / 10_000)
        sleep_blocking(SETTLE_S)
        scene.add("memory", memory_mb(cast.worker_pids), waiting)
        scene.add("server_memory", memory_mb(cast.server_pids), waiting)
        late: list[float] = []
        missing = 0
        for load, count in (("light", plan.light), ("heavy", plan.heavy)):
            if not count:
                continue
            with scene.trying(f"late_{load}_p50", f"late_{load}_p99"):
                answer = cast.ask(
                    "spread",
                    within_s=plan.over_s + plan.patience_s + LEAD_S + 60,
                    count=count,
                    over_s=plan.over_s,
                    lead_s=LEAD_S,
                    patience_s=plan.patience_s,
                )
                late, missing = late + answer["ms"], missing + answer["missing"]
                # A job that starts early is as wrong as one that is late.
                _quantiles(scene, f"late_{load}", [abs(each) for each in answer["ms"]], waiting)
        scene.add("missing", missing, waiting)
        scene.add("early", sum(each < 0 for each in late), waiting)


def growth(scene: Scene, waiting: int) -> None:
    """What it costs to add and to run jobs while many others wait for later."""
    seconds = scene.plan.enqueue_s
    with scene.start() as cast:
        if waiting:
            fill_later(scene, cast, waiting)
        how = "add" if "add_async" in scene.subject.lacks else "add_async"
        cast.ask("one_by_one", within_s=START_S, how=how, seconds=0.001)
        answer = cast.ask("one_by_one", within_s=seconds + START_S, how=how, seconds=seconds)
        scene.add("enqueue", answer["rate"], waiting)
        drain(scene, cast, 1, "drain", waiting=waiting)


def fill_later(scene: Scene, cast: Cast, waiting: int) -> None:
    """Add jobs that are due in an hour; SubjectFailed if that takes too long."""
    seconds = 5 + waiting / SLOWEST_FILL
    answer = cast.ask(
        "fill", within_s=seconds + START_S, count=waiting, seconds=seconds, later=True
    )
    if answer["count"] < waiting:
        raise SubjectFailed(f"only {answer['count']:,} of {waiting:,} added in {seconds:g} s")
    scene.add("fill", answer["rate"], waiting)


# --- All of them

Step = tuple[str, tuple[str, ...], Callable[[Scene], None]]

_STARTS = ("start_p50", "start_p99", "result_p50", "result_p99", "memory_idle")
_LATE = ("late_light_p50", "late_light_p99", "late_heavy_p50", "late_heavy_p99", "memory")


def steps(subject: Subject, plan: Plan, number: int) -> list[Step]:
    """What a round consists of: a name, the figures that fail with it, and what to do."""
    found: list[Step] = [
        ("enqueue", (), adding),
        ("drain", ("drain_one",), draining),
        ("drain, several processes", ("drain_several",), draining_by_several),
        ("drain in batches", ("drain_batches",), draining_batches),
        ("idle worker", _STARTS, idling),
    ]
    if number <= plan.waiting_rounds:
        levels = plan.waiting if subject.ours else plan.peers_waiting
        for level in levels:
            found.append((f"{level:,} waiting", _LATE, _at(punctuality, level)))
        if plan.rounds > 1:
            for level in (0, *levels):
                found.append((f"cost with {level:,} waiting", ("drain",), _at(growth, level)))
    return found


def _at(step: Callable[[Scene, int], None], level: int) -> Callable[[Scene], None]:
    return lambda scene: step(scene, level)
