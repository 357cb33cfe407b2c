"""docs/callbacks.md is true: its examples run, and verify what the first of them sends."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import django
import msgspec
import pytest
from django.conf import settings
from django.test import RequestFactory

from receiver import Request, answer, receiving
from tickwheel import webhooks
from tickwheel.callbacks import Callbacks
from tickwheel.testing import sandbox

PAGE = (Path(__file__).parents[2] / "docs" / "callbacks.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
KEY = webhooks.new_key()
BODY = b'{"order":42}'

Load = Callable[[str], ModuleType]
# Posts a body with these headers; returns the status.
Post = Callable[[bytes, dict[str, str]], int]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEBHOOK_KEY", KEY)

    def loaded(name: str) -> ModuleType:
        path = tmp_path / f"{name}.py"
        path.write_text(BLOCKS[name].replace("sqlite:///jobs.db", "memory://"))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return loaded


def test_every_example_has_a_name() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 4


async def test_the_first_example_enqueues_what_it_says(load: Load) -> None:
    orders = load("orders")
    async with sandbox(orders.app) as box:
        await orders.remind(42)
        [job] = box.jobs()
        assert job.id == "remind-42" and json.loads(job.arguments["body"]) == {"order": 42}


def fastapi(module: ModuleType) -> Post:
    def post(body: bytes, headers: dict[str, str]) -> int:
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/hooks",
            "raw_path": b"/hooks",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        asyncio.run(module.api(scope, receive, send))
        return int(sent[0]["status"])

    return post


def flask(module: ModuleType) -> Post:
    client = module.site.test_client()
    return lambda body, headers: int(client.post("/hooks", data=body, headers=headers).status_code)


def with_django(module: ModuleType) -> Post:
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], DEFAULT_CHARSET="utf-8")
        django.setup()

    def post(body: bytes, headers: dict[str, str]) -> int:
        request = RequestFactory().post(
            "/hooks", data=body, content_type="application/json", headers=headers
        )
        return int(module.hook(request).status_code)

    return post


@pytest.mark.parametrize(
    "name, poster",
    [("with_fastapi", fastapi), ("with_flask", flask), ("with_django", with_django)],
)
def test_each_receiver_takes_what_is_genuine_once_and_nothing_else(
    load: Load, name: str, poster: Callable[[ModuleType], Post], capsys: pytest.CaptureFixture[str]
) -> None:
    headers = {"content-type": "application/json"}
    headers |= webhooks.sign(BODY, id="remind-42", keys=KEY)
    post = poster(load(name))
    assert post(BODY, headers) == post(BODY, headers) == 200
    assert capsys.readouterr().out.count("handle") == 1
    assert post(BODY + b" ", headers) == 401
    assert post(BODY, {**headers, "webhook-timestamp": "1"}) == 401
    assert post(BODY, {"content-type": "application/json"}) == 401


async def test_what_follows_has_the_shape_that_the_page_shows(load: Load) -> None:
    orders = load("orders")

    def answers(request: Request) -> bytes:
        return answer(404 if request.path == "/hooks" else 200)

    async with receiving(answers) as receiver:
        callbacks: Callbacks = orders.callbacks
        callbacks.allowed.__init__([receiver.url])  # type: ignore[misc]
        async with orders.app, orders.app.worker():
            await callbacks.call(f"{receiver.url}/hooks", on_dead=f"{receiver.url}/undelivered")
            [request] = await receiver.until(1, "/undelivered")
    told = msgspec.json.decode(request.body)
    fields = re.search(r'"data": \{([^}]*)\}', PAGE.replace("\n", " "))
    assert fields is not None and told["type"] == "job.dead"
    assert list(told["data"]) == re.findall(r'"(\w+)"', fields[1])
