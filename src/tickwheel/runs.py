"""The runs of one worker: started on time, stopped when they must be, settled once.

    wheel ──due──► ready ──slot──► run ──► settle
    (held, not due)   (by priority)

Only this module moves jobs through the hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tickwheel.attempt import Runner, timeout_ms
from tickwheel.batch import Batcher
from tickwheel.clock import MS_NS, S_NS, StoreClock
from tickwheel.contact import Contact
from tickwheel.errors import UnknownTask
from tickwheel.hand import Hand, Held, Stop
from tickwheel.job import Job, Outcome, Settlement, handed_back, release
from tickwheel.retry import RetryPolicy, decide
from tickwheel.store import Store, settlement_bytes
from tickwheel.tasks import Pool, Tasks
from tickwheel.wheel import TimingWheel

log = logging.getLogger("tickwheel")

# A job that is due but finds no slot for this long goes back, for a worker that has one.
PATIENCE_MS = 1_000
# So long it then leaves claiming to them.
ABSTAIN_S = 0.1
# An async task that ignores its cancellation for this long is left behind.
STUBBORN_S = 5.0
# No timer is set for sooner: the sum of a late hour and a few nanoseconds is that hour again.
SOONEST_S = 0.000_01
POOLS: tuple[Pool, ...] = ("async", "thread", "process")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works; every number has a unit in its name."""

    queues: Sequence[str]
    # Jobs that run at the same time.
    concurrency: int = 100
    # How long a claim holds without being extended: a dead worker's jobs are back after that.
    lease_ms: int = 15_000
    # How long running jobs may take to finish once the worker is asked to stop.
    grace_ms: int = 30_000
    # A job that was lost with its worker this often in a row is dead: it is what kills them.
    takeovers: int = 5
    # Child processes for tasks with pool="process".
    processes: int = field(default_factory=lambda: os.cpu_count() or 1)
    # Claimed jobs that wait in memory for their moment, and what their arguments may take up.
    hold: int = 10_000
    hold_bytes: int = 256 * 1024 * 1024
    # How long ended jobs are kept.
    retention_ms: int = 7 * 86_400_000
    dead_retention_ms: int = 90 * 86_400_000
    result_limit: int = 1024 * 1024


