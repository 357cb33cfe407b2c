"""The figures of `tickwheel bench`: statistics, comparisons, tables, pictures, the page."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tickwheel.bench.catalogue import PEER_NAMES, PEERS, PROGRAMS, STORE_NAMES, Subject, chosen
from tickwheel.bench.environments import environment
from tickwheel.bench.figures import (
    MEASURES,
    Comparison,
    Figures,
    Reading,
    Spread,
    comparisons,
    quantile,
)
from tickwheel.bench.measure import distances, rate, steps
from tickwheel.bench.page import document, draw, markdown, save
from tickwheel.bench.plan import FULL, LONG, QUICK
from tickwheel.bench.plots import LEFT, ROOM, Bar, Scale, bars
from tickwheel.bench.processes import cpu_s, memory_mb
from tickwheel.bench.run import Report
from tickwheel.bench.sections import number, sections, span
from tickwheel.errors import UsageError

SVG = "{http://www.w3.org/2000/svg}"
DRAIN, START = Reading("drain_one"), Reading("start_p50")


def report(**figures: dict[str, list[float]]) -> Report:
    """Of Tickwheel, Huey and RQ on Redis: a measure's key, and the values of each library."""
    subjects = chosen(["redis"], ["Huey", "RQ"])
    made = Report(FULL, subjects, versions={each.name: "1.0" for each in subjects})
    made.machine = {
        "date": "2026-11-18 12:00 UTC",
        "tickwheel": "1.0",
        "python": "3.11",
        "system": "Linux",
        "processor": "one",
        "cores": "2",
        "load": "0.0",
    }
    for key, values in figures.items():
        for library, rounds in values.items():
            for value in rounds:
                made.figures.add(f"{library} · redis", Reading(key), value)
    return made


# --- Statistics


@pytest.mark.parametrize(
    ("share", "expected"), [(0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.991, 100), (1, 100)]
)
def test_a_quantile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert quantile(list(range(100, 0, -1)), share) == expected


def test_the_quantiles_of_one_value_are_that_value() -> None:
    assert {quantile([7.0], share) for share in (0, 0.5, 0.99, 1)} == {7.0}


def test_a_spread_has_the_median_the_least_and_the_most() -> None:
    assert Spread.of([5, 1, 3, 100]) == Spread(median=4, least=1, most=100, count=4)


def test_a_rate_counts_from_the_first_start_to_the_last() -> None:
    assert rate([0, 500_000_000, 1_000_000_000], 11) == 10
    assert rate([5], 1) is None
    assert rate([], 0) is None


def test_a_job_that_starts_early_is_as_wrong_as_one_that_is_late() -> None:
    assert distances([-500.0, 0.0, 3.0]) == ([500, 0, 3], 1)


def test_readings_come_in_the_order_of_the_measures_and_of_how_many_wait() -> None:
    figures = Figures()
    wanted = [
        Reading("enqueue_sync"),
        Reading("drain_one"),
        Reading("late_light_p50", 1_000),
        Reading("late_light_p50", 10_000),
    ]
    for reading in reversed(wanted):
        figures.add("a", reading, 1)
    figures.add("a", Reading("drain_batches"), None)
    assert figures.readings() == wanted


# --- Comparisons


def test_tickwheel_is_compared_with_the_best_peer_on_the_same_store() -> None:
    made = report(
        drain_one={"Tickwheel": [10], "Huey": [5], "RQ": [2]},
        start_p50={"Tickwheel": [4], "Huey": [8], "RQ": [2]},
        memory_idle={"Tickwheel": [30]},
    )
    found = comparisons(made.figures, made.stores, made.figures.readings())
    assert found == [
        Comparison("redis", DRAIN, 10, "Huey", 5),
        Comparison("redis", START, 4, "RQ", 2),
    ]
    assert [each.factor for each in found] == [2, 0.5]


def test_a_peer_that_needs_nothing_is_infinitely_better() -> None:
    assert Comparison("redis", START, 4, "RQ", 0).factor == 0
    assert Comparison("redis", START, 0, "RQ", 4).factor == float("inf")


# --- Tables


def test_the_best_of_a_store_is_marked_by_what_is_better() -> None:
    made = report(
        drain_one={"Tickwheel": [10, 12, 11], "Huey": [50, 60, 70], "RQ": [2]},
        start_p50={"Tickwheel": [4], "Huey": [8], "RQ": [5]},
    )
    best = {
        name
        for section in sections(made)
        for name, cells in section.lines.items()
        for cell in cells
        if cell.best
    }
    drain, latency = (
        {name: cells[0] for name, cells in section.lines.items()} for section in sections(made)
    )
    assert best == {"Huey · redis", "Tickwheel · redis"}
    assert drain["Huey · redis"].best and latency["Tickwheel · redis"].best
    assert drain["Tickwheel · redis"].spread == Spread(11, 10, 12, 3)


