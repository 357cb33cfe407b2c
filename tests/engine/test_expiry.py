"""Jobs that expire, in virtual time: none starts too late, and none is left lying about."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from world import World, virtual

from tickwheel import (
    JobCancelled,
    JobHandle,
    Outcome,
    RetryPolicy,
    Snooze,
    State,
    current_job,
)
from tickwheel.duration import moment
from tickwheel.engine.journal import LINES, PERIOD_S
from tickwheel.job import SUSPECT_AFTER
from tickwheel.testing import FaultyStore


async def expired(job: JobHandle[Any]) -> None:
    with pytest.raises(JobCancelled, match="expired: could not start by"):
        await job.result(timeout=600)
    info = await job.info()
    assert (info.state, info.error) == (State.CANCELLED, "expired")
    assert info.history[-1].outcome is Outcome.EXPIRE
    assert info.history[-1].started_ms is None


def test_a_job_that_starts_in_time_runs_as_ever() -> None:
    async def story(world: World) -> None:
        @world.app.task(expires="1s")
        async def note() -> int:
            await asyncio.sleep(5)  # its own time is not limited
            return 7

        await world.node()
        job = await note.enqueue()
        assert await job.result() == 7
        info = await job.info()
        assert info.expires == info.due + timedelta(seconds=1)

    virtual(story)


@pytest.mark.parametrize(("late_ms", "runs"), [(999, True), (1000, False), (1001, False)])
def test_it_may_start_until_a_moment_before_and_not_at_its_expiry(late_ms: int, runs: bool) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def note() -> None: ...

        job = await note.using(expires="1s").enqueue()
        due_ms = (await world.stored(job.id)).due_ms
        await asyncio.sleep((due_ms + late_ms - world.now_ms) / 1000)
        assert world.now_ms == due_ms + late_ms
        await world.node()
        if runs:
            await job.result()
        else:
            await expired(job)

    virtual(story)


def test_the_time_counts_from_when_it_is_due() -> None:
    async def story(world: World) -> None:
        @world.app.task(expires="1h")
        async def note() -> None: ...

        start = world.now_ms
        job = await note.using(delay="1h", expires="10m").enqueue()
        at = moment(start + 5_000)
        until = await note.using(at=at, expires=at + timedelta(seconds=2)).enqueue()
        past = await note.using(at=moment(start - 3_600_000), expires="10m").enqueue()
        info = await job.info()
        assert info.expires == info.due + timedelta(minutes=10)
        assert (await until.info()).expires == at + timedelta(seconds=2)
        # A past time means now.
        assert (await world.stored(past.id)).expires_ms == start + 600_000
        await asyncio.sleep(3600 + 599)
        await world.node()
        await job.result()
        await expired(until)

    virtual(story)


def test_a_job_that_is_held_without_a_slot_is_cancelled_at_its_expiry() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def busy() -> None:
            await asyncio.sleep(60)

        @world.app.task
        async def note() -> None: ...

        await world.node(concurrency=1)
        job = await note.using(delay="900ms", expires="100ms").enqueue()
        # It takes the slot after the other was claimed.
        await busy.using(delay="890ms", priority="urgent").enqueue()
        await asyncio.sleep(3)
        stored = await world.stored(job.id)
        assert (stored.state, stored.error) == (State.CANCELLED, "expired")
        assert stored.ended_ms is not None and stored.expires_ms is not None
        assert 0 <= stored.ended_ms - stored.expires_ms <= 2

    virtual(story)


def test_a_slot_that_comes_free_after_the_expiry_starts_nothing() -> None:
    """Also before any timer has noticed: here the clock was set in that moment."""

    async def story(world: World) -> None:
        runs: list[str] = []

        @world.app.task
        async def busy() -> None:
            await asyncio.sleep(0.3)
            world.set_clock(5)

        @world.app.task
        async def note() -> None:
            runs.append("run")

        await world.node(concurrency=1)
        job = await note.using(delay="900ms", expires="4s").enqueue()
        await busy.using(delay="890ms", priority="urgent").enqueue()
        await expired(job)
        assert runs == []

    virtual(story)


def test_no_retry_starts_after_the_expiry() -> None:
    async def story(world: World) -> None:
        runs: list[int] = []

        @world.app.task(retries=RetryPolicy(retries=9, first="4s", factor=1, jitter=0))
        async def fail() -> None:
            runs.append(world.now_ms)
            raise ValueError("no luck")

        await world.node()
        start = world.now_ms
        job = await fail.using(expires="10s").enqueue()
        await expired(job)
        # It ends when it expires, not at the time of the retry that can't be.
        assert (world.now_ms - start) // 1000 == 10
        assert [round((ms - start) / 1000) for ms in runs] == [0, 4, 8]
        info = await job.info()
        assert [run.outcome for run in info.history] == [*[Outcome.RETRY] * 3, Outcome.EXPIRE]
        assert (info.failures, info.history[2].error) == (3, "ValueError: no luck")

    virtual(story)


def test_a_snooze_beyond_the_expiry_ends_at_the_expiry() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def later() -> None:
            raise Snooze("1h")

        await world.node()
        start = world.now_ms
        await expired(job := await later.using(expires="10s").enqueue())
        assert (world.now_ms - start) // 1000 == 10
        assert (await job.info()).attempts == 2

    virtual(story)


def test_a_run_that_is_lost_after_the_expiry_is_not_run_again() -> None:
    async def story(world: World) -> None:
        runs: list[str] = []

        @world.app.task
        async def take_long() -> None:
            runs.append("run")
            await asyncio.sleep(3600)

        first = await world.node(lease_ms=3_000)
        job = await take_long.using(expires="5s").enqueue()
        await asyncio.sleep(4)
        first.crash()
        await world.node(lease_ms=3_000)
        await expired(job)
        assert runs == ["run"]
        info = await job.info()
        assert [run.outcome for run in info.history] == [Outcome.LOST, Outcome.EXPIRE]
        assert info.takeovers == 1

    virtual(story)


def test_a_run_that_is_lost_before_the_expiry_is_run_again() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def once_more() -> int:
            context = current_job()
            assert context is not None
            if context.attempt == 1:
                await asyncio.sleep(3600)
            return context.attempt

        first = await world.node(lease_ms=3_000)
        job = await once_more.using(expires="30s").enqueue()
        await asyncio.sleep(4)
        first.crash()
        await world.node(lease_ms=3_000)
        assert await job.result() == 2

    virtual(story)


def test_a_job_of_a_paused_queue_expires_once_a_worker_gets_it() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def note() -> None: ...

        await world.node()
        await world.app.pause("default")
        job = await note.using(expires="5s").enqueue()
        soon = await note.using(expires="1m").enqueue()
        await asyncio.sleep(20)
        assert (await job.info()).state is State.WAITING
        await world.app.resume("default")
        await expired(job)
        await soon.result()

    virtual(story)


@pytest.mark.parametrize(("by_s", "runs"), [(3600, False), (-3600, True)])
def test_the_clock_decides_also_when_it_is_set(by_s: float, runs: bool) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def busy() -> None:
            await asyncio.sleep(0.3)

        @world.app.task
        async def note() -> None: ...

        node = await world.node(concurrency=1)
        await busy.enqueue()
        await asyncio.sleep(0.1)
        job = await note.using(expires="1m").enqueue()
        world.set_clock(by_s)
        await asyncio.sleep(30)
        info = await job.info()
        if by_s > 0:
            assert (info.state, info.error) == (State.CANCELLED, "expired")
        else:
            # Due in an hour again, and a minute after that it expires.
            assert info.state in (State.WAITING, State.RUNNING)
            await asyncio.sleep(3600)
            assert (await job.info()).state is State.DONE
        assert node.worker.running == 0

    virtual(story)


def test_a_suspect_that_expires_is_not_tried() -> None:
    async def story(world: World) -> None:
        runs: list[int] = []

        @world.app.task
        async def kill() -> None:
            context = current_job()
            assert context is not None
            runs.append(context.attempt)
            world.nodes[-1].crash()
            await asyncio.sleep(3600)

        job = await kill.using(expires="5s").enqueue()
        for _ in range(SUSPECT_AFTER):
            await world.node(lease_ms=2_000)
            await asyncio.sleep(3)
        await world.node(lease_ms=2_000)
        await expired(job)
        assert len(runs) == SUSPECT_AFTER

    virtual(story)


def test_a_suspect_that_waits_for_its_trial_expires_meanwhile() -> None:
    async def story(world: World) -> None:
        runs: list[str] = []

        @world.app.task
        async def kill(name: str) -> None:
            runs.append(name)
            if len(runs) < 2 * SUSPECT_AFTER:
                await asyncio.sleep(0.1)
                world.nodes[-1].crash()
            await asyncio.sleep(3600)

        jobs = [await kill.using(expires="20s").enqueue(name) for name in "ab"]
        for _ in range(SUSPECT_AFTER):
            await world.node(lease_ms=2_000, concurrency=2)
            await asyncio.sleep(3)
        # On the last chance each is tried alone, for up to a minute: the other has to wait.
        await world.node(lease_ms=2_000, concurrency=2, takeovers=SUSPECT_AFTER + 1)
        await asyncio.sleep(30)
        infos = [await job.info() for job in jobs]
        assert sorted(info.state for info in infos) == [State.CANCELLED, State.RUNNING]
        [late] = [info for info in infos if info.state is State.CANCELLED]
        assert late.ended is not None and late.expires is not None
        assert late.error == "expired"
        assert timedelta() <= late.ended - late.expires <= timedelta(milliseconds=2)

    virtual(story)


def test_a_job_whose_lease_is_over_is_not_expired_by_its_former_holder() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def busy() -> None:
            await asyncio.sleep(600)

        @world.app.task
        async def note() -> None: ...

        line = FaultyStore(world.store)
        await world.node(concurrency=1, lease_ms=2_000, line=line)
        job = await note.using(delay="900ms", expires="8s").enqueue()
        await busy.using(delay="890ms", priority="urgent").enqueue()
        await asyncio.sleep(1)
        line.away = True
        await asyncio.sleep(5)
        assert await world.app.cancel(job.id) == "cancelled"
        line.away = False
        await asyncio.sleep(10)
        info = await job.info()
        assert (info.state, info.error) == (State.CANCELLED, None)

    virtual(story)


def test_a_job_that_is_rerun_no_longer_expires() -> None:
    async def story(world: World) -> None:
        @world.app.task(expires="5s")
        async def note() -> int:
            return 7

        job = await note.enqueue()
        await asyncio.sleep(6)
        await world.node()
        await expired(job)
        assert await world.app.rerun(job.id)
        assert await job.result() == 7
        assert (await job.info()).expires is None

    virtual(story)


def test_the_jobs_of_a_schedule_expire_as_their_task_says() -> None:
    async def story(world: World) -> None:
        runs: list[int] = []

        @world.app.every("1h", misfire="all")
        @world.app.task(expires="10m")
        async def hourly() -> None:
            runs.append(world.now_ms)

        first = await world.node()
        await asyncio.sleep(3600 + 1)
        assert len(runs) == 1
        first.crash()
        await asyncio.sleep(2 * 3600 + 300)  # five minutes after the third tick
        await world.node()
        await asyncio.sleep(60)
        assert len(runs) == 2  # the third; the second came too late
        page = await world.app.find(state="cancelled")
        assert [(info.error, info.task) for info in page.jobs] == [("expired", "hourly")]

    virtual(story, start=datetime(2026, 1, 1, tzinfo=UTC))


def test_nothing_is_remembered_of_jobs_that_are_over() -> None:
    async def story(world: World) -> None:
        @world.app.task(expires="1d", retries=0)
        async def note(fails: bool) -> None:
            if fails:
                raise ValueError

        node = await world.node()
        for n in range(20):
            await note.using(delay=n / 10).enqueue(n % 2 == 0)
        await asyncio.sleep(5)
        assert len(node.worker._runs._expiries) == 0

    virtual(story)


# --- The log


def test_the_log_says_what_expired_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        @world.app.task(expires="1s")
        async def note() -> None: ...

        for _ in range(LINES + 50):
            await note.using(meta={"customer": "42"}).enqueue()
        await asyncio.sleep(2)
        await world.node()
        await asyncio.sleep(PERIOD_S + 1)

    with caplog.at_level(logging.INFO, "tickwheel"):
        virtual(story)
    lines = [record for record in caplog.records if getattr(record, "outcome", "") == "expire"]
    assert len(lines) == LINES
    assert "expired: could not start by " in lines[0].getMessage()
    assert vars(lines[0])["meta"] == {"customer": "42"}
    [summary] = [record for record in caplog.records if hasattr(record, "expired")]
    assert summary.getMessage() == f"0 runs in the last 10s: {LINES + 50} expired"
    assert vars(summary)["expired"] == LINES + 50


def test_a_summary_counts_expired_jobs_beside_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def note() -> None: ...

        for _ in range(LINES):
            await note.enqueue()
        late = [await note.using(expires="1s").enqueue() for _ in range(2)]
        await asyncio.sleep(2)
        await world.node()
        await asyncio.sleep(PERIOD_S + 1)
        for job in late:
            await expired(job)

    with caplog.at_level(logging.INFO, "tickwheel"):
        virtual(story)
    [summary] = [record for record in caplog.records if hasattr(record, "expired")]
    words = summary.getMessage()
    assert f"{LINES} runs in the last 10s: {LINES} done, 2 expired; late p50" in words


def test_a_failure_that_is_not_retried_any_more_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=RetryPolicy(first="1h", jitter=0))
        async def fail() -> None:
            raise ValueError("no luck")

        await world.node()
        await expired(await fail.using(expires="10s").enqueue())

    with caplog.at_level(logging.INFO, "tickwheel"):
        virtual(story)
    [failure] = [record for record in caplog.records if getattr(record, "outcome", "") == "retry"]
    assert "failed (1 of 6), expires in 10s: ValueError" in failure.getMessage()
