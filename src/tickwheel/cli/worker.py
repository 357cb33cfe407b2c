"""`tickwheel worker`: run an app's jobs until told to stop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from tickwheel.cli.options import COUNT, Verb, argument, stacked
from tickwheel.config import LOG_LEVELS, Config, Settings, load
from tickwheel.errors import BadConfig

_DEFAULTS = Settings()

# The app, and how to run its jobs: as typed, each None where it was not.
running: Callable[[Any], Any] = stacked(
    argument(
        "app",
        metavar="[MODULE:APP]",
        about="The app, as shop:app or shop. Default: the setting `app`.",
        required=False,
    ),
    click.option(
        "--queues", metavar="A,B", help="Queues to serve. Default: those of the app's tasks."
    ),
    click.option(
        "--concurrency",
        metavar="N",
        type=COUNT,
        help=f"Jobs to run at the same time, per process. Default: {_DEFAULTS.concurrency}.",
    ),
    click.option(
        "--lease",
        metavar="SPAN",
        help="How soon others take over the jobs of a worker that died. "
        f"Default: {_DEFAULTS.lease}.",
    ),
    click.option(
        "--grace",
        metavar="SPAN",
        help=f"How long running jobs may take to finish. Default: {_DEFAULTS.grace}.",
    ),
    click.option(
        "--log-level",
        type=click.Choice(LOG_LEVELS),
        help="The least that is logged. Default: info.",
    ),
)


@dataclass(frozen=True, slots=True)
class Work:
    """An app to work for, and the settings to do it with."""

    target: str
    settings: Settings

    def command(self, parent: int) -> list[str]:
        """The command that runs one worker process of several, tied to its parent by a pipe."""
        settings = self.settings
        return [
            *(sys.executable, "-m", "tickwheel", "worker", self.target),
            *(("--queues", ",".join(settings.queues)) if settings.queues else ()),
            *("--concurrency", str(settings.concurrency)),
            *("--lease", settings.lease, "--grace", settings.grace),
            *("--processes", "1", "--log-level", settings.log_level, "--parent", str(parent)),
        ]


def work_of(config: Config) -> Work:
    """What there is to do; BadConfig where no app is named."""
    if not config.settings.app:
        raise BadConfig("which app? Name it, as in shop:app, or set `app` in tickwheel.toml")
    from tickwheel.tasks import checked_name

    for queue in config.settings.queues:
        checked_name("queue", queue)
    return Work(config.settings.app, config.settings)


@click.command("worker", cls=Verb)
@running
@click.option(
    "--processes",
    metavar="N",
    type=COUNT,
    help="Worker processes; one that dies is replaced. Default: 1.",
)
@click.option("--parent", type=int, hidden=True)
def worker(parent: int | None, **flags: Any) -> int:
    """Run an app's jobs until told to stop.

    The first SIGTERM or Ctrl-C lets running jobs finish, the second one ends the process at once.
    """
    work = work_of(load(flags))
    from tickwheel.cli import serving

    return serving.supervise(work) if work.settings.processes > 1 else serving.serve(work, parent)
