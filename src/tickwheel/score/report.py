"""The leaderboard of a contest: as a table, JSON, Markdown and a workbook."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tickwheel.clock import SystemClock
from tickwheel.duration import moment, moment_text
from tickwheel.score.contest import (
    COST_GOAL,
    EFFICIENCY_GOAL_MS,
    GOAL_INSTANCES,
    GOAL_MINUTES,
    Result,
    ranked,
)
from tickwheel.version import __version__

COLUMNS = (
    *("#", "strategy", "on", "cost", "lists", "failed locks", "single", "efficiency"),
    *("mean", "deviation", "worst", "done", "doubled", "valid"),
)
_TEMPLATE = Path(__file__).with_name("page.md")
# How many parts of the window the workbook's chart of lateness has.
PARTS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The results of a contest, the best first, and how it was run."""

    results: Sequence[Result]
    minutes: float
    instances: int
    seed: int
    ha: bool
    at_ms: int
    machine: str

    @classmethod
    def of(
        cls, results: Sequence[Result], *, minutes: float, instances: int, seed: int, ha: bool
    ) -> Scores:
        return cls(
            results=ranked(results),
            minutes=minutes,
            instances=instances,
            seed=seed,
            ha=ha,
            at_ms=SystemClock().now_ns() // 1_000_000,
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
            f"Python {platform.python_version()}, Tickwheel {__version__}, {_load()}",
        )

    @property
    def title(self) -> str:
        jobs = max((each.jobs for each in self.results), default=0)
        words = f"{jobs:,} jobs in {self.minutes:g} min, {self.instances} instances"
        return f"{words}, 3 of 5 killed" if self.ha else words

    @property
    def valid(self) -> bool:
        return all(each.valid for each in self.results)

    def rows(self) -> list[tuple[Any, ...]]:
        return [(n, *_row(each)) for n, each in enumerate(self.results, 1)]


def _load() -> str:
    """How busy the machine was: others make runs late as well."""
    try:
        return f"load average {os.getloadavg()[2]:.1f}"
    except OSError:
        return "load unknown"


def _row(each: Result) -> tuple[Any, ...]:
    asked = each.queries
    return (
        *(each.name, each.where, each.cost, asked.lists, asked.failed_locks, asked.singles),
        *(each.efficiency_ms, each.mean_ms, each.deviation_ms, each.worst_ms),
        *(f"{each.done:,} of {each.jobs:,}", _doubled(each), "yes" if each.valid else _why(each)),
    )


def _doubled(each: Result) -> str:
    if not each.doubled:
        return "0"
    return f"{each.doubled} ({each.explained} by a kill)"


def _why(each: Result) -> str:
    """What it did not do of what is required."""
    unexplained = each.doubled - each.explained
    found = {"lost": each.lost, "doubled": unexplained, "early": each.early, "late": each.too_late}
    return "no: " + ", ".join(f"{count} {what}" for what, count in found.items() if count)


def _ms(ms: float) -> str:
    return f"{ms:,.1f}" if ms < 100 else f"{ms:,.0f}"


# --- Documents


def document(report: Scores) -> dict[str, Any]:
    """The report for programs."""
    return {
        "at": moment(report.at_ms).isoformat(),
        "machine": report.machine,
        "minutes": report.minutes,
        "instances": report.instances,
        "seed": report.seed,
        "ha": report.ha,
        "valid": report.valid,
        "entrants": [
            {
                "name": each.name,
                "where": each.where,
                "cost": each.cost,
                "queries": {
                    "lists": each.queries.lists,
                    "failed_locks": each.queries.failed_locks,
                    "singles": each.queries.singles,
                    "writes": each.queries.writes,
                },
                "efficiency_ms": round(each.efficiency_ms, 3),
                "mean_ms": round(each.mean_ms, 3),
                "deviation_ms": round(each.deviation_ms, 3),
                "worst_ms": round(each.worst_ms, 3),
                "jobs": each.jobs,
                "done": each.done,
                "lost": each.lost,
                "doubled": each.doubled,
                "doubled_by_kill": each.explained,
                "early": each.early,
                "too_late": each.too_late,
                "valid": each.valid,
            }
            for each in report.results
        ],
    }


def markdown(report: Scores, page: str | None = None) -> str:
    """The page docs/score.md with this contest in it; the other kind of contest stays as it is in
    the page that there was."""
    text = _TEMPLATE.read_text()
    for kind in ("leaderboard", "ha"):
        mine = kind == ("ha" if report.ha else "leaderboard")
        section = _section(report) if mine else _section_in(page or "", kind)
        text = text.replace(_marked("", kind), _marked(section, kind))
    return text


def _marked(section: str, kind: str) -> str:
    return f"<!-- {kind} -->\n{section}<!-- end of {kind} -->"


def _section_in(page: str, kind: str) -> str:
    start, end = _marked("|", kind).split("|")
    return page.partition(start)[2].partition(end)[0] if start in page and end in page else ""


def _section(report: Scores) -> str:
    title = "With three of five instances killed" if report.ha else "The leaderboard"
    rows = [["#", *COLUMNS[1:]], ["---"] * len(COLUMNS), *map(_words, report.rows())]
    lines = [
        f"## {title}",
        "",
        f"{report.title}; {moment_text(report.at_ms)}, {report.machine}, seed {report.seed}.",
        "",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        *(_HA if report.ha else _goals(report)),
    ]
    return "\n".join(lines) + "\n"


