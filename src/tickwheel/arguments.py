"""A task's arguments and results as JSON.

A payload is a JSON object of arguments by parameter name, so that it is readable in a store and
survives a reordering of parameters. It is checked against the function's annotations when a job is
created and again when it runs. Nothing is ever pickled into a store or imported from one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import msgspec
import msgspec.inspect

from tickwheel.envelope import GIVE_KEYS, is_sealed
from tickwheel.errors import BadArguments, BadConfig
from tickwheel.retry import describe

MIB = 1024 * 1024

_INSTEAD = "pass plain values, or an id and load the object in the task"


class _Injected:
    """The default of a task's parameter that takes the value of the lifespan: `db: Db = INJECTED`.

    It tells type checkers that callers leave the parameter out. The worker fills it in.
    """

    def __repr__(self) -> str:
        return "INJECTED"

    def __reduce__(self) -> str:
        return "INJECTED"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r}: only a worker fills in this parameter; in a direct call, pass it"
        )


INJECTED: Any = _Injected()


class Arguments:
    """Encodes a function's arguments as a JSON object, and decodes them.

    A msgspec struct with a field per parameter does the work: creating one binds arguments as a
    call would, encoding one writes the payload, decoding one checks every type.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        injects: type | None = None,
        hints: dict[str, Any] | None = None,
    ) -> None:
        """A parameter of exactly the class `injects` is not an argument: the worker fills it in.
        `hints` replaces the function's annotations."""
        self._name = name
        self._whole = inspect.signature(function)
        self.hints = hints_of(function) if hints is None else hints
        self.injected = self._injected(injects)
        parameters = [p for p in self._whole.parameters.values() if p.name not in self.injected]
        self.signature = self._whole.replace(parameters=parameters)
        hidden = next((p.name for p in parameters if p.name.startswith("__")), None)
        if hidden is not None:
            raise BadConfig(
                f"task {name!r}: rename the parameter {hidden!r}; two underscores at the start "
                "are reserved (for parameters by position only, write / after them)"
            )
        ordered = [p.name for p in self._whole.parameters.values() if p.kind in _BY_POSITION]
        # One that is filled in is passed by name, and so are those after it.
        first = next((i for i, each in enumerate(ordered) if each in self.injected), len(ordered))
        self._positional = ordered[:first]
        self._by_keyword = [each for each in ordered[first:] if each not in self.injected]
        self._by_keyword += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._named_rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self.names = frozenset(self.signature.parameters)
        # Those that take one value, unlike *args and **kwargs.
        self.single = frozenset((*self._positional, *self._by_keyword))
        # Their names as in the function's definition: `*` and `**` mark the variable ones.
        self.parameters = tuple(
            str(p.replace(default=p.empty, annotation=p.empty)) for p in parameters
        )
        # With only ordinary parameters the struct does the binding, in C.
        self._plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        try:
            self._struct = msgspec.defstruct(
                name.replace(".", "_"),
                [self._field(parameter) for parameter in parameters],
                kw_only=not self._plain,
                forbid_unknown_fields=True,
            )
            self._decoder = msgspec.json.Decoder(self._struct, dec_hook=_validated)
            _refuse_custom(msgspec.inspect.type_info(self._struct))
        except TypeError as error:
            raise BadConfig(
                f"task {name!r} has a parameter that can't be written as JSON: {error}; use plain "
                "types, dataclasses, Pydantic models, datetime, UUID, Enum…, or pass an id and "
                "load the object in the task; if it is the value of a lifespan, declare that "
                "before the task"
            ) from None

    def _injected(self, kind: type | None) -> tuple[str, ...]:
        """The parameters that take the value of the lifespan, which has this class."""
        found: list[str] = []
        several = any(p.kind is p.VAR_POSITIONAL for p in self._whole.parameters.values())
        for p in self._whole.parameters.values():
            if p.kind in _VARIABLE:
                continue
            if kind is not None and self.hints.get(p.name) is kind:
                if p.kind is p.POSITIONAL_ONLY or (several and p.kind is p.POSITIONAL_OR_KEYWORD):
                    raise BadConfig(
                        f"task {self._name!r}: {p.name!r} takes the value of the lifespan and is "
                        "passed by name; write it after *"
                    )
                found.append(p.name)
            elif p.default is INJECTED:
                raise BadConfig(
                    f"task {self._name!r}: {p.name!r} is INJECTED, but its annotation is not the "
                    "class that a lifespan, declared before the task, yields where it runs"
                )
        return tuple(found)

    def refuse_direct(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a direct call that leaves out what only a worker fills in."""
        try:
            given = self._whole.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return  # the call itself says why
        for name in self.injected:
            if given.get(name, INJECTED) is INJECTED:
                raise BadArguments(
                    f"{self._name}(): only a worker fills in {name!r}; in a direct call, pass it"
                )

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
        # Not in the payload, so that the function's default at the time of the run is used.
        return parameter.name, kind | msgspec.UnsetType, msgspec.UNSET

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, limit: int) -> str:
        """The payload for this call. Raises BadArguments if the function would not accept it."""
        try:
            bound = self._struct(*args, **kwargs) if self._plain else self._bind(args, kwargs)
        except TypeError:
            raise BadArguments(f"{self._name}(): {self._complaint(args, kwargs)}") from None
        try:
            payload, has_models = _json(bound)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise self._not_json(str(error)) from None
        except Exception as error:  # a model's serializers are the user's code
            raise self._not_json(describe(error)) from error
        self._check_size(payload, limit)
        kept = self._check(payload)
        if has_models:
            self._refuse_loss(bound, kept)
        return payload.decode()

    def _check_size(self, payload: bytes, limit: int) -> None:
        if len(payload) > limit:
            raise BadArguments(
                f"{self._name}(): the arguments take {len(payload):,} bytes as JSON, more than "
                f"the limit of {limit:,}; store the data elsewhere and pass its id, or raise "
                "App(payload_limit=…)"
            )

    def _refuse_loss(self, bound: msgspec.Struct, kept: msgspec.Struct) -> None:
        try:
            lost = _lost(bound, kept)
        except Exception as error:  # comparing can run the values' own code
            raise self._not_json(describe(error)) from error
        if lost:
            raise BadArguments(f"{self._name}(): {lost}; {_INSTEAD}")

    def _not_json(self, why: str) -> BadArguments:
        return BadArguments(
            f"{self._name}(): an argument can't be written as JSON ({why}); {_INSTEAD}"
        )

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> msgspec.Struct:
        return self._struct(**self.signature.bind(*args, **kwargs).arguments)

    def _complaint(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        for name in self.injected:
            if name in kwargs:
                return f"{name!r} is filled in by the worker; leave it out"
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return "its arguments don't fit"

    def _check(self, payload: bytes) -> msgspec.Struct:
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadArguments(f"{self._name}(): {_in_words(error)}") from None
        except Exception as error:  # validators and __post_init__ are the user's code
            raise BadArguments(
                f"{self._name}(): an argument could not be checked: {describe(error)}"
            ) from error

    def decode(self, payload: str) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in a payload. Raises BadArguments if they no longer fit the function."""
        try:
            bound = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._no_longer_fits(payload, error) from None
        return self._call(bound)

    def decode_only(self, payload: str) -> Any:
        """The argument in a payload, of a function that takes just one."""
        try:
            return getattr(self._decoder.decode(payload), self._positional[0])
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._no_longer_fits(payload, error) from None

    def _no_longer_fits(self, payload: str, error: Exception) -> BadArguments:
        if is_sealed(payload):
            return BadArguments(f"{self._name}(): this job is sealed; {GIVE_KEYS}")
        return BadArguments(
            f"{self._name}(): the stored arguments no longer fit the function: {_in_words(error)}"
        )

    def by_name(self, payload: str) -> dict[str, Any]:
        """The arguments in a payload by parameter name, to be looked at: plain JSON values if they
        no longer fit the function."""
        try:
            bound = self._decoder.decode(payload)
        except Exception:  # a model's validators are the user's code
            return plain_arguments(payload)
        return self._set(bound, list(self._struct.__struct_fields__))

    def _call(self, bound: msgspec.Struct) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name in self._positional:
            value = getattr(bound, name)
            if value is msgspec.UNSET:
                # From here on by keyword: later parameters may be set although this one is not.
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


class AnyArguments(Arguments):
    """Those of a task that this program doesn't know: whatever can be written as JSON."""

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, limit: int) -> str:
        try:
            payload, _ = _json(kwargs)
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise self._not_json(str(error)) from None
        self._check_size(payload, limit)
        return payload.decode()

    def by_name(self, payload: str) -> dict[str, Any]:
        return plain_arguments(payload)


