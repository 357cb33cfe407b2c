"""The hosts that callbacks go to: how many at a time, and which are left alone for a while.

How many calls a host may have depends on how many more there is room for: while a host has few, it
gets more, and the more are under way, the more is left to others. So the first host that hangs can
take half of all slots, the next one half of the rest; and one that answers quickly can have nine
tenths, because it gives them back soon. However many hang, a few slots are left to hosts that have
answered before.

A call that can't go now is told how long to stay away, so that it doesn't wait in a slot of the
worker. Time is an argument, and so is chance.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

# How many hosts are remembered; those with calls under way always are.
HOSTS_LIMIT = 10_000
# How long a call stays away if its host has as many calls as it may have.
SHORTEST_MS, LONGEST_MS = 50, 30_000
# Calls to a busy host that is not quick come back one after the other, with so much between them:
# if thousands came again and again, the worker would have time for nothing else. At most this long.
APART_MS, LONGEST_AWAY_MS = 10, 60_000
# How long a host whose probes fail is left alone at most.
LONGEST_OPEN_MS = 60_000
# A call may wait for so long for a busy host that has just begun or ended another.
LINGER_MS = 25
# A host is quick if it has just answered a call that took no longer than this; "just" is as long.
QUICK_MS = 1_000
# How many calls a host may have for each more that there would be room for.
_QUICK, _SLOW = 9, 1
# This part of the room, a twentieth, is for hosts that have answered before.
_RESERVE = 20
# A host that no call had to stay away from for this long is not busy any more.
_CALM_MS = 1_000


@dataclass(slots=True)
class _Host:
    active: int = 0
    # When a call last began or ended, and when one was last answered quickly.
    moved_ms: int = 0
    quick_ms: int | None = None
    # Since when it has been busy, and when that last kept a call away.
    busy_since_ms: int = 0
    kept_away_ms: int | None = None
    # When the last of those that are away comes back.
    last_back_ms: int = 0
    # When a call last went well.
    went_well_ms: int | None = None
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


@dataclass(eq=False, slots=True)
class Share:
    """One worker's slots, which its hosts share: 0 if it is not known how many it has."""

    slots: int = 0
    active: int = 0
    lingering: int = 0
    # Of how many calls each host has, those with any.
    of: Counter[str] = field(default_factory=Counter)


class Hosts:
    """The state of each host, in one process: a host is a name and a port. How they fare is the
    same for all workers; the slots that they take are one worker's own."""

    def __init__(
        self,
        *,
        total: int,
        per_host: int | None = None,
        break_after: int,
        break_ms: int,
        rand: Callable[[], float] = random.random,
    ) -> None:
        """At most `total` calls are under way, and `per_host` of them to one host."""
        self._total = total
        self.share = Share()
        self._per_host = per_host
        self._break_after = break_after
        self._break_ms = break_ms
        self._rand = rand
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self.active = 0

    def __len__(self) -> int:
        return len(self._hosts)

    def enter(self, place: str, now_ms: int, share: Share | None = None) -> Wait | None:
        """A call wants to go: None if it goes, and then it must `leave`. Without a share, it is one
        of no worker."""
        share = share or self.share
        host = self._known(place)
        if host.open_until_ms is not None:
            if host.probing:
                return self._turn(host, now_ms, broken=True)
            if now_ms < host.open_until_ms:
                return self._after(host.open_until_ms - now_ms)
        elif not self._has_share(place, host, now_ms, share):
            return self._turn(host, now_ms, broken=False)
        if self.active >= self._total:
            return self._turn(host, now_ms, broken=False)
        host.probing = host.open_until_ms is not None
        host.moved_ms = now_ms
        host.active += 1
        self.active += 1
        share.active += 1
        share.of[place] += 1
        return None

    def _has_share(self, place: str, host: _Host, now_ms: int, share: Share) -> bool:
        """Whether one more call leaves enough room for other hosts: in its worker and in all."""
        if self._per_host is not None and host.active >= self._per_host:
            return False
        quick, known = _is_quick(host, now_ms), host.went_well_ms is not None
        room = self._room(share)
        return _fits(share.of[place], room - share.active, room, quick, known) and _fits(
            host.active, self._total - self.active, self._total, quick, known
        )

    def _room(self, share: Share) -> int:
        """How many calls a worker has room for."""
        return min(share.slots or self._total, self._total)

    def may_linger(self, place: str, now_ms: int, share: Share | None = None) -> bool:
        """Whether a call may wait for a moment in its slot, beside others that do: that is cheaper
        than to come again. They may take all slots only while the host is quick."""
        share = share or self.share
        host, free = self._hosts[place], self._room(share) - share.active
        room = free if _is_quick(host, now_ms) else free // 2
        return share.lingering < room and now_ms - host.moved_ms < LINGER_MS

    def leave(
        self,
        place: str,
        now_ms: int,
        share: Share | None = None,
        *,
        began_ms: int,
        trouble: bool | None,
    ) -> None:
        """A call has ended: in trouble, well, or None: without an answer that tells."""
        share = share or self.share
        host = self._hosts[place]
        host.moved_ms = now_ms
        host.active -= 1
        self.active -= 1
        share.active -= 1
        share.of[place] -= 1
        if not share.of[place]:
            del share.of[place]
        if trouble is None:
            host.probing = False
        elif not trouble:
            host.went_well_ms = now_ms
            if now_ms - began_ms <= QUICK_MS:
                host.quick_ms = now_ms
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
        answered = host.went_well_ms is not None and began_ms <= host.went_well_ms
        if answered and not host.probing:
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
        soon at first, and not in vain again and again. The more are away, the later."""
        if host.kept_away_ms is None or now_ms - host.kept_away_ms > _CALM_MS:
            host.busy_since_ms = now_ms
        host.kept_away_ms = now_ms
        within_ms = min(max(now_ms - host.busy_since_ms, SHORTEST_MS), LONGEST_MS)
        away_ms = round(within_ms * self._rand())
        if _is_quick(host, now_ms):
            host.last_back_ms = now_ms
        else:
            away_ms = max(away_ms, self._in_turn(host, now_ms))
        return Wait(SHORTEST_MS + away_ms, broken)

    def _in_turn(self, host: _Host, now_ms: int) -> int:
        """How long until those that are away have come back, one after the other."""
        in_ms = max(host.last_back_ms - now_ms, 0)
        if in_ms > LONGEST_AWAY_MS:
            return round(LONGEST_AWAY_MS * (1 - self._rand() / 2))
        host.last_back_ms = now_ms + in_ms + APART_MS
        return in_ms

    def _after(self, ms: int) -> Wait:
        """Calls to a host that is left alone come back when it is not, but not all at once."""
        return Wait(round(max(ms, SHORTEST_MS) * (1 + 0.2 * self._rand())), broken=True)


def _fits(active: int, free: int, room: int, quick: bool, known: bool) -> bool:
    """Whether a host with so many calls may have one more, where so many of the room are free."""
    answers = quick or (not active and known)
    if not answers and free <= room // _RESERVE:
        return False
    return not active or active < (free - 1) * (_QUICK if quick else _SLOW)


def _is_quick(host: _Host, now_ms: int) -> bool:
    return host.quick_ms is not None and now_ms - host.quick_ms <= QUICK_MS
