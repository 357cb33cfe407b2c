"""Print a command's output: tables for people, JSON for programs, messages, exit codes.

On a terminal, a table fits the width and wraps long cells. Anywhere else a row is one line of any
length, so that `grep` and `cut` see whole rows. Ids are never cut or wrapped.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from tickwheel.duration import duration_text, iso

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Exit codes: scripts rely on them, so their meaning never changes.
OK = 0
FAILURE = 1
USAGE = 2
# The same, from a worker process to the one that started it: see supervisor.py.
CHILD_USAGE = 78
NOT_FOUND = 3
CONFLICT = 4
STORE = 5
INTERRUPTED = 130

# Wide enough that nothing wraps when the output is not a terminal.
UNLIMITED = 100_000
# The least width of a column that may wrap on a narrow terminal, unless it says otherwise.
NARROWEST = 8
GAP = 2


# --- Streams


def set_up_streams() -> None:
    """Closed streams are empty, and what an encoding lacks is written as in `\\u2713`."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Takes the number of the closed one, which no other file should get.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: Any) -> None:
    """Drop what could not be written: Python tries again when it exits, and fails."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


# --- Messages


def complain(message: str) -> None:
    """One line on stderr: what went wrong."""
    label = click.style("error:", fg="red", bold=True) if _colourful(sys.stderr) else "error:"
    _tell(f"{label} {one_line(message)}\n", color=True)


def say(message: str) -> None:
    """A message for the person at the terminal; on stderr, so that it never mixes with data."""
    _tell(f"{message}\n")


def _tell(text: str, color: bool | None = None) -> None:
    """Write to stderr. If nobody can hear it, the exit code is the same."""
    try:
        click.echo(text, err=True, nl=False, color=color)
    except OSError:
        silence(sys.stderr)


def confirmed(question: str) -> bool:
    """Ask the person at the terminal; anything but yes is no."""
    # click's own prompt leaves a blank on stdout, where only data belongs.
    _tell(f"{question} [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def one_line(text: str) -> str:
    return clean(" ".join(text.split()))


def clean(text: str) -> str:
    """The text without terminal control characters: it may come from anyone's job."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def _colourful(stream: Any) -> bool:
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


# --- JSON


def emit_json(document: Any) -> None:
    """One JSON document on stdout."""
    import msgspec

    dumps = partial(json.dumps, indent=2, default=msgspec.to_builtins)
    text = dumps(document, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = dumps(document)
    click.echo(text)


# --- Times for people


def absolute(moment: datetime) -> str:
    return iso(moment).replace("T", " ")


def relative(ms: int, now_ms: int) -> str:
    """How far away a moment is: 'in 29m 12s', '3h 20m ago', 'now'."""
    away_ms = abs(ms - now_ms) // 1000 * 1000
    if not away_ms:
        return "now"
    return f"in {duration_text(away_ms)}" if ms > now_ms else f"{duration_text(away_ms)} ago"


# --- Tables


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `whole` cells are neither cut nor wrapped; others have `least` cells of width if a
    terminal is narrow, and are wrapped, or `cut` to one line."""

    title: str
    whole: bool = True
    right: bool = False
    least: int = NARROWEST
    cut: bool = False


Cell = tuple[str, str] | str


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows on stdout under a heading. A cell is a text, or a text and its style."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    cells = [[_text(cell) for cell in row] for row in rows]
    wanted = [
        max([len(column.title), *(_width(row[i]) for row in cells)])
        for i, column in enumerate(columns)
    ]
    gaps = GAP * (len(columns) - 1)
    widths = fitted(columns, wanted, _console(0, False).width - gaps)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            column.title,
            no_wrap=column.whole or column.cut,
            overflow="ellipsis" if column.cut else "fold",
            justify="right" if column.right else "left",
            width=width,
        )
    for row in cells:
        table.add_row(*row)
    _print(table, sum(widths) + gaps + GAP)


def fitted(columns: Sequence[Column], wanted: Sequence[int], room: int) -> list[int]:
    """The width of each column in so much room: as wanted, unless that is too much. Then those that
    are cut become narrower first, and of the others the widest; none becomes unreadable."""
    widths = list(wanted)
    for cut in (True, False):
        some = [i for i, each in enumerate(columns) if not each.whole and each.cut is cut]
        while sum(widths) > room:
            wider = [i for i in some if widths[i] > columns[i].least]
            if not wider:
                break
            widest = max(wider, key=lambda i: widths[i])
            widths[widest] -= 1
    return widths


def _width(text: Text) -> int:
    """The cells that the widest line of a text takes."""
    return max((line.cell_len for line in text.split("\n")), default=0)


def show_fields(fields: Iterable[tuple[str, Cell]], *, stderr: bool = False) -> None:
    """Print names and values, one below the other."""
    from rich.table import Table

    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields:
        table.add_row(name, _text(value))
    _print(table, 0, stderr=stderr)


def _text(cell: Cell) -> Text:
    from rich.text import Text

    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(clean(text), style=style)


def _print(table: Table, room: int, *, stderr: bool = False) -> None:
    console = _console(room, stderr)
    with console.capture() as printed:
        console.print(table)
    lines = (line.rstrip() for line in printed.get().splitlines())
    click.echo("\n".join(lines), err=stderr, color=True)


def _console(room: int, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(
        stderr=stderr,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    # If the terminal is too narrow for an id, its own wrapping is better than ours: a line that the
    # terminal wrapped is still copied as one.
    console.width = max(console.width, room) if console.file.isatty() else UNLIMITED
    return console
