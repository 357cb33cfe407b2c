"""Tasks, calls of them that are ready to be enqueued, and handles of enqueued jobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from tickwheel.access import StoreAccess
from tickwheel.arguments import decode_result
from tickwheel.changes import IfExists
from tickwheel.checks import (
    AnyIfExists,
    AnyPriority,
    checked_id,
    checked_meta,
    checked_name,
    checked_options,
    if_exists_of,
    priority_of,
)
from tickwheel.client import JobInfo
from tickwheel.duration import FARTHEST_MS, Duration, due_ms, duration_ms, moment_text
from tickwheel.engine.attempt import current_job, waiting
from tickwheel.errors import BadArguments, BadConfig, BadTime, shown
from tickwheel.ids import new_id
from tickwheel.job import CancelOutcome, Job, MoveOutcome, Priority, PutOutcome
from tickwheel.registry import Definition
from tickwheel.retry import checked_retries

P = ParamSpec("P")
R = TypeVar("R")
# What calling a task directly returns: its result, or for an async task a coroutine.
C = TypeVar("C")


class JobHandle(Generic[R]):
    """An enqueued job: read its state, wait for its result, cancel it."""

    __slots__ = ("_access", "_in_outbox", "answer", "id")

    def __init__(
        self,
        access: StoreAccess,
        id: str,
        answer: PutOutcome = PutOutcome.ADDED,
        in_outbox: bool = False,
    ) -> None:
        self.id = id
        # What became of the call: added, kept, replaced or follows.
        self.answer = answer
        self._access = access
        # Still in an outbox, or waiting for a commit: the store does not know it yet.
        self._in_outbox = in_outbox

    @property
    def added(self) -> bool:
        """Whether this call has added a job. If not, its id was taken: `answer` says what became of
        the job that had it."""
        return self.answer is PutOutcome.ADDED

    def __repr__(self) -> str:
        return f"<job {self.id}>" if self.added else f"<job {self.id} {self.answer}>"

    async def info(self) -> JobInfo:
        """State, due time, attempts, error and history. Raises JobUnknown if it was pruned."""
        client = await self._access.client()
        return self._access.info_of(await client.get(self.id))

    async def result(self, timeout: Duration | None = None) -> R:  # noqa: ASYNC109 (a Duration)
        """Wait until the job is done and return what its task returned.

        Raises ResultTimeout, JobFailed (it is dead), JobCancelled, or ResultError if the result
        could not be stored; StoreUnavailable if the store is away for more than some seconds.
        A task that waits lends its slot if the job needs it.
        """
        client = await self._access.client()
        timeout_s = None if timeout is None else duration_ms(timeout) / 1000
        with waiting() as seen:
            job = await client.ended(self.id, timeout_s, in_outbox=self._in_outbox, seen=seen)
        task = self._access.tasks.find(job.task)
        value: R = decode_result(job.result, task.returns if task else Any)
        return value

    async def cancel(self) -> CancelOutcome:
        """Cancel the job; returns what that achieved."""
        client = await self._access.client()
        [answer] = await client.cancel([self.id])
        return answer

    @checked_options
    async def move(
        self,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        priority: AnyPriority | None = None,
        queue: str | None = None,
    ) -> MoveOutcome:
        """Change when the job is due, its priority or its queue, as long as it waits; returns what
        that achieved. If a worker has it for its last second, that puts it back: this waits for it,
        two seconds at most. An expiry that would come before it is due moves along."""
        client = await self._access.client()
        to = checked_move(delay, at, priority, queue, client.clock.now_ms())
        return await client.move_one(self.id, **to)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The choices that `using` was given for a job; None leaves a choice to the task."""

    delay_ms: int | None = None
    due_ms: int | None = None
    queue: str | None = None
    priority: Priority | None = None
    id: str | None = None
    retries: int | None = None
    timeout_ms: int | None = None
    # How long after it is due it may start, or until when.
    expires_after_ms: int | None = None
    expires_ms: int | None = None
    meta: dict[str, str] | None = None
    inherit_meta: bool | None = None
    if_exists: IfExists | None = None
    # The user's connection: the job is then part of its transaction.
    connection: Any = None


