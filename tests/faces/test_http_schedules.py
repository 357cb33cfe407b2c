"""Schedules, queues, workers, tasks and counts over HTTP."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from http_server import PATIENCE_S, problem, served, shop

from tickwheel.http.schedules import following
from tickwheel.job import Job, dead
from tickwheel.schedule import Rule, Schedule

NIGHTLY = {"task": "pack", "arguments": {"order": 1}, "cron": "0 2 * * *", "tz": "Europe/Paris"}


async def test_a_schedule_is_put_read_paused_resumed_and_deleted(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        put = await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY)
        assert put.status_code == 201
        assert put.headers["location"] == "/v1/schedules/nightly"
        found = (await its.get("/v1/schedules/nightly")).json()
        assert found == put.json()
        assert (found["cron"], found["tz"], found["paused"]) == ("0 2 * * *", "Europe/Paris", False)
        assert "02:00" in found["explained"]
        again = await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY | {"overlap": "skip"})
        assert (again.status_code, again.json()["overlap"]) == (200, "skip")
        for step, outcome, paused in (("pause", "paused", True), ("resume", "resumed", False)):
            answer = await its.post(f"/v1/schedules/nightly/{step}")
            assert answer.json() == {"name": "nightly", "outcome": outcome}
            [listed] = (await its.get("/v1/schedules")).json()["schedules"]
            assert listed["paused"] is paused
        deleted = await its.ask("DELETE", "/v1/schedules/nightly")
        assert deleted.json() == {"name": "nightly", "outcome": "deleted"}
        for method, path in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/next"),
            ("GET", "/runs"),
            ("POST", "/pause"),
            ("POST", "/resume"),
            ("POST", "/run"),
        ):
            problem(await its.ask(method, f"/v1/schedules/nightly{path}"), 404, "not-found")


async def test_a_schedule_can_be_put_again_as_it_was_read(tmp_path: Path) -> None:
    whole = NIGHTLY | {
        "misfire": "all", "misfire_limit": 7, "overlap": "skip", "spread": "30s",
        "start": "2026-01-01T00:00:00.000Z", "end": "2036-01-01T00:00:00.000Z",
    }  # fmt: skip
    async with served(shop(tmp_path)) as its:
        await its.ask("PUT", "/v1/schedules/nightly", json=whole)
        found = (await its.get("/v1/schedules/nightly")).json()
        assert found["spread_ms"] == 30_000 and found["queue"] == "default"
        same = ("task", "cron", "tz", "arguments", "misfire", "misfire_limit", "overlap")
        for name in (*same, "start", "end"):
            assert found[name] == whole[name], name


async def test_secrets_in_the_arguments_of_a_schedule_are_hidden(tmp_path: Path) -> None:
    secret = NIGHTLY | {"arguments": {"order": 1, "password": "hunter2"}}
    async with served(shop(tmp_path), keys=True) as its:
        put = await its.ask("PUT", "/v1/schedules/nightly", json=secret)
        assert put.json()["arguments"]["password"] == "hunter2"
        assert put.json()["arguments_hidden"] is False
        key = await its.key("read")
        for path in ("/v1/schedules/nightly", "/v1/schedules"):
            answer = await its.get(path, headers=key)
            assert "hunter2" not in answer.text and '"arguments_hidden":true' in answer.text


async def test_a_schedule_runs_now(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY)
        ran = await its.post("/v1/schedules/nightly/run")
        assert ran.status_code == 201
        job = (await its.get(ran.headers["location"])).json()
        assert (job["id"], job["task"]) == (ran.json()["job"], "pack")


async def test_the_last_ticks_of_a_schedule_say_what_became_of_them(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        schedule = {"task": "pack", "arguments": {"order": 1}, "every": "1h"}
        await its.ask("PUT", "/v1/schedules/hourly", json=schedule)
        assert (await its.get("/v1/schedules/hourly/runs?count=3")).json() == {"runs": []}
        [tick] = (await its.get("/v1/schedules/hourly/next?count=1")).json()["ticks"]
        hours = [datetime.fromisoformat(tick["at"]) - timedelta(hours=n) for n in (1, 2, 3)]
        last, before, first = (f"hourly@{hour:%Y-%m-%dT%H:%M:%SZ}" for hour in hours)
        client = await its.app.client()
        now_ms = client.clock.now_ms()
        due_ms = now_ms - 2000
        for id in (last, first):
            job = Job(id=id, task="pack", payload='{"order":1}', due_ms=due_ms, created_ms=due_ms)
            assert await client.add(job)
        held = await client.store.claim(
            ["default"], worker="ann", limit=2, now_ms=now_ms, lease_ms=60_000
        )
        [job] = [each for each in held if each.id == first]
        ended = dead(job, error="ValueError: no", started_ms=due_ms + 7, ended_ms=now_ms)
        assert await client.store.settle([ended], now_ms=now_ms) == [True]
        found = (await its.get("/v1/schedules/hourly/runs?count=3")).json()["runs"]
        assert [each["state"] for each in found] == ["running", None, "dead"]
        assert [each["id"] for each in found] == [last, before, first]
        assert (found[2]["lateness_ms"], found[2]["error"]) == (7, "ValueError: no")
        assert found[2]["started"] < found[2]["ended"]
        problem(await its.get("/v1/schedules/hourly/runs?count=0"), 400, "bad-request")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cron": "0 25 * * *"}, "hour"),
        ({"cron": None}, "cron"),
        ({"every": "1h"}, "cron"),
        ({"tz": "Mars/Base"}, "Mars/Base"),
        ({"arguments": {}}, "order"),
        ({"start": "tomorrow"}, "zone"),
        ({"end": "2020-01-01T00:00:00Z"}, "no tick"),
        ({"misfire": "never"}, "misfire"),
    ],
)
async def test_a_schedule_that_can_not_be_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY | change)
        assert words in problem(answer, 422, "invalid")
        unknown = await its.ask("PUT", "/v1/schedules/x", json=NIGHTLY | {"task": "nope"})
        problem(unknown, 422, "unknown-task")
        name = await its.ask("PUT", "/v1/schedules/a%20b", json=NIGHTLY)
        assert "schedule name" in problem(name, 422, "invalid")


async def test_next_ticks_of_a_schedule_and_of_an_expression(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY)
        query = "count=2&after=2026-03-28T00:00:00Z"
        by_name = (await its.get(f"/v1/schedules/nightly/next?{query}")).json()
        # On the 29th, Paris skips the hour.
        assert by_name["ticks"] == [
            {
                "at": "2026-03-28T01:00:00.000Z",
                "there": "2026-03-28T02:00:00.000+01:00",
                "change": None,
            },
            {
                "at": "2026-03-29T01:00:00.000Z",
                "there": "2026-03-29T03:00:00.000+02:00",
                "change": "clocks go forward 02:00 → 03:00",
            },
        ]
        params = {"cron": "0 2 * * *", "tz": "Europe/Paris", "count": "2"}
        params["after"] = "2026-03-28T00:00:00Z"
        assert (await its.get("/v1/preview", params=params)).json() == by_name
        every = (await its.get("/v1/preview?every=15m&count=1")).json()
        assert every["explained"] == "Every 15 minutes"
        for query in ("", "cron=x", "cron=*%20*%20*%20*%20*&every=1h", "every=soon"):
            problem(await its.get(f"/v1/preview?{query}"), 422, "invalid")
        for query in ("after=x", "after=9999-12-31T00:00:00Z", "after=2026-01-01"):
            problem(await its.get(f"/v1/schedules/nightly/next?{query}"), 422, "invalid")


def test_a_search_for_rare_ticks_can_be_stopped() -> None:
    stop = threading.Event()
    stop.set()
    assert following(Rule(cron="* * * * *", task="x"), 0, 10, stop) == []


async def test_schedules_are_simulated(tmp_path: Path) -> None:
    app = shop(tmp_path)

    @app.every("12h", name="declared")
    def tidy() -> None: ...

    async with served(app) as its:
        await its.ask("PUT", "/v1/schedules/nightly", json=NIGHTLY | {"tz": "UTC"})
        query = "start=2026-01-01T00:00:00Z&end=2026-01-02T00:00:00Z"
        found = (await its.get(f"/v1/simulation?{query}")).json()
        assert [(each["schedule"], each["at"][11:16]) for each in found["ticks"]] == [
            ("declared", "00:00"),
            ("nightly", "02:00"),
            ("declared", "12:00"),
        ]
        cut = (await its.get(f"/v1/simulation?{query}&limit=1&name=declared")).json()
        assert (len(cut["ticks"]), cut["cut_at"]) == (1, "2026-01-01T12:00:00.000Z")
        problem(await its.get("/v1/simulation?name=nope"), 404, "not-found")
        wrong = "start=2026-01-02T00:00:00Z&end=2026-01-01T00:00:00Z"
        problem(await its.get(f"/v1/simulation?{wrong}"), 422, "invalid")


async def test_a_schedule_that_can_not_be_read_is_listed_with_its_problem(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app:
        store = (await app.client()).store
        await store.put_schedule(Schedule(name="odd", rule='{"task": "x"}', next_ms=None))
        found = (await its.get("/v1/schedules/odd")).json()
        assert set(found) == {"name", "paused", "last_job", "problem"} and found["problem"]
        problem(await its.get("/v1/schedules/odd/next"), 422, "invalid")
        problem(await its.post("/v1/schedules/odd/run"), 422, "invalid")
        problem(await its.post("/v1/schedules/odd/resume"), 422, "invalid")


# --- Queues, workers, tasks


async def test_queues_are_listed_paused_and_resumed(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add("send", delay="1h")
        for step, paused in (("pause", True), ("resume", False)):
            answer = await its.post(f"/v1/queues/mail/{step}")
            assert answer.json() == {"name": "mail", "paused": paused}
            [queue] = (await its.get("/v1/queues")).json()["queues"]
            assert (queue["name"], queue["waiting"], queue["paused"]) == ("mail", 1, paused)
        problem(await its.post("/v1/queues/a%20b/pause"), 404, "not-found")


async def test_workers_tasks_counts_and_findings(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its:
        before = (await its.get("/v1/stats")).json()
        assert (before["waiting"], before["oldest_due"], before["workers"]) == (0, None, 0)
        await its.add()
        await its.add("send", delay="1h")
        stats = (await its.get("/v1/stats")).json()
        assert (stats["waiting"], stats["queues"]) == (2, 2)
        assert stats["oldest_due"] is not None
        async with app.worker(guarded=False), asyncio.timeout(PATIENCE_S):
            while not (workers := (await its.get("/v1/workers")).json()["workers"]):
                await asyncio.sleep(0.01)
        assert workers[0]["app"] == "shop" and workers[0]["queues"] == ["default", "mail"]
        tasks = (await its.get("/v1/tasks")).json()["tasks"]
        assert [task["name"] for task in tasks] == ["pack", "send"]
        assert tasks[0]["parameters"] == ["order", "note", "password"]
        findings = (await its.get("/v1/doctor")).json()["findings"]
        assert {"versions", "durability"} <= {each["about"] for each in findings}


async def test_health_and_readiness(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        assert (await its.get("/healthz")).json()["status"] == "ok"
        assert (await its.get("/readyz")).json()["status"] == "ready"
        head = await its.ask("HEAD", "/healthz")
        assert (head.status_code, head.content) == (200, b"")
