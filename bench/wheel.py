"""Compare the wheel with other timer structures: the cost to add, cancel and drain one timer.

    python -m bench.wheel [--quick]

N timers are due at random times within one hour; half of them are cancelled; the rest are drained
in time order, ten steps a second, without waiting. Garbage collection stays on, as in any program.
Bytes are the growth of resident memory per timer, in a separate process. Ratios are to the wheel:
above 1, the wheel is cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import apsw
from rich.console import Console
from rich.table import Table

from bench.report import Report, Row
from tickwheel.testing import VirtualLoop
from tickwheel.wheel import TimingWheel

RESULTS = Path(__file__).parent / "results"
HOUR_MS = 3_600_000
# A program that wakes ten times a second.
STEPS = range(0, HOUR_MS + 100, 100)


class Timers(Protocol):
    """A timer structure; a drain runs through the hour."""

    def add(self, key: int, due_ms: int) -> None: ...
    def cancel(self, key: int) -> None: ...
    def drain(self) -> int: ...


class Wheel:
    def __init__(self) -> None:
        self._wheel: TimingWheel[int] = TimingWheel()

    def add(self, key: int, due_ms: int) -> None:
        self._wheel.add(key, due_ms)

    def cancel(self, key: int) -> None:
        self._wheel.remove(key)

    def drain(self) -> int:
        advance = self._wheel.advance
        return sum(len(advance(now)) for now in STEPS)


class Heap:
    """heapq; a cancelled timer stays until it comes up, which is the usual way."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._gone: set[int] = set()

    def cancel(self, key: int) -> None:
        self._gone.add(key)

    def add(self, key: int, due_ms: int) -> None:
        heapq.heappush(self._heap, (due_ms, key))

    def drain(self) -> int:
        heap, gone, count = self._heap, self._gone, 0
        for now in STEPS:
            while heap and heap[0][0] <= now:
                if heapq.heappop(heap)[1] not in gone:
                    count += 1
        return count


class CallLater:
    """The event loop's own timers, on a loop whose time jumps."""

    def __init__(self) -> None:
        self._loop = VirtualLoop()
        self._handles: dict[int, asyncio.TimerHandle] = {}
        self._count = 0

    def add(self, key: int, due_ms: int) -> None:
        self._handles[key] = self._loop.call_later(due_ms / 1000, self._rang)

    def _rang(self) -> None:
        self._count += 1

    def cancel(self, key: int) -> None:
        self._handles.pop(key).cancel()

    def drain(self) -> int:
        self._loop.run_until_complete(asyncio.sleep(HOUR_MS / 1000 + 1))
        self._loop.close()
        return self._count


