"""`tickwheel dev`: a worker that restarts when the code changes."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.options import Verb
from tickwheel.cli.work import run_options, work_of
from tickwheel.config import load

# A reload should be quick: jobs that it interrupts are released soon.
GRACE = "2s"
LOG_LEVEL = "debug"


@click.command("dev", cls=Verb)
@run_options(grace=GRACE, log_level=LOG_LEVEL)
def dev(**flags: Any) -> int:
    """Run a worker that restarts when the code changes.

    Logs each job. Watches the .py and .toml files in the current folder. In production, use
    tickwheel worker.
    """
    flags["grace"] = flags["grace"] or GRACE
    flags["log_level"] = flags["log_level"] or LOG_LEVEL
    work = work_of(load(flags))
    from tickwheel.cli.autoreload import reload

    return reload(work)
