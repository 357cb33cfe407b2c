"""API keys: what they allow, how they are checked, and how soon a revoked one stops."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tickwheel.client import Client
from tickwheel.duration import moment
from tickwheel.errors import BadArguments, BadConfig, BadTime, StoreUnavailable, UsageError
from tickwheel.limit import Rate, parse_rate
from tickwheel.masking import scrubbed
from tickwheel.operate import keys as keys_module, remembered
from tickwheel.operate.audit import Entry
from tickwheel.operate.keys import Key, Keys, Scope, id_of
from tickwheel.stores.memory import MemoryStore

START_MS = 1_800_000_000_000


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.ns = START_MS * 1_000_000

    def now_ns(self) -> int:
        return self.ns

    def monotonic_ns(self) -> int:
        return self.ns

    def move(self, seconds: float) -> None:
        self.ns += int(seconds * 1_000_000_000)


class CountingStore(MemoryStore):
    """Counts reads of records, and fails when told to."""

    reads = 0
    down = False

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        if self.down:
            raise StoreUnavailable("down")
        self.reads += 1
        return await super().get_records(kind, names)


class Place:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.store = CountingStore(clock=self.clock)
        self.client = Client(self.store, self.clock)
        self.keys = Keys(self.client)


@pytest.fixture
def place() -> Place:
    return Place()


def key(*scopes: Scope, **more: Any) -> Key:
    return Key(id="1", name="k", scopes=scopes, created_ms=0, **more)


# --- What a key allows


@pytest.mark.parametrize(
    ("scope", "allows"),
    [
        (Scope.ENQUEUE, {Scope.ENQUEUE}),
        (Scope.READ, {Scope.READ}),
        (Scope.OPERATE, {Scope.OPERATE, Scope.READ}),
        (Scope.ADMIN, set(Scope)),
    ],
)
def test_a_scope_includes_these(scope: Scope, allows: set[Scope]) -> None:
    assert {each for each in Scope if key(scope).may(each)} == allows


def test_scopes_add_up_and_none_allow_nothing() -> None:
    both = key(Scope.ENQUEUE, Scope.READ)
    assert {each for each in Scope if both.may(each)} == {Scope.ENQUEUE, Scope.READ}
    assert not any(key().may(each) for each in Scope)


@pytest.mark.parametrize(
    ("patterns", "name", "allowed"),
    [
        ((), "mail", True),
        (("mail",), "mail", True),
        (("mail",), "mail.send", False),
        (("mail",), "Mail", False),
        (("mail.*",), "mail.send", True),
        (("mail.*",), "mail", False),
        (("mail.*",), "email.send", False),
        (("*.send",), "mail.send", True),
        (("bill", "mail*"), "mailing", True),
        (("m.il",), "mail", False),
        (("*",), "anything", True),
        (("mail",), None, True),
    ],
)
def test_queues_and_tasks_are_matched_by_patterns(
    patterns: tuple[str, ...], name: str | None, allowed: bool
) -> None:
    assert key(Scope.READ, queues=patterns).may(Scope.READ, queue=name) is allowed
    assert key(Scope.READ, tasks=patterns).may(Scope.READ, task=name) is allowed
    both = key(Scope.READ, queues=patterns, tasks=("other",))
    assert not both.may(Scope.READ, queue=name, task="task")
    assert not key(Scope.READ, queues=patterns).may(Scope.ENQUEUE, queue=name)


# --- Create, check, list, revoke


async def test_a_key_is_created_and_checked(place: Place) -> None:
    assert not await place.keys.any()
    made, text = await place.keys.create(
        "ci", ["read", Scope.ENQUEUE], queues=["mail"], tasks=["mail.*"], rate="100/s"
    )
    assert text.startswith(f"tw_{made.id}_")
    assert made == Key(
        id=made.id,
        name="ci",
        scopes=(Scope.ENQUEUE, Scope.READ),
        queues=("mail",),
        tasks=("mail.*",),
        created_ms=START_MS,
        expires_ms=None,
        rate="100/s",
    )
    assert await place.keys.check(text) == made
    assert await place.keys.list() == [made]
    assert await place.keys.any()
    assert id_of(text) == id_of(made.id) == made.id


async def test_only_a_hash_of_the_secret_is_stored(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    secret = text.removeprefix(f"tw_{made.id}_")
    assert len(bytes.fromhex(secret)) * 8 == 256
    [(name, stored)] = await place.store.records("key")
    assert name == made.id and secret not in stored
    assert msgspec.json.decode(stored)["sha256"] == hashlib.sha256(secret.encode()).hexdigest()


async def test_no_two_keys_are_alike(place: Place) -> None:
    texts = {(await place.keys.create("same", [Scope.READ]))[1] for _ in range(20)}
    assert len(texts) == len(await place.keys.list()) == 20


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "tw_", "tw__", "tw_0_0", "x", "Bearer x", "tw_é_é", "\0", "\ud800"),
        "tw_" + "0" * 16 + "_" + "0" * 64,
        "tw_" + "g" * 16 + "_" + "0" * 64,
        "tw_" + "0" * 16 + "_" + "0" * 100_000,
    ],
)
async def test_what_is_not_a_key_lets_nobody_in(place: Place, wrong: str) -> None:
    await place.keys.create("ci", [Scope.READ])
    assert await place.keys.check(wrong) is None


async def test_the_id_of_a_key_with_another_secret_lets_nobody_in(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    _, other = await place.keys.create("other", [Scope.ADMIN])
    mixed = f"tw_{made.id}_{other.rpartition('_')[2]}"
    for wrong in (mixed, text[:-1], text + "0", text.upper(), f" {text}", text + "\n"):
        assert await place.keys.check(wrong) is None
    assert await place.keys.check(text) == made


async def test_a_revoked_key_stops_here_at_once_and_elsewhere_within_two_seconds(
    place: Place,
) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    elsewhere = Keys(place.client)
    assert await elsewhere.check(text) == await place.keys.check(text) == made
    assert await place.keys.revoke(made.id)
    assert await place.keys.check(text) is None
    place.clock.move(2)
    assert await elsewhere.check(text) is None
    assert not await place.keys.revoke(made.id)
    assert not await place.keys.any()


async def test_an_expired_key_stops_at_its_time_although_it_was_just_read(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ], expires="1s")
    assert made.expires_ms == START_MS + 1000
    place.clock.move(0.999)
    assert await place.keys.check(text) == made
    place.clock.move(0.001)
    assert await place.keys.check(text) is None
    assert await place.keys.list() == [made]


async def test_a_key_may_expire_at_a_date(place: Place) -> None:
    at = moment(START_MS) + timedelta(days=30)
    made, _ = await place.keys.create("ci", [Scope.READ], expires=at)
    assert made.expires_ms == START_MS + 30 * 86_400_000


async def test_many_checks_ask_the_store_once_in_a_while(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    for _ in range(100):
        assert await place.keys.check(text) == made
    assert place.store.reads == 1
    place.clock.move(2)
    found = await asyncio.gather(*(place.keys.check(text) for _ in range(100)))
    assert found == [made] * 100
    assert place.store.reads <= 3


async def test_unknown_keys_are_remembered_too_and_not_too_many(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "CACHED", 10)
    unknown = [f"tw_{n:016x}_{n:064x}" for n in range(50)]
    for text in unknown:
        assert await place.keys.check(text) is None
    assert len(place.keys._records._seen) == 10
    asked = place.store.reads
    for text in unknown[-10:]:
        assert await place.keys.check(text) is None
    assert place.store.reads == asked


async def test_a_store_that_is_down_is_told_to_the_caller(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    place.store.down = True
    with pytest.raises(StoreUnavailable):
        await place.keys.check(text)
    place.store.down = False
    assert await place.keys.check(text) == made


async def test_keys_are_listed_by_age_page_after_page(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "RECORDS_LIMIT", 3)
    made = []
    for n in range(10):
        made.append((await place.keys.create(f"k{n}", [Scope.READ]))[0])
        place.clock.move(1)
    assert await place.keys.list() == made


async def test_there_are_not_too_many_keys(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "KEYS_LIMIT", 2)
    for name in ("a", "b"):
        await place.keys.create(name, [Scope.READ])
    with pytest.raises(UsageError, match="revoke"):
        await place.keys.create("c", [Scope.READ])


async def test_a_scope_of_a_later_release_grants_nothing_here(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    [stored] = await place.store.get_records("key", [made.id])
    later = msgspec.json.decode(stored or "") | {"scopes": ["read", "fly"], "moon": "full"}
    await place.store.put_records("key", {made.id: msgspec.json.encode(later).decode()})
    assert await place.keys.check(text) == made


async def test_a_key_that_can_not_be_read_lets_nobody_in_and_can_be_revoked(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.ADMIN])
    await place.store.put_records("key", {made.id: "{}"})
    assert await place.keys.check(text) is None
    assert await place.keys.list() == []
    assert await place.keys.revoke(made.id)


# --- Mistakes


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name": ""}, BadArguments, "1 to 128"),
        ({"name": "x" * 129}, BadArguments, "1 to 128"),
        ({"name": "a\nb"}, BadArguments, "printable"),
        ({"scopes": []}, BadArguments, "needs a scope"),
        ({"scopes": ["write"]}, BadArguments, "enqueue, read, operate, admin"),
        ({"queues": ["a b"]}, BadArguments, "queues"),
        ({"tasks": [""]}, BadArguments, "tasks"),
        ({"tasks": ["t"] * 101}, BadArguments, "101 patterns"),
        ({"expires": 0}, BadArguments, "future"),
        ({"expires": "soon"}, BadTime, "not a duration"),
        ({"expires": datetime(2020, 1, 1, tzinfo=UTC)}, BadArguments, "future"),
        ({"expires": datetime(2030, 1, 1)}, BadTime, "time zone"),  # noqa: DTZ001
        ({"rate": "fast"}, BadConfig, "100/s"),
        ({"scopes": [Scope.ADMIN], "queues": ["mail"]}, BadConfig, "admin"),
        ({"scopes": [Scope.ADMIN, Scope.READ], "tasks": ["mail"]}, BadConfig, "admin"),
    ],
)
async def test_a_mistake_is_refused_and_nothing_is_stored(
    place: Place, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    given = {"name": "ci", "scopes": [Scope.READ]} | arguments
    with pytest.raises(error, match=words):
        await place.keys.create(**given)
    assert not await place.keys.any()


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100/s", Rate(100, 1000, 100)),
        ("1/m", Rate(1, 60_000, 1)),
        ("5/30s", Rate(5, 30_000, 5)),
        ("1000/1h30m", Rate(1000, 5_400_000, 1000)),
    ],
)
def test_a_rate_is_read_as_people_write_it(text: str, rate: Rate) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "text", ["", "100", "/s", "0/s", "-1/s", "1/0s", "1/x", "1.5/s", "1 / s", "1/s/s", "9" * 30]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="is not a rate"):
        parse_rate(text)


AROUND = ("{}", " {}\n", "'{}'", '"{}",', "Bearer {}", "'Bearer {}'", "{}x", "x{}", "{}, {}")


@pytest.mark.parametrize("around", AROUND)
async def test_a_key_is_named_by_its_text_whatever_was_copied_around_it(
    place: Place, around: str
) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    assert id_of(around.replace("{}", text)) == made.id
    assert id_of("Bearer 'x',") == "x" and id_of(f' "{made.id}",\n') == made.id


@pytest.mark.parametrize(
    "around", [*AROUND, "{}".upper(), "of {} it", "a={};b", "('{}')", "_{}_", "%{}%"]
)
async def test_no_secret_is_in_an_entry_of_the_audit_log(place: Place, around: str) -> None:
    _, text = await place.keys.create("ci", [Scope.READ])
    id, secret = text.split("_")[1:]
    broken, mistyped = f"{text[:40]} {text[40:]}", f"tw_{id[1:]}_{secret}"
    for given in (text, text.upper(), text[:-40], broken, mistyped):
        said = around.replace("{}", given)
        entry = Entry(
            at_ms=1, who="a", action="b", target=said, source="c", outcome="ok", detail=said
        )
        for shown in (entry.target, entry.detail, repr(entry)):
            assert secret[:8] not in shown.lower() and secret[-8:] not in shown.lower()
            assert id[1:] in shown.lower()


async def test_the_text_of_a_key_is_never_shown(place: Place) -> None:
    made, text = await place.keys.create("ci", [Scope.READ])
    secret = text.rpartition("_")[2]
    shown = scrubbed(f"refused: Authorization: Bearer {text}.")
    assert secret not in shown and made.id in shown
