"""`memory://`: jobs in a dict, found by the wheel; the plainest statement of the contract.

One lock makes every step atomic, so handles may be used from several threads and event loops.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from tickwheel import changes, job as life
from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.changes import Put
from tickwheel.clock import Clock, SystemClock, moved_ms, wall_ns
from tickwheel.errors import BadConfig
from tickwheel.ids import new_fence
from tickwheel.job import CancelOutcome, Job, Move, MoveOutcome, PutOutcome, Settlement, State
from tickwheel.limit import Rate, admit
from tickwheel.masking import masked
from tickwheel.schedule import Schedule
from tickwheel.store import (
    CURSOR_LIMIT,
    NO_ASKS,
    PARKED_LIMIT,
    Ask,
    Asks,
    Durability,
    Finding,
    Page,
    Query,
    QueueInfo,
    Size,
    SlotCounts,
    Slots,
    Tell,
    WorkerInfo,
    each_once,
    job_bytes,
    not_a_cursor,
    time_ms,
)
from tickwheel.stores.waiting import Waiters, Watches
from tickwheel.wheel import TimingWheel

A = TypeVar("A")
_Entry = tuple[int, int, str]
# A queue, and a task for jobs that are parked.
_Line = tuple[str, str | None]


class MemoryStore:
    """Keeps the contract for as long as the process runs."""

    max_inflight = 1
    own_clock = True

    def __init__(self, *, clock: Clock | None = None, ahead_ms: int = 1000) -> None:
        self.ahead_ms = ahead_ms
        self._clock = clock or SystemClock()
        # The clock when it was last read: see `wall_ns`.
        self._seen_ns: int | None = None
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        # When each job next matters: its due time while waiting, its lease's end while running.
        self._due: TimingWheel[str] = TimingWheel()
        self._leases: TimingWheel[str] = TimingWheel()
        # What has become claimable, by line: (-priority, order, id). An entry is live while
        # `_ready_order` still has its order; any change of the job makes it stale.
        self._ready: dict[_Line, list[_Entry]] = {}
        self._ready_order: dict[str, int] = {}
        self._order = itertools.count()
        self._paused: set[str] = set()
        self._counts: defaultdict[str, Counter[State]] = defaultdict(Counter)
        self._schedules: dict[str, Schedule] = {}
        self._records: dict[str, dict[str, str]] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._buckets: dict[str, int] = {}
        self._waiters = Waiters()
        self._watches = Watches()

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> MemoryStore:
        if url.lower() != "memory://":
            raise BadConfig(f"{masked(url)!r}: memory:// takes neither a name nor options")
        return cls(clock=clock)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def new_handle(self) -> MemoryStore:
        return self

    async def time_ns(self) -> int:
        return self._clock.now_ns()

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        with self._lock:
            added = [self._add(job) for job in jobs]
            self._waiters.notify()
        return added

    def _add(self, job: Job) -> bool:
        if job.id in self._jobs:
            return False
        self._put(life.added(job))
        return True

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        with self._lock:
            self._follow_clock()
            answers = [self._ask(each.job.id, changes.put, each, now_ms) for each in puts]
            self._waiters.notify()
        return answers

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        with self._lock:
            self._follow_clock()
            answers = [self._ask(each.id, changes.move, each, now_ms) for each in moves]
            self._waiters.notify()
        return answers

    def _ask(self, id: str, step: Callable[..., tuple[A, Job | None]], ask: Any, now_ms: int) -> A:
        before = self._jobs.get(id)
        answer, after = step(before, ask, now_ms=now_ms)
        if after is not None and after is not before:
            self._put(after)
        return answer

    async def claim(
        self,
        queues: Sequence[str],
        *,
        worker: str,
        limit: int,
        now_ms: int,
        lease_ms: int,
        tasks: Collection[str] = (),
        call: int | None = None,
        again: bool = False,
    ) -> list[Job]:
        with self._lock:
            self._follow_clock()
            call = new_fence() if call is None else call
            if again and (held := self._claimed_by(call, now_ms, lease_ms)):
                return held
            self._collect(now_ms)
            claimed = functools.partial(
                life.claimed, worker=worker, fence=call, now_ms=now_ms, lease_ms=lease_ms
            )
            return self._take(self._open(queues, tasks), limit, now_ms, claimed)

    def _claimed_by(self, fence: int, now_ms: int, lease_ms: int) -> list[Job]:
        """The jobs that the claim with this fence took and still holds."""
        mine = [job for job in self._jobs.values() if job.fence == fence]
        held = [self._extend(job, now_ms, lease_ms) for job in mine]
        return [job for job in held if job is not None]

    def _follow_clock(self) -> None:
        """Leases are durations: when the clock is set, their ends move with it."""
        now_ns = wall_ns(self._clock)
        step_ms = moved_ms(now_ns, self._seen_ns)
        if step_ms or self._seen_ns is None:
            self._seen_ns = now_ns
        for job in list(self._jobs.values()) if step_ms else ():
            if job.lease_until_ms is not None:
                until_ms = job.lease_until_ms + step_ms
                self._put(msgspec.structs.replace(job, lease_until_ms=until_ms))

    def _collect(self, now_ms: int) -> None:
        """Move what has become claimable from the wheels to the ready heaps."""
        lost, due = self._leases.advance(now_ms), self._due.advance(now_ms + self.ahead_ms)
        jobs = [self._jobs[id] for id in (*lost, *due)]
        for job in sorted(jobs, key=self._claimable_ms):
            self._make_ready(job)

    def _make_ready(self, job: Job) -> None:
        order = self._ready_order[job.id] = next(self._order)
        line = job.queue, job.task if job.parked else None
        heapq.heappush(self._ready.setdefault(line, []), (-job.priority, order, job.id))

    def _take(
        self,
        heaps: Sequence[list[_Entry]],
        limit: int,
        now_ms: int,
        claimed: Callable[[Job], Job],
    ) -> list[Job]:
        """Claim the best jobs."""
        taken: list[Job] = []
        total = 0
        too_soon: list[tuple[list[_Entry], _Entry]] = []
        while len(taken) < limit and (heap := min(filter(None, heaps), default=None)):
            entry = heapq.heappop(heap)
            if not self._live(entry):
                continue
            job = self._jobs[entry[2]]
            # This caller's clock may be behind that of the caller who made the entry.
            if self._claimable_ms(job) > now_ms:
                too_soon.append((heap, entry))
                continue
            job = claimed(job)
            if job.state is State.RUNNING:
                total += job_bytes(job)
                if taken and total > BATCH_BYTES:
                    heapq.heappush(heap, entry)
                    break
                taken.append(job)
            self._put(job)
        for heap, entry in too_soon:
            heapq.heappush(heap, entry)
        return taken

    def _open(self, queues: Sequence[str], tasks: Collection[str]) -> list[list[_Entry]]:
        """What is ready in these queues, but for parked jobs of other tasks."""
        return [
            heap
            for (queue, task), heap in self._ready.items()
            if queue in queues and queue not in self._paused and (task is None or task in tasks)
        ]

    def _live(self, entry: _Entry) -> bool:
        return self._ready_order.get(entry[2]) == entry[1]

    def _claimable_ms(self, job: Job) -> int:
        since_ms = life.claimable_ms(job, ahead_ms=self.ahead_ms)
        assert since_ms is not None, "a job that has ended is in no wheel and no heap"
        return since_ms

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        with self._lock:
            self._follow_clock()
            return [self._extend(job, now_ms, lease_ms) for job in jobs]

    def _extend(self, job: Job, now_ms: int, lease_ms: int) -> Job | None:
        current = self._jobs.get(job.id)
        if current is None or not life.holds(job, current, now_ms=now_ms):
            return None
        longer = life.extended(current, job, now_ms=now_ms, lease_ms=lease_ms)
        self._put(longer)
        return longer

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        with self._lock:
            self._follow_clock()
            answers, settled = life.settle(settlements, self._jobs, now_ms=now_ms)
            for job in settled.values():
                self._put(job)
            self._waiters.notify()
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        with self._lock:
            self._follow_clock()
            answers = [self._cancel(id, now_ms) for id in ids]
            self._waiters.notify()
        return answers

    def _cancel(self, id: str, now_ms: int) -> CancelOutcome:
        job = self._jobs.get(id)
        if job is None:
            return CancelOutcome.UNKNOWN
        outcome, after = life.cancel(job, now_ms=now_ms)
        if after is not job:
            self._put(after)
        return outcome

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        with self._lock:
            answers = [self._rerun(id, now_ms) for id in ids]
            self._waiters.notify()
        return answers

    def _rerun(self, id: str, now_ms: int) -> bool:
        job = self._jobs.get(id)
        if job is None or not job.state.ended:
            return False
        self._put(life.rerun(job, now_ms=now_ms))
        return True

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        with self._lock:
            return [self._delete(id) for id in ids]

    def _delete(self, id: str) -> bool:
        job = self._jobs.get(id)
        if job is None or not job.state.ended:
            return False
        del self._jobs[id]
        self._counts[job.queue][job.state] -= 1
        return True

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        with self._lock:
            old = (
                job.id
                for job in self._jobs.values()
                if job.state in states and job.ended_ms is not None and job.ended_ms < before_ms
            )
            ids = list(itertools.islice(old, limit))
            return sum(self._delete(id) for id in ids)

    def _put(self, job: Job) -> None:
        """The one place where a job changes: keeps wheels and counts in step with it."""
        before = self._jobs.get(job.id)
        if before is not None:
            self._counts[before.queue][before.state] -= 1
            (self._leases if before.state is State.RUNNING else self._due).remove(job.id)
            self._ready_order.pop(job.id, None)
        self._counts[job.queue][job.state] += 1
        self._jobs[job.id] = job
        if job.state is State.WAITING:
            self._due.add(job.id, job.due_ms)
        elif job.state is State.RUNNING:
            assert job.lease_until_ms is not None
            self._leases.add(job.id, job.lease_until_ms)
        elif self._watches.anyone:
            self._watches.hear([job.id])

    # --- Waiting

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        async def next_ms(now_ms: int) -> int | None:
            with self._lock:
                return self._next_ms(queues, tasks, now_ms)

        await self._waiters.until_due((), next_ms, now_ms=now_ms, until_ms=until_ms)

    def _next_ms(self, queues: Sequence[str], tasks: Collection[str], now_ms: int) -> int | None:
        self._collect(now_ms)
        moments = []
        for heap in self._open(queues, tasks):
            while heap and not self._live(heap[0]):
                heapq.heappop(heap)
            if heap:
                moments.append(self._claimable_ms(self._jobs[heap[0][2]]))
        due, lease = self._due.next_ms(), self._leases.next_ms()
        moments += [due - self.ahead_ms] if due is not None else []
        moments += [lease] if lease is not None else []
        return min(moments, default=None)

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        async def find() -> dict[str, Ask]:
            with self._lock:
                return self._asked(worker)

        return await self._waiters.until_found(
            (), find, known=known, now_ms=now_ms, until_ms=until_ms
        )

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        with self._watches.watching(ids, tell) as watch:
            watch.tell()
            await watch.until(asyncio.get_running_loop().time() + (until_ms - now_ms) / 1000)

    def _asked(self, worker: str) -> dict[str, Ask]:
        return {
            job.id: Ask.STOP if job.cancel_requested else Ask.PUT_BACK
            for job in self._jobs.values()
            if (job.cancel_requested or job.told)
            and job.worker == worker
            and job.state is State.RUNNING
        }

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        with self._lock:
            stored = msgspec.structs.replace(schedule, fence=next(self._order) + 1)
            self._schedules[schedule.name] = stored
            self._waiters.notify()
        return stored

    async def replace_schedule(self, schedule: Schedule) -> bool:
        with self._lock:
            current = self._schedules.get(schedule.name)
            if current is None or schedule.fence != current.fence:
                return False
            fence = next(self._order) + 1
            self._schedules[schedule.name] = msgspec.structs.replace(schedule, fence=fence)
            self._waiters.notify()
        return True

    async def delete_schedule(self, name: str) -> bool:
        with self._lock:
            return self._schedules.pop(name, None) is not None

    async def schedules(self) -> list[Schedule]:
        with self._lock:
            return [self._schedules[name] for name in sorted(self._schedules)]

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        with self._lock:
            current = self._schedules.get(schedule.name)
            if current is None or current.fence != schedule.fence:
                return False
            for job in jobs:
                self._add(job)
            self._schedules[schedule.name] = msgspec.structs.replace(
                current,
                next_ms=next_ms,
                last_id=jobs[-1].id if jobs else current.last_id,
                fence=next(self._order) + 1,
            )
            self._waiters.notify()
        return True

    # --- Records

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        with self._lock:
            self._records.setdefault(kind, {}).update(records)

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        with self._lock:
            found = self._records.get(kind, {})
            names = heapq.nsmallest(limit, (name for name in found if name > after))
            return [(name, found[name]) for name in names]

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        with self._lock:
            found = self._records.get(kind, {})
            return [found.get(name) for name in names]

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        with self._lock:
            found = self._records.get(kind, {})
            gone = {name for name in names if found.pop(name, None) is not None}
        return each_once(names, gone)

    # --- Browsing and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        with self._lock:
            return [self._jobs.get(id) for id in ids]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Sorts all jobs for each page: fit for tests, where jobs are few."""
        place = _place_in_time if query.timed else _place
        after = None if cursor is None else _parsed(cursor, len(place(_ANY_JOB)))
        with self._lock:
            matching = [job for job in self._jobs.values() if self._matches(job, query)]
        matching = sorted(
            (job for job in matching if after is None or place(job) > after), key=place
        )
        jobs = next(portions(matching[:limit], job_bytes, most=limit), [])
        more = len(matching) > len(jobs)
        return Page(
            jobs=jobs, cursor=_cursor(place(jobs[-1])) if more else None, looked=len(matching)
        )

    def _matches(self, job: Job, query: Query) -> bool:
        return (
            (query.state is None or job.state is query.state)
            and (query.queue is None or job.queue == query.queue)
            and (query.task is None or job.task == query.task)
            and query.has_meta(job)
            and query.in_time(job)
        )

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        of_state = Query(state=slots.state, queue=slots.queue)
        with self._lock:
            times = [time_ms(job) for job in self._jobs.values() if self._matches(job, of_state)]
        counts = Counter((ms - slots.start_ms) // slots.width_ms for ms in times)
        return SlotCounts(
            before=sum(counts[slot] for slot in counts if slot < 0),
            counts=[counts[slot] for slot in range(slots.count)],
            after=sum(counts[slot] for slot in counts if slot >= slots.count),
        )

    async def parked(self) -> list[Job]:
        with self._lock:
            parked = sorted(filter(lambda job: job.parked, self._jobs.values()), key=_due_ms)
        first: dict[_Line, Job] = {}
        for job in parked:
            first.setdefault((job.queue, job.task), job)
        return list(first.values())[:PARKED_LIMIT]

    async def queues(self) -> list[QueueInfo]:
        with self._lock:
            return [
                QueueInfo(
                    name=name,
                    paused=name in self._paused,
                    **{state.value: self._counts.get(name, Counter())[state] for state in State},
                )
                for name in sorted(self._paused | {q for q, n in self._counts.items() if n.total()})
            ]

    async def pause(self, queue: str, paused: bool) -> None:
        with self._lock:
            (self._paused.add if paused else self._paused.discard)(queue)
            self._waiters.notify()

    async def beat(self, worker: WorkerInfo) -> None:
        with self._lock:
            if worker.gone_after_ms:
                self._workers[worker.name] = worker
            else:
                self._workers.pop(worker.name, None)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        with self._lock:
            alive = (w for w in self._workers.values() if w.seen_ms + w.gone_after_ms > now_ms)
            return sorted(alive, key=lambda worker: worker.name)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        with self._lock:
            self._buckets[key], wait_ms = admit(self._buckets.get(key), rate, now_ms)
        return wait_ms

    async def durability(self) -> Durability:
        return Durability(
            process_crash=False,
            power_loss=False,
            machine_loss=False,
            summary="jobs are in the memory of this process and end with it",
            fixes=("use sqlite:///jobs.db to keep jobs on disk",),
        )

    async def findings(self) -> list[Finding]:
        return []

    async def sizes(self) -> list[Size]:
        return [Size("All jobs", len(self._jobs), "jobs")]


def _due_ms(job: Job) -> int:
    return job.due_ms


# --- Pages

_Place = tuple[int | str, ...]
_AFTER = "after:"
_places = msgspec.json.Decoder(tuple[int | str, ...])
_ANY_JOB = Job(id="", task="", payload="", due_ms=0, created_ms=0)


def _place(job: Job) -> _Place:
    return (job.id,)


def _place_in_time(job: Job) -> _Place:
    """By state: the next due first, or the last that ended."""
    ended = job.ended_ms is not None
    return list(State).index(job.state), -time_ms(job) if ended else time_ms(job), job.id


def _cursor(place: _Place) -> str:
    return _AFTER + msgspec.json.encode(place).decode()


def _parsed(cursor: str, parts: int) -> _Place:
    kinds = (str,) if parts == 1 else (int, int, str)
    try:
        fits = cursor.startswith(_AFTER) and len(cursor) <= CURSOR_LIMIT
        place = _places.decode(cursor.removeprefix(_AFTER) if fits else "")
    except (msgspec.DecodeError, ValueError):
        raise not_a_cursor(cursor) from None
    if tuple(map(type, place)) != kinds:
        raise not_a_cursor(cursor)
    return place
