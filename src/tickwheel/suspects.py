"""Jobs that may be what kills their workers: found out one at a time, beside nothing else.

When a worker dies, every job that it held is lost, and nobody knows which of them was to blame. So
a job that was lost twice in a row is a suspect. It is put on trial: the store is told that it is
about to start, and it starts while the worker holds and starts nothing else. Only a loss during a
trial counts from then on (`job.losses`), so the killer goes on counting until it is dead, and the
innocent end their run, which clears them. See docs/adr/0015.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tickwheel.clock import StoreClock, first_of
from tickwheel.contact import Contact
from tickwheel.hand import Held, Stop
from tickwheel.job import losses
from tickwheel.runs import Runs, WorkerOptions
from tickwheel.store import Store

# What runs already is given a moment to end. Then a suspect runs alone, for so long at most: most
# killers strike at once, and others wait. Its trial goes on beside other jobs, until it is over.
QUIET_S, ALONE_S, TRIAL_S = 2.0, 10.0, 60.0


class Suspects:
    """Tries the suspects among a worker's jobs."""

    def __init__(
        self,
        runs: Runs,
        store: Store,
        clock: StoreClock,
        contact: Contact,
        options: WorkerOptions,
        claiming: asyncio.Lock,
    ) -> None:
        """Who holds `claiming` keeps the worker from claiming."""
        self._runs = runs
        self._hand = runs.hand
        self._store = store
        self._clock = clock
        self._contact = contact
        self._options = options
        self._claiming = claiming
        self._loop = asyncio.get_running_loop()

    async def try_next(self) -> None:
        """Wait for a suspect and try it; then let the others have as long a turn."""
        await self._runs.suspected.wait()
        held = self._hand.next_suspect()
        if held is None:
            self._runs.suspected.clear()
            return
        times = losses(held.job.history)
        if times >= self._options.takeovers:
            reason = f"its worker died or froze {times} times; not run again"
            self._runs.settle(held, self._runs.runner.give_up(held, reason, failed=False))
            return
        began_s = self._loop.time()
        async with self._nothing_else():
            await self._put_on_trial(held)
        await self._until_over(held, TRIAL_S - ALONE_S)
        # Where it takes still longer, others have their trial: one at a time, or nobody would know
        # which of them it was.
        held.trial_ms = None
        self._hand_back()
        await asyncio.sleep(min(self._loop.time() - began_s, ALONE_S))

    @contextlib.asynccontextmanager
    async def _nothing_else(self) -> AsyncIterator[None]:
        """Claim nothing, start nothing and hold nothing but suspects. What runs for longer than a
        moment has shown that it does no harm."""
        async with self._claiming:
            self._runs.quiet = True
            try:
                for held in self._hand.unstarted():
                    if not held.suspect:
                        self._runs.stop(held, Stop.RELEASE)
                await self._runs.until_none_runs(QUIET_S)
                await self._runs.settled()
                yield
            finally:
                self._runs.quiet = False
                self._runs.moved.set()
        self._runs.fill_slots()

    async def _put_on_trial(self, held: Held) -> None:
        """Tell the store that the job is about to start, and start it: if its worker is lost now,
        that counts."""
        if not self._may_start(held):
            return
        held.trial_ms = self._clock.now_ms()
        job = held.told()
        answer = await self._contact.insist(
            lambda: self._store.extend(
                [job], now_ms=self._clock.now_ms(), lease_ms=self._options.lease_ms
            ),
            while_=lambda: self._may_start(held),
        )
        if not self._may_start(held):
            return
        if answer is None or answer[0] is None:
            self._runs.stop(held, Stop.LOST)
            return
        held.job = answer[0]
        self._runs.start(held)
        await self._until_over(held, ALONE_S)

    def _may_start(self, held: Held) -> bool:
        return self._runs.waits(held) and not self._runs.stopping.is_set()

    async def _until_over(self, held: Held, timeout_s: float) -> None:
        if held.run is not None and not self._runs.stopping.is_set():
            over = asyncio.ensure_future(asyncio.wait([held.run]))
            await first_of(over, self._runs.stopping.wait(), timeout_s=timeout_s)

    def _hand_back(self) -> None:
        """Those that have waited for long are for other workers, which may be idle."""
        before_ms = self._clock.now_ms() - int(ALONE_S * 1000)
        for held in self._hand.unstarted(ready_before_ms=before_ms):
            if held.suspect:
                self._runs.hand_back(held)
