"""What a worker holds: claimed jobs, from the claim until their settlement is written.

    wheel (not yet due) ──► ready (due, no slot yet) ──► running ──► ended, not yet settled

A pure structure: the worker moves jobs through it and does the talking.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from enum import StrEnum

from tickwheel.job import Job
from tickwheel.tasks import Definition
from tickwheel.wheel import TimingWheel


class Stop(StrEnum):
    """Why a run is stopped before its end."""

    TIMEOUT = "timeout"
    ASKED = "asked"
    LOST = "lost"
    RELEASE = "release"


class Held:
    """One job in hand."""

    __slots__ = ("definition", "job", "ready_ms", "run", "settling", "started_ms", "stop")

    def __init__(self, job: Job) -> None:
        # As last claimed or extended: its fence is the newest one.
        self.job = job
        self.definition: Definition | None = None
        self.ready_ms: int | None = None
        self.started_ms: int | None = None
        self.run: asyncio.Task[None] | None = None
        self.stop: Stop | None = None
        # Its outcome is on its way to the store.
        self.settling = False


class Hand:
    """The jobs of one worker, by where they are on their way."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._wheel: TimingWheel[str] = TimingWheel()
        # Due but without a slot: (-priority, due, order, id). Entries of dropped jobs are skipped.
        self._ready: list[tuple[int, int, int, str]] = []
        self._ready_count = 0
        self._order = itertools.count()
        self._running: dict[str, Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        # A copy: the guard reads it from another thread, and callers drop while they look.
        return iter(list(self._held.values()))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def ready(self) -> int:
        return self._ready_count

    def get(self, id: str) -> Held | None:
        return self._held.get(id)

    def take(self, job: Job) -> None:
        """A job that was just claimed goes into the wheel."""
        # The same id can come again while an older attempt still winds up here.
        self._held[job.id] = Held(job)
        self._wheel.add(job.id, job.due_ms)

    def fall_due(self, now_ms: int) -> None:
        """Move what is due from the wheel to the ready ones."""
        for id in self._wheel.advance(now_ms):
            held = self._held[id]
            held.ready_ms = now_ms
            job = held.job
            heapq.heappush(self._ready, (-job.priority, job.due_ms, next(self._order), id))
            self._ready_count += 1

    def next_due_ms(self) -> int | None:
        return self._wheel.next_ms()

    def next_ready(self) -> Held | None:
        """Take out the ready job to start next: highest priority first, then earliest due."""
        while self._ready:
            held = self._held.get(heapq.heappop(self._ready)[3])
            if held is not None and held.ready_ms is not None:
                held.ready_ms = None
                self._ready_count -= 1
                return held
        return None

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
            del self._held[held.job.id]
            self._wheel.remove(held.job.id)
            self._unready(held)

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
            self._ready_count -= 1
