"""Signing in: a cookie that stands for a key, for as long as both are valid, on our own pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.cookies import Morsel, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from events import watching
from http_server import PATIENCE_S, Shop, problem, served, shop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount

from tickwheel import App
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.http.access import COOKIE, cookie_name
from tickwheel.http.asgi import OPERATIONS
from tickwheel.http.server import Listening, serving
from tickwheel.operate.keys import Keys
from tickwheel.operate.sessions import KIND, SESSIONS_OF_KEY
from tickwheel.version import __version__

# What a browser says of a request that a page of the same server made.
SAME = {"Sec-Fetch-Site": "same-origin"}
WRITES = [each for each in OPERATIONS if each.writes]


@asynccontextmanager
async def browsing(its: Shop, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A browser on a page of the server, signed in with a key if there is one."""
    async with httpx.AsyncClient(base_url=its.url, headers=SAME, timeout=PATIENCE_S) as browser:
        if key is not None:
            answer = await browser.post("/v1/session", json={"key": key})
            assert answer.status_code == 200, answer.text
        yield browser


def cookie_of(answer: httpx.Response) -> Morsel[str]:
    [cookie] = SimpleCookie(answer.headers["set-cookie"]).values()
    assert cookie.key.startswith(f"{COOKIE}_")
    return cookie


def name_at(url: str) -> str:
    """What the cookie is called on this server."""
    place = urlsplit(url)
    headers = [(b"host", place.netloc.encode())]
    scope = {"type": "http", "scheme": "http", "path": "/", "query_string": b"", "headers": headers}
    return cookie_name(Request(scope))


async def until_gone(browser: httpx.AsyncClient) -> None:
    """Wait until the browser's session has ended: what was read a moment ago still counts."""
    async with asyncio.timeout(PATIENCE_S):
        while (await browser.get("/v1/stats")).status_code == 200:
            await asyncio.sleep(0.02)


# --- Who is there


