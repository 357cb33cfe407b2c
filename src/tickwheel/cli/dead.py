"""`tickwheel dead`: list, rerun and delete dead jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tickwheel.cli.bulk import Action, act_on_ids, act_on_matching, list_jobs
from tickwheel.cli.options import Noun, Where, argument, common, narrowing, paging, stacked
from tickwheel.cli.times import since_ms
from tickwheel.cli.views import show_dead
from tickwheel.errors import BadConfig
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.operate.bulk import Filter

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
    from tickwheel.operate.bulk import rerun_dead

    action = Action(verb="rerun", past="rerun", act=rerun_dead, kind=KIND)
    return _take(action, where, as_json, **chosen)


@dead.command()
@_choosing
@common
def delete(where: Where, as_json: bool, **chosen: Any) -> int:
    """Delete dead jobs permanently. --queue, --task, --meta and --since narrow --all."""
    from tickwheel.operate.bulk import delete_dead

    action = Action(verb="delete", past="deleted", act=delete_dead, kind=KIND)
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
    from tickwheel.operate.bulk import Filter

    return Filter(
        states=[State.DEAD],
        queue=queue,
        task=task,
        meta=meta,
        since_ms=since_ms("--since", since),
    )
