"""What metrics say about the queues of a store, on each store."""

from __future__ import annotations

from stores import Harness
from tickwheel.client import Client
from tickwheel.clock import SystemClock
from tickwheel.operate.overview import read_overview

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
