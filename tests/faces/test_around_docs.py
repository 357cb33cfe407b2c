"""docs/lifespan.md and docs/middleware.md are true: their examples run, with Sentry and with
OpenTelemetry."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import sentry_sdk
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from tickwheel import App, JobFailed, JobHandle, Snooze, Task
from tickwheel.testing import sandbox

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = {
    name: code
    for page in ("lifespan.md", "middleware.md")
    for name, code in re.findall(
        r"```python\n# (\w+)\.py\n(.*?)```", (DOCS / page).read_text(), re.DOTALL
    )
}
PATIENCE_S = 30

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports an example, on a store in memory."""
    monkeypatch.chdir(tmp_path)
    if not hasattr(App, "on_enqueue"):
        monkeypatch.setattr(App, "on_enqueue", lambda self, hook: hook, raising=False)

    def loaded(name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(BLOCKS[name].replace("sqlite:///jobs.db", "memory://"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Annotations are looked up in the module of a class.
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_every_example_has_a_name() -> None:
    pages = [(DOCS / page).read_text() for page in ("lifespan.md", "middleware.md")]
    assert len(BLOCKS) == sum(page.count("```python") for page in pages) == 5


async def test_both_ways_to_get_the_value(load: Load) -> None:
    shop = load("shop")
    async with shop.app.worker():
        for task in (shop.ship, shop.bill):
            job = await task.enqueue(42)
            assert await job.result(timeout=PATIENCE_S) == "order 42"
    assert await shop.ship(7, shop.Db()) == "order 7"


def test_the_one_of_child_processes(load: Load) -> None:
    reports = load("reports")
    with sandbox(reports.app) as box:
        reports.count.enqueue_sync()
        [run] = box.drain()
        assert run.result == 0


async def test_timing(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    timing = load("timing")
    async with timing.app.worker():
        job = await timing.ship.enqueue(1)
        assert await job.result(timeout=PATIENCE_S) == 1
    assert re.search(r"ship took 0\.\d{3} s", caplog.text)


async def enqueued(
    app: App, task: Task[..., Any, Any], hook: Callable[[Any], Any]
) -> JobHandle[Any]:
    """A new job with the meta that the hook gives it."""
    job = task.job()
    if job.meta is None:
        job = msgspec.structs.replace(job, meta=hook(job))
    await (await app.client()).add(job)
    return app.job(job.id)


async def failed(job: JobHandle[Any]) -> None:
    with pytest.raises(JobFailed):
        await job.result(timeout=PATIENCE_S)


# --- Sentry


class Sent(Transport):
    """Keeps what would be sent."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.events: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            event = item.get_event() or item.get_transaction_event()
            if event is not None:
                self.events.append(dict(event))

    def of(self, kind: str | None) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("type") == kind]


@pytest.fixture
def sent() -> Iterator[Sent]:
    transport = Sent()
    sentry_sdk.init(
        "https://key@sentry.invalid/1",
        transport=transport,
        traces_sample_rate=1.0,
        auto_enabling_integrations=False,
    )
    yield transport
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.init()


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_sentry_has_each_failure_once_in_the_trace_of_the_caller(
    load: Load, sent: Sent, pool: str
) -> None:
    module = load("with_sentry")
    app: App = module.app

    async def on_loop() -> None:
        sentry_sdk.set_tag("from", "the task")
        raise ValueError("no luck")

    def in_thread() -> None:
        sentry_sdk.set_tag("from", "the task")
        raise ValueError("no luck")

    function: Any = on_loop if pool == "async" else in_thread
    task: Task[..., Any, Any] = app.task(name="fail", retries=0)(function)
    async with app, app.worker():
        with sentry_sdk.start_transaction(op="http.server", name="/orders") as request:
            job = await enqueued(app, task, module.sentry_trace)
            await failed(job)
    [event] = sent.of(None)
    assert event["exception"]["values"][-1]["value"] == "no luck"
    assert event["tags"] == {"job_id": job.id, "attempt": 1, "from": "the task"}
    assert event["transaction"] == "fail"
    [run] = [each for each in sent.of("transaction") if each["transaction"] == "fail"]
    assert run["contexts"]["trace"]["trace_id"] == request.trace_id
    assert event["contexts"]["trace"]["trace_id"] == request.trace_id
    # What one run sets is gone with it.
    assert "from" not in (sentry_sdk.get_isolation_scope()._tags or {})


async def test_sentry_is_not_told_of_what_a_task_chooses(load: Load, sent: Sent) -> None:
    module = load("with_sentry")
    app: App = module.app

    @app.task
    async def later() -> None:
        raise Snooze("1h")

    async with app, app.worker():
        job = await enqueued(app, later, module.sentry_trace)
        async with asyncio.timeout(PATIENCE_S):
            while not (await job.info()).history:
                await asyncio.sleep(0.01)
    assert sent.of(None) == [] and len(sent.of("transaction")) == 1


# --- OpenTelemetry


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[ReadableSpan]]]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # A process can set it only once.
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield lambda: list(exporter.get_finished_spans())
    provider.shutdown()


@pytest.mark.parametrize("pool", ["async", "thread"])
async def test_a_span_is_in_the_trace_of_the_caller_and_around_those_of_the_task(
    load: Load, spans: Callable[[], list[ReadableSpan]], pool: str
) -> None:
    module = load("with_otel")
    app: App = module.app

    async def on_loop() -> None:
        with module.tracer.start_as_current_span("inside"):
            raise ValueError("no luck")

    def in_thread() -> None:
        with module.tracer.start_as_current_span("inside"):
            raise ValueError("no luck")

    function: Any = on_loop if pool == "async" else in_thread
    task: Task[..., Any, Any] = app.task(name="fail", retries=0)(function)
    async with app, app.worker():
        with module.tracer.start_as_current_span("request") as request:
            job = await enqueued(app, task, module.carry_trace)
            await failed(job)
    by_name = {span.name: span for span in spans()}
    run, inside = by_name["fail"], by_name["inside"]
    assert run.parent is not None and run.parent.span_id == request.get_span_context().span_id
    assert run.context is not None
    assert inside.parent is not None and inside.parent.span_id == run.context.span_id
    assert run.status.status_code is trace.StatusCode.ERROR
    assert dict(run.attributes or {}) == {"messaging.message.id": job.id, "tickwheel.attempt": 1}
    assert run.kind is trace.SpanKind.CONSUMER


async def test_a_job_of_nobody_has_a_trace_of_its_own(
    load: Load, spans: Callable[[], list[ReadableSpan]]
) -> None:
    module = load("with_otel")

    app: App = module.app

    @app.task
    async def work() -> None: ...

    async with app, app.worker():
        job = await enqueued(app, work, module.carry_trace)
        await job.result(timeout=PATIENCE_S)
    [run] = spans()
    assert run.name == "work" and run.parent is None
