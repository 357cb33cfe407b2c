"""Work on many jobs from the command line: list them, act on them, report on each."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
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
from tickwheel.errors import BadConfig
from tickwheel.job import Job, State

if TYPE_CHECKING:
    from tickwheel.cli.options import Where
    from tickwheel.client import Client
    from tickwheel.operate.bulk import Act, Filter, JobAnswer
    from tickwheel.store import Page

# How many jobs a command acts on at once: their ids are kept in memory for the question.
ACT_MOST = 500_000


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

    from tickwheel.operate.bulk import find_page
    from tickwheel.operate.documents import job_document

    async def look(client: Client) -> tuple[Page, int]:
        page = await find_page(client, wanted, cursor=cursor, limit=limit)
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


# --- Outcomes


def report(answers: Sequence[JobAnswer], as_json: bool) -> int:
    """Print each answer; returns the exit code of the worst."""
    if as_json:
        emit_answers(answers)
    else:
        show_table(
            [Column("ID"), Column("OUTCOME", whole=False)],
            [(answer.id, (answer.words, "" if answer.ok else "red")) for answer in answers],
        )
    # Not found before conflict: a wrong id is the likelier mistake.
    codes = {_code(answer) for answer in answers}
    return next((code for code in (NOT_FOUND, CONFLICT) if code in codes), OK)


def _code(answer: JobAnswer) -> int:
    from tickwheel.operate.bulk import UNKNOWN

    if answer.ok:
        return OK
    return NOT_FOUND if answer.outcome == UNKNOWN else CONFLICT


def emit_answers(answers: Sequence[JobAnswer]) -> None:
    emit_json({"jobs": [{"id": each.id, "outcome": each.outcome} for each in answers]})


# --- Acting on them, by id or by filter


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Something to do to jobs."""

    # As in "cancel 12 jobs?" and "cancelled: 12 jobs".
    verb: str
    past: str
    act: Act
    # What its jobs are called.
    kind: str = field(default="job")

    def counted(self, count: int) -> str:
        return f"{count:,} {self.kind}{'' if count == 1 else 's'}"


def act_on_ids(action: Action, ids: Sequence[str], where: Where, as_json: bool) -> int:
    """Act on these jobs and report on each; returns the exit code."""

    from tickwheel.operate.bulk import in_batches

    async def act(client: Client) -> list[JobAnswer]:
        return await in_batches(action.act, client, await whole_ids(client, ids))

    return report(ask(where, act), as_json)


def act_on_matching(
    action: Action, wanted: Filter, where: Where, as_json: bool, *, yes: bool
) -> int:
    """Act on all jobs that match, after a confirmation unless `yes`; returns the exit code."""
    from tickwheel.operate.bulk import find_jobs, in_batches

    if not yes and not sys.stdin.isatty():
        raise BadConfig("this needs --yes when stdin is not a terminal, because nobody can confirm")
    # Acts on exactly the jobs that were counted: those that match after the question are left
    # alone.
    matching = ask(where, lambda client: find_jobs(client, wanted, most=ACT_MOST))
    found = matching.states
    if matching.more:
        say(f"more than {len(found):,} match; run the command again for the rest")
    if found and not yes and not confirmed(f"{action.verb} {_count(action, found)}?"):
        say("nothing was changed")
        return FAILURE
    ids = list(found)
    answers = ask(where, lambda client: in_batches(action.act, client, ids)) if ids else []
    if as_json:
        emit_answers(answers)
        return OK
    if not answers:
        say(f"no matching {action.kind}s" if wanted.narrow else f"no {action.kind}s")
        return OK
    import click

    done = sum(answer.ok for answer in answers)
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
