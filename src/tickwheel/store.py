"""The seam: what the engine needs from a durable store, and how to open one by URL.

Each method is one atomic step in a job's life and takes many jobs at once. A store has no retry
policy, no worker loop and no HTTP. `tests/contract/` checks every sentence below on every store.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

import msgspec

from tickwheel.changes import Put
from tickwheel.clock import Clock, SystemClock
from tickwheel.errors import BadArguments, BadConfig, UsageError, shown
from tickwheel.job import CancelOutcome, Job, Move, MoveOutcome, PutOutcome, Settlement, State
from tickwheel.limit import Rate
from tickwheel.masking import QUOTE_LOGIN, masked
from tickwheel.schedule import Schedule


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs `find` returns; None matches all."""

    state: State | None = None
    queue: str | None = None
    task: str | None = None
    # A name, and the value that a job's meta must have for it.
    meta: tuple[str, str] | None = None
    # From when until when (excluded) they are due; for jobs that have ended, when they did.
    from_ms: int | None = None
    until_ms: int | None = None

    @property
    def timed(self) -> bool:
        """Whether it has a time range."""
        return self.from_ms is not None or self.until_ms is not None

    def in_time(self, job: Job) -> bool:
        """Whether the job's time is in the range."""
        ms = time_ms(job)
        after = self.from_ms is None or ms >= self.from_ms
        return after and (self.until_ms is None or ms < self.until_ms)

    def has_meta(self, job: Job) -> bool:
        """Whether the job's meta matches."""
        return self.meta is None or (job.meta or {}).get(self.meta[0]) == self.meta[1]


def time_ms(job: Job) -> int:
    """When a job is due, or has ended: what a time range is about."""
    return job.due_ms if job.ended_ms is None else job.ended_ms


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the matching jobs, and where to continue; no cursor means no more."""

    jobs: list[Job]
    cursor: str | None = None
    # How many jobs were looked at to find them.
    looked: int = 0


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """Equal parts of a time range, for jobs of one state: waiting, or one in which jobs end."""

    state: State
    queue: str | None = None
    start_ms: int
    width_ms: int
    count: int

    @property
    def end_ms(self) -> int:
        return self.start_ms + self.width_ms * self.count


class SlotCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs are in each slot, before the first and after the last."""

    before: int
    counts: list[int]
    after: int


# How many jobs `parked` returns at most.
PARKED_LIMIT = 1000

# How many records a page of `records` has at most: so many of the largest fit into one reply.
RECORDS_LIMIT = 250

# Texts up to this many characters are not measured exactly.
SHORT = 4096


def job_bytes(job: Job) -> int:
    """About how many bytes a job takes, for the bounds of a batch."""
    size = len(job.payload)
    if size >= SHORT:
        size = _text_bytes(job.payload)
    if job.result is not None:
        size += _text_bytes(job.result)
    if job.traceback is not None:
        size += len(job.traceback)
    if job.meta is not None:
        size += sum(len(name) + len(value) for name, value in job.meta.items())
    if job.progress is not None:
        size += len(job.progress.words)
    if job.history:
        size += sum(len(run.error or "") for run in job.history)
    if job.changes is not None and job.changes.next is not None:
        size += job_bytes(job.changes.next)
    return size


def put_bytes(put: Put) -> int:
    return job_bytes(put.job)


def record_bytes(record: tuple[str, str]) -> int:
    """About how many bytes a record takes: its name and its text."""
    return len(record[0]) + _text_bytes(record[1])


def settlement_bytes(settlement: Settlement) -> int:
    """About how many bytes a settlement takes, with its job."""
    size = job_bytes(settlement.job)
    if settlement.traceback is not None:
        size += len(settlement.traceback)
    return size if settlement.result is None else size + _text_bytes(settlement.result)


def _text_bytes(text: str) -> int:
    """The bytes of a text; for a short one, its number of characters is close enough."""
    size = len(text)
    return size if size < SHORT or text.isascii() else len(text.encode())


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue: how many jobs are in each state, and whether it is paused."""

    name: str
    paused: bool = False
    waiting: int = 0
    running: int = 0
    done: int = 0
    dead: int = 0
    cancelled: int = 0


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the process of a worker has counted since `since_ms`.

    Workers of one process tell the same, under the same `source`. Another release may tell more.
    """

    source: str
    since_ms: int
    started: int = 0
    done: int = 0
    failed: int = 0
    dead: int = 0
    expired: int = 0
    # How many runs started how late, by the buckets of `counts.BOUNDS_MS`; empty ones at the end
    # are left out.
    late: tuple[int, ...] = ()
    # By task: how many are done, runs that failed, and how many are dead.
    tasks: dict[str, tuple[int, int, int]] = {}


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
    # The app that it runs, and the tasks that it knows, by name. None: an older release, which
    # didn't say.
    app: str | None = None
    tasks: tuple[str, ...] | None = None
    # None: its metrics are off, or an older release.
    counts: WorkerCounts | None = None

    def knows(self, task: str) -> bool:
        """Whether it can run this task, as far as can be told."""
        return self.tasks is None or task in self.tasks


