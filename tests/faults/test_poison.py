"""One job that kills its workers, among many that don't: real processes, really killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import Shop, running_shop, wait_until

from tickwheel import App, JobInfo, State

pytestmark = pytest.mark.slow

INNOCENT = 99
LONG_S = 60


@pytest.mark.parametrize("killer", ["kill", "kill_from_a_thread"])
@pytest.mark.parametrize("restarted_by", ["somebody", "the supervisor"])
def test_the_killer_dies_and_no_innocent_job_with_it(
    tmp_path: Path, killer: str, restarted_by: str
) -> None:
    with running_shop(tmp_path) as shop:
        app = App(shop.env["TICKWHEEL_STORE"])

        @app.task(name="work")
        async def work(seconds: float) -> int: ...  # type: ignore[empty-body]

        @app.task(name=killer)
        async def kill() -> None: ...

        innocent = [work.job(0.01) for _ in range(INNOCENT)]
        bad = kill.job()
        jobs = [*innocent[:50], bad, *innocent[50:]]
        app.sync.enqueue_many(jobs)

        if restarted_by == "the supervisor":
            shop.worker("--processes", "2")
            wait_until(lambda: ended(app, len(jobs)), within_s=LONG_S, what="all ended")
        else:
            restart_until(shop, lambda: ended(app, len(jobs)))
        infos = asyncio.run(look(app, [job.id for job in innocent]))
        assert {info.state for info in infos} == {State.DONE}
        assert {info.failures for info in infos} == {0}
        [dead] = asyncio.run(look(app, [bad.id]))
        assert dead.state is State.DEAD
        assert dead.error is not None and "died or froze 5 times" in dead.error
        assert len(shop.events("kill")) == 5
        app.sync.close()


def restart_until(shop: Shop, happened: Callable[[], bool]) -> None:
    workers = [shop.worker()]

    def done() -> bool:
        if workers[-1].died():
            workers.append(shop.worker())
        return happened()

    wait_until(done, within_s=LONG_S, what="all ended")


def ended(app: App, count: int) -> bool:
    queues = app.sync.queues()
    return bool(queues) and queues[0].done + queues[0].dead == count


async def look(app: App, ids: list[str]) -> list[JobInfo]:
    async with app:
        return [await app.job(id).info() for id in ids]
