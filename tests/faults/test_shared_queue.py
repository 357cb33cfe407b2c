"""Two apps on one queue, with worker processes of their own: each job is run by its own app."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres_server import shared_server
from stores import nats_server, redis_server
from tickwheel import App, State
from tickwheel.job import Job, Outcome
from tickwheel.store import Query

APPS = ("one", "two")
WORKERS = 2
JOBS = 1_000

MODULE = """
from tickwheel import App

app = App()

@app.task(name="{name}", queue="{queue}")
async def work(n: int) -> str:
    return "{name}"
"""


def url_of(kind: str, folder: Path) -> str:
    name = f"t{secrets.token_hex(6)}"
    if kind == "sqlite":
        return f"sqlite:///{folder}/jobs.db"
    if kind == "postgres":
        return f"{shared_server().url}?schema={name}"
    if kind == "redis":
        return f"{redis_server().url}?namespace={name}"
    return f"{nats_server().url}/{name}"


@pytest.fixture
def url(kind: str, tmp_path: Path) -> str:
    """Made before the test's event loop runs: a server is started in a loop of its own."""
    return url_of(kind, tmp_path)


@contextlib.contextmanager
def workers(folder: Path, url: str, queues: dict[str, str]) -> Iterator[None]:
    """Some worker processes of each app."""
    running = []
    for app, queue in queues.items():
        (folder / f"{app}.py").write_text(MODULE.format(name=app, queue=queue))
        for n in range(WORKERS):
            with (folder / f"{app}-{n}.log").open("w") as log:
                command = [sys.executable, "-m", "tickwheel", "worker", app]
                env = {**os.environ, "TICKWHEEL_STORE": url}
                running.append(
                    subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
                )
    try:
        yield
        assert [process.poll() for process in running] == [None] * len(running)
    finally:
        for process in running:
            process.kill()
            process.wait(10)


def jobs_of(app: str, queue: str) -> list[Job]:
    now_ms = time.time_ns() // 1_000_000
    return [
        Job(
            id=f"{app}-{n:05}",
            task=app,
            payload=f'{{"n":{n}}}',
            queue=queue,
            due_ms=now_ms,
            created_ms=now_ms,
        )
        for n in range(JOBS)
    ]


async def until_ended(app: App, *, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while True:
            queues = await app.queues()
            if sum(each.done + each.dead + each.cancelled for each in queues) == len(APPS) * JOBS:
                return
            await asyncio.sleep(0.05)


async def all_jobs(app: App) -> list[Job]:
    store, found, cursor = (await app.client()).store, [], None
    while True:
        page = await store.find(Query(), cursor=cursor, limit=500)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis", "nats"])
async def test_two_apps_on_one_queue_run_their_own_jobs_and_fail_none(
    kind: str, url: str, tmp_path: Path
) -> None:
    async with App(url) as app:
        store = (await app.client()).store
        jobs = [job for name in APPS for job in jobs_of(name, "shared")]
        await store.add(sorted(jobs, key=lambda job: job.id[-5:]))
        with workers(tmp_path, url, dict.fromkeys(APPS, "shared")):
            await until_ended(app, within_s=90)
        found = await all_jobs(app)
    assert len(found) == len(APPS) * JOBS
    parked = 0
    for job in found:
        assert (job.state, job.failures, job.takeovers) == (State.DONE, 0, 0), job
        assert job.result == f'"{job.task}"'
        times = sum(run.outcome is Outcome.PARK for run in job.history)
        assert times <= 1, job
        parked += times
    assert parked, "no worker came across a job of the other app"
    for name in APPS:
        logs = "".join(path.read_text() for path in tmp_path.glob(f"{name}-*.log"))
        assert logs.count("no task is named") <= WORKERS