class Durability(msgspec.Struct, frozen=True, kw_only=True):
    """What an acknowledged add survives right now, read from the live store."""

    # A killed process; a machine that loses power; the loss of a whole machine or disk.
    process_crash: bool
    power_loss: bool
    machine_loss: bool
    # If a crash may lose acknowledged adds: those of at most this long. None: of any age.
    window_ms: int | None = None
    summary: str
    # What to change to survive more.
    fixes: tuple[str, ...] = ()


class Level(StrEnum):
    """How much a finding matters."""

    OK = "ok"
    # Worth knowing, or weaker than it could be.
    WARN = "warn"
    # Jobs are late, stuck or at risk.
    BAD = "bad"


class Finding(msgspec.Struct, frozen=True):
    """Something that an operator should know, and what to do about it."""

    level: Level
    about: str
    words: str
    fix: str = ""


class Ask(StrEnum):
    """What the holder of a job is asked for."""

    STOP = "stop"
    # Put it back unless it has started: it was replaced, or moved.
    PUT_BACK = "put back"


# What a worker is asked for, by the ids of its jobs.
Asks = Mapping[str, Ask]
NO_ASKS: Asks = MappingProxyType({})


class Size(msgspec.Struct, frozen=True):
    """How large a part of a store is, in bytes or in something that the unit names."""

    name: str
    value: int
    unit: str = "bytes"


# Called with the ids of jobs that may have ended, on the event loop of whoever watches them.
Tell = Callable[[Collection[str]], None]


