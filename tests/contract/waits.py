"""How tests tell a hint that comes in time from one that is late, or that comes for nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

# A hint that takes longer than this is no use; one that is asked for lasts a minute unless told.
SOON_S = 5
MINUTE = 60_000


async def begun(waiting: asyncio.Task[object]) -> None:
    """Give the waiting task its first turns. Whether it got far is not essential."""
    for _ in range(20):
        await asyncio.sleep(0)
        if waiting.done():
            return


async def spins(hint: Awaitable[object]) -> bool:
    """Whether a hint that was asked for 50 ms came at once, for no reason."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.timeout(SOON_S):
        await hint
    return loop.time() - start < 0.02
