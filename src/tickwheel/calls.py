"""A task with its choices, ready to be enqueued, and the handle of a job that was."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar, overload

from tickwheel.client import JobInfo
from tickwheel.errors import BadConfig, BadTime
from tickwheel.job import Cancelled, Job, Priority, new_id
from tickwheel.retry import checked_retries
from tickwheel.span import Span, due_ms, span_ms
from tickwheel.tasks import (
    Definition,
    PriorityName,
    checked_id,
    checked_name,
    decode_result,
    priority_of,
)

if TYPE_CHECKING:
    from tickwheel.app import App

P = ParamSpec("P")
R = TypeVar("R")
# What calling a task directly gives: its result, or for an async one the coroutine of it.
C = TypeVar("C")


class JobHandle(Generic[R]):
    """A job that was enqueued: ask for it, wait for it, cancel it."""

    __slots__ = ("_app", "_on_its_way", "_returns", "added", "id")

    def __init__(
        self,
        app: App,
        id: str,
        *,
        added: bool = True,
        returns: Any = Any,
        on_its_way: bool = False,
    ) -> None:
        self.id = id
        # False where the id was taken before: the job of that id is another call's.
        self.added = added
        self._app = app
        self._returns = returns
        # In an outbox: the store does not know it yet.
        self._on_its_way = on_its_way

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
        timeout_s = None if timeout is None else span_ms(timeout) / 1000
        job = await client.ended(self.id, timeout_s, on_its_way=self._on_its_way)
        value: R = decode_result(job.result, self._returns)
        return value

    async def cancel(self) -> Cancelled:
        """Cancel the job, and say what that achieved."""
        client = await self._app.client()
        [answer] = await client.cancel([self.id])
        return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `using` was given for a job; None leaves it to the task."""

    delay_ms: int | None = None
    due_ms: int | None = None
    queue: str | None = None
    priority: Priority | None = None
    id: str | None = None
    retries: int | None = None
    timeout_ms: int | None = None
    # A connection of the user's: then the job is part of its transaction.
    connection: Any = None


class Call(Generic[P, R]):
    """A task with the choices that `using` made, ready to be enqueued."""

    __slots__ = ("_app", "_choice", "_definition")

    def __init__(self, app: App, definition: Definition, choice: Choice) -> None:
        self._app = app
        self._definition = definition
        self._choice = choice

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Store a job that calls the task with these arguments; it is durable when this returns."""
        # Encode first: what is wrong with the call is said before anything is waited for.
        payload = self._app._payload(self._definition, args, kwargs)
        if self._choice.connection is not None:
            job = self._job(payload, self._app._now_ms())
            [added] = await self._app._add_within(self._choice.connection, [job])
            return self._handle(job.id, added)
        client = await self._app.client()
        job = self._job(payload, client.clock.next_ms())
        return self._handle(job.id, await client.add(job))

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """The same for callers without an event loop."""
        if self._choice.connection is not None:
            # Here and now, on the caller's own thread: connections belong to one.
            job = self.job(*args, **kwargs)
            [added] = self._app._add_within_sync(self._choice.connection, [job])
            return self._handle(job.id, added)
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
        on_its_way = self._choice.connection is not None and self._app.outbox is not None
        returns = self._definition.returns
        return JobHandle(self._app, id, added=added, returns=returns, on_its_way=on_its_way)


class Task(Generic[P, R, C]):
    """A function under a name. Calling it runs it here and now, like any function."""

    def __init__(self, app: App, definition: Definition) -> None:
        update_wrapper(self, definition.function)
        self._app = app
        self._call: Call[P, R] = Call(app, definition, Choice())
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
        connection: Any = None,
    ) -> Call[P, R]:
        """Choose for one job: when it is due, where it goes, how often it is tried.

        `delay` is "30m", seconds or a timedelta, `at` an aware datetime; a time that has passed
        means now. `id` is the idempotency key: while a job of that id is kept, enqueueing another
        stores nothing and gives a handle to the first. `connection` is one of your own, to the
        store's database or that of the app's outbox: the job exists if and only if what it is
        doing is committed.
        """
        if delay is not None and at is not None:
            raise BadTime("give delay= or at=, not both")
        choice = Choice(
            delay_ms=None if delay is None else span_ms(delay),
            due_ms=None if at is None else self._app._not_absurd(due_ms(at), at),
            queue=None if queue is None else checked_name("queue", queue),
            priority=None if priority is None else priority_of(priority),
            id=None if id is None else checked_id(id),
            retries=None if retries is None else checked_retries(retries),
            timeout_ms=None if timeout is None else checked_timeout(timeout),
            connection=connection,
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


def checked_timeout(timeout: Span) -> int:
    ms = span_ms(timeout)
    if ms == 0:
        raise BadConfig("timeout=0 leaves no time to run; write timeout=None for no limit")
    return ms
