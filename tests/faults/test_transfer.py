"""`migrate-jobs`: jobs and schedules move between stores, nothing lost, nothing doubled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tickwheel.operate.transfer
from stores import KNOWN, Harness
from tickwheel import App, StoreUnavailable
from tickwheel.checks import NOTE
from tickwheel.cli import main
from tickwheel.clock import StoreClock, SystemClock
from tickwheel.job import Progress, State
from tickwheel.operate.transfer import Transfer
from tickwheel.schedule import Misfire, Overlap, Rule, Schedule
from tickwheel.store import Query, Store
from tickwheel.testing import FaultyStore

PAIRS = [
    ("sqlite", "nats"),
    ("nats", "sqlite"),
    ("memory", "sqlite"),
    ("sqlite", "memory"),
    ("redis", "postgres"),
    ("postgres", "redis"),
]

RULE = Rule(
    cron="0 2 * * *",
    tz="Asia/Taipei",
    task="t",
    payload="{}",
    queue="default",
    priority=1,
    misfire=Misfire.ONE,
    overlap=Overlap.ALLOW,
).encode()


async def transfer(old: Any, new: Any) -> Transfer:
    moving = Transfer(old, new, StoreClock(SystemClock()))
    async for _ in moving.run():
        pass
    return moving


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Where no worker claims, none has to be waited for."""
    if "pair" in request.fixturenames:
        monkeypatch.setattr(tickwheel.operate.transfer, "PAUSE_S", 0)


async def ids(store: Store, state: State | None = None) -> list[str]:
    found, cursor = [], None
    while True:
        page = await store.find(Query(state=state), cursor=cursor, limit=100)
        found += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            return sorted(found)


@pytest.fixture(params=PAIRS, ids="-to-".join)
def pair(request: pytest.FixtureRequest, runner: asyncio.Runner, tmp_path: Path) -> Any:
    """Two open stores."""
    harnesses = []
    for n, name in enumerate(request.param):
        folder = tmp_path / str(n)
        folder.mkdir()
        harnesses.append(KNOWN[name](folder))
        runner.run(harnesses[-1].open())
    yield harnesses
    for harness in harnesses:
        runner.run(harness.close())


async def test_waiting_jobs_and_schedules_move_and_the_rest_stays(pair: list[Harness]) -> None:
    old, new = pair
    await old.claimed(old.job("running"))
    await old.ended(State.DEAD, "dead")
    await old.add(*(old.job(f"later-{n}", delay_ms=3_600_000) for n in range(450)))
    await old.store.put_schedule(Schedule(name="nightly", rule=RULE, next_ms=2_000_000_000_000))
    before = await old.store.get([f"later-{n}" for n in range(450)])
    moved = (await transfer(old.store, new.store)).moved
    assert (moved.jobs, moved.schedules, moved.known) == (450, 1, 0)
    after = await new.store.get([f"later-{n}" for n in range(450)])
    # Their fences are the stores' own business.
    assert [msgspec.structs.replace(job, fence=0) for job in after if job] == [
        msgspec.structs.replace(job, fence=0) for job in before if job
    ]
    assert await ids(old.store) == ["dead", "running"]
    assert await old.store.schedules() == []
    [schedule] = await new.store.schedules()
    assert (schedule.name, schedule.next_ms) == ("nightly", 2_000_000_000_000)


async def test_meta_expiry_and_progress_move_too(pair: list[Harness]) -> None:
    old, new = pair
    tagged = old.job(meta={"customer": "42"}, expires_ms=4_000_000_000_000)
    [held] = await old.claimed(tagged)
    told = msgspec.structs.replace(held, started_ms=old.now, progress=Progress(0.5, "half"))
    extended = await old.extend(told)
    assert extended is not None
    assert await old.settle(old.retry(extended, delay_ms=3_600_000))
    before = await old.get()
    await transfer(old.store, new.store)
    after = await new.get()
    assert (after.meta, after.expires_ms, after.progress) == (
        before.meta,
        before.expires_ms,
        Progress(0.5, "half"),
    )
    query = Query(meta=("customer", "42"))
    assert [job.id for job in (await new.store.find(query)).jobs] == ["job"]
    assert (await old.store.find(query)).jobs == []


