"""`postgresql://`: jobs in a database that a team has anyway, on one machine or many.

Every step is one statement in one transaction, durable when it returns as the server's settings
say. `steps` has the statements of a job's life, `looking` those that only look, `tables` the rest;
`news` wakes whoever waits. See docs/postgresql.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from tickwheel.batch import BATCH, portions, weightless
from tickwheel.clock import Clock
from tickwheel.errors import BadConfig, StoreUnavailable
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
from tickwheel.throttle import Rate
from tickwheel.transaction import Statement

try:
    import psycopg as _driver  # noqa: F401
except ImportError as error:
    raise BadConfig(
        "postgresql:// needs the driver psycopg: pip install 'tickwheel[postgresql]'"
    ) from error

from tickwheel.stores.postgres import health, looking, steps, tables
from tickwheel.stores.postgres.news import News
from tickwheel.stores.postgres.pool import Pool
from tickwheel.stores.postgres.schema import make_ready, migrate
from tickwheel.stores.postgres.url import Options

T = TypeVar("T")

# Counts are folded after so many steps of this handle, or when a look had to sum so many rows.
FOLD_STEPS, FOLD_ROWS = 500, 2000
MIGRATE_MS = 24 * 3_600_000


class PostgresStore:
    """Keeps jobs in one schema of a PostgreSQL database."""

    lanes = 1
    own_clock = False

    def __init__(self, options: Options) -> None:
        self.ahead_ms = options.ahead_ms
        self._options = options
        self._schema = options.schema
        self._pool: Pool | None = None
        self._news: News | None = None
        self._steps = 0

    @classmethod
    def from_url(cls, url: str, *, clock: Clock) -> PostgresStore:
        """The server keeps the time, so the clock is not asked."""
        return cls(Options.of(url))

    @staticmethod
    async def migrate(url: str, *, dry_run: bool) -> tuple[int, int, str]:
        """Make or upgrade the schema: its versions before and after, and the SQL for it. Parts that
        are missing are run all or none; with `dry_run` none."""
        # An index of many jobs takes as long as it takes.
        options = replace(Options.of(url), timeout_ms=MIGRATE_MS)
        pool = Pool(options)
        try:
            return await pool.run(migrate, options.schema, dry_run)
        finally:
            await pool.close()

    # --- Life

    async def open(self) -> None:
        if self._pool is not None:
            return
        pool = Pool(self._options)
        try:
            await pool.run(make_ready, self._schema)
        except BaseException:
            await pool.close()
            raise
        self._pool, self._news = pool, News(pool, self._schema)

    async def close(self) -> None:
        pool, news = self._pool, self._news
        self._pool = self._news = None
        if news is not None:
            await news.close()
        if pool is not None:
            await pool.close()

    def twin(self) -> PostgresStore:
        return PostgresStore(self._options)

    async def time_ns(self) -> int:
        return await self._opened().run(looking.time_ns)

    def _opened(self) -> Pool:
        if self._pool is None:
            raise StoreUnavailable("the store is closed")
        return self._pool

    async def _look(self, look: Callable[..., Awaitable[T]], *args: Any) -> T:
        return await self._opened().run(look, self._schema, *args)

    async def _step(self, step: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Take a step of some jobs' lives, each of which leaves a few rows of counts behind."""
        answer = await self._look(step, *args)
        self._steps += 1
        if self._steps % FOLD_STEPS == 0:
            await self._fold()
        return answer

    async def _fold(self) -> None:
        try:
            await self._look(tables.fold)
        except StoreUnavailable:
            # The step itself has happened; the counts are as exact unfolded.
            pass

    async def _in_batches(
        self,
        step: Callable[..., Awaitable[list[T]]],
        items: Sequence[Any],
        *args: Any,
        weigh: Callable[[Any], int] = weightless,
    ) -> list[T]:
        """One transaction moves a portion, so that no other step waits long for its turn."""
        answers: list[T] = []
        for some in portions(items, weigh):
            answers += await self._step(step, some, *args)
        return answers

    def _tell(self) -> None:
        """Wake this handle's own waiters; those of others are notified by the server."""
        if self._news is not None:
            self._news.tell()

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        answers = await self._in_batches(steps.add, jobs, weigh=job_bytes)
        self._tell()
        return answers

    def adding(self, jobs: Sequence[Job], *, driver: str) -> Statement:
        """For a connection of the user's own to the same database."""
        sql, parameters = steps.adding(jobs, self._schema)
        return Statement("postgresql", sql, parameters["jobs"])

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        names = list(dict.fromkeys(queues))
        if not names or limit < 1:
            return []
        where = {"worker": worker, "now": now_ms, "due": now_ms + self.ahead_ms}
        where["limit"] = min(limit, BATCH)
        return await self._step(steps.claim, names, where, lease_ms)

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        return await self._in_batches(steps.extend, jobs, now_ms, lease_ms)

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers = await self._in_batches(steps.settle, settlements, now_ms, weigh=settlement_bytes)
        if any(settlement.state is State.WAITING for settlement in settlements):
            self._tell()
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        answers = await self._in_batches(steps.cancel, ids, now_ms)
        self._tell()
        return answers

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        answers = await self._in_batches(steps.rerun, ids, now_ms)
        self._tell()
        return answers

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self._in_batches(steps.delete, ids)

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        ended = [state for state in states if state.ended]
        pruned = 0
        # In small transactions, each of which leaves little for the next vacuum.
        while ended and pruned < limit:
            most = min(limit - pruned, BATCH)
            gone = await self._step(steps.prune, ended, before_ms, most)
            pruned += gone
            if gone < most:
                break
        return pruned

    # --- Waiting

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        names = list(dict.fromkeys(queues))
        zero = asyncio.get_running_loop().time() - now_ms / 1000

        async def next_claimable() -> float:
            next_ms = await self._look(looking.next_claimable_ms, names, self.ahead_ms)
            return float("inf") if next_ms is None else zero + next_ms / 1000

        await self._opened_news().watch(
            frozenset(f"q{name}" for name in names), next_claimable, until=zero + until_ms / 1000
        )

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        ids: list[str] = []

        async def found() -> float:
            ids[:] = await self._look(looking.asked, worker)
            return 0 if ids else float("inf")

        until = asyncio.get_running_loop().time() + (until_ms - now_ms) / 1000
        await self._opened_news().watch(frozenset([f"a{worker}"]), found, until=until)
        return ids

    def _opened_news(self) -> News:
        if self._news is None:
            raise StoreUnavailable("the store is closed")
        return self._news

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        return await self._look(tables.put_schedule, schedule)

    async def delete_schedule(self, name: str) -> bool:
        return await self._look(tables.delete_schedule, name)

    async def schedules(self) -> list[Schedule]:
        return await self._look(tables.schedules)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        fired = await self._step(steps.fire, schedule, jobs, next_ms)
        self._tell()
        return fired

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found: list[Job | None] = []
        for some in portions(ids):
            found += await self._look(looking.get, some)
        return found

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self._look(looking.find, query, cursor, limit)

    async def queues(self) -> list[QueueInfo]:
        found, rows = await self._look(tables.queues)
        if rows > FOLD_ROWS:
            await self._fold()
        return found

    async def pause(self, queue: str, paused: bool) -> None:
        await self._look(tables.pause, queue, paused)
        self._tell()

    async def beat(self, worker: WorkerInfo) -> None:
        if worker.gone_after_ms:
            await self._look(tables.beat, worker)
        else:
            await self._look(tables.strike_off, worker.name)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._look(tables.workers, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await self._look(tables.throttle, key, rate, now_ms)

    async def durability(self) -> Durability:
        return await self._opened().run(health.durability)

    async def findings(self) -> list[Finding]:
        pool, news = self._opened(), self._opened_news()
        return await pool.run(self._findings, news.hearing, pool.pooled)

    async def _findings(self, db: steps.Link, hearing: bool | None, pooled: bool) -> list[Finding]:
        return await health.findings(db, self._schema, hearing=hearing, pooled=pooled)
