"""Natural batching: calls gather while one flush is under way, and the next flush takes them all.

When idle, a call does not wait. Under load, hundreds of calls become one transaction, one fsync,
one round trip, without any timer or size to tune. Items can be large, so every batch is bounded by
bytes as well as by count.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from functools import partial
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
    """Split into lists of at least one and at most `most` items, and at most `most_bytes` unless a
    single item is larger. From an iterator, only the items for the next list, plus one, are
    taken."""
    if not isinstance(items, list):
        yield from _cut(items, weigh, most, most_bytes)
        return
    for start in range(0, len(items), most):
        some = items[start : start + most]
        # Usually they are small.
        if weigh is weightless or sum(map(weigh, some)) <= most_bytes:
            yield some
        else:
            yield from _cut(some, weigh, most, most_bytes)


def _cut(
    items: Iterable[Item], weigh: Callable[[Item], int], most: int, most_bytes: int
) -> Iterator[list[Item]]:
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


# Called with one item and the answer for it, or with the error.
Answered = Callable[[Any, Any, BaseException | None], None]
# One submitted item, its bytes, and its callback.
_Call = tuple[Any, int, Answered]
_weight = itemgetter(1)


class Batcher(Generic[Item, Answer]):
    """Turns calls for one item into calls for many.

    `flush` gets at most `limit` items and returns an answer for each, in order. StoreUnavailable
    reaches every caller of that batch. Any other error may be about a single item, so the batch is
    retried in halves until only the callers of bad items get it: `flush` must be safe to repeat.

    At most `room` calls gather: beyond that, `send` waits. A full batch need not wait for the
    previous one: up to `max_inflight` flushes run at once. `weigh` returns the bytes of an item.
    All flushes under way have about `limit_bytes` in total, and about `room_bytes` gather.
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
        max_inflight: int = 1,
    ) -> None:
        self._flush = flush
        self._weigh = weigh
        self._limit = limit
        self._limit_bytes = limit_bytes // max_inflight
        self._room = room
        self._room_bytes = room_bytes
        self._max_inflight = max_inflight
        self._gathered: list[_Call] = []
        self._bytes = 0
        self._flushing: set[asyncio.Task[None]] = set()
        self._flushed = asyncio.Event()

    async def send(self, item: Item) -> Answer:
        """Submit one item and wait for its answer."""
        while len(self._gathered) >= self._room or self._bytes >= self._room_bytes:
            self._flushed.clear()
            await self._flushed.wait()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.submit([item], partial(_resolve, answer))
        return await answer

    def submit(
        self,
        items: Iterable[Item],
        answered: Callable[[Item, Answer | None, BaseException | None], None],
    ) -> None:
        """Submit items without waiting, for callers that bound their number themselves.

        `answered` is called once for each, with the item and the answer or an error."""
        for item in items:
            weight = self._weigh(item)
            self._gathered.append((item, weight, answered))
            self._bytes += weight
        if not self._gathered:
            return
        full = len(self._gathered) >= self._limit or self._bytes >= self._limit_bytes
        if not self._flushing or (full and len(self._flushing) < self._max_inflight):
            flushing = asyncio.get_running_loop().create_task(self._run())
            self._flushing.add(flushing)
            flushing.add_done_callback(self._over)

    async def drained(self) -> None:
        """Wait until every submitted item has its answer."""
        while self._flushing:
            await asyncio.wait(self._flushing)

    async def _run(self) -> None:
        try:
            while self._gathered:
                await self._answer(self._take())
                self._flushed.set()
        finally:
            # Here and not at the end: whatever is submitted from now on needs another flush.
            task = asyncio.current_task()
            assert task is not None
            self._flushing.discard(task)

    def _over(self, flushing: asyncio.Task[None]) -> None:
        self._flushing.discard(flushing)
        if flushing.cancelled():
            self._end_with_the_loop([])  # maybe before it began

    def _take(self) -> list[_Call]:
        if len(self._gathered) <= self._limit and self._bytes <= self._limit_bytes:
            batch, self._gathered, self._bytes = self._gathered, [], 0
            return batch
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
            except asyncio.CancelledError as cancelled:
                if _cancelling():
                    self._end_with_the_loop([*parts, part])
                    return
                _fail(part, cancelled)
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
        """Flush and deliver the answers; returns the error if there are none."""
        try:
            answers = await self._flush([item for item, _, _ in part])
            if len(answers) != len(part):
                raise RuntimeError(f"{len(answers)} answers to {len(part)} items")
        except Exception as error:
            return error
        for (item, _, answered), answer in zip(part, answers, strict=True):
            try:
                answered(item, answer, None)
            except Exception as error:
                _report(error)
        return None

    def _end_with_the_loop(self, parts: list[list[_Call]]) -> None:
        """If we are cancelled, rather than something inside the flush, nothing will flush the rest
        of the batch, or what has gathered."""
        parts.append(self._gathered)
        self._gathered, self._bytes = [], 0
        for calls in parts:
            _fail(calls, asyncio.CancelledError())


def _resolve(
    waiting: asyncio.Future[Answer], _: object, answer: Answer, error: BaseException | None
) -> None:
    if waiting.done():
        return  # its caller gave up and cancelled it
    if error is None:
        waiting.set_result(answer)
    elif isinstance(error, asyncio.CancelledError):
        waiting.cancel()
    else:
        waiting.set_exception(error)


def _fail(calls: Sequence[_Call], error: BaseException) -> None:
    for item, _, answered in calls:
        try:
            answered(item, None, error)
        except Exception as mistake:
            _report(mistake)


def _report(error: Exception) -> None:
    """A callback that fails must not keep others from their answers."""
    asyncio.get_running_loop().call_exception_handler(
        {"message": "a callback for a batched answer failed", "exception": error}
    )


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
