"""The embedded store's statements: each function is one step or one look, on a given connection.

A step reads what it needs, lets `tickwheel.job` decide, and writes the outcome; its caller wraps it
in one transaction. A batch goes into a statement as one JSON text and comes out as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import apsw
import msgspec

from tickwheel import job as life
from tickwheel.batch import BATCH_BYTES
from tickwheel.errors import BadConfig
from tickwheel.job import ENDED, Cancelled, Job, Priority, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import Page, Query, QueueInfo, WorkerInfo
from tickwheel.throttle import Rate, admit

# How many jobs one page looks at when it is filtered by something that no index knows.
SCAN = 1000

# --- Steps: each runs inside one transaction, in the writer's thread

_encode = msgspec.json.encode

# One job as one JSON object; its keys are the fields of Job.
_JOB = (
    "json_object("
    + ", ".join(
        f"'{name}', {column}"
        for name, column in {
            **{field: field for field in Job.__struct_fields__},
            "history": "json(history)",
        }.items()
    )
    + ")"
)
# What a job weighs; SQLite knows it without reading it.
_SIZE = (
    "octet_length(payload) + octet_length(history) + ifnull(octet_length(error), 0)"
    " + ifnull(octet_length(result), 0)"
)
# Of jobs in their order, those that one batch takes: `total` is what they weigh up to each.
_FITS = "(total <= :bytes or total = size)"
# `asked` is 0 or 1 in the file: the decoder is told to take that for a bool.
_numbered_jobs = msgspec.json.Decoder(list[tuple[int, Job]], strict=False)

_NEW = "id, task, payload, queue, priority, due_ms, created_ms, retries, timeout_ms"
_INSERT = f"""
    insert or ignore into job ({_NEW})
    select {", ".join(f"value ->> {i}" for i in range(9))} from json_each(?)
"""
# For jobs that come from another store and were tried there.
_INSERT_TRIED = f"""
    insert or ignore into job ({_NEW}, attempt, failures, takeovers, worker, error, history)
    select {", ".join(f"value ->> {i}" for i in range(15))} from json_each(?)
"""


def adding(jobs: Sequence[Job]) -> tuple[str, str]:
    """The statement that adds new jobs, for any connection to the file, and its parameter."""
    return _INSERT.replace("?", "%(jobs)s") + " returning id", _encode(_rows(jobs)).decode()


def _rows(jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
    return [
        (
            job.id, job.task, job.payload, job.queue, int(job.priority), job.due_ms,
            job.created_ms, job.retries, job.timeout_ms,
        )
        for job in jobs
    ]  # fmt: skip


def add(db: apsw.Connection, jobs: Sequence[Job]) -> list[bool]:
    rows = _rows(jobs)
    last = db.execute("select ifnull(max(n), 0) from job").get
    if any(job.attempt for job in jobs):
        tried = [
            (
                *row, job.attempt, job.failures, job.takeovers, job.worker, job.error,
                _encode(job.history).decode(),
            )
            for row, job in zip(rows, jobs, strict=True)
        ]  # fmt: skip
        db.execute(_INSERT_TRIED, (_encode(tried).decode(),))
    else:
        db.execute(_INSERT, (_encode(rows).decode(),))
    if db.changes() == len(jobs):
        return [True] * len(jobs)
    added = _added_since(db, last, [job.id for job in jobs])
    # Of two jobs with the same id in one batch it was the first.
    answers = []
    for job in jobs:
        answers.append(job.id in added)
        added.discard(job.id)
    return answers


def _added_since(db: apsw.Connection, last: int, ids: Sequence[str]) -> set[str]:
    text = db.execute(
        """select json_group_array(id) from job
           where n > ? and id in (select value from json_each(?))""",
        (last, _encode(ids).decode()),
    ).get
    return set(msgspec.json.decode(text, type=list[str]))


# The queues that hand out jobs, and every priority.
_MINE = f"""
    mine(queue) as materialized (
        select value from json_each(:queues) except select queue from paused),
    level(rank) as (values {", ".join(f"({int(priority)})" for priority in Priority)})
"""
# What can be claimed. The states are written out: a partial index is used only where its condition
# is in the query.
_WAITING = """state = 'waiting' and queue = mine.queue and priority = level.rank
              and due_ms <= :now + :ahead"""
_LOST = "state = 'running' and queue = mine.queue and lease_until_ms <= :now"

# Whether there is anything to claim: asked first, because it needs no lock.
_ANY = f"""
    with {_MINE}
    select exists (select 1 from mine cross join level where exists (
               select 1 from job where {_WAITING}))
        or exists (select 1 from mine where exists (select 1 from job where {_LOST}))
