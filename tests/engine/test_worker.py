"""The worker in virtual time: what it promises, one sentence a test."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from world import World, virtual

from tickwheel import (
    CancelOutcome,
    GiveUp,
    JobCancelled,
    JobFailed,
    Outcome,
    ResultError,
    ResultTimeout,
    Retry,
    RetryPolicy,
    Snooze,
    State,
    UnknownTask,
)
from tickwheel.clock import Clock
from tickwheel.engine.chores import idle_ms
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import FaultyStore


def test_a_delayed_job_starts_on_time_and_never_early() -> None:
    async def story(world: World) -> None:
        started: list[int] = []

        @world.app.task
        async def note() -> None:
            started.append(world.now_ms)

        await world.node()
        due = [world.now_ms + ms for ms in (1, 500, 1_800_000, 86_400_000)]
        for ms in due:
            await note.using(delay=timedelta(milliseconds=ms - world.now_ms)).enqueue()
        await asyncio.sleep(86_401)
        assert all(0 <= late - on_time <= 1 for late, on_time in zip(started, due, strict=True))

    virtual(story)


class WrongClock(Clock):
    """Hours off, and it jumps."""

    def __init__(self, right: Clock, off_s: float) -> None:
        self.right, self.off_s = right, off_s

    def now_ns(self) -> int:
        return self.right.now_ns() + int(self.off_s * 1e9)

    def monotonic_ns(self) -> int:
        return self.right.monotonic_ns()


@pytest.mark.parametrize("off_s", [-7200.0, -1.0, 1.0, 7200.0])
def test_a_node_whose_clock_is_wrong_starts_jobs_neither_early_nor_late(off_s: float) -> None:
    async def story(world: World) -> None:
        started: list[int] = []

        @world.app.task
        async def note() -> None:
            started.append(world.now_ms)

        clock = WrongClock(world.clock, off_s)
        await world.node(clock=clock)
        due = [world.now_ms + 10_000, world.now_ms + 90_000]
        for ms in due:
            await note.using(delay=(ms - world.now_ms) / 1000).enqueue()
        await asyncio.sleep(20)
        clock.off_s = -off_s  # somebody set the clock
        await asyncio.sleep(100)
        assert [0 <= late - on_time <= 2 for late, on_time in zip(started, due, strict=True)] == [
            True,
            True,
        ]

    virtual(story)


def test_a_failing_job_is_retried_after_growing_delays_and_then_dead() -> None:
    async def story(world: World) -> None:
        runs: list[int] = []

        @world.app.task(retries=RetryPolicy(retries=3, first="2s", jitter=0))
        async def fail() -> None:
            runs.append(world.now_ms)
            raise ValueError("no luck")

        await world.node()
        job = await fail.enqueue()
        with pytest.raises(JobFailed, match="no luck"):
            await job.result()
        gaps = [(b - a) / 1000 for a, b in pairwise(runs)]
        assert [round(gap) for gap in gaps] == [2, 4, 8]
        info = await job.info()
        assert (info.state, info.failures, info.attempts) == (State.DEAD, 4, 4)
        assert info.error == "ValueError: no luck"
        assert [run.outcome for run in info.history] == [Outcome.RETRY] * 3 + [Outcome.DEAD]

        # A person puts it back: it has all its retries again.
        assert await world.app.rerun([job.id]) == [True]
        with pytest.raises(JobFailed):
            await job.result()
        assert len(runs) == 8

    virtual(story)


def test_the_policy_of_an_exception_type_wins_over_that_of_the_task() -> None:
    async def story(world: World) -> None:
        class Busy(Exception):
            pass

        policy = RetryPolicy(
            retries=5,
            on={Busy: RetryPolicy(retries=1, first="1m", jitter=0), LookupError: None},
        )

        @world.app.task(retries=policy)
        async def fail(how: str) -> None:
            raise {"busy": Busy(), "missing": KeyError("x")}[how]

        await world.node()
        start = world.now_ms
        missing, busy = await fail.enqueue("missing"), await fail.enqueue("busy")
        for job in (missing, busy):
            with pytest.raises(JobFailed):
                await job.result()
        assert (await missing.info()).attempts == 1
        info = await busy.info()
        assert info.attempts == 2
        assert 60_000 <= (info.due.timestamp() * 1000) - start <= 61_000

    virtual(story)


def test_a_task_chooses_its_outcome_by_raising() -> None:
    async def story(world: World) -> None:
        calls: list[str] = []

        @world.app.task(retries=1)
        async def choose(how: str) -> str:
            calls.append(how)
            if calls.count(how) == 1:
                raise {"retry": Retry("10m"), "snooze": Snooze("1h"), "give up": GiveUp("enough")}[
                    how
                ]
            return f"{how} at last"

        await world.node()
        start = world.now_ms
        retried = await choose.enqueue("retry")
        snoozed = await choose.enqueue("snooze")
        given_up = await choose.enqueue("give up")
        with pytest.raises(JobFailed, match="enough"):
            await given_up.result()
        assert await retried.result() == "retry at last"
        assert await snoozed.result() == "snooze at last"
        assert 3_600_000 <= world.now_ms - start < 3_603_000
        assert (await retried.info()).failures == 1
        assert (await snoozed.info()).failures == 0
        assert (await given_up.info()).attempts == 1

    virtual(story)


def test_jobs_that_wait_for_a_slot_start_by_priority_then_by_due_time() -> None:
    async def story(world: World) -> None:
        order: list[str] = []

        @world.app.task
        async def note(name: str) -> None:
            order.append(name)
            await asyncio.sleep(0.1)

        await note.using(delay=1).enqueue("first")
        await asyncio.sleep(0.2)
        for name, priority in (("a", "low"), ("b", "normal"), ("c", "urgent"), ("d", "high")):
            await note.using(delay=1, priority=priority).enqueue(name)  # type: ignore[arg-type]
        await note.using(delay=1.01, priority="urgent").enqueue("e")
        await world.node(concurrency=1)
        await asyncio.sleep(5)
        assert order == ["first", "c", "e", "d", "b", "a"]

    virtual(story)


def test_a_cancelled_job_that_waits_never_runs() -> None:
    async def story(world: World) -> None:
        ran = []

        @world.app.task
        async def note() -> None:
            ran.append(1)

        await world.node()
        # One far away, one in a worker's wheel already: handed out, but not started.
        far, near = await note.using(delay=60).enqueue(), await note.using(delay=0.5).enqueue()
        await asyncio.sleep(0.2)
        assert await far.cancel() is CancelOutcome.CANCELLED
        assert await near.cancel() is CancelOutcome.REQUESTED
        await asyncio.sleep(120)
        assert ran == []
        assert (await far.info()).state is State.CANCELLED
        assert (await near.info()).state is State.CANCELLED
        assert await far.cancel() is CancelOutcome.TOO_LATE
        assert await world.app.job("nobody").cancel() is CancelOutcome.UNKNOWN
        with pytest.raises(JobCancelled):
            await near.result()

    virtual(story)


def test_cancelling_a_running_job_interrupts_it_at_once() -> None:
    async def story(world: World) -> None:
        interrupted = []

        @world.app.task
        async def slow() -> None:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                interrupted.append(world.now_ms)
                raise

        await world.node()
        job = await slow.enqueue()
        await asyncio.sleep(1)
        asked = world.now_ms
        assert await job.cancel() is CancelOutcome.REQUESTED
        with pytest.raises(JobCancelled):
            await job.result(timeout=5)
        assert interrupted and interrupted[0] - asked < 50

    virtual(story)


def test_a_run_that_takes_too_long_is_ended_and_retried() -> None:
    async def story(world: World) -> None:
        ended = []

        @world.app.task(timeout=30, retries=1)
        async def hang() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(world.now_ms)

        await world.node()
        start = world.now_ms
        job = await hang.enqueue()
        with pytest.raises(JobFailed, match="timeout of 30s"):
            await job.result()
        assert 30_000 <= ended[0] - start <= 30_010
        assert (await job.info()).attempts == 2

    virtual(story)


def test_a_run_that_ignores_its_cancellation_is_left_behind() -> None:
    async def story(world: World) -> None:
        @world.app.task(timeout=1, retries=0)
        async def stubborn() -> None:
            for _ in range(100):
                try:
                    await asyncio.sleep(10)
                except asyncio.CancelledError:
                    pass

        await world.node(concurrency=1)
        job = await stubborn.enqueue()
        with pytest.raises(JobFailed, match="timeout"):
            await job.result(timeout=10)
        # Its slot is free for the next one.
        second = await stubborn.enqueue()
        with pytest.raises(JobFailed, match="timeout"):
            await second.result(timeout=10)

    virtual(story)


def test_the_jobs_of_a_dead_worker_run_again_within_a_lease_and_a_second() -> None:
    async def story(world: World) -> None:
        ran: list[str] = []

        @world.app.task
        async def slow() -> None:
            ran.append("start")
            await asyncio.sleep(60)
            ran.append("end")

        first = await world.node(lease_ms=5_000)
        job = await slow.enqueue()
        await asyncio.sleep(20)
        first.crash()
        crashed = world.now_ms
        await world.node(lease_ms=5_000)
        await job.result(timeout=120)
        info = await job.info()
        assert (info.attempts, info.takeovers, info.failures) == (2, 1, 0)
        lost, done = info.history
        assert (lost.outcome, lost.worker) == (Outcome.LOST, first.name)
        assert done.started_ms is not None and done.started_ms - crashed <= 6_000
        assert ran.count("end") == 1

    virtual(story)


def test_a_job_longer_than_its_lease_is_kept_by_its_worker() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> str:
            await asyncio.sleep(600)
            return "done"

        await world.node(lease_ms=3_000)
        await world.node(lease_ms=3_000)
        job = await slow.enqueue()
        assert await job.result() == "done"
        assert (await job.info()).attempts == 1

    virtual(story)


def test_a_worker_cut_off_from_the_store_stops_its_run_and_cannot_settle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        ends: list[str] = []

        @world.app.task
        async def slow() -> None:
            try:
                await asyncio.sleep(100)
                ends.append("whole")
            except asyncio.CancelledError:
                ends.append("cut short")
                raise

        cut = await world.node(lease_ms=3_000)
        job = await slow.enqueue()
        await asyncio.sleep(1)
        cut.line.away = True
        await world.node(lease_ms=3_000)
        await asyncio.sleep(3.4)
        assert ends == ["cut short"], "its own clock tells a worker that its lease is over"
        await asyncio.sleep(17)
        cut.line.away = False
        await job.result()
        assert ends == ["cut short", "whole"]
        assert (await job.info()).attempts == 2
        assert "its lease ran out, so another worker may run it" in caplog.text
        away = [r for r in caplog.records if "calls to the store fail" in r.message]
        back = [r for r in caplog.records if "calls to the store succeed again" in r.message]
        assert (len(away), len(back)) == (1, 1)

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)


class SlowAnswers(FaultyStore):
    """Outcomes are written at once, and that is said two seconds later."""

    async def settle(self, *args: Any, **kwargs: Any) -> Any:
        answer = await self._store.settle(*args, **kwargs)
        await asyncio.sleep(2)
        return answer


def test_a_job_whose_outcome_is_on_its_way_is_not_called_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def brief() -> None:
            await asyncio.sleep(0.9)

        await world.node(lease_ms=3_000, line=SlowAnswers(world.store))
        job = await brief.enqueue()
        # Its lease is due to be extended after a second, when the store already has its outcome.
        await asyncio.sleep(4)
        assert (await job.info()).state is State.DONE
        assert caplog.records == []

    with caplog.at_level(logging.WARNING, "tickwheel"):
        virtual(story)


def test_a_store_that_is_away_for_a_while_loses_no_job() -> None:
    async def story(world: World) -> None:
        ran = []

        @world.app.task
        async def note(n: int) -> None:
            ran.append(n)

        node = await world.node()
        for n in range(10):
            await note.using(delay=n).enqueue(n)
        await asyncio.sleep(2.5)
        node.line.away = True
        await asyncio.sleep(4)
        node.line.away = False
        await asyncio.sleep(40)
        assert sorted(set(ran)) == list(range(10))
        [queue] = await world.app.queues()
        assert (queue.done, queue.waiting, queue.running) == (10, 0, 0)

    virtual(story)


def test_an_outcome_outlives_a_store_that_is_away_for_less_than_a_lease() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> str:
            await asyncio.sleep(1)
            return "done"

        node = await world.node(lease_ms=10_000)
        job = await work.enqueue()
        await asyncio.sleep(0.5)
        node.line.away = True
        await asyncio.sleep(4)
        node.line.away = False
        assert await job.result(timeout=5) == "done"
        assert (await job.info()).attempts == 1

    virtual(story)


def test_jobs_whose_claim_lost_its_reply_start_when_the_line_is_back() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        node = await world.node(lease_ms=10_000)
        await asyncio.sleep(0.1)
        node.line.lose_replies = 1
        jobs = [await work.enqueue() for _ in range(3)]
        await asyncio.sleep(6)
        node.line.lose_replies = 0
        await asyncio.sleep(2.5)
        for job in jobs:
            stored = await world.stored(job.id)
            assert (stored.state, stored.attempt, stored.takeovers) == (State.DONE, 1, 0)

    virtual(story)


def test_jobs_that_never_started_are_not_dead_however_often_their_claim_is_lost() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        node = await world.node(lease_ms=1_000, takeovers=2)
        await asyncio.sleep(0.1)
        node.line.lose_replies = 1
        jobs = [await work.enqueue() for _ in range(3)]
        await asyncio.sleep(60)
        assert (await world.stored(jobs[0].id)).takeovers > 5
        node.line.lose_replies = 0
        await asyncio.sleep(30)
        assert [(await job.info()).state for job in jobs] == [State.DONE] * 3

    virtual(story)


def test_jobs_in_the_wheel_of_a_stopping_worker_are_handed_back_at_once() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def work() -> None: ...

        node = await world.node()
        held = await work.using(delay=0.9).enqueue()
        await asyncio.sleep(0.2)
        assert (await held.info()).state is State.RUNNING
        await node.stop()
        info = await held.info()
        assert (info.state, info.history[-1].outcome) == (State.WAITING, Outcome.RELEASE)
        # Another one starts it on time, not a lease later.
        await world.node()
        await held.result()
        assert (last := (await held.info()).history[-1]).started_ms == last.due_ms

    virtual(story)


def test_a_stopping_worker_finishes_what_runs_and_hands_back_the_rest() -> None:
    async def story(world: World) -> None:
        ended = []

        @world.app.task
        async def work(seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append(seconds)

        node = await world.node(concurrency=1, grace_ms=10_000)
        short = await work.enqueue(5)
        await asyncio.sleep(0.1)
        waiting = await work.enqueue(1)
        held = await work.using(delay=1).enqueue(1)
        await asyncio.sleep(0.1)
        await node.stop()
        assert ended == [5]
        assert (await short.info()).state is State.DONE
        for job in (waiting, held):
            info = await job.info()
            assert (info.state, info.failures) == (State.WAITING, 0)
        assert await world.app.workers() == []

    virtual(story)


def test_what_outlasts_the_grace_is_interrupted_and_released() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(3600)

        node = await world.node(grace_ms=2_000)
        job = await slow.enqueue()
        await asyncio.sleep(1)
        start = world.now_ms
        await node.stop()
        assert 2_000 <= world.now_ms - start < 3_000
        info = await job.info()
        assert (info.state, info.failures) == (State.WAITING, 0)
        assert info.history[-1].outcome is Outcome.RELEASE

    virtual(story)


def test_a_job_whose_workers_keep_dying_is_dead_and_not_run_again() -> None:
    async def story(world: World) -> None:
        starts = []

        @world.app.task
        async def killer() -> None:
            starts.append(world.now_ms)
            await asyncio.sleep(3600)

        job = await killer.enqueue()
        for _ in range(3):
            node = await world.node(lease_ms=1_000, takeovers=3)
            await asyncio.sleep(1.5)
            node.crash()
        await world.node(lease_ms=1_000, takeovers=3)
        with pytest.raises(JobFailed, match="died or froze 3 times"):
            await job.result(timeout=10)
        assert len(starts) == 3
        assert (await job.info()).failures == 0

    virtual(story)


def test_a_payload_that_does_not_fit_is_retried_in_case_another_version_knows_it() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def changed(order_id: int) -> None: ...

        job = msgspec.structs.replace(changed.job(1), payload='{"order":1}')
        await world.store.add([job])
        await world.node()
        with pytest.raises(JobFailed, match="no longer fit"):
            await world.app.job(job.id).result()
        assert (await world.stored(job.id)).attempt == 6

    virtual(story)


def test_a_full_worker_leaves_the_work_to_an_idle_one() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> str:
            await asyncio.sleep(30)
            return "done"

        busy = await world.node(concurrency=2)
        jobs = [await slow.enqueue() for _ in range(6)]
        await asyncio.sleep(2)
        idle = await world.node(concurrency=4)
        start = world.now_ms
        for job in jobs:
            await job.result()
        # All six ran side by side: nothing sat in the hand of the busy one.
        assert world.now_ms - start < 32_000
        by = [(await job.info()).worker for job in jobs]
        assert (by.count(busy.name), by.count(idle.name)) == (2, 4)

    virtual(story)


def test_what_finds_no_slot_in_time_goes_back_for_others() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(60)

        await world.node(concurrency=2)
        # All fall due in one moment, so one worker can hold them all before any has started.
        jobs = [await slow.using(delay=0.9).enqueue() for _ in range(30)]
        await asyncio.sleep(0.5)
        await world.node(concurrency=30)
        start = world.now_ms
        for job in jobs:
            await job.result()
        assert world.now_ms - start < 66_000, "they waited in the hand of a full worker"

    virtual(story)


def test_jobs_held_for_later_take_no_slot() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def quick() -> str:
            return "done"

        await world.node(concurrency=1)
        await asyncio.gather(*(quick.using(delay=0.9).enqueue() for _ in range(50)))
        await asyncio.sleep(0.1)
        job = await quick.enqueue()
        assert await job.result(timeout=0.1) == "done"

    virtual(story)


def test_a_paused_queue_is_not_served_until_it_is_resumed() -> None:
    async def story(world: World) -> None:
        @world.app.task(queue="mail")
        async def quick() -> str:
            return "done"

        await world.node()
        await world.app.pause("mail")
        job = await quick.enqueue()
        with pytest.raises(ResultTimeout):
            await job.result(timeout=60)
        await world.app.resume("mail")
        assert await job.result(timeout=0.1) == "done"

    virtual(story)


def test_a_result_that_json_cannot_carry_leaves_the_job_done_and_says_so() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def odd() -> object:
            return object()

        await world.node()
        job = await odd.enqueue()
        with pytest.raises(ResultError, match="result was not kept"):
            await job.result()
        assert (await job.info()).state is State.DONE

    virtual(story)


def test_ended_jobs_are_pruned_after_their_retention() -> None:
    async def story(world: World) -> None:
        @world.app.task(retries=0)
        async def work(fail: bool) -> None:
            if fail:
                raise ValueError

        await world.node(retention_ms=3_600_000, dead_retention_ms=86_400_000)
        done, dead = await work.enqueue(False), await work.enqueue(True)
        await asyncio.sleep(3_000)
        assert (await done.info()).state is State.DONE
        await asyncio.sleep(800)
        [queue] = await world.app.queues()
        assert (queue.done, queue.dead) == (0, 1)
        await asyncio.sleep(86_400)
        assert await world.app.queues() == []
        assert (await world.store.get([done.id, dead.id])) == [None, None]

    virtual(story)


def test_the_same_id_is_one_job() -> None:
    async def story(world: World) -> None:
        ran = []

        @world.app.task
        async def note() -> int:
            ran.append(1)
            return len(ran)

        first = await note.using(id="order-42", delay=5).enqueue()
        again = await note.using(id="order-42").enqueue()
        assert (first.added, again.added) == (True, False)
        await world.node()
        assert await again.result() == 1
        await asyncio.sleep(10)
        assert ran == [1]

    virtual(story)


def test_a_worker_tells_of_itself_while_it_lives() -> None:
    async def story(world: World) -> None:
        @world.app.task(queue="mail")
        async def work() -> None: ...

        node = await world.node(concurrency=7)
        await asyncio.sleep(1)
        [info] = await world.app.workers()
        assert (info.name, info.concurrency, info.queues) == (node.name, 7, ("default", "mail"))
        node.crash()
        await asyncio.sleep(20)
        assert await world.app.workers() == []

    virtual(story)


def test_asking_for_an_unknown_task_says_which_there_are() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def known() -> None: ...

        with pytest.raises(UnknownTask, match="the tasks are: known"):
            world.app.tasks.get("unknown")

    virtual(story)


def test_a_store_with_a_long_ahead_is_asked_less_often() -> None:
    longest = [idle_ms(MemoryStore(ahead_ms=ahead_ms)) for ahead_ms in (0, 1_000, 20_000)]
    assert longest == [5_000, 5_000, 285_000]
