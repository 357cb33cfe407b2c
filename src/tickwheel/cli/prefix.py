"""The first characters of an id stand for all of it, if no other id starts with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tickwheel.cli.output import say
from tickwheel.errors import BadArguments
from tickwheel.job import State

if TYPE_CHECKING:
    from tickwheel.client import Client

# Fewer characters would often be a typo.
SHORTEST = 4
# No store finds ids by prefix, so their jobs are read; a store with more is not searched.
SEARCH_MOST = 10_000
PAGE = 1000
# How many ids with the same prefix a message lists.
LISTED = 3
# An id that Tickwheel made. If it is unknown, its job was pruned, and a search is of no use.
_WHOLE = re.compile("[0-9a-f]{27}")


async def whole_id(client: Client, id: str) -> str:
    """The id that starts so; the text itself if there is none. Raises if there are several."""
    [found] = await whole_ids(client, [id])
    return found


async def whole_ids(client: Client, ids: Iterable[str]) -> list[str]:
    """The same for many, each once."""
    once = list(dict.fromkeys(ids))
    known = await client.store.get(once)
    prefixes = [id for id, job in zip(once, known, strict=True) if job is None]
    found = await _search(client, [each for each in prefixes if len(each) >= SHORTEST])
    return list(dict.fromkeys(found.get(id, id) for id in once))


async def _search(client: Client, prefixes: list[str]) -> dict[str, str]:
    """The ids that start with these, by prefix."""
    from tickwheel.store import Query

    prefixes = [each for each in prefixes if not _WHOLE.fullmatch(each)]
    if not prefixes:
        return {}
    total = sum(getattr(queue, state) for queue in await client.queues() for state in State)
    if total > SEARCH_MOST:
        say(f"note: the store has {total:,} jobs, too many to search for ids by their start")
        return {}
    matches: dict[str, set[str]] = {prefix: set() for prefix in prefixes}
    cursor: str | None = None
    for _ in range(2 * SEARCH_MOST // PAGE):
        page = await client.find(Query(), cursor=cursor, limit=PAGE)
        for prefix, ids in matches.items():
            ids.update(job.id for job in page.jobs if job.id.startswith(prefix))
        cursor = page.cursor
        if cursor is None:
            break
    return {prefix: _only(prefix, sorted(ids)) for prefix, ids in matches.items() if ids}


def _only(prefix: str, ids: list[str]) -> str:
    if len(ids) == 1:
        return ids[0]
    shown = ", ".join(ids[:LISTED]) + (", …" if len(ids) > LISTED else "")
    raise BadArguments(f"{prefix!r} is the start of {len(ids):,} ids: {shown}; give more of it")
