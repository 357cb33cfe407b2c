"""What becomes of a job whose run failed: pure decisions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tickwheel.errors import BadConfig, GiveUp, Retry, Snooze
from tickwheel.job import Job, Settlement, dead, retry, snooze
from tickwheel.span import Span, span_ms

# The text of an error is for reading; a megabyte of traceback is not read.
ERROR_LIMIT = 4_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and after how long, a failed job runs again.

    The n-th retry comes `first * factor**(n-1)` after the failure, at most `cap`, plus a random
    part of up to `jitter`, so that jobs which failed together don't come back together. With the
    defaults: 5 retries after about 2, 4, 8, 16 and 32 seconds, then the job is dead.

    `on` overrides the policy for exceptions of a type or its subclasses (the nearest base class
    wins); None there means: don't retry, the job is dead at once.

        RetryPolicy(retries=8, on={RateLimited: RetryPolicy(first="1m"), ValueError: None})
    """

    retries: int = 5
    first: Span = 2.0
    factor: float = 2.0
    cap: Span = 300.0
    jitter: Span | None = None  # None: as much as `first`
    on: Mapping[type[BaseException], RetryPolicy | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_retries(self.retries)
        # Written so that a factor which is not a number fails too.
        if not (isinstance(self.factor, (int, float)) and 1 <= self.factor < math.inf):
            raise BadConfig(f"factor={self.factor!r}: it is 1 or more, as delays may not shrink")
        for value in (self.first, self.cap, 0 if self.jitter is None else self.jitter):
            span_ms(value)

    def for_error(self, error: BaseException) -> RetryPolicy | None:
        """The policy that holds for this exception; None where it is not to be retried."""
        for base in type(error).__mro__:
            if base in self.on:
                return self.on[base]
        return self

    def delay_ms(self, failures: int, rand: Callable[[], float] = random.random) -> int:
        """How long to wait after the given number of failures (1 or more)."""
        first, cap = span_ms(self.first), span_ms(self.cap)
        try:
            grown = min(first * self.factor ** (failures - 1), cap)
        except OverflowError:
            grown = cap
        jitter = first if self.jitter is None else span_ms(self.jitter)
        return int(grown + rand() * jitter)


def checked_retries(retries: int) -> int:
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise BadConfig(f"retries={retries!r}: a number of retries is 0 or more")
    return retries


def decide(
    job: Job,
    error: BaseException,
    policy: RetryPolicy,
    *,
    started_ms: int,
    ended_ms: int,
    rand: Callable[[], float] = random.random,
) -> Settlement:
    """Settle a run that raised."""
    if isinstance(error, Snooze):
        due_ms = ended_ms + span_ms(error.delay)
        return snooze(job, due_ms=due_ms, started_ms=started_ms, ended_ms=ended_ms)

    text = describe(error)
    rule = policy.for_error(error)
    if rule is None or isinstance(error, GiveUp):
        return dead(job, error=text, started_ms=started_ms, ended_ms=ended_ms)

    failures = job.failures + 1
    allowed = rule.retries if job.retries is None else job.retries
    if failures > allowed:
        return dead(job, error=text, started_ms=started_ms, ended_ms=ended_ms)

    asked = error.delay if isinstance(error, Retry) else None
    delay = rule.delay_ms(failures, rand) if asked is None else span_ms(asked)
    due_ms = ended_ms + delay
    return retry(job, due_ms=due_ms, error=text, started_ms=started_ms, ended_ms=ended_ms)


def describe(error: BaseException) -> str:
    """One line that names the exception, bounded in length, which any store can keep."""
    try:
        words = " ".join(str(error)[:ERROR_LIMIT].split())
    except BaseException:
        words = "(its message can't be read)"
    words = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    if isinstance(error, (GiveUp, Retry)) and words:
        return words[:ERROR_LIMIT]
    name = type(error).__qualname__
    return (f"{name}: {words}" if words else name)[:ERROR_LIMIT]
