"""From code without an event loop to code with one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class Bridge:
    """An event loop in a thread of its own, started when first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="tickwheel-sync", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
