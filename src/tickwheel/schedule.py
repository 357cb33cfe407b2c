"""A schedule as a store keeps it: a name, a rule that only the scheduler reads, the next tick."""

from __future__ import annotations

import msgspec


class Schedule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A rule that adds jobs again and again."""

    name: str
    # The rule as JSON text. Opaque to stores.
    rule: str
    # The next tick; None once the schedule has no more.
    next_ms: int | None
    paused: bool = False
    # Moved by the store with every change; `fire` compares it.
    fence: int = 0
