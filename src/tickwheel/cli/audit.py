"""`tickwheel audit`: list the audit log, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from tickwheel.cli.load_app import ask
from tickwheel.cli.options import COUNT, Verb, Where, common
from tickwheel.cli.output import Column, emit_json, say, show_table
from tickwheel.cli.times import since_ms
from tickwheel.duration import iso, moment, moment_text

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.operate.audit import Entry


@click.command("audit", cls=Verb)
@click.option("--since", metavar="TIME", help="Only entries since: 1h, or an ISO time.")
@click.option("--limit", metavar="N", type=COUNT, default=50, help="Print at most N entries.")
@click.option("--cursor", metavar="CURSOR", help="Continue after the previous page.")
@common
def audit(since: str | None, limit: int, cursor: str | None, where: Where, as_json: bool) -> None:
    """List the audit log, newest first.

    It has what was done with API keys, and who created and revoked them.
    """
    after_ms = since_ms("--since", since)

    async def look(client: Client) -> tuple[list[Entry], str | None]:
        return await _entries(client, limit, cursor, after_ms)

    found, more = ask(where, look)
    if as_json:
        emit_json({"entries": [_document(entry) for entry in found], "cursor": more})
        return
    if found:
        _show(found)
    else:
        say("no entries" if since is None and cursor is None else "no matching entries")
    if more is not None:
        say(f"there may be more; for the next page add --cursor {more}")


async def _entries(
    client: Client, limit: int, cursor: str | None, after_ms: int | None
) -> tuple[list[Entry], str | None]:
    from tickwheel.operate.audit import Audit
    from tickwheel.store import RECORDS_LIMIT

    log = Audit(client)
    found: list[Entry] = []
    while True:
        most = min(limit - len(found), RECORDS_LIMIT)
        page, cursor = await log.list(cursor=cursor, limit=most, after_ms=after_ms)
        found += page
        if cursor is None or len(found) >= limit:
            return found, cursor


def _document(entry: Entry) -> dict[str, object]:
    document = msgspec.to_builtins(entry)
    return {"at": iso(moment(document.pop("at_ms"))), **document}


def _show(found: list[Entry]) -> None:
    show_table(
        [
            Column("TIME"),
            Column("WHO", whole=False),
            Column("ACTION", whole=False),
            Column("TARGET"),
            # A narrow terminal has less of these first.
            Column("FROM", whole=False, least=4, cut=True),
            Column("OUTCOME", whole=False, cut=True),
        ],
        [
            (
                moment_text(entry.at_ms),
                entry.who,
                entry.action,
                entry.target,
                entry.source,
                (_outcome(entry), "" if entry.outcome == "ok" else "yellow"),
            )
            for entry in found
        ],
    )


def _outcome(entry: Entry) -> str:
    return f"{entry.outcome}: {entry.detail}" if entry.detail else entry.outcome
