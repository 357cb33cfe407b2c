"""A store that misbehaves on request."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

from tickwheel.errors import StoreUnavailable
from tickwheel.store import Store


class FaultyStore:
    """A store with an unreliable connection: calls fail before they arrive, or replies get lost.

    `lose_requests` and `lose_replies` are probabilities; while `away` is set, every call fails. The
    same seed produces the same faults.
    """

    def __init__(
        self, store: Store, *, lose_requests: float = 0, lose_replies: float = 0, seed: int = 0
    ) -> None:
        self._store = store
        self.lose_requests = lose_requests
        self.lose_replies = lose_replies
        self.away = False
        self._random = random.Random(seed)

    @property
    def ahead_ms(self) -> int:
        return self._store.ahead_ms

    @property
    def max_inflight(self) -> int:
        return self._store.max_inflight

    @property
    def own_clock(self) -> bool:
        return self._store.own_clock

    def new_handle(self) -> FaultyStore:
        return self

    def __getattr__(self, name: str) -> Any:
        step: Callable[..., Awaitable[Any]] = getattr(self._store, name)
        if name in ("open", "close"):
            return step

        async def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.away or self._random.random() < self.lose_requests:
                raise StoreUnavailable(f"{name}: the request was lost")
            answer = await step(*args, **kwargs)
            if self.away or self._random.random() < self.lose_replies:
                raise StoreUnavailable(f"{name}: the reply was lost")
            return answer

        return faulty
