"""A module whose import goes wrong in a child process, in the way that UNRULY says."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

if multiprocessing.parent_process() is not None:
    how, _, path = os.environ.get("UNRULY", "").partition(" ")
    if how == "dies":
        os._exit(7)
    if how == "dies-once" and not Path(path).exists():
        Path(path).write_text("died")
        os._exit(7)
    if how == "hangs":
        time.sleep(60)
    if how == "raises":
        raise KeyboardInterrupt
    if how == "slow":
        time.sleep(1)


def where() -> int:
    return os.getpid()
