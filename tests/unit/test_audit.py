"""The audit log: the newest entry first, none lost, old ones pruned as others are written."""

from __future__ import annotations

from typing import Any

import pytest

from tickwheel.client import Client
from tickwheel.errors import BadArguments, StoreUnavailable
from tickwheel.operate import audit as audit_module
from tickwheel.operate.audit import LENGTHS, Audit, Entry
from tickwheel.store import RECORDS_LIMIT
from tickwheel.stores.memory import MemoryStore

START_MS = 1_800_000_000_000
DAY_MS = 86_400_000


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.ns = START_MS * 1_000_000

    def now_ns(self) -> int:
        return self.ns

    def monotonic_ns(self) -> int:
        return self.ns

    def move_ms(self, ms: int) -> None:
        self.ns += ms * 1_000_000


class CountingStore(MemoryStore):
    """Counts pages of records, and fails to page when told to."""

    pages = 0
    down = False

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        if self.down:
            raise StoreUnavailable("down")
        self.pages += 1
        return await super().records(kind, after=after, limit=limit)


class Place:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.store = CountingStore(clock=self.clock)
        self.audit = Audit(Client(self.store, self.clock))

    @property
    def now_ms(self) -> int:
        return self.clock.ns // 1_000_000


@pytest.fixture
def place() -> Place:
    return Place()


def entry(at_ms: int, target: str = "job", **more: Any) -> Entry:
    fields = {"who": "cli:ann", "action": "job.cancel", "source": "::1", "outcome": "ok"} | more
    return Entry(at_ms=at_ms, target=target, **fields)


async def targets(audit: Audit, **where: Any) -> list[str]:
    """Page by page, as a caller does."""
    found: list[str] = []
    page, cursor = await audit.list(**where)
    found += [each.target for each in page]
    while cursor is not None:
        page, cursor = await audit.list(cursor=cursor, **where)
        found += [each.target for each in page]
    return found


async def test_there_is_nothing_at_first(place: Place) -> None:
    await place.audit.write([])
    assert await place.audit.list() == ([], None)
    assert await place.audit.prune(START_MS) == 0


async def test_entries_come_back_as_they_were_the_newest_first(place: Place) -> None:
    entries = [
        entry(START_MS + n, f"{n}", who="1a2b", detail=f"détail {n}", outcome="not-found")
        for n in (0, 1, 9, 10, 99, 100, 123_456)
    ]
    for each in entries:
        await place.audit.write([each])
    assert await place.audit.list() == (entries[::-1], None)


async def test_entries_of_one_call_and_one_millisecond_are_all_kept_the_last_first(
    place: Place,
) -> None:
    await place.audit.write([entry(START_MS, f"{n}") for n in range(20)])
    assert await targets(place.audit) == [f"{n}" for n in reversed(range(20))]


async def test_entries_of_several_writers_in_one_millisecond_are_all_kept(place: Place) -> None:
    for n in range(20):
        await place.audit.write([entry(START_MS, f"{n}")])
    assert sorted(await targets(place.audit), key=int) == [f"{n}" for n in range(20)]


