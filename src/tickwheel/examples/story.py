"""A busy day in half a minute: drives the shop, and checks the result at the end.

Orders pour in, each with a deadline. The warehouse goes down and comes back. A worker is killed
with `kill -9`. `Story._play` is the script.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Self

from tickwheel import (
    CancelOutcome,
    JobHandle,
    QueueInfo,
    State,
    TickwheelError,
    WorkerInfo,
)
from tickwheel.examples.account import Books, Summary, account, late_ms
from tickwheel.examples.shop import AWAY, FOLDER, app, database, open_shop, pay_order, place_order

# The share of customers who pay.
PAYING = 0.45
# One in this many orders is shown as an event; the others are only counted.
TOLD = 25
# Upcoming deadlines are counted in slots of this length.
SLOT_S = 0.5
POLL_S = 0.2
# How long a worker may take to start, to stop, and how long all may take to finish at the end.
START_S, STOP_S, PATIENCE_S = 20.0, 5.0, 20.0

# What happened to the cancel job of a paid order, by the result of `cancel`.
BECAME = {
    CancelOutcome.CANCELLED: "is cancelled",
    CancelOutcome.REQUESTED: "is held and asked to stop",
    CancelOutcome.TOO_LATE: "had just run and found it paid",
    CancelOutcome.UNKNOWN: "is unknown",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happens when, in seconds after the sale opens."""

    rate: int = 25  # orders a second
    pay_within: float = 8  # "30 minutes" in real life
    warehouse_away: float = 11
    warehouse_back: float = 16
    kill: float = 20
    replace: float = 21.5
    sale_ends: float = 28
    rerun: float = 29
    lease: float = 2

    @property
    def orders(self) -> int:
        return int(self.rate * self.sale_ends)

    @property
    def ends(self) -> float:
        """When the last deadline has passed."""
        return self.sale_ends + self.pay_within


FULL = Timeline()
FAST = Timeline(
    pay_within=2,
    warehouse_away=2.5,
    warehouse_back=5.5,
    kill=6,
    replace=6.5,
    sale_ends=7.5,
    rerun=7.8,
)


