"""Find jobs, look at them, cancel, move, rerun and delete them: one, or many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from tickwheel.checks import ID_LIMIT
from tickwheel.client import Client
from tickwheel.duration import duration_ms
from tickwheel.errors import BadArguments, BadTime, UsageError
from tickwheel.http.adding import BATCH_BYTES, read_time
from tickwheel.http.filters import LISTED_MOST, LOOK_S, filtered, listed, visible
from tickwheel.http.forms import (
    DeadFilter,
    FindDead,
    FindJobs,
    GetJob,
    JobFilter,
    MoveTo,
    Which,
    WhichDead,
    WhichMove,
)
from tickwheel.http.problems import Kind, Problem
from tickwheel.http.table import Handler, Incoming, Reply, Table
from tickwheel.job import ENDED, Job, State
from tickwheel.operate import bulk, explain as explaining
from tickwheel.operate.audit import in_words
from tickwheel.operate.bulk import (
    LOOK_MOST,
    UNKNOWN,
    Act,
    Filter,
    JobAnswer,
    cancel_jobs,
    delete_dead,
    delete_jobs,
    find_jobs,
    find_page,
    in_batches,
    move_jobs,
    rerun_dead,
    rerun_jobs,
)
from tickwheel.operate.documents import (
    ExplanationDocument,
    JobDocument,
    brief_document,
    explanation_document,
)
from tickwheel.operate.facts import facts_of
from tickwheel.operate.keys import Scope
from tickwheel.task import checked_move

table = Table()

UNENDED = (State.WAITING, State.RUNNING)
# How long a request may wait for the end of a job.
WAIT_MOST_S = 60.0


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Some jobs, and how many were looked at to find them; for the next page pass the cursor. No
    cursor means that there are no more."""

    jobs: list[JobDocument]
    cursor: str | None
    looked: int


class JobOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done to a job."""

    id: str
    outcome: str


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs were changed, what became of each, and whether more match."""

    changed: int
    more: bool
    results: list[JobOutcome]


# --- Find and look


@table.operation(
    "GET",
    "/v1/jobs",
    scope=Scope.READ,
    summary="List jobs",
    query=FindJobs,
    answers={200: JobList},
    problems=(Kind.INVALID,),
)
async def list_jobs(incoming: Incoming) -> Reply:
    """Waiting jobs: the next due first (on NATS, the first added). Ended jobs: newest first. With
    `view`, `from` or `until` that is so over all queues, but not on NATS. There is no index for
    `task`, `worker`, `text` and `view=retrying`, and on NATS only for `state` and `queue`: a
    request then looks at 5,000 jobs at most, so a page may be short, or empty, although the cursor
    leads to more. With `brief=true`, arguments, results and tracebacks are null, and of errors
    there are 500 characters."""
    return await _list(incoming, brief=incoming.query.brief)


@table.operation(
    "GET",
    "/v1/dead",
    scope=Scope.READ,
    summary="List dead jobs",
    query=FindDead,
    answers={200: JobList},
    problems=(Kind.INVALID,),
)
async def list_dead(incoming: Incoming) -> Reply:
    """Newest first."""
    return await _list(incoming, State.DEAD)


async def _list(incoming: Incoming, state: State | None = None, *, brief: bool = False) -> Reply:
    query = incoming.query
    client = await incoming.service.client()
    page = await find_page(
        client,
        listed(incoming, query, client.clock.now_ms(), state),
        cursor=query.cursor,
        limit=query.limit,
        look_most=LISTED_MOST,
        look_s=LOOK_S,
        visible=visible(incoming),
    )
    redaction, caller = incoming.service.redaction, incoming.caller
    jobs = [redaction.document(job, caller) for job in page.jobs]
    if brief:
        jobs = [brief_document(job) for job in jobs]
    # It would tell of jobs that are not for the caller.
    looked = page.looked if caller.sees_all(incoming.scope) else len(jobs)
    return Reply(JobList(jobs=jobs, cursor=page.cursor, looked=looked))


