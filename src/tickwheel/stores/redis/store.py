"""`redis://`: jobs in a Redis or Valkey server, for teams that have one.

Every step is one call of one script (steps.lua), so it happens whole or not at all. Jobs that wait
stand in sorted sets by due time, those that run by the end of their lease, and a claim takes a
short range of each. `now_ms` decides in all steps; only `time_ns` asks the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tickwheel import job as life
from tickwheel.batch import BATCH, portions
from tickwheel.clock import MS_NS, Clock
from tickwheel.errors import BadConfig, StoreIncompatible, StoreUnavailable
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import (
    Durability,
    Finding,
    Page,
    Query,
    QueueInfo,
    WorkerInfo,
    job_bytes,
    settlement_bytes,
)
from tickwheel.stores.redis import health, records
from tickwheel.stores.redis.news import POLL_S, News
from tickwheel.stores.redis.options import Options
from tickwheel.stores.redis.wire import Wire
from tickwheel.throttle import Rate

# How many jobs one page looks at when it is filtered by task, which no set knows.
SCAN = 1000
# The layout of the keys, as the head of steps.lua describes it.
SCHEMA = 1

_CANCELLED = {
    "c": Cancelled.CANCELLED,
    "a": Cancelled.ASKED,
    "l": Cancelled.TOO_LATE,
    "u": Cancelled.UNKNOWN,
}
_worker = msgspec.json.Decoder(WorkerInfo).decode


class RedisStore:
    """Keeps jobs in one Redis server, or in one slot of a cluster."""

    lanes = 1
    own_clock = False

    def __init__(self, options: Options) -> None:
        self.ahead_ms = options.ahead_ms
        self._options = options
        self._wire: Wire | None = None
        self._news: News | None = None
        self._turns = asyncio.Lock()

    @classmethod
    def from_url(cls, url: str, *, clock: Clock | None = None) -> RedisStore:
        """`redis://user:password@host:6379/0?namespace=shop`. The server's clock is used."""
        return cls(Options.of(url))

    # --- Life

    async def open(self) -> None:
        if self._wire is not None:
            return
        wire = Wire(self._options)
        try:
            await health.check(wire, self._options)
            schema = int(await wire.step("open", str(SCHEMA)))
            if schema > SCHEMA:
                raise StoreIncompatible(
                    f"the namespace {self._options.namespace!r} was written by a newer Tickwheel "
                    f"(schema {schema}, this one knows {SCHEMA}): upgrade Tickwheel, or use "
                    "another namespace"
                )
        except BaseException:
            await wire.close()
            raise
        self._wire, self._news = wire, News(wire, self._options)
        # An extend that is answered before a settle that it comes after would tell the holder that
        # a job was lost which it has just settled itself.
        self._turns = asyncio.Lock()

    async def close(self) -> None:
        wire, news = self._wire, self._news
        self._wire = self._news = None
        if news is not None:
            await news.close()
        if wire is not None:
            await wire.close()

    def twin(self) -> RedisStore:
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
    def _open_news(self) -> News:
        if self._news is None:
            raise StoreUnavailable("the store is closed")
        return self._news

    async def _step(self, name: str, *args: Any) -> Any:
        return await self._open_wire.step(name, *args)

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added: list[bool] = []
        for some in portions(jobs, job_bytes):
            added += _flags(await self._step("add", *records.columns(some)))
        return added

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        queues = list(dict.fromkeys(queues))
        if not queues or limit < 1:
            return []
        fence, name = life.new_fence(), records.as_line(worker)
        taken, lines = await self._step(
            *("claim", queues, name, str(fence), min(limit, BATCH), now_ms),
            *(self.ahead_ms, lease_ms),
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

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        extended: list[Job | None] = []
        until_ms = now_ms + lease_ms
        for some in portions(jobs):
            async with self._turns:
                answer = await self._step(
                    *("extend", [job.id for job in some], [str(job.fence) for job in some]),
                    [records.place(job) for job in some],
                    ["" if job.started_ms is None else str(job.started_ms) for job in some],
                    *(now_ms, until_ms),
                )
            extended += [
                None
                if flag == "0"
                else msgspec.structs.replace(job, lease_until_ms=until_ms, asked=flag == "2")
                for job, flag in zip(some, answer.decode(), strict=True)
            ]
        return extended

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        """Only its holder changes a job in hand, but for the wish that it stop: so the holder's
        copy is the job as it stands, and the script picks what that wish makes of it."""
        answers: list[bool] = []
        for portion in portions(settlements, settlement_bytes):
            some = [_outcome(settlement) for settlement in portion]
            jobs = [settlement.job for settlement in portion]
            async with self._turns:
                answer = await self._step(
                    *("settle", now_ms, [job.id for job in jobs], [str(job.fence) for job in jobs]),
                    *([records.place(job) for job in jobs], [each.state for each in some]),
                    *([each.score for each in some], [each.record for each in some]),
                    *([each.ended_ms for each in some], [each.stopped for each in some]),
                )
            answers += _flags(answer)
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        answer = await self._step_by_step("cancel", ids, now_ms)
        return [_CANCELLED[letter] for letter in answer.decode()]

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        return _flags(await self._step_by_step("rerun", ids, now_ms))

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return _flags(await self._step_by_step("delete", ids))

    async def _step_by_step(self, name: str, ids: Sequence[str], *args: Any) -> bytes:
        """Where jobs are large, the script answers for those that it came to."""
        answer = b""
        while len(answer) < len(ids):
            answer += await self._step(name, ids[len(answer) : len(answer) + BATCH], *args)
        return answer

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        letters = [records.LETTERS[state] for state in states if state.ended]
        pruned = 0
        while letters and pruned < limit:
            most = min(limit - pruned, BATCH)
            count: int = await self._step("prune", letters, before_ms, most)
            pruned += count
            if count < most:
                break
        return pruned

    # --- Waiting

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        loop = asyncio.get_running_loop()
        zero = loop.time() - now_ms / 1000
        queues = list(dict.fromkeys(queues))
        with self._open_news.ear([f"q{queue}".encode() for queue in queues]) as ear:
            await self._open_news.listening()
            while True:
                ear.forget()
                now_ms = int((loop.time() - zero) * 1000)
                answer = await self._step("next", queues, now_ms, until_ms, self.ahead_ms)
                wake_ms = min(int(answer), until_ms) if answer else until_ms
                left_s = zero + wake_ms / 1000 - loop.time()
                if not await ear.hear(min(left_s, POLL_S)) and left_s <= POLL_S:
                    return

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        loop = asyncio.get_running_loop()
        until = loop.time() + (until_ms - now_ms) / 1000
        name = records.as_line(worker)
        key = self._key(f"asked:{name}")
        with self._open_news.ear([f"a{name}".encode()]) as ear:
            await self._open_news.listening()
            while True:
                ear.forget()
                ids = [id.decode() for id in await self._open_wire.send("SMEMBERS", key)]
                left_s = until - loop.time()
                if ids or (not await ear.hear(min(left_s, POLL_S)) and left_s <= POLL_S):
                    return ids

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        stored = msgspec.structs.replace(schedule, fence=life.new_fence())
        record = records.schedule_record(stored)
        await self._open_wire.send("HSET", self._key("schedule"), schedule.name, record)
        return stored

    async def delete_schedule(self, name: str) -> bool:
        return bool(await self._open_wire.send("HDEL", self._key("schedule"), name))

    async def schedules(self) -> list[Schedule]:
        found = await self._open_wire.send("HVALS", self._key("schedule"))
        return sorted(map(records.read_schedule, found), key=lambda schedule: schedule.name)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        # Where the fence is still the same, so is all that the caller read with it.
        moved = msgspec.structs.replace(
            schedule,
            next_ms=next_ms,
            last_id=jobs[-1].id if jobs else schedule.last_id,
            fence=life.new_fence(),
        )
        fired = await self._step(
            *("fire", schedule.name, str(schedule.fence), records.schedule_record(moved)),
            *records.columns(jobs),
        )
        return bool(fired)

    def _key(self, name: str) -> str:
        return self._options.root + name

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: list[Job | None] = []
        while len(found) < len(ids):
            found += records.read_all(
                *await self._step("get", ids[len(found) : len(found) + BATCH])
            )
        return found

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        states = [query.state] if query.state else list(State)
        after: list[str] | bool = False
        if cursor is not None:
            try:
                after = records.parse_cursor(cursor)
            except ValueError:
                raise BadConfig(f"{cursor!r} is not a cursor that a page gave") from None
        letters = [records.LETTERS[state] for state in states]
        found, lines, last = await self._step(
            *("find", _from(letters, after), False if query.queue is None else query.queue),
            *(False if query.task is None else records.task_part(query.task), limit, SCAN, after),
        )
        jobs = [job for job in records.read_all(found, lines) if job]
        return Page(jobs=jobs, cursor=records.cursor_of(last))

    async def queues(self) -> list[QueueInfo]:
        found = await self._step("queues")
        infos = [
            QueueInfo(
                name=name.decode(),
                paused=bool(paused),
                waiting=waiting,
                running=running,
                done=done,
                dead=dead,
                cancelled=cancelled,
            )
            for name, paused, waiting, running, done, dead, cancelled in found
        ]
        return sorted(infos, key=lambda info: info.name)

    async def pause(self, queue: str, paused: bool) -> None:
        await self._step("pause", queue, paused)

    async def beat(self, worker: WorkerInfo) -> None:
        gone_ms = worker.seen_ms + worker.gone_after_ms if worker.gone_after_ms else False
        await self._step(
            "beat", worker.name, msgspec.json.encode(worker).decode(), gone_ms, worker.seen_ms
        )

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        found = map(_worker, await self._open_wire.send("HVALS", self._key("worker")))
        alive = (each for each in found if each.seen_ms + each.gone_after_ms > now_ms)
        return sorted(alive, key=lambda worker: worker.name)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        cost_ns = -(-rate.period_ms * MS_NS // rate.limit)
        burst_ns = cost_ns * (rate.burst - 1)
        wait_ms = await self._step(
            "throttle", key, now_ms, *divmod(cost_ns, MS_NS), *divmod(burst_ns, MS_NS)
        )
        return int(wait_ms)

    async def durability(self) -> Durability:
        return await health.durability(self._open_wire)

    async def findings(self) -> list[Finding]:
        return await health.findings(self._open_wire)


class _Outcome(msgspec.Struct, frozen=True):
    """What a settlement makes of a job: of one that was asked to stop, `stopped`."""

    state: str
    score: int
    record: str
    ended_ms: int
    stopped: str


def _outcome(settlement: Settlement) -> _Outcome:
    job = settlement.job
    plain = msgspec.structs.replace(job, asked=False) if job.asked else job
    after = life.settled(plain, settlement)
    stopped = ""
    if after.state is State.WAITING:
        asked = msgspec.structs.replace(job, asked=True)
        stopped = records.record(life.settled(asked, settlement))
    return _Outcome(
        state=records.LETTERS[after.state],
        score=after.due_ms if after.ended_ms is None else after.ended_ms,
        record=records.record(after),
        ended_ms=settlement.ended_ms,
        stopped=stopped,
    )


def _from(letters: list[str], after: list[str] | bool) -> list[str]:
    """The states that are left to page through, from that of the cursor on."""
    if not isinstance(after, list):
        return letters
    kind, _, rest = after[0].partition(":")
    letter = rest[:1] if kind == "e" else kind
    return letters[letters.index(letter) :] if letter in letters else []


def _flags(answer: bytes) -> list[bool]:
    return [flag == 49 for flag in answer]
