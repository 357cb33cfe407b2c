"""A job as the command line shows it: as JSON, as a row, as a page of its own.

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
    iso,
    one_line,
    relative,
    show_fields,
    show_table,
)
from tickwheel.job import Job, Outcome, Priority, Run, State
from tickwheel.span import moment, span_text

STYLES = {
    State.WAITING: "cyan",
    State.RUNNING: "yellow",
    State.DONE: "green",
    State.DEAD: "red",
    State.CANCELLED: "dim",
}
OUTCOME_STYLES = {Outcome.DONE: "green", Outcome.DEAD: "red", Outcome.LOST: "red"}
# Of an error a table shows this much; `jobs show` has all of it.
ERROR_SHOWN = 100

JOB_COLUMNS = (
    Column("ID"),
    Column("STATE"),
    Column("TASK", whole=False),
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
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "priority": priority_name(job),
        "state": str(job.state),
        "arguments": _decoded(job.payload),
        "due": iso(moment(job.due_ms)),
        "created": iso(moment(job.created_ms)),
        "retries": job.retries,
        "timeout_ms": job.timeout_ms,
        "attempts": job.attempt,
        "failures": job.failures,
        "takeovers": job.takeovers,
        "worker": job.worker,
        "lease_until": _iso_or_none(job.lease_until_ms),
        "asked": job.asked,
        "ended": _iso_or_none(job.ended_ms),
        "error": job.error,
        "result": None if job.result is None else _decoded(job.result),
        "history": [_run_document(run) for run in job.history],
    }


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
    """JSON text as what it means; as it stands, where some other program wrote it wrong."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def priority_name(job: Job) -> str:
    return Priority(job.priority).name.lower()


# --- Rows


def show_jobs(jobs: Iterable[Job], now_ms: int) -> None:
    show_table(
        JOB_COLUMNS,
        [(job.id, state_cell(job), job.task, job.queue, _when(job, now_ms)) for job in jobs],
    )


def _when(job: Job, now_ms: int) -> str:
    if job.ended_ms is not None:
        return f"ended {relative(job.ended_ms, now_ms)}"
    return f"due {relative(job.due_ms, now_ms)}"


def show_dead(jobs: Iterable[Job], now_ms: int) -> None:
    show_table(
        DEAD_COLUMNS,
        [
            (job.id, job.task, job.queue, relative(job.ended_ms or now_ms, now_ms), _brief(job))
            for job in jobs
        ],
    )


def _brief(job: Job) -> str:
    error = one_line(job.error or "")
    return error if len(error) <= ERROR_SHOWN else error[: ERROR_SHOWN - 1] + "…"


def state_cell(job: Job) -> Cell:
    return str(job.state), STYLES[job.state]


# --- One job


def show_job(job: Job, now_ms: int) -> None:
    """Print all that is known of a job, its history last."""
    show_fields(_fields(job, now_ms))
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
        ("state", (f"{job.state}, asked to stop", "yellow") if job.asked else state_cell(job)),
        ("queue", job.queue),
        ("priority", priority_name(job)),
        ("created", at(job.created_ms)),
        ("due", at(job.due_ms)),
    ]
    if job.lease_until_ms is not None:
        fields.append(("lease until", at(job.lease_until_ms)))
    if job.ended_ms is not None:
        fields.append(("ended", at(job.ended_ms)))
    fields += [
        ("attempts", f"{job.attempt} ({job.failures} failed, {job.takeovers} taken over)"),
        ("retries", "as the task says" if job.retries is None else str(job.retries)),
        ("timeout", "as the task says" if job.timeout_ms is None else span_text(job.timeout_ms)),
        ("worker", job.worker or "none yet"),
        ("arguments", _pretty(job.payload)),
    ]
    if job.error is not None:
        fields.append(("error", (job.error, "red")))
    if job.state is State.DONE:
        fields.append(("result", _pretty(job.result or "null")))
    return fields


def _pretty(text: str) -> str:
    value = _decoded(text)
    return text if value is text else json.dumps(value, indent=2, ensure_ascii=False)


def _run_row(run: Run) -> Sequence[Cell]:
    late = took = started = "-"
    if run.started_ms is not None:
        started = absolute(moment(run.started_ms))
        late = span_text(max(run.started_ms - run.due_ms, 0))
        took = span_text(max(run.ended_ms - run.started_ms, 0))
    outcome = str(run.outcome), OUTCOME_STYLES.get(run.outcome, "")
    return str(run.attempt), outcome, started, late, took, run.worker
