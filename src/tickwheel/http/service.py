"""What every operation works with: the app, its keys, its audit log, and what is hidden."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any

from tickwheel.app import App
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.config import setting
from tickwheel.errors import StoreUnavailable
from tickwheel.http.recent import Recent
from tickwheel.http.redaction import Redaction
from tickwheel.http.streams import Streams
from tickwheel.operate.audit import Audit
from tickwheel.operate.calls import RecentCalls
from tickwheel.operate.keys import Keys
from tickwheel.operate.recorder import Recorder
from tickwheel.operate.sessions import Sessions
from tickwheel.registry import Definition, any_task

# How long the recorder may take to stop.
STOP_S = 2.0


class Service:
    """An app, as its HTTP API serves it."""

    def __init__(
        self,
        app: App,
        *,
        redact: Sequence[str] = (),
        takes_any_task: bool = False,
    ) -> None:
        """`takes_any_task`: the app stands for a store alone, and jobs may name any task."""
        self.app = app
        self.redaction = Redaction(redact)
        # The name and colour of the dashboard's badge.
        self.environment: str = setting("environment")
        self._takes_any_task = takes_any_task
        # Ids of jobs that requests with an Idempotency-Key are adding.
        self.adding: set[str] = set()
        self.recent = Recent()
        # Of this process: `asgi_app` turns the counts on.
        self.calls = RecentCalls(app.enable_metrics(), SystemClock())
        self.streams = Streams()
        self._client: Client | None = None
        self._metrics: Any = None
        self._recording: asyncio.Task[None] | None = None

    async def client(self) -> Client:
        """The open client of the running event loop."""
        try:
            return await self.app.client()
        except OSError as error:
            raise StoreUnavailable(str(error)) from error

    async def keys(self) -> Keys:
        """The API keys that the store keeps."""
        await self._open()
        return self._keys

    async def sessions(self) -> Sessions:
        """The sessions that the store keeps."""
        await self._open()
        return self._sessions

    async def audit(self) -> Audit:
        """The audit log that the store keeps."""
        await self._open()
        return self._audit

    async def _open(self) -> None:
        client = await self.client()
        if client is not self._client:
            self._client, self._keys, self._audit = client, Keys(client), Audit(client)
            self._sessions = Sessions(client, self._keys)

    def record(self) -> None:
        """Record the history from now on, until `stop_recording`. An app that is mounted in another
        one is not told when it starts: then the first who wants to see something begins it."""
        running, loop = self._recording, asyncio.get_running_loop()
        if running is None or running.done() or running.get_loop() is not loop:
            recorder = Recorder(self.client, tell=self.calls.look)
            self._recording = loop.create_task(recorder.run(), name="tickwheel-history")

    async def stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
            await asyncio.wait([self._recording], timeout=STOP_S)

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text, and its content type. Raises BadConfig without prometheus-client."""
        if self._metrics is None:
            # Its library may not be installed.
            module = importlib.import_module("tickwheel.operate.metrics")
            self._metrics = module.Metrics(self.app)
        found: tuple[bytes, str] = await self._metrics.text(accept)
        return found

    def definition(self, task: str) -> Definition:
        """The task of this name; raises UnknownTask."""
        return any_task(task) if self._takes_any_task else self.app.tasks.get(task)
