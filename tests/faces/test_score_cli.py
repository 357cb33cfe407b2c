"""`tickwheel score`: a short contest with real servers, instances and kills."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Cli, cli, one_error

__all__ = ["cli"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_three_of_five_instances_are_killed_and_nothing_is_lost(cli: Cli, tmp_path: Path) -> None:
    said = cli(
        *("score", "--minutes", "0.2", "--ha", "--only", "prepare-10s,tickwheel-sqlite"),
        *("--xlsx", "score.xlsx", "--markdown", "score.md", "-o", "json"),
    )
    assert said.code == 0, said.err + said.out
    document = said.json
    assert document["ha"] and document["valid"]
    assert {each["where"] for each in document["entrants"]} == {"PostgreSQL", "SQLite"}
    for each in document["entrants"]:
        assert each["done"] == each["jobs"] > 10 and each["cost"] > 0
    assert (tmp_path / "score.xlsx").stat().st_size > 5_000
    assert "instances killed" in (tmp_path / "score.md").read_text()


def test_mistakes_are_told_before_anything_is_started(cli: Cli) -> None:
    for given, words in (
        (["--only", "poll-2s"], "the strategies are poll-1s"),
        (["--only", ","], "names no strategy"),
        (["--xlsx", "no/such/folder.xlsx"], "can't be written"),
    ):
        said = cli("score", *given)
        assert said.code == 2 and words in one_error(said)
