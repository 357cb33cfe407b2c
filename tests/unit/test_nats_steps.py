"""Where each state of a job stands in a NATS stream, and what guards each step. Pure text."""

from __future__ import annotations

import re
from urllib.parse import unquote

import msgspec
import pytest
from hypothesis import given, strategies as st

from stores import ODD_NAMES
from tickwheel import job as life
from tickwheel.job import Job, State
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.consumers import consumer_name
from tickwheel.stores.nats.steps import (
    Layout,
    Standing,
    current,
    standing,
    standing_of,
    subject_part,
)

NOW_MS = 1_800_000_000_000
AHEAD_MS = 1_000


@pytest.fixture
def layout() -> Layout:
    return Layout("ns", 0, AHEAD_MS)


def job(id: str = "job", *, delay_ms: int = 0, queue: str = "default") -> Job:
    return Job(
        id=id, task="t", payload="{}", queue=queue, due_ms=NOW_MS + delay_ms, created_ms=NOW_MS
    )


def running(layout: Layout, *, seq: int = 7) -> Standing:
    held = life.claimed(job(), worker="ann", fence=0, now_ms=NOW_MS, lease_ms=500)
    step = layout.step(held, layout.only_ready("job"), now_ms=NOW_MS)
    return standing(step.subject, seq, step.body)


# --- Parts of subjects


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_one_part_and_comes_back(name: str) -> None:
    made = subject_part(name)
    assert not re.search(r"[\s.*>\x00-\x20\x7f]", made)
    assert made and unquote(made) == name


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_names_are_different_parts(one: str, other: str) -> None:
    assert (subject_part(one) == subject_part(other)) is (one == other)
    assert unquote(subject_part(one)) == one
    assert not set(subject_part(one)) & set(" .*>\t\r\n\0")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_consumer_of_an_odd_queue_has_a_name_that_nats_takes(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]{1,255}", consumer_name(name, "r1"))


def test_no_two_queues_share_a_consumer() -> None:
    kinds = ("r0", "r1", "rx", "s", "p", "d", "x", "c", "run")
    names = [consumer_name(queue, kind) for queue in (*ODD_NAMES, "a", "a-r1") for kind in kinds]
    assert len(set(names)) == len(names)


# --- Where a job stands


def test_a_job_that_is_due_later_is_a_schedule_ahead_of_it(layout: Layout) -> None:
    step = layout.step(job(delay_ms=5_123), layout.nowhere("job"), now_ms=NOW_MS)
    assert step.subject == "tw.ns.0.t.s.default.job"
    assert "Nats-Schedule: @at 2027-01-15T08:00:04.123Z\r\n" in step.headers
    assert "Nats-Schedule-Target: tw.ns.0.r.default.1.job\r\n" in step.headers
    assert "Nats-Expected-Last-Subject-Sequence: 0\r\n" in step.headers
    assert "Nats-Expected-Last-Subject-Sequence-Subject: tw.ns.0.*.*.*.job\r\n" in step.headers


@pytest.mark.parametrize("delay_ms", [-1, 0, AHEAD_MS])
def test_a_job_that_is_due_soon_is_a_token_at_once(layout: Layout, delay_ms: int) -> None:
    step = layout.step(job(delay_ms=delay_ms), layout.nowhere("job"), now_ms=NOW_MS)
    assert step.subject == "tw.ns.0.r.default.1.job"
    assert "Nats-Schedule" not in step.headers


def test_a_claim_is_a_schedule_at_the_end_of_its_lease(layout: Layout) -> None:
    held = life.claimed(job(), worker="ann", fence=0, now_ms=NOW_MS, lease_ms=500)
    step = layout.step(held, layout.only_ready("job"), now_ms=NOW_MS)
    assert step.subject == "tw.ns.0.t.l.default.job"
    assert "Nats-Schedule: @at 2027-01-15T08:00:00.500Z\r\n" in step.headers
    assert "Nats-Schedule-Target: tw.ns.0.r.default.1.job\r\n" in step.headers


def test_the_sequence_of_a_claim_is_its_fence(layout: Layout) -> None:
    assert running(layout, seq=7).job.fence == 7