def test_nobody_is_best_alone_on_a_store() -> None:
    made = report(drain_one={"Tickwheel": [10]})
    assert not any(cell.best for each in sections(made) for [cell] in each.lines.values())


def test_a_table_has_only_what_was_measured() -> None:
    made = report(drain_one={"Tickwheel": [10]})
    [section] = sections(made)
    assert (section.title, section.headings, list(section.lines)) == (
        "Drain",
        ("one process",),
        ["Tickwheel · redis"],
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.2"), (7, "7"), (12.34, "12.3"), (123.4, "123"), (1234.5, "1,234")],
)
def test_a_number_has_the_digits_that_matter(value: float, text: str) -> None:
    assert number(value) == text


def test_a_large_number_is_rounded_to_hundreds() -> None:
    assert number(28_456) == "28,500"


def test_one_round_has_no_span() -> None:
    assert span(Spread.of([4])) == ""
    assert span(Spread.of([4, 2, 3])) == "2–4"


# --- Pictures


def drawn(svg: str) -> tuple[list[float], list[str]]:
    """The widths of the bars, and all texts."""
    tree = ElementTree.fromstring(svg)
    bars = [
        float(rect.attrib["width"])
        for rect in tree.iter(f"{SVG}rect")
        if rect.get("height") == "14"
    ]
    return bars, [text.text or "" for text in tree.iter(f"{SVG}text")]


def test_bars_are_as_long_as_their_figures() -> None:
    items = [
        Bar("redis", "us & <them>", Spread.of([100]), True),
        Bar("redis", "peer", Spread.of([50]), False),
        Bar("nats", "none", Spread.of([0]), False),
    ]
    widths, texts = drawn(bars("drain", "jobs/s", items))
    assert widths == [ROOM, ROOM / 2, 1]
    assert {"us & <them>", "redis", "nats", "100", "50", "drain (jobs/s)"} <= set(texts)


def test_a_line_shows_the_least_and_the_most() -> None:
    svg = bars("drain", "jobs/s", [Bar("redis", "us", Spread.of([50, 25, 100]), True)])
    [line] = [
        each
        for each in ElementTree.fromstring(svg).iter(f"{SVG}line")
        if each.get("y1") == each.get("y2")
    ]
    assert float(line.attrib["x1"]) == LEFT + ROOM / 4
    assert float(line.attrib["x2"]) == LEFT + ROOM


def test_each_power_of_ten_is_as_far_from_the_next_on_a_logarithmic_scale() -> None:
    scale = Scale.of([0.5, 100], log=True)
    places = [scale.x(each) for each in (0.1, 1, 10, 100)]
    steps = {round(after - before, 6) for before, after in itertools.pairwise(places)}
    assert len(steps) == 1 and places[0] == LEFT and places[-1] == LEFT + ROOM
    assert scale.ticks() == [0.1, 1, 10, 100]
    assert scale.x(0) == LEFT


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [[0.0], [0.0, 3.0], [1.0], [10.0], [1e-3, 1e6]])
def test_every_scale_has_ticks_within_the_picture(values: list[float], log: bool) -> None:
    scale = Scale.of(values, log=log)
    assert scale.ticks()
    assert all(LEFT <= scale.x(each) <= LEFT + ROOM for each in [*scale.ticks(), *values])


def test_growth_is_drawn_only_if_jobs_waited() -> None:
    made = report()
    made.figures.add("Tickwheel · redis", Reading("drain", 0), 100)
    assert draw(made)["growth"] == ""
    made.figures.add("Tickwheel · redis", Reading("drain", 10_000), 90)
    _, texts = drawn(draw(made)["growth"])
    assert {"Tickwheel, 0", "Tickwheel, 10,000"} <= set(texts)


# --- The page


def test_the_page_says_where_a_peer_is_better_the_worst_first() -> None:
    made = report(
        enqueue_sync={"Tickwheel": [1000], "Huey": [3000]},
        drain_one={"Tickwheel": [10], "Huey": [100], "RQ": [5]},
        start_p50={"Tickwheel": [1], "Huey": [2]},
        result_p50={"Tickwheel": [100], "Huey": [96]},
    )
    page = markdown(made, [])
    _, _, table = page.partition("## Where a peer is better\n")
    rows = [line for line in table.partition("\n## ")[0].splitlines() if line.startswith("| r")]
    assert rows == [
        "| redis | drain, one process | 10 jobs/s | Huey: 100 jobs/s | 10.0 times |",
        "| redis | enqueue, one after the other, sync | 1,000 jobs/s | Huey: 3,000 jobs/s "
        "| 3.0 times |",
    ]


