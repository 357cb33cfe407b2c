"""What users write: `App`, `@app.task`, `using`, `enqueue` and the handle of a job."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import update_wrapper
from pathlib import PurePath
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, overload

from tickwheel.bridge import Bridge
from tickwheel.client import Client, JobInfo
from tickwheel.clock import MS_NS, Clock, SystemClock
from tickwheel.config import load
from tickwheel.errors import BadArguments, BadConfig, BadTime
from tickwheel.job import Cancelled, Job, Priority, new_id
from tickwheel.retry import RetryPolicy, checked_retries
from tickwheel.schedule import Rule
from tickwheel.schedules import AppSchedules, make_rule
from tickwheel.span import FARTHEST_MS, Span, due_ms, span_ms
from tickwheel.store import Page, Query, QueueInfo, Store, WorkerInfo, open_store
from tickwheel.tasks import (
    MIB,
    Definition,
    Pool,
    PriorityName,
    Tasks,
    checked_name,
    decode_result,
    define,
    priority_of,
)
from tickwheel.worker import Worker, WorkerOptions

P = ParamSpec("P")
R = TypeVar("R")
# What calling a task directly gives: its result, or for an async one the coroutine of it.
C = TypeVar("C")

ID_LIMIT = 200
# A caller that enqueues without a pause still lets others run after this many.
CHUNK = 4000


class JobHandle(Generic[R]):
    """A job that was enqueued: ask for it, wait for it, cancel it."""

    __slots__ = ("_app", "_returns", "added", "id")

    def __init__(self, app: App, id: str, *, added: bool = True, returns: Any = Any) -> None:
        self.id = id
        # False where the id was taken before: the job of that id is another call's.
        self.added = added
        self._app = app
        self._returns = returns

    def __repr__(self) -> str:
        return f"<job {self.id}>"

    async def info(self) -> JobInfo:
        """State, due time, attempts, error and history; JobUnknown where it was pruned."""
        client = await self._app.client()
        return JobInfo.of(await client.get(self.id))

    async def result(self, timeout: Span | None = None) -> R:  # noqa: ASYNC109 (a Span)
        """Wait until the job is done and give what its task returned.

        Raises ResultTimeout, JobFailed (it is dead), JobCancelled, or ResultError where the
        result could not be kept.
        """
        client = await self._app.client()
        job = await client.ended(self.id, None if timeout is None else span_ms(timeout) / 1000)
        value: R = decode_result(job.result, self._returns)
        return value

    async def cancel(self) -> Cancelled:
        """Cancel the job, and say what that achieved."""
        client = await self._app.client()
        [answer] = await client.cancel([self.id])
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What `using` was given for a job; None leaves it to the task."""

    delay_ms: int | None = None
    due_ms: int | None = None
    queue: str | None = None
    priority: Priority | None = None
    id: str | None = None
    retries: int | None = None
    timeout_ms: int | None = None


class Call(Generic[P, R]):
    """A task with the choices that `using` made, ready to be enqueued."""

    __slots__ = ("_app", "_choice", "_definition")

    def __init__(self, app: App, definition: Definition, choice: _Choice) -> None:
        self._app = app
        self._definition = definition
        self._choice = choice

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Store a job that calls the task with these arguments; it is durable when this returns."""
        # Encode first: what is wrong with the call is said before anything is waited for.
        payload = self._app._payload(self._definition, args, kwargs)
        client = await self._app.client()
        job = self._job(payload, client.clock.next_ms())
        return self._handle(job.id, await client.add(job))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for callers without an event loop."""
        return self._app._run_sync(self.enqueue(*args, **kwargs))

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """A job for `app.enqueue_many`; nothing is stored yet."""
        payload = self._app._payload(self._definition, args, kwargs)
        return self._job(payload, self._app._now_ms())

    def _job(self, payload: str, now_ms: int) -> Job:
        choice, definition = self._choice, self._definition
        due = now_ms + (choice.delay_ms or 0) if choice.due_ms is None else choice.due_ms
        return Job(
            id=choice.id or new_id(now_ms),
            task=definition.name,
            payload=payload,
            queue=choice.queue or definition.queue,
            priority=definition.priority if choice.priority is None else choice.priority,
            due_ms=due,
            created_ms=now_ms,
            retries=choice.retries,
            timeout_ms=choice.timeout_ms,
        )

    def _handle(self, id: str, added: bool) -> JobHandle[R]:
        return JobHandle(self._app, id, added=added, returns=self._definition.returns)


