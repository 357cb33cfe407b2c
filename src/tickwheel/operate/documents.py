"""Jobs, schedules, queues, workers and tasks as documents: their JSON, wherever it is shown.

Programs rely on the names of the fields: those of a job are the names of `tickwheel.JobInfo`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import msgspec

from tickwheel.duration import iso, moment
from tickwheel.engine.counts import BOUNDS_MS
from tickwheel.envelope import json_or_hidden, readable
from tickwheel.job import Job, Outcome, Priority, Run, State
from tickwheel.masking import shown_arguments
from tickwheel.operate.explain import Explanation
from tickwheel.operate.facts import Facts
from tickwheel.operate.quantiles import quantile
from tickwheel.operate.simulate import zone_of
from tickwheel.registry import Definition
from tickwheel.schedule import Rule, ticks_of
from tickwheel.schedules import ScheduleInfo
from tickwheel.store import QueueInfo, WorkerCounts, WorkerInfo
from tickwheel.unserved import UnservedTask

# An ISO time in UTC, to the millisecond.
Time = Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]


def iso_ms(ms: int) -> str:
    return iso(moment(ms))


def _iso_or_none(ms: int | None) -> str | None:
    return None if ms is None else iso_ms(ms)


# --- Jobs


class ProgressDocument(msgspec.Struct, frozen=True, kw_only=True):
    """How far a running task says that it has come."""

    part: float
    words: str


# How much of an error a brief document has, in characters.
BRIEF_ERROR = 500


class RunDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a job."""

    attempt: int
    outcome: Outcome
    worker: str
    due: Time
    started: Time | None
    ended: Time
    lateness_ms: int | None
    error: str | None


class JobDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a job."""

    id: str
    task: str
    queue: str
    priority: str
    state: State
    # By parameter name; text if another program stored something that is not JSON.
    arguments: Any
    due: Time
    created: Time
    expires: Time | None
    meta: dict[str, str]
    # None: as its task says.
    retries: int | None
    timeout_ms: int | None
    attempts: int
    failures: int
    takeovers: int
    worker: str | None
    lease_until: Time | None
    # When the run began that is under way; None until its worker has told, within seconds.
    started: Time | None = None
    cancel_requested: bool
    progress: ProgressDocument | None
    ended: Time | None
    error: str | None
    traceback: str | None
    result: Any
    history: list[RunDocument]


def brief_document(document: JobDocument) -> JobDocument:
    """The same without what may be large, for lists."""
    history = [msgspec.structs.replace(run, error=_start(run.error)) for run in document.history]
    return msgspec.structs.replace(
        document,
        arguments=None,
        result=None,
        traceback=None,
        error=_start(document.error),
        history=history,
    )


def _start(error: str | None) -> str | None:
    return None if error is None else error[:BRIEF_ERROR]


def job_document(job: Job) -> JobDocument:
    job = readable(job)
    return JobDocument(
        id=job.id,
        task=job.task,
        queue=job.queue,
        priority=priority_name(job),
        state=job.state,
        arguments=shown_arguments(job.task, decoded(job.payload)),
        due=iso_ms(job.due_ms),
        created=iso_ms(job.created_ms),
        expires=_iso_or_none(job.expires_ms),
        meta=job.meta or {},
        retries=job.retries,
        timeout_ms=job.timeout_ms,
        attempts=job.attempt,
        failures=job.failures,
        takeovers=job.takeovers,
        worker=job.worker,
        lease_until=_iso_or_none(job.lease_until_ms),
        started=_iso_or_none(job.started_ms) if job.state is State.RUNNING else None,
        cancel_requested=job.cancel_requested,
        progress=progress_document(job),
        ended=_iso_or_none(job.ended_ms),
        error=job.error,
        traceback=job.traceback,
        result=None if job.result is None else decoded(job.result),
        history=[_run_document(run) for run in job.history],
    )


def progress_document(job: Job) -> ProgressDocument | None:
    if job.progress is None:
        return None
    return ProgressDocument(part=job.progress.part, words=job.progress.words)


def _run_document(run: Run) -> RunDocument:
    return RunDocument(
        attempt=run.attempt,
        outcome=run.outcome,
        worker=run.worker,
        due=iso_ms(run.due_ms),
        started=_iso_or_none(run.started_ms),
        ended=iso_ms(run.ended_ms),
        lateness_ms=None if run.started_ms is None else run.started_ms - run.due_ms,
        error=run.error,
    )


def decoded(text: str) -> Any:
    """Decoded JSON; the text itself if another program wrote it wrong."""
    try:
        found = json.loads(text)
        # Half a character can be quoted in JSON, but is no text.
        if "\\u" in text:
            msgspec.json.encode(found)
        return found
    except (ValueError, RecursionError):
        return text


def priority_name(job: Job) -> str:
    """As a number if another program stored one that is none of ours."""
    known = {each.value: each.name.lower() for each in Priority}
    return known.get(job.priority, str(job.priority))


# --- Why a job waits


class ReasonDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Why it waits, or how it ended."""

    code: str
    words: str


class HolderDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that has it."""

    worker: str | None
    host: str | None
    alive: bool
    lease_until: Time


class AdviceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What can be done."""

    words: str
    command: str | None


class ExplanationDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job waits, who holds it, when it runs, and what can be done."""

    id: str
    state: State
    headline: str
    reasons: list[ReasonDocument]
    runs: Time | None
    blocked: bool
    runs_words: str
    holder: HolderDocument | None
    cancel_requested: bool
    meta: dict[str, str]
    expires: Time | None
    progress: ProgressDocument | None
    failures: int
    retries: int | None
    takeovers: int
    takeovers_allowed: int
    schedule: str | None
    advice: list[AdviceDocument]


def explanation_document(facts: Facts, found: Explanation) -> ExplanationDocument:
    job, holder = facts.job, facts.holder
    held = job.lease_until_ms is not None
    return ExplanationDocument(
        id=job.id,
        state=job.state,
        headline=found.headline,
        reasons=[ReasonDocument(code=str(each.why), words=each.words) for each in found.reasons],
        runs=_iso_or_none(found.runs_ms),
        blocked=found.blocked,
        runs_words=found.when,
        holder=HolderDocument(
            worker=job.worker,
            host=holder.host if holder else None,
            alive=holder is not None,
            lease_until=iso_ms(job.lease_until_ms or 0),
        )
        if held
        else None,
        cancel_requested=job.cancel_requested,
        meta=job.meta or {},
        expires=_iso_or_none(job.expires_ms),
        progress=progress_document(job),
        failures=job.failures,
        retries=facts.retries,
        takeovers=job.takeovers,
        takeovers_allowed=facts.takeovers,
        schedule=found.schedule,
        advice=[AdviceDocument(words=each.words, command=each.command) for each in found.advice],
    )


# --- Schedules


class ScheduleDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule; one that this release can't read has a `problem`, and does not tick."""

    name: str
    task: str | msgspec.UnsetType = msgspec.UNSET
    cron: str | msgspec.UnsetType | None = msgspec.UNSET
    every_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    tz: str | msgspec.UnsetType = msgspec.UNSET
    explained: str | msgspec.UnsetType = msgspec.UNSET
    next: Time | msgspec.UnsetType | None = msgspec.UNSET
    next_there: Time | msgspec.UnsetType | None = msgspec.UNSET
    paused: bool
    misfire: str | msgspec.UnsetType = msgspec.UNSET
    misfire_limit: int | msgspec.UnsetType = msgspec.UNSET
    overlap: str | msgspec.UnsetType = msgspec.UNSET
    spread_ms: int | msgspec.UnsetType = msgspec.UNSET
    start: Time | msgspec.UnsetType | None = msgspec.UNSET
    end: Time | msgspec.UnsetType | None = msgspec.UNSET
    queue: str | msgspec.UnsetType = msgspec.UNSET
    # By parameter name, and whether some of them are not shown.
    arguments: Any = msgspec.UNSET
    arguments_hidden: bool | msgspec.UnsetType = msgspec.UNSET
    from_code: bool | msgspec.UnsetType = msgspec.UNSET
    app: str | msgspec.UnsetType | None = msgspec.UNSET
    last_job: str | None
    problem: str | None


def _given(rule: Rule, arguments: Any) -> Any:
    """The arguments without the one that each tick fills in."""
    if isinstance(arguments, dict) and rule.tick_parameter in arguments:
        return {name: value for name, value in arguments.items() if name != rule.tick_parameter}
    return arguments


