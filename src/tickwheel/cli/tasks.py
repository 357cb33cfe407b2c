"""`tickwheel tasks`: list an app's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.load_app import named_app
from tickwheel.cli.options import Verb, argument, as_output
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.duration import duration_text

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.registry import Definition


@click.command("tasks", cls=Verb)
@argument(
    "app",
    metavar="[MODULE:APP]",
    about="The app: shop:app, or shop. Default: the setting `app`.",
    required=False,
)
@as_output
def tasks(app: str | None, as_json: bool) -> None:
    """List an app's tasks, with their defaults and schedules. Needs no store."""
    found = named_app(app)
    definitions = sorted(found.tasks.all(), key=lambda each: each.name)
    if as_json:
        emit_json({"tasks": [_document(found, each) for each in definitions]})
    elif definitions:
        show_table(
            [
                Column("TASK", whole=False, least=16),
                Column("QUEUE", whole=False),
                Column("POOL"),
                Column("TIMEOUT"),
                Column("RETRIES", right=True),
                Column("SCHEDULE", whole=False, least=12),
            ],
            [_row(found, each) for each in definitions],
        )
    else:
        say("no tasks")


def _row(app: App, task: Definition) -> tuple[str, ...]:
    return (
        task.name,
        task.queue,
        task.pool,
        "none" if task.timeout_ms is None else duration_text(task.timeout_ms),
        str(task.policy.retries),
        "; ".join(_schedules(app, task).values()),
    )


def _schedules(app: App, task: Definition) -> dict[str, str]:
    """In words, by name."""
    from tickwheel.schedule import ticks_of

    return {
        name: ticks_of(rule).explain()
        for name, rule in app.declared.items()
        if rule.task == task.name
    }


def _document(app: App, task: Definition) -> dict[str, Any]:
    return {
        "name": task.name,
        "parameters": list(task.arguments.parameters),
        "queue": task.queue,
        "priority": task.priority.name.lower(),
        "pool": task.pool,
        "timeout_ms": task.timeout_ms,
        "retries": task.policy.retries,
        "schedules": [
            {"name": name, "explained": words} for name, words in _schedules(app, task).items()
        ],
    }
