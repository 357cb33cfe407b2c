"""`tickwheel jobs`: look at jobs, cancel them, run ended ones again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tickwheel.cli.loading import ask
from tickwheel.cli.options import Noun, Where, argument, common, narrowing, paging
from tickwheel.cli.output import CONFLICT, NOT_FOUND, OK, emit_json
from tickwheel.cli.several import Answer, list_jobs, query, report
from tickwheel.cli.views import job_document, show_job, show_jobs
from tickwheel.job import Cancelled, Job, State

if TYPE_CHECKING:
    from tickwheel.client import Client

jobs = Noun("jobs", help="Look at jobs, cancel them, run ended ones again.")

_ids = argument(
    "ids", metavar="ID...", about="The ids of one or more jobs.", nargs=-1, required=True
)


@jobs.command("list")
@click.option(
    "--state", type=click.Choice([str(state) for state in State]), help="Only jobs in this state."
)
@narrowing
@paging
@common
def list_(
    state: str | None,
    queue: str | None,
    task: str | None,
    limit: int,
    cursor: str | None,
    where: Where,
    as_json: bool,
) -> None:
    """List jobs. Those that wait: the next one first (on NATS: the one added first). Those that
    ended: the last one first."""
    list_jobs(
        where,
        as_json,
        query(State(state) if state else None, queue, task),
        cursor=cursor,
        limit=limit,
        show=show_jobs,
        none="no such jobs" if state or queue or task else "no jobs",
    )


@jobs.command()
@argument("id", metavar="ID", about="The job's id.")
@common
def show(id: str, where: Where, as_json: bool) -> None:
    """Show all about one job. Its arguments, its error or result, and how each run went."""

    async def look(client: Client) -> tuple[Job, int]:
        return await client.get(id), client.clock.now_ms()

    job, now_ms = ask(where, look)
    if as_json:
        emit_json(job_document(job))
    else:
        show_job(job, now_ms)


_CANCELLED = {
    Cancelled.CANCELLED: ("cancelled", "cancelled: it will not run", OK),
    Cancelled.ASKED: ("asked", "asked: a worker has it and is told to stop it", OK),
    Cancelled.TOO_LATE: ("too_late", "too late: it had ended", CONFLICT),
    Cancelled.UNKNOWN: ("unknown", "unknown: no job has this id", NOT_FOUND),
}


@jobs.command()
@_ids
@common
def cancel(ids: tuple[str, ...], where: Where, as_json: bool) -> int:
    """Cancel jobs, and say of each what that achieved. Exit code 4 where one had ended."""
    once = list(dict.fromkeys(ids))
    outcomes = ask(where, lambda client: client.cancel(once))
    answers = [Answer(id, *_CANCELLED[each]) for id, each in zip(once, outcomes, strict=True)]
    return report(answers, as_json)


@jobs.command()
@_ids
@common
def rerun(ids: tuple[str, ...], where: Where, as_json: bool) -> int:
    """Run ended jobs again, now, with all their retries. Exit code 4 where one has not ended."""
    once = list(dict.fromkeys(ids))

    async def step(client: Client) -> list[Answer]:
        put_back = await client.rerun(once)
        found = await client.store.get(once)
        return [_rerun(*each) for each in zip(once, put_back, found, strict=True)]

    return report(ask(where, step), as_json)


def _rerun(id: str, put_back: bool, job: Job | None) -> Answer:
    if put_back:
        return Answer(id, "rerun", "rerun: it is due now")
    if job is None:
        return Answer.unknown(id)
    return Answer(id, "not_ended", f"not ended: it is {job.state}", CONFLICT)
