"""`tickwheel dead`: jobs that are out of retries and wait for a person."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.answers import Answer, emit_answers, report
from tickwheel.cli.codes import CONFLICT, FAILURE
from tickwheel.cli.finding import BATCH, find_ids, list_jobs, query
from tickwheel.cli.loading import ask
from tickwheel.cli.options import (
    AppOption,
    CursorOption,
    LimitOption,
    Noun,
    OutputOption,
    QueueOption,
    StoreOption,
    TaskOption,
)
from tickwheel.cli.output import Output, confirmed, say
from tickwheel.cli.views import show_dead
from tickwheel.errors import BadConfig
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import Query

noun = typer.Typer(cls=Noun, help="Look at dead jobs (dead letters), rerun them, delete them.")

Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="The ids of dead jobs; or --all.")
]
AllOption = Annotated[bool, typer.Option("--all", help="All dead jobs, instead of ids.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask before --all.")]


@noun.command("list")
def list_(
    queue: QueueOption = None,
    task: TaskOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List dead jobs with their errors, the last one first."""
    list_jobs(
        store,
        app,
        output,
        query(State.DEAD, queue, task),
        cursor=cursor,
        limit=limit,
        show=show_dead,
        none="no such dead jobs" if queue or task else "no dead jobs",
    )


@noun.command()
def rerun(
    ids: Ids = None,
    all_: AllOption = False,
    yes: YesOption = False,
    queue: QueueOption = None,
    task: TaskOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run dead jobs again, now, with all their retries. --queue and --task narrow --all."""
    step = _Step("rerun", "rerun", ": it is due now", lambda client, ids: client.rerun(ids))
    _take(step, _chosen(step, ids, all_, yes, queue, task), yes, store, app, output)


@noun.command()
def delete(
    ids: Ids = None,
    all_: AllOption = False,
    yes: YesOption = False,
    queue: QueueOption = None,
    task: TaskOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete dead jobs for good. --queue and --task narrow --all."""
    step = _Step("delete", "deleted", "", lambda client, ids: client.delete(ids))
    _take(step, _chosen(step, ids, all_, yes, queue, task), yes, store, app, output)


# --- What both do: to some jobs by id, or to all that match, after a question


@dataclass(frozen=True, slots=True)
class _Step:
    """Something that can be done to dead jobs."""

    verb: str
    # What it is called once it is done, and what that means for the job.
    outcome: str
    meaning: str
    act: Callable[[Client, Sequence[str]], Awaitable[list[bool]]]


def _chosen(
    step: _Step,
    ids: list[str] | None,
    all_: bool,
    yes: bool,
    queue: str | None,
    task: str | None,
) -> list[str] | Query:
    """The ids, or what all the jobs have in common; refuses to guess which was meant."""
    if bool(ids) == all_:
        raise BadConfig(f"say which: tickwheel dead {step.verb} ID..., or --all")
    if ids:
        if queue or task or yes:
            raise BadConfig("--queue, --task and --yes go with --all, not with ids")
        return list(dict.fromkeys(ids))
    if not yes and not sys.stdin.isatty():
        raise BadConfig(f"dead {step.verb} --all needs --yes where nobody can be asked")
    return query(State.DEAD, queue, task)


def _take(
    step: _Step,
    chosen: list[str] | Query,
    yes: bool,
    store: str | None,
    app: str | None,
    output: Output,
) -> None:
    if isinstance(chosen, list):
        report(ask(store, app, lambda client: _each(step, client, chosen)), output)
        return
    # What was counted is what is acted on: jobs that die after the question are left alone.
    ids = ask(store, app, lambda client: find_ids(client, chosen))
    if ids and not yes and not confirmed(f"{step.verb} {_jobs(len(ids))}?"):
        say("nothing was changed")
        raise typer.Exit(FAILURE)
    answers = ask(store, app, lambda client: _each(step, client, ids)) if ids else []
    if output is Output.JSON:
        emit_answers(answers)
    elif answers:
        typer.echo(f"{step.outcome}: {_jobs(sum(not answer.code for answer in answers))}")
    else:
        say("no dead jobs")


async def _each(step: _Step, client: Client, ids: Sequence[str]) -> list[Answer]:
    answers: list[Answer] = []
    for start in range(0, len(ids), BATCH):
        answers += await _batch(step, client, ids[start : start + BATCH])
    return answers


async def _batch(step: _Step, client: Client, ids: Sequence[str]) -> list[Answer]:
    # The store's step takes any ended job; this command is for dead ones alone.
    jobs = await client.store.get(ids)
    states = [None if job is None else job.state for job in jobs]
    dead = [id for id, state in zip(ids, states, strict=True) if state is State.DEAD]
    done = {id for id, did in zip(dead, await step.act(client, dead), strict=True) if did}
    return [_answer(step, id, state, id in done) for id, state in zip(ids, states, strict=True)]


def _answer(step: _Step, id: str, state: State | None, done: bool) -> Answer:
    if done:
        return Answer(id, step.outcome, step.outcome + step.meaning)
    if state is None:
        return Answer.unknown(id)
    if state is State.DEAD:
        return Answer(id, "changed", "changed meanwhile: it is no longer dead", CONFLICT)
    return Answer(id, "not_dead", f"not dead: it is {state}", CONFLICT)


def _jobs(count: int) -> str:
    return f"{count:,} dead job{'' if count == 1 else 's'}"