_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, as far as their names can be resolved."""
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # annotations are the user's code
        pass
    # Some name exists only for type checkers; a parameter with such an annotation takes anything.
    hints: dict[str, Any] = {}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    for name, annotation in getattr(function, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        with contextlib.suppress(Exception):
            hints |= typing.get_type_hints(alone, names, include_extras=True)
    return hints


def _json(value: Any) -> tuple[bytes, bool]:
    """The value as JSON, and whether it holds models; raises for NaN and infinity, which msgspec
    would write as null."""
    has_models = False
    try:
        text = _encoder.encode(value)
    except TypeError:
        text, has_models = _encoder_of_models.encode(value), True
    if b"null" in text and _has_no_number(msgspec.to_builtins(value, enc_hook=_dumped)):
        raise ValueError("JSON has no NaN and no infinity")
    return text, has_models


def json_of(what: str, value: Any) -> bytes:
    """A value as JSON, without a task that says how it should be. Raises BadArguments."""
    try:
        return _json(value)[0]
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        why = str(error)
    except Exception as error:  # a model's serializers are the user's code
        why = describe(error)
    raise BadArguments(f"{what}: a value can't be written as JSON ({why}); {_INSTEAD}")


def _has_no_number(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_no_number, value.values()))
    return isinstance(value, (list, tuple, set)) and any(map(_has_no_number, value))


def _refuse_custom(kind: msgspec.inspect.Type, seen: frozenset[Any] = frozenset()) -> None:
    """Raise if a type contains, at any depth, a class that we don't know."""
    if isinstance(kind, msgspec.inspect.CustomType):
        if _is_model(kind.cls):
            if kind.cls is sys.modules["pydantic"].BaseModel:
                raise TypeError("BaseModel itself has no fields; name a model")
            return
        raise TypeError(f"{kind.cls.__module__}.{kind.cls.__qualname__} is not a data type")
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
    """msgspec's messages use JSON paths, `$.order_id`; readers want `order_id`."""
    return str(error).replace("at `$.", "at `").replace("field `", "argument `")