async def test_without_keys_nobody_has_a_name(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        assert (await its.get("/v1/session")).json() == {
            "keys": False,
            "who": None,
            "scopes": [],
            "app": "shop",
            "store": "sqlite",
            "version": __version__,
            "environment": None,
        }
        # Not for a name that may lead anywhere.
        other = (await its.get("/v1/session", headers={"Host": "evil.example"})).json()
        assert (other["app"], other["store"]) == (None, "")


async def test_strangers_learn_only_that_they_are(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its) as browser:
        found = (await browser.get("/v1/session")).json()
        assert found["keys"] is True
        assert (found["who"], found["scopes"]) == (None, [])
        assert (found["app"], found["store"]) == (None, "")


async def test_a_key_signs_in_and_out(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.key("operate", "enqueue")
        async with browsing(its, its.texts[-1]) as browser:
            found = (await browser.get("/v1/session")).json()
            assert (found["who"], found["scopes"]) == ("clerk", ["enqueue", "operate"])
            assert (found["app"], found["store"]) == ("shop", "sqlite")
            form = {"task": "pack", "arguments": {"order": 1}, "delay": "1h", "id": "a"}
            assert (await browser.post("/v1/jobs", json=form)).status_code == 201
            problem(await browser.get("/v1/keys"), 403, "forbidden")
            token = browser.cookies[name_at(its.url)]
            answer = await browser.delete("/v1/session")
            assert (answer.status_code, answer.json()["who"]) == (200, None)
            assert cookie_of(answer)["max-age"] == "0" and not browser.cookies
            # Also if somebody has kept the cookie.
            browser.cookies[name_at(its.url)] = token
            detail = problem(await browser.get("/v1/stats"), 401, "unauthorized")
            assert "sign in again" in detail
        actions = [(each.action, each.outcome) for each in await its.entries()]
        assert actions == [("sign_in", "ok"), ("add_job", "ok"), ("sign_out", "ok")]
        assert all(each.who.endswith(" (clerk)") for each in await its.entries())


async def test_a_key_in_the_header_counts_more_than_a_cookie(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        reading = await its.key("read")
        async with browsing(its, its.texts[0]) as browser:
            assert (await browser.get("/v1/keys")).status_code == 200
            problem(await browser.get("/v1/keys", headers=reading), 403, "forbidden")
            wrong = {"Authorization": "Bearer tw_wrong"}
            problem(await browser.get("/v1/keys", headers=wrong), 401, "unauthorized")


@pytest.mark.parametrize("key", ["tw_wrong", "x", "tw_0123456789abcdef_" + "0" * 64])
async def test_a_wrong_key_does_not_sign_in_and_is_not_in_the_audit_log(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its) as browser:
        answer = await browser.post("/v1/session", json={"key": key})
        assert "unknown" in problem(answer, 401, "unauthorized")
        assert "set-cookie" not in answer.headers
        problem(await browser.get("/v1/stats"), 401, "unauthorized")
        assert await its.entries() == []
        assert "a sign-in from 127.0.0.1 failed" in caplog.text and key not in caplog.text


@pytest.mark.parametrize(
    "token",
    ["", "x", "a b", "9" * 15 + "." + "A" * 43, "000000000000001." + "A" * 43, "é" * 9, "x" * 4000],
)
async def test_a_cookie_that_nobody_was_given_is_nothing(tmp_path: Path, token: str) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its) as browser:
        cookie = {b"Cookie": f"{name_at(its.url)}={token}".encode()}
        problem(await browser.get("/v1/stats", headers=cookie), 401, "unauthorized")
        assert (await browser.get("/v1/session", headers=cookie)).json()["who"] is None


async def test_the_end_of_a_session_can_not_be_put_off(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its, its.texts[0]) as browser:
        end, _, secret = browser.cookies[name_at(its.url)].partition(".")
        browser.cookies.clear()
        later = {"Cookie": f"{name_at(its.url)}={int(end) + 1:015}.{secret}"}
        problem(await browser.get("/v1/stats", headers=later), 401, "unauthorized")


# --- How long it lasts


async def test_a_session_ends_after_its_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TICKWHEEL_SESSION_LIFETIME", "1s")
    async with served(shop(tmp_path), keys=True) as its, browsing(its, its.texts[0]) as browser:
        kept = {"Cookie": f"{name_at(its.url)}={browser.cookies[name_at(its.url)]}"}
        browser.cookies.clear()
        async with watching(browser, ["/v1/stats"], headers=kept) as told:
            assert (await told.to_its_end())[-1] == "end"
        problem(await browser.get("/v1/stats", headers=kept), 401, "unauthorized")
        # The next one to sign in removes it.
        client = await its.app.client()
        [(old, _)] = await client.records(KIND)
        assert (await browser.post("/v1/session", json={"key": its.texts[0]})).status_code == 200
        [(new, _)] = await client.records(KIND)
        assert new != old


async def test_a_session_ends_with_its_key(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.key("read")
        async with browsing(its, its.texts[-1]) as browser:
            assert (await browser.get("/v1/stats")).status_code == 200
            keys = (await its.get("/v1/keys")).json()["keys"]
            [key] = [each for each in keys if "read" in each["scopes"]]
            await its.ask("DELETE", f"/v1/keys/{key['id']}")
            problem(await browser.get("/v1/stats"), 401, "unauthorized")
        await its.key("read", expires="1s")
        async with browsing(its, its.texts[-1]) as browser:
            await until_gone(browser)


async def test_a_session_holds_on_another_server_and_ends_there_too(tmp_path: Path) -> None:
    async with (
        served(shop(tmp_path), keys=True) as its,
        served(shop(tmp_path)) as another,
        browsing(its, its.texts[0]) as browser,
        browsing(another) as elsewhere,
    ):
        elsewhere.cookies[name_at(another.url)] = browser.cookies[name_at(its.url)]
        assert (await elsewhere.get("/v1/keys")).status_code == 200
        await browser.delete("/v1/session")
        await until_gone(elsewhere)


async def test_a_key_has_only_so_many_sessions(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.key("read")
        async with browsing(its, its.texts[1]) as other, browsing(its, its.texts[0]) as first:
            for _ in range(SESSIONS_OF_KEY):
                async with browsing(its, its.texts[0]) as last:
                    assert (await last.get("/v1/stats")).status_code == 200
            await until_gone(first)
            assert (await other.get("/v1/stats")).status_code == 200
        assert len(await (await its.app.client()).records(KIND)) == SESSIONS_OF_KEY + 1


async def test_to_sign_in_again_ends_the_session_before(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its, its.texts[0]) as browser:
        for _ in range(3):
            await browser.post("/v1/session", json={"key": its.texts[0]})
        assert len(await (await its.app.client()).records(KIND)) == 1


async def test_the_store_keeps_no_token(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its, browsing(its, its.texts[0]) as browser:
        token = browser.cookies[name_at(its.url)]
        [(name, text)] = await (await its.app.client()).records(KIND)
        secret = token.partition(".")[2]
        assert secret not in name + text and its.texts[0] not in name + text


async def test_while_the_store_is_away_a_session_that_was_seen_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = shop(tmp_path)
    async with served(app, keys=True) as its, app, browsing(its, its.texts[0]) as browser:
        assert (await browser.get("/v1/session")).json()["who"] == "clerk"
        store: Any = (await app.client()).store

        async def away(*_: object, **__: object) -> Any:
            raise StoreUnavailable("away")

        for name in ("get_records", "records", "queues"):
            monkeypatch.setattr(store, name, away)
        problem(await browser.get("/v1/queues"), 503, "store-unavailable")
        monkeypatch.undo()
        assert (await browser.get("/v1/queues")).status_code == 200


async def test_a_session_has_the_rate_of_its_key(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        await its.key("read", rate="2/h")
        async with browsing(its, its.texts[-1]) as browser:
            assert (await browser.get("/v1/stats")).status_code == 200
            problem(await browser.get("/v1/stats"), 429, "rate-limited")
            again = await browser.post("/v1/session", json={"key": its.texts[-1]})
            problem(again, 429, "rate-limited")


# --- The cookie


async def test_the_cookie_is_for_our_own_pages_only(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        answer = await its.post("/v1/session", {"key": its.texts[0]})
        cookie = cookie_of(answer)
        assert cookie["httponly"] and cookie["samesite"] == "Strict"
        assert (cookie["path"], cookie["max-age"], cookie["secure"]) == ("/", "43200", "")
        assert cookie["domain"] == ""


async def test_the_cookie_is_for_https_if_it_came_by_it_and_for_its_path(tmp_path: Path) -> None:
    app = shop(tmp_path)
    _, text = await Keys(await app.client()).create("clerk", ["read"])
    site = Starlette(routes=[Mount("/admin", app.dashboard())])
    transport = httpx.ASGITransport(site, client=("203.0.113.7", 1))
    async with app, httpx.AsyncClient(transport=transport, base_url="https://shop.example") as own:
        answer = await own.post("/admin/v1/session", json={"key": text}, headers=SAME)
        cookie = cookie_of(answer)
        assert (cookie["path"], cookie["secure"]) == ("/admin", True)
        assert (await own.get("/admin/v1/stats")).status_code == 200
        assert (await own.delete("/admin/v1/session", headers=SAME)).status_code == 200
        problem(await own.get("/admin/v1/stats"), 401, "unauthorized")


async def test_a_proxy_that_is_trusted_says_that_it_is_https(tmp_path: Path) -> None:
    app = shop(tmp_path)
    _, text = await Keys(await app.client()).create("clerk", ["read"])
    for trusted, secure in (("127.0.0.1", True), (None, "")):
        listening = Listening(port=0, root_path="/tick", forwarded_allow_ips=trusted)
        async with app, serving(app.dashboard(), listening) as url:
            headers = {**SAME, "X-Forwarded-Proto": "https", "X-Forwarded-For": "203.0.113.7"}
            async with httpx.AsyncClient(base_url=url.removesuffix("/tick")) as client:
                answer = await client.post("/v1/session", json={"key": text}, headers=headers)
                cookie = cookie_of(answer)
                assert (cookie["path"], cookie["secure"]) == ("/tick", secure)


async def test_dashboards_on_one_host_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Below each other, and on other ports: a browser sends all cookies of the host to each."""
    shops: dict[str, tuple[App, str]] = {}
    for name in ("root", "admin"):
        (tmp_path / name).mkdir()
        app = shop(tmp_path / name)
        _, text = await Keys(await app.client()).create(name, ["read"])
        shops[name] = app, text
    (root, root_key), (admin, admin_key) = shops.values()
    site = Starlette(routes=[Mount("/admin", admin.dashboard()), Mount("/", root.dashboard())])
    transport = httpx.ASGITransport(site, client=("203.0.113.7", 1))
    sent: dict[str, str] = {}

    async def ask(method: str, url: str, **options: Any) -> Any:
        async with httpx.AsyncClient(transport=transport) as own:
            cookie = "; ".join(f"{name}={token}" for name, token in sent.items())
            answer = await own.request(method, url, headers={**SAME, "Cookie": cookie}, **options)
        if "set-cookie" in answer.headers:
            morsel = cookie_of(answer)
            sent[morsel.key] = morsel.value
        return answer.json()

    async with root, admin:
        host = "http://shop.example"
        places = {
            f"{host}/admin": admin_key, host: root_key, f"{host}:8080": root_key,
            f"{host}:8080/admin": admin_key,
        }  # fmt: skip
        for place, key in places.items():
            await ask("POST", f"{place}/v1/session", json={"key": key})
        assert len(sent) == len(places)
        for place in places:
            found = await ask("GET", f"{place}/v1/session")
            assert found["who"] == ("admin" if place.endswith("/admin") else "root"), place
        # What somebody else has left under the old name is nothing.
        sent[COOKIE] = "x"
        await ask("DELETE", f"{host}/v1/session")
        assert (await ask("GET", f"{host}/v1/session"))["who"] is None
        assert (await ask("GET", f"{host}:8080/v1/session"))["who"] == "root"


# --- Only from our own pages


@pytest.mark.parametrize("operation", WRITES, ids=lambda each: each.id)
async def test_no_write_with_a_cookie_is_taken_from_elsewhere(
    tmp_path: Path, operation: Any
) -> None:
    """From the table itself, so that none is forgotten."""
    path = operation.path.replace("{id}", "x").replace("{name}", "x")
    async with served(shop(tmp_path), keys=True) as its:
        cookie = (await its.post("/v1/session", {"key": its.texts[0]})).cookies
        own = its.url
        async with httpx.AsyncClient(base_url=own, cookies=cookie, timeout=PATIENCE_S) as browser:
            for headers in (
                {},
                {"Sec-Fetch-Site": "cross-site"},
                {"Sec-Fetch-Site": "same-site"},
                {"Sec-Fetch-Site": "none"},
                {"Sec-Fetch-Site": "cross-site", "Origin": own},
                {"Origin": "https://evil.example"},
                {"Origin": "null"},
                {"Origin": own.replace("http:", "https:")},
                {"Origin": own.rpartition(":")[0]},
                {"Origin": "http://[::1"},
            ):
                answer = await browser.request(operation.method, path, json={}, headers=headers)
                problem(answer, 403, "cross-origin")
            for headers in (SAME, {"Origin": own}, {**SAME, "Origin": own}):
                answer = await browser.request(operation.method, path, json={}, headers=headers)
                assert answer.headers.get("content-type") and "cross-origin" not in answer.text
                # The one that signs out ends it.
                browser.cookies.update(cookie)
        assert [each for each in await its.entries() if each.outcome == "cross-origin"] == []


async def test_another_site_can_not_sign_anybody_in(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        form = {"key": its.texts[0]}
        async with httpx.AsyncClient(base_url=its.url) as browser:
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                answer = await browser.post("/v1/session", json=form, headers=headers)
                problem(answer, 403, "cross-origin")
            # A program is no browser.
            assert (await browser.post("/v1/session", json=form)).status_code == 200


async def test_to_read_takes_no_more_than_the_cookie(tmp_path: Path) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        cookie = (await its.post("/v1/session", {"key": its.texts[0]})).cookies
        async with httpx.AsyncClient(base_url=its.url, cookies=cookie) as browser:
            assert (await browser.get("/v1/stats")).status_code == 200


# --- The badge


@pytest.mark.parametrize(
    "text, name, colour",
    [
        ("production", "production", None),
        ("staging:#b45309", "staging", "#b45309"),
        ("Dev <1>:red", "Dev <1>", "red"),
        ("x:#FFF", "x", "#FFF"),
    ],
)
async def test_an_environment_has_a_name_and_a_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, colour: str | None
) -> None:
    monkeypatch.setenv("TICKWHEEL_ENVIRONMENT", text)
    async with served(shop(tmp_path), keys=True) as its, browsing(its) as browser:
        found = (await browser.get("/v1/session")).json()
        assert found["environment"] == {"name": name, "colour": colour}


@pytest.mark.parametrize(
    "text", [":red", "x:", "x:nocolour", "x:#12", "x:red;background:url(//evil)", "x" * 41, "a\nb"]
)
def test_what_is_no_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("TICKWHEEL_ENVIRONMENT", text)
    with pytest.raises(BadConfig, match="TICKWHEEL_ENVIRONMENT"):
        App(f"sqlite:///{tmp_path}/jobs.db", name="shop").http()
