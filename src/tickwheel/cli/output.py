"""What a command gives back: tables for people, JSON for programs, messages, an exit code.

A table on a terminal keeps to its width and wraps what is long. Anywhere else a row is one line
of any length, so that `grep` and `cut` see whole rows. Ids are never cut or wrapped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from tickwheel.span import span_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

# Exit codes: scripts rely on them, so they never change their meaning.
OK = 0
FAILURE = 1
USAGE = 2
# The same, said by a worker process to the one that started it: see supervisor.py.
CHILD_USAGE = 78
NOT_FOUND = 3
CONFLICT = 4
STORE = 5
INTERRUPTED = 130

# Wide enough that nothing wraps where nobody looks at a screen.
UNLIMITED = 100_000
# A column that may wrap still gets this much of a narrow terminal.
NARROWEST = 8
GAP = 2


# --- Messages


def complain(message: str) -> None:
    """One line on stderr: what went wrong."""
    label = click.style("error:", fg="red", bold=True) if _colourful(sys.stderr) else "error:"
    click.echo(f"{label} {one_line(message)}", err=True, color=True)


def say(message: str) -> None:
    """A message for the person at the terminal; it never mixes with the data."""
    click.echo(message, err=True)


def confirmed(question: str) -> bool:
    """Ask the person at the terminal; anything but yes is no."""
    # click's own prompt leaves a blank on stdout, where only data belongs.
    click.echo(f"{question} [y/N] ", err=True, nl=False)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def one_line(text: str) -> str:
    return clean(" ".join(text.split()))


def clean(text: str) -> str:
    """The text without anything that could steer a terminal: it may come from anybody's job."""
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
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def iso(moment: datetime) -> str:
    """A UTC time in ISO 8601, to the millisecond: 2026-01-31T09:30:00.000Z."""
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- Times for people


def absolute(moment: datetime) -> str:
    return iso(moment).replace("T", " ")


def relative(ms: int, now_ms: int) -> str:
    """How far away a moment is: 'in 29m 12s', '3h 20m ago', 'now'."""
    away_ms = abs(ms - now_ms) // 1000 * 1000
    if not away_ms:
        return "now"
    return f"in {span_text(away_ms)}" if ms > now_ms else f"{span_text(away_ms)} ago"


# --- Tables


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `whole` cells are neither cut nor wrapped."""

    title: str
    whole: bool = True
    right: bool = False


Cell = tuple[str, str] | str


def show_table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows on stdout under a line of titles. A cell is a text, or a text and its style."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.title,
            no_wrap=column.whole,
            overflow="fold",
            justify="right" if column.right else "left",
        )
    cells = [[_text(cell) for cell in row] for row in rows]
    for row in cells:
        table.add_row(*row)
    _print(table, _room(columns, cells))


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


def _room(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> int:
    """The width below which whole cells would be cut."""
    room = 0
    for i, column in enumerate(columns):
        widest = max([len(column.title), *(row[i].cell_len for row in rows)])
        room += GAP + (widest if column.whole else min(widest, NARROWEST))
    return room


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
    # Where the terminal is too narrow for an id, its own wrapping is better than ours: a line
    # that the terminal wrapped is still copied as one.
    console.width = max(console.width, room) if console.file.isatty() else UNLIMITED
    return console
