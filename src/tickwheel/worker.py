"""The worker: claim what is due soon, run it, and keep house.

    claim ──► wheel ──due──► ready ──slot──► run ──► settle
              (held, not due)   (by priority)

Everything in it may be lost at any moment: the store has all of it, and the leases tell others when
to take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from types import CodeType
from typing import Any

from tickwheel.clock import Clock, StoreClock, first_of
from tickwheel.contact import Contact
from tickwheel.hand import Stop
from tickwheel.job import State
from tickwheel.keeper import PARTS, Guard, Keeper
from tickwheel.runs import POOLS, STUBBORN_S, Runs, WorkerOptions
from tickwheel.schedule import Rule
from tickwheel.scheduler import Scheduler
from tickwheel.span import span_text
from tickwheel.store import Store, WorkerInfo
from tickwheel.suspects import Suspects
from tickwheel.tasks import Tasks
from tickwheel.version import __version__

__all__ = ["Worker", "WorkerOptions"]

log = logging.getLogger("tickwheel")

# A wait for work ends after this long at the latest, whatever the store forgot to say.
IDLE_MS = 5_000
# What a worker that is cancelled, rather than stopped, may take to hand back its jobs.
HURRY_S = 2.0
# The store's clock is asked again this often, and at once when ours was set.
MEASURE_S = 5.0
PRUNE_EVERY_S = 60.0
PRUNE_BATCH = 1_000


class Worker:
    """Runs jobs until it is told to stop."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        clock: StoreClock,
        own_clock: Clock,
        options: WorkerOptions,
        *,
        schedules: Mapping[str, Rule] | None = None,
        guarded: bool = True,
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._own_clock = own_clock
        self._options = options
        self._guarded = guarded
        self._task: asyncio.Task[Any] | None = None
        self._contact = contact = Contact(clock)
        self._runs = Runs(self.name, store, tasks, clock, contact, options, ending=self._ending)
        self._hand = self._runs.hand
        self._claiming = asyncio.Lock()
        self._suspects = Suspects(self._runs, store, clock, contact, options, self._claiming)
        self._scheduler = Scheduler(store, tasks, clock, contact, schedules or {}, worker=self.name)
        self._stopping = self._runs.stopping
        # How many runs had ended at the last claim, and how many ended between the last two.
        self._ended_before = self._pace = 0
        self._started_ms = clock.now_ms()

    # --- Life

    @property
    def running(self) -> int:
        """How many jobs run right now."""
        return self._hand.running

    def stop(self) -> None:
        """Claim no more, let running jobs finish within the grace, hand the rest back."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until `stop` is called."""
        chores: list[Callable[[], Awaitable[None]]] = [
            self._keeper().run,
            self._scheduler.run,
            self._heed_cancels,
            self._runs.give_back_what_waits,
            self._suspects.try_next,
            self._stay_known,
            self._prune,
        ]
        self._task = asyncio.current_task()
        self._clock.on_step.append(self._clock_was_set)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_forever(chore)) for chore in chores]
                if self._guarded:
                    with self._guard():
                        await self._work_and_wind_up()
                else:
                    await self._work_and_wind_up()
                for chore in running:
                    chore.cancel()
        except asyncio.CancelledError:
            # Somebody is in a hurry, but what can be handed back quickly need not wait for a lease.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY_S):
                    await self._wind_up(grace_s=0)
            raise
        finally:
            self._clock.on_step.remove(self._clock_was_set)
            self._runs.close()

    async def _work_and_wind_up(self) -> None:
        while not self._stopping.is_set():
            room = self._room()
            claimed = await self._claim(room)
            if claimed < room or not room:
                await self._wait_for_work(room)
        await self._wind_up(grace_s=self._options.grace_ms / 1000)

    def _ending(self) -> bool:
        """Whether a run that is cancelled now ends with the worker, and not by itself."""
        return self._task is not None and self._task.cancelling() > 0

    def _clock_was_set(self, step_ms: int) -> None:
        way = "forward" if step_ms > 0 else "back"
        log.warning("the clock was set %s by %s", way, span_text(abs(step_ms)))
        self._runs.clock_was_set(step_ms)

    def _keeper(self) -> Keeper:
        return Keeper(
            self._store,
            self._hand,
            self._clock,
            self._contact,
            lease_ms=self._options.lease_ms,
            stop=self._runs.stop,
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
        """How many jobs to claim: what can start now, and twice what ends between two claims.

        The second part keeps the slots of a fast worker busy while this claim is under way and the
        next one; a slow worker ends little meanwhile, so it takes little, and idle ones get the
        work. Jobs of a pool that is full don't count, up to as many as there are slots: others may
        stand behind them.
        """
        hand, slots = self._hand, self._options.concurrency
        if hand.bytes > self._options.hold_bytes or self._runs.abstaining:
            return 0
        ready = blocked = 0
        for pool in POOLS:
            if self._runs.runner.has_room(pool):
                ready += hand.ready(pool)
            else:
                blocked += hand.ready(pool)
        free = slots - hand.running - ready - max(blocked - slots, 0)
        pace = max(self._pace, self._runs.ended - self._ended_before)
        return max(0, min(free + 2 * pace, self._options.hold - len(hand)))

    async def _claim(self, room: int) -> int:
        if not room:
            return 0
        self._pace, self._ended_before = self._runs.ended - self._ended_before, self._runs.ended
        async with self._claiming:
            if self._stopping.is_set():
                return 0
            jobs = await self._contact.insist(
                lambda: self._store.claim(
                    self._options.queues,
                    worker=self.name,
                    limit=room,
                    now_ms=self._clock.now_ms(),
                    lease_ms=self._options.lease_ms,
                ),
                while_=lambda: not self._stopping.is_set(),
            )
            for job in jobs or ():
                self._runs.take(job)
        if jobs:
            self._runs.tick()
        return len(jobs or ())

    async def _wait_for_work(self, room: int) -> None:
        """Wait until a claim makes sense again: for work if there is room, for room if not."""
        self._runs.moved.clear()
        waiting: Awaitable[object]
        if room:
            now_ms = self._clock.now_ms()
            waiting = self._contact.insist(
                lambda: self._store.wait(
                    self._options.queues, now_ms=now_ms, until_ms=now_ms + IDLE_MS
                ),
                while_=lambda: False,
            )
        else:
            waiting = self._runs.moved.wait()
        await first_of(waiting, self._stopping.wait(), timeout_s=IDLE_MS / 1000)

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
        await self._contact.insist(
            lambda: self._store.beat(self._info(gone=True)), while_=lambda: False
        )

    # --- Chores, each a loop of its own beside the work

    async def _heed_cancels(self) -> None:
        """Stop jobs as soon as somebody asks for it."""
        now_ms = self._clock.now_ms()
        ids = await self._contact.insist(
            lambda: self._store.asked(self.name, now_ms=now_ms, until_ms=now_ms + IDLE_MS),
            while_=lambda: True,
        )
        found = [self._hand.get(id) for id in ids or ()]
        for held in found:
            if held is not None:
                self._runs.stop(held, Stop.ASKED)
        if found:
            # They stay asked until they are settled; that takes a moment, or as long as a thread.
            await asyncio.sleep(0.1)

    async def _stay_known(self) -> None:
        """Say that we live, and keep our idea of the store's clock fresh."""
        await self._contact.insist(lambda: self._store.beat(self._info()), while_=lambda: True)
        if self._clock.stale(MEASURE_S):
            await self._contact.insist(
                lambda: self._clock.measure(self._store.time_ns), while_=lambda: True
            )
            self._runs.rearm()
        await asyncio.sleep(self._options.lease_ms / PARTS / 1000)

    def _info(self, *, gone: bool = False) -> WorkerInfo:
        return WorkerInfo(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=tuple(self._options.queues),
            concurrency=self._options.concurrency,
            started_ms=self._started_ms,
            seen_ms=self._clock.now_ms(),
            gone_after_ms=0 if gone else self._options.lease_ms,
            held=len(self._hand),
            running=self._hand.running,
            offset_ms=self._clock.offset_ms,
            schedules=self._scheduler.declared,
        )

    async def _prune(self) -> None:
        """Forget jobs that ended long ago; any worker may do it, and all do."""
        now_ms = self._clock.now_ms()
        for states, keep_ms in (
            ((State.DONE, State.CANCELLED), self._options.retention_ms),
            ((State.DEAD,), self._options.dead_retention_ms),
        ):
            pruned: int | None = PRUNE_BATCH
            while pruned == PRUNE_BATCH:
                pruned = await self._contact.insist(
                    lambda states=states, keep_ms=keep_ms: self._store.prune(  # type: ignore[misc]
                        states, before_ms=now_ms - keep_ms, limit=PRUNE_BATCH
                    ),
                    while_=lambda: True,
                )
        await asyncio.sleep(PRUNE_EVERY_S)


async def _forever(chore: Callable[[], Awaitable[None]]) -> None:
    while True:
        await chore()
