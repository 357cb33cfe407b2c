"""The wheel against a plain dict, and the promises that a dict doesn't make."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tickwheel.wheel import TimingWheel

# Few keys, so that they are added again and removed; very few near times, so that many are equal
# and slots are shared and opened again; far ones, so that slots are empty for years.
KEYS = st.integers(0, 9)
DELAYS = st.one_of(st.sampled_from([-20, 0, 5, 40]), st.integers(-40, 40), st.integers(0, 2**37))
STEPS = st.one_of(st.sampled_from([0, 5, -5]), st.integers(-50, 100), st.integers(0, 2**37))


class Wheel(RuleBasedStateMachine):
    """`next_ms` is a rule, not an invariant: it opens slots, and both kinds must be met. Without
    slack, so that a few leftovers are enough for a sweep."""

    def __init__(self) -> None:
        super().__init__()
        self.no_slack = mock.patch("tickwheel.wheel.SLACK", 0)
        self.no_slack.start()
        self.wheel: TimingWheel[int] = TimingWheel(width_ms=16)
        # Key: when it is due, and the how-many-th add that was.
        self.model: dict[int, tuple[int, int]] = {}
        self.adds = itertools.count()
        self.now = 1_000_000

    @rule(key=KEYS, delay=DELAYS)
    def add(self, key: int, delay: int) -> None:
        self.wheel.add(key, self.now + delay)
        self.model[key] = (self.now + delay, next(self.adds))

    @rule(key=KEYS)
    def remove_and_add_at_the_same_time(self, key: int) -> None:
        if key in self.model:
            due, _ = self.model[key]
            assert self.wheel.remove(key)
            self.wheel.add(key, due)
            self.model[key] = (due, next(self.adds))

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.wheel.remove(key) == (self.model.pop(key, None) is not None)

    @rule(step=STEPS, limit=st.one_of(st.just(100), st.integers(0, 3)))
    def advance(self, step: int, limit: int) -> None:
        self.now += step
        due = sorted((at, key) for key, at in self.model.items() if at[0] <= self.now)[:limit]
        assert self.wheel.advance(self.now, limit) == [key for _, key in due]
        for _, key in due:
            del self.model[key]

    @rule()
    def next(self) -> None:
        assert self.wheel.next_ms() == min((due for due, _ in self.model.values()), default=None)

    @rule(offset=st.integers(-100, 100), width=st.integers(1, 100), count=st.integers(0, 9))
    def slots(self, offset: int, width: int, count: int) -> None:
        start = self.now + offset
        expected = [
            sum(
                (slot == 0 or start + slot * width <= due) and due < start + (slot + 1) * width
                for due, _ in self.model.values()
            )
            for slot in range(count)
        ]
        assert self.wheel.slots(start, width, count) == expected

    @invariant()
    def holds_the_same_keys(self) -> None:
        assert len(self.wheel) == len(self.model)
        assert all((key in self.wheel) == (key in self.model) for key in range(10))

    def teardown(self) -> None:
        self.now += 2**38
        self.advance(0, 100)
        self.holds_the_same_keys()
        self.no_slack.stop()


TestWheel = Wheel.TestCase
TestWheel.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)


def test_an_empty_wheel_has_nothing_to_say() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    assert (len(wheel), wheel.next_ms(), wheel.advance(10**15)) == (0, None, [])
    assert wheel.remove("nobody") is False
    assert wheel.slots(0, 1000, 3) == [0, 0, 0]


def test_a_slot_without_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width_ms=0: must be at least 1"):
        TimingWheel(width_ms=0)


def test_keys_come_earliest_first_and_equals_as_they_were_added() -> None:
    wheel: TimingWheel[str] = TimingWheel(width_ms=100)
    for key, due in [("d", 230), ("a", 7), ("b", 205), ("c", 205), ("e", 1015)]:
        wheel.add(key, due)
    assert wheel.next_ms() == 7
    assert wheel.advance(230) == ["a", "b", "c", "d"]
    assert wheel.next_ms() == 1015


def test_a_key_added_again_moves_behind_its_equals() -> None:
    for opened in (False, True):
        wheel: TimingWheel[str] = TimingWheel()
        wheel.add("a", 100)
        wheel.add("b", 100)
        if opened:
            wheel.next_ms()
        wheel.add("a", 100)
        assert wheel.advance(100) == ["b", "a"]


def test_equals_keep_their_order_through_a_sweep() -> None:
    for opened in (False, True):
        wheel: TimingWheel[int] = TimingWheel()
        for key in range(200):
            wheel.add(key, 100)
        if opened:
            wheel.next_ms()
        for key in list(range(150)) * 4:
            wheel.add(key, 100)
        assert wheel.advance(100) == [*range(150, 200), *range(150)]


def test_a_key_added_in_the_past_comes_at_the_next_advance() -> None:
    wheel: TimingWheel[str] = TimingWheel(width_ms=10)
    wheel.add("first", 5_000)
    assert wheel.advance(5_000) == ["first"]
    wheel.add("late", 5_000)
    wheel.add("very late", -3)
    assert wheel.next_ms() == -3
    assert wheel.advance(5_000) == ["very late", "late"]


def test_a_limit_leaves_the_rest_in_the_wheel() -> None:
    wheel: TimingWheel[int] = TimingWheel()
    for key in range(5):
        wheel.add(key, 100)
    assert wheel.advance(100, limit=2) == [0, 1]
    assert wheel.remove(2) and wheel.next_ms() == 100
    assert wheel.advance(100) == [3, 4]


def _time_outs_far_away(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn, turn + 30_000)
    wheel.remove(turn)


def _each_in_a_slot_of_its_own(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn, turn * 5_000)
    wheel.remove(turn)


def _one_key_again_and_again(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(1, 100_000 + turn % 3)


def _two_keys_further_and_further(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn % 2, turn * 5_000)


def _in_the_open_slot(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn, turn % 400)
    wheel.next_ms()
    wheel.remove(turn)


def _the_same_entry_in_the_open_slot(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(1, 400)
    wheel.add(2, 300)
    wheel.next_ms()
    wheel.remove(1)


def _nearer_and_nearer(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn, -turn * 5_000)
    wheel.next_ms()
    wheel.remove(turn)


def _as_time_goes_by(wheel: TimingWheel[int], turn: int) -> None:
    wheel.add(turn, turn * 700)
    wheel.advance(turn * 700)


@pytest.mark.parametrize("others", [0, 100])
@pytest.mark.parametrize(
    "use",
    [
        _time_outs_far_away,
        _each_in_a_slot_of_its_own,
        _one_key_again_and_again,
        _two_keys_further_and_further,
        _in_the_open_slot,
        _the_same_entry_in_the_open_slot,
        _nearer_and_nearer,
        _as_time_goes_by,
    ],
)
def test_use_without_end_takes_no_more_memory(
    use: Callable[[TimingWheel[int], int], None], others: int
) -> None:
    wheel: TimingWheel[int] = TimingWheel()
    for other in range(others):
        wheel.add(-1 - other, 10**12 + other * 50)
    for turn in range(1_000):
        use(wheel, turn)
    tracemalloc.start()
    for turn in range(1_000, 11_000):
        use(wheel, turn)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Ten bytes a turn: one pointer kept from each would be found.
    assert grown < 80_000
