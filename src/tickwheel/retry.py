"""Decide what happens to a job whose run failed. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tickwheel.checks import checked_options
from tickwheel.duration import Duration, duration_ms
from tickwheel.errors import BadConfig, GiveUp, Retry, Snooze, shown
from tickwheel.job import Job, Settlement, dead, retry, snooze
from tickwheel.traceback import ERROR_LIMIT, message, raised, traceback_text

# More than anyone waits for, and every store can keep it.
MOST_RETRIES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How many times, and after how long, a failed job runs again.

    The n-th retry comes `first * factor**(n-1)` after the failure, at most `cap`, plus a random
    delay of up to `jitter`, so that jobs that failed together don't retry together. With the
    defaults: 5 retries after about 2, 4, 8, 16 and 32 seconds, then the job is dead.

    `on` overrides the policy for exceptions of a type or its subclasses (the nearest base class
    wins); None means that the job is not retried and is dead at once.

        RetryPolicy(retries=8, on={RateLimited: RetryPolicy(first="1m"), ValueError: None})
    """

    retries: int = 5
    first: Duration = 2.0
    factor: float = 2.0
    cap: Duration = 300.0
    jitter: Duration | None = None  # None: as much as `first`
    on: Mapping[type[BaseException], RetryPolicy | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_retries(self.retries)
        _check_rules(self.on)
        # Written so that NaN fails too.
        if not (isinstance(self.factor, (int, float)) and 1 <= self.factor < math.inf):
            raise BadConfig(
                f"factor={shown(self.factor)}: must be at least 1, because delays may not shrink"
            )
        for value in (self.first, self.cap, 0 if self.jitter is None else self.jitter):
            duration_ms(value)

    def for_error(self, error: BaseException) -> RetryPolicy | None:
        """The policy for this exception; None if it is not retried."""
        for base in type(error).__mro__:
            if base in self.on:
                return self.on[base]
        return self

    def delay_ms(self, failures: int, rand: Callable[[], float] = random.random) -> int:
        """How long to wait after the given number of failures (1 or more)."""
        first, cap = duration_ms(self.first), duration_ms(self.cap)
        try:
            grown = min(first * float(self.factor) ** (failures - 1), cap)
        except OverflowError:
            grown = cap
        jitter = first if self.jitter is None else duration_ms(self.jitter)
        return int(grown + rand() * jitter)


def checked_retries(retries: int) -> int:
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise BadConfig(f"retries={shown(retries)}: must be a whole number of at least 0")
    if retries > MOST_RETRIES:
        raise BadConfig(f"retries={shown(retries)}: must be at most {MOST_RETRIES:,}")
    return retries


def _check_rules(rules: Mapping[type[BaseException], RetryPolicy | None]) -> None:
    if not isinstance(rules, Mapping):
        raise BadConfig(f"on={shown(rules)}: must be a dict, as in on={{ValueError: None}}")
    for kind, rule in rules.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise BadConfig(f"on={{{shown(kind)}: …}}: must be a class of exceptions")
        if not (rule is None or isinstance(rule, RetryPolicy)):
            raise BadConfig(
                f"on={{{kind.__name__}: {shown(rule)}}}: must be a RetryPolicy, or None for no "
                "retries"
            )


# The dataclass's own, with a guess for an option that it doesn't have.
RetryPolicy.__init__ = checked_options(RetryPolicy.__init__)  # type: ignore[method-assign]


# What a job keeps of an exception: one line, and its traceback.
Seen = tuple[str, str | None]


def look(error: BaseException) -> Seen:
    cause = raised(error)
    return describe(error), None if cause is None else traceback_text(cause)


def decide(
    job: Job,
    error: BaseException,
    policy: RetryPolicy,
    *,
    started_ms: int,
    ended_ms: int,
    rand: Callable[[], float] = random.random,
    seen: Seen | None = None,
) -> Settlement:
    """Settle a run that raised. `seen` is what `look` made of the error, if somebody has looked."""
    if isinstance(error, Snooze):
        due_ms = _in_time(job, ended_ms + duration_ms(error.delay))
        return snooze(job, due_ms=due_ms, started_ms=started_ms, ended_ms=ended_ms)

    text, traceback = look(error) if seen is None else seen
    rule = policy.for_error(error)
    failures = job.failures + 1
    if rule is None or failures > allowed(job, error, policy):
        return dead(job, error=text, traceback=traceback, started_ms=started_ms, ended_ms=ended_ms)

    chosen = error.delay if isinstance(error, Retry) else None
    delay_ms = rule.delay_ms(failures, rand) if chosen is None else duration_ms(chosen)
    return retry(
        job,
        due_ms=_in_time(job, ended_ms + delay_ms),
        error=text,
        traceback=traceback,
        started_ms=started_ms,
        ended_ms=ended_ms,
    )


def _in_time(job: Job, due_ms: int) -> int:
    """When the job is due next. One that would be due after it has expired doesn't run again, and
    is due when it expires: it need not wait longer for its end."""
    return due_ms if job.expires_ms is None else min(due_ms, job.expires_ms)


def allowed(job: Job, error: BaseException, policy: RetryPolicy) -> int:
    """How many failures of the job are retried if they are like this one."""
    rule = policy.for_error(error)
    if rule is None or isinstance(error, GiveUp):
        return 0
    return rule.retries if job.retries is None else job.retries


def describe(error: BaseException) -> str:
    """One line of bounded length that names the exception and that any store can keep."""
    words = " ".join(message(error).split())
    words = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)
    if isinstance(error, (GiveUp, Retry)) and words:
        return words[:ERROR_LIMIT]
    name = type(error).__qualname__
    return (f"{name}: {words}" if words else name)[:ERROR_LIMIT]
