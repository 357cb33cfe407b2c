"""Who may do what over HTTP: keys, scopes, queues and tasks, rates, the audit log, secrets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from http_faces import facing
from http_server import Shop, problem, served, shop

from tickwheel import AccessDenied, App, State
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.http.access import refuse_open_bind
from tickwheel.job import Job
from tickwheel.operate.audit import Audit
from tickwheel.operate.keys import Scope

METHODS = ("post", "put", "delete")


async def operations(its: Shop) -> list[tuple[str, str, dict[str, Any]]]:
    """Each operation of the served document, with its path filled in."""
    found = (await its.get("/v1/openapi.json")).json()
    return [
        (method, path.replace("{id}", "x").replace("{name}", "x"), each)
        for path, methods in found["paths"].items()
        for method, each in methods.items()
    ]


# --- Keys and scopes


async def test_with_keys_nothing_goes_without_one(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        async with httpx.AsyncClient(base_url=its.url) as stranger:
            for method, path, each in await operations(its):
                answer = await stranger.request(method, path)
                if each["x-scope"] is None:
                    # To sign in takes a body.
                    assert answer.status_code == (415 if each["operationId"] == "sign_in" else 200)
                    continue
                problem(answer, 401, "unauthorized")
                assert answer.headers["www-authenticate"].startswith("Bearer")
            for text in ("Bearer tw_wrong", "Basic YTpi", "Bearer", "Bearer " + "x" * 600):
                headers = {"Authorization": text}
                problem(await stranger.get("/v1/jobs", headers=headers), 401, "unauthorized")
        assert await its.entries() == []


@pytest.mark.parametrize("scope", Scope)
async def test_a_key_without_the_scope_is_refused_by_every_operation(
    tmp_path: Path, scope: Scope
) -> None:
    """From the document itself, so that none is forgotten."""
    includes = {
        Scope.ADMIN: set(Scope),
        Scope.OPERATE: {Scope.OPERATE, Scope.READ},
    }.get(scope, {scope})
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key(scope)
        writes = 0
        for method, path, each in await operations(its):
            writes += method in METHODS
            answer = await its.ask(method.upper(), path, headers=key)
            if each["x-scope"] is None or each["x-scope"] in includes:
                assert answer.status_code not in (401, 403), (method, path)
            else:
                assert each["x-scope"] in problem(answer, 403, "forbidden")
        assert writes > 15


async def test_a_job_outside_the_queues_of_a_key_does_not_exist_for_it(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        hidden, seen = await its.add(delay="1h"), await its.add("send", delay="1h")
        await its.ask(
            "PUT",
            "/v1/schedules/nightly",
            json={"task": "pack", "arguments": {"order": 1}, "every": "1h"},
        )
        key = await its.key("operate", "enqueue", queues=["ma*"])
        for method, path in (
            ("GET", f"/v1/jobs/{hidden}"),
            ("GET", f"/v1/jobs/{hidden}/explain"),
            ("POST", f"/v1/jobs/{hidden}/cancel"),
            ("POST", f"/v1/jobs/{hidden}/rerun"),
            ("DELETE", f"/v1/jobs/{hidden}"),
            ("POST", "/v1/queues/default/pause"),
            ("GET", "/v1/schedules/nightly"),
            ("POST", "/v1/schedules/nightly/run"),
            ("DELETE", "/v1/schedules/nightly"),
        ):
            problem(await its.ask(method, path, headers=key), 404, "not-found")
        jobs = (await its.get("/v1/jobs", headers=key)).json()["jobs"]
        assert [job["id"] for job in jobs] == [seen]
        queues = (await its.get("/v1/queues", headers=key)).json()["queues"]
        assert [queue["name"] for queue in queues] == ["mail"]
        assert (await its.get("/v1/schedules", headers=key)).json() == {"schedules": []}
        assert (await its.get("/v1/stats", headers=key)).json()["waiting"] == 1
        problem(await its.get("/v1/doctor", headers=key), 403, "forbidden")
        by_ids = await its.post("/v1/jobs/cancel", {"ids": [hidden, seen]}, headers=key)
        outcomes = [each["outcome"] for each in by_ids.json()["results"]]
        assert outcomes == ["unknown", "cancelled"]
        by_filter = await its.post("/v1/jobs/cancel", {"filter": {"state": "waiting"}}, headers=key)
        assert by_filter.json()["changed"] == 0
        form = {"task": "pack", "arguments": {"order": 1}}
        problem(await its.post("/v1/jobs", form, headers=key), 403, "forbidden")
        mail = await its.post("/v1/jobs", form | {"queue": "mail"}, headers=key)
        assert mail.status_code == 201
        put = {"task": "pack", "arguments": {"order": 1}, "every": "1h"}
        problem(await its.ask("PUT", "/v1/schedules/x", json=put, headers=key), 403, "forbidden")
        put = {"task": "send", "arguments": {"to": "ann"}, "every": "1h"}
        taken = await its.ask("PUT", "/v1/schedules/nightly", json=put, headers=key)
        problem(taken, 403, "forbidden")
        own = await its.ask("PUT", "/v1/schedules/mailing", json=put, headers=key)
        assert own.status_code == 201


async def test_a_key_for_some_tasks_learns_nothing_of_others(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key("enqueue", "read", tasks=["send"])
        for task in ("pack", "nope"):
            answer = await its.post("/v1/jobs", {"task": task}, headers=key)
            assert "send" not in problem(answer, 403, "forbidden")
        [task] = (await its.get("/v1/tasks", headers=key)).json()["tasks"]
        assert task["name"] == "send"
        batch = {"jobs": [{"task": "pack"}, {"task": "send", "arguments": {"to": "a"}}]}
        found = (await its.post("/v1/jobs/batch", batch, headers=key)).json()
        assert [each["added"] for each in found["results"]] == [False, True]
        assert found["results"][0]["problem"]["status"] == 403


async def test_a_key_for_some_tasks_gets_no_counts_of_jobs(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.add(queue="rush")
        await its.add("send")
        of_task = await its.key("read", tasks=["send"])
        for queue in (await its.get("/v1/queues", headers=of_task)).json()["queues"]:
            assert {queue[each] for each in State} == {None} and queue["paused"] is False
        stats = (await its.get("/v1/stats", headers=of_task)).json()
        assert {stats[each] for each in (*State, "oldest_due", "oldest_late_ms")} == {None}
        async with facing("async", its.url, key=its.texts[-1]) as face:
            assert (await face.client.stats()).waiting is None
            with pytest.raises(AccessDenied, match="limited to tasks"):
                await face.client.queues()
        of_queue = await its.key("read", queues=["mail"])
        [queue] = (await its.get("/v1/queues", headers=of_queue)).json()["queues"]
        assert (queue["name"], queue["waiting"]) == ("mail", 1)
        stats = (await its.get("/v1/stats", headers=of_queue)).json()
        assert (stats["waiting"], stats["queues"]) == (1, 1)


async def test_a_hidden_value_of_meta_can_not_be_guessed(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True, redact=["token"]) as its:
        await its.add(meta={"token": "t-1", "customer": "42"})
        key = await its.key("operate")
        for path in ("/v1/jobs", "/v1/dead", "/v1/jobs/count"):
            for value in ("t-1", "t-2"):
                guess = await its.get(path, params={"meta": f"token={value}"}, headers=key)
                problem(guess, 403, "forbidden")
        guess = await its.post(
            "/v1/jobs/cancel", {"filter": {"meta": {"token": "t-1"}}}, headers=key
        )
        problem(guess, 403, "forbidden")
        assert (await its.get("/v1/jobs?meta=token=t-1")).json()["looked"] == 1, "an admin may"
        assert (await its.get("/v1/jobs?meta=customer=42", headers=key)).status_code == 200


async def test_the_log_says_which_jobs_a_bulk_operation_was_about(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        for id in ("a", "b", "c"):
            await its.add(id=id, delay="1h", meta={"customer": "42"})
        await its.post("/v1/jobs/cancel", {"ids": ["a", "nope"]})
        wanted = {"task": "pack", "meta": {"customer": "42"}, "text": "secret"}
        await its.post("/v1/jobs/cancel", {"filter": wanted})
        wanted = {"task": "pack", "meta": {"customer": "42"}}
        await its.post("/v1/jobs/cancel", {"filter": wanted})
        await its.post("/v1/jobs/delete", {"filter": {"state": "done", "queue": "default"}})
        await its.post("/v1/jobs/delete", {"filter": {"queue": "default"}})
        details = [(each.outcome, each.detail) for each in (await its.entries())[3:]]
    assert details[0] == ("ok", "1 of 2 changed: a nope")
    assert details[1] == ("ok", "task=pack meta=customer=… text=…; 0 of 0 changed")
    outcome, detail = details[2]
    assert outcome == "ok" and detail.startswith("task=pack meta=customer=…; 2 of 2 changed: ")
    assert sorted(detail.split()[-2:]) == ["b", "c"]
    assert details[3] == ("ok", "queue=default state=done; 0 of 0 changed")
    assert details[4] == ("invalid", "queue=default")


async def test_a_key_is_revoked_by_its_text_and_that_is_nowhere(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        form = {"name": "ci", "scopes": ["read"]}
        created = (await its.post("/v1/keys", form)).json()
        text, secret = created["key"], created["key"].split("_")[2]
        revoked = await its.ask("DELETE", f"/v1/keys/{quote(f'Bearer {text},')}")
        assert revoked.json() == {"id": created["id"], "outcome": "revoked"}
        said = ""
        for path in ("keys", "jobs", "schedules"):
            for given in (f"{text}x", f"'{text}'", f"tw_{text}"):
                answer = await its.ask("DELETE", f"/v1/{path}/{quote(given)}")
                problem(answer, 404, "not-found")
                said += answer.text
        said += (await its.get("/v1/audit")).text
        assert said.count(created["id"]) > 18 and secret[:8] not in said


async def test_the_same_idempotency_key_of_two_keys_are_two_jobs(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        form = {"task": "pack", "arguments": {"order": 1}}
        answers = [
            await its.post(
                "/v1/jobs", form, headers={**await its.key("enqueue"), "Idempotency-Key": "k"}
            )
            for _ in range(2)
        ]
        assert [each.status_code for each in answers] == [201, 201]
        assert len({each.json()["id"] for each in answers}) == 2


async def test_keys_are_created_listed_and_revoked(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        form = {"name": "ci", "scopes": ["enqueue"], "queues": ["mail"], "rate": "5/s"}
        created = await its.post("/v1/keys", form | {"expires": "30d"})
        assert created.status_code == 201
        key = created.json()
        assert (key["name"], key["scopes"], key["queues"]) == ("ci", ["enqueue"], ["mail"])
        assert key["expires"] > key["created"]
        soon = await its.post("/v1/keys", form | {"expires": "soon"})
        assert "not a duration" in problem(soon, 422, "invalid")
        listed = (await its.get("/v1/keys")).json()["keys"]
        assert key["id"] in [each["id"] for each in listed]
        assert key["key"] not in str(listed)
        headers = {"Authorization": f"Bearer {key['key']}"}
        problem(await its.get("/v1/jobs", headers=headers), 403, "forbidden")
        revoked = await its.ask("DELETE", f"/v1/keys/{key['id']}")
        assert revoked.json() == {"id": key["id"], "outcome": "revoked"}
        problem(await its.get("/v1/jobs", headers=headers), 401, "unauthorized")
        problem(await its.ask("DELETE", f"/v1/keys/{key['id']}"), 404, "not-found")
        bad = await its.post("/v1/keys", form | {"rate": "often"})
        assert "100/s" in problem(bad, 422, "invalid")


async def test_from_the_first_key_on_every_request_needs_one(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        assert (await its.get("/v1/jobs")).status_code == 200
        created = await its.post("/v1/keys", {"name": "first", "scopes": ["admin"]})
        assert created.status_code == 201
        problem(await its.get("/v1/jobs"), 401, "unauthorized")
        headers = {"Authorization": f"Bearer {created.json()['key']}"}
        assert (await its.get("/v1/jobs", headers=headers)).status_code == 200


# --- Rates


async def test_a_key_may_not_send_more_than_its_rate(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key("read", rate="2/h")
        for _ in range(2):
            assert (await its.get("/v1/queues", headers=key)).status_code == 200
        refused = await its.get("/v1/queues", headers=key)
        problem(refused, 429, "rate-limited")
        assert 1700 < int(refused.headers["retry-after"]) <= 1800
        assert (await its.get("/v1/queues")).status_code == 200


# --- The audit log


async def test_every_write_leaves_one_entry_without_secrets(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        key = await its.key("read")
        form = {"task": "pack", "arguments": {"order": 1, "password": "hunter2"}, "id": "order-1"}
        await its.post("/v1/jobs", form)
        await its.get("/v1/jobs")
        await its.post("/v1/jobs/order-1/cancel")
        await its.post("/v1/jobs/order-1/cancel", headers=key)
        await its.post("/v1/jobs/order-1/cancel")
        await its.post("/v1/queues/mail/pause")
        found = (await its.get("/v1/audit?limit=3")).json()
        rest = (await its.get("/v1/audit", params={"cursor": found["cursor"]})).json()
        entries = [*found["entries"], *rest["entries"]][::-1]
        assert rest["cursor"] is None
        assert [(each["action"], each["target"], each["outcome"]) for each in entries] == [
            ("add_job", "order-1", "ok"),
            ("cancel_job", "order-1", "ok"),
            ("cancel_job", "order-1", "forbidden"),
            ("cancel_job", "order-1", "conflict"),
            ("pause_queue", "mail", "ok"),
        ]
        assert {each["source"] for each in entries} == {"127.0.0.1"}
        assert all(each["who"].endswith(" (clerk)") for each in entries)
        assert not any(text in str(entries) for text in [*its.texts, "hunter2"])


async def test_an_audit_log_that_fails_does_not_fail_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(shop(tmp_path), keys=True) as its:

        async def fail(self: Audit, entries: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(Audit, "write", fail)
        await its.add()
        assert "could not be written" in caplog.text and "add_job" in caplog.text


# --- Without keys


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 200),
        ({"Host": "localhost"}, 200),
        ({"Host": "api.localhost:80"}, 200),
        ({"Host": "[::1]:8484"}, 200),
        ({"Host": "shop.internal"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:80"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost", "X-Forwarded-For": "203.0.113.9"}, 403),
        ({"Host": "localhost", "Forwarded": "for=203.0.113.9"}, 403),
        ({"Host": "shop.internal", "X-Forwarded-For": "203.0.113.9"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
        ({"Origin": "https://shop.internal"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
async def test_without_keys_only_this_machine_and_listed_hosts_have_access(
    tmp_path: Path, headers: dict[str, str], status: int
) -> None:
    async with served(shop(tmp_path), allow_hosts=["shop.internal"]) as its:
        answer = await its.post("/v1/queues/mail/pause", headers=headers)
        assert answer.status_code == status, answer.text
        if status == 403:
            problem(answer, 403, "host-not-allowed")
        assert (await its.get("/healthz", headers={"Host": "10.0.0.1"})).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "shop.internal"])
async def test_without_keys_another_machine_can_not_pretend_to_be_this_one(
    tmp_path: Path, host: str
) -> None:
    app = shop(tmp_path)
    api = app.http(allow_hosts=["shop.internal"])

    async def unknown(scope: Any, receive: Any, send: Any) -> None:
        await api({**scope, "client": None}, receive, send)

    for served_api, address in ((api, ("192.0.2.7", 1)), (unknown, ("127.0.0.1", 1))):
        transport = httpx.ASGITransport(served_api, client=address)
        async with app, httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            problem(await client.get("/v1/jobs"), 403, "host-not-allowed")


async def test_a_key_for_some_tasks_pauses_no_queue_and_sees_no_other_task(tmp_path: Path) -> None:
    app = App(f"sqlite:///{tmp_path}/jobs.db", name="shop")
    async with served(app, keys=True) as its, app.worker(queues=["default"]):
        key = await its.key("operate", tasks=["mail.*"])
        problem(await its.post("/v1/queues/default/pause", headers=key), 404, "not-found")
        store = (await app.client()).store
        hidden = Job(id="x", task="payroll.pay", payload="{}", due_ms=0, created_ms=0)
        await store.add([hidden])
        async with asyncio.timeout(30):
            while "payroll.pay" not in (await its.get("/v1/queues")).text:
                await asyncio.sleep(0.05)
        assert "payroll.pay" not in (await its.get("/v1/queues", headers=key)).text


async def test_requests_that_are_not_let_in_are_not_in_the_audit_log(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        limited = await its.key("operate", rate="1/h")
        async with httpx.AsyncClient(base_url=its.url) as stranger:
            many = {f"x-{n}": "1" for n in range(70)}
            assert (await stranger.post("/v1/jobs", headers=many)).status_code == 431
            assert (await stranger.post("/v1/jobs", json={})).status_code == 401
            for _ in range(3):
                await stranger.post("/v1/queues/mail/pause", headers=limited)
        assert [each.outcome for each in await its.entries()] == ["ok"]


async def test_an_answer_that_leaves_the_body_unread_closes_the_connection(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        host, port = its.url.removeprefix("http://").split(":")
        for path in ("/v1/jobs", "/nowhere"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{{"
            writer.write(head.encode())
            async with asyncio.timeout(30):
                assert b"connection: close" in (await reader.read()).lower()
            writer.close()


def test_a_bind_beyond_this_machine_needs_keys() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        refuse_open_bind(host, keys=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "shop.example"):
        refuse_open_bind(host, keys=True)
        with pytest.raises(BadConfig, match="or listen on"):
            refuse_open_bind(host, keys=False)


# --- Secrets


async def test_secrets_in_arguments_are_hidden_from_all_but_admins(tmp_path: Path) -> None:
    app = shop(tmp_path)

    @app.task
    async def login(user: dict[str, Any], api_key: str = "") -> dict[str, str]:
        return {"session_token": "t0p"}

    async with served(app, keys=True) as its:
        secret = {"user": {"name": "ann", "Password": "hunter2", "old": [{"token": 1}]}}
        form = {"task": "login", "arguments": secret | {"api_key": "k"}, "meta": {"Api-Key": "m"}}
        id = (await its.post("/v1/jobs", form)).json()["id"]
        async with app.worker(guarded=False), asyncio.timeout(30):
            await app.job(id).result(timeout=30)
        key = await its.key("operate")
        listed = (await its.get("/v1/jobs", headers=key)).json()["jobs"]
        shown = (await its.get(f"/v1/jobs/{id}", headers=key)).json()
        assert listed == [shown]
        hidden = "[redacted]"
        assert shown["arguments"] == {
            "user": {"name": "ann", "Password": hidden, "old": [{"token": hidden}]},
            "api_key": hidden,
        }
        assert shown["result"] == {"session_token": hidden}
        assert shown["meta"] == {"Api-Key": hidden}
        explained = (await its.get(f"/v1/jobs/{id}/explain", headers=key)).json()
        assert explained["meta"] == {"Api-Key": hidden}
        whole = (await its.get(f"/v1/jobs/{id}")).json()
        assert whole["arguments"] == form["arguments"]


async def test_what_is_hidden_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TICKWHEEL_REDACT", "no*,order")
    async with served(shop(tmp_path)) as its:
        form = {"task": "pack", "arguments": {"order": 1, "note": "n", "password": "p"}}
        id = (await its.post("/v1/jobs", form)).json()["id"]
        shown = (await its.get(f"/v1/jobs/{id}")).json()["arguments"]
        assert shown == {"order": "[redacted]", "note": "[redacted]", "password": "p"}
