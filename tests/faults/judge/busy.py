"""Whether the machine is too busy for us, as the kernel sees it."""

from __future__ import annotations

import os
import time
from pathlib import Path

# How much of its time a thread may wait for a processor before that explains anything.
STARVED = 0.5


class Waiting:
    """How much of the time the main thread of this process waits for a processor."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{os.getpid()}/schedstat")
        self._seen, self._waited_s = time.time(), self._total_s()

    def share(self) -> float:
        """Since the last time that it was asked; 0 where the kernel doesn't say."""
        now, waited_s = time.time(), self._total_s()
        share = (waited_s - self._waited_s) / max(now - self._seen, 0.001)
        self._seen, self._waited_s = now, waited_s
        return share

    def _total_s(self) -> float:
        try:
            return int(self._file.read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0
