"""What the suites need to run on any store: how to open one, and how time passes for it.

A further store joins with one entry in `KNOWN`. No test knows which store it runs on.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from ending import at_end
from postgres_server import shared_server
from redis_server import RedisServer
from tickwheel import job as life
from tickwheel.changes import IfExists, Put
from tickwheel.ids import new_fence
from tickwheel.job import Job, Move, MoveOutcome, Outcome, PutOutcome, Settlement, State
from tickwheel.store import QueueInfo, Store, open_store
from tickwheel.stores.nats.servers.process import Server, start_server
from tickwheel.stores.nats.steps import ASKED, RUNNING, WAITING
from tickwheel.stores.nats.store import NatsStore
from tickwheel.trust import new_key, sealed, trust_of, unsealed

START_MS = 1_800_000_000_000


class Harness:
    """An open store under test, its time, and short words for what most tests do.

    Here time stands still until a test passes it, because `now_ms` decides. Where a server keeps
    the time itself, a subclass waits in `pass_time` and reads `now` from the server's clock. So a
    test takes every time from `now`, moves it with `pass_time` alone, and compares with `near`.
    """

    # Long enough that no lease runs out by accident. A test that outlives one pays for it.
    lease_ms = 30_000
    # The shortest span that this store can tell from none.
    step_ms = 1
    # How far a moment that the store chose may be from the one that the test expects.
    slack_ms = 0

    store: Store

    def __init__(self, url: str) -> None:
        self._url = url
        self._now = START_MS
        self._open: list[Store] = []

    async def open(self) -> None:
        self.store = await self._opened(open_store(self._url, clock=HarnessClock(self)))

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()

    async def reopen(self) -> None:
        """Close every handle, and come back as a new process would."""
        await self.close()
        await self.open()

    async def new_handle(self) -> Store:
        """A second open handle on the same jobs."""
        return await self._opened(self.store.new_handle())

    async def _opened(self, store: Store) -> Store:
        await store.open()
        self._open.append(store)
        return store

    # --- Time

    @property
    def now(self) -> int:
        return self._now

    def monotonic_ns(self) -> int:
        """Goes on with `now`: when a test passes time, no clock was set."""
        return self._now * 1_000_000

    async def pass_time(self, ms: int) -> None:
        self._now += ms

    async def lose_leases(self) -> None:
        """Let every lease of the usual length run out."""
        await self.pass_time(self.lease_ms + self.step_ms)

    def near(self, moment_ms: int | None, expected_ms: int) -> bool:
        return moment_ms is not None and abs(moment_ms - expected_ms) <= self.slack_ms

    # --- Jobs

    def job(
        self,
        id: str = "job",
        *,
        delay_ms: int = 0,
        queue: str = "default",
        task: str = "task",
        payload: str = "{}",
        priority: int = 1,
        meta: dict[str, str] | None = None,
        expires_ms: int | None = None,
    ) -> Job:
        return Job(
            id=id,
            task=task,
            payload=payload,
            queue=queue,
            priority=priority,
            due_ms=self.now + delay_ms,
            created_ms=self.now,
            meta=meta,
            expires_ms=expires_ms,
        )

    def jobs(self, count: int, *, delay_ms: int = 0, queue: str = "default") -> list[Job]:
        return [self.job(f"job-{n:04}", delay_ms=delay_ms, queue=queue) for n in range(count)]

    async def add(self, *jobs: Job) -> None:
        assert await self.store.add(jobs) == [True] * len(jobs)

    async def get(self, id: str = "job") -> Job:
        [job] = await self.store.get([id])
        assert job is not None, f"the store has no job {id!r}"
        return job

    async def claim(
        self,
        limit: int = 10,
        *,
        worker: str = "ann",
        queues: Sequence[str] = ("default",),
        lease_ms: int | None = None,
        store: Store | None = None,
        tasks: Collection[str] = (),
        call: int | None = None,
        again: bool = False,
    ) -> list[Job]:
        return await (store or self.store).claim(
            queues,
            worker=worker,
            limit=limit,
            now_ms=self.now,
            lease_ms=lease_ms or self.lease_ms,
            tasks=tasks,
            call=call,
            again=again,
        )

    async def claim_ids(
        self, limit: int = 10, *, worker: str = "ann", queues: Sequence[str] = ("default",)
    ) -> list[str]:
        return [job.id for job in await self.claim(limit, worker=worker, queues=queues)]

    async def claim_one(self, *, worker: str = "ann", queues: Sequence[str] = ("default",)) -> Job:
        [job] = await self.claim(worker=worker, queues=queues)
        return job

    async def put(
        self, job: Job, if_exists: str = "replace", *, request: int | None = None
    ) -> PutOutcome:
        number = new_fence() if request is None else request
        ask = Put(job=job, if_exists=IfExists(if_exists), request=number)
        [answer] = await self.store.put([ask], now_ms=self.now)
        return answer

    async def move(
        self,
        id: str = "job",
        *,
        due_ms: int | None = None,
        priority: int | None = None,
        queue: str | None = None,
        request: int | None = None,
    ) -> MoveOutcome:
        number = new_fence() if request is None else request
        ask = Move(id=id, request=number, due_ms=due_ms, priority=priority, queue=queue)
        [answer] = await self.store.move([ask], now_ms=self.now)
        return answer

    async def claim_soon(
        self, *, worker: str = "ann", queues: Sequence[str] = ("default",)
    ) -> list[Job]:
        """Claim what was changed a moment ago: a store may need a second until it is ready."""
        return await self.claim(worker=worker, queues=queues)

    async def changed(self) -> None:
        """Until what was put or moved, and is due, can be claimed."""

    async def claimed(self, *jobs: Job, worker: str = "ann") -> list[Job]:
        """Add these jobs, and have them all in the hand of one worker, in this order."""
        await self.add(*jobs)
        queues = list(dict.fromkeys(job.queue for job in jobs))
        held = {job.id: job for job in await self.claim(len(jobs), worker=worker, queues=queues)}
        return [held[job.id] for job in jobs]

    def never_claimed(self, id: str = "job") -> Job:
        """A job as a claim would hand it out, which no claim ever did."""
        return life.claimed(
            self.job(id), worker="ann", fence=1, now_ms=self.now, lease_ms=self.lease_ms
        )

    async def ended(self, state: State, id: str = "job", *, queue: str = "default") -> Job:
        """A job that has come to its end in this state."""
        await self.add(self.job(id, queue=queue))
        if state is State.CANCELLED:
            await self.store.cancel([id], now_ms=self.now)
        else:
            outcome = Outcome.DONE if state is State.DONE else Outcome.DEAD
            assert await self.settle(self.settlement(outcome, await self.claim_one(queues=[queue])))
        job = await self.get(id)
        assert job.state is state
        return job

    async def extend(self, job: Job, *, lease_ms: int | None = None) -> Job | None:
        [extended] = await self.store.extend(
            [job], now_ms=self.now, lease_ms=lease_ms or self.lease_ms
        )
        return extended

    # --- Outcomes

    def settlement(
        self,
        outcome: Outcome,
        job: Job,
        *,
        delay_ms: int = 0,
        text: str = "as it was",
        traceback: str | None = None,
    ) -> Settlement:
        """A settlement of each kind, with all that this kind can carry."""
        now = self.now
        if outcome is Outcome.DONE:
            result = msgspec.json.encode(text).decode()
            return life.done(job, started_ms=now, ended_ms=now, result=result)
        if outcome is Outcome.RETRY:
            return life.retry(
                job,
                due_ms=now + delay_ms,
                error=text,
                started_ms=now,
                ended_ms=now,
                traceback=traceback,
            )
        if outcome is Outcome.SNOOZE:
            return life.snooze(job, due_ms=now + delay_ms, started_ms=now, ended_ms=now)
        if outcome is Outcome.RELEASE:
            return life.release(job, ended_ms=now, error=text)
        if outcome is Outcome.PARK:
            return life.park(job, ended_ms=now)
        if outcome is Outcome.EXPIRE:
            return life.expire(job, ended_ms=now)
        assert outcome is Outcome.DEAD
        return life.dead(job, error=text, started_ms=now, ended_ms=now, traceback=traceback)

    def done(self, job: Job) -> Settlement:
        return self.settlement(Outcome.DONE, job)

    def retry(self, job: Job, *, delay_ms: int = 0) -> Settlement:
        return self.settlement(Outcome.RETRY, job, delay_ms=delay_ms)

    async def settle(self, settlement: Settlement, *, store: Store | None = None) -> bool:
        [taken] = await (store or self.store).settle([settlement], now_ms=self.now)
        return taken

    # --- Looking

    async def counts(self, queue: str = "default") -> dict[str, int]:
        """How many jobs of this queue stand in each state; states without any are left out."""
        return (await self.all_counts()).get(queue, {})

    async def all_counts(self) -> dict[str, dict[str, int]]:
        """The same for every queue that has jobs or is paused."""
        return {
            info.name: {state.value: n for state in State if (n := getattr(info, state.value))}
            for info in await self.queues()
        }

    async def queues(self, store: Store | None = None) -> list[QueueInfo]:
        """What a handle says of the queues, once its counts have followed the last step."""
        return await (store or self.store).queues()


class HarnessClock:
    """Lets a store that reads a clock read the harness's."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness

    def now_ns(self) -> int:
        return self._harness.now * 1_000_000

    def monotonic_ns(self) -> int:
        return self._harness.monotonic_ns()