async def _job(incoming: Incoming) -> tuple[Client, Job]:
    """The job that the path names; raises Problem if there is none that the caller may see."""
    id = incoming.path["id"]
    client = await incoming.service.client()
    fits = 0 < len(id) <= ID_LIMIT and id.isprintable()
    [job] = await client.store.get([id]) if fits else [None]
    if job is None or not incoming.caller.sees(incoming.scope, job):
        raise _no_job(id)
    return client, job


def _no_job(id: str) -> Problem:
    return Problem(
        Kind.NOT_FOUND, f"no job has the id {id[:80]!r}: it was never added, or it was pruned"
    )


@table.operation(
    "GET",
    "/v1/jobs/{id}",
    scope=Scope.READ,
    summary="Get a job",
    query=GetJob,
    answers={200: JobDocument},
    problems=(Kind.INVALID,),
)
async def get_job(incoming: Incoming) -> Reply:
    """Everything about a job. Secrets in its arguments are redacted. With `wait`, the answer comes
    when the job has ended, or at the end of that time with the job as it is; sooner, if the server
    stops."""
    wait_s = _wait_s(incoming.query.wait)
    client, job = await _job(incoming)
    if wait_s and not job.state.ended:
        job = await _awaited(incoming, client, job, wait_s)
    return Reply(incoming.service.redaction.document(job, incoming.caller))


def _wait_s(text: str | None) -> float:
    try:
        wait_s = 0.0 if text is None else duration_ms(text) / 1000
    except UsageError as error:
        raise BadArguments(f"wait: {error}") from None
    if wait_s > WAIT_MOST_S:
        raise BadArguments(f"wait={text}: must be at most {WAIT_MOST_S:g}s; then ask again")
    return wait_s


async def _awaited(incoming: Incoming, client: Client, job: Job, wait_s: float) -> Job:
    """The job as it ends, or as it is when there is no more waiting for it."""
    if incoming.wait is None:
        raise Problem(Kind.BAD_REQUEST, "wait= is for a request of its own: it can't be watched")
    with client.awaiting(job.id) as end:
        await incoming.wait(end, wait_s)
        found = end.result() if end.done() else (await client.store.get([job.id]))[0]
    # The key may have been revoked meanwhile, and the id may be another job's.
    incoming.caller = await incoming.api.identify(incoming.request)
    if found is None or not incoming.caller.sees(incoming.scope, found):
        raise _no_job(job.id)
    return found


@table.operation(
    "GET",
    "/v1/jobs/{id}/explain",
    scope=Scope.READ,
    summary="Explain a job",
    answers={200: ExplanationDocument},
)
async def explain_job(incoming: Incoming) -> Reply:
    """Why it waits, who holds it, when it runs or how it ended, and what can be done."""
    client, job = await _job(incoming)
    facts = await facts_of(client, job, incoming.service.app.tasks)
    document = explanation_document(facts, explaining.explain(facts))
    meta = incoming.service.redaction.document(job, incoming.caller).meta
    return Reply(msgspec.structs.replace(document, meta=meta))


# --- One job


async def _act(incoming: Incoming, act: Act) -> Reply:
    client, job = await _job(incoming)
    [answer] = await act(client, [job.id])
    if answer.outcome == UNKNOWN:
        raise _no_job(job.id)
    if not answer.ok:
        raise Problem(Kind.CONFLICT, answer.words)
    return Reply(JobOutcome(id=answer.id, outcome=answer.outcome))


@table.operation(
    "POST",
    "/v1/jobs/{id}/cancel",
    scope=Scope.OPERATE,
    summary="Cancel a job",
    answers={200: JobOutcome},
    problems=(Kind.CONFLICT,),
)
async def cancel_job(incoming: Incoming) -> Reply:
    """`cancelled`: it will not run. `requested`: its worker is told to stop it."""
    return await _act(incoming, cancel_jobs)


