"""Behind `tickwheel serve`: the HTTP API, the dashboard, and a worker if asked, in this process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from tickwheel.app import App
from tickwheel.callbacks import Callbacks
from tickwheel.cli.load_app import load_app, store_name
from tickwheel.cli.logs import set_up_logs
from tickwheel.cli.output import show_fields
from tickwheel.cli.run_worker import queues_of, run_app, working
from tickwheel.cli.shutdown import Shutdown
from tickwheel.cli.work import Work
from tickwheel.config import Settings
from tickwheel.dashboard.pages import dashboard_app
from tickwheel.duration import duration_ms
from tickwheel.http.access import refuse_open_bind
from tickwheel.http.asgi import asgi_app
from tickwheel.http.server import Listening, serving
from tickwheel.operate.keys import Keys
from tickwheel.version import __version__

log = logging.getLogger("tickwheel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What to serve, and how."""

    # The app; None: a store alone, by its URL or that of the settings.
    target: str | None
    store: str | None
    settings: Settings
    listening: Listening
    worker: bool
    allow_hosts: tuple[str, ...]
    dashboard: bool

    @property
    def work(self) -> Work:
        """What a worker in this process does."""
        return Work(self.target or "callbacks", self.settings)


def serve(wanted: Serving, parent: int | None) -> int:
    """Serve until told to stop; returns the exit code."""
    if wanted.target is None:
        app = _callbacks_alone(wanted)
    else:
        app = load_app(wanted.target, wanted.settings.imports)
    made = dashboard_app if wanted.dashboard else asgi_app
    api = made(
        app,
        allow_hosts=wanted.allow_hosts,
        redact=wanted.settings.redact,
        takes_any_task=wanted.target is None,
    )
    set_up_logs(wanted.settings, with_pid=parent is not None)
    return run_app(
        app,
        wanted.settings,
        parent,
        lambda shutdown, started: _run(app, api, wanted, shutdown, started, alone=parent is None),
    )


def _callbacks_alone(wanted: Serving) -> App:
    """An app that has no task but `http.call`."""
    app, settings = App(wanted.store, name="serve"), wanted.settings
    Callbacks(app, keys=settings.callback_keys, allow=settings.callback_allow or None)
    return app


async def _run(
    app: App,
    api: Callable[..., Awaitable[None]],
    wanted: Serving,
    shutdown: Shutdown,
    started: Callable[[], object],
    *,
    alone: bool,
) -> None:
    has_keys = await Keys(await app.client()).any()
    refuse_open_bind(wanted.listening.host, keys=has_keys)
    grace_s = duration_ms(wanted.settings.grace) / 1000
    async with contextlib.AsyncExitStack() as stack:
        if wanted.worker:
            # Outside: it stops after the last request.
            await stack.enter_async_context(working(app, wanted.work))
        async with serving(api, replace(wanted.listening, grace_s=grace_s)) as url:
            started()
            if alone and wanted.settings.log_format == "text":
                _banner(app, wanted, url, has_keys)
            else:
                log.info("%s", _started(app, wanted, url))
            await shutdown.requested()
            log.info("stopping: requests under way finish first")


def _started(app: App, wanted: Serving, url: str) -> str:
    if not wanted.worker:
        return f"serving {url}"
    queues = ", ".join(queues_of(app, wanted.work))
    return f"started, serving {queues} and {url}"


def _banner(app: App, wanted: Serving, url: str, has_keys: bool) -> None:
    fields: list[tuple[str, Any]] = [
        ("tickwheel", __version__),
        ("app", wanted.target or "none: callbacks, and any task of other workers"),
        ("store", store_name(app)),
        *([("dashboard", f"{url}/")] if wanted.dashboard else []),
        ("api", f"{url}/v1/openapi.json"),
        ("access", "with API keys" if has_keys else "without API keys: this machine only"),
        ("worker", "in this process" if wanted.worker else "none: run tickwheel worker"),
        ("pid", str(os.getpid())),
    ]
    show_fields(fields, stderr=True)
