"""Queues, workers, tasks, counts, what is wrong; whether this server works."""

from __future__ import annotations

import asyncio

import msgspec

from tickwheel.checks import checked_name
from tickwheel.client import Client
from tickwheel.config import unknown_variables
from tickwheel.errors import BadConfig, TickwheelError
from tickwheel.http.access import ANY_NAME, Caller
from tickwheel.http.problems import Kind, Problem, problem_of, store_away
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.operate.doctor import examine, of_variables, of_versions
from tickwheel.operate.documents import (
    QueueDocument,
    TaskDocument,
    WorkerDocument,
    queue_document,
    task_document,
    worker_document,
)
from tickwheel.operate.keys import Scope
from tickwheel.operate.stats import Standing, Stats, standing, stats_of
from tickwheel.store import Finding
from tickwheel.unserved import unserved_tasks
from tickwheel.version import __version__

table = Table()

# How long the store has to say that it is there.
READY_S = 2.0


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    """All queues that hold jobs or are paused, by name."""

    queues: list[QueueDocument]


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a queue is paused."""

    name: str
    paused: bool


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """The workers that were seen recently, by name."""

    workers: list[WorkerDocument]


class TaskList(msgspec.Struct, frozen=True, kw_only=True):
    """The app's tasks, by name; none if the server was started for a store alone."""

    tasks: list[TaskDocument]


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator should know."""

    findings: list[Finding]


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """That it works, and its version."""

    status: str
    version: str


# --- Queues


@table.operation(
    "GET", "/v1/queues", scope=Scope.READ, summary="List queues", answers={200: QueueList}
)
async def list_queues(incoming: Incoming) -> Reply:
    """How many jobs each has in each state, whether it is paused, and tasks that no running worker
    knows. A key that may not see all tasks gets no counts: they are null."""
    client = await incoming.service.client()
    unknown = [
        each
        for each in unserved_tasks(await client.parked(), await client.workers())
        if incoming.caller.may(Scope.READ, task=each.task)
    ]
    found = [
        queue_document(queue, unknown, counted=_sees_all_tasks(incoming.caller))
        for queue in await client.queues()
        if incoming.caller.may(Scope.READ, queue=queue.name)
    ]
    return Reply(QueueList(queues=found))


def _sees_all_tasks(caller: Caller) -> bool:
    """Whether counts of jobs tell the caller nothing that is not for them."""
    return caller.may(Scope.READ, task=ANY_NAME)


async def _set(incoming: Incoming, paused: bool) -> Reply:
    name = incoming.path["name"]
    try:
        checked_name("queue", name)
    except BadConfig as error:
        raise Problem(Kind.NOT_FOUND, str(error)) from None
    # It stops the jobs of all tasks.
    if not incoming.caller.may(incoming.scope, queue=name, task=ANY_NAME):
        raise Problem(Kind.NOT_FOUND, f"there is no queue {name!r} that the key may pause")
    await (await incoming.service.client()).pause(name, paused)
    return Reply(QueueState(name=name, paused=paused))


@table.operation(
    "POST",
    "/v1/queues/{name}/pause",
    scope=Scope.OPERATE,
    summary="Pause a queue",
    answers={200: QueueState},
)
async def pause_queue(incoming: Incoming) -> Reply:
    """Workers claim no more of its jobs. Those that a worker holds still start, within about a
    second, and jobs can be added. It need not have jobs."""
    return await _set(incoming, True)


@table.operation(
    "POST",
    "/v1/queues/{name}/resume",
    scope=Scope.OPERATE,
    summary="Resume a queue",
    answers={200: QueueState},
)
async def resume_queue(incoming: Incoming) -> Reply:
    """Its jobs start again."""
    return await _set(incoming, False)


# --- What runs


@table.operation(
    "GET", "/v1/workers", scope=Scope.READ, summary="List workers", answers={200: WorkerList}
)
async def list_workers(incoming: Incoming) -> Reply:
    """Those that were seen recently, with their load. What they have counted is for keys without
    limits to queues or tasks."""
    client, caller = await incoming.service.client(), incoming.caller
    found: list[WorkerDocument] = []
    for worker in map(worker_document, await client.workers()):
        queues = [name for name in worker.queues if caller.may(Scope.READ, queue=name)]
        tasks = [name for name in worker.tasks or () if caller.may(Scope.READ, task=name)]
        if queues:
            known = None if worker.tasks is None else tasks
            # They are of all its queues and tasks.
            counts = worker.counts if caller.sees_all(Scope.READ) else None
            found.append(msgspec.structs.replace(worker, queues=queues, tasks=known, counts=counts))
    return Reply(WorkerList(workers=found))


@table.operation(
    "GET", "/v1/tasks", scope=Scope.READ, summary="List tasks", answers={200: TaskList}
)
async def list_tasks(incoming: Incoming) -> Reply:
    """With their parameters, defaults and schedules."""
    app, caller = incoming.service.app, incoming.caller
    found = [
        task_document(task, app.declared)
        for task in sorted(app.tasks.all(), key=lambda each: each.name)
        if caller.may(Scope.READ, task=task.name)
    ]
    return Reply(TaskList(tasks=found))


@table.operation("GET", "/v1/stats", scope=Scope.READ, summary="Count jobs", answers={200: Stats})
async def get_stats(incoming: Incoming) -> Reply:
    """Over all queues that the key may see. A key that may not see all tasks gets no counts of
    jobs: they are null."""
    client = await incoming.service.client()
    return Reply(await seen_stats(incoming.caller, client, await standing(client)))


async def seen_stats(caller: Caller, client: Client, found: Standing) -> Stats:
    """What this caller may see of the counts."""
    return await stats_of(
        client,
        found,
        lambda queue: caller.may(Scope.READ, queue=queue),
        counted=_sees_all_tasks(caller),
    )


@table.operation(
    "GET",
    "/v1/doctor",
    scope=Scope.READ,
    summary="Examine the store",
    answers={200: Findings},
)
async def get_doctor(incoming: Incoming) -> Reply:
    """What is guaranteed, what is wrong, and how to fix it. For keys without limits to queues or
    tasks."""
    if not incoming.caller.sees_all(Scope.READ):
        raise Problem(Kind.FORBIDDEN, "the key may not see all queues and tasks")
    found = [*of_versions(), *of_variables(unknown_variables())]
    found += await examine(await incoming.service.client())
    return Reply(Findings(findings=found))


@table.operation(
    "GET",
    "/metrics",
    scope=Scope.READ,
    summary="Read the metrics",
    answers={200: str},
    media="text/plain",
    problems=(Kind.NOT_AVAILABLE,),
)
async def get_metrics(incoming: Incoming) -> Reply:
    """As Prometheus reads them: of this process, and of all queues. For keys without limits to
    queues or tasks. Needs the extra `metrics`."""
    if not incoming.caller.sees_all(Scope.READ):
        raise Problem(Kind.FORBIDDEN, "the key may not see all queues and tasks")
    try:
        text, content_type = await incoming.service.metrics(incoming.accept)
    except BadConfig as error:
        raise Problem(Kind.NOT_AVAILABLE, str(error)) from None
    return Reply(text, headers={"Content-Type": content_type})


# --- This server


@table.operation(
    "GET", "/healthz", scope=None, summary="Is this process alive?", answers={200: Health}
)
async def get_health(incoming: Incoming) -> Reply:
    """Asks nothing of the store."""
    return Reply(Health(status="ok", version=__version__))


@table.operation(
    "GET", "/readyz", scope=None, summary="Can it reach its store?", answers={200: Health}
)
async def get_ready(incoming: Incoming) -> Reply:
    """Answers within two seconds."""
    try:
        async with asyncio.timeout(READY_S):
            client = await incoming.service.client()
            await client.store.time_ns()
            await client.store.get(["tickwheel-ready"])
    except TimeoutError:
        raise store_away(f"it did not answer within {READY_S:g} s") from None
    except TickwheelError as error:
        # Anyone may ask: not in the store's own words.
        raise store_away(problem_of(error).kind.title) from error
    return Reply(Health(status="ready", version=__version__))
