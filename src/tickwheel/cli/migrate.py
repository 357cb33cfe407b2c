"""`tickwheel migrate`: create or upgrade the tables of a PostgreSQL store, as their owner."""

from __future__ import annotations

import click

from tickwheel.cli.load_app import app_of
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import emit_json, say
from tickwheel.errors import BadConfig
from tickwheel.masking import masked


@click.command("migrate", cls=Verb)
@click.option("--dry-run", is_flag=True, help="Print the SQL without running it.")
@common
def migrate(where: Where, as_json: bool, dry_run: bool) -> None:
    """Create or upgrade the tables of a PostgreSQL store.

    For databases where workers may not do this themselves: run it with the owner's URL before you
    start the new release. Other stores upgrade themselves when they are opened.
    """
    import asyncio

    url = app_of(where).url
    if url.partition("://")[0] not in ("postgresql", "postgres"):
        raise BadConfig(
            f"{masked(url)} does not need migrate: only postgresql:// stores do; "
            "all others upgrade themselves when they are opened"
        )
    asyncio.run(_migrate(url, as_json, dry_run))


async def _migrate(url: str, as_json: bool, dry_run: bool) -> None:
    from tickwheel.stores.postgres.store import PostgresStore

    before, after, sql = await PostgresStore.migrate(url, dry_run=dry_run)
    if as_json:
        emit_json({"from": before, "to": after, "dry_run": dry_run, "sql": sql})
        return
    if dry_run and sql:
        click.echo(sql, nl=False)
    if before == after:
        say(f"nothing to do: the schema is at version {after}")
    elif dry_run:
        say(f"nothing was run; this would upgrade the schema from version {before} to {after}")
    elif before == 0:
        say(f"created the schema, version {after}")
    else:
        say(f"upgraded the schema from version {before} to {after}")
