"""Call async code from code without an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import selectors
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class Bridge:
    """An event loop in a thread of its own, started when first needed."""

    def __init__(self) -> None:
        _bridges.add(self)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def is_here(self) -> bool:
        """Whether the caller is on the bridge's own thread, where a call would wait for itself."""
        return self._thread is threading.current_thread()

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="tickwheel-sync", daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def leave_to_parent(self) -> None:
        """In a forked child: use nothing of the parent's event loop. The two share what it listens
        with, so a connection that is closed here would no longer be read there."""
        if self._loop is not None:
            with contextlib.suppress(AttributeError):  # a loop of another kind
                self._loop._selector.close()  # type: ignore[attr-defined]
                self._loop._selector = selectors.DefaultSelector()  # type: ignore[attr-defined]


_bridges: weakref.WeakSet[Bridge] = weakref.WeakSet()


def _after_fork() -> None:
    for bridge in _bridges:
        bridge.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
