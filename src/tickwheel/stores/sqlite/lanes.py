"""The lanes of jobs, each one range of an index: a queue and a priority, or a queue and a state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tickwheel.job import Priority


def parked_lines(queues: str) -> str:
    """The queues that have parked jobs, and for some `queues` the tasks that have them: one step
    along the index for each."""
    return f"""
    place(queue) as (
        select min(queue) from job where state = 'parked'
        union all
        select (select min(queue) from job where state = 'parked' and queue > place.queue)
        from place where queue is not null),
    line(queue, task) as (
        select queue, (
            select min(task) from job where state = 'parked' and queue = place.queue)
        from place where {queues}
        union all
        select queue, (
            select min(task) from job where state = 'parked' and queue = line.queue
            and task > line.task)
        from line where task is not null)"""


# Every priority.
LEVEL = f"""
    level(rank) as (values {", ".join(f"({int(priority)})" for priority in Priority)})"""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one state."""

    # What a statement begins with to have them as `lane`.
    listed: str
    # The jobs of a lane.
    jobs: str
    # The column of time by which they are sorted.
    ms: str


@cache
def lanes_of(state: str, *, queue: bool) -> Lanes:
    """The lanes of all queues, or of :queue. The state is written out: a partial index is used only
    if its condition is in the query."""
    mine = "queue = :queue" if queue else "queue is not null"
    queues = f"select queue from tally where state = '{state}' and jobs > 0 and {mine}"
    if state == "waiting":
        return Lanes(
            f"{LEVEL}, lane as materialized (select queue, rank from ({queues}) cross join level)",
            """job indexed by job_waiting where state = 'waiting' and job.queue = lane.queue
               and priority = lane.rank""",
            "due_ms",
        )
    if state == "parked":
        return Lanes(
            f"""{LEVEL}, {parked_lines(mine)}, lane as materialized (
                select queue, task, rank from line cross join level where task is not null)""",
            """job indexed by job_parked where state = 'parked' and job.queue = lane.queue
               and job.task = lane.task and priority = lane.rank""",
            "due_ms",
        )
    return Lanes(
        f"lane as materialized ({queues})",
        f"""job indexed by job_ended where state = '{state}' and ended_ms is not null
            and job.queue = lane.queue""",
        "ended_ms",
    )
