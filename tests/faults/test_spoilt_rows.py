"""Rows that another program has spoilt: they hurt no other job, and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex
from typing import Any

import apsw
import psycopg
import pytest

from postgres_server import shared_server
from tickwheel import App

pytestmark = pytest.mark.slow

PATIENCE_S = 30


async def run_beside(app: App, spoil: Callable[[str], None]) -> None:
    """Run three jobs, one of which is spoilt while it waits."""

    @app.task
    async def echo(n: int) -> int:
        return n

    async with app:
        jobs = [await echo.using(delay="500ms").enqueue(n) for n in range(3)]
        await asyncio.to_thread(spoil, jobs[1].id)
        assert len((await app.find(limit=10)).jobs) == 3
        async with app.worker():
            # All that is lost of the spoilt one is what can't be read.
            assert [await job.result(timeout=PATIENCE_S) for job in jobs] == [0, 1, 2]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *[("history", text) for text in ("{}", "x", "", "[1]", '[{"a":1}]')],
        *[("progress", text) for text in ("x", "{}", "1")],
        *[("meta", text) for text in ("x", "[]", '{"a":1}')],
        ("error", b"\xff\xfe"),
        ("traceback", b"\xff"),
    ],
)
async def test_a_spoilt_row_of_sqlite_hurts_nobody(tmp_path: Path, column: str, value: Any) -> None:
    def spoil(id: str) -> None:
        db = apsw.Connection(str(tmp_path / "jobs.db"))
        db.set_busy_timeout(5_000)
        new = "cast(? as text)" if isinstance(value, bytes) else "?"
        db.execute(f"update job set {column} = {new} where id = ?", (value, id))
        db.close()

    await run_beside(App(f"sqlite:///{tmp_path}/jobs.db"), spoil)


async def test_a_worker_that_can_not_be_read_hurts_nobody(tmp_path: Path) -> None:
    def spoil(_: str) -> None:
        db = apsw.Connection(str(tmp_path / "jobs.db"))
        db.execute("insert into worker values ('odd', '{}', 9000000000000)")
        db.close()

    app = App(f"sqlite:///{tmp_path}/jobs.db")
    await run_beside(app, spoil)
    async with app:
        assert await app.workers() == []


@pytest.mark.parametrize(
    ("column", "value"), [("history", "{}"), ("history", "x"), ("progress", "x"), ("meta", "[1]")]
)
async def test_a_spoilt_row_of_postgresql_hurts_nobody(column: str, value: str) -> None:
    schema = f"spoilt_{token_hex(6)}"

    def spoil(id: str) -> None:
        with psycopg.connect(shared_server().url) as db:
            db.execute(f"update {schema}.job set {column} = %s where id = %s".encode(), (value, id))

    await run_beside(App(f"{shared_server().url}?schema={schema}"), spoil)
