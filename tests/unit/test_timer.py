"""`tickwheel.Timer` in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from tickwheel import Timer
from tickwheel.testing import run_virtual


def test_callbacks_come_on_time_in_order_and_never_early() -> None:
    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        called: list[tuple[str, float]] = []

        def note(name: str) -> None:
            called.append((name, loop.time()))

        timer.call_later(30, note, "c")
        timer.call_later(0.0101, note, "b")
        timer.call_at(loop.time() - 5, note, "past")
        timer.call_later(0, note, "a")
        timer.call_later(3600, note, "d")
        assert len(timer) == 5
        await asyncio.sleep(4000)
        assert [name for name, _ in called] == ["past", "a", "b", "c", "d"]
        for (_, at), due in zip(called, (0, 0, 0.0101, 30, 3600), strict=True):
            assert due <= at <= due + 0.0011
        assert len(timer) == 0

    run_virtual(story())


def test_a_cancelled_callback_is_not_called() -> None:
    async def story() -> None:
        timer = Timer()
        called: list[int] = []
        handle, other = timer.call_later(1, called.append, 1), timer.call_later(2, called.append, 2)
        assert handle.cancel() is True
        assert handle.cancel() is False
        assert timer.cancel(other) is True
        await asyncio.sleep(5)
        third = timer.call_later(1, called.append, 3)
        await asyncio.sleep(5)
        assert third.cancel() is False
        assert called == [3]

    run_virtual(story())


def test_one_callback_may_cancel_another_of_the_same_moment() -> None:
    async def story() -> None:
        timer = Timer()
        called: list[str] = []

        def first() -> None:
            called.append("first")
            second.cancel()

        timer.call_later(1, first)
        second = timer.call_later(1, called.append, "second")
        await asyncio.sleep(2)
        assert called == ["first"]

    run_virtual(story())


def test_a_nearer_timer_wakes_before_one_that_was_there() -> None:
    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        at: list[float] = []
        timer.call_later(100, lambda: at.append(loop.time()))
        await asyncio.sleep(10)
        timer.call_later(1, lambda: at.append(loop.time()))
        await asyncio.sleep(200)
        assert at == [pytest.approx(11, abs=0.002), pytest.approx(100, abs=0.002)]

    run_virtual(story())


def test_the_fault_of_one_callback_does_not_stop_the_others() -> None:
    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        faults: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: faults.append(context))
        called: list[int] = []
        timer.call_later(1, lambda: 1 / 0)
        timer.call_later(1, called.append, 1)
        timer.call_later(2, called.append, 2)
        await asyncio.sleep(3)
        assert called == [1, 2]
        assert isinstance(faults[0]["exception"], ZeroDivisionError)

    run_virtual(story())


def test_a_herd_lets_the_loop_breathe() -> None:
    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        order: list[str] = []
        timer.call_later(1, lambda: loop.call_soon(order.append, "other work"))
        for _ in range(5_000):
            timer.call_later(1, order.append, "herd")
        await asyncio.sleep(2)
        assert order.count("herd") == 5_000
        assert order.index("other work") < 4_000

    run_virtual(story())


def test_closing_forgets_everything() -> None:
    async def story() -> None:
        called: list[int] = []
        with Timer() as timer:
            timer.call_later(1, called.append, 1)
        assert len(timer) == 0
        await asyncio.sleep(2)
        assert called == []

    run_virtual(story())


@pytest.mark.parametrize("delay", [-1, -0.001, math.nan, math.inf])
def test_a_delay_that_is_none_is_refused(delay: float) -> None:
    async def story() -> None:
        with pytest.raises(ValueError, match="a delay is a number of seconds"):
            Timer().call_later(delay, print)

    run_virtual(story())


@pytest.mark.parametrize(
    "call",
    [
        lambda timer: timer.call_later(1, None),
        lambda timer: timer.call_at(math.nan, print),
    ],
)
def test_what_cannot_be_called_or_is_no_time_is_refused(call: Callable[[Timer], object]) -> None:
    async def story() -> None:
        with pytest.raises((TypeError, ValueError)):
            call(Timer())

    run_virtual(story())
