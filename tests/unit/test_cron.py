"""When schedules tick: known hard cases, the examples of docs/cron.md, and what is refused.

tests/model/test_cron_oracle.py compares the rules with a second reading of them at random.
"""

from __future__ import annotations

import copy
import pickle
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, strategies as st

from tickwheel.cron import ALIASES, LENGTH_MAX, Cron, Every
from tickwheel.errors import BadSchedule, UsageError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "cron.md"


def ms(text: str) -> int:
    """A moment from ISO text; UTC where it names no offset."""
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def ticks(cron: Cron | Every, after: str, count: int) -> list[int]:
    found, at_ms = [], ms(after)
    for _ in range(count):
        tick = cron.next_ms(at_ms)
        assert tick is not None and tick > at_ms
        found.append(tick)
        at_ms = tick
    return found


def shown(text: str, tz: str, after: str, count: int) -> list[str]:
    """The ticks as the wall of the zone shows them."""
    zone = ZoneInfo(tz)
    return [
        datetime.fromtimestamp(tick / 1000, zone).strftime("%a %d %b %H:%M:%S %z")
        for tick in ticks(Cron.parse(text, tz), after, count)
    ]


# --- The page


def rows(heading: str) -> list[list[str]]:
    """The tables under a heading of the page: cells of each row that begins with `code`."""
    section = DOCS.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


EXAMPLES = rows("Which days") + rows("When the clock changes")


@pytest.mark.parametrize(
    ("text", "tz", "moments"), [(text, tz, moments) for text, tz, moments, _ in EXAMPLES]
)
def test_every_example_of_the_page_ticks_as_it_says(text: str, tz: str, moments: str) -> None:
    expected = [datetime.fromisoformat(each.strip()) for each in moments.split(",")]
    zone = ZoneInfo(tz)
    # That the page gives each tick the offset that the zone has then.
    assert [each.astimezone(zone).utcoffset() for each in expected] == [
        each.utcoffset() for each in expected
    ]
    before = expected[0] - timedelta(milliseconds=1)
    found = ticks(Cron.parse(text, tz), before.isoformat(), len(expected))
    assert found == [ms(each.isoformat()) for each in expected]


def test_the_page_has_examples_of_every_kind() -> None:
    assert len(EXAMPLES) == 31 and len({tz for _, tz, *_ in EXAMPLES}) == 7


def test_the_page_names_every_alias_and_what_it_is() -> None:
    section = DOCS.read_text().split("\n## Expressions\n")[1].split("\n## ")[0]
    written = {
        alias: same
        for aliases, same in re.findall(r"^\| (`@.*?) \| `(.*?)` \|$", section, re.MULTILINE)
        for alias in re.findall(r"@\w+", aliases)
    }
    assert written == ALIASES


# --- Calendar


@pytest.mark.parametrize(
    ("text", "after", "expected"),
    [
        ("0 0 29 2 *", "2024-02-29T00:00", ["2028-02-29T00:00", "2032-02-29T00:00"]),
        ("0 0 29 2 */7", "2004-03-01", ["2032-02-29", "2060-02-29", "2088-02-29", "2128-02-29"]),
        ("0 0 * 2 MON#5", "2024-03-01", ["2044-02-29"]),
        ("59 23 31 12 *", "2026-12-31T23:58", ["2026-12-31T23:59", "2027-12-31T23:59"]),
        ("* * * * *", "2026-12-31T23:59:30", ["2027-01-01T00:00", "2027-01-01T00:01"]),
        ("0 0 1 1 *", "2026-12-31T23:59:59.999", ["2027-01-01T00:00"]),
        ("0 0 31 4,6,9,11,12 *", "2026-01-01", ["2026-12-31"]),
        ("0 0 L 2 *", "2027-01-01", ["2027-02-28", "2028-02-29"]),
        ("0 0 L,15 * *", "2026-02-14", ["2026-02-15", "2026-02-28", "2026-03-15"]),
        ("0 0 LW * *", "2026-05-01", ["2026-05-29", "2026-06-30"]),
        ("0 0 * * 0L", "2026-05-01", ["2026-05-31", "2026-06-28"]),
        ("0 0 * * 7L", "2026-05-01", ["2026-05-31", "2026-06-28"]),
        ("0 0 * * FRI#2,WED#1", "2026-05-01", ["2026-05-06", "2026-05-08", "2026-06-03"]),
        ("0 0 * * sun", "2026-05-01", ["2026-05-03"]),
        ("0 0 * * 7", "2026-05-01", ["2026-05-03"]),
        ("0 0 * * 6-7", "2026-05-01", ["2026-05-02", "2026-05-03", "2026-05-09"]),
        ("0 0 1 jan-Mar/2 *", "2026-01-01", ["2026-03-01", "2027-01-01"]),
        ("0 0 1 * MON", "2026-05-31", ["2026-06-01", "2026-06-08"]),
        ("0 0 1-7 * MON", "2026-06-06", ["2026-06-07", "2026-06-08", "2026-06-15"]),
        ("0 0 * * MON", "2026-06-01", ["2026-06-08"]),
        ("30 5/6 * * *", "2026-01-01", ["2026-01-01T05:30", "2026-01-01T11:30"]),
        ("0 50-59/3 * * * *", "2026-01-01T00:50", ["2026-01-01T00:53", "2026-01-01T00:56"]),
        ("30,31 0 0 * * *", "2026-01-01", ["2026-01-01T00:00:30", "2026-01-01T00:00:31"]),
        ("* * * * * *", "2026-01-01T00:00:59", ["2026-01-01T00:01", "2026-01-01T00:01:01"]),
        ("*/60 * * * *", "2026-01-01", ["2026-01-01T01:00", "2026-01-01T02:00"]),
        ("  0\t2  *\n*  * ", "2026-01-01", ["2026-01-01T02:00"]),
    ],
)
def test_calendar(text: str, after: str, expected: list[str]) -> None:
    assert ticks(Cron.parse(text), after, len(expected)) == [ms(each) for each in expected]


