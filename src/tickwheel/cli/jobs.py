"""`tickwheel jobs`: list, show, add, cancel, move, rerun and delete jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tickwheel.changes import IfExists
from tickwheel.checks import checked_name
from tickwheel.cli.bulk import Action, act_on_ids, act_on_matching, list_jobs
from tickwheel.cli.load_app import ask, ask_app, named_app, refuse_memory
from tickwheel.cli.options import Noun, Where, argument, common, narrowing, of_app, paging, stacked
from tickwheel.cli.output import CONFLICT, OK, emit_json, say
from tickwheel.cli.prefix import whole_id
from tickwheel.cli.times import since_ms, time_ms
from tickwheel.cli.views import show_job, show_jobs
from tickwheel.duration import duration_ms
from tickwheel.errors import BadArguments, BadConfig, BadTime, UsageError
from tickwheel.job import Job, Priority, PutOutcome, State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.operate.bulk import JobAnswer

jobs = Noun("jobs", help="List, show, add, cancel, move, rerun and delete jobs.")

UNENDED = (State.WAITING, State.RUNNING)
ENDED = (State.DONE, State.DEAD, State.CANCELLED)


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
    meta: tuple[str, str] | None,
    since: str | None,
    limit: int,
    cursor: str | None,
    where: Where,
    as_json: bool,
) -> None:
    """List jobs, with when each is due or has ended.

    Waiting jobs: the next due first (on NATS, the first added). Ended jobs: newest first. With
    --meta: in the order of the store.
    """
    from tickwheel.operate.bulk import Filter

    wanted = Filter(
        states=[State(state)] if state else (),
        queue=queue,
        task=task,
        meta=meta,
        since_ms=since_ms("--since", since),
    )
    list_jobs(
        where,
        as_json,
        wanted,
        cursor=cursor,
        limit=limit,
        show=show_jobs,
        none="no matching jobs" if state or wanted.narrow else "no jobs",
    )


@jobs.command()
@argument("id", metavar="ID", about="The job's id, or its first characters.")
@common
def show(id: str, where: Where, as_json: bool) -> None:
    """Show everything about one job. Prints its arguments, its error or result, and its runs."""

    async def look(client: Client) -> tuple[Job, int]:
        return await client.get(await whole_id(client, id)), client.clock.now_ms()

    job, now_ms = ask(where, look)
    if as_json:
        from tickwheel.operate.documents import job_document

        emit_json(job_document(job))
    else:
        show_job(job, now_ms)


# --- Add


@jobs.command()
@argument("task", metavar="TASK", about="The task's name; tickwheel tasks lists them.")
@argument(
    "arguments",
    metavar="[JSON]",
    about="Its arguments by name, as in '{\"order_id\": 42}'. Default: none.",
    default="{}",
)
@click.option("--delay", metavar="DURATION", help="When it is due, from now: 10m. Default: now.")
@click.option("--at", metavar="TIME", help="When it is due, as an ISO time.")
@click.option("--queue", metavar="NAME", help="Its queue. Default: the task's.")
@click.option(
    "--priority",
    type=click.Choice([each.name.lower() for each in Priority]),
    help="Its priority. Default: the task's.",
)
@click.option(
    "--id", metavar="ID", help="Its id; adds nothing if a job has it. Default: a new one."
)
@click.option(
    "--if-exists",
    type=click.Choice([str(each) for each in IfExists]),
    help="What happens to a job that has the id. Default: the task's, or keep.",
)
@of_app
def add(
    task: str,
    arguments: str,
    delay: str | None,
    at: str | None,
    app: str | None,
    as_json: bool,
    if_exists: str | None,
    **more: Any,
) -> int:
    """Add a job, and print its id. Needs the app, which checks the arguments.

    Exits with 4 if the id is taken, and its job is kept.
    """
    from tickwheel.duration import moment
    from tickwheel.task import Task

    if delay is not None and at is not None:
        raise BadTime("use --delay or --at, not both")
    its_app = named_app(app)
    due = None if at is None else moment(time_ms("--at", at, None))
    its_task: Any = Task(its_app._access, its_app.tasks.get(task))
    given = _object(arguments)
    # Before a store is created.
    _check(task, lambda: its_task.using(delay=delay, at=due, **more).job(**given))
    refuse_memory(its_app.url)
    call = its_task.using(delay=delay, at=due, if_exists=if_exists, **more)
    handle = ask_app(its_app, lambda _: call.enqueue(**given))
    if as_json:
        emit_json({"id": handle.id, "added": handle.added, "answer": str(handle.answer)})
    else:
        click.echo(handle.id)
    if not handle.added:
        say(_NOT_NEW[handle.answer])
    return CONFLICT if handle.answer is PutOutcome.KEPT else OK


_NOT_NEW = {
    PutOutcome.KEPT: "nothing was added: a job with this id exists",
    PutOutcome.REPLACED: "replaced: the job that waited with this id",
    PutOutcome.FOLLOWS: "follows: the job with this id is running, and this one runs after it",
}


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadArguments(f"the arguments are not JSON: {error}") from None
    except RecursionError:
        raise BadArguments("the arguments are nested too deeply") from None
    if not isinstance(value, dict):
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        raise BadArguments(f"the arguments must be a JSON object, by name, not {shown}")
    return value


def _check(task: str, call: Callable[[], object]) -> None:
    """Refuse arguments that the task doesn't take."""
    try:
        call()
    except UsageError:
        raise
    except RecursionError:
        raise BadArguments("the arguments are nested too deeply") from None
    except TypeError as error:
        raise BadArguments(f"{task}(): {error}") from None


