"""For tests: an event loop whose time is virtual, and a store that misbehaves on request.

Under `run_virtual` an hour of waiting takes no time at all, and everything happens in the same
order each time. It carries all code that neither uses threads nor talks to a server: the engine on
`memory://`, with `LoopClock` as its clock.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tickwheel.errors import StoreUnavailable
from tickwheel.store import Store

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that, instead of waiting, moves its time to the next timer."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_s

    def _jump(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError("deadlock: every task waits, and no timer will ever wake one")
        self._virtual_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout != 0:
            self._jump(timeout)
        return ready


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class FaultyStore:
    """A store behind a bad line: calls fail before they arrive, or their answers get lost.

    `lose_requests` and `lose_replies` are chances; while `away` is set, every call fails. The same
    seed gives the same faults.
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

    def twin(self) -> FaultyStore:
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
