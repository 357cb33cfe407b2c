"""Whole nodes on a bad line, crashing, from a seed: then the record is judged.

Goal: no mix of lost requests, lost replies, locked files, set clocks, dead workers and jobs that
kill them loses a job, starts one early, runs one twice without a lease having run out, or takes an
innocent one along. Method: an hour of virtual time per seed, an independent record of every run,
and one judgement at the end. A failing seed is in the test's name.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from world import Line, Node, World, virtual

from tickwheel import Outcome, RetryPolicy, State, Task, current_job
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job
from tickwheel.operate.flaws import (
    FlawKind,
    Span,
    early_by,
    flaws_of,
    repeated_attempts,
    unrecorded_attempts,
)
from tickwheel.outbox import Row, hand_over

LEASE_MS = 4_000
JOBS = 150
KILLERS = 4
# More than chance brings about for a job that does no harm, where a worker dies every few seconds
# or the store is locked for longer than a lease; and fewer than a history holds.
TAKEOVERS = 14


@dataclass
class Ran:
    id: str
    attempt: int
    due_ms: int
    started_ms: int
    ended_ms: int | None = None
    outcome: str = ""


@dataclass
class Faults:
    """What goes wrong in one story."""

    crashes: bool = True
    killers: bool = False
    locks: bool = False
    clock_steps: bool = False
    relays: bool = False
    overlap: bool = False


STORIES = {
    "a bad line": Faults(),
    "killers": Faults(crashes=False, killers=True),
    "killers and crashes": Faults(killers=True),
    "locks": Faults(locks=True),
    "a clock that is set": Faults(clock_steps=True),
    "relays": Faults(relays=True),
    "schedules": Faults(overlap=True),
    "everything": Faults(True, True, True, True, True, True),
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("faults", STORIES)
def test_every_job_ends_whatever_breaks(faults: str, seed: int) -> None:
    dice = random.Random(f"{faults} {seed}")
    virtual(lambda world: Chaos(world, dice, STORIES[faults]).run())


@dataclass
class Table:
    """The user's table with the outbox, as its relays see it."""

    dice: random.Random
    rows: dict[int, str] = field(default_factory=dict)
    last: int = 0
    aside: dict[int, str] = field(default_factory=dict)

    def insert(self, job: str) -> None:
        self.last += 1
        self.rows[self.last] = job

    async def _pause(self) -> None:
        await asyncio.sleep(self.dice.choice([0, 0.01, 0.5]))

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def read(self) -> list[Row]:
        await self._pause()
        left = {n: job for n, job in self.rows.items() if n not in self.aside}
        return [Row(n, job) for n, job in sorted(left.items())[:20]]

    async def delete(self, numbers: Sequence[int]) -> None:
        await self._pause()
        for n in numbers:
            self.rows.pop(n, None)

    async def set_aside(self, reasons: Mapping[int, str]) -> int:
        self.aside |= reasons
        return len(reasons)

    async def count_aside(self) -> int:
        return len(self.aside)