def unfenced(job: Job | None) -> Job:
    """The job without its fence, which is the store's own business."""
    assert job is not None
    return msgspec.structs.replace(job, fence=0)


# Names that a careless store would split, fold, trim, quote or match as a pattern.
ODD_NAMES = (
    "with space",
    " leading and trailing ",
    "dots.in.it",
    "slash/and\\backslash",
    "star*",
    "greater>",
    "per%cent_under",
    "quote'double\"back`",
    "semi;colon:comma,",
    "{braces}[brackets]",
    "--dashes",
    "new\nline\ttab",
    "Case",
    "case",
    "12",
    "012",
    "1e3",
    "null",
    "true",
    "ünïcödé",
    "unicode",
    "e\u0301",
    "\u00e9",
    "定时任务",
    "🕰️",
    "\U0010ffff",
    "x" * 200,
)


class SealedHarness(Harness):
    """A store through the wrapper that signs and encrypts."""

    trust = trust_of([new_key("sign")], [new_key("encrypt")])

    async def open(self) -> None:
        store = open_store(self._url, clock=HarnessClock(self))
        self.store = await self._opened(sealed(store, self.trust))


class NatsHarness(Harness):
    """A namespace of its own on a real server, which keeps the time: here time really passes."""

    lease_ms = 2_000
    step_ms = 600
    slack_ms = 1_000

    def __init__(self, **options: str) -> None:
        self.namespace = secrets.token_hex(6)
        query = "&".join(f"{name}={value}" for name, value in options.items())
        super().__init__(f"{nats_server().url}/{self.namespace}?{query}")

    async def open(self) -> None:
        self.store = await self._opened(open_store(self._url))

    @property
    def now(self) -> int:
        return time.time_ns() // 1_000_000

    async def claim_soon(
        self, *, worker: str = "ann", queues: Sequence[str] = ("default",)
    ) -> list[Job]:
        async with asyncio.timeout(20):
            while not (jobs := await self.claim(worker=worker, queues=queues)):
                await asyncio.sleep(0.05)
        return jobs

    async def changed(self) -> None:
        async with asyncio.timeout(20):
            while await self._overdue():
                await asyncio.sleep(0.05)

    async def queues(self, store: Store | None = None) -> list[QueueInfo]:
        # A consumer learns of a message a moment after it is stored, and says not when it has.
        found: list[list[QueueInfo]] = []
        while len(found) < 3 or found[-1] != found[-2] or found[-2] != found[-3]:
            await asyncio.sleep(0.015)
            found.append(await super().queues(store))
        return found[-1]

    async def pass_time(self, ms: int) -> None:
        await asyncio.sleep(ms / 1000)
        # The server's schedules are late by a quarter of a second, on a busy machine by more.
        async with asyncio.timeout(10):
            while await self._overdue():
                await asyncio.sleep(0.05)

    async def _overdue(self) -> bool:
        """Whether the server is yet to fire what is to fire by now."""
        store, now = unsealed(self.store), self.now
        assert isinstance(store, NatsStore)
        for shard in store._shards:
            of_kind = shard.layout.of_kind
            subjects = [of_kind(kind, None) for kind in (*WAITING, *RUNNING, *ASKED)]
            for standing in await shard.jobs.gathered(*subjects):
                job = standing.job
                if (job.lease_until_ms or job.due_ms - store.ahead_ms) < now:
                    return True
        return False


