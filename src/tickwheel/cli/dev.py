"""`tickwheel dev`: a worker that starts anew whenever the code changes."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.options import Verb
from tickwheel.cli.worker import running, work_of
from tickwheel.config import load

# Jobs that a reload interrupts are handed back at once; nobody wants to wait for them.
GRACE = "2s"


@click.command("dev", cls=Verb)
@running
def dev(**flags: Any) -> int:
    """Run an app's jobs, anew whenever its code changes.

    Logs each job. Watches the .py and .toml files of the current folder. For production use worker.
    """
    flags["grace"] = flags["grace"] or GRACE
    flags["log_level"] = flags["log_level"] or "debug"
    work = work_of(load(flags))
    from tickwheel.cli.reloading import reload

    return reload(work)
