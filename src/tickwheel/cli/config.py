"""`tickwheel config`: show the settings in effect and where each comes from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from tickwheel.cli.load_app import load_quietly
from tickwheel.cli.options import Verb, as_output, filled
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.config import DEFAULT, NAMES, PREFIX, SECRETS, Config, load, unknown_variables
from tickwheel.duration import duration_ms, duration_text
from tickwheel.errors import BadConfig, did_you_mean
from tickwheel.masking import MASK, masked


@click.command("config", cls=Verb)
@click.option(
    "--app",
    metavar="MODULE:APP",
    callback=filled,
    help="Show what this app uses, as in shop:app.",
)
@as_output
def config(app: str | None, as_json: bool) -> None:
    """Show the settings in effect and where they come from.

    An argument in the app's code overrides a flag, which overrides the environment
    (TICKWHEEL_LEASE=30s), which overrides tickwheel.toml, which overrides [tool.tickwheel] in
    pyproject.toml.
    """
    found = _with_app(load({"app": app}), required=app is not None)
    if as_json:
        emit_json({"settings": {name: _document(found, name) for name in NAMES}})
    else:
        _show(found)
    known = [PREFIX + name.upper() for name in NAMES]
    for name in unknown_variables():
        say(f"note: {name} is not a setting{did_you_mean(name, known)}")


def _with_app(found: Config, *, required: bool) -> Config:
    """The settings as the app's code has changed them. If only a setting names the app, a chosen
    store comes before the app's, and an app that can't be loaded is a note."""
    name = found.settings.app
    if not name:
        return found
    try:
        app = load_quietly(name)
    except BadConfig as error:
        if required:
            raise
        say(f"note: without the app's own settings: {error}")
        return found
    own: dict[str, Any] = {}
    if required or not found.chosen("store"):
        own["store"] = app.url or type(app._store).__name__
    for each in ("retention", "dead_retention"):
        ms = getattr(app, f"{each}_ms")
        if ms != duration_ms(getattr(found.settings, each)):
            own[each] = duration_text(ms)
    if app.objective is not None:
        own["objective"] = str(app.objective)
    own = {key: value for key, value in own.items() if value != getattr(found.settings, key)}
    return Config(replace(found.settings, **own), {**found.sources, **dict.fromkeys(own, name)})


def _value(found: Config, name: str) -> Any:
    value = getattr(found.settings, name)
    if name in SECRETS:
        return _key_ids(name, value)
    return masked(value) if name in ("store", "outbox") else value


def _key_ids(name: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys by their ids; of something else, nothing is shown."""
    from tickwheel.trust.keys import read_keys

    try:
        return tuple(f"{id}:{MASK}" for id in read_keys(name, keys))
    except BadConfig:
        return tuple(MASK for _ in keys)


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
