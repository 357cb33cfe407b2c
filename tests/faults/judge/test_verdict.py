"""The judge itself: it accepts what was right, and finds each kind of wrong that is planted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from judge.faults import CALM_S, LINE, PROCESS, SERVER, WORKERS, faults
from judge.load import PRODUCERS, RETRY_S, SNOOZE_S, Wish, orders, wishes
from judge.record import (
    AnyLine,
    Broke,
    CancelAnswered,
    CancelTried,
    Ended,
    Quit,
    RolledBack,
    Started,
    Stored,
    Trouble,
)
from judge.verdict import Found, judge

WISH = Wish(number=7, queue="mail", priority="low")
# When it was enqueued, and when it is due.
THEN, DUE = 100.0, 110.0
AFTERMATH_S = 2.0

STORED = Stored(at=THEN, id="job", number=7, added=True)
DONE = Found("job", 7, "done", result="run-1")


def started(attempt: int = 1, *, at: float = DUE, pid: int = 1) -> Started:
    return Started(
        at=at,
        run=f"run-{attempt}",
        id="job",
        number=7,
        attempt=attempt,
        pid=pid,
        not_before=DUE,
    )


def ended(attempt: int = 1, *, at: float = DUE + 1, how: str = "done") -> Ended:
    return Ended(at=at, run=f"run-{attempt}", attempt=attempt, how=how)


def rules(found: Found | None, *lines: AnyLine, wish: Wish = WISH) -> list[str]:
    """The rules that were broken, each once."""
    there = [found] if found else []
    counts = {(each.queue, each.state): 1 for each in there}
    judgement = judge({7: wish}, lines, there, counts, aftermath_s=AFTERMATH_S)
    return sorted({complaint.rule for complaint in judgement.complaints})


ONCE = (STORED, started(), ended())
TAKEN_OVER = (STORED, started(), started(2, at=DUE + 4, pid=2), ended(2, at=DUE + 5))
DONE_BY_THE_SECOND = replace(DONE, attempts=2, takeovers=1, result="run-2")


def kill(pid: int = 1, at: float = DUE + 0.5) -> Trouble:
    return Trouble(at=at, until=at, kind="kill", pid=pid)


# --- What is right


def test_a_job_that_ran_once_and_is_done_is_right() -> None:
    assert rules(DONE, *ONCE) == []


def test_a_run_that_was_killed_may_be_followed_by_another() -> None:
    assert rules(DONE_BY_THE_SECOND, *TAKEN_OVER, kill()) == []


def test_what_was_never_acknowledged_may_be_there_or_not() -> None:
    assert rules(DONE, started(), ended()) == []
    assert rules(None) == []


def test_a_run_that_chose_so_runs_again() -> None:
    for how, wait_s in (("retry", RETRY_S), ("snooze", SNOOZE_S)):
        again = started(2, at=DUE + 1 + wait_s), ended(2, at=DUE + 2)
        fails = int(how == "retry")
        found = replace(DONE, attempts=2, failures=fails, result="run-2")
        wish = replace(WISH, fails=fails)
        assert rules(found, STORED, started(), ended(how=how), *again, wish=wish) == []


def test_a_job_that_was_to_die_is_dead() -> None:
    wish, found = replace(WISH, gives_up=True), replace(DONE, state="dead", failures=1)
    assert rules(found, STORED, started(), ended(how="dead"), wish=wish) == []


def test_a_run_that_was_claimed_again_while_it_ran_goes_on() -> None:
    late = Ended(at=DUE + 5, run="run-1", attempt=2, how="done")
    assert rules(replace(DONE, attempts=2, takeovers=1), STORED, started(), late) == []


def test_an_id_that_is_given_twice_is_one_job() -> None:
    assert rules(DONE, *ONCE, structs.replace(STORED, added=False)) == []


# --- What is wrong


def test_an_acknowledged_job_that_is_not_there_is_lost() -> None:
    assert rules(None, STORED) == ["lost"]


def test_so_is_one_that_never_ends() -> None:
    for state in ("waiting", "running"):
        assert rules(replace(DONE, state=state), STORED) == ["lost"]


def test_so_is_one_that_is_done_by_a_run_that_is_not() -> None:
    assert rules(DONE, STORED) == ["lost"]
    assert rules(DONE, STORED, started()) == ["lost"]
    assert rules(DONE, STORED, started(), ended(how="interrupted")) == ["lost"]


def test_so_is_one_that_a_cancel_does_not_know() -> None:
    tried, answer = (
        CancelTried(at=THEN, id="job"),
        CancelAnswered(at=THEN, id="job", answer="unknown"),
    )
    assert rules(DONE, *ONCE, tried, answer) == ["lost"]
    on_its_way = structs.replace(STORED, on_its_way=True)
    assert rules(DONE, on_its_way, started(), ended(), tried, answer) == []


def test_a_run_before_its_time_is_early() -> None:
    assert rules(DONE, STORED, started(at=DUE - 0.001), ended()) == ["early"]


@pytest.mark.parametrize(("how", "wait_s"), [("retry", RETRY_S), ("snooze", SNOOZE_S)])
def test_so_is_one_that_does_not_wait_as_long_as_it_chose(how: str, wait_s: float) -> None:
    again = started(2, at=DUE + 1 + wait_s / 4), ended(2, at=DUE + 2)
    fails = int(how == "retry")
    found = replace(DONE, attempts=2, failures=fails, takeovers=1, result="run-2")
    lines = (STORED, started(), ended(how=how), *again)
    assert rules(found, *lines, wish=replace(WISH, fails=fails)) == ["early"]


def test_a_second_run_that_nothing_explains_is_one_too_many() -> None:
    assert rules(DONE_BY_THE_SECOND, *TAKEN_OVER) == ["twice"]


@pytest.mark.parametrize(
    "trouble",
    [
        kill(pid=2),
        kill(at=DUE + 4.1),
        kill(at=DUE - AFTERMATH_S - 0.1),
    ],
    ids=["of another process", "too late", "over long before"],
)
def test_a_fault_explains_only_what_it_can_have_caused(trouble: Trouble) -> None:
    assert rules(DONE_BY_THE_SECOND, *TAKEN_OVER, trouble) == ["twice"]


def test_a_fault_after_the_outcome_was_stored_explains_nothing() -> None:
    lines = (STORED, started(), ended(), started(2, at=DUE + 20, pid=2), ended(2, at=DUE + 21))
    assert rules(DONE_BY_THE_SECOND, *lines, kill(at=DUE + 1.5)) == []
    assert rules(DONE_BY_THE_SECOND, *lines, kill(at=DUE + 10)) == ["twice"]


def test_a_fault_of_all_explains_a_run_of_any() -> None:
    server = Trouble(at=DUE + 0.5, until=DUE + 1, kind="server killed")
    assert rules(DONE_BY_THE_SECOND, *TAKEN_OVER, server) == []


def test_two_runs_of_one_attempt_are_one_too_many_whatever_happened() -> None:
    other = Started(at=DUE + 4, run="other", id="job", number=7, attempt=1, pid=2, not_before=DUE)
    assert "twice" in rules(replace(DONE, takeovers=1), *ONCE, other, kill())


def test_a_second_run_that_is_not_counted_is_silent() -> None:
    silent = replace(DONE_BY_THE_SECOND, takeovers=0)
    assert rules(silent, *TAKEN_OVER, kill()) == ["disagrees"]
    assert rules(replace(silent, takeovers=1, attempts=1), *TAKEN_OVER, kill()) == ["disagrees"]


def test_a_run_that_lost_its_lease_cannot_settle() -> None:
    lines = (*TAKEN_OVER, ended(1, at=DUE + 4.5), kill())
    assert rules(replace(DONE_BY_THE_SECOND, result="run-1"), *lines) == ["disagrees"]


def test_a_run_after_a_confirmed_cancel_is_held_against_it() -> None:
    cancel = (
        CancelTried(at=THEN + 1, id="job"),
        CancelAnswered(at=THEN + 1, id="job", answer="cancelled"),
    )
    cancelled = replace(DONE, state="cancelled", attempts=0, result=None)
    assert rules(cancelled, STORED, *cancel) == []
    assert "cancelled" in rules(replace(cancelled, attempts=1), *ONCE, *cancel)
    assert "cancelled" in rules(DONE, *ONCE, *cancel)


def test_a_job_that_was_asked_to_stop_is_started_once_more_at_the_most() -> None:
    asked = (
        CancelTried(at=THEN + 1, id="job"),
        CancelAnswered(at=THEN + 1, id="job", answer="asked"),
    )
    assert rules(DONE, *ONCE, *asked) == []
    assert rules(DONE_BY_THE_SECOND, *TAKEN_OVER, *asked, kill()) == ["cancelled"]


def test_a_job_is_cancelled_only_where_somebody_wanted_it() -> None:
    assert rules(replace(DONE, state="cancelled", attempts=0), STORED) == ["disagrees"]


def test_a_job_that_was_not_to_die_is_not_dead() -> None:
    dead = replace(DONE, state="dead", error="its worker died or froze 5 times; not run again")
    assert rules(dead, STORED) == ["dead"]
    assert rules(DONE, *ONCE, wish=replace(WISH, gives_up=True)) == ["dead"]


def test_a_job_that_faults_cost_too_many_runs_may_be_taken_for_a_killer() -> None:
    dead = replace(DONE, state="dead", error="its worker died", attempts=5, takeovers=5)
    starts = [started(n, at=DUE + 10 * n, pid=n) for n in range(1, 6)]
    kills = [kill(pid=n, at=DUE + 10 * n + 1) for n in range(1, 6)]
    assert rules(dead, STORED, *starts, *kills) == []
    assert rules(dead, STORED, *starts, *kills[1:]) == ["dead", "twice"]
    assert rules(dead, STORED, *starts, *kills[:-1]) == ["dead"]


def test_failures_are_counted_as_they_were() -> None:
    assert rules(replace(DONE, failures=1), *ONCE) == ["disagrees"]
    assert rules(DONE, *ONCE, wish=replace(WISH, fails=1)) == ["disagrees"]


def test_what_was_rolled_back_is_nowhere() -> None:
    gone = RolledBack(at=THEN, id="job", number=7)
    assert rules(None, gone) == []
    assert rules(replace(DONE, state="waiting"), gone) == ["disagrees"]
    assert rules(None, gone, started()) == ["disagrees"]


def test_an_id_is_free_only_once() -> None:
    assert rules(DONE, *ONCE, STORED) == ["disagrees"]


def test_a_job_that_nobody_planned_is_found() -> None:
    assert rules(replace(DONE, number=8), *ONCE) == ["disagrees"]


def test_a_queue_that_miscounts_is_told() -> None:
    for counts in ({}, {("", "done"): 2}, {("", "done"): 1, ("", "dead"): 1}):
        judgement = judge({7: WISH}, ONCE, [DONE], counts, aftermath_s=AFTERMATH_S)
        assert {complaint.rule for complaint in judgement.complaints} == {"disagrees"}


def test_a_worker_that_ends_by_itself_and_a_call_that_fails_are_told() -> None:
    assert rules(DONE, *ONCE, Quit(at=DUE, pid=1, words="ended with 1")) == ["quit"]
    assert rules(DONE, *ONCE, Broke(at=DUE, what="one: UsageError")) == ["quit"]


# --- The plans


def test_the_plans_are_functions_of_the_seed() -> None:
    def plans(seed: int) -> tuple[object, object]:
        return (
            faults(seed, 60, process=(*PROCESS, *LINE), server=tuple(SERVER)),
            [list(orders(seed, n, 5, ("outbox",))) for n in range(PRODUCERS)],
        )

    assert plans(1) == plans(1)
    assert plans(1)[0] != plans(2)[0] and plans(1)[1] != plans(2)[1]


@pytest.mark.parametrize("seed", range(5))
def test_a_minute_sees_every_kind_of_fault_and_of_load(seed: int) -> None:
    plan = faults(seed, 60, process=(*PROCESS, *LINE), server=tuple(SERVER))
    kinds = {fault.kind for fault in plan}
    assert kinds == {*PROCESS, *LINE, *(f"server {kind}" for kind in SERVER)}
    assert all(CALM_S <= fault.at_s <= 60 - CALM_S for fault in plan)
    assert {fault.slot for fault in plan} == {None, *range(WORKERS + PRODUCERS)}
    load = wishes(seed, 60, ("outbox",)).values()
    assert 4_000 < len(load) < 10_000
    assert any(wish.cancel_s for wish in load) and any(wish.dies for wish in load)


def test_no_process_is_hit_twice_at_a_time() -> None:
    plan = faults(3, 600, process=tuple(PROCESS), server=())
    for slot in range(WORKERS + PRODUCERS):
        hits = [fault for fault in plan if fault.slot == slot]
        for first, second in pairwise(hits):
            assert first.at_s + first.seconds < second.at_s
