"""What users write: `App`, `@app.task`, `@app.cron`, and what an app is asked."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from pathlib import PurePath
from typing import Any, ParamSpec, Self, TypeVar, overload

from tickwheel import transaction
from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.bridge import Bridge
from tickwheel.calls import Decorator, JobHandle, Task, checked_timeout
from tickwheel.client import Client, JobInfo
from tickwheel.clock import MS_NS, Clock, SystemClock
from tickwheel.config import load
from tickwheel.errors import BadArguments, BadConfig, BadTime
from tickwheel.job import Cancelled, Job
from tickwheel.outbox import Outbox
from tickwheel.retry import RetryPolicy
from tickwheel.schedule import Rule
from tickwheel.schedules import AppSchedules, make_rule
from tickwheel.span import FARTHEST_MS, Span, span_ms
from tickwheel.store import (
    Page,
    Query,
    QueueInfo,
    Store,
    WorkerInfo,
    checked_text,
    job_bytes,
    open_store,
)
from tickwheel.tasks import (
    MIB,
    Definition,
    Pool,
    PriorityName,
    Tasks,
    checked_id,
    checked_name,
    define,
)
from tickwheel.worker import Worker, WorkerOptions

P = ParamSpec("P")
R = TypeVar("R")

# Jobs of `enqueue_many` that are on their way at the same time, in one step or a few; and about
# BATCH_BYTES of them.
CHUNK = 4000

NO_JOBS = "enqueue_many takes jobs, made with task.job(…)"


class App:
    """Tasks, and the store that keeps their jobs.

    The store is opened on first use, once per event loop; `async with app:` opens and closes it
    explicitly. Such blocks may be nested, also in `app.worker()`: the last one to end closes. What
    is not given comes from the settings: `tickwheel config` shows them.
    """

    def __init__(
        self,
        store: str | Store | None = None,
        *,
        outbox: str | None = None,
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
        # For transactions of the user's where the jobs are in another store than the data.
        self.outbox = Outbox(place, self._store) if (place := outbox or settings.outbox) else None
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
                timeout_ms=None if timeout is None else checked_timeout(timeout),
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

    async def enqueue_many(
        self, jobs: Iterable[Job], *, connection: Any = None
    ) -> list[JobHandle[Any]]:
        """Store many jobs, made with `task.job(…)`, in as few steps as the store can.

        A list is checked before any of it is stored. A generator is taken by the portion: some of
        its jobs are made while those before them are being stored.

        With a `connection` of your own they are part of its transaction, as in `using`.
        """
        taken: list[Job] = []
        portions = self._portions(jobs, taken)
        if connection is None:
            added = await (await self.client()).add_many(portions)
        else:
            added = []
            for portion in portions:
                added += await self._add_within(connection, portion)
        return self._handles(taken, added, connection)

    def _portions(self, jobs: Iterable[Job], taken: list[Job]) -> Iterator[Sequence[Job]]:
        """Jobs that are fit to be stored, some at a time; those that were taken are kept."""
        if not isinstance(jobs, Iterable):
            raise BadArguments(NO_JOBS)
        checked = self._checked(jobs)
        if isinstance(jobs, Sequence):
            checked = iter(list(checked))
        lanes = self._store.lanes
        for portion in portions(
            checked, job_bytes, most=max(1, CHUNK // lanes), most_bytes=BATCH_BYTES // lanes
        ):
            taken += portion
            yield portion

    def _checked(self, jobs: Iterable[Job]) -> Iterator[Job]:
        known: set[str] = set()
        for job in jobs:
            if not isinstance(job, Job):
                raise BadArguments(NO_JOBS)
            if job.task not in known:
                self.tasks.get(job.task)
                known.add(job.task)
            yield job

    def _handles(
        self, jobs: Sequence[Job], added: Sequence[bool], connection: Any
    ) -> list[JobHandle[Any]]:
        on_its_way = connection is not None and self.outbox is not None
        return [
            JobHandle(
                self,
                job.id,
                added=new,
                returns=self.tasks.get(job.task).returns,
                on_its_way=on_its_way,
            )
            for job, new in zip(jobs, added, strict=True)
        ]

    # --- Inside a transaction of the user's

    async def _add_within(self, connection: Any, jobs: Sequence[Job]) -> list[bool]:
        statement = self._statement(connection, jobs)
        return self._added(jobs, await transaction.run(connection, statement))

    def _add_within_sync(self, connection: Any, jobs: Sequence[Job]) -> list[bool]:
        statement = self._statement(connection, jobs)
        return self._added(jobs, transaction.run_sync(connection, statement))

    def _statement(self, connection: Any, jobs: Sequence[Job]) -> transaction.Statement:
        driver = transaction.driver_of(connection)
        if self.outbox is not None:
            return self.outbox.adding(jobs, driver=driver)
        if not isinstance(self._store, transaction.Transactional):
            raise BadConfig(
                "connection= needs a postgresql:// or sqlite:// store; with another one, give the "
                "app an outbox in your database: App(…, outbox='postgresql://…')"
            )
        return self._store.adding(jobs, driver=driver)

    def _added(self, jobs: Sequence[Job], ids: Sequence[str]) -> list[bool]:
        """The outbox can't say whether an id is taken: that shows when the job is handed over."""
        if self.outbox is not None:
            return [True] * len(jobs)
        left = set(ids)
        answers = []
        for job in jobs:
            answers.append(job.id in left)
            left.discard(job.id)
        return answers

    def job(self, id: str) -> JobHandle[Any]:
        """A handle for a job whose id is known; nothing is looked up yet."""
        return JobHandle(self, checked_id(id))

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs that match, page by page."""
        asked = {"queue": query.queue, "task": query.task, "cursor": cursor}
        for what, text in asked.items():
            checked_text(what, text or "")
        return await (await self.client()).find(query, cursor=cursor, limit=limit)

    async def cancel(self, ids: Sequence[str]) -> list[Cancelled]:
        """Cancel jobs, and say of each what that achieved."""
        return await (await self.client()).cancel(_checked(ids))

    async def rerun(self, ids: Sequence[str]) -> list[bool]:
        """Put ended jobs back to run now; False where a job has not ended or is unknown."""
        return await (await self.client()).rerun(_checked(ids))

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        """Forget ended jobs; False where a job has not ended or is unknown."""
        return await (await self.client()).delete(_checked(ids))

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
        async with self._using() as client:
            await client.ready()
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
                    running = group.create_task(worker.run())
                    if self.outbox is not None:
                        relay = self.outbox.relay(
                            client.store, client.clock, lambda: not running.done()
                        )
                        group.create_task(relay)
                    try:
                        yield worker
                    finally:
                        worker.stop()
            except BaseExceptionGroup as errors:
                # What one side raised is raised as it is: a block need not know of the group around
                # it.
                if len(errors.exceptions) == 1:
                    raise errors.exceptions[0] from errors.exceptions[0].__cause__
                raise

    # --- Life

    async def __aenter__(self) -> Self:
        client = self._client()
        client.users += 1
        try:
            await client.ready()
        except BaseException:
            await self._leave(client)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        client = self._clients.get(asyncio.get_running_loop())
        if client is not None:
            client.unwanted = True
            await self._leave(client)

    @asynccontextmanager
    async def _using(self) -> AsyncIterator[Client]:
        """The client of the running event loop; nobody closes it before the block ends."""
        client = self._client()
        client.users += 1
        try:
            yield client
        finally:
            await self._leave(client)

    async def _leave(self, client: Client) -> None:
        """The last user closes it, if anybody asked for that."""
        client.users = max(client.users - 1, 0)
        if client.users or not client.unwanted:
            return
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._clients.get(loop) is client:
                del self._clients[loop]
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

        async def undisturbed() -> R:
            # Another thread may close the app meanwhile.
            async with self._using():
                return await work

        return self._bridge.call(undisturbed())

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


def _checked(ids: Sequence[str]) -> Sequence[str]:
    for id in ids:
        checked_text("id", id)
    return ids


class SyncApp:
    """The app for callers without an event loop; `app.sync`. Each call waits for its answer."""

    def __init__(self, app: App) -> None:
        self._app = app

    def enqueue_many(self, jobs: Iterable[Job], *, connection: Any = None) -> list[JobHandle[Any]]:
        # A generator is run here: it may hold what belongs to this thread.
        taken: list[Job] = []
        portions = list(self._app._portions(jobs, taken))
        if connection is None:
            return self._call(self._app.enqueue_many(taken))
        added = [self._app._add_within_sync(connection, portion) for portion in portions]
        return self._app._handles(taken, list(itertools.chain.from_iterable(added)), connection)

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
        """Close the store that the calls above opened, once those of other threads have ended. It
        opens again when needed."""
        self._call(self._unwanted())

    async def _unwanted(self) -> None:
        self._app._client().unwanted = True

    def _call(self, work: Coroutine[Any, Any, R]) -> R:
        return self._app._run_sync(work)
