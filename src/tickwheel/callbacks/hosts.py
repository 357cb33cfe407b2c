"""The hosts that callbacks go to: how many at a time, and which are left alone for a while.

A call that can't go now is told how long to stay away, so that it doesn't wait in a slot of the
worker. Time is an argument, and so is chance.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# How many hosts are remembered; those with calls under way always are.
HOSTS_LIMIT = 10_000
# How long a call stays away if its host has as many calls as it may have.
SHORTEST_MS, LONGEST_MS = 50, 30_000
# How long a host whose probes fail is left alone at most.
LONGEST_OPEN_MS = 60_000
# A call may wait for a busy host that has just ended another: so many calls at a time, for so long.
LINGERING, LINGER_MS = 20, 25
# A host that no call had to stay away from for this long is not busy any more.
_CALM_MS = 1_000


@dataclass(slots=True)
class _Host:
    active: int = 0
    # When the last call ended.
    left_ms: int = 0
    # Since when it has been busy, and when that last kept a call away.
    busy_since_ms: int = 0
    kept_away_ms: int | None = None
    # When a call last went well.
    went_well_ms: int = -1
    # How many calls failed in a row, and until when it is left alone since: None if it is not.
    failures: int = 0
    open_until_ms: int | None = None
    open_ms: int = 0
    probing: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A call can't go now."""

    ms: int
    # Because its host fails, not because it is busy.
    broken: bool


class Hosts:
    """The state of each host, in one process."""

    def __init__(
        self,
        *,
        total: int,
        per_host: int,
        break_after: int,
        break_ms: int,
        rand: Callable[[], float] = random.random,
    ) -> None:
        self._total = total
        self._per_host = per_host
        self._break_after = break_after
        self._break_ms = break_ms
        self._rand = rand
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self.active = 0

    def __len__(self) -> int:
        return len(self._hosts)

    def enter(self, place: str, now_ms: int) -> Wait | None:
        """A call wants to go: None if it goes, and then it must `leave`."""
        host = self._known(place)
        if host.open_until_ms is not None:
            if host.probing:
                return self._turn(host, now_ms, broken=True)
            if now_ms < host.open_until_ms:
                return self._after(host.open_until_ms - now_ms)
        elif host.active >= self._per_host:
            return self._turn(host, now_ms, broken=False)
        if self.active >= self._total:
            return self._turn(host, now_ms, broken=False)
        host.probing = host.open_until_ms is not None
        host.active += 1
        if host.active == self._per_host:
            host.left_ms = max(host.left_ms, now_ms)
        self.active += 1
        return None

    def may_linger(self, place: str, lingering: int, now_ms: int) -> bool:
        """Whether a call may wait for a moment in its slot, beside others that do: it is cheaper
        than to come again, if the host is quick."""
        return lingering < LINGERING and now_ms - self._hosts[place].left_ms < LINGER_MS

    def leave(self, place: str, now_ms: int, *, began_ms: int, trouble: bool | None) -> None:
        """A call has ended: in trouble, well, or None: without an answer that tells."""
        host = self._hosts[place]
        host.left_ms = now_ms
        host.active -= 1
        self.active -= 1
        if trouble is None:
            host.probing = False
        elif not trouble:
            host.went_well_ms = now_ms
            host.failures, host.open_until_ms, host.open_ms, host.probing = 0, None, 0, False
        else:
            self._failed(host, began_ms, now_ms)

    def is_open(self, place: str) -> bool:
        """Whether the host is left alone."""
        host = self._hosts.get(place)
        return host is not None and host.open_until_ms is not None

    def _failed(self, host: _Host, began_ms: int, now_ms: int) -> None:
        # The host has answered since the call began: calls that get no answer end together, though
        # others between them went well.
        if began_ms <= host.went_well_ms and not host.probing:
            return
        host.failures += 1
        # Calls that began before it was left alone say nothing new.
        if host.open_until_ms is not None and not host.probing:
            return
        if host.failures >= self._break_after:
            host.probing = False
            host.open_ms = min(host.open_ms * 2 or self._break_ms, LONGEST_OPEN_MS)
            host.open_until_ms = now_ms + host.open_ms

    def _known(self, place: str) -> _Host:
        host = self._hosts.get(place)
        if host is None:
            host = self._hosts[place] = _Host()
            if len(self._hosts) > HOSTS_LIMIT:
                self._forget_one()
        self._hosts.move_to_end(place)
        return host

    def _forget_one(self) -> None:
        idle = (place for place, host in self._hosts.items() if not host.active)
        self._hosts.pop(next(idle), None)

    def _turn(self, host: _Host, now_ms: int, *, broken: bool) -> Wait:
        """Calls to a busy host come back at random times, within as long again as it has been busy:
        soon at first, and not in vain again and again."""
        if host.kept_away_ms is None or now_ms - host.kept_away_ms > _CALM_MS:
            host.busy_since_ms = now_ms
        host.kept_away_ms = now_ms
        within_ms = min(max(now_ms - host.busy_since_ms, SHORTEST_MS), LONGEST_MS)
        return Wait(SHORTEST_MS + round(within_ms * self._rand()), broken)

    def _after(self, ms: int) -> Wait:
        """Calls to a host that is left alone come back when it is not, but not all at once."""
        return Wait(round(max(ms, SHORTEST_MS) * (1 + 0.2 * self._rand())), broken=True)
