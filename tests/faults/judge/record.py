"""The record: each process appends what it did and what it was told, one write for each line.

Processes are killed, the machine is not: what was written is there. The files stay small, so that a
process whose files may not grow, as on a full disk, can still tell what it does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

LINES_PER_FILE = 200


class Line(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened, at a moment in seconds since the epoch."""

    at: float


# --- Of producers


class Stored(Line, frozen=True):
    """An enqueue was acknowledged. `added` is what it said: whether the id was free; an outbox
    can't say that, and the job is on its way from there to the store."""

    id: str
    number: int
    added: bool
    on_its_way: bool = False


class RolledBack(Line, frozen=True):
    """A transaction with this job in it was given up."""

    id: str
    number: int


class CancelTried(Line, frozen=True):
    """Somebody is about to ask for a cancel; an answer may never come."""

    id: str


class CancelAnswered(Line, frozen=True):
    id: str
    answer: str


class Broke(Line, frozen=True):
    """A call failed in a way that repeating it can't help."""

    what: str


# --- Of workers


class Started(Line, frozen=True):
    """A run began. `run` is its own name; `not_before` comes with the job's arguments."""

    run: str
    id: str
    number: int
    attempt: int
    pid: int
    not_before: float


class Ended(Line, frozen=True):
    """A run came to its end: done, retry, snooze, dead (all as it chose), or interrupted."""

    run: str
    # As the job stood then: one that was claimed again while it ran goes on under a new number.
    attempt: int
    how: str


# --- Of the one who brings the faults about, and of all who notice that the machine is too busy


# The machine was too busy for one process, or for the store, for longer than that: then leases may
# run out that nobody brought about.
SLOW, SLOW_S = "busy machine", 0.5


class Trouble(Line, frozen=True):
    """What went wrong, from `at` until `until`, with one process or with all (pid 0)."""

    kind: str
    until: float
    pid: int = 0


class Quit(Line, frozen=True):
    """A worker or a producer ended although nobody ended it."""

    pid: int
    words: str


AnyLine = (
    Stored | RolledBack | CancelTried | CancelAnswered | Broke | Started | Ended | Trouble | Quit
)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyLine).decode


class Recorder:
    """Writes the lines of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._count = 0
        self._file = -1

    def write(self, line: Line) -> None:
        if self._count % LINES_PER_FILE == 0:
            name = f"{os.getpid()}-{self._count // LINES_PER_FILE}"
            path = os.path.join(self._folder, name)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._count += 1
        os.write(self._file, _encode(line) + b"\n")


def read(folder: Path) -> Iterable[AnyLine]:
    """All lines of all processes, in no order."""
    for path in folder.iterdir():
        for line in path.read_bytes().splitlines():
            yield _decode(line)
