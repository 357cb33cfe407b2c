"""Tasks: functions under a name, and how their arguments and results travel as JSON.

A payload is a JSON object of arguments by parameter name, so that it can be read in a store and
survives a reordering of parameters. It is checked against the function's annotations when a job is
made and again when it is run. Nothing is ever pickled into a store or imported from one.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import msgspec.inspect

from tickwheel.errors import BadArguments, BadConfig, UnknownTask
from tickwheel.job import Job, Priority
from tickwheel.notes import NOTE
from tickwheel.retry import RetryPolicy, describe

Pool = Literal["async", "thread", "process"]
PriorityName = Literal["low", "normal", "high", "urgent"]

MIB = 1024 * 1024
NAME_LIMIT = 128
ID_LIMIT = 200
# The end of the year 9999, after which no calendar goes.
LATEST_MS = 253_402_300_799_999


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a worker needs to know of a task."""

    name: str
    function: Callable[..., Any]
    pool: Pool
    queue: str
    priority: Priority
    policy: RetryPolicy
    # None: no limit.
    timeout_ms: int | None
    arguments: Arguments
    # What the function says it returns; Any where it says nothing.
    returns: Any


class Tasks:
    """The registry: name to definition."""

    def __init__(self) -> None:
        self._by_name: dict[str, Definition] = {}

    def register(self, definition: Definition) -> None:
        other = self._by_name.get(definition.name)
        if other is not None:
            raise BadConfig(
                f"two tasks are named {definition.name!r}: {_place(other.function)} and "
                f"{_place(definition.function)}; give one of them @app.task(name=…)"
            )
        self._by_name[definition.name] = definition

    def get(self, name: str) -> Definition:
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownTask(self.unknown(name)) from None

    def find(self, name: str) -> Definition | None:
        return self._by_name.get(name)

    def unknown(self, name: str) -> str:
        """What to say of a task that is not here."""
        known = ", ".join(sorted(self._by_name)) or "none"
        return f"no task is named {name!r} here; there are: {known}"

    def all(self) -> list[Definition]:
        return list(self._by_name.values())

    def queues(self) -> list[str]:
        """Every queue that some task goes to by default."""
        return sorted({definition.queue for definition in self._by_name.values()} | {"default"})


def define(
    function: Callable[..., Any],
    *,
    name: str | None,
    queue: str,
    priority: PriorityName,
    policy: RetryPolicy,
    timeout_ms: int | None,
    pool: Pool | None,
) -> Definition:
    """Check what the decorator was given, and make a definition of it."""
    if not inspect.isroutine(function) or inspect.isbuiltin(function):
        raise BadConfig(f"@app.task goes on a function of your own, not on {function!r}")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise BadConfig(
            f"{_place(function)} is a generator: calling it runs nothing, so it can be no task"
        )
    if pool not in (None, *typing.get_args(Pool)):
        raise BadConfig(f"pool={pool!r}: a pool is one of {', '.join(typing.get_args(Pool))}")
    name = checked_name("task", name if name is not None else function.__name__)
    is_async = inspect.iscoroutinefunction(function)
    pool = pool or ("async" if is_async else "thread")
    if is_async != (pool == "async"):
        kind = "an async function runs on the event loop" if is_async else "a plain function can't"
        raise BadConfig(f"task {name!r}: pool={pool!r} doesn't fit, {kind}")
    if pool == "process" and "<locals>" in function.__qualname__:
        raise BadConfig(
            f"task {name!r} runs in another process, which has to import it: "
            "move it out of the function that defines it, to the top of its module"
        )
    arguments = Arguments(name, function)
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
    )