class Chaos:
    """One story, told from its dice."""

    def __init__(self, world: World, dice: random.Random, faults: Faults) -> None:
        self.world, self.dice, self.faults = world, dice, faults
        self.record: list[Ran] = []
        self.innocent: list[str] = []
        self.killers: list[str] = []
        self.ticks: list[Ran] = []
        self.nodes: list[Node] = []
        self.table = Table(dice)
        self.work, self.kill = self._tasks()

    def _tasks(self) -> tuple[Task[[float, float], None, Any], Task[[], None, Any]]:
        world, dice = self.world, self.dice

        @world.app.task(retries=RetryPolicy(retries=50, first=1, cap=10))
        async def work(seconds: float, luck: float) -> None:
            ran = self._note(self.record)
            await asyncio.sleep(seconds)
            if dice.random() > luck:
                raise RuntimeError("bad luck")
            ran.ended_ms = world.now_ms

        @world.app.task
        async def kill() -> None:
            context = current_job()
            assert context is not None
            await asyncio.sleep(dice.choice([0, 0, 0.5, 3]))
            # One that was told to stop still runs its jobs, and can be killed.
            [mine] = [node for node in world.nodes if node.name == context.job.worker]
            mine.crash()
            if mine in self.nodes:
                asyncio.get_running_loop().create_task(self._replace(self.nodes.index(mine)))
            await asyncio.sleep(3600)

        if self.faults.overlap:

            @world.app.every("7s", overlap="skip")
            async def tick() -> None:
                ran = self._note(self.ticks)
                await asyncio.sleep(dice.choice([0.1, 5, 6.5, 20]))
                ran.ended_ms = world.now_ms

        return work, kill

    def _note(self, record: list[Ran]) -> Ran:
        context = current_job()
        assert context is not None
        job = context.job
        ran = Ran(job.id, job.attempt, job.due_ms, self.world.now_ms)
        record.append(ran)
        return ran

    async def run(self) -> None:
        Line.free = None
        for _ in range(JOBS):
            call = self.work.using(delay=self.dice.uniform(0, 300))
            seconds, luck = self.dice.choice([0, 0.1, 2, 15]), self.dice.choice([1, 1, 0.5])
            if self.faults.relays and self.dice.random() < 0.5:
                job = call.job(seconds, luck)
                self._later(job)
                self.innocent.append(job.id)
            else:
                self.innocent.append((await call.enqueue(seconds, luck)).id)
        for _ in range(KILLERS if self.faults.killers else 0):
            killer = self.kill.using(delay=self.dice.uniform(0, 300))
            self.killers.append((await killer.enqueue()).id)
        self.nodes = [await self._start() for _ in range(3)]
        relays = [asyncio.create_task(self._relay()) for _ in range(3)]
        for _ in range(30):
            await asyncio.sleep(self.dice.uniform(1, 20))
            await self._break_something()
        await self._until_all_ended()
        for relay in relays:
            relay.cancel()
        await self.judge()

    async def _until_all_ended(self) -> None:
        for _ in range(240):
            await asyncio.sleep(30)
            jobs = await self.world.store.get([*self.innocent, *self.killers])
            if all(job is not None and job.state.ended for job in jobs):
                return

    def _later(self, job: Job) -> None:
        """The user's transaction is committed at some moment from now on."""
        text = msgspec.json.encode(job).decode()
        asyncio.get_running_loop().call_later(
            self.dice.uniform(0, 300), lambda: self.table.insert(text)
        )

    async def _relay(self) -> None:
        line = Line(self.world.store, lose_requests=0.1, lose_replies=0.1, seed=1)
        while True:
            try:
                await hand_over(self.table, line)  # type: ignore[arg-type]
            except StoreUnavailable:
                pass
            await asyncio.sleep(0.05)

    async def _start(self) -> Node:
        line = Line(
            self.world.store,
            lose_requests=0.05,
            lose_replies=0.05,
            seed=self.dice.randrange(10**9),
        )
        return await self.world.node(
            line=line, lease_ms=LEASE_MS, takeovers=TAKEOVERS, concurrency=5
        )

    async def _replace(self, n: int) -> None:
        self.nodes[n] = await self._start()

    async def _break_something(self) -> None:
        if self.faults.crashes:
            victim = self.dice.randrange(3)
            node = self.nodes[victim]
            if self.dice.random() < 0.5:
                node.crash()
            else:
                node.worker.stop()
                await node.gone()  # or it is killed on the way
            if self.nodes[victim] is node:
                await self._replace(victim)
        if self.faults.locks and self.dice.random() < 0.3:
            Line.free = asyncio.Event()
            await asyncio.sleep(self.dice.uniform(0.1, 3 * LEASE_MS / 1000))
            Line.free.set()
            Line.free = None
        if self.faults.clock_steps and self.dice.random() < 0.3:
            self.world.set_clock(self.dice.choice([-60, -2, -0.1, 0.1, 2, 60]))

    # --- The judgement

    async def judge(self) -> None:
        ran = [*self.record, *self.ticks]
        assert [each for each in ran if early_by(each)] == [], "started early"
        runs: dict[str, list[Ran]] = {}
        for each in self.record:
            runs.setdefault(each.id, []).append(each)
        assert not self.table.aside
        dead = [id for id in self.innocent if (await self.stored(id)).state is State.DEAD]
        assert dead == [], "innocent jobs are dead"
        assert set(self.innocent) == set(runs), "lost"
        for id, mine in runs.items():
            self._judge_runs(await self.stored(id), mine)
        for id in self.killers:
            job = await self.stored(id)
            assert job.state is State.DEAD and "died or froze" in (job.error or "")
        if not self.faults.clock_steps:
            self._judge_ticks()

    async def stored(self, id: str) -> Job:
        return await self.world.stored(id)

    def _judge_runs(self, job: Job, mine: list[Ran]) -> None:
        assert job.state is State.DONE, f"{job.id} never ended"
        outcomes = Counter(run.outcome for run in job.history)
        if len(job.history) < 20:
            assert not unrecorded_attempts(job), "an attempt that history doesn't know"
            assert outcomes[Outcome.LOST] <= job.takeovers
        if not self.faults.clock_steps:
            self._judge_history(job)
        # A second whole run is possible, but only where a lease had run out, and then it shows.
        whole = sum(ran.ended_ms is not None for ran in mine)
        assert 1 <= whole <= 1 + job.takeovers
        assert not repeated_attempts(ran.attempt for ran in mine), "two runs of one attempt"
        for before, after in pairwise(mine):
            over = before.ended_ms is not None and before.ended_ms <= after.started_ms
            assert over or after.attempt > before.attempt

    def _judge_history(self, job: Job) -> None:
        """The store's own record says the same: what runs twice has a reason."""
        now_ms = self.world.now_ms
        span = Span(since_ms=0, until_ms=now_ms, now_ms=now_ms, late_after_ms=1_000)
        for flaw in flaws_of(job, span):
            assert flaw.kind in (FlawKind.LATE, FlawKind.DOUBLED), flaw
            assert flaw.why or flaw.kind is FlawKind.LATE, flaw

    def _judge_ticks(self) -> None:
        """Ticks that skip are left out while the one before runs; none runs beside another, but
        for one whose worker was lost."""
        first = [each for each in self.ticks if each.attempt == 1 and each.ended_ms is not None]
        again = {each.id for each in self.ticks if each.attempt > 1}
        for before, after in pairwise(first):
            assert before.ended_ms is not None
            if before.id not in again:
                assert before.ended_ms <= after.started_ms, "ticks overlap"
        if self.faults.overlap:
            assert len({each.id for each in self.ticks}) > 20, "the schedule fell silent"
