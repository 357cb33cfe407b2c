"""Jobs of a Redis store by their time, whatever their queue: a page, and how many there are."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator
from itertools import islice

import msgspec

from tickwheel.batch import BATCH
from tickwheel.job import Job, State
from tickwheel.store import CURSOR_LIMIT, Page, Query, SlotCounts, Slots, not_a_cursor
from tickwheel.stores.redis import keys, records
from tickwheel.stores.redis.reading import names_of_queues
from tickwheel.stores.redis.wire import Wire

# How many jobs one page reads if it is also filtered by task.
SCAN = 1000
# How many slots of sets one step counts, which takes a few milliseconds.
COUNTED = 10_000
# The letter of parked jobs. Their sets are sorted by task, so they are not in the order of time.
PARKED = "p"
_UNTIMED = ("r", PARKED)
_ENDED = "dxc"
_NEVER, _FOREVER = -(2**53), 2**53

# Score and member.
_Entry = tuple[int, str]
_parts = msgspec.json.Decoder(tuple[str, int, str])


async def find(wire: Wire, query: Query, cursor: str | None, limit: int) -> Page:
    """One kind of job after the other, each in the order of time over all queues; but for running
    jobs, which are few, and sorted by their lease, and for parked ones."""
    letters = _letters(query.state)
    after: _Entry | None = None
    if cursor is not None:
        letter, after = _parsed(cursor, letters)
        letters = letters[letters.index(letter) :]
    jobs: list[Job] = []
    looked = 0
    for letter in letters:
        scanning = query.task is not None or letter in _UNTIMED
        room = (SCAN if scanning else limit) - looked
        entries = await _first(wire, query, letter, room, after)
        found = await _read(wire, [_id(letter, member) for _, member in entries])
        looked += len(found)
        for entry, job in zip(entries, found, strict=False):
            after = entry
            if job is not None and _matches(job, query):
                jobs.append(job)
                if len(jobs) == limit:
                    break
        if entries and (len(jobs) == limit or len(found) < len(entries) or len(entries) == room):
            assert after is not None
            place = msgspec.json.encode((letter, *after)).decode()
            return Page(jobs=jobs, cursor=place, looked=looked)
        after = None
    return Page(jobs=jobs, looked=looked)


def _letters(state: State | None) -> list[str]:
    letters = [records.LETTERS[each] for each in ([state] if state else State)]
    return ["w", PARKED, *letters[1:]] if letters[0] == "w" else letters


def _parsed(cursor: str, letters: list[str]) -> tuple[str, _Entry]:
    try:
        letter, score, member = _parts.decode(cursor if len(cursor) <= CURSOR_LIMIT else "")
    except (msgspec.DecodeError, ValueError):
        raise not_a_cursor(cursor) from None
    if letter not in letters or not _NEVER <= score <= _FOREVER:
        raise not_a_cursor(cursor)
    return letter, (score, member)


async def _first(
    wire: Wire, query: Query, letter: str, limit: int, after: _Entry | None
) -> list[_Entry]:
    """The first entries in the time range, of all queues."""
    backwards = letter in _ENDED
    from_ms = _NEVER if query.from_ms is None or letter in _UNTIMED else query.from_ms
    until_ms = _FOREVER if query.until_ms is None or letter in _UNTIMED else query.until_ms
    parts: list[list[_Entry]] = []
    async for names in _names(wire, query.queue):
        sets = [each for name in names for each in _of(letter, name)]
        found = await wire.step(
            *("timed", sets, backwards, from_ms, until_ms, limit, after or False), keys=sets
        )
        parts.append([(int(score), member.decode()) for score, member in found])
    if len(parts) == 1:
        return parts[0]
    merged = heapq.merge(*parts, key=_by_bytes, reverse=backwards)
    return list(islice(merged, limit))


def _by_bytes(entry: _Entry) -> tuple[int, bytes]:
    return entry[0], entry[1].encode()


def _of(letter: str, queue: str) -> list[str]:
    if letter == PARKED:
        return keys.of_parked([queue])
    return [each for each in keys.of_state(letter, queue) if not each.startswith("w:p:")]


def _id(letter: str, member: str) -> str:
    return records.parked_id(member) if letter == PARKED else member


async def _read(wire: Wire, ids: list[str]) -> list[Job | None]:
    """The first of them, as many as fit in one step."""
    return records.read_all(*await wire.step("get", ids[:BATCH])) if ids else []


def _matches(job: Job, query: Query) -> bool:
    return (
        query.state in (None, job.state) and query.task in (None, job.task) and query.in_time(job)
    )


async def slot_counts(wire: Wire, slots: Slots) -> SlotCounts:
    where = slots.start_ms, slots.width_ms, slots.count
    sums = [0] * (slots.count + 2)

    async def add(step: str, names: list[str], sets: list[str]) -> None:
        nonlocal sums
        counts: list[int] = await wire.step(step, names, *where, keys=sets)
        sums = [each + count for each, count in zip(sums, counts, strict=True)]

    most = max(1, COUNTED // slots.count)
    async for names in _names(wire, slots.queue):
        sets = [each for name in names for each in _of(records.LETTERS[slots.state], name)]
        for start in range(0, len(sets), most):
            some = sets[start : start + most]
            await add("slots", some, some)
        if slots.state is State.WAITING:
            await add("parked_slots", names, keys.of_parked(names))
    before, *counts, after = sums
    return SlotCounts(before=before, counts=counts, after=after)


async def _names(wire: Wire, queue: str | None) -> AsyncIterator[list[str]]:
    if queue is not None:
        yield [queue]
        return
    async for names in names_of_queues(wire):
        yield names
