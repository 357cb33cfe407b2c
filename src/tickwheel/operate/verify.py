"""Verify a store: what was due in a span of time, what ran, and what was wrong.

The rules are in `flaws` and `ticks`; here they meet a store, however many jobs it has.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tickwheel.client import Client
from tickwheel.duration import moment_text
from tickwheel.errors import BadSchedule
from tickwheel.job import HISTORY_LIMIT, Job, Outcome, State
from tickwheel.notes import schedules_of
from tickwheel.operate.bulk import BATCH
from tickwheel.operate.flaws import Flaw, FlawKind, Span, flaws_of, runs_of, unrecorded_attempts
from tickwheel.operate.ticks import TicksChecked, check_ticks
from tickwheel.schedule import Schedule, tick_of, unsealed_rule
from tickwheel.store import Query

# How many flaws of each kind are kept in full: the worst. All of them are counted.
SHOWN = 20
# How many ticks that have a job are remembered, of all schedules.
TICKS_REMEMBERED = 500_000
# How many flaws are remembered, so that a job that is read twice counts once.
FLAWS_REMEMBERED = 100_000
# Called with how many jobs were read, and about how many there are.
Tell = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was checked, what was wrong, and what can't be known."""

    span: Span
    # Jobs that were due in the span, their runs that started, and ticks of schedules.
    jobs: int
    runs: int
    schedules: int
    ticks: int
    ticks_left_out: int
    # How many of each kind, and the worst of them, first.
    counts: Mapping[FlawKind, int]
    flaws: Mapping[FlawKind, Sequence[Flaw]]
    unknown: Sequence[str]

    @property
    def well(self) -> bool:
        return not any(self.counts.values())