class Call(Generic[P, R]):
    """A task with the choices made by `using`, or with none, ready to be enqueued."""

    __slots__ = ("_access", "_choice", "_definition")

    def __init__(self, access: StoreAccess, definition: Definition, choice: Choice) -> None:
        self._access = access
        self._definition = definition
        self._choice = choice

    async def enqueue(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Add a job that calls the task with these arguments; it is durable when this returns."""
        # Encode first: errors in the call are raised before anything is awaited.
        encode, limit = self._definition.arguments.encode, self._access.payload_limit
        payload, id = encode(args, kwargs, limit=limit), self._id(args, kwargs)
        if self._choice.connection is not None:
            self._refuse_connection()
            job = self._job(payload, self._access.now_ms(), id)
            [added] = await self._access.add_within(self._choice.connection, [job])
            return self._handle(job.id, _answer(added), in_outbox=self._access.outbox is not None)
        client = await self._access.client()
        job = self._job(payload, client.clock.next_ms(), id)
        if self._if_exists is IfExists.KEEP:
            return self._handle(job.id, _answer(await client.add(job)))
        return self._handle(job.id, await client.put(job, self._if_exists))

    def enqueue_sync(self, /, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for callers without an event loop: Flask, Django, scripts."""
        if self._choice.connection is not None or self._access.ambient is not None:
            return self.add_sync(self.job(*args, **kwargs))
        # Encode here: a model may use objects that belong to this thread.
        payload = self._definition.arguments.encode(args, kwargs, limit=self._access.payload_limit)
        id = self._id(args, kwargs)
        if self._meta_is_added():
            # Here too: hooks look at what is current on this thread.
            job = self._job(payload, self._access.run_sync(self._next_ms()), id)
            return self._handle(job.id, self._access.run_sync(self._add(job)))
        return self._access.run_sync(self._add_payload(payload, id))

    async def _next_ms(self) -> int:
        return (await self._access.client()).clock.next_ms()

    async def _add_payload(self, payload: str, id: str | None) -> JobHandle[R]:
        client = await self._access.client()
        job = self._job(payload, client.clock.next_ms(), id)
        return self._handle(job.id, await self._add(job))

    def add_sync(self, job: Job) -> JobHandle[R]:
        """Add a job of this call, as `enqueue_sync` does."""
        access, connection = self._access, self._choice.connection
        if connection is not None:
            self._refuse_connection()
        elif self._if_exists is IfExists.KEEP:
            connection = access.joined()
        if connection is not None:
            # On the caller's own thread: a connection belongs to one thread.
            [added] = access.add_within_sync(connection, [job])
            return self._handle(job.id, _answer(added), in_outbox=access.outbox is not None)
        if access.after_commit([job], self._if_exists):
            return self._handle(job.id, PutOutcome.ADDED, in_outbox=True)
        return self._handle(job.id, access.run_sync(self._add(job)))

    async def _add(self, job: Job) -> PutOutcome:
        client = await self._access.client()
        if self._if_exists is IfExists.KEEP:
            return _answer(await client.add(job))
        return await client.put(job, self._if_exists)

    @property
    def _if_exists(self) -> IfExists:
        chosen = self._choice.if_exists
        return self._definition.if_exists if chosen is None else chosen

    def _refuse_connection(self) -> None:
        if self._if_exists is not IfExists.KEEP:
            raise BadConfig(
                f"if_exists={self._if_exists.value!r} is not possible with connection=: in your "
                "transaction a job can be added, but not compared with the one that has its id. "
                "Enqueue it without connection= after the commit, or use if_exists='keep'"
            )

    def _id(self, args: Any, kwargs: Any) -> str | None:
        """The id that the caller chose, or that the task makes; None for a new one."""
        id_of = self._definition.id_of
        if self._choice.id is not None or id_of is None:
            return self._choice.id
        try:
            made = id_of(*args, **kwargs)
        except Exception as error:
            raise BadArguments(
                f"task {self._definition.name}: its id= raised {type(error).__name__}: {error}"
            ) from error
        return checked_id(made)

    def job(self, /, *args: P.args, **kwargs: P.kwargs) -> Job:
        """A job for `app.enqueue_many`; nothing is stored yet."""
        encode, limit = self._definition.arguments.encode, self._access.payload_limit
        payload = encode(args, kwargs, limit=limit)
        if self._choice.if_exists is not None:
            raise BadArguments(
                "a job does not keep if_exists=: give it to enqueue_many(…, if_exists=…)"
            )
        return self._job(payload, self._access.now_ms(), self._id(args, kwargs))

    def _job(self, payload: str, now_ms: int, id: str | None) -> Job:
        choice, definition = self._choice, self._definition
        due = now_ms + (choice.delay_ms or 0) if choice.due_ms is None else choice.due_ms
        job = Job(
            id=id or new_id(now_ms),
            task=definition.name,
            payload=payload,
            queue=choice.queue or definition.queue,
            priority=definition.priority if choice.priority is None else choice.priority,
            due_ms=due,
            created_ms=now_ms,
            retries=choice.retries,
            timeout_ms=choice.timeout_ms,
            expires_ms=choice.expires_ms,
            meta=choice.meta,
        )
        if choice.expires_ms is not None or choice.expires_after_ms is not None:
            job = self._expiring(job)
        return self._with_meta(job) if self._meta_is_added() else job

    def _expiring(self, job: Job) -> Job:
        """The job with its expiry: measured from when it is due, where a past time means now."""
        from_ms, expires_ms = max(job.due_ms, job.created_ms), job.expires_ms
        if expires_ms is None:
            after_ms = self._choice.expires_after_ms or 0
            return msgspec.structs.replace(job, expires_ms=from_ms + after_ms)
        if expires_ms <= from_ms:
            raise BadTime(
                f"expires={moment_text(expires_ms)}: must be after the job is due, "
                f"{moment_text(from_ms)}"
            )
        return job

    def _meta_is_added(self) -> bool:
        """Whether hooks, or the job that runs here, may add to a job's meta."""
        access = self._access
        return bool(access.on_enqueue or access.inherit_meta or self._choice.inherit_meta)

    def _inherits(self) -> bool:
        chosen = self._choice.inherit_meta
        return self._access.inherit_meta if chosen is None else chosen

    def _with_meta(self, job: Job) -> Job:
        """The job with what is added to its meta: the hooks' entries win over inherited ones, and
        the caller's own over all."""
        own, current = job.meta or {}, current_job() if self._inherits() else None
        inherited = {} if current is None else current.meta
        job = msgspec.structs.replace(job, meta={**inherited, **own} or None)
        added: dict[str, str] = {}
        for hook in self._access.on_enqueue:
            added |= _from_hook(hook, job)
        return msgspec.structs.replace(job, meta=checked_meta({**inherited, **added, **own}))

    def _handle(self, id: str, answer: PutOutcome, *, in_outbox: bool = False) -> JobHandle[R]:
        return JobHandle(self._access, id, answer, in_outbox)


def _answer(added: bool) -> PutOutcome:
    return PutOutcome.ADDED if added else PutOutcome.KEPT


def checked_move(
    delay: Duration | None,
    at: datetime | None,
    priority: AnyPriority | None,
    queue: str | None,
    now_ms: int,
    *,
    empty: bool = False,
) -> dict[str, Any]:
    """The arguments of a move, checked, as the client takes them; it may be `empty`."""
    if delay is not None and at is not None:
        raise BadTime("use delay= or at=, not both")
    if delay is None and at is None and priority is None and queue is None and not empty:
        raise BadArguments("move where? Give delay=, at=, priority= or queue=")
    due = None if delay is None else now_ms + duration_ms(delay)
    if at is not None:
        due = max(due_ms(at, "at"), 0)
        if due > now_ms + FARTHEST_MS:
            raise BadTime(f"at={at.isoformat()} is more than 10 years away")
    return {
        "due_ms": due,
        "priority": None if priority is None else int(priority_of(priority)),
        "queue": None if queue is None else checked_name("queue", queue),
    }


class Task(Call[P, R], Generic[P, R, C]):
    """A function registered under a name. Calling it runs it directly, like any function."""

    def __init__(self, access: StoreAccess, definition: Definition) -> None:
        super().__init__(access, definition, Choice(expires_after_ms=definition.expires_ms))
        update_wrapper(self, definition.function)
        self.definition = definition
        # For child processes, where the function's name refers to this object.
        self.function = definition.function

    @property
    def name(self) -> str:
        return self.definition.name

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> C:
        if self.definition.injected:
            self.definition.arguments.refuse_direct(args, kwargs)
        value: C = self.function(*args, **kwargs)
        return value

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    @checked_options
    def using(
        self,
        *,
        delay: Duration | None = None,
        at: datetime | None = None,
        queue: str | None = None,
        priority: AnyPriority | None = None,
        id: str | None = None,
        retries: int | None = None,
        timeout: Duration | None = None,
        expires: Duration | datetime | None = None,
        meta: Mapping[str, str] | None = None,
        inherit_meta: bool | None = None,
        if_exists: AnyIfExists | None = None,
        connection: Any = None,
    ) -> Call[P, R]:
        """Choose options for one job: when it is due, its queue, how often it is retried.

        `delay` is "30m", seconds or a timedelta, `at` an aware datetime; a past time means now.
        `id` is the job's identity: no two jobs have the same. It stays taken until its job is
        pruned or deleted, also after a cancel. `if_exists` says what happens then: "keep" (default)
        adds nothing, whatever the arguments; "renew" does so while that job waits or runs, and adds
        the new one if it has ended; "replace" lets the new one take its place, and if it runs, run
        after it. The handle's `answer` says which it was. `connection` is your own connection to
        the store's database or to that of the app's outbox: the job exists if and only if its
        transaction is committed; such a job can't replace another.

        `expires` says how long after it is due the job may start ("10m"), or until when (an aware
        datetime): from then on no run starts, also no retry, and the job is cancelled. `meta` are
        strings that travel with the job; with `inherit_meta`, also those of the job that is running
        here.
        """
        if delay is not None and at is not None:
            raise BadTime("use delay= or at=, not both")
        choice = Choice(
            delay_ms=None if delay is None else duration_ms(delay),
            due_ms=None if at is None else self._checked_due(at),
            queue=None if queue is None else checked_name("queue", queue),
            priority=None if priority is None else priority_of(priority),
            id=None if id is None else checked_id(id),
            retries=None if retries is None else checked_retries(retries),
            timeout_ms=None if timeout is None else checked_timeout(timeout),
            expires_after_ms=self.definition.expires_ms
            if expires is None or isinstance(expires, datetime)
            else checked_expires(expires),
            expires_ms=self._checked_due(expires, "expires")
            if isinstance(expires, datetime)
            else None,
            meta=checked_meta(meta),
            inherit_meta=inherit_meta,
            if_exists=None if if_exists is None else if_exists_of(if_exists),
            connection=connection,
        )
        if choice.if_exists is not None and id is None and self.definition.id_of is None:
            raise BadArguments(
                f"if_exists={choice.if_exists.value!r} needs an id: using(id=…), or one that the "
                "task makes of its arguments, @app.task(id=lambda …)"
            )
        return Call(self._access, self.definition, choice)

    def _checked_due(self, at: datetime, name: str = "at") -> int:
        due = due_ms(at, name)
        if due > self._access.now_ms() + FARTHEST_MS:
            raise BadTime(f"{name}={at.isoformat()} is more than 10 years away")
        # A past time means now, also one before the epoch, which no store can keep.
        return max(due, 0)


T = TypeVar("T")


class BatchTask(Task[[T], R, C], Generic[T, R, C]):
    """A task whose jobs run together: each is for one item, and a call takes a list of items."""

    def __call__(self, items: list[T], /) -> C:  # type: ignore[override]
        value: C = self.function(items)
        return value


class BatchDecorator(Protocol):
    """The type of `@app.batch(…)`: from a function of a list to a task of one item."""

    @overload
    def __call__(
        self, function: Callable[[list[T]], Coroutine[Any, Any, None]], /
    ) -> BatchTask[T, None, Coroutine[Any, Any, None]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T]], Coroutine[Any, Any, list[R]]], /
    ) -> BatchTask[T, R, Coroutine[Any, Any, list[R]]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T]], Coroutine[Any, Any, list[R] | None]], /
    ) -> BatchTask[T, R | None, Coroutine[Any, Any, list[R] | None]]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], None], /) -> BatchTask[T, None, None]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], list[R]], /) -> BatchTask[T, R, list[R]]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T]], list[R] | None], /
    ) -> BatchTask[T, R | None, list[R] | None]: ...


