"""What becomes of a job whose run failed."""

from __future__ import annotations

import pickle
import re
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from tickwheel.errors import BadArguments, BadConfig, BadTime, GiveUp, Retry, Snooze, UsageError
from tickwheel.job import Job, Outcome, Settlement, State
from tickwheel.retry import RetryPolicy, decide, describe
from tickwheel.traceback import ERROR_LIMIT

ENDED_MS = 1_000_000
JOB = Job(id="j", task="t", payload="{}", due_ms=0, created_ms=0, attempt=1, fence=7)
PLAIN = RetryPolicy(jitter=0)


def decided(
    error: BaseException,
    policy: RetryPolicy = PLAIN,
    *,
    failures: int = 0,
    retries: int | None = None,
) -> Settlement:
    job = msgspec.structs.replace(JOB, failures=failures, retries=retries)
    return decide(job, error, policy, started_ms=ENDED_MS - 10, ended_ms=ENDED_MS)


def delay_s(settlement: Settlement) -> float:
    assert settlement.state is State.WAITING
    return (settlement.due_ms - ENDED_MS) / 1000


# --- How long


def test_the_default_policy_waits_2_4_8_16_and_32_seconds() -> None:
    policy = RetryPolicy()
    assert policy.retries == 5
    assert [policy.delay_ms(n, lambda: 0.0) for n in range(1, 6)] == [
        2_000,
        4_000,
        8_000,
        16_000,
        32_000,
    ]


def test_the_default_policy_adds_up_to_2_seconds_by_chance() -> None:
    policy = RetryPolicy()
    assert policy.delay_ms(1, lambda: 0.5) == 3_000
    assert policy.delay_ms(5, lambda: 0.999) == 33_998
    delays = {policy.delay_ms(3) for _ in range(200)}
    assert min(delays) >= 8_000 and max(delays) < 10_000 and len(delays) > 20


def test_the_default_policy_waits_300_seconds_at_most_and_the_random_part() -> None:
    policy = RetryPolicy()
    assert [policy.delay_ms(n, lambda: 0.0) for n in (8, 9, 100, 10**9)] == [
        256_000,
        300_000,
        300_000,
        300_000,
    ]
    assert policy.delay_ms(100, lambda: 0.5) == 301_000


def test_the_random_part_is_as_long_as_the_first_delay_unless_it_is_given() -> None:
    assert RetryPolicy(first="10s").delay_ms(1, lambda: 0.5) == 15_000
    assert RetryPolicy(first="10s", jitter="1m").delay_ms(1, lambda: 0.5) == 40_000
    assert RetryPolicy(first="10s", jitter=0).delay_ms(1, lambda: 0.5) == 10_000


SPANS = st.integers(0, 10_000_000)


@settings(deadline=None)
@given(
    first=SPANS,
    cap=SPANS,
    jitter=st.none() | SPANS,
    factor=st.floats(1, 1000),
    failures=st.integers(1, 10_000),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_delay_is_never_negative_and_never_past_the_cap_and_the_random_part(
    first: int, cap: int, jitter: int | None, factor: float, failures: int, chance: float
) -> None:
    policy = RetryPolicy(
        first=timedelta(milliseconds=first),
        cap=timedelta(milliseconds=cap),
        jitter=None if jitter is None else timedelta(milliseconds=jitter),
        factor=factor,
    )
    least, most = policy.delay_ms(failures, lambda: 0.0), policy.delay_ms(failures, lambda: chance)
    assert min(first, cap) <= least <= cap
    assert least <= most <= least + (first if jitter is None else jitter)
    assert least <= policy.delay_ms(failures + 1, lambda: 0.0)


def test_even_a_steep_policy_only_reaches_its_cap() -> None:
    assert RetryPolicy(factor=1e6, jitter=0).delay_ms(100) == 300_000


# --- Wrong policies


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ({"retries": -1}, BadConfig, "retries=-1: must be a whole number of at least 0"),
        ({"factor": 0.5}, BadConfig, "factor=0.5: must be at least 1"),
        ({"first": -1}, BadTime, "negative"),
        ({"cap": "soon"}, BadTime, "'soon' is not a duration"),
        ({"jitter": "5"}, BadTime, "'5' is not a duration"),
        ({"first": True}, BadTime, "True is not a duration"),
    ],
)
def test_a_wrong_policy_is_refused_where_it_is_written(
    wrong: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        RetryPolicy(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"retries": "5"}, {"retries": 1.5}, {"factor": float("nan")}, {"jitter": ""}],
    ids=str,
)
def test_a_policy_that_is_no_policy_at_all_is_refused_where_it_is_written(
    wrong: dict[str, Any],
) -> None:
    with pytest.raises((BadConfig, BadTime)):
        RetryPolicy(**wrong)


