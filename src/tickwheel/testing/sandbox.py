"""`sandbox(app)`: for one test, an app lives on a store in memory and in a time of its own."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import datetime
from typing import TypeVar

from tickwheel.app import App
from tickwheel.clock import MS_NS, SystemClock
from tickwheel.errors import BadTime, UsageError
from tickwheel.span import due_ms
from tickwheel.testing.box import Box, Looks, SyncBox
from tickwheel.testing.driver import BoxOptions, Driver
from tickwheel.testing.loop import VirtualLoop
from tickwheel.testing.place import BoxBridge, BoxClient, BoxClock, BoxStore, off_any_loop

Kind = TypeVar("Kind", bound=Looks)

# More runs than this in one travel or drain are taken for jobs that add themselves without end.
LIMIT = 50_000


def sandbox(
    app: App,
    *,
    start: datetime | None = None,
    inline: bool = False,
    raise_errors: bool = False,
    schedules: bool = True,
    limit: int = LIMIT,
) -> Sandbox:
    """Give the app a store in memory and a time that the test moves, for the length of a block.

        async with sandbox(app) as box: ...     # in a coroutine
        with sandbox(app) as box: ...           # without an event loop

    The time in the box begins at `start`, or now. Jobs wait for `box.travel` and `box.drain`; with
    `inline` a job that is due at once runs inside `enqueue`, which raises what the task raises.
    `raise_errors` makes `travel` and `drain` raise it, too. `schedules=False` leaves out the ticks
    of schedules. More runs than `limit` in one go are an error.

    Afterwards everything is as before: what the box held is gone.
    """
    if not isinstance(app, App):
        raise UsageError(f"sandbox() takes an App, not {app!r}")
    if not isinstance(limit, int) or limit < 1:
        raise UsageError(f"limit={limit!r}: at least 1 job may run")
    options = BoxOptions(inline=inline, raise_errors=raise_errors, schedules=schedules, limit=limit)
    return Sandbox(app, None if start is None else _checked_start(start), options)


class Sandbox:
    """What `sandbox` gives: a block, with or without `async`, that may be entered once."""

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
        self._leaving.close()

    def __enter__(self) -> SyncBox:
        off_any_loop()
        return self._enter(SyncBox, None)

    def __exit__(self, *_: object) -> None:
        self._leaving.close()

    def _enter(self, kind: type[Kind], loop: VirtualLoop | None) -> Kind:
        if self._entered:
            raise UsageError("a sandbox serves one with block; call sandbox(app) for another")
        self._entered = True
        start_ms = self._start_ms
        if start_ms is None:
            start_ms = -(-SystemClock().now_ns() // MS_NS)
        clock = BoxClock(start_ms, loop)
        store = BoxStore(clock)
        driver = Driver(self._app, clock, store, self._options)
        box = kind(self._app, clock, store, driver)
        self._leaving.callback(driver.close)
        self._leaving.enter_context(
            self._app._elsewhere(
                clock,
                connect=lambda: BoxClient(store, clock, driver.added),
                bridge=lambda own: BoxBridge(driver.call, own),
            )
        )
        self._leaving.callback(box._end)
        return box


def _checked_start(start: datetime) -> int:
    try:
        return due_ms(start)
    except BadTime:
        raise BadTime(
            f"start={start!r}: give an aware datetime, as datetime(2026, 3, 1, tzinfo=UTC)"
        ) from None
