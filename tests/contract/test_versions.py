"""Releases side by side: what a newer one stores can be read, and run, by this one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stores import Harness
from tickwheel.job import Job, Outcome, Run, State, losses
from tickwheel.notes import Note
from tickwheel.operate.audit import Entry
from tickwheel.schedule import Rule, Schedule, read_rule
from tickwheel.store import WorkerCounts, WorkerInfo


class NewerRun(Run, frozen=True, kw_only=True, omit_defaults=True):
    moon: str = ""


class NewerJob(Job, frozen=True, kw_only=True, omit_defaults=True):
    moon: str = ""
    tides: tuple[int, ...] = ()


class NewerSchedule(Schedule, frozen=True, kw_only=True, omit_defaults=True):
    moon: str = ""


class NewerWorker(WorkerInfo, frozen=True, kw_only=True):
    moon: str = ""


def newer_job(h: Harness) -> Job:
    beamed: Any = "beamed"
    run = NewerRun(
        attempt=1, worker="ann", outcome=beamed, due_ms=h.now, ended_ms=h.now, moon="full"
    )
    fields = {name: getattr(h.job(), name) for name in Job.__struct_fields__}
    fields |= {"attempt": 1, "history": (run,)}
    return NewerJob(**fields, moon="full", tides=(1, 2))


async def test_a_job_with_fields_and_outcomes_of_a_newer_release_runs(h: Harness) -> None:
    await h.add(newer_job(h))
    [found] = (await h.store.get(["job"])) or [None]
    assert found is not None
    # memory:// keeps the very object.
    read = msgspec.convert(msgspec.to_builtins(found), Job)
    assert (read.attempt, [str(run.outcome) for run in read.history]) == (1, ["other"])
    job = await h.claim_one()
    assert job.attempt == 2
    assert await h.settle(h.retry(job))
    job = await h.claim_one()
    assert await h.settle(h.done(job))
    ended = await h.get()
    assert (ended.state, ended.attempt, len(ended.history)) == (State.DONE, 3, 3)


async def test_a_worker_of_a_newer_release_is_seen(h: Harness) -> None:
    worker = NewerWorker(
        name="ann", host="host", pid=1, version="9", queues=("default",), concurrency=1,
        started_ms=h.now, seen_ms=h.now, gone_after_ms=60_000, moon="full",
    )  # fmt: skip
    await h.store.beat(worker)
    [seen] = await h.store.workers(now_ms=h.now)
    assert (seen.name, seen.version) == ("ann", "9")


async def test_a_schedule_of_a_newer_release_ticks(h: Harness) -> None:
    rule = msgspec.json.encode({"every_ms": 60_000, "task": "task", "moon": "full"}).decode()
    await h.store.put_schedule(NewerSchedule(name="hourly", rule=rule, next_ms=h.now, moon="full"))
    [schedule] = await h.store.schedules()
    assert read_rule(schedule.rule) == Rule(every_ms=60_000, task="task")
    assert await h.store.fire(schedule, [h.job("tick")], next_ms=h.now + 60_000)
    assert (await h.get("tick")).task == "task"


@pytest.mark.parametrize("kind", [Job, Run, Schedule, Rule, WorkerInfo, WorkerCounts, Note, Entry])
def test_no_record_refuses_fields_that_it_does_not_know(kind: type[Any]) -> None:
    required = {
        field.encode_name: _some(field.type)
        for field in msgspec.structs.fields(kind)
        if field.required
    }
    text = msgspec.json.encode({**required, "moon": "full", "tides": [1, {"high": None}]})
    read = msgspec.json.decode(text, type=kind)
    assert read == msgspec.convert(required, kind)


def _some(kind: Any) -> Any:
    for each, value in ((int, 1), (Outcome, "done"), (str, "text")):
        if kind is each:
            return value
    return [] if "tuple" in str(kind) or "list" in str(kind) else 1


def test_an_unknown_outcome_counts_for_neither_side() -> None:
    def run(outcome: str) -> Run:
        text = msgspec.json.encode(
            {"attempt": 1, "worker": "a", "outcome": outcome, "due_ms": 1, "ended_ms": 1}
        )
        return msgspec.json.decode(text, type=Run)

    assert run("beamed").outcome is Outcome.OTHER
    assert losses((run("lost"), run("beamed"), run("lost"))) == 2
    assert losses((run("lost"), run("done"), run("lost"))) == 1
