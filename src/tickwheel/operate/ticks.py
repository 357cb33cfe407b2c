"""Whether each tick of a schedule has its job. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tickwheel.duration import moment_text
from tickwheel.operate.flaws import Flaw, FlawKind, Span
from tickwheel.schedule import (
    MOVING_MS,
    Misfire,
    Overlap,
    Rule,
    Schedule,
    last_ticks,
    next_tick,
    tick_id,
    tick_of,
)

# How many ticks of one schedule are checked: the latest.
TICKS_MOST = 50_000
# How many flaws are returned in full: the latest.
FLAWS_MOST = 20


@dataclass(slots=True)
class TicksChecked:
    """What was found about the ticks of one schedule."""

    checked: int = 0
    # Left out because the one before still ran, as its rule says.
    left_out: int = 0
    flaws: list[Flaw] = field(default_factory=list)
    missed: int = 0
    unknown: list[str] = field(default_factory=list)


def check_ticks(
    schedule: Schedule, rule: Rule, seen: Mapping[int, float], span: Span, *, kept_ms: int
) -> TicksChecked:
    """Check that each tick has a job. `seen` has the ticks that have one, with when that ended:
    never, if it has not. Jobs that ended before `kept_ms` may be gone.

    Nobody notes when a schedule was made, changed or paused, so only ticks after the first that is
    on record count.
    """
    found = TicksChecked()
    from_ms = max(span.since_ms, kept_ms)
    until_ms = min(span.until_ms, span.now_ms - span.late_after_ms) - 1
    ticks = last_ticks(rule, from_ms, until_ms, TICKS_MOST + 1)
    cut = len(ticks) > TICKS_MOST
    ticks = ticks[-TICKS_MOST:]
    from_ms, until_ms = _on_record(schedule, rule, ticks, seen, until_ms, found)
    if cut and from_ms <= ticks[0]:
        found.unknown.append(
            f"Schedule {schedule.name} has too many ticks; the last {TICKS_MOST:,} were checked."
        )
    busy_ms = 0.0
    for tick_ms in ticks:
        if not from_ms <= tick_ms <= until_ms:
            continue
        found.checked += 1
        if tick_ms in seen:
            busy_ms = max(busy_ms, seen[tick_ms])
        elif rule.overlap is Overlap.SKIP and busy_ms > tick_ms:
            found.left_out += 1
        else:
            found.missed += 1
            found.flaws.append(_unfired(schedule, rule, tick_ms, span))
            found.flaws = found.flaws[-FLAWS_MOST:]
    return found


def _on_record(
    schedule: Schedule,
    rule: Rule,
    ticks: Sequence[int],
    seen: Mapping[int, float],
    until_ms: int,
    found: TicksChecked,
) -> tuple[int, int]:
    """From when until when the schedule certainly ticked by its rule."""
    on_rule = set(ticks)
    others = [ms for ms in seen if ms not in on_rule and next_tick(rule, ms - 1) != ms]
    from_ms = max(others, default=-1) + 1
    if others and ticks and from_ms > ticks[0]:
        found.unknown.append(
            f"Schedule {schedule.name} ticked by another rule until {moment_text(max(others))}."
        )
    known = [*(ms for ms in seen if ms >= from_ms), *_fired(schedule)]
    if schedule.paused or schedule.next_ms == MOVING_MS:
        found.unknown.append(f"Schedule {schedule.name} is paused; since when is not recorded.")
        until_ms = min(until_ms, max(known, default=0))
    elif schedule.next_ms is not None:
        known.append(schedule.next_ms)
    return max(from_ms, min(known, default=until_ms + 1)), until_ms


def _fired(schedule: Schedule) -> list[int]:
    """The tick that was fired last."""
    tick_ms = tick_of(schedule.last_id) if schedule.last_id else None
    return [] if tick_ms is None else [tick_ms]


_MISFIRES = {
    Misfire.SKIP: "its rule skips ticks that are not fired within a minute",
    Misfire.ONE: "of ticks that are missed in a row its rule runs only the latest",
    Misfire.ALL: "its rule runs missed ticks later, but not more than its limit",
}


def _unfired(schedule: Schedule, rule: Rule, tick_ms: int, span: Span) -> Flaw:
    if schedule.next_ms is not None and tick_ms >= schedule.next_ms:
        why = f"No worker has fired its schedule since the tick before: {_MISFIRES[rule.misfire]}."
    else:
        why = (
            f"No worker fired it in time ({_MISFIRES[rule.misfire]}); or its schedule was paused "
            "or had another rule then, or its job was deleted."
        )
    return Flaw(
        kind=FlawKind.MISSED,
        id=tick_id(schedule.name, tick_ms),
        due_ms=tick_ms,
        by_ms=span.now_ms - tick_ms,
        words=f"has no job: the tick of {moment_text(tick_ms)} was not fired",
        why=why,
        schedule=schedule.name,
    )
