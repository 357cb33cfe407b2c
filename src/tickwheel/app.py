"""The main API: `App` with its tasks, schedules, jobs and workers."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import PurePath
from typing import Any, ParamSpec, Self, TypeVar, overload

import msgspec

from tickwheel.access import StoreAccess
from tickwheel.arguments import MIB
from tickwheel.checks import (
    NO_IDENTITY,
    AnyIfExists,
    AnyPriority,
    Identity,
    check_list,
    checked_identity,
    checked_name,
    checked_options,
    module_name,
)
from tickwheel.client import Client
from tickwheel.clock import Clock, SystemClock
from tickwheel.concurrency import single_error
from tickwheel.config import load, setting
from tickwheel.duration import Duration, duration_ms
from tickwheel.engine.attempt import JobContext
from tickwheel.engine.following import Follow, followed
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.surroundings import OpenLifespan, Surroundings, chained
from tickwheel.engine.worker import Worker
from tickwheel.errors import BadConfig, shown
from tickwheel.job import Job
from tickwheel.jobs import AppJobs
from tickwheel.lifespan import Lifespans
from tickwheel.masking import masked
from tickwheel.monitoring import Monitored
from tickwheel.outbox import Outbox
from tickwheel.registry import Around, BatchOptions, Definition, PoolName, batch_options, define
from tickwheel.retry import RetryPolicy
from tickwheel.schedule import Rule
from tickwheel.schedules import AppSchedules, MisfireName, OverlapName, make_rule
from tickwheel.sealing import Sealing, SigningMode
from tickwheel.served import Served
from tickwheel.store import Store, open_store
from tickwheel.sync_app import SyncApp
from tickwheel.task import (
    BatchDecorator,
    BatchTask,
    Decorator,
    Task,
    checked_expires,
    checked_hook,
    checked_timeout,
)
from tickwheel.trust import unsealed

log = logging.getLogger("tickwheel")

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[[Job], Mapping[str, str] | None])
L = TypeVar("L", bound=Callable[[], Any])
M = TypeVar("M", bound=Callable[[JobContext, Callable[[], Awaitable[Any]]], Awaitable[Any]])

# A shorter lease could run out during an ordinary pause of the process.
SHORTEST_LEASE_MS = 500


class App(AppJobs, Monitored, Served):
    """Tasks, and the store that keeps their jobs.

    Apps that share a store need different names; by default, that of the module. `imports` names
    the modules that have tasks of this app: a worker imports them before it starts.

    The store is opened on first use, once per event loop; `async with app:` opens and closes it
    explicitly. Such blocks may be nested, also in `app.worker()`: the last one to end closes it.
    Arguments that are not given come from the settings: `tickwheel config` shows them.

    With `inherit_meta`, jobs that a task enqueues have the meta of the task's own job. `objective`
    says how punctual runs should be, "99% within 100ms": metrics and alerts tell whether they are.
    Keys, each written "id:base64", sign jobs and encrypt their arguments: docs/trust.md.
    """

    # What a framework does around each run.
    around: Callable[[], Around] | None = None

    @checked_options
    def __init__(
        self,
        store: str | Store | None = None,
        *,
        name: str | None = None,
        imports: Sequence[str] = (),
        outbox: str | None = None,
        retention: Duration | None = None,
        dead_retention: Duration | None = None,
        payload_limit: int = MIB,
        inherit_meta: bool = False,
        objective: str | None = None,
        signing_keys: Sequence[str] | None = None,
        encryption_keys: Sequence[str] | None = None,
        signing: SigningMode | None = None,
        clock: Clock | None = None,
    ) -> None:
        # In a store that apps share: whose schedules these are. By default the module's name.
        self.name = checked_name("app", module_name(sys._getframe(2)) if name is None else name)
        check_list("imports", imports)
        if not isinstance(payload_limit, int) or payload_limit < 1:
            raise BadConfig(f"payload_limit={shown(payload_limit)}: must be a number of bytes")
        # Modules with more of its tasks, which a worker imports before it starts.
        self.imports = tuple(imports)
        self._clock: Clock = clock or SystemClock()
        if store is None:
            store = load().settings.store  # checks the other settings too
        if isinstance(store, str):
            self.url = store
            self._store = open_store(self.url, clock=self._clock)
        elif isinstance(store, PurePath):
            raise BadConfig(f"{str(store)!r} is not a store URL; write App('sqlite:///{store}')")
        elif not callable(getattr(store, "new_handle", None)):
            # Not shown: it may hold a password.
            raise BadConfig(
                "the store must be a URL, as in App('sqlite:///jobs.db'), not "
                f"{type(store).__name__}"
            )
        else:
            self.url, self._store = "", store
        # What the code leaves open is read from the settings when it is first needed.
        if outbox is not None and not isinstance(outbox, str):
            raise BadConfig(f"outbox must be the URL of a database, not {type(outbox).__name__}")
        if outbox:
            self.outbox = Outbox(outbox, self._store)
        if retention is not None:
            self.retention_ms = duration_ms(retention)
        if dead_retention is not None:
            self.dead_retention_ms = duration_ms(dead_retention)
        self._set_objective(objective)
        keys = Sealing(signing_keys, encryption_keys, signing)
        access = StoreAccess(self._store, self._clock, lambda: self.outbox, payload_limit, keys)
        super().__init__(access)
        self.payload_limit = payload_limit
        self._access.inherit_meta = bool(inherit_meta)
        # What is around its tasks.
        self.lifespans = Lifespans()
        self.middlewares: list[Callable[[JobContext, Any], Awaitable[Any]]] = []
        # Its HTTP callbacks, if it has any; what its workers open for them, each with the number of
        # its slots, and what follows from the ends of jobs, by task.
        self.callbacks: Any = None
        self.resources: list[Callable[[int], AbstractAsyncContextManager[object]]] = []
        self.following: dict[str, Follow] = {}
        # Schedules that the code declares, by name.
        self.declared: dict[str, Rule] = {}
        self.schedules = AppSchedules(self.client, self.tasks.get, payload_limit)
        # The same for callers without an event loop.
        self.sync = SyncApp(self, self.schedules, self._access)

    def __repr__(self) -> str:
        return f"<app on {masked(self.url) or type(self._store).__name__}>"

    # --- Settings

    @cached_property
    def outbox(self) -> Outbox | None:
        """For the user's transactions when jobs and data are in different databases."""
        url = setting("outbox")
        return Outbox(url, self._store) if url else None

    @cached_property
    def retention_ms(self) -> int:
        return duration_ms(setting("retention"))

    @cached_property
    def dead_retention_ms(self) -> int:
        return duration_ms(setting("dead_retention"))

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
        priority: AnyPriority = "normal",
        retries: int | RetryPolicy = 5,
        timeout: Duration | None = "1h",
        pool: PoolName | None = None,
        expires: Duration | None = None,
        id: Callable[..., str] | None = None,
        if_exists: AnyIfExists = "keep",
    ) -> Decorator: ...
    @checked_options
    def task(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: AnyPriority = "normal",
        retries: int | RetryPolicy = 5,
        timeout: Duration | None = "1h",
        pool: PoolName | None = None,
        expires: Duration | None = None,
        id: Callable[..., str] | None = None,
        if_exists: AnyIfExists = "keep",
    ) -> Any:
        """Register a function as a task; it can still be called directly.

        An `async def` runs on the worker's event loop, a plain `def` in a thread, or with
        `pool="process"` in a child process. A run that takes longer than `timeout`, an hour unless
        you say otherwise, fails: it is cancelled, or killed with its process; a thread can't be,
        and keeps running. `timeout=None` means no limit. A job that could not start within
        `expires` after it was due is cancelled instead.

        `id` makes the id of each job from its arguments, as `lambda customer: f"sync-{customer}"`,
        and `if_exists` says what happens to the job that has that id already: see `using`.
        """
        identity = checked_identity(id, if_exists)

        def decorate(function: Callable[..., Any]) -> Task[..., Any, Any]:
            definition = self._define(
                *(function, name, queue, priority, retries, timeout, expires, pool),
                identity=identity,
            )
            return Task(self._access, definition)

        return decorate if function is None else decorate(function)

    @checked_options
    def batch(
        self,
        function: None = None,
        /,
        *,
        size: int = 100,
        linger: Duration = "50ms",
        name: str | None = None,
        queue: str = "default",
        priority: AnyPriority = "normal",
        retries: int | RetryPolicy = 5,
        timeout: Duration | None = "1h",
        expires: Duration | None = None,
        pool: PoolName | None = None,
    ) -> BatchDecorator:
        """Register a function of a list as a task whose jobs run together: `enqueue` takes one
        item, and one call gets the items of up to `size` jobs that are due.

        A due job waits for others, for at most `linger`. The function returns a list
        with a result for each job, or None. Raise `Partial` to fail some of them; any other
        exception fails all, and they are retried in smaller batches. Other options as for `task`.
        """
        if function is not None:
            raise BadConfig("write @app.batch(), with parentheses, as in @app.batch(size=100)")
        options = batch_options(size, linger)

        def decorate(function: Callable[..., Any]) -> Any:
            definition = self._define(
                function, name, queue, priority, retries, timeout, expires, pool, options
            )
            task: BatchTask[Any, Any, Any] = BatchTask(self._access, definition)
            return task

        return decorate

    def _define(
        self,
        function: Callable[..., Any],
        name: str | None,
        queue: str,
        priority: AnyPriority,
        retries: int | RetryPolicy,
        timeout: Duration | None,
        expires: Duration | None,
        pool: PoolName | None,
        batch: BatchOptions | None = None,
        identity: Identity = NO_IDENTITY,
    ) -> Definition:
        policy = retries if isinstance(retries, RetryPolicy) else RetryPolicy(retries=retries)
        definition = define(
            function,
            name=name,
            queue=queue,
            priority=priority,
            policy=policy,
            timeout_ms=None if timeout is None else checked_timeout(timeout),
            expires_ms=None if expires is None else checked_expires(expires),
            pool=pool,
            around=self.around,
            lifespans=self.lifespans,
            batch=batch,
        )
        definition = replace(definition, id_of=identity[0], if_exists=identity[1])
        self.tasks.register(definition)
        return definition

    def import_tasks(self) -> None:
        """Import the modules that have more of the app's tasks. A worker does it before it
        starts."""
        for module in self.imports:
            importlib.import_module(module)

    def on_enqueue(self, hook: H) -> H:
        """Call this function with each new job of this app, where it is made: what it returns, a
        dict of strings or None, is added to the job's meta.

        Hooks are called in the order in which they were added, and a later one wins; the caller's
        own `meta=` wins over all. What a hook raises, the caller of `enqueue` gets, and nothing is
        stored. Not called for the jobs of schedules: workers make those.
        """
        self._access.on_enqueue.append(checked_hook(hook))
        return hook

    # --- Around tasks

    def lifespan(self, function: L) -> L:
        """Open something once per worker process, before its first job, and close it after the
        last: decorates an async generator function that yields it once.

        Tasks get it as `current_job().state`, or by a parameter whose annotation is its class. A
        sync generator function is for the child processes of `pool="process"`, each of which opens
        it before its first task; without an async one, workers use it too.
        """
        self.lifespans.declare(function)
        self.tasks.check_order(self.lifespans)
        return function

    def middleware(self, function: M) -> M:
        """Run this around each run, in the worker's process: `async def timed(job, call_next)`.

        `await call_next()` runs the task and returns its result; what the middleware returns or
        raises is how the run ends. The first that is declared is outermost.
        """
        try:
            fits = inspect.iscoroutinefunction(function)
            inspect.signature(function).bind(None, None)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise BadConfig(
                "a middleware must be an async function of two parameters, job and call_next, "
                f"not {shown(function)}"
            )
        self.middlewares.append(function)
        return function

    # --- Schedules

    @checked_options
    def cron(
        self,
        expression: str,
        *,
        name: str | None = None,
        tz: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
        misfire: MisfireName = "one",
        misfire_limit: int = 100,
        overlap: OverlapName = "allow",
        spread: Duration = 0,
    ) -> Decorator:
        """Run a task at the times of a cron expression: `@app.cron("0 2 * * *", tz="Asia/Taipei")`.

        Decorates a task, or a function, which becomes one. The schedule has the task's name, unless
        `name` is given. A parameter named `tick` receives the tick's nominal time.

        It ticks from `start` until `end`, in the time zone `tz`, with these `arguments`. Ticks that
        no node was up to fire: `misfire` "skip"s them, fires the latest "one", or "all", at most
        `misfire_limit`. While the last tick's job has not ended, `overlap` says whether to "allow"
        the next, "skip" it, or "cancel" the last. Jobs are due at random within `spread`.
        """

        def rule(task: Definition) -> Rule:
            return make_rule(
                task,
                cron=expression,
                tz=tz,
                start=start,
                end=end,
                arguments=arguments,
                misfire=misfire,
                misfire_limit=misfire_limit,
                overlap=overlap,
                spread=spread,
                from_code=True,
                payload_limit=self.payload_limit,
            )

        return self._scheduled(name, rule)

    @checked_options
    def every(
        self,
        interval: Duration,
        *,
        name: str | None = None,
        tz: str | None = None,
        start: datetime | None = None,
        end: datetime | None = None,
        arguments: Mapping[str, Any] | None = None,
        misfire: MisfireName = "one",
        misfire_limit: int = 100,
        overlap: OverlapName = "allow",
        spread: Duration = 0,
    ) -> Decorator:
        """Run a task at a fixed interval: `@app.every("15m")`. Options as for `cron`."""

        def rule(task: Definition) -> Rule:
            return make_rule(
                task,
                every=interval,
                tz=tz,
                start=start,
                end=end,
                arguments=arguments,
                misfire=misfire,
                misfire_limit=misfire_limit,
                overlap=overlap,
                spread=spread,
                from_code=True,
                payload_limit=self.payload_limit,
            )

        return self._scheduled(name, rule)

    def _scheduled(self, name: str | None, rule_of: Callable[[Definition], Rule]) -> Decorator:
        def decorate(function: Callable[..., Any]) -> Any:
            task: Task[..., Any, Any]
            task = function if isinstance(function, Task) else self.task(function)
            rule = msgspec.structs.replace(rule_of(task.definition), app=self.name)
            known_as = checked_name("schedule", name or task.name)
            if known_as in self.declared:
                raise BadConfig(f"two schedules are named {known_as!r}; give one of them name=…")
            self.declared[known_as] = rule
            return task

        return decorate

    # --- Work

    @checked_options
    @asynccontextmanager
    async def worker(
        self,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = 100,
        threads: int | None = None,
        processes: int | None = None,
        lease: Duration = "15s",
        grace: Duration = "30s",
        guarded: bool = True,
    ) -> AsyncIterator[Worker]:
        """Run jobs in this program for the duration of the block; then stop gracefully.

        Serves the queues of the app's tasks, or those given. Of `concurrency` jobs at a time, at
        most `threads` run in threads (by default as many as in Python's own executor: the number
        of cores plus 4, at most 32) and `processes` in child processes (by default one per core).
        If the worker fails, the block is cancelled and the error is raised.
        """
        self.import_tasks()
        pools = {"threads": threads, "processes": processes}
        options = self._worker_options(queues, concurrency, pools, lease, grace)
        async with self._access.using() as client, AsyncExitStack() as resources:
            await client.ready()
            for resource in self.resources:
                await resources.enter_async_context(resource(concurrency))
            if self.url.lower().startswith("memory:"):
                log.info("the store is memory://: its jobs are lost when this process ends")
            lifespan = self._start_lifespan()
            state = None if lifespan is None else await lifespan.value()
            worker = self._new_worker(client, options, guarded, state)
            try:
                with single_error():
                    async with asyncio.TaskGroup() as group:
                        running = group.create_task(worker.run())
                        self._start_relay(group, client, lambda: not running.done())
                        if (alerts := self._alerts(client, worker.name)) is not None:
                            group.create_task(alerts.run())
                            running.add_done_callback(lambda _: alerts.stop())
                        if lifespan is not None:
                            watching = group.create_task(lifespan.until_it_fails())
                            running.add_done_callback(lambda _: watching.cancel())
                        try:
                            yield worker
                        finally:
                            worker.stop()
            finally:
                if lifespan is not None and (error := await lifespan.close(worker.closing_s)):
                    log.error("%s", error, exc_info=error.__cause__)

    def _start_lifespan(self) -> OpenLifespan | None:
        lifespan, in_children = self.lifespans.in_worker, self.lifespans.in_children
        if in_children and "process" in self.tasks.pools and "<locals>" in in_children.name:
            raise BadConfig(
                f"child processes open the lifespan {in_children.name}, and must import it; define "
                "it at the top level of its module, not inside a function"
            )
        return None if lifespan is None else OpenLifespan(lifespan)

    def _worker_options(
        self,
        queues: Sequence[str] | None,
        concurrency: int,
        pools: Mapping[str, int | None],
        lease: Duration,
        grace: Duration,
    ) -> WorkerOptions:
        """The options, checked. Sizes of pools that are None are left at their defaults."""
        sizes = {name: size for name, size in pools.items() if size is not None}
        for name, count in {"concurrency": concurrency, **sizes}.items():
            if not isinstance(count, int) or count < 1:
                raise BadConfig(f"{name}={shown(count)}: must be at least 1")
        if queues is not None:
            check_list("queues", queues)
            if not queues:
                raise BadConfig(
                    f"queues={queues!r}: must name a queue; without it, a worker serves those of "
                    "the app's tasks"
                )
        lease_ms = duration_ms(lease)
        if lease_ms < SHORTEST_LEASE_MS:
            raise BadConfig(
                f"lease={lease!r}: must be at least {SHORTEST_LEASE_MS}ms, or a short pause would "
                "lose leases"
            )
        return WorkerOptions(
            queues=[checked_name("queue", queue) for queue in queues or self.tasks.queues()],
            concurrency=concurrency,
            **sizes,
            lease_ms=lease_ms,
            grace_ms=duration_ms(grace),
            retention_ms=self.retention_ms,
            dead_retention_ms=self.dead_retention_ms,
            result_limit=self.payload_limit,
        )

    def _new_worker(
        self, client: Client, options: WorkerOptions, guarded: bool, state: Any
    ) -> Worker:
        return Worker(
            followed(client.store, self.following),
            self.tasks,
            client.clock,
            self._clock,
            options,
            app=self.name,
            schedules=self.declared,
            guarded=guarded,
            surroundings=Surroundings(
                state=state,
                middleware=chained(self.middlewares),
                in_children=self.lifespans.in_children,
            ),
            counts=self._worker_counts(),
        )

    def _start_relay(
        self, group: asyncio.TaskGroup, client: Client, going: Callable[[], bool]
    ) -> None:
        """Move jobs from the outbox, if there is one, while `going`."""
        if self.outbox is not None:
            group.create_task(self.outbox.relay(unsealed(client.store), client.clock, going))

    # --- Open and close

    async def __aenter__(self) -> Self:
        await self._access.enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._access.leave()
