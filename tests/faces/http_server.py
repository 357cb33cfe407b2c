"""A served app on a free port, a client of it, and keys and an audit log in memory."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx

from tickwheel import App
from tickwheel.duration import duration_ms
from tickwheel.http.access import Entry, Scope
from tickwheel.http.server import Listening, serving
from tickwheel.store import not_a_cursor

PATIENCE_S = 30


@dataclass
class MemoryKey:
    id: str
    name: str
    scopes: list[str]
    queues: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    created_ms: int = 0
    expires_ms: int | None = None
    rate: str | None = None

    def may(self, scope: str, *, queue: str | None = None, task: str | None = None) -> bool:
        held = set(self.scopes)
        if Scope.OPERATE in held:
            held.add(Scope.READ)
        return (
            (Scope.ADMIN in held or scope in held)
            and _matches(self.queues, queue)
            and _matches(self.tasks, task)
        )


def _matches(patterns: Sequence[str], name: str | None) -> bool:
    return not patterns or name is None or any(fnmatchcase(name, each) for each in patterns)


class MemoryKeys:
    def __init__(self) -> None:
        self.by_text: dict[str, MemoryKey] = {}

    async def check(self, text: str) -> MemoryKey | None:
        return self.by_text.get(text)

    async def any(self) -> bool:
        return bool(self.by_text)

    async def create(self, name: str, scopes: Sequence[str], **more: Any) -> tuple[MemoryKey, str]:
        expires = more.pop("expires", None)
        until_ms = None if expires is None else time.time_ns() // 1_000_000 + duration_ms(expires)
        key = MemoryKey(secrets.token_hex(4), name, list(scopes), expires_ms=until_ms, **more)
        text = f"tw_{secrets.token_hex(16)}"
        self.by_text[text] = key
        return key, text

    async def list(self) -> list[MemoryKey]:
        return list(self.by_text.values())

    async def revoke(self, id: str) -> bool:
        texts = [text for text, key in self.by_text.items() if key.id == id]
        for text in texts:
            del self.by_text[text]
        return bool(texts)


class MemoryAudit:
    def __init__(self) -> None:
        self.entries: list[Entry] = []

    async def write(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    async def list(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[Sequence[Entry], str | None]:
        if cursor is not None and not cursor.isdecimal():
            raise not_a_cursor(cursor)
        start = int(cursor or 0)
        newest = self.entries[::-1]
        more = str(start + limit) if len(newest) > start + limit else None
        return newest[start : start + limit], more


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

    def __init__(
        self, app: App, url: str, keys: MemoryKeys | None, audit: MemoryAudit | None
    ) -> None:
        self.app = app
        self.url = url
        self.keys = keys
        self.audit = audit
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
        assert self.keys is not None
        _, text = await self.keys.create("clerk", scopes, **more)
        return {"Authorization": f"Bearer {text}"}

    async def add(self, task: str = "pack", **more: Any) -> str:
        """Add a job, and return its id."""
        arguments = {"to": "ann"} if task == "send" else {"order": 1}
        answer = await self.post("/v1/jobs", {"task": task, "arguments": arguments, **more})
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])


@asynccontextmanager
async def served(app: App, *, keys: bool = False, **options: Any) -> AsyncIterator[Shop]:
    """Serve an app; with keys, all requests of the client have one for everything."""
    its_keys, its_audit = (MemoryKeys(), MemoryAudit()) if keys else (None, None)
    api = app.http(keys=its_keys, audit=its_audit, **options)
    async with serving(api, Listening(port=0)) as url:
        found = Shop(app, url, its_keys, its_audit)
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
