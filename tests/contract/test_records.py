"""Small named texts that a store keeps beside jobs and schedules."""

from __future__ import annotations

import asyncio

import pytest

from stores import Harness
from tickwheel.checks import NAME_LIMIT, RECORD_BYTES, checked_records
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.errors import BadArguments, BadConfig
from tickwheel.store import RECORDS_LIMIT, Store

# Names that a careless store would split, fold, number or sort in another order.
NAMES = [
    *("a", "A", "b", "B", "a.b", "a-b", "a_b", "a:b", "a.b.c", ".", "..", "-", ":", "_"),
    *("1", "01", "10", "2", "1e3", "null", "0x1", "longer-than-eight", "longer-than-9"),
    *("longer-t", "longer-", "x" * NAME_LIMIT, "x" * (NAME_LIMIT - 1)),
]


async def all_of(store: Store, kind: str, *, limit: int) -> list[tuple[str, str]]:
    """Page by page, as a caller does."""
    found: list[tuple[str, str]] = []
    page = await store.records(kind, limit=limit)
    while page:
        found += page
        assert len(page) <= limit
        if len(page) < limit:
            break
        page = await store.records(kind, after=page[-1][0], limit=limit)
    return found


async def test_there_are_none_at_first(h: Harness) -> None:
    assert await h.store.records("key") == []
    assert await h.store.get_records("key", ["a"]) == [None]
    assert await h.store.delete_records("key", ["a"]) == [False]


async def test_no_names_and_no_records_are_fine(h: Harness) -> None:
    await h.store.put_records("key", {})
    assert await h.store.get_records("key", []) == []
    assert await h.store.delete_records("key", []) == []
    assert await h.store.records("key") == []


