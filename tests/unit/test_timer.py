"""`tickwheel.Timer` in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tickwheel import Timer
from tickwheel.testing import VirtualLoop, run_virtual

Story = Callable[[], Awaitable[None]]


def in_virtual_time(story: Story) -> Callable[[], None]:
    def test() -> None:
        async def main() -> None:
            await story()

        run_virtual(main())

    return test


@in_virtual_time
async def test_callbacks_come_in_order_and_on_time() -> None:
    loop, timer = asyncio.get_running_loop(), Timer()
    called: list[tuple[str, float]] = []

    def note(name: str) -> None:
        called.append((name, loop.time()))

    timer.call_later(30, note, "c")
    timer.call_later(0.0101, note, "b")
    timer.call_at(-5, note, "past")
    timer.call_later(0, note, "a")
    timer.call_later(3600, note, "d")
    assert len(timer) == 5
    await asyncio.sleep(4000)
    assert called == [("past", 0), ("a", 0), ("b", 0.011), ("c", 30), ("d", 3600)]
    assert len(timer) == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.floats(0, 4), st.integers(0, 4000).map(lambda ms: ms / 1000))))
def test_none_is_early_or_more_than_a_millisecond_late(times: list[float]) -> None:
    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer(width_ms=100)
        called: list[tuple[float, float]] = []
        for when in times:
            timer.call_at(when, lambda when=when: called.append((when, loop.time())))
        await asyncio.sleep(5)
        assert len(called) == len(times)
        assert all(when <= at <= when + 0.001001 for when, at in called)

    run_virtual(story())


@pytest.mark.timeout(10)
@pytest.mark.parametrize("ms", [1001, 1003, 2007, 2011])
def test_a_time_whose_milliseconds_are_rounded_is_met(ms: int) -> None:
    """n / 1000 * 1000 is below 1001 and 1003, and above 2007 and 2011."""

    async def story() -> None:
        loop, timer = asyncio.get_running_loop(), Timer()
        called: list[float] = []
        timer.call_at(ms / 1000, lambda: called.append(loop.time()))
        await asyncio.sleep(3)
        assert called == [ms / 1000]

    run_virtual(story())


@in_virtual_time
async def test_none_is_early_after_the_loop_was_held_up() -> None:
    loop, timer = asyncio.get_running_loop(), Timer()
    called: list[tuple[float, bool]] = []
    time = loop.time

    def hold_up() -> None:
        loop.time = lambda: time() + 0.5006  # type: ignore[method-assign]

    timer.call_at(1, hold_up)
    for when in (1.2, 1.5, 1.501):
        timer.call_at(when, lambda when=when: called.append((when, loop.time() >= when)))
    await asyncio.sleep(2)
    assert called == [(1.2, True), (1.5, True), (1.501, True)]


@in_virtual_time
async def test_a_cancelled_callback_is_not_called() -> None:
    timer = Timer()
    called: list[int] = []
    handle, other = timer.call_later(1, called.append, 1), timer.call_later(2, called.append, 2)
    assert handle.cancel() is True
    assert handle.cancel() is False
    assert timer.cancel(other) is True
    assert len(timer) == 0
    await asyncio.sleep(5)
    third = timer.call_later(1, called.append, 3)
    await asyncio.sleep(5)
    assert third.cancel() is False
    assert called == [3]


@in_virtual_time
async def test_one_callback_may_cancel_another_of_the_same_moment() -> None:
    timer = Timer()
    called: list[str] = []
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    timer.call_later(1, lambda: called.append(f"first {second.cancel()} {second.cancel()}"))
    second = timer.call_later(1, called.append, "second")
    await asyncio.sleep(2)
    assert called == ["first True False"]
    assert faults == []


@in_virtual_time
async def test_another_timers_handle_is_refused() -> None:
    timer, called = Timer(), list[int]()
    handle = timer.call_later(1, called.append, 1)
    with pytest.raises(ValueError, match="another timer"):
        Timer().cancel(handle)
    await asyncio.sleep(2)
    assert called == [1]


class Alarms:
    """What the loop's own timers are set for, from here on."""

    def __init__(self) -> None:
        self._call_at = asyncio.get_running_loop().call_at
        self.set: list[asyncio.TimerHandle] = []
        asyncio.get_running_loop().call_at = self  # type: ignore[assignment]

    def __call__(self, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.set.append(self._call_at(*args, **options))
        return self.set[-1]


@in_virtual_time
async def test_only_a_nearer_timer_sets_the_alarm_again() -> None:
    loop, timer, alarms = asyncio.get_running_loop(), Timer(), Alarms()
    called: list[float] = []
    for when in (100, 200, 50, 70):
        timer.call_at(when, lambda: called.append(loop.time()))
    timer.call_at(300, print).cancel()
    assert [(each.when(), each.cancelled()) for each in alarms.set] == [(100, True), (50, False)]
    await asyncio.sleep(400)
    assert called == [50, 70, 100, 200]


@in_virtual_time
async def test_callbacks_that_add_set_the_alarm_once() -> None:
    timer = Timer()

    def add_nearer_and_nearer() -> None:
        for delay in (30, 20, 10):
            timer.call_later(delay, print)

    timer.call_later(1, add_nearer_and_nearer)
    alarms = Alarms()
    await asyncio.sleep(5)
    assert [each.when() for each in alarms.set] == [5, 11]  # 5 is our own sleep


@in_virtual_time
async def test_a_callback_may_add_others() -> None:
    loop, timer = asyncio.get_running_loop(), Timer()
    called: list[float] = []

    def again() -> None:
        called.append(loop.time())
        if len(called) < 4:
            timer.call_later(0, called.append, -1)
            timer.call_later(10, again)

    timer.call_later(10, again)
    await asyncio.sleep(100)
    assert called == [10, -1, 20, -1, 30]


@in_virtual_time
async def test_the_fault_of_one_callback_does_not_stop_the_others() -> None:
    loop, timer = asyncio.get_running_loop(), Timer()
    faults: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    called: list[int] = []
    timer.call_later(1, lambda: 1 / 0)
    timer.call_later(1, called.append, 1)
    timer.call_later(2, called.append, 2)
    await asyncio.sleep(3)
    assert called == [1, 2]
    [fault] = faults
    assert isinstance(fault["exception"], ZeroDivisionError)
    assert "a timer's callback failed" in fault["message"]


def test_an_interrupt_gets_through_and_loses_no_other_callback() -> None:
    called: list[int] = []
    timers: list[Timer] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    async def begin() -> None:
        timers.append(Timer())
        timers[0].call_later(1, interrupt)
        timers[0].call_later(1, called.append, 1)
        timers[0].call_later(2, called.append, 2)
        await asyncio.sleep(10)

    loop = VirtualLoop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(begin())
    loop.run_until_complete(asyncio.sleep(10))
    for task in asyncio.all_tasks(loop):
        loop.run_until_complete(task)
    loop.close()
    assert called == [1, 2]


@in_virtual_time
async def test_a_herd_lets_the_loop_breathe() -> None:
    loop, timer = asyncio.get_running_loop(), Timer()
    order: list[str] = []
    timer.call_later(1, lambda: loop.call_soon(order.append, "other work"))
    handles = [timer.call_later(1, order.append, "herd") for _ in range(5_000)]
    await asyncio.sleep(1)
    assert order.count("herd") < 2_000  # this task too gets its turn in between
    assert handles[-1].cancel() is True
    assert loop.time() == 1
    await asyncio.sleep(0.001)
    assert order.count("herd") == 4_999
    assert order.index("other work") < 1_001


@in_virtual_time
async def test_closing_forgets_everything() -> None:
    called: list[int] = []
    with Timer() as timer:
        timer.call_later(1, called.append, 1)
    assert len(timer) == 0
    await asyncio.sleep(2)
    assert called == []
    with pytest.raises(RuntimeError, match="closed"):
        timer.call_later(1, called.append, 1)


@in_virtual_time
async def test_a_callback_may_close_the_timer() -> None:
    timer, called = Timer(), list[int]()
    timer.call_later(1, timer.close)
    timer.call_later(1, called.append, 1)
    timer.call_later(2, called.append, 2)
    await asyncio.sleep(5)
    assert called == []
    assert len(timer) == 0


@in_virtual_time
async def test_callbacks_run_in_the_context_the_timer_was_made_in() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    seen: list[str] = []
    timer = Timer()
    name.set("a task that happened to add one")
    timer.call_later(1, lambda: seen.append(name.get()))
    await asyncio.sleep(2)
    assert seen == ["nobody"]


@pytest.mark.parametrize("delay", [-1, -0.001, math.nan, math.inf, -math.inf, 1e308])
def test_a_delay_that_is_none_is_refused(delay: float) -> None:
    async def story() -> None:
        timer = Timer()
        with pytest.raises(ValueError, match="a delay must be a finite number of at least 0"):
            timer.call_later(delay, print)
        assert len(timer) == 0

    run_virtual(story())


@pytest.mark.parametrize("when", [math.nan, math.inf, -math.inf, 1e308])
def test_a_time_that_is_none_is_refused(when: float) -> None:
    async def story() -> None:
        timer = Timer()
        with pytest.raises(ValueError, match="a time must be a finite number"):
            timer.call_at(when, print)
        assert len(timer) == 0

    run_virtual(story())


@in_virtual_time
async def test_what_is_of_another_type_is_refused() -> None:
    timer: Any = Timer()
    for number, callback in [(1, None), (1, "print"), ("1", print), (None, print)]:
        with pytest.raises(TypeError):
            timer.call_later(number, callback)
        with pytest.raises(TypeError):
            timer.call_at(number, callback)
    assert len(timer) == 0


def test_a_timer_is_made_on_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        Timer()
