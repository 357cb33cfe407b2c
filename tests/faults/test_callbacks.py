"""Callbacks to a receiver that fails and stalls, and to one of many hosts that hangs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from receiver import Request, answer, receiving
from tickwheel import App, RetryPolicy, State, webhooks
from tickwheel.callbacks import Callbacks

RECEIVER = Path(__file__).parent / "callback_receiver.py"
CALLBACKS = 2_000
PATIENCE_S = 100
ON_TIME_MS = 50

pytestmark = pytest.mark.slow


class Remote:
    """The receiver's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def report(self) -> tuple[dict[str, list[str]], int]:
        """End it: what it got of each id, and how many connections were open."""
        out, _ = self._process.communicate("", timeout=PATIENCE_S)
        said = json.loads(out)
        return said["got"], said["open"]


@contextmanager
def remote() -> Iterator[Remote]:
    process = subprocess.Popen(
        [sys.executable, RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Remote(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


async def all_ended(app: App, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if sum(queue.done + queue.dead for queue in await app.queues()) >= count:
                return
            await asyncio.sleep(0.05)


async def delivered(app: App, callbacks: Callbacks, url: str, count: int) -> float:
    """Deliver so many callbacks; returns how many per second."""
    async with app:
        jobs = [callbacks.using(id=f"c-{n}").job(url, body="x" * 200) for n in range(count)]
        await app.enqueue_many(jobs)
        tasks = len(asyncio.all_tasks())
        began = time.monotonic()
        async with app.worker(concurrency=100):
            await all_ended(app, count)
        rate = count / (time.monotonic() - began)
        assert len(asyncio.all_tasks()) <= tasks
        dead = (await app.find(state="dead")).jobs
        assert dead == []
    return rate


def test_each_callback_is_delivered_and_each_repeat_is_explained(tmp_path: Path) -> None:
    threads = threading.active_count()
    with remote() as receiver:
        app = App(f"sqlite:///{tmp_path}/jobs.db", name="test")
        callbacks = Callbacks(
            app,
            keys=webhooks.new_key(),
            allow=[receiver.url],
            timeout="500ms",
            retries=RetryPolicy(retries=20, first="50ms", factor=1, jitter="50ms"),
        )
        rate = asyncio.run(delivered(app, callbacks, receiver.url, CALLBACKS))
        got, left_open = receiver.report()
    outcomes = Counter(each for all in got.values() for each in all)
    print(f"{rate:,.0f} callbacks per second; {dict(outcomes)}")
    assert set(got) == {f"c-{n}" for n in range(CALLBACKS)}
    assert left_open == 0
    # Each was accepted once, at last; every other request failed or got no answer.
    assert {id: all for id, all in got.items() if all[-1:] != ["ok"] or "ok" in all[:-1]} == {}
    assert outcomes["fail"] > CALLBACKS * 0.05 and outcomes["stall"] > CALLBACKS * 0.02
    assert threading.active_count() <= threads + 1


class Hanging:
    """A receiver that answers at first, and from then on never again."""

    def __init__(self, answers: int) -> None:
        self._answers = answers

    async def __call__(self, _: Request) -> bytes | None:
        self._answers -= 1
        return answer() if self._answers >= 0 else None


@pytest.mark.parametrize("answers", [(0,), (60,), (0,) * 3])
async def test_hosts_that_hang_do_not_hold_up_the_others(answers: tuple[int, ...]) -> None:
    """Many callbacks to hosts that don't answer, or no longer do, are due before and among those to
    another host."""
    worst_ms: list[int] = []
    # More than once only if the machine was busy with something else.
    while len(worst_ms) < 3 and (not worst_ms or worst_ms[-1] > ON_TIME_MS):
        async with AsyncExitStack() as receivers:
            hanging = [
                await receivers.enter_async_context(receiving(Hanging(count))) for count in answers
            ]
            other = await receivers.enter_async_context(receiving(lambda _: answer()))
            worst_ms.append(await worst_lateness([each.url for each in hanging], other.url))
            for each, answered in zip(hanging, answers, strict=True):
                assert len(each.requests) > answered
    assert worst_ms[-1] <= ON_TIME_MS, worst_ms


async def worst_lateness(hanging: list[str], other: str) -> int:
    """By how many milliseconds the latest of the callbacks to the other host was sent late."""
    app = App("memory://", name="test")
    callbacks = Callbacks(app, allow=[*hanging, other])
    async with app, app.worker(concurrency=20, grace=0):
        stuck = [
            callbacks.using(delay=f"{n}ms").job(each)
            for n in range(0, 1_000, 5)
            for each in hanging
        ]
        await app.enqueue_many(stuck)
        prompt = [callbacks.using(delay=f"{n}ms").job(other) for n in range(500, 1_500, 10)]
        handles = await app.enqueue_many(prompt)
        late: list[Any] = []
        for handle in handles:
            await handle.result(timeout=PATIENCE_S)
            info = await handle.info()
            assert info.state is State.DONE
            [run] = info.history
            assert run.started_ms is not None
            late.append(run.started_ms - run.due_ms)
        await app.cancel([job.id for job in stuck])
    return int(max(late))
