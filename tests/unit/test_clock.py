"""The store's time as a node knows it, whatever its own clock and the network do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from tickwheel.clock import JUMP_NS, MS_NS, S_NS, SAMPLES, LoopClock, StoreClock, SystemClock
from tickwheel.testing import run_virtual

EPOCH_NS = 1_800_000_000 * S_NS


class Machine:
    """A node's clock that moves only when it is told to; it may be wrong and it may be set."""

    def __init__(self, *, started_ns: int = 12_345, off_ns: int = 0) -> None:
        self.passed_ns = 0
        self.started_ns = started_ns
        self.off_ns = off_ns

    def now_ns(self) -> int:
        return EPOCH_NS + self.passed_ns + self.off_ns

    def monotonic_ns(self) -> int:
        return self.started_ns + self.passed_ns


class Server:
    """The store's clock behind a network: the question travels, and so does the answer."""

    def __init__(self, machine: Machine, travels: Sequence[tuple[int, int]] = ()) -> None:
        self.machine = machine
        self.travels = list(travels)

    @property
    def now_ns(self) -> int:
        return EPOCH_NS + self.machine.passed_ns

    async def time_ns(self) -> int:
        there_ns, back_ns = self.travels.pop(0) if self.travels else (0, 0)
        self.machine.passed_ns += there_ns
        answer_ns = self.now_ns
        self.machine.passed_ns += back_ns
        return answer_ns


TRAVEL = st.integers(0, 5 * S_NS) | st.integers(0, 3 * MS_NS)
TRAVELS = st.lists(st.tuples(TRAVEL, TRAVEL), min_size=SAMPLES, max_size=SAMPLES)
# Years off, to either side.
OFFSET = st.integers(-(10**17), 10**17)
PASSED = st.integers(0, 10**15)


@settings(deadline=None)
@given(travels=TRAVELS, off_ns=OFFSET, started_ns=PASSED, passed_ns=PASSED, set_ns=OFFSET)
def test_the_clock_is_never_ahead_of_the_store_and_late_by_the_quickest_answer(
    travels: list[tuple[int, int]], off_ns: int, started_ns: int, passed_ns: int, set_ns: int
) -> None:
    machine = Machine(started_ns=started_ns, off_ns=off_ns)
    server = Server(machine, travels)
    clock = StoreClock(machine)
    asyncio.run(clock.measure(server.time_ns))
    quickest_ns = min(back_ns for _, back_ns in travels)
    assert server.now_ns - clock.now_ns() == quickest_ns

    # Time passes, and somebody sets the node's clock: neither changes that.
    machine.passed_ns += passed_ns
    machine.off_ns = set_ns
    assert server.now_ns - clock.now_ns() == quickest_ns


@settings(deadline=None)
@given(first=TRAVELS, second=TRAVELS, passed_ns=PASSED)
def test_the_last_measurement_is_the_one_that_counts(
    first: list[tuple[int, int]], second: list[tuple[int, int]], passed_ns: int
) -> None:
    machine = Machine()
    server = Server(machine, [*first, *second])
    clock = StoreClock(machine)
    asyncio.run(clock.measure(server.time_ns))
    machine.passed_ns += passed_ns
    asyncio.run(clock.measure(server.time_ns))
    assert server.now_ns - clock.now_ns() == min(back_ns for _, back_ns in second)


@settings(deadline=None)
@given(PASSED)
def test_what_is_due_by_now_is_due_and_a_delay_is_never_short(passed_ns: int) -> None:
    machine = Machine()
    clock = StoreClock(machine)
    machine.passed_ns = passed_ns
    assert clock.now_ms() * MS_NS <= clock.now_ns() < (clock.now_ms() + 1) * MS_NS
    assert (clock.next_ms() - 1) * MS_NS < clock.now_ns() <= clock.next_ms() * MS_NS


async def test_until_the_first_measurement_the_own_clock_has_to_do() -> None:
    machine = Machine(off_ns=7 * S_NS)
    clock = StoreClock(machine)
    assert clock.now_ns() == machine.now_ns()
    assert clock.offset_ms == 0


