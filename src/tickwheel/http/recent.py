"""Answers that were costly to make, kept for a few seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")

# How many answers are kept.
KEPT_MOST = 100


class Recent:
    """Answers by what was asked; those who ask the same at the same time share one."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}

    async def get(self, key: Hashable, seconds: float, make: Callable[[], Awaitable[T]]) -> T:
        """The answer of the last `seconds`, or a new one."""
        loop = asyncio.get_running_loop()
        key = id(loop), key
        until, task = self._kept.get(key, (0.0, None))
        if task is None or until <= loop.time() or _failed(task):
            self._kept.pop(key, None)
            while len(self._kept) >= KEPT_MOST:
                del self._kept[next(iter(self._kept))]
            task = asyncio.ensure_future(_awaited(make))
            # Perhaps nobody waits for it any more.
            task.add_done_callback(_failed)
            self._kept[key] = loop.time() + seconds, task
        # One who gives up must not take it away from the others.
        found: T = await asyncio.shield(task)
        return found


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _awaited(make: Callable[[], Awaitable[T]]) -> T:
    return await make()
