"""Boxes: a month in a second, everything at its moment and as in production."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from box_tasks import NEVER, app, cancel_order, place_order, send_mail, where_it_runs
from boxes import DAY, HOUR, HOURLY, MINUTE, START, after, outcomes

from tickwheel import (
    App,
    BadArguments,
    CancelOutcome,
    GiveUp,
    Retry,
    RetryPolicy,
    Snooze,
    Task,
    UsageError,
    current_job,
)
from tickwheel.schedules import MisfireName, OverlapName
from tickwheel.testing import BoxRun, run_virtual, sandbox

# --- A month

MID_MARCH = datetime(2026, 3, 15, tzinfo=UTC)


def busy_app() -> tuple[App, Task[..., Any, Any]]:
    busy = App(NEVER)

    @busy.cron("*/15 * * * *", tz="Europe/Paris")
    async def quarter(tick: datetime) -> datetime:
        return tick

    @busy.cron("30 2 * * *", tz="Europe/Paris")
    def daily(tick: datetime) -> datetime:
        return tick

    @busy.task(retries=RetryPolicy(retries=5, first="10m", factor=6, jitter=0, cap="100d"))
    async def flaky() -> None:
        raise ValueError("not today")

    return busy, flaky


def month() -> list[tuple[str, datetime]]:
    """What has to run in the 30 days from mid-March; Paris has no 02:30 on the 29th."""
    quarters = [MID_MARCH + n * 15 * MINUTE for n in range(1, 30 * 96 + 1)]
    winter = [datetime(2026, 3, day, 1, 30, tzinfo=UTC) for day in range(15, 29)]
    gap = [datetime(2026, 3, 29, 1, 0, tzinfo=UTC)]
    summer = [datetime(2026, 3, 30, 0, 30, tzinfo=UTC) + n * DAY for n in range(15)]
    tries = [MID_MARCH]
    for minutes in (10, 60, 360, 2_160, 12_960):
        tries.append(tries[-1] + minutes * MINUTE)
    # At one moment: first what the store had for longest, then the ticks by name.
    kinds = (("flaky", tries), ("daily", winter + gap + summer), ("quarter", quarters))
    ranked = [(at, rank, name) for rank, (name, ats) in enumerate(kinds) for at in ats]
    return [(name, at) for at, _, name in sorted(ranked)]


async def month_in_a_box() -> list[BoxRun]:
    busy, flaky = busy_app()
    async with sandbox(busy, start=MID_MARCH) as box:
        await flaky.enqueue()
        runs = await box.travel("30d")
        assert box.now == MID_MARCH + 30 * DAY
        assert box.runs == runs
    return runs


def month_without_a_loop() -> list[BoxRun]:
    busy, flaky = busy_app()
    with sandbox(busy, start=MID_MARCH) as box:
        flaky.enqueue_sync()
        runs = box.travel("30d")
        assert box.now == MID_MARCH + 30 * DAY
    return runs


@pytest.mark.parametrize("way", ["asyncio", "virtual", "sync"])
def test_a_month_of_schedules_and_retries_passes_quickly_and_in_order(way: str) -> None:
    began = time.monotonic()
    if way == "sync":
        runs = month_without_a_loop()
    else:
        runs = (run_virtual if way == "virtual" else asyncio.run)(month_in_a_box())
    # About a second; the bound is for a machine that has much else to do.
    assert time.monotonic() - began < 40
    assert [(run.task, run.at) for run in runs] == month()
    ticks = [run for run in runs if run.task != "flaky"]
    assert all(run.result == run.at for run in ticks)
    tries = [run for run in runs if run.task == "flaky"]
    assert outcomes(tries) == ["retry"] * 5 + ["dead"]
    assert tries[-1].error == "ValueError: not today"
    assert tries[-1].job.failures == 6


# --- What was enqueued


async def test_an_order_that_is_not_paid_is_cancelled_after_half_an_hour() -> None:
    async with sandbox(app, start=START) as box:
        await place_order(42)
        box.assert_enqueued(cancel_order, 42, delay="30m")
        box.assert_not_enqueued(send_mail)
        assert await box.drain() == []
        assert await box.travel("29m") == []
        [run] = await box.travel("1m")
        assert (run.task, run.at, run.outcome) == ("cancel_order", START + 30 * MINUTE, "done")
        assert run.result == "42 cancelled: late"
        assert run.job.state == "done"
        assert box.now == START + 30 * MINUTE
        # What was enqueued stays so when it has run.
        box.assert_enqueued(cancel_order, 42, count=1)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"args": ("a@b.c",)},
        {"to": "a@b.c"},
        {"args": ("a@b.c",), "queue": "post", "priority": "urgent", "at": START + DAY},
        {"delay": "1d"},
        {"delay": DAY},
        {"arguments": {"to": "a@b.c", "id": 0}, "id": "mail-1"},
        {"count": 1},
    ],
)
async def test_a_job_is_found_by_what_is_known_of_it(given: dict[str, Any]) -> None:
    async with sandbox(app, start=START) as box:
        chosen = send_mail.using(queue="post", priority="urgent", id="mail-1", delay="1d")
        await chosen.enqueue("a@b.c")
        await cancel_order.enqueue(1)
        box.assert_enqueued(send_mail, *given.pop("args", ()), **given)


@pytest.mark.parametrize(
    "given",
    [
        {"args": ("x@b.c",)},
        {"to": "x@b.c"},
        {"queue": "mail"},
        {"priority": "low"},
        {"at": START + HOUR},
        {"delay": "1d1s"},
        {"delay": 0},
        {"arguments": {"to": "a@b.c", "id": 1}},
        {"arguments": {"to": "a@b.c"}, "id": "mail-2"},
    ],
)
async def test_a_job_that_differs_in_one_thing_is_not_the_one(given: dict[str, Any]) -> None:
    async with sandbox(app, start=START) as box:
        chosen = send_mail.using(queue="post", priority="urgent", id="mail-1", delay="1d")
        await chosen.enqueue("a@b.c")
        args = given.pop("args", ())
        box.assert_not_enqueued(send_mail, *args, **given)
        with pytest.raises(AssertionError):
            box.assert_enqueued(send_mail, *args, **given)


async def test_the_message_lists_what_was_enqueued_instead() -> None:
    async with sandbox(app, start=START) as box:
        with pytest.raises(AssertionError) as nothing:
            box.assert_enqueued(cancel_order)
        assert str(nothing.value) == (
            "expected at least one job cancel_order(…), found none; nothing was enqueued"
        )
        await place_order(41)
        await send_mail.using(id="hello").enqueue("a@b.c", id=7)
        with pytest.raises(AssertionError) as wrong:
            box.assert_enqueued(cancel_order, 42, delay="30m", queue="default")
        [first] = box.jobs(task=cancel_order)
        assert str(wrong.value).splitlines() == [
            "expected at least one job cancel_order(order_id=42, why='late') with delay=30m, "
            "queue=default, found none; these were enqueued:",
            f"  cancel_order(order_id=41) delay=30m, queue=default, priority=normal, id={first.id}",
            "  send_mail(to='a@b.c', id=7) due at once, queue=mail, priority=low, id=hello",
        ]
        with pytest.raises(AssertionError, match=r"expected 2 jobs cancel_order\(…\), found 1; "):
            box.assert_enqueued(cancel_order, count=2)
        with pytest.raises(AssertionError, match=r"expected 0 jobs send_mail\(…\), found 1; "):
            box.assert_not_enqueued(send_mail)


async def test_a_slip_in_an_assertion_is_an_error_and_not_a_test_that_passes() -> None:
    async with sandbox(app, start=START) as box:
        with pytest.raises(BadArguments, match="order_id"):
            box.assert_not_enqueued(cancel_order, "forty-two")
        with pytest.raises(BadArguments, match="reason"):
            box.assert_not_enqueued(cancel_order, 42, reason="late")
        with pytest.raises(
            UsageError, match=r"id= could be an option of the job or an argument of send"
        ):
            box.assert_not_enqueued(send_mail, "a@b.c", id="7")
        with pytest.raises(UsageError, match="is not a task"):
            box.assert_not_enqueued(place_order)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="waiting, running, done, dead, cancelled"):
            box.jobs(state="scheduled")


async def test_an_id_that_is_taken_enqueues_nothing() -> None:
    async with sandbox(app, start=START) as box:
        for _ in range(3):
            await cancel_order.using(id="once").enqueue(1)
        box.assert_enqueued(cancel_order, count=1)
        assert len(await box.drain()) == 1


async def test_jobs_are_looked_at_by_state_and_task() -> None:
    async with sandbox(app, start=START) as box:
        first = await cancel_order.enqueue(1)
        await box.drain()
        second = await cancel_order.using(delay="1h").enqueue(2)
        await send_mail.using(delay="1h").enqueue("a@b.c")
        assert [job.id for job in box.jobs(task="cancel_order")] == [first.id, second.id]
        assert [job.id for job in box.jobs(state="waiting", task=cancel_order)] == [second.id]
        assert len(box.jobs()) == 3


# --- As in production


async def test_a_task_chooses_its_outcome_and_failures_are_seen() -> None:
    mine = App(NEVER)
    tries: list[int] = []

    @mine.task(retries=HOURLY)
    async def work(how: str) -> str:
        context = current_job()
        assert context is not None
        tries.append(context.job.attempt)
        if how == "snooze" and context.job.attempt == 1:
            raise Snooze("5m")
        if how == "retry" and context.job.attempt == 1:
            raise Retry("7m")
        if how == "give up":
            raise GiveUp("no use")
        if how == "fail" and context.job.attempt < 3:
            raise ValueError("oh")
        return how

    for how, expected, moments in (
        ("snooze", ["snooze", "done"], [0, 5]),
        ("retry", ["retry", "done"], [0, 7]),
        ("give up", ["dead"], [0]),
        ("fail", ["retry", "retry", "done"], [0, 60, 120]),
    ):
        async with sandbox(mine, start=START) as box:
            job = await work.enqueue(how)
            runs = await box.travel("1d")
            assert outcomes(runs) == expected
            assert after(runs, "work") == [minute * MINUTE for minute in moments]
            assert [run.failed for run in runs] == [how in ("fail", "give up")] * (
                len(runs) - (how != "give up")
            ) + [False] * (how != "give up")
            assert [type(error) for error in box.errors] == {
                "give up": [GiveUp],
                "fail": [ValueError, ValueError],
            }.get(how, [])
            if how != "give up":
                assert await job.result() == how
                assert (await job.info()).attempts == len(runs)
            assert current_job() is None


async def test_errors_are_raised_on_request_where_they_happened() -> None:
    mine = App(NEVER)

    @mine.task(retries=HOURLY)
    def work() -> None:
        raise ValueError("oh")

    async with sandbox(mine, start=START, raise_errors=True) as box:
        await work.using(delay="10m").enqueue()
        with pytest.raises(ValueError, match="oh"):
            await box.travel("1d")
        assert box.now == START + 10 * MINUTE
        # The box continues, and so does the job.
        with pytest.raises(ValueError, match="oh"):
            await box.travel("1d")
        assert box.now == START + 70 * MINUTE


@pytest.mark.parametrize("way", ["asyncio", "sync"])
def test_a_task_that_takes_too_long_is_stopped(way: str) -> None:
    mine = App(NEVER)
    stopped: list[bool] = []

    @mine.task(timeout=0.05, retries=0)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(True)

    async def story() -> list[BaseException]:
        async with sandbox(mine) as box:
            await slow.enqueue()
            await box.drain()
            return box.errors

    if way == "asyncio":
        errors = asyncio.run(story())
    else:
        with sandbox(mine) as box:
            slow.enqueue_sync()
            box.drain()
            errors = box.errors
    assert stopped == [True]
    [error] = errors
    assert isinstance(error, TimeoutError)
    assert str(error).startswith("ran longer than its timeout of 50ms; ")


async def test_due_jobs_run_by_priority_then_by_due_time_and_what_they_add_follows() -> None:
    mine = App(NEVER)
    ran: list[str] = []

    @mine.task
    async def note(name: str, then: str | None = None) -> None:
        ran.append(name)
        if then is not None:
            await note.enqueue(then)

    async with sandbox(mine, start=START) as box:
        await note.using(delay="2m").enqueue("later")
        await note.enqueue("first", then="added")
        await note.enqueue("second")
        await note.using(priority="high").enqueue("high")
        await box.drain()
        assert ran == ["high", "first", "second", "added"]
        await box.travel("2m")
        assert ran[-1] == "later"


async def test_a_paused_queue_waits_and_a_cancelled_job_does_not_run() -> None:
    async with sandbox(app, start=START) as box:
        await app.pause("mail")
        await send_mail.enqueue("a@b.c")
        gone = await cancel_order.using(delay="1h").enqueue(1)
        assert await gone.cancel() is CancelOutcome.CANCELLED
        assert await box.travel("1d") == []
        await app.resume("mail")
        [run] = await box.drain()
        assert run.task == "send_mail"


async def test_the_id_of_a_job_is_free_again_when_workers_would_have_pruned_it() -> None:
    async with sandbox(app, start=START) as box:
        await cancel_order.using(id="weekly").enqueue(1)
        await box.travel("6d")
        assert not (await cancel_order.using(id="weekly").enqueue(1)).added
        await box.travel("4d")
        assert (await cancel_order.using(id="weekly").enqueue(1)).added


async def test_tasks_of_all_pools_run_in_the_process_of_the_test() -> None:
    async with sandbox(app) as box:
        await where_it_runs.enqueue()
        [run] = await box.drain()
        assert run.result == os.getpid()


# --- Schedules


async def test_schedules_are_reconciled_at_the_first_journey_and_may_be_left_out() -> None:
    busy, _ = busy_app()
    async with sandbox(busy, start=START) as box:
        assert await busy.schedules.list() == []
        await box.drain()
        assert [each.name for each in await busy.schedules.list()] == ["daily", "quarter"]
        await busy.schedules.pause("quarter")
        runs = await box.travel("1d")
        assert [run.task for run in runs] == ["daily"]
        await busy.schedules.put("often", "daily", every="6h")
        assert [run.job.id for run in await box.travel("6h")] == [
            "daily@2026-03-02T01:30:00Z",
            "often@2026-03-02T06:00:00Z",
        ]
    async with sandbox(busy, start=START, schedules=False) as box:
        assert await box.travel("30d") == []


@pytest.mark.parametrize(
    ("overlap", "expected"),
    # Minutes of the runs: ticks every 20, retries an hour after each failure.
    [("skip", [20, 80, 140, 200, 220]), ("cancel", [20, 40, 60, 80, 100])],
)
async def test_a_job_that_waits_to_be_retried_overlaps_the_next_tick(
    overlap: OverlapName, expected: list[int]
) -> None:
    mine = App(NEVER)

    @mine.task(retries=HOURLY)
    async def work() -> None:
        raise ValueError("oh")

    mine.every("20m", overlap=overlap)(work)
    async with sandbox(mine, start=START) as box:
        runs = await box.travel("6h")
        assert after(runs, "work")[:5] == [minute * MINUTE for minute in expected]


@pytest.mark.parametrize("overlap", ["skip", "cancel"])
async def test_ticks_that_are_due_together_after_an_outage_do_not_overlap_each_other(
    overlap: OverlapName,
) -> None:
    mine = App(NEVER)

    @mine.every("5s", overlap=overlap, misfire="all")
    async def often(tick: datetime) -> datetime:
        return tick

    async with sandbox(mine, start=START) as box:
        await box.outage("1m2s")
        assert [run.result for run in await box.drain()] == [START + MINUTE]
        assert len(await box.travel("1m")) == 12


@pytest.mark.parametrize(("misfire", "hours"), [("skip", []), ("one", [10]), ("all", [8, 9, 10])])
async def test_ticks_missed_in_an_outage_follow_the_misfire_policy(
    misfire: MisfireName, hours: list[int]
) -> None:
    mine = App(NEVER)

    @mine.every("1h", misfire=misfire, misfire_limit=3)
    async def hourly(tick: datetime) -> datetime:
        return tick

    @mine.task
    async def job() -> None: ...

    async with sandbox(mine, start=START) as box:
        await job.using(delay="1h").enqueue()
        await box.outage("10h30m")
        assert box.runs == []
        runs = await box.drain()
        assert [run.result for run in runs if run.task == "hourly"] == [
            START + hour * HOUR for hour in hours
        ]
        assert after(runs, "job") == [10 * HOUR + 30 * MINUTE]
        assert after(await box.travel("1h"), "hourly") == [11 * HOUR]
