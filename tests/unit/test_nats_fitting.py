"""What of a job is dropped first if it doesn't fit into a message."""

from __future__ import annotations

import msgspec

from tickwheel.job import Job, Outcome, Progress, Run
from tickwheel.store import job_bytes
from tickwheel.stores.nats.fitting import fitted, without_arguments

RUN = Run(attempt=1, worker="w", outcome=Outcome.RETRY, due_ms=1, ended_ms=1, error="e" * 300)
JOB = Job(
    id="a",
    task="t",
    payload="p" * 1000,
    due_ms=1,
    created_ms=1,
    meta={"customer": "4" * 200},
    expires_ms=2,
    progress=Progress(0.5, "w" * 200),
    error="e" * 300,
    traceback="l" * 300,
    history=(RUN,) * 3,
)


def size(job: Job) -> int:
    return len(msgspec.json.encode(job))


def test_progress_goes_first() -> None:
    shorter = fitted(JOB, size(JOB) - 1)
    assert shorter == msgspec.structs.replace(JOB, progress=None)


def test_then_the_traceback_and_the_history_and_never_meta() -> None:
    left = [fitted(JOB, most) for most in range(size(JOB), 0, -1)]
    kept = [each for each in left if each is not None]
    assert kept[-1].history == () and kept[-1].traceback is None
    assert all(each.meta == JOB.meta and each.expires_ms == 2 for each in kept)
    with_progress = [each for each in kept if each.progress is not None]
    assert all(each == JOB for each in with_progress)


def test_a_job_without_arguments_keeps_its_meta() -> None:
    bare = without_arguments(JOB, 800)
    assert (bare.meta, bare.progress) == (JOB.meta, None)


def test_meta_and_progress_count_among_the_bytes_of_a_job() -> None:
    plain = msgspec.structs.replace(JOB, meta=None, progress=None)
    assert job_bytes(JOB) == job_bytes(plain) + 8 + 200 + 200
