"""Cron against a second reading of its rules, by brute force.

Goal: any expression ticks as docs/cron.md says, in any zone, above all where the clock changes, and
`next_ms` gives the same ticks from whatever moment it is asked.

Method: the oracle walks through every real minute of a window and asks zoneinfo for one thing only,
what the wall shows at that moment. A time that comes twice is seen by the wall falling back, a gap
by the wall jumping. It reads expressions by itself, and knows neither cronsim nor `tickwheel.cron`.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from hypothesis import given, settings, strategies as st

from tickwheel.cron import Cron

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
FIRST_S = int(datetime(2005, 1, 1, tzinfo=UTC).timestamp())
LAST_S = int(datetime(2035, 12, 31, tzinfo=UTC).timestamp())
# The clock never went back by more than 3 hours in these years: so far before a window the oracle
# must look to know what has been shown already.
BACK_S = 5 * HOUR_S

MONTHS = ["JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC"]
DAYS = ["SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT"]
SPECIAL = re.compile(r"L|LW|\dL|\w+#\d")

ZONES = [
    "Africa/Cairo",
    "Africa/Casablanca",  # changes for Ramadan
    "Africa/Juba",
    "America/Asuncion",
    "America/Caracas",  # half an hour, for good
    "America/Havana",
    "America/New_York",
    "America/Nuuk",
    "America/Santiago",
    "America/Sao_Paulo",  # at midnight
    "America/St_Johns",  # at 00:01
    "Antarctica/Casey",  # three hours
    "Antarctica/Troll",  # two hours
    "Asia/Amman",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Pyongyang",
    "Asia/Taipei",
    "Asia/Tehran",
    "Australia/Lord_Howe",  # half an hour
    "Europe/Dublin",  # winter is the exception there
    "Europe/Istanbul",
    "Europe/Moscow",
    "Europe/Paris",
    "Pacific/Apia",  # skipped 30 Dec 2011
    "Pacific/Chatham",  # at 02:45
    "Pacific/Fakaofo",  # skipped it, too
    "UTC",
]


# --- The oracle


def numbers(field: str, low: int, high: int, names: Sequence[str] = ()) -> set[int]:
    """The values of a field, those that are plain numbers or names."""

    def number(word: str) -> int:
        return names.index(word) + low if word in names else int(word)

    found: set[int] = set()
    for term in field.upper().split(","):
        if SPECIAL.fullmatch(term):
            continue
        base, _, step = term.partition("/")
        if base == "*":
            first, last = low, high
        elif "-" in base:
            first, last = map(number, base.split("-"))
        else:
            first = number(base)
            last = high if step else first
        found.update(value for value in range(first, last + 1, int(step or 1)))
    return found


class Oracle:
    """What docs/cron.md says, for one expression and one zone."""

    def __init__(self, text: str, tz: str) -> None:
        fields = text.split()
        second, minute, hour, self.day, month, self.weekday = ["0"][len(fields) - 5 :] + fields
        self.zone = ZoneInfo(tz)
        self.seconds = sorted(numbers(second, 0, 59))
        self.minutes, self.hours = numbers(minute, 0, 59), numbers(hour, 0, 23)
        self.days, self.months = numbers(self.day, 1, 31), numbers(month, 1, 12, MONTHS)
        self.weekdays = {number % 7 for number in numbers(self.weekday, 0, 7, DAYS)}
        self.fixed = not set(minute + hour) & set("*/")
        self.both = self.day[0] == "*" or self.weekday[0] == "*"

    def ticks(self, after_s: int, until_s: int) -> list[int]:
        """The ticks after the one moment and not after the other."""
        found: set[int] = set()
        for at_s, wall, shown, skipped in self.walk(after_s, until_s):
            if self.fits(wall) and not (self.fixed and shown):
                found.update(at_s + second for second in self.seconds)
            if self.fixed and any(map(self.fits, skipped)):
                found.add(at_s)
        return sorted(at_s for at_s in found if after_s < at_s <= until_s)

    def walk(
        self, after_s: int, until_s: int
    ) -> Iterator[tuple[int, datetime, bool, list[datetime]]]:
        """Each real minute: what the wall shows, whether it has shown that or later times before,
        and the times that it has just skipped."""
        minute = timedelta(minutes=1)
        start_s = (after_s - BACK_S) // MINUTE_S * MINUTE_S
        previous = self.wall(start_s - MINUTE_S)
        latest = previous
        for at_s in range(start_s, until_s + 1, MINUTE_S):
            wall = self.wall(at_s)
            skipped = [
                previous + number * minute for number in range(1, (wall - previous) // minute)
            ]
            yield at_s, wall, wall <= latest, skipped
            previous, latest = wall, max(latest, wall)

    def wall(self, at_s: int) -> datetime:
        return datetime.fromtimestamp(at_s, self.zone).replace(tzinfo=None, fold=0)

    def fits(self, wall: datetime) -> bool:
        return wall.minute in self.minutes and wall.hour in self.hours and self.fits_day(wall)

    def fits_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        fits = self.fits_day_of_month(day), self.fits_day_of_week(day)
        return all(fits) if self.both else any(fits)

    def fits_day_of_month(self, day: date) -> bool:
        length = calendar.monthrange(day.year, day.month)[1]
        working = [each for each in range(1, length + 1) if day.replace(day=each).isoweekday() <= 5]
        words = self.day.upper().split(",")
        return (
            day.day in self.days
            or ("L" in words and day.day == length)
            or ("LW" in words and day.day == working[-1])
        )

    def fits_day_of_week(self, day: date) -> bool:
        number = day.isoweekday() % 7
        length = calendar.monthrange(day.year, day.month)[1]
        # Which one of its kind it is in the month, counted from either end.
        nth, last = (day.day - 1) // 7 + 1, day.day > length - 7
        words = set(self.weekday.upper().split(","))
        own = {DAYS[number], str(number)} | ({"7"} if number == 0 else set())
        return (
            number in self.weekdays
            or bool(words & {f"{each}#{nth}" for each in own})
            or (last and bool(words & {f"{each}L" for each in own}))
        )


@lru_cache
def changes(tz: str) -> list[int]:
    """The moments in these years at which the zone's clock changes."""
    zone = ZoneInfo(tz)

    def offset(at_s: int) -> timedelta | None:
        return datetime.fromtimestamp(at_s, zone).utcoffset()

    found = []
    for start_s in range(FIRST_S, LAST_S, DAY_S):
        low, high = start_s, start_s + DAY_S
        if offset(low) != offset(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if offset(middle) != offset(low) else (middle, high)
            found.append(high)
    return found


# --- Expressions


def terms(low: int, high: int, names: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """A term of a field, each form as likely as the next."""
    spelled = st.sampled_from(names) if names else st.nothing()
    upward = st.tuples(spelled, spelled).filter(lambda p: names.index(p[0]) < names.index(p[1]))
    pair = st.tuples(st.integers(low, high), st.integers(low, high)).filter(lambda p: p[0] < p[1])
    step = st.integers(1, high + 5)
    number = st.integers(low, high).map(str)
    return st.one_of(
        number,
        spelled,
        spelled.map(str.lower),
        upward.map("-".join),
        pair.map(lambda p: f"{p[0]}-{p[1]}"),
        st.tuples(pair, step).map(lambda t: f"{t[0][0]}-{t[0][1]}/{t[1]}"),
        st.tuples(number, step).map(lambda t: f"{t[0]}/{t[1]}"),
        step.map(lambda step: f"*/{step}"),
        st.just("*"),
    )


def lists(term: st.SearchStrategy[str], most: int = 3) -> st.SearchStrategy[str]:
    return st.lists(term, min_size=1, max_size=most).map(",".join)


def plain(low: int, high: int) -> st.SearchStrategy[str]:
    """A field that names its values one by one: expressions of these are fixed times."""
    return lists(st.integers(low, high).map(str), 5) | st.just(f"{low}-{high}")


DAY = lists(terms(1, 31) | st.sampled_from(["L", "LW", "l"]))
WEEKDAY = lists(
    terms(0, 7, DAYS)
    | st.integers(0, 7).map(lambda day: f"{day}L")
    | st.tuples(st.sampled_from([*DAYS, "0", "3", "7"]), st.integers(1, 5)).map(
        lambda pair: f"{pair[0]}#{pair[1]}"
    )
)
MONTH = lists(terms(1, 12, MONTHS))


@st.composite
def near_a_change(draw: st.DrawFn) -> tuple[str, str, int]:
    """An expression, a zone, and a moment of its clock change (any moment where it has none).

    The hours are those around the change, and most days are allowed: else hardly any tick would be
    near it."""
    tz = draw(st.sampled_from(ZONES))
    moments = changes(tz)
    at_s = draw(st.sampled_from(moments) if moments else st.integers(FIRST_S, LAST_S))
    before = datetime.fromtimestamp(at_s - 1, ZoneInfo(tz))
    after = datetime.fromtimestamp(at_s, ZoneInfo(tz))
    near = {(wall.hour + step) % 24 for wall in (before, after) for step in (-1, 0, 1, 2)}
    hour = lists(st.sampled_from(sorted(near)).map(str)) | plain(0, 23) | lists(terms(0, 23))
    minute = plain(0, 59) | lists(terms(0, 59))
    day = st.sampled_from(["*", "*", "*", str(before.day), str(after.day), "*/2"]) | DAY
    weekday = st.sampled_from(["*", "*", "*", "*", DAYS[after.isoweekday() % 7]]) | WEEKDAY
    month = st.sampled_from(["*", "*", "*", MONTHS[before.month - 1]]) | MONTH
    second = draw(st.sampled_from(["", "", ""]) | lists(terms(0, 59)))
    text = " ".join([second, *map(draw, (minute, hour, day, month, weekday))])
    return text.strip(), tz, at_s


def ticks_of(cron: Cron, after_s: int, until_s: int) -> list[int]:
    """The ticks as a node finds them that never stops."""
    found: list[int] = []
    at_ms = after_s * 1000
    while (tick := cron.next_ms(at_ms)) is not None and tick <= until_s * 1000:
        assert tick > at_ms and tick % 1000 == 0
        found.append(tick // 1000)
        at_ms = tick
    return found


# --- The comparisons


@settings(max_examples=600, deadline=None)
@given(near_a_change(), st.integers(-10 * 60, 3 * 60), st.integers(1, 8))
def test_ticks_around_a_clock_change(
    chosen: tuple[str, str, int], start_minute: int, hours: int
) -> None:
    text, tz, at_s = chosen
    if len(text.split()) == 6:
        # A tick each second of a day would take all the time that there is for this test.
        start_minute, hours = max(start_minute, -2 * 60), 1
    start_s = at_s + start_minute * MINUTE_S
    end_s = max(start_s, at_s) + hours * HOUR_S
    assert ticks_of(Cron.parse(text, tz), start_s, end_s) == Oracle(text, tz).ticks(start_s, end_s)


@settings(max_examples=400, deadline=None)
@given(near_a_change(), st.lists(st.integers(-4 * HOUR_S * 1000, 4 * HOUR_S * 1000), min_size=8))
def test_every_moment_gives_the_smallest_tick_after_it(
    chosen: tuple[str, str, int], distances_ms: list[int]
) -> None:
    """As a node asks that starts at any moment: also at a tick, and 1 ms around it."""
    text, tz, at_s = chosen
    cron = Cron.parse(text, tz)
    start_s, end_s = at_s - 4 * HOUR_S, at_s + 6 * HOUR_S
    ticks = [tick_s * 1000 for tick_s in Oracle(text, tz).ticks(start_s, end_s)]
    moments = [at_s * 1000 + distance for distance in distances_ms]
    moments += [tick + distance for tick in ticks[:: len(ticks) // 40 + 1] for distance in (-1, 0)]
    for moment in moments:
        following = [tick for tick in ticks if tick > moment]
        found = cron.next_ms(moment)
        if following:
            assert found == following[0]
        else:
            assert found is None or found > end_s * 1000


@settings(max_examples=120, deadline=None)
@given(
    st.tuples(
        lists(terms(0, 59)),
        lists(terms(0, 23)),
        st.just("*") | DAY,
        st.just("*") | MONTH,
        st.just("*") | WEEKDAY,
    ),
    st.sampled_from(ZONES),
    st.integers(FIRST_S, LAST_S),
)
def test_ticks_of_any_two_days(fields: tuple[str, ...], tz: str, start_s: int) -> None:
    text = " ".join(fields)
    end_s = start_s + 2 * DAY_S
    assert ticks_of(Cron.parse(text, tz), start_s, end_s) == Oracle(text, tz).ticks(start_s, end_s)


@settings(max_examples=250, deadline=None)
@given(st.dates(date(2005, 1, 1), date(2035, 12, 31)), DAY, MONTH, WEEKDAY, st.integers(0, 3))
def test_days_of_two_years(start: date, day: str, month: str, weekday: str, free: int) -> None:
    """Which days fit, over far longer than minutes can be walked."""
    text = f"0 0 {'*' if free == 1 else day} {month} {'*' if free == 2 else weekday}"
    oracle = Oracle(text, "UTC")
    days = (start + timedelta(days=number) for number in range(1, 731))
    expected = [calendar.timegm(day.timetuple()) for day in days if oracle.fits_day(day)]
    start_s = calendar.timegm(start.timetuple())
    cron = Cron.parse(text)
    assert ticks_of(cron, start_s, start_s + 730 * DAY_S) == expected
    assert cron.explain().endswith(" (UTC)")


def test_the_oracle_has_changes_of_every_kind_to_look_at() -> None:
    """Else the comparisons above would say little."""
    kinds = set()
    for tz in ZONES:
        for at_s in changes(tz):
            before = datetime.fromtimestamp(at_s - 1, ZoneInfo(tz)).replace(tzinfo=None)
            after = datetime.fromtimestamp(at_s, ZoneInfo(tz)).replace(tzinfo=None)
            kinds.add((after - before - timedelta(seconds=1)) / timedelta(minutes=1))
    assert {-180, -60, -30, 30, 60, 120, 1440} <= kinds
