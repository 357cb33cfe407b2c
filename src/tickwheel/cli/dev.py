"""`tickwheel dev`: a worker that restarts when the code changes."""

from __future__ import annotations

from typing import Any

import click

from tickwheel.cli.options import Verb
from tickwheel.cli.work import run_options, work_of
from tickwheel.config import load
from tickwheel.errors import BadConfig

# A reload should be quick: jobs that it interrupts are released soon.
GRACE = "2s"
LOG_LEVEL = "debug"


@click.command("dev", cls=Verb)
@run_options(grace=GRACE, log_level=LOG_LEVEL)
def dev(**flags: Any) -> int:
    """Run a worker that restarts when the code changes.

    Logs each job. Watches the .py and .toml files in the current folder. With the extra `http`, it
    serves the dashboard and the HTTP API too. In production, use tickwheel worker and tickwheel
    serve.
    """
    flags["grace"] = flags["grace"] or GRACE
    flags["log_level"] = flags["log_level"] or LOG_LEVEL
    work = work_of(load(flags))
    from dataclasses import replace

    from tickwheel.cli.autoreload import reload

    return reload(replace(work, port=_port()))


def _port() -> int | None:
    """A free port for the HTTP API, the usual one if possible; None without its libraries."""
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        return None
    from tickwheel.http.server import Listening, bind

    usual = Listening()
    for port in (usual.port, 0):
        try:
            with bind(usual.host, port) as bound:
                found: int = bound.getsockname()[1]
                return found
        except BadConfig:
            continue
    return None
