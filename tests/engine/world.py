"""A small world in virtual time: an app on `memory://`, workers that can crash, and a record."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Any, cast

from tickwheel import App
from tickwheel.clock import Clock, LoopClock, StoreClock
from tickwheel.engine.options import WorkerOptions
from tickwheel.engine.worker import Worker
from tickwheel.job import Job
from tickwheel.store import Store
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import FaultyStore, run_virtual


class Line(FaultyStore):
    """A line to a store that somebody can lock: calls wait, and then go ahead as they are."""

    free: asyncio.Event | None = None

    def __getattr__(self, name: str) -> Any:
        step = super().__getattr__(name)

        async def in_turn(*args: Any, **kwargs: Any) -> Any:
            if self.free is not None:
                await self.free.wait()
            return await step(*args, **kwargs)

        return step if name in ("open", "close") else in_turn


class Node:
    """A worker with a line of its own to the store."""

    def __init__(self, worker: Worker, line: FaultyStore) -> None:
        self.worker = worker
        self.line = line
        self._task = asyncio.create_task(worker.run())

    @property
    def name(self) -> str:
        return self.worker.name

    def crash(self) -> None:
        """What `kill -9` does: no settle, no release, nothing more is heard of it."""
        self.line.away = True
        self._task.cancel()

    async def gone(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)

    async def stop(self) -> None:
        self.worker.stop()
        await self._task


class MachineClock(LoopClock):
    """The clock of the machine that the store and its nodes run on; somebody may set it."""

    set_by_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.set_by_ns


class World:
    """Everything shares one virtual clock, unless a node is given a wrong one."""

    def __init__(self, start: datetime | None = None) -> None:
        self.clock = MachineClock(int(start.timestamp()) * 10**9) if start else MachineClock()
        self.store = MemoryStore(clock=self.clock)
        self.app = App(self.store, clock=self.clock)
        self.nodes: list[Node] = []

    @property
    def now_ms(self) -> int:
        return self.clock.now_ns() // 1_000_000

    def set_clock(self, seconds: float) -> None:
        """Set the machine's clock forward, or back."""
        self.clock.set_by_ns += int(seconds * 1e9)

    async def node(
        self,
        *,
        app: App | None = None,
        clock: Clock | None = None,
        line: FaultyStore | None = None,
        **options: Any,
    ) -> Node:
        app = app or self.app
        own, line = clock or self.clock, line or FaultyStore(self.store)
        store_clock = StoreClock(own, own=own is self.clock)
        await store_clock.measure(self.store.time_ns)
        options.setdefault("queues", app.tasks.queues())
        worker = Worker(
            cast(Store, line),
            app.tasks,
            store_clock,
            own,
            WorkerOptions(**options),
            app=app.name,
            schedules=app.declared,
            guarded=False,
            counts=app.counts,
        )
        self.nodes.append(Node(worker, line))
        return self.nodes[-1]

    async def stored(self, id: str) -> Job:
        [job] = await self.store.get([id])
        assert job is not None
        return job

    async def until(self, happened: Callable[[], Awaitable[bool]], *, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not await happened():
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        for node in self.nodes:
            node.crash()
        for node in self.nodes:
            await node.gone()


def virtual(
    story: Callable[[World], Coroutine[Any, Any, None]], *, start: datetime | None = None
) -> None:
    """Run a story in a new world."""

    async def tell() -> None:
        world = World(start)
        try:
            await story(world)
        finally:
            await world.close()

    run_virtual(tell())


class Counting(FaultyStore):
    """Notes when leases are extended, and of how many jobs."""

    def __init__(self, store: Store, world: World) -> None:
        super().__init__(store)
        self.world = world
        self.extends: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        step = super().__getattr__(name)
        if name != "extend":
            return step

        async def noted(jobs: Any, **times: Any) -> Any:
            self.extends.append((self.world.now_ms, len(jobs)))
            return await step(jobs, **times)

        return noted
