"""Any store against the model: random steps, and some that are aimed at where leases are lost."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from model import Claim, Model, Record, Shift, Wish
from stores import KNOWN, SealedHarness, StillNatsHarness
from tickwheel.changes import IfExists, Put
from tickwheel.job import Changes, Job, Move, Outcome, Progress, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import Query
from tickwheel.trust import new_key, trust_of

T = TypeVar("T")

# Few of everything, so that steps meet one another.
IDS = ("a", "b", "c")
QUEUES = ("q1", "q2")
RECORDS = ("a", "a.b", "longer-than-8", "longer-than-9", "longer-")
WORKERS = ("ann", "bob")
TASKS = ("mail", "bill")
KINDS = (
    *(Outcome.DONE, Outcome.RETRY, Outcome.SNOOZE),
    *(Outcome.RELEASE, Outcome.PARK, Outcome.DEAD, Outcome.EXPIRE),
)
METAS = (None, {"customer": "1"}, {"customer": "2", "batch": "1"})
EXPIRES_MS = 4_000_000_000_000
LEASE = 1000
# Claims that the machine remembers, the latest last.
REMEMBERED = 12

# A store with a disk or a server under it gets fewer steps for its time.
EXAMPLES = {
    "memory": 400,
    "sqlite": 200,
    "sealed-memory": 200,
    "sealed-sqlite": 100,
    "redis": 150,
    "postgres": 80,
    "nats": 30,
    "nats-fast": 30,
}
# Where the server keeps the time, none passes: every span is so long that nothing ends meanwhile.
STILL = {
    "nats": StillNatsHarness,
    "nats-fast": lambda: StillNatsHarness(durability="fast"),
}
LONG = 1_000_000

# Often due at once, or on either side of what is handed out ahead.
delays = st.sampled_from([0, 0, 0, 500, 1000, 1001, 5000])
record_names = st.lists(st.sampled_from(RECORDS), min_size=1, max_size=3)
id_lists = st.lists(st.sampled_from(IDS), min_size=1, max_size=3)


@dataclass(eq=False)
class Hand:
    """What a worker has: the claim by the model, and the job as it was first and last handed."""

    claim: Claim
    first: Job
    last: Job


@dataclass(eq=False)
class Sent:
    """A settlement that was sent once, and may be sent again."""

    hand: Hand
    settlement: Settlement


def part_of(job: Job) -> float | None:
    return None if job.progress is None else job.progress.part


def wish_of(job: Job | None) -> Wish | None:
    if job is None:
        return None
    return Wish(job.queue, job.priority, job.due_ms, job.task, job.meta, job.expires_ms)


def shift_of(move: Move | None) -> Shift | None:
    return None if move is None else Shift(move.due_ms, move.priority, move.queue)


def seen(job: Job) -> dict[str, Any]:
    """A store's job in the model's words."""
    changes = job.changes or Changes()
    return Record(
        next=wish_of(changes.next),
        move=shift_of(changes.move),
        asks=[(each.number, each.answer) for each in changes.requests],
        queue=job.queue,
        priority=job.priority,
        due=job.due_ms,
        task=job.task,
        meta=job.meta,
        expires=job.expires_ms,
        state=job.state.value,
        parked=job.parked,
        attempt=job.attempt,
        failures=job.failures,
        takeovers=job.takeovers,
        worker=job.worker,
        lease=job.lease_until_ms,
        progress=part_of(job),
        cancel_requested=job.cancel_requested,
        ended=job.ended_ms,
        error=job.error,
        traceback=job.traceback,
        result=job.result,
        runs=[(run.attempt, run.worker, run.outcome.value, run.due_ms) for run in job.history],
    ).view()


def passes(machine: StoreMachine) -> bool:
    return machine.name not in STILL


class StoreMachine(RuleBasedStateMachine):
    name: str

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.hands: list[Hand] = []
        # The last claim: its number, worker, queues, and what it handed out.
        self.calls = 0
        self.call: tuple[str, Sequence[str], list[Hand]] = ("", (), [])
        self.sent: list[Sent] = []
        # Requests that were sent, and may be sent again.
        self.asks: list[Put | Move] = []
        self.reads: list[tuple[Schedule, int]] = []
        self.folder = tempfile.mkdtemp(prefix="tickwheel-model-")
        self.runner = asyncio.Runner()
        self.h = STILL[self.name]() if self.name in STILL else KNOWN[self.name](Path(self.folder))
        if isinstance(self.h, SealedHarness):
            # The model runs jobs before the time for which they were added, by reruns and retries;
            # a signature keeps them from that.
            self.h.trust = trust_of([], [new_key("encrypt")])
        # What a millisecond of a lease or a delay is drawn out to.
        self.unit = LONG if self.name in STILL else 1

    @initialize()
    def open(self) -> None:
        self.run(self.h.open())

    def teardown(self) -> None:
        self.run(self.h.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(step)

    # --- Jobs

    @rule(
        ids=id_lists,
        queue=st.sampled_from(QUEUES),
        priority=st.integers(0, 2),
        delay=delays,
        task=st.sampled_from(TASKS),
        meta=st.sampled_from(METAS),
        expires=st.booleans(),
    )
    def add(
        self,
        ids: list[str],
        queue: str,
        priority: int,
        delay: int,
        task: str,
        meta: dict[str, str] | None,
        expires: bool,
    ) -> None:
        delay *= self.unit
        expires_ms = EXPIRES_MS if expires else None
        more: Any = {"task": task, "meta": meta, "expires_ms": expires_ms}
        jobs = [
            self.h.job(id, queue=queue, priority=priority, delay_ms=delay, **more) for id in ids
        ]
        expected = [self.added(job) for job in jobs]
        assert self.run(self.h.store.add(jobs)) == expected

    def added(self, job: Job) -> bool:
        record = Record(job.queue, job.priority, job.due_ms, job.task, job.meta, job.expires_ms)
        return self.model.add(job.id, record)

    @rule(
        queues=st.sampled_from([QUEUES, QUEUES[::-1], QUEUES[:1], QUEUES[1:], QUEUES[:1] * 2]),
        worker=st.sampled_from(WORKERS),
        limit=st.sampled_from([4, 3, 2, 1, 0]),
        lease=st.sampled_from([LEASE, 3 * LEASE, 1]),
        tasks=st.sampled_from([TASKS, TASKS[:1], TASKS[1:], ()]),
    )
    def claim(
        self, queues: Sequence[str], worker: str, limit: int, lease: int, tasks: Sequence[str]
    ) -> None:
        lease *= self.unit
        now, ahead = self.h.now, self.h.store.ahead_ms
        claimable = self.model.claimable(queues, tasks, now, ahead)
        abandoned = self.model.abandoned(queues, now)
        self.calls += 1
        jobs = self.run(
            self.h.claim(
                limit,
                worker=worker,
                queues=queues,
                lease_ms=lease,
                tasks=tasks,
                call=self.calls,
            )
        )
        ids = [job.id for job in jobs]

        # A store may hand out what it has just found abandoned, as what it was replaced by.
        for id in abandoned & set(ids):
            assert self.model.jobs[id].pending
            self.model.abandon(id, None)
            claimable.add(id)
        abandoned -= set(ids)
        assert len(set(ids)) == len(ids) <= limit
        assert set(ids) <= claimable
        # A store may spend its limit on jobs that it finds abandoned, but on nothing else.
        assert len(ids) >= min(limit - len(abandoned), len(claimable))
        priorities = [job.priority for job in jobs]
        left = [self.model.jobs[id].priority for id in claimable - set(ids)]
        assert priorities == sorted(priorities, reverse=True)
        assert not left or not priorities or max(left) <= min(priorities)

        self.call = (worker, queues, [])
        for job in jobs:
            claim = self.model.claim(job.id, worker, now, lease)
            if job.parked:
                assert tasks and job.task not in tasks
                self.parked_at_once(job, claim)
                continue
            assert seen(job) == claim.record.view()
            hand = Hand(claim, job, job)
            self.hands = [*self.hands, hand][-REMEMBERED:]
            self.call[2].append(hand)
        if limit >= len(ids) + len(abandoned) > 0:
            found = self.run(self.h.store.get(sorted(abandoned)))
            for each in found:
                assert each is not None
                pending = self.model.jobs[each.id].pending
                assert each.state is (State.WAITING if pending else State.CANCELLED)

    def parked_at_once(self, job: Job, claim: Claim) -> None:
        """A store may park a job of another task in the step that claims it."""
        record = claim.record
        self.model.settle(
            job.id,
            claim,
            job,
            kind="park",
            now=self.h.now,
            due=record.due,
            error=record.error,
            traceback=record.traceback,
            result=None,
            progress=None,
        )
        assert seen(job) == record.view()

    @precondition(lambda self: self.held_of_call())
    @rule(lease=st.sampled_from([LEASE, 5 * LEASE]))
    def claim_again(self, lease: int) -> None:
        """The reply to the last claim was lost."""
        lease *= self.unit
        worker, queues, _ = self.call
        held = {hand.first.id: hand for hand in self.held_of_call()}
        jobs = self.run(
            self.h.claim(worker=worker, queues=queues, lease_ms=lease, call=self.calls, again=True)
        )
        assert {job.id for job in jobs} == set(held)
        for job in jobs:
            hand = held[job.id]
            progress = hand.claim.record.progress
            assert self.model.extend(job.id, hand.claim, self.h.now, lease, progress)
            assert seen(job) == hand.claim.record.view()
            hand.last = job

    def held_of_call(self) -> list[Hand]:
        now = self.h.now
        return [each for each in self.call[2] if self.model.holds(each.first.id, each.claim, now)]

    @precondition(lambda self: self.hands)
    @rule(
        data=st.data(),
        lease=st.sampled_from([LEASE, 5 * LEASE]),
        old=st.booleans(),
        part=st.sampled_from([None, 0.25, 1.0]),
    )
    def extend(self, data: st.DataObject, lease: int, old: bool, part: float | None) -> None:
        hand = data.draw(st.sampled_from(self.hands))
        progress = None if part is None else Progress(part, "on the way")
        job = msgspec.structs.replace(hand.first if old else hand.last, progress=progress)
        lease *= self.unit
        ours = self.model.extend(job.id, hand.claim, self.h.now, lease, part)
        extended = self.run(self.h.extend(job, lease_ms=lease))
        assert (extended is not None) == ours
        if extended is not None:
            assert seen(extended) == hand.claim.record.view()
            hand.last = extended

    @precondition(lambda self: self.hands)
    @rule(
        data=st.data(),
        kind=st.sampled_from(KINDS),
        delay=delays,
        old=st.booleans(),
        text=st.sampled_from(["x", "y"]),
    )
    def settle(self, data: st.DataObject, kind: Outcome, delay: int, old: bool, text: str) -> None:
        hand = data.draw(st.sampled_from(self.hands))
        job = hand.first if old else hand.last
        settlement = self.h.settlement(
            kind, job, delay_ms=delay * self.unit, text=text, traceback=f"at {text}"
        )
        sent = Sent(hand, settlement)
        self.sent = [*self.sent, sent][-REMEMBERED:]
        self.send(sent)

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def settle_again(self, data: st.DataObject) -> None:
        self.send(data.draw(st.sampled_from(self.sent)))

    def send(self, sent: Sent) -> None:
        settlement = sent.settlement
        expected = self.model.settle(
            settlement.job.id,
            sent.hand.claim,
            sent,
            kind=settlement.outcome.value,
            now=self.h.now,
            due=settlement.due_ms,
            error=settlement.error,
            traceback=settlement.traceback,
            result=settlement.result,
            progress=part_of(settlement.job),
        )
        answer = self.run(self.h.settle(settlement))
        assert expected is None or answer == expected

    @rule(
        id=st.sampled_from(IDS),
        queue=st.sampled_from(QUEUES),
        priority=st.integers(0, 2),
        delay=delays,
        task=st.sampled_from(TASKS),
        meta=st.sampled_from(METAS),
        expires=st.booleans(),
        how=st.sampled_from([IfExists.REPLACE, IfExists.REPLACE, IfExists.RENEW, IfExists.KEEP]),
    )
    def put(
        self,
        id: str,
        queue: str,
        priority: int,
        delay: int,
        task: str,
        meta: dict[str, str] | None,
        expires: bool,
        how: IfExists,
    ) -> None:
        more: Any = {"task": task, "meta": meta, "expires_ms": EXPIRES_MS if expires else None}
        job = self.h.job(id, queue=queue, priority=priority, delay_ms=delay * self.unit, **more)
        self.ask(Put(job=job, if_exists=how, request=len(self.asks) + 1))

    @rule(
        id=st.sampled_from(IDS),
        queue=st.none() | st.sampled_from(QUEUES),
        priority=st.none() | st.integers(0, 2),
        delay=st.none() | delays,
    )
    def move(self, id: str, queue: str | None, priority: int | None, delay: int | None) -> None:
        due_ms = None if delay is None else self.h.now + delay * self.unit
        request = len(self.asks) + 1
        self.ask(Move(id=id, request=request, queue=queue, priority=priority, due_ms=due_ms))

    @precondition(lambda self: self.asks)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        self.ask(data.draw(st.sampled_from(self.asks[-REMEMBERED:])), again=True)

    @precondition(lambda self: self.held_of_call())
    @rule(delay=delays, kind=st.sampled_from(KINDS))
    def replace_what_runs(self, delay: int, kind: Outcome) -> None:
        """And settle it: so that something follows."""
        for hand in self.held_of_call():
            self.put(
                hand.first.id, QUEUES[1], 2, delay, TASKS[1], METAS[2], False, IfExists.REPLACE
            )
            settlement = self.h.settlement(kind, hand.last, traceback="at x")
            self.send(Sent(hand, settlement))

    def ask(self, ask: Put | Move, *, again: bool = False) -> None:
        now = self.h.now
        if not again:
            self.asks.append(ask)
        if isinstance(ask, Put):
            wish = wish_of(ask.job)
            assert wish is not None
            how = ask.if_exists.value
            expected = self.model.put(ask.job.id, ask.request, wish, how, now)
            assert self.run(self.h.store.put([ask], now_ms=now)) == [expected]
        else:
            to = shift_of(ask)
            assert to is not None
            expected = self.model.move(ask.id, ask.request, to, now)
            assert self.run(self.h.store.move([ask], now_ms=now)) == [expected]
        self.run(self.h.changed())

    @precondition(lambda self: self.model.jobs)
    @rule(ids=id_lists)
    def cancel(self, ids: list[str]) -> None:
        ids = list(dict.fromkeys(ids))
        expected = [self.model.cancel(id, self.h.now) for id in ids]
        assert self.run(self.h.store.cancel(ids, now_ms=self.h.now)) == expected

    @precondition(lambda self: self.some("done", "dead", "cancelled"))
    @rule(ids=id_lists)
    def rerun(self, ids: list[str]) -> None:
        ids = list(dict.fromkeys(ids))
        expected = [self.model.rerun(id, self.h.now) for id in ids]
        assert self.run(self.h.store.rerun(ids, now_ms=self.h.now)) == expected

    @precondition(lambda self: self.some("done", "dead", "cancelled"))
    @rule(ids=id_lists)
    def delete(self, ids: list[str]) -> None:
        ids = list(dict.fromkeys(ids))
        expected = [self.model.delete(id) for id in ids]
        assert self.run(self.h.store.delete(ids)) == expected

    @precondition(lambda self: self.some("done", "dead", "cancelled"))
    @rule(
        states=st.lists(st.sampled_from(State), min_size=1, max_size=3, unique=True),
        ago=st.sampled_from([0, 1, LEASE]),
        limit=st.integers(0, 3),
    )
    def prune(self, states: list[State], ago: int, limit: int) -> None:
        before = self.h.now - ago
        prunable = self.model.prunable([state.value for state in states], before)
        pruned = self.run(self.h.store.prune(states, before_ms=before, limit=limit))
        assert pruned == min(limit, len(prunable))
        found = self.run(self.h.store.get(sorted(prunable)))
        gone = [id for id, job in zip(sorted(prunable), found, strict=True) if job is None]
        assert len(gone) == pruned
        assert all([self.model.delete(id) for id in gone])

    @rule(queue=st.sampled_from(QUEUES), paused=st.sampled_from([False, False, True]))
    def pause(self, queue: str, paused: bool) -> None:
        (self.model.paused.add if paused else self.model.paused.discard)(queue)
        self.run(self.h.store.pause(queue, paused))

    @precondition(passes)
    @rule(ms=st.sampled_from([1, 499, LEASE - 1, LEASE, LEASE + 1, 5 * LEASE]))
    def pass_time(self, ms: int) -> None:
        self.run(self.h.pass_time(ms))

    def some(self, *states: str) -> bool:
        return any(job.state in states for job in self.model.jobs.values())

    # --- Aimed steps: what random ones come to only now and then

    @rule(ids=id_lists, worker=st.sampled_from(WORKERS), lease=st.sampled_from([LEASE, 3 * LEASE]))
    def put_into_hand(self, ids: list[str], worker: str, lease: int) -> None:
        """So that there is something to extend, settle and lose."""
        self.add(ids, QUEUES[0], 1, 0, TASKS[0], METAS[1], expires=True)
        for queue in QUEUES:
            self.pause(queue, False)
        self.claim(QUEUES, worker, 10, lease, TASKS)

    @precondition(lambda self: passes(self) and self.some("running"))
    @rule(thief=st.sampled_from(["cy", *WORKERS]))
    def lose_every_lease_to_another_worker(self, thief: str) -> None:
        """So that the hands that were remembered are stale, and settle late."""
        for queue in QUEUES:
            self.pause(queue, False)
        self.pass_time(5 * LEASE)
        self.claim(QUEUES, thief, 10, LEASE, TASKS)

    @precondition(lambda self: len(self.hands) > 1)
    @rule(kind=st.sampled_from(KINDS))
    def settle_all_but_the_last_hand_late(self, kind: Outcome) -> None:
        for hand in self.hands[:-1]:
            self.send(Sent(hand, self.h.settlement(kind, hand.last, text="late")))

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def use_the_id_of_a_hand_anew(self, data: st.DataObject, worker: str) -> None:
        """So that an old hand and a new one have the same id and the same attempt."""
        id = data.draw(st.sampled_from(self.hands)).first.id
        if passes(self):
            self.pass_time(5 * LEASE)
        self.cancel([id])
        self.delete([id])
        self.put_into_hand([id], worker, LEASE)

    @precondition(
        lambda self: passes(self) and any(job.cancel_requested for job in self.model.jobs.values())
    )
    @rule()
    def abandon_what_was_asked_to_stop(self) -> None:
        for queue in QUEUES:
            self.pause(queue, False)
        self.pass_time(5 * LEASE)
        self.claim(QUEUES, "ann", 10, LEASE, ())

    # --- Records

    @rule(names=record_names, text=st.sampled_from(["", "1", "two"]))
    def put_records(self, names: list[str], text: str) -> None:
        self.run(self.h.store.put_records("key", dict.fromkeys(names, text)))
        self.model.records |= dict.fromkeys(names, text)

    @rule(names=record_names)
    def delete_records(self, names: list[str]) -> None:
        expected = [self.model.records.pop(name, None) is not None for name in names]
        assert self.run(self.h.store.delete_records("key", names)) == expected

    @rule(after=st.sampled_from(["", *RECORDS]), limit=st.integers(1, 5))
    def page_records(self, after: str, limit: int) -> None:
        expected = [each for each in sorted(self.model.records.items()) if each[0] > after][:limit]
        assert self.run(self.h.store.records("key", after=after, limit=limit)) == expected
        found = self.run(self.h.store.get_records("key", RECORDS))
        assert found == [self.model.records.get(name) for name in RECORDS]

    # --- The schedule

    @rule(delay=delays)
    def put_schedule(self, delay: int) -> None:
        new = Schedule(name="s", rule="{}", next_ms=self.h.now + delay * self.unit)
        stored = self.run(self.h.store.put_schedule(new))
        self.read(stored, self.model.move_schedule())

    @precondition(lambda self: self.reads)
    @rule()
    def delete_schedule(self) -> None:
        there = self.model.version is not None
        self.model.version = None
        assert self.run(self.h.store.delete_schedule("s")) == there

    @precondition(lambda self: self.model.version is not None)
    @rule()
    def read_schedule(self) -> None:
        [found] = self.run(self.h.store.schedules())
        assert self.model.version is not None
        self.read(found, self.model.version)

    def read(self, schedule: Schedule, version: int) -> None:
        self.reads = [*self.reads, (schedule, version)][-4:]

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), ids=id_lists, delay=delays)
    def fire(self, data: st.DataObject, ids: list[str], delay: int) -> None:
        schedule, version = data.draw(st.sampled_from(self.reads))
        delay *= self.unit
        jobs = [self.h.job(id, queue=QUEUES[0], delay_ms=delay) for id in ids]
        expected = version == self.model.version
        if expected:
            self.model.move_schedule()
            for job in jobs:
                self.added(job)
        next_ms = self.h.now + delay
        assert self.run(self.h.store.fire(schedule, jobs, next_ms=next_ms)) == expected

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), paused=st.booleans())
    def replace_schedule(self, data: st.DataObject, paused: bool) -> None:
        schedule, version = data.draw(st.sampled_from(self.reads))
        expected = version == self.model.version
        if expected:
            self.model.move_schedule()
        new = msgspec.structs.replace(schedule, paused=paused)
        assert self.run(self.h.store.replace_schedule(new)) == expected

    # --- After every step

    @invariant()
    def every_job_is_as_the_model_says(self) -> None:
        found = self.run(self.h.store.get(IDS))
        for id, job in zip(IDS, found, strict=True):
            record = self.model.jobs.get(id)
            assert (job is None) == (record is None), id
            if job is None or record is None:
                continue
            # When a store comes across an abandoned job is its own affair.
            if record.lost(self.h.now) and (record.pending or record.cancel_requested):
                if job.state is State.CANCELLED and not record.pending:
                    assert record.lease is not None and job.ended_ms is not None
                    assert record.lease <= job.ended_ms <= self.h.now
                if job.state is not State.RUNNING:
                    self.model.abandon(id, job.ended_ms)
            assert seen(job) == record.view()
        self.every_count_is_exact()

    def every_count_is_exact(self) -> None:
        assert self.run(self.h.all_counts()) == self.model.counts()

    @precondition(lambda self: self.model.jobs)
    @rule(
        state=st.none() | st.sampled_from(State),
        queue=st.none() | st.sampled_from(QUEUES),
        meta=st.none() | st.sampled_from([("customer", "1"), ("customer", "2"), ("batch", "1")]),
        limit=st.integers(1, 3),
    )
    def find(
        self, state: State | None, queue: str | None, meta: tuple[str, str] | None, limit: int
    ) -> None:
        query, cursor = Query(state=state, queue=queue, meta=meta), None
        found: list[str] = []
        while True:
            page = self.run(self.h.store.find(query, cursor=cursor, limit=limit))
            found += [job.id for job in page.jobs]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(found) == sorted(
            id
            for id, job in self.model.jobs.items()
            if state in (None, job.state)
            and queue in (None, job.queue)
            and (meta is None or (job.meta or {}).get(meta[0]) == meta[1])
        )


# Passing takes seconds; finding the shortest story of a failure takes minutes.
@pytest.mark.timeout(600)
def test_a_store_does_what_the_model_does(store_name: str) -> None:
    class Machine(StoreMachine):
        name = store_name

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES[store_name],
            stateful_step_count=40,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