class Runs:
    """Everything that a worker holds and runs."""

    def __init__(
        self,
        worker: str,
        store: Store,
        tasks: Tasks,
        clock: StoreClock,
        contact: Contact,
        options: WorkerOptions,
        *,
        ending: Callable[[], bool],
    ) -> None:
        """`ending` says whether the worker itself is being cancelled."""
        self._worker = worker
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._contact = contact
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.hand = Hand()
        # Runs that are not over, by job: also those that were left behind.
        self._alive: dict[str, asyncio.Task[None]] = {}
        # When runs have had their time, by the monotonic clock.
        self._deadlines: TimingWheel[Held] = TimingWheel()
        self._settling: Batcher[Settlement, bool] = Batcher(
            self._settle_all, weigh=settlement_bytes, lanes=store.lanes
        )
        self.runner = Runner(
            clock,
            threads=options.concurrency,
            processes=options.processes,
            result_limit=options.result_limit,
            lease_ms=options.lease_ms,
            ending=ending,
            freed=self._thread_came_back,
        )
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = 0.0
        # Nothing is started any more.
        self.stopping = asyncio.Event()
        self._closed = False
        # Set when a slot or a place in hand has become free.
        self.moved = asyncio.Event()
        # Set while due jobs find no slot, and while suspects wait for their trial.
        self._crowded = asyncio.Event()
        self.suspected = asyncio.Event()
        # While we leave what we have just handed back to others.
        self.abstaining = False
        self._started: Counter[Pool] = Counter()
        # How many runs have ended so far.
        self.ended = 0

    def close(self) -> None:
        """Leave no timer, run or thread behind."""
        self.stopping.set()
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for held in self.hand:
            if held.run is not None:
                # A thread may go on for a while, so its job is not handed back but left to its
                # lease.
                held.stop = Stop.LOST
                held.run.cancel()
        self.runner.close()

    def clock_was_set(self, step_ms: int) -> None:
        self.hand.shift_leases(step_ms)
        self.rearm()

    def take(self, job: Job) -> None:
        """Hold a job that was just claimed."""
        before = self.hand.get(job.id)
        if before is not None and before.run is not None and before.stop is None:
            # Its lease ran out unnoticed and nobody else took it: the run that goes on here is the
            # one that the new claim is for.
            log.warning("job %s (%s): its lease ran out, it was claimed again", job.id, job.task)
            before.job = job
            return
        held = Held(job, self._tasks.find(job.task))
        if job.history:
            since_ms = self._clock.now_ms() - PATIENCE_MS
            held.declined = handed_back(job, by=self._worker, since_ms=since_ms)
        self.hand.take(held)

    # --- Start

    def tick(self) -> None:
        """Start what is due, stop what has run too long, and set the timer for the next of both."""
        for held in self._deadlines.advance(self._clock.monotonic_ms()):
            self.stop(held, Stop.TIMEOUT)
        self.hand.fall_due(self._clock.now_ms())
        self.fill_slots()
        self._arm()

    def _arm(self) -> None:
        due_ms, ends_ms = self.hand.next_due_ms(), self._deadlines.next_ms()
        delays_s = []
        if due_ms is not None:
            delays_s.append((due_ms * MS_NS - self._clock.now_ns()) / S_NS)
        if ends_ms is not None:
            delays_s.append((ends_ms * MS_NS - self._clock.monotonic_ns()) / S_NS)
        if not delays_s:
            return
        at_s = self._loop.time() + max(min(delays_s), SOONEST_S)
        if self._timer is not None:
            # One that rings too soon only sets itself again; that is cheaper than setting it for
            # every job that came and went.
            if self._timer_at_s <= at_s:
                return
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._rang)

    def _rang(self) -> None:
        self._timer = None
        self.tick()

    def rearm(self) -> None:
        """The timer was set by the clock as it was known before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._rang)
            self._timer_at_s = 0.0

    def fill_slots(self) -> None:
        hand = self.hand
        while (
            hand.crowd and hand.running < self._options.concurrency and not self.stopping.is_set()
        ):
            held = hand.next_ready(self.runner.has_room)
            if held is None:
                break
            self.start(held)
        if hand.crowd:
            self._crowded.set()
        if hand.suspects:
            self.suspected.set()

    def start(self, held: Held) -> None:
        now_ms = self._clock.now_ms()
        job = held.job
        if job.lease_until_ms is not None and job.lease_until_ms <= now_ms:
            # We stood still for too long; somebody else may have it by now.
            self.stop(held, Stop.LOST)
        elif job.due_ms > now_ms:
            # The clock was set back while it waited for a slot.
            self.hand.wait_again(held)
            self._arm()
        elif job.id in self._alive:
            self._start_after(self._alive[job.id], held)
        elif held.definition is None:
            held.started_ms = now_ms
            # A newer worker may know it: worth some patience, like any other failure.
            error = UnknownTask(self._tasks.unknown(job.task))
            self.settle(held, decide(job, error, RetryPolicy(), started_ms=now_ms, ended_ms=now_ms))
        else:
            self.hand.start(held, now_ms)
            if held.pool != "async":
                self.runner.promise(held)
            self._started[held.pool] += 1
            name = f"{job.task} {job.id}"
            held.run = self._alive[job.id] = self._loop.create_task(self._run(held), name=name)

    def _start_after(self, other: asyncio.Task[None], held: Held) -> None:
        """An earlier attempt, which lost its lease, still winds up here: never two at once. Should
        it take long, another worker can have the job."""
        other.add_done_callback(lambda _: self._start_again(held))
        self._loop.call_later(PATIENCE_MS / 1000, self._hand_back_unless_started, held)

    def _start_again(self, held: Held) -> None:
        if self.waits(held):
            self.hand.make_ready(held, self._clock.now_ms())
            self.fill_slots()

    def _hand_back_unless_started(self, held: Held) -> None:
        if self.waits(held):
            self.hand_back(held)

    def waits(self, held: Held) -> bool:
        return self.hand.get(held.job.id) is held and held.started_ms is None and held.stop is None

    def hand_back(self, held: Held) -> None:
        """Give a job back that can't start here now. We leave it to others for a moment; if there
        were none that could start it, we let the jobs behind it have their turn first."""
        held.stop = Stop.RELEASE
        self.hand.withdraw(held)
        now_ms = self._clock.now_ms()
        due_ms = held.job.due_ms
        if held.declined:
            due_ms = max(due_ms, now_ms + self._store.ahead_ms + PATIENCE_MS)
        elif not self.abstaining:
            self.abstaining = True
            self._loop.call_later(ABSTAIN_S, self._abstain_no_more)
        self.settle(held, release(held.job, ended_ms=now_ms, due_ms=due_ms))

    def _abstain_no_more(self) -> None:
        self.abstaining = False
        self.moved.set()

    async def _run(self, held: Held) -> None:
        run = held.run
        assert held.definition is not None and run is not None
        held.begun = True
        try:
            settlement = await self.runner.attempt(
                held, held.definition, began=lambda: self._limit(held)
            )
        except GeneratorExit as error:
            # One that comes from a thread closes the attempt, instead of being raised in it.
            settlement = self.runner.raised(held, held.definition, error)
        finally:
            self._over(held, run)
        self._ended(held, settlement)

    def _over(self, held: Held, run: asyncio.Task[None]) -> None:
        """Nothing of the run goes on any more."""
        if held.pool != "async":
            self.runner.keep_no_place(held)
        if self._alive.get(held.job.id) is run:
            del self._alive[held.job.id]

    def _limit(self, held: Held) -> None:
        """From here on the run has as much time as its timeout says."""
        assert held.definition is not None
        limit_ms = timeout_ms(held.job, held.definition)
        if limit_ms is not None and held.run is not None:
            ends_ms = self._clock.monotonic_ms() + limit_ms
            self._deadlines.add(held, ends_ms)
            if self._timer is None or self._timer_at_s > self._loop.time() + limit_ms / 1000:
                self._arm()

    def _ended(self, held: Held, settlement: Settlement) -> None:
        """A run is over, or is left behind: free its slot and settle the job, once."""
        if held.run is None:
            return
        held.run = None
        self._deadlines.remove(held)
        self.hand.end(held)
        self.ended += 1
        self.moved.set()
        self.settle(held, settlement)
        self.fill_slots()

    def _thread_came_back(self) -> None:
        """A thread that was left behind is free again, and all others were busy."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.fill_slots)

    # --- Stop

    def stop(self, held: Held, why: Stop) -> None:
        """End a job before its time. One that has not started goes back at once."""
        if not _counts(why, held):
            return
        held.stop = why
        job = held.job
        if why is Stop.LOST:
            log.warning("job %s (%s) is no longer ours: its lease ran out", job.id, job.task)
        if held.run is None:
            self.hand.withdraw(held)
            if why is Stop.LOST:
                self._forget(held)
            elif held.started_ms is None:
                self.settle(held, release(job, ended_ms=self._clock.now_ms()))
            return
        self._interrupt(held, why)

    def _interrupt(self, held: Held, why: Stop) -> None:
        assert held.run is not None and held.definition is not None
        if held.definition.pool == "thread":
            # A thread can't be ended. Its task may look at `stopping`; where the slot matters more
            # than the outcome, the slot moves on without it.
            if why in (Stop.ASKED, Stop.RELEASE):
                return
            log.warning("job %s (%s): %s; its thread goes on", held.job.id, held.job.task, why)
            if why is Stop.LOST:
                # Not cancelled, so that we know when it ends: until then it isn't started again.
                self._ended(held, self.runner.stopped(held, held.definition))
                return
        if not held.interrupted:
            held.interrupted = True
            held.run.cancel()
            if held.begun:
                self._loop.call_later(STUBBORN_S, self._leave_behind, held)
            else:
                # It was to begin in this very turn of the loop, and never will.
                self._over(held, held.run)
                self._ended(held, self.runner.stopped(held, held.definition))

    def _leave_behind(self, held: Held) -> None:
        if held.run is None:
            return
        assert held.definition is not None
        log.error("job %s (%s) ignores its cancellation; left behind", held.job.id, held.job.task)
        self._ended(held, self.runner.stopped(held, held.definition))

    async def leave_threads_behind(self) -> None:
        """Hand back what runs in threads that don't end: the worker does."""
        for held in self.hand:
            if held.run is not None:
                held.interrupted = True
                held.run.cancel()
        await self.until_none_runs(1)

    async def until_none_runs(self, timeout_s: float, *, threads: bool = True) -> None:
        runs = [
            held.run
            for held in self.hand
            if held.run is not None
            and held.definition is not None
            and (threads or held.definition.pool != "thread")
        ]
        if runs:
            await asyncio.wait(runs, timeout=timeout_s)

    async def settled(self) -> None:
        """Wait until every outcome that was handed over is written."""
        await self._settling.drained()

    async def give_back_what_waits(self) -> None:
        """Hand back what has waited too long for a slot, for workers that have one."""
        await self._crowded.wait()
        self._crowded.clear()
        before = self._started.copy()
        await asyncio.sleep(PATIENCE_MS / 1000)
        since_ms = self._clock.now_ms() - PATIENCE_MS
        kept: Counter[Pool] = Counter()
        for held in sorted(self.hand.unstarted(ready_before_ms=since_ms), key=_by_turn):
            if held.suspect:
                continue
            if self.runner.has_room(held.pool):
                self.stop(held, Stop.RELEASE)
            elif kept[held.pool] < self._wanted(held, self._started - before):
                kept[held.pool] += 1
            else:
                self.hand_back(held)
        if self.hand.crowd:
            self._crowded.set()

    def _wanted(self, held: Held, started: Counter[Pool]) -> int:
        """How many jobs a full pool keeps beside those that run: what it will start until what it
        hands back could be here again. `started` is of the last second."""
        size = self._options.processes if held.pool == "process" else 0
        return size + (3 * started[held.pool] if held.declined else started[held.pool] // 3)

    # --- Settle

    def settle(self, held: Held, settlement: Settlement) -> None:
        if held.stop is Stop.LOST:
            self._forget(held)
            return
        held.settling = True
        self._write(held, settlement)

    def _write(self, held: Held, settlement: Settlement) -> None:
        self._settling.submit(settlement).add_done_callback(
            lambda answer: self._settled(held, settlement, answer)
        )

    def _settled(self, held: Held, settlement: Settlement, answer: asyncio.Future[bool]) -> None:
        if answer.cancelled() and held.settling and not self._closed:
            # Everything on the loop was cancelled, and the one who writes with it: once more.
            held.settling = False
            self._write(held, settlement)
            return
        error = None if answer.cancelled() else answer.exception()
        if error is not None:
            log.error(
                "job %s (%s): the store could not keep its outcome, so it runs again: %r",
                held.job.id,
                held.job.task,
                error,
            )
        elif not answer.cancelled() and not answer.result():
            log.warning(
                "job %s (%s): the outcome %r came too late, its lease had run out",
                held.job.id,
                held.job.task,
                str(settlement.outcome),
            )
        else:
            log.debug("job %s (%s): %s", held.job.id, held.job.task, settlement.outcome)
        if settlement.outcome is Outcome.DEAD:
            log.error("job %s (%s) is dead: %s", held.job.id, held.job.task, settlement.error)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self.hand.drop(held)
        self.moved.set()

    async def _settle_all(self, settlements: Sequence[Settlement]) -> Sequence[bool]:
        """Write outcomes; while the store is away, keep trying for as long as a lease holds."""
        answers = await self._contact.insist(
            lambda: self._store.settle(settlements, now_ms=self._clock.now_ms()),
            while_=lambda: self._any_lease_holds(settlements),
        )
        return [False] * len(settlements) if answers is None else answers

    def _any_lease_holds(self, settlements: Sequence[Settlement]) -> bool:
        now_ms = self._clock.now_ms()
        return any((each.job.lease_until_ms or 0) > now_ms for each in settlements)


def _counts(why: Stop, held: Held) -> bool:
    """Whether a further reason to stop changes anything: a stronger one does, and a run that was
    interrupted for one reason is not interrupted for another."""
    if held.stop is None or why is Stop.LOST:
        return held.stop is not Stop.LOST
    return not held.interrupted and _STRENGTH[why] > _STRENGTH[held.stop]


_STRENGTH = {Stop.RELEASE: 1, Stop.ASKED: 2, Stop.TIMEOUT: 3, Stop.LOST: 4}


def _by_turn(held: Held) -> tuple[int, int]:
    return -held.job.priority, held.job.due_ms
