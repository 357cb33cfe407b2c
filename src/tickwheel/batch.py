"""Natural batching: while one flush is under way, calls gather, and the next flush takes them all.

An idle caller waits for nothing. Under load hundreds of calls become one transaction, one fsync,
one round trip, without any timer or size to tune.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Turns calls for one item into calls for many.

    `flush` gets at most `limit` items and answers for each, in order; what it raises reaches every
    caller of that batch. At most `room` calls gather: `send` waits beyond that. Where a whole batch
    has gathered, it need not wait for the one before: up to `lanes` flushes go side by side.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        limit: int = 1000,
        room: int = 20_000,
        lanes: int = 1,
    ) -> None:
        self._flush = flush
        self._limit = limit
        self._room = room
        self._lanes = lanes
        self._gathered: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._flushing: set[asyncio.Task[None]] = set()
        self._flushed = asyncio.Event()

    async def send(self, item: Item) -> Answer:
        """Hand over one item and wait for its answer."""
        while len(self._gathered) >= self._room:
            self._flushed.clear()
            await self._flushed.wait()
        return await self.submit(item)

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Hand over one item without waiting, for callers that bound their number themselves."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        self._gathered.append((item, answer))
        full = len(self._gathered) >= self._limit and len(self._flushing) < self._lanes
        if full or not self._flushing:
            flushing = loop.create_task(self._run())
            self._flushing.add(flushing)
            flushing.add_done_callback(self._over)
        return answer

    async def drained(self) -> None:
        """Wait until everything that was handed over has its answer."""
        while self._flushing:
            await asyncio.wait(self._flushing)

    async def _run(self) -> None:
        try:
            while self._gathered:
                batch = self._gathered[: self._limit]
                del self._gathered[: self._limit]
                await self._answer(batch)
                self._flushed.set()
        finally:
            # Here and not when it is over: whatever is handed over from now on needs another one.
            task = asyncio.current_task()
            assert task is not None
            self._flushing.discard(task)

    def _over(self, flushing: asyncio.Task[None]) -> None:
        self._flushing.discard(flushing)
        if flushing.cancelled():
            self._give_up()  # at the end of its loop, maybe before it began

    async def _answer(self, batch: list[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._flush([item for item, _ in batch])
            if len(answers) != len(batch):
                raise RuntimeError(f"{len(answers)} answers to {len(batch)} items")
        except asyncio.CancelledError:
            for _, waiting in batch:
                waiting.cancel()
            self._end_with_the_loop()
            return
        except Exception as error:
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, waiting), answer in zip(batch, answers, strict=True):
            # A caller that gave up waiting has cancelled its future.
            if not waiting.done():
                waiting.set_result(answer)

    def _end_with_the_loop(self) -> None:
        """Where it is us that is cancelled, and not something inside the flush, nobody will flush
        what has gathered."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            self._give_up()

    def _give_up(self) -> None:
        gathered, self._gathered = self._gathered, []
        for _, waiting in gathered:
            waiting.cancel()


@asynccontextmanager
async def few_at_a_time(
    most: int,
) -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], Awaitable[None]]]:
    """Gives what starts work, and waits where so much is under way. At the end all of it is done;
    where some of it failed, the rest is cancelled."""
    running: set[asyncio.Task[None]] = set()

    async def start(work: Coroutine[Any, Any, None]) -> None:
        running.add(asyncio.create_task(work))
        await asyncio.sleep(0)  # it begins before the next is made
        if len(running) == most:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                running.remove(task)
                task.result()

    try:
        yield start
        for task in running:
            await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
