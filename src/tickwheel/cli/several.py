"""Several jobs at once: finding them page by page, and saying what became of each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tickwheel.cli.loading import ask
from tickwheel.cli.output import CONFLICT, NOT_FOUND, OK, Column, emit_json, say, show_table
from tickwheel.cli.views import job_document
from tickwheel.job import Job, State

if TYPE_CHECKING:
    from tickwheel.cli.options import Where
    from tickwheel.client import Client
    from tickwheel.store import Page, Query

# Jobs that one question to the store looks for or acts on.
BATCH = 1000


# --- Finding them


def query(state: State | None, queue: str | None, task: str | None) -> Query:
    """What the options ask for."""
    from tickwheel.store import Query

    return Query(state=state, queue=queue, task=task)


async def find_ids(client: Client, query: Query) -> list[str]:
    """The ids of all jobs that match now."""
    ids: list[str] = []
    cursor: str | None = None
    while True:
        page = await client.find(query, cursor=cursor, limit=BATCH)
        ids += [job.id for job in page.jobs]
        cursor = page.cursor
        if cursor is None:
            # Jobs that moved while we paged may have been seen twice.
            return list(dict.fromkeys(ids))


def list_jobs(
    where: Where,
    as_json: bool,
    query: Query,
    *,
    cursor: str | None,
    limit: int,
    show: Callable[[Sequence[Job], int], None],
    none: str,
) -> None:
    """Find jobs and print them, as JSON or through `show`; say `none` where there are none."""

    async def look(client: Client) -> tuple[Page, int]:
        page = await _find(client, query, cursor=cursor, limit=limit)
        return page, client.clock.now_ms()

    page, now_ms = ask(where, look)
    if as_json:
        emit_json({"jobs": [job_document(job) for job in page.jobs], "cursor": page.cursor})
        return
    if page.jobs:
        show(page.jobs, now_ms)
    else:
        say(none)
    if page.cursor is not None:
        say(f"there may be more: add --cursor {shlex.quote(page.cursor)}")


async def _find(client: Client, query: Query, *, cursor: str | None, limit: int) -> Page:
    """Up to `limit` jobs. A store may answer with short pages: ask until it has no more."""
    from tickwheel.store import Page

    jobs: list[Job] = []
    while len(jobs) < limit:
        page = await client.find(query, cursor=cursor, limit=min(limit - len(jobs), BATCH))
        jobs += page.jobs
        cursor = page.cursor
        if cursor is None:
            break
    return Page(jobs=jobs, cursor=cursor)


# --- What became of them


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one job: a stable word for programs, and words for people."""

    id: str
    outcome: str
    words: str
    code: int = OK

    @classmethod
    def unknown(cls, id: str) -> Answer:
        return cls(id, "unknown", "unknown: no job has this id", NOT_FOUND)


def report(answers: Sequence[Answer], as_json: bool) -> int:
    """Print each answer; gives the exit code of the worst."""
    if as_json:
        emit_answers(answers)
    else:
        show_table(
            [Column("ID"), Column("OUTCOME", whole=False)],
            [(answer.id, (answer.words, "red" if answer.code else "")) for answer in answers],
        )
    # Not found before conflict: a wrong id is the likelier slip.
    codes = {answer.code for answer in answers}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), OK)


def emit_answers(answers: Sequence[Answer]) -> None:
    emit_json({"jobs": [{"id": each.id, "outcome": each.outcome} for each in answers]})
