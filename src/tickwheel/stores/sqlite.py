"""`sqlite://`: the embedded store. One file, several processes, no server.

Every step reads what it needs, lets `tickwheel.job` decide, and writes the outcome, inside one
immediate transaction: durable when it returns (`synchronous=FULL`).

Whole batches cross into SQLite as one JSON text and come back as one. A statement is then a single
call that runs without Python's lock, so that the event loop works on while SQLite does; row by row,
each of the thousands of calls would have to win the lock back from it. See docs/adr/0004.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import apsw
import msgspec

from tickwheel import job as life
from tickwheel.clock import Clock, SystemClock, sleep_blocking
from tickwheel.errors import BadConfig, StoreIncompatible, StoreUnavailable
from tickwheel.job import ENDED, Cancelled, Job, Priority, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.span import span_ms
from tickwheel.store import Durability, Page, Query, QueueInfo, WorkerInfo
from tickwheel.throttle import Rate, admit

T = TypeVar("T")

# How often a waiting node looks at the file's change counter: a read of shared memory, 3 µs.
LOOK_S = 0.005
# A node asks less often who wants its jobs stopped: that is a query.
ASK_S = 0.02
# How long a step may wait for another process's transaction before the store counts as away.
BUSY_S = 15.0
# One transaction moves at most this many jobs, so that no other step waits long for its turn.
BATCH = 1000
# How many jobs one page looks at when it is filtered by something that no index knows.
SCAN = 1000
# Jobs in the file do not cost memory; this much of it is kept at hand, per connection.
CACHE_KIB = 8 * 1024


class SqliteStore:
    """Keeps jobs in one SQLite file."""

    def __init__(
        self, path: str | Path, *, clock: Clock | None = None, ahead_ms: int = 1000, sync: str = "full"
    ) -> None:
        self.ahead_ms = ahead_ms
        self._path = Path(path)
        self._clock = clock or SystemClock()
        self._sync = sync
        self._writer: _Lane | None = None
        self._reader: _Lane | None = None
        self._pulse: _Pulse | None = None

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
            raise BadConfig(f"unknown option {next(iter(known))!r} in {url!r}: there are ahead, sync")
        return cls(unquote(where[1:]), clock=clock, ahead_ms=ahead_ms, sync=sync)

    # --- Life

    async def open(self) -> None:
        if self._writer is not None:
            return
        writer = _Lane("writer")
        try:
            await writer.run(self._connect, writer)
            await writer.run(_migrate, writer.db)
            reader = _Lane("reader")
            await reader.run(self._connect, reader)
        except BaseException:
            writer.close()
            raise
        self._writer, self._reader = writer, reader
        self._pulse = _Pulse(_connection(self._path, self._sync))

    def _connect(self, lane: _Lane) -> None:
        lane.db = _connection(self._path, self._sync)

    async def close(self) -> None:
        writer, reader, pulse = self._writer, self._reader, self._pulse
        self._writer = self._reader = self._pulse = None
        if pulse is not None:
            pulse.close()
        # The writer last: the last connection to close folds the log back into the file.
        for lane in (reader, writer):
            if lane is not None:
                await lane.run(lane.db.close)
                lane.close()

    def twin(self) -> SqliteStore:
        return SqliteStore(
            self._path, clock=self._clock, ahead_ms=self.ahead_ms, sync=self._sync
        )

    async def time(self) -> float:
        return self._clock.now() * 1000

    async def _write(self, step: Callable[..., T], *args: Any) -> T:
        """Run a step in one transaction: all of it is on disk when this returns, or none."""
        if self._writer is None:
            raise StoreUnavailable("the store is closed")
        db = self._writer.db
        return await self._writer.run(_in_transaction, db, step, db, *args)

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
        for start in range(0, len(jobs), BATCH):
            added += await self._write(_add, jobs[start : start + BATCH])
            self._tell()
        return added

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, now_ms: int, lease_ms: int
    ) -> list[Job]:
        queues = list(dict.fromkeys(queues))
        if not queues or limit < 1:
            return []
        where = {"now": now_ms, "ahead": self.ahead_ms, "limit": min(limit, BATCH)}
        return await self._write(_claim, queues, where, worker, lease_ms)

    async def extend(self, jobs: Sequence[Job], *, now_ms: int, lease_ms: int) -> list[Job | None]:
        return await self._write(_extend, jobs, now_ms, lease_ms) if jobs else []

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(settlements), BATCH):
            answers += await self._write(_settle, settlements[start : start + BATCH], now_ms)
        if any(settlement.state is State.WAITING for settlement in settlements):
            self._tell()
        return answers

    async def cancel(self, ids: Sequence[str], *, now_ms: int) -> list[Cancelled]:
        answers = await self._write(_cancel, ids, now_ms)
        self._tell()
        return answers

    async def rerun(self, ids: Sequence[str], *, now_ms: int) -> list[bool]:
        answers = await self._write(_rerun, ids, now_ms)
        self._tell()
        return answers

    async def delete(self, ids: Sequence[str]) -> list[bool]:
        return await self._write(_delete, ids)

    async def prune(self, states: Sequence[State], *, before_ms: int, limit: int) -> int:
        return await self._write(_prune, states, before_ms, limit)

    # --- Waiting

    async def wait(self, queues: Sequence[str], *, now_ms: int, until_ms: int) -> None:
        loop = asyncio.get_running_loop()
        pulse = self._open_pulse()
        zero = loop.time() - now_ms / 1000
        while True:
            seen = pulse.count
            next_ms = await self._read(_next_claimable_ms, queues, self.ahead_ms)
            wake_ms = until_ms if next_ms is None else min(next_ms, until_ms)
            if not await pulse.after(seen, until=zero + wake_ms / 1000):
                return

    async def asked(self, worker: str, *, now_ms: int, until_ms: int) -> list[str]:
        loop = asyncio.get_running_loop()
        pulse = self._open_pulse()
        until = loop.time() + (until_ms - now_ms) / 1000
        while True:
            seen = pulse.count
            ids = await self._read(_asked, worker)
            if ids or not await pulse.after(seen, until=until):
                return ids
            await asyncio.sleep(ASK_S)

    def _open_pulse(self) -> _Pulse:
        if self._pulse is None:
            raise StoreUnavailable("the store is closed")
        return self._pulse

    # --- Schedules

    async def put_schedule(self, schedule: Schedule) -> Schedule:
        fence = await self._write(_put_schedule, schedule)
        self._tell()
        return msgspec.structs.replace(schedule, fence=fence)

    async def delete_schedule(self, name: str) -> bool:
        return await self._write(_delete_schedule, name)

    async def schedules(self) -> list[Schedule]:
        return await self._read(_schedules)

    async def fire(self, schedule: Schedule, jobs: Sequence[Job], *, next_ms: int | None) -> bool:
        fired = await self._write(_fire, schedule, jobs, next_ms)
        self._tell()
        return fired

    # --- Looking and operating

    async def get(self, ids: Sequence[str]) -> list[Job | None]:
        found = await self._read(_read_jobs, ids)
        return [found[id][1] if id in found else None for id in ids]

    async def find(self, query: Query, *, cursor: str | None = None, limit: int = 100) -> Page:
        return await self._read(_find, query, cursor, limit)

    async def queues(self) -> list[QueueInfo]:
        return await self._read(_queues)

    async def pause(self, queue: str, paused: bool) -> None:
        await self._write(_pause, queue, paused)
        self._tell()

    async def beat(self, worker: WorkerInfo) -> None:
        await self._write(_beat, worker)

    async def workers(self, *, now_ms: int) -> list[WorkerInfo]:
        return await self._read(_workers, now_ms)

    async def throttle(self, key: str, rate: Rate, *, now_ms: int) -> int:
        return await self._write(_throttle, key, rate, now_ms)

    async def durability(self) -> Durability:
        if self._writer is None:
            raise StoreUnavailable("the store is closed")
        return await self._writer.run(_durability, self._writer.db, self._path)


# --- Steps: each runs inside one transaction, in the writer's thread

_encode = msgspec.json.encode

# One job as one JSON object; its keys are the fields of Job.
_JOB = (
    "json_object("
    + ", ".join(
        f"'{name}', {column}"
        for name, column in {
            **{field: field for field in Job.__struct_fields__},
            "fence": "attempt",
            "history": "json(history)",
        }.items()
    )
    + ")"
)
# `asked` is 0 or 1 in the file: the decoder is told to take that for a bool.
_numbered_jobs = msgspec.json.Decoder(list[tuple[int, Job]], strict=False)

_INSERT = f"""
    insert or ignore into job (id, task, payload, queue, priority, due_ms, created_ms, retries,
                               timeout_ms)
    select {", ".join(f"value ->> {i}" for i in range(9))} from json_each(?)
