"""How the arguments of a call travel as JSON, and what can't."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NewType, Optional, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tickwheel.arguments import MIB, Arguments, decode_result, encode_result
from tickwheel.errors import BadArguments, BadConfig, UsageError

if TYPE_CHECKING:
    from somewhere import Thing  # type: ignore[import-not-found]

Function = Callable[..., Any]


def encode(function: Function, *args: Any, **kwargs: Any) -> str:
    return Arguments(function.__name__, function).encode(args, kwargs, limit=MIB)


def call(function: Function, payload: str) -> Any:
    args, kwargs = Arguments(function.__name__, function).decode(payload)
    return function(*args, **kwargs)


# --- There and back


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1


@dataclass
class Address:
    street: str
    zip: int | None = None


@dataclass
class Order:
    id: UUID
    to: Address
    placed: datetime
    colours: list[Colour]


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict, total=False):
    loud: bool


class Struct(msgspec.Struct):
    a: int


OrderId = NewType("OrderId", int)


def nothing() -> Any:
    return ()


def plain(a: int, b: str) -> Any:
    return a, b


def defaults(a: int, b: str = "b", c: float = 1.5) -> Any:
    return a, b, c


def keyword_only(a: int, *, b: str, c: int = 3) -> Any:
    return a, b, c


def positional_only(a: int, b: int = 2, /, c: int = 3) -> Any:
    return a, b, c


def rest(a: int, *rest: int) -> Any:
    return a, rest


def named_rest(a: int = 1, **named: str) -> Any:
    return a, named


def everything(a: int, /, b: int = 2, *rest: int, c: int, d: int = 4, **named: int) -> Any:
    return a, b, rest, c, d, named


def same_name_twice(a: int, /, **named: int) -> Any:
    return a, named


def _unannotated(a, b=2, *rest, c=3, **named):  # type: ignore[no-untyped-def]
    return a, b, rest, c, named


unannotated: Function = _unannotated


def odd_names(self: int, cls: int, id: int, type: int, args: int, kwargs: int) -> Any:
    return self, cls, id, type, args, kwargs


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (nothing, (), {}),
        (plain, (1, "x"), {}),
        (plain, (1,), {"b": "x"}),
        (plain, (), {"b": "x", "a": 1}),
        (defaults, (1,), {}),
        (defaults, (1, "x"), {}),
        (defaults, (1,), {"c": 2.5}),
        (keyword_only, (1,), {"b": "x"}),
        (keyword_only, (), {"a": 1, "b": "x", "c": 5}),
        (positional_only, (1,), {}),
        (positional_only, (1,), {"c": 9}),
        (positional_only, (1, 8, 9), {}),
        (rest, (1,), {}),
        (rest, (1, 2, 3), {}),
        (named_rest, (), {}),
        (named_rest, (5,), {"x": "y", "z": ""}),
        (everything, (1,), {"c": 3}),
        (everything, (1, 2, 3, 4), {"c": 5, "d": 6, "e": 7}),
        (everything, (1,), {"b": 9, "c": 5, "named": 7, "rest": 8}),
        (same_name_twice, (1,), {"a": 2}),
        (unannotated, (1,), {}),
        (unannotated, ([1, {"x": None}], "b", 3, True), {"c": 1.5, "d": "e"}),
        (odd_names, (1, 2, 3, 4, 5, 6), {}),
        (odd_names, (), {"self": 1, "cls": 2, "id": 3, "type": 4, "args": 5, "kwargs": 6}),
    ],
)
def test_a_stored_call_is_the_call_that_was_made(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    payload = encode(function, *args, **kwargs)
    assert call(function, payload) == function(*args, **kwargs)


def one(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bool, True),
        (int, 2**100),
        (float, -0.1),
        (float, 3),
        (str, "naïve ✓ \u0000 \U0001f600"),
        (bytes, b"\x00\xff"),
        (Decimal, Decimal("0.10")),
        (UUID, UUID(int=7)),
        (date, date(2030, 2, 28)),
        (datetime, datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)),
        (datetime, datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=8)))),
        (timedelta, timedelta(days=1, microseconds=1)),
        (Colour, Colour.BLUE),
        (Size, Size.SMALL),
        (Literal["a", "b"], "b"),
        (Optional[int], None),  # noqa: UP045
        (int | None, 5),
        (int | str, "5"),
        (list[int], [1, 2]),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "a")),
        (dict[str, list[Colour]], {"a": [Colour.RED]}),
        (dict[int, str], {1: "a"}),
        (dict[UUID, int], {UUID(int=7): 1}),
        (Address, Address("Elm", 12345)),
        (list[Address], [Address("Elm"), Address("Oak", 1)]),
        (Order, Order(UUID(int=1), Address("Elm"), datetime(2030, 1, 1, tzinfo=UTC), [])),
        (Point, Point(1, 2)),
        (Options, {"loud": True}),
        (Struct, Struct(1)),
        (OrderId, OrderId(5)),
        (Annotated[int, msgspec.Meta(ge=1)], 5),
        (Any, {"a": [1, None]}),
    ],
)
@pytest.mark.parametrize("default", [False, True])
def test_a_value_arrives_as_what_it_was(kind: Any, value: Any, default: bool) -> None:
    def function(value: Any = None) -> Any:
        return value

    def required(value: Any) -> Any:
        return value

    chosen = function if default else required
    chosen.__annotations__["value"] = kind
    arrived = call(chosen, encode(chosen, value))
    assert arrived == value
    assert type(arrived) is type(value) or kind is float


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Lone surrogates are no text that could be stored.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc"), inner),
    max_leaves=10,
)


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.dictionaries(st.text("de", min_size=1), VALUES))
def test_plain_values_arrive_unchanged(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert call(unannotated, encode(unannotated, *args, **kwargs)) == unannotated(*args, **kwargs)


def test_a_payload_is_an_object_by_parameter_name() -> None:
    assert msgspec.json.decode(encode(plain, 1, b="x")) == {"a": 1, "b": "x"}
    assert msgspec.json.decode(encode(everything, 1, 2, 3, c=4, e=5)) == {
        "a": 1,
        "b": 2,
        "rest": [3],
        "c": 4,
        "named": {"e": 5},
    }


@pytest.mark.parametrize("name", ["mail.send", "mail:send-v2", "2fast", "class", "_"])
def test_any_task_name_will_do(name: str) -> None:
    arguments = Arguments(name, plain)
    assert arguments.decode(arguments.encode((1, "x"), {}, limit=MIB)) == ([1, "x"], {})


# --- Calls that the function would not take


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "words"),
    [
        (nothing, (1,), {}, "too many positional arguments"),
        (plain, (1,), {}, "missing a required argument: 'b'"),
        (plain, (1, "x", 3), {}, "too many positional arguments"),
        (plain, (1, "x"), {"c": 3}, "unexpected keyword argument 'c'"),
        (plain, (1, "x"), {"a": 3}, "multiple values for argument 'a'"),
        (keyword_only, (1, "x"), {}, "too many positional arguments"),
        (keyword_only, (1,), {}, "missing a required.* argument: 'b'"),
        (everything, (), {"c": 1}, "missing a required.* argument: 'a'"),
    ],
)
def test_a_wrong_number_or_name_is_refused_as_the_function_would(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError):
        function(*args, **kwargs)
    with pytest.raises(BadArguments, match=rf"^{function.__name__}\(\): .*{words}"):
        encode(function, *args, **kwargs)


def test_a_positional_only_parameter_is_refused_by_name() -> None:
    def function(a: int, /) -> None: ...

    with pytest.raises(BadArguments, match="a"):
        encode(function, a=1)


def ordered(order_id: int, address: Address, tags: list[str] | None = None, *rest: int) -> None: ...


@pytest.mark.parametrize(
    ("args", "place", "wanted"),
    [
        (("1", Address("Elm")), "order_id", "`int`"),
        ((1.5, Address("Elm")), "order_id", "`int`"),
        ((True, Address("Elm")), "order_id", "`int`"),
        ((None, Address("Elm")), "order_id", "`int`"),
        ((1, None), "address", "`object`"),
        ((1, {"street": 5}), "address.street", "`str`"),
        ((1, Address("Elm"), "tag"), "tags", "`array | null`"),
        ((1, Address("Elm"), ["tag", 5]), "tags[1]", "`str`"),
        ((1, Address("Elm"), None, "x"), "rest[0]", "`int`"),
    ],
)
def test_a_wrong_type_is_refused_with_the_task_the_argument_and_the_type(
    args: tuple[Any, ...], place: str, wanted: str
) -> None:
    with pytest.raises(BadArguments) as caught:
        encode(ordered, *args)
    assert str(caught.value).startswith(f"ordered(): Expected {wanted}, got ")
    assert str(caught.value).endswith(f" at `{place}`")


def test_a_missing_part_of_an_argument_is_named() -> None:
    with pytest.raises(BadArguments, match=r"^ordered\(\): .*missing required.*street.*`address`"):
        encode(ordered, 1, {})


def test_a_constraint_of_an_annotation_holds() -> None:
    def function(count: Annotated[int, msgspec.Meta(ge=1)]) -> None: ...

    with pytest.raises(BadArguments, match=r"^function\(\): Expected `int` >= 1 - at `count`"):
        encode(function, 0)


class Session:
    """Something that belongs to one process: a connection, a file, an ORM's object."""