@pytest.mark.parametrize(
    ("alias", "expected"),
    [
        ("@yearly", "2027-01-01T00:00"),
        ("@annually", "2027-01-01T00:00"),
        ("@monthly", "2026-06-01T00:00"),
        ("@weekly", "2026-05-24T00:00"),
        ("@daily", "2026-05-22T00:00"),
        ("@midnight", "2026-05-22T00:00"),
        ("@hourly", "2026-05-21T11:00"),
        ("@Hourly", "2026-05-21T11:00"),
    ],
)
def test_aliases(alias: str, expected: str) -> None:
    assert Cron.parse(alias).next_ms(ms("2026-05-21T10:30")) == ms(expected)


@pytest.mark.parametrize(
    "text",
    [
        "0 0 30 2 *",
        "0 0 31 4,6,9,11 *",
        "0 0 31 2 */2",
        "0 0 */31 * MON#2",  # the 1st is never a second Monday
    ],
)
def test_what_no_day_fits_has_no_tick(text: str) -> None:
    assert Cron.parse(text, "Europe/Paris").next_ms(ms("2026-01-01")) is None


def test_an_hour_that_the_clock_always_skips_has_no_tick() -> None:
    # A Sunday that is 29 March is the last of the month, which has no hour 2 in Paris.
    cron = Cron.parse("* 2 29 3 */7", "Europe/Paris")
    assert cron.next_ms(ms("2026-01-01")) is None
    assert Cron.parse(cron.text, "UTC").next_ms(ms("2026-01-01")) == ms("2026-03-29T02:00")


def test_a_tick_is_strictly_after_the_moment() -> None:
    cron = Cron.parse("0 2 * * *")
    two, next_two = ms("2026-01-01T02:00"), ms("2026-01-02T02:00")
    assert [cron.next_ms(two + late) for late in (-1001, -1, 0, 1, 999, 1001)] == [
        two,
        two,
        *[next_two] * 4,
    ]


def test_ticks_begin_with_the_epoch() -> None:
    assert Cron.parse("0 0 * * *").next_ms(-1) == Cron.parse("0 0 * * *").next_ms(-(10**18)) == 0
    # Whose offset was not one of whole minutes.
    assert Cron.parse("0 0 * * *", "Africa/Monrovia").next_ms(-1) == ms("1970-01-01T00:44:30")


@pytest.mark.parametrize("tz", ["UTC", "Europe/Paris", "Pacific/Kiritimati"])
def test_ticks_end_before_the_calendar_does(tz: str) -> None:
    yearly, never = Cron.parse("0 0 1 1 *", tz), Cron.parse("0 0 30 2 *", tz)
    assert yearly.next_ms(ms("5026-06-01")) is not None
    moments = [ms(f"{year}-06-01") for year in range(9800, 10_000)]
    assert [never.next_ms(moment) for moment in moments[::20]] == [None] * 10
    found = [yearly.next_ms(moment) for moment in [*moments, 10**18]]
    assert found[0] is not None and found[-1] is None
    assert sorted(found, key=lambda tick: tick or 10**18) == found