def checked_name(what: str, name: str) -> str:
    """A name that every store, URL and metric can carry."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LIMIT:
        raise BadConfig(f"a {what} name has 1 to {NAME_LIMIT} characters; this is {name!r}")
    if not all(c.isascii() and (c.isalnum() or c in "_.:-") for c in name):
        raise BadConfig(f"a {what} name is made of letters, digits and _ . : -; this is {name!r}")
    if what == "schedule" and name == NOTE:
        raise BadConfig(f"{NOTE!r} is a name that Tickwheel uses itself: give the schedule another")
    return name


def checked_id(id: str) -> str:
    if not isinstance(id, str) or not 0 < len(id) <= ID_LIMIT or not id.isprintable():
        raise BadArguments(f"id={id!r}: an id is 1 to {ID_LIMIT} printable characters")
    return id


def checked_job(job: Job) -> Job:
    """A job that was made elsewhere, if every store can keep it."""
    checked_id(job.id)
    checked_name("task", job.task)
    checked_name("queue", job.queue)
    if job.priority not in tuple(Priority):
        raise BadArguments(f"priority={job.priority}: it is from 0 (low) to 3 (urgent)")
    for name, ms in (("due_ms", job.due_ms), ("created_ms", job.created_ms)):
        if not 0 <= ms <= LATEST_MS:
            raise BadArguments(f"{name}={ms}: it is not in the years 1970 to 9999")
    return job


def priority_of(name: str) -> Priority:
    try:
        return Priority[name.upper()]
    except (KeyError, AttributeError):
        raise BadConfig(
            f"priority={name!r}: a priority is one of {', '.join(p.name.lower() for p in Priority)}"
        ) from None


class Arguments:
    """The parameters of one function as a JSON object, both ways.

    The work is done by a msgspec struct with a field per parameter: making one binds arguments as
    a call would, encoding one writes the payload, decoding one checks every type.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._signature = inspect.signature(function)
        self.hints = _hints(function)
        parameters = list(self._signature.parameters.values())
        self._positional = [p.name for p in parameters if p.kind in _BY_POSITION]
        self._by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._named_rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self.names = frozenset(self._signature.parameters)
        # With only ordinary parameters the struct binds by itself, in C.
        self._plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        try:
            self._struct = msgspec.defstruct(
                name.replace(".", "_"),
                [self._field(parameter) for parameter in parameters],
                kw_only=not self._plain,
                forbid_unknown_fields=True,
            )
            self._decoder = msgspec.json.Decoder(self._struct)
            _refuse_custom(msgspec.inspect.type_info(self._struct))
        except TypeError as error:
            raise BadConfig(
                f"task {name!r} has a parameter that JSON can't carry: {error}; use plain types, "
                "dataclasses, datetime, UUID, Enum…, or pass an id and load the object in the task"
            ) from None

    def _field(self, parameter: inspect.Parameter) -> tuple[str, Any, Any]:
        kind: Any = self.hints.get(parameter.name, Any)
        if kind is object:
            kind = Any
        if parameter.kind is parameter.VAR_POSITIONAL:
            kind = types.GenericAlias(list, (kind,))
        if parameter.kind is parameter.VAR_KEYWORD:
            kind = types.GenericAlias(dict, (str, kind))
        if parameter.default is parameter.empty and parameter.kind not in _VARIABLE:
            return parameter.name, kind, msgspec.NODEFAULT
        # Left out of the payload, so that the default is the one the function has when it runs.
        return parameter.name, kind | msgspec.UnsetType, msgspec.UNSET

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, limit: int) -> str:
        """The payload for this call; BadArguments where the function would not take it."""
        try:
            bound = self._struct(*args, **kwargs) if self._plain else self._bind(args, kwargs)
        except TypeError:
            raise BadArguments(f"{self._name}(): {self._complaint(args, kwargs)}") from None
        try:
            payload = _json(bound)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise BadArguments(
                f"{self._name}(): an argument can't be written as JSON ({error}); pass plain "
                "values, or an id and load the object in the task"
            ) from None
        if len(payload) > limit:
            raise BadArguments(
                f"{self._name}(): the arguments take {len(payload):,} bytes as JSON, more than "
                f"the limit of {limit:,}; store the data elsewhere and pass its id, or raise "
                "App(payload_limit=…)"
            )
        self._check(payload)
        return payload.decode()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> msgspec.Struct:
        return self._struct(**self._signature.bind(*args, **kwargs).arguments)

    def _complaint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return "its arguments don't fit"

    def _check(self, payload: bytes) -> None:
        try:
            self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadArguments(f"{self._name}(): {_in_words(error)}") from None

    def decode(self, payload: str) -> tuple[list[Any], dict[str, Any]]:
        """The call that a payload stands for; BadArguments where the function has changed since."""
        try:
            bound = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadArguments(
                f"{self._name}(): the stored arguments no longer fit the function: "
                f"{_in_words(error)}"
            ) from None
        return self._call(bound)

    def _call(self, bound: msgspec.Struct) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name in self._positional:
            value = getattr(bound, name)
            if value is msgspec.UNSET:
                # From here on by keyword: what follows may be set although this one is not.
                kwargs = self._set(bound, self._positional[len(args) :])
                break
            args.append(value)
        kwargs |= self._set(bound, self._by_keyword)
        for rest, into in ((self._rest, args.extend), (self._named_rest, kwargs.update)):
            if rest is not None and getattr(bound, rest) is not msgspec.UNSET:
                into(getattr(bound, rest))
        return args, kwargs

    @staticmethod
    def _set(bound: msgspec.Struct, names: list[str]) -> dict[str, Any]:
        values = {name: getattr(bound, name) for name in names}
        return {name: value for name, value in values.items() if value is not msgspec.UNSET}


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError):
        # Some name exists for type checkers alone; arguments are then checked by name and number.
        return {}


