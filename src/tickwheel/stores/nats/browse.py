"""Browsing a stream: pages of jobs, counts, workers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import Job, State
from tickwheel.store import (
    CURSOR_LIMIT,
    Query,
    QueueInfo,
    WorkerInfo,
    job_bytes,
    not_a_cursor,
)
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.consumers import RUNNING
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.parked import Parked
from tickwheel.stores.nats.steps import Layout, Line, Standing
from tickwheel.stores.nats.stream import Stream

# How many windows one page of ended jobs reads, from the end backwards, each twice as wide.
WINDOWS = 14
NARROWEST, WIDEST = 64, 1_000
# How many jobs one page reads to find those of one task or with some meta, which are not part of
# the subject.
SCAN = 1_000
# A shard, those that didn't answer, and the place in the shard, if it is not its start.
_CURSOR = re.compile(
    rf"\d{{1,4}}(-\d{{1,4}})*:((\d{{1,4}}|{steps.PARKED}[^.\s]{{1,1000}})\.\d{{1,18}})?", re.ASCII
)

_as_worker = msgspec.json.Decoder(WorkerInfo).decode
_RUNNING = (*steps.RUNNING, *steps.ASKED)


class Finder:
    """Pages through one stream. A cursor is the name of a source and a sequence."""

    def __init__(self, stream: Stream, layout: Layout, jobs: Jobs, parked: Parked) -> None:
        self._stream = stream
        self._layout = layout
        self._jobs = jobs
        self._parked = parked

    async def find(self, query: Query, cursor: str, limit: int) -> tuple[list[Job], str, int]:
        """Some jobs that match, the cursor for more, empty if there are no more, and how many jobs
        were looked at."""
        sources = await self._sources(query)
        names = [name for name, _, _ in sources]
        name, _, at = cursor.partition(".")
        source = source_of(name, names)
        seq = int(at) if at.isdigit() and name in names else 0
        scanning = scans(query)
        found: list[Job] = []
        total = looked = 0
        while source < len(sources) and len(found) < limit and total < BATCH_BYTES:
            _, subject, backwards = sources[source]
            wanted = SCAN if scanning else limit - len(found)
            read = self._backwards if backwards else self._forwards
            standings, seq = await read(subject, seq, wanted)
            for standing in await self._jobs.still_ready(standings):
                looked += 1
                if _matches(standing.job, query):
                    found.append(standing.job)
                    total += job_bytes(standing.job)
                    full = len(found) == limit or total >= BATCH_BYTES
                    if full and standing is not standings[-1]:
                        return found, f"{names[source]}.{_after(standing, backwards)}", looked
            if seq == 0:
                source += 1
            elif scanning or not standings:
                break
        return found, f"{names[source]}.{seq}" if source < len(sources) else "", looked

    async def _sources(self, query: Query) -> list[tuple[str, str, bool]]:
        """The subjects to read, by name, and whether to read them backwards: ended jobs, latest
        first. Parked jobs come last, because each queue has its own subject, which may be new."""
        layout, queue = self._layout, query.queue
        waiting = [layout.of_kind(kind, queue) for kind in steps.WAITING]
        ready = [layout.ready(queue, "*")]
        running = [layout.of_kind(kind, queue) for kind in _RUNNING]
        forwards = {
            State.WAITING: waiting + ready,
            # A job whose lease ran out is a ready message that still names its last worker.
            State.RUNNING: running + ready,
            None: waiting + ready + running,
        }.get(query.state, [])
        ended = [
            layout.of_kind(kind, queue)
            for state, kind in steps.ENDED.items()
            if query.state in (None, state)
        ]
        fixed = [(each, False) for each in forwards] + [(each, True) for each in ended]
        sources = [(str(n), *each) for n, each in enumerate(fixed)]
        if query.state in (None, State.WAITING):
            lines = await self._parked.notes() if queue is None else ()
            parked = {queue: steps.subject_part(queue) for queue in _queues(lines, queue)}
            sources += [
                (steps.PARKED + parked[each], layout.of_kind(steps.PARKED, each), False)
                for each in sorted(parked, key=parked.__getitem__)
            ]
        return sources

    async def _forwards(
        self, subject: str, from_seq: int, limit: int
    ) -> tuple[list[Standing], int]:
        """The next messages of a subject, and where to continue; 0 if there are no more."""
        messages, more = await self._stream.page(subject, from_seq=from_seq, limit=limit)
        return [steps.standing(*each) for each in messages], messages[-1][1] + 1 if more else 0

    async def _backwards(self, subject: str, below: int, limit: int) -> tuple[list[Standing], int]:
        """The last messages below a sequence, latest first. The server only reads forwards, so this
        reads ever wider windows, starting at the end."""
        state = (await self._stream.info())["state"]
        first: int = state["first_seq"]
        below = below or state["last_seq"] + 1
        found: list[Standing] = []
        total, width = 0, NARROWEST
        for _ in range(WINDOWS):
            if below <= first or len(found) >= limit or total >= BATCH_BYTES:
                break
            start = max(below - width, first)
            messages, more = await self._stream.page(subject, from_seq=start, limit=WIDEST)
            inside = [each for each in messages if each[1] < below]
            if more and len(inside) == len(messages) and inside[-1][1] < below - 1:
                width = max(width // 4, 1)  # there may be more between the last of them and below
                continue
            found += [steps.standing(*each) for each in reversed(inside)]
            total += sum(len(body) for *_, body in inside)
            below, width = start, width * 2
        if len(found) > limit:
            found = found[:limit]
            below = found[-1].seq
        return found, below if below > first else 0


def source_of(name: str, names: Sequence[str]) -> int:
    """Where the source of this name is, or if it is no longer there, the one after it."""
    if name in names:
        return names.index(name)
    if name.startswith(steps.PARKED):
        return sum(each.isdigit() or each < name for each in names)
    return len(names) if name.isdigit() else 0


def _queues(lines: Iterable[Line], queue: str | None) -> set[str]:
    return {line.queue for line in lines} if queue is None else {queue}


def _matches(job: Job, query: Query) -> bool:
    return (
        query.state in (None, job.state)
        and query.task in (None, job.task)
        and query.has_meta(job)
        and query.in_time(job)
    )


def scans(query: Query) -> bool:
    """Whether jobs have to be read to find those that match."""
    return query.task is not None or query.meta is not None or query.timed


def _after(standing: Standing, backwards: bool) -> int:
    return standing.seq if backwards else standing.seq + 1


def parse_cursor(cursor: str | None) -> tuple[int, str, list[int]]:
    """Where a page begins: the shard, the cursor in it, and shards that didn't answer so far."""
    if cursor is None:
        return 0, "", []
    if len(cursor) > CURSOR_LIMIT or not _CURSOR.fullmatch(cursor):
        raise not_a_cursor(cursor)
    head, _, rest = cursor.partition(":")
    number, *missing = map(int, head.split("-"))
    return number, rest, missing


