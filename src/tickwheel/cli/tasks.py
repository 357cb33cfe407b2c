"""`tickwheel tasks`: list an app's tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        from tickwheel.operate.documents import task_document

        emit_json({"tasks": [task_document(each, found.declared) for each in definitions]})
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
    from tickwheel.operate.documents import schedules_in_words

    return (
        task.name,
        task.queue,
        task.pool,
        "none" if task.timeout_ms is None else duration_text(task.timeout_ms),
        str(task.policy.retries),
        "; ".join(schedules_in_words(task, app.declared).values()),
    )