@table.operation(
    "POST",
    "/v1/jobs/{id}/move",
    scope=Scope.OPERATE,
    summary="Move a job",
    body=MoveTo,
    answers={200: JobOutcome},
    problems=(Kind.CONFLICT,),
)
async def move_job(incoming: Incoming) -> Reply:
    """Change when it is due, its queue or its priority, while it waits. `requested`: a worker has
    it, is told, and puts it back unless it has started."""
    client = await incoming.service.client()
    return await _act(incoming, _moving(incoming, incoming.body, client.clock.now_ms()))


def _moving(incoming: Incoming, to: MoveTo, now_ms: int) -> Act:
    """What moves jobs there; raises if that is unclear, or a queue that the caller may not use."""
    if sum(each is not None for each in (to.delay, to.at, to.later)) > 1:
        raise BadTime("give one of delay, at and later")
    if to == MoveTo():
        raise BadArguments("move where? Give delay, at, later, queue or priority")
    if to.queue is not None and not incoming.caller.may(Scope.OPERATE, queue=to.queue):
        raise Problem(Kind.FORBIDDEN, f"the key may not use the queue {to.queue!r}")
    at = None if to.at is None else read_time("at", to.at)
    there = checked_move(to.delay, at, to.priority, to.queue, now_ms, empty=to.later is not None)
    later_ms = None if to.later is None else duration_ms(to.later)
    return move_jobs(bulk.Destination(later_ms=later_ms, **there))


@table.operation(
    "POST",
    "/v1/jobs/{id}/rerun",
    scope=Scope.OPERATE,
    summary="Run an ended job again",
    answers={200: JobOutcome},
    problems=(Kind.CONFLICT,),
)
async def rerun_job(incoming: Incoming) -> Reply:
    """It is due now, with all its retries."""
    return await _act(incoming, rerun_jobs)


@table.operation(
    "DELETE",
    "/v1/jobs/{id}",
    scope=Scope.OPERATE,
    summary="Delete an ended job",
    answers={200: JobOutcome},
    problems=(Kind.CONFLICT,),
)
async def delete_job(incoming: Incoming) -> Reply:
    """For good. Its id can be used again."""
    return await _act(incoming, delete_jobs)


# --- Many


async def _act_on_many(
    incoming: Incoming, act: Act, allowed: Sequence[State], default: Sequence[State] = ()
) -> Reply:
    """Act on the jobs that the body names, or on those that match: in an allowed state, which they
    must name if there is no default."""
    client = await incoming.service.client()
    which = incoming.body
    incoming.detail = in_words(_conditions(which.filter))
    wanted = _wanted(incoming, client.clock.now_ms(), allowed, default)
    if wanted is None:
        answers, more = await _by_ids(incoming, client, act, which.ids), False
    else:
        matching = await find_jobs(
            client, wanted, most=which.limit, look_most=LOOK_MOST, visible=visible(incoming)
        )
        if matching.more and not matching.states:
            raise Problem(
                Kind.INVALID,
                f"none of the first {LOOK_MOST:,} jobs match; narrow the filter "
                "by state, queue or meta, for which there is an index",
            )
        ids = list(matching.states)[: which.limit]
        more = matching.more or len(ids) < len(matching.states)
        answers = await in_batches(act, client, ids)
    changed = sum(answer.ok for answer in answers)
    # The first of those that it was about, changed or not.
    ids = [answer.id for answer in sorted(answers, key=lambda each: not each.ok)]
    incoming.detail = in_words(_conditions(which.filter), ids, changed, len(answers))
    results = [JobOutcome(id=answer.id, outcome=answer.outcome) for answer in answers]
    return Reply(Changed(changed=changed, more=more, results=results))


def _conditions(chosen: JobFilter | DeadFilter | None) -> dict[str, str]:
    """What a filter says, for the audit log: of meta only the name, and no text, which may be from
    the arguments of jobs."""
    given = {} if chosen is None else msgspec.structs.asdict(chosen)
    said = {name.strip("_"): str(value) for name, value in given.items() if value is not None}
    if chosen is not None and chosen.meta is not None:
        said["meta"] = " ".join(f"{name}=…" for name in chosen.meta)
    return said | ({"text": "…"} if "text" in said else {})