class Task(Generic[P, R, C]):
    """A function under a name. Calling it runs it here and now, like any function."""

    def __init__(self, app: App, definition: Definition) -> None:
        update_wrapper(self, definition.function)
        self._app = app
        self._call: Call[P, R] = Call(app, definition, _Choice())
        self.definition = definition
        # For the process that runs it: there the task's name leads to this object.
        self.function = definition.function

    @property
    def name(self) -> str:
        return self.definition.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> C:
        value: C = self.function(*args, **kwargs)
        return value

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Store a job that calls the task with these arguments; it is durable when this returns."""
        return await self._call.enqueue(*args, **kwargs)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for callers without an event loop: Flask, Django, scripts."""
        return self._call.enqueue_sync(*args, **kwargs)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> Job:
        """A job for `app.enqueue_many`; nothing is stored yet."""
        return self._call.job(*args, **kwargs)

    def using(
        self,
        *,
        delay: Span | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: PriorityName | None = None,
        id: str | None = None,
        retries: int | None = None,
        timeout: Span | None = None,
    ) -> Call[P, R]:
        """Choose for one job: when it is due, where it goes, how often it is tried.

        `delay` is "30m", seconds or a timedelta, `at` an aware datetime; a time that has passed
        means now. `id` is the idempotency key: while a job of that id is kept, enqueueing another
        stores nothing and gives a handle to the first.
        """
        if delay is not None and at is not None:
            raise BadTime("give delay= or at=, not both")
        choice = _Choice(
            delay_ms=None if delay is None else span_ms(delay),
            due_ms=None if at is None else self._app._not_absurd(due_ms(at), at),
            queue=None if queue is None else checked_name("queue", queue),
            priority=None if priority is None else priority_of(priority),
            id=None if id is None else _checked_id(id),
            retries=None if retries is None else checked_retries(retries),
            timeout_ms=None if timeout is None else _checked_timeout(timeout),
        )
        return Call(self._app, self.definition, choice)


