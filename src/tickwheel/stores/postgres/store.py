"""`postgresql://`: jobs in a database that a team already has, on one machine or many.

Every step is one statement in one transaction; how durable it is when it returns depends on the
server's settings. `statements` and `claiming` have the steps, `browse` has what only reads, and
`notify` wakes whoever waits. See docs/postgresql.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tickwheel.batch import BATCH, portions, weightless
from tickwheel.changes import Put
from tickwheel.clock import Clock
from tickwheel.errors import BadConfig, StoreError, StoreUnavailable
from tickwheel.ids import new_fence
from tickwheel.job import CancelOutcome, Job, Move, MoveOutcome, PutOutcome, Settlement, State
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
    each_once,
    job_bytes,
    put_bytes,
    record_bytes,
    settlement_bytes,
)
from tickwheel.transaction import Statement

try:
    import psycopg as _driver  # noqa: F401
except ImportError as error:
    raise BadConfig(
        "postgresql:// needs the driver psycopg: pip install 'tickwheel[postgresql]'"
    ) from error

from tickwheel.stores.postgres import (
    browse,
    changing,
    claiming,
    health,
    holding,
    parking,
    statements,
)
from tickwheel.stores.postgres.notify import EndListener, Listener
from tickwheel.stores.postgres.pool import Pool
from tickwheel.stores.postgres.schema import make_ready, migrate
from tickwheel.stores.postgres.url import PostgresOptions
from tickwheel.stores.waiting import slack_of

log = logging.getLogger("tickwheel")

T = TypeVar("T")

# Counts are folded after so many steps of this handle, or if `queues` had to sum so many rows.
FOLD_STEPS, FOLD_ROWS = 500, 2000
MIGRATE_MS = 24 * 3_600_000


class PostgresStore:
    """Keeps jobs in one schema of a PostgreSQL database."""

    max_inflight = 1
    own_clock = False

    def __init__(self, options: PostgresOptions) -> None:
        self.ahead_ms = options.ahead_ms
        self._options = options
        self._schema = options.schema
        self._pool: Pool | None = None
        self._listener: Listener | None = None
        self._ends: EndListener | None = None
        self._steps = 0
        # Whether the last claim saw parked jobs: the next one then expects them.
        self._parked = False
        # Why the counts could not be folded the last time; empty if they could.
        self._unfolded = ""

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> PostgresStore:
        """The clock is not used: the server keeps the time."""
        return cls(PostgresOptions.of(url))

    @staticmethod
    async def migrate(url: str, *, dry_run: bool) -> tuple[int, int, str]:
        """Create or upgrade the schema; returns its versions before and after, and the SQL. All
        missing parts are run, or none; with `dry_run` none."""
        # Building an index on many jobs may take hours.
        options = replace(PostgresOptions.of(url), timeout_ms=MIGRATE_MS)
        pool = Pool(options)
        try:
            return await pool.run(migrate, options.schema, dry_run)
        finally:
            await pool.close()

    # --- Open and close

    async def open(self) -> None:
        if self._pool is not None:
            return
        pool = Pool(self._options)
        try:
            await pool.run(make_ready, self._schema)
        except BaseException:
            await pool.close()
            raise
        self._pool, self._listener = pool, Listener(pool, self._schema)
        self._ends = EndListener(pool, self._schema)

    async def close(self) -> None:
        pool, listeners = self._pool, (self._listener, self._ends)
        self._pool = self._listener = self._ends = None
        for each in listeners:
            if each is not None:
                await each.close()
        if pool is not None:
            await pool.close()

    def new_handle(self) -> PostgresStore:
        return PostgresStore(self._options)

    async def time_ns(self) -> int:
        return await self._opened().run(browse.time_ns)

    def _opened(self) -> Pool:
        if self._pool is None:
            raise StoreUnavailable("the store is closed")
        return self._pool

    async def _run(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        return await self._opened().run(step, self._schema, *args)

    async def _step(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run a step that changes jobs. Each leaves a few rows of counts behind, which are folded
        now and then."""
        answer = await self._run(step, *args)
        self._steps += 1
        if self._steps % FOLD_STEPS == 0:
            await self._fold()
        return answer

    async def _fold(self) -> None:
        """Fold the counts. A failure is logged and shown by `findings`, but not raised: the step
        itself has happened, and unfolded counts are exact, only slower."""
        try:
            await self._run(statements.fold)
            self._unfolded = ""
        except StoreError as error:
            if not self._unfolded:
                log.warning("the counts of jobs can't be folded: %s", error)
            self._unfolded = str(error)

    async def _in_batches(
        self,
        step: Callable[..., Awaitable[list[T]]],
        items: Sequence[Any],
        *args: Any,
        weigh: Callable[[Any], int] = weightless,
    ) -> list[T]:
        """One transaction for each portion, so that no other step waits long."""
        answers: list[T] = []
        for some in portions(items, weigh):
            answers += await self._step(step, some, *args)
        return answers

    def _notify(self) -> None:
        """Wake this handle's own waiters; those of others are notified by the server."""
        if self._listener is not None:
            self._listener.notify()

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        answers = await self._in_batches(statements.add, jobs, weigh=job_bytes)
        self._notify()
        return answers

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """For the user's own connection to the same database."""
        sql, parameters = statements.adding(jobs, self._schema)
        return Statement("postgresql", sql, parameters["jobs"])

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        answers: list[PutOutcome] = await self._in_batches(
            changing.ask, puts, now_ms, weigh=put_bytes
        )
        self._notify()
        return answers

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        answers: list[MoveOutcome] = await self._in_batches(changing.ask, moves, now_ms)
        self._notify()
        return answers

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
        names = list(dict.fromkeys(queues))
        if not names or limit < 1:
            return []
        call = new_fence() if call is None else call
        if again and (taken := await self._run(claiming.claimed_by, names, worker, call)):
            held = await self.extend(taken, now_ms=now_ms, lease_ms=lease_ms)
            if ours := [job for job in held if job is not None]:
                return ours
        where = {"worker": worker, "call": call, "now": now_ms, "due": now_ms + self.ahead_ms}
        where["limit"] = min(limit, BATCH)
        known, step = frozenset(tasks), partial(claiming.claim, parked=self._parked)
        jobs, self._parked = await self._step(step, names, known, where, lease_ms)
        return jobs

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        return await self._in_batches(holding.extend, jobs, now_ms, lease_ms)

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers = await self._in_batches(
            holding.settle, settlements, now_ms, weigh=settlement_bytes
        )
        if any(settlement.state is State.WAITING for settlement in settlements):
            self._notify()
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        answers = await self._in_batches(statements.cancel, ids, now_ms)
        self._notify()
        return answers

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        answers = await self._in_batches(statements.rerun, ids, now_ms)
        self._notify()
        return answers

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self._in_batches(statements.delete, ids)

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        ended = [state for state in states if state.ended]
        pruned = 0
        # In small transactions, so that each leaves little for the next vacuum.
        while ended and pruned < limit:
            most = min(limit - pruned, BATCH)
            gone = await self._step(statements.prune, ended, before_ms, most)
            pruned += gone
            if gone < most:
                break
        return pruned

    # --- Waiting

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        names, known = list(dict.fromkeys(queues)), frozenset(tasks)

        async def next_ms(_: int) -> int | None:
            return await self._run(browse.next_claimable_ms, names, known, self.ahead_ms)

        topics = parking.topics_of(known).union(f"q{name}" for name in names)
        await self._open_listener().until_due(
            topics, next_ms, now_ms=now_ms, until_ms=until_ms, slack_ms=slack_of(self.ahead_ms)
        )

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        async def find() -> dict[str, Ask]:
            return await self._run(browse.asked, worker)

        return await self._open_listener().until_found(
            [f"a{worker}"], find, known=known, now_ms=now_ms, until_ms=until_ms
        )

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        if self._ends is None:
            raise StoreUnavailable("the store is closed")
        await self._ends.watch(ids, tell, now_ms=now_ms, until_ms=until_ms)

    def _open_listener(self) -> Listener:
        if self._listener is None:
            raise StoreUnavailable("the store is closed")
        return self._listener

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        return await self._run(statements.put_schedule, schedule)

    async def replace_schedule(self, schedule: Schedule) -> bool:
        return await self._run(statements.replace_schedule, schedule)

    async def delete_schedule(self, name: str) -> bool:
        return await self._run(statements.delete_schedule, name)

    async def schedules(self) -> list[Schedule]:
        return await self._run(browse.schedules)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        fired = await self._step(statements.fire, schedule, jobs, next_ms)
        self._notify()
        return fired

    # --- Records

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        for some in portions(list(records.items()), record_bytes):
            await self._run(statements.put_records, kind, some)

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        rows = await self._run(browse.records, kind, after, limit)
        return [(name, text) for name, text in rows]

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        found: list[str | None] = []
        for some in portions(names, most=RECORDS_LIMIT):
            found += await self._run(browse.get_records, kind, some)
        return found

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        gone: list[str] = []
        for some in portions(names):
            gone += await self._run(statements.delete_records, kind, some)
        return each_once(names, gone)

    # --- Browsing and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: list[Job | None] = []
        for some in portions(ids):
            found += await self._run(browse.get, some)
        return found

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Jobs with some meta have an index: a table. A task has none: a page scans a thousand jobs
        for it, and for any filter beside meta."""
        return await self._run(browse.find, query, cursor, limit)

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        return await self._run(browse.slot_counts, slots)

    async def parked(self) -> list[Job]:
        return await self._run(browse.parked)

    async def queues(self) -> list[QueueInfo]:
        found, rows = await self._run(browse.queues)
        if rows > FOLD_ROWS:
            await self._fold()
        return found

    async def pause(self, queue: str, paused: bool) -> None:
        await self._run(statements.pause, queue, paused)
        self._notify()

    async def beat(self, worker: WorkerInfo) -> None:
        if worker.gone_after_ms:
            await self._run(statements.beat, worker)
        else:
            await self._run(statements.remove_worker, worker.name)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._run(browse.workers, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await self._run(statements.throttle, key, rate, now_ms)

    async def durability(self) -> Durability:
        return await self._opened().run(health.durability)

    async def sizes(self) -> list[Size]:
        return await self._run(health.sizes)

    async def findings(self) -> list[Finding]:
        pool, listener = self._opened(), self._open_listener()
        # Try it here: the handle whose folding fails is mostly another one.
        await self._fold()
        return [
            *await self._run(health.findings),
            await self._run(health.of_counts, self._unfolded),
            health.of_notifications(listener.hearing, pool.pooled),
        ]
