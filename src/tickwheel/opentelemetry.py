"""OpenTelemetry for an app: spans around `enqueue` and each run, and its counts as metrics.

Names follow the semantic conventions for messaging, which are still in development.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tickwheel.app import App
from tickwheel.engine.context import JobContext, current_jobs
from tickwheel.engine.counts import Counts, JobCounts, Numbers
from tickwheel.errors import BadConfig, Retry, Snooze
from tickwheel.job import Job
from tickwheel.version import __version__

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
except ImportError:
    raise BadConfig(
        "tickwheel.opentelemetry needs its API: pip install 'tickwheel[opentelemetry]'"
    ) from None

# Longer values than this don't fit into a job's meta.
VALUE_LIMIT = 256

_instrumented: weakref.WeakSet[App] = weakref.WeakSet()


def instrument(
    app: App,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
    with_metrics: bool = False,
) -> None:
    """Trace the jobs of this app: a PRODUCER span where a job is enqueued, and a CONSUMER span for
    each run, in a trace of its own with a link to the producer, because days may be between them.

    With `with_metrics`, or a meter provider, its counts are exported too. Without providers, the
    global ones are used. Call it once, before other middleware is declared and before the app is
    used.
    """
    if app in _instrumented:
        raise BadConfig(f"{app!r} is instrumented already; call instrument(app) once")
    _instrumented.add(app)
    tracer = trace.get_tracer("tickwheel", __version__, tracer_provider)
    app.on_enqueue(_Producer(tracer))
    app.middleware(_consumer(tracer))
    if with_metrics or meter_provider is not None:
        _export(app.enable_metrics(), metrics.get_meter("tickwheel", __version__, meter_provider))


# --- Spans


class _Producer:
    """Makes a span for each new job, and puts its context into the job's meta."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def __call__(self, job: Job) -> Mapping[str, str]:
        about = _about(job, "enqueue", "create")
        kind = trace.SpanKind.PRODUCER
        carrier: dict[str, str] = {}
        with self._tracer.start_as_current_span(f"enqueue {job.task}", kind=kind, attributes=about):
            propagate.inject(carrier)
        return {name: value for name, value in carrier.items() if len(value) <= VALUE_LIMIT}


CallNext = Callable[[], Awaitable[Any]]


def _consumer(tracer: trace.Tracer) -> Callable[[JobContext, CallNext], Awaitable[Any]]:
    async def traced(job: JobContext, call_next: CallNext) -> Any:
        jobs = [each.job for each in current_jobs()] or [job.job]
        about = _about(job.job, "run", "process") | {"tickwheel.attempt": job.job.attempt}
        if len(jobs) > 1:
            about["messaging.batch.message_count"] = len(jobs)
            del about["messaging.message.id"]
        with tracer.start_as_current_span(
            f"run {job.job.task}",
            Context(),
            trace.SpanKind.CONSUMER,
            about,
            list(_links(jobs)),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                return await call_next()
            except BaseException as error:
                _note(span, error)
                raise

    return traced


def _about(job: Job, name: str, kind: str) -> dict[str, str | int]:
    return {
        "messaging.system": "tickwheel",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": job.queue,
        "messaging.message.id": job.id,
        "tickwheel.task": job.task,
    }


def _links(jobs: Sequence[Job]) -> Iterator[trace.Link]:
    """To where these jobs were enqueued."""
    for job in jobs:
        context = propagate.extract(job.meta or {}, Context())
        producer = trace.get_current_span(context).get_span_context()
        if producer.is_valid:
            yield trace.Link(producer)


def _note(span: trace.Span, error: BaseException) -> None:
    """A task that asks to run later has not failed."""
    if isinstance(error, (Snooze, asyncio.CancelledError)):
        span.set_attribute("tickwheel.outcome", type(error).__name__)
        return
    span.set_attribute("error.type", type(error).__qualname__)
    if isinstance(error, Retry):
        span.set_attribute("tickwheel.outcome", "Retry")
    else:
        span.record_exception(error)
    span.set_status(trace.StatusCode.ERROR, str(error))


# --- Metrics


Rows = Iterable[tuple[float, dict[str, str]]]


def _export(counts: Counts, meter: metrics.Meter) -> None:
    """Observable counters over the plain numbers: nothing is done for a run."""
    for name, unit, about, rows in (
        ("tickwheel.jobs", "{job}", "What happened to jobs and runs.", _jobs),
        ("tickwheel.lateness", "s", "The time from due to start, of all runs.", _lateness),
        ("tickwheel.run.time", "s", "The time that runs took.", _run_time),
        ("tickwheel.objective.runs", "{run}", "Runs, and jobs that expired.", _runs),
        ("tickwheel.objective.good", "{run}", "Runs that started in time.", _good),
        ("tickwheel.store.calls", "{call}", "Store calls.", _calls),
        ("tickwheel.store.errors", "{call}", "Store calls that failed.", _errors),
    ):
        meter.create_observable_counter(name, [_observer(counts, rows)], unit, about)


def _observer(
    counts: Counts, rows: Callable[[Numbers], Rows]
) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
    def observe(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        found = rows(counts.from_any_thread())
        return [metrics.Observation(value, labels) for value, labels in found]

    return observe


def _jobs(numbers: Numbers) -> Rows:
    for task, counts in numbers.tasks.items():
        for queue, jobs in counts.queues.items():
            for event in JobCounts.EVENTS:
                yield getattr(jobs, event), {"task": task, "queue": queue, "event": event}


def _lateness(numbers: Numbers) -> Rows:
    return [(each.late_ms / 1_000, {"task": task}) for task, each in numbers.tasks.items()]


def _run_time(numbers: Numbers) -> Rows:
    return [(each.took_ms / 1_000, {"task": task}) for task, each in numbers.tasks.items()]


def _runs(numbers: Numbers) -> Rows:
    return [(each.tally.total, {"task": task}) for task, each in numbers.tasks.items()]


def _good(numbers: Numbers) -> Rows:
    return [(each.tally.good, {"task": task}) for task, each in numbers.tasks.items()]


def _calls(numbers: Numbers) -> Rows:
    return [(each.count, {"method": method}) for method, each in numbers.calls.items()]


def _errors(numbers: Numbers) -> Rows:
    return [(each.errors, {"method": method}) for method, each in numbers.calls.items()]
