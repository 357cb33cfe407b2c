"""The tables of a report, for any output: which figures stand side by side, and which is best."""

from __future__ import annotations

from dataclasses import dataclass

from tickwheel.bench.figures import Figures, Reading, Spread
from tickwheel.bench.run import Report

# Keys of measures under their headings; those that depend on how many wait are tables of their own
# for each number.
_ENQUEUE = {
    "enqueue_sync": "one by one, sync",
    "enqueue_async": "one by one, async",
    "enqueue_at_once": "1,000 at once",
    "enqueue_bulk": "in bulk",
}
_DRAIN = {
    "drain_one": "one process",
    "drain_several": "{processes} processes",
    "drain_batches": "in batches of 100",
}
_COSTS = {"cpu_worker": "worker, µs a job", "cpu_server": "server, µs a job"}
_LATENCY = {
    "start_p50": "start, p50",
    "start_p99": "start, p99",
    "result_p50": "result, p50",
    "result_p99": "result, p99",
}
_PUNCTUALITY = {
    "late_light_p50": "light, p50",
    "late_light_p99": "light, p99",
    "late_heavy_p50": "heavy, p50",
    "late_heavy_p99": "heavy, p99",
    "early": "early",
    "missing": "not seen",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure, or why there is none."""

    reading: Reading
    spread: Spread | None
    reason: str = ""
    # The best on its store, if there is another to compare with.
    best: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    note: str
    headings: tuple[str, ...]
    # By the name of the subject.
    lines: dict[str, tuple[Cell, ...]]


def sections(report: Report) -> list[Section]:
    """All tables that have a figure."""
    plan = report.plan
    found = [
        _section(report, "Enqueue", "Jobs a second, added by one process.", _rows(_ENQUEUE)),
        _section(
            report,
            "Drain",
            "Jobs a second that do nothing, from the first start to the last.",
            {Reading(key): title.format(processes=plan.processes) for key, title in _DRAIN.items()},
        ),
        _section(report, "CPU", "CPU time per job while one process drains.", _rows(_COSTS)),
        _section(
            report,
            "From enqueue to start and to result",
            "Milliseconds from the call, with an idle worker.",
            _rows(_LATENCY),
        ),
    ]
    levels = sorted(
        {reading.waiting for reading in report.figures.readings() if reading.waiting is not None}
    )
    for level in levels:
        if level:
            loads = [("light", plan.light), ("heavy", plan.heavy)]
            named = " and ".join(
                f"{count / plan.over_s:g} ({load})" for load, count in loads if count
            )
            note = (
                f"Milliseconds between due and start, early or late, at {named} jobs a second; how "
                "many started early, and how many had not started "
                f"{plan.patience_s:g} s after the last was due."
            )
            title = f"Punctuality, {level:,} jobs waiting for later"
            found.append(_section(report, title, note, _rows(_PUNCTUALITY, level)))
    memory = _rows({"memory_idle": "empty store"})
    memory |= {Reading("memory", level): f"{level:,} waiting" for level in levels if level}
    found.append(
        _section(report, "Memory", "MB of one worker, all of its processes together.", memory)
    )
    if plan.growth:
        growth = {Reading("enqueue", level): f"enqueue, {level:,}" for level in levels}
        growth |= {Reading("drain", level): f"drain, {level:,}" for level in levels}
        note = "Jobs a second while so many others wait for later: one process, one by one."
        found.append(_section(report, "Growth of cost", note, growth))
    return [section for section in found if section.lines]


def _rows(titles: dict[str, str], waiting: int | None = None) -> dict[Reading, str]:
    return {Reading(key, waiting): title for key, title in titles.items()}


def _section(report: Report, title: str, note: str, wanted: dict[Reading, str]) -> Section:
    """With the readings and subjects that have a figure in it."""
    figures = report.figures
    measured = set(figures.readings())
    readings = {reading: heading for reading, heading in wanted.items() if reading in measured}
    lines = {}
    for subject in report.subjects:
        if any(figures.spread(subject.name, reading) for reading in readings):
            lines[subject.name] = tuple(
                _cell(figures, report, subject.name, subject.store, reading) for reading in readings
            )
    return Section(title, note, tuple(readings.values()), lines)


def _cell(figures: Figures, report: Report, name: str, store: str, reading: Reading) -> Cell:
    spread = figures.spread(name, reading)
    reasons = figures.reasons.get(name, {})
    if spread is None:
        return Cell(reading, None, reasons.get(reading.key) or reasons.get("", ""))
    others = [
        other.median
        for library in report.stores[store]
        if (other := figures.spread(f"{library} · {store}", reading)) is not None
    ]
    top = (max if reading.measure.more else min)(others)
    # That no job is early or missing is no achievement.
    best = len(others) > 1 and spread.median == top and reading.key not in ("early", "missing")
    return Cell(reading, spread, best=best)


def number(value: float) -> str:
    """With about three digits that matter."""
    if abs(value) >= 10_000:
        return f"{round(value, -2):,.0f}"
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}"


def span(spread: Spread) -> str:
    """The least and the most of several rounds; empty if there was one."""
    return f"{number(spread.least)}–{number(spread.most)}" if spread.count > 1 else ""
