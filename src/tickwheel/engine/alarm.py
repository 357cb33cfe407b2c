"""One timer of the event loop for many moments: it rings at the earliest of them, or before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# The shortest timer: a large float of seconds plus a few nanoseconds rounds to the same number.
SOONEST_S = 0.000_01


class Alarm:
    """Calls `ring`, which sets it again for what is still to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._timer: asyncio.Handle | None = None
        self._at_s = 0.0

    @property
    def is_set(self) -> bool:
        return self._timer is not None

    def ring_in(self, delay_s: float) -> None:
        at_s = self._loop.time() + max(delay_s, SOONEST_S)
        if self._timer is not None:
            # One that rings too soon is only set again: that is cheaper than setting it again for
            # every job that came and went.
            if self._at_s <= at_s:
                return
            self._timer.cancel()
        self._at_s = at_s
        self._timer = self._loop.call_at(at_s, self._rang)

    def ring_soon(self) -> None:
        """Ring now if it is set: whoever set it does so again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._rang)
            self._at_s = 0.0

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _rang(self) -> None:
        self._timer = None
        self._ring()
