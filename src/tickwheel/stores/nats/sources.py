"""What one handle knows of the consumers that hand out ready messages. No I/O.

A source is the consumer of one queue and one priority.

    NEW ──answer──► PRESENT ──gone──► LOST ──restoring──► ABSENT
     └────────────────────────gone───────────────────────────▲

An answer makes it PRESENT again from every state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from itertools import groupby

from tickwheel.stores.nats import steps
from tickwheel.stores.nats.consumers import consumer_name
from tickwheel.stores.nats.steps import ReadyMessage

# A source that takes longer than this to answer is not waited for, if another one answered.
PATIENCE_S = 0.25
# A source that has given nothing for this long may be stuck.
EMPTY_S = 1.0

# What a pull brings: messages, and whether there may be more.
Pull = asyncio.Task[tuple[list[ReadyMessage], bool]]


class Presence(Enum):
    """Whether the server has the consumer."""

    # It was never pulled from.
    NEW = auto()
    PRESENT = auto()
    # It was there, and now nobody answers for it.
    LOST = auto()
    # Nobody answers for it. Most queues don't use every priority, so most of these never existed.
    ABSENT = auto()


class Supply(Enum):
    """What the last pull left behind."""

    LITTLE = auto()
    # It gave as many messages as were asked for: there may be more.
    PLENTY = auto()
    # In this claim it gave fewer than were asked for, because of their bytes: there are more.
    CUT = auto()


class Source:
    """One source, as this handle last saw it."""

    __slots__ = ("empty_since", "presence", "priority", "pull", "queue", "silent", "supply")

    def __init__(self, queue: str, priority: str) -> None:
        self.queue = queue
        self.priority = priority
        self.presence = Presence.NEW
        self.supply = Supply.LITTLE
        # The pull in flight. It may outlive the claim that started it.
        self.pull: Pull | None = None
        # It kept a claim waiting: until it answers, no claim waits for it.
        self.silent = False
        # Since when it has given nothing, although it answers.
        self.empty_since: float | None = None

    @property
    def rank(self) -> int:
        return int(self.priority)

    @property
    def consumer(self) -> str:
        return consumer_name(self.queue, f"r{self.priority}")

    @property
    def is_gone(self) -> bool:
        return self.presence is Presence.LOST or self.presence is Presence.ABSENT

    def is_stuck(self, now: float) -> bool:
        """Whether it has given nothing for a while, however often it was asked."""
        return self.empty_since is not None and now - self.empty_since >= EMPTY_S

    # --- Transitions

    def begin_claim(self) -> None:
        if self.supply is Supply.CUT:
            self.supply = Supply.PLENTY

    def answered(self, count: int, *, wanted: int, more: bool, now: float) -> None:
        """A pull of up to `wanted` messages brought `count`; there may be more."""
        self.presence, self.silent = Presence.PRESENT, False
        if count:
            self.empty_since = None
        elif self.empty_since is None:
            self.empty_since = now
        if not more:
            self.supply = Supply.LITTLE
        else:
            self.supply = Supply.CUT if count < wanted else Supply.PLENTY

    def gone(self) -> None:
        """Nobody answers for it."""
        if self.presence is Presence.PRESENT:
            self.presence = Presence.LOST
        elif self.presence is Presence.NEW:
            self.presence = Presence.ABSENT
        self.silent, self.supply = False, Supply.LITTLE

    def failed(self) -> None:
        """The pull failed: nothing is known of the consumer."""
        self.supply = Supply.LITTLE

    def kept_waiting(self) -> None:
        self.silent = True

    def reconnected(self) -> None:
        self.silent = False

    def restoring(self) -> None:
        """Somebody has begun to restore it: once is enough."""
        if self.presence is Presence.LOST:
            self.presence = Presence.ABSENT


class Sources:
    """All sources that this handle has used."""

    def __init__(self) -> None:
        self._of_queue: dict[str, list[Source]] = {}

    def __iter__(self) -> Iterator[Source]:
        return (source for sources in self._of_queue.values() for source in sources)

    def of(self, queues: Iterable[str]) -> list[Source]:
        """The sources of these queues, highest priority first."""
        found = [self._of_queue.get(queue) or self._add(queue) for queue in queues]
        return [source for rank in zip(*found, strict=True) for source in rank]

    def _add(self, queue: str) -> list[Source]:
        self._of_queue[queue] = [Source(queue, priority) for priority in steps.PRIORITIES]
        return self._of_queue[queue]


# --- Decisions


def by_supply(sources: Sequence[Source]) -> tuple[list[Source], list[list[Source]]]:
    """The sources that had little the last time; and those that had plenty, by priority.

    The former can all be asked at once: they won't deliver too much. The latter are asked one
    priority after the other, each for no more than is still wanted.
    """
    little = [each for each in sources if each.supply is Supply.LITTLE]
    plenty = [each for each in sources if each.supply is not Supply.LITTLE]
    return little, [list(rank) for _, rank in groupby(plenty, key=lambda source: source.rank)]


def shares_of(
    little: Sequence[Source], plenty: Sequence[Source], most_bytes: int
) -> dict[Source, int]:
    """How many bytes to ask each of these sources for, if they are all asked at once.

    One that had little is not expected to need its share.
    """
    shares = dict.fromkeys(little, most_bytes // (len(little) + len(plenty)) if little else 0)
    return shares | dict.fromkeys(plenty, most_bytes // len(plenty) if plenty else 0)


def cut_above(sources: Iterable[Source], rank: int) -> bool:
    """Whether a source of a higher priority has more, left behind because of its bytes."""
    return any(each.supply is Supply.CUT and each.rank > rank for each in sources)


def unsettled(
    sources: Iterable[Source], *, new: Sequence[str], unsure: Sequence[str], served: set[str]
) -> list[Source]:
    """Sources whose consumer may not know yet what its stream has.

    In queues that are `new` to this handle the consumer may not even exist yet, unless the queue
    has `served` something. Of other queues only the `unsure` ones count.
    """
    return [
        each
        for each in sources
        if each.pull is None
        and (
            each.queue not in served
            if each.queue in new
            else each.queue in unsure and not each.is_gone
        )
    ]