"""


def _add(db: apsw.Connection, jobs: Sequence[Job]) -> list[bool]:
    rows = [
        (
            job.id, job.task, job.payload, job.queue, int(job.priority), job.due_ms,
            job.created_ms, job.retries, job.timeout_ms,
        )
        for job in jobs
    ]  # fmt: skip
    last = db.execute("select ifnull(max(n), 0) from job").get
    db.execute(_INSERT, (_encode(rows).decode(),))
    if db.changes() == len(jobs):
        return [True] * len(jobs)
    added = _added_since(db, last, [job.id for job in jobs])
    # Of two jobs with the same id in one batch it was the first.
    return [job.id in added and not added.discard(job.id) for job in jobs]


def _added_since(db: apsw.Connection, last: int, ids: Sequence[str]) -> set[str]:
    text = db.execute(
        """select json_group_array(id) from job
           where n > ? and id in (select value from json_each(?))""",
        (last, _encode(ids).decode()),
    ).get
    return set(msgspec.json.decode(text, type=list[str]))


def _picking(queues: int) -> str:
    """Find the best claimable jobs of that many queues.

    One short range of an index per queue and priority, none longer than the limit: a backlog of
    millions costs no more than the batch that is taken from it.
    """
    ranges = [
        f"""select * from (
                select n, priority, due_ms - :ahead as since from job
                where state = 'waiting' and queue = :q{i} and priority = {int(priority)}
                  and due_ms <= :now + :ahead
                order by due_ms, n limit :limit)"""
        for i in range(queues)
        for priority in Priority
    ] + [
        f"""select * from (
                select n, priority, lease_until_ms as since from job
                where state = 'running' and queue = :q{i} and lease_until_ms <= :now
                order by lease_until_ms, n limit :limit)"""
        for i in range(queues)
    ]
    return f"""
        select json_group_array(json_array(n, {_JOB}) order by rank) from (
            select job.*, row_number() over (order by pick.priority desc, pick.since, pick.n) as rank
            from ({" union all ".join(ranges)}) as pick join job using (n)
            order by pick.priority desc, pick.since, pick.n limit :limit)
    """


_picks: dict[int, str] = {}


def _claim(
    db: apsw.Connection, queues: Sequence[str], where: dict[str, Any], worker: str, lease_ms: int
) -> list[Job]:
    paused = {queue for (queue,) in db.execute("select queue from paused")}
    queues = [queue for queue in queues if queue not in paused]
    if not queues:
        return []
    pick = _picks.setdefault(len(queues), _picking(len(queues)))
    bindings = where | {f"q{i}": queue for i, queue in enumerate(queues)}
    found = _numbered_jobs.decode(db.execute(pick, bindings).get)
    now_ms = where["now"]

    # Almost all were waiting, and one statement moves those. The others are decided one by one.
    fresh = [n for n, job in found if job.state is State.WAITING]
    if fresh:
        db.execute(
            """update job set state = 'running', attempt = attempt + 1, worker = ?,
                              lease_until_ms = ?
               where n in (select value from json_each(?))""",
            (worker, now_ms + lease_ms, _encode(fresh).decode()),
        )
    claimed, lost = [], []
    for n, job in found:
        if job.asked:
            lost.append((n, life.cancelled(job, now_ms=now_ms)))
            continue
        taken = life.claimed(job, worker=worker, now_ms=now_ms, lease_ms=lease_ms)
        claimed.append(taken)
        if job.state is State.RUNNING:
            lost.append((n, taken))
    _write_jobs(db, lost)
    return claimed


class _Standing(msgspec.Struct, array_like=True):
    """What decides whether a holder still holds."""

    id: str
    n: int
    state: State
    attempt: int
    lease_until_ms: int | None
    asked: bool
    settled: int


_standings = msgspec.json.Decoder(list[_Standing], strict=False)


def _stand(db: apsw.Connection, ids: Sequence[str]) -> dict[str, _Standing]:
    text = db.execute(
        """select json_group_array(json_array(id, n, state, attempt, lease_until_ms, asked, settled))
           from job where id in (select value from json_each(?))""",
        (_encode(ids).decode(),),
    ).get
    return {standing.id: standing for standing in _standings.decode(text)}


def _holds(standing: _Standing | None, job: Job, now_ms: int) -> bool:
    return (
        standing is not None
        and standing.state is State.RUNNING
        and standing.attempt == job.attempt
        and standing.lease_until_ms is not None
        and standing.lease_until_ms > now_ms
    )


def _extend(
    db: apsw.Connection, jobs: Sequence[Job], now_ms: int, lease_ms: int
) -> list[Job | None]:
    standings = _stand(db, [job.id for job in jobs])
    until_ms = now_ms + lease_ms
    ours = [standings[job.id].n for job in jobs if _holds(standings.get(job.id), job, now_ms)]
    db.execute(
        "update job set lease_until_ms = ? where n in (select value from json_each(?))",
        (until_ms, _encode(ours).decode()),
    )
    return [
        msgspec.structs.replace(job, lease_until_ms=until_ms, asked=standings[job.id].asked)
        if _holds(standings.get(job.id), job, now_ms)
        else None
        for job in jobs
    ]


def _settle(db: apsw.Connection, settlements: Sequence[Settlement], now_ms: int) -> list[bool]:
    standings = _stand(db, [settlement.job.id for settlement in settlements])
    answers, changes = [], {}
    for settlement in settlements:
        job = settlement.job
        standing = standings.get(job.id)
        if standing is None or not _holds(standing, job, now_ms):
            answers.append(standing is not None and standing.settled == job.attempt)
            continue
        # Only its holder changes a job in hand, but for the wish that it stop: so the holder's
        # copy is the job as it stands.
        if standing.asked:
            job = msgspec.structs.replace(job, asked=True)
        changes.setdefault(standing.n, life.settled(job, settlement))
        answers.append(True)
    _write_jobs(db, list(changes.items()))
    return answers


def _cancel(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[Cancelled]:
    found = _read_jobs(db, ids)
    changes = []
    for n, job in found.values():
        if life.held(job, now_ms=now_ms):
            changes.append((n, msgspec.structs.replace(job, asked=True)))
        elif not job.state.ended:
            changes.append((n, life.cancelled(job, now_ms=now_ms)))
    _write_jobs(db, changes)
    return [_cancelled(found[id][1] if id in found else None, now_ms) for id in ids]


def _cancelled(before: Job | None, now_ms: int) -> Cancelled:
    if before is None:
        return Cancelled.UNKNOWN
    if before.state.ended:
        return Cancelled.TOO_LATE
    return Cancelled.ASKED if life.held(before, now_ms=now_ms) else Cancelled.CANCELLED


def _rerun(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[bool]:
    ended = {id: found for id, found in _read_jobs(db, ids).items() if found[1].state.ended}
    _write_jobs(db, [(n, life.rerun(job, now_ms=now_ms)) for n, job in ended.values()])
    return [id in ended for id in ids]


def _delete(db: apsw.Connection, ids: Sequence[str]) -> list[bool]:
    ended = {id: n for id, (n, job) in _read_jobs(db, ids).items() if job.state.ended}
    _forget(db, list(ended.values()))
    return [id in ended for id in ids]


def _prune(db: apsw.Connection, states: Sequence[State], before_ms: int, limit: int) -> int:
    pruned = 0
    for (queue,) in db.execute("select distinct queue from tally").fetchall():
        for state in states:
            if state.ended and pruned < limit:
                old = db.execute(
                    """select n from job where state = ? and queue = ? and ended_ms < ?
                       order by ended_ms limit ?""",
                    (str(state), queue, before_ms, limit - pruned),
                ).fetchall()
                _forget(db, [n for (n,) in old])
                pruned += len(old)
    return pruned


def _forget(db: apsw.Connection, ns: Sequence[int]) -> None:
    db.execute("delete from job where n in (select value from json_each(?))", (_encode(ns).decode(),))


_CHANGED = (
    "state", "due_ms", "attempt", "failures", "takeovers", "worker", "lease_until_ms", "asked",
    "settled", "ended_ms", "error", "result", "history",
)  # fmt: skip

_UPDATE = f"""
    update job set {", ".join(f"{name} = new.value ->> {i + 1}" for i, name in enumerate(_CHANGED))}
    from json_each(?) as new where job.n = new.value ->> 0
