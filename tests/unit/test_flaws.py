"""The rules of `tickwheel verify`: each kind of flaw is found, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tickwheel.job import ENDED_WITH_WORKER, EXPIRED, HISTORY_LIMIT, Job, Outcome, Run, State
from tickwheel.operate.flaws import (
    Flaw,
    FlawKind,
    Span,
    first_starts,
    flaws_of,
    repeated_attempts,
    second_runs,
    unrecorded_attempts,
)
from tickwheel.operate.ticks import check_ticks
from tickwheel.operate.verify import SHOWN, Verifier
from tickwheel.schedule import Misfire, Overlap, Rule, Schedule, job_of, tick_id

NOW = 1_800_000_000_000
S, HOUR = 1_000, 3_600_000
DUE = NOW - HOUR
SPAN = Span(since_ms=NOW - 24 * HOUR, until_ms=NOW, now_ms=NOW, late_after_ms=S)


def run(attempt: int = 1, outcome: Outcome = Outcome.DONE, **more: Any) -> Run:
    given: dict[str, Any] = {"due_ms": DUE, "started_ms": DUE + 2, "ended_ms": DUE + 9} | more
    return Run(attempt=attempt, worker=f"w{attempt}", outcome=outcome, **given)


def job(*history: Run, state: State = State.DONE, **more: Any) -> Job:
    attempt = history[-1].attempt if history else 0
    ended_ms = history[-1].ended_ms if history and state.ended else NOW if state.ended else None
    given: dict[str, Any] = {"due_ms": DUE, "created_ms": DUE - 60 * S, "attempt": attempt}
    given |= {"ended_ms": ended_ms, "id": "job"} | more
    return Job(task="t", payload="{}", state=state, history=history, **given)


def kinds(job: Job, span: Span = SPAN) -> list[str]:
    return [str(flaw.kind) for flaw in flaws_of(job, span)]


def only(job: Job) -> Flaw:
    [flaw] = flaws_of(job, SPAN)
    return flaw


LOST = run(outcome=Outcome.LOST, ended_ms=DUE + 15 * S)
AGAIN = run(2, started_ms=DUE + 16 * S, ended_ms=DUE + 17 * S)


# --- What is right


@pytest.mark.parametrize(
    "well",
    [
        job(run()),
        job(run(started_ms=DUE)),
        job(run(started_ms=DUE + S)),
        job(state=State.WAITING, due_ms=NOW + HOUR),
        job(state=State.WAITING, due_ms=NOW - S // 2),
        job(state=State.CANCELLED),
        job(run(outcome=Outcome.DEAD), state=State.DEAD),
        # A retry and a snooze have due times of their own.
        job(run(outcome=Outcome.RETRY), run(2, due_ms=DUE + 60 * S, started_ms=DUE + 60 * S)),
        job(run(outcome=Outcome.SNOOZE), run(2, due_ms=DUE + 60 * S, started_ms=DUE + 60 * S)),
        # Run again by a person.
        job(run(), run(2, due_ms=DUE + 60 * S, started_ms=DUE + 60 * S + 3)),
        # Due in the past means now.
        job(run(due_ms=DUE - 9 * S, started_ms=DUE), due_ms=DUE - 9 * S, created_ms=DUE),
        # Lost, but not taken over for long.
        job(
            state=State.RUNNING,
            due_ms=NOW - HOUR,
            started_ms=NOW - HOUR,
            lease_until_ms=NOW - S // 2,
        ),
        job(state=State.RUNNING, lease_until_ms=NOW + S),
    ],
)
def test_what_is_right_has_no_flaw(well: Job) -> None:
    assert kinds(well) == []


def test_what_was_due_at_another_time_does_not_count() -> None:
    before = Span(since_ms=NOW - 9 * HOUR, until_ms=DUE, now_ms=NOW, late_after_ms=S)
    after = Span(since_ms=DUE + 1, until_ms=NOW, now_ms=NOW, late_after_ms=S)
    for wrong in (job(run(started_ms=DUE - 1)), job(state=State.WAITING), job(LOST, AGAIN)):
        assert kinds(wrong) != [] and kinds(wrong, before) == kinds(wrong, after) == []


# --- Each kind


def test_a_due_job_that_has_not_started_is_missed() -> None:
    assert only(job(state=State.WAITING)).words.endswith("has not started")
    assert only(job(state=State.WAITING)).by_ms == HOUR


def test_so_is_one_that_was_lost_and_that_nobody_took_over() -> None:
    lost = job(state=State.RUNNING, lease_until_ms=NOW - 5 * S, worker="w")
    assert only(lost).kind == "missed" and "not been taken over" in only(lost).words


def test_so_is_one_that_expired_with_what_kept_it() -> None:
    parked = run(outcome=Outcome.PARK, started_ms=None)
    expired = job(
        parked, state=State.CANCELLED, error=EXPIRED, expires_ms=DUE + 9 * S, ended_ms=DUE + 9 * S
    )
    assert only(expired).kind == "missed" and only(expired).words.startswith("expired")
    assert only(expired).why == "Worker w1 doesn't know its task."


def test_so_is_one_that_died_or_is_done_without_a_run() -> None:
    refused = job(run(outcome=Outcome.DEAD, started_ms=None), state=State.DEAD, error="refused")
    assert (only(refused).kind, only(refused).why) == ("missed", "refused")
    assert only(job(run(outcome=Outcome.RETRY))).words == "is done, but none of its runs was"


def test_a_run_that_starts_after_the_limit_is_late() -> None:
    late = only(job(run(started_ms=DUE + S + 1)))
    assert (late.kind, late.by_ms, late.worker, late.why) == ("late", S + 1, "w1", "")


def test_what_came_before_a_late_run_explains_it() -> None:
    unstarted = run(outcome=Outcome.LOST, started_ms=None, ended_ms=DUE + 15 * S)
    late = only(job(unstarted, AGAIN))
    assert late.kind == "late" and "w1" in late.why and "lease ran out" in late.why


def test_a_run_that_is_under_way_counts_once_the_store_knows_that_it_started() -> None:
    running = job(
        state=State.RUNNING, attempt=1, started_ms=DUE + 5 * S, lease_until_ms=NOW + S, worker="w"
    )
    assert (only(running).kind, only(running).by_ms) == ("late", 5 * S)


def test_a_run_that_starts_before_it_is_due_is_early() -> None:
    early = only(job(run(started_ms=DUE - 1)))
    assert (early.kind, early.by_ms) == ("early", 1)


def test_a_second_run_for_the_same_time_is_a_double_with_its_reason() -> None:
    double = only(job(LOST, AGAIN))
    assert (double.kind, double.attempt) == ("doubled", 2)
    assert "w1" in double.why and "lease ran out" in double.why
    for error, words in ((ENDED_WITH_WORKER, "ended while"), ("stopped", "released")):
        released = run(outcome=Outcome.RELEASE, error=error)
        assert words in only(job(released, run(2, started_ms=DUE + 99))).why


def test_a_second_run_after_a_whole_one_has_no_reason() -> None:
    double = only(job(run(), run(2, started_ms=DUE + 20)))
    assert (double.kind, double.why) == ("doubled", "")


def test_runs_that_overlap_are_told() -> None:
    released = run(outcome=Outcome.RELEASE, ended_ms=DUE + 50)
    assert "before that ended" in only(job(released, run(2, started_ms=DUE + 20))).words


def test_two_runs_of_one_attempt_are_a_double() -> None:
    twice = job(run(outcome=Outcome.RETRY), run(due_ms=DUE + 60 * S, started_ms=DUE + 60 * S))
    assert only(twice).words == "has 2 runs of attempt 1"
    assert repeated_attempts([1, 2, 2, 3]) == {2: 2}


def test_lateness_is_about_the_first_start_for_each_due_time() -> None:
    assert list(first_starts([LOST, AGAIN])) == [LOST]
    assert list(second_runs([LOST, AGAIN])) == [(LOST, AGAIN)]


def test_attempts_that_are_not_in_the_history_are_known() -> None:
    assert unrecorded_attempts(job(run(2))) == {1}
    assert unrecorded_attempts(job(run(3, started_ms=None))) == set()
    assert unrecorded_attempts(job(run(1), state=State.RUNNING, attempt=2)) == set()


# --- Ticks

# Each ten minutes; NOW is 8:00.
RULE = Rule(cron="*/10 * * * *", task="t")
TICKS = [NOW - minutes * 60 * S for minutes in (60, 50, 40, 30, 20, 10)]


def schedule(rule: Rule = RULE, next_ms: int | None = NOW, **more: Any) -> Schedule:
    return Schedule(name="s", rule=rule.encode(), next_ms=next_ms, **more)


def missing(*seen: int, of: Schedule | None = None, rule: Rule = RULE, kept_ms: int = 0) -> Any:
    ended = {ms: ms + 5.0 for ms in seen}
    return check_ticks(of or schedule(rule), rule, ended, SPAN, kept_ms=kept_ms)


def test_each_tick_after_the_first_on_record_has_a_job() -> None:
    assert missing(*TICKS).missed == 0 and missing(*TICKS).checked == len(TICKS)
    found = missing(*(ms for ms in TICKS if ms != TICKS[3]))
    [flaw] = found.flaws
    assert (flaw.kind, flaw.id) == (FlawKind.MISSED, tick_id("s", TICKS[3]))
    assert "not fired" in flaw.words and "only the latest" in flaw.why


def test_ticks_that_are_overdue_are_missed_though_none_is_on_record() -> None:
    found = missing(of=schedule(next_ms=TICKS[-2]))
    assert [flaw.due_ms for flaw in found.flaws] == TICKS[-2:]
    assert "since the tick before" in found.flaws[0].why


def test_a_new_schedule_has_missed_nothing() -> None:
    assert missing().checked == 0


def test_the_tick_that_was_fired_last_is_on_record_though_its_job_is_pruned() -> None:
    last = schedule(last_id=tick_id("s", TICKS[2]))
    assert [flaw.due_ms for flaw in missing(TICKS[5], of=last).flaws] == [*TICKS[2:5]]


def test_jobs_that_may_be_pruned_are_not_missed() -> None:
    assert missing(TICKS[0], TICKS[5], kept_ms=TICKS[4]).missed == 1


def test_a_tick_that_its_rule_leaves_out_is_not_missed() -> None:
    rule = Rule(cron=RULE.cron, task="t", overlap=Overlap.SKIP)
    ended: dict[int, float] = dict.fromkeys(TICKS, 0)
    ended[TICKS[1]] = TICKS[3] + 1  # ran past two ticks
    del ended[TICKS[2]], ended[TICKS[3]], ended[TICKS[5]]
    found = check_ticks(schedule(rule), rule, ended, SPAN, kept_ms=0)
    assert (found.left_out, [flaw.due_ms for flaw in found.flaws]) == (2, [TICKS[5]])


def test_what_is_paused_or_ticked_otherwise_is_unknown() -> None:
    paused = missing(TICKS[0], TICKS[2], of=schedule(paused=True))
    assert paused.missed == 1 and "is paused" in paused.unknown[0]
    other = missing(TICKS[0], TICKS[2] + 60 * S, *TICKS[4:])
    assert other.missed == 0 and "another rule" in other.unknown[0]


def test_each_misfire_policy_is_explained() -> None:
    words = {
        missing(TICKS[0], rule=Rule(cron=RULE.cron, task="t", misfire=each)).flaws[0].why
        for each in Misfire
    }
    assert len(words) == 3


# --- All of it


def test_only_the_worst_are_kept_and_all_are_counted_each_once() -> None:
    verifier = Verifier(SPAN, [], kept_ms=0)
    for n in range(100):
        late = job(run(started_ms=DUE + S + n + 1), id=f"job-{n}")
        verifier.see(late)
        verifier.see(late)
    found = verifier.finish()
    assert found.counts[FlawKind.LATE] == 100 and not found.well
    kept = [flaw.by_ms for flaw in found.flaws[FlawKind.LATE]]
    assert kept == [S + n for n in range(100, 100 - SHOWN, -1)]


def test_what_cannot_be_known_is_told() -> None:
    verifier = Verifier(SPAN, [], kept_ms=NOW - HOUR)
    long = [run(n + 5, outcome=Outcome.RETRY) for n in range(HISTORY_LIMIT)]
    for each in (
        job(*long[:-1], msgspec.structs.replace(long[-1], outcome=Outcome.DONE)),
        job(run(outcome=Outcome.LOST, started_ms=None), run(2), id="untold"),
        job(state=State.RUNNING, lease_until_ms=NOW + S, id="held"),
    ):
        verifier.see(each)
    found = verifier.finish()
    words = " ".join(found.unknown)
    assert "may be pruned" in words
    assert "4 attempts are no longer in a history" in words
    assert "1 attempts were lost with their worker" in words
    assert "1 due jobs are held" in words
    assert found.well


def test_ticks_are_checked_by_the_ids_of_their_jobs() -> None:
    verifier = Verifier(SPAN, [schedule()], kept_ms=0)
    for ms in (*TICKS[:2], *TICKS[3:]):
        added = job_of(schedule(), RULE, ms, ms)
        done = run(due_ms=ms, started_ms=ms, ended_ms=ms)
        verifier.see(job(done, id=added.id, due_ms=ms, created_ms=ms))
    found = verifier.finish()
    assert (found.ticks, found.counts[FlawKind.MISSED]) == (6, 1)
    assert found.flaws[FlawKind.MISSED][0].schedule == "s"
