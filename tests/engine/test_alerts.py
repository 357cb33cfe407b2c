"""Alerts in virtual time: what is told, how often, and that it does no harm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any

import pytest
from world import World, virtual

from tickwheel import Alert, AlertKind, App, BadConfig, JobFailed, JobHandle
from tickwheel.engine.alerts import QUIET_MS, SUBJECTS, Gate, speaks, tally_at
from tickwheel.objective import Tally
from tickwheel.store import WorkerInfo


async def until_dead(*jobs: JobHandle[Any]) -> None:
    for job in jobs:
        with pytest.raises(JobFailed):
            await job.result(timeout=600)


def failing(app: App) -> Any:
    @app.task(retries=0)
    async def fail() -> None:
        raise ValueError("no luck")

    return fail


def test_a_dead_job_is_told_once_in_five_minutes_for_each_task() -> None:
    async def story(world: World) -> None:
        app, told = world.app, []
        fail = failing(app)

        @app.task(retries=0)
        async def fail_too() -> None:
            raise ValueError("no luck either")

        @app.on_alert
        async def tell(alert: Alert) -> None:
            told.append(alert)

        async with app, app.worker(guarded=False):
            first = await fail.enqueue()
            await until_dead(first, await fail.enqueue(), await fail.enqueue())
            await until_dead(await fail_too.enqueue())
            await asyncio.sleep(1)
            assert [alert.task for alert in told] == ["fail", "fail_too"]
            assert told[0].kind is AlertKind.DEAD
            assert told[0].job_id == first.id and told[0].queue == "default"
            assert told[0].words == f"job {first.id} of task fail is dead: ValueError: no luck"
            await asyncio.sleep(QUIET_MS / 1000)
            await until_dead(await fail.enqueue())
            await asyncio.sleep(1)
            assert [alert.left_out for alert in told] == [0, 0, 2]

    virtual(story)


def test_the_last_alert_is_told_although_the_worker_stops() -> None:
    async def story(world: World) -> None:
        app, told = world.app, []
        fail = failing(app)

        @app.on_alert
        async def tell(alert: Alert) -> None:
            await asyncio.sleep(1)
            told.append(alert.kind)

        async with app:
            async with app.worker(guarded=False):
                await until_dead(await fail.enqueue())
            assert told == ["dead"]

    virtual(story)


def test_a_function_that_fails_or_hangs_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        app, told = world.app, []
        fail = failing(app)

        @app.on_alert
        async def broken(alert: Alert) -> None:
            raise RuntimeError("no network")

        @app.on_alert
        async def exits(alert: Alert) -> None:
            sys.exit(1)

        @app.on_alert
        async def cancels(alert: Alert) -> None:
            raise asyncio.CancelledError

        @app.on_alert
        async def hangs(alert: Alert) -> None:
            await asyncio.Event().wait()

        @app.on_alert
        async def tell(alert: Alert) -> None:
            told.append(alert.kind)

        async with app, app.worker(guarded=False):
            await until_dead(await fail.enqueue())
            await asyncio.sleep(60)
            assert told == ["dead"]
            await until_dead(await fail.enqueue())

    with caplog.at_level(logging.ERROR, "tickwheel"):
        virtual(story)
    failures = [each for each in caplog.records if each.message.startswith("on_alert failed")]
    assert len(failures) == 4


def test_a_function_that_ignores_its_cancellation_does_not_keep_the_worker() -> None:
    async def story(world: World) -> None:
        app, ends = world.app, asyncio.Event()
        fail = failing(app)

        @app.on_alert
        async def stubborn(alert: Alert) -> None:
            while not ends.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await ends.wait()

        async with app:
            async with app.worker(guarded=False):
                await until_dead(await fail.enqueue())
                stopped_ms = world.now_ms
            assert world.now_ms - stopped_ms < 15_000
            ends.set()

    virtual(story)


def test_a_missed_objective_is_told() -> None:
    async def story(world: World) -> None:
        app = App(world.store, clock=world.clock, objective="99% within 100ms")
        told: list[Alert] = []

        @app.task
        async def work() -> None:
            await asyncio.sleep(1)

        @app.on_alert
        async def tell(alert: Alert) -> None:
            told.append(alert)

        async with app, app.worker(concurrency=1, guarded=False):
            for _ in range(100):
                await (await work.enqueue()).result(timeout=60)
            await asyncio.sleep(60)
            assert told == []
            jobs = [await work.enqueue() for _ in range(20)]
            for job in jobs:
                await job.result(timeout=600)
            await asyncio.sleep(60)
        [alert] = told
        assert alert.kind is AlertKind.LATE and alert.subject == app.name
        assert "the objective is 99% within 100ms" in alert.words

    virtual(story)


def test_due_jobs_whose_task_no_worker_knows_are_told_by_one_worker() -> None:
    async def story(world: World) -> None:
        app, other = world.app, App(world.store, clock=world.clock, name="other")
        told: list[Alert] = []

        @app.task
        async def known() -> None: ...

        @other.task
        async def unknown() -> None: ...

        @app.on_alert
        async def tell(alert: Alert) -> None:
            told.append(alert)

        async with app, other, app.worker(guarded=False), app.worker(guarded=False):
            await asyncio.sleep(20)
            job = await unknown.enqueue()
            await unknown.using(queue="lonely").enqueue()
            await unknown.using(queue="later", delay="1h").enqueue()
            await asyncio.sleep(40)
            assert sorted(alert.subject for alert in told) == ["default/unknown", "lonely"]
            [alert] = [alert for alert in told if alert.queue == "default"]
            assert alert.kind is AlertKind.UNSERVED and alert.job_id == job.id
            assert "no running worker of queue default knows task unknown" in alert.words

    virtual(story)


async def a_coroutine() -> None: ...


@pytest.mark.parametrize("hook", [print, lambda alert: None, a_coroutine, None, 1])
def test_what_can_t_be_told_is_refused(hook: Any) -> None:
    with pytest.raises(BadConfig, match="on_alert needs an async function of one parameter"):
        App("memory://").on_alert(hook)


def test_the_gate_forgets_the_oldest_subject() -> None:
    gate = Gate()
    for n in range(SUBJECTS):
        assert gate.passes(("dead", str(n)), n) == 0
    assert gate.passes(("dead", "0"), SUBJECTS) is None
    assert gate.passes(("dead", "another"), SUBJECTS) == 0
    assert gate.passes(("dead", "0"), SUBJECTS) == 0
    assert gate.passes(("dead", "2"), SUBJECTS) is None
    assert gate.passes(("late", "2"), SUBJECTS) == 0


def test_a_window_begins_with_the_last_tally_before_it() -> None:
    tallies = [(0, Tally(1, 1)), (10, Tally(2, 2)), (20, Tally(3, 3))]
    assert tally_at(tallies, -1) == Tally()
    assert tally_at(tallies, 15) == Tally(2, 2)
    assert tally_at(tallies, 20) == Tally(3, 3)


def test_the_first_worker_of_an_app_speaks() -> None:
    def info(name: str, app: str) -> WorkerInfo:
        return WorkerInfo(
            name=name, host="h", pid=1, version="1", queues=(), concurrency=1, started_ms=0,
            seen_ms=0, gone_after_ms=1, app=app,
        )  # fmt: skip

    running = [info("a", "mail"), info("b", "shop"), info("c", "shop")]
    assert speaks("b", "shop", running) and not speaks("c", "shop", running)
    assert speaks("d", "new", running)
