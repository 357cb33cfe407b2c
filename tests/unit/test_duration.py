"""Lengths of time and due times as people write them."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tickwheel.duration import FARTHEST_MS, Duration, due_ms, duration_ms, duration_text, moment
from tickwheel.errors import BadTime, UsageError
from tickwheel.job import Priority

MS = timedelta(milliseconds=1)
UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


# --- Lengths of time


@pytest.mark.parametrize(
    ("duration", "ms"),
    [
        ("250ms", 250),
        ("90s", 90_000),
        ("30m", 1_800_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1w", 604_800_000),
        ("0s", 0),
        ("1.5h", 5_400_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("30m1h", 5_400_000),
        (" 5 m ", 300_000),
        ("1w2d3h4m5s6ms", 788_645_006),
        (0, 0),
        (90, 90_000),
        (0.25, 250),
        (timedelta(0), 0),
        (timedelta(hours=2, milliseconds=1), 7_200_001),
    ],
)
def test_a_span_is_written_as_text_seconds_or_timedelta(duration: Duration, ms: int) -> None:
    assert duration_ms(duration) == ms


@pytest.mark.parametrize(
    ("duration", "ms"),
    [
        (0.0001, 1),
        (1.0001, 1001),
        ("0.1ms", 1),
        ("1.2345s", 1235),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=1001), 2),
    ],
)
def test_a_part_of_a_millisecond_is_rounded_up(duration: Duration, ms: int) -> None:
    assert duration_ms(duration) == ms


@pytest.mark.parametrize("duration", ["2.007s", 2.007])
def test_a_whole_number_of_milliseconds_is_not_rounded(duration: Duration) -> None:
    assert duration_ms(duration) == 2007


class Seconds(float):
    """A number with a repr of its own, as those of numpy are."""

    def __repr__(self) -> str:
        return f"Seconds({float(self)})"


@pytest.mark.parametrize(
    ("duration", "ms"), [(Seconds(1.5), 1500), (Priority.HIGH, 2000)], ids=repr
)
def test_a_number_is_a_number_whatever_its_repr(duration: Duration, ms: int) -> None:
    assert duration_ms(duration) == ms


@pytest.mark.parametrize(
    "duration",
    [
        "",
        " ",
        "30",
        "m",
        "-5m",
        "5M",
        ".5h",
        "1e3s",
        "5 parsecs",
        "1h-30m",
        "1h, 30m",
        "1h 30",
        "tomorrow",
        None,
        True,
        False,
        [],
        Decimal(5),
        datetime(2030, 1, 1, tzinfo=UTC),
        float("nan"),
        float("inf"),
        -float("inf"),
    ],
)
def test_what_is_not_a_length_of_time_is_refused(duration: Any) -> None:
    with pytest.raises(BadTime, match="is not a duration") as caught:
        duration_ms(duration)
    assert repr(duration) in str(caught.value)


@pytest.mark.parametrize("duration", ["30", "half an hour"])
def test_the_refusal_shows_how_to_write_it(duration: str) -> None:
    with pytest.raises(BadTime, match="write for example '90s', '30m', '1h30m'"):
        duration_ms(duration)


@pytest.mark.parametrize("duration", [-1, -0.001, timedelta(microseconds=-1)])
def test_a_negative_span_is_refused(duration: Duration) -> None:
    with pytest.raises(BadTime, match="is negative"):
        duration_ms(duration)


@pytest.mark.parametrize(
    "duration", [FARTHEST_MS / 1000 + 1, 1_900_000_000_000, "523w", timedelta(days=3661), 1e300]
)
def test_a_span_of_more_than_ten_years_is_refused(duration: Duration) -> None:
    # The usual slip: milliseconds, or a time of day since the epoch, where seconds are meant.
    with pytest.raises(BadTime, match="more than 10 years; numbers are seconds"):
        duration_ms(duration)


def test_an_absurdly_large_number_is_refused_like_any_other() -> None:
    with pytest.raises(BadTime):
        duration_ms(10**400)


def test_ten_years_are_still_a_span() -> None:
    assert duration_ms(timedelta(milliseconds=FARTHEST_MS)) == FARTHEST_MS


def test_a_bad_time_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(BadTime, UsageError) and issubclass(BadTime, ValueError)


@settings(deadline=None)
@given(st.floats(0, FARTHEST_MS / 1000))
def test_seconds_are_never_cut_short_nor_stretched_by_a_millisecond(seconds: float) -> None:
    # A timedelta counts microseconds: finer than that a float of seconds is not.
    asked = timedelta(seconds=seconds)
    assert asked <= duration_ms(seconds) * MS <= asked + MS


@settings(deadline=None)
@given(st.timedeltas(timedelta(0), timedelta(milliseconds=FARTHEST_MS)))
def test_a_timedelta_is_never_cut_short_nor_stretched_by_a_millisecond(asked: timedelta) -> None:
    assert asked <= duration_ms(asked) * MS < asked + MS


PART = st.tuples(
    st.decimals(0, 100, places=3) | st.integers(0, 100), st.sampled_from(list(UNIT_MS))
)


@settings(deadline=None)
@given(st.lists(PART, min_size=1, max_size=4), st.sampled_from(["", " "]))
def test_a_text_is_never_cut_short_nor_stretched_by_a_millisecond(
    parts: list[tuple[Decimal | int, str]], between: str
) -> None:
    asked_ms = sum(Fraction(number) * UNIT_MS[unit] for number, unit in parts)
    ms = duration_ms(between.join(f"{number}{between}{unit}" for number, unit in parts))
    # What a float can't hold of ten years in milliseconds is less than a microsecond.
    slack_ms = Fraction(1, 1000)
    assert asked_ms - slack_ms <= ms <= asked_ms + 1


# --- Due times


def test_a_due_time_is_the_same_moment_in_every_zone() -> None:
    utc = datetime(2030, 6, 1, 12, tzinfo=UTC)
    taipei = utc.astimezone(timezone(timedelta(hours=8)))
    assert due_ms(utc) == due_ms(taipei) == 1_906_545_600_000


def test_a_due_time_is_rounded_up_to_a_millisecond() -> None:
    assert due_ms(datetime(1970, 1, 1, 0, 0, 1, 1, tzinfo=UTC)) == 1001


def test_a_naive_due_time_is_refused_with_what_to_write() -> None:
    naive = datetime(2030, 6, 1, 12)  # noqa: DTZ001
    with pytest.raises(BadTime, match=r"2030-06-01T12:00:00 has no time zone; write .*now\(UTC\)"):
        due_ms(naive)


class Nowhere(tzinfo):
    """A time zone that doesn't know its offset: as good as none."""

    def utcoffset(self, at: datetime | None) -> None:
        return None

    def dst(self, at: datetime | None) -> None:
        return None

    def tzname(self, at: datetime | None) -> None:
        return None