def cursor_at(at: int, rest: str, missing: Sequence[int]) -> str:
    return "-".join(map(str, (at, *missing))) + f":{rest}"


# --- Counts

_STATES = {
    steps.WAITING[0]: State.WAITING,
    steps.PARKED: State.WAITING,
    RUNNING: State.RUNNING,
    steps.DONE: State.DONE,
    steps.DEAD: State.DEAD,
    steps.CANCELLED: State.CANCELLED,
    **{f"r{priority}": State.WAITING for priority in steps.PRIORITIES},
}


def alive(bodies: Iterable[bytes], now_ms: int) -> list[WorkerInfo]:
    """The workers in these messages that were seen recently, by name."""
    seen = (each for each in map(_as_worker, bodies) if now_ms - each.seen_ms <= each.gone_after_ms)
    return sorted(seen, key=lambda worker: worker.name)


def counted(consumers: Iterable[dict[str, Any]], spare: Iterable[Standing]) -> list[QueueInfo]:
    """Queues and their counts, from what their consumers have not delivered and what is spare here.

    A ready message that was delivered to another handle does not count: its job is being claimed. A
    job whose lease ran out counts as waiting, because it waits for another worker.
    """
    counts: dict[str, dict[str, int]] = {}
    paused: set[str] = set()
    for consumer in consumers:
        queue = consumer["config"]["metadata"]["queue"]
        state = _STATES.get(consumer["config"]["metadata"].get("kind", ""))
        if state is None:
            continue
        of_queue = counts.setdefault(queue, {})
        of_queue[state] = of_queue.get(state, 0) + consumer["num_pending"]
        if consumer.get("paused"):
            paused.add(queue)
    for standing in spare:
        of_queue = counts.setdefault(standing.job.queue, {})
        of_queue["waiting"] = of_queue.get("waiting", 0) + 1
    return [
        QueueInfo(name=queue, paused=queue in paused, **counts[queue])
        for queue in sorted(counts)
        if queue in paused or any(counts[queue].values())
    ]
