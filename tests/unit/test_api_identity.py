"""Identity and moves, as users write them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import apsw
import pytest

from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    BadTime,
    Job,
    MoveOutcome,
    PutOutcome,
    State,
    StoreUnavailable,
)
from tickwheel.testing import FaultyStore, sandbox

ran: list[Any] = []


def new_app(url: str = "memory://") -> App:
    app = App(url)

    @app.task(id=lambda customer, *_: f"sync-{customer}", if_exists="replace")
    async def sync(customer: int, note: str = "") -> None:
        ran.append((customer, note))

    @app.task
    async def plain(n: int) -> int:
        ran.append(n)
        return n

    @app.task(id=lambda day: f"report-{day}", if_exists="renew")
    async def report(day: str) -> None:
        ran.append(day)

    return app


@pytest.fixture(autouse=True)
def forget() -> None:
    ran.clear()


def task(app: App, name: str) -> Any:
    from tickwheel.task import Task

    [full] = [each for each in app.tasks.names if each.rpartition(".")[2] == name]
    return Task(app._access, app.tasks.get(full))


async def test_the_handle_says_what_became_of_the_job() -> None:
    async with new_app() as app:
        plain = task(app, "plain")
        first = await plain.using(id="a", delay="1h").enqueue(1)
        again = await plain.using(id="a", delay="1h").enqueue(2)
        assert (first.answer, first.added) == (PutOutcome.ADDED, True)
        assert (again.answer, again.added) == (PutOutcome.KEPT, False)
        assert repr(again) == "<job a kept>"
        other = await plain.using(id="a", delay="2h", if_exists="replace").enqueue(3)
        assert (other.answer, other.added) == ("replaced", False)
        assert (await other.info()).arguments == {"n": 3}
        kept = await plain.using(id="a", if_exists="renew").enqueue(4)
        assert kept.answer is PutOutcome.KEPT


async def test_a_task_makes_ids_of_its_arguments() -> None:
    async with new_app() as app:
        sync = task(app, "sync")
        first = await sync.using(delay="1h").enqueue(7, "old")
        second = await sync.using(delay="1h").enqueue(7, "new")
        assert (first.id, second.id, second.answer) == ("sync-7", "sync-7", PutOutcome.REPLACED)
        assert (await second.info()).arguments["note"] == "new"
        chosen = await sync.using(id="mine", delay="1h").enqueue(7)
        assert (chosen.id, chosen.answer) == ("mine", PutOutcome.ADDED)
        kept = await sync.using(delay="1h", if_exists="keep").enqueue(7, "later")
        assert kept.answer is PutOutcome.KEPT
        assert sync.job(7).id == "sync-7"


async def test_a_debounced_task_runs_once_with_the_last_arguments() -> None:
    app = new_app()
    async with sandbox(app) as box:
        sync = task(app, "sync")
        for n in range(5):
            await sync.using(delay="10s").enqueue(1, str(n))
            await box.travel("5s")
        assert ran == []
        await box.travel("10s")
        assert ran == [(1, "4")]


async def test_a_renewed_task_runs_again_once_it_has_ended() -> None:
    app = new_app()
    async with sandbox(app) as box:
        report = task(app, "report")
        assert (await report.enqueue("mon")).answer is PutOutcome.ADDED
        assert (await report.enqueue("mon")).answer is PutOutcome.KEPT
        await box.drain()
        assert (await report.enqueue("mon")).answer is PutOutcome.ADDED
        await box.drain()
        assert ran == ["mon", "mon"]


async def test_many_jobs_have_the_policy_of_their_task_or_that_of_the_call() -> None:
    async with new_app() as app:
        plain, sync = task(app, "plain"), task(app, "sync")
        jobs = [
            plain.using(id="a", delay="1h").job(1),
            sync.using(delay="1h").job(1, "x"),
            sync.using(delay="1h").job(1, "y"),
            plain.using(id="a", delay="1h").job(2),
        ]
        answers = [handle.answer for handle in await app.enqueue_many(jobs)]
        assert answers == ["added", "added", "replaced", "kept"]
        again = await app.enqueue_many([plain.using(id="a").job(3)], if_exists="replace")
        assert again[0].answer is PutOutcome.REPLACED


def test_the_same_without_an_event_loop() -> None:
    app = new_app()
    sync = task(app, "sync")
    assert sync.using(delay="1h").enqueue_sync(1, "a").answer is PutOutcome.ADDED
    assert sync.using(delay="1h").enqueue_sync(1, "b").answer is PutOutcome.REPLACED
    [handle] = app.sync.enqueue_many([sync.using(delay="1h").job(1, "c")])
    assert handle.answer is PutOutcome.REPLACED
    assert app.sync.move("sync-1", queue="other") is MoveOutcome.MOVED
    assert app.sync.move(["sync-1", "none"], delay="2h") == ["moved", "unknown"]
    assert app.sync.info("sync-1").queue == "other"
    app.sync.close()


# --- What is refused


async def test_mistakes_are_named_at_the_call(tmp_path: Path) -> None:
    async with new_app() as app:
        plain, sync = task(app, "plain"), task(app, "sync")
        with pytest.raises(BadArguments, match="needs an id"):
            plain.using(if_exists="replace")
        with pytest.raises(BadArguments, match="must be one of keep, renew, replace"):
            plain.using(id="a", if_exists="replce")
        with pytest.raises(BadArguments, match="enqueue_many"):
            plain.using(id="a", if_exists="replace").job(1)
        with pytest.raises(BadArguments, match="its id= raised TypeError"):
            await sync.enqueue(note="x", customer=1, **{})
        with pytest.raises(BadArguments, match="move where"):
            await app.move("a")
        with pytest.raises(BadTime, match="not both"):
            await app.move("a", delay=1, at=datetime.now(UTC))
        with pytest.raises(BadConfig):
            await app.move("a", queue="no such\nname")
    with pytest.raises(BadConfig, match="plain function"):
        App("memory://").task(id="fixed")  # type: ignore[call-overload]


async def test_an_id_that_no_store_can_keep_is_refused() -> None:
    app = App("memory://")

    @app.task(id=lambda n: n)
    async def odd(n: Any) -> None: ...

    async with app:
        for wrong in (7, "", "x" * 500):
            with pytest.raises(BadArguments, match="1 to 200 printable characters"):
                await odd.enqueue(wrong)


async def test_no_job_is_replaced_within_a_transaction(tmp_path: Path) -> None:
    app = new_app(f"sqlite:///{tmp_path}/jobs.db")
    async with app:
        sync, plain = task(app, "sync"), task(app, "plain")
        await plain.enqueue(1)
        with apsw.Connection(str(tmp_path / "jobs.db")) as connection:
            with pytest.raises(BadConfig, match="not possible with connection"):
                await sync.using(connection=connection).enqueue(1)
            with pytest.raises(BadConfig, match="not possible with connection"):
                sync.using(connection=connection).enqueue_sync(1)
            with pytest.raises(BadConfig, match="not possible with connection"):
                await app.enqueue_many([sync.job(1)], connection=connection)
            kept = await sync.using(connection=connection, if_exists="keep").enqueue(1)
        assert kept.added


# --- A bad line


class Counting(FaultyStore):
    """Loses the first replies of a call."""

    lost = 0

    def __getattr__(self, name: str) -> Any:
        step = super().__getattr__(name)
        if name not in ("put", "move"):
            return step

        async def counted(*args: Any, **kwargs: Any) -> Any:
            answer = await step(*args, **kwargs)
            if self.lost:
                self.lost -= 1
                raise StoreUnavailable("the reply was lost")
            return answer

        return counted


@asynccontextmanager
async def on_a_bad_line(lost: int) -> AsyncIterator[tuple[App, Counting]]:
    app = new_app()
    client = await app.client()
    line = Counting(client.store)
    client.store = line  # type: ignore[assignment]
    async with app:
        line.lost = lost
        yield app, line


async def test_a_lost_reply_replaces_no_job_twice() -> None:
    async with on_a_bad_line(2) as (app, line):
        handle = await task(app, "sync").using(delay="1h").enqueue(1, "a")
        assert (handle.answer, line.lost) == (PutOutcome.ADDED, 0)
        line.lost = 1
        assert await handle.move(delay="2h") is MoveOutcome.MOVED
        job: Job = await (await app.client()).get(handle.id)
        assert job.changes is not None and job.changes.count == 2


async def test_a_store_that_stays_away_is_told() -> None:
    async with on_a_bad_line(100) as (app, line):
        with pytest.raises(StoreUnavailable):
            await task(app, "sync").using(delay="1h").enqueue(1, "a")
        line.lost = 0


# --- Move


async def test_a_job_moves_and_its_handle_says_so() -> None:
    async with new_app() as app:
        handle = await task(app, "plain").using(delay="1h").enqueue(1)
        at = datetime.now(UTC) + timedelta(hours=3)
        assert await handle.move(at=at, priority="high", queue="other") is MoveOutcome.MOVED
        info = await handle.info()
        assert (info.queue, info.priority.name.lower()) == ("other", "high")
        assert abs(info.due - at) < timedelta(milliseconds=2)
        await handle.cancel()
        assert await handle.move(delay=0) is MoveOutcome.TOO_LATE
        assert await app.job("none").move(delay=0) is MoveOutcome.UNKNOWN


async def test_a_moved_job_runs_at_its_new_time() -> None:
    app = new_app()
    async with sandbox(app) as box:
        handle = await task(app, "plain").using(delay="1h").enqueue(1)
        await handle.move(delay="10s")
        await box.travel("9s")
        assert ran == []
        await box.travel("1s")
        assert ran == [1]
        assert (await handle.info()).state is State.DONE


async def test_a_move_that_nobody_decides_says_that_it_was_requested() -> None:
    """The worker that has it is frozen."""
    async with new_app() as app:
        handle = await task(app, "plain").enqueue(1)
        client = await app.client()
        now_ms = client.clock.now_ms()
        await client.store.claim(
            ["default"], worker="frozen", limit=1, now_ms=now_ms, lease_ms=60_000
        )
        async with asyncio.timeout(20):
            assert await handle.move(delay="1h") is MoveOutcome.REQUESTED