async def test_records_are_kept_by_kind_and_name(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1", "b": "2"})
    await h.store.put_records("audit", {"a": "3"})
    assert await h.store.records("key") == [("a", "1"), ("b", "2")]
    assert await h.store.records("audit") == [("a", "3")]
    assert await h.store.records("ke") == []
    assert await h.store.get_records("audit", ["b", "a"]) == [None, "3"]


async def test_a_put_replaces_the_record_of_the_same_name_only(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1", "b": "2"})
    await h.store.put_records("key", {"a": "new", "c": "3"})
    assert await h.store.records("key") == [("a", "new"), ("b", "2"), ("c", "3")]


async def test_repeating_a_put_changes_nothing_more(h: Harness) -> None:
    for _ in range(2):
        await h.store.put_records("key", {"a": "1"})
        assert await h.store.records("key") == [("a", "1")]


async def test_answers_come_in_the_order_of_the_names(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1", "b": "2"})
    assert await h.store.get_records("key", ["b", "x", "a", "b"]) == ["2", None, "1", "2"]


async def test_a_deleted_record_is_gone_and_can_be_put_again(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1", "b": "2", "c": "3"})
    assert await h.store.delete_records("key", ["c", "x", "a"]) == [True, False, True]
    assert await h.store.records("key") == [("b", "2")]
    assert await h.store.get_records("key", ["a", "b"]) == [None, "2"]
    assert await h.store.delete_records("key", ["a", "c"]) == [False, False]
    await h.store.put_records("key", {"a": "new"})
    assert await h.store.records("key") == [("a", "new"), ("b", "2")]


async def test_a_name_that_comes_twice_is_deleted_once(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1"})
    assert await h.store.delete_records("key", ["a", "a"]) == [True, False]


async def test_a_delete_leaves_other_kinds_alone(h: Harness) -> None:
    await h.store.put_records("key", {"a": "1"})
    await h.store.put_records("audit", {"a": "2"})
    assert await h.store.delete_records("key", ["a"]) == [True]
    assert await h.store.records("audit") == [("a", "2")]


async def test_names_are_ordered_by_code_point(h: Harness) -> None:
    await h.store.put_records("key", {name: f"of {name}" for name in NAMES})
    expected = [(name, f"of {name}") for name in sorted(NAMES)]
    assert await h.store.records("key") == expected
    for limit in (1, 2, 7):
        assert await all_of(h.store, "key", limit=limit) == expected
    assert await h.store.get_records("key", NAMES) == [f"of {name}" for name in NAMES]


@pytest.mark.parametrize("after", ["", "a", "a.", "aa", "longer-t", "longer-than-8", "zzz"])
async def test_a_page_begins_after_any_name_even_one_that_is_not_there(
    h: Harness, after: str
) -> None:
    await h.store.put_records("key", {name: "" for name in NAMES})
    found = await h.store.records("key", after=after)
    assert [name for name, _ in found] == sorted(name for name in NAMES if name > after)


async def test_a_page_is_full_although_records_before_it_were_deleted(h: Harness) -> None:
    names = [f"{n:04}-{'abc'[n % 3]}" for n in range(60)]
    await h.store.put_records("key", dict.fromkeys(names, "text"))
    gone = [name for name in names if not name.endswith("b")]
    assert await h.store.delete_records("key", gone) == [True] * len(gone)
    left = [(name, "text") for name in names if name.endswith("b")]
    assert await h.store.records("key", limit=5) == left[:5]
    assert await all_of(h.store, "key", limit=5) == left


@pytest.mark.parametrize(
    "text", ["", "=", "text", '{"a": "定时任务 🕰️"}', "line\nend\r\n", "a'b\"c\\d%s{}", " "]
)
async def test_a_text_is_opaque(h: Harness, text: str) -> None:
    await h.store.put_records("key", {"a": text})
    assert await h.store.get_records("key", ["a"]) == [text]
    assert await h.store.records("key") == [("a", text)]


async def test_the_largest_page_of_the_largest_records_comes_whole(h: Harness) -> None:
    texts = {f"{n:03}": "é" * (RECORD_BYTES // 2) for n in range(RECORDS_LIMIT + 1)}
    checked_records("key", texts)
    await h.store.put_records("key", texts)
    found = await h.store.records("key", limit=RECORDS_LIMIT)
    assert found == list(texts.items())[:RECORDS_LIMIT]
    assert await h.store.get_records("key", list(texts)) == list(texts.values())
    assert await h.store.delete_records("key", list(texts)) == [True] * len(texts)
    assert await h.store.records("key") == []


async def test_many_small_records_are_paged_through(h: Harness) -> None:
    texts = {f"{n:05}": str(n) for n in range(2_500)}
    await h.store.put_records("key", texts)
    assert await all_of(h.store, "key", limit=RECORDS_LIMIT) == list(texts.items())
    assert await h.store.delete_records("key", list(texts)) == [True] * len(texts)
    assert await all_of(h.store, "key", limit=RECORDS_LIMIT) == []


async def test_another_handle_sees_them_and_so_does_a_later_process(h: Harness) -> None:
    other = await h.new_handle()
    await h.store.put_records("key", {"a": "1", "b": "2"})
    assert await other.records("key") == [("a", "1"), ("b", "2")]
    assert await other.delete_records("key", ["a"]) == [True]
    assert await h.store.records("key") == [("b", "2")]


async def test_many_who_put_at_the_same_time_all_do(h: Harness) -> None:
    handles = [h.store, await h.new_handle()]
    await asyncio.gather(
        *(handles[n % 2].put_records("key", {f"{n:02}": str(n), "same": "same"}) for n in range(20))
    )
    expected = [(f"{n:02}", str(n)) for n in range(20)]
    assert await h.store.records("key") == [*expected, ("same", "same")]


async def test_records_are_not_jobs_or_schedules(h: Harness) -> None:
    await h.store.put_records("job", {"a": "{}"})
    assert await h.store.get(["a"]) == [None]
    assert await h.queues() == []
    assert await h.store.schedules() == []
    assert await h.store.workers(now_ms=h.now) == []
    await h.add(h.job("a"))
    assert await h.claim_ids() == ["a"]


# --- What a client refuses, whatever the store


@pytest.mark.parametrize("kind", ["", "Key", "a b", "key1", "x" * 17])
async def test_a_kind_that_not_every_store_can_keep_is_refused(h: Harness, kind: str) -> None:
    with pytest.raises(BadArguments, match="kind of a record"):
        await Client(h.store, SystemClock()).put_records(kind, {"a": "1"})


@pytest.mark.parametrize("name", ["", "a b", "a*", "é", "a/b", "x" * (NAME_LIMIT + 1)])
async def test_a_name_that_not_every_store_can_keep_is_refused(h: Harness, name: str) -> None:
    with pytest.raises(BadConfig, match="record name"):
        await Client(h.store, SystemClock()).put_records("key", {"a": "1", name: "2"})
    assert await h.store.records("key") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x" * (RECORD_BYTES + 1), "65,537 bytes, and may have 65,536"),
        ("é" * RECORD_BYTES, "131,072 bytes"),
        ("a\0b", "NUL"),
        ("a\ud800", "lone surrogate"),
    ],
)
async def test_a_text_that_not_every_store_can_keep_is_refused(
    h: Harness, text: str, words: str
) -> None:
    with pytest.raises(BadArguments, match=words):
        await Client(h.store, SystemClock()).put_records("key", {"a": "1", "b": text})
    assert await h.store.records("key") == []


@pytest.mark.parametrize("limit", [0, -1, RECORDS_LIMIT + 1])
async def test_a_page_has_a_bounded_number_of_records(h: Harness, limit: int) -> None:
    with pytest.raises(BadArguments, match=f"from 1 to {RECORDS_LIMIT}"):
        await Client(h.store, SystemClock()).records("key", limit=limit)
