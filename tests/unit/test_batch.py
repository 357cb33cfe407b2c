"""Natural batching, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from tickwheel.batch import SPLITS, Batcher, portions
from tickwheel.concurrency import bounded_tasks
from tickwheel.errors import StoreUnavailable
from tickwheel.testing import run_virtual


class Sink:
    """Takes a second for each flush, answers each item with its double, and keeps a record."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        # Flushes that hold one of these fail: with an error of the item's, or of the store's.
        self.poison: set[int] = set()
        self.lost: set[int] = set()

    async def flush(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await asyncio.sleep(1)
        if self.poison & set(items):
            raise ValueError(f"can't take {items}")
        if self.lost & set(items):
            raise StoreUnavailable(f"lost {items}")
        return [item * 2 for item in items]


def submit(batcher: Batcher[int, int], item: int) -> asyncio.Future[int]:
    """Hand over one item; the future is told what `answered` is."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def answered(answers_to: int, answer: int | None, error: BaseException | None) -> None:
        assert answers_to == item
        if isinstance(error, asyncio.CancelledError):
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            assert answer is not None
            future.set_result(answer)

    batcher.submit([item], answered)
    return future


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_idle_batcher_adds_no_wait() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush)
        for n in range(3):
            before = now()
            assert await batcher.send(n) == n * 2
            assert now() - before == 1
        assert sink.batches == [[0], [1], [2]]

    run_virtual(story())


def test_calls_gather_while_a_flush_is_under_way_and_the_next_takes_them_all() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush)
        first = asyncio.create_task(batcher.send(0))
        await asyncio.sleep(0.2)
        others = []
        for n in range(1, 8):
            others.append(asyncio.create_task(batcher.send(n)))
            await asyncio.sleep(0.1)
        assert sink.batches == [[0]]
        assert await first == 0
        assert now() == 1
        # Each gets its own answer, in whatever batch it travelled.
        assert await asyncio.gather(*others) == [n * 2 for n in range(1, 8)]
        assert now() == 2
        assert sink.batches == [[0], [1, 2, 3, 4, 5, 6, 7]]

    run_virtual(story())


def test_calls_of_one_moment_are_one_batch() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush)
        assert await asyncio.gather(*map(batcher.send, range(100))) == list(range(0, 200, 2))
        assert sink.batches == [list(range(100))]

    run_virtual(story())


def test_a_batch_has_a_limit_and_the_order_is_kept() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, limit=3)
        answers = await asyncio.gather(*map(batcher.send, range(8)))
        assert answers == [n * 2 for n in range(8)]
        assert sink.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]

    run_virtual(story())


def test_only_one_flush_is_under_way_at_a_time() -> None:
    async def story() -> None:
        under_way, most = 0, 0

        async def flush(items: Sequence[int]) -> Sequence[int]:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(1)
            under_way -= 1
            return items

        batcher = Batcher(flush, limit=2)
        sending = []
        for n in range(20):
            sending.append(asyncio.create_task(batcher.send(n)))
            await asyncio.sleep(0.3)
        await asyncio.gather(*sending)
        assert most == 1

    run_virtual(story())


def test_a_store_that_is_away_is_told_to_every_caller_of_that_batch_and_no_other() -> None:
    async def story() -> None:
        sink = Sink()
        sink.lost = {4}
        batcher = Batcher(sink.flush, limit=3)
        answers = await asyncio.gather(*map(batcher.send, range(9)), return_exceptions=True)
        assert answers[:3] == [0, 2, 4]
        assert [str(answer) for answer in answers[3:6]] == ["lost [3, 4, 5]"] * 3
        assert all(isinstance(answer, StoreUnavailable) for answer in answers[3:6])
        assert answers[6:] == [12, 14, 16]
        # It was not tried again: nobody knows when the store is back.
        assert sink.batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        # And it keeps working.
        assert await batcher.send(50) == 100

    run_virtual(story())


def test_a_bad_item_fails_alone_and_its_neighbours_get_their_answers() -> None:
    async def story() -> None:
        sink = Sink()
        sink.poison = {37}
        batcher = Batcher(sink.flush)
        answers = await asyncio.gather(*map(batcher.send, range(100)), return_exceptions=True)
        bad = answers.pop(37)
        assert isinstance(bad, ValueError) and str(bad) == "can't take [37]"
        assert answers == [n * 2 for n in range(100) if n != 37]
        # By halves: the first try, and two for each of the seven times that 100 can be halved.
        assert len(sink.batches) <= 1 + 2 * 7
        assert await batcher.send(50) == 100

    run_virtual(story())


def test_where_the_store_goes_away_between_two_halves_the_second_half_is_told() -> None:
    async def story() -> None:
        sink = Sink()
        sink.poison, sink.lost = {0}, {3}
        batcher = Batcher(sink.flush)
        answers = await asyncio.gather(*map(batcher.send, range(4)), return_exceptions=True)
        assert isinstance(answers[0], ValueError)
        assert answers[1] == 2
        assert [str(answer) for answer in answers[2:]] == ["lost [2, 3]"] * 2

    run_virtual(story())


def test_a_batch_of_which_nothing_succeeds_is_given_up_after_a_number_of_tries() -> None:
    async def story() -> None:
        sink = Sink()
        sink.poison = set(range(1000))
        batcher = Batcher(sink.flush)
        answers = await asyncio.gather(*map(batcher.send, range(1000)), return_exceptions=True)
        assert all(isinstance(answer, ValueError) for answer in answers)
        # What is left over once no more is split is at most a part for each time it was halved.
        assert len(sink.batches) <= SPLITS + 10

    run_virtual(story())


def test_a_batcher_that_is_cancelled_between_two_halves_leaves_no_caller_waiting() -> None:
    async def story() -> None:
        sink = Sink()
        sink.poison = {0}
        batcher = Batcher(sink.flush)
        answers = [submit(batcher, n) for n in range(8)]
        await asyncio.sleep(1.5)
        [flushing] = batcher._flushing
        flushing.cancel()
        await asyncio.wait(answers)
        assert all(answer.cancelled() for answer in answers)

    run_virtual(story())


@pytest.mark.parametrize("when", ["gathered", "being flushed"])
def test_a_caller_that_is_cancelled_disturbs_nobody(when: str) -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush)
        ahead = asyncio.create_task(batcher.send(0))
        await asyncio.sleep(0.5)
        sending = [asyncio.create_task(batcher.send(n)) for n in (1, 2, 3)]
        await asyncio.sleep(0.2 if when == "gathered" else 1)
        sending[1].cancel()
        answers = await asyncio.gather(ahead, *sending, return_exceptions=True)
        assert [answers[n] for n in (0, 1, 3)] == [0, 2, 6]
        assert isinstance(answers[2], asyncio.CancelledError)
        assert await batcher.send(4) == 8

    run_virtual(story())


def test_a_cancelled_caller_of_a_batch_that_fails_disturbs_nobody() -> None:
    async def story() -> None:
        sink = Sink()
        sink.lost = {1}
        batcher = Batcher(sink.flush)
        sending = [asyncio.create_task(batcher.send(n)) for n in (1, 2)]
        await asyncio.sleep(0.5)
        sending[0].cancel()
        cancelled, failed = await asyncio.gather(*sending, return_exceptions=True)
        assert isinstance(cancelled, asyncio.CancelledError)
        assert isinstance(failed, StoreUnavailable)

    run_virtual(story())


def test_no_more_than_the_room_gathers_and_the_rest_waits() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, room=3)
        answers = await asyncio.gather(*map(batcher.send, range(10)))
        assert answers == [n * 2 for n in range(10)]
        # A batch takes all that has gathered, so its size tells how many that were.
        assert [len(batch) for batch in sink.batches] == [3, 3, 3, 1]

    run_virtual(story())


def test_a_caller_that_waits_for_room_can_be_cancelled() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, room=1)
        sending = [asyncio.create_task(batcher.send(n)) for n in range(3)]
        await asyncio.sleep(0.5)
        sending[1].cancel()
        await asyncio.wait(sending)
        assert sink.batches == [[0], [2]]

    run_virtual(story())


def test_submitting_hands_over_at_once_without_waiting() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, room=1)
        answers = [submit(batcher, n) for n in range(5)]
        assert not any(answer.done() for answer in answers)
        assert await asyncio.gather(*answers) == [0, 2, 4, 6, 8]
        assert sink.batches == [[0, 1, 2, 3, 4]]

    run_virtual(story())


def test_drained_waits_for_every_answer() -> None:
    async def story() -> None:
        sink = Sink()
        sink.poison = {1}
        batcher = Batcher(sink.flush, limit=1)
        await batcher.drained()
        assert now() == 0
        answers = [submit(batcher, n) for n in range(3)]
        await batcher.drained()
        assert now() == 3
        assert all(answer.done() for answer in answers)
        assert isinstance(answers[1].exception(), ValueError)

    run_virtual(story())


def test_one_who_does_not_take_its_answer_keeps_nobody_from_theirs() -> None:
    async def story() -> None:
        reported: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, told: reported.append(told))
        sink = Sink()
        batcher = Batcher(sink.flush)

        def careless(_: int, answer: int | None, error: BaseException | None) -> None:
            raise KeyError(answer)

        batcher.submit([1], careless)
        second = submit(batcher, 2)
        assert await second == 4
        sink.lost = {3, 4}
        batcher.submit([3], careless)
        with pytest.raises(StoreUnavailable):
            await submit(batcher, 4)
        assert [str(told["exception"]) for told in reported] == ["2", "None"]

    run_virtual(story())


async def too_few(items: Sequence[int]) -> Sequence[int]:
    return items[1:]


async def given_up(items: Sequence[int]) -> Sequence[int]:
    raise asyncio.CancelledError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("flush", [too_few, given_up])
def test_a_flush_that_breaks_its_word_leaves_no_caller_waiting(
    flush: Callable[[Sequence[int]], Coroutine[Any, Any, Sequence[int]]],
) -> None:
    async def story() -> None:
        batcher = Batcher(flush)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(batcher.send(1), batcher.send(2), return_exceptions=True)
        assert any(isinstance(answer, BaseException) for answer in answers)

    run_virtual(story())


def test_a_flush_that_gives_up_does_not_keep_the_next_from_going() -> None:
    async def story() -> None:
        sink = Sink()

        async def flush(items: Sequence[int]) -> Sequence[int]:
            answers = await sink.flush(items)
            if len(sink.batches) == 1:
                raise asyncio.CancelledError
            return answers

        batcher = Batcher(flush)
        first = asyncio.create_task(batcher.send(1))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(batcher.send(2))
        async with asyncio.timeout(60):
            assert await second == 4
        assert first.done()

    run_virtual(story())


def test_whole_batches_go_side_by_side_and_parts_of_one_wait() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, limit=3, max_inflight=2)
        sending = [asyncio.create_task(batcher.send(n)) for n in range(8)]
        await asyncio.sleep(0.5)
        # The third batch waits for a lane, although it is not whole.
        assert sink.batches == [[0, 1, 2], [3, 4, 5]]
        await asyncio.gather(*sending)
        assert sink.batches == [[0, 1, 2], [3, 4, 5], [6, 7]]
        assert now() == 2
        await batcher.drained()
        # Little does not go beside what is under way: it gathers.
        first = asyncio.create_task(batcher.send(8))
        await asyncio.sleep(0.5)
        second = asyncio.create_task(batcher.send(9))
        await asyncio.gather(first, second)
        assert sink.batches[3:] == [[8], [9]]
        assert now() == 4

    run_virtual(story())


# --- Bytes: here an item weighs as much as its number


def test_a_batch_is_bounded_by_bytes() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, weigh=int, limit_bytes=10)
        sizes = [4, 6, 1, 9, 1, 50, 3, 3, 3, 3]
        assert await asyncio.gather(*map(batcher.send, sizes)) == [n * 2 for n in sizes]
        assert sink.batches == [[4, 6], [1, 9], [1], [50], [3, 3, 3], [3]]

    run_virtual(story())


def test_a_batch_that_is_whole_by_its_bytes_does_not_wait_for_the_one_before() -> None:
    async def story() -> None:
        sink = Sink()
        # Two max_inflight share the bytes: 10 for each.
        batcher = Batcher(sink.flush, weigh=int, limit_bytes=20, max_inflight=2)
        sending = [asyncio.create_task(batcher.send(n)) for n in (5, 5, 7, 3, 2)]
        await asyncio.sleep(0.5)
        assert sink.batches == [[5, 5], [7, 3]]
        await asyncio.gather(*sending)
        assert sink.batches[2:] == [[2]]

    run_virtual(story())


def test_no_more_bytes_gather_than_there_is_room_for() -> None:
    async def story() -> None:
        sink = Sink()
        batcher = Batcher(sink.flush, weigh=int, room_bytes=10)
        sizes = [5, 5, 9, 9, 1, 12]
        answers = await asyncio.gather(*map(batcher.send, sizes))
        assert answers == [n * 2 for n in sizes]
        # Room is asked for before an item comes, so the last one may go beyond.
        assert sink.batches == [[5, 5], [9, 9], [1, 12]]

    run_virtual(story())


def test_portions_hold_one_item_at_least_and_no_more_than_their_limits() -> None:
    def cut(sizes: list[int]) -> list[list[int]]:
        return list(portions(sizes, int, most=3, most_bytes=10))

    assert cut([]) == []
    assert cut([1, 1, 1, 1]) == [[1, 1, 1], [1]]
    assert cut([5, 5, 1]) == [[5, 5], [1]]
    assert cut([99, 1, 99]) == [[99], [1], [99]]
    assert list(portions("abcde", most=2)) == [["a", "b"], ["c", "d"], ["e"]]


def test_portions_of_a_generator_are_taken_one_by_one() -> None:
    taken: list[int] = []

    def sizes() -> Iterator[int]:
        for n in (6, 3, 5, 8):
            taken.append(n)
            yield n

    cutting = portions(sizes(), int, most_bytes=10)
    assert taken == []
    assert next(cutting) == [6, 3]
    assert taken == [6, 3, 5]
    assert list(cutting) == [[5], [8]]


# --- A few at a time


def test_a_few_are_under_way_and_the_next_waits() -> None:
    async def story() -> None:
        begun: list[tuple[int, float]] = []

        async def work(n: int) -> None:
            begun.append((n, now()))
            await asyncio.sleep(1)

        async with bounded_tasks(2) as start:
            for n in range(5):
                await start(work(n))
        assert begun == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)]
        assert now() == 3

    run_virtual(story())


def test_where_one_fails_the_others_are_cancelled() -> None:
    async def story() -> None:
        ended: list[str] = []

        async def fail() -> None:
            await asyncio.sleep(1)
            raise ConnectionError("gone")

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise

        with pytest.raises(ConnectionError):
            async with bounded_tasks(3) as start:
                await start(work())
                await start(fail())
                await start(work())
        assert ended == ["cancelled"] * 2
        assert now() == 1

    run_virtual(story())


def test_what_is_under_way_ends_with_a_caller_that_is_cancelled() -> None:
    async def story() -> None:
        working = 0

        async def work() -> None:
            nonlocal working
            working += 1
            try:
                await asyncio.sleep(60)
            finally:
                working -= 1

        async def caller() -> None:
            async with bounded_tasks(3) as start:
                await start(work())
                await start(work())

        task = asyncio.create_task(caller())
        await asyncio.sleep(1)
        assert working == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert working == 0

    run_virtual(story())
