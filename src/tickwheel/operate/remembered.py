"""Records that every request needs: read once in a while, and remembered if the store is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tickwheel.batch import Batcher
from tickwheel.client import Client
from tickwheel.clock import S_NS
from tickwheel.errors import StoreUnavailable

# How long a record that was read may be used without another look, and how many are remembered. One
# that was deleted counts for no longer than two seconds.
CACHE_S, CACHED = 1.5, 1000
# While the store is away, what was read counts for longer: metrics should say that it is away. So
# long may it take to answer.
STALE_S, READ_S = 600.0, 2.0
NO_ANSWER = "the store does not answer"


class Remembered:
    """Records of one kind, by name."""

    def __init__(self, client: Client, kind: str) -> None:
        self._client = client
        self._kind = kind
        self._reading: Batcher[str, str | None] = Batcher(self._read)
        # By name: when it was read, by the monotonic clock, and what there was.
        self._seen: dict[str, tuple[int, str | None]] = {}

    async def get(self, name: str) -> str | None:
        """The text of a record; None if there is none."""
        now_ns = self._client.clock.monotonic_ns()
        seen = self._seen.get(name)
        if seen is not None and now_ns - seen[0] < CACHE_S * S_NS:
            return seen[1]
        try:
            async with asyncio.timeout(READ_S):
                text = await self._reading.send(name)
        except (StoreUnavailable, TimeoutError) as error:
            if seen is None or now_ns - seen[0] >= STALE_S * S_NS:
                raise StoreUnavailable(str(error) or NO_ANSWER) from error
            return seen[1]
        self.forget(name)
        while len(self._seen) >= CACHED:
            del self._seen[next(iter(self._seen))]
        self._seen[name] = now_ns, text
        return text

    def forget(self, name: str) -> None:
        """Read it again when it is next asked for."""
        self._seen.pop(name, None)

    async def _read(self, names: Sequence[str]) -> list[str | None]:
        return await self._client.get_records(self._kind, names)
