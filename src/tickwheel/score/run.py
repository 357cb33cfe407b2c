"""One contest: servers, instances, jobs that arrive, instances that are killed; then the record."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tickwheel.errors import StoreUnavailable
from tickwheel.score.contest import LATEST_MS, RECOVERY_MS, Result, arrivals, judged, kills
from tickwheel.score.entrants import SERVERS, Entrant, adder
from tickwheel.score.notes import now_ms, queries_in, ready_in, runs_in

# Between when all instances are ready and the first job; after the last one's end; between looks.
SETTLE_S, LINGER_S, LOOK_S = 2.0, 0.5, 0.25
# How often it is told how far they are.
TELL_S = 1.0
# How long an instance may take to start, and to stop.
START_S, STOP_S = 120.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a contest is: how long, how many instances, which entrants."""

    minutes: float
    instances: int
    seed: int
    ha: bool
    entrants: Sequence[Entrant]

    @property
    def last_s(self) -> float:
        """When the last job is due, in seconds after the start."""
        return max((each.due_s for each in arrivals(self.seed, self.minutes)), default=0.0)


@dataclass(slots=True)
class Advance:
    """How far an entrant is."""

    # How many jobs have run.
    done: int = 0
    phase: str = "starting"


# Told of how far they are, by the keys of entrants.
Tell = Callable[[Mapping[str, Advance]], None]


async def contest(plan: Rules, folder: Path, tell: Tell = lambda _: None) -> list[Result]:
    """Run it; all entrants at the same time. Results are in the order of the plan."""
    for entrant in plan.entrants:
        entrant.check()
    async with contextlib.AsyncExitStack() as stack:
        urls = {
            name: await stack.enter_async_context(SERVERS[name](folder / f"server-{name or 'no'}"))
            for name in dict.fromkeys(each.server for each in plan.entrants)
        }
        races = [
            _Race(plan, each, each.url(urls[each.server], folder / each.key), folder / each.key)
            for each in plan.entrants
        ]
        telling = asyncio.create_task(_telling(races, tell))
        stack.callback(telling.cancel)
        for race in races:
            await race.set_up()
            await stack.enter_async_context(race.instances())
        for race in races:
            await race.all_ready()
        async with asyncio.TaskGroup() as group:
            start_ms = now_ms() + SETTLE_S * 1000
            running = [group.create_task(race.run(start_ms)) for race in races]
    return [each.result() for each in running]


async def _telling(races: Sequence[_Race], tell: Tell) -> None:
    while True:
        for race in races:
            race.standing.done = len(race.done())
        tell({race.entrant.key: race.standing for race in races})
        await asyncio.sleep(TELL_S)


@dataclass(slots=True)
class _Race:
    """One entrant in a contest."""

    plan: Rules
    entrant: Entrant
    url: str
    folder: Path
    standing: Advance = field(default_factory=Advance)
    _due_ms: dict[str, float] = field(default_factory=dict)
    _killed_ms: dict[int, float] = field(default_factory=dict)
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    async def set_up(self) -> None:
        await asyncio.to_thread(self.folder.mkdir)
        _, close = await adder(self.entrant, self.url)
        await close()

    def done(self) -> set[str]:
        """The jobs that have run to their end."""
        return {run.id for run in runs_in(self.folder) if run.ended_ms}

    async def all_ready(self) -> None:
        """Wait until all instances can run jobs."""
        try:
            async with asyncio.timeout(START_S):
                while ready_in(self.folder) < self.plan.instances:
                    self._check_alive()
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise StoreUnavailable(
                f"the instances of {self.entrant.key} did not start within {START_S:g} s"
            ) from None

    async def run(self, start_ms: float) -> Result:
        async with asyncio.timeout(self._longest_s):
            self.standing.phase = "running"
            async with asyncio.TaskGroup() as group:
                group.create_task(self._add_jobs(start_ms))
                if self.plan.ha:
                    group.create_task(self._kill_some(start_ms))
            self.standing.phase = "draining"
            await self._drained(start_ms)
        self.standing.phase = "done"
        await self._end_all()
        return judged(
            self.entrant.name,
            self.entrant.where,
            self._due_ms,
            runs_in(self.folder),
            queries_in(self.folder),
            start_ms=start_ms,
            killed_ms=self._killed_ms,
        )

    @property
    def _longest_s(self) -> float:
        return SETTLE_S + self.plan.last_s + self._patience_s + START_S

    @property
    def _patience_s(self) -> float:
        return (LATEST_MS + (RECOVERY_MS if self.plan.ha else 0)) / 1000

    @contextlib.asynccontextmanager
    async def instances(self) -> AsyncIterator[None]:
        await asyncio.to_thread(self._start)
        try:
            yield
        finally:
            await self._end_all()

    async def _end_all(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(asyncio.to_thread(_end, each) for each in self._processes))

    def _start(self) -> None:
        command = [sys.executable, "-m", "tickwheel.score.instance", self.entrant.key]
        with (self.folder / "log").open("ab") as log:
            for number in range(self.plan.instances):
                words = [*command, str(number), self.url, str(self.folder)]
                self._processes.append(subprocess.Popen(words, stdout=log, stderr=log))

    async def _add_jobs(self, start_ms: float) -> None:
        add, close = await adder(self.entrant, self.url)
        try:
            for each in arrivals(self.plan.seed, self.plan.minutes):
                await _until(start_ms + each.at_s * 1000)
                due_ms = int(start_ms + each.due_s * 1000)
                await add(each.id, due_ms)
                self._due_ms[each.id] = due_ms
        finally:
            await close()

    async def _kill_some(self, start_ms: float) -> None:
        for each in kills(self.plan.seed, self.plan.minutes, self.plan.instances):
            await _until(start_ms + each.at_s * 1000)
            self._killed_ms[each.instance] = now_ms()
            self._processes[each.instance].send_signal(each.number)

    async def _drained(self, start_ms: float) -> None:
        """Wait until all jobs have run, or nothing more can be in time."""
        end_ms = start_ms + (self.plan.last_s + self._patience_s) * 1000
        while now_ms() < end_ms:
            self._check_alive()
            if self.done() >= self._due_ms.keys():
                break
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(LINGER_S)

    def _check_alive(self) -> None:
        for number, process in enumerate(self._processes):
            if process.poll() is not None and number not in self._killed_ms:
                words = (self.folder / "log").read_text(errors="replace")[-800:]
                raise StoreUnavailable(
                    f"instance {number} of {self.entrant.key} ended with {process.poll()}: {words}"
                )


async def _until(ms: float) -> None:
    await asyncio.sleep(max(ms - now_ms(), 0) / 1000)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
