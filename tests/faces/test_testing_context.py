"""What travels with a job, and what its task knows and says, in a box."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from box_tasks import NEVER
from boxes import HOUR, HOURLY, MINUTE, START

from tickwheel import App, JobCancelled, Outcome, Progress, State, Task, current_job
from tickwheel.testing import run_virtual, sandbox

app = App(NEVER)


def known() -> dict[str, Any]:
    context = current_job()
    assert context is not None
    context.progress(0.4, "loading")
    return {
        "id": context.id,
        "task": context.task,
        "attempt": context.attempt,
        "due": context.due.isoformat(),
        "deadline": context.deadline and context.deadline.isoformat(),
        "meta": context.meta,
        "stopping": context.stopping,
    }


@app.task(timeout="1h")
async def on_loop() -> dict[str, Any]:
    return known()


@app.task(timeout="1h")
def in_thread() -> dict[str, Any]:
    return known()


@app.task(timeout="1h", pool="process")
def in_process() -> dict[str, Any]:
    return known()


@app.task(retries=HOURLY)
async def fail() -> None:
    raise ValueError("not today")


@app.task
async def pass_on() -> None:
    await on_loop.using(inherit_meta=True).enqueue()


TASKS: tuple[Task[[], Any, Any], ...] = (on_loop, in_thread, in_process)


def check(runs: list[Any]) -> None:
    for task, run in zip(TASKS, runs, strict=True):
        assert run.result == {
            "id": run.job.id,
            "task": task.name,
            "attempt": 1,
            "due": (START + MINUTE).isoformat(),
            "deadline": (START + MINUTE + HOUR).isoformat(),
            "meta": {"customer": "42"},
            "stopping": False,
        }
        assert run.job.progress == Progress(0.4, "loading")
        assert run.job.meta == {"customer": "42"}


def test_a_task_knows_its_job_and_says_its_progress() -> None:
    with sandbox(app, start=START) as box:
        for task in TASKS:
            task.using(delay="1m", meta={"customer": "42"}).enqueue_sync()
        check(box.travel("1m"))


def test_also_on_an_event_loop() -> None:
    async def story() -> None:
        async with sandbox(app, start=START) as box:
            for task in TASKS:
                await task.using(delay="1m", meta={"customer": "42"}).enqueue()
            check(await box.travel("1m"))

    asyncio.run(story())
    run_virtual(story())


def test_meta_is_inherited_in_a_box() -> None:
    with sandbox(app, start=START) as box:
        pass_on.using(meta={"customer": "42"}).enqueue_sync()
        _, run = box.drain()
        assert run.job.meta == {"customer": "42"}


def test_a_job_expires_in_an_outage() -> None:
    with sandbox(app, start=START) as box:
        job = on_loop.using(delay="1m", expires="10m").enqueue_sync()
        in_time = on_loop.using(delay="2m", expires="10m").enqueue_sync()
        box.outage("11m")
        assert [run.job.id for run in box.drain()] == [in_time.id]
        info = app.sync.info(job)
        assert (info.state, info.error) == (State.CANCELLED, "expired")
        with pytest.raises(JobCancelled, match="expired"):
            app.sync.result(job)


def test_no_retry_starts_after_the_expiry_in_a_box() -> None:
    with sandbox(app, start=START, raise_errors=False) as box:
        job = fail.using(expires="90m").enqueue_sync()
        runs = box.travel("1d")
        assert [run.at - START for run in runs] == [0 * HOUR, HOUR]
        info = app.sync.info(job)
        assert info.ended == START + 90 * MINUTE
        outcomes = [run.outcome for run in info.history]
        assert outcomes == [Outcome.RETRY, Outcome.RETRY, Outcome.EXPIRE]
