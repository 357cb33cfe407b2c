"""Which losses count against a job, and which are another's fault."""

from __future__ import annotations

import pytest

from tickwheel.job import ENDED_WITH_WORKER, HISTORY_LIMIT, Outcome, Run, losses, remember


def run(letter: str, n: int = 1) -> Run:
    """l lost, L lost after the store was told of its start, r handed back unstarted, R stopped in
    mid-run, E ended with its worker; d done, f failed, s snoozed, x dead without a run."""
    outcome = {
        "l": Outcome.LOST, "r": Outcome.RELEASE, "e": Outcome.RELEASE, "d": Outcome.DONE,
        "f": Outcome.RETRY, "s": Outcome.SNOOZE, "x": Outcome.DEAD,
    }[letter.lower()]  # fmt: skip
    started = None if letter in "lrx" else 1
    error = ENDED_WITH_WORKER if letter == "E" else None
    fields = {"attempt": n, "worker": "w", "due_ms": 0, "started_ms": started, "ended_ms": 2}
    return Run(outcome=outcome, error=error, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("story", "count"),
    [
        ("", 0),
        ("l", 1),
        ("ll", 2),
        # Beyond the second only what had started alone counts.
        ("llllll", 2),
        ("llL", 3),
        ("llLlLl", 4),
        ("LLLLL", 5),
        # What is handed back unstarted changes nothing.
        ("rlrlr", 2),
        # Any run that comes to an end clears it, and so does a person who reruns a dead job.
        ("llLLs", 0),
        ("llLLf", 0),
        # To be stopped with a worker says nothing, unless the worker was ended from within.
        ("llLLR", 4),
        ("llLE", 4),
        ("EE", 2),
        ("llLLLx", 0),
        ("llLLdl", 1),
    ],
)
def test_losses_in_a_row(story: str, count: int) -> None:
    assert losses(tuple(run(letter) for letter in story)) == count


def test_history_keeps_one_of_several_times_that_a_job_was_released_unstarted() -> None:
    history: tuple[Run, ...] = (run("l", 1),)
    for n in range(2, 100):
        history = remember(history, run("r", n))
    assert [each.attempt for each in history] == [1, 99]
    history = remember(remember(history, run("R", 100)), run("R", 101))
    assert [each.attempt for each in history] == [1, 99, 100, 101]


def test_a_lease_that_ran_out_while_its_worker_lived_counts_for_nothing_there() -> None:
    history = tuple(run(letter) for letter in "llL")
    assert losses(history, survivor="w") == 0
    assert losses(history, survivor="another") == 3


@pytest.mark.parametrize("between", ["l", "rl", "lr", "llr"])
def test_what_happens_to_others_pushes_no_loss_out_of_the_history(between: str) -> None:
    history: tuple[Run, ...] = ()
    for letter in "ll" + "L".join([between * 40] * 4):
        history = remember(history, run(letter))
    assert losses(history) == 5


def test_history_is_bounded() -> None:
    history: tuple[Run, ...] = ()
    for n in range(102, 200):
        history = remember(history, run("f", n))
    assert len(history) == HISTORY_LIMIT