class Store(Protocol):
    """The durable truth about jobs and schedules.

    Each step of a job, and the firing of a schedule, happens completely or not at all; a store may
    split a call for many jobs, and bounds what it moves at once by bytes as well as by count
    (`portions` in tickwheel.batch). Repeating a call after a lost reply changes nothing more.
    Answers are in the order of the arguments. Any method may raise StoreUnavailable, after which it
    is unknown whether the step happened; no other exception is expected.

    `now_ms` is the caller's estimate of the store's clock. A store whose server keeps the time may
    use the server's instead. One store object serves one event loop: see `new_handle`.
    """

    # How long before they are due jobs can be claimed.
    ahead_ms: int
    # How many large steps under way at the same time still make it faster.
    max_inflight: int
    # Whether its clock is the node's own, because it has no server. Leases are durations: such a
    # store shifts them when that clock is set.
    own_clock: bool

    # --- Open and close

    async def open(self) -> None:
        """Connect; create or migrate what is missing. Refuses a schema newer than this release."""

    async def close(self) -> None:
        """Release all resources. Closing twice, or before opening, does nothing."""

    def new_handle(self) -> Store:
        """Another handle on the same jobs, not yet open, for another event loop or thread."""

    async def time_ns(self) -> int:
        """The store's clock, in nanoseconds since the epoch."""

    # --- Jobs

    async def add(self, jobs: Sequence[Job]) -> list[bool]:
        """Add each job as `job.added` returns it, unless its id is taken; returns which were added.

        An id stays taken until its job is pruned or deleted. After a lost reply False may mean
        "by you, a moment ago".
        """

    async def put(self, puts: Sequence[Put], *, now_ms: int) -> list[PutOutcome]:
        """Store each job under its id: `changes.put` defines what becomes of the one that has it.

        They count one after the other. A repeat with the same `request` changes nothing more and is
        answered as before, while the job remembers that request: the last eight that changed it.
        """

    async def move(self, moves: Sequence[Move], *, now_ms: int) -> list[MoveOutcome]:
        """Change when and where jobs run: `changes.move` defines what that achieves. Repeats are
        as for `put`."""

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
        """Hand up to `limit` jobs of these queues to `worker`, for `lease_ms`.

        A job can be claimed if its queue is not paused and
        - it is WAITING and due by `now_ms + ahead_ms`; if it is parked, only where its task is one
          of `tasks`, those that the worker knows; or
        - it is RUNNING and its lease has run out: a takeover. If it was asked to stop, it is
          CANCELLED instead of handed out; if it was replaced or moved, it is WAITING as such.
        Higher priority first, then in the order in which they became claimable. Each is returned
        RUNNING, with `attempt` one higher than ever before and a fence of its own. With `tasks`, a
        store may park a job of another task in the same step, as `park` would: it is returned
        WAITING and parked, and nobody holds it. If jobs are large, there may be fewer than `limit`
        although more could be claimed, but at least one: `wait` then returns at once.

        A caller that loses the reply repeats the call on the same handle, with `again` and the same
        `call` number as the first time (from `new_fence`). It gets the jobs that the first call
        claimed and whose lease still holds, with a new lease; and other jobs only if there are none
        of those.
        """

    async def wait(
        self, queues: Sequence[str], *, now_ms: int, until_ms: int, tasks: Collection[str] = ()
    ) -> None:
        """Return when a claim with these `tasks` may find work in these queues, at the latest at
        `until_ms`. Parked jobs of other tasks don't end it.

        A hint: it may be early or late, so it is never the only way to find work.
        """

    async def asked(
        self, worker: str, *, now_ms: int, until_ms: int, known: Asks = NO_ASKS
    ) -> dict[str, Ask]:
        """What `worker` is asked for, by the ids of the jobs that it holds: to stop them, or to put
        them back unless they have started, because they were replaced or moved.

        Returns as soon as there is something that is not `known`, or at `until_ms`. A hint like
        `wait`: `extend` tells the same, later.
        """

    async def watch_ended(
        self, ids: Collection[str], tell: Tell, *, now_ms: int, until_ms: int
    ) -> None:
        """Until `until_ms`, call `tell` with those of these jobs that may have ended: soon after
        each does, and at the beginning with those that may have ended before.

        `ids` may change meanwhile: what counts is what it has when there is something to tell. A
        hint like `wait`: it may come late, or for a job that has not ended, so whoever watches
        begins again now and then. Steps cost nothing more while nobody watches.
        """

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        """Extend the leases of held jobs to `now_ms + lease_ms`, and store their `started_ms` and
        `progress`.

        Returns the job as it is now, with its new fence, whether it was asked to stop, and what
        change is pending; None if it is no longer ours: taken over, ended, or its lease had run
        out.
        """

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        """Write how attempts ended. `job.settled` defines what a settlement does to a job.

        False if the attempt no longer holds the job: another attempt or a cancel came first, or the
        lease had run out. Repeating the last accepted settlement returns True again.
        """

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[CancelOutcome]:
        """Cancel jobs that are WAITING, and ask the holders of RUNNING jobs to stop."""

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        """Put ended jobs back to run now; False if a job has not ended or is unknown."""

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        """Delete ended jobs; False if a job has not ended or is unknown."""

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        """Delete up to `limit` jobs that ended in one of these states before `before_ms`.

        Returns how many; fewer than `limit` means that no more are left. May keep a little more
        than asked.
        """

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        """Add the schedule, or replace the one of its name; returns it with its new fence."""

    async def replace_schedule(self, schedule: Schedule) -> bool:
        """Replace the schedule that was read with this fence; False if it was changed, fired or
        deleted since."""

    async def delete_schedule(self, name: str) -> bool:
        """Delete a schedule; False if there was none."""

    async def schedules(self) -> list[Schedule]:
        """All schedules, by name."""

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        """Add the jobs of one tick and advance the schedule to `next_ms`, both or neither.

        The last of the jobs becomes the schedule's `last_id`; without jobs it stays as it was.
        False if the schedule was changed, fired or deleted since it was read; then nothing is
        added. Jobs whose id is taken are skipped, as in `add`.
        """

    # --- Records: small named texts, such as API keys and the audit log
    #
    # `checks.checked_records` says which kinds, names and texts a store must be able to keep.

    async def put_records(self, kind: str, records: Mapping[str, str]) -> None:
        """Add each record, or replace the one of its kind and name."""

    async def records(
        self, kind: str, *, after: str = "", limit: int = 100
    ) -> list[tuple[str, str]]:
        """The names and texts of the first `limit` records whose names come after `after`, in the
        order of their names by code point.

        Fewer than `limit` means that no more follow. `limit` is from 1 to RECORDS_LIMIT, so that
        the largest page fits into one reply and none is cut. The next page is after the last name
        of this one; a record that is put or deleted meanwhile may be missed, and no other.
        """

    async def get_records(self, kind: str, names: Sequence[str]) -> list[str | None]:
        """The texts of records by name; None if there is none."""

    async def delete_records(self, kind: str, names: Sequence[str]) -> list[bool]:
        """Delete records; False if there was none. After a lost reply False may mean "by you, a
        moment ago"."""

    # --- Browsing and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        """Jobs by id; None if unknown."""

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        """Some matching jobs, in the store's own order, continuing from `cursor`.

        A page may hold fewer than `limit` although more follow: only a page without a cursor is the
        last. Jobs that change state while paging may be missed or seen twice. Raises BadArguments
        for a cursor that can't be one of this query. A filter for which a store has no index makes
        it scan: a page then looks at a bounded number of jobs.

        With a time range, and where the store has an index by time, the jobs of one state come in
        the order of their time, whatever their queue: waiting ones the next due first (parked ones
        may come after the others), ended ones the last first.
        """

    async def slot_counts(self, slots: Slots) -> SlotCounts | None:
        """How many jobs are due in each slot, or have ended in it; None if the store has no index
        by time, so that it would have to read all jobs."""

    async def parked(self) -> list[Job]:
        """Of each queue and task with parked jobs, one such job: the one that is due first, or one
        near it. At most PARKED_LIMIT.
        """

    async def queues(self) -> list[QueueInfo]:
        """Every queue that holds jobs or is paused, by name.

        Counts cost O(1), and are exact whenever nothing is under way.
        """

    async def pause(self, queue: str, paused: bool) -> None:
        """Pause or resume a queue. While it is paused its jobs become due but can't be claimed."""

    async def beat(self, worker: WorkerInfo) -> None:
        """Record that a worker is running. `gone_after_ms=0` removes it."""

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        """The workers that were seen recently, by name."""

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        """Take one token from the bucket `key`, shared by all nodes: 0, or the milliseconds to wait
        before asking again (nothing is taken then)."""

    async def durability(self) -> Durability:
        """What an acknowledged add survives, read from the live store."""

    async def findings(self) -> list[Finding]:
        """What else an operator should know about this store: versions, limits, drift."""

    async def sizes(self) -> list[Size]:
        """How large it is, as far as that is known without reading it."""


