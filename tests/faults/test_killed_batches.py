"""Batches in real workers (`tickwheel worker`) that are killed and stopped: nothing is lost."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import LEASE_S, Shop, running_shop, wait_until

from tickwheel import App, BatchTask, JobInfo, State

pytestmark = pytest.mark.slow

STARTUP_S = 20
TASKS = ("together", "together_or_kill")


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with running_shop(tmp_path) as shop:
        yield shop


@pytest.fixture
def app(shop: Shop) -> Iterator[App]:
    """The same store from this process, with the tasks' names alone."""
    app = App(shop.env["TICKWHEEL_STORE"])
    for name in TASKS:

        @app.batch(name=name)
        async def stand_in(seconds: list[float]) -> None: ...

    yield app
    app.sync.close()


def enqueue(app: App, task: str, seconds: list[float]) -> list[str]:
    call: BatchTask[float, int, object] = BatchTask(app._access, app.tasks.get(task))
    return [job.id for job in app.sync.enqueue_many([call.job(each) for each in seconds])]


def infos(app: App, ids: list[str]) -> list[JobInfo]:
    return [app.sync.info(app.job(id)) for id in ids]


def all_done(app: App, count: int) -> bool:
    return sum(queue.done for queue in app.sync.queues()) == count


def starts(shop: Shop) -> Counter[str]:
    return Counter(event.id for event in shop.events() if event.kind.startswith("start"))


def test_the_jobs_of_a_worker_killed_in_a_batch_run_again(shop: Shop, app: App) -> None:
    ids = enqueue(app, "together", [3.0] * 20)
    first = shop.worker("--concurrency", "2")
    # Two batches of eight run, and four jobs wait.
    wait_until(lambda: len(starts(shop)) == 16, within_s=STARTUP_S, what="two batches")
    first.kill()
    shop.worker()
    wait_until(lambda: all_done(app, 20), within_s=STARTUP_S + LEASE_S + 10, what="all done")
    assert {event.kind for event in shop.events() if event.kind != "end"} >= {"start-of-8"}
    found = infos(app, ids)
    ran = starts(shop)
    assert all(job.failures == 0 and job.state is State.DONE for job in found)
    # A second run happens only after a lost lease, and is counted.
    assert all(ran[job.id] <= 1 + job.takeovers for job in found)
    assert sum(ran.values()) == 36


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_dies_while_it_settles_a_batch_loses_nothing(
    shop: Shop, app: App, when: str
) -> None:
    ids = enqueue(app, "together", [0.0] * 8)
    dying = shop.worker(DIE_AT_SETTLE=f"{when}:1")
    wait_until(dying.died, within_s=STARTUP_S, what="death at the settle")
    # All were settled in one step, or none.
    expected = State.RUNNING if when == "before" else State.DONE
    assert {job.state for job in infos(app, ids)} == {expected}
    shop.worker()
    wait_until(lambda: all_done(app, 8), within_s=STARTUP_S, what="all done")
    assert set(starts(shop).values()) == {2 if when == "before" else 1}


def test_a_worker_that_is_stopped_ends_its_batch_and_releases_what_lingers(
    shop: Shop, app: App
) -> None:
    ids = enqueue(app, "together", [2.0] * 8)
    first = shop.worker()
    wait_until(lambda: len(starts(shop)) == 8, within_s=STARTUP_S, what="a batch")
    more = enqueue(app, "together", [0.0] * 3)
    os.kill(first.pid, signal.SIGTERM)
    wait_until(first.died, within_s=STARTUP_S, what="the end of the worker")
    assert {job.state for job in infos(app, ids)} == {State.DONE}
    shop.worker()
    wait_until(lambda: all_done(app, 11), within_s=STARTUP_S, what="all done")
    assert set(starts(shop).values()) == {1}
    assert all(job.takeovers == job.failures == 0 for job in infos(app, ids + more))


def test_a_job_that_kills_its_worker_in_a_batch_is_dead_and_the_others_are_done(
    shop: Shop, app: App
) -> None:
    ids = enqueue(app, "together_or_kill", [0.0, 0.0, -1.0, 0.0])
    deadline = time.monotonic() + 90
    worker = shop.worker()
    while not all(job.state.ended for job in infos(app, ids)):
        assert time.monotonic() < deadline, [job.state for job in infos(app, ids)]
        if worker.died():
            worker = shop.worker()
        time.sleep(0.05)
    states = [job.state for job in infos(app, ids)]
    assert states == [State.DONE, State.DONE, State.DEAD, State.DONE]
