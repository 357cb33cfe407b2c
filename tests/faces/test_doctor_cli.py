"""`tickwheel doctor` and `tickwheel config`, on real files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from test_cli import Cli, cli, ids, one_error

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
    assert "its first job is due since" in said.out
    assert cli("doctor", "--store", "sqlite:///none.db").code == 5


def test_config_shows_each_setting_and_its_source(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tickwheel.toml").write_text('app = "shop:app"\n')
    monkeypatch.setenv("TICKWHEEL_STORE", "nats://ann:secret@host")
    monkeypatch.setenv("TICKWHEEL_LAESE", "1s")
    said = cli("config")
    assert "secret" not in said.out and "ann:***@host" in said.out
    assert "TICKWHEEL_LAESE is no setting" in said.err
    settings = cli("config", "-o", "json").json["settings"]
    assert settings["app"] == {"value": "shop:app", "source": "tickwheel.toml"}
    assert settings["lease"] == {"value": "15s", "source": "default"}
    monkeypatch.setenv("TICKWHEEL_LEASE", "soon")
    assert "TICKWHEEL_LEASE: 'soon'" in one_error(cli("config"))


def test_commands_find_the_store_of_the_app_in_the_settings(
    cli: Cli, ids: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TICKWHEEL_STORE")
    (tmp_path / "mine.py").write_text("from tickwheel import App\napp = App('sqlite:///jobs.db')\n")
    assert cli("queues").code == 5
    (tmp_path / "tickwheel.toml").write_text('app = "mine:app"\n')
    assert "mail" in cli("queues").out
