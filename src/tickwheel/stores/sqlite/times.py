"""Jobs by their time, whatever their queue: a page of them, and how many there are.

Each is one statement: while it runs, other threads can, and rows don't pass through Python.
"""

from __future__ import annotations

from functools import cache

import apsw

from tickwheel.job import State
from tickwheel.store import SlotCounts, Slots
from tickwheel.stores.sqlite.lanes import lanes_of
from tickwheel.stores.sqlite.rows import SIZE


@cache
def page(state: str, *, queue: bool, after: bool) -> str:
    """See `pager.Timed`. Each lane is read only up to a time by which one of them alone has enough
    jobs; ended jobs backwards."""
    lanes = lanes_of(state, queue=queue)
    ms = lanes.ms
    if ms == "ended_ms":
        order, nearest, beyond, within = "desc", "max", "<", ">="
        limits = f"{ms} >= :from and {ms} {'<= :ms' if after else '< :until'}"
    else:
        order, nearest, beyond, within = "asc", "min", ">", "<="
        limits = f"{ms} >= {':ms' if after else ':from'} and {ms} < :until"
    behind = f"and ({ms} {beyond} :ms or job.n {beyond} :n)" if after else ""
    jobs = f"{lanes.jobs} and {limits} {behind}"
    return f"""
        with recursive {lanes.listed},
        enough(ms) as materialized (select ifnull({nearest}((
            select {ms} from {jobs} order by {ms} {order} limit 1 offset :limit - 1)),
            {":from" if order == "desc" else ":until"}) from lane),
        page(n, ms) as materialized (
            select job.n, {ms} from lane cross join {jobs}
              and {ms} {within} (select ms from enough)
            order by {ms} {order}, job.n {order} limit :limit)
        select n, task, {SIZE}, ms, n from page cross join job using (n)
        order by ms {order}, n {order}"""


@cache
def _counting(state: str, *, queue: bool) -> str:
    """One step along the index for each lane and each slot that has jobs, and a count of these.
    What is before the first slot is slot -1."""
    lanes = lanes_of(state, queue=queue)
    ms = lanes.ms
    slot = f"iif({ms} < :start, -1, ({ms} - :start) / :width)"
    columns = [each for each in ("queue", "task", "rank") if f"lane.{each}" in lanes.jobs]
    names = ", ".join(columns)
    lane = ", ".join(f"lane.{each}" for each in columns)

    def first(beyond: str) -> str:
        return f"select min({ms}) from {lanes.jobs} {beyond} and {ms} < :end"

    return f"""
        with recursive {lanes.listed},
        step({names}, slot) as (
            select {lane}, (select {slot} from (select ({first("")}) as {ms})) from lane
            union all
            select {lane}, (select {slot} from (select (
                {first(f"and {ms} >= :start + (lane.slot + 1) * :width")}) as {ms}))
            from step as lane where slot is not null)
        select slot, sum((
            select count(*) from {lanes.jobs}
              and {ms} >= iif(slot < 0, -9007199254740992, :start + slot * :width)
              and {ms} < :start + (slot + 1) * :width))
        from step as lane where slot is not null group by slot"""


def slot_counts(db: apsw.Connection, slots: Slots) -> SlotCounts:
    where = {
        "queue": slots.queue,
        "start": slots.start_ms,
        "end": slots.end_ms,
        "width": slots.width_ms,
    }
    states = ["waiting", "parked"] if slots.state is State.WAITING else [slots.state]
    found: dict[int, int] = {}
    total = 0
    with db:
        for state in states:
            counting = _counting(state, queue=slots.queue is not None)
            for slot, jobs in db.execute(counting, where):
                found[slot] = found.get(slot, 0) + jobs
            total += db.execute(
                """select ifnull(sum(jobs), 0) from tally
                   where state = ? and queue = ifnull(?, queue)""",
                (state, slots.queue),
            ).get
    return SlotCounts(
        before=found.get(-1, 0),
        counts=[found.get(slot, 0) for slot in range(slots.count)],
        after=total - sum(found.values()),
    )
