"""End what a test run leaves running: servers that several tests share."""

from __future__ import annotations

import atexit
from collections.abc import Callable

_ends: list[Callable[[], None]] = []


def at_end(end: Callable[[], None]) -> None:
    """Call this when the tests are over. A worker of pytest-xdist is killed soon after that, so
    the end of the process is too late for what takes a while."""
    _ends.append(end)


def run_ends() -> None:
    while _ends:
        _ends.pop()()


# Where no pytest session ends, as in benchmarks.
atexit.register(run_ends)
