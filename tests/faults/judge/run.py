"""One run: workers and producers at work while faults happen, until the store is drained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from proxy import Proxy

from judge.busy import STARVED, Waiting
from judge.faults import LEASE_S, WORKERS, Fault, faults
from judge.load import PRODUCERS, wishes
from judge.record import SLOW, SLOW_S, AnyLine, Ended, Quit, Started, Stored, Trouble, read
from judge.scenes import Scene, full_disk
from judge.verdict import Found, Judgement, judge
from tickwheel import App, JobInfo, Outcome, State, StoreUnavailable, WorkerInfo
from tickwheel.cli.output import STORE
from tickwheel.job import ENDED
from tickwheel.operate.flaws import Span
from tickwheel.operate.verify import Verified, verify_store

FAULTS = Path(__file__).resolve().parent.parent
# All is over within this time after the last fault: what is due latest, then lost leases, then
# suspects that are tried one after the other.
DRAIN_S = 60.0
LOOK_S = 0.1
START_S = 30.0
PRODUCER_START_S = 2.0
# What a worker says once it works.
BANNER = "concurrency  "


class Process:
    """A worker or a producer, in its place: whoever is killed is replaced there."""

    def __init__(self, run: JudgedRun, slot: int) -> None:
        self._run = run
        self.slot = slot
        self.is_worker = slot < WORKERS
        self.proxy: Proxy | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._log = run.folder / f"{'worker' if self.is_worker else 'producer'}-{slot}.log"
        # How much of the log was there when it was started.
        self._said = 0
        # Somebody ends it on purpose, or has.
        self.wanted_gone = False

    async def open(self) -> None:
        if self._run.scene.has_line:
            self.proxy = Proxy(f"tcp://127.0.0.1:{self._run.scene.port}", raw=True)
            await self.proxy.open()
        self.start()

    async def close(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGCONT)
            self._child.kill()
            self._child.wait()
        if self.proxy is not None:
            await self.proxy.close()

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        assert self._child is not None
        return self._child.poll()

    @property
    def words(self) -> str:
        """What it has said since it was started."""
        return self._log.read_bytes()[self._said :].decode(errors="replace")

    def start(self) -> None:
        run = self._run
        words = ["-m", "tickwheel", "worker", "judge.shop:app", "--lease", f"{LEASE_S}s"]
        words += ["--concurrency", "20", "--grace", "2s"]
        if not self.is_worker:
            plan = (self.slot - WORKERS, run.seed, run.seconds, run.began, ",".join(run.scene.ways))
            words = ["-m", "judge.producer", *map(str, plan)]
        self.wanted_gone = False
        port = self.proxy.port if self.proxy else run.scene.port
        with self._log.open("ab") as log:
            self._said = log.tell()
            self._child = subprocess.Popen(
                [sys.executable, *words],
                cwd=FAULTS,
                env={**os.environ, **run.env, "TICKWHEEL_STORE": run.scene.url(port)},
                stdout=log,
                stderr=log,
            )

    def signal(self, which: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, which)


class JudgedRun:
    """One store, judged for some time with one seed."""

    def __init__(self, scene: Scene, folder: Path, *, seed: int, seconds: float) -> None:
        self.scene, self.folder, self.seed, self.seconds = scene, folder, seed, seconds
        self.plan = faults(seed, seconds, process=scene.process, server=scene.server)
        self.began = time.time()
        # How long the store took to drain.
        self.drained_s = 0.0
        self._record = folder / "record"
        self._record.mkdir()
        self._lines: list[AnyLine] = []
        self.lines: list[AnyLine] = []
        # How many faults the server has had, and whether none is under way.
        self._server_faults, self._server_well = 0, True
        self._server_turn = asyncio.Lock()
        self._processes = [Process(self, slot) for slot in range(WORKERS + PRODUCERS)]
        self.env = {
            "JUDGE_RECORD": str(self._record),
            "JUDGE_OUTBOX": "",
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def busy_s(self) -> float:
        """For how long the machine had no time for the store or for a worker, faults aside."""
        slow = [line for line in self.lines if isinstance(line, Trouble) and line.kind == SLOW]
        return sum(line.until - line.at for line in slow if not line.pid)

    async def run(self) -> Judgement:
        await self.scene.open()
        try:
            self.env["JUDGE_OUTBOX"] = self.scene.outbox
            async with self._app() as app:
                await self._make_outbox(app)
            async with self._running():
                await self._let_it_happen()
                ended = time.time()
                await self._drain()
                self.drained_s = time.time() - ended
            async with self._app() as app:
                found, counts = await self._found(app), await self._counts(app)
                verified = await self._verified(app)
        finally:
            await self.scene.close()
        self.lines = [*read(self._record), *self._lines]
        plan = wishes(self.seed, self.seconds, self.scene.ways)
        aftermath_s = self.scene.aftermath_s
        return judge(plan, self.lines, found, counts, verified, aftermath_s=aftermath_s)

    def story(self, id: str) -> str:
        """All that the record says of one job, with what went wrong meanwhile, by time."""
        ours = [line for line in self.lines if getattr(line, "id", "") == id]
        if not ours:
            return "nothing"
        runs = {line.run for line in ours if isinstance(line, Started)}
        ours += [line for line in self.lines if isinstance(line, Ended) and line.run in runs]
        began, ended = min(line.at for line in ours) - 5, max(line.at for line in ours)
        pids = {0} | {line.pid for line in ours if isinstance(line, Started)}
        for line in self.lines:
            if isinstance(line, Trouble) and line.pid in pids:
                ours += [line] if line.until > began and line.at < ended else []
        ours.sort(key=lambda line: line.at)
        return "\n".join(f"{line.at - self.began:8.3f} {line}" for line in ours)

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        try:
            for process in self._processes[:WORKERS]:
                await process.open()
            await self._until_workers_work()
            self.began = time.time() + PRODUCER_START_S
            for process in self._processes[WORKERS:]:
                await process.open()
            watching = [asyncio.create_task(each) for each in (self._watch(), self._probe())]
            yield
            for each in watching:
                each.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        finally:
            for process in self._processes:
                await process.close()

    async def _until_workers_work(self) -> None:
        async with asyncio.timeout(START_S):
            while not all(BANNER in process.words for process in self._processes[:WORKERS]):
                await asyncio.sleep(LOOK_S)

    async def _probe(self) -> None:
        """Ask the store for a durable write, straight and again and again. Where even that takes
        long although nothing is wrong, the machine is too busy, and leases may be lost by it. So
        it is where it has no time for this process, through which all lines go."""
        waiting = Waiting()
        async with self._app() as app:
            store = (await app.client()).store
            while True:
                asked, faults_before = time.time(), self._server_faults
                with contextlib.suppress(StoreUnavailable):
                    await store.beat(_nobody(asked))
                    slow = self._server_well and faults_before == self._server_faults
                    slow = slow and time.time() - asked > SLOW_S
                    if slow or waiting.share() > STARVED:
                        self._lines.append(Trouble(at=asked, until=time.time(), kind=SLOW))
                await asyncio.sleep(SLOW_S / 2)

    async def _watch(self) -> None:
        """Replace whoever ended. That a worker ends by itself is held against it, unless it could
        not even begin because its store was away."""
        while True:
            await asyncio.sleep(LOOK_S)
            for process in self._processes:
                if process.code is None or (not process.is_worker and process.code == 0):
                    continue
                if not process.wanted_gone and not self._could_not_begin(process):
                    words = f"ended with {process.code}: {process.words[-1500:]}"
                    self._lines.append(Quit(at=time.time(), pid=process.pid, words=words))
                process.start()

    def _could_not_begin(self, process: Process) -> bool:
        return process.is_worker and process.code == STORE and BANNER not in process.words

    # --- Faults

    async def _let_it_happen(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self.plan:
                await asyncio.sleep(max(0.0, self.began + fault.at_s - time.time()))
                group.create_task(self._happen(fault))
        await asyncio.sleep(max(0.0, self.began + self.seconds - time.time()))

    async def _happen(self, fault: Fault) -> None:
        if fault.slot is None:
            # One after the other, also where one takes longer than it was to.
            async with self._server_turn:
                await self._happen_to_server(fault)
            return
        at, process = time.time(), self._processes[fault.slot]
        pid = process.pid
        if process.code is not None:
            return
        await self._happen_to(process, fault)
        whom = 0 if "freeze" in fault.kind and self.scene.freezes_all else pid
        self._lines.append(Trouble(at=at, until=time.time(), kind=fault.kind, pid=whom))

    async def _happen_to_server(self, fault: Fault) -> None:
        at, kind = time.time(), fault.kind.removeprefix("server ")
        self._server_faults += 1
        self._server_well = False
        await getattr(self.scene, kind)(fault.seconds)
        self._server_well = True
        if kind not in self.scene.harmless:
            self._lines.append(Trouble(at=at, until=time.time(), kind=fault.kind))

    async def _happen_to(self, process: Process, fault: Fault) -> None:
        proxy, seconds = process.proxy, fault.seconds
        match fault.kind:
            case "kill":
                process.wanted_gone = True
                process.signal(signal.SIGKILL)
            case "stop":
                process.wanted_gone = True
                process.signal(signal.SIGTERM)
                await asyncio.sleep(LEASE_S)
            case "freeze" | "long freeze":
                process.signal(signal.SIGSTOP)
                await asyncio.sleep(seconds)
                process.signal(signal.SIGCONT)
            case "full disk":
                await full_disk(process.pid, seconds)
            case "cut":
                assert proxy
                proxy.cut()
            case "stall" | "long stall":
                assert proxy
                proxy.stall()
                await asyncio.sleep(seconds)
                proxy.flow()
            case "lost replies":
                assert proxy
                proxy.to_client = lambda _: False
                await asyncio.sleep(seconds)
                proxy.heal()
                proxy.cut()
            case _:
                raise AssertionError(fault.kind)

    # --- The end

    async def _drain(self) -> None:
        """Wait until all that was acknowledged has ended, for so long; then judge it as it is."""
        deadline = time.time() + DRAIN_S
        async with self._app() as app:
            while time.time() < deadline:
                await asyncio.sleep(1)
                if any(p.code is None for p in self._processes if not p.is_worker):
                    continue
                queues = await app.queues()
                if any(queue.waiting or queue.running for queue in queues):
                    continue
                stored = {line.id for line in read(self._record) if isinstance(line, Stored)}
                found = await self._found(app)
                # Counts may be behind by a moment.
                over = all(each.state in ENDED for each in found)
                if over and stored <= {each.id for each in found}:
                    return

    @contextlib.asynccontextmanager
    async def _app(self) -> AsyncIterator[App]:
        """The store itself, past all bad lines."""
        async with App(self.scene.url(self.scene.port), outbox=self.scene.outbox) as app:
            yield app

    async def _make_outbox(self, app: App) -> None:
        assert app.outbox is not None
        await app.outbox.empty((await app.client()).store)

    async def _counts(self, app: App) -> dict[tuple[str, str], int]:
        return {
            (queue.name, state.value): count
            for queue in await app.queues()
            for state in State
            if (count := getattr(queue, state.value))
        }

    async def _verified(self, app: App) -> Verified:
        """What `tickwheel verify` finds in the store."""
        client = await app.client()
        span = Span(
            since_ms=0,
            until_ms=client.clock.now_ms(),
            now_ms=client.clock.now_ms(),
            late_after_ms=1_000,
        )
        return await verify_store(client, span, kept_ms=0)

    async def _found(self, app: App) -> list[Found]:
        found: list[Found] = []
        cursor: str | None = None
        while True:
            page = await app.find(cursor=cursor, limit=1000)
            found += [_found(info) for info in page.jobs]
            cursor = page.cursor
            if cursor is None:
                return found


def _nobody(now: float) -> WorkerInfo:
    """A worker that there isn't, and that is gone at once."""
    return WorkerInfo(
        name="judge",
        host="",
        pid=0,
        version="",
        queues=(),
        concurrency=1,
        started_ms=0,
        seen_ms=int(now * 1000),
        gone_after_ms=1,
    )


def _found(info: JobInfo) -> Found:
    return Found(
        id=info.id,
        number=msgspec.json.decode(info.payload)["errand"]["number"],
        state=info.state.value,
        queue=info.queue,
        attempts=info.attempts,
        failures=info.failures,
        takeovers=info.takeovers,
        releases=sum(run.outcome is Outcome.RELEASE for run in info.history),
        error=info.error,
        result=info.result,
    )
