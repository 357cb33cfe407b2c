"""What the instances note, outside of any store: runs line by line, and counts of queries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tickwheel.clock import SystemClock
from tickwheel.score.contest import TAKES_S, JobRun, Queries

# How often the counts are written: what a killed instance asked after that is not counted.
WRITE_S = 0.2

_clock = SystemClock()


def now_ms() -> float:
    return _clock.now_ns() / 1e6


class Notebook:
    """The notes of one instance. A run is one write to a file, so `kill -9` loses none."""

    def __init__(self, folder: Path, instance: int) -> None:
        self.instance = instance
        self._ready = folder / f"ready-{instance}"
        self.queries = Queries()
        self._counts = folder / f"queries-{instance}.json"
        path = folder / f"runs-{instance}.jsonl"
        self._runs = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def ready(self) -> None:
        """Note that the instance can run jobs from now on."""
        self._ready.touch()

    async def run(self, id: str) -> None:
        """Do the work of a job."""
        started_ms = now_ms()
        self._write(JobRun(id, self.instance, started_ms))
        await asyncio.sleep(TAKES_S)
        self._write(JobRun(id, self.instance, started_ms, ended_ms=now_ms()))

    def _write(self, run: JobRun) -> None:
        os.write(self._runs, msgspec.json.encode(run) + b"\n")

    async def keep_counts(self) -> None:
        """Write the counts now and then."""
        while True:
            self.write_counts()
            await asyncio.sleep(WRITE_S)

    def write_counts(self) -> None:
        fresh = self._counts.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(self.queries))
        fresh.replace(self._counts)


def runs_in(folder: Path) -> Iterator[JobRun]:
    """All runs of all instances, each once: with its end, if it had one."""
    found: dict[tuple[int, str, float], JobRun] = {}
    for path in sorted(folder.glob("runs-*.jsonl")):
        for line in path.read_bytes().splitlines():
            run = msgspec.json.decode(line, type=JobRun)
            found[run.instance, run.id, run.started_ms] = run
    yield from found.values()


def ready_in(folder: Path) -> int:
    """How many instances are ready."""
    return len(list(folder.glob("ready-*")))


def queries_in(folder: Path) -> Queries:
    """The counts of all instances."""
    total = Queries()
    for path in sorted(folder.glob("queries-*.json")):
        total += msgspec.json.decode(path.read_bytes(), type=Queries)
    return total
