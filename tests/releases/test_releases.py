"""What an earlier release stored runs in this one, to its end.

`make.py` wrote the files beside this one with the code of that release.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest
import redis

from postgres_server import shared_server
from stores import nats_server, redis_server
from tickwheel import App, JobHandle, State
from tickwheel.job import Job

HERE = Path(__file__).parent
NAMESPACE = "release"
# How long ago the release stored it: all is due by now, and every lease has run out.
AGO_MS = 2 * 3_600_000

# Each job, and how often its task runs here.
ENDS = {
    "waiting": 1,
    "later": 1,
    "paused": 1,
    "retrying": 1,
    "snoozed": 1,
    "released": 1,
    "lost": 1,
    "lost-started": 1,
    "lost-asked": 0,
    "cancelled": 0,
    "done": 0,
    "dead": 0,
}


# --- Stores as the release left them


def stored(release: str, kind: str) -> str:
    """The file, with all times moved."""
    [path] = HERE.glob(f"{release}.{kind}.*")
    text = path.read_text()
    made_ms = min(int(each) for each in re.findall(r"\b1[789]\d{11}\b", text))
    moved = timedelta(milliseconds=time.time_ns() // 1_000_000 - AGO_MS - made_ms)

    def later(found: re.Match[str]) -> str:
        return str(int(found[0]) + moved // timedelta(milliseconds=1))

    def later_date(found: re.Match[str]) -> str:
        moment = datetime.fromisoformat(found[1]) + moved
        return f"@at {moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"

    text = re.sub(r"\b1[789]\d{11}\b", later, text)
    return re.sub(r"@at (20[2-9]\d-[\d-]+T[\d:.]+Z)", later_date, text)


async def from_sqlite(release: str, folder: Path) -> str:
    path = folder / "jobs.db"
    db = sqlite3.connect(path)
    db.executescript(stored(release, "sqlite"))
    db.close()
    return f"sqlite:///{path}"


async def from_postgres(release: str, folder: Path) -> str:
    server, name = shared_server(), f"release_{secrets.token_hex(4)}"
    server.execute(f"create database {name}")
    url = server.url.rpartition("/")[0] + f"/{name}"
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as db:
        await db.execute(stored(release, "postgres").encode())
    return url


async def from_redis(release: str, folder: Path) -> str:
    server = redis_server()
    db: Any = redis.Redis(port=server.port, decode_responses=True)
    for key, (kind, value) in json.loads(stored(release, "redis")).items():
        if kind == "string":
            db.set(key, value)
        elif kind == "hash":
            db.hset(key, mapping=value)
        elif kind == "zset":
            db.zadd(key, dict(value))
        elif kind == "set":
            db.sadd(key, *value)
        else:
            db.rpush(key, *value)
    db.close()
    return f"{server.url}?namespace={NAMESPACE}"


async def from_nats(release: str, folder: Path) -> str:
    server = await asyncio.to_thread(nats_server)
    client = await nats.connect(server.url)
    for stream in json.loads(stored(release, "nats"))["streams"]:
        config = stream["config"]
        made = json.dumps(config).encode()
        answer = await client.request(f"$JS.API.STREAM.CREATE.{config['name']}", made)
        assert "error" not in json.loads(answer.data), answer.data
        for consumer in stream["consumers"]:
            place = f"$JS.API.CONSUMER.DURABLE.CREATE.{config['name']}.{consumer['durable_name']}"
            made = json.dumps({"stream_name": config["name"], "config": consumer}).encode()
            answer = await client.request(place, made)
            assert "error" not in json.loads(answer.data), answer.data
        for message in stream["messages"]:
            answer = await client.request(
                message["subject"], message["data"].encode(), headers=_headers(message["hdrs"])
            )
            assert "error" not in json.loads(answer.data), (message, answer.data)
    await client.close()
    return f"{server.url}/{NAMESPACE}"


def _headers(text: str) -> dict[str, str] | None:
    """Without those that were for the moment of storing it."""
    lines = [line.partition(":") for line in text.splitlines()[1:] if line]
    kept = {
        name: value.strip()
        for name, _, value in lines
        if not name.startswith(("Nats-Expected", "Nats-Batch"))
    }
    return kept or None


FROM: dict[str, Callable[[str, Path], Coroutine[Any, Any, str]]] = {
    "sqlite": from_sqlite,
    "postgres": from_postgres,
    "redis": from_redis,
    "nats": from_nats,
}
RELEASES = sorted({path.name.removesuffix(".sqlite.sql") for path in HERE.glob("*.sqlite.sql")})


def test_there_is_one() -> None:
    assert RELEASES


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", FROM)
async def test_jobs_that_an_earlier_release_stored_run_to_their_end(
    release: str, kind: str, tmp_path: Path
) -> None:
    app = App(await FROM[kind](release, tmp_path))
    ran: list[str] = []

    @app.task
    async def note(id: str, words: str) -> str:
        ran.append(id)
        return words

    # One of its schedules is in the code.
    app.cron("* * * * *", tz="Asia/Taipei", name="cron", arguments={"id": "cron", "words": "tick"})(
        note
    )
    async with app:
        await _what_was_there(app)
        await _what_is_new(app)
        queues = [queue.name for queue in await app.queues()]
        async with app.worker(queues=["default", *queues]):
            await app.resume("paused")
            await _until_all_end(app)
            await _until(lambda: {"every", "cron"} <= set(ran), "the ticks of two schedules")
            assert await app.rerun(["dead", "cancelled"]) == [True, True]
            assert await app.job("tagged").result(timeout=60) == "new"
            assert await app.job("dead").result(timeout=60) == "定时任务"
            assert await app.job("cancelled").result(timeout=60) == "定时任务"
        await _what_became(app, ran)


async def _what_was_there(app: App) -> None:
    done = await app.job("done").info()
    assert (done.state, done.attempts) == (State.DONE, 1)
    dead = await app.job("dead").info()
    assert (dead.state, dead.error, dead.failures) == (State.DEAD, "ValueError: no", 1)
    assert {each.name for each in await app.schedules.list()} == {"every", "cron", "stopped"}
    [paused] = [queue for queue in await app.queues() if queue.paused]
    assert (paused.name, paused.waiting) == ("paused", 1)


async def _what_is_new(app: App) -> None:
    """A job with what that release did not know, among its jobs."""
    client = await app.client()
    old = [job for job in await client.store.get(list(ENDS)) if job is not None]
    assert len(old) == len(ENDS)
    assert {(job.meta, job.expires_ms, job.progress) for job in old} == {(None, None, None)}
    now_ms = client.clock.now_ms()
    tagged = Job(
        id="tagged",
        task="note",
        payload=json.dumps({"id": "tagged", "words": "new"}),
        due_ms=now_ms,
        created_ms=now_ms,
        expires_ms=now_ms + AGO_MS,
        meta={"customer": "42"},
    )
    assert await client.store.add([tagged]) == [True]
    assert [info.id async for info in app.find_all(meta={"customer": "42"})] == ["tagged"]
    await client.put_records("key", {"a": "1"})
    assert await client.records("key") == [("a", "1")]


async def _until_all_end(app: App) -> None:
    for id in ENDS:

        async def ended(job: JobHandle[Any]) -> bool:
            return (await job.info()).state.ended

        await _until(functools.partial(ended, app.job(id)), id)


async def _until(happened: Callable[[], Any], what: str) -> None:
    try:
        async with asyncio.timeout(60):
            while not (await found if asyncio.iscoroutine(found := happened()) else found):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"waited for {what}") from None


async def _what_became(app: App, ran: list[str]) -> None:
    expected = {**ENDS, "dead": 1, "cancelled": 1}
    assert {id: ran.count(id) for id in ENDS} == expected
    assert await app.job("waiting").result(timeout=1) == "定时任务"
    retried = await app.job("retrying").info()
    assert (retried.state, retried.attempts, retried.failures) == (State.DONE, 2, 1)
    assert [run.outcome for run in retried.history] == ["retry", "done"]
    lost = await app.job("lost-started").info()
    assert [run.outcome for run in lost.history] == ["lost", "done"]
    assert (await app.job("lost-asked").info()).state is State.CANCELLED
    assert await app.job("tagged").result(timeout=1) == "new"
    found = [info.id async for info in app.find_all(meta={"customer": "42"}, state="done")]
    assert found == ["tagged"]
