"""Keeps the leases of the jobs in hand, even while a task blocks the event loop.

The keeper is a task on the worker's loop. Should that loop stand still, a guard thread notices,
says which task holds it up, and extends the leases in its place through a store handle of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

from tickwheel.clock import S_NS, Clock, StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import TickwheelError
from tickwheel.hand import Hand, Held, Stop
from tickwheel.job import Job
from tickwheel.span import span_text
from tickwheel.store import Store

log = logging.getLogger("tickwheel")

# Leases are extended when a third of them has passed: one attempt may fail and one be late.
PARTS = 3
# Where a store is so slow that leases are always nearly over, it is not asked without a pause.
SHORTEST_MS = 50


class Keeper:
    """Extends every lease in hand, in one call, each third of a lease."""

    def __init__(
        self,
        store: Store,
        hand: Hand,
        clock: StoreClock,
        contact: Contact,
        *,
        lease_ms: int,
        stop: Callable[[Held, Stop], None],
    ) -> None:
        self._store = store
        self._hand = hand
        self._clock = clock
        self._contact = contact
        self._lease_ms = lease_ms
        self._stop = stop

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._pause_ms() / 1000)
            await self.extend()

    def _pause_ms(self) -> float:
        """Until a third of some lease has passed. An answer that took long may have come when a
        lease was nearly over, and then there is no time to lose."""
        part_ms = self._lease_ms / PARTS
        ends = [each.job.lease_until_ms for each in self._hand if each.stop is not Stop.LOST]
        soonest_ms = min((end for end in ends if end is not None), default=None)
        if soonest_ms is None:
            return part_ms
        left_ms = soonest_ms - self._clock.now_ms()
        return min(max(left_ms - (PARTS - 1) * part_ms, SHORTEST_MS), part_ms)

    async def extend(self) -> None:
        """Keep what is in hand, and stop what is no longer ours or is not wanted any more."""
        held = [each for each in self._hand if each.stop is not Stop.LOST]
        if not held:
            return
        jobs = [each.told() for each in held]
        asked = [each.job for each in held]
        answers = await self._contact.insist(
            lambda: self._store.extend(jobs, now_ms=self._clock.now_ms(), lease_ms=self._lease_ms),
            while_=lambda: any(self._holds(job) for job in jobs),
            longest_s=self._lease_ms / PARTS / 5 / 1000,
        )
        if answers is None:
            # The store is away, and by our own clock the leases are over: others may have the jobs.
            answers = [None] * len(held)
        for each, job, answer in zip(held, asked, answers, strict=True):
            # What was claimed again or extended by the guard meanwhile is not the job we asked for.
            if self._hand.get(job.id) is each and each.job is job:
                self._heed(each, answer)

    def _holds(self, job: Job) -> bool:
        return job.lease_until_ms is not None and job.lease_until_ms > self._clock.now_ms()

    def _heed(self, held: Held, answer: Job | None) -> None:
        if answer is None:
            # An outcome on its way may have arrived before us; its own answer says if it was taken.
            if not held.settling:
                self._stop(held, Stop.LOST)
            return
        held.job = answer
        if answer.asked:
            self._stop(held, Stop.ASKED)


class Guard:
    """A thread that keeps the leases while the event loop stands still."""

    def __init__(
        self,
        store: Store,
        hand: Hand,
        clock: StoreClock,
        own_clock: Clock,
        *,
        lease_ms: int,
        tasks: Callable[[], dict[CodeType, str]],
    ) -> None:
        self._store = store
        self._hand = hand
        self._clock = clock
        self._own_clock = own_clock
        self._lease_ms = lease_ms
        self._tasks = tasks
        self._beat_s = lease_ms / PARTS / 2 / 1000
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._last_beat_ns = own_clock.monotonic_ns()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._watch, name="tickwheel-guard", daemon=True)

    def __enter__(self) -> None:
        self._beat()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join(self._beat_s)

    def _beat(self) -> None:
        self._last_beat_ns = self._own_clock.monotonic_ns()
        self._timer = self._loop.call_later(self._beat_s, self._beat)

    # --- In the thread

    def _watch(self) -> None:
        while not self._ended.wait(self._beat_s):
            if self._standing_s() > 2 * self._beat_s and len(self._hand):
                asyncio.run(self._stand_in())

    def _standing_s(self) -> float:
        return (self._own_clock.monotonic_ns() - self._last_beat_ns) / S_NS

    async def _stand_in(self) -> None:
        """Keep the leases until the loop moves again."""
        log.error("the event loop stands still: %s; its leases are being kept", self._culprit())
        store = self._store.twin()
        try:
            await store.open()
            while self._standing_s() > self._beat_s and not self._ended.is_set():
                await self._extend(store)
                await asyncio.sleep(self._beat_s)
            standing = span_text(int(self._standing_s() * 1000))
            log.warning("the event loop moves again, last beat %s ago", standing)
        except TickwheelError as error:
            log.error("the leases could not be kept for the event loop: %s", error)
        finally:
            await store.close()

    async def _extend(self, store: Store) -> None:
        held = [each for each in self._hand if each.stop is not Stop.LOST]
        jobs = [each.told() for each in held]
        now_ms = self._clock.now_ms()
        answers: Sequence[Job | None] = await store.extend(
            jobs, now_ms=now_ms, lease_ms=self._lease_ms
        )
        for each, answer in zip(held, answers, strict=True):
            # What is lost or asked is for the keeper to act on: only the loop may stop a run.
            if answer is not None:
                each.job = answer

    def _culprit(self) -> str:
        """Where the loop's thread is right now, and in which task."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return "its thread is gone"
        known = self._tasks()
        place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        names = [known[each.f_code] for each in _stack(frame) if each.f_code in known]
        return f"task {names[0]!r} blocks it at {place}" if names else f"it is blocked at {place}"


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
