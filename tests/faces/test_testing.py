"""Boxes: a month in a second, everything at its moment and as in production."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from box_tasks import NEVER, app, cancel_order, place_order, send_mail, where_it_runs

from tickwheel import (
    App,
    BadArguments,
    BadTime,
    Cancelled,
    GiveUp,
    JobUnknown,
    Retry,
    RetryPolicy,
    Snooze,
    Task,
    UsageError,
    current_job,
)
from tickwheel.testing import Box, BoxRun, VirtualLoop, run_virtual, sandbox

START = datetime(2026, 3, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
# No jitter, so that a test can name the moments.
HOURLY = RetryPolicy(retries=3, first="1h", factor=1, jitter=0, cap="10d")


def after(runs: list[BoxRun], task: str) -> list[timedelta]:
    """When the task ran, from the start of the box."""
    return [run.at - START for run in runs if run.task == task]


def outcomes(runs: list[BoxRun]) -> list[str]:
    return [run.outcome.value for run in runs]


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
            "queue=default, found none; enqueued were:",
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
        with pytest.raises(UsageError, match=r"id= could be the job's or the argument of send"):
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
        # The box goes on, and so does the job.
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
    assert [repr(error) for error in errors] == [
        "TimeoutError('ran longer than its timeout of 50ms')"
    ]


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
        assert await gone.cancel() is Cancelled.CANCELLED
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
    overlap: str, expected: list[int]
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
    overlap: str,
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
    misfire: str, hours: list[int]
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


# --- Inline


async def test_inline_a_job_that_is_due_runs_inside_enqueue() -> None:
    mine = App(NEVER)
    ran: list[str] = []

    @mine.task
    async def child(name: str) -> str:
        ran.append(name)
        return name

    @mine.task
    async def parent() -> str:
        job = await child.enqueue("child")
        ran.append("parent")
        return await job.result(timeout=1)

    async with sandbox(mine, start=START, inline=True) as box:
        job = await parent.enqueue()
        assert ran == ["child", "parent"]
        assert await job.result() == "child"
        await mine.enqueue_many([child.job("a"), child.using(delay="1h").job("c"), child.job("b")])
        assert ran[2:] == ["a", "b"]
        assert outcomes(box.runs) == ["done"] * 4
        assert await box.drain() == []
        await box.travel("1h")
        assert ran[4:] == ["c"]
        assert current_job() is None


async def test_inline_errors_are_raised_at_the_caller() -> None:
    mine = App(NEVER)

    @mine.task(retries=HOURLY)
    def work(error: str) -> None:
        raise {"value": ValueError("oh"), "give up": GiveUp("no"), "snooze": Snooze("1h")}[error]

    async with sandbox(mine, start=START, inline=True) as box:
        with pytest.raises(ValueError, match="oh"):
            await work.enqueue("value")
        with pytest.raises(GiveUp, match="no"):
            await work.enqueue("give up")
        await work.enqueue("snooze")
        assert outcomes(box.runs) == ["retry", "dead", "snooze"]
        # The one that failed is retried as ever.
        assert outcomes(await box.travel("1h")) == ["retry", "snooze"]


# --- Without an event loop


def test_plain_code_finds_its_tasks_on_its_own_thread() -> None:
    mine = App(NEVER)
    here = threading.get_ident()
    ran: list[str] = []

    async def answer() -> str:
        return "from a loop of its own"

    @mine.task
    def plain() -> None:
        assert threading.get_ident() == here
        child.enqueue_sync(asyncio.run(answer()))
        ran.append("plain")

    @mine.task
    async def child(word: str) -> str:
        assert threading.get_ident() == here
        context = current_job()
        assert context is not None and context.job.task == "child"
        ran.append(word)
        await asyncio.sleep(0)
        return word

    for inline, order in (
        (False, ["plain", "from a loop of its own"]),
        (True, ["from a loop of its own", "plain"]),
    ):
        ran.clear()
        with sandbox(mine, start=START, inline=inline) as box:
            job = plain.enqueue_sync()
            box.assert_enqueued(plain)
            box.drain()
            assert ran == order
            assert mine.sync.info(job).state == "done"
            assert box.errors == []
            assert current_job() is None


def test_inline_errors_are_raised_at_the_plain_caller() -> None:
    mine = App(NEVER)

    @mine.task
    async def work() -> None:
        raise ValueError("oh")

    with sandbox(mine, inline=True), pytest.raises(ValueError, match="oh"):
        work.enqueue_sync()


def test_other_threads_may_enqueue() -> None:
    with sandbox(app, start=START, inline=True) as box:
        threads = [threading.Thread(target=cancel_order.enqueue_sync, args=(n,)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes(box.runs) == ["done"] * 5


async def test_a_plain_task_in_an_async_box_may_enqueue() -> None:
    mine = App(NEVER)

    @mine.task
    def plain() -> None:
        child.using(delay="1h").enqueue_sync()

    @mine.task
    def child() -> None: ...

    async with sandbox(mine, start=START) as box:
        await plain.enqueue()
        assert after(await box.travel("1d"), "child") == [HOUR]


# --- In virtual time


def test_on_a_virtual_loop_the_times_of_loop_and_box_agree() -> None:
    mine = App(NEVER)

    @mine.task
    async def slow() -> None:
        await asyncio.sleep(90)

    @mine.task
    def plain() -> None:
        time.sleep(0.05)

    async def story() -> None:
        async with sandbox(mine, start=START) as box:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(60)
            assert box.now == START + MINUTE
            await slow.enqueue()
            await plain.using(delay="30s").enqueue()
            # Runs take time, so they go side by side, as on a worker.
            runs = await box.drain()
            assert [(run.task, run.at - START) for run in runs] == [
                ("slow", MINUTE),
                ("plain", 1.5 * MINUTE),
            ]
            assert box.now == START + 2.5 * MINUTE
            assert loop.time() == pytest.approx(150)
            await box.travel("1d")
            assert loop.time() == pytest.approx(86_550)
            assert box.now == START + 2.5 * MINUTE + DAY

    run_virtual(story())


def test_on_a_virtual_loop_runs_are_exact_to_the_millisecond() -> None:
    delays = [timedelta(milliseconds=137 * n + n * n) for n in range(1, 500)]

    async def story() -> None:
        await asyncio.sleep(0.1)
        async with sandbox(app, start=START) as box:
            for delay in delays:
                await cancel_order.using(delay=delay).enqueue(1)
            runs = await box.travel("1h")
            assert after(runs, "cancel_order") == delays

    run_virtual(story())


@pytest.mark.parametrize("overlap", ["allow", "skip", "cancel"])
def test_on_a_virtual_loop_runs_that_take_long_overlap(overlap: str) -> None:
    mine = App(NEVER)
    starts: list[datetime] = []
    ends: list[datetime] = []

    async def story() -> None:
        @mine.every("10s", overlap=overlap)
        async def slow() -> None:
            starts.append(box.now)
            await asyncio.sleep(25)
            ends.append(box.now)

        async with sandbox(mine, start=START) as box:
            runs = await box.travel("61s")
            gaps = {(b - a).total_seconds() for a, b in pairwise(starts)}
            assert gaps == {"allow": {10}, "skip": {30}, "cancel": {10}}[overlap]
            assert len(ends) == {"allow": 6, "skip": 2, "cancel": 1}[overlap]
            if overlap == "cancel":
                assert outcomes(runs) == ["release"] * 5 + ["done"]
                assert [job.state.value for job in box.jobs()] == ["cancelled"] * 5 + ["done"]

    run_virtual(story())


def test_on_a_virtual_loop_a_task_may_wait_for_another() -> None:
    mine = App(NEVER)

    @mine.task
    async def child() -> int:
        return 7

    @mine.task(timeout="10s", retries=0)
    async def parent() -> int:
        return await (await child.enqueue()).result()

    async def story() -> None:
        async with sandbox(mine, start=START) as box:
            job = await parent.enqueue()
            await box.drain()
            assert await job.result() == 7

    run_virtual(story())


def test_the_time_of_a_virtual_loop_stands_still_while_a_thread_works() -> None:
    async def story() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with asyncio.timeout(0.01):
            await asyncio.to_thread(time.sleep, 0.1)
        await asyncio.sleep(3600)
        return await asyncio.to_thread(lambda: 7), loop.time()

    assert run_virtual(story()) == (7, 3600)


# --- Before, after, and mistakes


async def test_afterwards_the_app_is_on_its_own_store_and_time_again(tmp_path: Path) -> None:
    mine = App(f"sqlite:///{tmp_path}/jobs.db")

    @mine.task
    async def work(n: int) -> None: ...

    async with mine:
        before = await work.enqueue(1)
        async with sandbox(mine, start=START) as box:
            with pytest.raises(JobUnknown):
                await before.info()
            inside = await work.enqueue(2)
            async with sandbox(mine, start=START + DAY) as inner:
                await work.enqueue(3)
                assert [job.payload for job in inner.jobs()] == ['{"n":3}']
            await box.travel("1h")
            assert [job.payload for job in box.jobs()] == ['{"n":2}']
        assert (await before.info()).state == "waiting"
        with pytest.raises(RuntimeError, match="oops"):
            async with sandbox(mine):
                raise RuntimeError("oops")
        assert (await before.info()).state == "waiting"
        with pytest.raises(JobUnknown):
            await inside.info()
        assert [queue.waiting for queue in await mine.queues()] == [1]
    # What happened in the box can still be looked at.
    assert outcomes(box.runs) == ["done"]
    box.assert_enqueued(work, 2)


def test_without_a_loop_the_app_is_on_its_own_store_again(tmp_path: Path) -> None:
    mine = App(f"sqlite:///{tmp_path}/jobs.db")

    @mine.task
    def work() -> None: ...

    before = work.enqueue_sync()
    with sandbox(mine, start=START) as box:
        work.enqueue_sync()
        assert len(box.drain()) == 1
    assert abs(work.job().created_ms / 1000 - time.time()) < 3600
    assert mine.sync.info(before).state == "waiting"
    assert [queue.waiting for queue in mine.sync.queues()] == [1]
    mine.sync.close()


async def test_an_app_that_was_first_used_in_a_box_lives_in_real_time_afterwards() -> None:
    mine = App("memory://")

    @mine.task
    async def work() -> None: ...

    async with sandbox(mine, start=START):
        await work.enqueue()
    job = await work.enqueue()
    assert abs(datetime.now(UTC) - (await job.info()).created) < HOUR
    assert [queue.waiting for queue in await mine.queues()] == [1]


async def test_without_a_start_the_box_begins_now() -> None:
    async with sandbox(app) as box:
        assert abs(box.now - datetime.now(UTC)) < HOUR


async def test_mistakes_are_said_in_one_line() -> None:
    async with sandbox(app, start=START) as box:
        with pytest.raises(BadTime, match="negative"):
            await box.travel(timedelta(hours=-1))
        with pytest.raises(BadTime, match=r"until=2026-02-28.* has passed.*forward only"):
            await box.travel(until=START - DAY)
        with pytest.raises(BadTime, match="give a length of time"):
            await box.travel()
        await box.travel(until=START + DAY)
        assert box.now == START + DAY
    for late in (box.travel("1h"), box.drain(), box.outage("1h")):
        with pytest.raises(UsageError, match="this box has ended"):
            await late
    with pytest.raises(UsageError, match="write: async with"), sandbox(app):
        pass
    with pytest.raises(BadTime, match="give an aware datetime"):
        sandbox(app, start=datetime(2026, 3, 1))  # noqa: DTZ001
    with pytest.raises(UsageError, match="takes an App"):
        sandbox(cancel_order)  # type: ignore[arg-type]
    once = sandbox(app)
    async with once:
        pass
    with pytest.raises(UsageError, match="serves one with block"):
        async with once:
            pass


async def test_a_box_makes_one_journey_at_a_time() -> None:
    mine = App(NEVER)
    boxes: list[Box] = []

    @mine.task
    async def work() -> None:
        await boxes[0].travel("1h")

    async with sandbox(mine) as box:
        boxes.append(box)
        await work.enqueue()
        await box.drain()
        assert [str(error) for error in box.errors] == [
            "this box is at work already: one travel, drain or outage at a time"
        ]


async def test_a_storm_of_jobs_ends_with_the_name_of_its_task() -> None:
    mine = App(NEVER)

    @mine.task
    async def again(delay: int) -> None:
        await again.using(delay=delay).enqueue(delay)

    @mine.task
    async def innocent() -> None: ...

    async with sandbox(mine, limit=200) as box:
        await innocent.enqueue()
        await again.enqueue(0)
        with pytest.raises(UsageError, match=r"200 runs in one go, 199 of them of 'again'"):
            await box.drain()
    async with sandbox(mine, limit=200) as box:
        await again.enqueue(1)
        assert len(await box.travel("199s")) == 200
        assert len(await box.travel("100s")) == 100
        with pytest.raises(UsageError, match="'again'"):
            await box.travel("1h")
    async with sandbox(mine, inline=True) as box:
        with pytest.raises(UsageError, match="'again' is run inline by a job that is run inline"):
            await again.enqueue(0)


def test_a_storm_of_inline_jobs_ends_without_an_event_loop_too() -> None:
    mine = App(NEVER)

    @mine.task
    def again() -> None:
        again.enqueue_sync()

    with sandbox(mine, inline=True), pytest.raises(UsageError, match="'again' is run inline"):
        again.enqueue_sync()


async def test_a_journey_that_is_given_up_hands_its_job_back() -> None:
    mine = App(NEVER)
    naps = [60.0, 0.0]

    @mine.task
    async def work() -> None:
        await asyncio.sleep(naps.pop(0))

    async with sandbox(mine) as box:
        await work.enqueue()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await box.drain()
        assert outcomes(await box.drain()) == ["done"]
