"""Parked jobs in Redis: what they cost those who don't know their task, and who is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from test_redis import LEASE, NOW, SOON_S, no_poll, opened, running, strict, work_of

from redis_server import RedisServer
from tickwheel import job as life
from tickwheel.job import CancelOutcome, Job, Priority, State
from tickwheel.store import PARKED_LIMIT, Query, Store
from tickwheel.stores.redis import parking
from tickwheel.stores.redis.health import as_fields

__all__ = ["no_poll", "strict"]  # fixtures

pytestmark = pytest.mark.slow

ROOT = "tw:{default}:"
# As in parking.lua.
FORGET = 60_000
THOUSAND = frozenset(f"task-{n}" for n in range(1000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


def job(
    id: str,
    task: str = "mail",
    *,
    due_ms: int = NOW,
    queue: str = "default",
    priority: Priority = Priority.NORMAL,
) -> Job:
    return Job(
        id=id,
        task=task,
        payload="{}",
        due_ms=due_ms,
        created_ms=NOW,
        queue=queue,
        priority=priority,
    )


async def claim(
    store: Store,
    tasks: Collection[str] = (),
    *,
    queues: Collection[str] = ("default",),
    limit: int = 100,
    now_ms: int = NOW,
) -> list[Job]:
    return await store.claim(
        list(queues), worker="ann", limit=limit, now_ms=now_ms, lease_ms=LEASE, tasks=tasks
    )


async def park(store: Store, jobs: list[Job], *, now_ms: int = NOW) -> None:
    """All of these jobs, through the hands of a worker that doesn't know them."""
    await store.add(jobs)
    queues = {each.queue for each in jobs}
    latest = max(now_ms, *(each.due_ms for each in jobs))
    left = len(jobs)
    while left:
        held = await claim(store, queues=queues, limit=1000, now_ms=latest)
        assert held, f"{left} of {len(jobs)} jobs can't be claimed"
        settlements = [life.park(each, ended_ms=latest) for each in held]
        assert all(await store.settle(settlements, now_ms=now_ms))
        left -= len(held)


async def cost(server: RedisServer, step: Callable[[], object]) -> tuple[int, int]:
    """How many commands a step took, and how many of them were calls of the script."""
    server.command("CONFIG", "RESETSTAT")
    await step()  # type: ignore[misc]
    commands, scripts = work_of(server)
    # The command that reset the counts is the first that is counted.
    return commands - 1, scripts


def received(server: RedisServer) -> int:
    return int(as_fields(server.command("INFO", "stats"))["total_net_input_bytes"])


# --- What a claim costs


