"""One call of a batch task: call it with the items of all jobs, and settle each job by itself.

Like an attempt at one job, it never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tickwheel.arguments import NotKept
from tickwheel.engine import journal
from tickwheel.engine.attempt import Runner
from tickwheel.engine.hand import Batch, Held
from tickwheel.errors import Partial, UsageError
from tickwheel.job import Settlement
from tickwheel.registry import Definition
from tickwheel.retry import Seen, look

UNREADABLE = "what the task returned or raised can't be read: looking at it raised an error"
# How the run of each job of a batch ended.
Settlements = list[tuple[Held, Settlement]]


async def attempt(
    runner: Runner, batch: Batch, definition: Definition, began: Callable[[], None]
) -> Settlements:
    """Run the task once for all jobs of the batch. Calls `began` when the task's own time
    starts."""
    items, settlements = _decoded(runner, batch, definition)
    results: Sequence[Any]
    errors: Mapping[int, BaseException]
    try:
        try:
            # The one place where a batch task is called.
            value = await runner.call_batch(batch, definition, items, began) if items else None
            results, errors = _results(value, len(items)), {}
        except Partial as partial:
            results, errors = _parts(partial, len(items))
    except BaseException as error:
        for member in batch.called:
            member.outside = batch.outside
        return settlements + _all_raised(runner, batch.called, definition, error)
    now_ms = runner.now_ms()
    for index, member in enumerate(batch.called):
        if index in errors:
            settlement = runner.raised(member, definition, errors[index])
        else:
            settlement = runner.returned(member, definition, results[index], now_ms)
        settlements.append((member, settlement))
    return settlements


def _decoded(runner: Runner, batch: Batch, definition: Definition) -> tuple[list[Any], Settlements]:
    """The items of the batch. A job whose arguments don't fit fails by itself."""
    items: list[Any] = []
    failed: Settlements = []
    for member in batch.members:
        try:
            items.append(definition.arguments.decode_only(member.job.payload))
        except BaseException as error:
            failed.append((member, runner.raised(member, definition, error)))
    if failed:
        without = {member for member, _ in failed}
        batch.called = [member for member in batch.members if member not in without]
    return items, failed


def _all_raised(
    runner: Runner, members: Sequence[Held], definition: Definition, error: BaseException
) -> Settlements:
    """The call failed as a whole: each job is settled by its own retries. The error is looked at
    and logged once, however many they are."""
    settlements: Settlements = []
    seen: Seen | None = None
    for member in members:
        if settlements and isinstance(error, KeyboardInterrupt):
            # The first of them has passed it on, which must happen once.
            settlement = runner.ended_with_worker(member, definition)
        else:
            settlement = runner.raised(member, definition, error, seen)
        settlements.append((member, settlement))
        if seen is None and len(members) > 1:
            seen = look(error)
    journal.failed_together([settlement for _, settlement in settlements])
    return settlements


def raised(
    runner: Runner, held: Held, definition: Definition, error: BaseException
) -> Settlement | Settlements:
    """Settle a run that ended with an exception: that of one job, or of a batch."""
    if not held.members:
        return runner.raised(held, definition, error)
    return _all_raised(runner, held.members, definition, error)


def unreadable(runner: Runner, held: Held, definition: Definition) -> Settlement | Settlements:
    """Settle a run whose result or error is of a class that raises when it is looked at."""
    return raised(runner, held, definition, RuntimeError(UNREADABLE))


def stopped(runner: Runner, held: Held, definition: Definition) -> Settlement | Settlements:
    """Settle a run that was stopped, and whose end nobody waits for: that of one job, or of a
    batch."""
    if not held.members:
        return runner.stopped(held, definition)
    return [(member, runner.stopped(member, definition)) for member in held.members]


def _results(value: Any, count: int) -> Sequence[Any]:
    """The result of each job."""
    if value is None or type(value) is NotKept:
        return [value] * count
    if not isinstance(value, (list, tuple)):
        raise UsageError(
            f"the batch returned {type(value).__name__}: it must return a list with a result for "
            "each job, or None"
        )
    if len(value) != count:
        raise UsageError(
            f"the batch returned {len(value):,} results for {count:,} jobs: it must return one "
            "for each, in their order, or None"
        )
    return value


def _parts(partial: Partial, count: int) -> tuple[Sequence[Any], Mapping[int, BaseException]]:
    """The results of the jobs that are done, and the errors of the others, by index."""
    if (last := max(partial.errors, default=0)) >= count:
        raise UsageError(
            f"Partial names the index {last:,} in a batch of {count:,} jobs, which has 0 to "
            f"{count - 1:,}"
        ) from partial
    return _results(partial.results, count), partial.errors
