"""Waiting until a queue of one stream may have a ready job: notifications, and polls as a backup.

The server notifies one of the handles that wait for a queue of each ready message. That handle may
die, or leave the job to others, so all of them also ask the consumers now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tickwheel.concurrency import cancel_all
from tickwheel.stores.nats.parked import Parked
from tickwheel.stores.nats.sources import PATIENCE_S, Source, Sources
from tickwheel.stores.nats.steps import Layout, subject_part
from tickwheel.stores.nats.stream import Stream
from tickwheel.stores.nats.wire import Message, Wire

# Handles that wait for the same queue form this group: the server notifies one member.
GROUP = "wait"
# How long after the start of a wait the consumers are polled, and how often after that.
FIRST_POLL_S, POLL_S = 0.1, 1.0
# A poll asks every consumer, so a handle that serves many queues polls less often: this long per
# consumer.
POLL_EACH_S = 0.05

# A consumer that would hand out a message, and how far in the stream it has come.
Position = tuple[str, int]


@dataclass(slots=True)
class _Queue:
    """A queue that this handle serves."""

    # How many notifications there were.
    notified: int = 0
    # How many calls wait for it, and their common subscription.
    waiting: int = 0
    subscription: int | None = None


class Waiter:
    """Waits for ready jobs of one stream, for one handle."""

    def __init__(
        self, wire: Wire, stream: Stream, layout: Layout, sources: Sources, parked: Parked
    ) -> None:
        self._wire = wire
        self._stream = stream
        self._layout = layout
        self._sources = sources
        self._parked = parked
        parked.on_arrival = self._wake
        self._queues: dict[str, _Queue] = {}
        self._changed = asyncio.Event()

    async def wait(
        self, queues: Sequence[str], seconds: float, tasks: Collection[str] = ()
    ) -> bool:
        """Return when a claim may find something in these queues, or parked jobs of these tasks, or
        after so many seconds; returns whether there was a notification."""
        before = {queue: self._queue(queue).notified for queue in queues}
        self._join(before)
        try:
            return await self._notified_or_polled(before, seconds, tasks)
        finally:
            self._leave(before)

    def notify(self, queue: str) -> None:
        """A claim may find something in this queue."""
        self._queue(queue).notified += 1
        self._wake()

    def _wake(self) -> None:
        """Let those who wait see whether the jobs are for them."""
        self._changed.set()
        self._changed = asyncio.Event()

    def notify_all(self) -> None:
        """The same, in all queues that this handle serves."""
        for queue in self._queues:
            self.notify(queue)

    def follow(self, queue: str) -> bool:
        """Subscribe to requests that all handles claim from this queue again; returns whether it
        was new."""
        new = queue not in self._queues
        self._queue(queue)
        return new

    def _queue(self, queue: str) -> _Queue:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = _Queue()
            subject = f"{self._layout.notify}.r.{subject_part(queue)}.again"
            self._wire.subscribe(subject, lambda _: self.notify(queue))
        return found

    # --- Notifications

    def _join(self, queues: Iterable[str]) -> None:
        """Join the handles that wait. A notification ends that: this handle has work then, and the
        next message is for another one."""
        for name in queues:
            queue = self._queue(name)
            queue.waiting += 1
            if queue.subscription is None:
                subject = f"{self._layout.notify}.r.{subject_part(name)}.*.*"
                queue.subscription = self._wire.subscribe(
                    subject, functools.partial(self._notified, name), group=GROUP, once=True
                )

    def _leave(self, queues: Iterable[str]) -> None:
        for name in queues:
            queue = self._queue(name)
            queue.waiting -= 1
            if not queue.waiting:
                self._unsubscribe(queue)

    def _notified(self, queue: str, _: Message) -> None:
        self._unsubscribe(self._queue(queue))
        self.notify(queue)

    def _unsubscribe(self, queue: _Queue) -> None:
        if queue.subscription is not None:
            self._wire.unsubscribe(queue.subscription)
            queue.subscription = None

    # --- Waiting

    async def _notified_or_polled(
        self, before: dict[str, int], seconds: float, tasks: Collection[str]
    ) -> bool:
        """Wait for a notification or for a poll that finds something; returns whether it was a
        notification."""
        end = (loop := asyncio.get_running_loop()).time() + seconds
        pause_s, last = 0.0, set[Position]()
        for poll in itertools.count():
            left_s = end - loop.time()
            if await self._notified_since(before, min(pause_s, left_s), tasks):
                return True
            if left_s < pause_s:
                return False
            if tasks:
                await self._parked.refresh()
            # The third poll asks all: a consumer may have been created just before we joined.
            sources = [each for each in self._sources.of(before) if poll == 2 or not each.is_gone]
            found = await self._pending(sources)
            if is_ours(found, last, first=not poll):
                return False
            pause_s, last = next_pause(poll, found, len(sources)), found
        return False

    async def _notified_since(
        self, before: dict[str, int], seconds: float, tasks: Collection[str]
    ) -> bool:
        """Wait for a notification since then; returns whether there was one."""

        def notified() -> bool:
            heard = any(self._queues[queue].notified > then for queue, then in before.items())
            return heard or self._parked.has(before, tasks)

        if seconds > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not notified():
                        await self._changed.wait()
        return notified()

    async def _pending(self, sources: Sequence[Source]) -> set[Position]:
        """Which of these sources would hand out a message, as far as they answer soon."""
        asks = [
            asyncio.create_task(self._stream.consumer(each.consumer))
            for each in sources
            if not each.silent
        ]
        try:
            done = (await asyncio.wait(asks, timeout=PATIENCE_S))[0] if asks else set()
        finally:
            await cancel_all(*asks)
        found = [ask.result() for ask in done if not ask.exception()]
        return {
            (each["name"], each["delivered"]["stream_seq"])
            for each in found
            if each and each["num_pending"] and not each.get("paused")
        }


# --- Decisions


def is_ours(found: set[Position], last: set[Position], *, first: bool) -> bool:
    """Whether a poll found something to claim.

    Nobody may have been notified of what was there before we joined. What comes later is for the
    handle that was notified, unless the next poll finds it in the same position.
    """
    return bool(found & last or (found and first))


def next_pause(poll: int, found: set[Position], consumers: int) -> float:
    """How long to wait after this poll, which asked so many consumers."""
    if poll == 0 or found:
        return FIRST_POLL_S
    return max(POLL_S, POLL_EACH_S * consumers)
