"""Draw a frame of `tickwheel top` for a terminal of 80 columns or more. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tickwheel.cli.output import clean, one_line, relative
from tickwheel.cli.top_frame import SLOT_MS, Coming, Frame, QueueRow
from tickwheel.duration import duration_text, moment_text
from tickwheel.job import Outcome
from tickwheel.store import WorkerInfo

# From this width on, figures are next to the chart.
WIDE = 110
# Lines that are always there: titles, axes, blanks.
FRAME_LINES = 17
MARGIN = 7
LOAD_CELLS = 10
NAME_CELLS = 24
# Jobs later than this are highlighted.
LATE_MS = 1_000
# How many tasks that no worker knows are named.
UNKNOWN_SHOWN = 3

_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class RowLimits:
    """How many rows each part may take."""

    queues: int
    workers: int
    failures: int
    chart: int

    @classmethod
    def within(cls, height: int | None, frame: Frame) -> RowLimits:
        """What fits a terminal of this height; None: no limit."""
        if height is None:
            return cls(queues=50, workers=50, failures=10, chart=4)
        rows = max(height - FRAME_LINES, 8)
        chart = 4 if rows >= 16 else 2
        rows -= chart
        queues = min(max(rows * 2 // 5, 2), len(frame.queues))
        workers = min(max(rows * 3 // 10, 2), len(frame.workers))
        # What the others leave.
        return cls(queues, workers, max(rows - queues - workers, 2), chart)


def view(frame: Frame, title: str, *, width: int, height: int | None) -> RenderableType:
    """The frame, drawn."""
    room = RowLimits.within(height, frame)
    parts: list[RenderableType] = [_title(frame, title, width)]
    if frame.away is not None:
        lost = f"calls to the store fail, retrying: {one_line(frame.away)}"
        parts.append(Text(lost, "bold red"))
    parts += [Text(), *_queues(frame.queues, room.queues)]
    parts += [Text(), *_workers(frame, room.workers)]
    parts += _unknown(frame)
    parts += [Text(), *_wheel(frame, room.chart, width)]
    parts += [Text(), *_failures(frame, room.failures, width)]
    return Group(*parts)


def _title(frame: Frame, title: str, width: int) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(no_wrap=True, justify="right")
    name = Text.assemble(("tickwheel top", "bold"), f"  {clean(title)}")
    grid.add_row(name, Text(moment_text(frame.now_ms), "dim"))
    grid.width = width
    return grid


# --- Queues and workers


def _queues(rows: Sequence[QueueRow], most: int) -> Iterable[RenderableType]:
    table = _table("QUEUE")
    for title in ("WAITING", "RUNNING", "DONE", "DEAD"):
        table.add_column(title, justify="right", no_wrap=True, min_width=7)
    for title in ("DONE/S", "DEAD/S"):
        table.add_column(title, justify="right", no_wrap=True)
    # The busiest first: a store may have more queues than the screen has lines.
    busiest = sorted(rows, key=lambda row: -(row.info.waiting + row.info.running))
    shown = sorted(busiest[:most], key=lambda row: row.info.name)
    for row in shown:
        info = row.info
        table.add_row(
            Text.assemble(info.name, ("  paused", "yellow") if info.paused else ""),
            _count(info.waiting),
            _count(info.running, "yellow"),
            _count(info.done),
            _count(info.dead, "red"),
            _rate(row.done_per_s, "green"),
            _rate(row.dead_per_s, "red"),
        )
    yield table
    if not rows:
        yield Text("no queues: no job has been added yet", "dim")
    yield from _more(len(rows) - len(shown))


def _workers(frame: Frame, most: int) -> Iterable[RenderableType]:
    table = _table("WORKER")
    table.add_column("LOAD", no_wrap=True)
    table.add_column("HELD", justify="right", no_wrap=True)
    table.add_column("SEEN", justify="right", no_wrap=True, min_width=7)
    table.add_column("QUEUES", no_wrap=True, overflow="ellipsis")
    busiest = sorted(frame.workers, key=lambda each: -each.running / each.concurrency)
    shown = sorted(busiest[:most], key=lambda each: each.name)
    for worker in shown:
        table.add_row(
            Text(clean(worker.name)),
            _load(worker),
            _count(worker.held - worker.running),
            Text(relative(worker.seen_ms, frame.now_ms), "dim"),
            Text(", ".join(worker.queues)),
        )
    yield table
    if not frame.workers:
        yield Text("no workers: start one with tickwheel worker MODULE:APP", "yellow")
    yield from _more(len(frame.workers) - len(shown))


def _unknown(frame: Frame) -> list[RenderableType]:
    lines = [clean(each.words(frame.now_ms)) for each in frame.unknown]
    more = len(lines) - UNKNOWN_SHOWN
    shown = [*lines[:UNKNOWN_SHOWN], *([f"and {more:,} more such tasks"] if more > 0 else [])]
    return [Text(line, "red", no_wrap=True, overflow="ellipsis") for line in shown]


def _load(worker: WorkerInfo) -> Text:
    part = min(worker.running / worker.concurrency, 1.0)
    # A small load must not look like none, nor a nearly full one like full.
    full = min(max(round(part * LOAD_CELLS), part > 0), LOAD_CELLS - (part < 1))
    style = "yellow" if part == 1 else "green"
    return Text.assemble(
        ("█" * full, style),
        ("░" * (LOAD_CELLS - full), "dim"),
        f" {worker.running:,}/{worker.concurrency:,}",
    )


# --- The wheel


def _wheel(frame: Frame, chart: int, width: int) -> Iterable[RenderableType]:
    coming = frame.coming
    cut = f"  based on {coming.looked_at:,} of {coming.waiting:,} waiting jobs"
    yield Text.assemble(("UPCOMING", "bold"), (cut if coming.at_least else "", "dim"))
    drawn = _chart(coming, chart)
    if width >= WIDE:
        grid = Table.grid(padding=(0, 3, 0, 0))
        gap = [Text()] if chart > 2 else []
        grid.add_row(drawn, Group(*_figures(coming), *gap, *_punctuality(frame)))
        yield grid
        return
    yield drawn
    yield Text(" · ").join(_figures(coming))
    yield Text()
    yield Text(" ").join(_punctuality(frame))


def _figures(coming: Coming) -> list[Text]:
    least = "≥" if coming.at_least else ""
    minute = sum(coming.slots[: 60_000 // SLOT_MS])
    return [
        Text(f"{least}{coming.overdue:,} overdue", "yellow" if coming.overdue else ""),
        Text(f"{least}{minute:,} within a minute"),
        Text(f"{least}{sum(coming.slots):,} within {duration_text(len(coming.slots) * SLOT_MS)}"),
        Text(f"{least}{coming.later:,} later"),
    ]


def _punctuality(frame: Frame) -> list[Text]:
    on_time = frame.punctuality
    if on_time is None:
        return [Text("PUNCTUALITY", "bold"), Text("no jobs done yet", "dim")]
    figures = (("p50", on_time.p50_ms), ("p99", on_time.p99_ms), ("max", on_time.max_ms))
    late = Text(" ").join(
        Text(f"{name} {duration_text(ms)}", "yellow" if ms > LATE_MS else "green")
        for name, ms in figures
    )
    last = relative(on_time.last_ms, frame.now_ms)
    return [
        Text("PUNCTUALITY", "bold"),
        late,
        Text(f"(last {on_time.jobs:,} done, latest {last})", "dim"),
    ]


def _chart(coming: Coming, height: int) -> Text:
    most, count = max(coming.slots), len(coming.slots)
    lines = bars(coming.slots, height)
    if coming.at_least and not coming.later:
        # Beyond the last job that was read, the count is unknown.
        lines[-1] = lines[-1].rstrip() + "·" * (count - len(lines[-1].rstrip()))
    text = Text()
    for i, line in enumerate(lines):
        label = f"{most:,}" if i == 0 and most else ""
        text.append(f"{label:>{MARGIN - 2}} ┤" if label else " " * (MARGIN - 1) + "│", "dim")
        text.append(f"{line}\n", "cyan")
    text.append(" " * (MARGIN - 1) + "└" + "─" * count + "\n", "dim")
    text.append(" " * MARGIN + _axis(count), "dim")
    return text


def bars(counts: Sequence[int], height: int) -> list[str]:
    """Counts as vertical bars of `height` lines, the top line first."""
    most = max(counts) or 1
    steps = height * (len(_BLOCKS) - 1)
    # Even the smallest count is visible.
    tall = [-(-count * steps // most) for count in counts]
    lines = []
    for line in range(height - 1, -1, -1):
        base = line * (len(_BLOCKS) - 1)
        lines.append("".join(_BLOCKS[min(max(h - base, 0), len(_BLOCKS) - 1)] for h in tall))
    return lines


def _axis(count: int) -> str:
    """'now         +2m         +4m …', each under its slot."""
    every = 2 * 60_000 // SLOT_MS
    labels = [f"+{duration_text(slot * SLOT_MS)}" for slot in range(every, count, every)]
    return "".join(f"{label:<{every}}" for label in ["now", *labels]).rstrip()


# --- Failures


_STYLES = {Outcome.DEAD: "red", Outcome.LOST: "red", Outcome.RETRY: "yellow"}


def _failures(frame: Frame, most: int, width: int) -> Iterable[RenderableType]:
    if not frame.failures:
        yield Text.assemble(("LAST FAILURES", "bold"), ("  none", "dim"))
        return
    yield Text("LAST FAILURES", "bold")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    rows = [
        (
            Text(relative(each.ms, frame.now_ms), "dim"),
            Text(str(each.outcome), _STYLES.get(each.outcome, "")),
            Text(clean(each.task)),
            *([] if width < WIDE else [Text(clean(each.id))]),
            Text(one_line(each.error)),
        )
        for each in frame.failures[:most]
    ]
    # Only the error gives way on a narrow screen.
    left, most_cells = width, NAME_CELLS if width < WIDE else NAME_CELLS + 8
    for cells in list(zip(*rows, strict=True))[:-1]:
        cells_wide = min(max(cell.cell_len for cell in cells), most_cells)
        table.add_column(no_wrap=True, overflow="ellipsis", width=cells_wide)
        left -= cells_wide + 2
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=max(left, 1))
    for row in rows:
        table.add_row(*row)
    yield table


# --- Cells


def _table(title: str) -> Table:
    """A table whose first column has the same width in all tables, so that nothing moves."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(title, no_wrap=True, overflow="ellipsis", min_width=NAME_CELLS)
    return table


def _count(count: int, style: str = "") -> Text:
    return Text(f"{count:,}", style if count else "dim")


def _rate(rate: float | None, style: str) -> Text:
    if rate is None:
        return Text("-", "dim")
    return Text(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}", style if rate else "dim")


def _more(count: int) -> Iterable[Text]:
    if count > 0:
        yield Text(f"and {count:,} more", "dim")
