"""The final account of the demo: what happened to every order, and whether it adds up.

Pure functions of the records: the shop's books and the jobs in the store. The check uses nothing
that the story believes it did.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Self

from tickwheel import CancelOutcome, JobInfo, Outcome, Run, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """The contents of the shop's own database."""

    orders: dict[int, str]
    pieces: int
    # How many times a parcel was requested, by order.
    parcels: dict[int, int]
    reports: list[tuple[datetime, int]]


@dataclass(frozen=True, slots=True)
class Lateness:
    """How late some jobs started."""

    jobs: int
    p50_ms: int
    p99_ms: int
    max_ms: int

    @classmethod
    def of(cls, late: Sequence[int]) -> Self:
        ranked = sorted(late) or [0]
        p50, p99 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.5, 0.99))
        return cls(len(late), p50, p99, ranked[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The result of the day; `wrong` lists what does not add up, and is empty if all is well."""

    placed: int
    paid: int
    cancelled: int
    # What happened to the cancel jobs of paid orders: cancelled, or asked to stop at the last
    # moment.
    answers: dict[str, int]
    pieces_before: int
    pieces_after: int
    punctuality: Lateness
    by_live_workers: Lateness
    in_killed_hand: Lateness
    early: int
    # Jobs of all kinds that the killed worker held, and parcels that were requested twice.
    taken_over: int
    asked_twice: int
    parcels: int
    retried: int
    dead: int
    rerun: int
    ticks: int
    wrong: list[str]


def account(
    books: Books,
    jobs: Sequence[JobInfo],
    *,
    expected: int,
    killed: set[str],
    answers: Counter[CancelOutcome],
) -> Summary:
    """The summary of the day, from only the shop's books and the jobs in the store."""
    states = Counter(books.orders.values())
    cancels = [job for job in jobs if job.task == "cancel_order" and job.state is State.DONE]
    ships = [job for job in jobs if job.task == "ship"]
    late = {job.id: late_ms(job.history) for job in cancels}
    lost = {job.id for job in jobs if _lost_by(killed, job)}
    died = [job for job in ships if _count(job, Outcome.DEAD)]
    return Summary(
        placed=len(books.orders),
        paid=states["paid"],
        cancelled=states["cancelled"],
        answers={str(answer): count for answer, count in answers.most_common()},
        pieces_before=expected,
        pieces_after=books.pieces,
        punctuality=Lateness.of(list(late.values())),
        by_live_workers=Lateness.of([ms for id, ms in late.items() if id not in lost]),
        in_killed_hand=Lateness.of([ms for id, ms in late.items() if id in lost]),
        early=early_runs(jobs),
        taken_over=len(lost),
        asked_twice=sum(count > 1 for count in books.parcels.values()),
        parcels=len(books.parcels),
        retried=sum(_count(job, Outcome.RETRY) > 0 and job not in died for job in ships),
        dead=len(died),
        rerun=sum(job.state is State.DONE for job in died),
        ticks=len(books.reports),
        wrong=what_is_wrong(books, jobs, expected),
    )


def late_ms(history: Sequence[Run]) -> int:
    """How late the last run of a done job started."""
    last = history[-1]
    assert last.started_ms is not None, "a run that is done has started"
    return last.started_ms - last.due_ms


def _lost_by(workers: set[str], job: JobInfo) -> bool:
    return any(run.outcome is Outcome.LOST and run.worker in workers for run in job.history)


def _count(job: JobInfo, outcome: Outcome) -> int:
    return sum(run.outcome is outcome for run in job.history)


def early_runs(jobs: Sequence[JobInfo]) -> int:
    runs = [run for job in jobs for run in job.history]
    return sum(run.started_ms is not None and run.started_ms < run.due_ms for run in runs)


def what_is_wrong(books: Books, jobs: Sequence[JobInfo], expected: int) -> list[str]:
    """Every broken promise, in words."""
    paid = {order for order, state in books.orders.items() if state == "paid"}
    lost = set(range(1, expected + 1)) - books.orders.keys()
    still_open = {order for order, state in books.orders.items() if state == "open"}
    # The schedule continues; only it may have a waiting job.
    unended = {job.id for job in jobs if not job.state.ended and job.task != "report_stock"}
    dead = {job.id for job in jobs if job.state is State.DEAD}
    ticks = [tick for tick, _ in books.reports]
    gaps = {(after - before).total_seconds() for before, after in pairwise(ticks)}
    checks = [
        (not lost, f"orders that were placed but are missing: {_some(lost)}"),
        (not still_open, f"orders neither paid nor cancelled: {_some(still_open)}"),
        (
            books.pieces + len(paid) == expected,
            f"stock: {books.pieces} left and {len(paid)} sold do not add up to {expected}",
        ),
        (not early_runs(jobs), f"{early_runs(jobs)} runs started before they were due"),
        (
            paid == books.parcels.keys(),
            f"parcels missing or extra: {_some(paid ^ books.parcels.keys())}",
        ),
        (not unended, f"jobs that have not ended: {_some(unended)}"),
        (not dead, f"jobs that are still dead: {_some(dead)}"),
        (gaps <= {5}, f"ticks missing or doubled: {_some(gaps)} seconds apart"),
    ]
    return [words for right, words in checks if not right]


def _some(things: set[Any]) -> str:
    shown = ", ".join(map(str, sorted(things)[:10]))
    return shown if len(things) <= 10 else f"{shown} and {len(things) - 10} more"
