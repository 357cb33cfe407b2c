"""`sqlite://`: the embedded store. One file, several processes, no server.

Every step reads what it needs, lets `tickwheel.job` decide, and writes the outcome, inside one
immediate transaction: durable when it returns (`synchronous=FULL`).

A batch goes into SQLite as one JSON text and comes back as one. A statement is then a single call
that runs without Python's lock, so the event loop keeps running; row by row, each of thousands of
calls would have to win the lock back. See docs/adr/0004.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import apsw
import msgspec

from tickwheel.batch import BATCH, BATCH_BYTES, Batcher, portions
from tickwheel.changes import Put
from tickwheel.clock import MS_NS, Clock, SystemClock, wall_ns
from tickwheel.errors import BadConfig, StoreUnavailable
from tickwheel.ids import new_fence
from tickwheel.job import CancelOutcome, Job, Move, MoveOutcome, PutOutcome, Settlement, State
from tickwheel.limit import Rate
from tickwheel.schedule import Schedule
from tickwheel.store import (
    NO_ASKS,
    PARKED_LIMIT,
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
    each_once,
    job_bytes,
    put_bytes,
    record_bytes,
    settlement_bytes,
)
from tickwheel.stores.sqlite import browse, health, statements, times
from tickwheel.stores.sqlite.file import (
    ConnectionThread,
    clock_step_ms,
    connect,
    follow_clock,
    in_transaction,
    migrate,
)
from tickwheel.stores.sqlite.libraries import is_open
from tickwheel.stores.sqlite.notify import ENDED, ChangeWatcher
from tickwheel.stores.sqlite.url import SqliteOptions
from tickwheel.stores.waiting import slack_of
from tickwheel.transaction import Statement

T = TypeVar("T")

# The pause between two queries for cancel requests, however often the file changes.
CANCEL_POLL_S = 0.02
# A step that waits longer than this for its turn waits for a lock.
WAITED_MS = 250
# A pause between two batches, for other processes to get their turn: they retry every millisecond.
TURN_S = 0.002


class SqliteStore:
    """Keeps jobs in one SQLite file."""

    max_inflight = 1
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
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._watcher: ChangeWatcher | None = None
        self._firing: Batcher[statements.Firing, bool] = Batcher(self._fire, weigh=_firing_bytes)

    @classmethod
    def from_url(cls, url: str, *, clock: Clock | None = None) -> SqliteStore:
        options = SqliteOptions.of(url)
        return cls(options.path, clock=clock, ahead_ms=options.ahead_ms, sync=options.sync)

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    # --- Open and close

    async def open(self) -> None:
        if self._writer is not None:
            return
        writer, reader = ConnectionThread("writer"), ConnectionThread("reader")
        try:
            await writer.open(self._path, self._sync)
            await writer.run(migrate, writer.db)
            await reader.open(self._path, self._sync)
            # On a thread: it may have to wait for another process.
            self._watcher = ChangeWatcher(await reader.run(connect, self._path, self._sync))
        except BaseException:
            await reader.close()
            await writer.close()
            raise
        self._writer, self._reader = writer, reader

    async def close(self) -> None:
        writer, reader, watcher = self._writer, self._reader, self._watcher
        self._writer = self._reader = self._watcher = None
        if watcher is not None:
            watcher.close()
        # The writer last: the last connection to close folds the log back into the file.
        for each in (reader, writer):
            if each is not None:
                await each.close()

    def new_handle(self) -> SqliteStore:
        return SqliteStore(self._path, clock=self._clock, ahead_ms=self.ahead_ms, sync=self._sync)

    async def time_ns(self) -> int:
        return self._clock.now_ns()

    async def _write(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step in one transaction: all of it is on disk when this returns, or none."""
        writer = self._open_writer()
        return await writer.run(_step, writer.db, wall_ns(self._clock), step, *args)

    def _open_writer(self) -> ConnectionThread:
        if self._writer is None:
            raise StoreUnavailable("the store is closed")
        return self._writer

    async def _read(self, query: Callable[..., T], *args: Any) -> T:
        if self._reader is None:
            raise StoreUnavailable("the store is closed")
        return await self._reader.run(query, self._reader.db, *args)

    def _notify(self, *topics: str) -> None:
        """Wake this node's own waiters; those of others see the change counter move."""
        if self._watcher is not None:
            self._watcher.notify(*topics)

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        added: list[bool] = []
        for part in portions(jobs, job_bytes):
            added += await self._write(statements.add, part)
            self._notify()
        return added

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """For a connection of the user's own to the same file; needs SQLite 3.38 or later.

        If this process has the store open, it must be an apsw connection: see `libraries`.
        """
        if driver != "apsw" and is_open(self._path):
            raise BadConfig(
                f"{self._path} is open as a store in this process: use an apsw connection, or "
                "keep the jobs in a file of their own, with App(…, outbox='sqlite:///your.db')"
            )
        sql, text = statements.adding(jobs)
        return Statement("sqlite", sql, text)

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        answers: list[PutOutcome] = []
        for part in portions(puts, put_bytes):
            answers += await self._in_parts(statements.change, part, now_ms)
        return answers

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        return await self._in_parts(statements.change, moves, now_ms)

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
        if not queues or limit < 1:
            return []
        call = new_fence() if call is None else call
        if again and (taken := await self._read(browse.claimed_by, call, worker)):
            held = await self.extend(taken, now_ms=now_ms, lease_ms=lease_ms)
            if ours := [job for job in held if job is not None]:
                return ours
        where = {
            "queues": msgspec.json.encode(queues).decode(),
            "tasks": msgspec.json.encode(list(tasks)).decode(),
            "call": call,
            "now": now_ms,
            "ahead": self.ahead_ms,
            "limit": min(limit, BATCH),
        }
        writer = self._open_writer()
        now_ns, step = wall_ns(self._clock), _from_its_turn(statements.claim, lease_ms)
        return await writer.run(_claim, writer.db, now_ns, step, where, worker)

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        answers: list[Job | None] = []
        step = _from_its_turn(statements.extend, lease_ms)
        for part in portions(jobs, job_bytes):
            answers += await self._write(step, part, now_ms)
        return answers

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers: list[bool] = []
        for part in portions(settlements, settlement_bytes):
            answers += await self._write(statements.settle, part, now_ms)
        if any(settlement.state is State.WAITING for settlement in settlements):
            self._notify()
        else:
            self._notify(ENDED)
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        return await self._in_parts(statements.cancel, ids, now_ms)

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        return await self._in_parts(statements.rerun, ids, now_ms)

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self._in_parts(statements.delete, ids)

    async def _in_parts(
        self, step: Callable[..., list[T]], ids: Sequence[Any], *args: Any
    ) -> list[T]:
        """Repeat a step that answers for the first few of its ids until all are answered. In the
        pauses other processes get their turn."""
        answers: list[T] = []
        while len(answers) < len(ids):
            if answers:
                await asyncio.sleep(TURN_S)
            part = ids[len(answers) : len(answers) + BATCH]
            answers += await self._write(step, part, *args)
            self._notify()
        return answers

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        return await self._write(statements.prune, states, before_ms, limit)

    # --- Waiting

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        async def next_ms(_: int) -> int | None:
            return await self._read(browse.next_claimable_ms, queues, list(tasks), self.ahead_ms)

        await self._open_watcher().until_due(
            (), next_ms, now_ms=now_ms, until_ms=until_ms, slack_ms=slack_of(self.ahead_ms)
        )

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        async def find() -> dict[str, Ask]:
            return await self._read(browse.asked, worker)

        return await self._open_watcher().until_found(
            (), find, known=known, now_ms=now_ms, until_ms=until_ms, rest_s=CANCEL_POLL_S
        )

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        """The file doesn't say what has changed, so each change leads to a query for all of them;
        with many, these take half of the time at most."""
        loop, watcher = asyncio.get_running_loop(), self._open_watcher()
        rested = 0.0

        async def look(_: int) -> int | None:
            nonlocal rested
            await asyncio.sleep(rested - loop.time())
            start = loop.time()
            for some in portions(list(ids)):
                if ended := await self._read(browse.ended, some):
                    tell(ended)
            rested = 2 * loop.time() - start
            return None

        watcher.watches += 1
        try:
            await watcher.until_due([ENDED], look, now_ms=now_ms, until_ms=until_ms)
        finally:
            watcher.watches -= 1

    def _open_watcher(self) -> ChangeWatcher:
        if self._watcher is None:
            raise StoreUnavailable("the store is closed")
        return self._watcher

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        fence = await self._write(statements.put_schedule, schedule)
        self._notify()
        return msgspec.structs.replace(schedule, fence=fence)

    async def replace_schedule(self, schedule: Schedule) -> bool:
        replaced = await self._write(statements.replace_schedule, schedule)
        self._notify()
        return replaced

    async def delete_schedule(self, name: str) -> bool:
        return await self._write(statements.delete_schedule, name)

    async def schedules(self) -> list[Schedule]:
        return await self._read(browse.schedules)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        return await self._firing.send((schedule, jobs, next_ms))

    async def _fire(self, firings: Sequence[statements.Firing]) -> list[bool]:
        """Schedules that are due together share a transaction."""
        fired = await self._write(statements.fire, firings)
        self._notify()
        return fired

    # --- Records

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        for some in portions(list(records.items()), record_bytes):
            await self._write(statements.put_records, kind, some)

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        return await self._read(browse.records, kind, after, limit)

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        found: list[str | None] = []
        for some in portions(names, most=RECORDS_LIMIT):
            found += await self._read(browse.get_records, kind, some)
        return found

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        gone: list[str] = []
        for some in portions(names):
            gone += await self._write(statements.delete_records, kind, some)
        return each_once(names, gone)

    # --- Browsing and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: list[Job | None] = []
        while len(found) < len(ids):
            found += await self._read(browse.get, ids[len(found) : len(found) + BATCH])
        return found

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs with some meta have an index: a table. A task has none: a page scans a thousand jobs
        for it, and for any filter beside meta."""
        return await self._read(browse.find, query, cursor, limit)

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        return await self._read(times.slot_counts, slots)

    async def parked(self) -> list[Job]:
        jobs = await self.get(await self._read(browse.parked, PARKED_LIMIT))
        # Some may have been claimed in between.
        return [job for job in jobs if job is not None and job.parked]

    async def queues(self) -> list[QueueInfo]:
        return await self._read(browse.queues)

    async def pause(self, queue: str, paused: bool) -> None:
        await self._write(statements.pause, queue, paused)
        self._notify()

    async def beat(self, worker: WorkerInfo) -> None:
        await self._write(statements.beat, worker)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._read(browse.workers, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await self._write(statements.throttle, key, rate, now_ms)

    async def durability(self) -> Durability:
        writer = self._open_writer()
        return await writer.run(health.durability, writer.db, self._path)

    async def findings(self) -> list[Finding]:
        return await self._read(health.findings, self._path)

    async def sizes(self) -> list[Size]:
        return await self._read(health.sizes, self._path)


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
    """Most claims find nothing, so the file is locked only if there is something to claim."""
    some, parked = browse.claimable(db, where)
    if not some and not clock_step_ms(db, now_ns):
        return []
    return _step(db, now_ns, step, where, *args, parked)


def _from_its_turn(step: Callable[..., T], lease_ms: int) -> Callable[..., T]:
    """A step whose leases start when it gets its turn. Counted from the call, they could be over
    when the answer comes, if others had the file locked."""
    called_ns = SystemClock().monotonic_ns()

    def in_its_turn(*args: Any) -> T:
        waited_ms = (SystemClock().monotonic_ns() - called_ns) // MS_NS
        return step(*args, lease_ms + (waited_ms if waited_ms > WAITED_MS else 0))

    return in_its_turn


def _firing_bytes(firing: statements.Firing) -> int:
    """Each job counts for at least so much that a batch has no more than BATCH jobs."""
    return sum(job_bytes(job) + BATCH_BYTES // BATCH for job in firing[1])
