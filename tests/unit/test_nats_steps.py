"""Where each state of a job stands in a NATS stream, and what guards each step. Pure text."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stores import ODD_NAMES
from tickwheel import job as life
from tickwheel.job import Job, State
from tickwheel.stores.nats import steps
from tickwheel.stores.nats.jobs import _still_counts
from tickwheel.stores.nats.steps import Layout, Standing, standing, token, untoken
from tickwheel.stores.nats.stream import Token, consumer_name

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
    step = layout.step(held, layout.only_a_token("job"), now_ms=NOW_MS)
    return standing(step.subject, seq, step.body)


# --- Tokens of subjects


@pytest.mark.parametrize("name", ODD_NAMES)
def test_an_odd_name_is_one_token_and_comes_back(name: str) -> None:
    made = token(name)
    assert not re.search(r"[\s.*>\x00-\x20\x7f]", made)
    assert made and untoken(made) == name


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_names_are_different_tokens(one: str, other: str) -> None:
    assert (token(one) == token(other)) is (one == other)
    assert untoken(token(one)) == one
    assert not set(token(one)) & set(" .*>\t\r\n\0")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_consumer_of_an_odd_queue_has_a_name_that_nats_takes(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]{1,255}", consumer_name(name, "r1"))


def test_no_two_queues_share_a_consumer() -> None:
    kinds = ("r0", "r1", "rx", "s", "d", "x", "c", "run")
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
    step = layout.step(held, layout.only_a_token("job"), now_ms=NOW_MS)
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
    asked = msgspec.structs.replace(here.job, asked=True)
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


# --- Checks


def test_every_check_on_a_live_job_has_the_same_text(layout: Layout) -> None:
    """A cluster's leader tells checks that are under way apart by their text."""
    here = running(layout)
    ready = Standing(job(), "tw.ns.0.r.default.1.job", 3, "")
    texts = {
        layout.only_a_token("job").subject,
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
    assert len({each.news for each in layouts}) == 3


def test_a_message_in_the_far_future_has_a_date(layout: Layout) -> None:
    far = job(delay_ms=100 * 365 * 86_400_000)
    step = layout.step(far, layout.nowhere("job"), now_ms=NOW_MS)
    assert re.search(r"Nats-Schedule: @at 21\d\d-\d\d-\d\dT[\d:]{8}\.\d{3}Z", step.headers)


def test_a_token_counts_while_the_schedule_that_wrote_it_is_about_to_go() -> None:
    """The server writes the token first, and drops the schedule after that."""
    layout = Layout("ns", 0, 1_000)
    job = Job(id="job", task="t", payload="{}", due_ms=0, created_ms=0)
    schedule = "tw.ns.0.t.s.default.job"

    def counts(seen: Standing | None, *, scheduler: str = schedule) -> bool:
        token = Token(Standing(job, layout.token_of(job), 7, ""), "ack", scheduler, again=False)
        return _still_counts(token, seen) is token

    assert counts(Standing(job, schedule, 6, "s"))
    # Written anew since, or another one: then the token is that of something that is over.
    assert not counts(Standing(job, schedule, 8, "s"))
    assert not counts(Standing(job, "tw.ns.0.t.m.default.job", 6, "m"))
    assert not counts(Standing(job, schedule, 6, "s"), scheduler="")
    # A later token has taken its place, or the job is forgotten.
    assert counts(Standing(job, layout.token_of(job), 7, ""))
    assert not counts(Standing(job, layout.token_of(job), 9, ""))
    assert not counts(None)