# --- Clock changes that the page does not show


@pytest.mark.parametrize(
    ("text", "tz", "after", "expected"),
    [
        (  # asked in the second pass of the hour: it has ticked in the first
            "30 2 * * *",
            "Europe/Paris",
            "2026-10-25T01:05",
            ["Mon 26 Oct 02:30:00 +0100", "Tue 27 Oct 02:30:00 +0100"],
        ),
        (  # nothing of the second pass is left over for fixed times, what follows it is
            "0,15,30 2-3 * * *",
            "Europe/Paris",
            "2026-10-25T00:15",
            ["Sun 25 Oct 02:30:00 +0200", "Sun 25 Oct 03:00:00 +0100"],
        ),
        (  # the moment at which the second pass ends belongs to neither
            "0 3 * * *",
            "Europe/Paris",
            "2026-10-25T01:05",
            ["Sun 25 Oct 03:00:00 +0100", "Mon 26 Oct 03:00:00 +0100"],
        ),
        (
            "0 */3 * * *",
            "Europe/Paris",
            "2026-10-25T00:30",
            ["Sun 25 Oct 03:00:00 +0100", "Sun 25 Oct 06:00:00 +0100"],
        ),
        (  # the last second of both passes
            "59 59 * * * *",
            "Europe/Paris",
            "2026-10-25T00:59:58",
            [
                "Sun 25 Oct 02:59:59 +0200",
                "Sun 25 Oct 02:59:59 +0100",
                "Sun 25 Oct 03:59:59 +0100",
            ],
        ),
        (  # all seconds of a skipped minute are one tick
            "*/10 30 2 * * *",
            "Europe/Paris",
            "2026-03-29T00:59",
            ["Sun 29 Mar 03:00:00 +0200", "Mon 30 Mar 02:30:00 +0200"],
        ),
        (  # on a day of its own
            "30 2 29 3 *",
            "Europe/Paris",
            "2026-01-01",
            ["Sun 29 Mar 03:00:00 +0200", "Mon 29 Mar 02:30:00 +0200"],
        ),
        (  # wildcard, asked in the first pass with nothing left of it
            "*/20 1 * * *",
            "America/New_York",
            "2026-11-01T05:45",
            [
                "Sun 01 Nov 01:00:00 -0500",
                "Sun 01 Nov 01:20:00 -0500",
                "Sun 01 Nov 01:40:00 -0500",
                "Mon 02 Nov 01:00:00 -0500",
            ],
        ),
        (  # wildcard: the second pass has a tick that is before the moment on the wall
            "10 */1 * * *",
            "America/New_York",
            "2026-11-01T05:30",
            ["Sun 01 Nov 01:10:00 -0500", "Sun 01 Nov 02:10:00 -0500"],
        ),
        (
            "45 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-04T13:00",
            ["Sun 05 Apr 01:45:00 +1100", "Mon 06 Apr 01:45:00 +1030"],
        ),
        (
            "*/15 * * * *",
            "Australia/Lord_Howe",
            "2026-04-04T14:31",
            [
                "Sun 05 Apr 01:45:00 +1100",
                "Sun 05 Apr 01:30:00 +1030",
                "Sun 05 Apr 01:45:00 +1030",
                "Sun 05 Apr 02:00:00 +1030",
            ],
        ),
        (  # the hour after midnight is skipped, and with it all that a wildcard had there
            "*/30 0 27 3 *",
            "Asia/Beirut",
            "2021-04-01",
            ["Mon 27 Mar 00:00:00 +0300", "Mon 27 Mar 00:30:00 +0300"],
        ),
        (
            "0 0 * * MON",
            "America/Asuncion",
            "2023-09-29",
            ["Mon 02 Oct 00:00:00 -0300"],
        ),
        (
            "0 0 * * SUN",
            "America/Asuncion",
            "2023-09-29",
            ["Sun 01 Oct 01:00:00 -0300", "Sun 08 Oct 00:00:00 -0300"],
        ),
        (  # back from 00:01 to 23:01 of the day before
            "1,30 23 * * *",
            "America/St_Johns",
            "2008-11-02T02:00",
            ["Sun 02 Nov 23:01:00 -0330", "Sun 02 Nov 23:30:00 -0330"],
        ),
        (  # a day that does not exist, by its date and by its name
            "0 8,20 30 12 *",
            "Pacific/Apia",
            "2011-12-01",
            ["Sat 31 Dec 00:00:00 +1400", "Sun 30 Dec 08:00:00 +1400"],
        ),
        (
            "* * * * FRI",
            "Pacific/Apia",
            "2011-12-25",
            ["Fri 06 Jan 00:00:00 +1400"],
        ),
        (  # the standard offset changes, for good, and back
            "15 0 * * *",
            "Asia/Pyongyang",
            "2015-08-13T18:00",
            ["Sat 15 Aug 00:15:00 +0830"],
        ),
        (
            "45 23 * * *",
            "Asia/Pyongyang",
            "2018-05-04T00:00",
            ["Sat 05 May 00:00:00 +0900", "Sat 05 May 23:45:00 +0900"],
        ),
        (  # three hours back
            "0 0 * * *",
            "Antarctica/Casey",
            "2010-03-04T00:00",
            ["Fri 05 Mar 00:00:00 +1100", "Sat 06 Mar 00:00:00 +0800"],
        ),
    ],
)
def test_clock_changes(text: str, tz: str, after: str, expected: list[str]) -> None:
    assert shown(text, tz, after, len(expected)) == expected