class Verifier:
    """Sees jobs one by one, in any order, and keeps only what is wrong."""

    def __init__(self, span: Span, schedules: Iterable[Schedule], *, kept_ms: int) -> None:
        self.span = span
        self._kept_ms = kept_ms
        self._schedules = {each.name: each for each in schedules}
        self._seen: dict[str, dict[int, float]] = {name: {} for name in self._schedules}
        self._remembered = 0
        self._jobs = self._runs = 0
        # Attempts that histories no longer have, those whose worker was lost before it told, and
        # jobs that a worker holds and has not told about yet.
        self._unrecorded = self._untold = self._held = 0
        self._counts = Counter[FlawKind]()
        self._worst: dict[FlawKind, list[tuple[int, int, Flaw]]] = {kind: [] for kind in FlawKind}
        self._known: set[tuple[object, ...]] = set()

    def see(self, job: Job) -> None:
        """Check one job."""
        self._see_tick(job)
        runs = runs_of(job)
        if not (self.span.has(job.due_ms) or any(self.span.has(run.due_ms) for run in runs)):
            return
        self._jobs += 1
        self._runs += sum(self.span.has(run.due_ms) and run.started_ms is not None for run in runs)
        self._note_unknown(job)
        for flaw in flaws_of(job, self.span):
            self._keep(flaw)

    def finish(self) -> Verified:
        """Check the ticks of schedules, after all jobs."""
        ticks = TicksChecked()
        for name, schedule in self._schedules.items():
            try:
                rule = unsealed_rule(schedule.rule)
            except BadSchedule as error:
                ticks.unknown.append(f"Schedule {name} can't be read: {error}")
                continue
            seen = self._seen[name]
            found = check_ticks(schedule, rule, seen, self.span, kept_ms=self._kept_ms)
            ticks.checked += found.checked
            ticks.left_out += found.left_out
            ticks.unknown += found.unknown
            for flaw in found.flaws:
                self._keep(flaw)
            self._counts[FlawKind.MISSED] += found.missed - len(found.flaws)
        return Verified(
            span=self.span,
            jobs=self._jobs,
            runs=self._runs,
            schedules=len(self._schedules),
            ticks=ticks.checked,
            ticks_left_out=ticks.left_out,
            counts={kind: self._counts[kind] for kind in FlawKind},
            flaws={
                kind: [flaw for *_, flaw in sorted(worst, key=lambda each: each[:2], reverse=True)]
                for kind, worst in self._worst.items()
            },
            unknown=[*self._unknown(), *ticks.unknown],
        )

    def _see_tick(self, job: Job) -> None:
        name, at, _ = job.id.rpartition("@")
        if not at or name not in self._seen or (tick_ms := tick_of(job.id)) is None:
            return
        self._remembered += 1
        if self._remembered <= TICKS_REMEMBERED:
            self._seen[name][tick_ms] = float("inf") if job.ended_ms is None else job.ended_ms

    def _keep(self, flaw: Flaw) -> None:
        key = flaw.kind, flaw.id, flaw.attempt, flaw.due_ms
        if key in self._known:
            return  # a job that changed while the store was read may be seen twice
        if len(self._known) < FLAWS_REMEMBERED:
            self._known.add(key)
        self._counts[flaw.kind] += 1
        worst = self._worst[flaw.kind]
        heapq.heappush(worst, (flaw.by_ms, self._counts[flaw.kind], flaw))
        if len(worst) > SHOWN:
            heapq.heappop(worst)

    def _note_unknown(self, job: Job) -> None:
        if len(job.history) >= HISTORY_LIMIT:
            self._unrecorded += len(unrecorded_attempts(job))
        self._untold += sum(
            run.outcome is Outcome.LOST and run.started_ms is None and run.due_ms <= run.ended_ms
            for run in job.history
        )
        waits = job.state is State.RUNNING and job.started_ms is None
        self._held += waits and self.span.has(job.due_ms) and self.span.past(job.due_ms)

    def _unknown(self) -> Iterator[str]:
        if self.span.since_ms < self._kept_ms:
            yield (
                f"Jobs that ended before {moment_text(self._kept_ms)} may be pruned: what they did "
                "is gone."
            )
        if self._unrecorded:
            yield (
                f"{self._unrecorded:,} attempts are no longer in a history, which keeps the last "
                f"{HISTORY_LIMIT} of a job."
            )
        if self._untold:
            yield (
                f"{self._untold:,} attempts were lost with their worker before it told whether "
                "they had started: what ran after them may have run twice."
            )
        if self._held:
            yield (
                f"{self._held:,} due jobs are held by workers that have not told yet whether they "
                "have started."
            )
        if self._remembered > TICKS_REMEMBERED:
            yield f"There are more than {TICKS_REMEMBERED:,} ticks: some may be wrongly missed."


# --- From a store


async def verify_store(
    client: Client,
    span: Span,
    *,
    kept_ms: int,
    queue: str | None = None,
    task: str | None = None,
    tell: Tell = lambda _read, _of: None,
) -> Verified:
    """Verify what was due in this span. Jobs that ended before `kept_ms` may have been pruned.

    Reads in the order in which jobs go through their states, so that one that goes on meanwhile is
    read twice rather than missed.
    """
    schedules = [each for each in await schedules_of(client.store) if _fits(each, queue, task)]
    verifier = Verifier(span, schedules, kept_ms=kept_ms)
    queues = [each for each in await client.queues() if queue in (None, each.name)]
    total = sum(getattr(each, state) for each in queues for state in State)
    read = 0
    for query in _queries(span, queue, task):
        cursor: str | None = None
        while True:
            page = await client.find(query, cursor=cursor, limit=BATCH)
            for job in page.jobs:
                verifier.see(job)
            read += max(page.looked, len(page.jobs))
            tell(read, max(total, read))
            cursor = page.cursor
            if cursor is None:
                break
    return verifier.finish()


def _queries(span: Span, queue: str | None, task: str | None) -> Iterator[Query]:
    """What ended before the span had no run in it. What waits may have run before, whenever it is
    due next."""
    for state in State:
        from_ms = span.since_ms if state.ended else None
        yield Query(state=state, queue=queue, task=task, from_ms=from_ms)


def _fits(schedule: Schedule, queue: str | None, task: str | None) -> bool:
    try:
        rule = unsealed_rule(schedule.rule)
    except BadSchedule:
        return True
    return queue in (None, rule.queue) and task in (None, rule.task)
