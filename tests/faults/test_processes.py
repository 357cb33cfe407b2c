"""Real processes on a real file, killed and frozen: nothing lost, nothing silent.

Each test has bounds in seconds that follow from the lease: a dead worker's jobs are back within one
lease plus a second.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, LEASE_S, Shop, running_shop, wait_until

from tickwheel import App, JobInfo, Outcome, State, Task

pytestmark = pytest.mark.slow

RECOVERY_S = LEASE_S + 1
STARTUP_S = 10


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with running_shop(tmp_path) as shop:
        yield shop


@pytest.fixture
def app(shop: Shop) -> Iterator[App]:
    """The same store from this process, with the tasks' names alone."""
    app = App(shop.env["TICKWHEEL_STORE"])

    @app.task
    async def work(seconds: float) -> int: ...  # type: ignore[empty-body]

    @app.task
    async def block(seconds: float) -> None: ...

    yield app
    app.sync.close()


def enqueue(app: App, task: str, seconds: float, count: int = 1) -> list[str]:
    call: Task[[float], Any, Any] = Task(app._access, app.tasks.get(task))
    jobs = [call.job(seconds) for _ in range(count)]
    return [handle.id for handle in app.sync.enqueue_many(jobs)]


def info(app: App, id: str) -> JobInfo:
    return app.sync.info(app.job(id))


def all_done(app: App, count: int) -> bool:
    queues = app.sync.queues()
    return bool(queues) and queues[0].done == count


def test_jobs_of_a_worker_killed_in_mid_task_run_again_in_time(shop: Shop, app: App) -> None:
    ids = enqueue(app, "work", 3, 20)
    first = shop.worker()
    wait_until(lambda: len(shop.events("start")) == 20, within_s=STARTUP_S, what="start")
    second = shop.worker()
    wait_until(lambda: "worker" in second.log, within_s=STARTUP_S, what="a second worker")
    time.sleep(1)
    first.kill()
    killed = time.time()
    wait_until(lambda: len(shop.events("start")) == 40, within_s=STARTUP_S, what="restart")
    late = max(event.at for event in shop.events("start")) - killed
    assert late <= RECOVERY_S, f"taken over only after {late:.2f} s"
    wait_until(lambda: all_done(app, 20), within_s=10, what="all done")
    for id in ids:
        job = info(app, id)
        assert (job.attempts, job.takeovers, job.failures) == (2, 1, 0)
        assert [run.outcome for run in job.history] == [Outcome.LOST, Outcome.DONE]
    assert len(shop.events("end")) == 20


@pytest.mark.parametrize(("when", "runs"), [("before", 2), ("after", 1)])
def test_a_worker_killed_in_mid_settle_loses_nothing(
    shop: Shop, app: App, when: str, runs: int
) -> None:
    [id] = enqueue(app, "work", 0)
    dying = shop.worker(DIE_AT_SETTLE=f"{when}:1")
    wait_until(dying.died, within_s=STARTUP_S, what="death at the settle")
    # Killed before the commit the job is lost to its lease; after it, it is done for good.
    assert info(app, id).state is (State.RUNNING if when == "before" else State.DONE)
    shop.worker()
    wait_until(lambda: all_done(app, 1), within_s=STARTUP_S, what="done")
    time.sleep(RECOVERY_S)
    assert len(shop.events("start")) == runs
    assert info(app, id).attempts == runs


def test_a_worker_frozen_beyond_its_lease_cannot_settle(shop: Shop, app: App) -> None:
    [id] = enqueue(app, "work", 2)
    frozen = shop.worker()
    wait_until(lambda: len(shop.events("start")) == 1, within_s=STARTUP_S, what="start")
    # Past what it writes when it starts: frozen in mid-write it would hold the file's lock.
    time.sleep(LEASE_S / 6)
    frozen.freeze()
    stopped = time.time()
    other = shop.worker()
    wait_until(lambda: len(shop.events("start")) == 2, within_s=STARTUP_S, what="takeover")
    assert shop.events("start")[1].at - stopped <= RECOVERY_S + STARTUP_S / 5
    frozen.thaw()
    wait_until(lambda: all_done(app, 1), within_s=10, what="done")
    wait_until(
        lambda: "another worker may run it" in frozen.log or "came too late" in frozen.log,
        within_s=10,
        what="the thawed worker says that it lost the job",
    )
    job = info(app, id)
    assert (job.attempts, job.takeovers) == (2, 1)
    assert app.sync.result(app.job(id)) == other.pid
    assert [run.outcome for run in job.history] == [Outcome.LOST, Outcome.DONE]


