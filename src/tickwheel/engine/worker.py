"""The worker: claim jobs that are due soon, run them, and do the chores.

    claim ──► wheel ──due──► ready ──slot──► run ──► settle
              (held, not due)   (by priority)

Everything here may be lost at any moment: the store has all of it, and the leases tell others when
to take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from types import CodeType
from typing import Any

from tickwheel.batch import BATCH
from tickwheel.clock import Clock, StoreClock
from tickwheel.concurrency import first_of
from tickwheel.duration import duration_text
from tickwheel.engine.chores import Chores, idle_ms
from tickwheel.engine.counts import Counts, WorkerGauges
from tickwheel.engine.hand import Stop
from tickwheel.engine.leases import Guard, Keeper
from tickwheel.engine.options import POOLS, WorkerOptions
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.engine.runs import STUBBORN_S, Runs
from tickwheel.engine.scheduler import Scheduler
from tickwheel.engine.surroundings import NO_SURROUNDINGS, Surroundings
from tickwheel.engine.suspects import Suspects
from tickwheel.ids import new_fence
from tickwheel.registry import Registry
from tickwheel.schedule import Rule
from tickwheel.store import Store

__all__ = ["Worker", "WorkerOptions"]

log = logging.getLogger("tickwheel")

# How long a worker that is cancelled, rather than stopped, may take to release its jobs.
HURRY_S = 2.0
# How long closing a lifespan may take at least, however long the jobs took.
CLOSING_S = 2.0


class Worker:
    """Runs jobs until it is told to stop."""

    def __init__(
        self,
        store: Store,
        tasks: Registry,
        clock: StoreClock,
        own_clock: Clock,
        options: WorkerOptions,
        *,
        app: str | None = None,
        schedules: Mapping[str, Rule] | None = None,
        guarded: bool = True,
        surroundings: Surroundings = NO_SURROUNDINGS,
        counts: Counts | None = None,
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._own_clock = own_clock
        self._options = options
        self._guarded = guarded
        self._task: asyncio.Task[Any] | None = None
        self._loop = asyncio.get_running_loop()
        self._reconnecting = calls = Reconnecting(clock)
        self._runs = Runs(
            self.name,
            store,
            tasks,
            clock,
            calls,
            options,
            ending=self._ending,
            surroundings=surroundings,
            counts=counts,
        )
        self._counts = counts
        self._hand = self._runs.hand
        self._claiming = asyncio.Lock()
        self._suspects = Suspects(self._runs, store, clock, calls, options, self._claiming)
        self._scheduler = Scheduler(
            store, tasks, clock, calls, schedules or {}, app=app, worker=self.name
        )
        self._stopping = self._runs.stopping
        # When it was told to stop, by the event loop's time.
        self._stopped_s: float | None = None
        # How many runs had ended at the last claim, and how many ended between the last two claims.
        self._ended_before = self._pace = 0
        self._chores = Chores(
            self.name, self._runs, store, clock, calls, options, self._scheduler, counts
        )

    # --- Start and stop

    @property
    def running(self) -> int:
        """How many jobs are running now."""
        return self._hand.running + self._hand.lent_total

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping.is_set()

    def gauges(self) -> WorkerGauges:
        """What it holds and runs now. Visits every held job."""
        used, free = self._runs.slots()
        wheel = self._hand.in_wheel
        return WorkerGauges(
            name=self.name,
            queues=tuple(self._options.queues),
            wheel=wheel,
            ready=len(self._hand.unstarted()) - wheel,
            held=len(self._hand),
            used=used,
            free=free,
        )

    def stop(self) -> None:
        """Claim no more, let running jobs finish within the grace, and release the rest."""
        self._stopping.set()
        if self._stopped_s is None:
            self._stopped_s = self._loop.time()

    @property
    def closing_s(self) -> float:
        """How long closing a lifespan may take now: what is left of the grace, or a moment."""
        left_s = self._options.grace_ms / 1000
        if self._stopped_s is not None:
            left_s -= self._loop.time() - self._stopped_s
        return max(left_s, CLOSING_S)

    async def run(self) -> None:
        """Work until `stop` is called."""
        keeper = self._keeper()
        self._runs.said = keeper.said
        self._chores.tell_start = keeper.extend
        loops = [
            keeper.run,
            self._scheduler.run,
            self._suspects.try_next,
            self._chores.heed,
            self._chores.release_waiting,
            self._chores.beat,
            self._chores.prune,
            self._runs.journal.summarise,
        ]
        self._task = asyncio.current_task()
        self._clock.on_step.append(self._clock_was_set)
        if self._counts is not None:
            self._counts.workers[self.name] = self.gauges
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_forever(loop)) for loop in loops]
                if self._guarded:
                    with self._guard():
                        await self._work_and_wind_up()
                else:
                    await self._work_and_wind_up()
                for task in running:
                    task.cancel()
        except asyncio.CancelledError:
            # The caller is in a hurry, but jobs that can be released quickly need not wait for
            # their lease.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY_S):
                    await self._wind_up(grace_s=0)
            raise
        finally:
            self._clock.on_step.remove(self._clock_was_set)
            if self._counts is not None:
                self._counts.workers.pop(self.name, None)
            self._runs.close()

    async def _work_and_wind_up(self) -> None:
        while not self._stopping.is_set():
            room = self._room()
            claimed = await self._claim(room)
            if claimed < min(room, BATCH) or not room:
                await self._wait_for_work(room)
        await self._wind_up(grace_s=self._options.grace_ms / 1000)

    def _ending(self) -> bool:
        """Whether a run that is cancelled now ends because the worker does."""
        return self._task is not None and self._task.cancelling() > 0

    def _clock_was_set(self, step_ms: int) -> None:
        way = "forward" if step_ms > 0 else "back"
        log.warning("this machine's clock was set %s by %s", way, duration_text(abs(step_ms)))
        self._runs.clock_was_set(step_ms)

    def _keeper(self) -> Keeper:
        return Keeper(
            self._store,
            self._hand,
            self._clock,
            self._reconnecting,
            lease_ms=self._options.lease_ms,
            stop=self._runs.stop,
            put_back=self._chores.put_back,
        )

    def _guard(self) -> Guard:
        return Guard(
            self._store,
            self._hand,
            self._clock,
            self._own_clock,
            lease_ms=self._options.lease_ms,
            tasks=self._codes,
        )

    def _codes(self) -> dict[CodeType, str]:
        return {
            definition.function.__code__: definition.name
            for definition in self._tasks.all()
            if hasattr(definition.function, "__code__")
        }

    # --- Claim

    def _room(self) -> int:
        """How many jobs to claim: as many as can start now, plus twice those that end between
        claims.

        Only as many as the pools of our tasks can run: a worker whose tasks all need a thread
        claims no more than it has threads.

        The second part keeps the slots of a fast worker busy during this claim and the next; a slow
        worker ends few jobs in that time, so it claims few, and idle workers get the work. Jobs of
        a full pool don't count, up to the number of slots: jobs of other pools may be queued behind
        them.
        """
        hand, slots = self._hand, self._options.most(self._tasks.pools)
        if hand.bytes > self._options.hold_bytes or len(hand) >= self._options.hold:
            # Jobs that linger must not keep others out.
            self._runs.end_lingers()
            return 0
        if self._runs.abstaining:
            return 0
        ready = blocked = 0
        for pool in POOLS:
            if self._runs.has_room(pool):
                ready += hand.ready(pool)
            else:
                blocked += hand.ready(pool)
        lacking = 0
        now_ms = self._clock.now_ms() if hand.gathered else 0
        for each in hand.gathered.values():
            # A batch takes one slot, or none yet while its jobs linger, and more jobs fit into it.
            if self._runs.has_room(each.pool):
                ready += each.calls if each.ripe(now_ms) else 0
                lacking += each.lacks
            else:
                blocked += each.calls
        free = slots - hand.running - ready - max(blocked - slots, 0)
        if free >= 0:
            free += lacking
        pace = max(self._pace, self._runs.ended - self._ended_before)
        return max(0, min(free + 2 * pace, self._options.hold - len(hand)))

    async def _claim(self, room: int) -> int:
        if not room:
            return 0
        self._pace, self._ended_before = self._runs.ended - self._ended_before, self._runs.ended
        async with self._claiming:
            if self._stopping.is_set():
                return 0
            # The store may have given us jobs in a reply that got lost: so repeat the call as the
            # same call.
            call, tries = new_fence(), itertools.count()
            jobs = await self._reconnecting.until(
                self._stopping.is_set,
                lambda: self._store.claim(
                    self._options.queues,
                    worker=self.name,
                    limit=room,
                    now_ms=self._clock.now_ms(),
                    lease_ms=self._options.lease_ms,
                    tasks=self._tasks.names,
                    call=call,
                    again=next(tries) > 0,
                ),
            )
            if jobs:
                self._runs.take(jobs)
        return len(jobs or ())

    async def _wait_for_work(self, room: int) -> None:
        """Wait until a claim makes sense: for work if there is room, otherwise for room."""
        self._runs.room_freed.clear()
        waiting: Awaitable[object]
        longest_ms = idle_ms(self._store)
        if room:
            now_ms = self._clock.now_ms()
            waiting = self._reconnecting.once(
                lambda: self._store.wait(
                    self._options.queues,
                    now_ms=now_ms,
                    until_ms=now_ms + longest_ms,
                    tasks=self._tasks.names,
                )
            )
        else:
            waiting = self._runs.room_freed.wait()
        await first_of(waiting, self._stopping.wait(), timeout_s=longest_ms / 1000)

    async def _wind_up(self, *, grace_s: float) -> None:
        self._stopping.set()
        for held in self._hand.unstarted():
            self._runs.stop(held, Stop.RELEASE)
        await self._runs.until_none_runs(grace_s)
        for held in self._hand:
            if held.run is not None:
                self._runs.stop(held, Stop.RELEASE)
        await self._runs.until_none_runs(STUBBORN_S + 1, threads=False)
        await self._runs.leave_threads_behind()
        await self._runs.settled()
        self._runs.journal.end_period()
        await self._chores.unregister()
        await self._runs.runner.end_children(self.closing_s)


async def _forever(chore: Callable[[], Awaitable[None]]) -> None:
    while True:
        await chore()
