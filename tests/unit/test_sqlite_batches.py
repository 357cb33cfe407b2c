"""The embedded store's steps stay short: however many queues, however many jobs, however large."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import CancelOutcome, Job, Priority, Progress, State, dead, done, park, retry
from tickwheel.store import PARKED_LIMIT, Page, Query
from tickwheel.stores import pager
from tickwheel.stores.sqlite import browse, rows, statements
from tickwheel.stores.sqlite.store import SqliteStore

MIB = 1024**2


@pytest.fixture
def store(tmp_path: Path, runner: asyncio.Runner) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "jobs.db", sync="normal")
    runner.run(store.open())
    yield store
    runner.run(store.close())


def job(id: str, *, queue: str = "default", task: str = "t", size: int = 2, **more: Any) -> Job:
    return Job(
        id=id, task=task, payload="x" * size, queue=queue, created_ms=0, **{"due_ms": 0} | more
    )


async def claim(store: SqliteStore, queues: Sequence[str] = ("default",), **more: Any) -> list[Job]:
    options: dict[str, Any] = {
        "worker": "w",
        "limit": 1000,
        "now_ms": 1000,
        "lease_ms": 60_000,
    } | more
    return await store.claim(queues, **options)


# --- Queues


async def test_a_worker_may_serve_a_thousand_queues(store: SqliteStore) -> None:
    queues = [f"queue-{n}" for n in range(1000)]
    jobs = [
        job(f"{n}-{priority.name}", queue=queue, priority=priority, due_ms=1000 - n)
        for n, queue in enumerate(queues)
        for priority in (Priority.LOW, Priority.HIGH)
    ]
    await store.add(jobs)
    await store.pause("queue-999", True)
    got = [each.id for each in await claim(store, queues, limit=3)]
    assert got == ["998-HIGH", "997-HIGH", "996-HIGH"]
    rest = [each.id for _ in range(3) for each in await claim(store, queues)]
    assert len(rest) == 2 * 999 - 3
    assert rest == [f"{n}-HIGH" for n in range(995, -1, -1)] + [
        f"{n}-LOW" for n in range(998, -1, -1)
    ]
    # Those whose lease ran out, too.
    assert len(await claim(store, queues, now_ms=10**6, limit=5)) == 5
    await asyncio.wait_for(store.wait(queues, now_ms=10**6, until_ms=10**6 + 60_000), 5)


async def test_a_claim_that_finds_nothing_waits_for_nobody(
    store: SqliteStore, tmp_path: Path
) -> None:
    other = apsw.Connection(str(tmp_path / "jobs.db"))
    other.execute("begin immediate")
    try:
        async with asyncio.timeout(5):
            assert await claim(store, ["a", "b"]) == []
    finally:
        other.execute("rollback")
        other.close()


@pytest.mark.parametrize(
    "statement", [statements._PICK.jobs, statements._PICK_PARKED.jobs, browse._ANY]
)
async def test_a_claim_reads_no_more_than_it_takes(store: SqliteStore, statement: str) -> None:
    assert store._writer is not None
    where = {"queues": "[]", "tasks": "[]", "now": 0, "ahead": 0, "limit": 1, "bytes": 1}
    plan = store._writer.db.execute(f"explain query plan {statement}", where).fetchall()
    lines = [str(line) for *_, line in plan]
    assert [line for line in lines if "job_waiting" in line]
    assert [line for line in lines if "job_running" in line]
    assert bool([line for line in lines if "job_parked" in line]) == (
        statement != statements._PICK.jobs
    )
    # The first parked job is looked up with nothing to search for.
    first = "SCAN job USING COVERING INDEX job_parked"
    assert [line for line in lines if line.startswith("SCAN job") and line != first] == []


# --- Parked jobs


async def put_and_park(store: SqliteStore, jobs: Sequence[Job]) -> None:
    await store.add(jobs)
    while held := await claim(store, sorted({each.queue for each in jobs})):
        await store.settle([park(each, ended_ms=1000) for each in held], now_ms=1000)


async def steps(store: SqliteStore, call: Awaitable[object]) -> int:
    """How many steps of SQLite's virtual machine a call takes: unlike its time, always as many."""
    assert store._writer is not None
    seen: list[dict[str, Any]] = []
    store._writer.db.trace_v2(apsw.SQLITE_TRACE_PROFILE, seen.append)
    await call
    store._writer.db.trace_v2(0)
    return sum(each["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"] for each in seen)


THOUSAND = frozenset(f"task-{n}" for n in range(1000))