async def test_where_nothing_is_parked_a_claim_with_tasks_costs_one_command_more(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        queues = [f"queue-{n}" for n in range(10)]
        await claim(store, THOUSAND, queues=queues)
        without, _ = await cost(server, lambda: claim(store, queues=queues))
        with_tasks, scripts = await cost(server, lambda: claim(store, THOUSAND, queues=queues))
        assert (with_tasks - without, scripts) == (1, 1)


async def test_the_tasks_that_a_worker_knows_are_not_sent(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await park(store, [job("unknown"), job("known", "task-7")])
        assert [each.id for each in await claim(store, THOUSAND)] == ["known"]
        start = received(server)
        for _ in range(10):
            await claim(store)
        without = received(server) - start
        start = received(server)
        for _ in range(10):
            await claim(store, THOUSAND)
        assert received(server) - start < without + 10 * 200


async def test_many_parked_jobs_cost_a_worker_that_does_not_know_them_nothing(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        await claim(store, ["other"])
        empty, _ = await cost(server, lambda: claim(store, ["other"]))
        jobs = [job(f"{n:05}", f"task-{n % 500}") for n in range(20_000)]
        await park(store, jobs)
        assert await claim(store, ["other"]) == []
        assert await cost(server, lambda: claim(store, ["other"])) == (empty, 1)
        waiting = store.wait(["default"], now_ms=NOW, until_ms=NOW + 10, tasks=["other"])
        commands, scripts = await cost(server, lambda: waiting)
        assert commands / scripts < 20


async def test_a_worker_pays_for_the_jobs_it_takes_and_not_for_those_that_are_parked(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        later = [job(f"later-{n}", due_ms=NOW + LEASE) for n in range(1000)]
        await park(store, [job(f"{n:04}", f"task-{n % 5}") for n in range(5000)] + later)
        known = [*THOUSAND, "mail"]
        assert len(await claim(store, known, limit=10)) == 10
        commands, scripts = await cost(server, lambda: claim(store, known, limit=100))
        assert scripts == 1 and commands < 50
        assert len(await claim(store, known, limit=500)) == 500


async def test_a_worker_with_more_tasks_than_one_claim_takes_gets_them_all(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parking, "MOST", 10)
    async with opened(server.url) as store:
        jobs = [job(f"{n}", f"task-{n}", queue=f"queue-{n % 3}") for n in range(50)]
        await park(store, jobs)
        queues = {each.queue for each in jobs}
        found: set[str] = set()
        for _ in range(1000):
            some = await claim(store, THOUSAND, queues=queues)
            assert len(some) <= 10
            found |= {each.id for each in some}
        assert found == {each.id for each in jobs}


async def test_parked_jobs_are_claimed_by_priority_and_then_by_due_time_across_tasks(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        # Some tasks have no urgent jobs, some only those.
        jobs = [
            job(
                f"{n:03}",
                f"task-{n % 7}",
                priority=Priority(max(0, min(3, n % 7 + n % 3 - 2))),
                due_ms=NOW - n * 37 % 101,
            )
            for n in range(200)
        ]
        free, parked = jobs[::3], [each for each in jobs if each not in jobs[::3]]
        await park(store, parked)
        await park(store, [job("later", "task-1", due_ms=NOW + LEASE, priority=Priority.URGENT)])
        await store.add(free)
        claimed = [each for _ in range(40) for each in await claim(store, THOUSAND, limit=7)]
        assert len(claimed) == len(jobs)
        order = [(-each.priority, each.due_ms) for each in claimed]
        assert order == sorted(order)


# --- Which tasks have parked jobs


async def run(store: Store, *tasks: str) -> list[str]:
    """Claim what is there and end it."""
    held = await claim(store, tasks)
    ended = [life.done(each, started_ms=NOW, ended_ms=NOW) for each in held]
    assert all(await store.settle(ended, now_ms=NOW))
    return [each.id for each in held]


def entries(server: RedisServer) -> bytes:
    return server.command("HVALS", f"{ROOT}parked")


async def test_a_task_whose_jobs_come_and_go_is_no_news(server: RedisServer) -> None:
    """As where two apps share a queue: each claim would have to ask twice."""
    async with opened(server.url) as store:
        await park(store, [job("a")])
        assert await run(store, "mail") == ["a"]
        before = entries(server)
        for n in range(3):
            await park(store, [job(f"{n}")], now_ms=NOW + 1000)
            _, scripts = await cost(server, lambda: claim(store, ["mail"], limit=1))
            assert scripts == 1
        assert entries(server) == before


async def test_a_task_is_forgotten_a_while_after_its_last_job_was_claimed(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        await park(store, [job("a"), job("b", "bill"), job("c", "gone")])
        assert await run(store, "mail") == ["a"]
        await store.cancel(["c"], now_ms=NOW)
        assert await claim(store, ["mail"], now_ms=NOW + FORGET - 1) == []
        assert b'"mail"' in entries(server)
        assert await claim(store, ["mail"], now_ms=NOW + FORGET) == []
        left = entries(server)
        assert b'"mail"' not in left and b'"gone"' not in left and b'"bill"' in left
        assert await run(store, "mail", "bill") == ["b"]
        await park(store, [job("d")])
        assert await run(store, "mail", "bill") == ["d"]


async def test_a_task_that_is_parked_all_the_time_is_not_forgotten(server: RedisServer) -> None:
    async with opened(server.url) as store:
        for n in range(5):
            at = NOW + n * FORGET * 2 // 3
            await park(store, [job(f"{n}")], now_ms=at)
            assert await run(store, "mail") == [f"{n}"]
            assert await claim(store, ["mail"], now_ms=at + FORGET // 3) == []
            assert b'"mail"' in entries(server)


async def test_an_empty_queue_leaves_no_tasks_behind(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await park(store, [job("a")])
        await store.cancel(["a"], now_ms=NOW)
        assert await store.prune([State.CANCELLED], before_ms=NOW + 1, limit=1) == 1
        assert entries(server) == b"*0\r\n"
        assert await store.queues() == []


async def test_a_queue_with_parked_jobs_is_not_forgotten(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await park(store, [job("a"), job("b")])
        await store.cancel(["a"], now_ms=NOW)
        assert await store.delete(["a"]) == [True]
        assert [(info.name, info.waiting) for info in await store.queues()] == [("default", 1)]
        assert [each.id for each in await store.parked()] == ["b"]


async def test_a_handle_hears_of_tasks_that_were_parked_by_others_meanwhile(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        for n in range(5):
            await park(other, [job(f"{n}", f"task-{n}")])
            assert await run(store, *THOUSAND) == [f"{n}"]


async def test_parked_tells_the_first_job_of_many_queues_and_tasks(server: RedisServer) -> None:
    async with opened(server.url) as store:
        jobs = [
            job(f"{n}-{late}", f"task-{n % 10}", queue=f"q{n // 10}", due_ms=NOW + late)
            for n in range(PARKED_LIMIT + 200)
            for late in (1, 0)
        ]
        urgent = job("urgent", "task-0", queue="q0", due_ms=NOW + 2, priority=Priority.URGENT)
        await park(store, [urgent, *jobs])
        found = await store.parked()
        assert len({(each.queue, each.task) for each in found}) == len(found) == PARKED_LIMIT
        assert {each.due_ms for each in found} == {NOW}


async def test_pages_go_through_parked_jobs(server: RedisServer) -> None:
    async with opened(server.url) as store:
        ids = [f"{n:02} \n" for n in range(25)]
        await park(store, [job(id, f"täsk \n {id}", queue=f"q{id[0]}") for id in ids])
        await store.add([job("free", queue="q0")])
        for limit in (1, 3, 10):
            seen: list[str] = []
            cursor: str | None = None
            while True:
                query = Query(state=State.WAITING)
                page = await store.find(query, cursor=cursor, limit=limit)
                seen += [each.id for each in page.jobs]
                cursor = page.cursor
                if cursor is None:
                    break
            assert sorted(seen) == [*ids, "free"]
        page = await store.find(Query(task="täsk \n 07 \n"))
        assert [each.id for each in page.jobs] == ["07 \n"]


# --- Who is told


def waits(store: Store, *tasks: str) -> asyncio.Task[None]:
    until_ms = NOW + 600_000
    return asyncio.create_task(store.wait(["default"], now_ms=NOW, until_ms=until_ms, tasks=tasks))


async def looks(server: RedisServer, count: int) -> None:
    async with asyncio.timeout(SOON_S):
        while b"cmdstat_evalsha:calls=%d," % count not in server.command("INFO", "commandstats"):
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_poll")
async def test_only_those_who_know_the_task_are_woken(server: RedisServer) -> None:
    async with opened(server.url) as store, opened(server.url) as other:
        await store.add([job(f"{n}") for n in range(10)])
        held = await claim(store)
        server.command("CONFIG", "RESETSTAT")
        # The leases of the held jobs end both waits, but not soon.
        ignorant, knowing = waits(store, "bill"), waits(other, "mail", "bill")
        await looks(server, 2)
        server.command("CONFIG", "RESETSTAT")
        for each in held:
            assert await store.settle([life.park(each, ended_ms=NOW)], now_ms=NOW) == [True]
        async with asyncio.timeout(SOON_S):
            await knowing
        assert not ignorant.done()
        # Other work still wakes the one that slept on.
        await other.add([job("new")])
        async with asyncio.timeout(SOON_S):
            await ignorant
        # Ten settles, an add, and one look each, which has to ask twice.
        assert work_of(server)[1] <= 10 + 1 + 4


@pytest.mark.usefixtures("no_poll")
async def test_a_parked_job_that_is_due_later_ends_a_wait_in_time(server: RedisServer) -> None:
    async with opened(server.url) as store:
        due_ms = NOW + store.ahead_ms + 300
        await park(store, [job("a", due_ms=due_ms), job("b", due_ms=due_ms + LEASE)])
        start = asyncio.get_running_loop().time()
        async with asyncio.timeout(SOON_S):
            await store.wait(["default"], now_ms=NOW, until_ms=NOW + 600_000, tasks=["mail"])
        assert asyncio.get_running_loop().time() - start > 0.25
        assert await claim(store, ["mail"], now_ms=NOW) == []
        assert len(await claim(store, ["mail"], now_ms=NOW + 300)) == 1


# --- Servers and releases


async def test_a_full_server_parks_jobs_and_hands_them_out(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job("a"), job("b")])
        server.command("CONFIG", "SET", "maxmemory", "1")
        held = await claim(store, ["other"])
        parked = [life.park(each, ended_ms=NOW) for each in held]
        assert await store.settle(parked, now_ms=NOW) == [True, True]
        assert await claim(store, ["other"]) == []
        await store.wait(["default"], now_ms=NOW, until_ms=NOW + 10, tasks=["other"])
        assert await store.cancel(["b"], now_ms=NOW) == [CancelOutcome.CANCELLED]
        assert await run(store, "mail") == ["a"]
        assert await claim(store, ["mail"], now_ms=NOW + FORGET) == []
        assert entries(server) == b"*0\r\n"


@pytest.mark.usefixtures("strict")
async def test_steps_name_the_keys_of_parked_jobs(server: RedisServer) -> None:
    async with opened(server.url) as store:
        queues = ["one", "two"]
        jobs = [job(f"{queue} {n}", queue=queue) for queue in queues for n in range(4)]
        await park(store, jobs)
        assert len(await store.parked()) == 2
        await store.wait(queues, now_ms=NOW, until_ms=NOW + 10, tasks=["mail"])
        assert len(await claim(store, ["mail"], queues=queues, limit=3)) == 3
        left = [each.id for each in (await store.find(Query(state=State.WAITING))).jobs]
        assert len(left) == 5
        assert await store.cancel(left, now_ms=NOW) == [CancelOutcome.CANCELLED] * 5
        assert await store.delete(left) == [True] * 5
        late = NOW + FORGET
        assert len(await claim(store, ["mail"], queues=queues, now_ms=late)) == 3
        assert await store.parked() == []


async def test_jobs_of_the_previous_release_are_read(server: RedisServer) -> None:
    """As it wrote them: without tracebacks, and nobody had parked anything."""
    record = (
        '{"id":"%s","task":"mail","payload":"{}","due_ms":1800000000000,"created_ms":1,'
        '"attempt":1,"failures":1,"worker":"bob","settled":7,"error":"boom","history":[{"attempt":1,'
        '"worker":"bob","outcome":"retry","due_ms":1,"ended_ms":2,"error":"boom"}]}'
    )
    for id in ("waiting", "running"):
        server.command("HSET", f"{ROOT}job", id, "w1 7 7 default" + record % id)
    server.command("HSET", f"{ROOT}since", "running", f'r 8 {NOW + 1} 0 "bob"')
    server.command("ZADD", f"{ROOT}w:1:default", str(NOW), "waiting")
    server.command("ZADD", f"{ROOT}r:1:default", str(NOW + 1), "running")
    server.command("ZADD", f"{ROOT}names", "0", "default")
    server.command("SET", f"{ROOT}schema", "2")
    async with opened(server.url) as store:
        found = await store.get(["waiting", "running"])
        assert [each and (each.parked, each.traceback, each.error) for each in found] == [
            (False, None, "boom")
        ] * 2
        held = await claim(store, now_ms=NOW + 1)
        assert [(each.id, each.attempt) for each in held] == [("waiting", 2), ("running", 3)]
        parked = [life.park(each, ended_ms=NOW) for each in held]
        assert await store.settle(parked, now_ms=NOW + 1) == [True, True]
        assert {each.id for each in await claim(store, ["mail"])} == {"waiting", "running"}


async def test_a_job_that_an_older_release_took_from_its_set_is_not_handed_out(
    server: RedisServer,
) -> None:
    """It cancels a parked job as any that waits, and leaves it among those that are parked."""
    async with opened(server.url) as store:
        await park(store, [job("a"), job("b")])
        server.command("HSET", f"{ROOT}since", "a", f"c {NOW}")
        server.command("ZADD", f"{ROOT}e:c:default", str(NOW), "a")
        assert [each.id for each in await claim(store, ["mail"])] == ["b"]
        [found] = await store.get(["a"])
        assert found is not None and found.state is State.CANCELLED
        assert server.command("EXISTS", f"{ROOT}w:p:default") == b":0\r\n"


async def test_names_that_look_like_a_parked_job_are_only_names(server: RedisServer) -> None:
    name = '"parked":true,"task":"x","payload":"due_ms":1'
    async with opened(server.url) as store:
        plain = life.added(job(name, name, queue=name))
        await store.add([plain])
        assert await store.cancel([name], now_ms=NOW) == [CancelOutcome.CANCELLED]
        assert [(each.waiting, each.cancelled) for each in await store.queues()] == [(0, 1)]
        assert await store.rerun([name], now_ms=NOW) == [True]
        [held] = await claim(store, queues=[name])
        assert await store.settle([life.park(held, ended_ms=NOW)], now_ms=NOW) == [True]
        assert await claim(store, ["x"], queues=[name]) == []
        assert [each.id for each in await claim(store, [name], queues=[name])] == [name]
        counts = [(each.waiting, each.running) for each in await store.queues()]
        assert counts == [(0, 1)]


async def test_the_first_moments_of_time_are_like_any_other(server: RedisServer) -> None:
    """Virtual time may begin at the epoch."""
    async with opened(server.url) as store:
        await park(store, [job("a", due_ms=0)], now_ms=1)
        assert [each.id for each in await claim(store, ["mail"], now_ms=1)] == ["a"]
