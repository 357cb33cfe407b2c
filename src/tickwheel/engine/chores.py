"""A worker's background work: heartbeats, what others ask for, releasing waiting jobs, pruning."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from tickwheel.clock import StoreClock
from tickwheel.engine.counts import Counts
from tickwheel.engine.hand import Held, Stop
from tickwheel.engine.leases import PARTS
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.engine.runs import PATIENCE_MS, Runs
from tickwheel.engine.scheduler import Scheduler
from tickwheel.job import State
from tickwheel.registry import PoolName
from tickwheel.store import Ask, Store, WorkerInfo
from tickwheel.stores.waiting import slack_of
from tickwheel.version import __version__

# A wait for work or requests ends after this long, even if the store's notice got lost.
IDLE_MS = 5_000
# With a long `ahead` so many times the slack of the waits, which look by themselves: whoever chose
# that wants the store to be asked less often.
IDLE_SLACKS = 15
# How often the store's clock is read; also at once when our own clock was set.
MEASURE_S = 5.0
PRUNE_EVERY_S = 60.0
PRUNE_BATCH = 1_000


def idle_ms(store: Store) -> int:
    """How long a wait lasts at most."""
    return max(IDLE_MS, IDLE_SLACKS * slack_of(store.ahead_ms))


class Chores:
    """The chores of one worker: each method is one round, which the worker repeats."""

    def __init__(
        self,
        worker: str,
        runs: Runs,
        store: Store,
        clock: StoreClock,
        reconnecting: Reconnecting,
        options: WorkerOptions,
        scheduler: Scheduler,
        counts: Counts | None = None,
    ) -> None:
        self._worker = worker
        self._runs = runs
        self._hand = runs.hand
        self._store = store
        self._clock = clock
        self._reconnecting = reconnecting
        self._options = options
        self._scheduler = scheduler
        self._counts = counts
        self._began_ms = clock.now_ms()
        # What was asked of held jobs, and has been done about it.
        self._told: dict[str, tuple[Held, Ask]] = {}
        # Extends these jobs, which tells the store that they have started.
        self.tell_start: Callable[[Sequence[Held]], Awaitable[None]] = _nobody

    # --- Heartbeats

    async def beat(self) -> None:
        """Report that this worker is running, and keep its measurement of the store's clock
        fresh."""
        await self._reconnecting.forever(lambda: self._store.beat(self._info()))
        if self._clock.stale(MEASURE_S):
            await self._reconnecting.forever(lambda: self._clock.measure(self._store.time_ns))
            self._runs.rearm()
        await asyncio.sleep(self._options.lease_ms / PARTS / 1000)

    async def unregister(self) -> None:
        await self._reconnecting.once(lambda: self._store.beat(self._info(gone=True)))

    def _info(self, *, gone: bool = False) -> WorkerInfo:
        now_ms = self._clock.now_ms()
        return WorkerInfo(
            name=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=tuple(self._options.queues),
            concurrency=self._options.concurrency,
            started_ms=self._began_ms,
            seen_ms=now_ms,
            gone_after_ms=0 if gone else self._options.lease_ms,
            held=len(self._hand),
            running=self._hand.running,
            offset_ms=self._clock.offset_ms,
            schedules=self._scheduler.declared,
            app=self._scheduler.app,
            tasks=tuple(sorted(self._runs.tasks.names)),
            counts=None if self._counts is None else self._counts.told(now_ms),
        )

    # --- What others ask for

    async def heed(self) -> None:
        """Stop jobs as soon as a cancel asks for it; put back those that were replaced or moved,
        unless they have started."""
        now_ms = self._clock.now_ms()
        known = self._heeded()
        asked = await self._reconnecting.forever(
            lambda: self._store.asked(
                self._worker, now_ms=now_ms, until_ms=now_ms + idle_ms(self._store), known=known
            )
        )
        new = {id: ask for id, ask in asked.items() if known.get(id) != ask}
        started: list[Held] = []
        for held, ask in ((self._hand.get(id), ask) for id, ask in new.items()):
            if held is None:
                continue
            self._told[held.job.id] = held, ask
            if ask is Ask.STOP:
                self._runs.stop(held, Stop.CANCEL)
            elif not self.put_back(held):
                started.append(held)
        if started:
            # So that the store knows: whoever asked is waiting for an answer.
            await self.tell_start(started)
        if new.keys() - self._told.keys():
            # It was claimed, and the answer is on its way here; or it is being settled.
            await asyncio.sleep(0.1)

    def put_back(self, held: Held) -> bool:
        """Release a job that was replaced or moved, which makes it so; False if it has started, or
        is being settled."""
        if not self._runs.waits(held):
            return False
        self._runs.stop(held, Stop.RELEASE)
        return True

    def _heeded(self) -> dict[str, Ask]:
        """What was asked for and has been done, of jobs that are still held."""
        self._told = {id: each for id, each in self._told.items() if self._hand.get(id) is each[0]}
        return {id: ask for id, (_, ask) in self._told.items()}

    # --- Release

    async def release_waiting(self) -> None:
        """Release jobs that have waited too long for a slot, so that workers with a free one get
        them."""
        runs = self._runs
        await runs.crowded.wait()
        runs.crowded.clear()
        before = runs.started.copy()
        await asyncio.sleep(PATIENCE_MS / 1000)
        since_ms = self._clock.now_ms() - PATIENCE_MS
        kept: Counter[PoolName] = Counter()
        for held in sorted(self._hand.unstarted(ready_before_ms=since_ms), key=_by_turn):
            if held.suspect or self._hand.lingers(held, since_ms + PATIENCE_MS):
                continue
            if runs.has_room(held.pool):
                runs.stop(held, Stop.RELEASE)
            elif kept[held.pool] < self._wanted(held, runs.started - before):
                kept[held.pool] += 1
            else:
                runs.release_to_others(held)
        if self._hand.wants_slot(self._clock.now_ms()):
            runs.crowded.set()

    def _wanted(self, held: Held, started: Counter[PoolName]) -> int:
        """How many jobs a full pool keeps in addition to those that run: as many as it will start
        before a released job could be back here. `started` counts the last second."""
        size = self._options.processes if held.pool == "process" else 0
        return size + (3 * started[held.pool] if held.declined else started[held.pool] // 3)

    # --- Prune

    async def prune(self) -> None:
        """Delete jobs that ended long ago; any worker may do it, and all do."""
        now_ms = self._clock.now_ms()
        await self._prune((State.DONE, State.CANCELLED), now_ms - self._options.retention_ms)
        await self._prune((State.DEAD,), now_ms - self._options.dead_retention_ms)
        await asyncio.sleep(PRUNE_EVERY_S)

    async def _prune(self, states: tuple[State, ...], before_ms: int) -> None:
        pruned = PRUNE_BATCH
        while pruned == PRUNE_BATCH:
            pruned = await self._reconnecting.forever(
                lambda: self._store.prune(states, before_ms=before_ms, limit=PRUNE_BATCH)
            )


async def _nobody(_: Sequence[Held]) -> None:
    pass


def _by_turn(held: Held) -> tuple[int, int]:
    return -held.job.priority, held.job.due_ms
