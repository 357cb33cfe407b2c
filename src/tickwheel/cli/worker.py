"""`tickwheel worker`: run an app's jobs until told to stop."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from tickwheel.cli.logs import LogLevel
from tickwheel.errors import BadTime
from tickwheel.span import span_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was typed, checked as far as that can be done without the app."""

    target: str
    queues: tuple[str, ...]
    concurrency: int
    lease_ms: int
    grace_ms: int
    log_level: LogLevel

    def command(self, parent: int) -> list[str]:
        """The command that runs one worker process of several, tied to its parent by a pipe."""
        return [
            *(sys.executable, "-m", "tickwheel", "worker", self.target),
            *(("--queues", ",".join(self.queues)) if self.queues else ()),
            *("--concurrency", str(self.concurrency)),
            *("--lease", f"{self.lease_ms}ms", "--grace", f"{self.grace_ms}ms"),
            *("--log-level", str(self.log_level), "--parent", str(parent)),
        ]


def worker(
    target: Annotated[
        str, typer.Argument(metavar="MODULE:APP", help="The app, as shop:app or shop.")
    ],
    queues: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Queues to serve. Default: those of the app's tasks."),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, help="Jobs to run at the same time, per process.")
    ] = 100,
    lease: Annotated[
        str,
        typer.Option(
            metavar="SPAN", help="How soon others take over the jobs of a worker that died."
        ),
    ] = "15s",
    grace: Annotated[
        str, typer.Option(metavar="SPAN", help="How long running jobs may take to finish.")
    ] = "30s",
    processes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Worker processes; one that dies is replaced.")
    ] = 1,
    log_level: Annotated[LogLevel, typer.Option(help="The least that is logged.")] = LogLevel.INFO,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run an app's jobs until told to stop.

    The first SIGTERM or Ctrl-C lets running jobs finish, the second one ends the process at once.
    """
    settings = Settings(
        target=target,
        queues=_names(queues),
        concurrency=concurrency,
        lease_ms=_span("--lease", lease),
        grace_ms=_span("--grace", grace),
        log_level=log_level,
    )
    from tickwheel.cli.serving import supervise, work

    raise typer.Exit(supervise(settings, processes) if processes > 1 else work(settings, parent))


def _span(option: str, text: str) -> int:
    try:
        return span_ms(text)
    except BadTime as error:
        raise BadTime(f"{option}: {error}") from None


def _names(queues: str | None) -> tuple[str, ...]:
    if queues is None:
        return ()
    from tickwheel.tasks import checked_name

    return tuple(checked_name("queue", name.strip()) for name in queues.split(","))
