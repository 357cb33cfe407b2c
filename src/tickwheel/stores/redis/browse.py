"""What only reads a Redis store: jobs by id and page by page, queues, schedules, workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from tickwheel.job import Job, State
from tickwheel.schedule import Schedule
from tickwheel.store import PARKED_LIMIT, Ask, Page, Query, QueueInfo, WorkerInfo, not_a_cursor
from tickwheel.stores.redis import keys, records, times
from tickwheel.stores.redis.reading import get, names_of_queues
from tickwheel.stores.redis.wire import Wire

# How many jobs one page reads if it is filtered by task, for which there is no set, or by meta.
SCAN = 1000

_worker = msgspec.json.Decoder(WorkerInfo).decode


# --- Jobs


async def find(wire: Wire, query: Query, cursor: str | None, limit: int) -> Page:
    if query.meta is not None:
        return await _find_tagged(wire, query, cursor, limit)
    if query.timed:
        return await times.find(wire, query, cursor, limit)
    states = [query.state] if query.state else list(State)
    letters = [records.LETTERS[state] for state in states]
    after = None if cursor is None else _after(cursor, letters, query.queue)
    task = False if query.task is None else records.task_part(query.task)
    jobs: list[Job] = []
    last: Sequence[bytes] = [part.encode() for part in after or ()]
    behind: list[str] | bool = after[1:] if after else False
    looked = size = 0
    async for sets in _sets(wire, letters, query.queue, after[0] if after else None):
        found, lines, seen, whole, looked, size = await wire.step(
            *("find", sets, task, limit - len(jobs), SCAN, looked, size, behind), keys=sets
        )
        # A record may also have the task of a job that follows.
        jobs += [
            job for job in records.read_all(found, lines) if job and query.task in (None, job.task)
        ]
        last, behind = seen or last, False
        if not whole:
            return Page(jobs=jobs, cursor=records.cursor_of(last), looked=looked)
    return Page(jobs=jobs, looked=looked)


async def _find_tagged(wire: Wire, query: Query, cursor: str | None, limit: int) -> Page:
    """Jobs with some meta, by id, from the set that has these."""
    try:
        after = False if cursor is None else records.parse_after(cursor)
    except ValueError:
        raise not_a_cursor(cursor or "") from None
    assert query.meta is not None
    found, lines, last, whole = await wire.step(
        *("tagged", records.meta_lines(dict([query.meta]))),
        False if query.state is None else records.LETTERS[query.state],
        False if query.queue is None else query.queue,
        False if query.task is None else records.task_part(query.task),
        *(limit, SCAN, after),
        keys=keys.META,
    )
    # An older release may have deleted a job without its tags, and its id may be used again.
    tagged = [job for job in records.read_all(found, lines) if job and query.has_meta(job)]
    jobs = [job for job in tagged if query.in_time(job) and query.task in (None, job.task)]
    return Page(jobs=jobs, cursor=None if whole else records.cursor_after(last), looked=len(tagged))


def _after(cursor: str, letters: list[str], queue: str | None) -> list[str]:
    """Set, score and id of the last job that was read."""
    try:
        after = records.parse_cursor(cursor)
    except ValueError:
        raise not_a_cursor(cursor) from None
    letter, name = keys.state_and_queue(after[0])
    known = letter in letters and after[0] in keys.of_state(letter, name)
    if not known or queue not in (None, name):
        raise not_a_cursor(cursor)
    return after


async def _sets(
    wire: Wire, letters: list[str], queue: str | None, first: str | None
) -> AsyncIterator[list[str]]:
    """The sets to page through, starting with `first`, in portions for one step."""
    name: str | None = None
    if first is not None:
        letter, name = keys.state_and_queue(first)
        sets = keys.of_state(letter, name)
        letters = letters[letters.index(letter) :]
        yield sets[sets.index(first) :]
    for letter in letters:
        if queue is not None and name is None:
            yield keys.of_state(letter, queue)
        elif queue is None:
            async for names in names_of_queues(wire, name):
                yield [each for some in names for each in keys.of_state(letter, some)]
        name = None


async def parked(wire: Wire) -> list[Job]:
    ids: list[str] = []
    async for names in names_of_queues(wire):
        found = await wire.step(
            "parked", names, PARKED_LIMIT - len(ids), keys=keys.of_parked(names)
        )
        ids += [id.decode() for id in found]
        if len(ids) == PARKED_LIMIT:
            break
    # Some may have been claimed since.
    return [job for job in await get(wire, ids) if job is not None and job.parked]


# --- Queues


async def queues(wire: Wire) -> list[QueueInfo]:
    infos: list[QueueInfo] = []
    async for names in names_of_queues(wire):
        for name, paused, waiting, running, done, dead, cancelled in await wire.step(
            "count", names, keys=keys.of_queues(names)
        ):
            info = QueueInfo(
                name=name.decode(),
                paused=bool(paused),
                waiting=waiting,
                running=running,
                done=done,
                dead=dead,
                cancelled=cancelled,
            )
            infos.append(info)
    return sorted(infos, key=lambda info: info.name)


# --- Schedules, workers and cancel requests


async def schedules(wire: Wire) -> list[Schedule]:
    found = await wire.send("HVALS", wire.key("schedule"))
    return sorted(map(records.read_schedule, found), key=lambda schedule: schedule.name)


async def records_of(wire: Wire, kind: str, after: str, limit: int) -> list[tuple[str, str]]:
    names, texts = await wire.step("records", kind, after, limit, keys=keys.of_records(kind))
    return [(name.decode(), text.decode()) for name, text in zip(names, texts, strict=True)]


async def get_records(wire: Wire, kind: str, names: Sequence[str]) -> list[str | None]:
    found = await wire.send("HMGET", wire.key(keys.of_records(kind)[0]), *names)
    return [None if text is None else text.decode() for text in found]


async def workers(wire: Wire, now_ms: int) -> list[WorkerInfo]:
    found = map(_worker, await wire.send("HVALS", wire.key("worker")))
    alive = (each for each in found if each.seen_ms + each.gone_after_ms > now_ms)
    return sorted(alive, key=lambda worker: worker.name)


async def asked(wire: Wire, worker: str) -> dict[str, Ask]:
    name = records.as_line(worker)
    asks: dict[str, Ask] = {}
    for key, ask in (("told", Ask.PUT_BACK), ("asked", Ask.STOP)):
        # All that begins with the name and a line break: "\x0b" is the character after that.
        found = await wire.send("ZRANGEBYLEX", wire.key(key), f"[{name}\n", f"({name}\x0b")
        asks |= {each.decode().partition("\n")[2]: ask for each in found}
    return asks
