"""Times and short words for tests of boxes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tickwheel import (
    RetryPolicy,
)
from tickwheel.testing import BoxRun

START = datetime(2026, 3, 1, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
# No jitter, so that a test can name the moments.
HOURLY = RetryPolicy(retries=3, first="1h", factor=1, jitter=0, cap="10d")


def after(runs: list[BoxRun], task: str) -> list[timedelta]:
    """When the task ran, from the start of the box."""
    return [run.at - START for run in runs if run.task == task]


def outcomes(runs: list[BoxRun]) -> list[str]:
    return [run.outcome.value for run in runs]
