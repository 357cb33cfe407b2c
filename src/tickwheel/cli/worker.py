"""`tickwheel worker`: run an app's jobs until told to stop."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.options import COUNT, Verb
from tickwheel.cli.work import run_options, work_of
from tickwheel.config import load


@click.command("worker", cls=Verb)
@run_options()
@click.option(
    "--processes",
    metavar="N",
    type=COUNT,
    help="Worker processes; one that dies is replaced. Default: 1.",
)
@click.option("--parent", type=int, hidden=True)
def worker(parent: int | None, **flags: Any) -> int:
    """Run an app's jobs until told to stop.

    The first SIGTERM or Ctrl-C lets running jobs finish; the second ends the process at once.
    """
    work = work_of(load(flags))
    from tickwheel.cli import run_worker

    return (
        run_worker.supervise(work)
        if work.settings.processes > 1
        else run_worker.serve(work, parent)
    )
