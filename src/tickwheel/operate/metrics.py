"""An app's metrics for Prometheus, as text: `docs/metrics.md` lists them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from tickwheel.app import App
from tickwheel.engine.counts import BOUNDS_MS, CALL_BOUNDS_US, WAITS, JobCounts, Numbers
from tickwheel.errors import BadConfig
from tickwheel.job import State
from tickwheel.objective import Objective
from tickwheel.operate.overview import Overview, Overviews
from tickwheel.version import __version__

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
except ImportError:
    raise BadConfig("metrics need prometheus-client: pip install 'tickwheel[metrics]'") from None

_BOUNDS = [str(ms / 1_000) for ms in BOUNDS_MS] + ["+Inf"]
_CALL_BOUNDS = [str(us / 1_000_000) for us in CALL_BOUNDS_US] + ["+Inf"]

_EVENTS = {
    "added": "Jobs added by this process, and by its schedules.",
    "started": "Runs that started.",
    "done": "Jobs that are done.",
    "failed": "Runs that failed, whether they are retried or not.",
    "retried": "Failed runs after which the job runs again.",
    "dead": "Jobs that are dead: out of retries, until a person acts.",
    "expired": "Jobs that could not start in time, and were cancelled.",
    "cancelled": "Runs that a cancel stopped.",
    "snoozed": "Runs that asked to run later.",
    "released": "Runs that were stopped, for another run: the worker ended.",
    "lost": "Runs whose outcome did not count: the lease had run out.",
}
assert tuple(_EVENTS) == JobCounts.EVENTS

_STATES = (State.WAITING, State.RUNNING, State.DONE, State.DEAD, State.CANCELLED)


class Metrics:
    """The metrics of one app in this process. Turns them on. Belongs to one event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._counts = app.enable_metrics()
        self._overviews = Overviews(app)

    async def text(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics and their content type, in the format that the Accept header asks for:
        OpenMetrics, or Prometheus' own text."""
        overview = await self._overviews.get()
        numbers = self._counts.numbers()
        app, objective = self._app.name, self._app.objective
        # In a thread: with many tasks it takes longer than a job should wait.
        return await asyncio.to_thread(
            encoded, accept, lambda: families(app, objective, numbers, overview)
        )


def encoded(accept: str, collect: Callable[[], Iterable[Metric]]) -> tuple[bytes, str]:
    """The metrics as text, and their content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(collect())))
    try:
        encoder, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # an Accept header that can't be read
        encoder, content_type = choose_encoder("")
    return encoder(registry), content_type


def families(
    app: str, objective: Objective | None, numbers: Numbers, overview: Overview
) -> Iterator[Metric]:
    """All metrics, from plain numbers."""
    yield from _of_jobs(numbers)
    yield from _of_objective(objective, numbers)
    yield from _of_calls(numbers)
    yield _of_callbacks(numbers)
    yield from _of_workers(app, numbers)
    yield _gauge("store_up", "Whether the store answered when it was last asked.", overview.up)
    if overview.up:
        yield from _of_store(overview)


# --- This process


def _of_jobs(numbers: Numbers) -> Iterator[Metric]:
    for event, about in _EVENTS.items():
        family = CounterMetricFamily(f"tickwheel_jobs_{event}", about, labels=["task", "queue"])
        for task, counts in numbers.tasks.items():
            for queue, jobs in counts.queues.items():
                family.add_metric([task, queue], getattr(jobs, event))
        yield family
    late = _histogram("punctuality_seconds", "How long after it is due a run starts.", "task")
    took = _histogram("run_seconds", "How long runs take.", "task")
    for task, counts in numbers.tasks.items():
        late.add_metric([task], _buckets(_BOUNDS, counts.late), counts.late_ms / 1_000)
        took.add_metric([task], _buckets(_BOUNDS, counts.took), counts.took_ms / 1_000)
    yield late
    yield took


def _of_objective(objective: Objective | None, numbers: Numbers) -> Iterator[Metric]:
    if objective is None:
        return
    about = "The share of runs that should start in time."
    yield _gauge("objective_ratio", about, objective.ratio)
    about = "How long after it is due a run may start to be in time."
    yield _gauge("objective_seconds", about, objective.within_ms / 1_000)
    total = CounterMetricFamily(
        "tickwheel_objective_runs", "Runs that started, and jobs that expired.", labels=["task"]
    )
    good = CounterMetricFamily(
        "tickwheel_objective_good", "Runs that started in time.", labels=["task"]
    )
    for task, counts in numbers.tasks.items():
        total.add_metric([task], counts.tally.total)
        good.add_metric([task], counts.tally.good)
    yield total
    yield good


def _of_calls(numbers: Numbers) -> Iterator[Metric]:
    calls = CounterMetricFamily("tickwheel_store_calls", "Store calls.", labels=["method"])
    errors = CounterMetricFamily(
        "tickwheel_store_call_errors", "Store calls that failed.", labels=["method"]
    )
    took = _histogram("store_call_seconds", "How long store calls take, but not waits.", "method")
    for method, counts in numbers.calls.items():
        calls.add_metric([method], counts.count)
        errors.add_metric([method], counts.errors)
        if method not in WAITS:
            seconds = counts.total_us / 1_000_000
            took.add_metric([method], _buckets(_CALL_BOUNDS, counts.buckets), seconds)
    yield calls
    yield errors
    yield took
    yield CounterMetricFamily(
        "tickwheel_empty_claims", "Claims that found nothing.", numbers.empty_claims
    )


def _of_callbacks(numbers: Numbers) -> Metric:
    family = CounterMetricFamily(
        "tickwheel_callbacks",
        "HTTP callbacks that were sent, by the status of their answer; none: there was none.",
        labels=["host", "status"],
    )
    for (host, status), count in numbers.callbacks.items():
        family.add_metric([host, status], count)
    return family


def _of_workers(app: str, numbers: Numbers) -> Iterator[Metric]:
    workers = numbers.workers
    info = GaugeMetricFamily(
        "tickwheel_worker_info",
        "The workers of this process.",
        labels=["worker", "app", "version", "queues"],
    )
    for each in workers:
        info.add_metric([each.name, app, __version__, ",".join(each.queues)], 1)
    yield info
    about = "Held jobs that are not due yet."
    yield _gauge("wheel_jobs", about, sum(each.wheel for each in workers))
    about = "Held jobs that are due and have no slot."
    yield _gauge("ready_jobs", about, sum(each.ready for each in workers))
    yield _gauge("held_jobs", "All held jobs.", sum(each.held for each in workers))
    used = GaugeMetricFamily("tickwheel_slots_used", "Slots that runs take up.", labels=["pool"])
    free = GaugeMetricFamily(
        "tickwheel_slots_free", "How many more runs could start.", labels=["pool"]
    )
    for pool in ("async", "thread", "process"):
        used.add_metric([pool], sum(each.used[pool] for each in workers))
        free.add_metric([pool], sum(each.free[pool] for each in workers))
    yield used
    yield free


# --- The store


def _of_store(overview: Overview) -> Iterator[Metric]:
    yield _gauge("workers", "Workers that are running, on all machines.", overview.workers)
    jobs = GaugeMetricFamily(
        "tickwheel_queue_jobs", "Jobs in the store.", labels=["queue", "state"]
    )
    workers = _of_queue("workers", "Running workers that serve the queue.")
    paused = _of_queue("paused", "Whether the queue is paused.")
    due = _of_queue("due_jobs", "Waiting jobs that are due, among those that were looked at.")
    oldest = _of_queue("oldest_due_seconds", "For how long the first waiting job has been due.")
    for each in overview.queues:
        name = each.info.name
        for state in _STATES:
            jobs.add_metric([name, state], getattr(each.info, state))
        workers.add_metric([name], each.workers)
        paused.add_metric([name], each.info.paused)
        if each.due is not None and each.oldest_due_ms is not None:
            due.add_metric([name], each.due)
            oldest.add_metric([name], each.oldest_due_ms / 1_000)
    yield from (jobs, workers, paused, due, oldest)
    unserved = GaugeMetricFamily(
        "tickwheel_unserved_task",
        "Tasks with waiting jobs that no running worker of the queue knows.",
        labels=["queue", "task"],
    )
    for found in overview.unserved:
        unserved.add_metric([found.queue, found.task], 1)
    yield unserved


def _of_queue(name: str, about: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tickwheel_queue_{name}", about, labels=["queue"])


# --- As prometheus_client has them


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tickwheel_{name}", about, value)


def _histogram(name: str, about: str, label: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"tickwheel_{name}", about, labels=[label])


def _buckets(bounds: Sequence[str], counts: Iterable[int]) -> list[tuple[str, float]]:
    return list(zip(bounds, accumulate(counts), strict=True))


class _Collected(Collector):
    def __init__(self, collected: Iterable[Metric]) -> None:
        self._collected = collected

    def collect(self) -> Iterable[Metric]:
        return self._collected