# The module of each kind of store. By name, because a store's driver may not be installed.
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
        raise BadArguments(f"{what}={shown(text)}: must be a str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadArguments(
            f"{what}={shown(text)} has a lone surrogate, which no store can keep"
        ) from None
    return text


def each_once(names: Sequence[str], found: Collection[str]) -> list[bool]:
    """Whether each name is among those that were found; if it comes twice, only the first time."""
    left = set(found)
    answers = []
    for name in names:
        answers.append(name in left)
        left.discard(name)
    return answers


# No page returns a longer cursor.
CURSOR_LIMIT = 4096


def not_a_cursor(cursor: str) -> BadArguments:
    """For a cursor that no page of this query can have returned."""
    shown = cursor if len(cursor) <= 200 else f"{cursor[:200]}…"
    return BadArguments(
        f"{shown!r} is not a cursor of this query; use the one that the previous page returned"
    )


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(url: str, *, clock: Clock | None = None) -> Store:
    """A store for this URL, not yet open. Its driver is imported only here."""
    try:
        url.encode()
    except UnicodeEncodeError:
        raise BadConfig("the store's URL is not valid UTF-8; write other bytes as %XX") from None
    found = _SCHEME.match(url)
    scheme = found[1].lower() if found else ""
    if scheme not in _KINDS:
        # Only the scheme: the rest of a URL may hold a password.
        raise BadConfig(
            f"no store for {scheme + '://' if scheme else masked(url)!r}: a store URL is "
            "sqlite:///jobs.db (a file in this folder), "
            "sqlite:////var/lib/jobs.db (an absolute path), nats://host:4222, "
            "postgresql://user@host/database, redis://host:6379 or memory://"
        )
    module, name = _KINDS[scheme]
    kind = getattr(importlib.import_module(module), name)
    try:
        store: Store = kind.from_url(url, clock=clock or SystemClock())
    except UsageError:
        raise
    except ValueError:
        # What was raised may quote the password.
        raise BadConfig(f"the store URL {masked(url)!r} can't be read: {QUOTE_LOGIN}") from None
    return store