def test_a_task_that_blocks_the_event_loop_keeps_its_lease_and_is_named(
    shop: Shop, app: App
) -> None:
    [id] = enqueue(app, "block", LEASE_S * 3)
    blocked = shop.worker()
    wait_until(lambda: len(shop.events("start")) == 1, within_s=STARTUP_S, what="start")
    shop.worker()
    wait_until(lambda: all_done(app, 1), within_s=15, what="done")
    assert info(app, id).attempts == 1
    assert len(shop.events("start")) == 1
    assert "task 'block' blocks it" in blocked.log
    assert "shop.py" in blocked.log


def test_killing_workers_again_and_again_loses_no_job(shop: Shop, app: App) -> None:
    dice = random.Random(7)
    count = 200
    ids = enqueue(app, "work", 0.3, count)
    workers = [shop.worker() for _ in range(2)]
    for _ in range(5):
        time.sleep(dice.uniform(0.5, 1.5))
        workers[dice.randrange(2)].kill()
        workers = [each for each in workers if not each.died()] + [shop.worker()]
    wait_until(lambda: all_done(app, count), within_s=30, what="all done")
    ends = [event.id for event in shop.events("end")]
    for id in ids:
        job = info(app, id)
        assert 1 <= ends.count(id) <= 1 + job.takeovers, "a second run without a lost lease"
    attempts = [(event.id, event.attempt) for event in shop.events("start")]
    assert len(set(attempts)) == len(attempts), "two runs of one attempt"


def test_several_processes_share_one_file_and_run_each_job_once(shop: Shop, app: App) -> None:
    for _ in range(3):
        shop.worker()
    count = 1_500
    enqueue(app, "work", 0, count)
    wait_until(lambda: all_done(app, count), within_s=40, what="all done")
    assert len(shop.events("end")) == count
    assert len({event.id for event in shop.events("end")}) == count
    assert len({event.pid for event in shop.events("end")}) == 3


def test_a_job_added_by_one_process_wakes_a_worker_in_another(shop: Shop, app: App) -> None:
    shop.worker()
    enqueue(app, "work", 0)
    wait_until(lambda: all_done(app, 1), within_s=STARTUP_S, what="a worker that works")
    for n in range(20):
        time.sleep(0.1)
        enqueue(app, "work", 0)
        wait_until(lambda n=n: all_done(app, 2 + n), within_s=5, what="done")  # type: ignore[misc]
    starts = {event.id: event.at for event in shop.events("start")}
    waits = [start - info(app, id).created.timestamp() for id, start in starts.items()][1:]
    assert statistics.median(waits) < 0.02
    assert sorted(waits)[-2] < 0.05, f"seconds until the start: {sorted(waits)}"


def test_what_a_killed_process_was_told_is_stored_is_stored(shop: Shop, app: App) -> None:
    code = (
        "import asyncio\n"
        "from shop import work\n"
        "async def main():\n"
        "    while True:\n"
        "        later = [work.using(delay=60).enqueue(0) for _ in range(50)]\n"
        "        for job in await asyncio.gather(*later): print(job.id, flush=True)\n"
        "asyncio.run(main())\n"
    )
    told = shop.folder / "told"
    with told.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=HERE,
            env={**shop.env, "PATH": "", "PYTHONPATH": ""},
            stdout=out,
        )
    wait_until(lambda: told.read_text().count("\n") > 500, within_s=STARTUP_S, what="adds")
    process.kill()
    process.wait(5)
    *ids, _torn = told.read_text().split("\n")
    assert len(ids) > 500
    for id in ids[-200:]:
        assert info(app, id).state is State.WAITING
