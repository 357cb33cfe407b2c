"""What holders do to their jobs in PostgreSQL: extend the leases, and settle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import msgspec

from tickwheel import job as life
from tickwheel.batch import portions
from tickwheel.job import Job, Progress, Run, Settlement, State
from tickwheel.store import settlement_bytes
from tickwheel.stores.postgres import rows as stored
from tickwheel.stores.postgres.changing import change
from tickwheel.stores.postgres.pool import Connection
from tickwheel.stores.postgres.rows import by_id, encode

# Only a RUNNING job has a lease, so there is no condition on the state: with one, the server might
# go through all running jobs to find these.


# Most jobs tell no progress, and to look for it in each row takes time: so there are two of each.


@cache
def _extending(schema: str, told: bool) -> str:
    # `watch_ms` is left alone while it is far enough away: changing it would touch an index. It is
    # never later than the lease's end.
    return f"""
        update {schema}.job set
            lease_until_ms = %(until)s, started_ms = held.started_ms,
            progress = {"held.progress::text" if told else "null"},
            watch_ms = case when watch_ms between %(enough)s and %(until)s then watch_ms
                            else %(until)s end
        from json_to_recordset(%(held)s)
            as held(id text, fence bigint, started_ms bigint{", progress json" if told else ""})
        where job.id = held.id and job.fence = held.fence and lease_until_ms > %(now)s
        returning job.id, job.fence, job.asked, job.changes"""


class _Held(msgspec.Struct, omit_defaults=True):
    id: str
    fence: int
    started_ms: int | None = None
    progress: Progress | None = None


async def extend(
    db: Connection, schema: str, jobs: Sequence[Job], now_ms: int, lease_ms: int
) -> list[Job | None]:
    until_ms = now_ms + lease_ms
    held = [
        _Held(job.id, job.fence, job.started_ms, _storable_progress(job.progress))
        for job in sorted(jobs, key=by_id)
    ]
    cursor = await db.execute(
        _extending(schema, any(job.progress is not None for job in jobs)),
        {
            "held": encode(held).decode(),
            "now": now_ms,
            "until": until_ms,
            "enough": now_ms + lease_ms // 3,
        },
    )
    ours = {(id, fence): asked for id, fence, *asked in await cursor.fetchall()}
    return [
        life.extended(
            life.as_held(job, cancel_requested=asked[0], changes=stored.changes_of(asked[1])),
            job,
            now_ms=now_ms,
            lease_ms=lease_ms,
        )
        if (asked := ours.get((job.id, job.fence))) is not None
        else None
        for job in jobs
    ]


class _Settled(msgspec.Struct, omit_defaults=True):
    """What a settlement makes of a job; `stopped_…` is for a job that was asked to stop."""

    id: str
    fence: int
    state: State
    ended_ms: int | None
    stopped_state: State
    stopped_ended_ms: int | None
    due_ms: int
    failures: int
    error: str | None
    result: str | None
    history: tuple[Run, ...]
    parked: bool = False
    traceback: str | None = None
    progress: Progress | None = None

    @staticmethod
    def storable(settlement: Settlement) -> Settlement:
        error, traceback = _storable(settlement.error), _storable(settlement.traceback)
        if error is settlement.error and traceback is settlement.traceback:
            return settlement
        return msgspec.structs.replace(settlement, error=error, traceback=traceback)

    @classmethod
    def of(cls, settlement: Settlement) -> _Settled:
        job = settlement.job
        settlement = cls.storable(settlement)
        after, stopped = life.settled_either_way(settlement)
        return cls(
            id=job.id,
            fence=job.fence,
            state=after.state,
            ended_ms=after.ended_ms,
            stopped_state=stopped.state,
            stopped_ended_ms=stopped.ended_ms,
            due_ms=after.due_ms,
            failures=after.failures,
            error=after.error,
            result=after.result,
            history=after.history,
            parked=after.parked,
            traceback=after.traceback,
            progress=_storable_progress(after.progress),
        )


def _storable(text: str | None) -> str | None:
    """The one character that PostgreSQL can't store, and an error may contain anything."""
    return text.replace("\0", "\\x00") if text is not None and "\0" in text else text


def _storable_progress(progress: Progress | None) -> Progress | None:
    """The task's own words: they must not keep the leases of other jobs from being extended."""
    if progress is None or "\0" not in progress.words:
        return progress
    return Progress(progress.part, _storable(progress.words) or "")