@pytest.mark.parametrize("queues", [1, 1000])
async def test_without_parked_jobs_it_costs_nothing_to_know_many_tasks(
    store: SqliteStore, queues: int
) -> None:
    names = [f"queue-{n}" for n in range(queues)]
    assert await claim(store, names, tasks=THOUSAND) == []
    knows_none = await steps(store, claim(store, names))
    knows_one = await steps(store, claim(store, names, tasks=["t"]))
    knows_many = await steps(store, claim(store, names, tasks=THOUSAND))
    # It looks once whether any job is parked.
    assert knows_none < knows_one == knows_many < knows_none + 20


@pytest.mark.parametrize("tasks", [THOUSAND, ["task-1"], []])
async def test_a_claim_does_not_read_parked_jobs_of_other_tasks(
    store: SqliteStore, tasks: Collection[str]
) -> None:
    def jobs(first: int, last: int) -> list[Job]:
        return [job(f"{n}", task=f"other-{n % 10}") for n in range(first, last)]

    await put_and_park(store, [*jobs(0, 10), job("far", queue="far")])
    assert await claim(store, tasks=tasks) == []
    few = await steps(store, claim(store, tasks=tasks))
    # Many more jobs of the same tasks, and many more tasks of another queue.
    await put_and_park(store, jobs(10, 5000))
    await put_and_park(store, [job(f"far{n}", queue="far", task=f"{n}") for n in range(500)])
    assert await claim(store, tasks=tasks) == []
    assert await steps(store, claim(store, tasks=tasks)) == few


async def test_a_claim_reads_no_more_parked_jobs_than_it_takes(store: SqliteStore) -> None:
    few, many = [job(f"a{n}") for n in range(20)], [job(f"b{n}") for n in range(5000)]
    await put_and_park(store, few)
    taken: list[Job] = []

    async def take() -> None:
        taken.extend(await claim(store, limit=10, tasks=["t"]))

    cost = await steps(store, take())
    await put_and_park(store, many)
    assert await steps(store, take()) < cost * 1.2
    assert [each.id for each in taken] == [f"a{n}" for n in range(20)]


async def test_a_worker_finds_parked_jobs_in_a_thousand_queues(store: SqliteStore) -> None:
    queues = [f"queue-{n:03}" for n in range(1000)]
    await put_and_park(
        store,
        [
            job(f"{task} {queue}", queue=queue, task=task)
            for queue in queues
            for task in ("a", "b", "c")
        ],
    )
    mine = queues[::2]
    found = []
    while got := await claim(store, mine, tasks=["b", "x"]):
        found += [each.id for each in got]
    assert found == [f"b {queue}" for queue in mine]
    # Those of the other queues and tasks are still there: as many as are told at most.
    assert len(await store.parked()) == PARKED_LIMIT


async def test_a_parked_job_waits_for_its_time_if_the_clock_is_set_back(
    store: SqliteStore,
) -> None:
    await put_and_park(store, [job("soon", due_ms=1500)])
    assert await claim(store, now_ms=400, tasks=["t"]) == []
    assert [each.id for each in await claim(store, now_ms=500, tasks=["t"])] == ["soon"]


async def test_parked_tells_the_job_that_is_due_first_whatever_its_priority(
    store: SqliteStore,
) -> None:
    jobs = [job(f"{n}", priority=n % 4, due_ms=(n * 7 + 5) % 11) for n in range(11)]
    await put_and_park(store, jobs)
    [first] = await store.parked()
    assert first.due_ms == 0


@pytest.mark.parametrize("query", [Query(), Query(state=State.WAITING), Query(task="b")])
async def test_parked_jobs_are_on_one_page_each(store: SqliteStore, query: Query) -> None:
    await put_and_park(store, [job(f"p{n}", task="ab"[n % 2], queue=f"{n % 3}") for n in range(20)])
    await store.add([job(f"w{n}", task="ab"[n % 2], queue=f"{n % 3}") for n in range(20)])
    found: list[Job] = []
    cursor = None
    while True:
        page = await store.find(query, cursor=cursor, limit=3)
        found += page.jobs
        cursor = page.cursor
        if cursor is None:
            break
        assert len(found) < 100
    expected = {f"{kind}{n}" for kind in "pw" for n in range(20) if query.task is None or n % 2}
    assert sorted(each.id for each in found) == sorted(expected)
    assert {each.id for each in found if each.parked} == {id for id in expected if id[0] == "p"}


# --- Bytes


