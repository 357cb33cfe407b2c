"""Measure a store and one worker process: adds, drain, punctuality, memory.

    python -m bench.store [--kind nats-strict] [--quick]

Everything runs in this process except for the memory figure, which needs its own process. Each
figure has a baseline from the same run, because machines differ and are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import apsw

from bench.kinds import KINDS, Fresh, Goals, Kind, Served, heard_late_s
from bench.report import Report, Row
from tickwheel import App, Job

RESULTS = Path(__file__).parent / "results"


class Subject:
    """An app on the store under test, with the tasks that the figures need."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.app = App(url)
        self.ran = 0
        self.late_ms: list[float] = []

        @self.app.task
        async def nothing() -> None:
            self.ran += 1

        @self.app.batch(size=100)
        async def nothing_together(items: list[int]) -> None:
            self.ran += len(items)

        @self.app.task
        async def on_time(due: float) -> None:
            self.late_ms.append((time.time() - due) * 1000)

        self.nothing, self.on_time = nothing, on_time
        self.nothing_together = nothing_together


@contextmanager
def on(fresh: Fresh) -> Iterator[Subject]:
    """A subject on an empty store."""
    with fresh() as url:
        yield Subject(url)


# --- Adding


async def adding(report: Report, fresh: Fresh, goals: Goals, count: int) -> None:
    with on(fresh) as subject:
        app, nothing = subject.app, subject.nothing
        async with app:
            start = time.perf_counter()
            for _ in range(count // 100):
                await nothing.using(delay=3600).enqueue()
            one_by_one = count / 100 / (time.perf_counter() - start)

            rates = []
            for _ in range(5):
                start = time.perf_counter()
                await asyncio.gather(*(nothing.using(delay=3600).enqueue() for _ in range(1000)))
                rates.append(1000 / (time.perf_counter() - start))
            together = statistics.median(rates)

            start = time.perf_counter()
            await app.enqueue_many(nothing.using(delay=3600).job() for _ in range(count))
            many = count / (time.perf_counter() - start)

    plain = plain_inserts(count)
    report.add(Row("await enqueue, one after the other", one_by_one, "jobs/s"))
    report.add(
        Row(
            *("await enqueue, 1,000 at once", together, "jobs/s", "one after the other"),
            ratio=together / one_by_one,
            goal="" if goals.together is None else f"at least {goals.together:g}x",
            met=goals.together is None or together >= goals.together * one_by_one,
        )
    )
    report.add(
        Row(
            *("enqueue_many", many, "jobs/s", "bare SQLite inserts, no index"),
            ratio=many / plain,
            goal=f"at least {goals.enqueue_many:,}/s",
            met=many >= goals.enqueue_many,
        )
    )


def plain_inserts(count: int) -> float:
    """The rate of inserts of the same size into a table without any index, 1,000 a commit."""
    with tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
        db = apsw.Connection(f"{folder}/plain.db")
        db.pragma("journal_mode", "wal")
        db.pragma("synchronous", "full")
        db.execute("create table job (a, b, c, d, e, f, g, h, i)")
        row = ("1a1e208c4618e5ac154999558f5", "nothing", "{}", "default", 1, 10**12, 10**12, 1, 1)
        start = time.perf_counter()
        for _ in range(0, count, 1000):
            with db:
                db.executemany("insert into job values (?,?,?,?,?,?,?,?,?)", [row] * 1000)
        return count / (time.perf_counter() - start)


# --- Draining


async def draining(report: Report, fresh: Fresh, kind: Kind, count: int, history: int) -> None:
    goals = kind.goals
    with on(fresh) as subject:
        drained = await drain(subject, count)
        aged = None
        if kind.age is not None:
            kind.age(subject.url, history)
            aged = await drain(subject, count)
    with on(fresh) as subject:
        batched = await drain(subject, count, subject.nothing_together.job)
    bare = await bare_tasks(count)
    report.add(
        Row(
            *("one worker drains no-op jobs", drained, "jobs/s", "bare asyncio tasks, no store"),
            ratio=drained / bare,
            goal=f"at least {goals.drain:,}/s",
            met=drained >= goals.drain,
        )
    )
    if aged is not None:
        name = f"the same, with {history:,} ended jobs in the store"
        ratio = aged / drained
        report.add(Row(name, aged, "jobs/s", "without them", ratio, "at least 0.8x", ratio >= 0.8))
    name, ratio, least = "the same in batches of 100", batched / drained, goals.batched
    report.add(
        Row(
            *(name, batched, "jobs/s", "one by one", ratio),
            goal="" if least is None else f"at least {least:g}x",
            met=least is None or ratio >= least,
        )
    )


async def drain(subject: Subject, count: int, job: Callable[[int], Job] | None = None) -> float:
    """Jobs a second, from the start of the worker until the store has every outcome. `job` makes
    other jobs than no-op ones."""
    app, ran = subject.app, subject.ran
    async with app:
        jobs = (job(n) if job else subject.nothing.job() for n in range(count))
        await app.enqueue_many(jobs)
        before = sum(queue.done for queue in await app.queues())
        start = time.perf_counter()
        async with app.worker(concurrency=500):
            while subject.ran - ran < count:
                await asyncio.sleep(0.02)
            while (await app.queues())[0].done - before < count:
                await asyncio.sleep(0.005)
            return count / (time.perf_counter() - start)


async def bare_tasks(count: int) -> float:
    async def nothing() -> None: ...

    start = time.perf_counter()
    for _ in range(0, count, 500):
        await asyncio.gather(*(asyncio.create_task(nothing()) for _ in range(500)))
    return count / (time.perf_counter() - start)


# --- Punctuality


async def punctuality(report: Report, fresh: Fresh, goals: Goals, waiting: int, count: int) -> None:
    with on(fresh) as subject:
        app = subject.app
        async with app:
            far = subject.nothing.using(delay="7d")
            await app.enqueue_many([far.job() for _ in range(waiting)])
            baseline = await bare_timers(count // 2)
            start = time.time() + 2
            dues = [start + 10 * n / count for n in range(count)]
            await app.enqueue_many(
                [
                    subject.on_time.using(at=datetime.fromtimestamp(due, UTC)).job(due)
                    for due in dues
                ]
            )
            async with app.worker():
                while len(subject.late_ms) < count:
                    await asyncio.sleep(0.1)
    late = sorted(subject.late_ms)
    p50, p99 = statistics.median(late), late[int(len(late) * 0.99)]
    timer_p50, timer_p99 = statistics.median(baseline), baseline[int(len(baseline) * 0.99)]
    name = f"lateness of {count:,} jobs over 10 s, {waiting:,} waiting"
    call_at = "a bare asyncio timer"
    report.add(
        Row(
            f"{name}: p50",
            p50,
            "ms",
            call_at,
            p50 / timer_p50,
            under(goals.p50_ms),
            p50 < goals.p50_ms,
        )
    )
    report.add(
        Row(
            f"{name}: p99",
            p99,
            "ms",
            call_at,
            p99 / timer_p99,
            under(goals.p99_ms),
            p99 < goals.p99_ms,
        )
    )
    report.add(Row(f"{name}: max", late[-1], "ms"))
    early = sum(ms < 0 for ms in late)
    report.add(Row(f"{name}: early", early, "jobs", goal="none", met=early == 0))


def under(ms: float) -> str:
    return f"under {ms:g} ms"


async def bare_timers(count: int) -> list[float]:
    """How late the event loop's own timers are, over 5 s: no scheduler can beat that here."""
    loop = asyncio.get_running_loop()
    late: list[float] = []
    start = loop.time() + 0.1

    def rang(due: float) -> None:
        late.append((loop.time() - due) * 1000)

    for n in range(count):
        due = start + 5 * n / count
        loop.call_at(due, rang, due)
    await asyncio.sleep(5.3)
    return sorted(late)


# --- Results

CALLERS = 1_000


def results(report: Report, fresh: Fresh, goals: Goals) -> None:
    """Callers that wait for results of a worker in another process."""
    with on(fresh) as subject, tempfile.TemporaryDirectory(prefix="tickwheel-bench-") as folder:
        late = sorted(heard_late_s(subject.url, Path(folder), CALLERS, app=subject.app))
    p50_ms, p99_ms = statistics.median(late) * 1000, late[int(len(late) * 0.99)] * 1000
    name, most = f"{CALLERS:,} callers wait: from the end of a job to its result", goals.heard_ms
    report.add(Row(f"{name}, p50", p50_ms, "ms", goal=under(most), met=p50_ms < most))
    report.add(Row(f"{name}, p99", p99_ms, "ms"))


# --- Memory


def memory(report: Report, served: Served, waiting: int) -> None:
    """The memory of an idle worker process with an empty store and with many waiting jobs, and of
    the server with those jobs."""
    with on(served.fresh) as subject:
        bare = served.weigh() if served.weigh else 0.0
        empty = _idle(subject.url)

        async def fill() -> None:
            async with subject.app:
                far = subject.nothing.using(delay="30d")
                for _ in range(waiting // 50_000):
                    await subject.app.enqueue_many(far.job() for _ in range(50_000))

        asyncio.run(fill())
        full = _idle(subject.url)
        if served.weigh is not None and served.restart is not None:
            weight = served.weigh()
            start = time.perf_counter()
            served.restart()
            counted = asyncio.run(_count(subject))
            took = time.perf_counter() - start
            name = f"server, {waiting:,} jobs waiting"
            report.add(Row(name, weight, "MB", "empty server", ratio=weight / bare))
            name = "the same server, killed and restarted, until it has counted them"
            report.add(Row(name, took, "s", goal="none lost", met=counted == waiting))
            report.add(Row("the same server after that", served.weigh(), "MB"))
    report.add(Row("idle worker, empty store", empty, "MB"))
    report.add(
        Row(
            *(f"idle worker, {waiting:,} jobs waiting", full, "MB", "empty store"),
            ratio=full / empty,
            goal="under 100 MB",
            met=full < 100,
        )
    )


async def _count(subject: Subject) -> int:
    async with subject.app:
        return sum(queue.waiting for queue in await subject.app.queues())


def _idle(url: str) -> float:
    words = [sys.executable, "-m", "bench.idle", url]
    return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def run(kind: str = "sqlite", *, quick: bool) -> Report:
    report = Report(f"{kind} store and one worker")
    scale = 10 if quick else 1
    goals = KINDS[kind].goals
    with KINDS[kind].serve() as served:
        fresh = served.fresh
        asyncio.run(adding(report, fresh, goals, 100_000 // scale))
        asyncio.run(draining(report, fresh, KINDS[kind], 100_000 // scale, 1_000_000 // scale))
        asyncio.run(punctuality(report, fresh, goals, 100_000 // scale, 2_000 // scale))
        results(report, fresh, goals)
    with KINDS[kind].serve() as served:
        memory(report, served, 1_000_000 // scale)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, default="sqlite", help="the store to measure")
    parser.add_argument("--quick", action="store_true", help="a tenth of the jobs")
    options = parser.parse_args()
    report = run(options.kind, quick=options.quick)
    report.show()
    report.save(RESULTS, f"store-{options.kind}")
    return 0 if report.met else 1


if __name__ == "__main__":
    raise SystemExit(main())
