"""The seam: what the engine needs of a durable store, and how one is opened by URL.

Each method is one atomic step in a job's life and takes many jobs at once. A store knows no retry
policy, no worker loop and no HTTP. `tests/contract/` checks every sentence below on every store.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from tickwheel.clock import Clock, SystemClock
from tickwheel.errors import BadArguments, BadConfig
from tickwheel.job import Cancelled, Job, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.throttle import Rate


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs `find` looks for; None matches all."""

    state: State | None = None
    queue: str | None = None
    task: str | None = None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the jobs that were looked for, and where to go on; no cursor means no more."""

    jobs: list[Job]
    cursor: str | None = None


def job_bytes(job: Job) -> int:
    """About how many bytes a job is, for what bounds a batch."""
    size = _text_bytes(job.payload)
    if job.result is not None:
        size += _text_bytes(job.result)
    if job.history:
        size += sum(len(run.error or "") for run in job.history)
    return size


def settlement_bytes(settlement: Settlement) -> int:
    """About how many bytes a settlement is, with its job."""
    size = job_bytes(settlement.job)
    return size if settlement.result is None else size + _text_bytes(settlement.result)


def _text_bytes(text: str) -> int:
    """Of what is short, about as many as characters will do."""
    size = len(text)
    return size if size < 4096 or text.isascii() else len(text.encode())


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: how many jobs stand in each state, and whether it hands them out."""

    name: str
    paused: bool = False
    waiting: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, as it last described itself."""

    name: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    concurrency: int
    started_ms: int
    seen_ms: int
    # A worker not seen for this long is gone.
    gone_after_ms: int
    held: int = 0
    running: int = 0
    # How far the node's clock is behind the store's.
    offset_ms: float = 0
    # The schedules that its code declares, by name.
    schedules: tuple[str, ...] = ()


class Durability(msgspec.Struct, frozen=True, kw_only=True):
    """What an acknowledged add survives right now, read from the live store."""

    # A killed process; a machine that loses power; the loss of a whole machine or disk.
    process_crash: bool
    power_loss: bool
    machine_loss: bool
    summary: str
    # What to change for more, where something is weak.
    fixes: tuple[str, ...] = ()


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    # Worth knowing, or weaker than it could be.
    WARN = "warn"
    # Jobs are late, stuck or in danger.
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True):
    """Something that an operator should know, and what to do about it."""

    level: Level
    about: str
    words: str
    fix: str = ""


class Store(Protocol):
    """Durable truth about jobs and schedules.

    Each step of a job, and the firing of a schedule, happens whole or not at all; a store may split
    a call for many jobs, and bounds what it moves at once by bytes as well as by count (`portions`
    in tickwheel.batch). Repeating a call after a lost reply changes nothing more. Answers come in
    the order of the question. Any method may raise StoreUnavailable, after which it is unknown
    whether the step happened; no other exception is expected.

    `now_ms` is the caller's estimate of the store's own clock. A store whose server keeps the time
    itself may use that instead. One store object serves one event loop: see `twin`.
    """

    # How long before they are due jobs are handed out.
    ahead_ms: int
    # How many large steps it gains from having under way at the same time.
    lanes: int
    # Whether its clock is that of the node, for want of a server with one. Leases are spans of
    # time: such a store moves them along when that clock is set.
    own_clock: bool

    # --- Life

    async def open(self) -> None:
        """Connect; create or migrate what is missing. Refuses a schema newer than this release."""

    async def close(self) -> None:
        """Let go of everything. Closing twice, or before opening, does nothing."""

    def twin(self) -> Store:
        """Another handle on the same jobs, not yet open, for another event loop or thread."""

    async def time_ns(self) -> int:
        """The store's clock, in nanoseconds since the epoch."""

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        """Add each job as `job.added` has it, unless its id is taken; say which were added.

        An id stays taken until its job is pruned or deleted. After a lost reply False may mean
        "by you, a moment ago".
        """

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        """Hand up to `limit` jobs of these queues to `worker`, for `lease_ms`.

        A job can be claimed when its queue is not paused and
        - it is WAITING and due by `now_ms + ahead_ms`, or
        - it is RUNNING and its lease has run out: a takeover. If it was asked to stop, it is
          CANCELLED instead of handed out.
        Higher priority first, then in the order in which they could be claimed. Each comes back
        RUNNING, with `attempt` one higher than ever before and a fence of its own. Of large jobs
        there may be fewer than `limit` although more could be claimed, but at least one: `wait`
        then returns at once.
        """

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        """Return when a claim may find work in these queues, at the latest at `until_ms`.

        A hint: it may come early or late, so it is never the only way that work is found.
        """

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        """The ids of jobs in the hand of `worker` that were asked to stop.

        Answers as soon as there is one, or with none at `until_ms`. A hint like `wait`: `extend`
        tells the same, later.
        """

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        """Move the leases of jobs in hand to `now_ms + lease_ms`, and note their `started_ms`.

        Answers with the job as it stands, with its new fence and whether it was asked to stop;
        None where it is no longer ours: taken over, ended, or its lease had run out.
        """

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        """Write how attempts ended. What a settlement makes of a job is `job.settled`.

        False where the attempt is no longer the holder's: another attempt or a cancel came first,
        or the lease had run out. A repeat of the last settlement that was taken answers True again.
        """

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        """End jobs that are WAITING, ask the holders of those that are RUNNING to stop."""

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        """Put ended jobs back to run now; False where a job has not ended or is unknown."""

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        """Forget ended jobs at once; False where a job has not ended or is unknown."""

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        """Forget up to `limit` jobs that ended in one of these states before `before_ms`.

        Says how many; fewer than `limit` means that no more are left. May keep a little more
        than asked.
        """

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        """Add the schedule, or replace the one of its name; answers with its new fence."""

    async def delete_schedule(self, name: str) -> bool:
        """Forget a schedule; False where there was none."""

    async def schedules(self) -> list[Schedule]:
        """All schedules, by name."""

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        """Add the jobs of one tick and move the schedule on to `next_ms`, both or neither.

        The last of the jobs becomes the schedule's `last_id`; without jobs it stays as it was.
        False where the schedule was changed, fired or deleted since it was read: nothing is added
        then. Jobs whose id is taken are left out, as in `add`.
        """

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        """Jobs by id; None where unknown."""

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Some jobs that match, in the store's own order, from where `cursor` left off.

        A page may hold fewer than `limit` although more follow: only a page without a cursor is
        the last. Jobs that change state while paging may be missed or seen twice.
        """

    async def queues(self) -> list[QueueInfo]:
        """Every queue that holds jobs or is paused, by name.

        Counts cost O(1), and are exact as soon as nothing is under way.
        """

    async def pause(self, queue: str, paused: bool) -> None:
        """Stop, or go on, handing out jobs of a queue. They become due all the same."""

    async def beat(self, worker: WorkerInfo) -> None:
        """Note that a worker lives. `gone_after_ms=0` strikes it off."""

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        """The workers that were seen lately, by name."""

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        """Take one token from the bucket `key`, shared by all nodes: 0, or the milliseconds to wait
        before asking again (nothing is taken then)."""

    async def durability(self) -> Durability:
        """What an acknowledged add survives, read from the live store."""

    async def findings(self) -> list[Finding]:
        """What else an operator should know of this store: versions, limits, drift."""


# Where each kind of store lives. By name, because a store's driver may not be installed.
_KINDS = {
    "memory": ("tickwheel.stores.memory", "MemoryStore"),
    "sqlite": ("tickwheel.stores.sqlite.store", "SqliteStore"),
    "nats": ("tickwheel.stores.nats.store", "NatsStore"),
    "nats+embedded": ("tickwheel.stores.nats.store", "NatsStore"),
    "postgresql": ("tickwheel.stores.postgres.store", "PostgresStore"),
    "postgres": ("tickwheel.stores.postgres.store", "PostgresStore"),
    "redis": ("tickwheel.stores.redis.store", "RedisStore"),
    "rediss": ("tickwheel.stores.redis.store", "RedisStore"),
    "valkey": ("tickwheel.stores.redis.store", "RedisStore"),
    "valkeys": ("tickwheel.stores.redis.store", "RedisStore"),
}


def checked_text(what: str, text: str) -> str:
    """Text that every store can keep. Bytes that are not UTF-8 reach Python as lone surrogates."""
    if not isinstance(text, str):
        raise BadArguments(f"{what}={text!r}: give a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArguments(f"{what}={text!r} has a lone surrogate, which no store keeps") from None
    return text


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """A store for this URL, not yet open. Its driver is imported here and only if needed."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise BadConfig("the store's URL is not valid UTF-8; write other bytes as %XX") from None
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme not in _KINDS:
        # Only the scheme: the rest of a URL may hold a password.
        raise BadConfig(
            f"no store for {scheme + '://' if scheme else url!r}: a store URL is "
            "sqlite:///jobs.db (a file in this folder), "
            "sqlite:////var/lib/jobs.db (an absolute path), nats://host:4222, "
            "postgresql://user@host/database, redis://host:6379 or memory://"
        )
    module, name = _KINDS[scheme]
    kind = getattr(importlib.import_module(module), name)
    store: Store = kind.from_url(url, clock=clock or SystemClock())
    return store
