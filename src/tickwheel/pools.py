"""How many threads and child processes a worker has by default."""

from __future__ import annotations

import os


def usual_threads() -> int:
    """As many as in Python's own executor."""
    return min(32, (os.cpu_count() or 1) + 4)


def usual_processes() -> int:
    """One per core."""
    return os.cpu_count() or 1