class Decorator(Protocol):
    """What `@app.task(…)` gives: it keeps the parameters and the result of the function."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, R]: ...


class App:
    """Tasks, and the store that keeps their jobs.

    The store is opened on first use, once per event loop; `async with app:` opens and closes it
    explicitly. What is not given comes from the settings: `tickwheel config` shows them.
    """

    def __init__(
        self,
        store: str | Store | None = None,
        *,
        retention: Span | None = None,
        dead_retention: Span | None = None,
        payload_limit: int = MIB,
        clock: Clock | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        settings = load().settings
        if store is None or isinstance(store, str):
            self.url = store or settings.store
            self._store = open_store(self.url, clock=self._clock)
        elif isinstance(store, PurePath):
            raise BadConfig(f"a store is given by its URL: App('sqlite:///{store}')")
        else:
            self.url, self._store = "", store
        self._connect: Callable[[], Client] = lambda: Client(self._store.twin(), self._clock)
        self.tasks = Tasks()
        self.retention_ms = span_ms(settings.retention if retention is None else retention)
        self.dead_retention_ms = span_ms(
            settings.dead_retention if dead_retention is None else dead_retention
        )
        self.payload_limit = payload_limit
        self.sync = SyncApp(self)
        # Schedules that the code declares, by name.
        self.declared: dict[str, Rule] = {}
        self.schedules = AppSchedules(self.client, self.tasks.get, payload_limit)
        self._start_anew()

    # --- Tasks

    @overload
    def task(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: PriorityName = "normal",
        retries: int | RetryPolicy = 5,
        timeout: Span | None = "1h",
        pool: Pool | None = None,
    ) -> Decorator: ...
    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: PriorityName = "normal",
        retries: int | RetryPolicy = 5,
        timeout: Span | None = "1h",
        pool: Pool | None = None,
    ) -> Any:
        """Register a function as a task; it stays callable as before.

        An `async def` runs on the worker's event loop, a plain `def` in a thread, or with
        `pool="process"` in a child process. `timeout=None` lets a run take as long as it likes.
        """

        def decorate(function: Callable[..., Any]) -> Task[..., Any, Any]:
            definition = define(
                function,
                name=name,
                queue=queue,
                priority=priority,
                policy=retries
                if isinstance(retries, RetryPolicy)
                else RetryPolicy(retries=retries),
                timeout_ms=None if timeout is None else _checked_timeout(timeout),
                pool=pool,
            )
            self.tasks.register(definition)
            return Task(self, definition)

        return decorate if function is None else decorate(function)

    # --- Schedules

    def cron(self, expression: str, *, name: str | None = None, **options: Any) -> Decorator:
        """Run a task at the times of a cron expression: `@app.cron("0 2 * * *", tz="Asia/Taipei")`.

        Goes on a task, or on a function, which becomes one. The schedule is named as the task,
        unless `name` is given. Options: tz, start, end, arguments, misfire ("skip", "one", "all"
        with misfire_limit), overlap ("allow", "skip", "cancel"), spread. A parameter named `tick`
        is given the tick's nominal time.
        """
        return self._scheduled(name, {"cron": expression, **options})

    def every(self, interval: Span, *, name: str | None = None, **options: Any) -> Decorator:
        """Run a task at a fixed interval: `@app.every("15m")`. Options as for `cron`."""
        return self._scheduled(name, {"every": interval, **options})

    def _scheduled(self, name: str | None, options: dict[str, Any]) -> Decorator:
        def decorate(function: Callable[..., Any]) -> Any:
            task: Task[..., Any, Any]
            task = function if isinstance(function, Task) else self.task(function)
            rule = make_rule(
                task.definition, from_code=True, payload_limit=self.payload_limit, **options
            )
            known_as = checked_name("schedule", name or task.name)
            if known_as in self.declared:
                raise BadConfig(f"two schedules are named {known_as!r}; give one of them name=…")
            self.declared[known_as] = rule
            return task

        return decorate

    # --- Jobs

    async def enqueue_many(self, jobs: Sequence[Job]) -> list[JobHandle[Any]]:
        """Store many jobs, made with `task.job(…)`, in as few steps as the store can."""
        if not isinstance(jobs, Sequence) or not all(isinstance(job, Job) for job in jobs):
            raise BadArguments("enqueue_many takes a list of jobs, made with task.job(…)")
        returns = [self.tasks.get(job.task).returns for job in jobs]
        client = await self.client()
        added = [
            new
            for start in range(0, len(jobs), CHUNK)
            for new in await client.add_many(jobs[start : start + CHUNK])
        ]
        return [
            JobHandle(self, job.id, added=new, returns=kind)
            for job, new, kind in zip(jobs, added, returns, strict=True)
        ]

    def job(self, id: str) -> JobHandle[Any]:
        """A handle for a job whose id is known; nothing is looked up yet."""
        return JobHandle(self, _checked_id(id))

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs that match, page by page."""
        return await (await self.client()).find(query, cursor=cursor, limit=limit)

    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        """Cancel jobs, and say of each what that achieved."""
        return await (await self.client()).cancel(ids)

    async def rerun(self, ids: Sequence[str]) -> list[bool]:
        """Put ended jobs back to run now; False where a job has not ended or is unknown."""
        return await (await self.client()).rerun(ids)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        """Forget ended jobs; False where a job has not ended or is unknown."""
        return await (await self.client()).delete(ids)

    async def queues(self) -> list[QueueInfo]:
        """Every queue with its counts."""
        return await (await self.client()).queues()

    async def pause(self, queue: str) -> None:
        """Stop handing out a queue's jobs; running ones go on, and jobs can still be added."""
        await (await self.client()).pause(checked_name("queue", queue), True)

    async def resume(self, queue: str) -> None:
        """Hand out a queue's jobs again."""
        await (await self.client()).pause(checked_name("queue", queue), False)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that were seen lately."""
        return await (await self.client()).workers()

    # --- Work

    @asynccontextmanager
    async def worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = 100,
        lease: Span = "15s",
        grace: Span = "30s",
        guarded: bool = True,
    ) -> AsyncIterator[Worker]:
        """Run jobs in this program for as long as the block lasts; then stop gracefully.

        Serves the queues that the app's tasks go to, or those given. Should the worker fail, the
        block is cancelled and the failure is raised.
        """
        if not isinstance(concurrency, int) or concurrency < 1:
            raise BadConfig(f"concurrency={concurrency!r}: a worker runs at least 1 job at a time")
        if isinstance(queues, str):
            raise BadConfig(f"queues={queues!r}: give a list, [{queues!r}]")
        lease_ms = span_ms(lease)
        if lease_ms < 500:
            raise BadConfig(f"lease={lease!r}: below 500ms a short pause would lose jobs")
        options = WorkerOptions(
            queues=[checked_name("queue", queue) for queue in queues or self.tasks.queues()],
            concurrency=concurrency,
            lease_ms=lease_ms,
            grace_ms=span_ms(grace),
            retention_ms=self.retention_ms,
            dead_retention_ms=self.dead_retention_ms,
            result_limit=self.payload_limit,
        )
        client = await self.client()
        worker = Worker(
            client.store,
            self.tasks,
            client.clock,
            self._clock,
            options,
            schedules=self.declared,
            guarded=guarded,
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(worker.run())
                try:
                    yield worker
                finally:
                    worker.stop()
        except BaseExceptionGroup as errors:
            # What one side raised is raised as it is: a block need not know of the group around it.
            if len(errors.exceptions) == 1:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            raise

    # --- Life

    async def __aenter__(self) -> Self:
        await self.client()
        return self

    async def __aexit__(self, *_: object) -> None:
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    async def client(self) -> Client:
        """The client of the running event loop, open: everything that can be asked of the store."""
        client = self._client()
        await client.ready()
        return client

    def _client(self) -> Client:
        """The client of the running event loop; each loop has its own handle on the store."""
        if self._pid != os.getpid():
            self._start_anew()
        loop = asyncio.get_running_loop()
        with self._lock:
            client = self._clients.get(loop)
            if client is None:
                for other in [each for each in self._clients if each.is_closed()]:
                    del self._clients[other]
                client = self._clients[loop] = self._connect()
        return client

    def _run_sync(self, work: Coroutine[Any, Any, R]) -> R:
        if self._pid != os.getpid():
            self._start_anew()
        return self._bridge.call(work)

    def _start_anew(self) -> None:
        """Connections, threads and locks don't survive a fork."""
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client]
        self._clients = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._bridge = Bridge()
        self._pid = os.getpid()

    @contextmanager
    def _elsewhere(
        self, clock: Clock, connect: Callable[[], Client], bridge: Callable[[Bridge], Bridge]
    ) -> Iterator[None]:
        """For tests: by another clock and with other clients for a while, then as before."""
        own = self._clock, self._connect, self._clients, self._bridge
        self._clock, self._connect, self._bridge = clock, connect, bridge(self._bridge)
        self._clients = weakref.WeakKeyDictionary()
        try:
            yield
        finally:
            self._clock, self._connect, self._clients, self._bridge = own

    def _now_ms(self) -> int:
        """The store's time as far as it is known here; without an open store, our own."""
        try:
            client = self._clients.get(asyncio.get_running_loop())
        except RuntimeError:
            client = None
        return client.clock.next_ms() if client else -(-self._clock.now_ns() // MS_NS)

    def _payload(
        self, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str:
        return definition.arguments.encode(args, kwargs, limit=self.payload_limit)

    def _not_absurd(self, due: int, at: datetime) -> int:
        if due > self._now_ms() + FARTHEST_MS:
            raise BadTime(f"at={at.isoformat()} is more than 10 years away")
        return due


class SyncApp:
    """The app for callers without an event loop; `app.sync`. Each call waits for its answer."""

    def __init__(self, app: App) -> None:
        self._app = app

    def enqueue_many(self, jobs: Sequence[Job]) -> list[JobHandle[Any]]:
        return self._call(self._app.enqueue_many(jobs))

    def info(self, job: JobHandle[Any]) -> JobInfo:
        return self._call(job.info())

    def result(self, job: JobHandle[R], timeout: Span | None = None) -> R:
        return self._call(job.result(timeout))

    def cancel(self, job: JobHandle[Any]) -> Cancelled:
        return self._call(job.cancel())

    def rerun(self, ids: Sequence[str]) -> list[bool]:
        return self._call(self._app.rerun(ids))

    def queues(self) -> list[QueueInfo]:
        return self._call(self._app.queues())

    def pause(self, queue: str) -> None:
        self._call(self._app.pause(queue))

    def resume(self, queue: str) -> None:
        self._call(self._app.resume(queue))

    def close(self) -> None:
        """Close the store that the calls above opened. It opens again when needed."""
        self._call(self._app.__aexit__())

    def _call(self, work: Coroutine[Any, Any, R]) -> R:
        return self._app._run_sync(work)


def _checked_id(id: str) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= ID_LIMIT or not id.isprintable():
        raise BadArguments(f"id={id!r}: an id is 1 to {ID_LIMIT} printable characters")
    return id


def _checked_timeout(timeout: Span) -> int:
    ms = span_ms(timeout)
    if ms == 0:
        raise BadConfig("timeout=0 leaves no time to run; write timeout=None for no limit")
    return ms
