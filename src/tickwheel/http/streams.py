"""Streams that are open: how many there may be, what they share, and when they end."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, TypeVar

from tickwheel.http.access import Caller
from tickwheel.http.problems import Kind, Problem

T = TypeVar("T")

# How many streams there are at most, and how many of one key.
STREAMS_MOST, STREAMS_OF_KEY = 200, 20
# When to try again, if there are too many.
RETRY_AFTER_S = 5
# The extension of an ASGI scope by which our server says that it stops: an event.
STOPPING = "tickwheel.stopping"
# How often to look whether another server stops.
LOOK_S = 1.0


class Streams:
    """The streams of a served app."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._reading: dict[Hashable, asyncio.Task[Any]] = {}

    def enter(self, caller: Caller) -> Callable[[], None]:
        """Count one more stream until what this returns is called; raises Problem if there are too
        many."""
        again = {"Retry-After": str(RETRY_AFTER_S)}
        if self._open.total() >= STREAMS_MOST:
            raise Problem(Kind.OVERLOADED, "too many streams are open", headers=again)
        if self._open[caller.id] >= STREAMS_OF_KEY:
            words = f"{STREAMS_OF_KEY} streams with this key are open: close one first"
            raise Problem(Kind.RATE_LIMITED, words, headers=again)
        self._open[caller.id] += 1
        entered = True

        def leave() -> None:
            nonlocal entered
            if entered:
                entered = False
                self._open[caller.id] -= 1
                # No key is remembered for longer than its streams.
                self._open += Counter()

        return leave

    async def share(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """What `make` returns; those who ask for the same key at the same time share one."""
        key = id(asyncio.get_running_loop()), key
        task = self._reading.get(key)
        if task is None:
            task = asyncio.ensure_future(_awaited(make))
            self._reading[key] = task
            task.add_done_callback(lambda _: self._reading.pop(key, None))
        # One who gives up must not take it away from the others.
        found: T = await asyncio.shield(task)
        return found


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


async def stopping(scope: Mapping[str, Any]) -> None:
    """Return when the server stops, which waits for all its requests, and so for this stream."""
    told = scope.get("extensions", {}).get(STOPPING)
    if told is not None:
        await told.wait()
        return
    while not _uvicorn_stops():  # noqa: ASYNC110 (it tells nobody)
        await asyncio.sleep(LOOK_S)


def _uvicorn_stops() -> bool:
    """Whether the uvicorn that has this process's signals stops. It does not tell its apps before
    their requests have ended; other servers end streams by themselves."""
    server = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))
