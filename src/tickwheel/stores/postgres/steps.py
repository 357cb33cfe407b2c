"""The PostgreSQL store's statements: each function is one step or one look, on a given connection.

A step is one statement, which is one transaction and one round trip. Only where `tickwheel.job` has
to decide from what the store knows alone (a lease that ran out) is the job read and locked first.

A batch goes into a statement as one JSON text. Rows are named in the order of their ids wherever a
step changes those that it is given, so that two batches never wait for one another in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec
from psycopg import AsyncConnection

from tickwheel import job as life
from tickwheel.batch import BATCH_BYTES, portions
from tickwheel.job import Cancelled, Job, Priority, Run, Settlement, State
from tickwheel.schedule import Schedule
from tickwheel.store import job_bytes

Link = AsyncConnection[tuple[Any, ...]]

_encode = msgspec.json.encode
_histories = msgspec.json.Decoder(tuple[Run, ...])
_states = {state.value: state for state in State}
LEVELS = [int(priority) for priority in Priority]

# --- A job as a row, both ways

_FIELDS = Job.__struct_fields__
ROW = ", ".join(f"job.{name}" for name in _FIELDS)
# About how many bytes a row is. The server knows it without reading what it keeps apart.
ROW_BYTES = "octet_length(payload) + octet_length(history) + coalesce(octet_length(result), 0)"


def job_of(row: Sequence[Any]) -> Job:
    fields = dict(zip(_FIELDS, row, strict=True))
    fields["state"] = _states[fields["state"]]
    history = fields["history"]
    fields["history"] = () if history == "[]" else _histories.decode(history)
    return Job(**fields)


async def jobs_of(db: Link, schema: str, ids: Sequence[str]) -> list[Job]:
    """Those of these jobs that there are, in no order."""
    cursor = await db.execute(f"select {ROW} from {schema}.job where id = any(%s)", (list(ids),))
    return [job_of(row) for row in await cursor.fetchall()]


# Jobs are encoded as they are: without the fields that have their defaults.
_RECORD = """json_to_recordset(%(jobs)s) as new(
    id text, task text, payload text, queue text, priority smallint, due_ms bigint,
    created_ms bigint, retries integer, timeout_ms bigint, state text, attempt integer,
    fence bigint, failures integer, takeovers integer, worker text, lease_until_ms bigint,
    started_ms bigint, asked boolean, settled bigint, ended_ms bigint, error text, result text,
    history json)"""


def _new(name: str) -> str:
    """A field of an encoded job, as a value for its column."""
    value = "new.history::text" if name == "history" else f"new.{name}"
    default = {field.name: field.default for field in msgspec.structs.fields(Job)}[name]
    if default is None or default is msgspec.NODEFAULT:
        return value
    text = "'[]'" if default == () else f"'{default}'" if isinstance(default, str) else int(default)
    return f"coalesce({value}, {text})" if name != "asked" else f"coalesce({value}, false)"


def encoded(jobs: Sequence[Job]) -> str:
    return _encode(sorted(jobs, key=_id)).decode()


def _id(job: Job) -> str:
    return job.id


# --- Adding

# What `job.added` keeps of a job; the columns that are left out have the values that it gives.
_BROUGHT = (
    "id", "task", "payload", "queue", "priority", "due_ms", "created_ms", "retries", "timeout_ms",
    "attempt", "failures", "takeovers", "worker", "error", "history",
)  # fmt: skip


@cache
def _adding(schema: str) -> str:
    return f"""
        insert into {schema}.job ({", ".join(_BROUGHT)})
        select {", ".join(map(_new, _BROUGHT))} from {_RECORD}
        on conflict do nothing returning id"""


def adding(jobs: Sequence[Job], schema: str = "tickwheel") -> tuple[str, dict[str, Any]]:
    """The statement that adds these jobs, and its parameters, for any connection of psycopg.

    It gives back the ids that were added, in no order. Inside a transaction of the caller's the
    jobs exist, and workers hear of them, once that is committed.
    """
    return _adding(schema), {"jobs": encoded(jobs)}


def added(jobs: Sequence[Job], ids: set[str]) -> list[bool]:
    """Which of the jobs were added. Of two with the same id in one batch it was the first."""
    answers = []
    for job in jobs:
        answers.append(job.id in ids)
        ids.discard(job.id)
    return answers


async def add(db: Link, schema: str, jobs: Sequence[Job]) -> list[bool]:
    cursor = await db.execute(*adding(jobs, schema))
    if cursor.rowcount == len(jobs):
        return [True] * len(jobs)
    return added(jobs, {id for (id,) in await cursor.fetchall()})


# --- Claiming


def _waiting(schema: str, queue: str, level: int) -> str:
    """What may be handed out of one queue at one priority, best first: one range of the index."""
    return f"""
        select ctid, due_ms, n, {ROW_BYTES} as bytes from {schema}.job
        where state = 'waiting' and queue = {queue} and priority = {level}
          and due_ms <= %(due)s and (select free and not lost from gate)
        order by due_ms, n limit %(limit)s for update skip locked"""


@cache
def _picking(schema: str, several: bool) -> str:
    """The best jobs that can be claimed, locked; what others have locked is passed over. Of these,
    as many as one reply may hold.

    The branches are run one after the other, and only until there are enough: so of one queue no
    row is locked that is not taken, unless jobs are large. Of several, each level's best are locked
    and the best taken.
    They are then found by their place alone, with no other condition: one would lure the server
    into going along an index instead.
    """
    if not several:
        levels = [
            f"select * from ({_waiting(schema, '%(queue)s', level)}) as level{level}"
            for level in reversed(LEVELS)
        ]
    else:
        levels = [
            f"""(select ctid, due_ms, n, bytes from (
                    select best.* from unnest(%(queues)s::text[]) as mine(queue),
                    lateral ({_waiting(schema, "mine.queue", level)}) as best
                    where not exists (
                        select from {schema}.paused where paused.queue = mine.queue)
                 ) as level order by due_ms, n limit %(limit)s)"""
            for level in reversed(LEVELS)
        ]
    return _fitting(
        f"select ctid, bytes from ({' union all '.join(levels)}) as level limit %(limit)s"
    )


def _fitting(rows: str) -> str:
    """The places of the first of these rows (ctid, bytes), as many as one reply may hold; at least
    one."""
    return f"""
        select ctid from (
            select ctid, sum(bytes) over (rows unbounded preceding) - bytes as before, bytes
            from ({rows}) as ranked) as summed
        where before = 0 or before + bytes <= {BATCH_BYTES}"""


@cache
def _claiming(schema: str, several: bool) -> str:
    free = (
        "true" if several else f"not exists (select from {schema}.paused where queue = %(queue)s)"
    )
    return f"""
        with gate as materialized (
            select {free} as free, exists (
                select from {schema}.job
                where state = 'running' and queue = any(%(queues)s) and watch_ms <= %(now)s
                  and lease_until_ms <= %(now)s
                  and not exists (select from {schema}.paused where paused.queue = job.queue)
            ) as lost),
        picked as materialized ({_picking(schema, several)}),
        taken as (
            update {schema}.job set state = 'running', attempt = attempt + 1, fence = %(fence)s,
                worker = %(worker)s, lease_until_ms = %(until)s, watch_ms = %(until)s
            where ctid = any(array(select ctid from picked))
            returning job.n, {ROW})
        select gate.lost, taken.* from gate left join taken on true"""


async def claim(
    db: Link, schema: str, queues: list[str], where: dict[str, Any], lease_ms: int
) -> list[Job]:
    """`where` has worker, now, due (the latest) and limit."""
    until, fence = where["now"] + lease_ms, life.new_fence()
    where = where | {"queues": queues, "queue": queues[0], "fence": fence, "until": until}
    cursor = await db.execute(_claiming(schema, len(queues) > 1), where)
    rows = await cursor.fetchall()
    if rows[0][0]:
        async with db.transaction():
            return await _claim_with_lost(db, schema, where, lease_ms)
    taken = [(row[1], job_of(row[2:])) for row in rows if row[1] is not None]
    # The update gives its rows in no order.
    taken.sort(key=lambda each: (-each[1].priority, each[1].due_ms, each[0]))
    return [job for _, job in taken]


@cache
def _finding_lost(schema: str) -> str:
    lost = f"""
        select ctid, {ROW_BYTES} as bytes from {schema}.job
        where state = 'running' and queue = any(%(queues)s) and watch_ms <= %(now)s
          and lease_until_ms <= %(now)s
          and not exists (select from {schema}.paused where paused.queue = job.queue)
        order by job.priority desc, job.lease_until_ms, job.n
        limit %(limit)s for update skip locked"""
    return f"""
        with picked as materialized ({_fitting(lost)})
        select job.priority, job.lease_until_ms, job.n, {ROW} from {schema}.job
        where ctid = any(array(select ctid from picked))"""


@cache
def _finding_waiting(schema: str) -> str:
    return f"""
        with gate as materialized (select true as free, false as lost),
        picked as materialized ({_picking(schema, several=True)})
        select job.priority, job.due_ms, job.n, {ROW} from {schema}.job
        where ctid = any(array(select ctid from picked))"""


async def _claim_with_lost(
    db: Link, schema: str, where: dict[str, Any], lease_ms: int
) -> list[Job]:
    """Some leases have run out: rare, so each job is read, decided upon and written."""
    lost = await (await db.execute(_finding_lost(schema), where)).fetchall()
    waiting = await (await db.execute(_finding_waiting(schema), where)).fetchall()
    ahead_ms = where["due"] - where["now"]
    ranked = [(-row[0], row[1], row[2], row[3:]) for row in lost]
    ranked += [(-row[0], row[1] - ahead_ms, row[2], row[3:]) for row in waiting]
    best = [job_of(row) for *_, row in sorted(ranked, key=lambda each: each[:3])]
    claimed, changes = [], []
    for job in next(portions(best, job_bytes, most=where["limit"]), []):
        if job.asked:
            changes.append(life.cancelled(job, now_ms=where["now"]))
            continue
        taken = life.claimed(
            job,
            worker=where["worker"],
            fence=where["fence"],
            now_ms=where["now"],
            lease_ms=lease_ms,
        )
        claimed.append(taken)
        changes.append(taken)
    await _write_jobs(db, schema, changes)
    return claimed


_CHANGED = (
    "state", "due_ms", "attempt", "fence", "failures", "takeovers", "worker", "lease_until_ms",
    "started_ms", "asked", "settled", "ended_ms", "error", "result", "history",
)  # fmt: skip


@cache
def _writing(schema: str) -> str:
    values = {name: _new(name) for name in _CHANGED}
    values |= {"state": f"{values['state']}::{schema}.state", "watch_ms": "new.lease_until_ms"}
    return f"""
        update {schema}.job set {", ".join(f"{name} = {value}" for name, value in values.items())}
        from {_RECORD} where job.id = new.id"""


async def _write_jobs(db: Link, schema: str, jobs: Sequence[Job]) -> None:
    """Write what a step made of these jobs, which it has locked."""
    if jobs:
        await db.execute(_writing(schema), {"jobs": encoded(jobs)})


# --- Holding

# Only a job that is RUNNING has a lease. Its state is not asked for as well: the server would go
# through all that run, in search of those that are named here.


@cache
def _extending(schema: str) -> str:
    # A moment that is still far off is left alone, because an index has it; it is never later than
    # the lease's end.
    return f"""
        update {schema}.job set
            lease_until_ms = %(until)s, started_ms = held.started_ms,
            watch_ms = case when watch_ms between %(enough)s and %(until)s then watch_ms
                            else %(until)s end
        from json_to_recordset(%(held)s)
            as held(id text, fence bigint, started_ms bigint)
        where job.id = held.id and job.fence = held.fence and lease_until_ms > %(now)s
        returning job.id, job.fence, job.asked"""


class _Held(msgspec.Struct):
    id: str
    fence: int
    started_ms: int | None


async def extend(
    db: Link, schema: str, jobs: Sequence[Job], now_ms: int, lease_ms: int
) -> list[Job | None]:
    until_ms = now_ms + lease_ms
    held = [_Held(job.id, job.fence, job.started_ms) for job in sorted(jobs, key=_id)]
    cursor = await db.execute(
        _extending(schema),
        {
            "held": _encode(held).decode(),
            "now": now_ms,
            "until": until_ms,
            "enough": now_ms + lease_ms // 3,
        },
    )
    ours = {(id, fence): asked for id, fence, asked in await cursor.fetchall()}
    return [
        msgspec.structs.replace(job, lease_until_ms=until_ms, asked=ours[job.id, job.fence])
        if (job.id, job.fence) in ours
        else None
        for job in jobs
    ]


class _Settled(msgspec.Struct):
    """What a settlement makes of a job; and what it makes of it where it was asked to stop."""

    id: str
    fence: int
    state: State
    ended_ms: int | None
    asked_state: State
    asked_ended_ms: int | None
    due_ms: int
    failures: int
    error: str | None
    result: str | None
    history: tuple[Run, ...]

    @classmethod
    def of(cls, settlement: Settlement) -> _Settled:
        # Only its holder changes a job in hand, but for the wish that it stop: so the holder's
        # copy is the job as it stands.
        job = settlement.job
        # PostgreSQL keeps any text but this one character, and errors quote anything.
        if settlement.error is not None and "\0" in settlement.error:
            error = settlement.error.replace("\0", "\\x00")
            settlement = msgspec.structs.replace(settlement, error=error)
        asked = after = life.settled(_asked(job, False), settlement)
        if after.state is State.WAITING:
            asked = life.settled(_asked(job, True), settlement)
        return cls(
            id=job.id,
            fence=job.fence,
            state=after.state,
            ended_ms=after.ended_ms,
            asked_state=asked.state,
            asked_ended_ms=asked.ended_ms,
            due_ms=after.due_ms,
            failures=after.failures,
            error=after.error,
            result=after.result,
            history=after.history,
        )


def _asked(job: Job, asked: bool) -> Job:
    return job if job.asked is asked else msgspec.structs.replace(job, asked=asked)


@cache
def _settling(schema: str) -> str:
    return f"""
        update {schema}.job set
            state = (case when asked then new.asked_state else new.state end)::{schema}.state,
            ended_ms = case when asked then new.asked_ended_ms else new.ended_ms end,
            due_ms = new.due_ms, failures = new.failures, lease_until_ms = null, watch_ms = null,
            started_ms = null, asked = false, settled = new.fence, error = new.error,
            result = new.result, history = new.history::text
        from json_to_recordset(%(settled)s) as new(
            id text, fence bigint, state text, ended_ms bigint, asked_state text,
            asked_ended_ms bigint, due_ms bigint, failures integer, error text, result text,
            history json)
        where job.id = new.id and job.fence = new.fence and lease_until_ms > %(now)s
        returning job.id, new.fence"""


async def settle(
    db: Link, schema: str, settlements: Sequence[Settlement], now_ms: int
) -> list[bool]:
    # Of two settlements of one attempt in a batch the first counts.
    first: dict[tuple[str, int], Settlement] = {}
    for settlement in settlements:
        first.setdefault((settlement.job.id, settlement.job.fence), settlement)
    rows = [_Settled.of(first[key]) for key in sorted(first)]
    cursor = await db.execute(_settling(schema), {"settled": _encode(rows).decode(), "now": now_ms})
    taken = set(await cursor.fetchall())
    if missing := [id for id, fence in first if (id, fence) not in taken]:
        # The last settlement of a job may have been this one, and the reply to it lost.
        cursor = await db.execute(
            f"select id, settled from {schema}.job where id = any(%s)", (missing,)
        )
        taken.update(await cursor.fetchall())
    return [(each.job.id, each.job.fence) in taken for each in settlements]


# --- Operators' steps


@cache
def _cancelling(schema: str) -> str:
    return f"""
        with lost as materialized (
            select exists (
                select from {schema}.job
                where id = any(%(ids)s) and lease_until_ms <= %(now)s) as any)
        update {schema}.job set
            state = case state when 'waiting' then 'cancelled' else state end,
            ended_ms = case state when 'waiting' then %(now)s::bigint end,
            asked = state = 'running'
        where id = any(%(ids)s) and not (select lost.any from lost)
          and (state = 'waiting' or lease_until_ms > %(now)s)
        returning id, state"""


async def cancel(db: Link, schema: str, ids: Sequence[str], now_ms: int) -> list[Cancelled]:
    named = sorted(set(ids))
    cursor = await db.execute(_cancelling(schema), {"ids": named, "now": now_ms})
    answers = {
        id: Cancelled.ASKED if state == State.RUNNING else Cancelled.CANCELLED
        for id, state in await cursor.fetchall()
    }
    if rest := [id for id in named if id not in answers]:
        async with db.transaction():
            answers |= await _cancel_each(db, schema, rest, now_ms)
    return [answers[id] for id in ids]


async def _cancel_each(
    db: Link, schema: str, ids: Sequence[str], now_ms: int
) -> dict[str, Cancelled]:
    """The jobs that have ended, are unknown, or have lost their holder."""
    cursor = await db.execute(
        f"""select id, ended_ms is not null, {ROW_BYTES} from {schema}.job
            where id = any(%s) order by id for update""",
        (ids,),
    )
    rows = await cursor.fetchall()
    answers = dict.fromkeys(ids, Cancelled.UNKNOWN) | {
        id: Cancelled.TOO_LATE for id, ended, _ in rows if ended
    }
    live = [(id, size) for id, ended, size in rows if not ended]
    for some in portions(live, itemgetter(1)):
        changes = []
        for job in await jobs_of(db, schema, [id for id, _ in some]):
            if life.held(job, now_ms=now_ms):
                answers[job.id] = Cancelled.ASKED
                changes.append(msgspec.structs.replace(job, asked=True))
            else:
                answers[job.id] = Cancelled.CANCELLED
                changes.append(life.cancelled(job, now_ms=now_ms))
        await _write_jobs(db, schema, changes)
    return answers


async def rerun(db: Link, schema: str, ids: Sequence[str], now_ms: int) -> list[bool]:
    cursor = await db.execute(
        f"""update {schema}.job set state = 'waiting', due_ms = %s, failures = 0, takeovers = 0,
                ended_ms = null, error = null, result = null
            where id = any(%s) and ended_ms is not null returning id""",
        (now_ms, sorted(set(ids))),
    )
    ended = {id for (id,) in await cursor.fetchall()}
    return [id in ended for id in ids]


async def delete(db: Link, schema: str, ids: Sequence[str]) -> list[bool]:
    cursor = await db.execute(
        f"delete from {schema}.job where id = any(%s) and ended_ms is not null returning id",
        (sorted(set(ids)),),
    )
    ended = {id for (id,) in await cursor.fetchall()}
    return [id in ended for id in ids]


async def prune(db: Link, schema: str, states: Sequence[State], before_ms: int, limit: int) -> int:
    cursor = await db.execute(
        f"""delete from {schema}.job where ctid = any(array(
                select old.ctid
                from (select distinct queue from {schema}.tally) as known,
                     unnest(%s::{schema}.state[]) as wanted(state),
                     lateral (select ctid from {schema}.job
                              where state = wanted.state and queue = known.queue
                                and ended_ms < %s
                              order by ended_ms limit %s for update skip locked) as old
                limit %s))""",
        ([state.value for state in states], before_ms, limit, limit),
    )
    return cursor.rowcount


# --- Firing


@cache
def _firing(schema: str) -> str:
    return f"""
        with moved as (
            update {schema}.schedule set next_ms = %(next)s,
                last_id = coalesce(%(last)s, last_id), fence = %(fence)s
            where name = %(name)s and fence = %(old)s returning name),
        fired as (
            insert into {schema}.job ({", ".join(_BROUGHT)})
            select {", ".join(map(_new, _BROUGHT))} from {_RECORD}
            where exists (select from moved)
            on conflict do nothing)
        select count(*) from moved"""


async def fire(
    db: Link, schema: str, schedule: Schedule, jobs: Sequence[Job], next_ms: int | None
) -> bool:
    cursor = await db.execute(
        _firing(schema),
        {
            "name": schedule.name,
            "old": schedule.fence,
            "next": next_ms,
            "last": jobs[-1].id if jobs else None,
            "fence": life.new_fence(),
            "jobs": encoded(jobs),
        },
    )
    return await cursor.fetchone() == (1,)