@cache
def _settling(schema: str, told: bool) -> str:
    return f"""
        update {schema}.job set
            state = (case when asked then new.stopped_state else new.state end)::{schema}.state,
            ended_ms = case when asked then new.stopped_ended_ms else new.ended_ms end,
            priority = priority - case when new.parked and not asked then 4 else 0 end,
            due_ms = new.due_ms, failures = new.failures, lease_until_ms = null, watch_ms = null,
            started_ms = null, asked = false, settled = new.fence, error = new.error,
            traceback = new.traceback, result = new.result, history = new.history::text,
            progress = {"new.progress::text" if told else "null"}
        from json_to_recordset(%(settled)s) as new(
            id text, fence bigint, state text, ended_ms bigint, stopped_state text,
            stopped_ended_ms bigint, due_ms bigint, failures integer, error text, result text,
            history json, parked boolean, traceback text{", progress json" if told else ""})
        where job.id = new.id and job.fence = new.fence and lease_until_ms > %(now)s and not told
        returning job.id, new.fence"""


class _Finished(msgspec.Struct, omit_defaults=True):
    """What a run that is `just_done` makes of a job. The history as text: the server doesn't have
    to read it."""

    id: str
    fence: int
    ended_ms: int
    history: str
    result: str | None = None


@cache
def _finishing(schema: str) -> str:
    return f"""
        update {schema}.job set
            state = 'done', ended_ms = new.ended_ms, lease_until_ms = null, watch_ms = null,
            started_ms = null, asked = false, settled = new.fence, error = null, traceback = null,
            result = new.result, history = new.history, progress = null
        from json_to_recordset(%(finished)s) as new(
            id text, fence bigint, ended_ms bigint, history text, result text)
        where job.id = new.id and job.fence = new.fence and lease_until_ms > %(now)s and not told"""


async def settle(
    db: Connection, schema: str, settlements: Sequence[Settlement], now_ms: int
) -> list[bool]:
    """Usually all are done and held, and a short statement writes them. If it leaves some, the long
    one sees to all of them: what was written counts as settled before."""
    different = len({each.job.id for each in settlements}) == len(settlements)
    if different and all(map(life.just_done, settlements)):
        finished = await _finish(db, schema, settlements, now_ms)
        if finished == len(settlements):
            return [True] * finished
    return await _settle(db, schema, settlements, now_ms)


async def _finish(
    db: Connection, schema: str, settlements: Sequence[Settlement], now_ms: int
) -> int:
    rows = [
        _Finished(
            each.job.id,
            each.job.fence,
            each.ended_ms,
            encode(life.lengthened(each.job.history, each)).decode(),
            each.result,
        )
        for each in sorted(settlements, key=_by_id)
    ]
    values = {"finished": encode(rows).decode(), "now": now_ms}
    return (await db.execute(_finishing(schema), values)).rowcount


def _by_id(settlement: Settlement) -> str:
    return settlement.job.id


async def _settle(
    db: Connection, schema: str, settlements: Sequence[Settlement], now_ms: int
) -> list[bool]:
    first = _first_by_attempt(settlements)
    rows = [_Settled.of(first[key]) for key in sorted(first)]
    statement = _settling(schema, any(row.progress is not None for row in rows))
    cursor = await db.execute(statement, {"settled": encode(rows).decode(), "now": now_ms})
    taken = set(await cursor.fetchall())
    if missing := [id for id, fence in first if (id, fence) not in taken]:
        # This may repeat a settlement whose reply was lost, or the job is to change.
        cursor = await db.execute(
            f"select id, settled, fence, told from {schema}.job where id = any(%s)", (missing,)
        )
        found = await cursor.fetchall()
        taken.update((id, settled) for id, settled, _, _ in found)
        told = [(id, fence) for id, _, fence, told in found if told and (id, fence) in first]
        for some in portions([first[each] for each in told], settlement_bytes):
            taken |= await _settle_told(db, schema, some, now_ms)
    return [(each.job.id, each.job.fence) in taken for each in settlements]


async def _settle_told(
    db: Connection, schema: str, settlements: Sequence[Settlement], now_ms: int
) -> set[tuple[str, int]]:
    """Settle jobs that were replaced or moved while they ran: read, decided and written."""
    storable = {each.job.id: _Settled.storable(each) for each in settlements}

    def decide(job: Job | None, id: str) -> tuple[bool, Job | None]:
        claims = {} if job is None else {id: job}
        [taken], settled = life.settle([storable[id]], claims, now_ms=now_ms)
        return taken, settled.get(id, job)

    answers = await change(db, schema, list(storable), decide)
    return {(id, storable[id].job.fence) for id, taken in answers.items() if taken}


def _first_by_attempt(settlements: Iterable[Settlement]) -> dict[tuple[str, int], Settlement]:
    """The settlements that count, by id and fence: of two for one attempt, the first."""
    first: dict[tuple[str, int], Settlement] = {}
    for settlement in settlements:
        first.setdefault((settlement.job.id, settlement.job.fence), settlement)
    return first