@pytest.mark.parametrize(
    "value", [Session(), object(), print, 1j, iter([]), Session, {Session(): 1}]
)
def test_a_value_that_json_cannot_carry_is_refused_with_what_to_do(value: object) -> None:
    with pytest.raises(BadArguments, match=r"^one\(\): an argument can't be written .*pass plain"):
        encode(one, value)


def test_a_value_that_holds_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(BadArguments, match=r"^one\(\): an argument can't be written as JSON"):
        encode(one, ring)


def test_a_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(BadArguments, match=r"^one\(\): an argument can't be written as JSON"):
        encode(one, "\ud800")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_has_not_is_refused_where_a_float_is_wanted(value: float) -> None:
    def function(x: float) -> None: ...

    with pytest.raises(BadArguments, match=r"^function\(\): .*JSON has no NaN"):
        encode(function, value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("kind", [Any, float | None])
def test_a_number_that_json_has_not_is_refused_everywhere(value: float, kind: Any) -> None:
    def function(x: Any) -> None: ...

    function.__annotations__["x"] = kind
    with pytest.raises(BadArguments):
        encode(function, value)


def test_bad_arguments_are_a_usage_error_and_a_type_error() -> None:
    assert issubclass(BadArguments, UsageError) and issubclass(BadArguments, TypeError)


def test_a_payload_has_a_limit_in_bytes() -> None:
    arguments = Arguments("one", one)
    payload = arguments.encode(("é" * 10,), {}, limit=100)
    size = len(payload.encode())
    assert arguments.encode(("é" * 10,), {}, limit=size) == payload
    words = rf"one\(\): the arguments take {size} bytes .* the limit of {size - 1}; store the data"
    with pytest.raises(BadArguments, match=words):
        arguments.encode(("é" * 10,), {}, limit=size - 1)


# --- A function that has changed since


def test_a_default_is_the_one_that_the_function_has_when_it_runs() -> None:
    def before(a: int, b: str = "old", *, c: int = 1) -> Any: ...

    def after(a: int, b: str = "new", *, c: int = 2) -> Any:
        return a, b, c

    assert call(after, encode(before, 1)) == (1, "new", 2)
    # What was said is kept, even where it was the default.
    assert call(after, encode(before, 1, "old")) == (1, "old", 2)


def test_a_default_is_left_out_of_the_payload() -> None:
    def function(items: list[int] = [1]) -> list[int]:  # noqa: B006
        return items

    payload = encode(function)
    assert payload == "{}"
    assert call(function, payload) is function()


def before(order_id: int, note: str = "") -> Any: ...


def test_parameters_may_change_places_and_be_joined_by_optional_ones() -> None:
    def after(extra: int = 0, *, note: str = "", order_id: int) -> Any:
        return order_id, note, extra

    assert call(after, encode(before, 1, "x")) == (1, "x", 0)


def test_a_default_may_come_before_what_is_set() -> None:
    def after(order_id: int, colour: str = "red", note: str = "") -> Any:
        return order_id, colour, note

    assert call(after, encode(before, 1, "x")) == (1, "red", "x")


def removed(order_id: int) -> Any: ...


def renamed(id: int, note: str = "") -> Any: ...


def joined(order_id: int, customer: int, note: str = "") -> Any: ...


def retyped(order_id: UUID, note: str = "") -> Any: ...


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (removed, "unknown argument `note`"),
        (renamed, "unknown argument `order_id`|missing required argument `id`"),
        (joined, "missing required argument `customer`"),
        (retyped, "Expected `uuid`, got `int` - at `order_id`"),
    ],
)
def test_a_payload_that_no_longer_fits_is_refused_with_the_reason(
    after: Function, words: str
) -> None:
    payload = encode(before, 1, "x")
    start = rf"^{after.__name__}\(\): the stored arguments no longer fit the function: .*"
    with pytest.raises(BadArguments, match=f"{start}({words})"):
        call(after, payload)