"""


def _write_jobs(db: apsw.Connection, changes: Sequence[tuple[int, Job]]) -> None:
    """Write what a step made of these jobs."""
    if not changes:
        return
    rows = [
        (
            n, job.state, job.due_ms, job.attempt, job.failures, job.takeovers, job.worker,
            job.lease_until_ms, int(job.asked), job.settled, job.ended_ms, job.error, job.result,
            job.history,
        )
        for n, job in changes
    ]  # fmt: skip
    db.execute(_UPDATE, (_encode(rows).decode(),))


def _put_schedule(db: apsw.Connection, schedule: Schedule) -> int:
    fence: int = db.execute(
        """insert into schedule values (?, ?, ?, ?, (select 1 + ifnull(max(fence), 0) from schedule))
           on conflict do update set rule = excluded.rule, next_ms = excluded.next_ms,
                                     paused = excluded.paused, fence = excluded.fence
           returning fence""",
        (schedule.name, schedule.rule, schedule.next_ms, int(schedule.paused)),
    ).get
    return fence


def _delete_schedule(db: apsw.Connection, name: str) -> bool:
    db.execute("delete from schedule where name = ?", (name,))
    return db.changes() > 0


def _fire(
    db: apsw.Connection, schedule: Schedule, jobs: Sequence[Job], next_ms: int | None
) -> bool:
    db.execute(
        """update schedule set next_ms = ?, fence = (select 1 + max(fence) from schedule)
           where name = ? and fence = ?""",
        (next_ms, schedule.name, schedule.fence),
    )
    if not db.changes():
        return False
    _add(db, jobs)
    return True


def _pause(db: apsw.Connection, queue: str, paused: bool) -> None:
    if paused:
        db.execute("insert or ignore into paused values (?)", (queue,))
    else:
        db.execute("delete from paused where queue = ?", (queue,))


def _beat(db: apsw.Connection, worker: WorkerInfo) -> None:
    gone_ms = worker.seen_ms + worker.gone_after_ms
    db.execute("delete from worker where name = ? or gone_ms < ?", (worker.name, worker.seen_ms))
    if worker.gone_after_ms:
        info = _encode(worker).decode()
        db.execute("insert into worker values (?, ?, ?)", (worker.name, info, gone_ms))


def _throttle(db: apsw.Connection, key: str, rate: Rate, now_ms: int) -> int:
    mark = db.execute("select full_at_us from bucket where key = ?", (key,)).get
    mark, wait_ms = admit(mark, rate, now_ms)
    db.execute("insert or replace into bucket values (?, ?)", (key, mark))
    return wait_ms


# --- Looks: each runs in the reader's thread, on its own snapshot


def _read_jobs(db: apsw.Connection, ids: Sequence[str]) -> dict[str, tuple[int, Job]]:
    text = db.execute(
        f"""select json_group_array(json_array(n, {_JOB})) from job
            where id in (select value from json_each(?))""",
        (_encode(ids).decode(),),
    ).get
    return {job.id: (n, job) for n, job in _numbered_jobs.decode(text)}


def _next_claimable_ms(db: apsw.Connection, queues: Sequence[str], ahead_ms: int) -> int | None:
    next_ms: int | None = db.execute(
        f"""with mine(queue) as (select value from json_each(:queues) except select queue from paused)
            select min(since) from (
                select (select lease_until_ms from job where state = 'running'
                        and job.queue = mine.queue order by lease_until_ms limit 1) as since from mine
                union all
                select (select due_ms from job where state = 'waiting' and job.queue = mine.queue
                        and priority = level.value order by due_ms limit 1) - :ahead
                from mine, json_each('{[int(priority) for priority in Priority]}') as level)""",
        {"queues": _encode(queues).decode(), "ahead": ahead_ms},
    ).get
    return next_ms


def _asked(db: apsw.Connection, worker: str) -> list[str]:
    found = db.execute(
        "select id from job where asked = 1 and worker = ? and state = 'running'", (worker,)
    )
    return [id for (id,) in found]


def _schedules(db: apsw.Connection) -> list[Schedule]:
    rows = db.execute("select name, rule, next_ms, paused, fence from schedule order by name")
    return [
        Schedule(name=name, rule=rule, next_ms=next_ms, paused=bool(paused), fence=fence)
        for name, rule, next_ms, paused, fence in rows
    ]


def _queues(db: apsw.Connection) -> list[QueueInfo]:
    found: dict[str, dict[str, Any]] = {}
    for queue, state, jobs in db.execute("select queue, state, jobs from tally where jobs > 0"):
        found.setdefault(queue, {})[state] = jobs
    for (queue,) in db.execute("select queue from paused"):
        found.setdefault(queue, {})["paused"] = True
    return [QueueInfo(name=name, **found[name]) for name in sorted(found)]


def _workers(db: apsw.Connection, now_ms: int) -> list[WorkerInfo]:
    rows = db.execute("select info from worker where gone_ms > ? order by name", (now_ms,))
    return [msgspec.json.decode(info, type=WorkerInfo) for (info,) in rows]


# The order in which `find` goes through each state: along the index that the state has anyway.
# Waiting: what comes next, first; ended: what ended last, first.
_ALONG = {
    State.WAITING: (("queue", "priority", "due_ms", "n"), ">", "asc"),
    State.RUNNING: (("queue", "lease_until_ms", "n"), ">", "asc"),
    **{state: (("queue", "ended_ms", "n"), "<", "desc") for state in ENDED},
}


def _find(db: apsw.Connection, query: Query, cursor: str | None, limit: int) -> Page:
    states = [query.state] if query.state else list(State)
    at, key = _parse_cursor(cursor)
    if at is not None:
        states = states[states.index(at) :] if at in states else []
    picked: list[int] = []
    looked = 0
    for state in states:
        rows = _keys(db, state, query, key, SCAN - looked if query.task else limit - len(picked))
        for n, task, *found in rows:
            key, looked = found, looked + 1
            if query.task in (None, task):
                picked.append(n)
            if len(picked) == limit or looked == SCAN:
                return Page(
                    jobs=_by_n(db, picked), cursor=_encode([state, *key]).decode()
                )
        key = None
    return Page(jobs=_by_n(db, picked))


def _parse_cursor(cursor: str | None) -> tuple[State | None, list[Any] | None]:
    if cursor is None:
        return None, None
    try:
        state, *key = msgspec.json.decode(cursor, type=list[Any])
        return State(state), key
    except (msgspec.DecodeError, ValueError):
        raise BadConfig(f"{cursor!r} is not a cursor that a page gave") from None


def _keys(
    db: apsw.Connection, state: State, query: Query, after: list[Any] | None, limit: int
) -> list[tuple[Any, ...]]:
    columns, beyond, order = _ALONG[state]
    # The state is written out: a partial index is used only where its condition is in the query.
    conditions = [f"state = '{state}'"]
    if state.ended:
        conditions.append("ended_ms is not null")
    if query.queue is not None:
        conditions.append("queue = :queue")
    if after is not None:
        marks = ", ".join(f":k{i}" for i in range(len(columns)))
        conditions.append(f"({', '.join(columns)}) {beyond} ({marks})")
    return db.execute(
        f"""select n, task, {", ".join(columns)} from job where {" and ".join(conditions)}
            order by {", ".join(f"{column} {order}" for column in columns)} limit :limit""",
        {"limit": limit, "queue": query.queue}
        | {f"k{i}": value for i, value in enumerate(after or [])},
    ).fetchall()


def _by_n(db: apsw.Connection, ns: Sequence[int]) -> list[Job]:
    text = db.execute(
        f"""select json_group_array(json_array(n, {_JOB})) from job
            where n in (select value from json_each(?))""",
        (_encode(ns).decode(),),
    ).get
    found = dict(_numbered_jobs.decode(text))
    return [found[n] for n in ns if n in found]


def _durability(db: apsw.Connection, path: Path) -> Durability:
    full = db.pragma("synchronous") >= 2
    kind = _file_system(path)
    fixes = []
    if not full:
        fixes.append("drop sync=normal from the store URL: power loss can undo the last commits")
    if kind in ("tmpfs", "ramfs"):
        fixes.append(f"{path} is on {kind}, in memory: move it to a disk")
    if kind in ("nfs", "nfs4", "cifs", "smb3", "9p"):
        fixes.append(f"{path} is on {kind}: SQLite's locks need a local disk")
    return Durability(
        process_crash=True,
        power_loss=full and kind not in ("tmpfs", "ramfs"),
        machine_loss=False,
        summary=f"SQLite {apsw.sqlite_lib_version()}, WAL, synchronous={'FULL' if full else 'NORMAL'}"
        f", {path}" + (f" on {kind}" if kind else ""),
        fixes=tuple(fixes),
    )


def _file_system(path: Path) -> str:
    """The kind of file system that the path is on; empty where the system doesn't say."""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return ""
    folder = path.resolve().parent
    best = max(
        (line.split() for line in mounts if folder.is_relative_to(line.split()[1])),
        key=lambda fields: len(fields[1]),
        default=["", "", ""],
    )
    return best[2]


