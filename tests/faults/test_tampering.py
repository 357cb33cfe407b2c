"""Somebody writes to the database of a store, in SQL, past everything that we check."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from postgres_server import shared_server
from tickwheel import App, JobFailed
from tickwheel.cli import main
from tickwheel.envelope import is_sealed
from tickwheel.job import State
from tickwheel.trust import new_key

SIGN, ENCRYPT = new_key("sign"), new_key("encrypt")
KEYS: dict[str, Any] = {"signing_keys": [SIGN], "encryption_keys": [ENCRYPT]}
PATIENCE_S = 30


class Place:
    """A store, and its database in SQL."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        if kind == "sqlite":
            self._file = str(folder / "jobs.db")
            self.url, self.table = f"sqlite:///{self._file}", "job"
        else:
            self.schema = f"test_{secrets.token_hex(6)}"
            self.url = f"{shared_server().url}?schema={self.schema}"
            self.table = f"{self.schema}.job"

    def execute(self, sql: str, *parameters: Any) -> list[tuple[Any, ...]]:
        if self.kind == "sqlite":
            db = apsw.Connection(self._file)
            try:
                return list(db.execute(sql, parameters))
            finally:
                db.close()
        with psycopg.connect(shared_server().url) as connection:
            cursor = connection.execute(sql.replace("?", "%s"), parameters)
            return cursor.fetchall() if cursor.description else []

    def drop(self) -> None:
        if self.kind == "postgres":
            self.execute(f"drop schema {self.schema} cascade")


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path)
    yield place
    place.drop()


def shop(url: str, ran: list[str], **options: Any) -> tuple[App, Any]:
    app = App(url, name="shop", **options)

    @app.task(name="pay", retries=0)
    async def pay(card: str) -> str:
        ran.append(card)
        return card

    @app.task(name="refund", retries=0)
    async def refund(card: str) -> None:
        ran.append("refund")

    return app, pay


# Each changes the job "bad"; "other" is a job that is as it was.
CHANGES: dict[str, str] = {
    "task": "update {job} set task = 'refund' where id = 'bad'",
    "arguments": """update {job} set payload = '{{"card":"mine"}}' where id = 'bad'""",
    "envelope": "update {job} set payload = replace(payload, 'body', 'bodi') where id = 'bad'",
    "arguments of another": """update {job} set payload =
        (select payload from {job} where id = 'other') where id = 'bad'""",
    "retries": "update {job} set retries = 100 where id = 'bad'",
    "timeout": "update {job} set timeout_ms = 1 where id = 'bad'",
    "priority": "update {job} set priority = 3 where id = 'bad'",
    "expiry": "update {job} set expires_ms = due_ms + 1000000000 where id = 'bad'",
    "signed time": """update {job} set due_ms = due_ms - 10000000,
        payload = replace(payload, '"due_ms":', '"due_ms":-') where id = 'bad'""",
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_changed_job_never_runs(place: Place, change: str) -> None:
    ran: list[str] = []
    app, pay = shop(place.url, ran, **KEYS)
    async with app:
        bad = await pay.using(id="bad").enqueue("bad")
        other = await pay.using(id="other").enqueue("other")
        place.execute(CHANGES[change].format(job=place.table))
        async with app.worker(guarded=False):
            assert await other.result(timeout=PATIENCE_S) == "other"
            with pytest.raises(JobFailed, match="refused: "):
                await bad.result(timeout=PATIENCE_S)
    assert ran == ["other"]


async def test_a_job_moved_to_another_queue_never_runs(place: Place) -> None:
    ran: list[str] = []
    app, pay = shop(place.url, ran, **KEYS)
    async with app:
        bad = await pay.using(id="bad").enqueue("bad")
        place.execute(f"update {place.table} set queue = 'urgent' where id = 'bad'")
        async with app.worker(queues=["urgent"], guarded=False):
            with pytest.raises(JobFailed, match="its signature does not match"):
                await bad.result(timeout=PATIENCE_S)
    assert ran == []


async def test_a_job_that_is_made_due_earlier_waits_for_its_time(place: Place) -> None:
    ran: list[str] = []
    app, pay = shop(place.url, ran, **KEYS)
    async with app:
        bad = await pay.using(id="bad", delay="1h").enqueue("bad")
        due = (await bad.info()).due
        place.execute(f"update {place.table} set due_ms = due_ms - 3600000 where id = 'bad'")
        assert (await bad.info()).due < due
        async with app.worker(guarded=False):
            # Workers take the job that became due first: when another has run, so has this.
            assert await (await pay.enqueue("other")).result(timeout=PATIENCE_S) == "other"
            info = await bad.info()
    assert (info.state, info.due, ran) == (State.WAITING, due, ["other"])
    assert info.history[-1].error is not None and "that was signed" in info.history[-1].error


async def test_sql_cannot_sign(tmp_path: Path) -> None:
    place = Place("postgres", tmp_path)
    ran: list[str] = []
    app, _ = shop(place.url, ran, **KEYS)
    async with app, app.worker(guarded=False):
        place.execute(f"select {place.schema}.enqueue('pay', '{{\"card\": \"x\"}}', id => 'sql')")
        with pytest.raises(JobFailed, match=r"refused: it is not signed: .* by SQL"):
            await app.job("sql").result(timeout=PATIENCE_S)
    app, _ = shop(place.url, ran, **KEYS, signing="prefer")
    async with app, app.worker(guarded=False):
        place.execute(f"select {place.schema}.enqueue('pay', '{{\"card\": \"y\"}}', id => 'sql2')")
        assert await app.job("sql2").result(timeout=PATIENCE_S) == "y"
    assert ran == ["y"]
    place.drop()


# --- migrate-jobs


def test_sealed_jobs_move_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without keys, and unsigned ones are not signed on the way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TICKWHEEL_SIGNING_KEYS", SIGN)
    monkeypatch.setenv("TICKWHEEL_ENCRYPTION_KEYS", ENCRYPT)
    old, new = Place("sqlite", tmp_path), Place("postgres", tmp_path)
    ran: list[str] = []

    async def fill() -> None:
        app, pay = shop(old.url, ran)
        plain, unsigned = shop(old.url, ran, signing_keys=[], encryption_keys=[])
        async with app, plain:
            await pay.using(id="good").enqueue("good")
            await unsigned.using(id="unsigned").enqueue("x")
            await app.schedules.put("s", "pay", every="1h", arguments={"card": "c"})

    async def work() -> None:
        app, _ = shop(new.url, ran)
        async with app, app.worker(guarded=False):
            assert await app.job("good").result(timeout=PATIENCE_S) == "good"
            with pytest.raises(JobFailed, match="refused: it is not signed"):
                await app.job("unsigned").result(timeout=PATIENCE_S)
            [schedule] = await app.schedules.list()
            assert schedule.rule is not None
            assert json.loads(schedule.rule.payload) == {"card": "c"}

    asyncio.run(fill())
    assert main(["migrate-jobs", old.url, new.url, "--yes"]) == 0
    [[payload]] = new.execute(f"select payload from {new.table} where id = 'good'")
    assert is_sealed(payload)
    asyncio.run(work())
    assert ran == ["good"]
    new.drop()
