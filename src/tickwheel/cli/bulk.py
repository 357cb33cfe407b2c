"""Work on many jobs: find them page by page, act on them, and report the outcome for each."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tickwheel.cli.load_app import ask
from tickwheel.cli.output import (
    CONFLICT,
    FAILURE,
    NOT_FOUND,
    OK,
    Column,
    confirmed,
    emit_json,
    say,
    show_table,
)
from tickwheel.cli.prefix import whole_ids
from tickwheel.cli.views import job_document
from tickwheel.errors import BadConfig
from tickwheel.job import Job, State

if TYPE_CHECKING:
    from tickwheel.cli.options import Where
    from tickwheel.client import Client
    from tickwheel.store import Page, Query

# How many jobs one call to the store finds or changes.
BATCH = 1000
# How many jobs a list looks at to find those since a time, for which no store has an index.
LOOK_MOST = 100_000
# How many jobs a command acts on at once: their ids are kept in memory for the question.
ACT_MOST = 500_000


# --- Which jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs a command is about; None matches all."""

    states: Sequence[State] = ()
    queue: str | None = None
    task: str | None = None
    # A name and its value.
    meta: tuple[str, str] | None = None
    # Added or ended at this time or later.
    since_ms: int | None = None

    @property
    def narrow(self) -> bool:
        """Whether it leaves out anything, apart from states."""
        return any(each is not None for each in (self.queue, self.task, self.meta, self.since_ms))

    @property
    def queries(self) -> list[Query]:
        from tickwheel.store import Query

        return [
            Query(state=state, queue=self.queue, task=self.task, meta=self.meta)
            for state in self.states or (None,)
        ]

    def keeps(self, job: Job) -> bool:
        """What no query can say."""
        return self.since_ms is None or max(job.created_ms, job.ended_ms or 0) >= self.since_ms


async def find_jobs(client: Client, wanted: Filter) -> dict[str, State]:
    """The ids and states of the jobs that match now, at most about ACT_MOST."""
    found: dict[str, State] = {}
    for query in wanted.queries:
        cursor: str | None = None
        while True:
            if len(found) >= ACT_MOST:
                say(f"more than {ACT_MOST:,} match; run the command again for the rest")
                return found
            page = await client.find(query, cursor=cursor, limit=BATCH)
            # Jobs that changed while we paged may appear twice.
            found |= {job.id: job.state for job in page.jobs if wanted.keeps(job)}
            cursor = page.cursor
            if cursor is None:
                break
    return found


# --- Listing them


def list_jobs(
    where: Where,
    as_json: bool,
    wanted: Filter,
    *,
    cursor: str | None,
    limit: int,
    show: Callable[[Sequence[Job], int], None],
    none: str,
) -> None:
    """Find jobs and print them, as JSON or with `show`; prints `none` if there are none."""

    async def look(client: Client) -> tuple[Page, int]:
        page = await _find(client, wanted, cursor=cursor, limit=limit)
        return page, client.clock.now_ms()

    page, now_ms = ask(where, look)
    if as_json:
        emit_json({"jobs": [job_document(job) for job in page.jobs], "cursor": page.cursor})
        return
    if page.jobs:
        show(page.jobs, now_ms)
    elif page.cursor is None:
        say(none)
    if page.cursor is not None:
        say(f"there may be more; for the next page add --cursor {shlex.quote(page.cursor)}")


async def _find(client: Client, wanted: Filter, *, cursor: str | None, limit: int) -> Page:
    """Up to `limit` jobs. A store may return short pages: ask until it has no more."""
    from tickwheel.store import Page

    [query] = wanted.queries
    jobs: list[Job] = []
    looked = 0
    while len(jobs) < limit and looked < LOOK_MOST:
        left = limit - len(jobs)
        size = BATCH if wanted.since_ms is not None else min(left, BATCH)
        page = await client.find(query, cursor=cursor, limit=size)
        kept = [job for job in page.jobs if wanted.keeps(job)]
        if len(kept) > left:
            # Read again up to the last one that is wanted: the next page starts after it.
            size = page.jobs.index(kept[left - 1]) + 1
            page = await client.find(query, cursor=cursor, limit=size)
            kept = [job for job in page.jobs if wanted.keeps(job)]
        jobs += kept
        looked += len(page.jobs)
        cursor = page.cursor
        if cursor is None:
            break
    return Page(jobs=jobs, cursor=cursor)


