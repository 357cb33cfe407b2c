"""What the embedded store only reads: each function is one query, on a given connection.

Queries run in the reader's thread, each on its own snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw
import msgspec

from tickwheel.job import Job
from tickwheel.schedule import Schedule
from tickwheel.store import Ask, Page, Query, QueueInfo, WorkerInfo
from tickwheel.stores.pager import MetaPager, Pager, Table
from tickwheel.stores.sqlite import times
from tickwheel.stores.sqlite.lanes import LEVEL, parked_lines
from tickwheel.stores.sqlite.rows import (
    SIZE,
    STATE,
    Selecting,
    encode,
    fitting,
    read_jobs,
    select_jobs,
)

# --- What can be claimed

# The queues that hand out jobs.
MINE = """
    mine(queue) as materialized (
        select value from json_each(:queues) except select queue from paused)"""
# Of the queues and tasks that have parked jobs, those that the worker serves and knows.
KNOWN = f"""{parked_lines("queue in mine")},
    known(queue, task) as (
        select queue, task from line where task in (select value from json_each(:tasks)))"""
# What can be claimed. The states are written out: a partial index is used only if its condition is
# in the query.
WAITING = """state = 'waiting' and queue = mine.queue and priority = level.rank
              and due_ms <= :now + :ahead"""
PARKED = """state = 'parked' and queue = known.queue and task = known.task
              and priority = level.rank and due_ms <= :now + :ahead"""
LOST = "state = 'running' and queue = mine.queue and lease_until_ms <= :now"

# Whether any job is parked: one step, where finding out which takes a temporary table.
ANY_PARKED = ":tasks <> '[]' and exists (select 1 from job where state = 'parked')"
# Whether there is anything to claim, and whether some of it is parked. Checked first, because it
# needs no lock.
_ANY = f"""
    with recursive {MINE}, {LEVEL}, {KNOWN}
    select exists (select 1 from level cross join mine where exists (
               select 1 from job where {WAITING}))
           or exists (select 1 from mine where exists (select 1 from job where {LOST})),
        iif({ANY_PARKED}, exists (select 1 from level cross join known where exists (
               select 1 from job where {PARKED})), 0)
"""


def claimable(db: apsw.Connection, where: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a claim would find anything, and whether it would find parked jobs."""
    [(others, parked)] = db.execute(_ANY, where)
    return bool(others or parked), bool(parked)


def ended(db: apsw.Connection, ids: Sequence[str]) -> list[str]:
    """Those of these jobs that have ended or are unknown."""
    text = db.execute(
        """select json_group_array(value) from json_each(?) left join job on job.id = value
           where n is null or ended_ms is not null""",
        (encode(ids).decode(),),
    ).get
    found: list[str] = msgspec.json.decode(text)
    return found


def claimed_by(db: apsw.Connection, call: int, worker: str) -> list[Job]:
    """The jobs that the claim with this number took. Reads all running jobs, which is fine because
    it is rare: only after a lost reply."""
    return [job for _, job in select_jobs(db, _BY_CLAIM, (call, worker))]


_BY_CLAIM = Selecting.of(
    lambda job: (
        f"""select json_group_array(json_array(n, {job})) from job
                    where state = 'running' and fence = ? and worker = ?"""
    )
)


def next_claimable_ms(
    db: apsw.Connection, queues: Sequence[str], tasks: Sequence[str], ahead_ms: int
) -> int | None:
    next_ms: int | None = db.execute(
        f"""with recursive {MINE}, {LEVEL}, {KNOWN}
            select min(since) from (
                select (select lease_until_ms from job where state = 'running'
                        and job.queue = mine.queue order by lease_until_ms limit 1) as since
                from mine
                union all
                select (select due_ms from job where state = 'waiting' and job.queue = mine.queue
                        and priority = level.rank order by due_ms limit 1) - :ahead
                from level cross join mine
                union all
                select iif({ANY_PARKED}, (
                    select min((select due_ms from job where state = 'parked'
                                and job.queue = known.queue and job.task = known.task
                                and priority = level.rank order by due_ms limit 1))
                    from level cross join known), null) - :ahead)""",
        {
            "queues": encode(queues).decode(),
            "tasks": encode(tasks).decode(),
            "ahead": ahead_ms,
        },
    ).get
    return next_ms


