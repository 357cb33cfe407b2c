"""Spans of callers and runs, and counts, with the exporters of the OpenTelemetry SDK."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tickwheel import App, BadConfig, JobFailed, Retry, Snooze
from tickwheel.opentelemetry import instrument
from tickwheel.stores.memory import MemoryStore

PATIENCE_S = 30


class Traced:
    """An app whose spans are kept."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("test")
        self.app = App(MemoryStore(), name="shop")
        instrument(self.app, tracer_provider=self.provider)

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture
def traced() -> Iterator[Traced]:
    found = Traced()
    yield found
    found.provider.shutdown()


async def test_a_run_has_a_trace_of_its_own_and_a_link_to_where_it_was_enqueued(
    traced: Traced,
) -> None:
    @traced.app.task(queue="mail")
    async def send() -> None:
        with traced.tracer.start_as_current_span("inside"):
            pass

    async with traced.app, traced.app.worker():
        with traced.tracer.start_as_current_span("request") as request:
            job = await send.enqueue()
        await job.result(timeout=PATIENCE_S)
    [enqueued], [run], [inside] = map(traced.spans, ("enqueue send", "run send", "inside"))
    assert enqueued.kind is trace.SpanKind.PRODUCER and run.kind is trace.SpanKind.CONSUMER
    assert enqueued.parent is not None
    assert enqueued.parent.span_id == request.get_span_context().span_id
    assert run.parent is None and run.context.trace_id != enqueued.context.trace_id
    assert [link.context.span_id for link in run.links] == [enqueued.context.span_id]
    assert inside.parent is not None and inside.parent.span_id == run.context.span_id
    common = {
        "messaging.system": "tickwheel",
        "messaging.destination.name": "mail",
        "messaging.message.id": job.id,
        "tickwheel.task": "send",
    }
    assert dict(enqueued.attributes or {}) == {
        **common,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
    }
    assert dict(run.attributes or {}) == {
        **common,
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "tickwheel.attempt": 1,
    }


async def test_each_retry_is_a_span_and_a_failure_is_an_error(traced: Traced) -> None:
    @traced.app.task
    async def fail() -> None:
        raise ValueError("no luck")

    async with traced.app, traced.app.worker():
        job = await fail.using(retries=0).enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=PATIENCE_S)
    [run] = traced.spans("run fail")
    assert run.status.status_code is trace.StatusCode.ERROR
    assert run.status.description == "no luck"
    assert (run.attributes or {})["error.type"] == "ValueError"
    assert [event.name for event in run.events] == ["exception"]


async def test_what_a_task_chooses_is_no_exception(traced: Traced) -> None:
    seen: list[str] = []

    @traced.app.task
    async def chooses() -> None:
        seen.append("run")
        if len(seen) == 1:
            raise Snooze(0.001)
        if len(seen) == 2:
            raise Retry(0.001)

    async with traced.app, traced.app.worker():
        job = await chooses.enqueue()
        await job.result(timeout=PATIENCE_S)
    snoozed, retried, done = traced.spans("run chooses")
    codes = [span.status.status_code for span in (snoozed, retried, done)]
    assert codes == [trace.StatusCode.UNSET, trace.StatusCode.ERROR, trace.StatusCode.UNSET]
    assert (snoozed.attributes or {})["tickwheel.outcome"] == "Snooze"
    assert (retried.attributes or {})["tickwheel.outcome"] == "Retry"
    assert not snoozed.events and not retried.events
    assert [(span.attributes or {})["tickwheel.attempt"] for span in (snoozed, retried, done)] == [
        1,
        2,
        3,
    ]


async def test_a_batch_is_one_span_with_a_link_for_each_job(traced: Traced) -> None:
    @traced.app.batch(size=3, linger="10s")
    async def index(items: list[int]) -> None: ...

    async with traced.app, traced.app.worker():
        jobs = [await index.enqueue(n) for n in range(3)]
        for job in jobs:
            await job.result(timeout=PATIENCE_S)
    [run] = traced.spans("run index")
    producers = {span.context.span_id for span in traced.spans("enqueue index")}
    assert {link.context.span_id for link in run.links} == producers and len(producers) == 3
    assert (run.attributes or {})["messaging.batch.message_count"] == 3


async def test_the_spans_of_callers_without_an_event_loop(traced: Traced) -> None:
    @traced.app.task
    async def work() -> None: ...

    async with traced.app:
        await asyncio.to_thread(work.enqueue_sync)
    assert len(traced.spans("enqueue work")) == 1


def test_an_app_is_instrumented_once(traced: Traced) -> None:
    with pytest.raises(BadConfig, match="instrumented already"):
        instrument(traced.app)


def test_without_the_library_the_extra_is_named() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import tickwheel.opentelemetry"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'tickwheel[opentelemetry]'" in ended.stderr


async def test_counts_are_exported_as_they_are() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    app = App(MemoryStore(), name="shop")
    instrument(app, meter_provider=provider)

    @app.task(queue="mail")
    async def send() -> None: ...

    async with app, app.worker():
        await (await send.enqueue()).result(timeout=PATIENCE_S)
    found = points(reader)
    provider.shutdown()
    about = {"task": "send", "queue": "mail"}
    for event, count in (("added", 1), ("started", 1), ("done", 1), ("dead", 0)):
        assert found["tickwheel.jobs", frozenset((about | {"event": event}).items())] == count
    assert found["tickwheel.objective.runs", frozenset({("task", "send")})] == 1
    assert found["tickwheel.store.calls", frozenset({("method", "settle")})] == 1


def points(reader: InMemoryMetricReader) -> dict[tuple[str, frozenset[Any]], float]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        (metric.name, frozenset((point.attributes or {}).items())): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
        if hasattr(point, "value")
    }