async def _by_ids(
    incoming: Incoming, client: Client, act: Act, ids: Sequence[str]
) -> list[JobAnswer]:
    """A job that the caller may not see is unknown to them."""
    if incoming.caller.sees_all(incoming.scope):
        return await in_batches(act, client, ids)
    found = await client.store.get(ids)
    seen = [job.id for job in found if job is not None and visible(incoming)(job)]
    answers = {answer.id: answer for answer in await in_batches(act, client, seen)}
    return [answers.get(id) or JobAnswer.unknown(id) for id in ids]


def _wanted(
    incoming: Incoming, now_ms: int, allowed: Sequence[State], default: Sequence[State]
) -> Filter | None:
    """The filter that the body has, or None if it has ids; raises if it has both or neither, or if
    it is about no states or about others."""
    which: Which | WhichDead = incoming.body
    chosen = which.filter
    if (which.ids is None) == (chosen is None):
        raise BadArguments("which jobs? Give ids, or a filter")
    if chosen is None:
        return None
    if isinstance(chosen, DeadFilter):
        return filtered(incoming, chosen, now_ms, allowed)
    if chosen == JobFilter():
        raise BadArguments("which jobs? The filter is empty")
    wanted = filtered(incoming, chosen, now_ms, ())
    for state in wanted.states:
        if state not in allowed:
            given = f"view={chosen.view}" if chosen.view else f"state={state}"
            raise BadArguments(f"{given}: must be one of {', '.join(allowed)}")
    if not wanted.states and not default:
        raise BadArguments(f"in which state? One of {', '.join(allowed)}")
    return wanted if wanted.states else replace(wanted, states=default)


def _bulk(path: str, summary: str, body: type) -> Callable[[Handler], Handler]:
    return table.operation(
        "POST",
        path,
        scope=Scope.OPERATE,
        summary=summary,
        body=body,
        body_limit=BATCH_BYTES,
        answers={200: Changed},
    )


@_bulk("/v1/jobs/cancel", "Cancel many jobs", Which)
async def cancel_many(incoming: Incoming) -> Reply:
    """By ids, or by filter: then those that wait or run."""
    return await _act_on_many(incoming, cancel_jobs, UNENDED, default=UNENDED)


@_bulk("/v1/jobs/move", "Move many jobs", WhichMove)
async def move_many(incoming: Incoming) -> Reply:
    """By ids, or by filter: then those that wait. Repeated by a filter, `later` moves those again
    that have moved: name the time with `until`."""
    client = await incoming.service.client()
    act = _moving(incoming, incoming.body.to, client.clock.now_ms())
    return await _act_on_many(incoming, act, UNENDED, default=[State.WAITING])


@_bulk("/v1/jobs/rerun", "Run many ended jobs again", Which)
async def rerun_many(incoming: Incoming) -> Reply:
    """By ids, or by filter, which must have a state or a view. Repeat it while there is `more`,
    with `until` as the time of the first request: then it ends, whatever ends meanwhile."""
    return await _act_on_many(incoming, rerun_jobs, ENDED)


@_bulk("/v1/jobs/delete", "Delete many ended jobs", Which)
async def delete_many(incoming: Incoming) -> Reply:
    """By ids, or by filter, which must have a state or a view. Repeat it while there is `more`,
    with `until` as the time of the first request: then it ends, whatever ends meanwhile."""
    return await _act_on_many(incoming, delete_jobs, ENDED)


@_bulk("/v1/dead/rerun", "Run dead jobs again", WhichDead)
async def rerun_many_dead(incoming: Incoming) -> Reply:
    """By ids, or by filter; an empty one means all. Jobs that are not dead are left alone."""
    return await _act_on_many(incoming, rerun_dead, [State.DEAD])


@_bulk("/v1/dead/delete", "Delete dead jobs", WhichDead)
async def delete_many_dead(incoming: Incoming) -> Reply:
    """By ids, or by filter; an empty one means all. Jobs that are not dead are left alone."""
    return await _act_on_many(incoming, delete_dead, [State.DEAD])