def asked(db: apsw.Connection, worker: str) -> dict[str, Ask]:
    found = db.execute(
        """select id, asked from job where asked = 1 and worker = :worker and state = 'running'
           union all
           select id, asked from job
           where told = 1 and asked = 0 and worker = :worker and state = 'running'""",
        {"worker": worker},
    )
    return {id: Ask.STOP if stop else Ask.PUT_BACK for id, stop in found}


# --- Jobs


_TABLE = Table(
    "job",
    key="n",
    size=SIZE,
    running="lease_until_ms",
    mark=":{}",
    timed=times.page,
    parked=True,
)


def get(db: apsw.Connection, ids: Sequence[str]) -> list[Job | None]:
    ids = fitting(db, ids)
    found = read_jobs(db, ids)
    return [found[id][1] if id in found else None for id in ids]


_TAGGED = f"""
    with tagged as materialized (
        select n from job_meta where name = :name and value = :value and n < :below
        order by n desc limit :limit)
    select n, state, queue, task, ifnull(ended_ms, due_ms), {SIZE}, n
    from tagged cross join job using (n) order by n desc
"""


def find(db: apsw.Connection, query: Query, cursor: str | None, limit: int) -> Page:
    pager: Pager | MetaPager
    if query.meta is None:
        pager = Pager(_TABLE, query, cursor, limit)
    else:
        pager = MetaPager(_TABLE, _TAGGED, query, cursor, limit)
    while (read := pager.next_read()) is not None:
        pager.take(db.execute(*read).fetchall())
    return Page(jobs=_by_n(db, pager.picked), cursor=pager.cursor, looked=pager.looked)


_PARKED = f"""
    with recursive {LEVEL}, {parked_lines("queue is not null")}
    select (select id from level cross join job where job.n = (
                select n from job where state = 'parked' and queue = line.queue
                and task = line.task and priority = level.rank order by due_ms limit 1)
            order by due_ms limit 1)
    from line where task is not null limit ?
"""


def parked(db: apsw.Connection, limit: int) -> list[str]:
    """Of each queue and task that have parked jobs, the id of the one that is due first."""
    return [id for (id,) in db.execute(_PARKED, (limit,))]


_BY_NUMBER = Selecting.of(
    lambda job: (
        f"""select json_group_array(json_array(n, {job})) from job
                    where n in (select value from json_each(?))"""
    )
)


def _by_n(db: apsw.Connection, ns: Sequence[int]) -> list[Job]:
    found = dict(select_jobs(db, _BY_NUMBER, (encode(ns).decode(),)))
    return [found[n] for n in ns if n in found]


# --- Schedules, queues and workers


def records(db: apsw.Connection, kind: str, after: str, limit: int) -> list[tuple[str, str]]:
    rows: list[Any] = db.execute(
        """select name, body from tickwheel_record where kind = ? and name > ?
           order by name limit ?""",
        (kind, after, limit),
    ).fetchall()
    return rows


def get_records(db: apsw.Connection, kind: str, names: Sequence[str]) -> list[str | None]:
    rows: list[Any] = db.execute(
        """select name, body from tickwheel_record
           where kind = ? and name in (select value from json_each(?))""",
        (kind, encode(names).decode()),
    ).fetchall()
    found = dict(rows)
    return [found.get(name) for name in names]


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
    for queue, state, jobs in db.execute(
        f"select queue, {STATE}, sum(jobs) from tally where jobs > 0 group by 1, 2"
    ):
        found.setdefault(queue, {})[state] = jobs
    for (queue,) in db.execute("select queue from paused"):
        found.setdefault(queue, {})["paused"] = True
    return [QueueInfo(name=name, **found[name]) for name in sorted(found)]


def workers(db: apsw.Connection, now_ms: int) -> list[WorkerInfo]:
    rows = db.execute("select info from worker where gone_ms > ? order by name", (now_ms,))
    return [worker for (info,) in rows if (worker := _worker(info)) is not None]


def _worker(info: str) -> WorkerInfo | None:
    """None for what another program wrote there."""
    try:
        return msgspec.json.decode(info, type=WorkerInfo)
    except msgspec.MsgspecError:
        return None
