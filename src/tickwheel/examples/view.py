"""Show the story on a terminal: a live screen, or plain lines if there is no terminal."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import AbstractContextManager
from pathlib import Path

from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tickwheel import State
from tickwheel.examples.account import Lateness, Summary
from tickwheel.examples.story import SLOT_S, Scene, Story, Timeline, WorkerSeen

REFRESH_S = 1 / 8
# Without a terminal: how often to print a status line.
PLAIN_EVERY_S = 5.0
# Rows of a frame without the events, and of the chart in it.
FIXED_ROWS, CHART_ROWS = 20, 4
# Jobs due within a second are in a worker's wheel; the others are only in the store.
WHEEL_SLOTS = round(1 / SLOT_S)
PICTURE_WIDTH, PICTURE_HEIGHT = 100, 29
BLOCKS = " ▁▂▃▄▅▆▇█"


async def show(timeline: Timeline, console: Console, *, picture: Path | None = None) -> Summary:
    """Play the story on this console; `picture` is an SVG file for a late frame of it."""
    story, recording = Story(timeline), Recording()
    on_screen = console.is_terminal and not console.is_dumb_terminal
    with Screen(console) if on_screen else Lines(console) as face:
        async with asyncio.TaskGroup() as group:
            playing = group.create_task(story.run())
            while not playing.done():
                await asyncio.wait([playing], timeout=REFRESH_S)
                story.look_ahead()
                face.draw(story.scene)
                recording.draw(story.scene)
    if picture is not None:
        recording.save(playing.result(), picture)
    return playing.result()


class Screen(Live):
    """A live screen."""

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, auto_refresh=False)

    def draw(self, scene: Scene) -> None:
        self.update(frame(scene, self.console.width, self.console.height), refresh=True)


class Lines(AbstractContextManager["Lines"]):
    """For a log: each event as a line, and a status line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told, self._next_line = 0, PLAIN_EVERY_S

    def __exit__(self, *_: object) -> None: ...

    def draw(self, scene: Scene) -> None:
        for event in scene.events[self._told :]:
            self._console.print(f"{event.at:5.1f} s  {event.words}", soft_wrap=True)
        self._told = len(scene.events)
        if scene.now >= self._next_line:
            self._console.print(f"{scene.now:5.1f} s  {one_line(scene)}", soft_wrap=True)
            self._next_line += PLAIN_EVERY_S


class Recording:
    """The busiest frame, soon after the dead worker was replaced, as SVG."""

    def __init__(self) -> None:
        self._taken = False
        self._console = Console(
            record=True,
            width=PICTURE_WIDTH,
            file=io.StringIO(),
            force_terminal=True,
            color_system="truecolor",
            no_color=False,
        )

    def draw(self, scene: Scene) -> None:
        if not self._taken and scene.now >= scene.timeline.replace + 1.5:
            self._console.print(frame(scene, PICTURE_WIDTH, PICTURE_HEIGHT))
            self._taken = True

    def save(self, summary: Summary, path: Path) -> None:
        self._console.print(summary_table(summary))
        svg = self._console.export_svg(title="tickwheel demo")
        # Without web fonts: the picture loads nothing from other servers.
        path.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL), encoding="utf-8")


# --- A frame


def frame(scene: Scene, width: int, height: int) -> RenderableType:
    """The whole screen; it fits 80 columns and 24 rows, and uses extra rows for events."""
    half = width // 2
    upper, lower = Table.grid(expand=True), Table.grid(expand=True)
    for row in (upper, lower):
        row.add_column(width=half)
        row.add_column(width=width - half)
    upper.add_row(_orders(scene), _deadlines(scene, width - half - 4))
    lower.add_row(_jobs(scene), _workers(scene))
    return Group(
        _heading(scene), upper, lower, _events(scene, min(max(height - FIXED_ROWS, 3), 10))
    )


def _heading(scene: Scene) -> RenderableType:
    heading, progress = Table.grid(expand=True), Table.grid(expand=True)
    heading.add_column(no_wrap=True)
    heading.add_column(justify="right", no_wrap=True)
    heading.add_row(
        Text(scene.chapter, style="bold"), f"{scene.now:.1f} of {scene.timeline.ends:.0f} s"
    )
    progress.add_row(ProgressBar(total=scene.timeline.ends, completed=scene.now))
    return Group(heading, progress)


def _orders(scene: Scene) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=9)
    table.add_column(width=5, justify="right")
    table.add_column(ratio=1)
    most = scene.timeline.orders
    table.add_row("placed", f"{scene.orders.total():,}", "")
    for state, colour in (("open", "yellow"), ("paid", "green"), ("cancelled", "cyan")):
        count = scene.orders[state]
        table.add_row(state, f"{count:,}", Bar(most, 0, count, color=colour))
    table.add_row("in stock", f"{scene.pieces:,}", Bar(most, 0, scene.pieces, color="blue"))
    table.add_row("parcels", f"{scene.parcels:,}", Bar(most, 0, scene.parcels, color="green"))
    return Panel(table, title="orders", title_align="left", border_style="dim")