@pytest.mark.parametrize("off_s", [-3600, 0, 3600])
async def test_the_offset_tells_how_far_the_node_is_behind_the_store(off_s: int) -> None:
    machine = Machine(off_ns=-off_s * S_NS)
    clock = StoreClock(machine)
    await clock.measure(Server(machine).time_ns)
    machine.passed_ns += 5 * S_NS
    assert clock.offset_ms == off_s * 1000


async def test_a_measurement_grows_stale_with_time() -> None:
    machine = Machine()
    clock = StoreClock(machine)
    await clock.measure(Server(machine).time_ns)
    assert not clock.stale(60)
    machine.passed_ns += 60 * S_NS
    assert not clock.stale(60)
    machine.passed_ns += 1
    assert clock.stale(60)
    await clock.measure(Server(machine).time_ns)
    assert not clock.stale(60)


@pytest.mark.parametrize("way", [-1, 1])
async def test_a_measurement_is_stale_once_the_clock_was_set(way: int) -> None:
    machine = Machine(off_ns=-3 * S_NS)
    clock = StoreClock(machine)
    await clock.measure(Server(machine).time_ns)
    # What a time service corrects bit by bit is no jump.
    machine.off_ns += way * JUMP_NS
    assert not clock.stale(60)
    machine.off_ns += way
    assert clock.stale(60)
    await clock.measure(Server(machine).time_ns)
    assert not clock.stale(60)


async def test_an_error_of_the_store_leaves_the_last_measurement_in_place() -> None:
    async def broken() -> int:
        raise ConnectionError

    machine = Machine(off_ns=S_NS)
    clock = StoreClock(machine)
    await clock.measure(Server(machine).time_ns)
    before_ns = clock.now_ns()
    with pytest.raises(ConnectionError):
        await clock.measure(broken)
    assert clock.now_ns() == before_ns


@pytest.mark.parametrize("way", [-1, 1])
def test_a_clock_that_is_the_store_s_own_is_followed_and_its_steps_are_told(way: int) -> None:
    machine = Machine(off_ns=5 * S_NS)
    clock = StoreClock(machine, own=True)
    heard: list[int] = []
    clock.on_step.append(heard.append)
    machine.passed_ns += S_NS
    assert clock.now_ns() == machine.now_ns()
    # Bit by bit: followed, and said once it has come to more than a time service corrects.
    machine.off_ns += way * JUMP_NS
    assert (clock.now_ns(), heard) == (machine.now_ns(), [])
    machine.off_ns += way * 3_600 * S_NS
    assert clock.now_ns() == machine.now_ns()
    assert heard == [way * (3_600_000 + JUMP_NS // 1_000_000)]
    clock.now_ns()
    assert len(heard) == 1
    assert not clock.stale(0)
    assert clock.offset_ms == 0


def test_the_clock_of_this_machine_counts_nanoseconds_and_goes_on() -> None:
    clock = SystemClock()
    # Some time after 2020 and before 2100: nanoseconds, not seconds or milliseconds.
    assert 1_577_836_800 * S_NS < clock.now_ns() < 4_102_444_800 * S_NS
    before_ns = clock.monotonic_ns()
    assert clock.monotonic_ns() >= before_ns


def test_virtual_time_goes_on_after_years() -> None:
    async def story() -> None:
        for _ in range(20):
            await asyncio.sleep(100 * 86_400)
            async with asyncio.timeout(1):
                for _ in range(100):
                    await asyncio.sleep(0.003)

    run_virtual(story())


def test_the_clock_of_the_loop_follows_virtual_time() -> None:
    async def story() -> None:
        clock = LoopClock(start_ns=EPOCH_NS)
        assert clock.now_ns() == EPOCH_NS
        await asyncio.sleep(3600)
        assert clock.now_ns() == EPOCH_NS + 3600 * S_NS
        assert clock.monotonic_ns() == 3600 * S_NS

    run_virtual(story())
