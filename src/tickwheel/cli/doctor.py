"""`tickwheel doctor`: show what the store guarantees, what is wrong, and how to fix it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import FAILURE, OK, Column, emit_json, show_table

if TYPE_CHECKING:
    from tickwheel.store import Finding

STYLES = {"ok": "green", "warn": "yellow", "bad": "red bold"}


@click.command("doctor", cls=Verb)
@common
def doctor(where: Where, as_json: bool) -> int:
    """Show what is guaranteed, what is wrong, and how to fix it.

    As a health check: exits with 1 if anything is bad (jobs are late, stuck or at risk), with 5 if
    the store is unreachable, and with 0 otherwise, whatever the warnings.
    """
    from tickwheel.config import unknown_variables
    from tickwheel.operate.doctor import examine, of_variables, of_versions
    from tickwheel.store import Level

    # This machine first: it can be checked whatever the store's state.
    found = [*of_versions(), *of_variables(unknown_variables())]
    found += ask(where, examine)
    if as_json:
        emit_json({"findings": [msgspec.to_builtins(each) for each in found]})
    else:
        _show(found)
    return FAILURE if any(each.level is Level.BAD for each in found) else OK


def _show(found: list[Finding]) -> None:
    # On a terminal the fix has lines of its own: a command between two columns can't be copied.
    before = "\n→ " if sys.stdout.isatty() else "  → "
    show_table(
        [Column(""), Column("ABOUT"), Column("FINDING AND FIX", whole=False)],
        [
            (
                (each.level, STYLES[each.level]),
                each.about,
                each.words + (before + each.fix if each.fix else ""),
            )
            for each in found
        ],
    )
