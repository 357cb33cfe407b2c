"""The objective for punctuality, as people write it: "99% within 100ms". Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from tickwheel.duration import duration_ms, duration_text
from tickwheel.errors import BadConfig, BadTime, shown

_TEXT = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s+within\s+(\S.{0,60}?)\s*", re.ASCII)

# A burn of 1 uses up the allowed share of late runs exactly. One of 14.4 for an hour uses up what
# is allowed for two days.
FAST_BURN = 14.4
# Fewer runs than this in an hour say nothing about a share.
FEWEST_RUNS = 10


@dataclass(frozen=True, slots=True)
class Objective:
    """This share of all runs starts within so many milliseconds after they are due."""

    ratio: float
    within_ms: int

    def __str__(self) -> str:
        return f"{self.ratio * 100:.6f}".rstrip("0").rstrip(".") + (
            f"% within {duration_text(self.within_ms)}"
        )


def parse_objective(text: object) -> Objective:
    """Read an objective; raises BadConfig."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise BadConfig(f"objective={shown(text)}: write it as in '99% within 100ms'")
    percent = Decimal(found[1])
    if not 0 < percent < 100:
        raise BadConfig(
            f"objective={shown(text)}: the share must be more than 0% and less than 100%; no "
            "objective of 100% can be kept"
        )
    try:
        within_ms = duration_ms(found[2])
    except BadTime as error:
        raise BadConfig(f"objective={shown(text)}: {error}") from None
    if within_ms == 0:
        raise BadConfig(f"objective={shown(text)}: no run starts within 0ms; allow at least 1ms")
    return Objective(float(percent / 100), within_ms)


@dataclass(frozen=True, slots=True)
class Tally:
    """How many runs there were, and how many of them started within the objective."""

    total: int = 0
    good: int = 0

    def __sub__(self, before: Tally) -> Tally:
        return Tally(self.total - before.total, self.good - before.good)

    @property
    def late_share(self) -> float:
        return (self.total - self.good) / self.total if self.total else 0.0


def misses(objective: Objective, short: Tally, long: Tally) -> bool:
    """Whether so many runs were late that somebody should know: in a short window, so that it is
    still going on, and in a long one, so that it is no accident."""
    budget = 1 - objective.ratio
    # Where the budget is large no burn can be 14.4: then halfway between it and all of them.
    limit = min(FAST_BURN * budget, (1 + budget) / 2)
    return long.total >= FEWEST_RUNS and min(short.late_share, long.late_share) >= limit