class StillNatsHarness(NatsHarness):
    """For the model: now stands still, and leases are so long that none ends meanwhile."""

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        self._start = time.time_ns() // 1_000_000

    @property
    def now(self) -> int:
        return self._start


@functools.cache
def nats_server() -> Server:
    """One server for all tests of this process, in a folder that goes with it."""
    folder = tempfile.mkdtemp(prefix="tickwheel-nats-")
    server = asyncio.run(start_server(folder, durability="fast"))

    def end() -> None:
        asyncio.run(server.stop())
        shutil.rmtree(folder, ignore_errors=True)

    at_end(end)
    return server


class RedisHarness(Harness):
    """A namespace of its own on a real server. Only `time_ns` is the server's: so now is now."""

    def __init__(self) -> None:
        super().__init__(f"{redis_server().url}?namespace={secrets.token_hex(6)}")
        self._now = time.time_ns() // 1_000_000


@functools.cache
def redis_server() -> RedisServer:
    """One server for all tests of this process, in a folder that goes with it."""
    folder = tempfile.mkdtemp(prefix="tickwheel-redis-")
    server = RedisServer(Path(folder), appendonly="yes", appendfsync="always").start()

    def end() -> None:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    at_end(end)
    return server


class PostgresHarness(Harness):
    """A schema of its own on a real server. Only `time_ns` is the server's: so now is now."""

    def __init__(self) -> None:
        self._schema = f"test_{secrets.token_hex(6)}"
        super().__init__(f"{shared_server().url}?schema={self._schema}")
        self._now = time.time_ns() // 1_000_000

    async def close(self) -> None:
        await super().close()
        shared_server().execute(f"drop schema {self._schema} cascade")

    async def reopen(self) -> None:
        await super().close()
        await self.open()


# How to open each store with its data in this folder.
KNOWN: dict[str, Callable[[Path], Harness]] = {
    "memory": lambda folder: Harness("memory://"),
    "sqlite": lambda folder: Harness(f"sqlite:///{folder}/jobs.db"),
    "sealed-memory": lambda folder: SealedHarness("memory://"),
    "sealed-sqlite": lambda folder: SealedHarness(f"sqlite:///{folder}/jobs.db"),
    # Steps go in batches, or each for itself.
    "nats": lambda folder: NatsHarness(),
    "nats-fast": lambda folder: NatsHarness(durability="fast"),
    "redis": lambda folder: RedisHarness(),
    "postgres": lambda folder: PostgresHarness(),
}
# The stores for which time is an argument, so that a model can play hours with them.
TIMELESS = ("memory", "sqlite", "redis", "postgres")

STORES = os.environ.get("TICKWHEEL_TEST_STORES", ",".join(KNOWN))


def chosen(names: str) -> list[str]:
    """The stores that `--stores=memory,sqlite` names."""
    stores = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := set(stores) - set(KNOWN):
        raise ValueError(f"no store {', '.join(sorted(unknown))}: there are {', '.join(KNOWN)}")
    return stores
