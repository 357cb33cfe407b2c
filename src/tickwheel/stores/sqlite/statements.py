"""The embedded store's statements: each function is one step, on a given connection.

A step reads what it needs, lets `tickwheel.job` decide, and writes the outcome; its caller wraps it
in one transaction, in the writer's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import apsw
import msgspec

from tickwheel import changes, job as life
from tickwheel.batch import BATCH_BYTES
from tickwheel.changes import Put
from tickwheel.job import CancelOutcome, Changes, Job, Move, Settlement, State
from tickwheel.limit import Rate, admit
from tickwheel.schedule import Schedule
from tickwheel.store import WorkerInfo
from tickwheel.stores.sqlite.browse import KNOWN, LOST, MINE, PARKED, WAITING
from tickwheel.stores.sqlite.lanes import LEVEL
from tickwheel.stores.sqlite.rows import (
    FITS,
    SIZE,
    STATE,
    UNPARKED,
    Selecting,
    encode,
    finish_jobs,
    fitting,
    read_jobs,
    replace_jobs,
    select_jobs,
    write_jobs,
)

# --- Adding


def _insert(columns: str) -> str:
    values = (f"value ->> {i}" for i, _ in enumerate(columns.split(",")))
    return f"insert or ignore into job ({columns}) select {', '.join(values)} from json_each(?)"


# Each value that is looked up in each row takes time, so there are three statements: for plain
# jobs, for those with options, and for those that have more, as a job that ran in another store.
_PLAIN = "id, task, payload, queue, priority, due_ms, created_ms"
_CHOSEN = f"{_PLAIN}, retries, timeout_ms"
_WHOLE = (
    f"{_CHOSEN}, expires_ms, meta, attempt, failures, takeovers, worker, progress, error, "
    "traceback, history, changes"
)
_INSERT_PLAIN, _INSERT_CHOSEN, _INSERT_WHOLE = map(_insert, (_PLAIN, _CHOSEN, _WHOLE))


def adding(jobs: Sequence[Job]) -> tuple[str, str]:
    """The statement that adds new jobs, for any connection to the file, and its parameter."""
    insert, text = _inserting(jobs)
    return insert.replace("?", "%(jobs)s") + " returning id", text


def _inserting(jobs: Sequence[Job]) -> tuple[str, str]:
    """Only the last statement needs columns that are new: a user's connection can add other jobs
    before a worker has upgraded the file."""
    insert = _INSERT_PLAIN
    for job in jobs:
        if job.attempt or job.meta is not None or job.expires_ms is not None or job.changes:
            insert = _INSERT_WHOLE
            break
        if job.retries is not None or job.timeout_ms is not None:
            insert = _INSERT_CHOSEN
    rows: list[tuple[Any, ...]] = [
        (job.id, job.task, job.payload, job.queue, job.priority, job.due_ms, job.created_ms)
        for job in jobs
    ]
    if insert is not _INSERT_PLAIN:
        rows = [(*row, job.retries, job.timeout_ms) for row, job in zip(rows, jobs, strict=True)]
    if insert is _INSERT_WHOLE:
        rows = [
            (
                *row, job.expires_ms, job.meta, job.attempt, job.failures, job.takeovers,
                job.worker, job.progress, job.error, job.traceback, job.history,
                job.changes,
            )
            for row, job in zip(rows, jobs, strict=True)
        ]  # fmt: skip
    return insert, encode(rows).decode()


def add(db: apsw.Connection, jobs: Sequence[Job]) -> list[bool]:
    insert, text = _inserting(jobs)
    last = db.execute("select ifnull(max(n), 0) from job").get
    db.execute(insert, (text,))
    if db.changes() == len(jobs):
        return [True] * len(jobs)
    return life.which_added(jobs, _added_since(db, last, [job.id for job in jobs]))


def _added_since(db: apsw.Connection, last: int, ids: Sequence[str]) -> list[str]:
    text = db.execute(
        """select json_group_array(id) from job
           where n > ? and id in (select value from json_each(?))""",
        (last, encode(ids).decode()),
    ).get
    return msgspec.json.decode(text, type=list[str])


def change(db: apsw.Connection, asks: Sequence[Put | Move], now_ms: int) -> list[Any]:
    """Put or move: like `cancel`, it answers for the first ones, as many as a batch holds."""
    ids = [each.job.id if isinstance(each, Put) else each.id for each in asks]
    asks = asks[: len(fitting(db, ids))]
    asked = changes.by_id(asks)
    found = read_jobs(db, list(asked))
    answers: dict[str, list[Any]] = {}
    new, changed = [], []
    for id, each in asked.items():
        n, before = found.get(id, (0, None))
        answers[id], after = each.of(before, now_ms=now_ms)
        if after is not None and before is None:
            new.append(after)
        elif after is not None and after is not before:
            changed.append((n, after))
    if new:
        add(db, new)
    replace_jobs(db, changed)
    return changes.in_order(asks, answers)


# --- Claiming

# The best jobs that can be claimed. One short range of an index per queue and priority (of parked
# jobs, also per task), none longer than the limit, so a backlog of millions costs no more than the
# batch that is taken from it. Lost jobs are few, no more than dead workers held, so those of a
# queue are sorted.
#
# `:limit + 0`, because SQLite plans a statement again each time a bare parameter is bound as a
# limit, which costs more than running it.
_FOUND = f"""
        select n, priority, due_ms - :ahead, {SIZE} from level cross join mine cross join job
        where job.n in (select n from job where {WAITING} order by due_ms, n limit :limit + 0)
        union all
        select n, priority, lease_until_ms, {SIZE} from mine cross join job
        where job.n in (select n from job where {LOST}
                        order by priority desc, lease_until_ms, n limit :limit + 0)"""
_FOUND_PARKED = f"""
        select n, priority, due_ms - :ahead, {SIZE} from level cross join known cross join job
        where job.n in (select n from job where {PARKED} order by due_ms, n limit :limit + 0)"""


def _pick(tables: str, found: str, job: str) -> str:
    return f"""
    with recursive {tables},
    found(n, rank, since, size) as ({found}),
    best as (select * from found order by rank desc, since, n limit :limit + 0),
    summed as (
        select n, size, sum(size) over (order by rank desc, since, n rows unbounded preceding)
               as total
        from best)
    select json_group_array(json_array(n, {job}) order by total)
    from summed cross join job using (n) where {FITS}"""


# Two statements, so that a claim that finds no parked jobs costs what it would cost without them.
_PICK = Selecting.of(partial(_pick, f"{MINE}, {LEVEL}", _FOUND), UNPARKED)
_PICK_PARKED = Selecting.of(
    partial(_pick, f"{MINE}, {LEVEL}, {KNOWN}", f"{_FOUND} union all {_FOUND_PARKED}")
)


def claim(
    db: apsw.Connection, where: dict[str, Any], worker: str, parked: bool, lease_ms: int
) -> list[Job]:
    """Claim the best jobs; parked ones only if `parked`."""
    pick = _PICK_PARKED if parked else _PICK
    found = select_jobs(db, pick, where | {"bytes": BATCH_BYTES})
    now_ms, fence = where["now"], where["call"]

    # Almost all were waiting, and one short statement moves those. Lost jobs are written whole.
    fresh = [n for n, job in found if job.state is State.WAITING]
    if fresh:
        db.execute(
            """update job set state = 'running', attempt = attempt + 1, fence = ?, worker = ?,
                              lease_until_ms = ?, progress = null
               where n in (select value from json_each(?))""",
            (fence, worker, now_ms + lease_ms, encode(fresh).decode()),
        )
    claimed = [
        life.claimed(job, worker=worker, fence=fence, now_ms=now_ms, lease_ms=lease_ms)
        for _, job in found
    ]
    lost = [
        (n, after)
        for (n, job), after in zip(found, claimed, strict=True)
        if job.state is State.RUNNING
    ]
    write_jobs(db, [each for each in lost if each[1].changes is None])
    replace_jobs(db, [each for each in lost if each[1].changes is not None])
    return [job for job in claimed if job.state is State.RUNNING]


# --- Holding


class _ClaimRow(msgspec.Struct, array_like=True):
    """What `job.Claim` needs of a job, with its id and the number of its row."""

    id: str
    n: int
    state: State
    fence: int
    lease_until_ms: int | None
    cancel_requested: bool
    settled: int | None
    changes: Changes | None = None


_claims = msgspec.json.Decoder(list[_ClaimRow], strict=False)


def _claims_on(db: apsw.Connection, ids: Sequence[str]) -> dict[str, _ClaimRow]:
    text = db.execute(
        f"""select json_group_array(
               json_array(id, n, {STATE}, fence, lease_until_ms, asked, settled, json(changes)))
           from job where id in (select value from json_each(?))""",
        (encode(ids).decode(),),
    ).get
    return {claim.id: claim for claim in _claims.decode(text)}


def extend(
    db: apsw.Connection, jobs: Sequence[Job], now_ms: int, lease_ms: int
) -> list[Job | None]:
    claims = _claims_on(db, [job.id for job in jobs])

    def extended(job: Job) -> Job | None:
        claim = claims.get(job.id)
        if claim is None or not life.holds(job, claim, now_ms=now_ms):
            return None
        return life.extended(
            life.as_held(job, cancel_requested=claim.cancel_requested, changes=claim.changes),
            job,
            now_ms=now_ms,
            lease_ms=lease_ms,
        )

    answers = [extended(job) for job in jobs]
    ours = [job for job in answers if job is not None]
    told = any(job.progress is not None for job in ours)
    rows = [
        (claims[job.id].n, job.lease_until_ms, job.started_ms, *([job.progress] if told else []))
        for job in ours
    ]
    db.execute(
        f"""update job set lease_until_ms = held.value ->> 1, started_ms = held.value ->> 2,
                           progress = {"held.value ->> 3" if told else "null"}
            from json_each(?) as held where job.n = held.value ->> 0""",
        (encode(rows).decode(),),
    )
    return answers


def settle(db: apsw.Connection, settlements: Sequence[Settlement], now_ms: int) -> list[bool]:
    first: dict[str, Settlement] = {}
    for each in settlements:
        first.setdefault(each.job.id, each)
    # Almost all are done and held, and one short statement writes those.
    done = [each for each in first.values() if life.just_done(each)]
    if done and finish_jobs(db, done, now_ms) == len(settlements):
        return [True] * len(settlements)
    # Those that it has written count as settled before.
    claims = _claims_on(db, list(first))
    answers, settled = life.settle(settlements, claims, now_ms=now_ms)
    rows = [(claims[id].n, job) for id, job in settled.items()]
    write_jobs(db, [each for each in rows if each[1].changes is None])
    replace_jobs(db, [each for each in rows if each[1].changes is not None])
    return answers


# --- Operators' steps


def cancel(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[CancelOutcome]:
    """Like `rerun`, `delete` and `get`, answers for the first ids, as many as a batch holds."""
    ids = fitting(db, ids)
    outcomes: dict[str, CancelOutcome] = {}
    changed = []
    for id, (n, job) in read_jobs(db, ids).items():
        outcomes[id], after = life.cancel(job, now_ms=now_ms)
        if after is not job:
            changed.append((n, after))
    write_jobs(db, [each for each in changed if each[1].changes is None])
    replace_jobs(db, [each for each in changed if each[1].changes is not None])
    return [outcomes.get(id, CancelOutcome.UNKNOWN) for id in ids]


def rerun(db: apsw.Connection, ids: Sequence[str], now_ms: int) -> list[bool]:
    ids = fitting(db, ids)
    ended = {id: found for id, found in read_jobs(db, ids).items() if found[1].state.ended}
    write_jobs(db, [(n, life.rerun(job, now_ms=now_ms)) for n, job in ended.values()])
    # Only a rerun changes it, so other steps don't write it.
    expired = [n for n, job in ended.values() if job.expires_ms is not None]
    db.execute(
        "update job set expires_ms = null where n in (select value from json_each(?))",
        (encode(expired).decode(),),
    )
    return [id in ended for id in ids]


def delete(db: apsw.Connection, ids: Sequence[str]) -> list[bool]:
    ids = fitting(db, ids)
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
        "delete from job where n in (select value from json_each(?))", (encode(ns).decode(),)
    )


# --- Schedules

# Random, so that no earlier schedule of the same name had it.
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


def replace_schedule(db: apsw.Connection, schedule: Schedule) -> bool:
    db.execute(
        f"""update schedule set rule = ?, next_ms = ?, paused = ?, last_id = ?, fence = {_NEW_FENCE}
           where name = ? and fence = ?""",
        (
            schedule.rule,
            schedule.next_ms,
            int(schedule.paused),
            schedule.last_id,
            schedule.name,
            schedule.fence,
        ),
    )
    return db.changes() > 0


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


# --- Records


def put_records(db: apsw.Connection, kind: str, records: Sequence[tuple[str, str]]) -> None:
    db.execute(
        """insert or replace into tickwheel_record
           select ?, value ->> 0, value ->> 1 from json_each(?)""",
        (kind, encode(records).decode()),
    )


def delete_records(db: apsw.Connection, kind: str, names: Sequence[str]) -> list[str]:
    """Returns the names of those that there were."""
    rows: list[Any] = db.execute(
        """delete from tickwheel_record
           where kind = ? and name in (select value from json_each(?)) returning name""",
        (kind, encode(names).decode()),
    ).fetchall()
    return [name for (name,) in rows]


# --- Queues, workers and buckets


def pause(db: apsw.Connection, queue: str, paused: bool) -> None:
    if paused:
        db.execute("insert or ignore into paused values (?)", (queue,))
    else:
        db.execute("delete from paused where queue = ?", (queue,))


def beat(db: apsw.Connection, worker: WorkerInfo) -> None:
    gone_ms = worker.seen_ms + worker.gone_after_ms
    db.execute("delete from worker where name = ? or gone_ms < ?", (worker.name, worker.seen_ms))
    if worker.gone_after_ms:
        info = encode(worker).decode()
        db.execute("insert into worker values (?, ?, ?)", (worker.name, info, gone_ms))


def throttle(db: apsw.Connection, key: str, rate: Rate, now_ms: int) -> int:
    mark = db.execute("select full_at_ns from bucket where key = ?", (key,)).get
    mark, wait_ms = admit(mark, rate, now_ms)
    db.execute("insert or replace into bucket values (?, ?)", (key, mark))
    return wait_ms
