"""`tickwheel dead`: jobs that are out of retries and wait for a person."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from tickwheel.cli.loading import ask
from tickwheel.cli.options import Noun, Where, argument, common, narrowing, paging, stacked
from tickwheel.cli.output import CONFLICT, FAILURE, OK, confirmed, say
from tickwheel.cli.several import BATCH, Answer, emit_answers, find_ids, list_jobs, query, report
from tickwheel.cli.views import show_dead
from tickwheel.errors import BadConfig
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import Query

dead = Noun("dead", help="Look at dead jobs (dead letters), rerun them, delete them.")

# Which jobs are meant: some by id, or all that match.
_choosing = stacked(
    argument("ids", metavar="[ID]...", about="The ids of dead jobs; or --all.", nargs=-1),
    click.option("--all", "all_", is_flag=True, help="All dead jobs, instead of ids."),
    click.option("--yes", "-y", is_flag=True, help="Don't ask before --all."),
    narrowing,
)


@dead.command("list")
@narrowing
@paging
@common
def list_(
    queue: str | None,
    task: str | None,
    limit: int,
    cursor: str | None,
    where: Where,
    as_json: bool,
) -> None:
    """List dead jobs with their errors, the last one first."""
    list_jobs(
        where,
        as_json,
        query(State.DEAD, queue, task),
        cursor=cursor,
        limit=limit,
        show=show_dead,
        none="no such dead jobs" if queue or task else "no dead jobs",
    )


@dead.command()
@_choosing
@common
def rerun(
    ids: tuple[str, ...],
    all_: bool,
    yes: bool,
    queue: str | None,
    task: str | None,
    where: Where,
    as_json: bool,
) -> int:
    """Run dead jobs again, now, with all their retries. --queue and --task narrow --all."""
    step = _Step("rerun", "rerun", ": it is due now", lambda client, ids: client.rerun(ids))
    return _take(step, _chosen(step, ids, all_, yes, queue, task), yes, where, as_json)


@dead.command()
@_choosing
@common
def delete(
    ids: tuple[str, ...],
    all_: bool,
    yes: bool,
    queue: str | None,
    task: str | None,
    where: Where,
    as_json: bool,
) -> int:
    """Delete dead jobs for good. --queue and --task narrow --all."""
    step = _Step("delete", "deleted", "", lambda client, ids: client.delete(ids))
    return _take(step, _chosen(step, ids, all_, yes, queue, task), yes, where, as_json)


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
    ids: Sequence[str],
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


def _take(step: _Step, chosen: list[str] | Query, yes: bool, where: Where, as_json: bool) -> int:
    """Do it, after a question where all are meant and nobody said yes yet; gives the exit code."""
    if isinstance(chosen, list):
        return report(ask(where, lambda client: _each(step, client, chosen)), as_json)
    # What was counted is what is acted on: jobs that die after the question are left alone.
    ids = ask(where, lambda client: find_ids(client, chosen))
    if ids and not yes and not confirmed(f"{step.verb} {_jobs(len(ids))}?"):
        say("nothing was changed")
        return FAILURE
    answers = ask(where, lambda client: _each(step, client, ids)) if ids else []
    if as_json:
        emit_answers(answers)
    elif answers:
        click.echo(f"{step.outcome}: {_jobs(sum(not answer.code for answer in answers))}")
    else:
        say("no dead jobs")
    return OK


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
