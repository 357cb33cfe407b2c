"""Waiting for work: look into the store, wait for a notification or the due time, look again.

A store's `notify.py` receives notifications from other processes in its own way.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from tickwheel.store import Ask, Asks, Tell

# How long before they are due jobs should be claimed at the latest, where `ahead` allows for more;
# and by how much the waits of several handles differ then.
IN_TIME_MS, SPREAD_MS = 1_000, 500
# With slack, a wait relies on notifications for longer: up to this, after so many looks.
CALM_S, CALM_AFTER = 4.0, 8


def slack_of(ahead_ms: int) -> int:
    """How long a claim may wait for more jobs once the first can be claimed."""
    return max(ahead_ms - IN_TIME_MS, 0)


class Waiters:
    """The waits on one handle, by topic. They may be in several threads and event loops."""

    def __init__(self) -> None:
        self._waiting: set[_Waiter] = set()

    def notify(self, *topics: str) -> None:
        """Wake the waits that are for all of these topics; without a topic, every wait."""
        here = _running_loop()
        for waiter in tuple(self._waiting):
            if waiter.topics.issuperset(topics) and not waiter.wake(here):
                self._waiting.discard(waiter)

    async def until_due(
        self,
        topics: Iterable[str],
        next_ms: Callable[[int], Awaitable[int | None]],
        *,
        now_ms: int,
        until_ms: int,
        rest_s: float = 0,
        slack_ms: int = 0,
    ) -> None:
        """Wait until the time that `next_ms` returns, or until `until_ms`. It looks into the store,
        given the current time; and again after each notification, but at most every `rest_s`.

        With `slack_ms`, that time may pass by so much: more will have come together by then. Waits
        of several handles end at different moments, and look again before: often another handle
        has taken everything.
        """
        loop = asyncio.get_running_loop()
        start, silent = loop.time(), 0
        slack_ms -= int(random.random() * min(slack_ms / 4, SPREAD_MS))
        waiter = _Waiter(loop, frozenset(topics))
        # Before the first look, so that nothing that happens during it is missed.
        self._waiting.add(waiter)
        try:
            await self.listen()
            while True:
                waiter.notified.clear()
                due_ms = await next_ms(now_ms + int((loop.time() - start) * 1000))
                wake_ms = until_ms if due_ms is None else min(due_ms + slack_ms, until_ms)
                end = start + (wake_ms - now_ms) / 1000
                look_again = loop.time() + self._patience_s(silent, slack_ms)
                if end <= loop.time():
                    return
                if await waiter.until(min(end, look_again)):
                    if rest_s:
                        await asyncio.sleep(rest_s)
                elif end <= look_again:
                    if not slack_ms:
                        return
                else:
                    silent += 1
        finally:
            self._waiting.discard(waiter)

    async def until_found(
        self,
        topics: Iterable[str],
        find: Callable[[], Awaitable[dict[str, Ask]]],
        *,
        known: Asks,
        now_ms: int,
        until_ms: int,
        rest_s: float = 0,
    ) -> dict[str, Ask]:
        """Wait until `find`, which looks into the store, finds something that is not known, and
        return all that it found."""
        found: dict[str, Ask] = {}

        async def look(now_ms: int) -> int | None:
            nonlocal found
            found = await find()
            return now_ms if found.items() - known.items() else None

        await self.until_due(topics, look, now_ms=now_ms, until_ms=until_ms, rest_s=rest_s)
        return found

    def _patience_s(self, silent: int, slack_ms: int) -> float:
        patience_s = self.patience_s(silent)
        if silent < CALM_AFTER:
            return patience_s
        return max(patience_s, min(slack_ms / 4_000, CALM_S))

    # --- For stores that are used by several processes

    async def listen(self) -> None:
        """Start to listen, unless that was done. Each wait calls this before its first look."""

    def patience_s(self, silent: int) -> float:
        """How long to rely on notifications before looking again, after `silent` looks that no
        notification caused."""
        return math.inf

    @property
    def anyone(self) -> bool:
        """Whether anyone is waiting."""
        return bool(self._waiting)


class _Waiter:
    """One wait, in its event loop."""

    __slots__ = ("_loop", "notified", "topics")

    def __init__(self, loop: asyncio.AbstractEventLoop, topics: frozenset[str]) -> None:
        self._loop = loop
        self.topics = topics
        self.notified = asyncio.Event()

    def wake(self, here: asyncio.AbstractEventLoop | None) -> bool:
        """False if the loop was closed, so that nobody waits any more."""
        if here is self._loop:
            self.notified.set()
            return True
        try:
            self._loop.call_soon_threadsafe(self.notified.set)
        except RuntimeError:
            return False
        return True

    async def until(self, end: float) -> bool:
        """Whether there was a notification by then."""
        try:
            async with asyncio.timeout_at(end):
                await self.notified.wait()
        except TimeoutError:
            return False
        return True


class Watches:
    """The watches for ends of jobs on one handle. They may be in several threads and event
    loops."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()

    @property
    def anyone(self) -> bool:
        return bool(self._watches)

    def hear(self, ids: Collection[str] | None) -> None:
        """These jobs may have ended; None if it can't be said which."""
        if not self._watches:
            return
        here = _running_loop()
        for watch in tuple(self._watches):
            if not watch.hear(ids, here):
                self._watches.discard(watch)

    @contextmanager
    def watching(self, ids: Collection[str], tell: Tell) -> Iterator[Watch]:
        watch = Watch(asyncio.get_running_loop(), ids, tell)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def close(self) -> None:
        """End all watches."""
        for watch in tuple(self._watches):
            watch.over.set()


class Watch:
    """One watch for ends, in its event loop."""

    __slots__ = ("_ids", "_loop", "_tell", "over")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ids: Collection[str],
        tell: Tell,
    ) -> None:
        self._loop = loop
        self._ids = ids
        self._tell = tell
        self.over = asyncio.Event()

    def hear(self, ids: Collection[str] | None, here: asyncio.AbstractEventLoop | None) -> bool:
        """False if the loop was closed, so that nobody watches any more."""
        if here is self._loop:
            self.tell(ids)
            return True
        try:
            self._loop.call_soon_threadsafe(self.tell, ids)
        except RuntimeError:
            return False
        return True

    def tell(self, ids: Collection[str] | None = None) -> None:
        """Tell of those of these that count; without, of all."""
        mine = list(self._ids) if ids is None else [id for id in ids if id in self._ids]
        if mine:
            self._tell(mine)

    async def until(self, end: float) -> bool:
        """Wait until then; whether the store was closed by then."""
        try:
            async with asyncio.timeout_at(end):
                await self.over.wait()
        except TimeoutError:
            return False
        return True


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """None in a coroutine that is run without a loop, as `tickwheel.testing` does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
