"""`tickwheel worker`: run an app's jobs until told to stop."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click

from tickwheel.cli.options import COUNT, Verb, argument
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
    log_level: str

    def command(self, parent: int) -> list[str]:
        """The command that runs one worker process of several, tied to its parent by a pipe."""
        return [
            *(sys.executable, "-m", "tickwheel", "worker", self.target),
            *(("--queues", ",".join(self.queues)) if self.queues else ()),
            *("--concurrency", str(self.concurrency)),
            *("--lease", f"{self.lease_ms}ms", "--grace", f"{self.grace_ms}ms"),
            *("--log-level", self.log_level, "--parent", str(parent)),
        ]


@click.command("worker", cls=Verb)
@argument("target", metavar="MODULE:APP", about="The app, as shop:app or shop.")
@click.option("--queues", metavar="A,B", help="Queues to serve. Default: those of the app's tasks.")
@click.option(
    "--concurrency",
    metavar="N",
    type=COUNT,
    default=100,
    help="Jobs to run at the same time, per process.",
)
@click.option(
    "--lease",
    metavar="SPAN",
    default="15s",
    help="How soon others take over the jobs of a worker that died.",
)
@click.option(
    "--grace", metavar="SPAN", default="30s", help="How long running jobs may take to finish."
)
@click.option(
    "--processes",
    metavar="N",
    type=COUNT,
    default=1,
    help="Worker processes; one that dies is replaced.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="The least that is logged.",
)
@click.option("--parent", type=int, hidden=True)
def worker(
    target: str,
    queues: str | None,
    concurrency: int,
    lease: str,
    grace: str,
    processes: int,
    log_level: str,
    parent: int | None,
) -> int:
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

    return supervise(settings, processes) if processes > 1 else work(settings, parent)


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
