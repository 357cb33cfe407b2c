"""Whole nodes on a bad line, crashing, from a seed: then the record is judged.

Goal: no mix of lost requests, lost replies and dead workers loses a job, starts one early, or runs
one twice without a lease having run out. Method: an hour of virtual time per seed, an independent
record of every run, and one judgement at the end. A failing seed is in the test's name.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from world import Node, World, virtual

from tickwheel import Outcome, RetryPolicy, State, current_job
from tickwheel.job import Job
from tickwheel.testing import FaultyStore

LEASE_MS = 4_000
JOBS = 150


@dataclass
class Ran:
    id: str
    attempt: int
    due_ms: int
    start_ms: int
    end_ms: int | None = None


@pytest.mark.parametrize("seed", range(12))
def test_every_job_ends_whatever_breaks(seed: int) -> None:
    virtual(lambda world: chaos(world, random.Random(seed)))


async def chaos(world: World, dice: random.Random) -> None:
    record: list[Ran] = []

    @world.app.task(retries=RetryPolicy(retries=50, first=1, cap=10))
    async def work(seconds: float, luck: float) -> None:
        context = current_job()
        assert context is not None
        ran = Ran(context.job.id, context.job.attempt, context.job.due_ms, world.now_ms)
        record.append(ran)
        await asyncio.sleep(seconds)
        if dice.random() > luck:
            raise RuntimeError("bad luck")
        ran.end_ms = world.now_ms

    for _ in range(JOBS):
        call = work.using(delay=dice.uniform(0, 300))
        await call.enqueue(dice.choice([0, 0.1, 2, 15]), dice.choice([1, 1, 0.5]))

    nodes = [await start(world, dice) for _ in range(3)]
    for _ in range(30):
        await asyncio.sleep(dice.uniform(1, 20))
        victim = dice.randrange(3)
        if dice.random() < 0.5:
            nodes[victim].crash()
        else:
            await nodes[victim].stop()
        nodes[victim] = await start(world, dice)
    await asyncio.sleep(600)
    await judge(world, record)


async def start(world: World, dice: random.Random) -> Node:
    line = FaultyStore(
        world.store, lose_requests=0.05, lose_replies=0.05, seed=dice.randrange(10**9)
    )
    return await world.node(line=line, lease_ms=LEASE_MS, takeovers=1_000, concurrency=5)


def unknown(job: Job) -> set[int]:
    """The attempts that are missing in a job's history. Of several in a row that were handed back
    unstarted only the last is there."""
    known, before = set(), 0
    for run in job.history:
        handed_back = run.outcome is Outcome.RELEASE and run.started_ms is None
        known |= set(range(before + 1, run.attempt + 1)) if handed_back else {run.attempt}
        before = run.attempt
    return set(range(1, job.attempt + 1)) - known


async def judge(world: World, record: list[Ran]) -> None:
    assert [ran for ran in record if ran.start_ms < ran.due_ms] == [], "started early"
    runs: dict[str, list[Ran]] = {}
    for ran in record:
        runs.setdefault(ran.id, []).append(ran)
    assert len(runs) == JOBS, "lost"
    for id, mine in runs.items():
        job = await world.stored(id)
        assert job.state is State.DONE, f"{id} never ended"
        outcomes = Counter(run.outcome for run in job.history)
        if len(job.history) < 20:
            assert not unknown(job), "an attempt that history doesn't know"
            assert outcomes[Outcome.LOST] == job.takeovers
        # A second whole run is possible, but only where a lease had run out, and then it shows.
        whole = sum(ran.end_ms is not None for ran in mine)
        assert 1 <= whole <= 1 + job.takeovers
        assert len({ran.attempt for ran in mine}) == len(mine), "two runs of one attempt"
        for before, after in pairwise(mine):
            over = before.end_ms is not None and before.end_ms <= after.start_ms
            assert over or after.attempt > before.attempt
