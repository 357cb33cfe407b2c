"""Finding jobs page by page: what `jobs list`, `dead list` and `dead … --all` share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tickwheel.cli.loading import ask
from tickwheel.cli.output import Output, emit_json, say
from tickwheel.cli.views import job_document
from tickwheel.job import Job, State

if TYPE_CHECKING:
    from tickwheel.client import Client
    from tickwheel.store import Page, Query

# Jobs that one question to the store looks for or acts on.
BATCH = 1000


def query(state: State | None, queue: str | None, task: str | None) -> Query:
    """What the options ask for."""
    from tickwheel.store import Query

    return Query(state=state, queue=queue, task=task)


async def find(client: Client, query: Query, *, cursor: str | None, limit: int) -> Page:
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
    store: str | None,
    app: str | None,
    output: Output,
    query: Query,
    *,
    cursor: str | None,
    limit: int,
    show: Callable[[Sequence[Job], int], None],
    none: str,
) -> None:
    """Find jobs and print them, as JSON or through `show`; say `none` where there are none."""

    async def look(client: Client) -> tuple[Page, int]:
        page = await find(client, query, cursor=cursor, limit=limit)
        return page, client.clock.now_ms()

    page, now_ms = ask(store, app, look)
    if output is Output.JSON:
        emit_json({"jobs": [job_document(job) for job in page.jobs], "cursor": page.cursor})
        return
    if page.jobs:
        show(page.jobs, now_ms)
    else:
        say(none)
    if page.cursor is not None:
        say(f"there may be more: add --cursor {shlex.quote(page.cursor)}")
