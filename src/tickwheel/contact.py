"""Keeps asking a store that is away, and says so once when it goes and once when it is back."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tickwheel.clock import StoreClock
from tickwheel.errors import StoreUnavailable
from tickwheel.span import span_text

T = TypeVar("T")

log = logging.getLogger("tickwheel")

FIRST_S, LONGEST_S = 0.05, 2.0
# Without a failure for this long, the store is back. Longer than stores wait for an answer: a call
# from before its return may fail that much later.
STEADY_MS = 6_000


class Contact:
    """One node's contact with its store, shared by all its loops."""

    def __init__(self, clock: StoreClock) -> None:
        self._clock = clock
        self._away_since_ms: int | None = None
        self._lost_ms = 0

    async def insist(
        self,
        step: Callable[[], Awaitable[T]],
        *,
        while_: Callable[[], bool],
        longest_s: float = LONGEST_S,
    ) -> T | None:
        """Take a step, again and again while the store is away; None where `while_` ended first.

        `longest_s` is the longest pause between two tries, and so how late that end is noticed.
        Repeating is safe: that is what the store promises of every step.
        """
        pause_s = FIRST_S
        while True:
            try:
                answer = await step()
            except StoreUnavailable as error:
                self._lost(error)
            else:
                self._found()
                return answer
            if not while_():
                return None
            # Many nodes lose the same store: they should not all come back in one moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, longest_s)

    def _lost(self, error: StoreUnavailable) -> None:
        self._lost_ms = self._clock.now_ms()
        if self._away_since_ms is None:
            self._away_since_ms = self._lost_ms
            log.warning("the store is away, trying on: %s", error)

    def _found(self) -> None:
        """A store that comes back may stumble a few times: it is said once it has been steady."""
        if self._away_since_ms is None:
            return
        if self._clock.now_ms() - self._lost_ms >= STEADY_MS:
            away = span_text(self._lost_ms - self._away_since_ms)
            log.warning("the store is back after %s", away)
            self._away_since_ms = None