def test_a_day_of_an_hour_more_has_all_its_minutes_and_no_fixed_time_twice() -> None:
    for text, count in [("* * * * *", 25 * 60), ("0-59 0-23 * * *", 24 * 60)]:
        found = ticks(Cron.parse(text, "Europe/Paris"), "2026-10-24T21:59", count + 1)
        assert found[0] == ms("2026-10-24T22:00") and found[-1] == ms("2026-10-25T23:00")


# --- What a caller holds


def test_the_zone_may_lead_the_expression() -> None:
    cron = Cron.parse("CRON_TZ=Europe/Paris 0  2 * * *")
    assert (cron.text, cron.tz) == ("0 2 * * *", "Europe/Paris")
    assert cron == Cron.parse("0 2 * * *", tz="Europe/Paris")
    assert cron == Cron.parse("CRON_TZ=Europe/Paris 0 2 * * *", tz="Europe/Paris")
    assert Cron.parse("CRON_TZ=Asia/Tokyo @daily").next_ms(ms("2026-01-01")) == ms("2026-01-01T15")


def test_equal_means_the_same_text_and_zone() -> None:
    cron = Cron.parse("0 2 * * *", "Europe/Paris")
    assert cron == Cron.parse(cron.text, cron.tz) and hash(cron) == hash(Cron.parse(*key(cron)))
    assert cron != Cron.parse("0 2 * * *") and cron != Cron.parse("0 3 * * *", "Europe/Paris")
    assert repr(cron) == "Cron(text='0 2 * * *', tz='Europe/Paris')"


def key(cron: Cron) -> tuple[str, str]:
    return cron.text, cron.tz


def test_it_is_frozen_and_can_be_copied_and_sent() -> None:
    cron = Cron.parse("0 2 * * *", "Europe/Paris")
    with pytest.raises(FrozenInstanceError):
        cron.tz = "UTC"  # type: ignore[misc]
    at_ms = ms("2026-03-29")
    first = cron.next_ms(at_ms)
    for other in (copy.deepcopy(cron), pickle.loads(pickle.dumps(cron)), cron):
        assert other == cron and other.next_ms(at_ms) == first


def test_threads_may_share_it() -> None:
    cron = Cron.parse("59 23 31 12 *")
    years = list(range(2000, 2100))

    def wrong(_: int) -> list[int]:
        asked = [(year, cron.next_ms(ms(f"{year}-06-01"))) for year in years]
        return [year for year, tick in asked if tick != ms(f"{year}-12-31T23:59")]

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(wrong, range(4))) == [[]] * 4
    finally:
        sys.setswitchinterval(usual)


@pytest.mark.parametrize(
    ("text", "tz", "words"),
    [
        ("0 2 * * *", "Asia/Taipei", "At 02:00 every day (Asia/Taipei)"),
        ("@hourly", "UTC", "At the start of every hour (UTC)"),
        ("0 9 * * MON-FRI", "UTC", "At 09:00 on Monday through Friday (UTC)"),
        ("0 0 1 * MON", "UTC", "At 00:00 on the first day of month and on Monday (UTC)"),
        ("0 0 L * *", "UTC", "At 00:00 on the last day of every month (UTC)"),
        ("15 30 9 * * *", "UTC", "At 09:30:15 every day (UTC)"),
        ("0 0 30 2 *", "UTC", "At 00:00 on February 30 (UTC)"),
    ],
)
def test_it_explains_itself(text: str, tz: str, words: str) -> None:
    assert Cron.parse(text, tz).explain() == words