# --- What becomes of the job


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ([ValueError], "must be a dict, as in on={ValueError: None}"),
        ({"ValueError": None}, "on={'ValueError': …}: must be a class of exceptions"),
        ({int: None}, "must be a class of exceptions"),
        ({ValueError(): None}, "must be a class of exceptions"),
        ({(ValueError, OSError): None}, "must be a class of exceptions"),
        ({ValueError: 3}, "on={ValueError: 3}: must be a RetryPolicy, or None for no retries"),
        ({ValueError: False}, "must be a RetryPolicy, or None"),
    ],
)
def test_a_wrong_rule_is_refused_where_it_is_written(on: Any, words: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(words)):
        RetryPolicy(on=on)


def test_an_option_that_a_policy_does_not_have_is_refused_with_a_guess() -> None:
    options: dict[str, Any] = {"retrys": 3}
    with pytest.raises(
        BadArguments, match=r"^RetryPolicy\(\) has no option 'retrys'; did you mean"
    ):
        RetryPolicy(**options)


def test_a_policy_with_numbers_that_python_does_not_write_is_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"retries": 10**5000},
        {"factor": -(10**5000)},
        {"cap": 10**5000},
    ]
    for options in wrong:
        with pytest.raises(UsageError, match="<int>"):
            RetryPolicy(**options)
    assert RetryPolicy(factor=10**400, jitter=0).delay_ms(999_999) == 300_000


def test_a_failure_is_retried_while_retries_are_left_and_then_dead() -> None:
    outcomes = [decided(ValueError("no"), failures=n) for n in range(7)]
    assert [each.outcome for each in outcomes] == [Outcome.RETRY] * 5 + [Outcome.DEAD] * 2
    assert [delay_s(each) for each in outcomes[:5]] == [2, 4, 8, 16, 32]
    assert all(each.failed and each.error == "ValueError: no" for each in outcomes)
    assert all(each.started_ms == ENDED_MS - 10 for each in outcomes)
    assert all(each.ended_ms == ENDED_MS for each in outcomes)


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert decided(ValueError(), RetryPolicy(retries=0)).state is State.DEAD


@pytest.mark.parametrize(
    ("retries", "failures", "state"),
    [(0, 0, State.DEAD), (1, 0, State.WAITING), (1, 1, State.DEAD), (9, 8, State.WAITING)],
)
def test_the_retries_of_a_job_win_over_those_of_its_task(
    retries: int, failures: int, state: State
) -> None:
    assert decided(ValueError(), failures=failures, retries=retries).state is state


def test_a_task_that_asks_for_a_retry_says_when() -> None:
    asked = decided(Retry("10m"))
    assert (asked.outcome, delay_s(asked), asked.failed) == (Outcome.RETRY, 600, True)
    assert asked.error == "the task asked for a retry"
    # However long: the cap is for the policy's own delays.
    assert delay_s(decided(Retry(timedelta(days=30)))) == 30 * 86_400
    assert delay_s(decided(Retry(0))) == 0


def test_a_retry_without_a_delay_leaves_it_to_the_policy() -> None:
    assert delay_s(decided(Retry(), failures=2)) == 8
    assert decided(Retry(reason="busy")).error == "busy"


def test_a_task_that_asks_for_a_retry_too_often_is_dead() -> None:
    last = decided(Retry("10m", reason="still busy"), failures=5)
    assert (last.outcome, last.error) == (Outcome.DEAD, "still busy")


def test_a_snooze_is_no_failure_and_uses_up_no_retry() -> None:
    snoozed = decided(Snooze("1h"), failures=5, retries=0)
    assert (snoozed.outcome, delay_s(snoozed)) == (Outcome.SNOOZE, 3600)
    assert (snoozed.failed, snoozed.error) == (False, None)


def test_giving_up_is_final_whatever_retries_are_left() -> None:
    policy = RetryPolicy(on={Exception: RetryPolicy(retries=99)})
    given_up = decided(GiveUp("no such order"), policy, retries=99)
    assert (given_up.outcome, given_up.error) == (Outcome.DEAD, "no such order")
    assert given_up.failed


