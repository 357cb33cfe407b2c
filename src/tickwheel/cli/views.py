"""Show a job as JSON, as a table row, or in full.

The names in the JSON are those of `tickwheel.JobInfo`; scripts rely on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import click

from tickwheel.cli.output import (
    Cell,
    Column,
    absolute,
    clean,
    iso,
    one_line,
    relative,
    show_fields,
    show_table,
)
from tickwheel.duration import duration_text, moment
from tickwheel.envelope import ENCRYPTED, readable
from tickwheel.job import Job, Outcome, Priority, Run, State
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


# --- JSON


def job_document(job: Job) -> dict[str, Any]:
    """Everything about a job, for programs."""
    job = readable(job)
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "priority": priority_name(job),
        "state": str(job.state),
        "arguments": shown_arguments(job.task, _decoded(job.payload)),
        "due": iso(moment(job.due_ms)),
        "created": iso(moment(job.created_ms)),
        "expires": _iso_or_none(job.expires_ms),
        "meta": job.meta or {},
        "retries": job.retries,
        "timeout_ms": job.timeout_ms,
        "attempts": job.attempt,
        "failures": job.failures,
        "takeovers": job.takeovers,
        "worker": job.worker,
        "lease_until": _iso_or_none(job.lease_until_ms),
        "cancel_requested": job.cancel_requested,
        "progress": progress_document(job),
        "ended": _iso_or_none(job.ended_ms),
        "error": job.error,
        "traceback": job.traceback,
        "result": None if job.result is None else _decoded(job.result),
        "history": [_run_document(run) for run in job.history],
    }


def progress_document(job: Job) -> dict[str, Any] | None:
    if job.progress is None:
        return None
    return {"part": job.progress.part, "words": job.progress.words}


def _run_document(run: Run) -> dict[str, Any]:
    return {
        "attempt": run.attempt,
        "outcome": str(run.outcome),
        "worker": run.worker,
        "due": iso(moment(run.due_ms)),
        "started": _iso_or_none(run.started_ms),
        "ended": iso(moment(run.ended_ms)),
        "lateness_ms": None if run.started_ms is None else run.started_ms - run.due_ms,
        "error": run.error,
    }


def _iso_or_none(ms: int | None) -> str | None:
    return None if ms is None else iso(moment(ms))


def _decoded(text: str) -> Any:
    """Decoded JSON; the text itself if another program wrote it wrong."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def priority_name(job: Job) -> str:
    return Priority(job.priority).name.lower()


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
    job = readable(job)
    given = shown_arguments(job.task, _decoded(job.payload))
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
    value = _decoded(text)
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