# --- What is refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' has 0 fields; write five, 'minute hour"),
        ("CRON_TZ=Europe/Paris", "'' has 0 fields"),
        ("* * * *", "'* * * *' has 4 fields"),
        ("x", "'x' has 1 field; write five"),
        ("0 0 0 1 1 * 2026", "7 fields; write five, … or six with seconds first"),
        ("60 * * * *", "'60 * * * *': '60' is not a valid minute; use * and 0-59"),
        ("0 24 * * *", "'24' is not a valid hour; use * and 0-23"),
        ("0 0 0 * *", "'0' is not a valid day of month; use * and 1-31, L (the last day)"),
        ("0 0 * 13 *", "'13' is not a valid month; use * and 1-12 or JAN-DEC"),
        ("0 0 * * 8", "'8' is not a valid day of week; use * and 0-7 (0 and 7 are Sunday)"),
        ("60 0 0 * * *", "'60' is not a valid second"),
        ("0 0 * * MON,FOO", "'FOO' is not a valid day of week"),
        ("0 0 * * SAT-SUN", "'SAT-SUN' is not a valid … ; a range goes from low to high"),
        ("30-10 * * * *", "'30-10' is not a valid minute"),
        ("1--100000000 * * * *", "'1--100000000' is not a valid minute"),
        ("*/0 * * * *", "'*/0' is not a valid minute"),
        ("*/ * * * *", "is not a valid minute"),
        ("/5 * * * *", "is not a valid minute"),
        ("1,,2 * * * *", "'' is not a valid minute"),
        ("-1 * * * *", "is not a valid minute"),
        ("1.5 * * * *", "is not a valid minute"),
        ("0 0 ? * *", "'?' is not a valid day of month"),
        ("0 0 15W * *", "'15W' is not a valid day of month"),
        ("0 0 L/2 * *", "'L/2' is not a valid day of month"),
        ("0 0 LW/2 * *", "'LW/2' is not a valid day of month"),
        ("0 0 3-3/5 * *", "'3-3/5' is not a valid day of month"),
        ("0 0 * * MON-1/2", "'MON-1/2' is not a valid day of week"),
        ("0 0 * * MON#6", "'MON#6' is not a valid day of week"),
        ("0 0 * * MON#0", "'MON#0' is not a valid day of week"),
        ("0 0 * * FRIL", "'FRIL' is not a valid day of week"),
        ("0 0 * * L", "'L' is not a valid day of week"),
        ("0 0 * L *", "'L' is not a valid month"),
        ("@reboot", "'@reboot' is not an alias; the aliases are @yearly, @annually, @monthly"),
        ("@every_minute", "is not an alias"),
        ("@daily *", "'@daily *' is not an alias"),
        ("TZ=UTC 0 0 * * *", "'TZ=UTC' is not a valid second"),
        ("0 0 * * ſun", "'0 0 * * ſun' has characters that are not allowed in a cron expression"),
        ("٣ * * * *", "has characters that are not allowed"),
        ("0 " * LENGTH_MAX, f"… has {2 * LENGTH_MAX} characters; the limit is {LENGTH_MAX}"),
    ],
)
def test_a_bad_expression_is_shown_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(BadSchedule) as refused:
        Cron.parse(text)
    for part in message.split(" … "):
        assert part in str(refused.value)
    assert isinstance(refused.value, UsageError)


@pytest.mark.parametrize(
    ("tz", "hint"),
    [
        ("Europe/Pari", "(did you mean 'Europe/Paris'?)"),
        ("europe/paris", "(did you mean 'Europe/Paris'?)"),
        ("Taipei", "(did you mean 'Asia/Taipei'?)"),
        ("+02:00", "or 'UTC'"),
        ("", "or 'UTC'"),
        ("Europe", "write Area/City as in 'Europe/Paris'"),
        ("../UTC", "write Area/City"),
        ("/etc/localtime", "write Area/City"),
        ("localtime", "or 'UTC'"),
        ("right/Europe/Paris", "(did you mean 'Europe/Paris'?)"),
        ("Europe/Paris\0", "write Area/City"),
        ("Zürich", "write Area/City"),
    ],
)
def test_an_unknown_zone_is_shown_with_how_to_write_one(tz: str, hint: str) -> None:
    with pytest.raises(BadSchedule) as refused:
        Cron.parse("0 2 * * *", tz)
    assert str(refused.value).startswith(f"{tz!r} is not a time zone; write Area/City as in ")
    assert hint in str(refused.value)
    if tz and not tz.isspace():
        with pytest.raises(BadSchedule, match="is not a time zone"):
            Cron.parse(f"CRON_TZ={tz} 0 2 * * *")


