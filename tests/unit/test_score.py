"""The rules of the contest: what is counted, what is required, and how it is told."""

from __future__ import annotations

import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tickwheel.errors import BadConfig
from tickwheel.score.contest import (
    AHEAD_S,
    LATEST_MS,
    RECOVERY_MS,
    JobRun,
    Queries,
    Result,
    arrivals,
    judged,
    kills,
    ranked,
)
from tickwheel.score.entrants import BY_KEY, ENTRANTS
from tickwheel.score.report import Scores, document, markdown, workbook

START = 1_000_000.0
DUE = {"a": START + 10_000, "b": START + 20_000}


def run(id: str, late_ms: float = 0, *, ended: bool = True, instance: int = 0) -> JobRun:
    started_ms = DUE[id] + late_ms
    return JobRun(id, instance, started_ms, ended_ms=started_ms + 20 if ended else None)


def result(*runs: JobRun, killed: dict[int, float] | None = None, **asked: int) -> Result:
    return judged(
        "s", "db", DUE, runs, Queries(**asked), start_ms=START, killed_ms=killed or {}
    )  # fmt: skip


# --- Jobs and kills


def test_the_jobs_are_a_function_of_the_seed_and_are_asked_for_ahead() -> None:
    jobs = arrivals(1, 10)
    assert jobs == arrivals(1, 10) != arrivals(2, 10)
    assert 1_500 < len(jobs) < 1_900
    assert all(AHEAD_S[0] <= job.due_s - job.at_s <= AHEAD_S[1] for job in jobs)
    assert len({job.id for job in jobs}) == len(jobs)


def test_three_of_five_are_killed_in_both_ways_while_jobs_come() -> None:
    for seed in range(20):
        plan = kills(seed, 10, 5)
        assert len({each.instance for each in plan}) == 3
        assert {each.number for each in plan} == {signal.SIGKILL, signal.SIGTERM}
        assert all(0 < each.at_s < 600 for each in plan)


# --- The judgement


def test_cost_and_efficiency_are_what_the_rules_say() -> None:
    found = result(run("a", 10), run("b", 30), lists=3, failed_locks=2, singles=7, writes=99)
    assert found.cost == 3 * 100 + 2 * 10 + 7
    assert (found.mean_ms, found.deviation_ms, found.efficiency_ms) == (20, 10, 30)
    assert found.valid and found.worst_ms == 30


def test_a_job_that_is_lost_early_late_or_doubled_makes_it_invalid() -> None:
    assert result(run("a"), run("b")).valid
    assert not result(run("a")).valid
    assert not result(run("a"), run("b", ended=False)).valid
    assert not result(run("a"), run("b", -1)).valid
    assert not result(run("a"), run("b", LATEST_MS + 1)).valid
    assert not result(run("a"), run("b"), run("b", 500, instance=1)).valid


def test_a_kill_explains_a_double_and_time_to_recover() -> None:
    runs = run("a"), run("b", ended=False, instance=2), run("b", 17_000, instance=1)
    found = result(*runs, killed={2: START})
    assert (found.doubled, found.explained, found.done, found.valid) == (1, 1, 2, True)
    assert not result(*runs, killed={3: START}).valid
    assert result(run("a"), run("b", LATEST_MS + RECOVERY_MS), killed={2: START}).valid


def test_the_valid_come_first_then_cost_and_lateness_count_alike() -> None:
    cheap = result(run("a", 10), run("b", 10), lists=1)
    exact = result(run("a", 1), run("b", 1), lists=1)
    dear = result(run("a", 1), run("b", 1), lists=1_000)
    wrong = result(run("a"))
    assert ranked([wrong, dear, cheap, exact]) == [exact, cheap, dear, wrong]


# --- Entrants


def test_entrants_are_told_apart_and_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(BY_KEY) == len(ENTRANTS) == 8
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BadConfig, match=r"needs psycopg, .* pip install 'tickwheel\[score\]'"):
        BY_KEY["poll-1s"].check()
    BY_KEY["tickwheel-sqlite"].check()


# --- The report


def report(**more: Any) -> Scores:
    given: dict[str, Any] = {"minutes": 10, "instances": 5, "seed": 1, "ha": False} | more
    results = [result(run("a", 5), run("b", 5), lists=9), result(run("a"))]
    return Scores.of(results, **given)


def test_the_document_has_all_figures() -> None:
    found = document(report())
    first, second = found["entrants"]
    assert (first["cost"], first["efficiency_ms"], first["valid"]) == (900, 5, True)
    assert (second["lost"], second["valid"], found["valid"]) == (1, False, False)


def test_the_page_keeps_the_other_kind_of_contest() -> None:
    page = markdown(report())
    assert "## The leaderboard" in page and "instances killed" not in page
    assert "no: 1 lost" in page and "Goals for Tickwheel" in page
    both = markdown(report(ha=True), page)
    assert "## The leaderboard" in both and "## With three of five instances killed" in both
    again = markdown(report(minutes=1), both)
    assert again.count("## The leaderboard") == 1 and "in 1 min" in again
    assert "## With three" in again and "Goals for" not in again


def test_the_workbook_has_two_sheets_and_three_charts(tmp_path: Path) -> None:
    workbook(report(), tmp_path / "score.xlsx")
    with zipfile.ZipFile(tmp_path / "score.xlsx") as book:
        names = book.namelist()
    assert sum(name.startswith("xl/worksheets/sheet") for name in names) == 2
    assert sum(name.startswith("xl/charts/chart") for name in names) == 3