@pytest.mark.parametrize("error", [Retry("soon"), Retry(-1), Snooze(True), Snooze("")], ids=repr)
def test_a_delay_that_is_none_is_said_to_be_so(error: Exception) -> None:
    with pytest.raises(BadTime):
        decided(error)


class Busy(Exception):
    pass


class VeryBusy(Busy):
    pass


class Closed(Busy):
    pass


RULES = RetryPolicy(
    retries=1,
    jitter=0,
    on={
        Busy: RetryPolicy(retries=3, first="1m", jitter=0),
        Closed: None,
        LookupError: None,
    },
)


@pytest.mark.parametrize(
    ("error", "delay"),
    [(ValueError(), 2), (Busy(), 60), (VeryBusy(), 60), (OSError(), 2)],
    ids=repr,
)
def test_the_rule_of_the_nearest_base_class_holds(error: Exception, delay: float) -> None:
    assert delay_s(decided(error, RULES)) == delay


@pytest.mark.parametrize("error", [Closed(), LookupError(), KeyError("x")], ids=repr)
def test_where_the_rule_is_none_the_job_is_dead_at_once(error: Exception) -> None:
    assert decided(error, RULES).outcome is Outcome.DEAD
    # Not even the job's own retries change that.
    assert decided(error, RULES, retries=9).outcome is Outcome.DEAD


def test_a_rule_counts_its_own_retries_unless_the_job_has_some() -> None:
    assert decided(VeryBusy(), RULES, failures=2).outcome is Outcome.RETRY
    assert decided(VeryBusy(), RULES, failures=3).outcome is Outcome.DEAD
    assert decided(VeryBusy(), RULES, failures=3, retries=4).outcome is Outcome.RETRY
    assert decided(VeryBusy(), RULES, failures=1, retries=1).outcome is Outcome.DEAD


@settings(deadline=None)
@given(
    failures=st.integers(0, 20),
    retries=st.none() | st.integers(0, 20),
    allowed=st.integers(0, 20),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_a_job_runs_once_more_than_it_has_retries(
    failures: int, retries: int | None, allowed: int, chance: float
) -> None:
    job = msgspec.structs.replace(JOB, failures=failures, retries=retries)
    settlement = decide(
        job,
        ValueError(),
        RetryPolicy(retries=allowed),
        started_ms=ENDED_MS,
        ended_ms=ENDED_MS,
        rand=lambda: chance,
    )
    left = (allowed if retries is None else retries) - failures
    assert (settlement.outcome is Outcome.RETRY) == (left > 0)
    if left > 0:
        assert 2_000 <= settlement.due_ms - ENDED_MS <= 302_000


# --- The error in words


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("no luck"), "ValueError: no luck"),
        (ValueError(), "ValueError"),
        (KeyError("x"), "KeyError: 'x'"),
        (TimeoutError(" late "), "TimeoutError: late"),
        (GiveUp("enough"), "enough"),
        (GiveUp(""), "GiveUp"),
        (Retry(reason="busy"), "busy"),
    ],
    ids=repr,
)
def test_an_error_is_told_by_its_name_and_its_words(error: Exception, words: str) -> None:
    assert describe(error) == words


@pytest.mark.parametrize("error", [ValueError("x" * 10**6), GiveUp("x" * 10**6)], ids=["own", "up"])
def test_an_error_is_told_in_a_bounded_length(error: Exception) -> None:
    assert len(describe(error)) == ERROR_LIMIT


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError("no words")


def test_an_error_that_cannot_be_put_in_words_is_retried_like_any_other() -> None:
    assert decided(Mute()).outcome is Outcome.RETRY


def test_the_words_of_an_error_can_always_be_stored() -> None:
    describe(ValueError("no file \udcff")).encode()


def test_an_error_is_told_in_one_line() -> None:
    assert "\n" not in describe(ValueError("one\ntwo"))


# --- From another process


class RateLimited(Retry):
    """A user's own kind of Retry, which a policy may have a rule for."""


@pytest.mark.parametrize(
    "error",
    [
        Retry("10m", reason="busy"),
        Retry(),
        Snooze(timedelta(hours=1)),
        GiveUp("enough"),
        pytest.param(
            RateLimited("1m"),
        ),
    ],
    ids=repr,
)
def test_what_a_task_raises_to_choose_its_outcome_can_be_pickled(error: Exception) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))
