"""Changes that others ask for: jobs are read, decided on and written, unless they changed since.

See changing.lua. The keys that a change touches depend on where a job is and where it goes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from tickwheel.batch import BATCH
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Job, State
from tickwheel.stores.redis import keys, records
from tickwheel.stores.redis.reading import QUEUES
from tickwheel.stores.redis.wire import Wire

T = TypeVar("T")

# How often a change is tried that others keep getting in the way of, and the pauses between.
TRIES, PAUSE_S = 30, 0.002


class _Change(NamedTuple):
    """What becomes of a job, and what it was when it was read."""

    id: str
    mark: bytes
    queues: frozenset[str]
    after: tuple[Any, ...]


async def change(
    wire: Wire,
    step: str,
    ids: Sequence[str],
    decide: Callable[[Job | None, str], tuple[T, Job | None]],
    *,
    now_ms: int,
) -> dict[str, T]:
    """Let `decide` say what becomes of each job and what to answer. If it has changed meanwhile, it
    is asked again. An unknown job may become a new one. The step `change` also works if the server
    is full, `ask` doesn't."""
    answers: dict[str, T] = {}
    rest = list(dict.fromkeys(ids))
    for tries in range(TRIES):
        again: list[str] = []
        while rest:
            found, lines, marks = await wire.step("seen", rest[:BATCH])
            some, rest = rest[: len(found)], rest[len(found) :]
            changes: list[_Change] = []
            for id, record, since, mark in zip(some, found, lines, marks, strict=True):
                before = None if record is None else records.read(record, since)
                answers[id], after = decide(before, id)
                if after is not None and after is not before:
                    changes.append(_changed(before, record, mark, after))
            again += await _write(wire, step, changes, now_ms)
        if not again:
            return answers
        rest = again
        await asyncio.sleep(random.uniform(0, PAUSE_S * min(tries + 1, 10)))
    raise StoreUnavailable(f"{len(rest)} jobs kept changing while they were being changed")


async def _write(wire: Wire, step: str, changes: Sequence[_Change], now_ms: int) -> list[str]:
    """Returns the ids of those that have changed since they were read."""
    refused: list[str] = []
    for some in _by_queues(changes):
        touched = {queue for each in some for queue in each.queues}
        flags = await wire.step(
            *(step, now_ms, [each.id for each in some]),
            *([each.mark.decode() for each in some], [each.after for each in some]),
            keys=[*keys.of_queues(touched), *keys.META, *keys.TOLD],
        )
        refused += [each.id for each, flag in zip(some, flags.decode(), strict=True) if flag == "0"]
    return refused


def _by_queues(changes: Sequence[_Change]) -> list[list[_Change]]:
    """Portions, each with jobs of few queues."""
    parts: list[list[_Change]] = []
    queues: set[str] = set()
    for each in changes:
        if not parts or len(queues | each.queues) > QUEUES:
            parts.append([])
            queues = set()
        parts[-1].append(each)
        queues |= each.queues
    return parts


def _changed(before: Job | None, record: bytes | None, mark: bytes, after: Job) -> _Change:
    queues = frozenset({after.queue} if before is None else {before.queue, after.queue})
    written: tuple[Any, ...]
    if after.state is State.RUNNING:
        assert record is not None
        # Only what was asked for is new. From now on its holder's copy is out of date.
        flag = "3" if after.cancel_requested else "2"
        told = records.rewritten(record, after.changes)
        written = ("r", records.place(after), 0, told, False, flag, after.told)
        return _Change(after.id, mark, queues, written)
    state = "p" if after.parked else records.LETTERS[after.state]
    score = after.due_ms if after.ended_ms is None else after.ended_ms
    meta: str | bool = records.meta_lines(after.meta) if after.meta else False
    written = (state, records.place(after), score, records.record(after), meta, False, False)
    return _Change(after.id, mark, queues, written)