# --- Connections and threads


class _Lane:
    """A connection and the one thread that uses it."""

    db: apsw.Connection

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"tickwheel-sqlite-{name}")

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _translated, work, *args
        )

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class _Pulse:
    """Wakes waiters when the file changed: at once for this node, soon for other processes.

    SQLite keeps a counter of commits in shared memory; one task per store looks at it, and only
    while somebody waits.
    """

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._version = self._look()
        self._waiters: set[asyncio.Future[None]] = set()
        self._looking: asyncio.TimerHandle | None = None
        self.count = 0

    def _look(self) -> int:
        version: int = self._db.pragma("data_version")
        return version

    def beat(self) -> None:
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def after(self, seen: int, *, until: float) -> bool:
        """Wait for a beat later than `seen`; False where `until` came first."""
        if self.count != seen:
            return True
        if until <= self._loop.time():
            return False
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.add(waiter)
        self._keep_looking()
        try:
            async with asyncio.timeout_at(until):
                await waiter
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True

    def _keep_looking(self) -> None:
        if self._looking is None:
            self._looking = self._loop.call_later(LOOK_S, self._looked)

    def _looked(self) -> None:
        self._looking = None
        if not self._waiters:
            return
        self._keep_looking()
        with contextlib.suppress(apsw.Error):
            version = self._look()
            if version != self._version:
                self._version = version
                self.beat()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        # Whoever still waits finds the store closed when it looks again.
        self.beat()
        self._db.close()


