"""The distributed store: NATS JetStream, on many machines, with replicas.

    nats://user:password@host1:4222,host2:4222/namespace?replicas=3&shards=2&ahead=1s

A namespace is one or more streams (shards) with one message per job. `steps` has the subjects of a
job's states, `jobs` moves it between them, `delivery` delivers ready jobs. This module makes one
store of the shards.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tickwheel import changes, job as life
from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.changes import Put
from tickwheel.clock import MS_NS, S_NS, Clock, StoreClock, SystemClock
from tickwheel.concurrency import first_of
from tickwheel.errors import StoreUnavailable
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
)
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.answers import nanoseconds
from tickwheel.stores.nats.away import Away
from tickwheel.stores.nats.browse import counted, cursor_at, parse_cursor, scans
from tickwheel.stores.nats.buckets import take_token
from tickwheel.stores.nats.ends import Ends
from tickwheel.stores.nats.health import durability_of, findings_of, sizes_of
from tickwheel.stores.nats.parked import Arrivals, Part
from tickwheel.stores.nats.requests import Requests, gather
from tickwheel.stores.nats.shard import Shard
from tickwheel.stores.nats.steps import Line
from tickwheel.stores.nats.url import NatsOptions
from tickwheel.stores.nats.wire import Message, Wire, publish_line

# How often the server's clock is measured, and how often the settings of the streams are checked.
MEASURE_S, WATCH_S = 30.0, 5.0
# How far the server's clock may be ahead of our estimate.
DOUBT_MS = 1_000
# How many lines one message names.
LINES_NAMED = 100
# How many jobs an operator's step reads at once, and then writes.
OPERATED = 200


class NatsStore:
    """Jobs in JetStream. One object serves one event loop."""

    # A batch spends most of its time on the server's disk, and several can do so together.
    max_inflight = 4
    own_clock = False

    def __init__(self, options: NatsOptions, clock: Clock | None = None) -> None:
        self._options = options
        self._own_clock = clock or SystemClock()
        self._clock = StoreClock(self._own_clock)
        self.ahead_ms = options.ahead_ms
        self._wire: Wire | None = None
        self._shards: list[Shard] = []
        self._begin = 0
        self._watched_s = 0.0
        # Shards that don't answer: the others don't wait for them.
        self._away = Away(self._shards)
        self._requests = Requests(options.namespace)
        # The tasks whose parked jobs this handle hears of, and its subscription.
        self._tasks: Collection[str] = ()
        self._parked_subscription: int | None = None
        self._ends = Ends(options.namespace)

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> NatsStore:
        return cls(NatsOptions.of(url), clock)

    # --- Open and close

    async def open(self) -> None:
        if self._wire is not None:
            return
        servers = await self._options.open()
        options = self._options
        self._wire = wire = Wire(
            servers, credentials=options.credentials(), tls=options.tls(), inbox=options.inbox
        )
        self._shards[:] = [
            Shard(wire, options, n, self._clock.now_ms, self._notify_full, self._notify_parked)
            for n in range(options.shards)
        ]
        wire.on_stray = self._stray
        self._ends.wire = self._requests.wire = wire
        try:
            await wire.open()
            wire.on_up = self._came_back
            for shard in self._shards:
                await shard.stream.ensure()
                await shard.room.check()
            wire.subscribe(self._full_subject, self._found_full)
            await self._clock.measure(self.time_ns)
            self._watched_s = self._own_clock.monotonic_ns() / S_NS
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is None:
            return
        await self._away.close()
        self._ends.close()
        for shard in self._shards:
            await shard.delivery.close()
        await wire.close()
        self._requests.close()
        self._tasks, self._parked_subscription = (), None
        await self._options.close()

    def new_handle(self) -> NatsStore:
        return NatsStore(self._options, self._own_clock)

    async def time_ns(self) -> int:
        times: list[int] = []

        async def ask(shard: Shard) -> None:
            if not times:
                times.append(nanoseconds((await shard.stream.info())["ts"]))

        await self._away.of_each(self._turn(), ask)
        return times[0]

    def _came_back(self) -> None:
        """The connection was lost and is there again; so may be the server."""
        self._away.forget()
        for shard in self._shards:
            shard.stream.doubt((self._clock.now_ms() + DOUBT_MS) * MS_NS)
            shard.delivery.reconnected()
        self._requests.reconnected()
        self._ends.reconnected()

    def _stray(self, message: Message) -> None:
        for shard in self._shards:
            if message.subject.startswith(shard.layout.prefix + "."):
                shard.delivery.stray(message)

    @property
    def _first(self) -> Shard:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return self._shards[0]

    async def _keep_watch(self) -> None:
        """Keep track of the server's clock, which decides whether a job is due soon, and check that
        the settings of the streams are safe."""
        if self._clock.stale(MEASURE_S):
            await self._clock.measure(self.time_ns)
        now_s = self._own_clock.monotonic_ns() / S_NS
        if now_s - self._watched_s >= WATCH_S:
            self._watched_s = now_s
            for shard in self._shards:
                await shard.stream.keep_right()

    # --- Which shard

    def _shard(self, key: str) -> Shard:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return self._shards[zlib.crc32(key.encode()) % len(self._shards)]

    def _turn(self) -> list[Shard]:
        """The shards, starting with another one each time, so that none is always the last."""
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        self._begin = (self._begin + 1) % len(self._shards)
        return self._shards[self._begin :] + self._shards[: self._begin]

    def _of_job(self, id: str) -> Shard:
        # The id of a tick's job begins with the name of its schedule: both are in one shard, so
        # that they can be written in one step.
        return self._shard(id.rpartition("@")[0] or id)

    def _split(self, ids: Iterable[str]) -> dict[Shard, list[str]]:
        if len(self._shards) == 1:
            return {self._first: list(dict.fromkeys(ids))}
        found: defaultdict[Shard, list[str]] = defaultdict(list)
        for id in dict.fromkeys(ids):
            found[self._of_job(id)].append(id)
        return found

    def _portions(self, ids: Iterable[str]) -> Iterator[tuple[Shard, list[str]]]:
        for shard, mine in self._split(ids).items():
            for some in portions(mine, most=OPERATED):
                yield shard, some

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        first = life.first_by_id(jobs)
        added: set[str] = set()
        await self._keep_watch()

        async def add(shard: Shard, ids: list[str]) -> None:
            mine = [first[id] for id in ids]
            await shard.prepare(mine)
            added.update(await shard.jobs.add(mine))

        for failure in (await self._away.of_all(self._split(first), add)).values():
            raise failure
        return life.which_added(jobs, added)

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        return await self._ask(puts, now_ms)

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        return await self._ask(moves, now_ms)

    async def _ask(self, asks: Sequence[Put | Move], now_ms: int) -> list[Any]:
        await self._keep_watch()
        asked = changes.by_id(asks)
        answers: dict[str, list[Any]] = {}
        for shard, ids in self._split(asked).items():
            if shard.stream.unsafe:
                raise StoreUnavailable(shard.stream.unsafe)
            for some in portions(ids, lambda id: asked[id].bytes, most=OPERATED):
                mine = [ask for id in some for ask in asked[id].asks]
                found, told = await shard.changing.ask(mine, now_ms=now_ms)
                answers |= found
                self._requests.tell(told)
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
        self._requests.event(worker)
        self._subscribe_parked(tasks)
        await self._keep_watch()
        if again and call is not None and (held := await self._claimed_by(call, now_ms, lease_ms)):
            return held
        wanted = list(dict.fromkeys(queues))
        claimed: list[Job] = []
        left_bytes = BATCH_BYTES
        shards = self._away.others(self._turn())
        left = len(shards)

        async def claim(shard: Shard) -> None:
            nonlocal left, left_bytes
            share, left = left, left - 1
            some = await shard.claim(
                wanted,
                worker=worker,
                limit=-(-(limit - len(claimed)) // share),
                most_bytes=left_bytes // share,
                now_ms=now_ms,
                lease_ms=lease_ms,
                tasks=tasks,
                call=call,
            )
            left_bytes -= sum(map(job_bytes, some))
            claimed.extend(some)

        self._away.served = wanted
        await self._away.of_each(shards, claim)
        return claimed

    async def _claimed_by(self, call: int, now_ms: int, lease_ms: int) -> list[Job]:
        """What this call claimed, as far as we still hold it."""
        held: list[Job] = []

        async def ask(shard: Shard) -> None:
            held.extend(await shard.jobs.claimed_by(call, now_ms=now_ms, lease_ms=lease_ms))

        await self._away.of_each(self._turn(), ask)
        return held

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        shards = self._turn()
        self._subscribe_parked(tasks)
        if not queues:
            await asyncio.sleep(max(until_ms - now_ms, 0) / 1000)
            return
        seconds = (until_ms - now_ms) / 1000
        await first_of(*(shard.delivery.wait(queues, seconds, tasks) for shard in shards))

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        async def look(asks: dict[str, Ask]) -> None:
            await self._away.of_each(self._turn(), lambda shard: gather(shard, worker, asks))

        wait_s = (until_ms - now_ms) / 1000
        return await self._requests.asked(worker, look, known, wait_s)

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        await self._ends.watch(ids, tell, now_ms=now_ms, until_ms=until_ms)

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        by_id = {job.id: job for job in jobs}
        extended: dict[str, Job] = {}

        async def extend(shard: Shard, ids: list[str]) -> None:
            held = [by_id[id] for id in ids]
            extended.update(await shard.jobs.extend(held, now_ms=now_ms, lease_ms=lease_ms))

        split = self._split(by_id)
        failed = await self._away.of_all(split, extend)
        for shard, failure in failed.items():
            if len(failed) == len(split):
                raise failure
            # These may still be ours: we hold them until their leases run out.
            mine = [by_id[id] for id in split[shard]]
            extended |= {job.id: job for job in mine if life.held(job, now_ms=now_ms)}
        return [extended.get(job.id) for job in jobs]

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers: list[bool] = [False] * len(settlements)
        todo = list(enumerate(settlements))
        while todo:
            # Each id once per round: a repeat is answered by what the first one did.
            once = {settlement.job.id: (n, settlement) for n, settlement in reversed(todo)}

            async def settle(
                shard: Shard, ids: list[str], once: dict[str, tuple[int, Settlement]] = once
            ) -> None:
                mine = [once[id][1] for id in ids]
                taken = await shard.jobs.settle(mine, now_ms=now_ms)
                for id in ids:
                    answers[once[id][0]] = id in taken
                self._ends.notify(taken)
                shard.notify_parked(
                    [each.job for each in mine if each.outcome is Outcome.PARK], taken
                )

            for failure in (await self._away.of_all(self._split(once), settle)).values():
                raise failure
            done = {n for n, _ in once.values()}
            todo = [(n, settlement) for n, settlement in todo if n not in done]
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        answers: dict[str, CancelOutcome] = {}
        for shard, mine in self._portions(ids):
            found, requested = await shard.jobs.cancel(mine, now_ms=now_ms)
            answers |= found
            self._ends.notify(found)
            self._requests.tell(requested)
        return [answers.get(id, CancelOutcome.UNKNOWN) for id in ids]

    def _notify(self, subject: str, data: bytes = b"") -> None:
        assert self._wire is not None
        self._wire.send(publish_line(subject, data))

    @property
    def _parked_subject(self) -> str:
        """The subject that says which lines have got parked jobs; no worker can have this name."""
        return f"{self._first.layout.notify_cancel}.=parked"

    def _notify_parked(self, shard: int, arrivals: Arrivals) -> None:
        for some in portions(list(arrivals.items()), most=LINES_NAMED):
            # If this is lost, others find out by themselves.
            with contextlib.suppress(StoreUnavailable):
                data = msgspec.json.encode((shard, some))
                self._notify(self._parked_subject, data)

    def _subscribe_parked(self, tasks: Collection[str]) -> None:
        """Hear of parked jobs of these tasks. Of the handles that know the same tasks, one is told
        of each."""
        if not tasks or tasks is self._tasks or self._wire is None:
            return
        same, self._tasks = set(self._tasks) == set(tasks), tasks
        if same:
            return
        if self._parked_subscription is not None:
            self._wire.unsubscribe(self._parked_subscription)
        names = "\n".join(sorted(tasks)).encode()
        group = f"parked-{hashlib.blake2b(names, digest_size=10).hexdigest()}"
        self._parked_subscription = self._wire.subscribe(
            self._parked_subject, self._on_parked, group=group
        )
        for shard in self._shards:
            shard.parked.doubt()

    def _on_parked(self, message: Message) -> None:
        number, lines = _arrivals(message.data)
        known = {line: part for line, part in lines if line.task in self._tasks}
        self._shards[number].parked.arrived(known)

    @property
    def _full_subject(self) -> str:
        """The subject that says that the store is full; no worker can have this name."""
        return f"{self._first.layout.notify_cancel}.=full"

    def _notify_full(self) -> None:
        with contextlib.suppress(StoreUnavailable):
            self._notify(self._full_subject)

    def _found_full(self, _: Message) -> None:
        for shard in self._shards:
            shard.room.found_full()

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        done: set[str] = set()
        for shard, mine in self._portions(ids):
            done |= await shard.jobs.rerun(mine, now_ms=now_ms)
        return each_once(ids, done)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        done: set[str] = set()
        for shard, mine in self._portions(ids):
            done |= await shard.jobs.delete(mine)
        return each_once(ids, done)

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        pruned = 0

        async def prune(shard: Shard) -> None:
            nonlocal pruned
            for state in states:
                left = limit - pruned
                pruned += await shard.jobs.prune(state, before_ms=before_ms, limit=left)

        await self._away.of_each(self._turn(), prune)
        return pruned

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        return await self._shard(schedule.name).schedules.put(schedule)

    async def replace_schedule(self, schedule: Schedule) -> bool:
        return await self._shard(schedule.name).schedules.replace(schedule)

    async def delete_schedule(self, name: str) -> bool:
        return await self._shard(name).schedules.delete(name)

    async def schedules(self) -> list[Schedule]:
        found = [each for shard in self._turn() for each in await shard.schedules.all()]
        return sorted(found, key=lambda schedule: schedule.name)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        shard = self._shard(schedule.name)
        if any(self._of_job(job.id) is not shard for job in jobs):
            raise StoreUnavailable(
                f"the jobs of schedule {schedule.name!r} are in other shards: "
                "their ids must be the schedule's name, @ and the tick"
            )
        await self._keep_watch()
        await shard.prepare(jobs)
        return await shard.schedules.fire(schedule, jobs, next_ms=next_ms)

    # --- Records: those of a kind are in one shard

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        await self._shard(kind).records.put(kind, records)

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        return await self._shard(kind).records.page(kind, after, limit)

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        found = await self._shard(kind).records.get(kind, names)
        return [found.get(name) for name in names]

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        return each_once(names, await self._shard(kind).records.delete(kind, names))

    # --- Browse and operate

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: dict[str, Job] = {}
        for shard, mine in self._split(ids).items():
            found |= await shard.jobs.get(mine)
        return [found.get(id) for id in ids]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Tasks, meta and times have no index: a page scans about a thousand jobs for them."""
        shards = sorted(self._turn(), key=lambda shard: shard.layout.stream)
        at, rest, missing = parse_cursor(cursor)
        jobs: list[Job] = []
        looked = 0
        while at < len(shards) and not jobs:
            shard, after = shards[at], ""

            async def look(shard: Shard, _: list[str], rest: str = rest) -> None:
                nonlocal jobs, after, looked
                jobs, after, some = await shard.finder.find(query, rest, limit)
                looked += some

            failed = await self._away.of_all({shard: []}, look)
            if failed and len(shards) == 1:
                raise failed[shard]
            missing += [at] if failed else []
            at, rest = (at, after) if after else (at + 1, "")
            if after and scans(query):
                break  # the next page scans on
        if missing and at == len(shards) and not jobs:
            names = ", ".join(shards[each].layout.stream for each in missing)
            raise StoreUnavailable(f"no answer from {names}: their jobs are not listed")
        more = at < len(shards) or (missing and at == len(shards))
        place = cursor_at(at, rest, missing) if more else None
        return Page(jobs=jobs, cursor=place, looked=looked)

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        return None

    async def parked(self) -> list[Job]:
        found = [job for shard in self._turn() for job in await shard.parked.first_of_each()]
        first: dict[tuple[str, str], Job] = {}
        for job in sorted(found, key=lambda job: job.due_ms):
            first.setdefault((job.queue, job.task), job)
        return list(first.values())[:PARKED_LIMIT]

    async def queues(self) -> list[QueueInfo]:
        shards = self._turn()
        consumers = []
        for shard in shards:
            queues = {line.queue for line in await shard.parked.notes()}
            consumers += await shard.stream.count(queues)
        spare = [
            each for shard in shards for each in await shard.jobs.still_ready(shard.delivery.spare)
        ]
        return counted(consumers, spare)

    async def pause(self, queue: str, paused: bool) -> None:
        for shard in self._turn():
            await shard.stream.pause(queue, paused)
            if not paused:
                self._notify(f"{shard.layout.notify}.r.{steps.subject_part(queue)}.again")

    async def beat(self, worker: WorkerInfo) -> None:
        await self._shard("").beat(worker)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._shard("").workers(now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await take_token(self._shard(key), key, rate, now_ms)

    async def durability(self) -> Durability:
        return await durability_of(self._options, self._first.stream)

    async def findings(self) -> list[Finding]:
        wire, streams = self._wire, [shard.stream for shard in self._shards]
        if wire is None:
            raise StoreUnavailable("the store is closed")
        return await findings_of(self._options, wire, streams)

    async def sizes(self) -> list[Size]:
        return await sizes_of([shard.stream for shard in self._shards])


_arrivals = msgspec.json.Decoder(tuple[int, list[tuple[Line, Part]]]).decode
