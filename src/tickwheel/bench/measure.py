"""The measurements: each starts a subject on an empty store and adds its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tickwheel.bench.catalogue import Subject
from tickwheel.bench.figures import Figures, Reading, quantile
from tickwheel.bench.plan import Plan
from tickwheel.bench.processes import Deployment, SubjectFailed, cpu_s, deployed, memory_mb
from tickwheel.bench.servers import StoreServer
from tickwheel.clock import sleep_blocking

AT_ONCE, BULK = 1_000, 1_000
START_S = 30.0
# Filling a store with jobs for later takes as long as this many a second would, at most.
SLOWEST_FILL = 500
SETTLE_S = 0.5
# CPU time is counted in hundredths of a second.
COARSE_S = 0.05
GAP_S = 0.05
# How long before the first of some jobs is due they are added.
LEAD_S = 1.5


@dataclass(frozen=True, slots=True)
class Turn:
    """A subject in one round, with what it needs to start."""

    subject: Subject
    server: StoreServer
    environment: Path | None
    plan: Plan
    figures: Figures

    def start(self) -> AbstractContextManager[Deployment]:
        """On an empty store. An error of its server ends the round of all its subjects."""
        return deployed(self.subject, self.server.fresh(), self.environment, self.server.pids)

    def add(self, key: str, value: float | None, waiting: int | None = None) -> None:
        self.figures.add(self.subject.name, Reading(key, waiting), value)

    @property
    def plainest(self) -> str:
        """How jobs are added one after the other, if it is measured once: async if it can be."""
        return "add" if "add_async" in self.subject.lacks else "add_async"

    def lacks(self, part: str, *keys: str) -> bool:
        """Whether the library has no such part; then the figures are excused."""
        reason = self.subject.lacks.get(part)
        if reason is not None:
            self.excuse(reason, *keys)
        return reason is not None

    def excuse(self, reason: str, *keys: str) -> None:
        for key in keys:
            self.figures.excuse(self.subject.name, key, reason)

    @contextmanager
    def trying(self, *keys: str) -> Iterator[None]:
        """A failure in here costs these figures, and no others."""
        try:
            yield
        except SubjectFailed as failure:
            self.figures.fail(self.subject.name, keys[0], keys, str(failure))


# --- Adding


def adding(turn: Turn) -> None:
    """One after the other, many at once, in bulk; no worker runs."""
    seconds = turn.plan.enqueue_s
    parts: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("enqueue_sync", "add", "one_by_one", {"how": "add"}),
        ("enqueue_async", "add_async", "one_by_one", {"how": "add_async"}),
        ("enqueue_at_once", "add_async", "at_once", {"count": AT_ONCE}),
        ("enqueue_bulk", "add_many", "in_bulk", {"count": BULK}),
    )
    with turn.start() as deployment:
        for key, part, what, details in parts:
            if turn.lacks(part, key):
                continue
            with turn.trying(key):
                # The first call of a kind opens connections.
                warm = {"count": 10} if "count" in details else {}
                deployment.ask(what, within_s=START_S, seconds=0.001, **(details | warm))
                answer = deployment.ask(
                    what, within_s=seconds + START_S, seconds=seconds, **details
                )
                turn.add(key, answer["rate"])
                if details.get("how") == turn.plainest:
                    turn.add("enqueue", answer["rate"], 0)


# --- Draining


def draining(turn: Turn) -> None:
    with turn.start() as deployment:
        found = drain(turn, deployment, 1, "drain_one", costs=True)
        turn.add("drain", found, 0)


def draining_by_several(turn: Turn) -> None:
    if turn.plan.processes > 1 and not turn.lacks("processes", "drain_several"):
        with turn.start() as deployment:
            drain(turn, deployment, turn.plan.processes, "drain_several")


def draining_batches(turn: Turn) -> None:
    if turn.subject.ours:
        with turn.start() as deployment:
            drain(turn, deployment, 1, "drain_batches", batch=True)
    else:
        turn.excuse("no batches", "drain_batches")


def drain(
    turn: Turn,
    deployment: Deployment,
    processes: int,
    key: str,
    *,
    waiting: int | None = None,
    costs: bool = False,
    batch: bool = False,
) -> float | None:
    """Fill the queue, start the workers, and count runs from the first to the last."""
    plan = turn.plan
    answer = deployment.ask(
        "fill",
        within_s=plan.fill_s + START_S,
        count=plan.drain,
        seconds=plan.fill_s,
        later=False,
        batch=batch,
    )
    count = answer["count"]
    deployment.start_workers(processes)
    deployment.until_ran(1, START_S)
    before = [cpu_s(deployment.worker_pids), cpu_s(deployment.server_pids)]
    # More have run since then.
    first = deployment.ask("until_ran", within_s=START_S, count=0, seconds=0)
    last = deployment.ask(
        "until_ran", within_s=plan.drain_s + 30, count=count, seconds=plan.drain_s
    )
    after = [cpu_s(deployment.worker_pids), cpu_s(deployment.server_pids)]
    found = rate(last["times"], last["runs"])
    turn.add(key, found, waiting)
    if costs:
        _costs(turn, before, after, last["runs"] - first["runs"])
    return found


def _costs(turn: Turn, before: list[float | None], after: list[float | None], runs: int) -> None:
    """CPU time per job; none if the kernel's count is too coarse to tell."""
    for name, start, end in zip(("cpu_worker", "cpu_server"), before, after, strict=True):
        if start is not None and end is not None and end - start >= COARSE_S and runs:
            turn.add(name, (end - start) * 1e6 / runs)


