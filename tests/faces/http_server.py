"""A served app on a free port, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tickwheel import App
from tickwheel.http.server import Listening, serving
from tickwheel.operate.audit import Audit, Entry
from tickwheel.operate.keys import Keys

PATIENCE_S = 90


def shop(folder: Path) -> App:
    """An app with a few tasks, on an embedded store in the folder."""
    app = App(f"sqlite:///{folder}/jobs.db", name="shop")

    @app.task
    async def pack(order: int, note: str = "", password: str = "") -> dict[str, int]:
        return {"order": order}

    @app.task(queue="mail", retries=0)
    async def send(to: str) -> None:
        raise ValueError(f"no mailbox for {to}")

    return app


class Shop:
    """A served shop: `shop.client` sends requests with a key that may do everything, if there are
    keys."""

    def __init__(self, app: App, url: str) -> None:
        self.app = app
        self.url = url
        # The texts of the keys that were created.
        self.texts: list[str] = []
        self.client: httpx.AsyncClient

    async def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return await self.client.request(method, path, **more)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.ask("GET", path, **more)

    async def post(self, path: str, json: Any = None, **more: Any) -> httpx.Response:
        if json is not None:
            more["json"] = json
        return await self.ask("POST", path, **more)

    async def key(self, *scopes: str, **more: Any) -> dict[str, str]:
        """The headers of a new key."""
        keys = Keys(await self.app.client())
        _, text = await keys.create("clerk", scopes, **more)
        self.texts.append(text)
        return {"Authorization": f"Bearer {text}"}

    async def entries(self) -> list[Entry]:
        """The audit log, the oldest first."""
        found, _ = await Audit(await self.app.client()).list(limit=250)
        return found[::-1]

    async def add(self, task: str = "pack", **more: Any) -> str:
        """Add a job, and return its id."""
        arguments = {"to": "ann"} if task == "send" else {"order": 1}
        answer = await self.post("/v1/jobs", {"task": task, "arguments": arguments, **more})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@asynccontextmanager
async def served(app: App, *, keys: bool = False, **options: Any) -> AsyncIterator[Shop]:
    """Serve an app; with keys, all requests of the client have one for everything."""
    async with serving(app.http(**options), Listening(port=0)) as url:
        found = Shop(app, url)
        headers = await found.key("admin") if keys else {}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
            found.client = client
            yield found


def problem(answer: httpx.Response, status: int, code: str) -> str:
    """Check that an answer is this problem; returns its detail."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["type"] == f"urn:tickwheel:problem:{code}", found
    assert found["status"] == status
    assert found["request_id"] == answer.headers["x-request-id"]
    return str(found["detail"])
