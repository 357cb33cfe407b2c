"""Log what became of runs: one line for each, and if there are many, a summary of them.

A line takes 23 µs, and a job that does nothing 35 µs (2 cores, Python 3.11, log in a file), so a
line for each would cost 40 % of the drain rate: a busy worker writes only a few, and failures.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tickwheel.duration import duration_text, moment_text
from tickwheel.errors import Retry
from tickwheel.job import Job, Outcome, Settlement
from tickwheel.traceback import raised, users_frames

log = logging.getLogger("tickwheel")

# In each period this many runs have a line of their own, and the others are summarised.
PERIOD_S = 10.0
LINES = 100
# How many tasks a summary names, and of how many runs it knows the lateness.
TASKS_NAMED = 5
SAMPLE = 2_000

INFO = logging.INFO
DONE = Outcome.DONE


class Journal:
    """The log of one worker's runs."""

    def __init__(self) -> None:
        self._begin_period()

    def _begin_period(self) -> None:
        self._began_s = asyncio.get_running_loop().time()
        # How many more runs have a line of their own.
        self._lines_left = sys.maxsize if log.isEnabledFor(logging.DEBUG) else LINES
        self._left_out = 0
        self._done = 0
        # Outcomes other than done.
        self._others: Counter[Outcome] = Counter()
        self._tasks: dict[str, int] = {}
        self._late_ms: list[int] = []
        # Every n-th run is sampled; n is a power of two, and this is n - 1.
        self._mask = 0
        self._runs = 0

    def ran(self, settlement: Settlement, *, cancelled: bool = False) -> None:
        """A run ended. Failures have been logged where they happened, with their exception."""
        if not log.isEnabledFor(INFO):
            return
        job, started_ms, done = settlement.job, settlement.started_ms, settlement.outcome is DONE
        assert started_ms is not None
        # Without a call or a hash of an enum: this is on the way of every job.
        if done:
            self._done += 1
        else:
            self._others[settlement.outcome] += 1
        tasks = self._tasks
        tasks[job.task] = tasks.get(job.task, 0) + 1
        if not self._runs & self._mask:
            self._sample(started_ms - job.due_ms)
        self._runs += 1
        if settlement.failed:
            return
        if self._lines_left:
            self._line(settlement, _words(settlement, cancelled))
        else:
            self._left_out += 1

    def _line(self, settlement: Settlement, words: str) -> None:
        self._lines_left -= 1
        job = settlement.job
        log.info("%s %s: %s", job.task, job.id, words, extra=facts(settlement))

    def expired(self, settlement: Settlement) -> None:
        """A job could not start in time. It had no run, so it counts among the outcomes only."""
        if not log.isEnabledFor(INFO):
            return
        self._others[settlement.outcome] += 1
        if self._lines_left:
            by = moment_text(settlement.job.expires_ms)
            self._line(settlement, f"expired: could not start by {by}")
        else:
            self._left_out += 1

    def _sample(self, late_ms: int) -> None:
        self._late_ms.append(late_ms)
        if len(self._late_ms) == SAMPLE:
            del self._late_ms[1::2]
            self._mask = self._mask * 2 + 1

    async def summarise(self) -> None:
        """Write a summary after a period in which not every run had its line."""
        await asyncio.sleep(PERIOD_S)
        self.end_period()

    def end_period(self) -> None:
        outcomes = self._others
        failed = outcomes[Outcome.RETRY] + outcomes[Outcome.DEAD]
        outcomes[DONE] = self._done
        if self._left_out:
            took_s = asyncio.get_running_loop().time() - self._began_s
            log.info(
                "%s in the last %s: %s%s",
                _counted(self._runs, "run"),
                duration_text(round(took_s * 1000)),
                ", ".join(
                    f"{outcomes[each]:,} {_NAMES[each]}" for each in _NAMES if outcomes[each]
                ),
                self._punctuality(),
                extra={
                    "runs": self._runs,
                    "failed": failed,
                    "expired": outcomes[Outcome.EXPIRE],
                },
            )
        self._begin_period()

    def _punctuality(self) -> str:
        if not self._late_ms:
            return ""
        p50, p99 = map(duration_text, _percentiles(self._late_ms))
        return f"; late p50 {p50}, p99 {p99}; by task: {_most(self._tasks)}"


