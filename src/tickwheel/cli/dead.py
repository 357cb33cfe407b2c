"""`tickwheel dead`: list, rerun and delete dead jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.bulk import Action, Filter, JobAnswer, act_on_ids, act_on_matching, list_jobs
from tickwheel.cli.options import Noun, Where, argument, common, narrowing, paging, stacked
from tickwheel.cli.output import CONFLICT
from tickwheel.cli.times import since_ms
from tickwheel.cli.views import show_dead
from tickwheel.errors import BadConfig
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client

KIND = "dead job"

dead = Noun("dead", help="List, rerun and delete dead jobs (dead letters).")

# Which jobs to act on: some by id, or all that match.
_choosing = stacked(
    argument("ids", metavar="[ID]...", about="The ids of dead jobs; or use --all.", nargs=-1),
    click.option("--all", "all_", is_flag=True, help="Act on all dead jobs instead of ids."),
    click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation with --all."),
    narrowing,
)


@dead.command("list")
@narrowing
@paging
@common
def list_(
    queue: str | None,
    task: str | None,
    meta: tuple[str, str] | None,
    since: str | None,
    limit: int,
    cursor: str | None,
    where: Where,
    as_json: bool,
) -> None:
    """List dead jobs with their errors, newest first."""
    wanted = _wanted(queue, task, meta, since)
    list_jobs(
        where,
        as_json,
        wanted,
        cursor=cursor,
        limit=limit,
        show=show_dead,
        none="no matching dead jobs" if wanted.narrow else "no dead jobs",
    )


@dead.command()
@_choosing
@common
def rerun(where: Where, as_json: bool, **chosen: Any) -> int:
    """Run dead jobs again now, with all their retries.

    --queue, --task, --meta and --since narrow --all.
    """

    async def act(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
        return await _of_dead(client, ids, client.rerun, "rerun", ": it is due now")

    return _take(Action(verb="rerun", past="rerun", act=act, kind=KIND), where, as_json, **chosen)


@dead.command()
@_choosing
@common
def delete(where: Where, as_json: bool, **chosen: Any) -> int:
    """Delete dead jobs permanently. --queue, --task, --meta and --since narrow --all."""

    async def act(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
        return await _of_dead(client, ids, client.delete, "deleted", "")

    action = Action(verb="delete", past="deleted", act=act, kind=KIND)
    return _take(action, where, as_json, **chosen)


# --- Shared by both


def _take(
    action: Action,
    where: Where,
    as_json: bool,
    *,
    ids: tuple[str, ...],
    all_: bool,
    yes: bool,
    queue: str | None,
    task: str | None,
    meta: tuple[str, str] | None,
    since: str | None,
) -> int:
    """Act by ids or on all; refuses to guess which was meant."""
    if bool(ids) == all_:
        raise BadConfig(f"which jobs? Use tickwheel dead {action.verb} ID..., or --all")
    wanted = _wanted(queue, task, meta, since)
    if not ids:
        return act_on_matching(action, wanted, where, as_json, yes=yes)
    if wanted.narrow or yes:
        raise BadConfig("--queue, --task, --meta, --since and --yes work with --all, not with ids")
    return act_on_ids(action, ids, where, as_json)


def _wanted(
    queue: str | None, task: str | None, meta: tuple[str, str] | None, since: str | None
) -> Filter:
    return Filter(
        states=[State.DEAD],
        queue=queue,
        task=task,
        meta=meta,
        since_ms=since_ms("--since", since),
    )


async def _of_dead(
    client: Client,
    ids: Sequence[str],
    step: Callable[[Sequence[str]], Awaitable[list[bool]]],
    outcome: str,
    meaning: str,
) -> list[JobAnswer]:
    # The store accepts any ended job; this command is only for dead ones.
    jobs = await client.store.get(ids)
    states = [None if job is None else job.state for job in jobs]
    dead = [id for id, state in zip(ids, states, strict=True) if state is State.DEAD]
    done = {id for id, did in zip(dead, await step(dead), strict=True) if did}
    return [
        JobAnswer(id, outcome, outcome + meaning) if id in done else _not_done(id, state)
        for id, state in zip(ids, states, strict=True)
    ]


def _not_done(id: str, state: State | None) -> JobAnswer:
    if state is None:
        return JobAnswer.unknown(id)
    if state is State.DEAD:
        return JobAnswer(id, "changed", "changed in the meantime: it is no longer dead", CONFLICT)
    return JobAnswer(id, "not_dead", f"not dead: it is {state}", CONFLICT)
