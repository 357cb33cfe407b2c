"""Batches in boxes: due together means together, and a linger is time in the box."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from box_tasks import NEVER
from boxes import HOURLY, START, outcomes

from tickwheel import App, GiveUp, Partial, State, current_job, current_jobs
from tickwheel.testing import run_virtual, sandbox

MS = timedelta(milliseconds=1)


class Shop:
    """An app with a batch task of each kind, which note their calls."""

    def __init__(self) -> None:
        self.app = App(NEVER)
        self.calls: list[list[int]] = []
        self.answer: Callable[[list[int]], list[int] | None] = lambda items: items

        @self.app.batch(size=3, linger="200ms", retries=HOURLY)
        async def index(items: list[int]) -> list[int] | None:
            assert current_job() is None and len(current_jobs()) == len(items)
            self.calls.append(items)
            return self.answer(items)

        @self.app.batch(size=3, linger="200ms", retries=HOURLY)
        def plain(items: list[int]) -> list[int] | None:
            self.calls.append(items)
            return self.answer(items)

        self.index, self.plain = index, plain


each_kind = pytest.mark.parametrize("kind", ["index", "plain"])


@each_kind
def test_a_drain_runs_what_is_due_together(kind: str) -> None:
    shop = Shop()
    task = getattr(shop, kind)
    with sandbox(shop.app, start=START) as box:
        shop.app.sync.enqueue_many([task.job(n) for n in range(4)])
        task.using(priority="high").enqueue_sync(9)
        runs = box.drain()
        assert shop.calls == [[9, 0, 1], [2, 3]]
        assert [run.result for run in runs] == [9, 0, 1, 2, 3]
        assert [job.state for job in box.jobs()] == [State.DONE] * 5
        assert box.now == START


@each_kind
def test_on_the_way_a_batch_starts_when_it_is_full_or_has_lingered(kind: str) -> None:
    shop = Shop()
    with sandbox(shop.app, start=START) as box:
        for n, ms in enumerate([100, 150, 299, 300, 350]):
            getattr(shop, kind).using(delay=ms / 1000).enqueue_sync(n)
        runs = box.travel("1s")
        assert shop.calls == [[0, 1, 2], [3, 4]]
        assert [(run.at - START) / MS for run in runs] == [299, 299, 299, 500, 500]


@each_kind
def test_a_job_that_still_lingers_when_the_travel_ends_runs_in_the_next(kind: str) -> None:
    shop = Shop()
    with sandbox(shop.app, start=START) as box:
        task = getattr(shop, kind)
        job, cancelled = task.enqueue_sync(1), task.enqueue_sync(2)
        assert box.travel("100ms") == []
        shop.app.sync.cancel(cancelled)
        [run] = box.travel("1s")
        assert (run.at - START, run.job.id, run.job.attempts) == (200 * MS, job.id, 1)
        assert shop.app.sync.info(cancelled).state is State.CANCELLED
        assert shop.calls == [[1]]


@each_kind
def test_each_job_of_a_batch_has_its_own_outcome(kind: str) -> None:
    shop = Shop()

    def answer(items: list[int]) -> list[int]:
        if len(items) > 1:
            raise Partial({0: ValueError("no"), 1: GiveUp("never")}, results=[0, 0, 7])
        return items

    shop.answer = answer
    with sandbox(shop.app, start=START) as box:
        shop.app.sync.enqueue_many([getattr(shop, kind).job(n) for n in range(3)])
        runs = box.drain()
        assert outcomes(runs) == ["retry", "dead", "done"]
        assert [str(error) for error in box.errors] == ["no", "never"]
        assert (runs[2].result, runs[2].exception) == (7, None)
        assert [run.job.id for run in runs] == [job.id for job in box.enqueued]
        box.travel("2h")
        assert shop.calls == [[0, 1, 2], [0]]


def test_a_batch_that_fails_as_a_whole_is_retried_in_smaller_ones() -> None:
    shop = Shop()

    def answer(items: list[int]) -> list[int]:
        if 1 in items:
            raise ValueError("poison")
        return items

    shop.answer = answer
    with sandbox(shop.app, start=START) as box:
        shop.app.sync.enqueue_many([shop.index.job(n) for n in range(3)])
        box.travel("1d")
        states = [job.state for job in box.jobs()]
        assert states == [State.DONE, State.DEAD, State.DONE]


def test_inline_a_batch_runs_inside_the_call_that_adds_it() -> None:
    shop = Shop()
    with sandbox(shop.app, inline=True):
        shop.index.enqueue_sync(1)
        shop.app.sync.enqueue_many([shop.index.job(n) for n in range(5)])
        assert shop.calls == [[1], [0, 1, 2], [3, 4]]
        shop.answer = lambda items: [0] * 9
        with pytest.raises(Exception, match="9 results for 1 jobs"):
            shop.index.enqueue_sync(1)


def test_on_a_virtual_loop_a_batch_takes_its_time_and_can_time_out() -> None:
    app = App(NEVER)
    stopping: list[list[bool]] = []

    @app.batch(size=2, linger="1s", timeout="10s", retries=0)
    async def slow(seconds: list[float]) -> list[float]:
        await asyncio.sleep(max(seconds))
        stopping.append([each.stopping for each in current_jobs()])
        return seconds

    async def story() -> None:
        async with sandbox(app, start=START) as box:
            handles: list[Any] = [await slow.enqueue(each) for each in (5, 1, 60, 2, 3)]
            handles.append(await slow.using(delay="500ms").enqueue(4))
            asyncio.get_running_loop().call_later(0.2, asyncio.create_task, handles[0].cancel())
            runs = await box.travel("1m")
            assert outcomes(runs) == ["done", "done", "dead", "dead", "done", "done"]
            assert "timeout of 10s" in (runs[2].error or "")
            # The last two: full after half a second.
            assert [(run.at - START) / MS for run in runs] == [0, 0, 0, 0, 500, 500]
            assert stopping == [[False, False], [True, False]]

    run_virtual(story())
