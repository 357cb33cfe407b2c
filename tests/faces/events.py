"""Server-sent events as a client reads them, and the documents that they make."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from http_server import PATIENCE_S

from patching import patched


class Watching:
    """A stream that is open: the events so far, and what they make."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.events: list[tuple[str, Any]] = []
        self.documents: dict[str, Any] = {}
        self.problems: dict[str, Any] = {}

    async def next(self) -> tuple[str, Any]:
        """The next event and its data; ("", None) if the stream is over."""
        name = ""
        async with asyncio.timeout(PATIENCE_S):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    self._take(name, data)
                    return name, data
        return "", None

    def _take(self, name: str, data: Any) -> None:
        self.events.append((name, data))
        if name == "document":
            self.documents[data["path"]] = data["document"]
        elif name == "change":
            path = data["path"]
            self.documents[path] = patched(self.documents[path], data["patch"])
        elif name == "problem":
            self.problems[data["path"]] = data["problem"]

    async def until(self, is_so: Callable[[], Any], what: str = "") -> None:
        """Read on until something is so."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                name, _ = await self.next()
                assert name, f"the stream ended before {what or 'it'}: {self.events[-5:]}"

    async def to_its_end(self) -> list[str]:
        """The names of the events until the stream is over."""
        found = []
        async with asyncio.timeout(PATIENCE_S):
            while (event := await self.next())[0]:
                found.append(event[0])
        return found


@asynccontextmanager
async def watching(
    client: httpx.AsyncClient, paths: Sequence[str], *, every: int = 1, **more: Any
) -> AsyncIterator[Watching]:
    query = {"every": str(every), "path": list(paths)}
    async with client.stream("GET", "/v1/watch", params=query, **more) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        yield Watching(answer.aiter_lines())
