"""Leases are extended in time, in few calls, and not those that are new: in virtual time."""

from __future__ import annotations

import asyncio

from world import Counting, World, virtual


def test_a_lease_that_is_new_is_not_extended_with_the_others() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def long() -> None:
            await asyncio.sleep(100)

        line = Counting(world.store, world)
        await world.node(line=line, lease_ms=15_000)
        began = world.now_ms
        await long.enqueue()
        await asyncio.sleep(4)
        late = [await long.enqueue() for _ in range(10)]
        await asyncio.sleep(2)
        # A third of the first lease has passed, and little of the others.
        [(told, count)] = line.extends
        assert count == 1 and 4_900 <= told - began <= 5_100
        await asyncio.sleep(34)
        # From then on all are extended, each a third of a lease after the last time or before.
        assert 8 <= len(line.extends) <= 16
        assert {(await job.info()).attempts for job in late} == {1}
        assert {count for _, count in line.extends[1:]} <= {1, 10, 11}

    virtual(story)


def test_leases_that_begin_one_after_the_other_share_calls() -> None:
    async def story(world: World) -> None:
        @world.app.task
        async def long() -> None:
            await asyncio.sleep(100)

        line = Counting(world.store, world)
        await world.node(line=line, lease_ms=15_000)
        jobs = []
        for _ in range(50):
            jobs.append(await long.enqueue())
            await asyncio.sleep(0.1)
        await asyncio.sleep(30)
        # Each call has all that are not new, so there is never more than one in a sixth of a lease.
        assert len(line.extends) <= 35 / 2.5
        assert {(await job.info()).attempts for job in jobs} == {1}

    virtual(story)
