"""Natural batching: while one flush is under way, calls gather, and the next flush takes them all.

An idle caller waits for nothing. Under load hundreds of calls become one transaction, one fsync,
one round trip, without any timer or size to tune. Items can be large, so every batch is bounded by
bytes as well as by count.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Any, Generic, TypeVar

from tickwheel.errors import StoreUnavailable

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# One step of a store, and one reply, moves at most this many jobs and about this many bytes.
BATCH = 1000
BATCH_BYTES = 16 * 1024 * 1024
# A batch in which this many flushes failed is not split further.
SPLITS = 100


def weightless(_: object) -> int:
    """For items that are all small, such as ids."""
    return 0


def portions(
    items: Iterable[Item],
    weigh: Callable[[Item], int] = weightless,
    *,
    most: int = BATCH,
    most_bytes: int = BATCH_BYTES,
) -> Iterator[list[Item]]:
    """Cut into lists of at least one item, at most `most`, and at most `most_bytes` where one item
    alone is not more than that. No more items are taken than the next list needs, and one."""
    portion: list[Item] = []
    total = 0
    for item in items:
        weight = weigh(item)
        if portion and total + weight > most_bytes:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += weight
        if len(portion) == most:
            yield portion
            portion, total = [], 0
    if portion:
        yield portion


# One item that was handed over, its bytes, and where its answer goes.
_Call = tuple[Any, int, asyncio.Future[Any]]
_weight = itemgetter(1)


class Batcher(Generic[Item, Answer]):
    """Turns calls for one item into calls for many.

    `flush` gets at most `limit` items and answers for each, in order. StoreUnavailable reaches
    every caller of that batch. Any other error may be about one item alone, so the batch is tried
    again in halves until only the callers of bad items get it: `flush` must be safe to repeat.

    At most `room` calls gather: `send` waits beyond that. Where a whole batch has gathered, it need
    not wait for the one before: up to `lanes` flushes go side by side. `weigh` gives the bytes of
    an item. All flushes under way together carry about `limit_bytes`, and about `room_bytes`
    gather.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]],
        *,
        weigh: Callable[[Item], int] = weightless,
        limit: int = BATCH,
        limit_bytes: int = BATCH_BYTES,
        room: int = 20_000,
        room_bytes: int = 4 * BATCH_BYTES,
        lanes: int = 1,
    ) -> None:
        self._flush = flush
        self._weigh = weigh
        self._limit = limit
        self._limit_bytes = limit_bytes // lanes
        self._room = room
        self._room_bytes = room_bytes
        self._lanes = lanes
        self._gathered: list[_Call] = []
        self._bytes = 0
        self._flushing: set[asyncio.Task[None]] = set()
        self._flushed = asyncio.Event()

    async def send(self, item: Item) -> Answer:
        """Hand over one item and wait for its answer."""
        while len(self._gathered) >= self._room or self._bytes >= self._room_bytes:
            self._flushed.clear()
            await self._flushed.wait()
        return await self.submit(item)

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Hand over one item without waiting, for callers that bound their number themselves."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()
        weight = self._weigh(item)
        self._gathered.append((item, weight, answer))
        self._bytes += weight
        whole = len(self._gathered) >= self._limit or self._bytes >= self._limit_bytes
        if not self._flushing or (whole and len(self._flushing) < self._lanes):
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
                await self._answer(self._take())
                self._flushed.set()
        finally:
            # Here and not when it is over: whatever is handed over from now on needs another one.
            task = asyncio.current_task()
            assert task is not None
            self._flushing.discard(task)

    def _over(self, flushing: asyncio.Task[None]) -> None:
        self._flushing.discard(flushing)
        if flushing.cancelled():
            self._end_with_the_loop([])  # maybe before it began

    def _take(self) -> list[_Call]:
        if len(self._gathered) <= self._limit and self._bytes <= self._limit_bytes:
            whole, self._gathered, self._bytes = self._gathered, [], 0
            return whole
        batch = next(
            portions(self._gathered, _weight, most=self._limit, most_bytes=self._limit_bytes)
        )
        del self._gathered[: len(batch)]
        self._bytes -= sum(map(_weight, batch))
        return batch

    async def _answer(self, batch: list[_Call]) -> None:
        parts = [batch]
        failures = 0
        while parts:
            part = parts.pop()
            try:
                error = await self._try(part)
            except asyncio.CancelledError:
                _cancel(part)
                if _cancelling():
                    self._end_with_the_loop(parts)
                    return
                continue
            if error is None:
                continue
            failures += 1
            if len(part) > 1 and failures < SPLITS and not isinstance(error, StoreUnavailable):
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
            else:
                _fail(part, error)

    async def _try(self, part: list[_Call]) -> Exception | None:
        """Flush and hand out the answers; gives the error where there are none."""
        try:
            answers = await self._flush([item for item, _, _ in part])
            if len(answers) != len(part):
                raise RuntimeError(f"{len(answers)} answers to {len(part)} items")
        except Exception as error:
            return error
        for (_, _, waiting), answer in zip(part, answers, strict=True):
            # A caller that gave up waiting has cancelled its future.
            if not waiting.done():
                waiting.set_result(answer)
        return None

    def _end_with_the_loop(self, parts: list[list[_Call]]) -> None:
        """Where it is us that is cancelled, and not something inside the flush, nobody will flush
        the rest of the batch, or what has gathered."""
        for calls in (*parts, self._gathered):
            _cancel(calls)
        self._gathered.clear()
        self._bytes = 0


def _fail(calls: Sequence[_Call], error: Exception) -> None:
    for _, _, waiting in calls:
        if not waiting.done():
            waiting.set_exception(error)


def _cancel(calls: Sequence[_Call]) -> None:
    for _, _, waiting in calls:
        waiting.cancel()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


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
