"""The embedded store's steps stay short: however many queues, however many jobs, however large."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import Cancelled, Job, Priority, State, dead, done
from tickwheel.store import Page, Query
from tickwheel.stores.sqlite import steps
from tickwheel.stores.sqlite.store import SqliteStore

MIB = 1024**2


@pytest.fixture
def store(tmp_path: Path, runner: asyncio.Runner) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "jobs.db", sync="normal")
    runner.run(store.open())
    yield store
    runner.run(store.close())


def job(id: str, *, queue: str = "default", size: int = 2, **more: Any) -> Job:
    return Job(
        id=id, task="t", payload="x" * size, queue=queue, created_ms=0, **{"due_ms": 0} | more
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


@pytest.mark.parametrize("statement", [steps._PICK, steps._ANY])
async def test_a_claim_reads_no_more_than_it_takes(store: SqliteStore, statement: str) -> None:
    assert store._writer is not None
    where = {"queues": "[]", "now": 0, "ahead": 0, "limit": 1, "bytes": 1}
    plan = store._writer.db.execute(f"explain query plan {statement}", where).fetchall()
    lines = [str(line) for *_, line in plan]
    assert [line for line in lines if "job_waiting" in line]
    assert [line for line in lines if "job_running" in line]
    assert [line for line in lines if line.startswith("SCAN job")] == []


# --- Bytes


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
        Cancelled.CANCELLED,
        Cancelled.UNKNOWN,
        Cancelled.TOO_LATE,
    ]
    assert [[each.id for each in await claim(store)] for _ in range(3)] == [["0"], ["1"], []]


async def test_large_jobs_go_through_every_step(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "BATCH_BYTES", 10_000)
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
    assert await store.cancel(ids, now_ms=1000) == [Cancelled.TOO_LATE] * 35
    assert await store.rerun(ids[:20], now_ms=1000) == [True] * 20
    assert await store.delete(ids) == [False] * 20 + [True] * 15
    assert [each and each.state for each in await store.get(ids)] == (
        [State.WAITING] * 20 + [None] * 15
    )


@pytest.mark.parametrize("query", [Query(), Query(task="t"), Query(state=State.WAITING)])
async def test_a_page_holds_no_more_than_so_much(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, query: Query
) -> None:
    monkeypatch.setattr(steps, "BATCH_BYTES", 10_000)
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