def test_where_a_claim_stands_is_known_without_a_look(layout: Layout) -> None:
    seen = running(layout, seq=7)
    assert layout.lease(seen.job) == seen


# --- Steps on a running job


def test_extends_alternate_between_two_subjects_and_drop_the_other(layout: Layout) -> None:
    """A schedule that fires purges whatever stands on its subject by then."""
    here = running(layout)
    subjects = [here.subject]
    for seq in range(8, 12):
        longer = msgspec.structs.replace(here.job, lease_until_ms=NOW_MS + 100 * seq)
        step = layout.step_from(here, longer, now_ms=NOW_MS)
        assert f"Nats-Scheduler: {here.subject}\r\n" in step.headers
        assert "Nats-Schedule-Next: purge\r\n" in step.headers
        assert f"Nats-Expected-Last-Subject-Sequence: {here.seq}\r\n" in step.headers
        assert step.subject != here.subject
        here = standing(step.subject, seq, step.body)
        assert here.job.fence == 7, "the fence of a claim stays"
        subjects.append(here.subject)
    assert [subject.split(".")[4] for subject in subjects] == ["l", "m", "l", "m", "l"]


def test_a_job_asked_to_stop_stands_elsewhere_and_alternates_too(layout: Layout) -> None:
    here = running(layout)
    asked = msgspec.structs.replace(here.job, cancel_requested=True)
    kinds = []
    for seq in range(8, 11):
        step = layout.step_from(here, asked, now_ms=NOW_MS)
        assert f"Nats-Scheduler: {here.subject}\r\n" in step.headers
        here = standing(step.subject, seq, step.body)
        kinds.append(here.kind)
    assert kinds == ["j", "k", "j"]


@pytest.mark.parametrize(
    ("state", "kind"), [(State.DONE, "d"), (State.DEAD, "x"), (State.CANCELLED, "c")]
)
def test_an_end_drops_the_lease_and_is_no_schedule(layout: Layout, state: State, kind: str) -> None:
    here = running(layout)
    ended = msgspec.structs.replace(here.job, state=state, lease_until_ms=None, ended_ms=NOW_MS)
    step = layout.step_from(here, ended, now_ms=NOW_MS)
    assert standing(step.subject, 8, step.body).kind == kind
    assert f"Nats-Scheduler: {here.subject}\r\n" in step.headers
    assert "Nats-Schedule: " not in step.headers


def test_a_retry_later_moves_the_schedule_in_one_message(layout: Layout) -> None:
    here = running(layout)
    again = life.settled(
        here.job, life.retry(here.job, due_ms=NOW_MS + 60_000, error="e", ended_ms=NOW_MS)
    )
    step = layout.step_from(here, again, now_ms=NOW_MS)
    assert step.subject == "tw.ns.0.t.s.default.job"
    for line in ("Nats-Schedule: @at", "Nats-Schedule-Next: purge", "Nats-Scheduler: tw.ns.0.t.l"):
        assert line in step.headers


def test_a_rerun_makes_a_schedule_of_the_ended_job_to_drop_it(layout: Layout) -> None:
    ended = msgspec.structs.replace(job(), state=State.DEAD, ended_ms=NOW_MS)
    here = Standing(ended, "tw.ns.0.t.x.default.job", 9, "x")
    first, second = layout.revive(here, life.rerun(ended, now_ms=NOW_MS), now_ms=NOW_MS)
    assert first.subject == here.subject
    assert "Nats-Expected-Last-Subject-Sequence: 9\r\n" in first.headers
    assert f"Nats-Schedule: {steps.NEVER}\r\n" in first.headers
    assert second.subject == "tw.ns.0.r.default.1.job"
    assert f"Nats-Scheduler: {here.subject}\r\n" in second.headers


# --- Parked jobs


def parked(layout: Layout, here: Standing, *, seq: int) -> tuple[steps.Step, Standing]:
    """The running job after a worker that doesn't know its task has put it back."""
    job = life.settled(here.job, life.park(here.job, ended_ms=NOW_MS))
    step = layout.step_from(here, job, now_ms=NOW_MS)
    return step, standing(step.subject, seq, step.body)