# --- Outcomes


@dataclass(frozen=True, slots=True)
class JobAnswer:
    """The outcome for one job: a stable word for programs, and words for people."""

    id: str
    outcome: str
    words: str
    code: int = OK

    @classmethod
    def unknown(cls, id: str) -> JobAnswer:
        return cls(id, "unknown", "unknown: no job has this id", NOT_FOUND)


def report(answers: Sequence[JobAnswer], as_json: bool) -> int:
    """Print each answer; returns the exit code of the worst."""
    if as_json:
        emit_answers(answers)
    else:
        show_table(
            [Column("ID"), Column("OUTCOME", whole=False)],
            [(answer.id, (answer.words, "red" if answer.code else "")) for answer in answers],
        )
    # Not found before conflict: a wrong id is the likelier mistake.
    codes = {answer.code for answer in answers}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), OK)


def emit_answers(answers: Sequence[JobAnswer]) -> None:
    emit_json({"jobs": [{"id": each.id, "outcome": each.outcome} for each in answers]})


# --- Acting on them, by id or by filter


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to do to jobs."""

    # As in "cancel 12 jobs?" and "cancelled: 12 jobs".
    verb: str
    past: str
    act: Callable[[Client, Sequence[str]], Awaitable[list[JobAnswer]]]
    # What its jobs are called.
    kind: str = field(default="job")

    def counted(self, count: int) -> str:
        return f"{count:,} {self.kind}{'' if count == 1 else 's'}"

    async def each(self, client: Client, ids: Sequence[str]) -> list[JobAnswer]:
        answers: list[JobAnswer] = []
        for start in range(0, len(ids), BATCH):
            answers += await self.act(client, ids[start : start + BATCH])
        return answers


def act_on_ids(action: Action, ids: Sequence[str], where: Where, as_json: bool) -> int:
    """Act on these jobs and report on each; returns the exit code."""

    async def act(client: Client) -> list[JobAnswer]:
        return await action.each(client, await whole_ids(client, ids))

    return report(ask(where, act), as_json)


def act_on_matching(
    action: Action, wanted: Filter, where: Where, as_json: bool, *, yes: bool
) -> int:
    """Act on all jobs that match, after a confirmation unless `yes`; returns the exit code."""
    if not yes and not sys.stdin.isatty():
        raise BadConfig("this needs --yes when stdin is not a terminal, because nobody can confirm")
    # Acts on exactly the jobs that were counted: those that match after the question are left
    # alone.
    found = ask(where, lambda client: find_jobs(client, wanted))
    if found and not yes and not confirmed(f"{action.verb} {_count(action, found)}?"):
        say("nothing was changed")
        return FAILURE
    answers = ask(where, lambda client: action.each(client, list(found))) if found else []
    if as_json:
        emit_answers(answers)
        return OK
    if not answers:
        say(f"no matching {action.kind}s" if wanted.narrow else f"no {action.kind}s")
        return OK
    import click

    done = sum(answer.code == OK for answer in answers)
    click.echo(f"{action.past}: {action.counted(done)}")
    if done < len(answers):
        left = action.counted(len(answers) - done)
        say(f"left alone, because changed in the meantime: {left}")
    return OK


def _count(action: Action, found: dict[str, State]) -> str:
    """'12 jobs', or '12 jobs (10 waiting, 2 running)' if they differ."""
    states = Counter(found.values())
    parts = ", ".join(f"{states[each]:,} {each}" for each in State if each in states)
    return action.counted(len(found)) + (f" ({parts})" if len(states) > 1 else "")
