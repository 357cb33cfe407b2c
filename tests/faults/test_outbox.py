"""The outbox: whatever is committed into it reaches the store or stays where it is."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from postgres_server import BadLine, shared_server
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.errors import BadArguments, StoreError, StoreRefused
from tickwheel.job import Job
from tickwheel.outbox import BATCH_BYTES, TABLE, Outbox
from tickwheel.stores.memory import MemoryStore

# The table as it was made before numbers were given only once.
OLD = f"create table {TABLE} (n integer primary key, job text)"


def job(id: str, payload: str = "{}") -> Job:
    return Job(id=id, task="ship", payload=payload, due_ms=10**14, created_ms=0)


class Place:
    """A user's database with an outbox."""

    def __init__(self, dialect: str, folder: Path) -> None:
        self.dialect, self.file = dialect, folder / "shop.db"
        self.url = f"sqlite:///{self.file}" if dialect == "sqlite" else shared_server().url
        self.outbox = Outbox(self.url)
        if dialect == "postgresql":
            self.execute(f"drop table if exists {TABLE}")

    def execute(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own."""
        if self.dialect == "sqlite":
            with closing(sqlite3.connect(self.file, timeout=30)) as db, db:
                return db.execute(sql, parameters).fetchall()
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(sql.replace("?", "%s"), parameters)
            return cursor.fetchall() if cursor.description else []

    def leave(self, *jobs: Job) -> None:
        statement = self.outbox.adding(jobs, driver="sqlite3")
        self.execute(statement.sql.replace("%(jobs)s", "?"), statement.jobs)

    def left(self) -> int:
        return int(self.execute(f"select count(*) from {TABLE}")[0][0])

    def aside(self) -> list[str]:
        found = self.execute(f"select refused from {TABLE} where refused is not null order by n")
        return [reason for (reason,) in found]


class Picky(MemoryStore):
    """Refuses some jobs."""

    def __init__(self, refuse: Exception, *ids: str) -> None:
        super().__init__()
        self.refuse, self.ids = refuse, ids
        self.batches: list[int] = []

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        self.batches.append(len(jobs))
        if any(job.id in self.ids for job in jobs):
            raise self.refuse
        return await super().add(jobs)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    yield MemoryStore()


async def known(store: MemoryStore, ids: Sequence[str]) -> list[str]:
    return [job.id for job in await store.get(ids) if job is not None]


async def test_meta_and_expiry_reach_the_store(place: Place, store: MemoryStore) -> None:
    await place.outbox.empty(store)
    left = msgspec.structs.replace(
        job("a"), meta={"customer": '4"2', "größe": "\n"}, expires_ms=4_000_000_000_000
    )
    place.leave(left)
    assert await place.outbox.empty(store) == 1
    assert await store.get(["a"]) == [left]


@pytest.mark.parametrize("relays", [2, 3])
async def test_several_relays_lose_nothing_that_is_committed_meanwhile(
    place: Place, store: MemoryStore, relays: int
) -> None:
    await place.outbox.empty(store)
    ids = [f"job-{n}" for n in range(3000)]
    committed = asyncio.Event()

    def commit() -> None:
        for start in range(0, len(ids), 3):
            place.leave(*(job(id) for id in ids[start : start + 3]))

    async def relay() -> None:
        clock = StoreClock(SystemClock())
        await place.outbox.relay(store, clock, lambda: not committed.is_set())

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for _ in range(relays):
            group.create_task(relay())
        await asyncio.to_thread(commit)
        committed.set()
    await place.outbox.empty(store)
    assert set(ids) - set(await known(store, ids)) == set()
    assert place.left() == 0


async def test_a_number_is_never_given_twice(place: Place, store: MemoryStore) -> None:
    await place.outbox.empty(store)
    seen = []
    for n in range(3):
        place.leave(job(f"job-{n}"))
        seen += place.execute(f"select n from {TABLE}")
        await place.outbox.empty(store)
    assert seen == sorted(set(seen))
    assert len(seen) == 3


async def test_relays_that_start_together_make_one_table(place: Place) -> None:
    assert await asyncio.gather(*(place.outbox.aside() for _ in range(8))) == [0] * 8


async def test_a_table_of_an_older_release_is_taken_along(
    tmp_path: Path, store: MemoryStore
) -> None:
    place = Place("sqlite", tmp_path)
    place.execute(OLD)
    place.leave(*(job(f"job-{n}") for n in range(5)))
    place.execute(f"delete from {TABLE} where n > 3")
    # Several relays start at the same moment.
    assert await asyncio.gather(*(place.outbox.aside() for _ in range(4))) == [0] * 4
    place.leave(job("new"))
    # A relay of the older release deletes what it has read: nothing that is there now.
    place.execute(f"delete from {TABLE} where n <= 500")
    assert await place.outbox.empty(store) == 4
    assert await known(store, ["job-0", "job-1", "job-2", "new"]) == [
        "job-0", "job-1", "job-2", "new",
    ]  # fmt: skip


async def test_a_table_without_reasons_is_given_them(store: MemoryStore) -> None:
    place = Place("postgresql", Path())
    place.execute(
        f"create table {TABLE} "
        "(n bigint generated always as identity primary key, job text not null)"
    )
    place.leave(job("one"))
    place.execute(f"insert into {TABLE} (job) values ('nonsense')")
    assert await place.outbox.empty(store) == 1
    assert len(place.aside()) == 1


NONSENSE = ["nonsense", "", "{}", "[]", '{"id": 7}']
# Jobs in form, which no store can keep, or none can show.
ODD: list[dict[str, Any]] = [
    {"id": ""},
    {"id": "x" * 100_000},
    {"queue": ""},
    {"queue": "q" * 100_000},
    {"task": "\0"},
    {"priority": 9},
    {"priority": -1},
    {"due_ms": 10**18},
    {"due_ms": -1},
]


async def test_what_is_no_job_stays_and_holds_up_nothing(
    place: Place, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    await place.outbox.empty(store)
    for text in NONSENSE:
        place.execute(f"insert into {TABLE} (job) values (?)", text)
    for changes in ODD:
        text = msgspec.json.encode(msgspec.structs.replace(job("odd"), **changes)).decode()
        place.execute(f"insert into {TABLE} (job) values (?)", text)
    bad = len(NONSENSE) + len(ODD)
    if place.dialect == "sqlite":
        place.execute(f"insert into {TABLE} (job) values (null)")
        place.execute(f"insert into {TABLE} (job) values (cast(x'ff22' as text))")
        bad += 2
    place.leave(job("good"))
    with caplog.at_level(logging.ERROR, "tickwheel"):
        assert await place.outbox.empty(store) == 1
        assert await place.outbox.empty(store) == 0
    assert await known(store, ["good"]) == ["good"]
    assert [reason[:9] for reason in place.aside()] == ["not a job"] * bad
    assert await place.outbox.aside() == place.left() == bad
    assert len(caplog.records) == 1
    assert f"set aside {bad} rows" in caplog.text


@pytest.mark.parametrize(
    "error", [BadArguments("too large"), StoreRefused("too big"), StoreError("odd"), KeyError("x")]
)
async def test_jobs_that_are_refused_for_good_hold_up_nothing(
    place: Place, error: Exception
) -> None:
    store = Picky(error, "job-7", "job-33")
    await place.outbox.empty(store)
    ids = [f"job-{n}" for n in range(100)]
    place.leave(*(job(id) for id in ids))
    assert await place.outbox.empty(store) == 98
    assert set(ids) - set(await known(store, ids)) == {"job-7", "job-33"}
    assert place.aside() == [f"{type(error).__name__}: {error}"] * 2
    # Its reason taken away, a row is tried again.
    store.ids = ()
    place.execute(f"update {TABLE} set refused = null")
    assert await place.outbox.empty(store) == 2
    assert place.left() == 0


async def test_a_relay_goes_on_after_a_job_that_is_refused(place: Place) -> None:
    store = Picky(BadArguments("too large"), "bad")
    await place.outbox.empty(store)
    place.leave(job("bad"))
    going = True
    clock = StoreClock(SystemClock())
    relay = asyncio.create_task(place.outbox.relay(store, clock, lambda: going))
    try:
        async with asyncio.timeout(10):
            while not place.aside():
                await asyncio.sleep(0.01)
            place.leave(job("good"))
            while not await known(store, ["good"]):
                await asyncio.sleep(0.01)
    finally:
        going = False
        await relay


async def test_a_row_that_is_nested_too_deeply_holds_up_nothing(
    place: Place, store: MemoryStore
) -> None:
    await place.outbox.empty(store)
    for deep in (1_000, 100_000):
        place.execute(
            f"insert into {TABLE} (job) values (?)", '{"x":' + "[" * deep + "]" * deep + "}"
        )
    place.leave(job("good"))
    await place.outbox.empty(store)
    assert await known(store, ["good"]) == ["good"]
    assert len(place.aside()) == 2


async def test_a_relay_whose_line_goes_dead_takes_another(
    tmp_path: Path, store: MemoryStore
) -> None:
    place = Place("postgresql", tmp_path)
    await place.outbox.empty(store)
    going = True
    async with BadLine(shared_server()) as line:
        outbox = Outbox(f"{line.url}?timeout=1s")
        relay = asyncio.create_task(outbox.relay(store, StoreClock(SystemClock()), lambda: going))
        try:
            async with asyncio.timeout(30):
                place.leave(job("before"))
                while not await known(store, ["before"]):
                    await asyncio.sleep(0.01)
                line.stall()
                place.leave(job("after"))
                while not await known(store, ["after"]):
                    await asyncio.sleep(0.01)
        finally:
            going = False
            await relay


async def test_a_store_that_takes_nothing_sets_nothing_aside(place: Place) -> None:
    store = Picky(StoreError("replaced"), "one", "two")
    await place.outbox.empty(store)
    place.leave(job("one"), job("two"))
    with pytest.raises(StoreError, match="accepts no job from the outbox: replaced"):
        await place.outbox.empty(store)
    assert (place.left(), place.aside()) == (2, [])


def test_the_command_counts_what_is_set_aside(tmp_path: Path) -> None:
    place = Place("sqlite", tmp_path)
    (tmp_path / "shop.py").write_text(
        f"from tickwheel import App\napp = App('sqlite:///jobs.db', outbox={place.url!r})\n"
    )
    command = [sys.executable, "-m", "tickwheel", "outbox", "--once", "shop:app"]

    def said() -> str:
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return ran.stderr

    first = said()
    assert "moved to the store: 0 jobs" in first and "set aside" not in first
    place.execute(f"insert into {TABLE} (job) values ('nonsense')")
    second = said()
    assert "moved to the store: 0 jobs" in second and "set aside: 1 row," in second
    assert f"select n, refused, job from {TABLE} where refused is not null" in second


async def test_large_jobs_go_a_few_at_a_time(place: Place) -> None:
    store = Picky(KeyError())
    await place.outbox.empty(store)
    size = BATCH_BYTES // 4
    ids = [f"job-{n}" for n in range(9)]
    for id in ids:
        place.leave(job(id, "x" * size))
    place.leave(job("huge", "x" * (BATCH_BYTES + 1)))
    assert await place.outbox.empty(store) == 10
    assert store.batches == [3, 3, 3, 1]
