"""A worker's HTTP face: `/metrics` for Prometheus and `/healthz` for whoever restarts it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from tickwheel.address import http_address
from tickwheel.app import App
from tickwheel.engine.worker import Worker
from tickwheel.operate.metrics import Metrics
from tickwheel.operate.responder import PlainResponse, responding

log = logging.getLogger("tickwheel")


class WorkerStatus:
    """What the HTTP face tells of a worker."""

    def __init__(self, app: App) -> None:
        self._metrics = Metrics(app)
        # None until it runs.
        self.worker: Worker | None = None

    async def metrics(self, accept: str) -> PlainResponse:
        body, content_type = await self._metrics.text(accept)
        return PlainResponse(200, body, content_type)

    async def health(self, accept: str) -> PlainResponse:
        """200 while the worker runs jobs. An unreachable store is not the worker's fault, and a
        restart would not help: it has metrics of its own."""
        if self.worker is None:
            return PlainResponse(503, b"starting\n")
        return (
            PlainResponse(503, b"stopping\n")
            if self.worker.stopping
            else PlainResponse(200, b"ok\n")
        )


@contextlib.asynccontextmanager
async def serving_status(app: App, address: str) -> AsyncIterator[WorkerStatus]:
    """Serve metrics and health at HOST:PORT for the duration of the block."""
    host, port = http_address(address)
    status = WorkerStatus(app)
    routes = {"/metrics": status.metrics, "/healthz": status.health}
    async with responding(host, port, routes) as port:
        shown = f"[{host}]" if ":" in host else host
        log.info("metrics at http://%s:%d/metrics", shown, port)
        yield status
