"""Tell an app's functions what a person on call should know: rarely, and without harm.

Whatever is noticed waits in a short queue for one loop that calls the functions, so that neither
their time nor their errors reach the runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tickwheel.clock import StoreClock
from tickwheel.concurrency import cancel_all
from tickwheel.duration import duration_text, moment
from tickwheel.engine.counts import Counts
from tickwheel.engine.reconnect import Reconnecting
from tickwheel.job import Job, Settlement, State
from tickwheel.objective import Objective, Tally, misses
from tickwheel.store import Query, Store, WorkerInfo
from tickwheel.unserved import unserved_tasks

log = logging.getLogger("tickwheel")

# One alert per kind and subject in this time; so many subjects are remembered.
QUIET_MS = 300_000
SUBJECTS = 1_000
# How many alerts wait for the functions, and how long one call of a function may take.
ROOM = 100
CALL_S = 30.0
# How long the last alerts of a worker that stops may take.
LAST_S = 5.0
# How often punctuality is judged, over these windows, and the store is asked about its queues.
LOOK_S = 15.0
SHORT_MS, LONG_MS = 300_000, 3_600_000
# How many queues without a worker are looked at.
QUEUES_READ = 20


class AlertKind(StrEnum):
    """What an alert is about."""

    # A job is dead.
    DEAD = "dead"
    # So many runs were late that the objective is missed.
    LATE = "late"
    # Jobs are due, and no running worker serves their queue and knows their task.
    UNSERVED = "unserved"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that a person on call should know."""

    kind: AlertKind
    # What it is about: a task, a queue, or a queue and a task.
    subject: str
    words: str
    at: datetime
    task: str | None = None
    queue: str | None = None
    # One of the jobs.
    job_id: str | None = None
    # How many alerts of this kind and subject were left out since the last one.
    left_out: int = 0


Hook = Callable[[Alert], Awaitable[object]]


