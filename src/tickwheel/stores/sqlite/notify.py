"""Wakes waits when another process has changed the file, within milliseconds.

SQLite keeps a counter of commits in shared memory. While somebody waits, a timer reads it.
"""

from __future__ import annotations

import asyncio
import contextlib

import apsw

from tickwheel.stores.waiting import Waiters

# How often the counter is read: 3 µs each time. More often while somebody waits for a result.
LOOK_S, QUICK_S = 0.005, 0.002
# The topic of jobs that ended.
ENDED = "ended"


class ChangeWatcher(Waiters):
    """Watches the file with a connection of its own."""

    def __init__(self, db: apsw.Connection) -> None:
        super().__init__()
        self._db = db
        self._version = self._read()
        self._timer: asyncio.TimerHandle | None = None
        # How many watch for ends of jobs.
        self.watches = 0

    def _read(self) -> int:
        version: int = self._db.pragma("data_version")
        return version

    async def listen(self) -> None:
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        pause_s = QUICK_S if self.watches else LOOK_S
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self.anyone:
            return
        self._start_timer()
        with contextlib.suppress(apsw.Error):
            version = self._read()
            if version != self._version:
                self._version = version
                self.notify()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # A wait that goes on finds the store closed when it looks again.
        self.notify()
        self._db.close()
