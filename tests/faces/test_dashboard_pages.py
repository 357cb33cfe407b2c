"""The dashboard's pages and files: what they are served with, below any path, and nothing else."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from http_server import PATIENCE_S, Shop, problem, shop
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp

from tickwheel.dashboard.pages import SCREENS, STATIC, TYPES, _content, page_text
from tickwheel.http.server import Listening, serving


def links_in(page: str) -> list[str]:
    return re.findall(r'(?:src|href)="(static/[^"]+)"', page)


def asking(served: ASGIApp, base: str = "http://localhost") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(served, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url=base, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", SCREENS)
async def test_every_screen_is_the_page_with_a_strict_policy(tmp_path: Path, path: str) -> None:
    async with asking(shop(tmp_path).dashboard()) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "same-origin"
    assert answer.headers["cache-control"] == "no-store"
    assert '<base href="/">' in answer.text and "{{" not in answer.text
    # What the policy would not run.
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", answer.text)


async def test_the_page_knows_all_screens_of_the_scripts() -> None:
    main = (STATIC / "js" / "main.js").read_text()
    assert {*re.findall(r'^  "(/[a-z-]*)": \[', main, re.MULTILINE)} | {"/sign-in"} == {*SCREENS}


async def test_the_files_of_the_page_are_served_for_good(tmp_path: Path) -> None:
    async with asking(shop(tmp_path).dashboard()) as client:
        links = links_in((await client.get("/")).text)
        assert len(links) > 5
        for link in links:
            answer = await client.get(f"/{link}")
            assert answer.status_code == 200, link
            assert answer.headers["content-type"] == TYPES[Path(link).suffix]
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["x-content-type-options"] == "nosniff"
            name = link.split("/", 2)[2]
            assert answer.content == (STATIC / name).read_bytes()


async def test_modules_import_only_files_that_are_served(tmp_path: Path) -> None:
    names = _content().files
    for name in names:
        for found in re.findall(rb'from "(\.[^"]+)"', names[name]):
            target = (STATIC / name).parent / found.decode()
            assert target.resolve().relative_to(STATIC).as_posix() in names, (name, found)


def test_no_file_is_left_half_merged() -> None:
    """A browser would skip what it can't read, without a word."""
    for name, content in _content().files.items():
        assert not re.search(rb"^(<{7}|={7}|>{7})", content, re.MULTILINE), name
        if name.endswith(".css"):
            assert content.count(b"{") == content.count(b"}"), name


@pytest.mark.parametrize(
    "name",
    [
        *("", "index.html", "vendor/README.md", "vendor", "nope.js", "../pages.py"),
        *("..%2fpages.py", "%2e%2e/pages.py", "js/../js/main.js", "js//main.js", "/etc/passwd"),
        *("js%2fmain.js", "js/main.js/", "js\\main.js", "js/main.js%00"),
    ],
)
async def test_nothing_else_is_served(tmp_path: Path, name: str) -> None:
    async with serving(shop(tmp_path).dashboard(), Listening(port=0)) as url:
        # Byte for byte: a client would tidy the path.
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"GET /static/{_content().version}/{name} HTTP/1.1\r\nHost: localhost\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 404") and b"problem:not-found" in answer, answer


async def test_another_version_is_not_this_one(tmp_path: Path) -> None:
    async with asking(shop(tmp_path).dashboard()) as client:
        answer = await client.get("/static/0123456789abcdef/js/main.js")
        problem(answer, 404, "not-found")
        assert answer.headers["cache-control"] == "no-store"


async def test_the_api_is_there_too_and_everything_else_is_a_problem(tmp_path: Path) -> None:
    async with asking(shop(tmp_path).dashboard()) as client:
        assert (await client.get("/v1/queues")).status_code == 200
        for path in ("/nope", "/jobs/", "/v1", "/static", "/index.html"):
            problem(await client.get(path), 404, "not-found")
        problem(await client.post("/"), 405, "method-not-allowed")
    async with asking(shop(tmp_path).http()) as client:
        problem(await client.get("/"), 404, "not-found")


async def test_pages_need_no_key(tmp_path: Path) -> None:
    app = shop(tmp_path)
    async with app, asking(app.dashboard()) as client:
        await Shop(app, "").key("admin")
        assert (await client.get("/jobs")).status_code == 200
        problem(await client.get("/v1/jobs"), 401, "unauthorized")


# --- Below a path


@pytest.mark.parametrize("outer", [FastAPI, Starlette])
async def test_it_works_mounted_in_another_app(tmp_path: Path, outer: type[Starlette]) -> None:
    site = outer(routes=[Mount("/admin", Mount("/tick", shop(tmp_path).dashboard()))])
    async with asking(site) as client:
        page = await client.get("/admin/tick/jobs")
        assert '<base href="/admin/tick/">' in page.text
        [*links] = links_in(page.text)
        for link in links:
            assert (await client.get(f"/admin/tick/{link}")).status_code == 200
        assert (await client.get("/admin/tick/v1/queues")).status_code == 200
        assert (await client.get("/admin/tick/")).status_code == 200


async def test_it_works_behind_a_proxy_that_strips_the_path(tmp_path: Path) -> None:
    listening = Listening(port=0, root_path="/tick")
    async with serving(shop(tmp_path).dashboard(), listening) as url:
        assert url.endswith("/tick")
        async with httpx.AsyncClient(base_url=url.removesuffix("/tick")) as client:
            page = await client.get("/")
            assert '<base href="/tick/">' in page.text
            assert (await client.get(f"/{links_in(page.text)[0]}")).status_code == 200


def test_a_path_is_quoted_in_the_page() -> None:
    text = page_text(_content(), '/"><script>é/')
    assert '<base href="/%22%3E%3Cscript%3E%C3%A9/">' in text
    assert '<base href="/a&amp;b/">' in page_text(_content(), "/a&b")
