"""What every operation works with: the app, its keys, its audit log, and what is hidden."""

from __future__ import annotations

from collections.abc import Sequence

from tickwheel.app import App
from tickwheel.client import Client
from tickwheel.errors import StoreUnavailable
from tickwheel.http.access import Audit, Keys
from tickwheel.http.redaction import Redaction
from tickwheel.registry import Definition, any_task


class Service:
    """An app, as its HTTP API serves it."""

    def __init__(
        self,
        app: App,
        *,
        keys: Keys | None = None,
        audit: Audit | None = None,
        redact: Sequence[str] = (),
        takes_any_task: bool = False,
    ) -> None:
        """`takes_any_task`: the app stands for a store alone, and jobs may name any task."""
        self.app = app
        self.keys = keys
        self.audit = audit
        self.redaction = Redaction(redact)
        self._takes_any_task = takes_any_task
        # Ids of jobs that requests with an Idempotency-Key are adding.
        self.adding: set[str] = set()

    async def client(self) -> Client:
        """The open client of the running event loop."""
        try:
            return await self.app.client()
        except OSError as error:
            raise StoreUnavailable(str(error)) from error

    def definition(self, task: str) -> Definition:
        """The task of this name; raises UnknownTask."""
        return any_task(task) if self._takes_any_task else self.app.tasks.get(task)
