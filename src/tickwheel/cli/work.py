"""What to run: an app and its settings, from the command line and the configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from tickwheel.address import nth_address
from tickwheel.cli.options import COUNT, argument, stacked
from tickwheel.config import LOG_FORMATS, LOG_LEVELS, Config, Settings
from tickwheel.errors import BadConfig

_DEFAULTS = Settings()

Decorate = Callable[[Any], Any]


def run_options(*, grace: str = _DEFAULTS.grace, log_level: str = _DEFAULTS.log_level) -> Decorate:
    """The app and the settings as typed; each is None if it was not given. `grace` and `log_level`
    are this command's defaults."""
    return stacked(
        argument(
            "app",
            metavar="[MODULE:APP]",
            about="The app: shop:app, or shop. Default: the setting `app`.",
            required=False,
        ),
        click.option(
            "--import",
            "imports",
            metavar="MODULE",
            multiple=True,
            help="Import this module too, for its tasks. Can be repeated.",
        ),
        click.option(
            "--queues", metavar="A,B", help="Queues to serve. Default: those of the app's tasks."
        ),
        click.option(
            "--concurrency",
            metavar="N",
            type=COUNT,
            help=f"Jobs to run at the same time in each process. Default: {_DEFAULTS.concurrency}.",
        ),
        click.option(
            "--threads",
            metavar="N",
            type=COUNT,
            help=f"Plain functions to run at the same time. Default: {_DEFAULTS.threads}.",
        ),
        click.option(
            "--task-processes",
            metavar="N",
            type=COUNT,
            help='Child processes for tasks with pool="process". Default: one per core.',
        ),
        click.option(
            "--lease",
            metavar="DURATION",
            help=f"How soon others take over a dead worker's jobs. Default: {_DEFAULTS.lease}.",
        ),
        click.option(
            "--grace",
            metavar="DURATION",
            help=f"How long running jobs may take to finish when it stops. Default: {grace}.",
        ),
        click.option(
            "--http",
            metavar="HOST:PORT",
            help="Serve /metrics and /healthz there; :9100 is for this machine only.",
        ),
        click.option(
            "--log-level",
            type=click.Choice(LOG_LEVELS),
            help=f"The lowest level to log. Default: {log_level}.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(LOG_FORMATS),
            help=f"Log as text, or as one JSON object a line. Default: {_DEFAULTS.log_format}.",
        ),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """An app, and the settings to run its jobs with."""

    target: str
    settings: Settings
    # If it serves the HTTP API too: the port.
    port: int | None = None

    def command(self, parent: int, number: int = 1) -> list[str]:
        """The command that runs the n-th worker process, tied to its parent by a pipe."""
        settings = self.settings
        verb, more = "worker", ["--processes", "1"]
        if self.port is not None:
            verb, more = "serve", ["--worker", "--port", str(self.port)]
        return [
            *(sys.executable, "-m", "tickwheel", verb, self.target),
            *(("--queues", ",".join(settings.queues)) if settings.queues else ()),
            *(word for module in settings.imports for word in ("--import", module)),
            *("--concurrency", str(settings.concurrency), "--threads", str(settings.threads)),
            *("--task-processes", str(settings.task_processes)),
            *("--lease", settings.lease, "--grace", settings.grace),
            *(("--http", nth_address(settings.http, number)) if settings.http else ()),
            *(*more, "--log-level", settings.log_level),
            *("--log-format", settings.log_format, "--parent", str(parent)),
        ]


def work_of(config: Config) -> Work:
    """The app and settings; BadConfig if no app is named."""
    if not config.settings.app:
        raise BadConfig("which app? Name it, as in shop:app, or set `app` in tickwheel.toml")
    from tickwheel.checks import checked_name

    for queue in config.settings.queues:
        checked_name("queue", queue)
    return Work(config.settings.app, config.settings)