def _json(value: Any) -> bytes:
    """The value as JSON; an error also for NaN and infinity, which msgspec would write as null."""
    text = msgspec.json.encode(value)
    if b"null" in text and _has_no_number(msgspec.to_builtins(value)):
        raise ValueError("JSON has no NaN and no infinity")
    return text


def _has_no_number(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    return isinstance(value, (list, tuple, set)) and any(map(_has_no_number, value))


def _refuse_custom(kind: msgspec.inspect.Type, seen: frozenset[Any] = frozenset()) -> None:
    """Find a class that msgspec knows nothing of, however deep in a type it is."""
    if isinstance(kind, msgspec.inspect.CustomType):
        raise TypeError(f"{kind.cls.__module__}.{kind.cls.__qualname__} is not a type of data")
    cls = getattr(kind, "cls", None)
    if cls in seen:
        return
    seen |= {cls} if cls is not None else frozenset()
    inner = [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
    inner += getattr(kind, "types", ()) or ()
    inner += getattr(kind, "item_types", ()) or ()
    inner += [field.type for field in getattr(kind, "fields", ()) or ()]
    for each in inner:
        if each is not None:
            _refuse_custom(each, seen)


def _in_words(error: Exception) -> str:
    """msgspec's messages name places as JSON paths: `$.order_id`; a reader wants `order_id`."""
    return str(error).replace("at `$.", "at `").replace("field `", "argument `")


class NotKept:
    """Takes the place of a result that could not be brought to where it is encoded."""

    def __init__(self, why: str) -> None:
        self.why = why


def encode_result(value: Any, *, limit: int) -> tuple[str | None, str | None]:
    """What a task returned as JSON text, or why it could not be kept."""
    if value is None:
        return None, None
    if type(value) is NotKept:  # others may raise when they are asked
        return None, f"the result was not kept: {value.why}"
    try:
        text = _json(value)
    except Exception as error:  # a value may raise anything while it is looked at
        return None, f"the result was not kept: JSON can't carry it ({describe(error)})"
    if len(text) > limit:
        return None, f"the result was not kept: {len(text):,} bytes, over the limit of {limit:,}"
    return text.decode(), None


def decode_result(text: str | None, returns: Any) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=returns)
    except (msgspec.MsgspecError, TypeError):
        # The function's annotation is not what it returned; plain JSON is still an answer.
        return msgspec.json.decode(text)


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
