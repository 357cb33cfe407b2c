"""`memory://`: jobs in a dict, found by the wheel. For tests, for throw-away work, and as the
plainest statement of the contract.

One lock makes every step atomic, so handles may be used from several threads and event loops.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Sequence

import msgspec

from tickwheel import job as life
from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.clock import Clock, SystemClock, moved_ms, wall_ns
from tickwheel.errors import BadConfig
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import Durability, Finding, Page, Query, QueueInfo, WorkerInfo, job_bytes
from tickwheel.throttle import Rate, admit
from tickwheel.wheel import TimingWheel

_Entry = tuple[int, int, str]


class MemoryStore:
    """Keeps the contract for as long as the process lives."""

    lanes = 1
    own_clock = True

    def __init__(self, *, clock: Clock | None = None, ahead_ms: int = 1000) -> None:
        self.ahead_ms = ahead_ms
        self._clock = clock or SystemClock()
        # The clock as it was last looked at: see `wall_ns`.
        self._seen_ns: int | None = None
        # One that a thread may take twice: a wait whose loop was closed under it ends as garbage,
        # whenever that is collected.
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        # When each job next matters: its due time while waiting, its lease's end while running.
        self._due: TimingWheel[str] = TimingWheel()
        self._leases: TimingWheel[str] = TimingWheel()
        # What has become claimable, by queue: (-priority, order, id). An entry is live while
        # `_place` still has its order; any change of the job makes it stale.
        self._ready: dict[str, list[_Entry]] = {}
        self._place: dict[str, int] = {}
        self._order = itertools.count()
        self._paused: set[str] = set()
        self._counts: dict[str, Counter[State]] = {}
        self._schedules: dict[str, Schedule] = {}
        self._workers: dict[str, WorkerInfo] = {}
        self._buckets: dict[str, int] = {}
        self._waiters: set[_Waiter] = set()

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> MemoryStore:
        if url != "memory://":
            raise BadConfig(f"{url!r}: memory:// takes neither a name nor options")
        return cls(clock=clock)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def twin(self) -> MemoryStore:
        return self

    async def time_ns(self) -> int:
        return self._clock.now_ns()

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        with self._lock:
            added = [self._add(job) for job in jobs]
            self._wake()
        return added

    def _add(self, job: Job) -> bool:
        if job.id in self._jobs:
            return False
        self._put(life.added(job))
        return True

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        with self._lock:
            self._follow_clock()
            self._collect(now_ms)
            jobs = [self._jobs[id] for id in self._take(queues, limit, now_ms)]
            fence = life.new_fence()
            taken = [
                life.claimed(job, worker=worker, fence=fence, now_ms=now_ms, lease_ms=lease_ms)
                for job in jobs
            ]
            for job in taken:
                self._put(job)
        return taken

    def _follow_clock(self) -> None:
        """A lease is a span of time: where the clock was set, its end is another moment now."""
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
        order = self._place[job.id] = next(self._order)
        heapq.heappush(self._ready.setdefault(job.queue, []), (-job.priority, order, job.id))

    def _take(self, queues: Sequence[str], limit: int, now_ms: int) -> list[str]:
        """The ids to hand out, best first."""
        heaps = [self._ready[queue] for queue in self._open(queues)]
        taken: list[str] = []
        total = 0
        too_soon: list[tuple[list[_Entry], _Entry]] = []
        while len(taken) < limit and (heap := min(filter(None, heaps), default=None)):
            entry = heapq.heappop(heap)
            if not self._live(entry):
                continue
            job = self._jobs[entry[2]]
            # The clock of this caller may be behind that of the one who made the entry.
            if self._claimable_ms(job) > now_ms:
                too_soon.append((heap, entry))
            elif job.asked:
                self._put(life.cancelled(job, now_ms=now_ms))
            elif taken and total + job_bytes(job) > BATCH_BYTES:
                heapq.heappush(heap, entry)
                break
            else:
                taken.append(entry[2])
                total += job_bytes(job)
        for heap, entry in too_soon:
            heapq.heappush(heap, entry)
        return taken

    def _open(self, queues: Sequence[str]) -> list[str]:
        return [q for q in dict.fromkeys(queues) if q in self._ready and q not in self._paused]

    def _live(self, entry: _Entry) -> bool:
        return self._place.get(entry[2]) == entry[1]

    def _claimable_ms(self, job: Job) -> int:
        return job.lease_until_ms or job.due_ms - self.ahead_ms

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        with self._lock:
            self._follow_clock()
            return [self._extend(job, now_ms, lease_ms) for job in jobs]

    def _extend(self, job: Job, now_ms: int, lease_ms: int) -> Job | None:
        current = self._jobs.get(job.id)
        if current is None or current.fence != job.fence or not life.held(current, now_ms=now_ms):
            return None
        longer = msgspec.structs.replace(
            current, lease_until_ms=now_ms + lease_ms, started_ms=job.started_ms
        )
        self._put(longer)
        return longer

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        with self._lock:
            self._follow_clock()
            answers = [self._settle(settlement, now_ms) for settlement in settlements]
            self._wake()
        return answers

    def _settle(self, settlement: Settlement, now_ms: int) -> bool:
        job = settlement.job
        current = self._jobs.get(job.id)
        if current is None:
            return False
        if current.settled == job.fence:
            return True
        if current.fence != job.fence or not life.held(current, now_ms=now_ms):
            return False
        self._put(life.settled(current, settlement))
        return True

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        with self._lock:
            self._follow_clock()
            answers = [self._cancel(id, now_ms) for id in ids]
            self._wake()
        return answers

    def _cancel(self, id: str, now_ms: int) -> Cancelled:
        job = self._jobs.get(id)
        if job is None:
            return Cancelled.UNKNOWN
        if job.state.ended:
            return Cancelled.TOO_LATE
        if life.held(job, now_ms=now_ms):
            self._put(msgspec.structs.replace(job, asked=True))
            return Cancelled.ASKED
        self._put(life.cancelled(job, now_ms=now_ms))
        return Cancelled.CANCELLED

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        with self._lock:
            answers = [self._rerun(id, now_ms) for id in ids]
            self._wake()
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
        counts = self._counts.setdefault(job.queue, Counter())
        if before is not None:
            counts[before.state] -= 1
            self._due.remove(job.id)
            self._leases.remove(job.id)
            self._place.pop(job.id, None)
        counts[job.state] += 1
        self._jobs[job.id] = job
        if job.state is State.WAITING:
            self._due.add(job.id, job.due_ms)
        elif job.state is State.RUNNING:
            assert job.lease_until_ms is not None
            self._leases.add(job.id, job.lease_until_ms)

    # --- Waiting

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        waiter = _Waiter()
        with self._lock:
            next_ms = self._next_ms(queues, now_ms)
            self._waiters.add(waiter)
        try:
            await waiter.until((until_ms if next_ms is None else min(next_ms, until_ms)) - now_ms)
        finally:
            with self._lock:
                self._waiters.discard(waiter)

    def _next_ms(self, queues: Sequence[str], now_ms: int) -> int | None:
        self._collect(now_ms)
        moments = []
        for heap in (self._ready[queue] for queue in self._open(queues)):
            while heap and not self._live(heap[0]):
                heapq.heappop(heap)
            if heap:
                moments.append(self._claimable_ms(self._jobs[heap[0][2]]))
        due, lease = self._due.next_ms(), self._leases.next_ms()
        moments += [due - self.ahead_ms] if due is not None else []
        moments += [lease] if lease is not None else []
        return min(moments, default=None)

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        waiter = _Waiter()
        with self._lock:
            if ids := self._asked_of(worker):
                return ids
            self._waiters.add(waiter)
        try:
            await waiter.until(until_ms - now_ms)
        finally:
            with self._lock:
                self._waiters.discard(waiter)
        with self._lock:
            return self._asked_of(worker)

    def _asked_of(self, worker: str) -> list[str]:
        return [
            job.id
            for job in self._jobs.values()
            if job.asked and job.worker == worker and job.state is State.RUNNING
        ]

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if not waiter.wake():
                self._waiters.discard(waiter)

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        with self._lock:
            stored = msgspec.structs.replace(schedule, fence=next(self._order) + 1)
            self._schedules[schedule.name] = stored
            self._wake()
        return stored

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
            self._wake()
        return True

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        with self._lock:
            return [self._jobs.get(id) for id in ids]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Sorts all jobs for each page: fit for tests, where jobs are few."""
        with self._lock:
            matching = [
                id for id in sorted(self._jobs) if id > (cursor or "") and self._matches(id, query)
            ]
            jobs = [self._jobs[id] for id in matching[:limit]]
        jobs = next(portions(jobs, job_bytes, most=limit), [])
        return Page(jobs=jobs, cursor=jobs[-1].id if len(matching) > len(jobs) else None)

    def _matches(self, id: str, query: Query) -> bool:
        job = self._jobs[id]
        return (
            (query.state is None or job.state is query.state)
            and (query.queue is None or job.queue == query.queue)
            and (query.task is None or job.task == query.task)
        )

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
            self._wake()

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
            summary="jobs live in this process alone and end with it",
            fixes=("use sqlite:///jobs.db to keep jobs on disk",),
        )

    async def findings(self) -> list[Finding]:
        return []


class _Waiter:
    """Lets one event loop wait for news from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def wake(self) -> bool:
        """False where nobody waits any more: the loop was closed under it."""
        try:
            self._loop.call_soon_threadsafe(self._news.set)
        except RuntimeError:
            return False
        return True

    async def until(self, ms: int) -> None:
        try:
            async with asyncio.timeout(max(ms, 0) / 1000):
                await self._news.wait()
        except TimeoutError:
            pass