class Decorator(Protocol):
    """The type of `@app.task(…)`, which keeps the function's parameter and result types."""

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Task[P, R, Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R, R]: ...


def checked_timeout(timeout: Duration) -> int:
    ms = duration_ms(timeout)
    if ms == 0:
        raise BadConfig("timeout=0 leaves no time to run; use timeout=None for no limit")
    return ms


def checked_expires(expires: Duration) -> int:
    if isinstance(expires, datetime):
        raise BadConfig("a task's expires= is a duration, as '10m'; for a datetime, use using(…)")
    ms = duration_ms(expires)
    if ms == 0:
        raise BadTime("expires=0 leaves no time to start; leave it out for no limit")
    return ms


def _from_hook(hook: Callable[[Job], Mapping[str, str] | None], job: Job) -> dict[str, str]:
    added = hook(job)
    if added is None:
        return {}
    try:
        return checked_meta(added) or {}
    except BadArguments as error:
        name = getattr(hook, "__qualname__", repr(hook))
        raise BadArguments(f"on_enqueue: {name} returned what can't be added: {error}") from None


def checked_hook(hook: Any) -> Callable[[Job], Mapping[str, str] | None]:
    """Check what `@app.on_enqueue` decorates."""
    if not callable(hook) or inspect.iscoroutinefunction(hook):
        raise BadConfig(
            f"on_enqueue needs a plain function, def hook(job), not {shown(hook)}: it is also "
            "called where no event loop runs"
        )
    try:
        inspect.signature(hook).bind(None)
    except TypeError:
        raise BadConfig(f"on_enqueue: {shown(hook)} must take one argument, the job") from None
    function: Callable[[Job], Mapping[str, str] | None] = hook
    return function
