"""Meta and progress in Redis: which keys they take, and what an older release makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_redis import LEASE, NOW, opened, running, strict

from redis_server import RedisServer
from tickwheel import job as life
from tickwheel.changes import IfExists, Put
from tickwheel.ids import new_fence
from tickwheel.job import Job, Move, Progress, PutOutcome, State
from tickwheel.schedule import Schedule
from tickwheel.store import Query, Store
from tickwheel.stores.redis import records

__all__ = ["strict"]  # a fixture

pytestmark = pytest.mark.slow

ROOT = "tw:{default}:"
META = {"customer": "42", "größe": 'a "b"\n'}
BY_CUSTOMER = Query(meta=("customer", "42"))
HALF = Progress(0.5, "half")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from running(tmp_path)


def job(id: str, meta: dict[str, str] | None = META) -> Job:
    return Job(id=id, task="mail", payload="{}", due_ms=NOW, created_ms=NOW, meta=meta)


async def told(store: Store, started_ms: int | None = NOW, *, now_ms: int = NOW) -> Job:
    """A job whose holder has told its progress."""
    [held] = await store.claim(["default"], worker="ann", limit=1, now_ms=now_ms, lease_ms=LEASE)
    held = msgspec.structs.replace(held, started_ms=started_ms, progress=HALF)
    [extended] = await store.extend([held], now_ms=now_ms, lease_ms=LEASE)
    assert extended is not None
    return extended


def left(server: RedisServer) -> list[str]:
    """The keys of jobs that exist."""
    return [
        key
        for key in ("job", "since", "meta", "tags")
        if server.command("EXISTS", ROOT + key) == b":1\r\n"
    ]


@pytest.mark.usefixtures("strict")
async def test_every_step_names_its_keys_and_leaves_nothing(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([job("deleted"), job("pruned"), job("plain", None)])
        schedule = await store.put_schedule(Schedule(name="s", rule="{}", next_ms=NOW))
        assert await store.fire(schedule, [job("fired")], next_ms=None)
        assert len((await store.find(BY_CUSTOMER)).jobs) == 3
        assert left(server) == ["job", "meta", "tags"]
        held = await told(store)
        assert left(server) == ["job", "since", "meta", "tags"]
        settlement = life.done(held, started_ms=NOW, ended_ms=NOW)
        assert await store.settle([settlement], now_ms=NOW) == [True]
        assert left(server) == ["job", "meta", "tags"]
        # This one is lost, with its progress.
        lost = await told(store)
        late = NOW + LEASE + 1
        rest = [each for each in ("deleted", "pruned", "plain", "fired") if each != held.id]
        assert lost.id in rest
        await store.cancel(rest, now_ms=late)
        assert await store.delete(["deleted", "plain"]) == [True, True]
        ended = [State.DONE, State.CANCELLED]
        assert await store.prune(ended, before_ms=late + 1, limit=10) == 2
        assert left(server) == []
        await store.put_records("key", {"a": "1"})
        assert await store.records("key") == [("a", "1")]
        assert await store.delete_records("key", ["a"]) == [True]
        for key in ("record:key", "records:key"):
            assert server.command("EXISTS", ROOT + key) == b":0\r\n"


@pytest.mark.usefixtures("strict")
async def test_a_takeover_forgets_the_progress_of_the_run_that_was_lost(
    server: RedisServer,
) -> None:
    async with opened(server.url) as store:
        await store.add([job("a")])
        await told(store)
        assert server.command("HLEN", f"{ROOT}since") == b":2\r\n"
        late = NOW + LEASE + 1
        assert await store.claim(["default"], worker="bob", limit=1, now_ms=late, lease_ms=LEASE)
        assert server.command("HLEN", f"{ROOT}since") == b":1\r\n"


@pytest.mark.parametrize("started_ms", [None, 0, NOW])
async def test_an_older_release_reads_the_lines_of_a_job_with_progress(
    server: RedisServer, started_ms: int | None
) -> None:
    async with opened(server.url) as store:
        await store.add([job("a")])
        held = await told(store, started_ms)
        [found] = await store.get(["a"])
        assert found is not None
        assert (found.started_ms, found.progress) == (started_ms, HALF)
        line = bulk(server.command("HGET", f"{ROOT}since", "a"))
        # As its script and its reader parse it.
        parsed = re.fullmatch(r'r (\d+) (\d+) ([01]) (\d*) ?("[^\n]*)', line)
        assert parsed is not None
        assert (int(parsed[1]), parsed[5]) == (held.fence, '"ann"')
        _, _, _, asked, rest = line.split(" ", 4)
        started, _, worker = rest.partition(" ")
        assert (asked, int(started), worker) == ("0", started_ms or 0, '"ann"')


async def test_a_start_at_the_first_moment_of_time_is_no_progress(server: RedisServer) -> None:
    async with opened(server.url) as store:
        await store.add([msgspec.structs.replace(job("a"), due_ms=0)])
        [held] = await store.claim(["default"], worker="ann", limit=1, now_ms=1, lease_ms=LEASE)
        held = msgspec.structs.replace(held, started_ms=0)
        await store.extend([held], now_ms=1, lease_ms=LEASE)
        [found] = await store.get(["a"])
        assert found is not None
        assert (found.started_ms, found.progress) == (0, None)


async def test_what_an_older_release_deletes_is_not_found(server: RedisServer) -> None:
    """It knows nothing of the tags, and the id may be used again."""
    async with opened(server.url) as store:
        await store.add([job("a"), job("b"), job("c")])
        for id in "ab":
            server.command("HDEL", f"{ROOT}job", id)
            server.command("ZREM", f"{ROOT}w:1:default", id)
        await store.add([job("b", None)])
        assert [each.id for each in (await store.find(BY_CUSTOMER)).jobs] == ["c"]
        await store.cancel(["b"], now_ms=NOW)
        assert await store.delete(["b"]) == [True]
        tags = int(server.command("ZCARD", f"{ROOT}tags")[1:])
        assert tags == 4  # of a and c


def bulk(answer: bytes) -> str:
    return answer.partition(b"\r\n")[2].removesuffix(b"\r\n").decode()


def test_a_line_without_progress_is_as_it_was() -> None:
    started = msgspec.structs.replace(job("a"), started_ms=NOW)
    assert records.started_part(started) == str(NOW)
    assert records.started_part(job("a")) == ""
    assert records.told([started]) is False


@pytest.mark.usefixtures("strict")
async def test_a_job_that_was_replaced_and_moved_leaves_nothing(server: RedisServer) -> None:
    """Each step names its keys, also where the job runs, is parked or has ended."""
    later = {"job": "no", "größe": "x"}

    async with opened(server.url) as store:

        async def put(meta: dict[str, str] | None, queue: str = "other") -> PutOutcome:
            new = msgspec.structs.replace(job("a", meta), queue=queue)
            ask = Put(job=new, if_exists=IfExists.REPLACE, request=new_fence())
            [answer] = await store.put([ask], now_ms=NOW)
            return answer

        async def claim() -> Job:
            [held] = await store.claim(
                ["default", "other"], worker="ann", limit=1, now_ms=NOW, lease_ms=LEASE
            )
            return held

        await store.add([job("a")])
        assert await put(later) == "replaced"
        held = await claim()
        assert await put(META, "default") == "follows"
        assert await store.settle([life.park(held, ended_ms=NOW)], now_ms=NOW) == [True]
        held = await claim()
        await store.settle([life.park(held, ended_ms=NOW)], now_ms=NOW)
        move = Move(id="a", request=new_fence(), queue="other", priority=3)
        assert await store.move([move], now_ms=NOW) == ["moved"]
        await store.cancel(["a"], now_ms=NOW)
        assert await put(None) == "added"
        assert left(server) == ["job"]
        await store.cancel(["a"], now_ms=NOW)
        assert await store.delete(["a"]) == [True]
        assert left(server) == []
        assert await store.queues() == []
        assert server.command("EXISTS", ROOT + "told", ROOT + "asked") == b":0\r\n"
