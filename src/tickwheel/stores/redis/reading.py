"""Jobs by id, and the names of queues: what other reads of a Redis store begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from tickwheel.batch import BATCH
from tickwheel.job import Job
from tickwheel.stores.redis import records
from tickwheel.stores.redis.wire import Wire

# How many queues one step reads: each has twelve sets.
QUEUES = 100


async def get(wire: Wire, ids: Sequence[str]) -> list[Job | None]:
    found: list[Job | None] = []
    while len(found) < len(ids):
        found += records.read_all(*await wire.step("get", ids[len(found) : len(found) + BATCH]))
    return found


async def names_of_queues(wire: Wire, after: str | None = None) -> AsyncIterator[list[str]]:
    """The queues that have jobs or are paused, by name, in portions for one step."""
    names: list[str] = []
    while not names or len(names) == QUEUES:
        least = b"-" if after is None else b"(" + after.encode()
        found = await wire.send(
            *("ZRANGEBYLEX", wire.key("names"), least, b"+", "LIMIT", 0, QUEUES)
        )
        if not found:
            return
        names = [name.decode() for name in found]
        after = names[-1]
        yield names