class RoundCounting:
    """3,600 slots of a second and a count of rounds per timer, as in the textbooks.

    Cheap to drain because it does less: a slot's timers are unordered, with a resolution of a
    second.
    """

    def __init__(self) -> None:
        self._slots: list[dict[int, int]] = [{} for _ in range(3600)]
        self._slot_of: dict[int, int] = {}

    def add(self, key: int, due_ms: int) -> None:
        rounds, slot = divmod(due_ms // 1000, 3600)
        self._slots[slot][key] = rounds
        self._slot_of[key] = slot

    def cancel(self, key: int) -> None:
        del self._slots[self._slot_of.pop(key)][key]

    def drain(self) -> int:
        count = 0
        for slot in self._slots:
            for key, rounds in list(slot.items()):
                if rounds:
                    slot[key] = rounds - 1
                else:
                    del slot[key]
                    count += 1
        return count


class Threads:
    """One thread per timer."""

    def __init__(self) -> None:
        self._timers: dict[int, threading.Timer] = {}
        self._done = threading.Semaphore(0)

    def add(self, key: int, due_ms: int) -> None:
        # A quarter of a second for all: the cost is the thread, not the wait.
        timer = self._timers[key] = threading.Timer(0.25, self._done.release)
        timer.start()

    def cancel(self, key: int) -> None:
        timer = self._timers.pop(key)
        timer.cancel()
        timer.join()

    def drain(self) -> int:
        for _ in self._timers:
            self._done.acquire()
        return len(self._timers)


class PolledTable:
    """A SQLite table with an index on the due time, polled once a second."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tickwheel-bench-")
        self._db = apsw.Connection(f"{self._folder.name}/timers.db")
        self._db.pragma("journal_mode", "wal")
        self._db.execute("create table timer (key integer primary key, due integer)")
        self._db.execute("create index due on timer (due)")

    def add(self, key: int, due_ms: int) -> None:
        self._db.execute("insert into timer values (?, ?)", (key, due_ms))

    def cancel(self, key: int) -> None:
        self._db.execute("delete from timer where key = ?", (key,))

    def drain(self) -> int:
        count = 0
        for now in range(0, HOUR_MS + 1000, 1000):
            due = self._db.execute("select key from timer where due <= ?", (now,)).fetchall()
            if due:
                self._db.execute("delete from timer where due <= ?", (now,))
                count += len(due)
        return count


@dataclass
class Cost:
    add_ns: float
    cancel_ns: float
    drain_ns: float
    bytes_each: float


def measure(make: Callable[[], Timers], count: int, repeats: int) -> Cost:
    runs = [_in_a_process(make, count, seed) for seed in range(repeats)]
    return Cost(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in ("add_ns", "cancel_ns", "drain_ns", "bytes_each")
        )
    )


def _in_a_process(make: Callable[[], Timers], count: int, seed: int) -> Cost:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(make, count, seed, theirs))
    process.start()
    cost: Cost = ours.recv()
    process.join()
    return cost


def _measure(make: Callable[[], Timers], count: int, seed: int, pipe: Connection) -> None:
    dice = random.Random(seed)
    dues = [dice.randrange(HOUR_MS) for _ in range(count)]
    cancelled = dice.sample(range(count), count // 2)
    timers = make()
    gc.collect()
    before = _resident()

    start = time.perf_counter_ns()
    for key, due in enumerate(dues):
        timers.add(key, due)
    add = time.perf_counter_ns() - start
    bytes_each = (_resident() - before) / count

    start = time.perf_counter_ns()
    for key in cancelled:
        timers.cancel(key)
    cancel = time.perf_counter_ns() - start

    start = time.perf_counter_ns()
    drained = timers.drain()
    drain = time.perf_counter_ns() - start
    assert drained == count - len(cancelled), f"{make.__name__} drained {drained}"
    pipe.send(Cost(add / count, cancel / len(cancelled), drain / drained, bytes_each))


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


OTHERS: list[tuple[str, type[Timers], int]] = [
    ("heapq", Heap, 1_000_000),
    ("asyncio.call_later", CallLater, 1_000_000),
    ("round-counting wheel", RoundCounting, 1_000_000),
    ("polled SQLite table", PolledTable, 10_000),
    ("a thread each", Threads, 1_000),
]


FIGURES = {"add_ns": "ns", "cancel_ns": "ns", "drain_ns": "ns", "bytes_each": "bytes"}
# The wheel's two promises, at the size where they matter: these cost at least 5 times as much.
PROMISED = {("asyncio.call_later", "add_ns"), ("heapq", "drain_ns")}


class WheelReport(Report):
    """One line per structure and size: 36 figures one below the other can't be compared."""

    def show(self) -> None:
        table = Table(title=self.title, title_justify="left", header_style="bold")
        table.add_column("timers", justify="right")
        table.add_column("kept by")
        for name in ("add", "cancel", "drain", "memory"):
            table.add_column(name, justify="right")
        lines: dict[tuple[str, str], list[str]] = {}
        for row in self.rows:
            count, name, _ = row.what.split(", ")
            mark = {True: " [green]met[/]", False: " [red]missed[/]", None: ""}[row.met]
            ratio = "" if row.ratio is None else f"  {row.ratio:6.1f}x{mark}"
            lines.setdefault((count, name), []).append(f"{row.figure:,.0f} {row.unit}{ratio}")
        for (count, name), cells in lines.items():
            table.add_row(f"{int(count):,}", name, *cells, end_section=False)
        Console(width=None if os.isatty(1) else 130).print(table)


def run(*, quick: bool) -> Report:
    sizes = [10_000, 100_000] if quick else [10_000, 100_000, 1_000_000]
    repeats = 1 if quick else 3
    report = WheelReport(
        "timers over an hour, half cancelled (ratio to the wheel; goal: at least 5x where marked)"
    )
    for count in sizes:
        ours = measure(Wheel, count, repeats)
        _rows(report, "wheel", ours, count, None)
        for name, make, most in OTHERS:
            if count <= most:
                _rows(report, name, measure(make, count, repeats), count, ours)
            elif count == sizes[0]:
                # Too slow for more timers.
                _rows(report, name, measure(make, most, repeats), most, ours)
    return report


def _rows(report: Report, name: str, cost: Cost, count: int, ours: Cost | None) -> None:
    for what, unit in FIGURES.items():
        figure = getattr(cost, what)
        ratio = None if ours is None else figure / getattr(ours, what)
        row = Row(f"{count}, {name}, {what}", figure, unit, "wheel" if ours else "", ratio)
        if ratio is not None and (name, what) in PROMISED and count == 1_000_000:
            row.goal, row.met = "at least 5x", ratio >= 5
        report.add(row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 100,000 timers, once")
    options = parser.parse_args()
    report = run(quick=options.quick)
    report.show()
    report.save(RESULTS, "wheel")
    return 0 if report.met else 1


if __name__ == "__main__":
    raise SystemExit(main())
