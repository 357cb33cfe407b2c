"""The worker: claim what is due soon, start it on time, settle how it went.

    claim ──► wheel ──due──► ready ──slot──► run ──► settle
              (held, not due)   (by priority)

Only this module moves jobs through the hand. Everything in it may be lost at any moment: the store
has all of it, and the leases tell others when to take over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from tickwheel.attempt import Runner, timeout_ms
from tickwheel.batch import Batcher
from tickwheel.clock import MS_NS, S_NS, Clock, StoreClock, first_of
from tickwheel.contact import Contact
from tickwheel.errors import UnknownTask
from tickwheel.hand import Hand, Held, Stop
from tickwheel.job import Job, Outcome, Settlement, State, handed_back, losses, release
from tickwheel.keeper import PARTS, Guard, Keeper
from tickwheel.retry import RetryPolicy, decide
from tickwheel.schedule import Rule
from tickwheel.scheduler import Scheduler
from tickwheel.span import span_text
from tickwheel.store import Store, WorkerInfo
from tickwheel.tasks import Pool, Tasks
from tickwheel.version import __version__
from tickwheel.wheel import TimingWheel

log = logging.getLogger("tickwheel")

# A wait for work ends after this long at the latest, whatever the store forgot to say.
IDLE_MS = 5_000
# A job that is due but finds no slot for this long goes back, for a worker that has one.
PATIENCE_MS = 1_000
# So long it then leaves claiming to them.
ABSTAIN_S = 0.1
# An async task that ignores its cancellation for this long is left behind.
STUBBORN_S = 5.0
# What a worker that is cancelled, rather than stopped, may take to hand back its jobs.
HURRY_S = 2.0
# A suspect runs alone for this long at most, and is on trial for this long; before that, what runs
# is given a moment to end.
QUIET_S, ALONE_S, TRIAL_S = 2.0, 10.0, 60.0
# The store's clock is asked again this often, and at once when ours was set.
MEASURE_S = 5.0
# No timer is set for sooner: the sum of a late hour and a few nanoseconds is that hour again.
SOONEST_S = 0.000_01
POOLS: tuple[Pool, ...] = ("async", "thread", "process")
PRUNE_EVERY_S = 60.0
PRUNE_BATCH = 1_000


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


class Worker:
    """Runs jobs until it is told to stop."""

    def __init__(
        self,
        store: Store,
        tasks: Tasks,
        clock: StoreClock,
        own_clock: Clock,
        options: WorkerOptions,
        *,
        schedules: Mapping[str, Rule] | None = None,
        guarded: bool = True,
    ) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._store = store
        self._tasks = tasks
        self._clock = clock
        self._own_clock = own_clock
        self._options = options
        self._guarded = guarded
        self._loop = asyncio.get_running_loop()
        self._hand = Hand()
        # Runs that are not over, by job: also those that were left behind.
        self._alive: dict[str, asyncio.Task[None]] = {}
        # When runs are to be stopped, by the monotonic clock.
        self._deadlines: TimingWheel[Held] = TimingWheel()
        self._contact = Contact(clock)
        self._scheduler = Scheduler(
            store, tasks, clock, self._contact, schedules or {}, worker=self.name
        )
        self._settling: Batcher[Settlement, bool] = Batcher(self._settle_all, lanes=store.lanes)
        self._runner = Runner(
            clock,
            threads=options.concurrency,
            processes=options.processes,
            result_limit=options.result_limit,
            ending=self._ending,
            freed=self._thread_came_back,
        )
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = 0.0
        self._task: asyncio.Task[Any] | None = None
        self._stopping = asyncio.Event()
        self._gone = False
        # Set when a slot or a place in hand has become free.
        self._moved = asyncio.Event()
        # Set while due jobs find no slot.
        self._crowded = asyncio.Event()
        # Set while suspects wait to be run alone; the lock keeps claims out meanwhile.
        self._suspected = asyncio.Event()
        self._claiming = asyncio.Lock()
        self._quiet = False
        # While we leave what we have just handed back to others.
        self._abstaining = False
        self._ended_since_claim = 0
        # How many jobs ended between the last two claims.
        self._pace = 0
        self._started: Counter[Pool] = Counter()
        self._started_ms = clock.now_ms()

    # --- Life

    @property
    def running(self) -> int:
        """How many jobs run right now."""
        return self._hand.running

    def stop(self) -> None:
        """Claim no more, let running jobs finish within the grace, hand the rest back."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until `stop` is called."""
        chores: list[Callable[[], Awaitable[None]]] = [
            self._keeper().run,
            self._scheduler.run,
            self._heed_cancels,
            self._give_back_what_waits,
            self._try_a_suspect,
            self._stay_known,
            self._prune,
        ]
        self._task = asyncio.current_task()
        self._clock.on_step.append(self._clock_was_set)
        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(_forever(chore)) for chore in chores]
                if self._guarded:
                    with self._guard():
                        await self._work_and_wind_up()
                else:
                    await self._work_and_wind_up()
                for chore in running:
                    chore.cancel()
        except asyncio.CancelledError:
            # Somebody is in a hurry, but what can be handed back quickly need not wait for a lease.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HURRY_S):
                    await self._wind_up(grace_s=0)
            raise
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Whatever ended the worker, leave no timer, run or thread of it behind."""
        self._stopping.set()
        self._gone = True
        self._clock.on_step.remove(self._clock_was_set)
        if self._timer is not None:
            self._timer.cancel()
        for held in self._hand:
            if held.run is not None:
                # A thread may go on for a while, so its job is not handed back but left to its
                # lease.
                held.stop = Stop.LOST
                held.run.cancel()
        self._runner.close()

    async def _work_and_wind_up(self) -> None:
        while not self._stopping.is_set():
            room = self._room()
            claimed = await self._claim(room)
            if claimed < room or not room:
                await self._wait_for_work(room)
        await self._wind_up(grace_s=self._options.grace_ms / 1000)

    def _ending(self) -> bool:
        """Whether a run that is cancelled now ends with the worker, and not by itself."""
        return self._stopping.is_set() or (self._task is not None and self._task.cancelling() > 0)

    def _clock_was_set(self, step_ms: int) -> None:
        way = "forward" if step_ms > 0 else "back"
        log.warning("the clock was set %s by %s", way, span_text(abs(step_ms)))
        self._hand.shift_leases(step_ms)
        self._rearm()

    def _keeper(self) -> Keeper:
        return Keeper(
            self._store,
            self._hand,
            self._clock,
            self._contact,
            lease_ms=self._options.lease_ms,
            stop=self._stop,
        )

    def _guard(self) -> Guard:
        return Guard(
            self._store,
            self._hand,
            self._clock,
            self._own_clock,
            lease_ms=self._options.lease_ms,
            tasks=self._codes,
        )

    def _codes(self) -> dict[CodeType, str]:
        return {
            definition.function.__code__: definition.name
            for definition in self._tasks.all()
            if hasattr(definition.function, "__code__")
        }

    # --- Claim

    def _room(self) -> int:
        """How many jobs to claim: what can start now, and twice what ends between two claims.

        The second part keeps the slots of a fast worker busy while this claim is under way and the
        next one; a slow worker ends little meanwhile, so it takes little, and idle ones get the
        work. Jobs of a pool that is full don't count, up to as many as there are slots: others may
        stand behind them.
        """
        hand, slots = self._hand, self._options.concurrency
        if hand.bytes > self._options.hold_bytes or self._abstaining:
            return 0
        ready = blocked = 0
        for pool in POOLS:
            if self._runner.has_room(pool):
                ready += hand.ready(pool)
            else:
                blocked += hand.ready(pool)
        free = slots - hand.running - ready - max(blocked - slots, 0)
        pace = max(self._pace, self._ended_since_claim)
        return max(0, min(free + 2 * pace, self._options.hold - len(hand)))

    async def _claim(self, room: int) -> int:
        if not room:
            return 0
        self._pace, self._ended_since_claim = self._ended_since_claim, 0
        async with self._claiming:
            if self._stopping.is_set():
                return 0
            jobs = await self._contact.insist(
                lambda: self._store.claim(
                    self._options.queues,
                    worker=self.name,
                    limit=room,
                    now_ms=self._clock.now_ms(),
                    lease_ms=self._options.lease_ms,
                ),
                while_=lambda: not self._stopping.is_set(),
            )
            for job in jobs or ():
                self._take(job)
        if jobs:
            self._tick()
        return len(jobs or ())

    def _take(self, job: Job) -> None:
        before = self._hand.get(job.id)
        if before is not None and before.run is not None and before.stop is None:
            # Its lease ran out unnoticed and nobody else took it: the run that goes on here is the
            # one that the new claim is for.
            log.warning("job %s (%s): its lease ran out, it was claimed again", job.id, job.task)
            before.job = job
            return
        held = Held(job, self._tasks.find(job.task))
        since_ms = self._clock.now_ms() - PATIENCE_MS
        held.declined = handed_back(job, by=self.name, since_ms=since_ms)
        self._hand.take(held)

    async def _wait_for_work(self, room: int) -> None:
        """Wait until a claim makes sense again: for work if there is room, for room if not."""
        self._moved.clear()
        waiting: Awaitable[object]
        if room:
            now_ms = self._clock.now_ms()
            waiting = self._contact.insist(
                lambda: self._store.wait(
                    self._options.queues, now_ms=now_ms, until_ms=now_ms + IDLE_MS
                ),
                while_=lambda: False,
            )
        else:
            waiting = self._moved.wait()
        await first_of(waiting, self._stopping.wait(), timeout_s=IDLE_MS / 1000)

    # --- Start

    def _tick(self) -> None:
        """Start what is due, stop what has run too long, and set the timer for the next of both."""
        for held in self._deadlines.advance(self._clock.monotonic_ms()):
            self._stop(held, Stop.TIMEOUT)
        self._hand.fall_due(self._clock.now_ms())
        self._fill_slots()
        self._arm()

    def _arm(self) -> None:
        due_ms, ends_ms = self._hand.next_due_ms(), self._deadlines.next_ms()
        delays_s = []
        if due_ms is not None:
            delays_s.append((due_ms * MS_NS - self._clock.now_ns()) / S_NS)
        if ends_ms is not None:
            delays_s.append((ends_ms * MS_NS - self._own_clock.monotonic_ns()) / S_NS)
        if not delays_s:
            return
        at_s = self._loop.time() + max(min(delays_s), SOONEST_S)
        if self._timer is not None:
            # One that rings too soon only sets itself again; that is cheaper than to set it anew
            # for every job that came and went.
            if self._timer_at_s <= at_s:
                return
            self._timer.cancel()
        self._timer_at_s = at_s
        self._timer = self._loop.call_at(at_s, self._rang)

    def _rang(self) -> None:
        self._timer = None
        self._tick()

    def _rearm(self) -> None:
        """The timer was set by the clock as it was known before."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._rang)
            self._timer_at_s = 0.0

    def _fill_slots(self) -> None:
        while (
            self._hand.running < self._options.concurrency
            and not self._quiet
            and not self._stopping.is_set()
        ):
            held = self._hand.next_ready(self._runner.has_room)
            if held is None:
                break
            self._start(held)
        if any(self._hand.ready(pool) for pool in POOLS):
            self._crowded.set()
        if self._hand.suspects:
            self._suspected.set()

    def _start(self, held: Held) -> None:
        now_ms = self._clock.now_ms()
        job = held.job
        if job.lease_until_ms is not None and job.lease_until_ms <= now_ms:
            # We stood still for too long; somebody else may have it by now.
            self._stop(held, Stop.LOST)
        elif job.id in self._alive:
            self._start_after(self._alive[job.id], held)
        elif held.definition is None:
            held.started_ms = now_ms
            # A newer worker may know it: worth some patience, like any other failure.
            error = UnknownTask(self._tasks.unknown(job.task))
            self._settle(
                held, decide(job, error, RetryPolicy(), started_ms=now_ms, ended_ms=now_ms)
            )
        else:
            self._hand.start(held, now_ms)
            self._started[held.pool] += 1
            name = f"{job.task} {job.id}"
            held.run = self._alive[job.id] = self._loop.create_task(self._run(held), name=name)
            held.run.add_done_callback(lambda run: self._over(held, run))

    def _start_after(self, other: asyncio.Task[None], held: Held) -> None:
        """An earlier attempt, which lost its lease, still winds up here: never two at once. Should
        it take long, another worker can have the job."""
        other.add_done_callback(lambda _: self._start_again(held))
        self._loop.call_later(PATIENCE_MS / 1000, self._hand_back_unless_started, held)

    def _start_again(self, held: Held) -> None:
        if self._waits(held):
            self._hand.make_ready(held, self._clock.now_ms())
            self._fill_slots()

    def _hand_back_unless_started(self, held: Held) -> None:
        if self._waits(held):
            self._hand_back(held)

    def _waits(self, held: Held) -> bool:
        return self._hand.get(held.job.id) is held and held.started_ms is None and held.stop is None

    def _hand_back(self, held: Held) -> None:
        """Give a job back that can't start here now. We leave it to others for a moment; if there
        were none that could start it, we let the jobs behind it have their turn first."""
        held.stop = Stop.RELEASE
        self._hand.withdraw(held)
        now_ms = self._clock.now_ms()
        due_ms = held.job.due_ms
        if held.declined:
            due_ms = max(due_ms, now_ms + self._store.ahead_ms + PATIENCE_MS)
        elif not self._abstaining:
            self._abstaining = True
            self._loop.call_later(ABSTAIN_S, self._abstain_no_more)
        self._settle(held, release(held.job, ended_ms=now_ms, due_ms=due_ms))

    def _abstain_no_more(self) -> None:
        self._abstaining = False
        self._moved.set()

    async def _run(self, held: Held) -> None:
        assert held.definition is not None
        settlement = await self._runner.attempt(
            held, held.definition, began=lambda: self._limit(held)
        )
        self._ended(held, settlement)

    def _over(self, held: Held, run: asyncio.Task[None]) -> None:
        """The run is over, however it ended: it may have been cancelled before its first step."""
        if self._alive.get(held.job.id) is run:
            del self._alive[held.job.id]
        error = asyncio.CancelledError() if run.cancelled() else run.exception()
        if held.run is run:
            assert held.definition is not None and error is not None
            self._ended(held, self._runner.raised(held, held.definition, error))
        elif error is not None and not run.cancelled():
            log.error(
                "job %s (%s) could not be settled", held.job.id, held.job.task, exc_info=error
            )

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
        self._hand.end(held)
        self._ended_since_claim += 1
        self._moved.set()
        self._settle(held, settlement)
        self._fill_slots()

    def _thread_came_back(self) -> None:
        """A thread that was left behind is free again, and all others were busy."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._fill_slots)

    # --- Stop

    def _stop(self, held: Held, why: Stop) -> None:
        """End a job before its time. One that has not started goes back at once."""
        if not _counts(why, held):
            return
        held.stop = why
        job = held.job
        if why is Stop.LOST:
            log.warning("job %s (%s) is no longer ours: its lease ran out", job.id, job.task)
        if held.run is None:
            self._hand.withdraw(held)
            if why is Stop.LOST:
                self._forget(held)
            elif held.started_ms is None:
                self._settle(held, release(job, ended_ms=self._clock.now_ms()))
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
                self._ended(held, self._runner.stopped(held, held.definition))
                return
        if not held.interrupted:
            held.interrupted = True
            held.run.cancel()
            self._loop.call_later(STUBBORN_S, self._leave_behind, held)

    def _leave_behind(self, held: Held) -> None:
        if held.run is None:
            return
        assert held.definition is not None
        log.error("job %s (%s) ignores its cancellation; left behind", held.job.id, held.job.task)
        self._ended(held, self._runner.stopped(held, held.definition))

    async def _wind_up(self, *, grace_s: float) -> None:
        self._stopping.set()
        for held in self._hand.unstarted():
            self._stop(held, Stop.RELEASE)
        await self._until_none_runs(grace_s)
        for held in self._hand:
            if held.run is not None:
                self._stop(held, Stop.RELEASE)
        await self._until_none_runs(STUBBORN_S + 1, threads=False)
        await self._settling.drained()
        await self._contact.insist(
            lambda: self._store.beat(self._info(gone=True)), while_=lambda: False
        )

    async def _until_none_runs(self, timeout_s: float, *, threads: bool = True) -> None:
        runs = [
            held.run
            for held in self._hand
            if held.run is not None
            and held.definition is not None
            and (threads or held.definition.pool != "thread")
        ]
        if runs:
            await asyncio.wait(runs, timeout=timeout_s)

    # --- Settle

    def _settle(self, held: Held, settlement: Settlement) -> None:
        if held.stop is Stop.LOST:
            self._forget(held)
            return
        held.settling = True
        self._settling.submit(settlement).add_done_callback(
            lambda answer: self._settled(held, settlement, answer)
        )

    def _settled(self, held: Held, settlement: Settlement, answer: asyncio.Future[bool]) -> None:
        if answer.cancelled() and held.settling and not self._gone:
            # Everything on the loop was cancelled, and the one who writes with it: once more.
            held.settling = False
            self._settling.submit(settlement).add_done_callback(
                lambda answer: self._settled(held, settlement, answer)
            )
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
        self._hand.drop(held)
        self._moved.set()

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

    # --- Chores, each a loop of its own beside the work

    async def _heed_cancels(self) -> None:
        """Stop jobs as soon as somebody asks for it."""
        now_ms = self._clock.now_ms()
        ids = await self._contact.insist(
            lambda: self._store.asked(self.name, now_ms=now_ms, until_ms=now_ms + IDLE_MS),
            while_=lambda: True,
        )
        found = [self._hand.get(id) for id in ids or ()]
        for held in found:
            if held is not None:
                self._stop(held, Stop.ASKED)
        if found:
            # They stay asked until they are settled; that takes a moment, or as long as a thread.
            await asyncio.sleep(0.1)

    async def _give_back_what_waits(self) -> None:
        await self._crowded.wait()
        self._crowded.clear()
        before = self._started.copy()
        await asyncio.sleep(PATIENCE_MS / 1000)
        since_ms = self._clock.now_ms() - PATIENCE_MS
        # A full pool keeps as much as it will want before others could hand it more.
        keep = {pool: 3 * (self._started[pool] - before[pool]) for pool in POOLS}
        keep["process"] += self._options.processes
        waiting = self._hand.unstarted(ready_before_ms=since_ms)
        for held in sorted(waiting, key=_by_turn):
            if held.suspect:
                continue
            if self._runner.has_room(held.pool):
                self._stop(held, Stop.RELEASE)
            elif keep[held.pool] > 0:
                keep[held.pool] -= 1
            else:
                self._hand_back(held)
        if any(self._hand.ready(pool) for pool in POOLS):
            self._crowded.set()

    # --- Suspects: jobs that may be what kills their workers

    async def _try_a_suspect(self) -> None:
        """Start one such job beside nothing else, so that only the killer keeps being lost; then
        let the others have as long a turn."""
        await self._suspected.wait()
        held = self._hand.next_suspect()
        if held is None:
            self._suspected.clear()
            return
        times = losses(held.job)
        if times >= self._options.takeovers:
            reason = f"its worker died or froze {times} times; not run again"
            self._settle(held, self._runner.give_up(held, reason, failed=False))
            return
        began_s = self._loop.time()
        async with self._nothing_else():
            await self._put_on_trial(held)
        await self._until_over(held, TRIAL_S - ALONE_S)
        # Where it takes still longer, others have their trial: one at a time, or nobody would know
        # which of them it was.
        held.trial_ms = None
        self._hand_back_suspects()
        await asyncio.sleep(min(self._loop.time() - began_s, ALONE_S))

    @contextlib.asynccontextmanager
    async def _nothing_else(self) -> AsyncIterator[None]:
        """Claim nothing, start nothing and hold nothing but suspects. What runs is given a moment
        to end; what runs for longer has shown that it does no harm."""
        async with self._claiming:
            self._quiet = True
            try:
                for held in self._hand.unstarted():
                    if not held.suspect:
                        self._stop(held, Stop.RELEASE)
                await self._until_none_runs(QUIET_S)
                await self._settling.drained()
                yield
            finally:
                self._quiet = False
                self._moved.set()
        self._fill_slots()

    async def _put_on_trial(self, held: Held) -> None:
        """Tell the store that the job is about to start, and start it. If its worker is lost now,
        that counts."""
        if not self._waits(held) or self._stopping.is_set():
            return
        held.trial_ms = self._clock.now_ms()
        job = held.told()
        answer = await self._contact.insist(
            lambda: self._store.extend(
                [job], now_ms=self._clock.now_ms(), lease_ms=self._options.lease_ms
            ),
            while_=lambda: self._waits(held),
        )
        if not self._waits(held) or self._stopping.is_set():
            return
        if answer is None or answer[0] is None:
            self._stop(held, Stop.LOST)
            return
        held.job = answer[0]
        self._start(held)
        await self._until_over(held, ALONE_S)

    async def _until_over(self, held: Held, timeout_s: float) -> None:
        if held.run is not None and not self._stopping.is_set():
            over = asyncio.ensure_future(asyncio.wait([held.run]))
            await first_of(over, self._stopping.wait(), timeout_s=timeout_s)

    def _hand_back_suspects(self) -> None:
        """Those that have waited for long are for other workers, which may be idle."""
        before_ms = self._clock.now_ms() - int(ALONE_S * 1000)
        for held in self._hand.unstarted(ready_before_ms=before_ms):
            if held.suspect:
                self._hand_back(held)

    async def _stay_known(self) -> None:
        """Say that we live, and keep our idea of the store's clock fresh."""
        await self._contact.insist(lambda: self._store.beat(self._info()), while_=lambda: True)
        if self._clock.stale(MEASURE_S):
            await self._contact.insist(
                lambda: self._clock.measure(self._store.time_ns), while_=lambda: True
            )
            self._rearm()
        await asyncio.sleep(self._options.lease_ms / PARTS / 1000)

    def _info(self, *, gone: bool = False) -> WorkerInfo:
        return WorkerInfo(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            queues=tuple(self._options.queues),
            concurrency=self._options.concurrency,
            started_ms=self._started_ms,
            seen_ms=self._clock.now_ms(),
            gone_after_ms=0 if gone else self._options.lease_ms,
            held=len(self._hand),
            running=self._hand.running,
            offset_ms=self._clock.offset_ms,
            schedules=self._scheduler.declared,
        )

    async def _prune(self) -> None:
        """Forget jobs that ended long ago; any worker may do it, and all do."""
        now_ms = self._clock.now_ms()
        for states, keep_ms in (
            ((State.DONE, State.CANCELLED), self._options.retention_ms),
            ((State.DEAD,), self._options.dead_retention_ms),
        ):
            pruned: int | None = PRUNE_BATCH
            while pruned == PRUNE_BATCH:
                pruned = await self._contact.insist(
                    lambda states=states, keep_ms=keep_ms: self._store.prune(  # type: ignore[misc]
                        states, before_ms=now_ms - keep_ms, limit=PRUNE_BATCH
                    ),
                    while_=lambda: True,
                )
        await asyncio.sleep(PRUNE_EVERY_S)


def _counts(why: Stop, held: Held) -> bool:
    """Whether a further reason to stop changes anything: a stronger one does, and a run that was
    interrupted for one reason is not interrupted for another."""
    if held.stop is None or why is Stop.LOST:
        return held.stop is not Stop.LOST
    return not held.interrupted and _STRENGTH[why] > _STRENGTH[held.stop]


_STRENGTH = {Stop.RELEASE: 1, Stop.ASKED: 2, Stop.TIMEOUT: 3, Stop.LOST: 4}


def _by_turn(held: Held) -> tuple[int, int]:
    return -held.job.priority, held.job.due_ms


async def _forever(chore: Callable[[], Awaitable[None]]) -> None:
    while True:
        await chore()
