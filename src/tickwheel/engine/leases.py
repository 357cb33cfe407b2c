"""Extend the leases of held jobs, even while a task blocks the event loop.

The keeper is a task on the worker's loop. If that loop is blocked, a guard thread notices and logs
which task blocks it; before leases run out, it extends them through a store handle of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType, FrameType

from tickwheel.clock import S_NS, Clock, StoreClock
from tickwheel.engine.hand import Hand, Held, Phase, Stop
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.errors import TickwheelError
from tickwheel.job import Job
from tickwheel.store import Store

log = logging.getLogger("tickwheel")

# Leases are extended when a third of them has passed: one attempt may fail and one may be late.
PARTS = 3
# The least pause between calls, even if the store is so slow that leases are always nearly over.
SHORTEST_MS = 50
# How often the guard looks, and how long a task may block the event loop before it is named; the
# same line of code is not named again for a while.
LOOK_S = 0.25
BLOCKED_S = 1.0
NAMED_AGAIN_S = 60.0
# How many such lines are remembered.
REMEMBERED = 100


# How often jobs that say their progress are extended for that.
PROGRESS_S = 1.0


class Keeper:
    """Extends held leases when a third of one has passed, in one call with all that are not new;
    between, those of jobs with news of their progress, at most once a second."""

    def __init__(
        self,
        store: Store,
        hand: Hand,
        clock: StoreClock,
        reconnecting: Reconnecting,
        *,
        lease_ms: int,
        stop: Callable[[Held, Stop], None],
        put_back: Callable[[Held], object],
    ) -> None:
        self._store = store
        self._hand = hand
        self._clock = clock
        self._reconnecting = reconnecting
        self._lease_ms = lease_ms
        self._stop = stop
        self._put_back = put_back
        self._loop = asyncio.get_running_loop()
        # Set while there is news of progress; and whether that was asked for, by any thread.
        self._news = asyncio.Event()
        self._asked = False
        # When such news was last told.
        self._told_s = -PROGRESS_S

    async def run(self) -> None:
        while True:
            if await self._news_within(self._pause_ms() / 1000):
                await self.extend([each for each in self._hand if each.untold])
            else:
                await self.extend(self._begun())

    def said(self) -> None:
        """A run has said its progress, perhaps on its own thread."""
        if self._asked:
            return
        self._asked = True
        if asyncio._get_running_loop() is self._loop:
            self._news.set()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def _news_within(self, pause_s: float) -> bool:
        """Wait this long, or until news of progress may be told: then True."""
        end_s = self._loop.time() + pause_s
        early_s = self._told_s + PROGRESS_S - self._loop.time()
        try:
            async with asyncio.timeout_at(end_s):
                await asyncio.sleep(max(early_s, 0))
                await self._news.wait()
        except TimeoutError:
            return False
        self._told_s = self._loop.time()
        # In this order: what is said from here on is either told now or asked for again.
        self._news.clear()
        self._asked = False
        return True

    def _pause_ms(self) -> float:
        """Until a third of some lease has passed. A slow answer may have arrived when a lease was
        nearly over; then the next extend is urgent."""
        part_ms = self._lease_ms / PARTS
        ends = [each.job.lease_until_ms for each in self._hand if each.stop is not Stop.LOST]
        soonest_ms = min((end for end in ends if end is not None), default=None)
        if soonest_ms is None:
            return part_ms
        left_ms = soonest_ms - self._clock.now_ms()
        return min(max(left_ms - (PARTS - 1) * part_ms, SHORTEST_MS), part_ms)

    def _begun(self) -> list[Held]:
        """Those that are not new: of which a sixth has passed. A busy worker holds many that it
        claimed a moment ago, and will have ended long before they matter."""
        new_ms = self._clock.now_ms() + self._lease_ms - self._lease_ms // (2 * PARTS)
        return [each for each in self._hand if (each.job.lease_until_ms or 0) <= new_ms]

    async def extend(self, held: Sequence[Held]) -> None:
        """Extend held jobs; stop those that are no longer ours or were cancelled, and put back
        those that were replaced or moved, unless they have started."""
        held = [each for each in held if each.stop is not Stop.LOST]
        if not held:
            return
        jobs = [each.with_start() for each in held]
        before = [each.job for each in held]
        answers = await self._reconnecting.until(
            lambda: not any(self._holds(job) for job in jobs),
            lambda: self._store.extend(jobs, now_ms=self._clock.now_ms(), lease_ms=self._lease_ms),
            longest_s=self._lease_ms / PARTS / 5 / 1000,
        )
        if answers is None:
            # By our own clock the leases have run out, so others may have the jobs.
            answers = [None] * len(held)
        for each, job, answer in zip(held, before, answers, strict=True):
            # If the job was claimed again in the meantime, or extended by the guard, the answer is
            # out of date.
            if self._hand.get(job.id) is each and each.job is job:
                self._apply(each, answer)

    def _holds(self, job: Job) -> bool:
        return job.lease_until_ms is not None and job.lease_until_ms > self._clock.now_ms()

    def _apply(self, held: Held, answer: Job | None) -> None:
        if answer is None:
            # An outcome in transit may have arrived first; its own answer tells whether it was
            # accepted.
            if held.phase is not Phase.SETTLING:
                self._stop(held, Stop.LOST)
            return
        held.job = answer
        if answer.cancel_requested:
            self._stop(held, Stop.CANCEL)
        elif answer.told:
            self._put_back(held)


class Guard:
    """A thread that watches the event loop, and extends the leases while it is blocked."""

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
        self._look_s = min(LOOK_S, self._beat_s)
        # Since when the loop owes an answer.
        self._asked_ns: int | None = None
        self._ended = threading.Event()
        # When the places that block the loop were last named.
        self._named_ns: dict[str, int] = {}
        self._thread = threading.Thread(target=self._watch, name="tickwheel-guard", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(self._beat_s)

    def _answer(self) -> None:
        self._asked_ns = None

    # --- In the thread

    def _watch(self) -> None:
        # Nothing is asked of the loop of an idle worker.
        while not self._ended.wait(self._look_s):
            if not len(self._hand) or not self._ask():
                continue
            if self._blocked_s() > 2 * self._beat_s:
                asyncio.run(self._stand_in())
            elif self._blocked_s() > BLOCKED_S:
                self._name_culprit()

    def _ask(self) -> bool:
        """Ask the loop for an answer, unless it still owes one: then True."""
        if self._asked_ns is not None:
            return True
        self._asked_ns = self._own_clock.monotonic_ns()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answer)
        return False

    def _blocked_s(self) -> float:
        """How long the loop has owed an answer."""
        asked_ns = self._asked_ns
        return 0 if asked_ns is None else (self._own_clock.monotonic_ns() - asked_ns) / S_NS

    def _name_culprit(self) -> None:
        """Log which task blocks the loop. Without one in sight it may be the machine that stops."""
        task, where = self._culprit()
        now_ns = self._own_clock.monotonic_ns()
        named_ns = self._named_ns.get(where)
        if task is None or (named_ns and now_ns - named_ns < NAMED_AGAIN_S * S_NS):
            return
        if len(self._named_ns) >= REMEMBERED:
            self._named_ns.clear()
        self._named_ns[where] = now_ns
        log.warning(
            "task %r blocks the event loop for more than %gs at %s: no other job can start or "
            "go on; await instead, or make it a plain def, which runs in a thread",
            task,
            BLOCKED_S,
            where,
            extra={"task": task},
        )

    async def _stand_in(self) -> None:
        """Extend the leases until the loop runs again."""
        task, where = self._culprit()
        log.error(
            "the event loop is blocked: %s at %s; a thread extends its leases",
            f"task {task!r} blocks it" if task else "it is",
            where,
            extra={"task": task},
        )
        store = self._store.new_handle()
        try:
            await store.open()
            while self._blocked_s() > self._beat_s and not self._ended.is_set():
                await self._extend(store)
                await asyncio.sleep(self._beat_s)
            log.warning("the event loop is running again")
        except TickwheelError as error:
            log.error("could not extend the leases while the event loop is blocked: %s", error)
        finally:
            await store.close()

    async def _extend(self, store: Store) -> None:
        held = [each for each in self._hand if each.stop is not Stop.LOST]
        jobs = [each.with_start() for each in held]
        now_ms = self._clock.now_ms()
        answers: Sequence[Job | None] = await store.extend(
            jobs, now_ms=now_ms, lease_ms=self._lease_ms
        )
        for each, answer in zip(held, answers, strict=True):
            # The keeper acts on lost and cancelled jobs: only the loop may stop a run.
            if answer is not None:
                each.job = answer

    def _culprit(self) -> tuple[str | None, str]:
        """The task in which the loop's thread is right now, if any, and where."""
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None:
            return None, "its end"
        known = self._tasks()
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        names = (known[each.f_code] for each in _stack(frame) if each.f_code in known)
        return next(names, None), where


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames
