"""`sqlite://`: the embedded store. One file, several processes, no server.

Every step reads what it needs, lets `tickwheel.job` decide, and writes the outcome, inside one
immediate transaction: durable when it returns (`synchronous=FULL`).

Whole batches cross into SQLite as one JSON text and come back as one. A statement is then a single
call that runs without Python's lock, so that the event loop works on while SQLite does; row by row,
each of the thousands of calls would have to win the lock back from it. See docs/adr/0004.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import apsw
import msgspec

from tickwheel.batch import BATCH, BATCH_BYTES, Batcher, portions
from tickwheel.clock import MS_NS, Clock, SystemClock, wall_ns
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.span import span_ms
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
from tickwheel.stores.sqlite import health, steps
from tickwheel.stores.sqlite.file import (
    Lane,
    Pulse,
    clock_step_ms,
    connect,
    follow_clock,
    in_transaction,
    migrate,
)
from tickwheel.stores.sqlite.libraries import is_open
from tickwheel.throttle import Rate
from tickwheel.transaction import Statement

T = TypeVar("T")

# A node asks less often who wants its jobs stopped than whether there is work: that is a query.
ASK_S = 0.02
# A step that waits longer than this for its turn waits for a lock.
WAITED_MS = 250
# Between two batches other processes get their turn: they try again each millisecond.
TURN_S = 0.002


class SqliteStore:
    """Keeps jobs in one SQLite file."""

    lanes = 1
    own_clock = True

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock | None = None,
        ahead_ms: int = 1000,
        sync: str = "full",
    ) -> None:
        self.ahead_ms = ahead_ms
        self._path = Path(path)
        self._clock = clock or SystemClock()
        self._sync = sync
        self._writer: Lane | None = None
        self._reader: Lane | None = None
        self._pulse: Pulse | None = None
        self._firing: Batcher[steps.Firing, bool] = Batcher(self._fire, weigh=_firing_bytes)

    @classmethod
    def from_url(cls, url: str, *, clock: Clock | None = None) -> SqliteStore:
        """`sqlite:///jobs.db?ahead=500ms`: relative to this folder; four slashes: absolute."""
        where, _, options = url.removeprefix("sqlite://").partition("?")
        if not where.startswith("/") or where == "/":
            raise BadConfig(
                f"{url!r} names no file: write sqlite:///jobs.db (in this folder) "
                "or sqlite:////var/lib/jobs.db (an absolute path)"
            )
        known = dict(parse_qsl(options))
        ahead_ms = span_ms(known.pop("ahead", "1s"))
        sync = known.pop("sync", "full")
        if sync not in ("full", "normal"):
            raise BadConfig(f"sync={sync} in {url!r}: it is full (the default) or normal")
        if known:
            raise BadConfig(
                f"unknown option {next(iter(known))!r} in {url!r}: there are ahead, sync"
            )
        return cls(unquote(where[1:]), clock=clock, ahead_ms=ahead_ms, sync=sync)

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    # --- Life

    async def open(self) -> None:
        if self._writer is not None:
            return
        writer, reader = Lane("writer"), Lane("reader")
        try:
            await writer.open(self._path, self._sync)
            await writer.run(migrate, writer.db)
            await reader.open(self._path, self._sync)
            self._pulse = Pulse(connect(self._path, self._sync))
        except BaseException:
            await reader.close()
            await writer.close()
            raise
        self._writer, self._reader = writer, reader

    async def close(self) -> None:
        writer, reader, pulse = self._writer, self._reader, self._pulse
        self._writer = self._reader = self._pulse = None
        if pulse is not None:
            pulse.close()
        # The writer last: the last connection to close folds the log back into the file.
        for lane in (reader, writer):
            if lane is not None:
                await lane.close()

    def twin(self) -> SqliteStore:
        return SqliteStore(self._path, clock=self._clock, ahead_ms=self.ahead_ms, sync=self._sync)

    async def time_ns(self) -> int:
        return self._clock.now_ns()

    async def _write(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step in one transaction: all of it is on disk when this returns, or none."""
        writer = self._open_writer()
        return await writer.run(_step, writer.db, wall_ns(self._clock), step, *args)

    def _open_writer(self) -> Lane:
        if self._writer is None:
            raise StoreUnavailable("the store is closed")
        return self._writer

    async def _read(self, look: Callable[..., T], *args: Any) -> T:
        if self._reader is None:
            raise StoreUnavailable("the store is closed")
        return await self._reader.run(look, self._reader.db, *args)

    def _tell(self) -> None:
        """Wake this node's own waiters; those of others see the change counter move."""
        if self._pulse is not None:
            self._pulse.beat()

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added: list[bool] = []
        for part in portions(jobs, job_bytes):
            added += await self._write(steps.add, part)
            self._tell()
        return added

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """For a connection of the user's own to the same file; needs SQLite 3.38 or later.

        Where this process has the store open, only apsw will do: see `libraries`.
        """
        if driver != "apsw" and is_open(self._path):
            raise BadConfig(
                f"{self._path} is open as a store in this process: give an apsw connection, or "
                "keep the jobs in a file of their own, with App(…, outbox='sqlite:///your.db')"
            )
        sql, text = steps.adding(jobs)
        return Statement("sqlite", sql, text)

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        if not queues or limit < 1:
            return []
        where = {
            "queues": msgspec.json.encode(queues).decode(),
            "now": now_ms,
            "ahead": self.ahead_ms,
            "limit": min(limit, BATCH),
        }
        writer = self._open_writer()
        now_ns, step = wall_ns(self._clock), _from_its_turn(steps.claim, lease_ms)
        return await writer.run(_claim, writer.db, now_ns, step, where, worker)

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        answers: list[Job | None] = []
        step = _from_its_turn(steps.extend, lease_ms)
        for part in portions(jobs, job_bytes):
            answers += await self._write(step, part, now_ms)
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers: list[bool] = []
        for part in portions(settlements, settlement_bytes):
            answers += await self._write(steps.settle, part, now_ms)
        if any(settlement.state is State.WAITING for settlement in settlements):
            self._tell()
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        return await self._in_parts(steps.cancel, ids, now_ms)

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        return await self._in_parts(steps.rerun, ids, now_ms)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self._in_parts(steps.delete, ids)

    async def _in_parts(
        self, step: Callable[..., list[T]], ids: Sequence[str], *args: Any
    ) -> list[T]:
        """Take a step that answers for the first of the ids that it is given, until all are done.
        Between two of them it is the turn of others."""
        answers: list[T] = []
        while len(answers) < len(ids):
            if answers:
                await asyncio.sleep(TURN_S)
            part = ids[len(answers) : len(answers) + BATCH]
            answers += await self._write(step, part, *args)
            self._tell()
        return answers

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        return await self._write(steps.prune, states, before_ms, limit)

    # --- Waiting

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        loop = asyncio.get_running_loop()
        pulse = self._open_pulse()
        zero = loop.time() - now_ms / 1000
        while True:
            seen = pulse.count
            next_ms = await self._read(steps.next_claimable_ms, queues, self.ahead_ms)
            wake_ms = until_ms if next_ms is None else min(next_ms, until_ms)
            if not await pulse.after(seen, until=zero + wake_ms / 1000):
                return

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        loop = asyncio.get_running_loop()
        pulse = self._open_pulse()
        until = loop.time() + (until_ms - now_ms) / 1000
        while True:
            seen = pulse.count
            ids = await self._read(steps.asked, worker)
            if ids or not await pulse.after(seen, until=until):
                return ids
            await asyncio.sleep(ASK_S)

    def _open_pulse(self) -> Pulse:
        if self._pulse is None:
            raise StoreUnavailable("the store is closed")
        return self._pulse

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        fence = await self._write(steps.put_schedule, schedule)
        self._tell()
        return msgspec.structs.replace(schedule, fence=fence)

    async def delete_schedule(self, name: str) -> bool:
        return await self._write(steps.delete_schedule, name)

    async def schedules(self) -> list[Schedule]:
        return await self._read(steps.schedules)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        return await self._firing.send((schedule, jobs, next_ms))

    async def _fire(self, firings: Sequence[steps.Firing]) -> list[bool]:
        """Schedules that are due together share a transaction."""
        fired = await self._write(steps.fire, firings)
        self._tell()
        return fired

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: list[Job | None] = []
        while len(found) < len(ids):
            found += await self._read(steps.get, ids[len(found) : len(found) + BATCH])
        return found

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self._read(steps.find, query, cursor, limit)

    async def queues(self) -> list[QueueInfo]:
        return await self._read(steps.queues)

    async def pause(self, queue: str, paused: bool) -> None:
        await self._write(steps.pause, queue, paused)
        self._tell()

    async def beat(self, worker: WorkerInfo) -> None:
        await self._write(steps.beat, worker)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._read(steps.workers, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await self._write(steps.throttle, key, rate, now_ms)

    async def durability(self) -> Durability:
        writer = self._open_writer()
        return await writer.run(health.durability, writer.db, self._path)

    async def findings(self) -> list[Finding]:
        return await self._read(health.findings, self._path)


# --- In the writer's thread


def _step(db: apsw.Connection, now_ns: int, step: Callable[..., T], *args: Any) -> T:
    def follow_and_step() -> T:
        follow_clock(db, now_ns)
        return step(db, *args)

    return in_transaction(db, follow_and_step)


def _claim(
    db: apsw.Connection,
    now_ns: int,
    step: Callable[..., list[Job]],
    where: dict[str, Any],
    *args: Any,
) -> list[Job]:
    """Workers ask far more often than there is anything: only then is the file locked."""
    if not steps.claimable(db, where) and not clock_step_ms(db, now_ns):
        return []
    return _step(db, now_ns, step, where, *args)


def _from_its_turn(step: Callable[..., T], lease_ms: int) -> Callable[..., T]:
    """A step whose leases count from when it gets its turn, however long others had the file
    locked. Counted from the call, they could be over when the answer comes."""
    asked_ns = SystemClock().monotonic_ns()

    def at_last(*args: Any) -> T:
        waited_ms = (SystemClock().monotonic_ns() - asked_ns) // MS_NS
        return step(*args, lease_ms + (waited_ms if waited_ms > WAITED_MS else 0))

    return at_last


def _firing_bytes(firing: steps.Firing) -> int:
    """With so much for each job that a batch by bytes is no more than one by jobs."""
    return sum(job_bytes(job) + BATCH_BYTES // BATCH for job in firing[1])
