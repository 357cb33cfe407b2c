"""`tickwheel doctor` and `tickwheel config`, on real files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from command_line import Cli, cli, ids, one_error

__all__ = ["cli", "ids"]


def test_the_doctor_tells_of_a_store(cli: Cli, ids: dict[str, str]) -> None:
    said = cli("doctor")
    assert said.code == 0
    for words in ("versions", "time zones", "survive a killed process", "queue mail", "1 dead job"):
        assert words in said.out
    by_name = {each["about"]: each for each in cli("doctor", "-o", "json").json["findings"]}
    assert by_name["durability"]["level"] in ("ok", "warn")
    assert by_name["queue mail"]["fix"].startswith("tickwheel dead list --queue mail")


def test_the_doctor_exits_with_1_where_something_is_bad(cli: Cli, ids: dict[str, str]) -> None:
    with closing(sqlite3.connect("jobs.db")) as db, db:
        db.execute("update job set due_ms = due_ms - 3600 * 1000 * 24 * 30 where state = 'waiting'")
    said = cli("doctor")
    assert said.code == 1
    assert "its first job has been due for" in said.out
    assert cli("doctor", "--store", "sqlite:///none.db").code == 5


def test_config_shows_each_setting_and_its_source(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tickwheel.toml").write_text('app = "shop:app"\n')
    monkeypatch.setenv("TICKWHEEL_STORE", "nats://ann:hunter2@host")
    monkeypatch.setenv("TICKWHEEL_LAESE", "1s")
    said = cli("config")
    assert "hunter2" not in said.out and "ann:***@host" in said.out
    assert "TICKWHEEL_LAESE is not a setting" in said.err
    settings = cli("config", "-o", "json").json["settings"]
    assert settings["app"] == {"value": "shop:app", "source": "tickwheel.toml"}
    assert settings["lease"] == {"value": "15s", "source": "default"}
    monkeypatch.setenv("TICKWHEEL_LEASE", "soon")
    assert "TICKWHEEL_LEASE: 'soon'" in one_error(cli("config"))


def test_config_shows_what_the_apps_code_sets(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from tickwheel import App\napp = App('sqlite:///own.db', retention='3d')\nplain = App()\n"
    )
    (tmp_path / "its_own.py").write_text(code)

    def shown(*argv: str) -> tuple[str, str]:
        store = cli("config", *argv, "-o", "json").json["settings"]["store"]
        return store["value"], store["source"]

    # Named on the command line, the app uses its own store.
    own = "sqlite:///own.db", "its_own:app"
    assert shown() == ("sqlite:///jobs.db", "TICKWHEEL_STORE")
    assert shown("--app", "its_own:app") == own
    assert shown("--app", "its_own:plain") == ("sqlite:///jobs.db", "TICKWHEEL_STORE")
    settings = cli("config", "--app", "its_own:app", "-o", "json").json["settings"]
    assert settings["retention"] == {"value": "3d", "source": "its_own:app"}
    assert settings["dead_retention"] == {"value": "90d", "source": "default"}
    # Named by a setting, a store that was chosen comes first, as in all commands.
    monkeypatch.setenv("TICKWHEEL_APP", "its_own:app")
    assert shown() == ("sqlite:///jobs.db", "TICKWHEEL_STORE")
    monkeypatch.delenv("TICKWHEEL_STORE")
    assert shown() == own
    monkeypatch.setenv("TICKWHEEL_APP", "its_own:gone")
    said = cli("config")
    assert (said.code, said.err.startswith("note: without the app's own settings")) == (0, True)
    assert cli("config", "--app", "its_own:gone").code == 2
    assert not (tmp_path / "own.db").exists()


def test_commands_find_the_store_of_the_app_in_the_settings(
    cli: Cli, ids: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TICKWHEEL_STORE")
    (tmp_path / "mine.py").write_text("from tickwheel import App\napp = App('sqlite:///mine.db')\n")
    (tmp_path / "jobs.db").rename(tmp_path / "mine.db")
    assert cli("queues").code == 5
    (tmp_path / "tickwheel.toml").write_text('app = "mine:app"\n')
    assert "mail" in cli("queues").out