# --- State to draw


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth showing."""

    at: float
    words: str
    style: str = ""


@dataclass(slots=True)
class WorkerSeen:
    """A worker process, as the story knows it and as it last described itself."""

    number: int
    pid: int
    killed: float | None = None
    info: WorkerInfo | None = None


@dataclass(slots=True)
class Scene:
    """The current state; the story changes it, the view draws it."""

    timeline: Timeline
    now: float = 0
    chapter: str = "The shop opens"
    orders: Counter[str] = field(default_factory=Counter)
    pieces: int = 0
    parcels: int = 0
    queues: list[QueueInfo] = field(default_factory=list)
    workers: list[WorkerSeen] = field(default_factory=list)
    # How late orders were cancelled: by live workers, and those that a dead worker held.
    late_ms: list[int] = field(default_factory=list)
    taken_over_ms: list[int] = field(default_factory=list)
    # Upcoming deadlines, by slots of SLOT_S; and those that have passed without an outcome yet.
    coming: list[int] = field(default_factory=list)
    overdue: int = 0
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Deadline:
    job: JobHandle[bool]
    falls: float


# --- The story


class Story:
    """One busy day. It changes `scene` as it goes; `run` returns the summary."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.scene = Scene(timeline, pieces=timeline.orders)
        self._loop = asyncio.get_running_loop()
        self._opened = math.inf  # not yet
        self._dice = random.Random(7)  # the same customers each time
        self._deadlines: dict[int, Deadline] = {}
        self._answers: Counter[CancelOutcome] = Counter()
        self._reports = 0

    async def run(self) -> Summary:
        """Play it from start to end; whatever happens, no worker is left running."""
        open_shop(pieces=self.timeline.orders)
        with Workers(lease_s=self.timeline.lease) as workers:
            async with app:
                await self._start(workers, 2)
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(self._watch())
                    await self._play(group, workers)
                    watching.cancel()
                await self._look()
                return await self._account()

    async def _play(self, group: asyncio.TaskGroup, workers: Workers) -> None:
        """The script, from top to bottom."""
        timeline = self.timeline
        self._opened = self._loop.time()
        self._chapter(
            f"The sale: {timeline.rate} orders a second, payable within {timeline.pay_within:g} s"
        )
        selling = group.create_task(self._sell())

        await self._until(timeline.pay_within)
        self._chapter("First deadlines: unpaid orders are cancelled and return to stock")

        await self._until(timeline.warehouse_away)
        self._chapter("The warehouse is down: jobs fail and are retried", "yellow")
        AWAY.touch()

        await self._until(timeline.warehouse_back)
        self._chapter("The warehouse is back: jobs with retries left succeed", "green")
        AWAY.unlink()

        await self._until(timeline.kill)
        self._chapter("kill -9: the busiest worker dies while it holds jobs", "bold red")
        self._kill(workers)

        await self._until(timeline.replace)
        self._chapter(
            f"A new worker starts; the dead one's jobs are taken over after {timeline.lease:g} s"
        )
        await self._start(workers, 1)

        await self._until(timeline.rerun)
        self._chapter("The sale is over; an operator reruns the dead jobs", "green")
        await self._rerun_dead()

        await self._until(timeline.ends)
        self._chapter("The last deadline has passed; now the final account")
        await selling
        await self._all_ended()

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(self._opened + moment - self._loop.time())

    def _chapter(self, title: str, style: str = "bold") -> None:
        self.scene.chapter = title
        self._tell(title, style)

    def _tell(self, words: str, style: str = "") -> None:
        self.scene.events.append(Event(self._now(), words, style))

    def _now(self) -> float:
        """Seconds since the opening, 0 before it."""
        return max(self._loop.time() - self._opened, 0.0)

    # --- Customers

    async def _sell(self) -> None:
        async with asyncio.TaskGroup() as customers:
            for order_id in range(1, self.timeline.orders + 1):
                await self._until(order_id / self.timeline.rate)
                customers.create_task(self._customer(order_id))

    async def _customer(self, order_id: int) -> None:
        """Places an order, and pays in time or not at all."""
        wait = self.timeline.pay_within * self._dice.uniform(0.05, 0.95)
        pays = self._dice.random() < PAYING
        falls = self._now() + self.timeline.pay_within
        job = await place_order(order_id, pay_within=self.timeline.pay_within)
        self._deadlines[order_id] = Deadline(job, falls)
        if pays:
            await asyncio.sleep(wait)
            await self._pay(order_id, wait)

    async def _pay(self, order_id: int, wait: float) -> None:
        answer = await pay_order(order_id)
        if answer is None:
            self._tell(f"order {order_id}: the payment came too late", "yellow")
            return
        self._answers[answer] += 1
        self._deadlines.pop(order_id, None)
        if order_id % TOLD == 0:
            self._tell(
                f"order {order_id}: paid after {wait:.1f} s; its cancel job {BECAME[answer]}"
            )

    # --- Operators

    async def _start(self, workers: Workers, count: int) -> None:
        """Start workers, and wait until they are running."""
        new = [workers.start() for _ in range(count)]
        self.scene.workers += new
        deadline = self._loop.time() + START_S
        while not all(each.info for each in new):
            workers.must_be_running(new)
            if self._loop.time() > deadline:
                raise TickwheelError(f"the workers did not start within {START_S:g} s")
            await asyncio.sleep(0.05)
            await self._look_at_workers()
        for each in new:
            self._tell(f"worker {each.number} is running, pid {each.pid}", "cyan")

    def _kill(self, workers: Workers) -> None:
        victim = max(self.scene.workers, key=lambda each: each.info.held if each.info else 0)
        workers.kill(victim.number)
        victim.killed = self._now()
        self._tell(f"worker {victim.number} (pid {victim.pid}) was killed with kill -9", "red")

    async def _rerun_dead(self) -> None:
        dead = [info.id async for info in app.find_all(state="dead")]
        answers = await app.rerun(dead)
        self._tell(f"{sum(answers)} dead jobs are rerun now that the warehouse is back", "green")

    async def _all_ended(self) -> None:
        """Wait, for a limited time, until no deadline and no parcel request is open."""
        deadline = self._loop.time() + PATIENCE_S
        while self._loop.time() < deadline:
            if not any(queue.waiting or queue.running for queue in await app.queues()):
                break
            await asyncio.sleep(0.1)

    # --- Watching

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        scene = self.scene
        books = await asyncio.to_thread(read_books)
        scene.orders = Counter(books.orders.values())
        scene.pieces, scene.parcels = books.pieces, len(books.parcels)
        for tick, pieces in books.reports[self._reports :]:
            self._tell(f"schedule: tick of {tick:%H:%M:%S}, {pieces} pieces in stock", "blue")
        self._reports = len(books.reports)
        scene.queues = await app.queues()
        await self._look_at_workers()
        await self._look_at_deadlines()
        self.look_ahead()

    async def _look_at_workers(self) -> None:
        seen = {each.pid: each for each in await app.workers()}
        for worker in self.scene.workers:
            worker.info = seen.get(worker.pid, worker.info)

    async def _look_at_deadlines(self) -> None:
        """Find the orders cancelled since the last look, and how late that was."""
        passed = [each for each in self._deadlines.items() if each[1].falls < self._now()]
        for order_id, deadline in passed:
            info = await deadline.job.info()
            # A payment may have come first in the meantime.
            if info.state is State.DONE and order_id in self._deadlines:
                del self._deadlines[order_id]
                self._note(order_id, late_ms(info.history), taken_over=info.takeovers > 0)

    def _note(self, order_id: int, late: int, *, taken_over: bool) -> None:
        if taken_over:
            self.scene.taken_over_ms.append(late)
            self._tell(f"order {order_id}: taken over, cancelled {late:,} ms late", "magenta")
            return
        self.scene.late_ms.append(late)
        if order_id % TOLD == 0:
            self._tell(f"order {order_id}: not paid; cancelled {late} ms after its deadline")

    def look_ahead(self) -> None:
        """Count the upcoming deadlines again: they come closer without any event."""
        scene, now = self.scene, self._now()
        scene.now = now
        scene.coming = [0] * math.ceil(self.timeline.pay_within / SLOT_S)
        ahead = [deadline.falls - now for deadline in self._deadlines.values()]
        for seconds in ahead:
            if seconds >= 0:
                scene.coming[min(int(seconds / SLOT_S), len(scene.coming) - 1)] += 1
        # Not those of the last moment: we may just not have seen their outcome yet.
        scene.overdue = sum(seconds < -2 * POLL_S for seconds in ahead)

    async def _account(self) -> Summary:
        killed = {
            each.info.name for each in self.scene.workers if each.killed is not None and each.info
        }
        return account(
            await asyncio.to_thread(read_books),
            [info async for info in app.find_all()],
            expected=self.timeline.orders,
            killed=killed,
            answers=self._answers,
        )