def _deadlines(scene: Scene, width: int) -> RenderableType:
    """How many deadlines are in each upcoming slot: the wheel's, then the store's."""
    wide = max(width // max(len(scene.coming), 1), 1)
    most = max([scene.timeline.rate * SLOT_S, *scene.coming])
    chart = Text(no_wrap=True)
    for row in reversed(range(CHART_ROWS)):
        for slot, count in enumerate(scene.coming):
            filled = min(max(round(count / most * CHART_ROWS * 8) - row * 8, 0), 8)
            colour = "magenta" if slot < WHEEL_SLOTS else "cyan"
            chart.append(BLOCKS[filled] * (wide - 1) + " " * (wide > 1), style=colour)
        chart.append("\n")
    far = f"in {scene.timeline.pay_within:g} s"
    overdue = f"overdue {scene.overdue}" if scene.overdue else ""
    room = wide * len(scene.coming) - len(far) - 3
    chart.append("now").append(f"{overdue:^{max(room, 0)}}", style="bold red").append(far)
    chart.append("\n█", style="magenta").append(" in a wheel  ")
    chart.append("█", style="cyan").append(" in the store")
    return Panel(chart, title="upcoming deadlines", title_align="left", border_style="dim")


def _jobs(scene: Scene) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=9)
    table.add_row("", *(Text(queue.name, style="bold") for queue in scene.queues))
    for state in State:
        counts = [getattr(queue, state) for queue in scene.queues]
        style = "red" if state is State.DEAD and any(counts) else ""
        table.add_row(state, *(f"{count:,}" for count in counts), style=style)
    for column in table.columns[1:]:
        column.justify = "right"
    return Panel(table, title="jobs by queue", title_align="left", border_style="dim")


def _workers(scene: Scene) -> RenderableType:
    lines = [_worker(worker) for worker in scene.workers]
    lines += [Text()] * (4 - len(lines))
    late = late_words(Lateness.of(scene.late_ms)).replace(" ms,", ",")
    lines.append(Text(f"late by  {late}", no_wrap=True, overflow="ellipsis"))
    taken = Lateness.of(scene.taken_over_ms)
    words = f"taken over  {taken.jobs}, at most {ms(taken.max_ms)} late" if taken.jobs else ""
    lines.append(Text(words, style="magenta"))
    return Panel(Group(*lines), title="workers", title_align="left", border_style="dim")


def _worker(worker: WorkerSeen) -> Text:
    words = f"worker {worker.number}    pid {worker.pid}  "
    if worker.killed is not None:
        return Text(words + "† kill -9", style="red")
    if worker.info is None:
        return Text(words + "starting", style="dim")
    return Text(words + f"holds {worker.info.held}")


def _events(scene: Scene, rows: int) -> RenderableType:
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", style="dim", min_width=6)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for event in scene.events[-rows:]:
        table.add_row(f"{event.at:.1f}", Text(event.words, style=event.style))
    return table


# --- Words


def one_line(scene: Scene) -> str:
    orders, late = scene.orders, Lateness.of(scene.late_ms)
    return (
        f"-- placed {orders.total()}, open {orders['open']}, paid {orders['paid']}, "
        f"cancelled {orders['cancelled']}, in stock {scene.pieces}; late by {late_words(late)}"
    )


def late_words(late: Lateness) -> str:
    if not late.jobs:
        return "no deadline has passed yet"
    return f"p50 {ms(late.p50_ms)}, p99 {ms(late.p99_ms)}, max {ms(late.max_ms)}"


def ms(value: int) -> str:
    """Whole milliseconds, with 0 shown as less than one."""
    if value >= 1000:
        return f"{value / 1000:.1f} s"
    return f"{value} ms" if value else "<1 ms"


# --- The summary


def summary_table(summary: Summary) -> RenderableType:
    """The results, and whether they add up."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, words in _facts(summary):
        facts.add_row(name, words)
    return Group(Text(), facts, Text(), _punctuality(summary), Text(), _verdict(summary))


def _facts(summary: Summary) -> list[tuple[str, str]]:
    answers = ", ".join(f"{count} {answer}" for answer, count in summary.answers.items())
    sold = summary.pieces_before - summary.pieces_after
    return [
        ("orders", f"{summary.placed} placed: {summary.paid} paid, {summary.cancelled} cancelled"),
        ("cancel jobs of paid orders", answers),
        ("stock", f"{summary.pieces_before} pieces, {sold} sold, {summary.pieces_after} left"),
        ("parcels", f"{summary.parcels} sent for {summary.paid} paid orders"),
        (
            "while the warehouse was down",
            f"{summary.retried} jobs succeeded after a retry; {summary.dead} were dead, "
            f"rerun later: {summary.rerun} done",
        ),
        (
            "held by the killed worker",
            f"{summary.taken_over} jobs, taken over; {summary.asked_twice} asked twice for their "
            "parcel, got one",
        ),
        ("schedule", f"{summary.ticks} ticks, one report each"),
    ]


def _punctuality(summary: Summary) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("start after the deadline", no_wrap=True)
    for title in ("jobs", "p50", "p99", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, late in (
        ("all cancelled orders", summary.punctuality),
        ("  by live workers", summary.by_live_workers),
        ("  held by the killed worker", summary.in_killed_hand),
    ):
        figures = [ms(late.p50_ms), ms(late.p99_ms), ms(late.max_ms)] if late.jobs else ["-"] * 3
        table.add_row(name, str(late.jobs), *figures)
    return table


def _verdict(summary: Summary) -> RenderableType:
    if not summary.wrong:
        return Text(
            "✓ nothing lost, nothing early, nothing duplicated; the stock adds up", "bold green"
        )
    return Text("\n".join(f"✗ {words}" for words in summary.wrong), "bold red")
