"""Views, time ranges, texts and counts of jobs over HTTP, and what dead jobs died of."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dashboard_store import fill
from http_server import Shop, problem, served, shop

from tickwheel import App
from tickwheel.job import Settlement, dead, done, retry

# What each of the answers may take with a million jobs, on a processor, which others may use too.
FAST_S = 0.3


def iso(**ahead: float) -> str:
    at = datetime.now(UTC) + timedelta(**ahead)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def settle(its: Shop, id: str, how: str, error: str = "ValueError: no") -> None:
    """Run a job that is due, and let it end so."""
    client = await its.app.client()
    now_ms = client.clock.now_ms()
    jobs = await client.store.claim(
        ["default", "mail"], worker="ann", limit=100, now_ms=now_ms, lease_ms=60_000
    )
    [job] = [each for each in jobs if each.id == id]
    settlement: dict[str, Settlement] = {
        "done": done(job, started_ms=now_ms, ended_ms=now_ms),
        "dead": dead(job, error=error, ended_ms=now_ms),
        "retry": retry(job, due_ms=now_ms + 3_600_000, error=error, ended_ms=now_ms),
    }
    others = [each for each in jobs if each.id != id]
    assert not others
    assert await client.store.settle([settlement[how]], now_ms=now_ms) == [True]


async def ids(its: Shop, path: str, **more: Any) -> list[str]:
    answer = await its.get(path, **more)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["jobs"]]


async def count(its: Shop, query: str) -> tuple[int, bool]:
    found = (await its.get(f"/v1/jobs/count?{query}")).json()
    return found["count"], found["exact"]


async def one_of_each(its: Shop) -> None:
    await its.add(id="retrying")
    await settle(its, "retrying", "retry")
    await its.add(id="done")
    await settle(its, "done", "done")
    await its.add("send", id="dead")
    await settle(its, "dead", "dead")
    await its.add(id="cancelled", delay="1h")
    await its.post("/v1/jobs/cancelled/cancel")
    await its.add(id="running")
    client = await its.app.client()
    now_ms = client.clock.now_ms()
    await client.store.claim(["default"], worker="ann", limit=1, now_ms=now_ms, lease_ms=60_000)
    await its.add(id="ready")
    await its.add(id="scheduled", delay="2h")


async def test_views_show_jobs_as_people_think_of_them(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await one_of_each(its)
        for view, expected in {
            "scheduled": ["retrying", "scheduled"],
            "ready": ["ready"],
            "retrying": ["retrying"],
            "running": ["running"],
            "done": ["done"],
            "dead": ["dead"],
            "cancelled": ["cancelled"],
        }.items():
            assert await ids(its, f"/v1/jobs?view={view}") == expected
            assert await count(its, f"view={view}") == (len(expected), True)
        assert await count(its, "") == (7, True)
        assert await count(its, "queue=mail") == (1, True)
        assert await count(its, "state=waiting&task=pack") == (3, True)
        both = await its.get("/v1/jobs?view=dead&state=dead")
        assert "a state or a view" in problem(both, 422, "invalid")
        problem(await its.get("/v1/jobs?view=late"), 400, "bad-request")


async def test_jobs_are_found_by_time_worker_and_text(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await one_of_each(its)
        range_ = f"from={iso(minutes=90)}&until={iso(hours=3)}"
        assert await ids(its, f"/v1/jobs?{range_}") == ["scheduled"]
        assert await count(its, f"view=scheduled&{range_}") == (1, True)
        assert await ids(its, f"/v1/jobs?view=dead&until={iso(hours=-1)}") == []
        assert await ids(its, f"/v1/jobs?view=dead&from={iso(hours=-1)}") == ["dead"]
        assert await ids(its, "/v1/jobs?worker=ann") == ["running"]
        assert await ids(its, "/v1/jobs?worker=bob") == []
        refused = await its.get("/v1/jobs?worker=ann&view=dead")
        assert "only running jobs" in problem(refused, 422, "invalid")
        assert await ids(its, "/v1/jobs?text=valueerror&view=dead") == ["dead"]
        assert await ids(its, "/v1/jobs?text=SCHED") == ["scheduled"]
        assert await ids(its, '/v1/jobs?text="to":"ann"') == ["dead"]
        assert await ids(its, "/v1/jobs?text=nothing+of+that") == []
        assert await count(its, "text=SCHED") == (1, True)


async def test_ended_jobs_come_newest_first_whatever_their_queue(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        for n in range(6):
            task = "send" if n % 2 else "pack"
            await its.add(task, id=f"{n}")
            await settle(its, f"{n}", "dead")
            time.sleep(0.002)
        first = (await its.get("/v1/jobs?view=dead&limit=4")).json()
        rest = (
            await its.get("/v1/jobs", params={"view": "dead", "cursor": first["cursor"]})
        ).json()
        found = [job["id"] for job in first["jobs"] + rest["jobs"]]
        assert found == ["5", "4", "3", "2", "1", "0"]
        assert rest["cursor"] is None


async def test_what_is_hidden_from_a_key_is_never_found(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True, redact=["password", "token"]) as its:
        secret = {"order": 1, "password": "swordfish", "note": "fine"}
        await its.add(id="a", arguments=secret, meta={"token": "trout", "kind": "swimming"})
        clerk = await its.key("read", "operate")
        for text in ("swordfish", "trout", "fish"):
            assert await ids(its, f"/v1/jobs?text={text}") == ["a"]
            assert await ids(its, f"/v1/jobs?text={text}", headers=clerk) == []
            found = await its.get(f"/v1/jobs/count?text={text}", headers=clerk)
            assert found.json()["count"] == 0
            body = {"filter": {"text": text}}
            changed = await its.post("/v1/jobs/cancel", body, headers=clerk)
            assert changed.json()["changed"] == 0
        assert await ids(its, "/v1/jobs?text=swimming", headers=clerk) == ["a"]
        assert await ids(its, "/v1/jobs?meta=kind=swimming", headers=clerk) == ["a"]
        assert await ids(its, "/v1/jobs?meta=token=trout") == ["a"]
        for path in ("/v1/jobs?meta=token=trout", "/v1/jobs/count?meta=Token=trout"):
            refused = await its.get(path, headers=clerk)
            assert "hidden" in problem(refused, 403, "forbidden")
        refused = await its.post(
            "/v1/jobs/cancel", {"filter": {"meta": {"token": "trout"}}}, headers=clerk
        )
        problem(refused, 403, "forbidden")


async def test_a_key_with_limits_counts_what_it_may_see(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        for n in range(3):
            await its.add(id=f"pack {n}", delay="10m")
        await its.add("send", id="send", delay="10m")
        mail, packing = (
            await its.key("read", queues=["mail"]),
            await its.key("read", tasks=["pack"]),
        )
        due = f"/v1/due?from={iso()}&until={iso(hours=1)}&slots=1"
        for headers, expected in ((mail, 1), (packing, 3)):
            found = (await its.get("/v1/jobs/count?state=waiting", headers=headers)).json()
            assert found["count"] == expected
            counted = (await its.get(due, headers=headers)).json()
            assert (counted["counts"], counted["exact"]) == ([expected], True)
            # How many others there are is not for them.
            assert counted["looked"] == found["looked"] == expected
            listed = (await its.get("/v1/jobs", headers=headers)).json()
            assert listed["looked"] == expected
        exact = (await its.get(f"{due}&queue=mail", headers=mail)).json()
        assert (exact["counts"], exact["exact"], exact["looked"]) == ([1], True, 0)
        other = (await its.get(f"{due}&queue=default", headers=mail)).json()
        assert other["counts"] == [0]


async def test_due_jobs_are_counted_by_slots(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        for n, delay in enumerate(("0s", "10m", "11m", "55m", "2h")):
            await its.add(id=f"{n}", delay=delay)
        start, end = iso(minutes=5), iso(minutes=65)
        found = (await its.get(f"/v1/due?from={start}&until={end}&slots=4")).json()
        assert found == {
            "from": start,
            "until": end,
            "width_ms": 900_000,
            "counts": [2, 0, 0, 1],
            "overdue": 1,
            "later": 1,
            "exact": True,
            "looked": 0,
        }
        backwards = await its.get(f"/v1/due?from={end}&until={start}")
        assert "until must be after from" in problem(backwards, 422, "invalid")
        problem(await its.get(f"/v1/due?from={start}&until={end}&slots=1441"), 400, "bad-request")
        problem(await its.get(f"/v1/due?from={start}"), 400, "bad-request")


# --- Dead jobs


async def some_dead(its: Shop) -> None:
    for n in range(5):
        await its.add("send" if n < 3 else "pack", id=f"{n}")
        words = f"no mailbox for 'user{n}'" if n < 3 else f"order {n} is 0x{n:08x}"
        await settle(its, f"{n}", "dead", f"ValueError: {words}")
        time.sleep(0.002)


async def test_dead_jobs_are_grouped_by_what_they_died_of(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await some_dead(its)
        found = (await its.get("/v1/dead/groups")).json()
        assert (found["looked"], found["total"]) == (5, 5)
        mail, orders = found["groups"]
        assert (mail["task"], mail["count"], mail["queues"]) == ("send", 3, ["mail"])
        assert mail["error"] == "ValueError: no mailbox for …"
        assert mail["sample"]["id"] == "2"
        assert mail["sample"]["error"] == "ValueError: no mailbox for 'user2'"
        assert mail["first"] < mail["last"]
        assert (orders["task"], orders["count"]) == ("pack", 2)
        only = (await its.get("/v1/dead/groups?queue=default")).json()
        assert [each["fingerprint"] for each in only["groups"]] == [orders["fingerprint"]]
        listed = await ids(its, f"/v1/dead?fingerprint={mail['fingerprint']}")
        assert sorted(listed) == ["0", "1", "2"]
        body = {"filter": {"fingerprint": mail["fingerprint"]}}
        rerun = (await its.post("/v1/dead/rerun", body)).json()
        assert (rerun["changed"], rerun["more"]) == (3, False)
        assert await ids(its, "/v1/jobs?view=ready") != []
        assert sorted(await ids(its, "/v1/dead")) == ["3", "4"]


async def test_a_bulk_operation_leaves_alone_what_ends_after_its_time(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await some_dead(its)
        time.sleep(0.002)
        began = iso()
        time.sleep(0.002)
        await its.add(id="late")
        await settle(its, "late", "dead")
        body = {"filter": {"view": "dead", "until": began}, "limit": 2}
        changed, more = 0, True
        while more:
            answer = (await its.post("/v1/jobs/rerun", body)).json()
            changed, more = changed + answer["changed"], answer["more"]
        assert changed == 5
        assert await ids(its, "/v1/dead") == ["late"]
        wrong = await its.post("/v1/jobs/rerun", {"filter": {"view": "ready"}})
        assert "view=ready: must be one of" in problem(wrong, 422, "invalid")
        cancelled = await its.post("/v1/jobs/cancel", {"filter": {"view": "ready"}})
        assert cancelled.json()["changed"] == 5


# --- With a million jobs


@pytest.mark.slow
async def test_every_answer_comes_soon_with_a_million_jobs(tmp_path: Path) -> None:
    await fill(tmp_path / "jobs.db")
    app = App(f"sqlite:///{tmp_path}/jobs.db", name="shop")
    range_ = f"from={iso(hours=-1)}&until={iso(minutes=-30)}"
    paths = [
        "/v1/jobs?view=scheduled",
        "/v1/jobs?view=ready",
        "/v1/jobs?view=retrying",
        "/v1/jobs?view=done&limit=1000",
        f"/v1/jobs?view=done&{range_}",
        "/v1/jobs?text=no+such+text",
        "/v1/jobs?view=done&text=secret-99",
        "/v1/jobs/count?view=scheduled",
        "/v1/jobs/count?view=retrying",
        "/v1/jobs/count?text=order",
        f"/v1/jobs/count?view=done&{range_}",
        f"/v1/due?from={iso()}&until={iso(hours=1)}",
        "/v1/dead/groups",
    ]
    async with served(app, redact=["password"]) as its:
        for path in paths:
            await its.get("/v1/stats")
            start = time.process_time()
            answer = await its.get(path)
            took_s = time.process_time() - start
            assert answer.status_code == 200, answer.text
            assert took_s < FAST_S, f"{path}: {took_s * 1000:.0f} ms"
        assert (await its.get("/v1/jobs/count?view=running&worker=worker-3")).json()["count"] > 0
        groups = (await its.get("/v1/dead/groups")).json()
        assert (len(groups["groups"]), groups["looked"], groups["total"]) == (2, 10_000, 40_000)


async def test_a_brief_list_leaves_out_what_may_be_large(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        await its.add("send", id="dead")
        await settle(its, "dead", "dead", error="ValueError: " + "x" * 2000)
        [whole] = (await its.get("/v1/jobs?view=dead")).json()["jobs"]
        assert whole["arguments"] and len(whole["error"]) > 1000
        [job] = (await its.get("/v1/jobs?view=dead&brief=true")).json()["jobs"]
        left_out = dict.fromkeys(("arguments", "result", "traceback"))
        error = whole["error"][:500]
        history = [{**run, "error": error} for run in whole["history"]]
        assert history and job == {**whole, **left_out, "error": error, "history": history}
        problem(await its.get("/v1/jobs?brief=maybe"), 400, "bad-request")
