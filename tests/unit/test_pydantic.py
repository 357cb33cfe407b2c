"""Pydantic models as arguments and results: like dataclasses, with their own checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import pytest
from an_app import app
from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    RootModel,
    SecretBytes,
    SecretStr,
    computed_field,
    field_validator,
)

from tickwheel import App, BadArguments, BadConfig, ResultError, State
from tickwheel.arguments import MIB, Arguments, decode_result, encode_result
from tickwheel.job import Job

__all__ = ["app"]

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


class Item(BaseModel):
    sku: str
    count: Annotated[int, Field(gt=0)] = 1


class Order(BaseModel):
    """What JSON makes hard: strict types, aliases, fields that are only computed, no others."""

    model_config = ConfigDict(strict=True, extra="forbid")

    id: int = Field(alias="orderId")
    placed: datetime
    items: list[Item] = []

    @computed_field  # type: ignore[prop-decorator]
    @property
    def pieces(self) -> int:
        return sum(item.count for item in self.items)


class Skus(RootModel[list[str]]):
    pass


@dataclass
class Wrapped:
    item: Item


ORDER = Order(orderId=7, placed=NOON, items=[Item(sku="a", count=2)])
ORDER_JSON = '{"orderId":7,"placed":"2030-01-01T12:00:00Z","items":[{"sku":"a","count":2}]}'
ITEM = Item(sku="b")


def plain(order: Order) -> Any:
    return order


def nested(
    items: list[Item],
    by_sku: dict[str, Item | None],
    maybe: Item | None = None,
    wrapped: Wrapped | None = None,
    skus: Skus | None = None,
    *rest: Item,
    **named: Item,
) -> Any:
    return items, by_sku, maybe, wrapped, skus, rest, named


def there_and_back(function: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = Arguments(function.__name__, function)
    args_there, kwargs_there = arguments.decode(arguments.encode(args, kwargs, limit=MIB))
    return function(*args_there, **kwargs_there)


def test_a_model_comes_back_as_it_was() -> None:
    assert there_and_back(plain, ORDER) == ORDER
    payload = Arguments("plain", plain).encode((ORDER,), {}, limit=MIB)
    assert payload == f'{{"order":{ORDER_JSON}}}'
    assert Arguments("plain", plain).by_name(payload) == {"order": ORDER}


def test_models_may_be_anywhere_in_the_arguments() -> None:
    skus = Skus(["a", "b"])
    expected = ([ITEM], {"x": ITEM, "y": None}, ITEM, Wrapped(ITEM), skus, (ITEM,), {"z": ITEM})
    args = ([ITEM], {"x": ITEM, "y": None}, ITEM, Wrapped(ITEM), skus, ITEM)
    assert there_and_back(nested, *args, z=ITEM) == expected
    assert there_and_back(nested, [], {}) == ([], {}, None, None, None, (), {})


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((Item.model_construct(sku="a", count=0),), "count: Input should be greater than 0"),
        (({"sku": "a", "count": "many"},), "count: Input should be a valid integer"),
        (({},), "sku: Field required"),
        ((5,), "Input should be an object"),
    ],
)
async def test_a_model_that_is_not_valid_is_refused_at_the_call(
    app: App, args: tuple[Any, ...], words: str
) -> None:
    @app.task
    async def pack(items: list[Item]) -> None: ...

    with pytest.raises(BadArguments, match=rf"^pack\(\): {words}.* - at `items\[0\]`$"):
        await pack.enqueue(list(args))
    assert await app.queues() == []


async def test_a_stored_model_that_fits_no_more_is_dead_and_still_shown(app: App) -> None:
    @app.task
    async def pack(item: Item) -> None: ...

    payload = '{"item":{"sku":"a","count":-1}}'
    await (await app.client()).store.add(
        [Job(id="a", task="pack", payload=payload, due_ms=0, created_ms=0, retries=0)]
    )
    async with app.worker():
        with pytest.raises(Exception, match="no longer fit the function: count: Input should be"):
            await app.job("a").result(timeout=10)
    info = await app.job("a").info()
    assert info.state is State.DEAD
    assert info.arguments == {"item": {"sku": "a", "count": -1}}


async def test_a_task_takes_and_returns_models(app: App) -> None:
    @app.task
    async def double(order: Order) -> list[Order]:
        assert isinstance(order, Order)
        return [order, order]

    async with app.worker():
        job = await double.enqueue(ORDER)
        assert await job.result(timeout=10) == [ORDER, ORDER]
    info = await job.info()
    assert info.arguments == {"order": ORDER}
    assert info.result == [ORDER, ORDER]
    assert info.result_json == f"[{ORDER_JSON},{ORDER_JSON}]"


def test_a_result_that_is_not_what_its_annotation_says_is_plain_json() -> None:
    text, problem = encode_result({"any": ITEM}, limit=MIB)
    assert (text, problem) == ('{"any":{"sku":"b","count":1}}', None)
    assert decode_result(text, Item) == {"any": {"sku": "b", "count": 1}}


# --- What models lose as JSON


class Login(BaseModel):
    user: str
    password: SecretStr | SecretBytes


class Hidden(BaseModel):
    shown: int = 1
    hidden: int = Field(default=1, exclude=True)


class Large(Item):
    litres: int = 1


class Same(Item):
    """Has no fields of its own."""


class Box(BaseModel):
    items: list[Item]


class Bag(BaseModel):
    """What arrives as something equal, or as JSON has it."""

    model_config = ConfigDict(extra="allow")

    any: Any = None
    tags: set[str] = set()
    price: Decimal = Decimal("1.10")
    site: AnyUrl = AnyUrl("https://example.org")
    items: tuple[Item, ...] = ()
    _seen: int = PrivateAttr(default=0)


@dataclass
class Held:
    it: Any


LOSING = [
    (Login(user="ann", password=SecretStr("x")), "Login.password would not arrive as it is"),
    (Login(user="ann", password=SecretBytes(b"x")), "Login.password would not arrive as it is"),
    (Hidden(hidden=2), "Hidden.hidden would not arrive as it is"),
    (Box(items=[Large(sku="a", litres=2)]), "Large.litres would be lost, because Item has no"),
]


def takes_any(it: Any) -> Any:
    return it


def takes_items(items: list[Item]) -> Any:
    return items


@pytest.mark.parametrize(("model", "words"), LOSING)
@pytest.mark.parametrize("wrap", [lambda it: it, lambda it: {"a": [it]}, Held])
def test_a_model_that_would_lose_something_is_refused(
    model: BaseModel, words: str, wrap: Callable[[Any], Any]
) -> None:
    def takes(it: Any) -> None: ...

    takes.__annotations__ = {"it": type(model)}
    with pytest.raises(BadArguments, match=rf"^takes\(\): {words}.*; pass plain values, or an id"):
        Arguments("takes", takes).encode((model,), {}, limit=MIB)
    with pytest.raises(BadArguments, match=words):
        Arguments("takes_any", takes_any).encode((wrap(model),), {}, limit=MIB)
    text, problem = encode_result(wrap(model), limit=MIB)
    assert text is None and problem and words in problem


def test_a_subclass_loses_nothing_but_its_class() -> None:
    with pytest.raises(BadArguments, match=r"Large\.litres would be lost, because Item has no"):
        there_and_back(takes_items, [ITEM, Large(sku="a")])
    assert there_and_back(takes_items, [Same(sku="a")]) == [Item(sku="a")]
    large = Large(sku="a", litres=2)
    assert encode_result([large], limit=MIB, returns=list[Item])[0] is None
    assert encode_result([large], limit=MIB, returns=list[Large])[1] is None


class Key(BaseModel):
    model_config = ConfigDict(frozen=True)

    secret: SecretStr


class Known(TypedDict):
    item: Item


@dataclass
class Base:
    item: Item


@dataclass
class Sub(Base):
    more: int = 1


class Short(msgspec.Struct, omit_defaults=True, rename="camel"):
    the_item: Item | None = None
    the_bag: Any = None


def takes_keys(keys: set[Key]) -> Any:
    return keys


def takes_known(known: Known, base: Base, short: Short) -> Any:
    return known, base, short


def test_models_are_found_in_whatever_holds_them() -> None:
    key = Key(secret=SecretStr("x"))
    for function, value in ((takes_keys, {key}), (takes_any, {key}), (takes_any, {1: [(key,)]})):
        with pytest.raises(BadArguments, match="would not arrive as it is"):
            there_and_back(function, value)
    with pytest.raises(BadArguments, match=r"Key\.secret would not arrive as it is"):
        there_and_back(takes_any, Short(the_bag=key))


def test_what_annotations_leave_out_around_a_model_is_meant() -> None:
    known: Any = {"item": ITEM, "more": 1}
    short = Short(the_item=ITEM)
    assert there_and_back(takes_known, known, Sub(ITEM), short) == (
        {"item": ITEM},
        Base(ITEM),
        short,
    )
    assert there_and_back(takes_any, [short, Sub(ITEM)]) == [
        {"theItem": {"sku": "b", "count": 1}},
        {"item": {"sku": "b", "count": 1}, "more": 1},
    ]


def test_what_models_write_as_json_writes_it_is_not_refused() -> None:
    bag = Bag(
        any=(1, NOON, {"x": [ITEM]}),
        tags={"a", "b", "c"},
        items=(ITEM,),
        more={"y": None},  # type: ignore[call-arg]
    )
    bag._seen = 5
    assert there_and_back(takes_any, bag)["any"] == [
        1,
        "2030-01-01T12:00:00Z",
        {"x": [{"sku": "b", "count": 1}]},
    ]
    assert encode_result({"bag": bag}, limit=MIB)[1] is None


async def test_a_result_that_would_lose_something_is_not_kept(app: App) -> None:
    @app.task
    async def login() -> Login:
        return Login(user="ann", password=SecretStr("x"))

    @app.task
    async def items() -> list[Item]:
        return [Large(sku="a")]

    async with app.worker():
        with pytest.raises(ResultError, match=r"was not kept: Login\.password would not arrive"):
            await (await login.enqueue()).result(timeout=10)
        with pytest.raises(ResultError, match=r"was not kept: Large\.litres would be lost"):
            await (await items.enqueue()).result(timeout=10)


def test_a_class_that_only_models_have_as_a_base_is_no_annotation() -> None:
    def takes(it: BaseModel) -> None: ...

    with pytest.raises(BadConfig, match="BaseModel itself has no fields; name a model"):
        Arguments("takes", takes)


def test_what_a_validator_raises_is_the_cause_of_the_refusal() -> None:
    def moody(it: Moody) -> None: ...

    with pytest.raises(BadArguments, match=r"moody\(\): .*RuntimeError: bad luck") as refused:
        Arguments("moody", moody).encode(({"a": 13},), {}, limit=MIB)
    assert isinstance(refused.value.__cause__, RuntimeError)


class Moody(BaseModel):
    a: float | None

    @field_validator("a")
    @classmethod
    def fails(cls, value: float | None) -> float | None:
        if value == 13:
            raise RuntimeError("bad luck")
        return value


def test_a_model_has_no_number_that_json_lacks() -> None:
    def moody(it: Moody) -> None: ...

    with pytest.raises(BadArguments, match="JSON has no NaN and no infinity"):
        Arguments("moody", moody).encode((Moody(a=float("nan")),), {}, limit=MIB)
    assert encode_result(Moody(a=float("inf")), limit=MIB)[0] is None


def test_a_validator_that_breaks_hides_no_job() -> None:
    def moody(it: Moody) -> None: ...

    assert Arguments("moody", moody).by_name('{"it":{"a":13}}') == {"it": {"a": 13}}
    assert decode_result('{"a":13}', Moody) == {"a": 13}


def test_a_class_that_is_no_model_is_still_refused() -> None:
    class Other: ...

    def takes(it: Other | None = None) -> None: ...

    takes.__annotations__ = {"it": Other}
    with pytest.raises(BadConfig, match=r"Other is not a data type; use .*Pydantic models"):
        Arguments("takes", takes)


def test_pydantic_is_not_imported_by_us() -> None:
    code = """
import asyncio, sys
from tickwheel import App
app = App("memory://")

@app.task
async def add(a: int) -> int:
    return a

async def main():
    async with app.worker():
        assert await (await add.enqueue(1)).result(timeout=10) == 1

asyncio.run(main())
assert "pydantic" not in sys.modules
"""
    src = Path(__file__).parents[2] / "src"
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(src)}
    )
