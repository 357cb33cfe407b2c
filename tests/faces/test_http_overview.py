"""How everything stands, how it stood, and what the store is, over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from dashboard_store import fill
from http_server import PATIENCE_S, Shop, problem, served, shop
from starlette.applications import Starlette
from starlette.routing import Mount

from tickwheel import App
from tickwheel.client import Client
from tickwheel.http.service import Service
from tickwheel.job import park
from tickwheel.operate.history import FINE, KIND
from tickwheel.operate.recorder import Recorder
from tickwheel.store import WorkerCounts, WorkerInfo

# What the answers may take with a million jobs.
OVERVIEW_S, FAST_S = 0.1, 0.3


@asynccontextmanager
async def unrecorded(app: App, *, keys: bool = False) -> AsyncIterator[Shop]:
    """The API, which records nothing by itself."""
    transport = httpx.ASGITransport(app.http(), client=("127.0.0.1", 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Service, "record", lambda _: None)
        async with _unrecorded(app, transport, keys) as its:
            yield its


@asynccontextmanager
async def _unrecorded(app: App, transport: httpx.ASGITransport, keys: bool) -> AsyncIterator[Shop]:
    async with app:
        its = Shop(app, "http://127.0.0.1")
        its.began_ms = time.time_ns() // 1_000_000  # type: ignore[attr-defined]
        headers = await its.key("admin") if keys else {}
        async with httpx.AsyncClient(
            base_url="http://127.0.0.1", transport=transport, headers=headers, timeout=PATIENCE_S
        ) as client:
            its.client = client
            yield its


async def record(its: Shop, *told: WorkerCounts | None, ago_s: int) -> None:
    """Record a point of some time before the test began, at which these processes told this."""
    store = (await its.app.client()).store
    client = Client(store, its.app._clock)
    now_ms = its.began_ms  # type: ignore[attr-defined]
    for n, counts in enumerate(told):
        await store.beat(
            WorkerInfo(
                name=f"worker-{n}", host="host", pid=n, version="1", queues=("default", "mail"),
                concurrency=10, started_ms=now_ms, seen_ms=now_ms, gone_after_ms=3_600_000,
                counts=counts,
            )
        )  # fmt: skip
    client.clock.now_ms = lambda: now_ms - ago_s * 1000  # type: ignore[method-assign]
    await Recorder(its.app.client).sample(client)


def counts(**more: Any) -> WorkerCounts:
    return WorkerCounts(source="a", since_ms=0, **more)


async def document(its: Shop, path: str, **more: Any) -> dict[str, Any]:
    answer = await its.get(path, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


# --- Overview


async def test_an_overview_of_a_new_store_says_what_is_known(tmp_path: Path) -> None:
    async with unrecorded(shop(tmp_path)) as its:
        found = await document(its, "/v1/overview")
        assert found["stats"]["waiting"] == 0
        assert found["rates"] == {"started": None, "done": None, "failed": None, "dead": None}
        nothing = {"p50_ms": None, "p99_ms": None, "share": None, "started": None}
        assert found["punctuality"] == nothing and found["objective"] is None
        assert (found["workers"], found["reporting"]) == (0, 0)
        assert found["failures"] == found["unserved"] == found["paused"] == []
        assert [each["about"] for each in found["problems"]] == ["workers"]


async def test_rates_and_punctuality_are_what_workers_have_told(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db", name="shop", objective="99% within 100ms")
    async with unrecorded(app) as its:
        await record(its, counts(started=10, done=10, late=(10,)), None, ago_s=40)
        late = (10, 0, 0, 0, 0, 0, 270, 30)
        tasks = {"pack": (270, 30, 0), "send": (0, 10, 20), "fine": (50, 0, 0)}
        now = counts(started=310, done=300, failed=40, dead=20, late=late, tasks=tasks)
        await record(its, now, None, ago_s=20)
        found = await document(its, "/v1/overview")
        assert found["rates"] == {"started": 15, "done": 14.5, "failed": 2, "dead": 1}
        assert found["punctuality"]["started"] == 300 and found["punctuality"]["share"] == 0.9
        assert 50 <= found["punctuality"]["p50_ms"] <= 100 < found["punctuality"]["p99_ms"] <= 250
        assert found["objective"] == {"text": "99% within 100ms", "share": 0.99, "within_ms": 100}
        assert (found["workers"], found["reporting"]) == (2, 1)
        assert found["failures"] == [
            {"task": "pack", "done": 270, "failed": 30, "dead": 0},
            {"task": "send", "done": 0, "failed": 10, "dead": 20},
        ]


async def test_an_overview_tells_of_paused_queues_and_unserved_tasks_once(tmp_path: Path) -> None:
    async with unrecorded(shop(tmp_path)) as its:
        await record(its, None, ago_s=0)
        await its.add(id="a")
        await its.add("send", id="b")
        await its.post("/v1/queues/mail/pause")
        store = (await its.app.client()).store
        now_ms = (await its.app.client()).clock.now_ms()
        [job] = await store.claim(
            ["default"], worker="x", limit=1, now_ms=now_ms, lease_ms=10_000, tasks=["pack"]
        )
        assert await store.settle([park(job, ended_ms=now_ms)], now_ms=now_ms) == [True]
        [worker] = await store.workers(now_ms=now_ms)
        await store.beat(msgspec.structs.replace(worker, tasks=("other",)))
        found = await document(its, "/v1/overview")
        assert [(each["queue"], each["task"]) for each in found["unserved"]] == [
            ("default", "pack")
        ]
        assert found["paused"] == ["mail"] and found["problems"] == []


async def test_a_limited_key_sees_its_share(tmp_path: Path) -> None:
    async with unrecorded(shop(tmp_path), keys=True) as its:
        await record(its, counts(), ago_s=40)
        tasks = {"pack": (1, 1, 0), "send": (1, 2, 0)}
        await record(its, counts(started=5, done=2, failed=3, late=(5,), tasks=tasks), ago_s=20)
        await its.add(id="a")
        await its.add("send", id="b")
        by_queue = await its.key("read", queues=["mail"])
        found = await document(its, "/v1/overview", headers=by_queue)
        assert found["stats"]["waiting"] == 1 and found["stats"]["queues"] == 1
        assert set(found["rates"].values()) == set(found["punctuality"].values()) == {None}
        assert found["failures"] == [] and found["problems"] == []
        [worker] = (await document(its, "/v1/workers", headers=by_queue))["workers"]
        assert worker["queues"] == ["mail"] and worker["counts"] is None
        by_task = await its.key("read", tasks=["pack"])
        found = await document(its, "/v1/overview", headers=by_task)
        assert [each["task"] for each in found["failures"]] == ["pack"]
        for path in ("/v1/history", "/v1/store"):
            problem(await its.get(path, headers=by_queue), 403, "forbidden")
            problem(await its.get(path, headers=by_task), 403, "forbidden")
            problem(await its.get(path, headers=await its.key("enqueue")), 403, "forbidden")
        assert (await document(its, "/v1/overview"))["rates"]["done"] == 0.1


# --- History


async def test_history_has_a_point_for_each_slot(tmp_path: Path) -> None:
    async with unrecorded(shop(tmp_path)) as its:
        await its.add(id="a")
        await record(its, counts(), ago_s=40)
        await record(its, counts(started=20, done=20, late=(20,)), ago_s=20)
        found = await document(its, "/v1/history?range=1h")
        assert len(found["times"]) == 360
        known = [n for n, value in enumerate(found["waiting"]) if value is not None]
        assert [found["waiting"][n] for n in known] == [1, 1]
        assert [found["done"][n] for n in known] == [None, 1]
        assert found["times"][known[1]] - found["times"][known[0]] == 20
        for wide in ("24h", "7d", "90d"):
            assert len((await document(its, f"/v1/history?range={wide}"))["times"]) <= 400
        problem(await its.get("/v1/history?range=1y"), 400, "bad-request")


async def test_a_served_app_records_what_its_worker_does(tmp_path: Path) -> None:
    """With real time: it takes as long as two slots."""
    app = shop(tmp_path)
    async with served(app) as its, app.worker(lease="1s"):
        jobs = [await its.add() for _ in range(20)] + [await its.add("send") for _ in range(3)]
        until = time.monotonic() + 6 * FINE.step_s
        found: dict[str, Any] = {}
        while time.monotonic() < until:
            found = await document(its, "/v1/overview")
            if found["punctuality"]["started"] == len(jobs):
                break
            await asyncio.sleep(0.2)
        assert found["punctuality"]["started"] == len(jobs)
        assert found["failures"] == [{"task": "send", "done": 0, "failed": 3, "dead": 3}]
        assert found["rates"]["done"] > 0 and found["reporting"] == 1
        [worker] = (await document(its, "/v1/workers"))["workers"]
        assert worker["counts"]["done"] == 20 and worker["counts"]["p99_ms"] is not None
        shown = await document(its, "/v1/history?range=1h")
        assert sum(value is not None for value in shown["waiting"]) >= 2


async def test_a_mounted_app_records_once_somebody_looks(
    tmp_path: Path,
) -> None:
    """Starlette doesn't run the lifespan of a mounted app."""
    app = shop(tmp_path)
    outer = Starlette(routes=[Mount("/ops", app=app.http())])
    transport = httpx.ASGITransport(outer, client=("127.0.0.1", 1))
    async with (
        app,
        httpx.AsyncClient(base_url="http://127.0.0.1/ops", transport=transport) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        assert (await client.get("/v1/overview")).status_code == 200
        while not await (await app.client()).records(KIND):
            await asyncio.sleep(0.05)


async def test_a_running_job_says_when_it_started_once_its_worker_has_told(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db", name="shop")
    go, running = asyncio.Event(), asyncio.Event()

    @app.task
    async def wait() -> None:
        running.set()
        await go.wait()

    async with served(app) as its, app.worker(lease="1s"):
        answer = await its.post("/v1/jobs", {"task": "wait"})
        path = f"/v1/jobs/{answer.json()['id']}"
        assert answer.json().get("started") is None
        await asyncio.wait_for(running.wait(), PATIENCE_S)
        job: dict[str, Any] = {"started": None}
        async with asyncio.timeout(PATIENCE_S):
            while job["started"] is None:
                job = await document(its, path)
                await asyncio.sleep(0.05)
        assert job["state"] == "running" and job["created"] <= job["started"]
        go.set()
        async with asyncio.timeout(PATIENCE_S):
            while job["state"] != "done":
                job = await document(its, path)
                await asyncio.sleep(0.05)
        # Its history has it.
        assert job["started"] is None and job["history"][0]["started"] is not None


# --- The store


async def test_the_store_is_described(tmp_path: Path) -> None:
    async with unrecorded(shop(tmp_path)) as its:
        await its.add(id="a")
        found = await document(its, "/v1/store")
        assert found["kind"] == "sqlite" and found["name"].endswith("jobs.db")
        assert found["durability"]["process_crash"] is True
        sizes = {each["name"]: each for each in found["sizes"]}
        assert sizes["File"]["value"] > 0 and sizes["File"]["unit"] == "bytes"
        assert any(each["about"] == "file" for each in found["findings"])
        calls = {each["method"]: each for each in found["calls"]}
        assert calls["add"]["count"] == 1 and calls["add"]["errors"] == 0
        assert calls["add"]["mean_ms"] > 0 and calls["add"]["p99_ms"] > 0


# --- With a million jobs


@pytest.mark.slow
async def test_a_million_jobs_are_no_burden(tmp_path: Path) -> None:
    """Nothing is kept of an earlier answer: each try is a server of its own. The best of three, by
    the time on a processor, which others may use too."""
    await fill(tmp_path / "jobs.db")
    took: dict[str, float] = {}
    for _ in range(3):
        async with unrecorded(shop(tmp_path)) as its:
            await record(its, counts(), ago_s=20)
            for path in PATHS:
                began = time.process_time()
                await document(its, path)
                took[path] = min(time.process_time() - began, took.get(path, 60))
    assert took["/v1/overview"] <= OVERVIEW_S and max(took.values()) <= FAST_S, took


PATHS = ("/v1/overview", "/v1/history?range=1h", "/v1/store", "/v1/workers", "/v1/stats")
