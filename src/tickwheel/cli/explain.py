"""`tickwheel explain`: why a job waits, who holds it, how it ended, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.load_app import app_of, ask
from tickwheel.cli.options import Verb, Where, argument, common
from tickwheel.cli.output import Cell, clean, emit_json, iso, show_fields
from tickwheel.cli.prefix import whole_id
from tickwheel.cli.views import meta_fields, progress_document
from tickwheel.duration import moment
from tickwheel.envelope import readable
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

    app = app_of(where)

    async def look(client: Client) -> Facts:
        return await _facts(client, id, app, where)

    facts = ask(where, look)
    found = pure.explain(facts)
    if as_json:
        emit_json(_document(facts, found))
    else:
        _show(facts, found)


async def _facts(client: Client, id: str, app: App, where: Where) -> Facts:
    from tickwheel.config import load
    from tickwheel.engine.options import WorkerOptions
    from tickwheel.notes import schedules_of
    from tickwheel.operate.facts import Facts

    job = await client.get(await whole_id(client, id))
    queues = {queue.name: queue for queue in await client.queues()}
    retries = {each.name: each.policy.retries for each in app.tasks.all()}
    return Facts(
        job=readable(job),
        queue=queues.get(job.queue),
        workers=await client.workers(),
        schedules=await schedules_of(client.store),
        now_ms=client.clock.now_ms(),
        takeovers=WorkerOptions(queues=()).takeovers,
        task_retries=retries.get(job.task),
        where=_again(where),
        app=where.app or load().settings.app or "MODULE:APP",
    )


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


def _document(facts: Facts, found: Explanation) -> dict[str, Any]:
    job, holder = facts.job, facts.holder
    held = job.lease_until_ms is not None
    return {
        "id": job.id,
        "state": str(job.state),
        "headline": found.headline,
        "reasons": [{"code": str(each.why), "words": each.words} for each in found.reasons],
        "runs": None if found.runs_ms is None else iso(moment(found.runs_ms)),
        "blocked": found.blocked,
        "runs_words": found.when,
        "holder": {
            "worker": job.worker,
            "host": holder.host if holder else None,
            "alive": holder is not None,
            "lease_until": iso(moment(job.lease_until_ms or 0)),
        }
        if held
        else None,
        "cancel_requested": job.cancel_requested,
        "meta": job.meta or {},
        "expires": None if job.expires_ms is None else iso(moment(job.expires_ms)),
        "progress": progress_document(job),
        "failures": job.failures,
        "retries": facts.retries,
        "takeovers": job.takeovers,
        "takeovers_allowed": facts.takeovers,
        "schedule": found.schedule,
        "advice": [{"words": each.words, "command": each.command} for each in found.advice],
    }
