"""Waits: look, wait for a notification or the due time, look again. Nothing is missed."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from tickwheel.store import Ask
from tickwheel.stores.waiting import CALM_AFTER, CALM_S, SPREAD_MS, Waiters, slack_of
from tickwheel.testing import run_virtual

NOW = 1_000_000
MINUTE = 60_000


class Look:
    """Gives these answers in turn, as milliseconds from now; the last one for ever."""

    def __init__(self, *answers: int | None, during: Callable[[], None] | None = None) -> None:
        self._answers = list(answers)
        self._during = during
        self.at: list[int] = []

    async def __call__(self, now_ms: int) -> int | None:
        self.at.append(now_ms - NOW)
        during, self._during = self._during, None
        await asyncio.sleep(0)
        if during is not None:
            during()
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return None if answer is None else NOW + answer


def in_virtual_time(test: Callable[[Waiters], Awaitable[None]]) -> Callable[[], None]:
    async def main() -> None:
        await test(Waiters())

    @functools.wraps(test)
    def wrapped() -> None:
        run_virtual(main())

    # Or pytest looks for a fixture with the name of the argument.
    del wrapped.__wrapped__
    return wrapped


async def ended_ms(
    waiters: Waiters, look: Look, *topics: str, ms: int = MINUTE, rest_s: float = 0
) -> int:
    """How long a wait took."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    await waiters.until_due(topics, look, now_ms=NOW, until_ms=NOW + ms, rest_s=rest_s)
    return round((loop.time() - start) * 1000)


@in_virtual_time
async def test_a_wait_ends_when_something_is_due_without_another_look(waiters: Waiters) -> None:
    look = Look(500)
    assert await ended_ms(waiters, look) == 500
    assert look.at == [0]
    assert not waiters.anyone


@in_virtual_time
async def test_a_wait_ends_at_its_end(waiters: Waiters) -> None:
    assert await ended_ms(waiters, Look(None)) == MINUTE
    assert await ended_ms(waiters, Look(2 * MINUTE)) == MINUTE
    assert await ended_ms(waiters, Look(None), ms=0) == 0
    assert await ended_ms(waiters, Look(None), ms=-1000) == 0
    assert await ended_ms(waiters, Look(-1000)) == 0


@in_virtual_time
async def test_a_notification_is_a_reason_to_look_again(waiters: Waiters) -> None:
    look = Look(None, None, 2500)
    loop = asyncio.get_running_loop()
    loop.call_later(1, waiters.notify)
    loop.call_later(2, waiters.notify)
    assert await ended_ms(waiters, look) == 2500
    assert look.at == [0, 1000, 2000]


@in_virtual_time
async def test_what_happens_during_a_look_is_not_missed(waiters: Waiters) -> None:
    look = Look(None, 0, during=waiters.notify)
    assert await ended_ms(waiters, look) == 0
    assert look.at == [0, 0]


@in_virtual_time
async def test_a_wait_that_is_notified_all_the_time_still_ends(waiters: Waiters) -> None:
    async def notify(_: int) -> None:
        waiters.notify()
        await asyncio.sleep(0.001)

    async with asyncio.timeout(2):
        await waiters.until_due((), notify, now_ms=NOW, until_ms=NOW + 1000)


@in_virtual_time
async def test_only_its_own_topics_wake_a_wait(waiters: Waiters) -> None:
    loop = asyncio.get_running_loop()
    look = Look(None)
    for second, topics in enumerate([["qa"], ["qb"], ["qc"], []]):
        loop.call_later(second + 1, waiters.notify, *topics)
    assert await ended_ms(waiters, look, "qa", "qc") == MINUTE
    assert look.at == [0, 1000, 3000, 4000]


@in_virtual_time
async def test_looks_keep_their_distance_if_they_are_told_to(waiters: Waiters) -> None:
    loop = asyncio.get_running_loop()
    for n in range(1, 5):
        loop.call_later(n / 1000, waiters.notify)
    look = Look(None)
    await ended_ms(waiters, look, rest_s=0.02)
    assert look.at == [0, 21]


@in_virtual_time
async def test_a_store_that_may_miss_something_looks_by_itself(_: Waiters) -> None:
    class Doubtful(Waiters):
        def patience_s(self, silent: int) -> float:
            return min(0.5 * (1 << silent), 2)

    look = Look(None)
    assert await ended_ms(Doubtful(), look, ms=6000) == 6000
    assert look.at == [0, 500, 1500, 3500, 5500]