@pytest.mark.parametrize("payload", ["", "{", "null", "[1]", "5", '{"a": }', "\x00"])
def test_a_payload_that_is_no_object_is_refused(payload: str) -> None:
    with pytest.raises(BadArguments, match=r"^plain\(\): the stored arguments no longer fit"):
        call(plain, payload)


# --- Annotations


def ambiguous(a: list[int] | tuple[int, ...]) -> None: ...


def two_shapes(*a: Address | Order) -> None: ...


@pytest.mark.parametrize("function", [ambiguous, two_shapes])
def test_a_type_that_cannot_be_told_from_its_json_is_refused_at_decoration(
    function: Function,
) -> None:
    words = (
        rf"^task '{function.__name__}' has a parameter that can't be written as JSON: .*pass an id"
    )
    with pytest.raises(BadConfig, match=words):
        Arguments(function.__name__, function)


def takes_a_session(session: Session) -> None: ...


def takes_a_complex(z: complex = 0) -> None: ...


def takes_functions(*calls: Callable[[], None]) -> None: ...


@pytest.mark.parametrize("function", [takes_a_session, takes_a_complex, takes_functions])
def test_a_class_that_json_cannot_carry_is_refused_at_decoration(function: Function) -> None:
    with pytest.raises(BadConfig, match=f"{function.__name__}.*can't be written as JSON"):
        Arguments(function.__name__, function)


