"""What the store and the log say about runs, in virtual time."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import re
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest
from world import World, virtual

from tickwheel import GiveUp, JobFailed, JobHandle, Retry, Snooze, State
from tickwheel.engine.journal import LINES, PERIOD_S

Story = Callable[[World], Coroutine[Any, Any, None]]
Log = pytest.LogCaptureFixture


def log_of(caplog: Log, story: Story, level: int = logging.INFO) -> list[Any]:
    """The records of a story."""
    with caplog.at_level(level, "tickwheel"):
        virtual(story)
    return [record for record in caplog.records if record.name == "tickwheel"]


def about(records: list[Any], job: str) -> list[Any]:
    return [record for record in records if getattr(record, "job_id", None) == job]


def charge(order: int) -> None:
    raise ValueError(f"no order {order}")


async def until_failed(world: World, job: JobHandle[Any], failures: int = 1) -> None:
    async def failed() -> bool:
        return (await job.info()).failures >= failures

    await world.until(failed, within_s=120)


def frames_of(traceback: Any) -> list[str]:
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return names


# --- Tracebacks


def test_the_traceback_of_the_last_failure_is_kept_until_a_run_succeeds() -> None:
    async def story(world: World) -> None:
        tries: list[None] = []

        @world.app.task
        async def third_time_lucky() -> None:
            tries.append(None)
            if len(tries) < 3:
                charge(len(tries))

        await world.node()
        job = await third_time_lucky.enqueue()
        for n in (1, 2):
            await until_failed(world, job, n)
            traceback = (await job.info()).traceback
            assert traceback is not None
            assert re.findall(r", in (\S+)\n", traceback) == [
                f"{story.__qualname__}.<locals>.third_time_lucky",
                "charge",
            ]
            assert traceback.endswith(f"ValueError: no order {n}")
        await job.result(timeout=60)
        assert (await job.info()).traceback is None

    virtual(story)


def test_a_thread_task_has_its_own_frames_only() -> None:
    async def story(world: World) -> None:
        task = world.app.task(retries=0)(charge)
        await world.node()
        job = await task.enqueue(7)
        with pytest.raises(JobFailed):
            await job.result(timeout=60)
        info = await job.info()
        assert info.state is State.DEAD
        assert re.findall(r", in (\S+)\n", info.traceback or "") == ["charge"]

    virtual(story)


def test_a_retry_keeps_the_traceback_of_what_it_was_raised_from(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def busy() -> None:
            try:
                charge(1)
            except ValueError as error:
                raise Retry("1h", reason="the bank is busy") from error

        @world.app.task
        async def polls() -> None:
            raise Retry("1h")

        await world.node()
        asked, polled = await busy.enqueue(), await polls.enqueue()
        await until_failed(world, asked)
        await until_failed(world, polled)
        info = await asked.info()
        assert info.error == "the bank is busy"
        assert (info.traceback or "").endswith("ValueError: no order 1")
        assert (await polled.info()).traceback is None
        ids.extend([asked.id, polled.id])

    ids: list[str] = []
    records = log_of(caplog, story)
    [asked], [polled] = (about(records, id) for id in ids)
    assert isinstance(asked.exc_info[1], ValueError)
    assert polled.exc_info is None
    assert (asked.levelname, polled.levelname) == ("INFO", "INFO")


def test_a_timeout_says_where_the_task_was_and_how_to_change_it() -> None:
    async def story(world: World) -> None:
        @world.app.task(timeout=5, retries=0)
        async def hang() -> None:
            await asyncio.Event().wait()

        await world.node()
        job = await hang.enqueue()
        with pytest.raises(JobFailed, match=r"timeout of 5s; .*@app\.task\(timeout=…\)"):
            await job.result(timeout=60)
        assert "await asyncio.Event().wait()" in ((await job.info()).traceback or "")

    virtual(story)


# --- The log


def test_a_run_has_a_line_with_its_outcome_duration_and_lateness(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def cancel_order() -> None:
            await asyncio.sleep(0.012)

        job = await cancel_order.enqueue()
        await asyncio.sleep(3)
        await world.node()
        await job.result(timeout=10)
        ids.append(job.id)

    ids: list[str] = []
    [record] = about(log_of(caplog, story), ids[0])
    assert record.getMessage() == f"cancel_order {ids[0]}: done in 12ms, 3s late"
    assert record.levelname == "INFO"
    facts = {"task": "cancel_order", "queue": "default", "attempt": 1, "outcome": "done"}
    assert vars(record).items() >= {**facts, "took_ms": 12, "late_ms": 3000}.items()


def test_a_failure_has_its_exception_and_is_told_once(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=1)
        async def pay() -> None:
            charge(42)

        await world.node()
        job = await pay.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=60)
        ids.append(job.id)

    ids: list[str] = []
    first, last = about(log_of(caplog, story), ids[0])
    assert re.fullmatch(
        rf"pay {ids[0]}: failed \(1 of 2\), retry in [\d.]+s: ValueError: no order 42",
        first.getMessage(),
    )
    assert last.getMessage() == f"pay {ids[0]}: dead after 2 failures: ValueError: no order 42"
    assert (first.levelname, last.levelname) == ("WARNING", "ERROR")
    assert (first.attempt, last.attempt) == (1, 2)
    for record in (first, last):
        kind, error, traceback = record.exc_info
        assert kind is ValueError and str(error) == "no order 42"
        assert frames_of(traceback) == ["pay", "charge"]


def test_other_ends_of_a_run_are_told_too(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def later() -> None:
            raise Snooze("1h")

        @world.app.task
        async def never() -> None:
            raise GiveUp("no such order")

        @world.app.task
        async def long() -> None:
            await asyncio.sleep(1000)

        node = await world.node(grace_ms=0)
        jobs = [await task.enqueue() for task in (later, never, long, long)]
        await asyncio.sleep(2)
        await jobs[2].cancel()
        await asyncio.sleep(2)
        await node.stop()
        ids.extend(job.id for job in jobs)

    ids: list[str] = []
    records = log_of(caplog, story)
    lines = [[each.getMessage() for each in about(records, id)] for id in ids]
    assert lines[0] == [f"later {ids[0]}: snoozed for 1h after 0ms, 0ms late"]
    assert lines[1] == [f"never {ids[1]}: dead after 1 failure: no such order"]
    assert re.fullmatch(rf"long {ids[2]}: cancelled after 2(\.\d)?s", lines[2][0])
    assert re.fullmatch(rf"long {ids[3]}: released after 4(\.\d)?s, for another run", lines[3][0])


def test_arguments_that_a_task_does_not_take_are_told_once(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def pay(order: int) -> None: ...

        job = pay.job(1)
        await world.store.add([msgspec.structs.replace(job, payload='{"order":"x"}', retries=0)])
        await world.node()
        with pytest.raises(JobFailed):
            await world.app.job(job.id).result(timeout=10)
        ids.append(job.id)

    ids: list[str] = []
    [record] = about(log_of(caplog, story), ids[0])
    assert record.levelname == "ERROR"
    assert record.getMessage().startswith(f"pay {ids[0]}: dead after 1 failure: ")


def test_many_runs_are_summarised_but_each_failure_is_told(caplog: Log) -> None:
    many = LINES * 3

    async def story(world: World) -> None:
        @world.app.task
        async def quick(n: int) -> None:
            if n == 0:
                charge(n)

        @world.app.task
        async def rare() -> None: ...

        await world.app.enqueue_many([quick.using(retries=0).job(n) for n in range(many)])
        await rare.enqueue()
        await asyncio.sleep(1)
        await world.node()
        await asyncio.sleep(PERIOD_S * 2)

    records = log_of(caplog, story)
    single = [record for record in records if getattr(record, "outcome", "") == "done"]
    assert len(single) == LINES
    assert len([record for record in records if record.exc_info]) == 1
    [summary] = [record for record in records if "in the last" in record.getMessage()]
    assert summary.getMessage() == (
        f"{many + 1} runs in the last 10s: {many} done, 1 dead; late p50 1s, p99 1s; "
        f"by task: quick {many}, rare 1"
    )


def test_a_worker_that_stops_sums_up_at_once(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def quick() -> None: ...

        await world.app.enqueue_many([quick.job() for _ in range(LINES * 2)])
        node = await world.node()
        await asyncio.sleep(1)
        await node.stop()

    assert "200 runs in the last" in "\n".join(r.getMessage() for r in log_of(caplog, story))


def test_at_debug_every_run_has_its_line(caplog: Log) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def quick() -> None: ...

        await world.app.enqueue_many([quick.job() for _ in range(LINES * 2)])
        await world.node()
        await asyncio.sleep(PERIOD_S * 2)

    records = log_of(caplog, story, logging.DEBUG)
    assert len([r for r in records if getattr(r, "outcome", "") == "done"]) == LINES * 2
    assert not [r for r in records if "in the last" in r.getMessage()]


def test_a_failure_is_logged_in_the_context_of_its_run(caplog: Log) -> None:
    """Where tools such as Sentry keep what they know about it."""
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="none")
    seen: list[str] = []

    class Tool(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            seen.append(tenant.get())
            return True

    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def pay() -> None:
            tenant.set("acme")
            charge(1)

        await world.node()
        job = await pay.enqueue()
        with pytest.raises(JobFailed):
            await job.result(timeout=60)

    tool = Tool()
    logging.getLogger("tickwheel").addFilter(tool)
    try:
        log_of(caplog, story)
    finally:
        logging.getLogger("tickwheel").removeFilter(tool)
    assert "acme" in seen