_HA = (
    "Each strategy had the same instances killed at the same moments, by SIGKILL and SIGTERM in",
    "turn; they were not replaced. A job that ran when its instance was killed runs again once its",
    "lock or lease has run out: a double that the kill explains. Jobs may be 30 s later here.",
)


def _goals(report: Scores) -> list[str]:
    if (report.minutes, report.instances) != (GOAL_MINUTES, GOAL_INSTANCES):
        return []
    ours = [each for each in report.results if each.name.startswith("Tickwheel, ahead")]
    cheap = [each.where for each in ours if each.cost < COST_GOAL]
    exact = [each.where for each in ours if each.efficiency_ms < EFFICIENCY_GOAL_MS]
    return [
        f"Goals for Tickwheel in ten minutes: a cost under {COST_GOAL:,}, met on "
        f"{_those(cheap, ours)}; an",
        f"efficiency under {EFFICIENCY_GOAL_MS:g} ms, met on {_those(exact, ours)}.",
    ]


def _those(some: Sequence[str], of: Sequence[Result]) -> str:
    if len(some) == len(of):
        return "all stores"
    return " and ".join(some) or "none of them"


def _words(row: Sequence[Any]) -> list[str]:
    """As text."""
    return [_ms(cell) if isinstance(cell, float) else _plain(cell) for cell in row]


def _plain(cell: int | str) -> str:
    return f"{cell:,}" if isinstance(cell, int) else cell


# --- The workbook


def workbook(report: Scores, path: Path) -> None:
    """An Excel workbook: the leaderboard, lateness over time, and charts of both."""
    from tickwheel.score.servers import require

    require("a workbook", "xlsxwriter")
    import xlsxwriter

    with xlsxwriter.Workbook(str(path)) as book:
        bold = book.add_format({"bold": True})
        number = book.add_format({"num_format": "#,##0"})
        decimal = book.add_format({"num_format": "#,##0.0"})
        board = book.add_worksheet("leaderboard")
        board.write(0, 0, report.title, bold)
        board.write(1, 0, f"{moment_text(report.at_ms)}, {report.machine}, seed {report.seed}")
        board.write_row(3, 0, COLUMNS, bold)
        for n, row in enumerate(report.rows(), 4):
            for column, cell in enumerate(row):
                form = {int: number, float: decimal}.get(type(cell))
                board.write(n, column, cell, form)
        board.set_column(1, 1, 34)
        board.set_column(2, len(COLUMNS), 12)
        board.freeze_panes(4, 3)
        last = 3 + len(report.results)
        for place, (column, title) in enumerate(((3, "cost"), (7, "efficiency, ms"))):
            board.insert_chart(last + 2, 1 + 6 * place, _bars(book, column, title, last))
        _lateness_sheet(book, report, bold, decimal)


def _bars(book: Any, column: int, title: str, last: int) -> Any:
    chart = book.add_chart({"type": "bar"})
    chart.add_series(
        {
            "name": title,
            "categories": ["leaderboard", 4, 1, last, 2],
            "values": ["leaderboard", 4, column, last, column],
        }
    )
    chart.set_title({"name": f"{title} (less is better)"})
    # One is thousands of times another.
    chart.set_x_axis({"log_base": 10})
    chart.set_y_axis({"reverse": True})
    chart.set_legend({"none": True})
    chart.set_size({"width": 640, "height": 360})
    return chart


def _lateness_sheet(book: Any, report: Scores, bold: Any, decimal: Any) -> None:
    sheet = book.add_worksheet("lateness")
    names = [f"{each.name}, {each.where}" for each in report.results]
    sheet.write_row(0, 0, ["second", *names], bold)
    length_s = max((due_s for each in report.results for due_s, _ in each.lateness), default=1.0)
    width_s = max(length_s / PARTS, 1.0)
    for part in range(PARTS):
        sheet.write(part + 1, 0, round(part * width_s))
    for column, each in enumerate(report.results, 1):
        for part, mean_ms in _means(each, width_s).items():
            sheet.write(part + 1, column, mean_ms, decimal)
    sheet.set_column(0, len(names), 14)
    chart = book.add_chart({"type": "line"})
    for column in range(1, len(names) + 1):
        chart.add_series(
            {
                "name": ["lateness", 0, column],
                "categories": ["lateness", 1, 0, PARTS, 0],
                "values": ["lateness", 1, column, PARTS, column],
            }
        )
    chart.set_title({"name": "mean lateness by due time, ms"})
    chart.set_y_axis({"log_base": 10, "min": 0.1})
    chart.set_size({"width": 960, "height": 420})
    sheet.insert_chart(1, len(names) + 2, chart)


def _means(result: Result, width_s: float) -> dict[int, float]:
    """The mean lateness in each part of the window."""
    parts: dict[int, list[float]] = {}
    for due_s, late_ms in result.lateness:
        parts.setdefault(min(int(due_s / width_s), PARTS - 1), []).append(late_ms)
    # A logarithmic axis has no zero.
    return {part: max(sum(all_ms) / len(all_ms), 0.1) for part, all_ms in parts.items()}
