"""Why a job stands where it stands, from facts alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tickwheel.job import Job, Outcome, Progress, Run, State
from tickwheel.operate.explain import ON_ITS_WAY_MS, Explanation, Why, explain
from tickwheel.operate.facts import Facts
from tickwheel.schedule import Rule, Schedule
from tickwheel.store import QueueInfo, WorkerInfo

NOW = 1_800_000_000_000  # 2027-01-15 08:00:00Z
MINUTE = 60_000


def job(**changes: Any) -> Job:
    fields: dict[str, Any] = {"id": "j", "task": "pack", "payload": "{}", "queue": "mail"}
    return Job(**fields | {"due_ms": NOW + MINUTE, "created_ms": NOW - MINUTE} | changes)


def worker(name: str = "w1", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {"name": name, "host": "box", "pid": 7, "version": "1"}
    times = {"started_ms": NOW - MINUTE, "seen_ms": NOW - 2000, "gone_after_ms": 15_000}
    load = {"queues": ("mail",), "concurrency": 4, "running": 1, "held": 1}
    return WorkerInfo(**fields | times | load | changes)


def run(outcome: Outcome, **changes: Any) -> Run:
    fields: dict[str, Any] = {"attempt": 1, "worker": "w1", "due_ms": NOW - 5000}
    times = {"started_ms": NOW - 4990, "ended_ms": NOW - 4000}
    return Run(outcome=outcome, **fields | times | changes)


LOST_FIVE_TIMES = (*[run(Outcome.LOST)] * 5, run(Outcome.DEAD, started_ms=None))


def told(of: Job, **changes: Any) -> Explanation:
    facts: dict[str, Any] = {"schedules": [], "now_ms": NOW, "takeovers": 5}
    around = {"queue": QueueInfo(name="mail", waiting=1), "workers": [worker()]}
    return explain(Facts(job=of, **facts | around | changes))


def words(found: Explanation, why: Why) -> str:
    [reason] = [each for each in found.reasons if each.why is why]
    return reason.words


def codes(found: Explanation) -> list[Why]:
    return [each.why for each in found.reasons]


def commands(found: Explanation) -> list[str]:
    return [each.command for each in found.advice]


# --- Waiting


def test_a_job_that_is_not_due_waits_for_its_time() -> None:
    found = told(job(retries=3))
    assert codes(found) == [Why.NOT_DUE, Why.FAILURES_LEFT]
    assert "2027-01-15 08:01:00Z (in 1m)" in words(found, Why.NOT_DUE)
    assert (found.runs_ms, found.blocked) == (NOW + MINUTE, False)
    assert commands(found) == ["tickwheel jobs cancel j"]


@pytest.mark.parametrize("due_ms", [NOW - 1000, NOW + MINUTE])
def test_a_paused_queue_blocks_due_or_not(due_ms: int) -> None:
    found = told(job(due_ms=due_ms), queue=QueueInfo(name="mail", paused=True, waiting=1))
    assert "its queue is paused" in found.headline
    assert found.blocked and "once its queue is resumed" in found.when
    assert found.runs_ms == max(due_ms, NOW)
    assert "tickwheel queues resume mail" in commands(found)


@pytest.mark.parametrize("due_ms", [NOW - 1000, NOW + MINUTE])
def test_a_task_that_no_running_worker_knows_blocks_due_or_not(due_ms: int) -> None:
    history = (run(Outcome.PARK, started_ms=None),)
    parked = job(due_ms=due_ms, parked=True, history=history)
    found = told(parked, workers=[worker(tasks=("mail",)), worker("w2", tasks=())])
    assert "no running worker knows its task" in found.headline
    assert "None of the 2 workers of queue 'mail' knows task 'pack'" in words(
        found, Why.UNKNOWN_TASK
    )
    assert "w1 does not know its task and put it back 4s ago" in words(found, Why.PARKED)
    assert found.blocked and "once a worker knows its task" in found.when


def test_a_worker_of_another_queue_that_knows_the_task_does_not_help() -> None:
    elsewhere = worker("w2", tasks=("pack",), queues=("other",))
    found = told(job(due_ms=NOW - 1000), workers=[worker(tasks=("mail",)), elsewhere])
    assert "The only worker of queue 'mail' does not know task 'pack'." in words(
        found, Why.UNKNOWN_TASK
    )
    knowing = worker("w3", tasks=("pack",))
    found = told(job(due_ms=NOW - 1000), workers=[worker(tasks=("mail",)), knowing])
    assert codes(found)[0] is Why.ON_ITS_WAY


def test_without_a_worker_for_its_queue_a_due_job_says_so() -> None:
    due = job(due_ms=NOW - 1000)
    found = told(due, workers=[worker(queues=("default",))], app="shop:app")
    assert "no running worker serves its queue" in found.headline
    assert "serves default, not queue 'mail'" in words(found, Why.NO_WORKER)
    assert "tickwheel worker shop:app --queues mail" in commands(found)
    assert words(told(due, workers=[]), Why.NO_WORKER) == "No worker is running."
    many = [worker(f"w{n}", queues=("default",)) for n in range(3)]
    assert words(told(due, workers=many), Why.NO_WORKER).startswith("None of the 3 running workers")


def test_a_paused_queue_without_workers_says_both() -> None:
    found = told(job(due_ms=NOW), queue=QueueInfo(name="mail", paused=True), workers=[])
    assert codes(found)[:2] == [Why.QUEUE_PAUSED, Why.NO_WORKER]
    assert found.when == "once its queue is resumed and once a worker serves its queue"


def test_full_slots_are_counted_over_all_workers_of_the_queue() -> None:
    full = [worker("w1", running=4), worker("w2", running=4), worker("w3", queues=("default",))]
    found = told(job(due_ms=NOW - 1000), workers=full, queue=QueueInfo(name="mail", waiting=1200))
    assert "all slots for its queue are busy" in found.headline
    assert "2 workers with 8 slots" in words(found, Why.NO_SLOT)
    assert "1,200 jobs are waiting" in words(found, Why.NO_SLOT)
    assert found.blocked and found.when == "once a slot is free"


def test_a_due_job_with_free_slots_is_on_its_way_until_that_is_unlikely() -> None:
    found = told(job(due_ms=NOW - 200))
    assert Why.ON_ITS_WAY in codes(found) and not found.blocked
    assert "3 of 4 slots free on 1 worker" in words(found, Why.ON_ITS_WAY)
    late = told(job(due_ms=NOW - ON_ITS_WAY_MS - 1))
    assert Why.OVERLOOKED in codes(late)
    assert "tickwheel workers" in commands(late)


def test_a_retry_tells_its_number_its_error_and_what_is_left() -> None:
    failed = job(failures=2, retries=3, error="Boom: no", history=(run(Outcome.RETRY),))
    found = told(failed)
    assert found.headline == "It is waiting for retry 2 of 3, in 1m."
    assert words(found, Why.RETRY) == "It failed 4s ago; retry 2 of 3 comes next."
    assert words(found, Why.LAST_ERROR) == "Last error: Boom: no"
    assert words(found, Why.FAILURES_LEFT) == "2 failures so far; 1 of 3 retries left."


@pytest.mark.parametrize(
    ("failures", "retries", "task_retries", "expected"),
    [
        (0, None, None, "No failures so far; the task decides how often it is retried."),
        (1, None, 5, "1 failure so far; 4 of 5 retries left."),
        (1, 1, 5, "1 failure so far; the next failure makes it dead."),
        (0, 0, 5, "No failures so far; the next failure makes it dead."),
    ],
)
def test_the_jobs_own_retries_go_before_those_of_its_task(
    failures: int, retries: int | None, task_retries: int | None, expected: str
) -> None:
    found = told(job(failures=failures, retries=retries), task_retries=task_retries)
    assert words(found, Why.FAILURES_LEFT) == expected


def test_why_a_job_that_did_not_fail_waits_again() -> None:
    assert Why.SNOOZED in codes(told(job(history=(run(Outcome.SNOOZE),))))
    assert Why.RELEASED in codes(told(job(history=(run(Outcome.RELEASE),))))
    # A rerun forgets the failures, not the history.
    assert Why.RETRY not in codes(told(job(failures=0, history=(run(Outcome.RETRY),))))


# --- Running


def held(**changes: Any) -> Job:
    fields: dict[str, Any] = {"state": State.RUNNING, "attempt": 2, "worker": "w1"}
    return job(**fields | {"due_ms": NOW - 1000, "lease_until_ms": NOW + 9000} | changes)


def test_who_holds_a_running_job_and_until_when() -> None:
    found = told(held())
    assert found.headline == "Worker w1 is running it."
    for part in ("pid 7 on box", "seen 2s ago", "attempt 2", "08:00:09Z (in 9s)"):
        assert part in words(found, Why.HELD)
    assert (found.when, found.runs_ms) == ("now", None)
    assert commands(found) == ["tickwheel jobs cancel j"]


def test_a_job_held_before_its_time_starts_when_due() -> None:
    found = told(held(due_ms=NOW + 800))
    assert "holds it and starts it" in found.headline
    assert found.runs_ms == NOW + 800


def test_a_crowded_holder_may_not_have_started_it() -> None:
    found = told(held(), workers=[worker(running=4, held=6)])
    assert found.headline == "Worker w1 has it."
    assert Why.NO_SLOT in codes(found) and not found.blocked


def test_a_holder_that_is_gone_is_followed_when_the_lease_runs_out() -> None:
    found = told(held(), workers=[worker("w2")])
    assert "w1 is gone" in found.headline and Why.HOLDER_GONE in codes(found)
    assert found.runs_ms == NOW + 9000 and not found.blocked
    alone = told(held(), workers=[])
    assert alone.blocked and "only once a worker serves its queue" in alone.when


def test_a_lease_that_ran_out_waits_for_a_takeover() -> None:
    lost = (run(Outcome.LOST),)
    found = told(held(lease_until_ms=NOW - 3000, takeovers=1, history=lost))
    assert codes(found)[:2] == [Why.LEASE_RAN_OUT, Why.ON_ITS_WAY]
    assert found.runs_ms == NOW
    assert "once in a row; 4 more" in words(found, Why.TAKEOVERS_LEFT)
    again = told(held(lease_until_ms=NOW - 3000, takeovers=2, history=lost * 2))
    assert "runs on its own" in words(again, Why.TAKEOVERS_LEFT)
    cleared = told(held(takeovers=2, history=(*lost * 2, run(Outcome.SNOOZE))))
    assert Why.TAKEOVERS_LEFT not in codes(cleared)
    paused = told(held(lease_until_ms=NOW - 3000), queue=QueueInfo(name="mail", paused=True))
    assert paused.blocked


def test_a_job_that_was_asked_to_stop_is_not_to_be_asked_again() -> None:
    found = told(held(cancel_requested=True))
    assert "asked to stop" in found.headline and codes(found)[0] is Why.CANCEL_REQUESTED
    assert commands(found) == []
    lost = told(held(cancel_requested=True, lease_until_ms=NOW - 1))
    assert lost.runs_ms is None and "does not run again" in lost.headline


def test_a_running_job_tells_the_error_of_the_run_before() -> None:
    found = told(held(failures=1, history=(run(Outcome.RETRY, error="Boom"),)))
    assert words(found, Why.LAST_ERROR) == "Error of the previous run: Boom"


# --- Ended


def ended(state: State, **changes: Any) -> Job:
    return job(**{"state": state, "ended_ms": NOW - 4000, "attempt": 1, "worker": "w1"} | changes)


def test_a_done_job_tells_how_late_it_was_and_how_long_it_took() -> None:
    found = told(ended(State.DONE, failures=2, history=(run(Outcome.DONE),)))
    assert words(found, Why.DONE) == (
        "w1 started it 10ms after it was due; it took 990ms, after 2 failures."
    )
    assert found.runs_ms is None
    assert Why.NO_RESULT in codes(told(ended(State.DONE, error="too large")))


@pytest.mark.parametrize(
    ("changes", "task_retries", "why"),
    [
        ({"failures": 3, "retries": 2}, None, Why.OUT_OF_RETRIES),
        ({"failures": 1}, 5, Why.GAVE_UP),
        ({"failures": 6}, 5, Why.OUT_OF_RETRIES),
        ({"failures": 1}, None, Why.FAILED),
        ({"failures": 1, "history": LOST_FIVE_TIMES}, 5, Why.POISON),
    ],
)
def test_a_dead_job_tells_what_killed_it(
    changes: dict[str, Any], task_retries: int | None, why: Why
) -> None:
    found = told(ended(State.DEAD, error="Boom: no", **changes), task_retries=task_retries)
    assert codes(found)[0] is why
    assert "Boom: no" in words(found, Why.LAST_ERROR)
    assert commands(found) == [
        "tickwheel jobs rerun j",
        "tickwheel jobs show j",
        "tickwheel dead delete j",
    ]


def test_a_job_that_was_refused_says_so() -> None:
    unstarted = msgspec.structs.replace(run(Outcome.DEAD), started_ms=None)
    job = ended(State.DEAD, error="refused: it is not signed", history=(unstarted,))
    assert codes(told(job, task_retries=5))[0] is Why.REFUSED
    # One that says the same of its own accord has run.
    job = ended(State.DEAD, error="refused: by the bank", history=(run(Outcome.DEAD),))
    assert codes(told(job, task_retries=5))[0] is Why.GAVE_UP


def test_a_cancelled_job_tells_whether_it_ever_ran() -> None:
    assert "before it ran" in words(told(ended(State.CANCELLED, attempt=0)), Why.CANCELLED)
    assert "after 2 attempts" in words(told(ended(State.CANCELLED, attempt=2)), Why.CANCELLED)


# --- Schedules and commands


def schedule(**changes: Any) -> Schedule:
    fields: dict[str, Any] = {"name": "nightly", "next_ms": NOW + MINUTE}
    return Schedule(rule=Rule(cron="0 2 * * *", task="pack").encode(), **fields | changes)


@pytest.mark.parametrize(
    ("schedules", "expected"),
    [
        ([schedule()], "ticks next at 2027-01-15 08:01:00Z"),
        ([schedule(paused=True)], "paused"),
        ([schedule(next_ms=None)], "no more ticks"),
        ([], "no longer exists"),
    ],
)
def test_the_schedule_is_known_by_the_jobs_id(schedules: list[Schedule], expected: str) -> None:
    found = told(job(id="nightly@2027-01-15T02:00:00Z"), schedules=schedules)
    assert found.schedule == "nightly"
    assert expected in words(found, Why.SCHEDULE)


def test_an_id_that_only_looks_a_little_like_a_tick_names_no_schedule() -> None:
    for id in ("ann@example.org", "nightly@2027-01-15", "@2027-01-15T02:00:00Z"):
        assert told(job(id=id), schedules=[schedule()]).schedule is None


def test_commands_can_be_pasted_whatever_the_id_and_the_store() -> None:
    found = told(job(id="it's; rm"), where=["--store", "sqlite:///my jobs.db"])
    assert commands(found) == [
        "tickwheel jobs cancel 'it'\"'\"'s; rm' --store 'sqlite:///my jobs.db'"
    ]


def test_an_id_that_begins_like_an_option_is_not_taken_for_one() -> None:
    found = told(job(id="--all"), where=["--store", "sqlite:///jobs.db"])
    assert commands(found) == ["tickwheel jobs cancel --store sqlite:///jobs.db -- --all"]


# --- Expiry and progress


def test_a_waiting_job_says_when_it_expires() -> None:
    found = told(job(expires_ms=NOW + 5 * MINUTE))
    assert "It expires at 2027-01-15 08:05:00Z (in 5m)" in words(found, Why.EXPIRES)
    late = told(job(due_ms=NOW - 5 * MINUTE, expires_ms=NOW - MINUTE))
    assert "It expired at 2027-01-15 07:59:00Z (1m ago)" in words(late, Why.EXPIRES)
    assert Why.EXPIRES not in codes(told(job()))


def test_an_expired_job_says_that_it_could_not_start_in_time() -> None:
    gone = run(Outcome.EXPIRE, started_ms=None, error="expired", ended_ms=NOW - MINUTE)
    ended: dict[str, Any] = {
        "state": State.CANCELLED,
        "error": "expired",
        "ended_ms": NOW - MINUTE,
        "expires_ms": NOW - MINUTE,
        "attempt": 1,
    }
    found = told(job(**ended, history=(gone,)))
    assert codes(found) == [Why.EXPIRED]
    expected = "It expired: could not start by 2027-01-15 07:59:00Z (1m ago)."
    assert words(found, Why.EXPIRED) == expected
    assert "It expired and was cancelled" in found.headline
    assert commands(found) == ["tickwheel jobs rerun j"]
    failed = run(Outcome.RETRY, error="ValueError: no luck")
    again = told(job(**ended, history=(failed, gone)))
    assert "It had run before" in words(again, Why.EXPIRED)
    assert words(again, Why.LAST_ERROR) == "Error of the previous run: ValueError: no luck"


def test_a_running_job_says_how_far_it_is() -> None:
    running: dict[str, Any] = {
        "state": State.RUNNING,
        "worker": "w1",
        "attempt": 1,
        "due_ms": NOW - 1000,
        "lease_until_ms": NOW + 9000,
    }
    found = told(job(**running, started_ms=NOW - 900, progress=Progress(0.4, "loading")))
    assert words(found, Why.PROGRESS) == "Its task says how far it is: 40%: loading"
    # Its run has started: it no longer expires, unless it is lost.
    assert Why.EXPIRES not in codes(told(job(**running, started_ms=NOW, expires_ms=NOW + 1)))
    assert Why.EXPIRES in codes(told(job(**running, expires_ms=NOW + MINUTE)))