def schedule_document(schedule: ScheduleInfo) -> ScheduleDocument:
    rule = schedule.rule
    if rule is None:
        return ScheduleDocument(
            name=schedule.name,
            paused=schedule.paused,
            last_job=schedule.last_id,
            problem=schedule.problem,
        )
    tz = zone_of(rule)
    there = None if schedule.next is None else schedule.next.astimezone(ZoneInfo(tz))
    given = _given(rule, decoded(json_or_hidden(rule.payload)))
    shown = shown_arguments(rule.task, given)
    return ScheduleDocument(
        name=schedule.name,
        task=schedule.task,
        cron=rule.cron,
        every_ms=rule.every_ms,
        tz=tz,
        explained=schedule.explained,
        next=None if schedule.next is None else iso(schedule.next),
        next_there=None if there is None else there.isoformat(timespec="milliseconds"),
        paused=schedule.paused,
        misfire=rule.misfire.value,
        misfire_limit=rule.misfire_limit,
        overlap=rule.overlap.value,
        spread_ms=rule.spread_ms,
        start=_iso_or_none(rule.start_ms),
        end=_iso_or_none(rule.end_ms),
        queue=rule.queue,
        arguments=shown,
        arguments_hidden=shown != _given(rule, decoded(rule.payload)),
        from_code=rule.from_code,
        app=rule.app,
        last_job=schedule.last_id,
        problem=None,
    )


# --- Queues, workers, tasks


class UnservedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A task with waiting jobs that no running worker knows."""

    task: str
    since: Time


class QueueDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: how many jobs are in each state, and whether it is paused. Counts are null for keys
    that may not see all tasks."""

    name: str
    paused: bool
    waiting: int | None
    running: int | None
    done: int | None
    dead: int | None
    cancelled: int | None
    unserved_tasks: list[UnservedDocument]


def queue_document(
    queue: QueueInfo, unknown: Iterable[UnservedTask], *, counted: bool = True
) -> QueueDocument:
    """The queue; without its counts unless `counted`."""
    tasks = [
        UnservedDocument(task=each.task, since=iso_ms(each.since_ms))
        for each in unknown
        if each.queue == queue.name
    ]
    fields = msgspec.structs.asdict(queue) | ({} if counted else dict.fromkeys(map(str, State)))
    return QueueDocument(**fields, unserved_tasks=tasks)


class WorkerCountsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's process has counted since it started, and how late its runs started."""

    started: int
    done: int
    failed: int
    dead: int
    p50_ms: float | None
    p99_ms: float | None


def worker_counts_document(counts: WorkerCounts) -> WorkerCountsDocument:
    return WorkerCountsDocument(
        started=counts.started,
        done=counts.done,
        failed=counts.failed,
        dead=counts.dead,
        p50_ms=quantile(BOUNDS_MS, counts.late, 0.5),
        p99_ms=quantile(BOUNDS_MS, counts.late, 0.99),
    )


class WorkerDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it last described itself."""

    name: str
    app: str | None
    host: str
    pid: int
    version: str
    concurrency: int
    held: int
    running: int
    offset_ms: float
    queues: list[str]
    # None: an older release, which didn't say.
    tasks: list[str] | None
    started: Time
    seen: Time
    # None: its metrics are off, or an older release.
    counts: WorkerCountsDocument | None


def worker_document(worker: WorkerInfo) -> WorkerDocument:
    return WorkerDocument(
        name=worker.name,
        app=worker.app,
        host=worker.host,
        pid=worker.pid,
        version=worker.version,
        concurrency=worker.concurrency,
        held=worker.held,
        running=worker.running,
        offset_ms=worker.offset_ms,
        queues=list(worker.queues),
        tasks=None if worker.tasks is None else list(worker.tasks),
        started=iso_ms(worker.started_ms),
        seen=iso_ms(worker.seen_ms),
        counts=None if worker.counts is None else worker_counts_document(worker.counts),
    )


class TaskScheduleDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that the code declares for a task."""

    name: str
    explained: str


class TaskDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A task of the app, with its defaults."""

    name: str
    parameters: list[str]
    queue: str
    priority: str
    pool: str
    timeout_ms: int | None
    retries: int
    schedules: list[TaskScheduleDocument]


def task_document(task: Definition, declared: Mapping[str, Rule]) -> TaskDocument:
    return TaskDocument(
        name=task.name,
        parameters=list(task.arguments.parameters),
        queue=task.queue,
        priority=task.priority.name.lower(),
        pool=task.pool,
        timeout_ms=task.timeout_ms,
        retries=task.policy.retries,
        schedules=[
            TaskScheduleDocument(name=name, explained=words)
            for name, words in schedules_in_words(task, declared).items()
        ],
    )


def schedules_in_words(task: Definition, declared: Mapping[str, Rule]) -> dict[str, str]:
    """The schedules of a task in words, by name."""
    return {
        name: ticks_of(rule).explain() for name, rule in declared.items() if rule.task == task.name
    }
