"""Requests that wait for the end of a job, and what becomes of requests when a server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_faces import FACES, FaceName, facing
from http_server import PATIENCE_S, Shop, problem, served, shop

from tickwheel import App, ResultTimeout
from tickwheel.http import api
from tickwheel.http.server import Listening, serving
from tickwheel.operate.keys import Keys, id_of
from tickwheel.stores.sqlite.store import SqliteStore

# Long enough that no answer comes because of it.
LONG = "60s"


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.005)


def waiting(app: App) -> Callable[[], int]:
    """How many jobs somebody waits for."""
    [client] = app._access._clients.values()
    return lambda: sum(map(len, client._ends._waiting.values()))


async def get_waiting(its: Shop, id: str, wait: str) -> tuple[httpx.Response, float]:
    began = time.monotonic()
    answer = await its.get(f"/v1/jobs/{id}", params={"wait": wait}, timeout=PATIENCE_S)
    return answer, time.monotonic() - began


async def test_the_answer_comes_when_the_job_has_ended(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its:
        id = await its.add()
        asked = asyncio.create_task(get_waiting(its, id, LONG))
        await until(lambda: waiting(app)() == 1)
        async with app.worker():
            answer, _ = await asked
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["result"]) == ("done", {"order": 1})


async def test_a_job_that_has_ended_is_answered_at_once(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its:
        id = await its.add(delay="1h")
        await its.post(f"/v1/jobs/{id}/cancel")
        answer, took_s = await get_waiting(its, id, LONG)
        assert answer.json()["state"] == "cancelled" and took_s < 30
        assert (await its.get(f"/v1/jobs/no?wait={LONG}")).status_code == 404


async def test_at_the_end_of_the_wait_the_answer_is_the_job_as_it_is(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        id = await its.add(delay="1h")
        answer, took_s = await get_waiting(its, id, "200ms")
    assert (answer.status_code, answer.json()["state"]) == (200, "waiting")
    assert took_s >= 0.2


@pytest.mark.parametrize("wait", ["61s", "soon", "-1s"])
async def test_a_wait_that_is_too_long_or_none_is_refused(tmp_path: Path, wait: str) -> None:
    async with served(shop(tmp_path)) as its:
        id = await its.add(delay="1h")
        answer, _ = await get_waiting(its, id, wait)
    assert (answer.status_code, "wait" in answer.json()["detail"]) == (422, True)


async def test_a_wait_may_take_longer_than_other_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(shop(tmp_path)) as its:
        id = await its.add(delay="1h")
        monkeypatch.setattr(api, "REQUEST_S", 0.3)
        answer, _ = await get_waiting(its, id, "900ms")
    assert answer.status_code == 200


async def test_only_so_many_wait_and_others_are_answered_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "WAITING_MOST", 2)
    monkeypatch.setattr(api, "REQUESTS_MOST", 2)
    app = shop(tmp_path)
    async with served(app) as its:
        id = await its.add(delay="1h")
        asked = [asyncio.create_task(get_waiting(its, id, LONG)) for _ in range(2)]
        await until(lambda: waiting(app)() == 2)
        answer, _ = await get_waiting(its, id, LONG)
        assert (answer.status_code, answer.json()["type"][-10:]) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert (await its.get(f"/v1/jobs/{id}")).status_code == 200
        await its.post(f"/v1/jobs/{id}/cancel")
        for each in asked:
            answer, _ = await each
            assert answer.json()["state"] == "cancelled"
        assert (await get_waiting(its, id, LONG))[0].status_code == 200


@pytest.mark.parametrize("how", ["revoked", "revoked elsewhere", "expired"])
async def test_the_wait_of_a_key_ends_with_the_key(tmp_path: Path, how: str) -> None:
    app = shop(tmp_path)
    async with served(app, keys=True) as its:
        id = await its.add(delay="1h")
        key = await its.key("read", expires="4s" if how == "expired" else None)
        asked = asyncio.create_task(
            its.get(f"/v1/jobs/{id}", params={"wait": LONG}, headers=key, timeout=PATIENCE_S)
        )
        await until(lambda: waiting(app)() == 1 or asked.done())
        text = its.texts[-1]
        if how == "revoked":
            assert (await its.ask("DELETE", f"/v1/keys/{text}")).status_code == 200
        if how == "revoked elsewhere":
            assert await Keys(await app.client()).revoke(id_of(text))
        problem(await asked, 401, "unauthorized")
        await until(lambda: waiting(app)() == 0)


async def test_the_end_of_a_job_is_not_told_to_a_key_that_was_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LOOK_S", 100.0)
    app = shop(tmp_path)
    async with served(app, keys=True) as its:
        id = await its.add(delay="1h")
        key = await its.key("read")
        asked = asyncio.create_task(
            its.get(f"/v1/jobs/{id}", params={"wait": LONG}, headers=key, timeout=PATIENCE_S)
        )
        await until(lambda: waiting(app)() == 1)
        assert (await its.ask("DELETE", f"/v1/keys/{its.texts[-1]}")).status_code == 200
        await its.post(f"/v1/jobs/{id}/cancel")
        problem(await asked, 401, "unauthorized")


async def test_nobody_waits_for_a_client_that_has_left(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with served(app) as its:
        id = await its.add(delay="1h")
        asked = asyncio.create_task(get_waiting(its, id, LONG))
        await until(lambda: waiting(app)() == 1)
        asked.cancel()
        await until(lambda: waiting(app)() == 0)


async def test_a_server_that_stops_ends_the_waits_with_the_job_as_it_is(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        async with serving(app.http(), Listening(port=0)) as url:
            form = {"task": "pack", "arguments": {"order": 1}, "delay": "1h"}
            id = (await client.post(f"{url}/v1/jobs", json=form)).json()["id"]
            asked = asyncio.create_task(client.get(f"{url}/v1/jobs/{id}?wait={LONG}"))
            await until(lambda: waiting(app)() == 1)
            left = time.monotonic()
        answer = await asked
    assert (answer.status_code, answer.json()["state"]) == (200, "waiting")
    assert time.monotonic() - left < 9, "the grace was not needed"


@pytest.mark.parametrize("name", FACES)
async def test_a_client_hears_of_the_end_without_polling(tmp_path: Path, name: FaceName) -> None:
    app = shop(tmp_path)
    count = 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        nonlocal count
        count += scope["type"] == "http"
        await http(scope, receive, send)

    http = app.http()
    async with serving(counted, Listening(port=0)) as url, facing(name, url) as face:
        job = await face.do(face.client.task("pack").enqueue, order=7)
        asked = asyncio.create_task(face.do(job.result, timeout="30s"))
        await until(lambda: waiting(app)() == 1)
        async with app.worker():
            assert await asked == {"order": 7}
        assert count == 2
        pack = face.client.task("pack").using(delay="1h")
        later = await face.do(pack.enqueue, order=8)
        with pytest.raises(ResultTimeout):
            await face.do(later.result, timeout="200ms")
        assert count <= 6


# --- What can't be waited for


async def test_a_request_that_is_stuck_at_the_end_of_the_grace_gets_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = asyncio.Event()

    async def never(*_: object) -> list[Any]:
        stuck.set()
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(SqliteStore, "get", never)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        async with serving(shop(tmp_path).http(), Listening(port=0, grace_s=1)) as url:
            asked = asyncio.create_task(client.get(f"{url}/v1/jobs/a"))
            async with asyncio.timeout(PATIENCE_S):
                await stuck.wait()
            began = time.monotonic()
        assert time.monotonic() - began < 8
        answer = await asked
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:tickwheel:problem:stopping"
