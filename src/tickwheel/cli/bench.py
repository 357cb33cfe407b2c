"""`tickwheel bench`: measure every store here, and other libraries beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tickwheel.bench.catalogue import PEER_NAMES, STORE_NAMES, chosen
from tickwheel.cli.options import COUNT, Verb, as_output
from tickwheel.cli.output import FAILURE, OK, emit_json, say
from tickwheel.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from tickwheel.bench.catalogue import Subject
    from tickwheel.bench.plan import Plan
    from tickwheel.bench.run import Listener, Report
    from tickwheel.bench.sections import Cell, Section

# For a table that is not shown on a terminal.
WIDTH = 160


@click.command("bench", cls=Verb)
@click.option("--quick", is_flag=True, help="A first look: small numbers, one round, 2 minutes.")
@click.option("--long", is_flag=True, help="With 1,000,000 waiting jobs, and more rounds.")
@click.option(
    "--stores",
    metavar="A,B",
    help=f"Of {', '.join(STORE_NAMES)}. Default: all, or four of them with --quick.",
)
@click.option(
    "--peers",
    metavar="A,B",
    default="all",
    help=f"Of {', '.join(PEER_NAMES)}; or none. Each is installed into its own folder.",
)
@click.option("--rounds", metavar="N", type=COUNT, help="How often all is measured.")
@click.option(
    "--save",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write benchmarks.md, benchmarks.json and pictures to this folder.",
)
@click.option(
    "--environments",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where peers are installed. Default: tickwheel/bench in the user's cache.",
)
@as_output
def bench(
    quick: bool,
    long: bool,
    stores: str | None,
    peers: str,
    rounds: int | None,
    save: Path | None,
    environments: Path | None,
    as_json: bool,
) -> int:
    """Measure every store here, and other libraries beside it.

    Starts its own servers, on free ports and in temporary folders. The whole takes about 25
    minutes. Exits with 1 if Tickwheel itself failed; a peer that fails is noted.
    """
    from tickwheel.bench.environments import default_folder
    from tickwheel.bench.page import document, save as save_page
    from tickwheel.bench.run import run

    plan = _plan(quick, long, rounds)
    subjects = _subjects(stores, peers, plan)
    if save is not None and not os.access(save if save.exists() else save.parent, os.W_OK):
        raise UsageError(f"--save: can't write to {save}")
    with _ended_by_signals(), _progress(sys.stderr.isatty()) as listener:
        report = run(plan, subjects, environments or default_folder(), listener)
    if as_json:
        emit_json(document(report))
    else:
        _show(report)
    if save is not None:
        written = save_page(report, save)
        say(f"wrote {written[-1]} and {len(written) - 1} more files")
    return OK if _sound(report) else FAILURE


def _plan(quick: bool, long: bool, rounds: int | None) -> Plan:
    from dataclasses import replace

    from tickwheel.bench.plan import FULL, LONG, QUICK

    if quick and long:
        raise UsageError("--quick and --long exclude each other")
    plan = QUICK if quick else LONG if long else FULL
    return plan if rounds is None else replace(plan, rounds=rounds)


def _subjects(stores: str | None, peers: str, plan: Plan) -> list[Subject]:
    from tickwheel.bench.servers import check

    named = _words(stores) if stores is not None else list(plan.stores)
    if stores is not None:
        for name in {*named} & {*STORE_NAMES}:
            check(name)
    by_name = {name.lower(): name for name in PEER_NAMES}
    wanted = {"all": list(PEER_NAMES), "none": []}.get(peers)
    if wanted is None:
        wanted = [by_name.get(name.lower(), name) for name in _words(peers)]
    return chosen(named, wanted)


def _words(text: str) -> list[str]:
    return [word for each in text.split(",") if (word := each.strip())]


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Other signals end the run in the same way as Ctrl-C, so that no process is left running."""
    import signal

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _sound(report: Report) -> bool:
    """Whether Tickwheel has figures, and none of its measurements failed."""
    ours = {each.name for each in report.subjects if each.ours}
    failed = {name for name, _, _ in report.figures.failures}
    return bool(ours & set(report.figures.values)) and not ours & failed


# --- While it runs


@contextmanager
def _progress(terminal: bool) -> Iterator[Listener]:
    from tickwheel.bench.run import Listener

    if not terminal:

        class PlainLines(Listener):
            """One line for each subject."""

            last = ""

            def step(self, subject: str, what: str) -> None:
                if subject != self.last and what != "prepare":
                    say(f"measuring {subject}")
                    self.last = subject

            def note(self, words: str) -> None:
                say(words)

        yield PlainLines()
        return
    import rich.progress
    from rich.console import Console

    columns: Sequence[Any] = (
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}", markup=False),
    )
    with rich.progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=None)

        class Bars(Listener):
            """A bar, with what is being measured beside it."""

            def plan(self, steps: int) -> None:
                bar.update(task, total=steps)

            def step(self, subject: str, what: str) -> None:
                bar.update(task, description=f"{subject}: {what}")

            def done(self) -> None:
                bar.advance(task)

            def note(self, words: str) -> None:
                bar.console.print(words, markup=False, highlight=False)

        yield Bars()


# --- Afterwards


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from tickwheel.bench.page import lost, words
    from tickwheel.bench.sections import sections

    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    for section in sections(report):
        console.print(_table(section))
        console.print()
    if found := lost(report):
        table = Table(title="Where a peer is better", title_justify="left")
        for heading in ("store", "figure", "Tickwheel", "best peer", "by"):
            table.add_column(heading)
        for each in found:
            table.add_row(*words(each))
        console.print(table)


def _table(section: Section) -> Table:
    from rich.table import Table

    table = Table(
        title=section.title, caption=section.note, title_justify="left", caption_justify="left"
    )
    table.add_column("")
    for heading in section.headings:
        table.add_column(heading, justify="right")
    store = None
    for name, cells in section.lines.items():
        if store not in (None, name.rpartition(" · ")[2]):
            table.add_section()
        store = name.rpartition(" · ")[2]
        style = "bold" if name.startswith("Tickwheel") else ""
        table.add_row(name, *map(_shown, cells), style=style)
    return table


def _shown(cell: Cell) -> str:
    from tickwheel.bench.sections import number, span

    if cell.spread is None:
        return "[dim]–[/]"
    text, between = number(cell.spread.median), span(cell.spread)
    text = f"[green]{text}[/]" if cell.best else text
    return f"{text} [dim]{between}[/]" if between else text
