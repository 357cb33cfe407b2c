"""`tickwheel jobs`: look at jobs, cancel them, run ended ones again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tickwheel.cli.answers import Answer, report
from tickwheel.cli.codes import CONFLICT, NOT_FOUND, OK
from tickwheel.cli.finding import list_jobs, query
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
from tickwheel.cli.output import Output, emit_json
from tickwheel.cli.views import job_document, show_job, show_jobs
from tickwheel.job import Cancelled, Job, State

if TYPE_CHECKING:
    from tickwheel.client import Client

noun = typer.Typer(cls=Noun, help="Look at jobs, cancel them, run ended ones again.")

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID", help="The ids of one or more jobs.")]
StateOption = Annotated[State | None, typer.Option("--state", help="Only jobs in this state.")]


@noun.command("list")
def list_(
    state: StateOption = None,
    queue: QueueOption = None,
    task: TaskOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List jobs. Those that wait: the next one first. Those that ended: the last one first."""
    list_jobs(
        store,
        app,
        output,
        query(state, queue, task),
        cursor=cursor,
        limit=limit,
        show=show_jobs,
        none="no such jobs" if state or queue or task else "no jobs",
    )


@noun.command()
def show(
    id: Id,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show all about one job. Its arguments, its error or result, and how each run went."""

    async def look(client: Client) -> tuple[Job, int]:
        return await client.get(id), client.clock.now_ms()

    job, now_ms = ask(store, app, look)
    if output is Output.JSON:
        emit_json(job_document(job))
    else:
        show_job(job, now_ms)


_CANCELLED = {
    Cancelled.CANCELLED: ("cancelled", "cancelled: it will not run", OK),
    Cancelled.ASKED: ("asked", "asked: a worker has it and is told to stop it", OK),
    Cancelled.TOO_LATE: ("too_late", "too late: it had ended", CONFLICT),
    Cancelled.UNKNOWN: ("unknown", "unknown: no job has this id", NOT_FOUND),
}


@noun.command()
def cancel(
    ids: Ids,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Cancel jobs, and say of each what that achieved. Exit code 4 where one had ended."""
    ids = list(dict.fromkeys(ids))
    answers = ask(store, app, lambda client: client.cancel(ids))
    report(
        [Answer(id, *_CANCELLED[answer]) for id, answer in zip(ids, answers, strict=True)],
        output,
    )


@noun.command()
def rerun(
    ids: Ids,
    store: StoreOption = None,
    app: AppOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Run ended jobs again, now, with all their retries. Exit code 4 where one has not ended."""
    ids = list(dict.fromkeys(ids))

    async def step(client: Client) -> list[Answer]:
        put_back = await client.rerun(ids)
        jobs = await client.store.get(ids)
        return [_rerun(*each) for each in zip(ids, put_back, jobs, strict=True)]

    report(ask(store, app, step), output)


def _rerun(id: str, put_back: bool, job: Job | None) -> Answer:
    if put_back:
        return Answer(id, "rerun", "rerun: it is due now")
    if job is None:
        return Answer.unknown(id)
    return Answer(id, "not_ended", f"not ended: it is {job.state}", CONFLICT)
