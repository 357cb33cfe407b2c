"""Objectives for punctuality: how they are written, and when they are missed."""

from __future__ import annotations

import pytest

from tickwheel import BadConfig
from tickwheel.objective import Objective, Tally, misses, parse_objective


@pytest.mark.parametrize(
    "text, ratio, within_ms",
    [
        ("99% within 100ms", 0.99, 100),
        ("99.9% within 1s", 0.999, 1_000),
        (" 50 %  within 1m 30s ", 0.5, 90_000),
        ("99.999% within 2.5s", 0.99999, 2_500),
    ],
)
def test_an_objective_is_read(text: str, ratio: float, within_ms: int) -> None:
    assert parse_objective(text) == Objective(ratio, within_ms)


@pytest.mark.parametrize(
    "text", ["99% within 100ms", "99.9% within 1s", "50% within 2m", "0.5% within 1m 1s"]
)
def test_an_objective_reads_what_it_says(text: str) -> None:
    assert str(parse_objective(text)) == text


@pytest.mark.parametrize(
    "text, problem",
    [
        ("99 within 100ms", "write it as in '99% within 100ms'"),
        ("within 100ms", "write it as in"),
        ("99%", "write it as in"),
        ("", "write it as in"),
        (0.99, "write it as in"),
        (None, "write it as in"),
        ("٩٩% within 1s", "write it as in"),
        ("100% within 1s", "less than 100%"),
        ("0% within 1s", "more than 0%"),
        ("101% within 1s", "less than 100%"),
        ("99% within soon", "'soon' is not a duration"),
        ("99% within 0ms", "at least 1ms"),
        ("99% within 11w 9999d", "more than 10 years"),
        ("9" * 10_000 + "% within 1s", "write it as in"),
    ],
)
def test_what_is_wrong_is_said(text: object, problem: str) -> None:
    with pytest.raises(BadConfig, match=r"^objective=") as caught:
        parse_objective(text)
    assert problem in str(caught.value) and len(str(caught.value)) < 300


NINES = Objective(0.99, 100)


def test_an_objective_is_missed_if_both_windows_burn() -> None:
    assert misses(NINES, Tally(100, 85), Tally(1_000, 850))
    assert not misses(NINES, Tally(100, 86), Tally(1_000, 850))
    assert not misses(NINES, Tally(100, 85), Tally(1_000, 860))


def test_a_few_runs_say_nothing() -> None:
    assert not misses(NINES, Tally(9, 0), Tally(9, 0))
    assert misses(NINES, Tally(1, 0), Tally(10, 0))
    assert not misses(NINES, Tally(), Tally(10, 0))


def test_a_lenient_objective_can_be_missed_too() -> None:
    half = Objective(0.5, 100)
    assert misses(half, Tally(100, 25), Tally(100, 25))
    assert not misses(half, Tally(100, 26), Tally(100, 26))