def test_a_parked_job_is_a_schedule_that_never_fires_where_no_consumer_delivers(
    layout: Layout,
) -> None:
    here = running(layout)
    step, there = parked(layout, here, seq=8)
    assert step.subject == "tw.ns.0.t.p-default.1-t.job"
    assert f"Nats-Schedule: {steps.NEVER}\r\n" in step.headers
    assert f"Nats-Scheduler: {here.subject}\r\n" in step.headers
    assert (there.kind, there.job.parked, there.job.state) == ("p", True, State.WAITING)
    assert "r." not in step.subject


@pytest.mark.parametrize("extends", [0, 1, 2])
def test_a_parked_job_is_claimed_to_another_subject_than_the_one_that_it_left(
    layout: Layout, extends: int
) -> None:
    """The lease that it left may be firing: that purges its subject a moment later."""
    here = running(layout)
    for seq in range(8, 8 + extends):
        step = layout.step_from(here, here.job, now_ms=NOW_MS)
        here = standing(step.subject, seq, step.body)
    _, there = parked(layout, here, seq=20)
    held = life.claimed(there.job, worker="bob", fence=0, now_ms=NOW_MS, lease_ms=500)
    step = layout.step_from(there, held, now_ms=NOW_MS)
    assert {standing(step.subject, 21, step.body).kind, here.kind} == {"l", "m"}
    assert f"Nats-Scheduler: {there.subject}\r\n" in step.headers
    assert "Nats-Expected-Last-Subject-Sequence: 20\r\n" in step.headers


def test_a_parked_job_counts_before_the_ready_message_that_its_lease_left(layout: Layout) -> None:
    here = running(layout)
    _, there = parked(layout, here, seq=8)
    late = Standing(here.job, "tw.ns.0.r.default.1.job", 9, "")
    assert current([late, there]) == there


def test_a_parked_message_that_stands_again_is_over(layout: Layout) -> None:
    _, ghost = parked(layout, running(layout), seq=8)
    held = life.claimed(ghost.job, worker="bob", fence=0, now_ms=NOW_MS, lease_ms=500)
    back = life.settled(held, life.release(held, ended_ms=NOW_MS))
    ready = Standing(back, "tw.ns.0.r.default.1.job", 10, "")
    assert current([ghost, ready]).over == (ghost,)


@pytest.mark.parametrize("name", ODD_NAMES)
def test_lines_of_odd_names_stay_in_their_places(layout: Layout, name: str) -> None:
    line = steps.Line(name, 2, name)
    note = layout.note(line)
    assert steps.as_line(note.body) == line
    assert note.subject.count(".") == 6
    assert layout.parked(line).count(".") == 6
    assert layout.note_subject(line) != layout.note_subject(steps.Line(name, 2, name + "x"))


@given(st.text(min_size=1), st.integers(0, 3), st.text(min_size=1))
def test_no_id_looks_like_a_note(id: str, priority: int, task: str) -> None:
    """A check on all that stands for an id must not find the note of a line."""
    layout = Layout("ns", 0, AHEAD_MS)
    note = layout.note_subject(steps.Line("default", priority, task))
    assert note.rpartition(".")[2] != subject_part(id)


# --- Checks


def test_every_check_on_a_live_job_has_the_same_text(layout: Layout) -> None:
    """A cluster's leader tells checks that are under way apart by their text."""
    here = running(layout)
    ready = Standing(job(), "tw.ns.0.r.default.1.job", 3, "")
    texts = {
        layout.only_ready("job").subject,
        layout.as_left(here).subject,
        layout.as_left(ready).subject,
    }
    assert len(texts) == 1


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_stay_in_their_places(layout: Layout, name: str) -> None:
    step = layout.step(job(name, queue=name), layout.nowhere(name), now_ms=NOW_MS)
    assert step.subject.count(".") == 6
    assert step.headers.count("\r\n") == 2
    assert "\n" not in step.headers.replace("\r\n", "")
    assert standing(step.subject, 1, step.body).job.id == name


