"""Find the jobs that kill their workers, by running suspects apart from all others.

When a worker dies, every job that it held is lost, and it is unknown which of them killed it. So a
job that was lost twice in a row is a suspect. Suspects are put on trial: the store is told that
they are about to start, and they start while the worker holds and starts nothing else. From then on
only a loss during a trial counts (`job.losses`). At first many are tried together, then few, and
finally each alone: so the killer's count keeps growing until it is dead, and innocent jobs finish
their run, which clears them. See docs/adr/0015.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tickwheel.clock import StoreClock
from tickwheel.concurrency import first_of
from tickwheel.engine.hand import Held, Stop
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.engine.runs import Runs
from tickwheel.job import losses
from tickwheel.store import Store

# Jobs that already run get a moment to end. Then suspects run with nothing else, for at most this
# long: most killers strike at once, and other jobs are waiting. Their trial continues alongside
# other jobs until they end, but after a while the next suspects get theirs.
QUIET_S, ALONE_S, TRIAL_S = 2.0, 10.0, 60.0
# How many are tried together, by how often they were lost. On the last chance a job runs alone.
TOGETHER = {2: 25, 3: 5}


class Suspects:
    """Puts the suspects among a worker's jobs on trial."""

    def __init__(
        self,
        runs: Runs,
        store: Store,
        clock: StoreClock,
        reconnecting: Reconnecting,
        options: WorkerOptions,
        claiming: asyncio.Lock,
    ) -> None:
        """Holding `claiming` keeps the worker from claiming."""
        self._runs = runs
        self._hand = runs.hand
        self._store = store
        self._clock = clock
        self._reconnecting = reconnecting
        self._options = options
        self._claiming = claiming
        self._loop = asyncio.get_running_loop()

    async def try_next(self) -> None:
        """Wait for suspects and try some; then give other jobs a turn of the same length."""
        await self._runs.suspected.wait()
        group = self._next_group()
        if not group:
            self._runs.suspected.clear()
            return
        began_s = self._loop.time()
        last_chance = _losses(group[0]) >= self._options.takeovers - 1
        async with self._nothing_else():
            await self._put_on_trial(group)
            await self._until_over(group, TRIAL_S if last_chance else ALONE_S)
        await self._until_over(group, TRIAL_S - (self._loop.time() - began_s))
        self._release_waiting()
        await asyncio.sleep(min(self._loop.time() - began_s, ALONE_S))

    def _next_group(self) -> list[Held]:
        """Suspects to try together. Those that were lost too often are settled dead."""
        for held in self._hand.take_suspects(lambda all: [h for h in all if self._guilty(h)]):
            reason = f"its worker died or froze {_losses(held)} times; it is not run again"
            self._runs.settle(held, self._runs.runner.give_up(held, reason, failed=False))
        return self._hand.take_suspects(self._equals)

    def _guilty(self, held: Held) -> bool:
        return _losses(held) >= self._options.takeovers

    def _equals(self, waiting: list[Held]) -> list[Held]:
        """The first, and those lost equally often, up to the size of a trial."""
        if not waiting:
            return []
        times = _losses(waiting[0])
        equals = [held for held in waiting if _losses(held) == times]
        return equals[: self._most(times)]

    def _most(self, times: int) -> int:
        most = 1 if times >= self._options.takeovers - 1 else TOGETHER.get(times, 1)
        return min(most, self._options.concurrency)

    @contextlib.asynccontextmanager
    async def _nothing_else(self) -> AsyncIterator[None]:
        """Claim nothing and hold nothing but suspects, so that nothing else starts. A job that has
        run for longer than a moment has shown that it does no harm."""
        async with self._claiming:
            for held in self._hand.unstarted():
                if not held.suspect:
                    self._runs.stop(held, Stop.RELEASE)
            await self._runs.until_none_runs(QUIET_S)
            await self._runs.settled()
            yield

    async def _put_on_trial(self, group: list[Held]) -> None:
        """Tell the store that these are about to start, and start them: a worker lost from now on
        counts against them."""
        for held in group:
            held.trial_ms = self._clock.now_ms()
        told = [held for held in group if self._may_start(held)]
        answers = await self._reconnecting.until(
            lambda: not any(map(self._may_start, told)),
            lambda: self._store.extend(
                [held.with_start() for held in told],
                now_ms=self._clock.now_ms(),
                lease_ms=self._options.lease_ms,
            ),
        )
        for held, job in zip(told, answers or [None] * len(told), strict=True):
            if not self._may_start(held):
                continue
            if job is None:
                self._runs.stop(held, Stop.LOST)
            else:
                held.job = job
                self._runs.start(held)
        for held in group:
            if held.started_ms is None:
                held.trial_ms = None

    def _may_start(self, held: Held) -> bool:
        return self._runs.waits(held) and not self._runs.stopping.is_set()

    async def _until_over(self, group: list[Held], timeout_s: float) -> None:
        runs = [held.run for held in group if held.run is not None]
        if runs and not self._runs.stopping.is_set() and timeout_s > 0:
            over = asyncio.ensure_future(asyncio.wait(runs))
            await first_of(over, self._runs.stopping.wait(), timeout_s=timeout_s)

    def _release_waiting(self) -> None:
        """Release suspects that have waited long, for other workers that may be idle."""
        before_ms = self._clock.now_ms() - int(ALONE_S * 1000)
        for held in self._hand.unstarted(ready_before_ms=before_ms):
            if held.suspect:
                self._runs.release_to_others(held)


def _losses(held: Held) -> int:
    """How often it was lost; its holder is this worker, which is alive."""
    return losses(held.job.history, survivor=held.job.worker or "")
