"""Which keys each step of statements.lua touches: Redis has to know before it runs a script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

# Keys that any step may touch. The script expects the hash of jobs first.
FIXED = (
    *("job", "since", "names", "paused", "asked", "sleep", "schedule", "worker", "gone"),
    # `none` never exists, so a cluster node starts no step while the slot is being moved.
    *("parked", "watched", "schema", "none"),
)
# Keys that a step touches if it adds, finds or deletes jobs with meta.
META = ("meta", "tags")
# Keys that a step touches if it changes jobs because others ask for it.
TOLD = ("told",)
# Keys that only `open` touches: one to try commands on, and one of an older layout.
OPENING = ("probe", "queues")


def of_records(kind: str) -> list[str]:
    """The texts of the records of this kind, and their names."""
    return [f"record:{kind}", f"records:{kind}"]


def of_places(places: Iterable[str]) -> list[str]:
    """The sets that a job in one of these places ("<rank>:<queue>") may be in, unless parked."""
    found = []
    for place in set(places):
        found += [f"w:{place}", f"r:{place}", *(f"e:{state}:{place[2:]}" for state in "dxc")]
    return found


def of_parked(queues: Iterable[str]) -> list[str]:
    """The sets of the parked jobs of these queues."""
    return [f"w:p:{queue}" for queue in set(queues)]


def of_queues(queues: Iterable[str]) -> list[str]:
    """All sets of these queues."""
    return [each for queue in queues for state in "wrdxc" for each in of_state(state, queue)]


def split_by_queues(places: Sequence[str], most: int) -> Iterator[slice]:
    """Consecutive slices, each with jobs of at most `most` queues."""
    first, queues = 0, set[str]()
    for i, place in enumerate(places):
        queue = place[2:]
        if queue not in queues and len(queues) == most:
            yield slice(first, i)
            first, queues = i, set()
        queues.add(queue)
    yield slice(first, len(places))


def of_state(state: str, queue: str) -> list[str]:
    """The sets of one queue and one state, in the order of pages."""
    if state in "wr":
        ranks = "3210p" if state == "w" else "3210"
        return [f"{state}:{rank}:{queue}" for rank in ranks]
    return [f"e:{state}:{queue}"]


def state_and_queue(key: str) -> tuple[str, str]:
    """The arguments of `of_state` that give this key."""
    return key[2] if key[0] == "e" else key[0], key[4:]