def _connection(path: Path, sync: str) -> apsw.Connection:
    if not path.resolve().parent.is_dir():
        raise BadConfig(f"the folder {path.resolve().parent} does not exist: create it first")
    # Jobs may carry secrets: the file is its owner's alone.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
    db = apsw.Connection(str(path))
    db.set_busy_handler(_patiently)
    db.pragma("journal_mode", "wal")
    db.pragma("synchronous", sync)
    db.pragma("cache_size", -CACHE_KIB)
    # Larger than SQLite's default, so that a busy store checkpoints less often; bounded all the same.
    db.pragma("wal_autocheckpoint", 4000)
    db.pragma("journal_size_limit", 64 * 1024 * 1024)
    return db


def _patiently(tries: int) -> bool:
    """Wait for another process's transaction in steps of a millisecond: they are that short, and
    SQLite's own steps grow to 100."""
    sleep_blocking(0.001)
    return tries < BUSY_S * 1000


def _migrate(db: apsw.Connection) -> None:
    parts = Path(__file__).with_suffix(".sql").read_text().split("\n-- part ")[1:]
    with _transaction(db):
        version = db.pragma("user_version")
        if version > len(parts):
            raise StoreIncompatible(
                f"the file was written by a newer Tickwheel (schema {version}, this one knows "
                f"{len(parts)}): upgrade Tickwheel, or use another file"
            )
        for part in parts[version:]:
            db.execute(part.partition("\n")[2])
        db.pragma("user_version", len(parts))


def _in_transaction(db: apsw.Connection, step: Callable[..., T], *args: Any) -> T:
    with _transaction(db):
        return step(*args)


@contextlib.contextmanager
def _transaction(db: apsw.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


def _translated(work: Callable[..., T], *args: Any) -> T:
    """Say in our words what went wrong in SQLite's."""
    try:
        return work(*args)
    except (apsw.NotADBError, apsw.CorruptError) as error:
        raise StoreIncompatible(f"the file is not a sound SQLite database: {error}") from error
    except apsw.Error as error:
        raise StoreUnavailable(f"SQLite: {error}") from error