def test_namespaces_and_shards_share_no_subject() -> None:
    layouts = [Layout("a", 0, 0), Layout("a", 1, 0), Layout("b", 0, 0)]
    assert len({each.prefix for each in layouts}) == len({each.stream for each in layouts}) == 3
    assert len({each.notify for each in layouts}) == 3


def test_a_message_in_the_far_future_has_a_date(layout: Layout) -> None:
    far = job(delay_ms=100 * 365 * 86_400_000)
    step = layout.step(far, layout.nowhere("job"), now_ms=NOW_MS)
    assert re.search(r"Nats-Schedule: @at 21\d\d-\d\d-\d\dT[\d:]{8}\.\d{3}Z", step.headers)


def message(kind: str, seq: int, job: Job) -> Standing:
    """A job under a kind of truth, or as a token."""
    layout = Layout("ns", 0, AHEAD_MS)
    subject = layout.ready_subject(job) if kind == "r" else f"tw.ns.0.t.{kind}.default.job"
    return standing_of(job, subject, seq)


WAITS = Job(id="job", task="t", payload="{}", due_ms=0, created_ms=0)
RUNS = life.claimed(WAITS, worker="ann", fence=7, now_ms=NOW_MS, lease_ms=1_000)
EXTENDED = msgspec.structs.replace(RUNS, lease_until_ms=NOW_MS + 2_000)
REQUESTED = msgspec.structs.replace(RUNS, cancel_requested=True)
BACK = life.settled(RUNS, life.release(RUNS, ended_ms=NOW_MS))
DONE = life.settled(RUNS, life.done(RUNS, started_ms=NOW_MS, ended_ms=NOW_MS))
CANCELLED = life.cancelled(WAITS, now_ms=NOW_MS)
AGAIN = life.rerun(DONE, now_ms=NOW_MS)
TAKEN_OVER = life.claimed(RUNS, worker="bob", fence=9, now_ms=NOW_MS, lease_ms=1_000)


@pytest.mark.parametrize(
    ("truth", "token"),
    [
        # It fires: the server writes the token first, and drops the schedule after that.
        (("s", WAITS), WAITS),
        (("l", RUNS), RUNS),
        # Ghosts: the server forgot that they were dropped.
        (("s", WAITS), RUNS),
        (("s", WAITS), BACK),
        (("l", RUNS), BACK),
        (("l", RUNS), EXTENDED),
        (("l", RUNS), REQUESTED),
        (("d", AGAIN), AGAIN),
        (("l", RUNS), TAKEN_OVER),
    ],
)
def test_a_token_counts_where_its_schedule_is_over(truth: tuple[str, Job], token: Job) -> None:
    kind, job = truth
    ghost, here = message(kind, 6, job), message("r", 8, token)
    found = current([ghost, here])
    assert (found.seq, found.kind, found.over) == (8, "", (ghost,))


@pytest.mark.parametrize(
    ("truth", "token"),
    [
        # A ghost of a schedule fired again, or late.
        (("l", RUNS), WAITS),
        (("m", EXTENDED), RUNS),
        (("j", REQUESTED), RUNS),
        (("s", BACK), RUNS),
        (("d", DONE), RUNS),
        (("d", DONE), BACK),
        (("c", CANCELLED), WAITS),
        (("c", CANCELLED), BACK),
        (("l", TAKEN_OVER), RUNS),
        (("l", TAKEN_OVER), BACK),
    ],
)
def test_a_token_of_an_earlier_part_of_its_life_does_not_count(
    truth: tuple[str, Job], token: Job
) -> None:
    kind, job = truth
    here, stale = message(kind, 6, job), message("r", 8, token)
    assert current([here, stale]) == here
    assert current([stale, here]) == here


@pytest.mark.parametrize(("kind", "truth"), [("s", WAITS), ("l", RUNS), ("c", CANCELLED)])
def test_what_is_written_after_a_token_counts(kind: str, truth: Job) -> None:
    """Also where it was thought of before: then an attempt is missing from its history."""
    token, here = message("r", 6, BACK), message(kind, 8, truth)
    assert current([token, here]) == here
    assert current([token]) == token
