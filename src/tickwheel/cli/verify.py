"""`tickwheel verify`: what should have run in a span of time, what did, and what was wrong."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.load_app import app_of, ask
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import FAILURE, OK, Cell, clean, emit_json, show_fields
from tickwheel.cli.times import from_ms, now_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tickwheel.app import App
    from tickwheel.client import Client
    from tickwheel.operate.explain import Explanation
    from tickwheel.operate.facts import Facts
    from tickwheel.operate.flaws import Flaw, Span
    from tickwheel.operate.verify import Tell, Verified

# When neither an option nor the objective says what is late.
LATE_AFTER_MS = 1_000
STYLES = {"missed": "red", "late": "yellow", "early": "red", "doubled": "yellow"}

# The explanations of jobs as they are now, by id.
Explained = Mapping[str, tuple["Facts", "Explanation"]]


@click.command("verify", cls=Verb)
@click.option(
    "--since",
    metavar="TIME",
    default="24h",
    help="Verify what was due since: 1h, or an ISO time.",
)
@click.option("--until", metavar="TIME", help="And until then. Default: now.")
@click.option(
    "--late-after",
    metavar="DURATION",
    help="A run that starts later than this is late. Default: the objective's, or 1s.",
)
@click.option("--queue", metavar="NAME", help="Only jobs in this queue.")
@click.option("--task", metavar="NAME", help="Only jobs of this task.")
@common
def verify(
    since: str,
    until: str | None,
    late_after: str | None,
    queue: str | None,
    task: str | None,
    where: Where,
    as_json: bool,
) -> int:
    """Find what was missed, late, early or doubled.

    Reads the store's jobs and their histories, and explains what was wrong. Exits with 1 if
    anything was. Jobs that were pruned or deleted leave no trace.
    """
    from tickwheel.operate.verify import verify_store

    app = app_of(where)
    since_ms, until_ms = _range(since, until)
    late_after_ms = _late_after_ms(late_after, app)

    async def look(client: Client) -> tuple[Verified, Explained]:
        span = _span(client, since_ms, until_ms, late_after_ms)
        kept_ms = client.clock.now_ms() - app.retention_ms
        with _progress() as tell:
            found = await verify_store(
                client, span, kept_ms=kept_ms, queue=queue, task=task, tell=tell
            )
        return found, await _explained(client, found, app, where)

    found, explained = ask(where, look)
    if as_json:
        emit_json(_document(found, explained))
    else:
        _show(found, explained)
    return OK if found.well else FAILURE


# --- What to verify


def _range(since: str, until: str | None) -> tuple[int, int | None]:
    from tickwheel.errors import BadTime

    now = now_ms()
    since_ms = from_ms("--since", since, now, sign=-1)
    until_ms = None if until is None else from_ms("--until", until, now, sign=-1)
    if since_ms >= (now if until_ms is None else until_ms):
        raise BadTime("there is no time to verify: --since must be before --until, and in the past")
    return since_ms, until_ms


def _late_after_ms(given: str | None, app: App) -> int:
    from tickwheel.duration import duration_ms

    if given is not None:
        return duration_ms(given)
    return app.objective.within_ms if app.objective is not None else LATE_AFTER_MS


def _span(client: Client, since_ms: int, until_ms: int | None, late_after_ms: int) -> Span:
    from tickwheel.operate.flaws import Span

    # By the store's clock, like all times in it.
    now = client.clock.now_ms()
    return Span(
        since_ms=since_ms,
        until_ms=now if until_ms is None else until_ms,
        now_ms=now,
        late_after_ms=late_after_ms,
    )


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _read, _of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("reading jobs"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("jobs", total=None)
        yield lambda read, of: progress.update(bar, completed=read, total=of)


async def _explained(client: Client, found: Verified, app: App, where: Where) -> Explained:
    """Explain the jobs that are shown, as they are now."""
    from tickwheel.operate.explain import explain
    from tickwheel.operate.facts import facts_of

    ids = {
        flaw.id: None for flaws in found.flaws.values() for flaw in flaws if flaw.schedule is None
    }
    jobs = [job for job in await client.store.get(list(ids)) if job is not None]
    facts: Facts | None = None
    explained: dict[str, tuple[Facts, Explanation]] = {}
    for job in jobs:
        if facts is None:
            facts = await facts_of(client, job, app.tasks)
        task = app.tasks.find(job.task)
        facts = dataclasses.replace(
            facts, job=job, task_retries=None if task is None else task.policy.retries
        )
        explained[job.id] = facts, explain(facts)
    return explained


# --- Output


def _document(found: Verified, explained: Explained) -> dict[str, Any]:
    from tickwheel.operate.documents import explanation_document, iso_ms

    def flaw_document(flaw: Flaw) -> dict[str, Any]:
        about = explained.get(flaw.id)
        return {
            "id": flaw.id,
            "schedule": flaw.schedule,
            "due": iso_ms(flaw.due_ms),
            "started": None if flaw.started_ms is None else iso_ms(flaw.started_ms),
            "by_ms": flaw.by_ms,
            "attempt": flaw.attempt,
            "worker": flaw.worker,
            "words": flaw.words,
            "why": flaw.why or None,
            "explanation": explanation_document(*about) if about else None,
        }

    span = found.span
    return {
        "well": found.well,
        "since": iso_ms(span.since_ms),
        "until": iso_ms(span.until_ms),
        "late_after_ms": span.late_after_ms,
        "checked": {
            "jobs": found.jobs,
            "runs": found.runs,
            "schedules": found.schedules,
            "ticks": found.ticks,
            "ticks_left_out": found.ticks_left_out,
        },
        "counts": {str(kind): count for kind, count in found.counts.items()},
        "flaws": {
            str(kind): [flaw_document(flaw) for flaw in flaws]
            for kind, flaws in found.flaws.items()
        },
        "unknown": list(found.unknown),
    }


def _show(found: Verified, explained: Explained) -> None:
    from tickwheel.duration import moment_text

    span = found.span
    fields: list[tuple[str, Cell]] = [
        ("due", f"{moment_text(span.since_ms)} to {moment_text(span.until_ms)}"),
        ("checked", _checked(found)),
    ]
    fields += [(str(kind), _count(found, kind)) for kind in found.counts]
    fields += [("unknown" if i == 0 else "", each) for i, each in enumerate(found.unknown)]
    show_fields(fields)
    for kind, flaws in found.flaws.items():
        if not flaws:
            continue
        count = found.counts[kind]
        of = f", the worst {len(flaws)} of {count:,}" if count > len(flaws) else ""
        click.echo()
        show_fields([(f"{kind}{of}", "")])
        for flaw in flaws:
            click.echo(clean(flaw.id))
            show_fields(("", words) for words in _words(flaw, explained))


def _checked(found: Verified) -> str:
    words = f"{_counted(found.jobs, 'job')}, {_counted(found.runs, 'run')}"
    if found.schedules:
        ticks, schedules = _counted(found.ticks, "tick"), _counted(found.schedules, "schedule")
        words += f", {ticks} of {schedules}"
    if found.ticks_left_out:
        words += f" ({found.ticks_left_out:,} left out, as the one before still ran)"
    return words


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _count(found: Verified, kind: Any) -> Cell:
    from tickwheel.duration import duration_text

    count = found.counts[kind]
    words = f"{count:,}"
    if kind == "late":
        words += f" by more than {duration_text(found.span.late_after_ms)}"
        if count:
            words += f", at most by {duration_text(found.flaws[kind][0].by_ms)}"
    return words, STYLES[kind] if count else "green"


def _words(flaw: Flaw, explained: Explained) -> Iterator[str]:
    """What was wrong, why, and if the job has not ended well, how it is now."""
    from tickwheel.job import State

    yield flaw.words
    about = explained.get(flaw.id)
    if flaw.why:
        yield flaw.why
    elif about is None or about[0].job.state is State.DONE:
        yield "Nothing in its history says why."
    if about is not None and about[0].job.state is not State.DONE:
        yield about[1].headline
