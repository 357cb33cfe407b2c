"""Write what a release stores, for tests of later ones: `python tests/releases/make.py NAME`.

Run it with the release's own code first on the path. It plays the same story on each kind of store
and writes what is there then, as text, to `tests/releases/NAME.*`: a job in every state and on
every way through them, schedules, a worker, a paused queue. A test moves all times in it, so that
everything is due and every lease has run out.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

LEASE_MS = 600_000
NAMESPACE = "release"
GET, CONSUMERS = "$JS.API.STREAM.MSG.GET", "$JS.API.CONSUMER.LIST"


# --- The story


async def story(store: Any) -> None:
    life: Any = importlib.import_module("tickwheel.job")

    now = time.time_ns() // 1_000_000

    def job(id: str, *, queue: str = "default", delay_ms: int = 0) -> Any:
        return life.Job(
            id=id,
            task="note",
            payload=json.dumps({"id": id, "words": "定时任务"}),
            queue=queue,
            due_ms=now + delay_ms,
            created_ms=now,
            retries=3,
            timeout_ms=60_000,
        )

    async def claimed(id: str) -> Any:
        """Add a job, and claim it; each has a queue of its own until then."""
        await store.add([job(id, queue=id)])
        [held] = await store.claim([id], worker="ann", limit=1, now_ms=now, lease_ms=LEASE_MS)
        return held

    async def settled(settlement: Any) -> None:
        assert await store.settle([settlement], now_ms=now) == [True]

    await store.add([job("waiting"), job("later", delay_ms=3_600_000), job("cancelled")])
    await store.add([job("paused", queue="paused")])
    await store.pause("paused", True)
    await store.cancel(["cancelled"], now_ms=now)
    times = {"started_ms": now, "ended_ms": now}
    await settled(life.done(await claimed("done"), result='"done"', **times))
    due_ms = now + 60_000
    await settled(life.retry(await claimed("retrying"), due_ms=due_ms, error="boom", **times))
    await settled(life.snooze(await claimed("snoozed"), due_ms=due_ms, **times))
    await settled(life.release(await claimed("released"), ended_ms=now))
    await settled(life.dead(await claimed("dead"), error="ValueError: no", **times))
    await claimed("lost")
    await store.extend(
        [_started(await claimed("lost-started"), now)], now_ms=now, lease_ms=LEASE_MS
    )
    await claimed("lost-asked")
    await store.cancel(["lost-asked"], now_ms=now)
    await _schedules(store, now)
    await store.beat(_worker(now))


def _started(job: Any, now: int) -> Any:
    import msgspec

    return msgspec.structs.replace(job, started_ms=now)


async def _schedules(store: Any, now: int) -> None:
    from tickwheel.schedule import Rule, Schedule

    def payload(id: str) -> str:
        return json.dumps({"id": id, "words": "tick"}, separators=(",", ":"))

    every = Rule(every_ms=60_000, task="note", payload=payload("every"))
    cron = Rule(
        cron="* * * * *", tz="Asia/Taipei", task="note", payload=payload("cron"), from_code=True
    )
    for name, rule in (("every", every), ("cron", cron)):
        text = rule.encode()
        await store.put_schedule(Schedule(name=name, rule=text, next_ms=now + 60_000))
    await store.put_schedule(
        Schedule(name="stopped", rule=every.encode(), next_ms=now, paused=True)
    )


def _worker(now: int) -> Any:
    from tickwheel.store import WorkerInfo

    return WorkerInfo(
        name="ann", host="host", pid=1, version="0.1.0", queues=("default",), concurrency=100,
        started_ms=now, seen_ms=now, gone_after_ms=LEASE_MS,
    )  # fmt: skip


async def play(url: str) -> None:
    from tickwheel.store import open_store

    store = open_store(url)
    await store.open()
    try:
        await story(store)
    finally:
        await store.close()


# --- What is there then, as text


def of_sqlite() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "jobs.db"
        asyncio.run(play(f"sqlite:///{path}"))
        with sqlite3.connect(path) as db:
            [version] = db.execute("pragma user_version").fetchone()
            lines = [*db.iterdump(), f"pragma user_version = {version};"]
        db.close()
    return "\n".join(lines) + "\n"


def of_postgres() -> str:
    from postgres_server import PostgresServer, programs

    server = PostgresServer(fast=True)
    try:
        server.create()
        server.start()
        asyncio.run(play(server.url))
        dump = subprocess.run(
            [programs() / "pg_dump", "--inserts", "--no-owner", "--schema=tickwheel", server.url],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    finally:
        server.remove()
    # What only psql understands, and what only some versions know.
    kept = [line for line in dump.splitlines() if not line.startswith(("\\", "--", "SET "))]
    return "\n".join(line for line in kept if line) + "\n"


def of_redis() -> str:
    import redis

    from redis_server import RedisServer

    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder), appendonly="yes", appendfsync="always").start()
        try:
            asyncio.run(play(f"{server.url}?namespace={NAMESPACE}"))
            db: Any = redis.Redis(port=server.port, decode_responses=True)
            found = {key: _of_key(db, key) for key in sorted(db.scan_iter(count=1000))}
            db.close()
        finally:
            server.stop()
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _of_key(db: Any, key: str) -> Any:
    kind = db.type(key)
    read: dict[str, Callable[[], Any]] = {
        "string": lambda: db.get(key),
        "hash": lambda: db.hgetall(key),
        "set": lambda: sorted(db.smembers(key)),
        "zset": lambda: db.zrange(key, 0, -1, withscores=True),
        "list": lambda: db.lrange(key, 0, -1),
    }
    return [kind, read[kind]()]


def of_nats() -> str:
    from redis_server import free_port

    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        program = shutil.which("nats-server", path=str(Path(sys.executable).parent))
        assert program is not None
        words = [program, "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", folder]
        server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            found = asyncio.run(_of_nats(f"nats://127.0.0.1:{port}"))
        finally:
            server.terminate()
            server.wait(20)
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


async def _of_nats(url: str) -> dict[str, Any]:
    import nats

    client = await nats.connect(url, max_reconnect_attempts=20)
    await play(f"{url}/{NAMESPACE}")
    streams = []
    listed = json.loads((await client.request("$JS.API.STREAM.LIST", b"")).data)
    for stream in listed["streams"] or []:
        name, state = stream["config"]["name"], stream["state"]
        messages = []
        for seq in range(state["first_seq"], state["last_seq"] + 1):
            asked = json.dumps({"seq": seq}).encode()
            answer = json.loads((await client.request(f"{GET}.{name}", asked)).data)
            if "message" in answer:
                told = answer["message"]
                texts = {
                    key: base64.b64decode(told.get(key, "")).decode() for key in ("hdrs", "data")
                }
                messages.append({"subject": told["subject"], **texts})
        listed = json.loads((await client.request(f"{CONSUMERS}.{name}", b"")).data)
        consumers = [each["config"] for each in listed["consumers"]]
        streams.append({"config": stream["config"], "consumers": consumers, "messages": messages})
    await client.close()
    return {"streams": streams}


if __name__ == "__main__":
    name = sys.argv[1]
    for suffix, of in {
        "sqlite.sql": of_sqlite,
        "postgres.sql": of_postgres,
        "redis.json": of_redis,
        "nats.json": of_nats,
    }.items():
        (HERE / f"{name}.{suffix}").write_text(of())
        print(f"wrote {name}.{suffix}")
