"""The token bucket that is one number, against a bucket that counts its tokens."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings, strategies as st

from tickwheel.limit import Rate, admit

START_MS = 1_800_000_000_000


class Bucket:
    """A bucket under `admit`: remembers the mark, and when a token was taken."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.mark: int | None = None
        self.taken_ms: list[int] = []

    def ask(self, now_ms: int) -> int:
        self.mark, wait_ms = admit(self.mark, self.rate, now_ms)
        if wait_ms == 0:
            self.taken_ms.append(now_ms)
        return wait_ms

    def would_wait(self, now_ms: int) -> int:
        """What asking would answer, without asking."""
        return admit(self.mark, self.rate, now_ms)[1]


class Tokens:
    """The model: a level that fills with time and is exact, because it is a fraction."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.level = Fraction(rate.burst)
        self.seen_ms: int | None = None

    def ask(self, now_ms: int) -> bool:
        passed_ms = now_ms - (now_ms if self.seen_ms is None else self.seen_ms)
        filled = self.level + Fraction(passed_ms * self.rate.limit, self.rate.period_ms)
        self.level, self.seen_ms = min(filled, Fraction(self.rate.burst)), now_ms
        if self.level < 1:
            return False
        self.level -= 1
        return True


def most_over(bucket: Bucket) -> Fraction:
    """By how much any run of calls exceeded the rate and the burst; 0 or less is right."""
    rate, taken = bucket.rate, list(enumerate(bucket.taken_ms, 1))
    return max(
        (
            (j - i + 1) - rate.burst - Fraction((to - since) * rate.limit, rate.period_ms)
            for (i, since), (j, to) in combinations(taken, 2)
        ),
        default=Fraction(0),
    )


# Rates whose tokens are a whole number of microseconds apart.
RATES = st.builds(
    lambda limit, times, burst: Rate(limit, limit * times, burst),
    st.integers(1, 50),
    st.integers(1, 2_000),
    st.integers(1, 10),
) | st.sampled_from([Rate(1, 1000), Rate(100, 1000, 10), Rate(5, 60_000, 5), Rate(4, 1, 3)])
PAUSES = st.lists(st.integers(0, 5) | st.integers(0, 5_000), min_size=1, max_size=40)


# --- By example


def test_the_first_call_goes_and_the_next_waits_its_turn() -> None:
    bucket = Bucket(Rate(10, 1000))
    assert [bucket.ask(START_MS + ms) for ms in (0, 0, 30, 99, 100, 100)] == [0, 100, 70, 1, 0, 100]


def test_a_burst_goes_at_once_and_is_paid_back() -> None:
    bucket = Bucket(Rate(10, 1000, burst=3))
    assert [bucket.ask(START_MS) for _ in range(4)] == [0, 0, 0, 100]
    assert [bucket.ask(START_MS + 250) for _ in range(3)] == [0, 0, 50]
    # After a long rest the burst is whole again, and not more than that.
    assert [bucket.ask(START_MS + 60_000) for _ in range(4)] == [0, 0, 0, 100]


def test_asking_in_vain_costs_nothing() -> None:
    patient, eager = Bucket(Rate(1, 1000)), Bucket(Rate(1, 1000))
    patient.ask(START_MS)
    eager.ask(START_MS)
    assert [eager.ask(START_MS + ms) for ms in range(0, 1000, 100)] == list(range(1000, 0, -100))
    assert eager.mark == patient.mark
    assert eager.ask(START_MS + 1000) == 0


def test_a_part_of_a_millisecond_is_waited_out() -> None:
    bucket = Bucket(Rate(4, 1))
    bucket.ask(START_MS)
    assert bucket.ask(START_MS) == 1
    assert bucket.ask(START_MS + 1) == 0


def test_a_clock_that_goes_back_gives_no_more_tokens() -> None:
    bucket = Bucket(Rate(1, 1000))
    assert bucket.ask(START_MS) == 0
    assert bucket.ask(START_MS - 500) == 1500


# --- Against the model


@settings(deadline=None)
@given(RATES, PAUSES)
def test_a_call_goes_exactly_when_the_bucket_has_a_token(rate: Rate, pauses: list[int]) -> None:
    bucket, tokens, now_ms = Bucket(rate), Tokens(rate), START_MS
    for pause in pauses:
        now_ms += pause
        assert (bucket.ask(now_ms) == 0) == tokens.ask(now_ms)


@settings(deadline=None)
@given(RATES, PAUSES)
def test_asking_again_after_the_told_wait_succeeds_and_no_earlier(
    rate: Rate, pauses: list[int]
) -> None:
    bucket, now_ms = Bucket(rate), START_MS
    for pause in pauses:
        now_ms += pause
        wait_ms = bucket.ask(now_ms)
        if wait_ms > 0:
            assert bucket.would_wait(now_ms + wait_ms - 1) == 1
            now_ms += wait_ms
            assert bucket.ask(now_ms) == 0


@settings(deadline=None)
@given(RATES, PAUSES, st.booleans())
def test_no_run_of_calls_exceeds_the_rate(rate: Rate, pauses: list[int], obedient: bool) -> None:
    bucket, now_ms = Bucket(rate), START_MS
    for pause in pauses:
        now_ms += pause
        wait_ms = bucket.ask(now_ms)
        if wait_ms and obedient:
            now_ms += wait_ms
            bucket.ask(now_ms)
    assert most_over(bucket) <= 0


@pytest.mark.parametrize(
    ("rate", "for_ms"),
    [(Rate(3, 1, 10), 1100), (Rate(300_000, 1000, 400), 30), (Rate(2_000_000, 1000, 9), 3)],
    ids=str,
)
def test_a_rate_that_does_not_divide_its_period_is_kept_too(rate: Rate, for_ms: int) -> None:
    bucket = Bucket(rate)
    for ms in range(for_ms):
        for _ in range(2 * rate.limit // rate.period_ms):
            bucket.ask(START_MS + ms)
    took_ms = bucket.taken_ms[-1] - bucket.taken_ms[0]
    assert len(bucket.taken_ms) <= rate.burst + Fraction(took_ms * rate.limit, rate.period_ms)
