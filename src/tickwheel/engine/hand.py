"""The jobs that a worker holds, from the claim until their settlement is written.

    take ──► WAITING ──due──► READY ──slot──► RUNNING ──► SETTLING ──► gone
             (wheel)          (by priority)
                └───────────────┴──── released ─────────────▲

The ready jobs of batch tasks gather, and several of them take one slot.

A pure structure: only its methods move a job from phase to phase; the worker does all I/O.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, StrEnum, auto
from typing import Any

import msgspec

from tickwheel.batch import BATCH_BYTES
from tickwheel.engine.gathering import Entry, Gathering, Key, most_together
from tickwheel.job import Job, Outcome, Progress, Settlement, suspect
from tickwheel.registry import Definition, PoolName
from tickwheel.store import settlement_bytes
from tickwheel.wheel import TimingWheel

# Called with a run and the job that it waits for; with None once it no longer does.
Waiting = Callable[["Held", Job | None], None]
# Ready jobs of one pool. Entries of dropped jobs are skipped.
_Heap = list[Entry]


class Stop(StrEnum):
    """Why a run is stopped before it ends by itself."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    LOST = "lost"
    RELEASE = "release"


class Phase(Enum):
    """The phase of a held job."""

    # Not started and not ready: in the wheel, or taken out of it to start.
    WAITING = auto()
    # Due, without a slot; a suspect waits for its trial.
    READY = auto()
    RUNNING = auto()
    # Its outcome is being written to the store.
    SETTLING = auto()
    # No longer held. A run may still be ending.
    GONE = auto()


# By their own names here, because each job passes through all of them.
WAITING, READY, RUNNING, SETTLING, GONE = Phase


class Held:
    """One held job."""

    __slots__ = (
        "batch",
        "begun",
        "declined",
        "definition",
        "gathering",
        "interrupted",
        "job",
        "lent",
        "limit",
        "outside",
        "phase",
        "pool",
        "progress",
        "ready_ms",
        "run",
        "said",
        "settlement",
        "started_ms",
        "state",
        "stop",
        "suspect",
        "trial_ms",
        "waiting",
    )
    # Those of a batch.
    members: Sequence[Held] = ()
    called: Sequence[Held] = ()

    def __init__(self, job: Job, definition: Definition | None = None) -> None:
        # As last claimed or extended: its fence is the newest.
        self.job = job
        # None if this worker doesn't know the task.
        self.definition = definition
        self.pool: PoolName = "async" if definition is None else definition.pool
        # Set only by `Hand`.
        self.phase = WAITING
        # Since when it is READY.
        self.ready_ms = 0
        self.started_ms: int | None = None
        self.run: asyncio.Task[None] | None = None
        # The run has had its first turn of the loop.
        self.begun = False
        self.stop: Stop | None = None
        # How it ended, while that is being written.
        self.settlement: Settlement | None = None
        # The run was cancelled because of `stop`; a thread can't be.
        self.interrupted = False
        # It was released a moment ago, and no other worker took it.
        self.declined = False
        # Whether it is suspected of killing its workers, and when its trial began.
        self.suspect = bool(job.history) and suspect(job, survivor=job.worker or "")
        self.trial_ms: int | None = None
        # Whether its slot is lent to others, because the run waits for another job; and who is told
        # of the jobs that it waits for.
        self.lent = False
        self.waiting: Waiting | None = None
        # What its task last said of its progress, and who is told that it said something.
        self.progress: Progress | None = None
        self.said: Callable[[], None] | None = None
        # The value of the app's lifespan.
        self.state: Any = None
        # The app's middleware is at work, not the task itself.
        self.outside = False
        # How many jobs may run in one call with it, 0 if its task is not a batch; with whom it
        # gathers while READY, and runs while RUNNING.
        self.limit = 0
        if definition is not None and definition.batch is not None:
            self.limit = most_together(job, definition, definition.batch)
        self.gathering: Gathering | None = None
        self.batch: Batch | None = None

    def with_start(self) -> Job:
        """The job as the next extend sends it, with its start time and its progress.

        The start of a suspect is sent only while it is on trial: that makes its loss count.
        """
        told_ms = self.trial_ms if self.suspect else self.started_ms
        progress = self.progress
        if self.job.started_ms == told_ms and (progress is None or self.job.progress == progress):
            return self.job
        return msgspec.structs.replace(self.job, started_ms=told_ms, progress=progress)

    def outcome_bytes(self) -> int:
        """About how many bytes writing its end takes."""
        return 0 if self.settlement is None else settlement_bytes(self.settlement)

    def replaced_by(self, job: Job) -> bool:
        """Whether the job was replaced or moved before it was claimed as this one."""
        before = self.job
        if before.changes is None and job.changes is None:
            return False
        counts = {0 if each.changes is None else each.changes.count for each in (before, job)}
        return before.told or len(counts) > 1

    @property
    def untold(self) -> bool:
        """Whether it runs, and the store has not heard of its progress yet."""
        progress = self.progress
        return progress is not None and self.phase is RUNNING and self.job.progress != progress

    def say(self, progress: Progress) -> None:
        """The task says how far it has come, on any thread."""
        self.progress = progress
        if self.said is not None:
            self.said()

    @property
    def deadline_ms(self) -> int | None:
        """When its timeout stops the run. The task's own time may start a moment later: once it has
        a thread."""
        if self.definition is None or self.started_ms is None:
            return None
        limit_ms = timeout_ms(self.job, self.definition)
        return None if limit_ms is None else self.started_ms + limit_ms


