"""An app's lifespans: what its workers open before the first run, and close after the last."""

from __future__ import annotations

import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import Any

from tickwheel.arguments import hints_of
from tickwheel.errors import BadConfig, shown

# What a lifespan may be annotated to return; the first argument is the type of its value.
_GIVING = (
    AsyncIterator,
    AsyncGenerator,
    AsyncIterable,
    AbstractAsyncContextManager,
    Iterator,
    Generator,
    Iterable,
    AbstractContextManager,
)


@dataclass(frozen=True, slots=True)
class Lifespan:
    """One declared lifespan."""

    function: Callable[[], Any]
    is_async: bool
    # The class of its value, if the annotation names one: parameters of that class take it.
    value: type | None

    @property
    def name(self) -> str:
        return f"{self.function.__module__}.{self.function.__qualname__}"

    def manager(self) -> Any:
        """A new context manager, async or not, as `is_async` says."""
        function: Any = self.function
        if inspect.isasyncgenfunction(function):
            return asynccontextmanager(function)()
        if inspect.isgeneratorfunction(function):
            return contextmanager(function)()
        manager = function()
        if not hasattr(type(manager), "__aenter__" if self.is_async else "__enter__"):
            kind = "an async context manager" if self.is_async else "a context manager"
            raise BadConfig(f"the lifespan {self.name} must yield once, or return {kind}")
        return manager


def lifespan_of(function: Callable[[], Any]) -> Lifespan:
    """Check the function of a lifespan. Raises BadConfig."""
    if not inspect.isroutine(function) or inspect.isbuiltin(function):
        raise BadConfig(f"@app.lifespan needs a function that you define, not {shown(function)}")
    if inspect.iscoroutinefunction(function):
        raise BadConfig(
            f"the lifespan {function.__qualname__} must yield once: what is before the yield is "
            "done at the start, what is after it at the end"
        )
    try:
        inspect.signature(function).bind()
    except TypeError:
        raise BadConfig(f"the lifespan {function.__qualname__} can't have parameters") from None
    returns = hints_of(function).get("return")
    return Lifespan(function, _is_async(function, returns), _value(returns))


def _is_async(function: Callable[[], Any], returns: Any) -> bool:
    generator = inspect.unwrap(function)
    if inspect.isasyncgenfunction(generator) or inspect.isgeneratorfunction(generator):
        return inspect.isasyncgenfunction(generator)
    kind = typing.get_origin(returns) or returns
    return hasattr(kind, "__aenter__") or not hasattr(kind, "__enter__")


def _value(returns: Any) -> type | None:
    arguments = typing.get_args(returns)
    if typing.get_origin(returns) not in _GIVING or not arguments:
        return None
    kind = arguments[0]
    # Parameters of a built-in type, or of none, are ordinary arguments.
    if not isinstance(kind, type) or kind.__module__ in ("builtins", "typing"):
        return None
    return kind


class Lifespans:
    """The lifespans of one app: at most one that is async and one that is not."""

    def __init__(self) -> None:
        self._async: Lifespan | None = None
        self._sync: Lifespan | None = None

    def declare(self, function: Callable[[], Any]) -> None:
        lifespan = lifespan_of(function)
        other = self._async if lifespan.is_async else self._sync
        if other is not None:
            kind = "async" if lifespan.is_async else "sync"
            raise BadConfig(f"the app already has the {kind} lifespan {other.name}")
        if lifespan.is_async:
            self._async = lifespan
        else:
            self._sync = lifespan

    @property
    def in_worker(self) -> Lifespan | None:
        """The one that is opened in a worker's own process."""
        return self._async or self._sync

    @property
    def in_children(self) -> Lifespan | None:
        """The one that is opened in each child process."""
        return self._sync

    def of(self, pool: str) -> Lifespan | None:
        """The one whose value the tasks of this pool get."""
        return self.in_children if pool == "process" else self.in_worker

    def value_for(self, pool: str) -> type | None:
        lifespan = self.of(pool)
        return None if lifespan is None else lifespan.value