def rate(times: list[int], runs: int) -> float | None:
    """Runs a second from the first to the last of these times; None if there are too few."""
    took_ns = times[-1] - times[0] if times else 0
    return (runs - 1) * 1e9 / took_ns if took_ns > 0 else None


# --- With an idle worker


def idling(turn: Turn) -> None:
    """Enqueue to start, the round trip of a result, and memory."""
    plan = turn.plan
    with turn.start() as deployment:
        deployment.start_workers()
        deployment.probe(START_S)
        sleep_blocking(SETTLE_S)
        turn.add("memory_idle", memory_mb(deployment.worker_pids))
        with turn.trying("start_p50", "start_p99"):
            answer = deployment.ask(
                "starts",
                within_s=plan.starts * GAP_S * 20 + 60,
                count=plan.starts,
                gap_s=GAP_S,
                patience_s=15,
            )
            _quantiles(turn, "start", answer["ms"])
        if not turn.lacks("call", "result_p50", "result_p99"):
            with turn.trying("result_p50", "result_p99"):
                answer = deployment.ask(
                    "calls", within_s=plan.calls_s + 30, count=plan.calls, seconds=plan.calls_s
                )
                _quantiles(turn, "result", answer["ms"])


def _quantiles(turn: Turn, key: str, samples: list[float], waiting: int | None = None) -> None:
    if samples:
        turn.add(f"{key}_p50", quantile(samples, 0.5), waiting)
        turn.add(f"{key}_p99", quantile(samples, 0.99), waiting)


# --- With many waiting


def punctuality(turn: Turn, waiting: int) -> None:
    """How late jobs start while many others wait for later, and what waiting costs in memory."""
    plan = turn.plan
    with turn.start() as deployment:
        fill_later(turn, deployment, waiting)
        deployment.start_workers()
        deployment.probe(START_S + waiting / 10_000)
        sleep_blocking(SETTLE_S)
        turn.add("memory", memory_mb(deployment.worker_pids), waiting)
        turn.add("server_memory", memory_mb(deployment.server_pids), waiting)
        early = missing = 0
        for load, count in (("light", plan.light), ("heavy", plan.heavy)):
            if not count:
                continue
            with turn.trying(f"late_{load}_p50", f"late_{load}_p99"):
                answer = deployment.ask(
                    "spread",
                    within_s=plan.over_s + plan.patience_s + LEAD_S + 60,
                    count=count,
                    over_s=plan.over_s,
                    lead_s=LEAD_S,
                    patience_s=plan.patience_s,
                )
                off, before = distances(answer["ms"])
                if not off:
                    turn.excuse("none started in time", f"late_{load}_p50", f"late_{load}_p99")
                _quantiles(turn, f"late_{load}", off, waiting)
                early, missing = early + before, missing + answer["missing"]
        turn.add("early", early, waiting)
        turn.add("missing", missing, waiting)


def distances(late: list[float]) -> tuple[list[float], int]:
    """How far each start was from its time, and how many were before it: a job that starts early
    is as wrong as one that is late."""
    return [abs(each) for each in late], sum(each < 0 for each in late)


def growth(turn: Turn, waiting: int) -> None:
    """What it costs to add and to run jobs while many others wait for later."""
    seconds = turn.plan.enqueue_s
    with turn.start() as deployment:
        fill_later(turn, deployment, waiting)
        how = turn.plainest
        deployment.ask("one_by_one", within_s=START_S, how=how, seconds=0.001)
        answer = deployment.ask("one_by_one", within_s=seconds + START_S, how=how, seconds=seconds)
        turn.add("enqueue", answer["rate"], waiting)
        drain(turn, deployment, 1, "drain", waiting=waiting)


def fill_later(turn: Turn, deployment: Deployment, waiting: int) -> None:
    """Add jobs that are due in an hour; SubjectFailed if that takes too long."""
    seconds = 5 + waiting / SLOWEST_FILL
    answer = deployment.ask(
        "fill", within_s=seconds + START_S, count=waiting, seconds=seconds, later=True
    )
    if answer["count"] < waiting:
        raise SubjectFailed(f"only {answer['count']:,} of {waiting:,} added in {seconds:g} s")
    turn.add("fill", answer["rate"], waiting)


# --- All of them

Step = tuple[str, tuple[str, ...], Callable[[Turn], None]]

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
            if plan.growth:
                found.append((f"cost with {level:,} waiting", ("drain",), _at(growth, level)))
    return found


def _at(step: Callable[[Turn, int], None], level: int) -> Callable[[Turn], None]:
    return lambda turn: step(turn, level)
