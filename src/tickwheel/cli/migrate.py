"""`tickwheel migrate`: make or upgrade the tables of a PostgreSQL store, as their owner."""

from __future__ import annotations

import click

from tickwheel.cli.loading import app_of, without_password
from tickwheel.cli.options import Verb, Where, common
from tickwheel.cli.output import emit_json, say
from tickwheel.errors import BadConfig


@click.command("migrate", cls=Verb)
@click.option("--dry-run", is_flag=True, help="Print the SQL that would be run, and run nothing.")
@common
def migrate(where: Where, as_json: bool, dry_run: bool) -> None:
    """Make or upgrade the tables of a PostgreSQL store.

    For databases whose workers may not do it themselves: run it with the URL of the owner before
    the new release starts. Other stores see to it when they are opened.
    """
    import asyncio

    url = app_of(where).url
    if url.partition("://")[0] not in ("postgresql", "postgres"):
        raise BadConfig(
            f"{without_password(url)} needs no migrate: only postgresql:// stores do, "
            "all others see to it when they are opened"
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
        say(f"nothing was run; this would take the schema from version {before} to {after}")
    elif before == 0:
        say(f"made the schema, at version {after}")
    else:
        say(f"took the schema from version {before} to {after}")
