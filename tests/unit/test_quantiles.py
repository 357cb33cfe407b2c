"""Quantiles and shares from buckets."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, strategies as st

from tickwheel.engine.counts import BOUNDS_MS
from tickwheel.operate.quantiles import quantile, share_within

BOUNDS = (10, 20, 50)
values = st.lists(st.integers(0, BOUNDS_MS[-1]), min_size=1, max_size=200)


def counted(found: list[int]) -> list[int]:
    buckets = [0] * (len(BOUNDS_MS) + 1)
    for value in found:
        buckets[bisect_left(BOUNDS_MS, value)] += 1
    return buckets


def test_nothing_has_no_quantile_and_no_share() -> None:
    assert quantile(BOUNDS, (), 0.5) is None
    assert quantile(BOUNDS, (0, 0, 0, 0), 0.5) is None
    assert share_within(BOUNDS, (), 10) is None


def test_values_are_spread_evenly_within_a_bucket() -> None:
    assert quantile(BOUNDS, (4,), 0.5) == 5
    assert quantile(BOUNDS, (5, 5), 0.75) == 15
    assert quantile(BOUNDS, (0, 0, 10), 0.99) == pytest.approx(49.7)
    assert share_within(BOUNDS, (2, 2), 15) == 0.75


def test_what_is_above_the_last_bound_counts_as_that_bound() -> None:
    assert quantile(BOUNDS, (1, 0, 0, 9), 0.99) == 50
    assert share_within(BOUNDS, (1, 0, 0, 9), 1_000) == 0.1


@given(values, st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_in_the_bucket_of_the_true_one(found: list[int], share: float) -> None:
    buckets = counted(found)
    guess = quantile(BOUNDS_MS, buckets, share)
    assert guess is not None
    ordered = sorted(found)
    wanted = share * len(ordered)
    rank = int(wanted) if wanted == int(wanted) else int(wanted) + 1
    true = ordered[max(rank, 1) - 1]
    bucket = bisect_left(BOUNDS_MS, true)
    lower = BOUNDS_MS[bucket - 1] if bucket else 0
    assert lower - 0.001 <= guess <= BOUNDS_MS[bucket] + 0.001


@given(values, st.sampled_from(BOUNDS_MS))
def test_the_share_within_a_bound_is_exact(found: list[int], bound: int) -> None:
    true = sum(value <= bound for value in found) / len(found)
    assert share_within(BOUNDS_MS, counted(found), bound) == pytest.approx(true)
