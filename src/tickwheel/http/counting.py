"""How many jobs match, how many are due when, and what dead jobs died of."""

from __future__ import annotations

import msgspec

from tickwheel.duration import due_ms
from tickwheel.errors import BadTime
from tickwheel.http.access import ANY_NAME
from tickwheel.http.adding import read_time
from tickwheel.http.filters import COUNTED_MOST, LOOK_S, listed, visible
from tickwheel.http.forms import CountJobs, DueRange, GroupDead
from tickwheel.http.problems import Kind
from tickwheel.http.table import Incoming, Reply, Table
from tickwheel.job import State
from tickwheel.operate import counting
from tickwheel.operate.bulk import BATCH, Filter, everything
from tickwheel.operate.documents import Time, iso_ms, job_document
from tickwheel.operate.fingerprint import Cause, Groups
from tickwheel.operate.keys import Scope
from tickwheel.store import Query, Slots

table = Table()

# How many dead jobs are looked at for their groups, and how long the answer is kept.
GROUPED_MOST = 10_000
GROUPED_S = 5.0
# How long counts of due jobs are kept.
DUE_S = 1.0


class JobCount(msgspec.Struct, frozen=True, kw_only=True):
    """How many jobs match, or if it is not exact, at least; and how many were looked at."""

    count: int
    exact: bool
    looked: int


class DueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many waiting jobs are due in each slot, before the first and after the last; if it is not
    exact, at least, of those that were looked at."""

    from_: Time = msgspec.field(name="from")
    until: Time
    width_ms: int
    counts: list[int]
    overdue: int
    later: int
    exact: bool
    looked: int


class DeadSample(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a group that died last."""

    id: str
    error: str | None
    traceback: str | None


class DeadGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Dead jobs of one task with the same error, but for numbers, ids and quoted texts."""

    fingerprint: str
    task: str
    error: str
    count: int
    first: Time
    last: Time
    queues: list[str]
    sample: DeadSample


class DeadGroups(msgspec.Struct, frozen=True, kw_only=True):
    """What dead jobs died of, most frequent first; how many were looked at, and how many there
    are."""

    groups: list[DeadGroup]
    looked: int
    total: int


@table.operation(
    "GET",
    "/v1/jobs/count",
    scope=Scope.READ,
    summary="Count the jobs that match",
    query=CountJobs,
    answers={200: JobCount},
    problems=(Kind.INVALID,),
)
async def count_jobs(incoming: Incoming) -> Reply:
    """Exact by state, queue and time (but for running jobs, and NATS). For all else it looks at
    20,000 jobs at most: `exact: false` means at least so many."""
    client = await incoming.service.client()
    found = await counting.count_jobs(
        client,
        listed(incoming, incoming.query, client.clock.now_ms()),
        look_most=COUNTED_MOST,
        look_s=LOOK_S,
        visible=visible(incoming),
    )
    looked = found.looked if incoming.caller.sees_all(Scope.READ) else found.count
    return Reply(JobCount(count=found.count, exact=found.exact, looked=looked))


@table.operation(
    "GET",
    "/v1/due",
    scope=Scope.READ,
    summary="Count due jobs by time",
    query=DueRange,
    answers={200: DueCounts},
    problems=(Kind.INVALID,),
)
async def count_due(incoming: Incoming) -> Reply:
    """Waiting jobs, by when they are due. Not exact on NATS, and for keys with limits, but for one
    of their queues. An answer may be a second old."""
    query, caller = incoming.query, incoming.caller
    start_ms, end_ms = (
        due_ms(read_time(name, text))
        for name, text in (("from", query.from_), ("until", query.until))
    )
    if start_ms >= end_ms:
        raise BadTime("until must be after from")
    slots = Slots(
        state=State.WAITING,
        queue=query.queue,
        start_ms=start_ms,
        # The last slot may end a little later.
        width_ms=-(-(end_ms - start_ms) // query.slots),
        count=query.slots,
    )
    whole = caller.may(Scope.READ, queue=query.queue or ANY_NAME, task=ANY_NAME)
    client = await incoming.service.client()
    found = await incoming.service.recent.get(
        ("due", slots, whole or caller.id),
        DUE_S,
        lambda: counting.count_slots(
            client,
            slots,
            look_most=COUNTED_MOST,
            look_s=LOOK_S,
            visible=everything if whole else visible(incoming),
        ),
    )
    return Reply(
        DueCounts(
            from_=iso_ms(start_ms),
            until=iso_ms(slots.end_ms),
            width_ms=slots.width_ms,
            counts=found.counts.counts,
            overdue=found.counts.before,
            later=found.counts.after,
            exact=found.exact,
            # It would tell of jobs that are not for the caller.
            looked=found.looked if whole else sum(found.counts.counts),
        )
    )


@table.operation(
    "GET",
    "/v1/dead/groups",
    scope=Scope.READ,
    summary="Cause dead jobs by their error",
    query=GroupDead,
    answers={200: DeadGroups},
    problems=(Kind.INVALID,),
)
async def group_dead(incoming: Incoming) -> Reply:
    """Of the last 10,000 that died. The fingerprint of a group finds its jobs in `/v1/dead`, and
    takes them in `/v1/dead/rerun` and `/v1/dead/delete`. An answer may be five seconds old."""
    query, caller = incoming.query, incoming.caller
    sees_all = caller.sees_all(incoming.scope)
    found = await incoming.service.recent.get(
        ("groups", query.queue, query.task, sees_all or caller.id),
        GROUPED_S,
        lambda: _grouped(incoming),
    )
    return Reply(found)


async def _grouped(incoming: Incoming) -> DeadGroups:
    client = await incoming.service.client()
    query, sees = incoming.query, visible(incoming)
    wanted = Query(state=State.DEAD, queue=query.queue, task=query.task, from_ms=0)
    groups = Groups()
    looked = seen = 0
    cursor: str | None = None
    while looked < GROUPED_MOST:
        page = await client.find(wanted, cursor=cursor, limit=BATCH)
        looked += max(page.looked, len(page.jobs))
        jobs = [job for job in page.jobs if sees(job)]
        seen += len(jobs)
        groups.add(jobs)
        cursor = page.cursor
        if cursor is None:
            break
    total = seen
    if cursor is not None and query.task is None and sees is everything:
        counted = await counting.count_jobs(
            client, Filter(states=[State.DEAD], queue=query.queue), look_most=0
        )
        total = max(seen, counted.count)
    found = [_group(each) for each in groups.largest_first()]
    return DeadGroups(groups=found, looked=looked if sees is everything else seen, total=total)


def _group(group: Cause) -> DeadGroup:
    sample = job_document(group.sample)
    return DeadGroup(
        fingerprint=group.fingerprint,
        task=group.task,
        error=group.error,
        count=group.count,
        first=iso_ms(group.first_ms),
        last=iso_ms(group.last_ms),
        queues=sorted(group.queues),
        sample=DeadSample(id=sample.id, error=sample.error, traceback=sample.traceback),
    )
