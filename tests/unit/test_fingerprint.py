"""What is the same about two errors, and what is not."""

from __future__ import annotations

import pytest

from tickwheel.job import Job, State
from tickwheel.operate.fingerprint import Groups, fingerprint, generalized


@pytest.mark.parametrize(
    "error, general",
    [
        ("ValueError: order 42 is late", "ValueError: order … is late"),
        ("ValueError: -1.5 < 0", "ValueError: … < …"),
        ("KeyError: 'user-17'", "KeyError: …"),
        ('E: "it\'s" and `x`', "E: … and …"),
        ("E: at 0x7f3d0fdab870", "E: at …"),
        ("E: 6f1c9a52-0b1e-4a0e-9d6f-0123456789ab is gone", "E: … is gone"),
        ("E: commit deadbeef12 of main", "E: commit … of main"),
        ("E: id 1a1ee2842afd6fea1937106dcf1", "E: id …"),
        (
            "TimeoutError: no answer after 30.5 s from 10.0.0.7:8080",
            "TimeoutError: no answer after … s from …",
        ),
        ("RuntimeError: the deed is done", "RuntimeError: the deed is done"),
        ("", ""),
    ],
)
def test_what_differs_from_job_to_job_is_left_out(error: str, general: str) -> None:
    assert generalized(error) == general


def test_a_fingerprint_tells_tasks_and_errors_apart() -> None:
    mark = fingerprint("send", "ValueError: no mailbox for 'ann'")
    assert mark == fingerprint("send", "ValueError: no mailbox for 'bob'")
    assert mark != fingerprint("pack", "ValueError: no mailbox for 'ann'")
    assert mark != fingerprint("send", "TypeError: no mailbox for 'ann'")
    assert mark != fingerprint("send", "ValueError: no letterbox for 'ann'")
    assert fingerprint("send", None) == fingerprint("send", "")
    assert len(mark) == 16


def test_a_long_or_odd_error_has_a_fingerprint_soon() -> None:
    for error in ("'" * 100_000, '"a' * 50_000, "0" * 100_000, "\ud800", "a1" * 100_000):
        assert len(fingerprint("send", error)) == 16


def test_groups_know_first_last_and_the_newest_sample() -> None:
    groups = Groups()
    ends = [("a", 5, "x"), ("b", 9, "y"), ("c", 7, "x")]
    groups.add(
        Job(
            id=id,
            task="send",
            payload="{}",
            queue=queue,
            due_ms=0,
            created_ms=0,
            state=State.DEAD,
            ended_ms=ended_ms,
            error=f"ValueError: {ended_ms}",
        )
        for id, ended_ms, queue in ends
    )
    [group] = groups.largest_first()
    assert (group.count, group.first_ms, group.last_ms, group.sample.id) == (3, 5, 9, "b")
    assert group.queues == {"x", "y"}
