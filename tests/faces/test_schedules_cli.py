"""`tickwheel schedules`, on a real file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tickwheel import App
from tickwheel.checks import NOTE
from tickwheel.cli import main
from tickwheel.duration import due_ms
from tickwheel.operate.simulate import clock_changes, simulate_rules
from tickwheel.schedule import Rule, Schedule


class Shell:
    """Runs commands on one store, and reads what they print."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str, str]:
        code = main(["schedules", *arguments, "--store", self._url])
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def json(self, *arguments: str) -> Any:
        code, out, err = self.run(*arguments, "-o", "json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Shell]:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)

    @app.task
    async def report(day: str = "today") -> None: ...

    async def fill() -> None:
        await app.schedules.put("nightly", "report", cron="0 2 * * *", tz="Asia/Taipei")
        await app.schedules.put("often", "report", every="15m", overlap="skip")

    app._access.run_sync(fill())
    yield Shell(url, capsys)
    app.sync.close()


@pytest.fixture
def in_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets this machine be in a zone."""

    def be_in(tz: str) -> None:
        monkeypatch.setenv("TZ", tz)
        time.tzset()

    yield be_in
    monkeypatch.undo()
    time.tzset()


def test_schedules_are_listed_with_their_next_ticks(shell: Shell) -> None:
    code, out, _ = shell.run("list")
    assert code == 0
    assert "nightly" in out and "02:00:00" in out and "Asia/Taipei" in out
    found = {each["name"]: each for each in shell.json("list")["schedules"]}
    assert found["nightly"]["cron"] == "0 2 * * *"
    assert found["nightly"]["next"].endswith("T18:00:00.000Z")
    assert found["often"]["overlap"] == "skip"


def test_a_schedule_is_paused_resumed_run_and_deleted(shell: Shell) -> None:
    assert shell.run("pause", "nightly")[:2] == (0, "nightly: paused\n")
    assert {each["name"]: each["paused"] for each in shell.json("list")["schedules"]} == {
        "nightly": True,
        "often": False,
    }
    assert shell.run("resume", "nightly")[0] == 0
    assert shell.json("run", "nightly")["job"].startswith("nightly@")
    assert shell.run("delete", "nightly")[0] == 0
    assert shell.run("delete", "nightly")[0] == 3
    assert [each["name"] for each in shell.json("list")["schedules"]] == ["often"]


def test_a_schedule_that_is_not_there_is_said_in_one_line(shell: Shell) -> None:
    code, out, err = shell.run("pause", "nigthly")
    assert (code, out) == (3, "")
    assert err.count("\n") == 1 and "the schedules are: nightly, often" in err


def test_what_can_not_be_read_is_listed_and_the_note_of_a_move_is_not(
    shell: Shell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)

    async def spoil() -> None:
        store = (await app.client()).store
        await store.put_schedule(Schedule(name="odd", rule='{"task": "t", "moon": 1}', next_ms=1))
        await store.put_schedule(
            Schedule(name=NOTE, rule='{"ids": ["x"], "paused": []}', next_ms=None, paused=True)
        )

    app._access.run_sync(spoil())
    app.sync.close()
    code, out, err = shell.run("list")
    assert code == 0
    assert "nightly" in out and "can't be read" in out and NOTE not in out + err
    assert "schedule odd does not tick: this release can't read it" in err
    found = {each["name"]: each for each in shell.json("list")["schedules"]}
    assert set(found) == {"nightly", "often", "odd"}
    assert "can't read it" in found["odd"]["problem"] and found["often"]["problem"] is None
    code, out, err = shell.run("simulate")
    assert code == 0 and "nightly" in out and "can't read them: odd" in err
    assert shell.json("simulate")["unreadable"] == ["odd"]
    id = shell.json("run", "often")["job"]
    assert main(["explain", id, "--store", url]) == 0
    capsys.readouterr()
    assert main(["doctor", "--store", url, "-o", "json"]) == 1
    by_name = {each["about"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "does not tick" in by_name["schedule odd"]["words"]
    assert "1 job in transit" in by_name["migrate-jobs"]["words"]
    assert f"schedule {NOTE}" not in by_name
    for verb in ("delete", "pause", "resume", "run"):
        code, _, err = shell.run(verb, NOTE)
        assert code == 2 and "Run the same command again" in err
    assert shell.run("resume", "odd")[0] == 2
    assert shell.run("delete", "odd")[0] == 0


def test_a_stored_interval_with_a_wrong_zone_is_a_problem_and_not_a_traceback(
    shell: Shell, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/jobs.db"
    app = App(url)
    rule = '{"every_ms": 3600000, "tz": "Europe/Pariss", "task": "t"}'

    async def spoil() -> None:
        await (await app.client()).store.put_schedule(Schedule(name="odd", rule=rule, next_ms=1))

    app._access.run_sync(spoil())
    app.sync.close()
    code, out, err = shell.run("list")
    assert code == 0 and "nightly" in out and "did you mean 'Europe/Paris'?" in err
    found = {each["name"]: each["problem"] for each in shell.json("list")["schedules"]}
    assert "'Europe/Pariss' is not a time zone" in found["odd"] and found["often"] is None
    assert shell.json("simulate")["unreadable"] == ["odd"]
    assert main(["doctor", "--store", url, "-o", "json"]) == 1
    by_name = {each["about"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "does not tick" in by_name["schedule odd"]["words"]


def test_the_next_ticks_of_an_expression_skip_no_clock_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--tz", "Europe/Paris", "--from", "2027-03-27T12:00", "--count", "2"]
    assert main(["schedules", "next", "30 2 * * *", *arguments, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ticks"] == [
        "2027-03-28T01:00:00.000Z",
        "2027-03-29T00:30:00.000Z",
    ]
    assert main(["schedules", "next", "30 2 * * *", *arguments]) == 0
    assert "Sun 2027-03-28 03:00:00" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["61 * * * *"], "minute"),
        (["* * * * *", "--tz", "Mars"], "Mars"),
        (["* * * * *", "--from", "soon"], "ISO time"),
    ],
)
def test_a_wrong_expression_zone_or_time_gets_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedules", "next", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and words in printed.err


# --- Here and there


def test_the_next_tick_is_shown_here_too_where_that_differs(
    shell: Shell, in_zone: Callable[[str], None]
) -> None:
    in_zone("Europe/Berlin")
    _, out, _ = shell.run("list")
    titles, nightly, *_ = out.splitlines()
    assert "NEXT IN ZONE" in titles and "NEXT LOCAL" in titles
    assert "02:00:00" in nightly and ("19:00:00" in nightly or "20:00:00" in nightly)
    [found, _] = shell.json("list")["schedules"]
    assert found["next_there"].endswith("T02:00:00.000+08:00")
    assert shell.run("delete", "often")[0] == 0
    in_zone("Asia/Taipei")
    assert "NEXT LOCAL" not in shell.run("list")[1]


# --- Simulating

DAY = ("--from", "2027-03-28T00:00Z", "--to", "2027-03-29T00:00Z")


def ms(text: str) -> int:
    return due_ms(datetime.fromisoformat(text))


def test_ticks_are_simulated_in_order_from_the_start_and_before_the_end(shell: Shell) -> None:
    arguments = ("simulate", "--from", "2027-01-01T17:45Z", "--to", "2027-01-01T18:15Z")
    found = shell.json(*arguments)
    assert [(each["at"], each["schedule"], each["beside"]) for each in found["ticks"]] == [
        ("2027-01-01T17:45:00.000Z", "often", []),
        ("2027-01-01T18:00:00.000Z", "nightly", ["often"]),
        ("2027-01-01T18:00:00.000Z", "often", ["nightly"]),
    ]
    assert found["ticks"][1]["there"] == "2027-01-02T02:00:00.000+08:00"
    assert (found["left_out"], found["cut_at"], found["changes"]) == (0, None, [])
    code, out, _ = shell.run(*arguments)
    assert code == 0
    assert "Sat 2027-01-02 02:00:00" in out and "same time as often" in out


def test_only_some_schedules_are_simulated(shell: Shell) -> None:
    day = ("simulate", "--from", "2027-01-01T17:45Z", "--to", "1h")
    found = shell.json(*day, "--name", "nightly")
    assert [each["schedule"] for each in found["ticks"]] == ["nightly"]
    both = shell.json(*day, "--name", "nightly", "--name", "often")
    assert both == shell.json(*day)
    code, out, err = shell.run(*day, "--name", "nigthly")
    assert (code, out) == (3, "")
    assert "no schedule is named 'nigthly'; the schedules are: nightly, often" in err


def test_times_without_an_offset_are_those_of_this_place(
    shell: Shell, in_zone: Callable[[str], None]
) -> None:
    in_zone("Asia/Taipei")
    [tick, *_] = shell.json("simulate", "--from", "2027-01-02T02:00", "--to", "1h")["ticks"]
    assert (tick["schedule"], tick["at"]) == ("nightly", "2027-01-01T18:00:00.000Z")


def test_a_paused_schedule_does_not_tick_and_that_is_said(shell: Shell) -> None:
    shell.run("pause", "often")
    found = shell.json("simulate", *DAY)
    assert {each["schedule"] for each in found["ticks"]} == {"nightly"}
    assert found["paused"] == ["often"]
    assert "skipped, because they are paused: often" in shell.run("simulate", *DAY)[2]


def test_many_ticks_are_cut_counted_and_summed_up(shell: Shell) -> None:
    code, out, err = shell.run("simulate", *DAY, "--limit", "5")
    assert code == 0
    assert "92 more ticks are not shown (--limit 5)" in err
    # Five ticks, 24 hours, and two lines of titles.
    assert len(out.splitlines()) == 5 + 24 + 2
    found = shell.json("simulate", *DAY, "--limit", "5")
    assert (len(found["ticks"]), found["left_out"], len(found["summary"])) == (5, 92, 24)
    assert max(part["most_at_once"] for part in found["summary"]) == 2


def test_a_rule_that_ticks_too_often_is_not_followed_to_the_end() -> None:
    start = ms("2027-01-01T00:00Z")
    found = simulate_rules({"a": Rule(every_ms=1000, task="t")}, start, start + 9_000, most=5)
    assert [tick.ms - start for tick in found.ticks] == [0, 1000, 2000, 3000, 4000]
    assert found.cut_ms == start + 5000


def test_a_rules_own_start_and_end_hold() -> None:
    start = ms("2027-01-01T00:00Z")
    rule = Rule(every_ms=1000, task="t", start_ms=start + 2500, end_ms=start + 4500)
    found = simulate_rules({"a": rule}, start, start + 9000)
    assert [tick.ms - start for tick in found.ticks] == [2500, 3500, 4500]


@pytest.mark.parametrize(
    ("tz", "day", "words"),
    [
        ("Europe/Paris", "2027-03-28", "clocks go forward 02:00 → 03:00"),
        ("Europe/Paris", "2026-10-25", "clocks go back 03:00 → 02:00"),
        ("Australia/Lord_Howe", "2026-10-04", "clocks go forward 02:00 → 02:30"),
        (
            "America/Havana",
            "2026-11-01",
            "clocks go back 01:00 → 00:00",
        ),
        (
            "Pacific/Apia",
            "2011-12-31",
            "clocks go forward 2011-12-30 00:00 → 2011-12-31 00:00",
        ),
    ],
)
def test_clock_changes_are_told_in_the_zones_own_time(tz: str, day: str, words: str) -> None:
    noon = ms(f"{day}T12:00Z")
    [change] = clock_changes(tz, noon - 43_200_000, noon + 43_200_000)
    assert change.words == words
    assert clock_changes("UTC", noon - 43_200_000, noon + 43_200_000) == []
    # The days around it, there, have none.
    assert clock_changes(tz, noon + 2 * 43_200_000, noon + 3 * 43_200_000) == []
    assert clock_changes(tz, noon - 5 * 43_200_000, noon - 4 * 43_200_000) == []


def test_ticks_on_the_day_of_a_clock_change_are_marked_and_no_others() -> None:
    rule = Rule(cron="30 2 * * *", tz="Europe/Paris", task="t")
    named = Rule(cron="CRON_TZ=Europe/Paris 30 4 * * *", task="t")
    start = ms("2027-03-27T00:00Z")
    found = simulate_rules({"a": rule, "b": named}, start, start + 3 * 86_400_000)
    marked = [(tick.name, tick.change is not None) for tick in found.ticks]
    assert marked == [
        ("a", False),
        ("b", False),
        ("a", True),
        ("b", True),
        ("a", False),
        ("b", False),
    ]
    assert found.ticks[2].ms == ms("2027-03-28T01:00Z")
    assert [change.tz for change in found.changes] == ["Europe/Paris"]


def test_schedules_of_the_code_are_simulated_before_any_store_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "shop_simulated.py").write_text(
        "from tickwheel import App\n"
        f"app = App('sqlite:///{tmp_path}/none.db')\n"
        "@app.every('6h')\n"
        "async def tidy() -> None: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = main(["schedules", "simulate", *DAY, "--app", "shop_simulated", "-o", "json"])
    printed = capsys.readouterr()
    assert code == 0
    assert [each["schedule"] for each in json.loads(printed.out)["ticks"]] == ["tidy"] * 4
    assert "only the schedules in the code" in printed.err
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "soon"], "ISO time"),
        (["--to", "soon"], "nor a duration (7d)"),
        (["--to", "2020-01-01T00:00Z"], "is not after --from"),
        (["--to", "367d"], "the longest range is 366d"),
        (["--from", "9999-12-31"], "is out of range"),
        (["--from", "0001-01-01"], "is out of range"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_a_stretch_of_time_that_is_none_gets_one_line(
    shell: Shell, arguments: list[str], words: str
) -> None:
    code, out, err = shell.run("simulate", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and words in err


@pytest.mark.parametrize("command", ["", "list", "next", "simulate", "run", "resume"])
def test_help_fits_a_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedules", *command.split(), "-h"]) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines()) < 80
    assert "..." not in out.partition("\n")[2], "something was cut"