class Alerts:
    """The alerts of one worker."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        counts: Counts,
        store: Store,
        clock: StoreClock,
        *,
        worker: str,
        app: str,
        objective: Objective | None = None,
    ) -> None:
        self._hooks = hooks
        self._counts = counts
        self._store = store
        self._clock = clock
        self._reconnecting = Reconnecting(clock)
        self._worker = worker
        self._app = app
        self._objective = objective
        self._gate = Gate()
        self._waiting: asyncio.Queue[Alert | None] = asyncio.Queue(ROOM)
        self._stopping = asyncio.Event()
        # How many runs there had been, and when, from the oldest of the long window on.
        self._tallies: deque[tuple[int, Tally]] = deque(maxlen=int(LONG_MS / 1000 / LOOK_S) + 2)

    def stop(self) -> None:
        """The worker has ended: tell what is left, within a few seconds."""
        self._stopping.set()

    async def run(self) -> None:
        """Notice and tell until `stop` is called."""
        self._counts.on_dead.append(self._died)
        looking = asyncio.create_task(self._look_now_and_then())
        telling = asyncio.create_task(self._tell_all())
        try:
            await self._stopping.wait()
            await cancel_all(looking)
            self._put(None)
            await asyncio.wait([telling], timeout=LAST_S)
        finally:
            self._counts.on_dead.remove(self._died)
            for task in (looking, telling):
                task.cancel()
            # A function may ignore that.
            await asyncio.wait([looking, telling], timeout=LAST_S)

    # --- Notice

    def _died(self, settlement: Settlement) -> None:
        job = settlement.job
        self._alert(
            AlertKind.DEAD,
            job.task,
            f"job {job.id} of task {job.task} is dead: {settlement.error}",
            task=job.task,
            queue=job.queue,
            job_id=job.id,
        )

    async def _look_now_and_then(self) -> None:
        while True:
            try:
                self._judge_punctuality()
                await self._find_unserved()
            except Exception:
                log.exception("could not look for what to alert of")
            await asyncio.sleep(LOOK_S)

    def _judge_punctuality(self) -> None:
        if self._objective is None:
            return
        now_ms, tally = self._clock.monotonic_ms(), self._counts.tally
        self._tallies.append((now_ms, tally))
        short, long = (
            tally - tally_at(self._tallies, now_ms - window_ms) for window_ms in (SHORT_MS, LONG_MS)
        )
        if misses(self._objective, short, long):
            words = (
                f"{short.late_share:.1%} of {short.total:,} runs in the last "
                f"{duration_text(SHORT_MS)} were late; the objective is {self._objective}"
            )
            self._alert(AlertKind.LATE, self._app, words)

    async def _find_unserved(self) -> None:
        """One worker of the app is enough to ask."""
        now_ms = self._clock.now_ms()
        workers = await self._reconnecting.once(lambda: self._store.workers(now_ms=now_ms))
        if not workers or not speaks(self._worker, self._app, workers):
            return
        parked = await self._reconnecting.once(self._store.parked) or []
        due = [job for job in parked if job.due_ms <= now_ms]
        for each in unserved_tasks(due, workers):
            self._alert(
                AlertKind.UNSERVED,
                f"{each.queue}/{each.task}",
                each.words(now_ms),
                task=each.task,
                queue=each.queue,
                job_id=each.job,
            )
        await self._find_unserved_queues(workers, now_ms)

    async def _find_unserved_queues(self, workers: Sequence[WorkerInfo], now_ms: int) -> None:
        served = {queue for worker in workers for queue in worker.queues}
        queues = await self._reconnecting.once(self._store.queues) or []
        alone = [
            each.name
            for each in queues
            if each.waiting and not each.paused and each.name not in served
        ]
        for name in alone[:QUEUES_READ]:
            job = await self._first_waiting(name)
            if job is not None and job.due_ms <= now_ms:
                words = f"queue {name} has due jobs, and no running worker serves it"
                self._alert(
                    AlertKind.UNSERVED, name, words, task=job.task, queue=name, job_id=job.id
                )

    async def _first_waiting(self, queue: str) -> Job | None:
        query = Query(state=State.WAITING, queue=queue)
        page = await self._reconnecting.once(lambda: self._store.find(query, limit=1))
        return None if page is None else next(iter(page.jobs), None)

    # --- Tell

    def _alert(
        self,
        kind: AlertKind,
        subject: str,
        words: str,
        *,
        task: str | None = None,
        queue: str | None = None,
        job_id: str | None = None,
    ) -> None:
        now_ms = self._clock.now_ms()
        left_out = self._gate.passes((kind, subject), self._clock.monotonic_ms())
        if left_out is None:
            return
        alert = Alert(
            kind=kind,
            subject=subject,
            words=words,
            at=moment(now_ms),
            task=task,
            queue=queue,
            job_id=job_id,
            left_out=left_out,
        )
        self._put(alert)

    def _put(self, alert: Alert | None) -> None:
        try:
            self._waiting.put_nowait(alert)
        except asyncio.QueueFull:
            log.error("an alert was dropped: on_alert is too slow for more than %d", ROOM)

    async def _tell_all(self) -> None:
        while (alert := await self._waiting.get()) is not None:
            for hook in self._hooks:
                await self._tell(hook, alert)

    async def _tell(self, hook: Hook, alert: Alert) -> None:
        try:
            async with asyncio.timeout(CALL_S):
                await hook(alert)
        except (Exception, asyncio.CancelledError, SystemExit):
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # the worker ends
            log.exception("on_alert failed; not told: %s", alert.words)


class Gate:
    """Lets one alert of each kind and subject through, and then none for a while."""

    def __init__(self) -> None:
        # When each last passed, and how many did not since, the one that passed last at the end.
        self._last: dict[tuple[str, str], tuple[int, int]] = {}

    def passes(self, key: tuple[str, str], now_ms: int) -> int | None:
        """How many were left out since the last one that passed; None if this one is too."""
        passed_ms, left_out = self._last.get(key, (None, 0))
        if passed_ms is not None and now_ms - passed_ms < QUIET_MS:
            self._last[key] = passed_ms, left_out + 1
            return None
        self._last.pop(key, None)
        if len(self._last) >= SUBJECTS:
            del self._last[next(iter(self._last))]
        self._last[key] = now_ms, 0
        return left_out


def tally_at(tallies: Iterable[tuple[int, Tally]], since_ms: int) -> Tally:
    """The last tally taken by then; if all are later, none of the runs had been counted yet."""
    found = Tally()
    for at_ms, tally in tallies:
        if at_ms > since_ms:
            break
        found = tally
    return found


def speaks(worker: str, app: str, workers: Sequence[WorkerInfo]) -> bool:
    """Whether this worker is the one of its app that asks about queues: the first by name."""
    return worker == min((each.name for each in workers if each.app == app), default=worker)
