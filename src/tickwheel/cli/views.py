"""Show a job as a table row, or in full."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import click

from tickwheel.cli.output import (
    Cell,
    Column,
    absolute,
    clean,
    one_line,
    relative,
    show_fields,
    show_table,
)
from tickwheel.duration import duration_text, moment
from tickwheel.envelope import ENCRYPTED, readable
from tickwheel.job import Job, Outcome, Run, State
from tickwheel.masking import shown_arguments
from tickwheel.traceback import where

STYLES = {
    State.WAITING: "cyan",
    State.RUNNING: "yellow",
    State.DONE: "green",
    State.DEAD: "red",
    State.CANCELLED: "dim",
}
OUTCOME_STYLES = {Outcome.DONE: "green", Outcome.DEAD: "red", Outcome.LOST: "red"}
# How much of an error and of the arguments a table shows; `jobs show` prints all of them.
ERROR_SHOWN = 100
ARGUMENTS_SHOWN = 100

JOB_COLUMNS = (
    Column("ID"),
    Column("STATE"),
    Column("TASK", whole=False),
    Column("ARGUMENTS", whole=False, cut=True),
    Column("QUEUE", whole=False),
    Column("WHEN"),
)
DEAD_COLUMNS = (
    Column("ID"),
    Column("TASK", whole=False),
    Column("QUEUE", whole=False),
    Column("DIED"),
    Column("ERROR", whole=False),
)
RUN_COLUMNS = (
    Column("#", right=True),
    Column("OUTCOME"),
    Column("STARTED"),
    Column("LATE", right=True),
    Column("TOOK", right=True),
    Column("WORKER", whole=False),
)


# --- Rows


def show_jobs(jobs: Sequence[Job], now_ms: int) -> None:
    # Most apps have one queue.
    several = any(job.queue != "default" for job in jobs)
    show_table(
        [column for column in JOB_COLUMNS if several or column.title != "QUEUE"],
        [
            (
                job.id,
                state_cell(job),
                job.task,
                _arguments(job),
                *([job.queue] if several else []),
                relative(job.due_ms if job.ended_ms is None else job.ended_ms, now_ms),
            )
            for job in jobs
        ],
    )


def _arguments(job: Job) -> str:
    """As in a call: `order_id=42, note="x"`."""
    from tickwheel.operate.documents import decoded

    job = readable(job)
    given = shown_arguments(job.task, decoded(job.payload))
    try:
        words = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items()]
    except (AttributeError, RecursionError):
        return _cut(given if isinstance(given, str) else job.payload, ARGUMENTS_SHOWN)
    return _cut(", ".join(words), ARGUMENTS_SHOWN)


def _cut(text: str, most: int) -> str:
    text = one_line(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def show_dead(jobs: Iterable[Job], now_ms: int) -> None:
    show_table(
        DEAD_COLUMNS,
        [
            (job.id, job.task, job.queue, relative(job.ended_ms or now_ms, now_ms), _brief(job))
            for job in jobs
        ],
    )


def _brief(job: Job) -> str:
    """The error, and if it fits, where it happened."""
    job = readable(job)
    error = one_line(job.error or "")
    place = where(job.traceback or "")
    if place is not None and len(error) + len(place) + 3 <= ERROR_SHOWN:
        return f"{error} ({place})"
    return _cut(error, ERROR_SHOWN)


def state_cell(job: Job) -> Cell:
    return str(job.state), STYLES[job.state]


# --- One job


def show_job(job: Job, now_ms: int) -> None:
    """Print everything about a job, its history last."""
    job = readable(job)
    show_fields(_fields(job, now_ms))
    if job.traceback:
        click.echo()
        click.echo(clean(job.traceback))
    if not job.history:
        return
    click.echo()
    show_table(RUN_COLUMNS, [_run_row(run) for run in job.history])
    # The job's own error is that of its last run.
    told = job.history[-1] if job.error == job.history[-1].error else None
    errors = [
        (f"#{run.attempt}", run.error) for run in job.history if run.error and run is not told
    ]
    if errors:
        click.echo()
        show_fields(errors)


def _fields(job: Job, now_ms: int) -> list[tuple[str, Cell]]:
    from tickwheel.operate.documents import priority_name

    def at(ms: int) -> str:
        return f"{absolute(moment(ms))}  {relative(ms, now_ms)}"

    fields: list[tuple[str, Cell]] = [
        ("id", job.id),
        ("task", job.task),
        (
            "state",
            (f"{job.state}, asked to stop", "yellow") if job.cancel_requested else state_cell(job),
        ),
        ("queue", job.queue),
        ("priority", priority_name(job)),
        ("created", at(job.created_ms)),
        ("due", at(job.due_ms)),
    ]
    if job.expires_ms is not None:
        fields.append(("expires", at(job.expires_ms)))
    if job.lease_until_ms is not None:
        fields.append(("lease until", at(job.lease_until_ms)))
    if job.ended_ms is not None:
        fields.append(("ended", at(job.ended_ms)))
    fields += [
        ("attempts", f"{job.attempt} ({job.failures} failed, {job.takeovers} taken over)"),
        ("retries", "the task's default" if job.retries is None else str(job.retries)),
        (
            "timeout",
            "the task's default" if job.timeout_ms is None else duration_text(job.timeout_ms),
        ),
        ("worker", job.worker or "none yet"),
        *([("progress", str(job.progress))] if job.progress else []),
        ("arguments", _pretty(job.payload, job.task)),
        *meta_fields(job),
    ]
    if job.error is not None:
        fields.append(("error", (job.error, "red")))
    if job.state is State.DONE:
        fields.append(("result", _pretty(job.result or "null")))
    return fields


def meta_fields(job: Job) -> list[tuple[str, Cell]]:
    """A line for each entry of its meta."""
    lines = [f"{name}={value}" for name, value in sorted((job.meta or {}).items())]
    return [("" if i else "meta", one_line(line)) for i, line in enumerate(lines)]


def _pretty(text: str, task: str | None = None) -> str:
    """JSON for people; the arguments of this task, if it is given."""
    from tickwheel.operate.documents import decoded

    value = decoded(text)
    if value == ENCRYPTED:
        return ENCRYPTED
    if task is not None:
        value = shown_arguments(task, value)
    try:
        return text if value is text else json.dumps(value, indent=2, ensure_ascii=False)
    except RecursionError:
        return text


def _run_row(run: Run) -> Sequence[Cell]:
    late = took = started = "-"
    if run.started_ms is not None:
        started = absolute(moment(run.started_ms))
        late = duration_text(max(run.started_ms - run.due_ms, 0))
        took = duration_text(max(run.ended_ms - run.started_ms, 0))
    outcome = str(run.outcome), OUTCOME_STYLES.get(run.outcome, "")
    return str(run.attempt), outcome, started, late, took, run.worker
