"""What goes wrong: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from judge.load import PRODUCERS

WORKERS = 3
LEASE_S = 4.0
# At the beginning and at the end.
CALM_S = 3.0
# A process that was killed is back after that.
RESTART_S = 2.0

# What there is, and for how long at a time, in leases: with a process, with its line to the store,
# with its disk, and with the server, which is with all.
PROCESS = {"kill": (0, 0), "stop": (0, 0), "freeze": (0.2, 0.5), "long freeze": (1.3, 2.0)}
LINE = {"cut": (0, 0), "stall": (0.2, 0.5), "long stall": (1.3, 2.0), "lost replies": (0.1, 0.5)}
DISK = {"full disk": (1.2, 1.5)}
SERVER = {
    "killed": (0.1, 0.6),
    "restarted": (0, 0.2),
    "frozen": (0.3, 1.3),
    "full": (1.2, 1.5),
    "resharded": (0.05, 0.3),
}
_LASTS = PROCESS | LINE | DISK


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    kind: str
    # How long it lasts.
    seconds: float
    # Workers first, then producers; None where it is the server's.
    slot: int | None = None


def faults(
    seed: int, seconds: float, *, process: tuple[str, ...], server: tuple[str, ...]
) -> list[Fault]:
    """What goes wrong in the course of so many seconds, by time, of what can: with one process, and
    with the server."""
    dice = random.Random(f"faults {seed}")
    found = [*_of_processes(dice, seconds, process), *_of_the_server(dice, seconds, server)]
    return sorted(found, key=lambda fault: fault.at_s)


def _of_processes(dice: random.Random, seconds: float, kinds: tuple[str, ...]) -> Iterator[Fault]:
    free_s = [0.0] * (WORKERS + PRODUCERS)
    deck: list[str] = []
    at_s = CALM_S
    while at_s < seconds - CALM_S:
        # Each kind in turn, in random order: a short run sees all of them.
        deck = deck or dice.sample(kinds, len(kinds))
        kind = deck.pop()
        lasts_s = dice.uniform(*_LASTS[kind]) * LEASE_S
        # Two of three are a worker's.
        slots = [slot for slot in range(len(free_s)) if free_s[slot] <= at_s]
        workers = [slot for slot in slots if slot < WORKERS]
        if slots := workers if workers and dice.random() < 0.7 else slots:
            slot = dice.choice(slots)
            free_s[slot] = at_s + lasts_s + RESTART_S
            yield Fault(at_s=at_s, kind=kind, seconds=lasts_s, slot=slot)
        at_s += dice.uniform(0.6, 2.4)


def _of_the_server(dice: random.Random, seconds: float, kinds: tuple[str, ...]) -> Iterator[Fault]:
    """Spread over the time, so that there is calm between them: what happens to all explains
    second runs of all."""
    count = max(len(kinds), round(seconds / 15)) if kinds else 0
    deck: list[str] = []
    for n in range(count):
        deck = deck or dice.sample(kinds, len(kinds))
        kind = deck.pop()
        room_s = (seconds - 2 * CALM_S) / count
        at_s = CALM_S + (n + dice.uniform(0, 0.3)) * room_s
        yield Fault(at_s=at_s, kind=f"server {kind}", seconds=dice.uniform(*SERVER[kind]) * LEASE_S)