def test_a_parameter_may_be_any_object() -> None:
    def function(value: object) -> object:
        return value

    assert call(function, encode(function, [1, "x"])) == [1, "x"]


def unresolvable(thing: Thing, count: int = 1) -> Any:
    return thing, count


def test_a_parameter_with_a_name_for_type_checkers_alone_takes_anything() -> None:
    assert call(unresolvable, encode(unresolvable, {"a": 1}, count=2)) == ({"a": 1}, 2)
    with pytest.raises(BadArguments, match="Expected `int`, got `str` - at `count`"):
        encode(unresolvable, "x", "not a number")
    with pytest.raises(BadArguments, match="missing a required argument: 'thing'"):
        encode(unresolvable)
    with pytest.raises(BadArguments, match="unexpected keyword argument 'other'"):
        encode(unresolvable, 1, other=2)


def test_a_parameter_that_starts_with_two_underscores_is_refused() -> None:
    def hidden(a: int, __b: int) -> None: ...

    with pytest.raises(BadConfig, match=r"'hidden': rename the parameter '__b'; .* write / "):
        Arguments("hidden", hidden)


@dataclass
class Picky:
    a: int

    def __post_init__(self) -> None:
        if self.a == 13:
            raise KeyError("bad luck")


def test_what_a_class_raises_when_it_is_checked_is_the_cause_of_the_refusal() -> None:
    def pick(it: Picky) -> None: ...

    pick.__annotations__ = {"it": Picky}
    with pytest.raises(BadArguments, match=r"pick\(\): .*KeyError: 'bad luck'") as refused:
        encode(pick, {"a": 13})
    assert isinstance(refused.value.__cause__, KeyError)


# --- Results


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (None, None),
        (None, int),
        (0, int),
        ("", str),
        ([1], list[int]),
        ((1, "a"), tuple[int, str]),
        (Address("Elm"), Address),
        (datetime(2030, 1, 1, tzinfo=UTC), datetime),
        ({"a": 1}, Any),
    ],
)
def test_a_result_comes_back_as_what_it_was(value: Any, returns: Any) -> None:
    text, problem = encode_result(value, limit=MIB)
    assert problem is None
    assert decode_result(text, returns) == value


@pytest.mark.parametrize("returns", [int, Session, list[int] | tuple[int, ...]])
def test_a_result_that_is_not_what_was_promised_comes_back_as_plain_json(returns: Any) -> None:
    text, _ = encode_result({"a": Address("Elm")}, limit=MIB)
    assert decode_result(text, returns) == {"a": {"street": "Elm", "zip": None}}


@pytest.mark.parametrize("value", [Session(), "\ud800", {1: {2: object()}}])
def test_a_result_that_json_cannot_carry_is_not_kept(value: object) -> None:
    text, problem = encode_result(value, limit=MIB)
    assert text is None
    assert problem is not None and problem.startswith(
        "the result was not kept: it can't be written as JSON"
    )


def test_a_result_has_a_limit_in_bytes() -> None:
    assert encode_result("x" * 8, limit=10) == ('"xxxxxxxx"', None)
    assert encode_result("x" * 2000, limit=1000) == (
        None,
        "the result was not kept: 2,002 bytes, over the limit of 1,000",
    )