async def test_a_move_that_breaks_off_anywhere_is_finished_by_the_next(
    pair: list[Harness],
) -> None:
    old, new = pair
    await old.add(*(old.job(f"{n}", delay_ms=3_600_000) for n in range(30)))
    await old.store.put_schedule(Schedule(name="nightly", rule=RULE, next_ms=2_000_000_000_000))
    for seed in range(40):
        bad = [
            FaultyStore(each.store, lose_requests=0.15, lose_replies=0.15, seed=seed * 2 + n)
            for n, each in enumerate(pair)
        ]
        with contextlib.suppress(StoreUnavailable):
            await transfer(*bad)
            break
    await transfer(old.store, new.store)
    assert await ids(old.store) == []
    assert await old.store.schedules() == []
    assert await ids(new.store) == sorted(f"{n}" for n in range(30))
    assert [each.name for each in await new.store.schedules()] == ["nightly"]
    assert not any(queue.paused for queue in await old.store.queues())


class Breaking:
    """Counts the calls to both stores, and breaks off at one of them: before it, or after it."""

    def __init__(self, at: int, *, acted: bool) -> None:
        self.at, self.acted = at, acted
        self.calls = 0

    def around(self, store: Store) -> Any:
        breaking = self

        class Around:
            def __getattr__(self, name: str) -> Any:
                step = getattr(store, name)

                async def call(*args: Any, **kwargs: Any) -> Any:
                    breaking.calls += 1
                    now = breaking.calls == breaking.at
                    if now and not breaking.acted:
                        raise StoreUnavailable("broken off before")
                    answer = await step(*args, **kwargs)
                    if now:
                        raise StoreUnavailable("broken off after")
                    return answer

                return call

        return Around()


@pytest.mark.parametrize("acted", [False, True], ids=["before", "after"])
async def test_a_move_that_breaks_off_at_any_call_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, acted: bool
) -> None:
    monkeypatch.setattr(tickwheel.operate.transfer, "PAUSE_S", 0)
    expected = sorted(f"{n}" for n in range(5))
    for at in range(1, 100):
        old, new = KNOWN["memory"](tmp_path), KNOWN["memory"](tmp_path)
        await old.open()
        await new.open()
        await old.add(*(old.job(id, delay_ms=3_600_000) for id in expected))
        await old.store.put_schedule(Schedule(name="nightly", rule=RULE, next_ms=2 * 10**12))
        breaking = Breaking(at, acted=acted)
        broke = False
        try:
            await transfer(breaking.around(old.store), breaking.around(new.store))
        except StoreUnavailable:
            broke = True
        await transfer(old.store, new.store)
        assert (await ids(old.store), await ids(new.store)) == ([], expected), f"at call {at}"
        assert [each.name for each in await new.store.schedules()] == ["nightly"]
        assert not any(queue.paused for queue in await old.store.queues())
        await old.close()
        await new.close()
        if not broke:
            return
    raise AssertionError("the move has no end")


async def test_a_schedule_that_can_not_be_read_stays_and_the_rest_moves(
    pair: list[Harness],
) -> None:
    old, new = pair
    await old.add(old.job("a", delay_ms=3_600_000))
    await old.store.put_schedule(Schedule(name="nightly", rule=RULE, next_ms=2_000_000_000_000))
    odd = await old.store.put_schedule(Schedule(name="odd", rule="?", next_ms=2_000_000_000_000))
    plan = await Transfer(old.store, new.store, StoreClock(SystemClock())).plan()
    assert (plan.schedules, plan.unreadable) == (("nightly",), ("odd",))
    moved = (await transfer(old.store, new.store)).moved
    assert (moved.jobs, moved.schedules, moved.unreadable) == (1, 1, 1)
    assert await old.store.schedules() == [odd]
    assert [each.name for each in await new.store.schedules()] == ["nightly"]