def test_the_page_says_if_no_peer_is_better() -> None:
    page = markdown(report(drain_one={"Tickwheel": [10], "Huey": [1]}), [])
    assert "Nowhere in this run" in page


def test_the_page_says_why_a_figure_is_missing_and_what_failed() -> None:
    made = report(drain_one={"Tickwheel": [10]})
    for library in ("Huey", "RQ"):
        made.figures.excuse(f"{library} · redis", "enqueue_async", "no async API")
    made.figures.fail("RQ · redis", "drain", ("drain_one",), "its workers ended:\n boom")
    page = markdown(made, [])
    assert (
        "- enqueue, one after the other, async: no async API (Huey · redis, RQ · redis)\n" in page
    )
    assert "- drain, one process: it failed (RQ · redis)\n" in page
    assert page.endswith("## What failed\n\n- RQ · redis: drain: its workers ended: boom\n")


def test_the_page_warns_of_a_busy_machine() -> None:
    made = report(drain_one={"Tickwheel": [10]})
    assert "was busy" not in markdown(made, [])
    made.busy = True
    assert "was busy" in markdown(made, [])


def test_saving_replaces_the_pictures_of_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "old.svg").touch()
    save(report(drain_one={"Tickwheel": [10]}), tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")) == [
        "benchmarks.json",
        "benchmarks.md",
        "benchmarks/drain.svg",
    ]
    assert "![drain](benchmarks/drain.svg)" in (tmp_path / "benchmarks.md").read_text()


def test_the_document_has_every_value_of_every_round() -> None:
    made = document(report(drain_one={"Tickwheel": [10, 12, 11]}))
    assert made["subjects"][0]["figures"] == [
        {
            "key": "drain_one",
            "waiting": None,
            "unit": "jobs/s",
            "median": 11,
            "min": 10,
            "max": 12,
            "values": [10, 12, 11],
        }
    ]


# --- What is measured


def test_every_peer_has_a_program_and_excuses_only_what_is_measured() -> None:
    parts = {"add", "add_async", "add_many", "call", "processes"}
    for subject in chosen(STORE_NAMES, PEER_NAMES):
        text = (PROGRAMS / f"{subject.program}.py").read_text()
        assert set(subject.lacks) <= parts
        for part in parts - {"processes"} - set(subject.lacks):
            assert f"def {part}(" in text, f"{subject.name} lacks {part}"


def test_tickwheel_comes_first_on_each_store() -> None:
    found = chosen(["redis", "postgresql"], ["RQ", "PgQueuer"])
    assert [each.name for each in found] == [
        "Tickwheel · redis",
        "RQ · redis",
        "Tickwheel · postgresql",
        "PgQueuer · postgresql",
    ]


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"no store 'oracle'; there are: memory, sqlite"):
        chosen(["oracle"], [])
    with pytest.raises(UsageError, match=r"no peer 'cron'; there are: Celery, "):
        chosen(["redis"], ["cron"])


def test_worker_commands_start_as_many_processes_as_asked_for() -> None:
    subject = Subject("A", "redis", "a", commands=("run -n {n}",), each=("one {url}",))
    assert subject.worker_commands(2, "redis://x") == [
        ["run", "-n", "2"],
        ["one", "redis://x"],
        ["one", "redis://x"],
    ]


def test_a_subject_without_packages_runs_with_tickwheel(tmp_path: Path) -> None:
    assert environment(chosen(["sqlite"], [])[0], tmp_path) is None
    assert all(peer.packages for peer in PEERS)


@pytest.mark.parametrize("plan", [QUICK, FULL, LONG])
def test_only_the_first_rounds_are_with_many_waiting(plan: object) -> None:
    subject = chosen(["redis"], [])[0]
    assert isinstance(plan, type(FULL))
    many = replace(plan, rounds=2)
    first, second = ([name for name, _, _ in steps(subject, many, n)] for n in (1, 2))
    assert [name for name in first if name not in second] == [
        name for name in first if name.endswith("waiting")
    ]
    assert any(name.endswith("waiting") for name in first)


def test_every_figure_that_a_step_can_fail_is_known() -> None:
    for subject in chosen(STORE_NAMES, PEER_NAMES):
        for _, keys, _ in steps(subject, LONG, 1):
            assert set(keys) <= set(MEASURES)


def test_processes_that_are_gone_cost_nothing() -> None:
    assert cpu_s([2**22 + 1]) is None
    assert memory_mb([2**22 + 1]) is None
