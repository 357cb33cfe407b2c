"""Looking at a stream: pages of jobs, and counts of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tickwheel.batch import BATCH_BYTES
from tickwheel.job import Job, State
from tickwheel.store import Query, QueueInfo, job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.jobs import Jobs
from tickwheel.stores.nats.steps import Layout, Standing
from tickwheel.stores.nats.stream import RUNNING, Stream

# Windows that one page of ended jobs looks through, from the end backwards, each twice as wide.
WINDOWS = 14
NARROWEST, WIDEST = 64, 1_000
# Jobs that one page looks at where a task is asked for, which no subject tells.
SCAN = 1_000

_RUNNING = (*steps.RUNNING, *steps.ASKED)


class Finder:
    """Pages through one stream. A cursor is a source's number and a sequence."""

    def __init__(self, stream: Stream, layout: Layout, jobs: Jobs) -> None:
        self._stream = stream
        self._layout = layout
        self._jobs = jobs

    async def find(self, query: Query, cursor: str, limit: int) -> tuple[list[Job], str]:
        """Some jobs that match, and the cursor for more; an empty one where there are no more."""
        sources = self._sources(query)
        number, _, at = cursor.partition(".")
        source = int(number) if number.isdigit() else 0
        seq = int(at) if at.isdigit() else 0
        found: list[Job] = []
        total = 0
        while source < len(sources) and len(found) < limit and total < BATCH_BYTES:
            subject, backwards = sources[source]
            wanted = limit - len(found) if query.task is None else SCAN
            look = self._back if backwards else self._on
            standings, seq = await look(subject, seq, wanted)
            for standing in await self._jobs.true_tokens(standings):
                if _matches(standing.job, query):
                    found.append(standing.job)
                    total += job_bytes(standing.job)
                    full = len(found) == limit or total >= BATCH_BYTES
                    if full and standing is not standings[-1]:
                        return found, f"{source}.{_after(standing, backwards)}"
            if seq == 0:
                source += 1
            elif query.task is not None or not standings:
                break
        return found, f"{source}.{seq}" if source < len(sources) else ""

    def _sources(self, query: Query) -> list[tuple[str, bool]]:
        """Subjects that hold what is asked for; the ended ones are read from the end backwards."""
        layout, queue = self._layout, query.queue
        waiting = [layout.of_kind(steps.WAITING, queue)]
        tokens = [layout.ready(queue, "*")]
        running = [layout.of_kind(kind, queue) for kind in _RUNNING]
        forwards = {
            State.WAITING: waiting + tokens,
            # A job whose lease ran out is a token that still says who had it.
            State.RUNNING: running + tokens,
            None: waiting + tokens + running,
        }.get(query.state, [])
        ended = [
            layout.of_kind(kind, queue)
            for state, kind in steps.ENDED.items()
            if query.state in (None, state)
        ]
        return [(each, False) for each in forwards] + [(each, True) for each in ended]

    async def _on(self, subject: str, from_seq: int, limit: int) -> tuple[list[Standing], int]:
        """The next messages under a subject, and where to go on; 0 where there are no more."""
        messages, more = await self._stream.page(subject, from_seq=from_seq, limit=limit)
        return [steps.standing(*each) for each in messages], messages[-1][1] + 1 if more else 0

    async def _back(self, subject: str, below: int, limit: int) -> tuple[list[Standing], int]:
        """The last messages below a sequence, latest first. The server only reads forwards, so we
        look through ever wider windows from the end on."""
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


def _matches(job: Job, query: Query) -> bool:
    return query.state in (None, job.state) and query.task in (None, job.task)


def _after(standing: Standing, backwards: bool) -> int:
    return standing.seq if backwards else standing.seq + 1


# --- Counts

_STATES = {
    steps.WAITING: State.WAITING,
    RUNNING: State.RUNNING,
    steps.DONE: State.DONE,
    steps.DEAD: State.DEAD,
    steps.CANCELLED: State.CANCELLED,
    **{f"r{priority}": State.WAITING for priority in steps.PRIORITIES},
}


def counted(consumers: Iterable[dict[str, Any]]) -> list[QueueInfo]:
    """Queues from what their consumers have before them.

    A token that was delivered and not spent yet is left out: its job is being claimed. One of a job
    whose lease ran out counts as waiting, for it waits for another worker.
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
    return [
        QueueInfo(name=queue, paused=queue in paused, **counts[queue])
        for queue in sorted(counts)
        if queue in paused or any(counts[queue].values())
    ]
