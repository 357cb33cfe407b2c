"""`redis://`: jobs in a Redis or Valkey server, for teams that have one.

Every step is one call of one script (statements.lua), so it is atomic. Waiting jobs are in sorted
sets by due time, running ones by the end of their lease, and a claim takes a short range of each.
All steps go by the `now_ms` that they are given; only `time_ns` reads the server's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tickwheel import changes, job as life
from tickwheel.batch import BATCH, portions
from tickwheel.changes import Put
from tickwheel.clock import MS_NS, Clock
from tickwheel.errors import StoreIncompatible, StoreUnavailable
from tickwheel.ids import new_fence
from tickwheel.job import (
    CancelOutcome,
    Job,
    Move,
    MoveOutcome,
    Outcome,
    PutOutcome,
    Settlement,
    State,
)
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import (
    NO_ASKS,
    RECORDS_LIMIT,
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
    job_bytes,
    put_bytes,
    record_bytes,
    settlement_bytes,
)
from tickwheel.stores.redis import browse, health, keys, records, times
from tickwheel.stores.redis.changing import change
from tickwheel.stores.redis.notify import EndSubscriber, Subscriber
from tickwheel.stores.redis.parking import Parked, topics
from tickwheel.stores.redis.reading import QUEUES, get, names_of_queues
from tickwheel.stores.redis.url import RedisOptions
from tickwheel.stores.redis.wire import Wire
from tickwheel.stores.waiting import slack_of

# The version of the layout that the head of statements.lua describes.
SCHEMA = 2
# How often a claim or a wait asks again because other tasks have parked jobs now.
PARKED_TRIES = 3

# The flag of a job that others have changed, in the answer to a settle.
CHANGED = ord("n")

_CANCELLED = {
    "c": CancelOutcome.CANCELLED,
    "a": CancelOutcome.REQUESTED,
    "l": CancelOutcome.TOO_LATE,
    "u": CancelOutcome.UNKNOWN,
}


class RedisStore:
    """Keeps jobs in one Redis server, or in one slot of a cluster."""

    max_inflight = 1
    own_clock = False

    def __init__(self, options: RedisOptions) -> None:
        self.ahead_ms = options.ahead_ms
        self._options = options
        self._wire: Wire | None = None
        self._subscriber: Subscriber | None = None
        self._ends: EndSubscriber | None = None
        self._parked = Parked()
        self._turns = asyncio.Lock()

    @classmethod
    def from_url(cls, url: str, *, clock: Clock | None = None) -> RedisStore:
        """The clock is not used: the server keeps the time."""
        return cls(RedisOptions.of(url))

    # --- Open and close

    async def open(self) -> None:
        if self._wire is not None:
            return
        wire = Wire(self._options)
        try:
            await health.check(wire, self._options)
            schema = int(await wire.step("open", str(SCHEMA), keys=keys.OPENING))
            if schema > SCHEMA:
                raise StoreIncompatible(
                    f"the namespace {self._options.namespace!r} was written by a newer Tickwheel "
                    f"(schema {schema}, this one knows {SCHEMA}): upgrade Tickwheel, or use "
                    "another namespace"
                )
        except BaseException:
            await wire.close()
            raise
        self._wire, self._subscriber = wire, Subscriber(wire, self._options)
        self._ends = EndSubscriber(wire, self._options)
        # An extend that overtook a settle on another connection would report a job as lost that the
        # caller has just settled.
        self._turns = asyncio.Lock()

    async def close(self) -> None:
        wire, subscribers = self._wire, (self._subscriber, self._ends)
        self._wire = self._subscriber = self._ends = None
        for each in subscribers:
            if each is not None:
                await each.close()
        if wire is not None:
            await wire.close()

    def new_handle(self) -> RedisStore:
        return RedisStore(self._options)

    async def time_ns(self) -> int:
        seconds, micros = await self._open_wire.ask("TIME")
        return int(seconds) * 1_000_000_000 + int(micros) * 1000

    @property
    def _open_wire(self) -> Wire:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return self._wire

    @property
    def _open_subscriber(self) -> Subscriber:
        if self._subscriber is None:
            raise StoreUnavailable("the store is closed")
        return self._subscriber

    async def _step(self, name: str, *args: Any, keys: Iterable[str] = ()) -> Any:
        return await self._open_wire.step(name, *args, keys=keys)

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added: list[bool] = []
        for some in portions(jobs, job_bytes):
            columns = records.columns(some)
            added += _flags(await self._step("add", *columns, keys=_keys_of(columns)))
        return added

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        answers: list[PutOutcome] = []
        for some in portions(puts, put_bytes):
            answers += await self._ask(some, now_ms)
        return answers

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        answers: list[MoveOutcome] = []
        for some in portions(moves):
            answers += await self._ask(some, now_ms)
        return answers

    async def _ask(self, asks: Sequence[Put | Move], now_ms: int) -> list[Any]:
        asked = changes.by_id(asks)

        def decide(job: Job | None, id: str) -> tuple[list[Any], Job | None]:
            return asked[id].of(job, now_ms=now_ms)

        answers = await change(self._open_wire, "ask", list(asked), decide, now_ms=now_ms)
        return changes.in_order(asks, answers)

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
        queues = list(dict.fromkeys(queues))
        if not queues or limit < 1:
            return []
        fence, name = new_fence() if call is None else call, records.as_line(worker)
        if again and (held := await self._claimed_by(queues, fence, now_ms, lease_ms)):
            return held
        taken, lines, *changed = await self._step_for(
            *("claim", queues, frozenset(tasks)),
            *(name, str(fence), min(limit, BATCH), now_ms, self.ahead_ms, lease_ms),
        )
        if changed:
            await self._take_back([id.decode() for id in changed[0]], now_ms)
            if not taken:
                return await self.claim(
                    queues,
                    worker=worker,
                    limit=limit,
                    now_ms=now_ms,
                    lease_ms=lease_ms,
                    tasks=tasks,
                    call=fence,
                )
        return [
            life.claimed(
                records.read(record, since),
                worker=worker,
                fence=fence,
                now_ms=now_ms,
                lease_ms=lease_ms,
            )
            for record, since in zip(taken, lines, strict=True)
        ]

    async def _take_back(self, ids: Sequence[str], now_ms: int) -> None:
        """Decide what becomes of lost jobs that were replaced or moved while they ran."""

        def decide(job: Job | None, _: str) -> tuple[None, Job | None]:
            if job is None or job.state is not State.RUNNING or life.held(job, now_ms=now_ms):
                return None, job
            after = life.taken_back(job) if job.told else job
            if after.state is State.RUNNING and after.cancel_requested:
                return None, life.cancelled(after, now_ms=now_ms)
            return None, life.lost(after) if after.state is State.RUNNING else after

        await change(self._open_wire, "change", ids, decide, now_ms=now_ms)

    async def _step_for(
        self, name: str, queues: list[str], tasks: frozenset[str], *args: Any
    ) -> Any:
        """Run a step that also looks for parked jobs of these tasks."""
        sets = keys.of_queues(queues)
        for _ in range(PARKED_TRIES if tasks else 0):
            known = self._parked.of(queues, tasks)
            answer = await self._step(name, queues, known, True, *args, keys=sets)
            if answer[0] is not None:
                return answer
            self._parked.learn(answer[1])
        last_known = self._parked.of(queues, tasks) if tasks else False
        return await self._step(name, queues, last_known, False, *args, keys=sets)

    async def _claimed_by(
        self, queues: list[str], fence: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        """The jobs that the claim with this fence took and still holds."""
        taken, lines = await self._step(
            "claimed_by", queues, str(fence), keys=keys.of_queues(queues)
        )
        jobs = [job for job in records.read_all(taken, lines) if job is not None]
        held = await self.extend(jobs, now_ms=now_ms, lease_ms=lease_ms)
        return [job for job in held if job is not None]

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        extended: list[Job | None] = []
        for some in portions(jobs):
            places = [records.place(job) for job in some]
            async with self._turns:
                answer = await self._step(
                    *("extend", [job.id for job in some], [str(job.fence) for job in some], places),
                    [records.started_part(job) for job in some],
                    *(now_ms, now_ms + lease_ms, records.told(some)),
                    keys=keys.of_places(places),
                )
            flags = list(zip(some, answer.decode(), strict=True))
            changed = [job.id for job, flag in flags if flag == "3"]
            now = {each.id: each for each in await self.get(changed) if each} if changed else {}
            extended += [
                None
                if flag == "0"
                else life.extended(
                    life.as_held(
                        job,
                        cancel_requested=now[job.id].cancel_requested
                        if job.id in now
                        else flag == "2",
                        changes=now[job.id].changes if job.id in now else None,
                    ),
                    job,
                    now_ms=now_ms,
                    lease_ms=lease_ms,
                )
                for job, flag in flags
            ]
        return extended

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        """The script knows whether the job was asked to stop, and picks one of two outcomes."""
        answers: list[bool] = []
        for portion in portions(settlements, settlement_bytes):
            some = [_outcome(settlement) for settlement in portion]
            jobs = [settlement.job for settlement in portion]
            places = [records.place(job) for job in jobs]
            parked = [s.job.queue for s in portion if s.outcome is Outcome.PARK]
            async with self._turns:
                answer = await self._step(
                    *("settle", now_ms, [job.id for job in jobs], [str(job.fence) for job in jobs]),
                    *(places, [each.state for each in some]),
                    *([each.score for each in some], [each.record for each in some]),
                    *([each.ended_ms for each in some], [each.stopped for each in some]),
                    keys=keys.of_places(places) + keys.of_parked(parked),
                )
            flags = _flags(answer)
            if told := {n: portion[n] for n, flag in enumerate(answer) if flag == CHANGED}:
                taken = await self._settle_changed(list(told.values()), now_ms)
                for n, settlement in told.items():
                    flags[n] = taken[settlement.job.id]
            answers += flags
        return answers

    async def _settle_changed(
        self, settlements: Sequence[Settlement], now_ms: int
    ) -> dict[str, bool]:
        """Settle jobs that others have changed while they ran: read, decided and written."""
        by_id = {settlement.job.id: settlement for settlement in reversed(settlements)}

        def decide(job: Job | None, id: str) -> tuple[bool, Job | None]:
            claims = {} if job is None else {id: job}
            [taken], settled = life.settle([by_id[id]], claims, now_ms=now_ms)
            return taken, settled.get(id, job)

        return await change(self._open_wire, "change", list(by_id), decide, now_ms=now_ms)

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        letters = (await self._step_by_step("cancel", ids, now_ms)).decode()

        def decide(job: Job | None, _: str) -> tuple[CancelOutcome, Job | None]:
            if job is None:
                return CancelOutcome.UNKNOWN, None
            return life.cancel(job, now_ms=now_ms)

        told = [id for id, letter in zip(ids, letters, strict=True) if letter == "n"]
        answers = await change(self._open_wire, "change", told, decide, now_ms=now_ms)
        return [
            answers[id] if letter == "n" else _CANCELLED[letter]
            for id, letter in zip(ids, letters, strict=True)
        ]

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        return _flags(await self._step_by_step("rerun", ids, now_ms))

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return _flags(await self._step_by_step("delete", ids))

    async def _step_by_step(self, name: str, ids: Sequence[str], *args: Any) -> bytes:
        """Run a step on jobs in any place. The keys that it touches depend on the places, so those
        are read first. The script may answer for the first few jobs only, if they are large or
        have moved to another place since."""
        answer = b""
        while len(answer) < len(ids):
            some = ids[len(answer) : len(answer) + BATCH]
            places = [place.decode() for place in await self._step("places", some)]
            for run in keys.split_by_queues(places, QUEUES):
                queues = {place[2:] for place in places[run] if place}
                flags = await self._step(
                    *(name, some[run], places[run], *args),
                    keys=[*keys.of_queues(queues), *keys.META],
                )
                answer += flags
                if len(flags) < len(places[run]):
                    break
        return answer

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        letters = [records.LETTERS[state] for state in states if state.ended]
        pruned = 0
        async for names in names_of_queues(self._open_wire):
            sets = [
                each for name in names for state in letters for each in keys.of_state(state, name)
            ]
            old = await self._step("old", letters, names, before_ms, keys=sets)
            queues = [name.decode() for name in old]
            count = most = 0
            while queues and count == most and pruned < limit:
                most = min(limit - pruned, BATCH)
                count = await self._step(
                    *("prune", letters, queues, before_ms, most),
                    keys=[*keys.of_queues(queues), *keys.META],
                )
                pruned += count
            if pruned >= limit:
                break
        return pruned

    # --- Waiting

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        queues, known = list(dict.fromkeys(queues)), frozenset(tasks)

        ahead_ms, slack_ms = self.ahead_ms, slack_of(self.ahead_ms)

        async def next_ms(now_ms: int) -> int | None:
            # As of when a claim would not wait any longer: until then we want to be notified.
            ripe_ms = now_ms - slack_ms
            answer, _ = await self._step_for("next", queues, known, ripe_ms, until_ms, ahead_ms)
            return int(answer) if answer else None

        wanted = topics(known).union(f"q{queue}" for queue in queues)
        await self._open_subscriber.until_due(
            wanted, next_ms, now_ms=now_ms, until_ms=until_ms, slack_ms=slack_ms
        )

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        async def find() -> dict[str, Ask]:
            return await browse.asked(self._open_wire, worker)

        topic = f"a{records.as_line(worker)}"
        return await self._open_subscriber.until_found(
            [topic], find, known=known, now_ms=now_ms, until_ms=until_ms
        )

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        if self._ends is None:
            raise StoreUnavailable("the store is closed")
        await self._ends.watch(ids, tell, now_ms=now_ms, until_ms=until_ms)

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        stored = msgspec.structs.replace(schedule, fence=new_fence())
        await self._step("schedule", schedule.name, records.schedule_record(stored))
        return stored

    async def replace_schedule(self, schedule: Schedule) -> bool:
        record = records.schedule_record(msgspec.structs.replace(schedule, fence=new_fence()))
        return bool(await self._step("schedule", schedule.name, record, str(schedule.fence)))

    async def delete_schedule(self, name: str) -> bool:
        wire = self._open_wire
        return bool(await wire.send("HDEL", wire.key("schedule"), name))

    async def schedules(self) -> list[Schedule]:
        return await browse.schedules(self._open_wire)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        # If the fence is still the same, so is everything else in the caller's copy.
        moved = msgspec.structs.replace(
            schedule,
            next_ms=next_ms,
            last_id=jobs[-1].id if jobs else schedule.last_id,
            fence=new_fence(),
        )
        columns = records.columns(jobs)
        fired = await self._step(
            *("fire", schedule.name, str(schedule.fence), records.schedule_record(moved)),
            *columns,
            keys=_keys_of(columns),
        )
        return bool(fired)

    # --- Records

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        for some in portions(list(records.items()), record_bytes):
            names, texts = zip(*some, strict=True)
            await self._step("put_records", kind, names, texts, keys=keys.of_records(kind))

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        return await browse.records_of(self._open_wire, kind, after, limit)

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        found: list[str | None] = []
        for some in portions(names, most=RECORDS_LIMIT):
            found += await browse.get_records(self._open_wire, kind, some)
        return found

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        answers: list[bool] = []
        for some in portions(names):
            step = self._step("delete_records", kind, some, keys=keys.of_records(kind))
            answers += _flags(await step)
        return answers

    # --- Browsing and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        return await get(self._open_wire, ids)

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs with some meta have an index: a sorted set. A task has none: a page scans up to a
        thousand jobs for it, and for any filter beside meta."""
        return await browse.find(self._open_wire, query, cursor, limit)

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        return await times.slot_counts(self._open_wire, slots)

    async def parked(self) -> list[Job]:
        return await browse.parked(self._open_wire)

    async def queues(self) -> list[QueueInfo]:
        return await browse.queues(self._open_wire)

    async def pause(self, queue: str, paused: bool) -> None:
        await self._step("pause", queue, paused, keys=keys.of_queues([queue]))

    async def beat(self, worker: WorkerInfo) -> None:
        gone_ms = worker.seen_ms + worker.gone_after_ms if worker.gone_after_ms else False
        await self._step(
            "beat", worker.name, msgspec.json.encode(worker).decode(), gone_ms, worker.seen_ms
        )

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await browse.workers(self._open_wire, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        cost_ns = -(-rate.period_ms * MS_NS // rate.limit)
        burst_ns = cost_ns * (rate.burst - 1)
        wait_ms = await self._step(
            *("throttle", key, now_ms, *divmod(cost_ns, MS_NS), *divmod(burst_ns, MS_NS)),
            keys=[f"bucket:{key}"],
        )
        return int(wait_ms)

    async def durability(self) -> Durability:
        return await health.durability(self._open_wire)

    async def findings(self) -> list[Finding]:
        return await health.findings(self._open_wire)

    async def sizes(self) -> list[Size]:
        return await health.sizes(self._open_wire)


class _Outcome(msgspec.Struct, frozen=True):
    """What becomes of a job; `stopped` if it was asked to stop and would otherwise wait again. The
    state is p if it is to be parked."""

    state: str
    score: int
    record: str
    ended_ms: int
    stopped: str


def _outcome(settlement: Settlement) -> _Outcome:
    after, stopped = life.settled_either_way(settlement)
    return _Outcome(
        state="p" if after.parked else records.LETTERS[after.state],
        score=after.due_ms if after.ended_ms is None else after.ended_ms,
        record=records.record(after),
        ended_ms=settlement.ended_ms,
        stopped="" if stopped is after else records.record(stopped),
    )


def _keys_of(columns: records.Columns) -> list[str]:
    return keys.of_places(columns.places) + (list(keys.META) if columns.metas else [])


def _flags(answer: bytes) -> list[bool]:
    return [flag == 49 for flag in answer]
