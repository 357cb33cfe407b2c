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
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any

from tickwheel import App, JobHandle, RetryPolicy

app = App("memory://")


@app.task
async def ship(order_id: int, *, express: bool = False) -> str:
    return ""


@app.task(retries=RetryPolicy(retries=1), timeout="30s", pool="process")
def bill(order_id: int, amounts: list[float], note: str | None = None) -> dict[str, int]:
    return {}


@app.task(priority="high")
async def clean() -> None: ...


async def right_calls() -> None:
    await ship.enqueue(1)
    await ship.enqueue(order_id=1, express=True)
    await ship.using(delay="30m", priority="urgent").enqueue(1)
    await ship.using(delay=timedelta(hours=1)).enqueue(1, express=True)
    await bill.using(at=datetime(2030, 1, 1, tzinfo=UTC), id="x").enqueue(1, [1.5])
    bill.enqueue_sync(1, [1.5], note="x")
    bill.using(delay=5, retries=0, timeout=1.5, queue="q").enqueue_sync(1, [1.5], None)
    await app.enqueue_many([ship.job(1), clean.using(delay=1).job()])
    await clean.enqueue()
    await ship(1)
    bill(1, [2.5])


async def wrong_types() -> None:
    await ship.enqueue("1")  # error: arg-type
    await ship.enqueue(1, express="yes")  # error: arg-type
    await ship.using(delay=1).enqueue(None)  # error: arg-type
    bill.enqueue_sync(1, ["x"])  # error: list-item
    bill.using(delay=1).enqueue_sync(1, 1.5)  # error: arg-type
    ship.job(1.5)  # error: arg-type
    bill.using(id="x").job("1", [])  # error: arg-type
    await ship("1")  # error: arg-type


async def missing_arguments() -> None:
    await ship.enqueue()  # error: call-arg
    await ship.using(delay=1).enqueue()  # error: call-arg
    bill.enqueue_sync(1)  # error: call-arg
    bill.using(delay=1).enqueue_sync()  # error: call-arg
    ship.job()  # error: call-arg
    bill.using(delay=1).job(1)  # error: call-arg


async def extra_arguments() -> None:
    await ship.enqueue(1, True)  # error: call-arg
    await ship.enqueue(1, fast=True)  # error: call-arg
    await ship.using(delay=1).enqueue(1, delay=2)  # error: call-arg
    bill.enqueue_sync(1, [], None, 4)  # error: call-arg
    clean.using(delay=1).enqueue_sync(1)  # error: call-arg
    clean.job(1)  # error: call-arg
    clean.using(delay=1).job(x=1)  # error: call-arg


async def wrong_choices() -> None:
    app.task(priority="huge")  # error: call-overload
    app.task(pool="fiber")  # error: call-overload
    ship.using(priority="huge")  # error: arg-type
    ship.using(delay=None, at="2030-01-01")  # error: arg-type
    ship.using(retries=1.5)  # error: arg-type
    ship.using(id=5)  # error: arg-type
    ship.using(countdown=5)  # error: call-arg
    await app.enqueue_many([ship.enqueue(1)])  # error: list-item


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