class Batch(Held):
    """Jobs that run as one call: one run, which takes one slot. Its job is the first of them."""

    __slots__ = ("called", "members")

    def __init__(self, members: list[Held]) -> None:
        first = members[0]
        super().__init__(first.job, first.definition)
        self.waiting = first.waiting
        self.state = first.state
        self.members: Sequence[Held] = members
        # Those whose items the function gets, in the same order.
        self.called: Sequence[Held] = members
        for member in members:
            member.batch = self


class Hand:
    """The jobs that one worker holds, by phase."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}
        self._wheel: TimingWheel[str] = TimingWheel()
        # Each pool has its own slots: a full pool holds up no other.
        self._ready: dict[PoolName, _Heap] = {"async": [], "thread": [], "process": []}
        self._ready_counts: dict[PoolName, int] = {"async": 0, "thread": 0, "process": 0}
        self.ready_total = 0
        self._suspects: _Heap = []
        # Ready jobs of batch tasks.
        self.gathered: dict[Key, Gathering] = {}
        self._order = itertools.count()
        # How many runs take up a slot, how many of those are in a thread, and how many runs have
        # lent their slot.
        self.running = self.in_threads = self.lent_total = 0
        self.lent: dict[PoolName, int] = {"async": 0, "thread": 0, "process": 0}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        # A copy: the guard reads it from another thread, and callers drop jobs while they iterate.
        return iter(list(self._held.values()))

    @property
    def in_wheel(self) -> int:
        """How many held jobs are not due yet."""
        return len(self._wheel)

    def ready(self, pool: PoolName) -> int:
        """How many jobs of this pool are due and have not started."""
        return self._ready_counts[pool]

    @property
    def suspects(self) -> int:
        return len(self._suspects)

    def get(self, id: str) -> Held | None:
        return self._held.get(id)

    def take(self, held: Held, now_ms: int) -> None:
        """Put a job that was just claimed into the wheel, or make it ready if it is due."""
        job = held.job
        # The same id can come again while an older attempt is still ending here.
        if (before := self._held.get(job.id)) is not None:
            self.drop(before)
        self._held[job.id] = held
        self.bytes += len(job.payload)
        if job.due_ms <= now_ms:
            self.make_ready(held, now_ms)
        else:
            self._wheel.add(job.id, job.due_ms)

    def wait_again(self, held: Held) -> None:
        """Put back a job that was taken out to start but is not due after all."""
        self._wheel.add(held.job.id, held.job.due_ms)

    def fall_due(self, now_ms: int) -> None:
        """Move due jobs from the wheel to the ready jobs, or to the suspects."""
        for id in self._wheel.advance(now_ms):
            self.make_ready(self._held[id], now_ms)

    def make_ready(self, held: Held, now_ms: int) -> None:
        job, order = held.job, next(self._order)
        held.phase, held.ready_ms = READY, now_ms
        if held.suspect:
            # In random order: an innocent job should not share a trial with the same killer each
            # time.
            heapq.heappush(self._suspects, (-job.priority, random.random(), order, job.id))
        elif held.limit:
            self._gather(held, order)
        else:
            heapq.heappush(self._ready[held.pool], (-job.priority, job.due_ms, order, job.id))
            self._ready_counts[held.pool] += 1
            self.ready_total += 1

    def next_due_ms(self) -> int | None:
        return self._wheel.next_ms()

    def next_ready(self, has_room: Callable[[PoolName], bool], now_ms: int) -> Held | None:
        """Take out the ready job to start next, of the pools that have room: highest priority
        first, then earliest due. See `companions` for a job that starts in a batch."""
        heap: _Heap | None
        if self.gathered:
            heaps = [heap for pool, heap in self._ready.items() if heap and has_room(pool)]
            heaps += [
                each.entries
                for each in self.gathered.values()
                if each.ripe(now_ms) and has_room(each.pool)
            ]
            heap = min(filter(self._top, heaps), default=None)
        elif self._ready_counts["async"] == self.ready_total:
            # Usually there are only async tasks, which always have room.
            heap = (
                self._ready["async"]
                if self.ready_total and self._top(self._ready["async"])
                else None
            )
        else:
            open_ = (heap for pool, heap in self._ready.items() if heap and has_room(pool))
            heap = min(filter(self._top, open_), default=None)
        if heap is None:
            return None
        held = self._held[heapq.heappop(heap)[3]]
        self._leave(held)
        held.phase = WAITING
        return held

    def _top(self, heap: _Heap) -> bool:
        """Drop entries that are no longer ready from the top; returns whether any are left."""
        while heap:
            held = self._held.get(heap[0][3])
            if held is not None and held.phase is READY:
                return True
            heapq.heappop(heap)
        return False

    # --- Batches

    def _gather(self, held: Held, order: int) -> None:
        job, definition, key = held.job, held.definition, _key(held)
        gathering = self.gathered.get(key)
        if gathering is None:
            assert definition is not None and definition.batch is not None
            gathering = Gathering(held.pool, held.limit, definition.batch.linger_ms)
            self.gathered[key] = gathering
        heapq.heappush(gathering.entries, (-job.priority, job.due_ms, order, job.id))
        gathering.add(job, _lingers_since(held))
        held.gathering = gathering

    def companions(self, held: Held) -> list[Held]:
        """Take out the ready jobs that start in one call with this one, which was just taken out:
        as many as may, and as fit into memory together."""
        gathering = self.gathered.get(_key(held))
        taken: list[Held] = []
        if gathering is None or held.suspect:
            return taken
        size, entries = len(held.job.payload), gathering.entries
        while len(taken) + 1 < held.limit and self._top(entries):
            each = self._held[entries[0][3]]
            size += len(each.job.payload)
            if size > BATCH_BYTES:
                break
            heapq.heappop(entries)
            # As `_leave` does, but without a call for each.
            each.phase, each.gathering = WAITING, None
            taken.append(each)
        gathering.count -= len(taken)
        if not gathering.count:
            del self.gathered[_key(held)]
        elif gathering.count < gathering.limit:
            # Those that are left may have more time.
            self._count_again(gathering)
        return taken

    def _count_again(self, gathering: Gathering) -> None:
        gathering.count, gathering.ripe_ms = 0, math.inf
        for *_, id in gathering.entries:
            each = self._held.get(id)
            if each is not None and each.gathering is gathering:
                gathering.add(each.job, _lingers_since(each))

    def end_lingers(self) -> None:
        """No gathered job waits for others any longer."""
        for each in self.gathered.values():
            each.ripe_ms = -math.inf

    def lingers(self, held: Held, now_ms: int) -> bool:
        """Whether the job waits for others to join it, not for a slot."""
        return held.gathering is not None and not held.gathering.ripe(now_ms)

    def next_ripe_ms(self, now_ms: int) -> float | None:
        """When the next jobs that linger have waited enough."""
        lingering = (each.ripe_ms for each in self.gathered.values() if not each.ripe(now_ms))
        return min(lingering, default=None)

    def wants_slot(self, now_ms: int) -> bool:
        """Whether any job waits for a slot."""
        return self.ready_total > 0 or any(each.ripe(now_ms) for each in self.gathered.values())

    # --- Suspects

    def take_suspects(self, choose: Callable[[list[Held]], list[Held]]) -> list[Held]:
        """Take out the suspects that `choose` picks; the others stay as they are."""
        waiting = []
        while self._top(self._suspects):
            waiting.append(heapq.heappop(self._suspects))
        held = [self._held[id] for *_, id in waiting]
        chosen = choose(held)
        for each in chosen:
            each.phase = WAITING
        # Sorted, so that they are a heap.
        self._suspects = [
            entry for entry, each in zip(waiting, held, strict=True) if each.phase is READY
        ]
        return chosen

    # --- Slots

    def start(self, held: Held, now_ms: int) -> None:
        held.phase, held.started_ms = RUNNING, now_ms
        self._take_slot(held)
        if held.limit:
            for member in held.members:
                member.phase, member.started_ms = RUNNING, now_ms

    def used(self) -> dict[PoolName, int]:
        """How many runs take up a slot, by pool. Visits every held job."""
        counts: dict[PoolName, int] = {"async": 0, "thread": 0, "process": 0}
        batches: set[int] = set()
        for held in self._held.values():
            run = held if held.batch is None else held.batch
            if run.phase is RUNNING and not run.lent and id(run) not in batches:
                batches.add(id(run))
                counts[run.pool] += 1
        return counts

    def _take_slot(self, held: Held) -> None:
        self.running += 1
        if held.pool == "thread":
            self.in_threads += 1

    def _free_slot(self, held: Held) -> None:
        self.running -= 1
        if held.pool == "thread":
            self.in_threads -= 1

    def lend(self, held: Held) -> None:
        """Free the slot of a run that waits for another job."""
        if held.phase is RUNNING and not held.lent:
            held.lent = True
            self.lent[held.pool] += 1
            self.lent_total += 1
            self._free_slot(held)

    def take_back(self, held: Held) -> None:
        """The run goes on. If its slot is taken, there is one run too many for a while."""
        if held.lent:
            held.lent = False
            self.lent[held.pool] -= 1
            self.lent_total -= 1
            self._take_slot(held)

    def settle(self, held: Held) -> None:
        """The job won't start, or its run is over: its slot is free, but it is held until its
        outcome is written."""
        if held.phase is not GONE:
            self._leave(held)
            held.phase = SETTLING

    def drop(self, held: Held) -> None:
        """Forget a job that is no longer ours."""
        if held.phase is not GONE:
            self._leave(held)
            held.phase = GONE
            del self._held[held.job.id]
            self.bytes -= len(held.job.payload)

    def _leave(self, held: Held) -> None:
        """Undo what the job's current phase set up."""
        if held.phase is RUNNING:
            if held.lent:
                self.take_back(held)
            if held.batch is None:
                self._free_slot(held)
        elif held.phase is WAITING:
            self._wheel.remove(held.job.id)
        elif held.gathering is not None:
            held.gathering.count -= 1
            if not held.gathering.count:
                del self.gathered[_key(held)]
            held.gathering = None
        elif held.phase is READY and not held.suspect:
            self._ready_counts[held.pool] -= 1
            self.ready_total -= 1

    def holds_unstarted(self, id: str) -> bool:
        held = self._held.get(id)
        return held is not None and held.phase in (WAITING, READY)

    def unstarted(self, *, ready_before_ms: int | None = None) -> list[Held]:
        """Jobs that have not started; with `ready_before_ms`, those that were ready by then."""
        if ready_before_ms is None:
            return [
                held for held in self._held.values() if held.phase is WAITING or held.phase is READY
            ]
        return [
            held
            for held in self._held.values()
            if held.phase is READY and held.ready_ms <= ready_before_ms
        ]

    def shift_leases(self, step_ms: int) -> None:
        """Move all leases, because the clock that they are written by was set."""
        for held in self._held.values():
            if held.job.lease_until_ms is not None:
                until_ms = held.job.lease_until_ms + step_ms
                held.job = msgspec.structs.replace(held.job, lease_until_ms=until_ms)


def timeout_ms(job: Job, definition: Definition) -> int | None:
    return definition.timeout_ms if job.timeout_ms is None else job.timeout_ms


def _key(held: Held) -> Key:
    return held.job.task, held.limit, held.job.timeout_ms


def _lingers_since(held: Held) -> int:
    """A late job waits for others that may be late as well, but only in its first worker."""
    return held.ready_ms if held.job.attempt == 1 else held.job.due_ms


def released_unstarted(job: Job, *, by: str, since_ms: int) -> bool:
    """Whether this worker released the job unstarted since then, and no other has had it since."""
    last = job.history[-1] if job.history else None
    if last is None or last.outcome is not Outcome.RELEASE or last.started_ms is not None:
        return False
    return last.worker == by and last.ended_ms > since_ms


def stronger(why: Stop, held: Held) -> bool:
    """Whether another reason to stop changes anything: a stronger one does, and a run that was
    already interrupted is not interrupted again."""
    if held.stop is None or why is Stop.LOST:
        return held.stop is not Stop.LOST
    return not held.interrupted and _STRENGTH[why] > _STRENGTH[held.stop]


_STRENGTH = {Stop.RELEASE: 1, Stop.CANCEL: 2, Stop.TIMEOUT: 3, Stop.LOST: 4}