def plain_arguments(payload: str) -> dict[str, Any]:
    """The arguments as plain JSON values; none if another program wrote something else."""
    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}


# --- Pydantic models: msgspec asks these hooks about classes that it doesn't know


def _is_model(kind: Any) -> bool:
    # If there is a model, its library has been imported.
    pydantic = sys.modules.get("pydantic")
    model = getattr(pydantic, "BaseModel", None)
    return (
        model is not None
        and hasattr(model, "model_validate_json")  # not before Pydantic 2
        and isinstance(kind, type)
        and issubclass(kind, model)
    )


def _dumped(value: Any) -> Any:
    if not _is_model(type(value)):
        kind = type(value)
        raise TypeError(f"Encoding objects of type {kind.__qualname__} is unsupported")
    # So that it can be validated again: under its aliases, without computed fields.
    return value.model_dump(mode="json", by_alias=True, round_trip=True)


def _validated(kind: Any, value: Any) -> Any:
    if not _is_model(kind):
        if isinstance(value, kind):
            return value
        raise TypeError(f"Expected `{kind.__qualname__}`, got `{type(value).__qualname__}`")
    try:
        # As JSON: a strict model takes a string for a datetime only there.
        return kind.model_validate_json(msgspec.json.encode(value))
    except ValueError as error:
        raise ValueError(_all_in_one_line(error)) from None


def _all_in_one_line(error: Any) -> str:
    """Pydantic's message has a line or more per field, with links."""
    if not hasattr(error, "errors"):
        return str(error)
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return "; ".join(
        ": ".join(filter(None, [".".join(map(str, each["loc"])), each["msg"]])) for each in found
    )


_encoder = msgspec.json.Encoder()
_encoder_of_models = msgspec.json.Encoder(enc_hook=_dumped)