"""
# The best of them. One short range of an index per queue and priority, none longer than the limit:
# a backlog of millions costs no more than the batch that is taken from it. Lost jobs are few, no
# more than dead workers held, so those of a queue are sorted.
#
# SQLite plans a statement again each time that a bare parameter for a limit is bound, which costs
# more than to run it; an expression it takes as it comes.
_PICK = f"""
    with {_MINE},
    found(n, rank, since, size) as (
        select n, priority, due_ms - :ahead, {_SIZE} from mine cross join level cross join job
        where job.n in (select n from job where {_WAITING} order by due_ms, n limit :limit + 0)
        union all
        select n, priority, lease_until_ms, {_SIZE} from mine cross join job
        where job.n in (select n from job where {_LOST}
                        order by priority desc, lease_until_ms, n limit :limit + 0)),
    best as (select * from found order by rank desc, since, n limit :limit + 0),
    summed as (
        select n, size, sum(size) over (order by rank desc, since, n rows unbounded preceding)
               as total
        from best)
    select json_group_array(json_array(n, {_JOB}) order by total)
    from summed cross join job using (n) where {_FITS}
"""


def claimable(db: apsw.Connection, where: dict[str, Any]) -> bool:
    """Whether a claim would find anything."""
    return bool(db.execute(_ANY, where).get)


def claim(db: apsw.Connection, where: dict[str, Any], worker: str, lease_ms: int) -> list[Job]:
    found = _numbered_jobs.decode(db.execute(_PICK, where | {"bytes": BATCH_BYTES}).get)
    now_ms, fence = where["now"], life.new_fence()

    # Almost all were waiting, and one statement moves those. The others are decided one by one.
    fresh = [n for n, job in found if job.state is State.WAITING]
    if fresh:
        db.execute(
            """update job set state = 'running', attempt = attempt + 1, fence = ?, worker = ?,
                              lease_until_ms = ?
               where n in (select value from json_each(?))""",
            (fence, worker, now_ms + lease_ms, _encode(fresh).decode()),
        )
    claimed, lost = [], []
    for n, job in found:
        if job.asked:
            lost.append((n, life.cancelled(job, now_ms=now_ms)))
            continue
        taken = life.claimed(job, worker=worker, fence=fence, now_ms=now_ms, lease_ms=lease_ms)
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
    fence: int
    lease_until_ms: int | None
    asked: bool
    settled: int | None


_standings = msgspec.json.Decoder(list[_Standing], strict=False)


def _stand(db: apsw.Connection, ids: Sequence[str]) -> dict[str, _Standing]:
    text = db.execute(
        """select json_group_array(
               json_array(id, n, state, fence, lease_until_ms, asked, settled))
           from job where id in (select value from json_each(?))""",
        (_encode(ids).decode(),),
    ).get
    return {standing.id: standing for standing in _standings.decode(text)}


def _holds(standing: _Standing | None, job: Job, now_ms: int) -> bool:
    return (
        standing is not None
        and standing.state is State.RUNNING
        and standing.fence == job.fence
        and standing.lease_until_ms is not None
        and standing.lease_until_ms > now_ms
    )


def extend(
    db: apsw.Connection, jobs: Sequence[Job], now_ms: int, lease_ms: int
) -> list[Job | None]:
    standings = _stand(db, [job.id for job in jobs])
    until_ms = now_ms + lease_ms
    ours = [
        (standings[job.id].n, job.started_ms)
        for job in jobs
        if _holds(standings.get(job.id), job, now_ms)
    ]
    db.execute(
        """update job set lease_until_ms = ?, started_ms = held.value ->> 1
           from json_each(?) as held where job.n = held.value ->> 0""",
        (until_ms, _encode(ours).decode()),
    )
    return [
        msgspec.structs.replace(job, lease_until_ms=until_ms, asked=standings[job.id].asked)
        if _holds(standings.get(job.id), job, now_ms)
        else None
        for job in jobs
    ]


def settle(db: apsw.Connection, settlements: Sequence[Settlement], now_ms: int) -> list[bool]:
    standings = _stand(db, [settlement.job.id for settlement in settlements])
    answers: list[bool] = []
    changes: dict[int, Job] = {}
    for settlement in settlements:
        job = settlement.job
        standing = standings.get(job.id)
        if standing is None or not _holds(standing, job, now_ms):
            answers.append(standing is not None and standing.settled == job.fence)
            continue
        # Only its holder changes a job in hand, but for the wish that it stop: so the holder's
        # copy is the job as it stands.
        if standing.asked:
            job = msgspec.structs.replace(job, asked=True)
        changes.setdefault(standing.n, life.settled(job, settlement))
        answers.append(True)
    _write_jobs(db, list(changes.items()))
    return answers


def cancel(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[Cancelled]:
    """Like `rerun`, `delete` and `get`, answers for the first of these ids, as many as fit."""
    ids = _fitting(db, ids)
    found = read_jobs(db, ids)
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


def rerun(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[bool]:
    ids = _fitting(db, ids)
    ended = {id: found for id, found in read_jobs(db, ids).items() if found[1].state.ended}
    _write_jobs(db, [(n, life.rerun(job, now_ms=now_ms)) for n, job in ended.values()])
    return [id in ended for id in ids]


def delete(db: apsw.Connection, ids: Sequence[str]) -> list[bool]:
    ids = _fitting(db, ids)
    ended = {id: n for id, (n, job) in read_jobs(db, ids).items() if job.state.ended}
    _forget(db, list(ended.values()))
    return [id in ended for id in ids]


def prune(db: apsw.Connection, states: Sequence[State], before_ms: int, limit: int) -> int:
    pruned = 0
    for (queue,) in db.execute("select distinct queue from tally").fetchall():
        for state in states:
            if state.ended and pruned < limit:
                old = db.execute(
                    """select n from job where state = ? and queue = ? and ended_ms < ?
                       order by ended_ms limit ?""",
                    (str(state), queue, before_ms, limit - pruned),
                ).fetchall()
                _forget(db, [row[0] for row in old])
                pruned += len(old)
    return pruned


def _forget(db: apsw.Connection, ns: Sequence[Any]) -> None:
    db.execute(
        "delete from job where n in (select value from json_each(?))", (_encode(ns).decode(),)
    )


_CHANGED = (
    "state", "due_ms", "attempt", "fence", "failures", "takeovers", "worker", "lease_until_ms",
    "started_ms", "asked", "settled", "ended_ms", "error", "result", "history",
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
            n, job.state, job.due_ms, job.attempt, job.fence, job.failures, job.takeovers,
            job.worker, job.lease_until_ms, job.started_ms, int(job.asked), job.settled,
            job.ended_ms, job.error, job.result, job.history,
        )
        for n, job in changes
    ]  # fmt: skip
    db.execute(_UPDATE, (_encode(rows).decode(),))


# Never one that an earlier schedule of the same name had, so not simply one more than the last.
_NEW_FENCE = "abs(random() / 2)"


def put_schedule(db: apsw.Connection, schedule: Schedule) -> int:
    fence: int = db.execute(
        f"""insert into schedule values (?, ?, ?, ?, ?, {_NEW_FENCE})
           on conflict do update set rule = excluded.rule, next_ms = excluded.next_ms,
                                     paused = excluded.paused, last_id = excluded.last_id,
                                     fence = excluded.fence
           returning fence""",
        (
            schedule.name,
            schedule.rule,
            schedule.next_ms,
            int(schedule.paused),
            schedule.last_id,
        ),
    ).get
    return fence


def delete_schedule(db: apsw.Connection, name: str) -> bool:
    db.execute("delete from schedule where name = ?", (name,))
    return db.changes() > 0


# A schedule as it was read, the jobs of its tick, its next tick.
Firing: TypeAlias = tuple[Schedule, Sequence[Job], int | None]


def fire(db: apsw.Connection, firings: Sequence[Firing]) -> list[bool]:
    """Each is decided on its own; all are written together."""
    fired = [_move_on(db, *firing) for firing in firings]
    jobs = [job for moved, firing in zip(fired, firings, strict=True) if moved for job in firing[1]]
    if jobs:
        add(db, jobs)
    return fired


def _move_on(
    db: apsw.Connection, schedule: Schedule, jobs: Sequence[Job], next_ms: int | None
) -> bool:
    db.execute(
        f"""update schedule set next_ms = ?, last_id = ifnull(?, last_id), fence = {_NEW_FENCE}
           where name = ? and fence = ?""",
        (next_ms, jobs[-1].id if jobs else None, schedule.name, schedule.fence),
    )
    return db.changes() > 0


def pause(db: apsw.Connection, queue: str, paused: bool) -> None:
    if paused:
        db.execute("insert or ignore into paused values (?)", (queue,))
    else:
        db.execute("delete from paused where queue = ?", (queue,))


def beat(db: apsw.Connection, worker: WorkerInfo) -> None:
    gone_ms = worker.seen_ms + worker.gone_after_ms
    db.execute("delete from worker where name = ? or gone_ms < ?", (worker.name, worker.seen_ms))
    if worker.gone_after_ms:
        info = _encode(worker).decode()
        db.execute("insert into worker values (?, ?, ?)", (worker.name, info, gone_ms))


def throttle(db: apsw.Connection, key: str, rate: Rate, now_ms: int) -> int:
    mark = db.execute("select full_at_ns from bucket where key = ?", (key,)).get
    mark, wait_ms = admit(mark, rate, now_ms)
    db.execute("insert or replace into bucket values (?, ?)", (key, mark))
    return wait_ms


# --- Looks: each runs in the reader's thread, on its own snapshot


def get(db: apsw.Connection, ids: Sequence[str]) -> list[Job | None]:
    ids = _fitting(db, ids)
    found = read_jobs(db, ids)
    return [found[id][1] if id in found else None for id in ids]


def _fitting(db: apsw.Connection, ids: Sequence[str]) -> Sequence[str]:
    """The first of these ids, as many as one batch takes."""
    if len(ids) == 1:
        return ids
    count = db.execute(
        f"""select count(*) from (
                select size, sum(size) over (order by key rows unbounded preceding) as total from (
                    select ids.key, ifnull({_SIZE}, 0) as size
                    from json_each(:ids) as ids left join job on job.id = ids.value))
            where {_FITS}""",
        {"ids": _encode(ids).decode(), "bytes": BATCH_BYTES},
    ).get
    return ids[:count]


def read_jobs(db: apsw.Connection, ids: Sequence[str]) -> dict[str, tuple[int, Job]]:
    text = db.execute(
        f"""select json_group_array(json_array(n, {_JOB})) from job
            where id in (select value from json_each(?))""",
        (_encode(ids).decode(),),
    ).get
    return {job.id: (n, job) for n, job in _numbered_jobs.decode(text)}


def next_claimable_ms(db: apsw.Connection, queues: Sequence[str], ahead_ms: int) -> int | None:
    next_ms: int | None = db.execute(
        f"""with {_MINE}
            select min(since) from (
                select (select lease_until_ms from job where state = 'running'
                        and job.queue = mine.queue order by lease_until_ms limit 1) as since
                from mine
                union all
                select (select due_ms from job where state = 'waiting' and job.queue = mine.queue
                        and priority = level.rank order by due_ms limit 1) - :ahead
                from mine cross join level)""",
        {"queues": _encode(queues).decode(), "ahead": ahead_ms},
    ).get
    return next_ms


def asked(db: apsw.Connection, worker: str) -> list[str]:
    found = db.execute(
        "select id from job where asked = 1 and worker = ? and state = 'running'", (worker,)
    )
    return [id for (id,) in found]


def schedules(db: apsw.Connection) -> list[Schedule]:
    rows = db.execute(
        "select name, rule, next_ms, paused, last_id, fence from schedule order by name"
    )
    return [
        Schedule(
            name=name,
            rule=rule,
            next_ms=next_ms,
            paused=bool(paused),
            last_id=last_id,
            fence=fence,
        )
        for name, rule, next_ms, paused, last_id, fence in rows
    ]


def queues(db: apsw.Connection) -> list[QueueInfo]:
    found: dict[str, dict[str, Any]] = {}
    for queue, state, jobs in db.execute("select queue, state, jobs from tally where jobs > 0"):
        found.setdefault(queue, {})[state] = jobs
    for (queue,) in db.execute("select queue from paused"):
        found.setdefault(queue, {})["paused"] = True
    return [QueueInfo(name=name, **found[name]) for name in sorted(found)]


def workers(db: apsw.Connection, now_ms: int) -> list[WorkerInfo]:
    rows = db.execute("select info from worker where gone_ms > ? order by name", (now_ms,))
    return [msgspec.json.decode(info, type=WorkerInfo) for (info,) in rows]


# The order in which `find` goes through each state: along the index that the state has anyway.
# Waiting: what comes next, first; ended: what ended last, first.
_ALONG = {
    State.WAITING: (("queue", "priority", "due_ms", "n"), ">", "asc"),
    State.RUNNING: (("queue", "lease_until_ms", "n"), ">", "asc"),
    **{state: (("queue", "ended_ms", "n"), "<", "desc") for state in ENDED},
}


def find(db: apsw.Connection, query: Query, cursor: str | None, limit: int) -> Page:
    states = [query.state] if query.state else list(State)
    at, key = _parse_cursor(cursor)
    if at is not None:
        states = states[states.index(at) :] if at in states else []
    picked: list[int] = []
    looked = weight = 0
    last = cursor
    for state in states:
        rows = _keys(db, state, query, key, SCAN - looked if query.task else limit - len(picked))
        for n, task, size, *found in rows:
            if query.task in (None, task):
                weight += size
                if picked and weight > BATCH_BYTES:
                    return Page(jobs=_by_n(db, picked), cursor=last)
                picked.append(n)
            key, looked = found, looked + 1
            last = _encode([state, *key]).decode()
            if len(picked) == limit or looked == SCAN:
                return Page(jobs=_by_n(db, picked), cursor=last)
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
        f"""select n, task, {_SIZE}, {", ".join(columns)} from job where {" and ".join(conditions)}
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
