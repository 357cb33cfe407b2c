"""`tickwheel config`: the settings in effect here, and where each came from."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.loading import without_password
from tickwheel.cli.options import Verb, as_output
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.config import DEFAULT, NAMES, Config, load, unknown_variables


@click.command("config", cls=Verb)
@as_output
def config(as_json: bool) -> None:
    """Show the settings in effect here, and their sources.

    A flag beats the environment (TICKWHEEL_LEASE=30s), which beats tickwheel.toml, which beats
    [tool.tickwheel] in pyproject.toml.
    """
    found = load()
    if as_json:
        emit_json({"settings": {name: _document(found, name) for name in NAMES}})
    else:
        _show(found)
    for name in unknown_variables():
        say(f"note: {name} is no setting")


def _value(found: Config, name: str) -> Any:
    value = getattr(found.settings, name)
    return without_password(value) if name in ("store", "outbox") else value


def _document(found: Config, name: str) -> dict[str, Any]:
    return {"value": _value(found, name), "source": found.sources[name]}


def _show(found: Config) -> None:
    rows = [(name, _value(found, name), found.sources[name]) for name in NAMES]
    show_table(
        [Column("SETTING"), Column("VALUE", whole=False), Column("FROM")],
        [
            (
                name,
                ", ".join(value) if isinstance(value, tuple) else str(value),
                (source, "dim" if source == DEFAULT else ""),
            )
            for name, value, source in rows
        ],
    )
