"""Which tasks have parked jobs, as the server last said: see the head of statements.lua."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence

from tickwheel.stores.redis import records

# With how many tasks, over all queues, a claim looks for parked jobs: each costs it a few commands.
MOST = 1000

# By queue: the digest of all its tasks with parked jobs, and those of them that a worker knows.
Known = dict[str, tuple[str, list[str]]]


class Parked:
    """What one handle knows. The server checks the digests, so this is never out of date."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[str, dict[str, str]]] = {}

    def of(self, queues: Iterable[str], tasks: frozenset[str]) -> Known:
        """What a claim of these queues sends, for a worker that knows these tasks."""
        known: Known = {}
        pairs = []
        for queue in queues:
            if queue in self._queues:
                digest, lines = self._queues[queue]
                known[queue] = digest, []
                pairs += [(queue, line) for task, line in lines.items() if task in tasks]
        if len(pairs) > MOST:
            # At random, so that each has its turn.
            pairs = random.sample(pairs, MOST)
        for queue, line in pairs:
            known[queue][1].append(line)
        return known

    def learn(self, changes: Sequence[bytes]) -> None:
        """`changes` is what the server answers instead: queue, entry, queue, entry, …"""
        for queue, entry in zip(changes[::2], changes[1::2], strict=True):
            digest, *lines = entry.decode().split("\n")
            if digest:
                names = [line.rpartition(" ")[0] for line in lines]
                self._queues[queue.decode()] = digest, {records.name_in(n): n for n in names}
            else:
                self._queues.pop(queue.decode(), None)


@functools.lru_cache(maxsize=8)
def topics(tasks: frozenset[str]) -> frozenset[str]:
    """The topics of a wait of a worker that knows these tasks; kept, because they may be many."""
    return frozenset(f"t{records.as_line(task)}" for task in tasks)
