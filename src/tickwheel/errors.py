"""Every exception that Tickwheel raises, grouped by what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

# How many characters of a value a message shows.
SHOWN = 80


class TickwheelError(Exception):
    """Base class of all errors below except those that tasks raise themselves."""


# --- Fix the call: the input is wrong, and nothing was stored.


class UsageError(TickwheelError, ValueError):
    """The input is invalid; the message says what to write instead."""


class BadArguments(UsageError, TypeError):
    """A task was given arguments that it doesn't take, or that can't be written as JSON."""


class BadTime(UsageError):
    """A delay or due time is naive, negative, absurdly far away, or not a time."""


class BadConfig(UsageError):
    """A setting, a store URL or a module path is invalid."""


class BadSchedule(UsageError):
    """A cron expression, an interval or a time zone is invalid."""


class UnknownTask(UsageError, LookupError):
    """No task of that name is registered here."""


class UnknownSchedule(UsageError, LookupError):
    """The store has no schedule of that name."""


# --- Fix the app's own code, or what it depends on.


class LifespanError(TickwheelError):
    """The app's lifespan failed: when it was opened, while a worker was running, or at its end."""


# --- Retry, or tell the operator: the store failed.


class StoreError(TickwheelError):
    """Something is wrong with the store."""


class StoreUnavailable(StoreError):
    """The store did not answer, so it is unknown whether it acted. Every step may be repeated."""


class StoreRefused(StoreError):
    """The store will never accept this, so a retry is no use: a value is too large or of the wrong
    kind, or a statement of ours has a bug. Nothing was stored."""


class StoreIncompatible(StoreError):
    """This release can't work with the store's schema or server version."""


# --- Of the HTTP API's clients.


class AccessDenied(TickwheelError):
    """The API key is missing, unknown or expired, or may not do this."""


class JobsRefused(TickwheelError):
    """Some jobs of an HTTP client's `enqueue_many` were refused; all others are stored.

    `errors` has the reasons, and `handles` the others, by their index in what was given.
    """

    def __init__(self, errors: Mapping[int, TickwheelError], handles: Mapping[int, Any]) -> None:
        first = min(errors)
        total = len(errors) + len(handles)
        super().__init__(
            f"{len(errors):,} of {total:,} jobs were refused; number {first}: {errors[first]}"
        )
        self.errors = dict(errors)
        self.handles = dict(handles)

    def __reduce__(self) -> tuple[type[JobsRefused], tuple[object, ...]]:
        return type(self), (self.errors, {})


# --- Read the outcome: raised by `job.result()`.


class ResultError(TickwheelError):
    """The job has no result."""


class JobUnknown(ResultError, LookupError):
    """The store has no job with that id: it was never added, or it was pruned."""


class JobFailed(ResultError):
    """The job is dead; the message is its last error."""


class JobCancelled(ResultError):
    """The job was cancelled."""


class ResultTimeout(ResultError, TimeoutError):
    """The job did not end within the caller's timeout."""


# --- Refuse the request: raised by `webhooks.verify`.


class SignatureError(TickwheelError):
    """A request was not signed with one of the keys, not recently, or not as the standard says."""


# --- Raised by tasks to choose how their attempt is settled.


class Retry(Exception):
    """Run again after `delay`, or when the task's retry policy says. Counts as a failure."""

    def __init__(self, delay: str | float | timedelta | None = None, reason: str = "") -> None:
        super().__init__(reason or "the task asked for a retry")
        self.delay = delay

    def __reduce__(self) -> tuple[type[Retry], tuple[object, ...]]:
        return type(self), (self.delay, str(self))


class Snooze(Exception):
    """Run again after `delay`. Not a failure: it uses no retry."""

    def __init__(self, delay: str | float | timedelta) -> None:
        super().__init__("the task asked to run later")
        self.delay = delay

    def __reduce__(self) -> tuple[type[Snooze], tuple[object, ...]]:
        return type(self), (self.delay,)


class GiveUp(Exception):
    """Don't run again: the job is dead at once, with `reason`, even if retries are left."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Partial(Exception):
    """Fail some jobs of a batch, each with its own error, by their index in the list that the
    function was called with. The others are done, with their results if there are any.

    `results` is as long as that list; the entries of failed jobs are ignored. An error may be a
    Retry, a Snooze or a GiveUp.
    """

    def __init__(
        self, errors: Mapping[int, BaseException], results: Sequence[Any] | None = None
    ) -> None:
        if not isinstance(errors, Mapping):
            raise BadArguments(f"Partial({shown(errors)}): must be a dict, as in {{0: error}}")
        for index, error in errors.items():
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise BadArguments(
                    f"Partial({{{shown(index)}: …}}): must be the index of a job in its batch"
                )
            if not isinstance(error, BaseException):
                raise BadArguments(
                    f"Partial({{{index}: {shown(error)}}}): must be an exception, not "
                    f"{type(error).__name__}"
                )
        if results is not None and not isinstance(results, (list, tuple)):
            raise BadArguments(f"Partial(results={shown(results)}): must be a list")
        super().__init__(f"{len(errors)} of the batch failed")
        self.errors = dict(errors)
        self.results = results

    def __reduce__(self) -> tuple[type[Partial], tuple[object, ...]]:
        return type(self), (self.errors, self.results)


def shown(value: object) -> str:
    """A value in a message: its repr, shortened, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # Python writes no int of more than 4,300 digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A suggestion for a mistyped name, as the end of a sentence."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
