"""`tickwheel outbox`: move jobs from an app's outbox to its store until told to stop."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from tickwheel.cli.options import Verb, argument
from tickwheel.cli.output import OK, say, show_fields
from tickwheel.config import load
from tickwheel.errors import BadConfig, StoreUnavailable

if TYPE_CHECKING:
    from tickwheel.app import App
    from tickwheel.outbox import Outbox


@click.command("outbox", cls=Verb)
@argument(
    "app", metavar="[MODULE:APP]", about="The app. Default: the setting `app`.", required=False
)
@click.option("--once", is_flag=True, help="Move the jobs that are there now, and exit.")
def outbox(app: str | None, once: bool) -> int:
    """Move jobs from an app's outbox to its store.

    The app's workers do this too. Creates the outbox table if it is missing. Rows that hold no job,
    or a job that the store will never accept, are set aside: they stay in the table, with the
    reason.
    """
    import asyncio

    from tickwheel.cli.load_app import load_app
    from tickwheel.cli.logs import set_up_logs
    from tickwheel.cli.work import work_of

    work = work_of(load({"app": app}))
    found = load_app(work.target)
    set_up_logs(work.settings)
    asyncio.run(_relay(found, once))
    return OK


async def _relay(app: App, once: bool) -> None:
    import asyncio

    from tickwheel.cli.load_app import open_app, store_name
    from tickwheel.concurrency import first_of
    from tickwheel.operate.supervisor import on_signals
    from tickwheel.trust import unsealed

    if app.outbox is None:
        raise BadConfig("this app has no outbox; give it one: App(…, outbox='postgresql://…')")
    await open_app(app)
    client = await app.client()
    # Jobs were sealed where they were enqueued: a relay doesn't vouch for what it finds.
    store = unsealed(client.store)
    stopping = asyncio.Event()
    try:
        if once:
            moved = await app.outbox.empty(store)
            say(f"moved to the store: {moved:,} job{'' if moved == 1 else 's'}")
            await _tell_aside(app.outbox)
            return
        show_fields([("from", str(app.outbox)), ("to", store_name(app))], stderr=True)
        with on_signals(lambda _: stopping.set()):
            # If the database is unreachable, the relay logs that and retries.
            with contextlib.suppress(StoreUnavailable):
                await _tell_aside(app.outbox)
            relay = app.outbox.relay(store, client.clock, lambda: not stopping.is_set())
            await first_of(relay, stopping.wait())
    finally:
        await app.__aexit__()


async def _tell_aside(outbox: Outbox) -> None:
    from tickwheel.outbox import TABLE

    if aside := await outbox.aside():
        rows = f"{aside:,} row" if aside == 1 else f"{aside:,} rows"
        say(
            f"set aside: {rows}, see `select n, refused, job from {TABLE} where refused is "
            f"not null`; `update {TABLE} set refused = null where n = …` retries a row"
        )
