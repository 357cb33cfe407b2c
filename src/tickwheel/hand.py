"""What a worker holds: claimed jobs, from the claim until their settlement is written.

    wheel (not yet due) ──► ready (due, no slot yet) ──► running ──► ended, not yet settled
                       └──► suspects (due, wait for their trial)

A pure structure: the worker moves jobs through it and does the talking.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from enum import StrEnum

import msgspec

from tickwheel.job import Job, suspect
from tickwheel.tasks import Definition, Pool
from tickwheel.wheel import TimingWheel

# Ready jobs of one kind: (-priority, due, order, id). Entries of dropped jobs are skipped.
_Heap = list[tuple[int, float, int, str]]


class Stop(StrEnum):
    """Why a run is stopped before its end."""

    TIMEOUT = "timeout"
    ASKED = "asked"
    LOST = "lost"
    RELEASE = "release"


class Held:
    """One job in hand."""

    __slots__ = (
        "begun",
        "declined",
        "definition",
        "interrupted",
        "job",
        "pool",
        "ready_ms",
        "run",
        "settling",
        "started_ms",
        "stop",
        "suspect",
        "trial_ms",
    )

    def __init__(self, job: Job, definition: Definition | None = None) -> None:
        # As last claimed or extended: its fence is the newest one.
        self.job = job
        # None where this worker doesn't know the task.
        self.definition = definition
        self.pool: Pool = "async" if definition is None else definition.pool
        self.ready_ms: int | None = None
        self.started_ms: int | None = None
        self.run: asyncio.Task[None] | None = None
        # The run has had its first turn of the loop.
        self.begun = False
        self.stop: Stop | None = None
        # The run was cancelled because of `stop`; a thread can't be.
        self.interrupted = False
        # Its outcome is on its way to the store.
        self.settling = False
        # It was handed back a moment ago, and nobody else took it.
        self.declined = False
        # It may be what kills its workers; and since when that is being found out.
        self.suspect = bool(job.history) and suspect(job, survivor=job.worker or "")
        self.trial_ms: int | None = None

    def told(self) -> Job:
        """The job, with what the next extend tells the store of its start.

        The start of a suspect is told only while it is on trial: that makes its loss count.
        """
        told_ms = self.trial_ms if self.suspect else self.started_ms
        if self.job.started_ms == told_ms:
            return self.job
        return msgspec.structs.replace(self.job, started_ms=told_ms)


class Hand:
    """The jobs of one worker, by where they are on their way."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._wheel: TimingWheel[str] = TimingWheel()
        # Each pool has places of its own: one that is full holds up no other.
        self._ready: dict[Pool, _Heap] = {"async": [], "thread": [], "process": []}
        self._ready_counts: dict[Pool, int] = {"async": 0, "thread": 0, "process": 0}
        self.crowd = 0
        self._suspects: _Heap = []
        self._order = itertools.count()
        self._running: dict[str, Held] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        # A copy: the guard reads it from another thread, and callers drop while they look.
        return iter(list(self._held.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    def ready(self, pool: Pool) -> int:
        """How many jobs of this pool are due and have not started."""
        return self._ready_counts[pool]

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def get(self, id: str) -> Held | None:
        return self._held.get(id)

    def take(self, held: Held) -> None:
        """A job that was just claimed goes into the wheel."""
        job = held.job
        # The same id can come again while an older attempt still winds up here.
        if (before := self._held.get(job.id)) is not None:
            self.drop(before)
        self._held[job.id] = held
        self.bytes += len(job.payload)
        self._wheel.add(job.id, job.due_ms)

    def wait_again(self, held: Held) -> None:
        """A job that was taken out to start is not due after all."""
        self._wheel.add(held.job.id, held.job.due_ms)

    def fall_due(self, now_ms: int) -> None:
        """Move what is due from the wheel to the ready ones, or to the suspects."""
        for id in self._wheel.advance(now_ms):
            self.make_ready(self._held[id], now_ms)

    def make_ready(self, held: Held, now_ms: int) -> None:
        job, order = held.job, next(self._order)
        held.ready_ms = now_ms
        if held.suspect:
            # In no order: no innocent should stand beside the same killer again and again.
            heapq.heappush(self._suspects, (-job.priority, random.random(), order, job.id))
        else:
            heapq.heappush(self._ready[held.pool], (-job.priority, job.due_ms, order, job.id))
            self._ready_counts[held.pool] += 1
            self.crowd += 1

    def next_due_ms(self) -> int | None:
        return self._wheel.next_ms()

    def next_ready(self, has_room: Callable[[Pool], bool]) -> Held | None:
        """Take out the ready job to start next, of the pools that have room: highest priority
        first, then earliest due."""
        heap: _Heap | None
        if self._ready_counts["async"] == self.crowd:
            # Mostly there are async tasks alone, which always find room.
            heap = self._ready["async"] if self.crowd and self._top(self._ready["async"]) else None
        else:
            open_ = (heap for pool, heap in self._ready.items() if heap and has_room(pool))
            heap = min(filter(self._top, open_), default=None)
        if heap is None:
            return None
        held = self._held[heapq.heappop(heap)[3]]
        self._unready(held)
        return held

    def _top(self, heap: _Heap) -> bool:
        """Drop what is no longer ready from the top; whether something is left."""
        while heap:
            held = self._held.get(heap[0][3])
            if held is not None and held.ready_ms is not None:
                return True
            heapq.heappop(heap)
        return False

    def take_suspects(self, choose: Callable[[list[Held]], list[Held]]) -> list[Held]:
        """Take out those of the suspects that are chosen; the others stay as they are."""
        waiting = []
        while self._top(self._suspects):
            waiting.append(heapq.heappop(self._suspects))
        held = [self._held[id] for *_, id in waiting]
        chosen = choose(held)
        for each in chosen:
            each.ready_ms = None
        # In order, so that they are a heap.
        self._suspects = [
            entry for entry, each in zip(waiting, held, strict=True) if each.ready_ms is not None
        ]
        return chosen

    def start(self, held: Held, now_ms: int) -> None:
        held.started_ms = now_ms
        self._running[held.job.id] = held

    def end(self, held: Held) -> None:
        """The run is over: its slot is free, but the job stays in hand until it is settled."""
        if self._running.get(held.job.id) is held:
            del self._running[held.job.id]

    def drop(self, held: Held) -> None:
        """The job is no longer ours to care for."""
        self.end(held)
        if self._held.get(held.job.id) is held:
            self.withdraw(held)
            del self._held[held.job.id]
            self.bytes -= len(held.job.payload)

    def unstarted(self, *, ready_before_ms: int | None = None) -> list[Held]:
        """Jobs that have not started; with `ready_before_ms`, those that were ready by then."""
        return [
            held
            for held in self._held.values()
            if held.started_ms is None
            and (
                ready_before_ms is None
                or (held.ready_ms is not None and held.ready_ms <= ready_before_ms)
            )
        ]

    def withdraw(self, held: Held) -> None:
        """Make sure that the job won't start; it stays in hand until it is settled."""
        self._wheel.remove(held.job.id)
        self._unready(held)

    def _unready(self, held: Held) -> None:
        if held.ready_ms is not None:
            held.ready_ms = None
            if not held.suspect:
                self._ready_counts[held.pool] -= 1
                self.crowd -= 1

    def shift_leases(self, step_ms: int) -> None:
        """The clock by which leases are written was set: they end at another moment now."""
        for held in self._held.values():
            if held.job.lease_until_ms is not None:
                until_ms = held.job.lease_until_ms + step_ms
                held.job = msgspec.structs.replace(held.job, lease_until_ms=until_ms)
