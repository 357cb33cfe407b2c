"""`tickwheel doctor`: what is guaranteed right now, what is wrong, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.loading import ask
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import FAILURE, OK, Column, emit_json, show_table

if TYPE_CHECKING:
    from tickwheel.store import Finding

STYLES = {"ok": "green", "warn": "yellow", "bad": "red bold"}


@click.command("doctor", cls=Verb)
@common
def doctor(where: Where, as_json: bool) -> int:
    """Say what is guaranteed, what is wrong, how to mend it.

    Exits with 1 where something is bad: jobs are late, stuck or in danger.
    """
    from tickwheel.config import unknown_variables
    from tickwheel.doctor import examine, of_variables, of_versions
    from tickwheel.store import Level

    # Of this machine first: it can be said whatever the store's state.
    found = [*of_versions(), *of_variables(unknown_variables())]
    found += ask(where, examine)
    if as_json:
        emit_json({"findings": [msgspec.to_builtins(each) for each in found]})
    else:
        _show(found)
    return FAILURE if any(each.level is Level.BAD for each in found) else OK


def _show(found: list[Finding]) -> None:
    show_table(
        [Column(""), Column("ABOUT"), Column("FINDING", whole=False), Column("FIX", whole=False)],
        [((each.level, STYLES[each.level]), each.about, each.words, each.fix) for each in found],
    )