@pytest.mark.parametrize("limit", [1, 3, 10, 11, RECORDS_LIMIT])
async def test_pages_have_every_entry_once(place: Place, limit: int) -> None:
    await place.audit.write([entry(START_MS + n // 2, f"{n}") for n in range(10)])
    assert await targets(place.audit, limit=limit) == [f"{n}" for n in reversed(range(10))]


@pytest.mark.parametrize("limit", [1, 2, 100])
@pytest.mark.parametrize(
    ("after", "before", "found"),
    [
        (None, None, "9876543210"),
        (3, None, "9876543"),
        (None, 3, "210"),
        (3, 6, "543"),
        (3, 3, ""),
        (20, None, ""),
        (None, -1, ""),
        (9, None, "9"),
        (None, 1, "0"),
    ],
)
async def test_entries_of_a_time_are_found(
    place: Place, after: int | None, before: int | None, found: str, limit: int
) -> None:
    await place.audit.write([entry(START_MS + n, f"{n}") for n in range(10)])
    where = {
        "after_ms": None if after is None else START_MS + after,
        "before_ms": None if before is None else START_MS + before,
    }
    assert "".join(await targets(place.audit, limit=limit, **where)) == found


@pytest.mark.parametrize("cursor", ["", "x", "1", "*", "0" * 15, "\0"])
async def test_what_is_not_a_cursor_is_refused(place: Place, cursor: str) -> None:
    with pytest.raises(BadArguments, match="not a cursor"):
        await place.audit.list(cursor=cursor)


@pytest.mark.parametrize("limit", [0, RECORDS_LIMIT + 1])
async def test_a_page_is_bounded(place: Place, limit: int) -> None:
    with pytest.raises(BadArguments, match="limit"):
        await place.audit.list(limit=limit)


async def test_long_and_broken_fields_are_cut_and_kept(place: Place) -> None:
    await place.audit.write(
        [entry(START_MS, **{name: f"a\ud800\0{'é' * 100_000}" for name in LENGTHS})]
    )
    [found], _ = await place.audit.list()
    for name, length in LENGTHS.items():
        text = getattr(found, name)
        assert len(text) == length and text.startswith("a?\0é") and text.endswith("é…")


async def test_a_time_that_no_calendar_has_is_kept_as_the_latest(place: Place) -> None:
    await place.audit.write([entry(10**18, "far"), entry(START_MS, "now")])
    assert await targets(place.audit) == ["far", "now"]


async def test_an_entry_that_can_not_be_read_does_not_hide_the_others(place: Place) -> None:
    await place.audit.write([entry(START_MS, "a"), entry(START_MS + 1, "b")])
    [(name, _), _] = await place.store.records("audit")
    await place.store.put_records("audit", {name: "?"})
    assert await targets(place.audit) == ["a"]
    assert await targets(place.audit, limit=1) == ["a"]


# --- How long entries are kept


async def test_a_prune_deletes_old_entries_and_only_these(place: Place) -> None:
    await place.audit.write([entry(START_MS + n, f"{n}") for n in range(10)])
    assert await place.audit.prune(START_MS + 4) == 4
    assert await targets(place.audit) == list("987654")
    assert await place.audit.prune(START_MS + 4) == 0


async def test_a_prune_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "PRUNED", 4)
    await place.audit.write([entry(START_MS + n) for n in range(10)])
    assert [await place.audit.prune(START_MS + 100) for _ in range(4)] == [4, 4, 2, 0]


async def test_writes_prune_what_is_older_than_the_retention(place: Place) -> None:
    await place.audit.write([entry(place.now_ms, "old")])
    place.clock.move_ms(60 * DAY_MS)
    await place.audit.write([entry(place.now_ms, "later")])
    assert await targets(place.audit) == ["later", "old"]
    place.clock.move_ms(30 * DAY_MS + 1)
    await place.audit.write([entry(place.now_ms, "new")])
    assert await targets(place.audit) == ["new", "later"]


async def test_the_retention_is_a_setting(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKWHEEL_AUDIT_RETENTION", "1d")
    audit = Audit(Client(place.store, place.clock))
    await audit.write([entry(place.now_ms, "old")])
    place.clock.move_ms(DAY_MS + 1)
    await audit.write([entry(place.now_ms, "new")])
    assert await targets(audit) == ["new"]


async def test_writes_prune_rarely_unless_much_is_old(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "PRUNED", 4)
    for _ in range(50):
        await place.audit.write([entry(place.now_ms)])
    assert place.store.pages == 1
    place.clock.move_ms(91 * DAY_MS)
    for _ in range(20):
        await place.audit.write([entry(place.now_ms, "new")])
    assert place.store.pages == 1 + 13
    assert await targets(place.audit) == ["new"] * 20


async def test_a_write_succeeds_although_nothing_can_be_pruned(place: Place) -> None:
    place.store.down = True
    await place.audit.write([entry(START_MS)])
    place.store.down = False
    assert await targets(place.audit) == ["job"]