@pytest.mark.parametrize("tz", ["Asia/Tokyo", "UTC"])
def test_two_zones_are_refused(tz: str) -> None:
    with pytest.raises(BadSchedule, match=f"names one zone and tz='{tz}' another"):
        Cron.parse("CRON_TZ=Europe/Paris 0 2 * * *", tz=tz)


@pytest.mark.parametrize(("text", "tz"), [(5, "UTC"), (None, "UTC"), ("@daily", ZoneInfo("UTC"))])
def test_what_is_not_text_is_refused(text: str, tz: str) -> None:
    with pytest.raises(BadSchedule, match="is not a string"):
        Cron.parse(text, tz)


@given(st.text(st.sampled_from("0159*/-,#LWMONJA @?\t"), max_size=40) | st.text(max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        cron = Cron.parse(text)
    except BadSchedule:
        return
    assert cron.explain()
    tick = cron.next_ms(ms("2026-01-01"))
    assert tick is None or tick > ms("2026-01-01")


# --- Intervals


@pytest.mark.parametrize(
    ("interval", "after", "expected"),
    [
        ("15m", "2026-01-01T10:07", ["2026-01-01T10:15", "2026-01-01T10:30"]),
        ("15m", "2026-01-01T10:15", ["2026-01-01T10:30"]),
        ("15m", "2026-01-01T10:14:59.999", ["2026-01-01T10:15"]),
        ("1h30m", "1970-01-01T02:00", ["1970-01-01T03:00", "1970-01-01T04:30"]),
        ("1d", "2026-01-01T10:00", ["2026-01-02", "2026-01-03"]),
        (timedelta(seconds=10), "2026-01-01T10:00:01", ["2026-01-01T10:00:10"]),
        (0.25, "2026-01-01T10:00", ["2026-01-01T10:00:00.250", "2026-01-01T10:00:00.500"]),
    ],
)
def test_intervals(interval: str | float | timedelta, after: str, expected: list[str]) -> None:
    assert ticks(Every.parse(interval), after, len(expected)) == [ms(each) for each in expected]


@given(st.integers(1, 10**12), st.integers(-(10**13), 10**13), st.integers(-(10**13), 10**13))
def test_an_interval_ticks_at_whole_multiples_since_its_anchor(
    interval_ms: int, anchor_ms: int, after_ms: int
) -> None:
    every = Every(interval_ms, anchor_ms)
    tick = every.next_ms(after_ms)
    assert tick > after_ms and tick >= anchor_ms and (tick - anchor_ms) % interval_ms == 0
    # The one before is no tick after the moment.
    assert tick == anchor_ms or tick - interval_ms <= after_ms


def test_no_interval_ticks_before_its_anchor() -> None:
    every = Every.parse("1h", anchor_ms=ms("2026-01-01T10:20"))
    assert ticks(every, "2020-01-01", 2) == [ms("2026-01-01T10:20"), ms("2026-01-01T11:20")]


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ("15m", "Every 15 minutes"),
        ("1h30m", "Every 1 hour 30 minutes"),
        ("90s", "Every 1 minute 30 seconds"),
        ("2w", "Every 14 days"),
        ("250ms", "Every 250 ms"),
        ("1d1ms", "Every 1 day 1 ms"),
    ],
)
def test_an_interval_explains_itself(interval: str, words: str) -> None:
    assert Every.parse(interval).explain() == words


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        ("0s", "an interval can't be 0"),
        (0, "an interval can't be 0"),
        ("often", "'often' is not a duration"),
        ("-5m", "is not a duration"),
        (-5, "is negative"),
        ("20000d", "more than 10 years"),
    ],
)
def test_a_bad_interval_is_refused(interval: str | float, message: str) -> None:
    with pytest.raises(BadSchedule, match=message):
        Every.parse(interval)
