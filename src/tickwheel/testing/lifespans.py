"""An app's lifespans in a box: each is opened before the first run that needs it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from tickwheel.engine.surroundings import OpenLifespan
from tickwheel.errors import LifespanError, TickwheelError, UsageError
from tickwheel.lifespan import Lifespan, Lifespans
from tickwheel.registry import PoolName
from tickwheel.retry import describe
from tickwheel.testing.parts import CallerLoops, on_a_loop

# How long one may take to close.
CLOSING_S = 30.0


class BoxLifespans:
    """Opens lifespans on the test's loop; without a loop, sync ones on the test's thread."""

    def __init__(self, lifespans: Lifespans, loops: CallerLoops) -> None:
        self._lifespans = lifespans
        self._loops = loops
        self._values: dict[Lifespan, Any] = {}
        self._on_loop: dict[Lifespan, OpenLifespan] = {}
        self._entered = ExitStack()

    async def value(self, pool: PoolName) -> Any:
        """The value for a task of this pool. Without an event loop, it never waits."""
        lifespan = self._lifespans.of(pool)
        if lifespan is None:
            return None
        if lifespan not in self._values:
            if on_a_loop():
                self._values[lifespan] = await self._opened(lifespan)
            elif lifespan.is_async:
                self._values[lifespan] = self._open_on_callers_loop(lifespan)
            else:
                self._values[lifespan] = self._enter(lifespan)
        return self._values[lifespan]

    async def _opened(self, lifespan: Lifespan) -> Any:
        if lifespan not in self._on_loop:
            self._on_loop[lifespan] = OpenLifespan(lifespan)
        try:
            return await self._on_loop[lifespan].value()
        except (asyncio.CancelledError, TickwheelError):
            self._on_loop.pop(lifespan, None)  # the next run tries again
            raise

    def _open_on_callers_loop(self, lifespan: Lifespan) -> Any:
        if not self._loops.at_home:
            raise UsageError(
                f"the lifespan {lifespan.name} is async and can't be opened on this thread: let "
                "the box run a job on the test's own thread first"
            )
        return self._loops.run(self._opened(lifespan))

    def _enter(self, lifespan: Lifespan) -> Any:
        try:
            return self._entered.enter_context(lifespan.manager())
        except Exception as error:
            words = f"the lifespan {lifespan.name} failed at its start: {describe(error)}"
            raise LifespanError(words) from error

    async def close(self) -> None:
        """Close what was opened. Raises what goes wrong."""
        with self._entered:
            while self._on_loop:
                _, lifespan = self._on_loop.popitem()
                if error := await lifespan.close(CLOSING_S):
                    raise error

    def close_sync(self) -> None:
        if self._on_loop:
            self._loops.run(self.close())
        else:
            self._entered.close()
