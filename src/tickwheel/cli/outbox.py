"""`tickwheel outbox`: hand jobs over from an app's outbox to its store, until told to stop."""

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
@click.option("--once", is_flag=True, help="Hand over what is there, and exit.")
def outbox(app: str | None, once: bool) -> int:
    """Hand jobs over from an app's outbox to its store.

    Workers of the app do it too. Makes the outbox's table where it is missing. Rows that hold no
    job, or one that the store refuses for good, are set aside: they stay, with the reason.
    """
    import asyncio

    from tickwheel.cli.loading import load_app
    from tickwheel.cli.serving import set_up_logs
    from tickwheel.cli.worker import work_of

    work = work_of(load({"app": app}))
    found = load_app(work.target)
    set_up_logs(work.settings.log_level)
    asyncio.run(_relay(found, once))
    return OK


async def _relay(app: App, once: bool) -> None:
    import asyncio

    from tickwheel.cli.loading import open_app, store_name
    from tickwheel.clock import first_of
    from tickwheel.supervisor import on_signals

    if app.outbox is None:
        raise BadConfig("this app has no outbox: App(…, outbox='postgresql://…')")
    await open_app(app)
    client = await app.client()
    stopping = asyncio.Event()
    try:
        if once:
            say(f"handed over: {await app.outbox.empty(client.store):,} jobs")
            await _tell_aside(app.outbox)
            return
        show_fields([("from", str(app.outbox)), ("to", store_name(app))], stderr=True)
        with on_signals(lambda _: stopping.set()):
            # Where the database is away, the relay says so and keeps trying.
            with contextlib.suppress(StoreUnavailable):
                await _tell_aside(app.outbox)
            relay = app.outbox.relay(client.store, client.clock, lambda: not stopping.is_set())
            await first_of(relay, stopping.wait())
    finally:
        await app.__aexit__()


async def _tell_aside(outbox: Outbox) -> None:
    from tickwheel.outbox import TABLE

    if aside := await outbox.aside():
        say(
            f"set aside: {aside:,} rows, see `select n, refused, job from {TABLE} where refused is "
            f"not null`; `update {TABLE} set refused = null where n = …` has a row tried again"
        )
