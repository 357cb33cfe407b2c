"""`tickwheel demo`: a shop on a busy day, with a killed worker; about 40 seconds."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tickwheel.cli.options import Verb, as_output
from tickwheel.cli.output import FAILURE, OK, emit_json
from tickwheel.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from tickwheel.examples.account import Summary


@click.command("demo", cls=Verb)
@click.option("--fast", is_flag=True, help="Run for about 12 seconds instead of 40.")
@click.option(
    "--record",
    metavar="FILE.svg",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Save the screen as a picture to this file.",
)
@as_output
def demo(fast: bool, record: Path | None, as_json: bool) -> int:
    """Watch orders, deadlines, retries and a killed worker.

    Runs on the embedded store, in a temporary folder. Exits with 0 if every order is accounted for,
    no job started early and the stock adds up, otherwise with 1.
    """
    if record is not None and not os.access(record.parent, os.W_OK):
        raise UsageError(f"--record: can't write to {record.parent}")
    with tempfile.TemporaryDirectory(
        prefix="tickwheel-demo-", ignore_cleanup_errors=True
    ) as folder:
        # Read by the shop, which is imported below and in the worker processes.
        os.environ["SHOP_FOLDER"] = folder
        return _play(fast, record, as_json)


def _play(fast: bool, record: Path | None, as_json: bool) -> int:
    import asyncio
    from dataclasses import asdict

    from rich.console import Console

    from tickwheel.examples.view import summary_table

    console = Console(stderr=as_json, highlight=False, markup=False, emoji=False)
    try:
        summary = asyncio.run(_show(fast, console, record))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    if as_json:
        emit_json(asdict(summary))
    else:
        console.print(summary_table(summary))
    return FAILURE if summary.wrong else OK


async def _show(fast: bool, console: Console, picture: Path | None) -> Summary:
    import asyncio

    from tickwheel.examples.story import FAST, FULL
    from tickwheel.examples.view import show

    # Other signals end the demo in the same way as Ctrl-C, so that no worker is left running.
    loop, playing = asyncio.get_running_loop(), asyncio.current_task()
    assert playing is not None
    for name in {"SIGTERM", "SIGHUP"} & set(dir(signal)):
        signal.signal(getattr(signal, name), lambda *_: loop.call_soon_threadsafe(playing.cancel))
    return await show(FAST if fast else FULL, console, picture=picture)