# --- Cancel, rerun, delete


def _choosing(states: Sequence[State], default: str) -> Callable[[Any], Any]:
    """Which jobs to act on: some by id, or all that match."""
    return stacked(
        argument(
            "ids",
            metavar="[ID]...",
            about="Ids, or their first characters; or use the options below.",
            nargs=-1,
        ),
        click.option(
            "--state",
            type=click.Choice([str(each) for each in states]),
            help=f"All jobs in this state. {default}",
        ),
        narrowing,
        click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation."),
    )


@jobs.command()
@_choosing(UNENDED, "Default: both.")
@common
def cancel(where: Where, as_json: bool, **chosen: Any) -> int:
    """Cancel jobs by id, or all that match the options. Prints the outcome for each id.

    Exits with 4 if one has already ended.
    """
    from tickwheel.operate.bulk import cancel_jobs

    action = Action(verb="cancel", past="cancelled", act=cancel_jobs)
    return _take(action, UNENDED, where, as_json, **chosen)


@jobs.command()
@_choosing(UNENDED, "Default: waiting.")
@click.option("--delay", metavar="DURATION", help="Make them due then, from now: 10m.")
@click.option("--at", metavar="TIME", help="Make them due then, as an ISO time.")
@click.option("--later", metavar="DURATION", help="Make each due that much later than it was.")
@click.option("--sooner", metavar="DURATION", help="Make each due that much sooner than it was.")
@click.option("--to-queue", metavar="NAME", help="Move them to this queue.")
@click.option(
    "--priority",
    type=click.Choice([each.name.lower() for each in Priority]),
    help="Give them this priority.",
)
@common
def move(
    where: Where,
    as_json: bool,
    delay: str | None,
    at: str | None,
    later: str | None,
    sooner: str | None,
    to_queue: str | None,
    priority: str | None,
    **chosen: Any,
) -> int:
    """Move waiting jobs to another time, queue or priority.

    By id, or all that match the options. Exits with 4 if one has started or ended.
    """
    from tickwheel.operate.bulk import Destination, move_jobs

    times = [each for each in (delay, at, later, sooner) if each is not None]
    if len(times) > 1:
        raise BadTime("use one of --delay, --at, --later and --sooner")
    if not times and to_queue is None and priority is None:
        raise BadConfig("move them where? Add --delay, --at, --later, --to-queue or --priority")
    shift = later if sooner is None else sooner
    to = Destination(
        due_ms=None if at is None else time_ms("--at", at, None),
        later_ms=None if shift is None else duration_ms(shift) * (1 if sooner is None else -1),
        priority=None if priority is None else int(Priority[priority.upper()]),
        queue=None if to_queue is None else checked_name("queue", to_queue),
    )

    async def act(client: Client, ids: Sequence[str]) -> list[JobAnswer]:
        there = to
        if delay is not None:
            there = replace(to, due_ms=client.clock.now_ms() + duration_ms(delay))
        return await move_jobs(there)(client, ids)

    action = Action(verb="move", past="moved", act=act)
    return _take(action, (State.WAITING,), where, as_json, **chosen)


@jobs.command()
@_choosing(ENDED, "Needed without ids.")
@common
def rerun(where: Where, as_json: bool, **chosen: Any) -> int:
    """Run ended jobs again now, by id, or all that match the options.

    They get all their retries again. Exits with 4 if one has not ended.
    """
    from tickwheel.operate.bulk import rerun_jobs

    action = Action(verb="rerun", past="rerun", act=rerun_jobs)
    return _take(action, (), where, as_json, **chosen)


@jobs.command()
@_choosing(ENDED, "Needed without ids.")
@common
def delete(where: Where, as_json: bool, **chosen: Any) -> int:
    """Delete ended jobs permanently, by id, or all that match.

    Exits with 4 if one has not ended.
    """
    from tickwheel.operate.bulk import delete_jobs

    action = Action(verb="delete", past="deleted", act=delete_jobs)
    return _take(action, (), where, as_json, **chosen)


def _take(
    action: Action,
    default: Sequence[State],
    where: Where,
    as_json: bool,
    *,
    ids: tuple[str, ...],
    state: str | None,
    queue: str | None,
    task: str | None,
    meta: tuple[str, str] | None,
    since: str | None,
    yes: bool,
) -> int:
    """Act by ids or by filter; refuses to guess which was meant."""
    from tickwheel.operate.bulk import Filter

    states = [State(state)] if state else default
    wanted = Filter(
        states=states,
        queue=queue,
        task=task,
        meta=meta,
        since_ms=since_ms("--since", since),
    )
    filtered = state is not None or wanted.narrow
    if ids and (filtered or yes):
        raise BadConfig(
            "give ids, or --state, --queue, --task, --meta, --since and --yes, not both"
        )
    if ids:
        return act_on_ids(action, ids, where, as_json)
    if not filtered:
        raise BadConfig(
            f"which jobs? Use tickwheel jobs {action.verb} ID..., or --state, --queue, --task, "
            "--meta or --since"
        )
    if not states:
        choices = ", ".join(each for each in ENDED)
        raise BadConfig(f"in which state? Add --state: {choices}")
    return act_on_matching(action, wanted, where, as_json, yes=yes)