def failed(settlement: Settlement, error: BaseException | None, *, allowed: int = 0) -> None:
    """Log that a run failed, with the exception, so that tools can group by it. `allowed` is how
    many failures are retried."""
    job = settlement.job
    dead = settlement.outcome is Outcome.DEAD
    # A retry that the task asked for is no surprise.
    level = logging.ERROR if dead else INFO if isinstance(error, Retry) else logging.WARNING
    if not log.isEnabledFor(level):
        return
    failures = job.failures + settlement.failed
    if dead:
        words = f"dead after {_counted(failures, 'failure')}" if failures else "dead"
    else:
        wait = duration_text(max(settlement.due_ms - settlement.ended_ms, 0))
        next_ = "expires" if settlement.due_ms == job.expires_ms else "retry"
        words = f"failed ({failures} of {allowed + 1}), {next_} in {wait}"
    log.log(
        level,
        "%s %s: %s: %s",
        job.task,
        job.id,
        words,
        settlement.error,
        exc_info=_exc_info(error),
        extra=facts(settlement),
    )


def failed_together(settlements: Sequence[Settlement]) -> None:
    """Log how many jobs failed with the first of these, in one call. `failed` has logged it."""
    others = [each for each in settlements[1:] if each.failed]
    dead = sum(each.outcome is Outcome.DEAD for each in others)
    if others:
        log.log(
            logging.ERROR if dead else logging.WARNING,
            "%s: %s failed in the same call: %s",
            others[0].job.task,
            _counted(len(others), "more job"),
            f"{dead:,} dead, {len(others) - dead:,} to be retried",
        )


def facts(settlement: Settlement) -> dict[str, Any]:
    """What a log record says about a run beside its message."""
    job = settlement.job
    known = {**about(job), "outcome": str(settlement.outcome)}
    if settlement.started_ms is not None:
        known["took_ms"] = max(settlement.ended_ms - settlement.started_ms, 0)
        known["late_ms"] = max(settlement.started_ms - job.due_ms, 0)
    return known


def say(level: int, job: Job, words: str) -> None:
    """Log something about a job beside its runs."""
    log.log(level, "%s %s: %s", job.task, job.id, words, extra=about(job))


def about(job: Job) -> dict[str, Any]:
    """What every log record about a job has as attributes."""
    known = {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    return known if job.meta is None else {**known, "meta": job.meta}


def _exc_info(error: BaseException | None) -> Any:
    cause = None if error is None else raised(error)
    return None if cause is None else (type(cause), cause, users_frames(cause.__traceback__))


def _words(settlement: Settlement, cancelled: bool) -> str:
    job, started_ms = settlement.job, settlement.started_ms
    assert started_ms is not None
    took = duration_text(max(settlement.ended_ms - started_ms, 0))
    late = duration_text(max(started_ms - job.due_ms, 0))
    if settlement.outcome is Outcome.DONE:
        problem = f"; {settlement.error}" if settlement.error else ""
        return f"done in {took}, {late} late{problem}"
    if settlement.outcome is Outcome.SNOOZE:
        wait = duration_text(settlement.due_ms - settlement.ended_ms)
        return f"snoozed for {wait} after {took}, {late} late"
    if cancelled:
        return f"cancelled after {took}"
    reason = f": {settlement.error}" if settlement.error else ""
    return f"released after {took}, for another run{reason}"


_NAMES = {
    Outcome.DONE: "done",
    Outcome.RETRY: "failed",
    Outcome.DEAD: "dead",
    Outcome.SNOOZE: "snoozed",
    Outcome.RELEASE: "released",
    Outcome.EXPIRE: "expired",
}


def _percentiles(values: list[int]) -> tuple[int, int]:
    values = sorted(max(each, 0) for each in values)
    return values[len(values) // 2], values[len(values) * 99 // 100]


def _most(tasks: dict[str, int]) -> str:
    most = Counter(tasks).most_common(TASKS_NAMED)
    named = ", ".join(f"{task} {count:,}" for task, count in most)
    rest = len(tasks) - TASKS_NAMED
    return f"{named} and {_counted(rest, 'other task')}" if rest > 0 else named


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"
