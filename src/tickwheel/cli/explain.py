"""`tickwheel explain`: why a job waits, who holds it, how it ended, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tickwheel.cli.load_app import app_of, ask
from tickwheel.cli.options import Verb, Where, argument, common
from tickwheel.cli.output import Cell, clean, emit_json, show_fields
from tickwheel.cli.prefix import whole_id
from tickwheel.cli.views import meta_fields
from tickwheel.masking import masked

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.client import Client
    from tickwheel.operate.explain import Explanation
    from tickwheel.operate.facts import Facts


@click.command("explain", cls=Verb)
@argument("id", metavar="JOB", about="The job's id, or its first characters.")
@common
def explain(id: str, where: Where, as_json: bool) -> None:
    """Explain why a job waits, who holds it, or how it ended.

    Also shows when it runs, and what you can do now. With --app it also knows the task's retries.
    """
    from tickwheel.operate import explain as pure
    from tickwheel.operate.documents import explanation_document

    app = app_of(where)

    async def look(client: Client) -> Facts:
        return await _facts(client, id, app, where)

    facts = ask(where, look)
    found = pure.explain(facts)
    if as_json:
        emit_json(explanation_document(facts, found))
    else:
        _show(facts, found)


async def _facts(client: Client, id: str, app: App, where: Where) -> Facts:
    from tickwheel.config import load
    from tickwheel.operate.facts import facts_of

    job = await client.get(await whole_id(client, id))
    name = where.app or load().settings.app or "MODULE:APP"
    return await facts_of(client, job, app.tasks, where=_again(where), app=name)


def _again(where: Where) -> list[str]:
    """The options that lead to the same store."""
    if where.app is not None:
        return ["--app", where.app]
    return [] if where.store is None else ["--store", masked(where.store)]


def _show(facts: Facts, found: Explanation) -> None:
    click.echo(clean(found.headline))
    fields: list[tuple[str, Cell]] = [
        ("why" if i == 0 else "", reason.words) for i, reason in enumerate(found.reasons)
    ]
    fields.append(("runs", found.when))
    fields += meta_fields(facts.job)
    for advice in found.advice:
        first = "" if any(name == "do" for name, _ in fields) else "do"
        fields.append((first, advice.words))
        if advice.command:
            fields.append(("", (f"  {advice.command}", "bold")))
    click.echo()
    show_fields(fields)
