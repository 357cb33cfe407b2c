"""Ids of new jobs, and numbers of claims."""

from __future__ import annotations

import itertools
import os
import secrets


def new_fence() -> int:
    """A number that no other claim has; small enough for any JSON number."""
    return secrets.randbits(53)


class _Ids:
    """Ids of this process: the time, a random tag of the process, and a count.

    They sort by creation time, and neighbours differ only in their last digits, so that every index
    grows at one end.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._tag = secrets.token_hex(5)
        self._counter = itertools.count(secrets.randbits(20))

    def new(self, now_ms: int) -> str:
        return f"{now_ms:011x}{self._tag}{next(self._counter) & 0xFFFFFF:06x}"


_ids = _Ids()
# Otherwise a forked process would continue with its parent's tag and count.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_ids.restart)


def new_id(now_ms: int) -> str:
    """A new id."""
    return _ids.new(now_ms)
