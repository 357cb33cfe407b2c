"""The record of runs: a file to which every run appends its number and its time.

The same few instructions for every library, whatever processes and threads it uses.
"""

from __future__ import annotations

import os
import struct
import time

URL = os.environ["BENCH_URL"]
PATH = os.environ["BENCH_RECORD"]

_ENTRY = struct.Struct("<qq")
_file = os.open(PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def ran(n: int) -> None:
    """Record that the job with this number runs now. Appends are atomic."""
    os.write(_file, _ENTRY.pack(n, time.time_ns()))


def runs() -> int:
    return os.stat(PATH).st_size // _ENTRY.size


def entries(after: int = 0) -> list[tuple[int, int]]:
    """Numbers and times, in nanoseconds, of the runs after so many."""
    with open(PATH, "rb") as file:
        file.seek(after * _ENTRY.size)
        data = file.read()
    return list(_ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size]))
