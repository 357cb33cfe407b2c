"""Adds jobs with one library and reports what that took: `python drive.py PROGRAM`.

Runs in that library's environment, so it uses the standard library only. Requests and answers are
lines of JSON. A program has some of these functions, each of them sync or async:

    open()                    connect, and create what the store needs
    add(n), add_async(n)      add one job, to run at once
    add_many(numbers, delay)  add many, to run at once or after `delay` seconds
    add_batch(numbers)        add many that run as batches
    add_at(n, due)            add one that runs at this time, in seconds since the epoch
    call(n)                   add one, wait for its result and return that
    work(), rest()            start and stop a worker in this process, if that is the only place
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import record

# How many calls are under way at the same time where the library is async.
AT_ONCE = 200
LATER_S = 3600.0


class Requests:
    """What can be asked for: each public method is a request."""

    def __init__(self, program: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._program = program
        self._loop = loop
        self._numbers = itertools.count(1)

    def open(self) -> dict[str, Any]:
        if hasattr(self._program, "open"):
            self._wait_for(self._program.open)
        names = ("add", "add_async", "add_many", "add_batch", "add_at", "call", "work")
        return {"can": [name for name in names if hasattr(self._program, name)]}

    # --- Adding

    def one_by_one(self, how: str, seconds: float) -> dict[str, Any]:
        """Add one job after the other for so long."""
        add, numbers = getattr(self._program, how), self._numbers
        count, start = 0, time.perf_counter()
        end = start + seconds
        if not inspect.iscoroutinefunction(add):
            while time.perf_counter() < end:
                add(next(numbers))
                count += 1
            return _rate(count, time.perf_counter() - start)

        async def adding() -> int:
            count = 0
            while time.perf_counter() < end:
                await add(next(numbers))
                count += 1
            return count

        return _rate(self._loop.run_until_complete(adding()), time.perf_counter() - start)

    def at_once(self, count: int, seconds: float) -> dict[str, Any]:
        """Add so many at the same time, again and again for so long."""

        async def adding() -> int:
            added = 0
            while time.perf_counter() < end:
                numbers = itertools.islice(self._numbers, count)
                await asyncio.gather(*map(self._program.add_async, numbers))
                added += count
            return added

        start = time.perf_counter()
        end = start + seconds
        return _rate(self._loop.run_until_complete(adding()), time.perf_counter() - start)

    def in_bulk(self, count: int, seconds: float) -> dict[str, Any]:
        """Add so many in one call, again and again for so long."""
        added, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            self._wait_for(self._program.add_many, self._next(count), None)
            added += count
        return _rate(added, time.perf_counter() - start)

    def fill(self, count: int, seconds: float, later: bool, batch: bool = False) -> dict[str, Any]:
        """Add so many by the quickest way, or as many as this takes `seconds` for."""
        program, delay = self._program, LATER_S if later else None
        added, start = 0, time.perf_counter()
        while added < count and time.perf_counter() - start < seconds:
            some = min(1000, count - added)
            if batch:
                self._wait_for(program.add_batch, self._next(some))
            elif hasattr(program, "add_many"):
                self._wait_for(program.add_many, self._next(some), delay)
            elif later:
                self._each(program.add_at, [(n, time.time() + LATER_S) for n in self._next(some)])
            else:
                self._each(self._add, [(n,) for n in self._next(some)])
            added += some
        return _rate(added, time.perf_counter() - start)

    # --- Running

    def work(self) -> dict[str, Any]:
        self._wait_for(self._program.work)
        return {}

    def rest(self) -> dict[str, Any]:
        self._wait_for(self._program.rest)
        return {}

    def until_ran(self, count: int, seconds: float) -> dict[str, Any]:
        """Wait until so many runs are recorded in all, at most so long."""
        self._until(lambda: record.runs() >= count, seconds)
        times = [at for _, at in record.entries()]
        return {"runs": len(times), "times": _thinned(times)}

    def probe(self) -> dict[str, Any]:
        """Add one job, to see when the workers are up; returns how many had run before."""
        before = record.runs()
        self._wait_for(self._add, *self._next(1))
        return {"runs": before}

    @property
    def _add(self) -> Callable[..., Any]:
        return getattr(self._program, "add_async", None) or self._program.add

    def starts(self, count: int, gap_s: float, patience_s: float) -> dict[str, Any]:
        """How long after each of a few calls its job starts, in milliseconds."""
        called: dict[int, int] = {}
        before = record.runs()

        async def adding() -> None:
            for n in self._next(count):
                called[n] = time.time_ns()
                done = self._add(n)
                if inspect.isawaitable(done):
                    await done
                # Random, so that no poll of the library keeps step.
                await asyncio.sleep(random.uniform(0.5, 1.5) * gap_s)

        self._loop.run_until_complete(adding())
        self._until(lambda: record.runs() - before >= count, patience_s)
        ran = dict(record.entries(before))
        took = [(ran[n] - at) / 1e6 for n, at in called.items() if n in ran]
        return {"ms": took, "missing": count - len(took)}

    def calls(self, count: int, seconds: float) -> dict[str, Any]:
        """How long each of a few calls takes until its result is here, in milliseconds."""
        took: list[float] = []
        end = time.perf_counter() + seconds
        for n in self._next(count):
            start = time.perf_counter()
            result = self._wait_for(self._program.call, n)
            took.append((time.perf_counter() - start) * 1000)
            if result != n:
                raise ValueError(f"the result of {n} is {result!r}")
            if time.perf_counter() > end:
                break
        return {"ms": took}

    def spread(self, count: int, over_s: float, lead_s: float, patience_s: float) -> dict[str, Any]:
        """How late each of so many jobs starts that are due evenly over some seconds, in
        milliseconds: below zero, it was early."""
        before, first = record.runs(), time.time() + lead_s
        due = {n: first + i * over_s / count for i, n in enumerate(self._next(count))}
        self._each(self._program.add_at, list(due.items()))
        added_s = time.time() - first + lead_s
        left = first + over_s - time.time() + patience_s
        self._until(lambda: record.runs() - before >= count, left)
        ran = dict(record.entries(before))
        late = [ran[n] / 1e6 - at * 1e3 for n, at in due.items() if n in ran]
        return {"ms": late, "missing": count - len(late), "added_s": added_s}

    # --- Helpers

    def _next(self, count: int) -> list[int]:
        return list(itertools.islice(self._numbers, count))

    def _wait_for(self, function: Callable[..., Any], *args: Any) -> Any:
        async def called() -> Any:
            done = function(*args)
            return await done if inspect.isawaitable(done) else done

        if inspect.iscoroutinefunction(function):
            return self._loop.run_until_complete(called())
        return function(*args)

    def _each(self, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> None:
        """Call it for each; async calls run side by side."""
        if not inspect.iscoroutinefunction(function):
            for args in calls:
                function(*args)
            return

        async def together() -> None:
            for at in range(0, len(calls), AT_ONCE):
                await asyncio.gather(*(function(*args) for args in calls[at : at + AT_ONCE]))

        self._loop.run_until_complete(together())

    def _until(self, happened: Callable[[], bool], seconds: float) -> None:
        async def waiting() -> None:
            end = time.perf_counter() + seconds
            while not happened() and time.perf_counter() < end:
                await asyncio.sleep(0.01)

        self._loop.run_until_complete(waiting())


def _rate(count: int, seconds: float) -> dict[str, Any]:
    return {"count": count, "seconds": seconds, "rate": count / seconds if seconds else 0.0}


def _thinned(times: list[int]) -> list[int]:
    """At most a few thousand of them, in order, with the first and the last."""
    times.sort()
    step = max(1, len(times) // 2000)
    return times[::step] + times[-1:]


def main() -> None:
    # Whatever the library prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    requests = Requests(importlib.import_module(sys.argv[1]), loop)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(requests, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
