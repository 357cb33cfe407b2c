"""Batches in virtual time: due jobs of one task run as one call, each with its own outcome."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from typing import Any

import pytest
from world import Line, World, virtual

from tickwheel import (
    App,
    CancelOutcome,
    GiveUp,
    JobFailed,
    Outcome,
    Partial,
    Retry,
    RetryPolicy,
    Snooze,
    State,
    current_job,
    current_jobs,
)
from tickwheel.task import BatchTask

SOON = RetryPolicy(retries=5, first="1s", factor=1, jitter=0)


class Calls:
    """A batch task that notes when it was called, and with what."""

    def __init__(self, world: World, **options: Any) -> None:
        self.world = world
        self.made: list[list[int]] = []
        self.at_ms: list[int] = []

        @world.app.batch(**options)
        async def note(items: list[int]) -> list[int]:
            return await self.answer(items)

        self.task = note

    async def answer(self, items: list[int]) -> list[int]:
        self.made.append(items)
        self.at_ms.append(self.world.now_ms)
        return [item * 10 for item in items]

    async def add(self, *items: int, **choices: Any) -> list[str]:
        call = self.task.using(**choices)
        return [job.id for job in await self.world.app.enqueue_many([call.job(i) for i in items])]


async def states(world: World, ids: list[str]) -> list[State]:
    return [(await world.stored(id)).state for id in ids]


async def all_ended(world: World, ids: list[str]) -> bool:
    return all(state.ended for state in await states(world, ids))


def test_jobs_that_are_due_together_run_as_one_call_and_each_has_its_result() -> None:
    async def story(world: World) -> None:
        calls = Calls(world)
        handles = [await calls.task.enqueue(n) for n in range(7)]
        await world.node()
        assert [await each.result(timeout=60) for each in handles] == [n * 10 for n in range(7)]
        assert calls.made == [list(range(7))]
        info = await handles[3].info()
        assert (info.attempts, info.state, info.arguments) == (1, State.DONE, {"items": 3})
        assert [run.outcome for run in info.history] == [Outcome.DONE]

    virtual(story)


def test_a_batch_starts_at_once_when_it_is_full_and_else_when_the_first_has_lingered() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=3, linger="200ms")
        await world.node()
        start = world.now_ms + 1000
        for item, ms in enumerate([1000, 1050, 1199, 1200, 1250, 1260, 1270]):
            await calls.add(item, delay=(ms + start - 1000 - world.now_ms) / 1000)
        await asyncio.sleep(3)
        assert calls.made == [[0, 1, 2], [3, 4, 5], [6]]
        # Full at the third of them; full at the sixth; and the last has waited for all its linger.
        assert [ms - start for ms in calls.at_ms] == [199, 260, 470]

    virtual(story)


@pytest.mark.parametrize("linger_ms", [0, 1, 50, 2500])
def test_no_job_starts_early_or_later_than_its_linger(linger_ms: int) -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=10, linger=linger_ms / 1000)
        await world.node()
        due = {n: world.now_ms + 100 + 37 * n + (n * n) % 53 for n in range(200)}
        for item, ms in due.items():
            await calls.add(item, delay=(ms - world.now_ms) / 1000)
        await asyncio.sleep(20)
        late = [
            at_ms - due[item]
            for items, at_ms in zip(calls.made, calls.at_ms, strict=True)
            for item in items
        ]
        assert len(late) == 200
        assert min(late) >= 0
        # A millisecond for the timer's own rounding.
        assert max(late) <= linger_ms + 1
        assert max(map(len, calls.made)) <= 10
        assert linger_ms < 50 or len(calls.made) < 120

    virtual(story)


def test_a_job_lingers_in_one_worker_only() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="10s")
        await calls.add(1, 2)
        first = await world.node()
        await asyncio.sleep(9)
        await first.stop()
        assert calls.made == []
        await world.node()
        await asyncio.sleep(1.5)
        assert calls.made == [[1, 2]]

    virtual(story)


def test_a_job_that_lingers_for_long_is_not_released() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="30s")

        @world.app.task
        async def slow() -> None:
            await asyncio.sleep(20)

        await world.node(concurrency=1)
        [id] = await calls.add(1)
        await asyncio.sleep(1)
        # Something waits for a slot meanwhile, and is released for others.
        for _ in range(3):
            await slow.enqueue()
        await asyncio.sleep(28)
        assert calls.made == []
        assert (await world.stored(id)).attempt == 1

    virtual(story)


def test_jobs_that_linger_take_no_slot_from_others() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="30s")
        ran_ms: list[int] = []

        @world.app.task
        async def plain() -> None:
            ran_ms.append(world.now_ms)

        await world.node(concurrency=2)
        # Jobs with different timeouts run in different calls.
        for n in range(5):
            await calls.add(n, timeout=60 + n)
        await asyncio.sleep(1)
        start_ms = world.now_ms
        await plain.enqueue()
        await asyncio.sleep(5)
        assert [ms - start_ms for ms in ran_ms] == [0]
        assert calls.made == []

    virtual(story)


@pytest.mark.parametrize("limit", [{"hold": 20}, {"hold_bytes": 200}])
def test_jobs_that_linger_go_when_their_worker_can_hold_no_more(limit: dict[str, int]) -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="30s")
        ran_ms: list[int] = []

        @world.app.task
        async def plain() -> None:
            ran_ms.append(world.now_ms)

        options: dict[str, Any] = dict(limit)
        await world.node(**options)
        start_ms = world.now_ms
        await calls.add(*range(25))
        await asyncio.sleep(1)
        await plain.enqueue()
        await asyncio.sleep(1)
        assert ran_ms and calls.made
        assert calls.at_ms[0] - start_ms <= 1000

    virtual(story)


@pytest.mark.parametrize("expires, after_ms", [("1s", 900), ("50ms", 0), ("1h", 2000)])
def test_a_job_that_would_expire_while_it_lingers_starts_before(
    expires: str, after_ms: int
) -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="2s", expires=expires)
        await world.node()
        start_ms = world.now_ms
        ids = await calls.add(1)
        await asyncio.sleep(5)
        assert [ms - start_ms for ms in calls.at_ms] == [after_ms]
        assert await states(world, ids) == [State.DONE]

    virtual(story)


def test_what_is_left_of_a_full_batch_lingers_no_longer_than_it_may() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=10, linger="20s")

        @world.app.task
        async def busy() -> None:
            await asyncio.sleep(1.5)

        await world.node(concurrency=20)
        start = world.now_ms
        await calls.add(*range(15), delay="900ms")
        await asyncio.sleep(0.1)
        # More than a batch is ready when a slot becomes free, and nothing happens afterwards.
        await world.app.enqueue_many([busy.job() for _ in range(20)])
        await asyncio.sleep(60)
        assert list(map(len, calls.made)) == [10, 5]
        assert calls.at_ms[0] - start < 2_000
        assert 20_900 <= calls.at_ms[1] - start <= 20_901

    virtual(story)


def test_priorities_and_queues_share_a_batch_and_higher_priority_goes_first() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=4)
        await calls.add(1, 2, priority="low", queue="slow")
        await calls.add(3, 4, 5, priority="high", queue="fast")
        await calls.add(6, 7)
        await calls.add(8, priority="urgent", queue="slow")
        await world.node(queues=["slow", "fast", "default"])
        await asyncio.sleep(1)
        assert calls.made == [[8, 3, 4, 5], [6, 7, 1, 2]]

    virtual(story)


def test_a_batch_takes_one_slot_and_waits_its_turn_among_other_jobs() -> None:
    async def story(world: World) -> None:
        calls, order, most = Calls(world, size=10), [], 0

        async def answer(items: list[int]) -> list[int]:
            order.append(f"batch of {len(items)}")
            await asyncio.sleep(5)
            return items

        calls.answer = answer  # type: ignore[method-assign]

        @world.app.task
        async def one(name: str) -> None:
            nonlocal most
            order.append(name)
            most = max(most, node.worker.running)
            await asyncio.sleep(0.1)

        ids = await calls.add(*range(25))
        await one.using(priority="high").enqueue("first")
        await one.using(priority="low").enqueue("last")
        node = await world.node(concurrency=1)
        await world.until(lambda: all_ended(world, ids), within_s=60)
        await asyncio.sleep(5)
        assert order == ["first", "batch of 10", "batch of 10", "batch of 5", "last"]
        assert most == 1

    virtual(story)


def test_a_worker_with_few_slots_claims_enough_to_fill_a_batch() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=50)
        await calls.add(*range(200))
        await world.node(concurrency=1)
        await asyncio.sleep(1)
        assert list(map(len, calls.made)) == [50] * 4

    virtual(story)


def test_the_bytes_of_a_batch_are_bounded() -> None:
    async def story(world: World) -> None:
        sizes: list[int] = []

        @world.app.batch(size=100)
        async def weigh(texts: list[str]) -> None:
            sizes.append(len(texts))

        await world.app.enqueue_many([weigh.job("x" * 1_000_000) for _ in range(20)])
        await world.node()
        await asyncio.sleep(1)
        assert sizes == [16, 4]

    virtual(story)


# --- Failures


def test_partial_fails_some_by_their_own_retries_and_the_others_are_done() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, retries=RetryPolicy(first="3s", jitter=0))
        answers: list[Any] = [
            Partial(
                {1: ValueError("one"), 2: GiveUp("two"), 3: Snooze("5s"), 4: Retry("9s")},
                results=[0, None, None, None, None, 50],
            )
        ]
        plain = calls.answer

        async def answer(items: list[int]) -> list[int]:
            done = await plain(items)
            if answers:
                raise answers.pop()
            return done

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(*range(6))
        last = (await calls.add(6, retries=0))[0]
        answers[0] = Partial({**answers[0].errors, 6: KeyError("x")}, [*answers[0].results, None])
        await world.node()
        await asyncio.sleep(0.5)
        found = [await world.stored(id) for id in [*ids, last]]
        assert [job.state for job in found] == [
            State.DONE, State.WAITING, State.DEAD, State.WAITING, State.WAITING, State.DONE,
            State.DEAD,
        ]  # fmt: skip
        assert [job.failures for job in found] == [0, 1, 1, 0, 1, 0, 1]
        assert [job.result for job in found] == ["0", None, None, None, None, "50", None]
        assert (found[1].error, found[2].error) == ("ValueError: one", "two")
        assert found[6].error == "KeyError: 'x'"
        await asyncio.sleep(20)
        assert await states(world, ids) == [State.DONE] * 2 + [State.DEAD] + [State.DONE] * 3
        assert calls.made[1:] == [[1], [3], [4]]

    virtual(story)


def test_without_results_the_others_are_done_with_none() -> None:
    async def story(world: World) -> None:
        @world.app.batch(retries=0)
        async def note(items: list[int]) -> list[int] | None:
            if 0 in items:
                raise Partial({0: ValueError("no")})
            return None

        handles = [await note.enqueue(n) for n in range(3)]
        await world.node()
        assert [await each.result(timeout=60) for each in handles[1:]] == [None, None]
        with pytest.raises(JobFailed, match="no"):
            await handles[0].result(timeout=60)

    virtual(story)


@pytest.mark.parametrize("size", [5, 100])
@pytest.mark.parametrize("retries", [1, 2, 5])
def test_a_job_that_makes_its_batch_fail_is_dead_alone(size: int, retries: int) -> None:
    async def story(world: World) -> None:
        policy = RetryPolicy(retries=retries, first="1s", factor=1, jitter=0)
        calls = Calls(world, size=size, retries=policy)
        plain = calls.answer

        async def answer(items: list[int]) -> list[int]:
            done = await plain(items)
            if 13 in items:
                raise ValueError("poison")
            return done

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(*range(100))
        await world.node()
        await world.until(lambda: all_ended(world, ids), within_s=60)
        ends = await states(world, ids)
        assert [n for n, end in enumerate(ends) if end is not State.DONE] == [13]
        assert (await world.stored(ids[13])).failures == retries + 1
        # It harmed others a few times, not again and again.
        failed = [set(items) - {13} for items in calls.made if 13 in items]
        assert failed[-1] == set()
        assert all(len(later) <= len(first) // 4 for first, later in pairwise(failed))
        assert len(calls.made) <= 110

    virtual(story)


def test_the_error_of_a_call_is_logged_once_and_kept_with_each_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World) -> None:
        @world.app.batch(retries=1)
        async def fail(items: list[int]) -> None:
            raise ValueError("no index")

        jobs = await world.app.enqueue_many([fail.job(n) for n in range(50)])
        await world.node()
        await world.until(lambda: all_failed_once(world, [job.id for job in jobs]), within_s=60)
        with_error = [record for record in caplog.records if record.exc_info]
        assert len(with_error) == 1
        assert "fail: 49 more jobs failed in the same call: 0 dead, 49 to be retried" in caplog.text
        for job in jobs:
            stored = await world.stored(job.id)
            assert stored.error == "ValueError: no index"
            assert 'raise ValueError("no index")' in (stored.traceback or "")

    async def all_failed_once(world: World, ids: list[str]) -> bool:
        return all([(await world.stored(id)).failures == 1 for id in ids])

    virtual(story)


def test_a_job_that_has_not_failed_does_not_share_a_batch_with_one_that_has() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, retries=SOON, linger="500ms")
        plain = calls.answer

        async def answer(items: list[int]) -> list[int]:
            done = await plain(items)
            if 0 in items:
                raise ValueError("poison")
            return done

        calls.answer = answer  # type: ignore[method-assign]
        await calls.add(0)
        await world.node()
        for n in range(1, 10):
            await calls.add(n, delay=n * 0.9)
        await asyncio.sleep(30)
        assert [items for items in calls.made if 0 in items] == [[0]] * 6

    virtual(story)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([1, 2], "2 results for 3 jobs"),
        ({0: 1}, "returned dict"),
        ("abc", "returned str"),
        (Partial({3: ValueError()}), "index 3 in a batch of 3 jobs"),
        (Partial({0: ValueError()}, results=[1]), "1 results for 3 jobs"),
    ],
)
def test_an_answer_that_does_not_fit_fails_all_and_says_why(answer: Any, words: str) -> None:
    async def story(world: World) -> None:
        @world.app.batch(retries=0)
        async def note(items: list[int]) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        ids = [(await note.enqueue(n)).id for n in range(3)]
        await world.node()
        await asyncio.sleep(1)
        for id in ids:
            job = await world.stored(id)
            assert (job.state, job.failures) == (State.DEAD, 1)
            assert words in (job.error or "")

    virtual(story)


@pytest.mark.parametrize(
    ("error", "state", "failures"),
    [
        (Retry("5s"), State.WAITING, 1),
        (Snooze("5s"), State.WAITING, 0),
        (GiveUp("no"), State.DEAD, 1),
    ],
)
def test_retry_snooze_and_give_up_count_for_all(
    error: Exception, state: State, failures: int
) -> None:
    async def story(world: World) -> None:
        @world.app.batch()
        async def note(items: list[int]) -> None:
            raise error

        ids = [(await note.enqueue(n)).id for n in range(3)]
        await world.node()
        await asyncio.sleep(1)
        found = [await world.stored(id) for id in ids]
        assert [(job.state, job.failures) for job in found] == [(state, failures)] * 3

    virtual(story)


def test_a_job_whose_arguments_no_longer_fit_fails_by_itself() -> None:
    async def story(world: World) -> None:
        other, seen = App(world.store, clock=world.clock), []

        @other.batch(name="note")
        async def note(items: list[str]) -> None: ...

        @world.app.batch(name="note", retries=0)
        async def newer(items: list[int]) -> list[int]:
            seen.append([context.job.id for context in current_jobs()])
            return items

        first, last = await newer.enqueue(1), await newer.enqueue(2)
        odd = await note.enqueue("x")
        await world.node()
        assert [await first.result(timeout=60), await last.result(timeout=60)] == [1, 2]
        with pytest.raises(JobFailed, match="no longer fit"):
            await odd.result(timeout=60)
        assert seen == [[first.id, last.id]]

    virtual(story)


# --- Stops


def test_a_batch_that_takes_too_long_fails_for_all_of_its_jobs() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, timeout="2s", retries=SOON)

        async def answer(items: list[int]) -> list[int]:
            calls.made.append(items)
            await asyncio.sleep(60 if 2 in items else 0)
            return items

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(1, 2, 3, retries=1)
        await calls.add(4, timeout="1m")
        await world.node()
        await asyncio.sleep(2.5)
        assert {(await world.stored(id)).failures for id in ids} == {1}
        assert "timeout of 2s" in ((await world.stored(ids[0])).error or "")
        await asyncio.sleep(10)
        assert await states(world, ids) == [State.DONE, State.DEAD, State.DONE]
        # A job with another timeout is in another call.
        assert sorted(calls.made) == [[1], [1, 2, 3], [2], [3], [4]]

    virtual(story)


@pytest.mark.parametrize("ends", ["returns", "raises"])
def test_a_cancelled_job_of_a_running_batch_does_not_stop_the_others(ends: str) -> None:
    async def story(world: World) -> None:
        stopping: list[bool] = []

        @world.app.batch(retries=SOON)
        async def note(items: list[int]) -> list[int]:
            if len(items) == 3:
                await asyncio.sleep(5)
                stopping.extend(context.stopping for context in current_jobs())
                if ends == "raises":
                    raise ValueError("no")
            return items

        handles = [await note.enqueue(n) for n in range(3)]
        await world.node()
        await asyncio.sleep(1)
        assert await handles[1].cancel() is CancelOutcome.REQUESTED
        await asyncio.sleep(10)
        assert stopping == [False, True, False]
        ended = State.DONE if ends == "returns" else State.CANCELLED
        found = await states(world, [each.id for each in handles])
        assert found == [State.DONE, ended, State.DONE]

    virtual(story)


def test_a_batch_of_which_every_job_is_cancelled_is_stopped() -> None:
    async def story(world: World) -> None:
        @world.app.batch()
        async def note(items: list[int]) -> None:
            await asyncio.sleep(600)

        handles = [await note.enqueue(n) for n in range(3)]
        node = await world.node()
        await asyncio.sleep(1)
        for each in handles:
            await each.cancel()
        await asyncio.sleep(2)
        assert await states(world, [each.id for each in handles]) == [State.CANCELLED] * 3
        assert node.worker.running == 0

    virtual(story)


def test_a_job_that_lingers_is_cancelled_and_the_others_run() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, linger="10s")
        ids = await calls.add(1, 2, 3)
        await world.node()
        await asyncio.sleep(1)
        await world.app.cancel(ids[1])
        await asyncio.sleep(1)
        assert (await world.stored(ids[1])).state is State.CANCELLED
        await asyncio.sleep(15)
        assert calls.made == [[1, 3]]

    virtual(story)


def test_a_lost_lease_of_one_job_leaves_the_others_their_outcome() -> None:
    async def story(world: World) -> None:
        calls = Calls(world)

        async def answer(items: list[int]) -> list[int]:
            calls.made.append(items)
            await asyncio.sleep(20)
            return items

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(1, 2, 3)
        node = await world.node(lease_ms=3_000)
        await asyncio.sleep(1)
        # Somebody else has the second of them.
        lost = await world.stored(ids[1])
        world.store._put(_taken(lost, world.now_ms))
        await asyncio.sleep(22)
        assert await states(world, [ids[0], ids[2]]) == [State.DONE, State.DONE]
        other = await world.stored(ids[1])
        assert (other.state, other.worker, other.result) == (State.RUNNING, "other", None)
        assert node.worker.running == 0

    virtual(story)


def _taken(job: Any, now_ms: int) -> Any:
    from tickwheel.job import claimed

    return claimed(job, worker="other", fence=job.fence + 1, now_ms=now_ms, lease_ms=100_000)


def test_a_worker_that_is_cut_off_and_back_never_runs_a_job_twice_at_once() -> None:
    async def story(world: World) -> None:
        running: set[int] = set()
        twice: list[int] = []

        @world.app.batch(size=5)
        async def note(items: list[int]) -> None:
            twice.extend(running & set(items))
            running.update(items)
            try:
                await asyncio.sleep(6)
            finally:
                running.difference_update(items)

        line = Line(world.store)
        await world.node(lease_ms=3_000, line=line)
        ids = [(await note.enqueue(n)).id for n in range(12)]
        await asyncio.sleep(1)
        line.away = True
        await asyncio.sleep(4)
        line.away = False
        await world.until(lambda: all_ended(world, ids), within_s=60)
        assert await states(world, ids) == [State.DONE] * 12
        assert twice == []

    virtual(story)


def test_a_running_batch_gets_the_grace_and_one_that_lingers_is_released() -> None:
    async def story(world: World) -> None:
        calls = Calls(world, size=3, linger="20s")

        async def answer(items: list[int]) -> list[int]:
            calls.made.append(items)
            await asyncio.sleep(5)
            return items

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(1, 2, 3, 4, 5)
        first = await world.node()
        await asyncio.sleep(1)
        await first.stop()
        assert await states(world, ids) == [State.DONE] * 3 + [State.WAITING] * 2
        assert {(await world.stored(id)).failures for id in ids} == {0}
        await world.node()
        await world.until(lambda: all_ended(world, ids), within_s=40)
        assert calls.made == [[1, 2, 3], [4, 5]]

    virtual(story)


def test_a_batch_that_outlasts_the_grace_is_released_and_runs_elsewhere() -> None:
    async def story(world: World) -> None:
        calls = Calls(world)

        async def answer(items: list[int]) -> list[int]:
            calls.made.append(items)
            await asyncio.sleep(10)
            return items

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(1, 2, 3)
        first = await world.node(grace_ms=2_000)
        await asyncio.sleep(1)
        await first.stop()
        found = [await world.stored(id) for id in ids]
        assert [(job.state, job.failures) for job in found] == [(State.WAITING, 0)] * 3
        assert {job.history[-1].outcome for job in found} == {Outcome.RELEASE}
        await world.node()
        await world.until(lambda: all_ended(world, ids), within_s=40)
        assert calls.made == [[1, 2, 3]] * 2

    virtual(story)


def test_the_jobs_of_a_worker_that_dies_in_a_batch_run_again_and_suspects_alone() -> None:
    async def story(world: World) -> None:
        calls = Calls(world)

        async def answer(items: list[int]) -> list[int]:
            calls.made.append(items)
            if len(world.nodes) < 3:
                await asyncio.sleep(600)
            return items

        calls.answer = answer  # type: ignore[method-assign]
        ids = await calls.add(1, 2, 3)
        for _ in range(2):
            node = await world.node(lease_ms=3_000)
            await asyncio.sleep(4)
            node.crash()
        await world.node(lease_ms=3_000)
        await world.until(lambda: all_ended(world, ids), within_s=60)
        assert await states(world, ids) == [State.DONE] * 3
        assert calls.made[:2] == [[1, 2, 3]] * 2
        assert sorted(calls.made[2:]) == [[1], [2], [3]]

    virtual(story)


# --- Around it


def test_in_a_batch_there_are_current_jobs_but_no_current_job() -> None:
    async def story(world: World) -> None:
        seen: list[Any] = []

        @world.app.batch()
        async def note(items: list[int]) -> None:
            seen.append((current_job(), [context.job.id for context in current_jobs()]))

        @world.app.task
        async def single() -> None:
            seen.append([context.job.id for context in current_jobs()])

        await world.node()
        ids = [(await note.enqueue(n)).id for n in range(3)]
        await asyncio.sleep(1)
        one = await single.enqueue()
        await asyncio.sleep(1)
        assert seen == [(None, ids), [one.id]]
        assert current_jobs() == []

    virtual(story)


def test_a_batch_that_waits_for_another_job_lends_its_one_slot() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def child() -> int:
            return 5

        @world.app.batch()
        async def parents(items: list[int]) -> list[int]:
            return [await (await child.enqueue()).result(timeout=60) for _ in items]

        handles = [await parents.enqueue(n) for n in range(3)]
        await world.node(concurrency=1)
        assert [await each.result(timeout=20) for each in handles] == [5, 5, 5]

    virtual(story)


def test_a_batch_in_a_thread_takes_one_thread() -> None:
    async def story(world: World) -> None:
        made: list[list[int]] = []

        @world.app.batch(size=5)
        def note(items: list[int]) -> list[int]:
            made.append([context.job.attempt for context in current_jobs()])
            time.sleep(0.01)
            return [item + 1 for item in items]

        handles = [await note.enqueue(n) for n in range(10)]
        await world.node(threads=1)
        assert [await each.result(timeout=60) for each in handles] == list(range(1, 11))
        assert made == [[1] * 5] * 2

    virtual(story)


def test_a_thread_that_outlasts_its_timeout_fails_all_of_its_jobs() -> None:
    async def story(world: World) -> None:
        import threading

        go_on = threading.Event()

        @world.app.batch(timeout="1s", retries=0)
        def note(items: list[int]) -> None:
            go_on.wait(20)

        task: BatchTask[int, None, None] = note
        ids = [(await task.enqueue(n)).id for n in range(3)]
        # The virtual clock stands while a thread works.
        asyncio.get_running_loop()._threads = -1000  # type: ignore[attr-defined]
        try:
            node = await world.node()
            await world.until(lambda: all_ended(world, ids), within_s=10)
            assert await states(world, ids) == [State.DEAD] * 3
            assert node.worker.running == 0
        finally:
            go_on.set()
            asyncio.get_running_loop()._threads = 1  # type: ignore[attr-defined]

    virtual(story)