_SEVERAL = (dict, list, tuple, set, frozenset)


def _lost(given: Any, kept: Any, within: str = "") -> str | None:
    """What a model loses as JSON, in words. `kept` is `given` after it was written and read;
    `within` names the field of a model that it is in. Outside of models nothing is compared: what
    annotations convert is meant."""
    if _is_model(type(given)):
        return _lost_by_model(given, kept)
    # In a model, a dataclass is compared as a whole.
    pairs = _pairs(given, kept) if not within or isinstance(given, _SEVERAL) else None
    if pairs is None:
        models = isinstance(given, (set, frozenset)) and any(_is_model(type(e)) for e in given)
        if (within or models) and not _equal(given, kept):
            return f"{within or 'a set of models'} would not arrive as it is"
        return None
    if within and len(pairs) != len(given):
        return f"{within} would not arrive as it is"
    return next(filter(None, (_lost(*pair, within) for pair in pairs)), None)


def _pairs(given: Any, kept: Any) -> list[tuple[Any, Any]] | None:
    """The parts of a value, each with what is kept of it; None if it has none."""
    if isinstance(given, dict) and isinstance(kept, dict):
        if len(given) == len(kept):  # in the same order; keys may have become text
            return list(zip(given.values(), kept.values(), strict=True))
        return [(each, kept[key]) for key, each in given.items() if key in kept]
    if isinstance(given, (list, tuple, set, frozenset)) and isinstance(kept, (list, tuple)):
        return list(zip(given, kept, strict=False))
    if isinstance(given, msgspec.Struct):
        names = dict(zip(given.__struct_fields__, given.__struct_encode_fields__, strict=True))
    elif dataclasses.is_dataclass(given) and not isinstance(given, type):
        names = {field.name: field.name for field in dataclasses.fields(given)}
    else:
        return None
    if isinstance(kept, dict):
        return [(getattr(given, name), kept[key]) for name, key in names.items() if key in kept]
    return [(getattr(given, name), getattr(kept, name)) for name in names if hasattr(kept, name)]


def _lost_by_model(given: Any, kept: Any) -> str | None:
    if not _is_model(type(kept)):
        kept = _validated(type(given), kept)
    fields, left = _values(given), _values(kept)
    for name, value in fields.items():
        within = f"{type(given).__qualname__}.{name}"
        if name not in left:
            return f"{within} would be lost, because {type(kept).__qualname__} has no such field"
        if lost := _lost(value, left[name], within):
            return lost
    return None


def _values(model: Any) -> dict[str, Any]:
    """A model's fields. Private attributes are none: they are never written."""
    names = type(model).model_fields
    return {n: getattr(model, n, None) for n in names} | (model.__pydantic_extra__ or {})


def _equal(given: Any, kept: Any) -> bool:
    if given == kept:
        return True
    try:
        # A tuple or a datetime in a field of type Any.
        return _encoder.encode(given) == _encoder.encode(kept)
    except (TypeError, ValueError):
        return False


# --- Results


class NotKept:
    """Stands for a result that could not be sent to where it is encoded."""

    def __init__(self, why: str) -> None:
        self.why = why


def encode_result(value: Any, *, limit: int, returns: Any = Any) -> tuple[str | None, str | None]:
    """A task's result as JSON text, or why it could not be stored."""
    if value is None:
        return None, None
    if type(value) is NotKept:  # isinstance could run the value's own code
        return None, f"the result was not kept: {value.why}"
    try:
        text, has_models = _json(value)
        lost = _lost(value, decode_result(text.decode(), returns)) if has_models else None
    except Exception as error:  # encoding can run the value's own code
        return None, f"the result was not kept: it can't be written as JSON ({describe(error)})"
    if lost:
        return None, f"the result was not kept: {lost}"
    if len(text) > limit:
        return None, f"the result was not kept: {len(text):,} bytes, over the limit of {limit:,}"
    return text.decode(), None


def decode_result(text: str | None, returns: Any) -> Any:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=returns, dec_hook=_validated)
    except Exception:  # a model's validators are the user's code
        # The function did not return what its annotation says; return plain JSON.
        return msgspec.json.decode(text)
