"""What a type checker makes of users' code: wrong calls are errors, and results have their types.

One run of mypy over a snippet. A line that ends in `# error: code` must have exactly that error, a
line that ends in `# type: …` must reveal that type, and every other line must be clean.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SNIPPET = """
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

from tickwheel import (
    INJECTED,
    App,
    JobContext,
    JobHandle,
    Partial,
    Priority,
    Retry,
    RetryPolicy,
    State,
    current_jobs,
)

app = App("memory://")


@app.task
async def ship(order_id: int, *, express: bool = False) -> str:
    return ""


@app.task(retries=RetryPolicy(retries=1), timeout="30s", pool="process")
def bill(order_id: int, amounts: list[float], note: str | None = None) -> dict[str, int]:
    return {}


@app.task(priority="high")
async def clean() -> None: ...


class Db: ...


@app.lifespan
async def database() -> AsyncIterator[Db]:
    yield Db()


@app.middleware
async def timed(job: JobContext, call_next: Callable[[], Awaitable[Any]]) -> Any:
    return await call_next()


@app.task
async def load(order_id: int, db: Db = INJECTED) -> None: ...


async def around() -> None:
    await load.enqueue(1)
    await load(1, Db())
    await load("1", Db())  # error: arg-type
    await load(1, "db")  # error: arg-type
    reveal_type(database())  # type: AsyncIterator[Db]
    app.middleware(database)  # error: type-var
    app.lifespan(timed)  # error: type-var


@app.batch(size=10, linger="50ms", queue="q", priority="low", retries=1, timeout=5, pool="async")
async def index(docs: list[int]) -> list[str]:
    return []


@app.batch()
async def maybe(docs: list[int]) -> list[str] | None:
    return None


@app.batch(pool="process")
def notify(names: list[str]) -> None: ...


async def right_calls() -> None:
    await ship.enqueue(1)
    await ship.enqueue(order_id=1, express=True)
    await ship.using(delay="30m", priority="urgent").enqueue(1)
    await ship.using(priority=Priority.HIGH).enqueue(1)
    app.task(priority=Priority.LOW)
    await ship.using(delay=timedelta(hours=1)).enqueue(1, express=True)
    await bill.using(at=datetime(2030, 1, 1, tzinfo=UTC), id="x").enqueue(1, [1.5])
    bill.enqueue_sync(1, [1.5], note="x")
    bill.using(delay=5, retries=0, timeout=1.5, queue="q").enqueue_sync(1, [1.5], None)
    await app.enqueue_many([ship.job(1), clean.using(delay=1).job()])
    await clean.enqueue()
    await ship(1)
    bill(1, [2.5])
    await index.enqueue(1)
    await index.using(delay="5m", id="x").enqueue(1)
    await app.enqueue_many([index.job(1), notify.using(delay=1).job("x")])
    notify.enqueue_sync("x")
    await index([1, 2])
    notify(["a", "b"])
    raise Partial({0: ValueError(), 1: Retry("5m")}, results=["a", "b"])


async def wrong_types() -> None:
    await ship.enqueue("1")  # error: arg-type
    await ship.enqueue(1, express="yes")  # error: arg-type
    await ship.using(delay=1).enqueue(None)  # error: arg-type
    bill.enqueue_sync(1, ["x"])  # error: list-item
    bill.using(delay=1).enqueue_sync(1, 1.5)  # error: arg-type
    ship.job(1.5)  # error: arg-type
    bill.using(id="x").job("1", [])  # error: arg-type
    await ship("1")  # error: arg-type
    await index.enqueue([1])  # error: arg-type
    await index.enqueue("1")  # error: arg-type
    index.using(delay=1).job(None)  # error: arg-type
    await index(1)  # error: arg-type
    notify.enqueue_sync(1)  # error: arg-type
    Partial([ValueError()])  # error: arg-type
    Partial({0: "wrong"})  # error: dict-item


async def missing_arguments() -> None:
    await ship.enqueue()  # error: call-arg
    await ship.using(delay=1).enqueue()  # error: call-arg
    bill.enqueue_sync(1)  # error: call-arg
    bill.using(delay=1).enqueue_sync()  # error: call-arg
    ship.job()  # error: call-arg
    await index.enqueue()  # error: call-arg
    bill.using(delay=1).job(1)  # error: call-arg


async def extra_arguments() -> None:
    await ship.enqueue(1, True)  # error: call-arg
    await ship.enqueue(1, fast=True)  # error: call-arg
    await ship.using(delay=1).enqueue(1, delay=2)  # error: call-arg
    bill.enqueue_sync(1, [], None, 4)  # error: call-arg
    clean.using(delay=1).enqueue_sync(1)  # error: call-arg
    clean.job(1)  # error: call-arg
    await index.enqueue(1, 2)  # error: call-arg
    clean.using(delay=1).job(x=1)  # error: call-arg


async def wrong_choices() -> None:
    app.task(priority="huge")  # error: call-overload
    app.task(pool="fiber")  # error: call-overload
    app.batch(pool="fiber")  # error: arg-type
    app.batch(size="10")  # error: arg-type
    app.batch()(ship)  # error: arg-type
    app.batch(clean)  # error: arg-type
    ship.using(priority="huge")  # error: arg-type
    ship.using(delay=None, at="2030-01-01")  # error: arg-type
    ship.using(retries=1.5)  # error: arg-type
    ship.using(id=5)  # error: arg-type
    ship.using(countdown=5)  # error: call-arg
    await app.enqueue_many([ship.enqueue(1)])  # error: list-item