def test_a_zone_without_an_offset_is_as_good_as_none() -> None:
    with pytest.raises(BadTime, match="has no time zone"):
        due_ms(datetime(2030, 6, 1, tzinfo=Nowhere()))


@pytest.mark.parametrize("at", [date(2030, 6, 1), "2030-06-01T12:00Z", 1_906_545_600, None])
def test_what_is_not_a_datetime_is_no_due_time(at: Any) -> None:
    with pytest.raises(BadTime, match="is not a datetime"):
        due_ms(at)


OFFSETS = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@settings(deadline=None)
@given(st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=OFFSETS))  # noqa: DTZ001
def test_a_due_time_is_never_early_and_less_than_a_millisecond_late(at: datetime) -> None:
    assert at <= moment(due_ms(at)) < at + MS


@settings(deadline=None)
@given(st.integers(0, 2 * FARTHEST_MS))
def test_a_moment_is_read_back_as_it_was(ms: int) -> None:
    assert due_ms(moment(ms)) == ms
    assert moment(ms).utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("ms", "told"),
    [
        (253_402_300_800_000, "9999-12-31T23:59:59.999"),
        (2**63 - 1, "9999-12-31T23:59:59.999"),
        (10**40, "9999-12-31T23:59:59.999"),
        (-(2**63), "0001-01-01T00:00:00.000"),
    ],
)
def test_a_moment_that_no_calendar_has_is_its_first_or_last(ms: int, told: str) -> None:
    assert moment(ms).isoformat(timespec="milliseconds") == f"{told}+00:00"


# --- Spans for people


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0ms"),
        (850, "850ms"),
        (999, "999ms"),
        (1000, "1s"),
        (4_200, "4.2s"),
        (30_000, "30s"),
        (60_000, "1m"),
        (90_000, "1m 30s"),
        (720_000, "12m"),
        (3_600_000, "1h"),
        (12_000_000, "3h 20m"),
        (86_400_000, "1d"),
        (439_200_000, "5d 2h"),
    ],
)
def test_a_span_is_told_in_its_two_largest_units(ms: int, text: str) -> None:
    assert duration_text(ms) == text


@settings(deadline=None)
@given(st.integers(0, FARTHEST_MS))
def test_a_span_that_is_told_can_be_read_back_to_within_its_smaller_unit(ms: int) -> None:
    told = duration_ms(duration_text(ms))
    smaller = next(
        unit
        for size, unit in ((86_400_000, 3_600_000), (3_600_000, 60_000), (60_000, 1000), (0, 51))
        if ms >= size
    )
    assert abs(told - ms) < smaller
