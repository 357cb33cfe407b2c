"""`sandbox(app)`: run an app for one test on a store in memory and with its own clock."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import datetime
from typing import TypeVar

from tickwheel.app import App
from tickwheel.checks import checked_options
from tickwheel.clock import MS_NS, SystemClock
from tickwheel.duration import due_ms
from tickwheel.errors import BadTime, UsageError, shown
from tickwheel.testing.box import Box, BoxView, SyncBox
from tickwheel.testing.driver import BoxOptions, Driver
from tickwheel.testing.loop import VirtualLoop
from tickwheel.testing.parts import BoxBridge, BoxClient, BoxClock, BoxStore, off_any_loop

Kind = TypeVar("Kind", bound=BoxView)

# With more runs than this in one travel or drain, jobs seem to add themselves endlessly.
LIMIT = 50_000


@checked_options
def sandbox(
    app: App,
    *,
    start: datetime | None = None,
    inline: bool = False,
    raise_errors: bool = False,
    schedules: bool = True,
    limit: int = LIMIT,
) -> Sandbox:
    """Give the app a store in memory and a clock that the test moves, for the duration of a block.

        async with sandbox(app) as box: ...     # in a coroutine
        with sandbox(app) as box: ...           # without an event loop

    The time in the box starts at `start`, or now. Jobs wait for `box.travel` and `box.drain`; with
    `inline` a job that is due now runs inside `enqueue`, which raises what the task raises.
    `raise_errors` makes `travel` and `drain` raise it, too. `schedules=False` disables the ticks of
    schedules. More runs than `limit` in one go are an error.

    Afterwards everything is as before, and the box's jobs are gone.
    """
    if not isinstance(app, App):
        raise UsageError(f"sandbox() takes an App, not {shown(app)}")
    if not isinstance(limit, int) or limit < 1:
        raise UsageError(f"limit={shown(limit)}: must be at least 1")
    options = BoxOptions(inline=inline, raise_errors=raise_errors, schedules=schedules, limit=limit)
    return Sandbox(app, None if start is None else _checked_start(start), options)


class Sandbox:
    """The result of `sandbox`: a `with` or `async with` block that can be entered once."""

    def __init__(self, app: App, start_ms: int | None, options: BoxOptions) -> None:
        self._app = app
        self._start_ms = start_ms
        self._options = options
        self._entered = False
        self._leaving = ExitStack()

    async def __aenter__(self) -> Box:
        loop = asyncio.get_running_loop()
        return self._enter(Box, loop if isinstance(loop, VirtualLoop) else None)

    async def __aexit__(self, *_: object) -> None:
        with self._leaving:
            await self._driver.close_lifespans()

    def __enter__(self) -> SyncBox:
        off_any_loop()
        return self._enter(SyncBox, None)

    def __exit__(self, *_: object) -> None:
        with self._leaving:
            self._driver.close_lifespans_sync()

    def _enter(self, kind: type[Kind], loop: VirtualLoop | None) -> Kind:
        if self._entered:
            raise UsageError("a sandbox can be entered only once; call sandbox(app) again")
        self._entered = True
        start_ms = self._start_ms
        if start_ms is None:
            start_ms = -(-SystemClock().now_ns() // MS_NS)
        clock = BoxClock(start_ms, loop)
        store = BoxStore(clock, self._app.tasks)
        self._driver = driver = Driver(self._app, clock, store, self._options)
        box = kind(self._app, clock, store, driver)
        self._leaving.callback(driver.close)
        self._leaving.enter_context(
            self._app._access.replaced(
                clock,
                connect=lambda: BoxClient(store, clock, driver.added),
                bridge=lambda own: BoxBridge(driver.call, own),
            )
        )
        self._leaving.callback(box._end)
        return box


def _checked_start(start: datetime) -> int:
    try:
        return due_ms(start, "start")
    except BadTime:
        raise BadTime(
            f"start={shown(start)}: must be an aware datetime, as in "
            "datetime(2026, 3, 1, tzinfo=UTC)"
        ) from None
