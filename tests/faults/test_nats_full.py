"""NATS servers and accounts that are full: adds are refused, and all that was taken still runs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats_books import Words, opened
from nats_raw import jetstream, raw_server
from processes import running_shop, wait_until

from tickwheel import job as life
from tickwheel.errors import StoreUnavailable
from tickwheel.job import CancelOutcome, Job, State
from tickwheel.schedule import Schedule
from tickwheel.store import Store, WorkerInfo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMITS = ("server", "account")


@asynccontextmanager
async def small(folder: Path, limit: str, size: str = "3MB") -> AsyncIterator[str]:
    """The URL of a store on a server, or in an account, that may hold little."""
    conf = f'jetstream {{ store_dir: "{folder}/js", max_file: {size} }}\n'
    login = ""
    if limit == "account":
        users = "users: [{ user: a, password: b }]"
        account = f"jetstream: {{ max_file: {size} }}, {users}"
        conf = f"{jetstream(folder)}accounts {{ A {{ {account} }} }}\n"
        login = "a:b@"
    async with raw_server(folder, conf) as place:
        yield f"nats://{login}{place}/ns"


def job(h: Words, id: str, *, seconds: float = 0.0, delay_ms: int = 0, size: int = 0) -> Job:
    payload = f'{{"seconds":{seconds}}}' + " " * size
    return h.job(id, task="work", payload=payload, delay_ms=delay_ms)


async def fill(h: Words, *, delay_ms: int = 0, size: int = 0) -> list[str]:
    """Add jobs until no more are taken, not even single ones; gives the ids of all that are there.

    A call that was refused may have added some."""
    tried: list[str] = []
    for count in (100, 10, 1):
        refused = 0
        while refused < 2:
            ids = [f"{count}-{len(tried) + n:05}" for n in range(count)]
            tried += ids
            try:
                await h.store.add([job(h, id, delay_ms=delay_ms, size=size) for id in ids])
            except StoreUnavailable:
                refused += 1
    found = [await h.store.get(tried[n : n + 500]) for n in range(0, len(tried), 500)]
    return [each.id for page in found for each in page if each is not None]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("durability", ["strict", "fast"])
@pytest.mark.parametrize(
    ("size", "delay_ms"), [(0, 0), (0, 3_000), (5_000, 0), (200_000, 0)], ids=str
)
async def test_a_store_that_is_full_is_drained_by_one_claim_of_each_job_and_takes_jobs_again(
    limit: str, durability: str, size: int, delay_ms: int, tmp_path: Path
) -> None:
    async with (
        small(tmp_path, limit) as url,
        opened(f"{url}?durability={durability}") as (h, store),
    ):
        ids = await fill(h, delay_ms=delay_ms, size=size)
        assert len(ids) * (size + 1_000) > 1_500_000, "it was really filled"
        await asyncio.sleep(delay_ms / 1000)
        async with opened(f"{url}?durability={durability}") as (_, worker):
            claims: Counter[str] = Counter()
            quiet = 0
            while len(claims) < len(ids):
                held = await h.claim(100, store=worker, lease_ms=60_000)
                claims.update(each.id for each in held)
                quiet = 0 if held else quiet + 1
                await asyncio.sleep(0.01 if quiet else 0)
                assert quiet < 400, f"{len(claims)} of {len(ids)} were handed out"
                extended = await worker.extend(held, now_ms=h.now, lease_ms=60_000)
                kept = [each for each in extended if each is not None]
                assert len(kept) == len(held)
                outcomes = [
                    life.done(each, started_ms=h.now, ended_ms=h.now, result='"a result"')
                    for each in kept
                ]
                assert await worker.settle(outcomes, now_ms=h.now) == [True] * len(held)
        assert claims == dict.fromkeys(ids, 1)
        assert await h.counts() == {"done": len(ids)}
        pruned = await store.prune([State.DONE], before_ms=h.now + 10_000, limit=100_000)
        assert pruned == len(ids)
        await asyncio.sleep(1.1)
        assert await store.add([job(h, "after", size=size)]) == [True]


async def refused(store: Store, jobs: list[Job]) -> bool:
    try:
        await store.add(jobs)
    except StoreUnavailable:
        return True
    return False


@pytest.mark.parametrize("limit", LIMITS)
async def test_every_step_but_an_add_works_while_the_store_is_full(
    limit: str, tmp_path: Path
) -> None:
    async with small(tmp_path, limit) as url, opened(url) as (h, store):
        schedule = await store.put_schedule(Schedule(name="s", rule="", next_ms=h.now))
        await h.add(*(job(h, f"held-{n}") for n in range(20)))
        held = await h.claim(20, lease_ms=60_000)
        ids = await fill(h)
        async with opened(url) as (_, other):
            extended = await other.extend(held, now_ms=h.now, lease_ms=60_000)
            jobs = [each for each in extended if each is not None]
            assert len(jobs) == 20
            assert await other.cancel(ids[:50], now_ms=h.now) == [CancelOutcome.CANCELLED] * 50
            assert await other.cancel([jobs[0].id], now_ms=h.now) == [CancelOutcome.REQUESTED]
            error = life.retry(
                jobs[1], due_ms=h.now + 60_000, error="x" * 4_000, started_ms=h.now, ended_ms=h.now
            )
            parked = [life.park(each, ended_ms=h.now) for each in jobs[2:6]]
            outcomes = [error, *parked, *(h.done(each) for each in jobs[6:])]
            assert await other.settle(outcomes, now_ms=h.now) == [True] * 19
            assert await other.settle(outcomes, now_ms=h.now) == [True] * 19
            assert [each.task for each in await store.parked()] == ["work"]
            again: list[Job] = []
            while len(again) < 4:
                found = await h.claim(4, store=store, tasks=["work"], lease_ms=60_000)
                again += [each for each in found if each.attempt == 2]
            assert {each.id for each in again} == {each.job.id for each in parked}
            info = WorkerInfo(
                name="w", host="h", pid=1, version="0", queues=(), concurrency=1,
                started_ms=h.now, seen_ms=h.now, gone_after_ms=5_000,
            )  # fmt: skip
            await other.put_records("key", {"a": "1", "b": "2"})
            assert await other.delete_records("key", ["a"]) == [True]
            assert await store.records("key") == [("b", "2")]
            await other.beat(info)
            assert len(await other.workers(now_ms=h.now)) == 1
            assert await other.delete(ids[:50]) == [True] * 50
            await asyncio.sleep(1.1)
            # A tick is an add: it comes, or waits.
            tick = job(h, "s@1")
            try:
                assert await other.fire(schedule, [tick], next_ms=h.now + 60_000)
            except StoreUnavailable:
                assert await other.get(["s@1"]) == [None]


# --- Real workers


@pytest.mark.parametrize("limit", LIMITS)
async def test_workers_drain_a_full_store_and_run_each_job_once(limit: str, tmp_path: Path) -> None:
    async with small(tmp_path / "nats", limit) as url, opened(url) as (h, store):
        ids = await fill(h, size=3_000)
        with running_shop(tmp_path) as shop:
            shop.env["TICKWHEEL_STORE"] = url
            workers = [shop.worker(), shop.worker()]
            adds: Counter[bool] = Counter()

            def drained() -> bool:
                return len(shop.events("end")) >= len(ids) or any(e.died() for e in workers)

            deadline = time.monotonic() + 120
            while not await asyncio.to_thread(drained) and time.monotonic() < deadline:
                # Somebody keeps trying to add.
                more = [job(h, f"more-{sum(adds.values()):05}-{n}") for n in range(20)]
                adds[await refused(store, more)] += 1
                ids += [each.id for each in await store.get([m.id for m in more]) if each]
                await asyncio.sleep(0.1)
            assert not any(each.died() for each in workers), [each.log for each in workers]
            wait_until(drained, within_s=60, what=f"{len(ids)} jobs")
            ran = Counter(event.id for event in shop.events("start"))
            assert ran == dict.fromkeys(ids, 1)
            assert adds[True]


async def test_jobs_that_run_while_the_store_fills_up_run_once(tmp_path: Path) -> None:
    async with small(tmp_path / "nats", "server") as url, opened(url) as (h, _):
        await h.add(*(job(h, f"long-{n}", seconds=6) for n in range(20)))
        with running_shop(tmp_path) as shop:
            shop.env["TICKWHEEL_STORE"] = url
            worker = shop.worker()
            wait_until(lambda: len(shop.events("start")) == 20, within_s=20, what="20 starts")
            await fill(h, delay_ms=3_600_000)
            wait_until(
                lambda: len(shop.events("end")) >= 20 or worker.died(), within_s=20, what="20 ends"
            )
            await asyncio.sleep(3)
            assert not worker.died(), worker.log
            ran = Counter(event.id for event in shop.events("start"))
            assert ran == {f"long-{n}": 1 for n in range(20)}
            states = {(await h.get(f"long-{n}")).state for n in range(20)}
            assert states == {State.DONE}
