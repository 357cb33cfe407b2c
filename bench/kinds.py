"""The stores to measure, how to create an empty one, and the goals for each."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from tickwheel.stores.nats.servers.process import start_server

# Uses the same servers as the tests.
sys.path.append(str(Path(__file__).parent.parent / "tests"))

from callers import heard_late_s as heard_late_s
from postgres_server import PostgresServer
from redis_server import RedisServer


@dataclass(frozen=True, slots=True)
class Goals:
    """Jobs a second at least, milliseconds at most."""

    enqueue_many: int
    drain: int
    p50_ms: float
    p99_ms: float
    # How many times faster 1,000 concurrent enqueues must be than one after the other.
    together: float | None = None
    # How long after the end of a job its caller may have the result, in the median.
    heard_ms: float = 3
    # How many times faster than one by one jobs must drain in batches.
    batched: float | None = None


# Yields the URL of an empty store, a new one each time.
Fresh = Callable[[], AbstractContextManager[str]]


@dataclass(frozen=True, slots=True)
class Served:
    """A source of empty stores, and their server if it is measured as well."""

    fresh: Fresh
    # The memory of the server's process, in MB.
    weigh: Callable[[], float] | None = None
    # Kills the server and restarts it on the same folder.
    restart: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """A store under test; its server, if it has one, runs for the duration of the block."""

    serve: Callable[[], AbstractContextManager[Served]]
    goals: Goals
    # Adds this many ended jobs to the store at this URL, which must not make it slower.
    age: Callable[[str, int], None] | None = None


@contextmanager
def _sqlite() -> Iterator[Served]:
    @contextmanager
    def fresh() -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
            yield f"sqlite:///{folder}/jobs.db"

    yield Served(fresh)


def _nats(durability: str) -> Callable[[], AbstractContextManager[Served]]:
    @contextmanager
    def serve() -> Iterator[Served]:
        with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
            server = asyncio.run(start_server(folder, durability=durability))

            @contextmanager
            def fresh() -> Iterator[str]:
                yield f"{server.url}/{secrets.token_hex(4)}?durability={durability}"

            def weigh() -> float:
                status = Path(f"/proc/{server.pid}/status").read_text()
                return int(status.partition("VmRSS:")[2].split()[0]) / 1024

            def restart() -> None:
                nonlocal server
                os.kill(server.pid, signal.SIGKILL)
                asyncio.run(server.stop())
                server = asyncio.run(start_server(folder, durability=durability, patience_s=300))

            try:
                yield Served(fresh, weigh, restart)
            finally:
                asyncio.run(server.stop())

    return serve


@contextmanager
def _postgres() -> Iterator[Served]:
    server = PostgresServer(fast=False)
    server.create()
    server.start()

    @contextmanager
    def fresh() -> Iterator[str]:
        yield f"{server.url}?schema=bench_{secrets.token_hex(4)}"

    try:
        yield Served(fresh)
    finally:
        server.remove()


def _aged(url: str, count: int) -> None:
    base, _, schema = url.partition("?schema=")
    with psycopg.connect(base) as db:
        db.execute(
            f"""insert into {schema}.job
                (id, task, payload, queue, priority, due_ms, created_ms, state, ended_ms, attempt)
            select 'old-' || n, 'nothing', '{{}}', 'default', 1, now, now, 'done', now, 1
            from generate_series(1, {count}) as n,
                 (select (extract(epoch from now()) * 1000)::bigint as now) as clock""".encode()
        )
        db.commit()
        db.autocommit = True
        db.execute(f"vacuum analyze {schema}.job".encode())


@contextmanager
def _redis() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
        server = RedisServer(Path(folder), appendonly="yes", appendfsync="everysec").start()

        @contextmanager
        def fresh() -> Iterator[str]:
            yield f"{server.url}?namespace={secrets.token_hex(4)}"

        try:
            yield Served(fresh)
        finally:
            server.stop()


KINDS = {
    "sqlite": Kind(_sqlite, Goals(50_000, 15_000, 2, 5, together=10, batched=1.7)),
    "nats-strict": Kind(_nats("strict"), Goals(30_000, 7_000, 2, 5)),
    "nats-fast": Kind(_nats("fast"), Goals(30_000, 10_000, 2, 5)),
    "postgresql": Kind(_postgres, Goals(20_000, 4_000, 3, 10), _aged),
    "redis": Kind(_redis, Goals(40_000, 12_000, 3, 10, batched=1.7)),
}
