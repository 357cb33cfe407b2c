"""The registry: functions as tasks, by name."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from tickwheel.arguments import AnyArguments, Arguments
from tickwheel.changes import IfExists
from tickwheel.checks import AnyPriority, checked_name, priority_of
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadConfig, UnknownTask, shown
from tickwheel.job import Priority
from tickwheel.lifespan import Lifespans
from tickwheel.retry import RetryPolicy

PoolName = Literal["async", "thread", "process"]


class Around(Protocol):
    """What a framework does around each run, in the thread or process that runs the task; around
    an async task, it is awaited. A class at the top level of a module: child processes import it,
    and enter it before they import the task."""

    def __enter__(self) -> object: ...
    def __exit__(self, *_: object) -> None: ...
    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *_: object) -> None: ...


# How many tasks an error names.
NAMES_SHOWN = 20
# The largest batch, and the longest linger: meanwhile a worker holds jobs that others could run.
LARGEST_BATCH = 10_000
LONGEST_LINGER_MS = 60_000


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How many jobs run as one call, and how long a due job waits for others."""

    size: int
    linger_ms: int


def batch_options(size: int, linger: Duration) -> BatchOptions:
    """The options, checked."""
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= LARGEST_BATCH:
        raise BadConfig(f"size={shown(size)}: must be from 1 to {LARGEST_BATCH:,} jobs")
    linger_ms = duration_ms(linger)
    if linger_ms > LONGEST_LINGER_MS:
        raise BadConfig(
            f"linger={shown(linger)}: must be at most 1m; to run jobs together later, use "
            "using(delay=…)"
        )
    return BatchOptions(size, linger_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a worker needs to know about a task."""

    name: str
    function: Callable[..., Any]
    pool: PoolName
    queue: str
    priority: Priority
    policy: RetryPolicy
    # None: no limit.
    timeout_ms: int | None
    # Of one job, also if a batch of them is one call.
    arguments: Arguments
    # The function's return annotation, for one job; Any if it has none.
    returns: Any
    around: Callable[[], Around] | None = None
    # How long after they are due its jobs may start, unless they say so themselves. None: for ever.
    expires_ms: int | None = None
    # The parameters that take the value of the lifespan.
    injected: tuple[str, ...] = ()
    # None: each job is a call of its own.
    batch: BatchOptions | None = None
    # Makes the id of a job from its arguments; and what happens to the job that has it already.
    id_of: Callable[..., str] | None = None
    if_exists: IfExists = IfExists.KEEP


class Registry:
    """Definitions of tasks, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}
        self.names: frozenset[str] = frozenset()
        # Whether any of them says what happens to a job that has the id of a new one.
        self.identified = False
        # The pools that the tasks run in.
        self.pools: frozenset[PoolName] = frozenset()

    def register(self, definition: Definition) -> None:
        other = self._by_name.get(definition.name)
        if other is not None:
            raise BadConfig(
                f"two tasks are named {definition.name!r}: {_qualified(other.function)} and "
                f"{_qualified(definition.function)}; give one of them @app.task(name=…)"
            )
        self._by_name[definition.name] = definition
        self.names = frozenset(self._by_name)
        self.pools |= {definition.pool}
        self.identified |= definition.if_exists is not IfExists.KEEP

    def get(self, name: str) -> Definition:
        try:
            return self._by_name[name]
        except (KeyError, TypeError):
            raise UnknownTask(self.unknown(name)) from None

    def find(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def unknown(self, name: str) -> str:
        """The message for an unknown task."""
        known = ", ".join(sorted(self._by_name)[:NAMES_SHOWN]) or "none"
        if len(self._by_name) > NAMES_SHOWN:
            known += f" and {len(self._by_name) - NAMES_SHOWN:,} more"
        return f"no task is named {shown(name)} here; the tasks are: {known}"

    def all(self) -> list[Definition]:
        return list(self._by_name.values())

    def check_order(self, lifespans: Lifespans) -> None:
        """Refuse a lifespan that is declared after a task that takes its value."""
        for each in self._by_name.values():
            kind = lifespans.value_for(each.pool)
            hints = each.arguments.hints
            late = kind is not None and any(hints.get(n) is kind for n in each.arguments.names)
            if late or any(hints[name] is not kind for name in each.injected):
                raise BadConfig(
                    f"task {each.name!r} takes the value of a lifespan; declare all lifespans "
                    "before it"
                )

    def queues(self) -> list[str]:
        """The default queues of all tasks."""
        return sorted({definition.queue for definition in self._by_name.values()} | {"default"})


def define(
    function: Callable[..., Any],
    *,
    name: str | None,
    queue: str,
    priority: AnyPriority,
    policy: RetryPolicy,
    timeout_ms: int | None,
    pool: PoolName | None,
    around: Callable[[], Around] | None = None,
    expires_ms: int | None = None,
    lifespans: Lifespans | None = None,
    batch: BatchOptions | None = None,
) -> Definition:
    """Check the decorator's arguments, and create a definition."""
    if not callable(function) or not inspect.isroutine(function) or inspect.isbuiltin(function):
        raise BadConfig(f"@app.task needs a function that you define, not {shown(function)}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadConfig(
            f"{_qualified(function)} is a generator and can't be a task: calling it runs nothing"
        )
    if pool not in (None, *typing.get_args(PoolName)):
        raise BadConfig(
            f"pool={shown(pool)}: must be one of {', '.join(typing.get_args(PoolName))}"
        )
    name = checked_name("task", name if name is not None else function.__name__)
    is_async = inspect.iscoroutinefunction(function)
    pool = pool or ("async" if is_async else "thread")
    if is_async != (pool == "async"):
        kind = "an async function runs on the event loop" if is_async else "a plain function can't"
        raise BadConfig(f"task {name!r}: pool={pool!r} can't be used: {kind}")
    if pool == "process" and "<locals>" in function.__qualname__:
        raise BadConfig(
            f"task {name!r} runs in another process, which must import it; "
            "define it at the top level of its module, not inside a function"
        )
    injects = None if lifespans is None else lifespans.value_for(pool)
    arguments = Arguments(name, function, injects)
    if batch is not None:
        arguments = _of_one_job(name, function, injects, arguments)
    return Definition(
        name=name,
        function=function,
        pool=pool,
        queue=checked_name("queue", queue),
        priority=priority_of(priority),
        policy=policy,
        timeout_ms=timeout_ms,
        arguments=arguments,
        returns=arguments.hints.get("return", Any),
        around=around,
        expires_ms=expires_ms,
        injected=arguments.injected,
        batch=batch,
    )


@lru_cache(maxsize=1_000)
def any_task(name: str) -> Definition:
    """A task of which only the name is known: it takes whatever can be written as JSON."""
    name = checked_name("task", name)
    return Definition(
        name=name,
        function=_not_here,
        pool="thread",
        queue="default",
        priority=Priority.NORMAL,
        policy=RetryPolicy(),
        timeout_ms=None,
        arguments=AnyArguments(name, _not_here),
        returns=Any,
    )


def _not_here(**arguments: Any) -> None:
    raise UnknownTask("only its name is known here")


def _of_one_job(
    name: str, function: Callable[..., Any], injects: type | None, of_all: Arguments
) -> Arguments:
    """The arguments of one job of a batch task, whose function takes and returns lists."""
    hints = of_all.hints
    parameters = list(of_all.signature.parameters.values())
    [taken, *others] = [_item(hints.get(each.name, Any)) for each in parameters] or [None]
    if (
        taken is None
        or others
        or parameters[0].default is not inspect.Parameter.empty
        or parameters[0].kind not in (_POSITIONAL_ONLY, _POSITIONAL)
    ):
        raise BadConfig(
            f"batch task {name!r}: its function must take exactly one parameter, a list, as in "
            f"def {function.__name__}(docs: list[Doc])"
        )
    returned = hints.get("return", Any)
    if returned is not types.NoneType:
        returned = _item(_without_none(returned))
    if returned is None:
        raise BadConfig(
            f"batch task {name!r}: its function must return a list, with a result for each job, "
            "or None"
        )
    kinds = {each: hints[each] for each in of_all.injected}
    kinds |= {parameters[0].name: taken, "return": returned}
    return Arguments(name, function, injects, kinds)


_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _item(kind: Any) -> Any:
    """What a list holds, by its annotation; None if that is not a list."""
    if kind is Any or kind is list:
        return Any
    return typing.get_args(kind)[0] if typing.get_origin(kind) is list else None


def _without_none(kind: Any) -> Any:
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind
    others = [each for each in typing.get_args(kind) if each is not types.NoneType]
    return others[0] if len(others) == 1 else kind


def _qualified(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
