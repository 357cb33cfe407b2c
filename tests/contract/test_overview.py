"""What metrics say about the queues of a store, on each store."""

from __future__ import annotations

import msgspec

from stores import Harness
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.operate.history import COARSE, FINE
from tickwheel.operate.overview import read_overview
from tickwheel.operate.recorder import Recorder, points_of
from tickwheel.store import WorkerCounts, WorkerInfo

SECOND = 1_000


async def test_due_jobs_and_the_oldest_of_them_are_found_among_those_that_wait(h: Harness) -> None:
    oldest = h.job("a", delay_ms=-5 * SECOND, priority=0)
    await h.add(
        oldest,
        h.job("b", delay_ms=-2 * SECOND, priority=2),
        h.job("c", delay_ms=3_600 * SECOND),
        h.job("d", queue="later", delay_ms=3_600 * SECOND),
    )
    await h.queues()
    client, now_ms = Client(h.store, SystemClock()), h.now
    client.clock.now_ms = lambda: now_ms  # type: ignore[method-assign]
    overview = await read_overview(client)
    assert overview.up and overview.workers == 0
    found = {each.info.name: each for each in overview.queues}
    assert (found["default"].info.waiting, found["default"].due) == (3, 2)
    assert found["default"].oldest_due_ms == now_ms - oldest.due_ms
    assert (found["later"].due, found["later"].oldest_due_ms, found["later"].workers) == (0, 0, 0)


async def test_history_is_recorded_and_read_back(h: Harness) -> None:
    await h.add(h.job("a"), h.job("b", queue="later", delay_ms=3_600 * SECOND))
    await h.queues()
    client, now_ms = Client(h.store, SystemClock()), h.now
    worker = WorkerInfo(
        name="ann", host="host", pid=1, version="1", queues=("default",), concurrency=1,
        started_ms=now_ms, seen_ms=now_ms, gone_after_ms=3_600 * SECOND,
    )  # fmt: skip
    for n in range(2 * FINE.points + 1):
        at_ms = now_ms - (2 * FINE.points - n) * FINE.step_s * SECOND
        client.clock.now_ms = lambda at_ms=at_ms: at_ms  # type: ignore[method-assign, misc]
        if n in (0, 30):
            counts = WorkerCounts(source="a", since_ms=0, started=n, done=n, late=(n,))
            await h.store.beat(msgspec.structs.replace(worker, counts=counts))
        # Each by another server.
        await Recorder(_unused).sample(client)
    found = await points_of(client, FINE)
    assert len(found) == 2 * FINE.points + 1
    assert sum(each.done for each in found) == 30
    assert {(each.waiting, each.running) for each in found} == {(2, 0)}
    assert sum(each.samples for each in await points_of(client, COARSE[0])) >= FINE.points


async def _unused() -> Client:
    raise AssertionError("it is given a client")