async def test_a_schedule_on_its_way_ticks_in_no_store(tmp_path: Path) -> None:
    """A move breaks off halfway with a schedule; workers of the old store let it be."""
    app = App("memory://")
    ran: list[str] = []

    @app.task
    async def note() -> None:
        ran.append("tick")

    new = KNOWN["memory"](tmp_path)
    await new.open()
    async with app:
        await app.schedules.put("s", "note", every="1s")
        store = (await app.client()).store
        breaking = Breaking(2, acted=False)  # its put there
        with pytest.raises(StoreUnavailable):
            await transfer(store, breaking.around(new.store))
        assert [each.moving for each in await app.schedules.list()] == [True]
        async with app.worker():
            await asyncio.sleep(2.5)
        assert ran == []
        await transfer(store, new.store)
        assert await store.schedules() == []
    [moved] = await new.store.schedules()
    assert moved.next_ms is not None and moved.next_ms < 3 * 10**12
    await new.close()


async def test_a_queue_that_was_paused_stays_paused(pair: list[Harness]) -> None:
    old, new = pair
    await old.add(old.job("a", queue="held up"), old.job("b"))
    await old.store.pause("held up", True)
    await transfer(old.store, new.store)
    assert {queue.name: queue.paused for queue in await old.store.queues()} == {"held up": True}
    assert {queue.name: queue.paused for queue in await new.store.queues()} == {
        "default": False,
        "held up": True,
    }
    assert await ids(new.store) == ["a", "b"]


async def test_what_somebody_cancelled_stays_cancelled(pair: list[Harness]) -> None:
    old, new = pair
    await old.add(*(old.job(f"{n}", delay_ms=3_600_000) for n in range(3)))
    await old.store.cancel(["1"], now_ms=old.now)
    await transfer(old.store, new.store)
    assert await ids(new.store) == ["0", "2"]
    assert await ids(old.store) == ["1"]


async def test_an_id_that_is_there_already_is_left_as_it_is(pair: list[Harness]) -> None:
    old, new = pair
    await old.add(old.job("both", delay_ms=3_600_000, payload='"old"'))
    await new.add(new.job("both", delay_ms=3_600_000, payload='"new"'))
    moved = (await transfer(old.store, new.store)).moved
    assert (moved.jobs, moved.known) == (0, 1)
    assert (await new.get("both")).payload == '"new"'


@pytest.mark.slow
async def test_each_job_runs_once_while_workers_run_on_both(tmp_path: Path) -> None:
    ran: Counter[int] = Counter()
    apps = [App(f"sqlite:///{tmp_path}/{name}.db") for name in ("old", "new")]

    async def count(number: int) -> None:
        ran[number] += 1

    tasks = [app.task(count) for app in apps]
    async with apps[0], apps[1], apps[0].worker(), apps[1].worker():
        jobs = [tasks[0].using(delay=1 + n / 200).job(n) for n in range(600)]
        await apps[0].enqueue_many(jobs)
        stores = [(await app.client()).store for app in apps]
        await asyncio.sleep(0.5)
        await transfer(*stores)
        await asyncio.sleep(0.3)
        await transfer(*stores)
        async with asyncio.timeout(20):
            while len(ran) < 600:
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        assert ran == Counter(range(600))
        both = [{queue.name: queue.done for queue in await app.queues()} for app in apps]
    assert both[0]["default"] + both[1]["default"] == 600
    assert both[1]["default"] > 0


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = (f"sqlite:///{tmp_path}/{name}.db" for name in ("old", "new"))
    app = App(old)

    @app.task
    def greet() -> None: ...

    greet.using(delay="1h", id="a").enqueue_sync()
    app.sync.close()
    assert main(["migrate-jobs", old, new, "--dry-run", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["waiting"] == 1
    assert main(["migrate-jobs", old, new]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["migrate-jobs", old, new, "--yes"]) == 0
    assert capsys.readouterr().out == "moved: 1 job, 0 schedules\n"
    assert main(["jobs", "show", "a", "--store", new]) == 0
    assert main(["jobs", "show", "a", "--store", old]) == 3
    assert main(["migrate-jobs", old, old]) == 2
    assert NOTE not in capsys.readouterr().out
