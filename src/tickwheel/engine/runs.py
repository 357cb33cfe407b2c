"""The runs of one worker: start them on time, stop them when needed, settle each once.

    wheel ──due──► ready ──slot──► run ──► settle
    (held, not due)   (by priority)

Only this module moves jobs through the hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from tickwheel.batch import Batcher
from tickwheel.clock import MS_NS, S_NS, StoreClock
from tickwheel.concurrency import in_this_context
from tickwheel.engine import batches
from tickwheel.engine.alarm import Alarm
from tickwheel.engine.attempt import Runner, timeout_ms
from tickwheel.engine.counts import DONE, Counts
from tickwheel.engine.hand import Batch, Hand, Held, Phase, Stop, released_unstarted, stronger
from tickwheel.engine.journal import Journal, say
from tickwheel.engine.lending import Lending
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.engine.surroundings import Surroundings
from tickwheel.job import Job, Settlement, expire, park, release
from tickwheel.registry import PoolName, Registry
from tickwheel.store import Store
from tickwheel.wheel import TimingWheel

log = logging.getLogger("tickwheel")

# A due job that gets no slot for this long is released, for a worker that has one.
PATIENCE_MS = 1_000
# How long this worker then leaves such jobs to the others.
ABSTAIN_S = 0.1
# An async task that ignores its cancellation for this long is abandoned.
STUBBORN_S = 5.0
# A worker logs only so many different tasks that it doesn't know.
UNKNOWN_LOGGED = 1_000


class Runs:
    """Everything that a worker holds and runs."""

    # Who is told that a run has said its progress.
    said: Callable[[], None] | None = None

    def __init__(
        self,
        worker: str,
        store: Store,
        tasks: Registry,
        clock: StoreClock,
        reconnecting: Reconnecting,
        options: WorkerOptions,
        *,
        ending: Callable[[], bool],
        surroundings: Surroundings,
        counts: Counts | None = None,
    ) -> None:
        """`ending` tells whether the worker itself is being cancelled."""
        self._worker = worker
        self._store = store
        self.tasks = tasks
        self._clock = clock
        self._reconnecting = reconnecting
        self._options = options
        self._loop = asyncio.get_running_loop()
        self.hand = Hand()
        self.journal = Journal()
        self._counts = counts
        # Runs that have not ended, by job, including abandoned ones.
        self._alive: dict[str, asyncio.Task[None]] = {}
        # When runs time out, by the monotonic clock.
        self._deadlines: TimingWheel[Held] = TimingWheel()
        # When held jobs expire, if they have not started by then, by the store's clock.
        self._expiries: TimingWheel[Held] = TimingWheel()
        self._paused: dict[Held, int] = {}  # what is left to runs whose time stands still
        self._state = surroundings.state
        self._settling: Batcher[Held, bool] = Batcher(
            self._settle_all, weigh=Held.outcome_bytes, max_inflight=store.max_inflight
        )
        self._most_threads = min(options.threads, options.concurrency)
        self.runner = self._new_runner(ending, surroundings)
        self._lending = Lending(
            self.hand,
            tasks,
            queues=options.queues,
            slots=options.concurrency,
            has_room=self.has_room,
            lent=self._slot_lent,
        )
        # Once: a bound method costs something for every job.
        self._waiting = self._lending.waiting
        self._on_settled = self._settled
        self._alarm = Alarm(self._loop, self.start_due)
        # In the worker's own context, not in that of a run that has just ended.
        self._new_task = in_this_context(self._loop)
        # Set once nothing may start any more.
        self.stopping = asyncio.Event()
        self._closed = False
        # Set when a slot, or room for another held job, becomes free.
        self.room_freed = asyncio.Event()
        # Set while due jobs have no slot, and while suspects wait for their trial.
        self.crowded = asyncio.Event()
        self.suspected = asyncio.Event()
        # Whether we leave the jobs that we have just released to others.
        self.abstaining = False
        # Unknown tasks that were logged.
        self._unknown: set[str] = set()
        # How many runs have started so far, by pool.
        self.started: Counter[PoolName] = Counter()
        # How many runs have ended so far.
        self.ended = 0

    def _new_runner(self, ending: Callable[[], bool], surroundings: Surroundings) -> Runner:
        return Runner(
            self._clock,
            threads=self._most_threads,
            processes=self._options.processes,
            result_limit=self._options.result_limit,
            lease_ms=self._options.lease_ms,
            ending=ending,
            freed=self._thread_came_back,
            lent=self.hand.lent,
            surroundings=surroundings,
            waits=self._pause,
        )

    def close(self) -> None:
        """Leave no timer, run or thread behind."""
        self.stopping.set()
        self._closed = True
        self._alarm.cancel()
        for held in self.hand:
            if held.run is not None:
                # A thread may keep running for a while, so its job is not released but left to its
                # lease.
                held.stop = Stop.LOST
                held.run.cancel()
        self.runner.close()

    def clock_was_set(self, step_ms: int) -> None:
        self.hand.shift_leases(step_ms)
        self.rearm()

    def take(self, jobs: Iterable[Job]) -> None:
        """Hold jobs that were just claimed, and start those that are due."""
        now_ms = self._clock.now_ms()
        for job in jobs:
            self._take(job, now_ms)
        self.start_due()

    def _take(self, job: Job, now_ms: int) -> None:
        if job.parked:
            self._parked(job)
            return
        before = self.hand.get(job.id)
        if before is not None and before.run is not None and before.replaced_by(job):
            self.stop(before, Stop.LOST)
        if before is not None and before.run is not None and before.stop is None:
            # Its lease ran out unnoticed: the new claim is for the run that still goes on here.
            say(logging.WARNING, job, "its lease ran out, and this worker claimed it again")
            before.job = job
            return
        held = Held(job, self.tasks.find(job.task))
        held.waiting = self._waiting
        held.said = self.said
        held.state = self._state
        if job.expires_ms is not None:
            self._expiries.add(held, job.expires_ms)
            if before is not None:
                self._expiries.remove(before)
        if job.history:
            since_ms = now_ms - PATIENCE_MS
            held.declined = released_unstarted(job, by=self._worker, since_ms=since_ms)
        self.hand.take(held, now_ms)
        if held.definition is None:
            self._park(held, now_ms)

    def _park(self, held: Held, now_ms: int) -> None:
        """Put back a job whose task is unknown here, before it is due: a worker that knows the task
        can still start it on time."""
        self._parked(held.job)
        self.settle(held, park(held.job, ended_ms=now_ms))

    def _parked(self, job: Job) -> None:
        """Count a job that another worker has to run, and warn of its task, once."""
        self.ended += 1
        if job.task not in self._unknown and len(self._unknown) < UNKNOWN_LOGGED:
            self._unknown.add(job.task)
            log.warning(
                "job %s: %s; such jobs are left to workers that know the task",
                job.id,
                self.tasks.unknown(job.task),
            )

    # --- Start

    def start_due(self) -> None:
        """Start what is due, stop what has run too long, and set the timer for the next event."""
        for held in self._deadlines.advance(self._clock.monotonic_ms()):
            self.stop(held, Stop.TIMEOUT)
        now_ms = self._clock.now_ms()
        if self._expiries:
            self._expire_unstarted(now_ms)
        self.hand.fall_due(now_ms)
        self.fill_slots()
        self._arm()

    def _expire_unstarted(self, now_ms: int) -> None:
        """Expire what found no slot in time."""
        for held in self._expiries.advance(now_ms):
            if not self.waits(held):
                continue
            if held.job.lease_until_ms is not None and held.job.lease_until_ms <= now_ms:
                self.stop(held, Stop.LOST)
            else:
                self._expire(held, now_ms)

    def _expire(self, held: Held, now_ms: int) -> None:
        """Settle a job that could not start in time."""
        settlement = expire(held.job, ended_ms=now_ms)
        self.ended += 1
        self.journal.expired(settlement)
        self.settle(held, settlement)

    def _arm(self) -> None:
        due_ms = self.hand.next_due_ms()
        if self._expiries and (expires_ms := self._expiries.next_ms()) is not None:
            due_ms = expires_ms if due_ms is None else min(due_ms, expires_ms)
        # One that is set rings before all of them: `_limit` makes sure of that.
        ends_ms = self._deadlines.next_ms() if not self._alarm.is_set else None
        if due_ms is not None:
            self._alarm.ring_in((due_ms * MS_NS - self._clock.now_ns()) / S_NS)
        if self.hand.gathered:
            ripe_ms = self.hand.next_ripe_ms(self._clock.now_ms())
            if ripe_ms is not None:
                self._alarm.ring_in((ripe_ms * MS_NS - self._clock.now_ns()) / S_NS)
        if ends_ms is not None:
            self._alarm.ring_in((ends_ms * MS_NS - self._clock.monotonic_ns()) / S_NS)

    def rearm(self) -> None:
        """The clock that the alarm was set by has changed."""
        self._alarm.ring_soon()

    def fill_slots(self) -> None:
        hand = self.hand
        now_ms = self._clock.now_ms() if hand.gathered else 0
        while (
            (hand.ready_total or hand.gathered)
            and hand.running < self._options.concurrency
            and not self.stopping.is_set()
        ):
            held = hand.next_ready(self.has_room, now_ms)
            if held is None:
                break
            self.start(held)
        if hand.ready_total or (hand.gathered and hand.wants_slot(now_ms)):
            self.crowded.set()
        if hand.suspects:
            self.suspected.set()

    def end_lingers(self) -> None:
        """Start what lingers, without waiting for other jobs to join it."""
        if self.hand.gathered:
            self.hand.end_lingers()
            self.start_due()

    def has_room(self, pool: PoolName) -> bool:
        """Whether a task of this pool would start at once."""
        if pool == "thread" and self.hand.in_threads >= self._most_threads:
            return False
        return self.runner.has_room(pool)

    def slots(self) -> tuple[dict[PoolName, int], dict[PoolName, int]]:
        """How many slots are taken, and how many more runs could start, by pool."""
        used = self.hand.used()
        return used, self._options.free(used, self.hand.running)

    def start(self, held: Held) -> None:
        """Start a job that was taken out for it; one of a batch with those that join it."""
        now_ms = self._clock.now_ms()
        if not self._may_start(held, now_ms):
            return
        job = held.job
        if held.limit:
            others = self.hand.companions(held)
            held = Batch([held, *(each for each in others if self._may_start(each, now_ms))])
            self.started[held.pool] += len(held.members) - 1
        self.hand.start(held, now_ms)
        if held.pool != "async":
            self.runner.reserve(held)
        self.started[held.pool] += 1
        if self._counts is not None:
            # Counted at the end of some run: this is on the way of every job.
            self._counts.starts.append(held)
        held.run = self._alive[job.id] = self._new_task(self._run(held), f"{job.task} {job.id}")
        if held.limit:
            for member in held.members:
                member.run = self._alive[member.job.id] = held.run

    def _may_start(self, held: Held, now_ms: int) -> bool:
        """Whether a job that was taken out to start can start now; if not, sees to it."""
        job = held.job
        if job.lease_until_ms is not None and job.lease_until_ms <= now_ms:
            # We were blocked for too long; another worker may have it by now.
            self.stop(held, Stop.LOST)
        elif job.due_ms > now_ms:
            # The clock was set back while it waited for a slot.
            self.hand.wait_again(held)
            self._arm()
        elif job.expires_ms is not None and job.expires_ms <= now_ms:
            self._expire(held, now_ms)
        elif job.id in self._alive:
            self._start_after(self._alive[job.id], held)
        elif self.hand.lent_total and self._lending.defers(held):
            self.release_to_others(held)
        else:
            return True
        return False

    def _start_after(self, other: asyncio.Task[None], held: Held) -> None:
        """Wait for an earlier attempt that lost its lease and is still ending here: never run two
        at once. If it takes long, another worker can have the job."""
        other.add_done_callback(lambda _: self._start_again(held))
        self._loop.call_later(PATIENCE_MS / 1000, self._release_unless_started, held)

    def _start_again(self, held: Held) -> None:
        if self.waits(held):
            self.hand.make_ready(held, self._clock.now_ms())
            self.start_due()

    def _release_unless_started(self, held: Held) -> None:
        if self.waits(held):
            self.release_to_others(held)

    def waits(self, held: Held) -> bool:
        return held.phase in (Phase.WAITING, Phase.READY) and held.stop is None

    def release_to_others(self, held: Held) -> None:
        """Release a job that can't start here now. We leave it to others for a moment; if none
        could start it, the jobs behind it get their turn first."""
        held.stop = Stop.RELEASE
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
        self.room_freed.set()

    async def _run(self, held: Held) -> None:
        run, definition = held.run, held.definition
        assert definition is not None and run is not None
        held.begun = True
        ended: Settlement | batches.Settlements
        try:
            if isinstance(held, Batch):
                ended = await batches.attempt(
                    self.runner, held, definition, began=lambda: self._limit(held)
                )
            else:
                ended = await self.runner.attempt(held, definition, began=lambda: self._limit(held))
        except GeneratorExit as error:
            # One that comes from a thread closes the attempt, instead of being raised in it.
            ended = batches.raised(self.runner, held, definition, error)
        except BaseException:
            ended = batches.unreadable(self.runner, held, definition)
        finally:
            self._over(held, run)
        self._ended(held, ended)

    def _over(self, held: Held, run: asyncio.Task[None]) -> None:
        """The run has ended completely."""
        if held.pool != "async":
            self.runner.drop_reservation(held)
        if self._alive.get(held.job.id) is run:
            del self._alive[held.job.id]
        if held.limit:
            for member in held.members:
                if self._alive.get(member.job.id) is run:
                    del self._alive[member.job.id]

    def _limit(self, held: Held) -> None:
        """Start the run's timeout, or let it go on."""
        assert held.definition is not None
        limit_ms = timeout_ms(held.job, held.definition)
        if self._paused:
            limit_ms = self._paused.pop(held, limit_ms)
        if limit_ms is not None and held.run is not None:
            self._deadlines.add(held, self._clock.monotonic_ms() + limit_ms)
            self._alarm.ring_in(limit_ms / 1000)

    def _pause(self, held: Held) -> None:
        """Stop the run's timeout until it goes on."""
        due_ms = self._deadlines.due_ms(held)
        if due_ms is not None:
            self._deadlines.remove(held)
            self._paused[held] = max(due_ms - self._clock.monotonic_ms(), 1)

    def _ended(self, held: Held, ended: Settlement | batches.Settlements) -> None:
        """A run ended or was abandoned: free its slot, and settle each of its jobs once."""
        if held.run is None:
            return
        held.run = None
        self._deadlines.remove(held)
        if self._paused:
            self._paused.pop(held, None)
        self.hand.settle(held)
        self.room_freed.set()
        pairs = ended if isinstance(ended, list) else [(held, ended)]
        ours = [each for each, settlement in pairs if self._ran(each, settlement)]
        for member in held.members:
            member.run = member.batch = None
        self._settling.submit(ours, self._on_settled)
        self._slot_freed()

    def _ran(self, held: Held, settlement: Settlement) -> bool:
        """Note how a run ended; returns whether that must be written."""
        self.ended += 1
        if held.stop is not Stop.LOST:
            self.journal.ran(settlement, cancelled=held.stop is Stop.CANCEL)
        return self._note(held, settlement)

    def _slot_freed(self) -> None:
        self.fill_slots()
        if self.hand.gathered:
            # Those that are left of a full batch may linger from now on.
            self._arm()

    def _slot_lent(self) -> None:
        self.room_freed.set()
        self._slot_freed()

    def _thread_came_back(self) -> None:
        """An abandoned thread is free again, and all others were busy."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._slot_freed)

    # --- Stop

    def stop(self, held: Held, why: Stop) -> None:
        """Stop a job early. One that has not started is released at once."""
        if held.batch is not None:
            self._stop_member(held, held.batch, why)
            return
        if not stronger(why, held):
            return
        held.stop = why
        for member in held.members:
            if member.stop is not Stop.LOST:
                member.stop = why
        job = held.job
        if why is Stop.LOST:
            say(logging.WARNING, job, "its lease ran out, so another worker may run it")
        if held.run is None:
            if why is Stop.LOST:
                self._forget(held)
            elif held.phase is not Phase.SETTLING:
                self.settle(held, release(job, ended_ms=self._clock.now_ms()))
            return
        self._interrupt(held, why)

    def _stop_member(self, member: Held, batch: Batch, why: Stop) -> None:
        """Stop a job in a batch that is running. The call goes on for the others; it is stopped if
        none is left, or if the worker ends."""
        if why is Stop.RELEASE:
            self.stop(batch, why)
            return
        if not stronger(why, member):
            return
        member.stop = why
        if why is Stop.LOST:
            say(logging.WARNING, member.job, "its lease ran out, so another worker may run it")
            self._forget(member)
        reasons = {each.stop for each in batch.members}
        why = Stop.LOST if reasons == {Stop.LOST} else Stop.CANCEL
        if reasons <= {Stop.CANCEL, Stop.LOST} and stronger(why, batch):
            batch.stop = why
            self._interrupt(batch, why)

    def _interrupt(self, held: Held, why: Stop) -> None:
        assert held.run is not None and held.definition is not None
        if held.definition.pool == "thread" and not held.outside:
            # A thread can't be killed. If the slot matters more than the outcome, it is freed.
            if why in (Stop.CANCEL, Stop.RELEASE):
                return
            say(logging.WARNING, held.job, f"{why}; its thread keeps running")
            if why is Stop.LOST:
                # Not cancelled, so that we learn when it ends: until then it isn't started again.
                self._ended(held, batches.stopped(self.runner, held, held.definition))
                return
        if not held.interrupted:
            held.interrupted = True
            held.run.cancel()
            if held.begun:
                self._loop.call_later(STUBBORN_S, self._abandon, held)
            else:
                # It was about to begin in this turn of the loop, and now never will.
                self._over(held, held.run)
                self._ended(held, batches.stopped(self.runner, held, held.definition))

    def _abandon(self, held: Held) -> None:
        if held.run is None:
            return
        assert held.definition is not None
        say(logging.ERROR, held.job, "ignored cancellation; abandoned")
        self._ended(held, batches.stopped(self.runner, held, held.definition))

    async def leave_threads_behind(self) -> None:
        """Release the jobs in threads that don't end, because the worker does."""
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
        """Wait until every submitted outcome is written."""
        await self._settling.drained()

    # --- Settle

    def settle(self, held: Held, settlement: Settlement) -> None:
        if self._note(held, settlement):
            self._settling.submit([held], self._on_settled)

    def _note(self, held: Held, settlement: Settlement) -> bool:
        """Note how a job ended; returns whether that must be written."""
        if held.stop is Stop.LOST:
            if self._counts is not None:
                self._counts.ended(settlement, False, held.stop)
            self._forget(held)
            return False
        held.settlement = settlement
        self.hand.settle(held)
        return True

    def _settled(self, held: Held, kept: bool | None, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError) and not self._closed:
            # Everything on the loop was cancelled, including the writer: submit again.
            self._settling.submit([held], self._settled_or_not)
        else:
            self._settled_or_not(held, kept, error)

    def _settled_or_not(self, held: Held, kept: bool | None, error: BaseException | None) -> None:
        settlement = held.settlement
        assert settlement is not None
        if error is not None and not isinstance(error, asyncio.CancelledError):
            words = "its outcome could not be stored, so it runs again"
            say(logging.ERROR, held.job, f"{words}: {error!r}")
        elif error is None and not kept:
            words = f"the outcome {str(settlement.outcome)!r} came too late: its lease had run out"
            say(logging.WARNING, held.job, words)
        if self._counts is not None and (settlement.outcome is not DONE or not kept):
            self._counts.ended(settlement, kept, held.stop)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        if held.job.expires_ms is not None:
            self._expiries.remove(held)
        self.hand.drop(held)
        self.room_freed.set()

    async def _settle_all(self, ended: Sequence[Held]) -> Sequence[bool]:
        """Write outcomes; retries while the store is unreachable, as long as a lease holds."""
        settlements = [each.settlement for each in ended if each.settlement is not None]
        answers = await self._reconnecting.until(
            lambda: not self._any_lease_holds(settlements),
            lambda: self._store.settle(settlements, now_ms=self._clock.now_ms()),
        )
        if answers is not None and self._counts is not None:
            self._counts.done(settlements, answers)
        return [False] * len(settlements) if answers is None else answers

    def _any_lease_holds(self, settlements: Sequence[Settlement]) -> bool:
        now_ms = self._clock.now_ms()
        return any((each.job.lease_until_ms or 0) > now_ms for each in settlements)
