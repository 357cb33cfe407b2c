"""The distributed store: NATS JetStream, on many machines, with replicas.

    nats://user:password@host1:4222,host2:4222/namespace?replicas=3&shards=2&ahead=1s

A namespace is one or more streams (shards) of one message per job. `steps` says where each state of
a job stands, `jobs` how it moves, `ready` how ready jobs are handed out. Here the shards become one
store.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from tickwheel.batch import BATCH_BYTES, few_at_a_time, portions
from tickwheel.clock import S_NS, Clock, StoreClock, SystemClock, first_of
from tickwheel.errors import StoreUnavailable
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import Durability, Finding, Page, Query, QueueInfo, WorkerInfo, job_bytes
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.health import durability_of, findings_of
from tickwheel.stores.nats.jobs import PARALLEL, Jobs
from tickwheel.stores.nats.looking import Finder, counted
from tickwheel.stores.nats.options import Options
from tickwheel.stores.nats.ready import Ready, token_bytes
from tickwheel.stores.nats.steps import Check, Layout, Step
from tickwheel.stores.nats.stream import BATCH, Stream, Token
from tickwheel.stores.nats.wire import Message, Wire, publish_line
from tickwheel.throttle import Rate, admit

# A bucket that nobody asked for this long, and that is full again, is forgotten.
BUCKET_TTL_S = 3600
# How often a claim asks for more where tokens were spent.
ROUNDS = 3
# The server's clock is asked again this often.
MEASURE_S = 30.0
# Tries at a bucket that others take from at the same moment.
TRIES = 50
# Jobs that an operator's step reads at once, and then writes.
OPERATED = 200


class Shard:
    """One stream, with everything that works on it."""

    def __init__(
        self, wire: Wire, options: Options, number: int, now_ms: Callable[[], int]
    ) -> None:
        self.layout = Layout(options.namespace, number, options.ahead_ms)
        self.stream = Stream(
            wire,
            self.layout,
            replicas=options.replicas,
            shards=options.shards,
            singly=options.durability == "fast",
        )
        self.jobs = Jobs(self.stream, self.layout, now_ms)
        self.ready = Ready(wire, self.stream, self.layout, self.jobs)
        self.finder = Finder(self.stream, self.layout, self.jobs)

    async def ensure_sources(self, jobs: Sequence[Job]) -> None:
        """Let these jobs be handed out once they are ready."""
        for queue, priority in {(job.queue, str(job.priority)) for job in jobs}:
            await self.stream.ensure_source(queue, priority)

    async def claim(
        self,
        queues: list[str],
        *,
        worker: str,
        limit: int,
        most_bytes: int,
        now_ms: int,
        lease_ms: int,
    ) -> list[Job]:
        claimed: list[Job] = []

        async def claim(tokens: Sequence[Token]) -> None:
            claimed.extend(
                await self.jobs.claim(
                    tokens,
                    worker=worker,
                    now_ms=now_ms,
                    lease_ms=lease_ms,
                    leave=self.ready.keep,
                )
            )

        # Tokens may turn out to be spent: then there is room for others.
        for _ in range(ROUNDS):
            wanted = limit - len(claimed)
            async with few_at_a_time(PARALLEL) as start:
                while wanted and most_bytes > 0:
                    # By the batch: one is claimed while the next one comes.
                    portion = min(wanted, BATCH)
                    tokens = await self.ready.take(queues, portion, most_bytes)
                    if tokens:
                        await start(claim(tokens))
                    wanted -= len(tokens)
                    most_bytes -= sum(map(token_bytes, tokens))
                    if len(tokens) < portion:
                        break
            if wanted or len(claimed) == limit:
                break
        return claimed


class NatsStore:
    """Jobs in JetStream. One object serves one event loop."""

    # A batch spends most of its time on the server's disk, and several do so together.
    lanes = 4
    own_clock = False

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self._own_clock = clock or SystemClock()
        self._clock = StoreClock(self._own_clock)
        self.ahead_ms = options.ahead_ms
        self._wire: Wire | None = None
        self._shards: list[Shard] = []
        self._begin = 0
        # Workers whose cancels we hear of.
        self._heard: dict[str, asyncio.Event] = {}

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> NatsStore:
        return cls(Options.of(url), clock)

    # --- Life

    async def open(self) -> None:
        if self._wire is not None:
            return
        servers = await self._options.open()
        options = self._options
        self._wire = wire = Wire(
            servers, sign=options.sign(), tls=options.tls(), inbox=options.inbox
        )
        self._shards = [
            Shard(wire, self._options, n, self._clock.now_ms) for n in range(self._options.shards)
        ]
        wire.on_up, wire.on_stray = self._came_up, self._stray
        try:
            await wire.open()
            for shard in self._shards:
                await shard.stream.ensure()
            await self._clock.measure(self.time_ns)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        wire, self._wire = self._wire, None
        if wire is None:
            return
        for shard in self._shards:
            await shard.ready.close()
        await wire.close()
        self._heard.clear()
        await self._options.close()

    def twin(self) -> NatsStore:
        return NatsStore(self._options, self._own_clock)

    async def time_ns(self) -> int:
        info = await self._first.stream.info()
        return _nanoseconds(info["ts"])

    def _came_up(self) -> None:
        for shard in self._shards:
            shard.ready.told()
        for event in self._heard.values():
            event.set()

    def _stray(self, message: Message) -> None:
        for shard in self._shards:
            if message.subject.startswith(shard.layout.prefix + "."):
                shard.ready.returned(message)

    @property
    def _first(self) -> Shard:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return self._shards[0]

    async def _keep_time(self) -> None:
        """Know the server's time: whether a job is due soon is for its clock to say."""
        if self._clock.stale(MEASURE_S):
            await self._clock.measure(self.time_ns)

    # --- Which shard

    def _shard(self, key: str) -> Shard:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return self._shards[zlib.crc32(key.encode()) % len(self._shards)]

    def _of_job(self, id: str) -> Shard:
        # The job of a tick is named as its schedule, and lies beside it: they move in one step.
        return self._shard(id.rpartition("@")[0] or id)

    def _split(self, ids: Iterable[str]) -> dict[Shard, list[str]]:
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
        first: dict[str, Job] = {}
        for job in jobs:
            first.setdefault(job.id, job)
        added: set[str] = set()
        await self._keep_time()
        for shard, ids in self._split(first).items():
            mine = [first[id] for id in ids]
            await shard.ensure_sources(mine)
            added |= await shard.jobs.add(mine)
        answers = []
        for job in jobs:
            answers.append(job.id in added)
            added.discard(job.id)
        return answers

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        self._hear(worker)
        await self._keep_time()
        wanted = list(dict.fromkeys(queues))
        claimed: list[Job] = []
        left_bytes = BATCH_BYTES
        shards = self._turn()
        for left, shard in zip(range(len(shards), 0, -1), shards, strict=True):
            some = await shard.claim(
                wanted,
                worker=worker,
                limit=-(-(limit - len(claimed)) // left),
                most_bytes=left_bytes // left,
                now_ms=now_ms,
                lease_ms=lease_ms,
            )
            left_bytes -= sum(map(job_bytes, some))
            claimed += some
        return claimed

    def _turn(self) -> list[Shard]:
        """The shards, beginning with another one each time, so that none is always the last."""
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        self._begin = (self._begin + 1) % len(self._shards)
        return self._shards[self._begin :] + self._shards[: self._begin]

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        shards = self._turn()
        if not queues:
            await asyncio.sleep(max(until_ms - now_ms, 0) / 1000)
            return
        seconds = (until_ms - now_ms) / 1000
        await first_of(*(shard.ready.wait(queues, seconds) for shard in shards))

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        heard = self._hear(worker)
        loop = asyncio.get_running_loop()
        end = loop.time() + (until_ms - now_ms) / 1000
        while True:
            heard.clear()
            ids = [
                standing.job.id
                for shard in self._turn()
                for standing in await shard.jobs.gathered(
                    *(shard.layout.of_kind(kind, None) for kind in steps.ASKED)
                )
                if standing.job.worker == worker
            ]
            left = end - loop.time()
            if ids or left <= 0:
                return ids
            await first_of(heard.wait(), timeout_s=left)

    def _hear(self, worker: str) -> asyncio.Event:
        """Set when somebody asks one of this worker's jobs to stop."""
        event = self._heard.get(worker)
        if event is None:
            event = self._heard[worker] = asyncio.Event()
            subject = f"{self._first.layout.asked}.{steps.token(worker)}"
            assert self._wire is not None
            self._wire.subscribe(subject, lambda _: event.set())
        return event

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        by_id = {job.id: job for job in jobs}
        extended: dict[str, Job] = {}
        for shard, ids in self._split(by_id).items():
            held = [by_id[id] for id in ids]
            extended |= await shard.jobs.extend(held, now_ms=now_ms, lease_ms=lease_ms)
        return [extended.get(job.id) for job in jobs]

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers: list[bool] = [False] * len(settlements)
        todo = list(enumerate(settlements))
        while todo:
            # One id at a time once: a repeat is answered by what the first of it did.
            once = {settlement.job.id: (n, settlement) for n, settlement in reversed(todo)}
            for shard, ids in self._split(once).items():
                taken = await shard.jobs.settle([once[id][1] for id in ids], now_ms=now_ms)
                for id in ids:
                    answers[once[id][0]] = id in taken
            done = {n for n, _ in once.values()}
            todo = [(n, settlement) for n, settlement in todo if n not in done]
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        answers: dict[str, Cancelled] = {}
        for shard, mine in self._portions(ids):
            found, asked = await shard.jobs.cancel(mine, now_ms=now_ms)
            answers |= found
            for worker in {job.worker for job in asked if job.worker}:
                self._tell(f"{self._first.layout.asked}.{steps.token(worker)}")
        return [answers.get(id, Cancelled.UNKNOWN) for id in ids]

    def _tell(self, subject: str) -> None:
        assert self._wire is not None
        self._wire.send(publish_line(subject, b""))

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        done: set[str] = set()
        for shard, mine in self._portions(ids):
            done |= await shard.jobs.rerun(mine, now_ms=now_ms)
        return _once(ids, done)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        done: set[str] = set()
        for shard, mine in self._portions(ids):
            done |= await shard.jobs.delete(mine)
        return _once(ids, done)

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        pruned = 0
        for shard in self._turn():
            for state in states:
                left = limit - pruned
                pruned += await shard.jobs.prune(state, before_ms=before_ms, limit=left)
        return pruned

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        return await self._shard(schedule.name).jobs.put_schedule(schedule)

    async def delete_schedule(self, name: str) -> bool:
        return await self._shard(name).jobs.delete_schedule(name)

    async def schedules(self) -> list[Schedule]:
        found = [each for shard in self._turn() for each in await shard.jobs.schedules()]
        return sorted(found, key=lambda schedule: schedule.name)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        shard = self._shard(schedule.name)
        if any(self._of_job(job.id) is not shard for job in jobs):
            raise StoreUnavailable(
                f"the jobs of schedule {schedule.name!r} lie in other shards: "
                "they are to be named as their schedule, followed by @ and the tick"
            )
        await shard.ensure_sources(jobs)
        await self._keep_time()
        return await shard.jobs.fire(schedule, jobs, next_ms=next_ms)

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: dict[str, Job] = {}
        for shard, mine in self._split(ids).items():
            found |= await shard.jobs.get(mine)
        return [found.get(id) for id in ids]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        shards = sorted(self._turn(), key=lambda shard: shard.layout.stream)
        number, _, rest = (cursor or "0:").partition(":")
        at = int(number) if number.isdigit() else len(shards)
        if at >= len(shards):
            return Page(jobs=[])
        jobs, after = await shards[at].finder.find(query, rest, limit)
        if after:
            return Page(jobs=jobs, cursor=f"{at}:{after}")
        return Page(jobs=jobs, cursor=f"{at + 1}:" if at + 1 < len(shards) else None)

    async def queues(self) -> list[QueueInfo]:
        consumers = [each for shard in self._turn() for each in await shard.stream.count()]
        return counted(consumers)

    async def pause(self, queue: str, paused: bool) -> None:
        for shard in self._turn():
            await shard.stream.pause(queue, paused)
            if not paused:
                self._tell(f"{shard.layout.news}.r.{steps.token(queue)}.again")

    async def beat(self, worker: WorkerInfo) -> None:
        shard = self._shard("")
        subject = f"{shard.layout.prefix}.w.{steps.token(worker.name)}"
        if worker.gone_after_ms <= 0:
            await shard.stream.purge(subject)
            return
        # Whole seconds; what it outlives by that is left out when workers are listed.
        ttl_s = worker.gone_after_ms // 1000 + 1
        await shard.stream.store(
            [Step(subject, f"Nats-TTL: {ttl_s}s\r\n", msgspec.json.encode(worker))]
        )

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        shard = self._shard("")
        found = await shard.stream.all_of(f"{shard.layout.prefix}.w.*")
        workers = [_as_worker(body) for _, _, body in found]
        alive = [each for each in workers if now_ms - each.seen_ms <= each.gone_after_ms]
        return sorted(alive, key=lambda worker: worker.name)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        shard = self._shard(key)
        subject = f"{shard.layout.prefix}.b.{steps.token(key)}"
        for _ in range(TRIES):
            found = await shard.stream.leader_last(subject)
            full_ns, seq = (int(found[2]), found[1]) if found else (None, 0)
            full_ns, wait_ms = admit(full_ns, rate, now_ms)
            if wait_ms:
                return wait_ms
            full_s = full_ns // S_NS - now_ms // 1000 + 1
            ttl = f"Nats-TTL: {max(full_s, BUCKET_TTL_S)}s\r\n"
            headers = Check(subject, seq).headers + ttl
            if await shard.stream.store([Step(subject, headers, str(full_ns).encode())]):
                return 0
        raise StoreUnavailable(f"too many take from the bucket {key!r} at the same moment")

    async def durability(self) -> Durability:
        return await durability_of(self._options, self._first.stream)

    async def findings(self) -> list[Finding]:
        if self._wire is None:
            raise StoreUnavailable("the store is closed")
        return await findings_of(
            self._options, self._wire, [shard.stream for shard in self._shards]
        )


_as_worker = msgspec.json.Decoder(WorkerInfo).decode


def _once(ids: Sequence[str], done: set[str]) -> list[bool]:
    """An answer for each id; where one comes twice, the step happened at its first."""
    answers = []
    for id in ids:
        answers.append(id in done)
        done.discard(id)
    return answers


def _nanoseconds(text: str) -> int:
    """RFC 3339 with any number of digits below the second, as a server writes it."""
    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * S_NS + int(rest.ljust(9, "0")[:9] or 0)
