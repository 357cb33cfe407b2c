"""Retry calls to a store that fails, and log once when that begins and once when it is over."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tickwheel.clock import StoreClock
from tickwheel.duration import duration_text
from tickwheel.errors import StoreUnavailable

T = TypeVar("T")
StoreCall = Callable[[], Awaitable[T]]

log = logging.getLogger("tickwheel")

FIRST_S, LONGEST_S = 0.05, 2.0
# After this long without a failure, the store is back. Longer than stores wait for an answer: a
# call made before it came back may fail that much later.
STEADY_MS = 6_000


class Reconnecting:
    """One node's calls to its store, from all its loops.

    Repeating a call is safe: the store contract promises it.
    """

    def __init__(self, clock: StoreClock) -> None:
        self._clock = clock
        self._lost_since_ms: int | None = None
        self._lost_ms = 0

    async def once(self, call: StoreCall[T]) -> T | None:
        """Make the call; None if the store is unreachable."""
        return await self.until(lambda: True, call)

    async def forever(self, call: StoreCall[T]) -> T:
        """Make the call, and retry until the store answers."""
        answer = await self.until(lambda: False, call)
        return answer  # type: ignore[return-value]  # None only if that was the answer

    async def until(
        self, given_up: Callable[[], bool], call: StoreCall[T], *, longest_s: float = LONGEST_S
    ) -> T | None:
        """Make the call, and retry until the store answers; None once `given_up`.

        `longest_s` is the longest pause between two tries, and so how late `given_up` is noticed.
        """
        pause_s = FIRST_S
        while True:
            try:
                answer = await call()
            except StoreUnavailable as error:
                self._lost(error)
            else:
                self._reached()
                return answer
            if given_up():
                return None
            # Many nodes lose the same store: they should not all come back at the same moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, longest_s)

    def _lost(self, error: StoreUnavailable) -> None:
        self._lost_ms = self._clock.now_ms()
        if self._lost_since_ms is None:
            self._lost_since_ms = self._lost_ms
            log.warning("calls to the store fail, retrying: %s", error)

    def _reached(self) -> None:
        """A store that comes back may fail a few more times: it is back once calls stop failing."""
        if self._lost_since_ms is None:
            return
        if self._clock.now_ms() - self._lost_ms >= STEADY_MS:
            lost = duration_text(self._lost_ms - self._lost_since_ms)
            log.warning("calls to the store succeed again, after %s", lost)
            self._lost_since_ms = None