async def right_operations() -> None:
    job = await ship.enqueue(1)
    await app.cancel([job, "id"])
    await app.rerun(each.id for each in (await app.find(state="dead", limit=5)).jobs)
    async for info in app.find_all(state=State.DONE, queue="q", task="ship"):
        info.arguments["order_id"]
    for info in app.sync.find_all(state="done"):
        info.due.isoformat()
    app.cron("0 2 * * *", tz="Asia/Taipei", misfire="all", overlap="skip", spread="5m")(clean)
    app.every("15m", name="x", start=datetime.now(UTC), arguments={"a": 1})(clean)
    await app.schedules.put("s", "clean", every="1h", misfire_limit=5)
    app.sync.schedules.put("s", "clean", cron="0 2 * * *")
    app.sync.schedules.delete("s")


async def wrong_operations() -> None:
    job = await ship.enqueue(1)
    await app.cancel(None)  # error: call-overload
    await app.rerun([1])  # error: list-item
    app.sync.delete(5)  # error: call-overload
    await app.find(state="waitin")  # error: arg-type
    await app.find(stat="dead")  # error: call-arg
    await app.find(limit="5")  # error: arg-type
    app.sync.find(cursor=5)  # error: arg-type
    app.sync.find_all(state="gone")  # error: arg-type
    app.cron("0 2 * * *", timezone="UTC")  # error: call-arg
    app.cron("0 2 * * *", misfire="none")  # error: arg-type
    app.every("15m", overlap=True)  # error: arg-type
    await app.schedules.put("s", "clean", evry="1h")  # error: call-arg
    app.sync.schedules.put("s", "clean", every=[1])  # error: arg-type
    reveal_type(await app.cancel("id"))  # type: CancelOutcome
    reveal_type(await app.cancel(job))  # type: CancelOutcome
    reveal_type(await app.cancel(["id", job]))  # type: list[CancelOutcome]
    reveal_type(await app.rerun("id"))  # type: bool
    reveal_type(await app.delete({"id"}))  # type: list[bool]
    reveal_type(app.sync.cancel(job))  # type: CancelOutcome
    reveal_type(app.sync.delete(["id"]))  # type: list[bool]
    reveal_type(await app.find())  # type: JobPage
    reveal_type(app.sync.find(state="dead").jobs)  # type: list[JobInfo]
    reveal_type(app.sync.info("id"))  # type: JobInfo
    reveal_type(app.sync.queues())  # type: list[QueueInfo]
    reveal_type(app.sync.schedules.list())  # type: list[ScheduleInfo]


async def results() -> None:
    shipped, billed = await ship.enqueue(1), bill.using(delay=1).enqueue_sync(1, [])
    reveal_type(shipped)  # type: JobHandle[str]
    reveal_type(await shipped.result())  # type: str
    reveal_type(await shipped.result(timeout="5s"))  # type: str
    reveal_type(await billed.result())  # type: dict[str, int]
    reveal_type(app.sync.result(billed))  # type: dict[str, int]
    reveal_type(await (await clean.enqueue()).result())  # type: None
    reveal_type(await ship(1))  # type: str
    reveal_type(bill(1, []))  # type: dict[str, int]
    reveal_type(index)  # type: BatchTask[int, str, Coroutine[Any, Any, list[str]]]
    reveal_type(await (await index.enqueue(1)).result())  # type: str
    reveal_type(await (await maybe.enqueue(1)).result())  # type: str | None
    reveal_type(app.sync.result(notify.enqueue_sync("x")))  # type: None
    reveal_type(await index([1]))  # type: list[str]
    reveal_type(current_jobs())  # type: list[JobContext]
    number: int = await shipped.result()  # error: assignment
    handle: JobHandle[int] = shipped  # error: assignment
    coroutine: Coroutine[Any, Any, str] = ship(1)
    await coroutine
    await bill(1, [])  # error: misc
"""

EXPECTED = re.compile(r"# (error|type): (.+)$")
FOUND = re.compile(r'^[^:]+:(\d+): (?:error: .*\[([\w-]+)\]|note: Revealed type is "(.*)")$')


def without_modules(kind: str) -> str:
    """`builtins.dict[builtins.str, tickwheel.x.Y]` as people write it."""
    return re.sub(r"[\w.]+\.(\w+)", r"\1", kind)


def expected() -> dict[int, list[str]]:
    wanted: dict[int, list[str]] = {}
    for number, line in enumerate(SNIPPET.splitlines(), 1):
        if found := EXPECTED.search(line):
            wanted[number] = [found[2]]
    return wanted


def checked(path: Path) -> dict[int, list[str]]:
    """What mypy says of each line: codes of errors, and types that were to be revealed."""
    # With the project's own configuration, which is strict, to share its cache.
    command = [sys.executable, "-m", "mypy", "--strict", "--no-pretty", "--no-error-summary"]
    run = subprocess.run(
        [*command, str(path)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert run.returncode == 1, run.stdout + run.stderr
    said: dict[int, list[str]] = {}
    for line in run.stdout.splitlines():
        if found := FOUND.match(line):
            said.setdefault(int(found[1]), []).append(found[2] or without_modules(found[3]))
        else:
            assert ": note: " in line, line
    return said


def test_a_type_checker_refuses_exactly_the_wrong_calls(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    lines = SNIPPET.splitlines()
    said, wanted = checked(snippet), expected()
    differing = {
        lines[number - 1].strip(): said.get(number)
        for number in sorted(said.keys() | wanted.keys())
        if said.get(number) != wanted.get(number)
    }
    assert differing == {}
    assert len(wanted) > 30
