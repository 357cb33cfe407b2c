"""Parked jobs in PostgreSQL: which kinds there are, and which of them a worker knows.

A kind is a queue, a task and a priority. An index has them one after the other, and a recursive
query steps from the first job of one kind to that of the next. So parked jobs cost as many steps as
there are kinds, however many jobs are parked and however many tasks a worker knows.
"""

from __future__ import annotations

from functools import cache, lru_cache

from tickwheel.store import PARKED_LIMIT
from tickwheel.stores.postgres.rows import LEVELS, encode

# The condition and the order of the index. `priority & 3` is the priority that the job was given.
PARKED = "state = 'waiting' and priority < 0"
_KIND = 'task collate "C", priority & 3'
_FIRST = f"order by queue, {_KIND}, due_ms, n limit 1"


@lru_cache(maxsize=64)
def names_of(tasks: frozenset[str]) -> str:
    """These tasks as a parameter. One text, which the server reads only if jobs are parked."""
    return encode(sorted(tasks)).decode()


@lru_cache(maxsize=64)
def topics_of(tasks: frozenset[str]) -> frozenset[str]:
    """What a wait for parked jobs of these tasks listens to."""
    return frozenset(f"t{task}" for task in tasks)


def anything(schema: str, queue: str) -> str:
    """Whether jobs are parked in a queue; without one, in any. It asks for the head of the index:
    in `exists`, the server would leave out the order, and might read the whole table."""
    mine = f"and job.queue = {queue}" if queue else ""
    return f"(select true from {schema}.job where {PARKED} {mine} {_FIRST}) is not null"


def _first(schema: str, queue: str) -> str:
    return f"""
        select task, priority & 3 as level, due_ms from {schema}.job
        where {PARKED} and job.queue = {queue}
        {_FIRST}"""


def heads(schema: str) -> str:
    """For `with recursive`: the first job of each kind that is parked in these queues (`head`), and
    those of them that the worker knows (`known`)."""
    return f"""
        head(queue, task, level, due_ms) as (
            select mine.queue, first.* from unnest(%(queues)s::text[]) as mine(queue),
                lateral ({_first(schema, "mine.queue")}) as first
            where not exists (select from {schema}.paused where paused.queue = mine.queue)
            union all
            select head.queue, next.* from head, lateral (
                {_first(schema, f"head.queue and ({_KIND}) > (head.task, head.level)")}) as next),
        known as (
            select * from head
            where (task in (select json_array_elements_text(%(tasks)s::text::json))) is true)"""


@cache
def first_jobs(schema: str) -> str:
    """The ids of the jobs that are due first, one for each queue and task."""
    first = f"""
        select queue, task, priority & 3 as level, due_ms, id from {schema}.job where {PARKED}"""
    return f"""
        with recursive head as (
            ({first} {_FIRST})
            union all
            select next.* from head, lateral (
                {first} and (queue, {_KIND}) > (head.queue, head.task, head.level)
                {_FIRST}) as next)
        select distinct on (queue, task) id
        from (select * from head limit {len(LEVELS) * PARKED_LIMIT}) as found
        order by queue, task, due_ms limit {PARKED_LIMIT}"""


def best(schema: str, level: int, columns: str) -> str:
    """The parked jobs that the worker knows, of one priority: those of the kind whose first job has
    waited longest come first. Only rows that are asked for are locked."""
    return f"""
        select best.* from (
            select queue, task from known where level = {level} and due_ms <= %(due)s
              and (select open from gate)
            order by due_ms) as kind,
        lateral (
            select {columns} from {schema}.job
            where {PARKED} and priority & 3 = {level}
              and job.queue = kind.queue and job.task = kind.task collate "C"
              and due_ms <= %(due)s
            order by due_ms, n limit %(limit)s for update skip locked) as best"""