def read_books() -> Books:
    with database() as db:
        [pieces] = db.execute("SELECT pieces FROM stock").fetchone()
        reports = db.execute("SELECT tick, pieces FROM reports ORDER BY tick").fetchall()
        return Books(
            orders=dict(db.execute("SELECT id, state FROM orders")),
            pieces=pieces,
            parcels=dict(db.execute("SELECT order_id, requests FROM parcels")),
            reports=[(datetime.fromisoformat(tick), left) for tick, left in reports],
        )


# --- Worker processes


class Workers:
    """`tickwheel worker` processes. None of them outlives the block, or this process."""

    def __init__(self, *, lease_s: float) -> None:
        self._lease_s = lease_s
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        # Workers stop when its write end closes, however we end.
        self._lifeline = os.pipe()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            for end in self._lifeline:
                os.close(end)

    def start(self) -> WorkerSeen:
        number = len(self._processes) + 1
        command = [
            *(sys.executable, "-m", "tickwheel", "worker", "tickwheel.examples.shop:app"),
            *("--lease", f"{self._lease_s}s", "--grace", "2s", "--log-level", "warning"),
            *("--parent", str(self._lifeline[0])),
        ]
        # In the demo's own folder and without the user's settings, which are for other apps.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TICKWHEEL_")}
        with self._log(number).open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=FOLDER,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[self._lifeline[0]],
            )
        self._processes.append(process)
        return WorkerSeen(number, process.pid)

    def kill(self, number: int) -> None:
        self._processes[number - 1].kill()
        self._processes[number - 1].wait()

    def must_be_running(self, workers: Sequence[WorkerSeen]) -> None:
        """Raise, with its last log line, if one of these has ended by itself."""
        for number in [each.number for each in workers]:
            if self._processes[number - 1].poll() is not None:
                words = self._log(number).read_text(errors="replace").splitlines() or ["no output"]
                raise TickwheelError(f"worker {number} ended: {words[-1]}")

    def _log(self, number: int) -> Path:
        return FOLDER / f"worker-{number}.log"
