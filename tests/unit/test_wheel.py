"""The wheel against a plain dict, and the promises that a dict doesn't make."""

from __future__ import annotations

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tickwheel.wheel import TimingWheel

# Few keys, so that they are added again and removed; near times, so that slots are shared and
# re-opened; far ones, so that slots are empty for years.
KEYS = st.integers(0, 12)
DELAYS = st.one_of(st.integers(0, 40), st.integers(0, 2_000), st.integers(0, 2**37))


class Wheel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wheel: TimingWheel[int] = TimingWheel(width_ms=16)
        self.model: dict[int, int] = {}
        self.now = 1_000_000

    @rule(key=KEYS, delay=DELAYS)
    def add(self, key: int, delay: int) -> None:
        self.wheel.add(key, self.now + delay)
        self.model[key] = self.now + delay

    @rule(key=KEYS, late=st.integers(1, 2_000))
    def add_in_the_past(self, key: int, late: int) -> None:
        self.wheel.add(key, self.now - late)
        self.model[key] = self.now - late

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        assert self.wheel.remove(key) == (self.model.pop(key, None) is not None)

    @rule(step=st.one_of(st.integers(-50, 50), st.integers(0, 3_000), st.integers(0, 2**37)))
    def advance(self, step: int) -> None:
        self.now += step
        fallen = self.wheel.advance(self.now)
        due = {key: ms for key, ms in self.model.items() if ms <= self.now}
        assert sorted(fallen) == sorted(due)
        assert [due[key] for key in fallen] == sorted(due.values())
        for key in fallen:
            del self.model[key]

    @rule(width=st.integers(1, 5_000), count=st.integers(1, 10))
    def draw(self, width: int, count: int) -> None:
        expected = [0] * count
        for ms in self.model.values():
            slot = max((ms - self.now) // width, 0)
            if slot < count:
                expected[slot] += 1
        assert self.wheel.slots(self.now, width, count) == expected

    @invariant()
    def same(self) -> None:
        assert len(self.wheel) == len(self.model)
        assert self.wheel.next_ms() == min(self.model.values(), default=None)
        assert all(key in self.wheel for key in self.model)


TestWheel = Wheel.TestCase
TestWheel.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@given(st.lists(st.integers(0, 300), max_size=60))
def test_keys_due_at_the_same_time_come_in_the_order_they_were_added(dues: list[int]) -> None:
    wheel: TimingWheel[int] = TimingWheel(width_ms=64)
    for key, due in enumerate(dues):
        wheel.add(key, due)
        wheel.next_ms()  # opens the first slot, so that later ones are added to an open one
    assert wheel.advance(1_000) == sorted(range(len(dues)), key=lambda key: (dues[key], key))


def test_an_empty_wheel_has_nothing_to_say() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    assert (len(wheel), wheel.next_ms(), wheel.advance(10**15)) == (0, None, [])
    assert wheel.remove("nobody") is False
    assert wheel.slots(0, 1000, 3) == [0, 0, 0]


def test_a_key_added_again_moves() -> None:
    wheel: TimingWheel[str] = TimingWheel()
    wheel.add("a", 100)
    wheel.add("a", 900_000)
    assert wheel.advance(1_000) == []
    wheel.add("a", 2_000)
    assert wheel.advance(2_000) == ["a"]
    assert wheel.advance(10**9) == []


def test_adding_and_removing_forever_takes_no_more_memory() -> None:
    wheel: TimingWheel[int] = TimingWheel()

    def connections(count: int) -> None:
        """Time-outs as a busy server sets them: 30 s away, almost all of them cancelled."""
        for key in range(count):
            wheel.add(key, key // 100 + 30_000)
            wheel.remove(key)

    connections(50_000)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    connections(300_000)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Ten thousand leftovers may stand until the next sweep; three hundred thousand may not.
    assert after - before < 2_000_000
    assert len(wheel) == 0
