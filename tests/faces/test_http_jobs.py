"""Jobs over HTTP: add one or many, find, explain, cancel, rerun and delete them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from http_server import PATIENCE_S, Shop, problem, served, shop

from tickwheel import App
from tickwheel.callbacks import Callbacks

BIG = 2**80 + 1


@asynccontextmanager
async def stocked(folder: Path) -> AsyncIterator[tuple[Shop, dict[str, str]]]:
    """A served shop with a job in every state that stays."""
    async with served(shop(folder)) as its:
        ids = {"done": await its.add(), "dead": await its.add("send")}
        async with its.app.worker(guarded=False), asyncio.timeout(PATIENCE_S):
            for state, id in ids.items():
                while (await its.get(f"/v1/jobs/{id}")).json()["state"] != state:
                    await asyncio.sleep(0.01)
        ids["waiting"] = await its.add(delay="1h", meta={"customer": "42"})
        yield its, ids


# --- Add


async def test_a_job_is_added_with_all_its_options(tmp_path: Path) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    async with served(shop(tmp_path)) as its:
        form = {
            "task": "pack",
            "arguments": {"order": BIG, "note": "grüße"},
            "at": at.isoformat(),
            "id": "orders/1",
            "queue": "rush",
            "priority": "high",
            "retries": 2,
            "timeout": "90s",
            "expires": "10m",
            "meta": {"customer": "42"},
        }
        answer = await its.post("/v1/jobs", form)
        assert (answer.status_code, answer.json()) == (
            201,
            {"id": "orders/1", "added": True, "answer": "added"},
        )
        assert answer.headers["location"] == "/v1/jobs/orders%2F1"
        job = (await its.get(answer.headers["location"])).json()
    assert job["arguments"] == {"order": BIG, "note": "grüße"}
    assert (job["queue"], job["priority"], job["retries"]) == ("rush", "high", 2)
    assert (job["timeout_ms"], job["meta"]) == (90_000, {"customer": "42"})
    due = datetime.fromisoformat(job["due"])
    assert timedelta() <= due - at < timedelta(milliseconds=1)
    assert datetime.fromisoformat(job["expires"]) - due == timedelta(minutes=10)


async def test_an_id_that_is_taken_adds_nothing(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add(id="order-1")
        again = await its.post(
            "/v1/jobs", {"task": "pack", "arguments": {"order": 2}, "id": "order-1"}
        )
        assert (again.status_code, again.json()) == (
            200,
            {"id": "order-1", "added": False, "answer": "kept"},
        )
        assert (await its.get("/v1/jobs/order-1")).json()["arguments"] == {"order": 1}


@pytest.mark.parametrize(
    "form, words",
    [
        ({"arguments": {}}, "give a task, or a url"),
        ({"task": "pack"}, "missing a required argument: 'order'"),
        ({"task": "pack", "arguments": {"order": "one"}}, "order"),
        ({"task": "pack", "arguments": {"order": 1, "color": "red"}}, "color"),
        ({"task": "pack", "arguments": {"order": 1}, "dealy": "1h"}, "dealy"),
        ({"task": "pack", "arguments": {"order": 1}, "delay": "soon"}, "not a duration"),
        ({"task": "pack", "arguments": {"order": 1}, "delay": "-1s"}, "not a duration"),
        ({"task": "pack", "arguments": {"order": 1}, "at": "2026-01-31T09:30:00"}, "zone"),
        (
            {"task": "pack", "arguments": {"order": 1}, "delay": 1, "at": "2026-01-31T09:30:00Z"},
            "both",
        ),
        ({"task": "pack", "arguments": {"order": 1}, "priority": "top"}, "priority"),
        ({"task": "pack", "arguments": {"order": 1}, "queue": "a b"}, "queue name"),
        ({"task": "pack", "arguments": {"order": 1}, "meta": {"a": 1}}, "meta"),
        ({"task": "pack", "arguments": {"order": 1}, "meta": {"tickwheel.x": "1"}}, "reserved"),
        ({"task": "pack", "arguments": {"order": 1}, "method": "GET"}, "only a job with a url"),
        ({"task": "pack", "arguments": [1]}, "arguments"),
    ],
)
async def test_what_can_not_be_a_job_is_refused(
    tmp_path: Path, form: dict[str, Any], words: str
) -> None:
    async with served(shop(tmp_path)) as its:
        assert words in problem(await its.post("/v1/jobs", form), 422, "invalid")
        none: dict[str, Any] = {"jobs": [], "cursor": None, "looked": 0}
        assert (await its.get("/v1/jobs")).json() == none


async def test_a_task_that_the_app_does_not_know_is_refused(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        answer = await its.post("/v1/jobs", {"task": "pakc"})
        assert "the tasks are: pack, send" in problem(answer, 422, "unknown-task")


async def test_a_url_needs_a_task_that_calls_it(tmp_path: Path) -> None:
    form = {
        "url": "https://shop.example/paid",
        "method": "POST",
        "body": {"order": 1},
        "delay": "1h",
    }
    async with served(shop(tmp_path)) as its:
        problem(await its.post("/v1/jobs", form), 422, "no-callbacks")
    app = shop(tmp_path)
    Callbacks(app)
    async with served(app) as its:
        id = (await its.post("/v1/jobs", form | {"on_done": "https://shop.example/done"})).json()[
            "id"
        ]
        job = (await its.get(f"/v1/jobs/{id}")).json()
        assert job["task"] == "http.call"
        assert job["arguments"]["url"] == "https://shop.example/paid"
        assert job["arguments"]["on_done"] == "https://shop.example/done"
        deep: Any = []
        for _ in range(200):
            deep = [deep]
        problem(await its.post("/v1/jobs", form | {"body": deep}), 422, "invalid")
        inside = await its.post("/v1/jobs", form | {"url": "http://169.254.169.254/"})
        assert "metadata" in problem(inside, 422, "invalid")
        both = await its.post("/v1/jobs", form | {"task": "pack"})
        assert "not both" in problem(both, 422, "invalid")


async def test_jobs_of_a_batch_are_added_or_refused_one_by_one(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add(id="taken")
        good = {"task": "pack", "arguments": {"order": 1}}
        jobs = [
            good,
            {"task": "nope"},
            good | {"id": "taken"},
            {"tusk": "pack"},
            7,
            good | {"id": "x"},
        ]
        answer = await its.post("/v1/jobs/batch", {"jobs": jobs})
        assert answer.status_code == 200
        found = answer.json()
        assert found["added"] == 2
        assert [each["added"] for each in found["results"]] == [
            True,
            False,
            False,
            False,
            False,
            True,
        ]
        kinds = [each["problem"] and each["problem"]["type"] for each in found["results"]]
        invalid, unknown = (f"urn:tickwheel:problem:{each}" for each in ("invalid", "unknown-task"))
        assert kinds == [None, unknown, None, invalid, invalid, None]
        assert found["results"][1]["problem"]["request_id"] == answer.headers["x-request-id"]
        assert found["results"][2]["id"] == "taken"
        too_many = await its.post("/v1/jobs/batch", {"jobs": [good] * 1001})
        assert "1000" in problem(too_many, 422, "invalid")
        assert len((await its.get("/v1/jobs")).json()["jobs"]) == 3


# --- With an Idempotency-Key


async def test_a_repeat_with_the_same_key_adds_nothing_and_has_the_same_answer(
    tmp_path: Path,
) -> None:
    async with served(shop(tmp_path)) as its:
        form = {"task": "pack", "arguments": {"order": 1, "note": "a"}, "delay": 60}
        first = await its.post("/v1/jobs", form, headers={"Idempotency-Key": "pay-1"})
        assert first.status_code == 201 and "idempotent-replay" not in first.headers
        for key in ("pay-1", '"pay-1"'):
            turned = {"delay": 60, "arguments": {"note": "a", "order": 1}, "task": "pack"}
            again = await its.post("/v1/jobs", turned, headers={"Idempotency-Key": key})
            assert (again.status_code, again.json()) == (200, first.json())
            assert again.headers["idempotent-replay"] == "true"
            assert again.headers["location"] == first.headers["location"]
        other = await its.post(
            "/v1/jobs", form | {"delay": 61}, headers={"Idempotency-Key": "pay-1"}
        )
        problem(other, 422, "idempotency-key-reused")
        [job] = (await its.get("/v1/jobs")).json()["jobs"]
        assert job["meta"] == {}


async def test_a_repeat_of_a_batch_adds_what_is_missing(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        jobs: list[Any] = [{"task": "pack", "arguments": {"order": n}} for n in range(3)]
        key = {"Idempotency-Key": "night"}
        first = (await its.post("/v1/jobs/batch", {"jobs": jobs}, headers=key)).json()
        lost = first["results"][1]["id"]
        await its.post(f"/v1/jobs/{lost}/cancel")
        await its.ask("DELETE", f"/v1/jobs/{lost}")
        again = (await its.post("/v1/jobs/batch", {"jobs": jobs}, headers=key)).json()
        assert again == first | {"added": 1}
        jobs[0]["arguments"] = {"order": 9}
        third = (await its.post("/v1/jobs/batch", {"jobs": jobs}, headers=key)).json()
        assert third["added"] == 0
        assert third["results"][0]["problem"]["type"].endswith("idempotency-key-reused")


@pytest.mark.parametrize("key", ["", "x" * 129, "caf\u00e9"])
async def test_a_key_must_be_short_ascii_and_excludes_an_id(tmp_path: Path, key: str) -> None:
    async with served(shop(tmp_path)) as its:
        form = {"task": "pack", "arguments": {"order": 1}}
        bad = await its.post("/v1/jobs", form, headers={"Idempotency-Key": key.encode("latin-1")})
        problem(bad, 400, "bad-request")
        both = await its.post("/v1/jobs", form | {"id": "a"}, headers={"Idempotency-Key": "k"})
        assert "not both" in problem(both, 422, "invalid")


async def test_while_the_first_is_under_way_a_second_is_told_so(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its, app:
        store = (await app.client()).store
        add, gate, reached = store.add, asyncio.Event(), asyncio.Event()

        async def slow(jobs: Any) -> Any:
            reached.set()
            await gate.wait()
            return await add(jobs)

        client = await app.client()
        client._adding._flush = slow
        form = {"task": "pack", "arguments": {"order": 1}}
        key = {"Idempotency-Key": "pay-1"}
        first = asyncio.create_task(its.post("/v1/jobs", form, headers=key))
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        second = await its.post("/v1/jobs", form, headers=key)
        problem(second, 409, "idempotency-in-progress")
        assert second.headers["retry-after"] == "1"
        gate.set()
        assert (await first).status_code == 201
        assert (await its.post("/v1/jobs", form, headers=key)).status_code == 200


# --- Find and look


async def test_jobs_are_found_by_state_queue_task_and_meta(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        for query, names in {
            "": {"done", "dead", "waiting"},
            "state=dead": {"dead"},
            "queue=mail": {"dead"},
            "task=pack": {"done", "waiting"},
            "meta=customer=42": {"waiting"},
            "task=pack&state=done": {"done"},
            "queue=null": set(),
        }.items():
            found = (await its.get(f"/v1/jobs?{query}")).json()
            assert {job["id"] for job in found["jobs"]} == {ids[name] for name in names}, query
        [dead] = (await its.get("/v1/dead")).json()["jobs"]
        assert dead["error"] == "ValueError: no mailbox for ann"
        assert dead["history"][0]["outcome"] == "dead"


async def test_a_list_goes_on_page_by_page(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        added = {await its.add(delay=60 + n) for n in range(5)}
        seen: list[str] = []
        cursor = None
        while True:
            more: dict[str, str] = {"cursor": cursor} if cursor else {}
            page = (await its.get("/v1/jobs", params={"limit": "2", **more})).json()
            assert len(page["jobs"]) <= 2
            seen += [job["id"] for job in page["jobs"]]
            cursor = page["cursor"]
            if cursor is None:
                break
        assert len(seen) == 5 and set(seen) == added
        problem(await its.get("/v1/jobs?cursor=zzz"), 422, "invalid")


async def test_a_job_is_shown_and_explained(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        done = (await its.get(f"/v1/jobs/{ids['done']}")).json()
        assert (done["state"], done["result"]) == ("done", {"order": 1})
        found = (await its.get(f"/v1/jobs/{ids['waiting']}/explain")).json()
        assert found["blocked"] and "no_worker" in [each["code"] for each in found["reasons"]]
        for path in ("/v1/jobs/nope", "/v1/jobs/nope/explain", "/v1/jobs/%00", "/v1/jobs/%FF"):
            problem(await its.get(path), 404, "not-found")


# --- Change


async def test_a_job_is_cancelled_rerun_and_deleted(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        id = ids["waiting"]
        for _ in range(2):
            problem(await its.ask("DELETE", f"/v1/jobs/{id}"), 409, "conflict")
            problem(await its.post(f"/v1/jobs/{id}/rerun"), 409, "conflict")
        cancelled = await its.post(f"/v1/jobs/{id}/cancel")
        assert cancelled.json() == {"id": id, "outcome": "cancelled"}
        assert "ended" in problem(await its.post(f"/v1/jobs/{id}/cancel"), 409, "conflict")
        assert (await its.post(f"/v1/jobs/{id}/rerun")).json()["outcome"] == "rerun"
        deleted = await its.ask("DELETE", f"/v1/jobs/{ids['done']}")
        assert deleted.json() == {"id": ids["done"], "outcome": "deleted"}
        for step in ("cancel", "rerun"):
            problem(await its.post(f"/v1/jobs/{ids['done']}/{step}"), 404, "not-found")


async def test_many_jobs_are_changed_by_ids(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        answer = await its.post("/v1/jobs/cancel", {"ids": [ids["waiting"], ids["done"], "nope"]})
        assert answer.json() == {
            "changed": 1,
            "more": False,
            "results": [
                {"id": ids["waiting"], "outcome": "cancelled"},
                {"id": ids["done"], "outcome": "too_late"},
                {"id": "nope", "outcome": "unknown"},
            ],
        }
        rerun = await its.post("/v1/dead/rerun", {"ids": [ids["dead"], ids["done"]]})
        outcomes = [each["outcome"] for each in rerun.json()["results"]]
        assert outcomes == ["rerun", "not_dead"]


async def test_many_jobs_are_changed_by_filter_and_it_says_if_more_remain(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        for _ in range(5):
            await its.add(delay="1h")
        some = {"filter": {"task": "pack"}, "limit": 2}
        for changed, more in ((2, True), (2, True), (1, False)):
            found = (await its.post("/v1/jobs/cancel", some)).json()
            assert (found["changed"], found["more"]) == (changed, more)
        deleted = await its.post("/v1/jobs/delete", {"filter": {"state": "cancelled"}})
        assert deleted.json()["changed"] == 5
        assert (await its.get("/v1/jobs")).json()["jobs"] == []


async def test_dead_jobs_are_rerun_and_deleted_by_filter(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        none = await its.post("/v1/dead/rerun", {"filter": {"queue": "default"}})
        assert none.json() == {"changed": 0, "more": False, "results": []}
        recent = {"filter": {"since": "2020-01-01T00:00:00Z"}}
        assert (await its.post("/v1/dead/rerun", recent)).json()["changed"] == 1
        assert (await its.get(f"/v1/jobs/{ids['dead']}")).json()["state"] == "waiting"
        assert (await its.post("/v1/dead/delete", {"filter": {}})).json()["changed"] == 0
        by_state = {"filter": {"state": "done"}}
        assert (await its.post("/v1/jobs/rerun", by_state)).json()["changed"] == 1


@pytest.mark.parametrize(
    "step, which, words",
    [
        ("jobs/cancel", {}, "which jobs"),
        ("jobs/cancel", {"filter": {}}, "which jobs"),
        ("jobs/cancel", {"ids": ["a"], "filter": {"task": "pack"}}, "which jobs"),
        ("jobs/cancel", {"filter": {"state": "done"}}, "waiting, running"),
        ("jobs/rerun", {"filter": {"task": "pack"}}, "in which state"),
        ("jobs/delete", {"filter": {"state": "waiting"}}, "done, dead, cancelled"),
        ("jobs/delete", {"ids": ["x"] * 1001}, "1000"),
        ("jobs/delete", {"filter": {"state": "done"}, "limit": 10_001}, "10000"),
        ("dead/delete", {"filter": {"state": "done"}}, "state"),
        ("dead/delete", {"filter": {"meta": {"a": "1", "b": "2"}}}, "one name"),
    ],
)
async def test_which_jobs_must_be_clear(
    tmp_path: Path, step: str, which: dict[str, Any], words: str
) -> None:
    async with served(shop(tmp_path)) as its:
        assert words in problem(await its.post(f"/v1/{step}", which), 422, "invalid")


# --- A store alone


async def test_a_server_for_a_store_alone_takes_any_task(tmp_path: Path) -> None:
    from tickwheel.http.asgi import asgi_app
    from tickwheel.http.server import Listening, serving

    app = App(f"sqlite:///{tmp_path}/jobs.db", name="serve")
    async with serving(asgi_app(app, takes_any_task=True), Listening(port=0)) as url:
        its = Shop(app, url)
        import httpx

        async with httpx.AsyncClient(base_url=url) as its.client:
            form = {"task": "billing.charge", "arguments": {"amount": BIG, "to": ["ann"]}}
            id = (await its.post("/v1/jobs", form)).json()["id"]
            job = (await its.get(f"/v1/jobs/{id}")).json()
            assert (job["task"], job["arguments"]) == ("billing.charge", form["arguments"])
            put = await its.ask("PUT", "/v1/schedules/hourly", json={"task": "x", "every": "1h"})
            assert put.status_code == 201
            bad = await its.post("/v1/jobs", {"task": "no good name"})
            assert "task name" in problem(bad, 422, "invalid")


# --- Identity and moves


async def test_a_job_replaces_the_one_that_has_its_id_once_per_request(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add(id="a", delay="1h")
        form = {"task": "pack", "id": "a", "delay": "2h", "if_exists": "replace"}
        first = form | {"arguments": {"order": 7}, "request": "r1"}
        answer = await its.post("/v1/jobs", first)
        assert answer.status_code == 200
        assert answer.json() == {"id": "a", "added": False, "answer": "replaced"}
        await its.post("/v1/jobs", form | {"arguments": {"order": 8}, "request": "r2"})
        assert (await its.post("/v1/jobs", first)).json()["answer"] == "replaced"
        assert (await its.get("/v1/jobs/a")).json()["arguments"]["order"] == 8
        batch = {"jobs": [first | {"request": "r3"}, {"task": "pack", "arguments": {"order": 1}}]}
        answers = (await its.post("/v1/jobs/batch", batch)).json()
        assert [each["answer"] for each in answers["results"]] == ["replaced", "added"]
        assert answers["added"] == 1


async def test_if_exists_needs_an_id_and_excludes_a_key(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        form = {"task": "pack", "arguments": {"order": 1}, "if_exists": "replace"}
        assert "needs an id" in problem(await its.post("/v1/jobs", form), 422, "invalid")
        key = {"Idempotency-Key": "k"}
        both = await its.post("/v1/jobs", form | {"id": "a"}, headers=key)
        assert "not both" in problem(both, 422, "invalid")


async def test_jobs_move_one_or_many(tmp_path: Path) -> None:
    async with stocked(tmp_path) as (its, ids):
        path = f"/v1/jobs/{ids['waiting']}"
        before = datetime.fromisoformat((await its.get(path)).json()["due"])
        moved = await its.post(f"{path}/move", {"queue": "slow", "priority": "low"})
        assert (moved.status_code, moved.json()["outcome"]) == (200, "moved")
        body = {"filter": {"queue": "slow"}, "to": {"later": "2h"}}
        assert (await its.post("/v1/jobs/move", body)).json()["changed"] == 1
        job = (await its.get(path)).json()
        assert datetime.fromisoformat(job["due"]) - before == timedelta(hours=2)
        assert (job["queue"], job["priority"]) == ("slow", "low")
        late = await its.post(f"/v1/jobs/{ids['done']}/move", {"delay": 0})
        assert "too late" in problem(late, 409, "conflict")
        for wrong in ({}, {"delay": 1, "later": 1}):
            problem(await its.post(f"{path}/move", wrong), 422, "invalid")
