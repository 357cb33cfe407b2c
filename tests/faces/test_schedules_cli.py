"""`tickwheel schedules`, on a real file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tickwheel import App
from tickwheel.cli import main


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

    app._run_sync(fill())
    yield Shell(url, capsys)
    app.sync.close()


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
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "there are: nightly, often" in err


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
