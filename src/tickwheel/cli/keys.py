"""`tickwheel keys`: create, list and revoke API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.load_app import app_of, ask, ask_app, refuse_memory
from tickwheel.cli.options import Noun, Where, argument, common
from tickwheel.cli.output import (
    NOT_FOUND,
    OK,
    Cell,
    Column,
    emit_json,
    relative,
    say,
    show_table,
)
from tickwheel.cli.times import from_ms, now_ms
from tickwheel.duration import iso, moment
from tickwheel.masking import without_keys

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.operate.keys import Key

SCOPES = ("enqueue", "read", "operate", "admin")

keys = Noun("keys", help="Create, list and revoke API keys.")


@keys.command("list")
@common
def list_(where: Where, as_json: bool) -> None:
    """List API keys, the oldest first. `tickwheel keys` does the same."""
    from tickwheel.operate.keys import Keys

    async def look(client: Client) -> tuple[list[Key], int]:
        return await Keys(client).list(), client.clock.now_ms()

    found, now_ms = ask(where, look)
    if as_json:
        emit_json({"keys": [_document(key) for key in found]})
    elif found:
        _show(found, now_ms)
    else:
        say("no API keys; create one with tickwheel keys create NAME --scope read")


def _show(found: list[Key], now_ms: int) -> None:
    limited = any(key.queues or key.tasks for key in found)
    rated = any(key.rate for key in found)
    show_table(
        [
            Column("ID"),
            Column("NAME", whole=False),
            Column("SCOPES", whole=False),
            *([Column("QUEUES", whole=False), Column("TASKS", whole=False)] if limited else []),
            *([Column("RATE", whole=False)] if rated else []),
            Column("EXPIRES", whole=False),
        ],
        [
            (
                key.id,
                key.name,
                " ".join(key.scopes),
                *([_patterns(key.queues), _patterns(key.tasks)] if limited else []),
                *([key.rate or ""] if rated else []),
                _expiry(key, now_ms),
            )
            for key in found
        ],
    )


def _patterns(patterns: tuple[str, ...]) -> Cell:
    return " ".join(patterns) if patterns else ("all", "dim")


def _expiry(key: Key, now_ms: int) -> Cell:
    if key.expires_ms is None:
        return "never", "dim"
    away = relative(key.expires_ms, now_ms)
    return (away, "yellow") if key.expires_ms <= now_ms else away


def _document(key: Key) -> dict[str, object]:
    document = msgspec.to_builtins(key)
    created, expires = document.pop("created_ms"), document.pop("expires_ms")
    return {
        **document,
        "created": iso(moment(created)),
        "expires": None if expires is None else iso(moment(expires)),
    }


@keys.command()
@argument("name", metavar="NAME", about="What the key is for, as in deploy.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    required=True,
    help="What it may do; can be repeated.",
)
@click.option(
    "--queue", "queues", metavar="NAME", multiple=True, help="Only this queue, or 'mail.*'."
)
@click.option("--task", "tasks", metavar="NAME", multiple=True, help="Only this task, or 'mail.*'.")
@click.option(
    "--expires", metavar="TIME", help="When it stops: 90d, or an ISO time. Default: never."
)
@click.option("--rate", metavar="RATE", help="How many requests it may send: 100/s, 10/m.")
@common
def create(
    name: str,
    scopes: tuple[str, ...],
    queues: tuple[str, ...],
    tasks: tuple[str, ...],
    expires: str | None,
    rate: str | None,
    where: Where,
    as_json: bool,
) -> None:
    """Create an API key, and print its text. It is shown only this once.

    enqueue adds jobs. read sees jobs, queues, schedules and workers; operate also cancels, reruns,
    deletes and pauses; admin does everything. --queue and --task can be repeated.
    """
    from tickwheel.operate.keys import Keys

    until = None if expires is None else moment(from_ms("--expires", expires, now_ms()))

    async def step(client: Client) -> tuple[Key, str]:
        return await Keys(client).create(
            name, scopes, queues=queues, tasks=tasks, expires=until, rate=rate
        )

    app = app_of(where)
    refuse_memory(app.url)
    key, text = ask_app(app, step)
    if as_json:
        emit_json(_document(key) | {"key": text})
        return
    click.echo(text)
    say(f"key {key.id} was created; keep the text now: it is not shown again")


@keys.command()
@argument("id", metavar="ID", about="The key's id, or its text.")
@common
def revoke(id: str, where: Where, as_json: bool) -> int:
    """Revoke an API key: it stops within two seconds."""
    from tickwheel.operate.keys import Keys, id_of

    id = id_of(id)
    revoked = ask(where, lambda client: Keys(client).revoke(id))
    id = without_keys(id)
    if as_json:
        emit_json({"id": id, "outcome": "revoked" if revoked else "unknown"})
    else:
        click.echo(f"{id}: {'revoked' if revoked else 'unknown: no key has this id'}")
    return OK if revoked else NOT_FOUND