async def test_tracebacks_count_among_the_bytes_of_a_batch(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.add([job(f"{n:02}") for n in range(20)])
    held = await claim(store)
    await store.settle(
        [retry(each, due_ms=0, error="no", ended_ms=0, traceback="x" * 1000) for each in held],
        now_ms=1000,
    )
    for module in (statements, rows):
        monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    assert len(await claim(store)) < 10


async def test_meta_and_progress_count_among_the_bytes_of_a_batch(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Progress(0.5, "x" * 1000)
    await store.add(
        [
            msgspec.structs.replace(job(f"{kind}{n:02}"), meta=meta, progress=progress, attempt=1)
            for kind, meta, progress in (("a", {"n": "x" * 1000}, None), ("b", None, told))
            for n in range(20)
        ]
    )
    for module in (statements, rows):
        monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    ids = [f"{kind}{n:02}" for kind in "ab" for n in range(20)]
    for some in (ids[:20], ids[20:]):
        answered = await store._read(browse.get, some)
        assert 0 < len(answered) < 10


async def test_a_claim_hands_out_no_more_than_so_much(store: SqliteStore) -> None:
    await store.add([job(f"{n:02}", size=MIB) for n in range(40)])
    taken = []
    while got := await claim(store):
        assert sum(len(each.payload) for each in got) <= BATCH_BYTES
        taken += [each.id for each in got]
    assert taken == [f"{n:02}" for n in range(40)]


async def test_a_job_that_is_larger_than_a_batch_goes_alone(store: SqliteStore) -> None:
    await store.add([job(str(n), size=BATCH_BYTES + 1, due_ms=n) for n in range(3)])
    assert [job and job.id for job in await store.get(["0", "no", "1", "2"])] == [
        "0", None, "1", "2",
    ]  # fmt: skip
    assert await store.cancel(["2", "no", "2"], now_ms=0) == [
        CancelOutcome.CANCELLED,
        CancelOutcome.UNKNOWN,
        CancelOutcome.TOO_LATE,
    ]
    assert [[each.id for each in await claim(store)] for _ in range(3)] == [["0"], ["1"], []]


async def test_large_jobs_go_through_every_step(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (statements, rows):
        monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    ids = [f"{n:02}" for n in range(35)]
    assert await store.add([job(id, size=1000) for id in ids]) == [True] * 35
    held = [each for _ in range(4) for each in await claim(store)]
    assert [each.id for each in held] == ids
    kept = await store.extend(held, now_ms=1000, lease_ms=60_000)
    assert [each and each.id for each in kept] == ids
    outcomes = [
        dead(each, error="no", started_ms=0, ended_ms=0)
        if each.id < "20"
        else done(each, result="y" * 3000, started_ms=0, ended_ms=0)
        for each in held
    ]
    assert await store.settle(outcomes, now_ms=1000) == [True] * 35
    assert [each and each.id for each in await store.get(ids)] == ids
    assert await store.cancel(ids, now_ms=1000) == [CancelOutcome.TOO_LATE] * 35
    assert await store.rerun(ids[:20], now_ms=1000) == [True] * 20
    assert await store.delete(ids) == [False] * 20 + [True] * 15
    assert [each and each.state for each in await store.get(ids)] == (
        [State.WAITING] * 20 + [None] * 15
    )


@pytest.mark.parametrize("query", [Query(), Query(task="t"), Query(state=State.WAITING)])
async def test_a_page_holds_no_more_than_so_much(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, query: Query
) -> None:
    for module in (statements, pager):
        monkeypatch.setattr(module, "BATCH_BYTES", 10_000)
    ids = [f"{n:02}" for n in range(35)]
    await store.add([job(id, size=1000) for id in ids])
    if query.state is None:
        await claim(store, limit=5)
        await store.cancel(ids[20:], now_ms=0)
    pages: list[Page] = []
    while not pages or pages[-1].cursor is not None:
        pages.append(await store.find(query, cursor=pages[-1].cursor if pages else None))
        assert len(pages) < 20
    assert max(len(page.jobs) for page in pages) < 10
    assert sorted(each.id for page in pages for each in page.jobs) == ids


# --- Turns


@pytest.mark.parametrize("step", ["cancel", "rerun", "delete"])
async def test_other_steps_take_their_turn_in_a_large_one(store: SqliteStore, step: str) -> None:
    ids = [f"{n}" for n in range(5000)]
    await store.add([job(id) for id in ids])
    if step != "cancel":
        await store.cancel(ids, now_ms=0)
    order: list[str] = []

    async def large() -> None:
        answers: list[Any]
        if step == "delete":
            answers = list(await store.delete(ids))
        else:
            answers = list(await getattr(store, step)(ids, now_ms=0))
        assert len(answers) == 5000 and len(set(answers)) == 1
        order.append("large")

    async def small() -> None:
        await store.add([job("small")])
        order.append("small")

    async with asyncio.TaskGroup() as group:
        group.create_task(large())
        group.create_task(small())
    assert order == ["small", "large"]