@in_virtual_time
async def test_what_is_found_is_returned(waiters: Waiters) -> None:
    found: dict[str, Ask] = {}

    async def find() -> dict[str, Ask]:
        return found

    def cancel() -> None:
        found["job"] = Ask.STOP
        waiters.notify("a")

    times = {"now_ms": NOW, "until_ms": NOW + MINUTE}
    assert await waiters.until_found("a", find, known={}, **times) == {}
    asyncio.get_running_loop().call_later(1, cancel)
    assert await waiters.until_found("a", find, known={}, **times) == {"job": Ask.STOP}
    before = asyncio.get_running_loop().time()
    assert await waiters.until_found("a", find, known=dict(found), **times) == found
    assert asyncio.get_running_loop().time() - before >= MINUTE / 1000


@in_virtual_time
async def test_a_notification_of_two_topics_is_for_waits_that_have_both(waiters: Waiters) -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(1, waiters.notify, "queue", "task")
    looks = [Look(None) for _ in range(3)]
    await asyncio.gather(
        ended_ms(waiters, looks[0], "queue"),
        ended_ms(waiters, looks[1], "queue", "another task"),
        ended_ms(waiters, looks[2], "queue", "task", "another task"),
    )
    assert [look.at for look in looks] == [[0], [0], [0, 1000]]


@pytest.mark.parametrize("with_loop", [True, False])
async def test_a_notification_in_another_thread_wakes_a_wait(with_loop: bool) -> None:
    waiters, looked = Waiters(), asyncio.Event()
    answers = iter([None, NOW])

    async def look(_: int) -> int | None:
        looked.set()
        return next(answers)

    waiting = asyncio.create_task(waiters.until_due((), look, now_ms=NOW, until_ms=NOW + MINUTE))
    await looked.wait()

    async def notify() -> None:
        waiters.notify()

    if with_loop:
        await asyncio.to_thread(asyncio.run, notify())
    else:
        await asyncio.to_thread(waiters.notify)
    async with asyncio.timeout(5):
        await waiting


async def test_a_wait_whose_loop_was_closed_is_forgotten() -> None:
    waiters = Waiters()
    abandoned: list[asyncio.Task[None]] = []

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        wait = waiters.until_due((), Look(None), now_ms=NOW, until_ms=NOW + MINUTE)
        abandoned.append(loop.create_task(wait))
        # It is meant to be.
        abandoned[0]._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.call_later(0.05, loop.stop)
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=abandon)
    thread.start()
    await asyncio.to_thread(thread.join)
    waiters.notify()
    assert not waiters.anyone


# --- Slack: jobs that can be claimed come together

SLACK = 20_000


async def with_slack(waiters: Waiters, look: Look, *, ms: int = MINUTE) -> int:
    loop = asyncio.get_running_loop()
    start = loop.time()
    await waiters.until_due((), look, now_ms=NOW, until_ms=NOW + ms, slack_ms=SLACK)
    return round((loop.time() - start) * 1000)


@in_virtual_time
async def test_with_slack_a_wait_lets_its_time_pass_by_that_much(waiters: Waiters) -> None:
    took = [await with_slack(waiters, Look(5_000)) for _ in range(20)]
    assert all(5_000 + SLACK - SPREAD_MS <= each <= 5_000 + SLACK for each in took)
    assert len(set(took)) > 1, "several handles would end at the same moment"


@in_virtual_time
async def test_and_goes_on_if_another_handle_has_taken_everything_by_then(
    waiters: Waiters,
) -> None:
    look = Look(5_000, 25_000)
    assert await with_slack(waiters, look) >= 25_000 + SLACK - SPREAD_MS
    assert len(look.at) == 3


@in_virtual_time
async def test_but_not_beyond_the_end_of_the_wait(waiters: Waiters) -> None:
    assert await with_slack(waiters, Look(5_000), ms=10_000) == 10_000
    assert await with_slack(waiters, Look(None), ms=10_000) == 10_000


@in_virtual_time
async def test_what_is_due_already_ends_it_at_once(waiters: Waiters) -> None:
    assert await with_slack(waiters, Look(-SLACK)) == 0


@in_virtual_time
async def test_with_slack_it_relies_longer_on_notifications_after_a_while(_: Waiters) -> None:
    class Often(Waiters):
        def patience_s(self, silent: int) -> float:
            return 1.0

    look = Look(None)
    await with_slack(Often(), look)
    gaps = [after - before for before, after in pairwise(look.at)]
    assert gaps[:CALM_AFTER] == [1_000] * CALM_AFTER
    assert gaps[CALM_AFTER] == int(CALM_S * 1000)


def test_there_is_slack_only_where_jobs_are_handed_out_long_before() -> None:
    assert [slack_of(ms) for ms in (0, 500, 1_000, 20_000)] == [0, 0, 0, 19_000]
