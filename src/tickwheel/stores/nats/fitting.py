"""Making a job fit into one message: what is shortened or dropped first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from tickwheel import job as life
from tickwheel.errors import UsageError
from tickwheel.job import Job, Run, State
from tickwheel.stores.nats.steps import Step
from tickwheel.stores.nats.stream import Stream

log = logging.getLogger("tickwheel")

# What later steps may add to a job: its worker, its progress, twenty runs, an error. If the server
# accepts only small messages, it is a part of their size instead.
HEADROOM = 8 * 1024
HEADROOM_PART = 8
# What a claimed job needs at least so that it can be settled, in addition to another subject.
LEAST = 1024
# How many characters of an error are kept: at first, and if that is still too much. The errors of
# runs that ended with their worker are not longer: they are searched for.
WORDS, FEW_WORDS = 400, 60
# How many characters of a traceback are kept, at first.
LINES = 2_000
# How many runs show that a job kills its workers.
RUNS = 6

_replace = msgspec.structs.replace
_encode = msgspec.json.encode


# A job and its message.
Fit = tuple[Job, Step]
Write = Callable[[Job], Step]


class Fitter:
    """Makes the messages of jobs fit into the server's limit, which may change."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def safe_bytes(self) -> int:
        """A job of up to so many bytes certainly fits: as JSON, text can be six times as long."""
        return self._stream.largest // 12

    def new(self, job: Job, write: Write) -> Step:
        """The message that adds a job. Raises UsageError if it leaves no room for later steps."""
        largest = self._stream.largest
        found = self.fit(job, write, headroom(largest))
        if found is None:
            step = write(job)
            limit = len(step.body) - self._stream.over(step) - headroom(largest)
            raise UsageError(
                f"job {job.id!r} has {len(step.body):,} bytes, and may have {limit:,}: this NATS "
                f"server accepts messages of {largest:,} (max_payload), and a part is reserved for "
                "the history of its runs; raise max_payload, or store less"
            )
        return found[1]

    def fit(self, job: Job, write: Write, spare: int = 0) -> Fit | None:
        """The job and its message, shortened if the server would not accept it; None if that is not
        enough. `spare` bytes are left free."""
        step = write(job)
        over = self._stream.over(step) + spare
        if over <= 0:
            return job, step
        shorter = fitted(job, len(step.body) - over)
        return None if shorter is None else (shorter, write(shorter))

    def end(self, job: Job, write: Write, *, now_ms: int) -> Fit:
        """The end of a job that has become too large for the server: dead, if it had not ended, and
        if necessary with only part of its arguments."""
        if not job.state.ended:
            why = (
                f"it has {len(_encode(job)):,} bytes, and this NATS server accepts messages of "
                f"{self._stream.largest:,} (max_payload): raise that, and enqueue it again"
            )
            log.error("job %s (%s) is dead: %s", job.id, job.task, why)
            job = given_up(job, why=why, now_ms=now_ms)
        found = self.fit(job, write)
        if found is None:
            step = write(job)
            job = without_arguments(job, len(step.body) - self._stream.over(step))
            found = job, write(job)
        return found


def headroom(largest: int) -> int:
    """How much of a message an add leaves free, if the server accepts up to `largest`."""
    return min(HEADROOM, largest // HEADROOM_PART)


def fitted(job: Job, most: int) -> Job | None:
    """The job in at most so many bytes: without its progress, with less of its traceback, shorter
    errors, fewer runs or without its result. None if that is not enough."""
    return next((each for each in _shorter(job) if len(_encode(each)) <= most), None)


def no_larger(job: Job, before: Job) -> Job:
    """The job in about as many bytes as it had before, if possible."""
    return fitted(job, len(_encode(before)) + FEW_WORDS) or job


def _shorter(job: Job) -> Iterator[Job]:
    yield job
    if job.progress is not None:
        job = _replace(job, progress=None)
        yield job
    if job.traceback is not None:
        yield _replace(job, traceback=_cut(job.traceback, LINES))
        job = _replace(job, traceback=None)
        yield job
    yield from _brief(job)
    if job.result is not None:
        # The work is done: a result that is too large must not make it run again.
        lost = f"its result of {len(job.result):,} bytes was dropped: too large for the server"
        bare = _replace(job, result=None, error=lost)
        yield bare
        yield from _brief(bare)


def _brief(job: Job) -> Iterator[Job]:
    for words, runs in ((WORDS, life.HISTORY_LIMIT), (FEW_WORDS, life.HISTORY_LIMIT)):
        yield _replace(job, error=_cut(job.error, WORDS), history=_runs(job, words, runs))
    for runs in (RUNS, 0):
        error = _cut(job.error, WORDS if runs else FEW_WORDS)
        yield _replace(job, error=error, history=_runs(job, FEW_WORDS, runs))


def _runs(job: Job, words: int, count: int) -> tuple[Run, ...]:
    history = job.history[len(job.history) - count :] if count < len(job.history) else job.history
    return tuple(_replace(run, error=_cut(run.error, words)) for run in history)


def _cut(text: str | None, most: int) -> str | None:
    return text if text is None or len(text) <= most else text[: most - 1] + "…"


def given_up(job: Job, *, why: str, now_ms: int) -> Job:
    """The job as dead for this reason; no worker holds it any more."""
    return _replace(life.cancelled(job, now_ms=now_ms), state=State.DEAD, error=why, traceback=None)


def without_arguments(job: Job, most: int) -> Job:
    """An ended job with only part of its arguments: it can't be run again."""
    error = _cut(job.error, WORDS)
    bare = _replace(
        job, payload="", result=None, error=error, traceback=None, progress=None, history=()
    )
    # In JSON a character has at most six bytes. JSON that was cut is invalid: nobody can mistake it
    # for arguments.
    left = max(most - len(_encode(bare)), 0) // 6
    return _replace(bare, payload=job.payload[: min(left, len(job.payload) - 1)])
