"""Every exception that Tickwheel raises, grouped by what the caller does next."""

from __future__ import annotations

from datetime import timedelta


class TickwheelError(Exception):
    """Base of every error below except the three that tasks raise themselves."""


# --- Mend the call: the input was wrong, and nothing was stored.


class UsageError(TickwheelError, ValueError):
    """The input can't be used; the message says what to write instead."""


class BadArguments(UsageError, TypeError):
    """A task was given arguments that it doesn't take, or that JSON can't carry."""


class BadTime(UsageError):
    """A delay or a due time that is naive, negative, absurdly far, or not a time."""


class BadConfig(UsageError):
    """A setting, a store URL or a module path that can't be used."""


class BadSchedule(UsageError):
    """A cron expression, an interval or a time zone that can't be used."""


class UnknownTask(UsageError, LookupError):
    """No task of that name is registered here."""


# --- Ask again, or tell the operator: the store's side.


class StoreError(TickwheelError):
    """Something is wrong with the store."""


class StoreUnavailable(StoreError):
    """The store gave no answer, so whether it acted is unknown. Every step may be repeated."""


class StoreRefused(StoreError):
    """The store will never take this, however often it is asked: a value that is too large or of
    the wrong kind, or a bug in a statement of ours. Nothing was stored."""


class StoreIncompatible(StoreError):
    """The store's schema or server version is not one that this release can work with."""


# --- Read the outcome: answers to `job.result()`.


class ResultError(TickwheelError):
    """The job has no result to give."""


class JobUnknown(ResultError, LookupError):
    """The store has no job of that id: it never had, or it was pruned."""


class JobFailed(ResultError):
    """The job is dead; the message is its last error."""


class JobCancelled(ResultError):
    """The job was cancelled."""


class ResultTimeout(ResultError, TimeoutError):
    """The job had not ended within the time that the caller gave it."""


# --- Raised by tasks to choose how their attempt is settled.


class Retry(Exception):
    """Run again after `delay`, or after that of the task's retry policy. Counts as a failure."""

    def __init__(self, delay: str | float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "the task asked to be retried")
        self.delay = delay

    def __reduce__(self) -> tuple[type[Retry], tuple[object, ...]]:
        return type(self), (self.delay, str(self))


class Snooze(Exception):
    """Run again after `delay`. Not a failure: it uses up no retry."""

    def __init__(self, delay: str | float | timedelta) -> None:
        super().__init__("the task asked to be run later")
        self.delay = delay

    def __reduce__(self) -> tuple[type[Snooze], tuple[object, ...]]:
        return type(self), (self.delay,)


class GiveUp(Exception):
    """Don't run again: the job is dead at once, with `reason`, whatever retries are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
