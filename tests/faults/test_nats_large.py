"""Jobs as large as a NATS server takes, and larger: each is its own trouble, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats_books import Words, opened
from nats_raw import jetstream, raw_server
from processes import running_shop, wait_until

from tickwheel import job as life
from tickwheel.errors import StoreUnavailable, UsageError
from tickwheel.job import CancelOutcome, Job, Outcome, State
from tickwheel.store import Store
from tickwheel.stores.nats import store as nats_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = 64 * 1024
# Texts that are as long in JSON as their characters, twice as long, four times, six times.
TEXTS = {"plain": "x", "quotes": '"', "clocks": "🕰", "controls": "\x01"}


@asynccontextmanager
async def server(folder: Path, max_payload: int = SMALL) -> AsyncIterator[str]:
    """A server that takes so much, on the same data each time; gives the URL of a store."""
    conf = f"{jetstream(folder)}max_payload: {max_payload}\n"
    async with raw_server(folder, conf) as place:
        yield f"nats://{place}/ns"


async def refused(h: Words, job: Job) -> str:
    try:
        await h.store.add([job])
    except UsageError as error:
        return str(error)
    await h.store.cancel([job.id], now_ms=h.now)
    await h.store.delete([job.id])
    return ""


async def largest(h: Words, text: str) -> int:
    """How many of these characters the arguments of a job may have."""
    fits, too_many = 0, SMALL
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if await refused(h, h.job(f"probe-{middle:05}", payload=text * middle)):
            too_many = middle
        else:
            fits = middle
    return fits


@pytest.mark.parametrize("durability", ["strict", "fast"])
@pytest.mark.parametrize("name", TEXTS)
async def test_the_largest_job_that_is_added_lives_through_every_step_beside_others(
    name: str, durability: str, tmp_path: Path
) -> None:
    text = TEXTS[name]
    async with (
        server(tmp_path) as url,
        opened(f"{url}?durability={durability}") as (h, store),
    ):
        payload = text * await largest(h, text)
        said = await refused(h, h.job("probe-extra", payload=payload + text))
        assert "'probe-extra'" in said and "max_payload" in said and f"{SMALL:,}" in said
        await h.add(h.job("large", payload=payload), *h.jobs(20))
        worker, error = "w" * 100, text * 4_000
        held = {job.id: job for job in await h.claim(30, worker=worker, lease_ms=60_000)}
        assert len(held) == 21 and held["large"].payload == payload
        answers = await store.extend(list(held.values()), now_ms=h.now, lease_ms=60_000)
        assert None not in answers
        # Failing again and again, with errors that are as long as errors can be.
        job: Job = next(each for each in answers if each is not None and each.id == "large")
        others = [each for each in answers if each is not None and each.id != "large"]
        for n in range(25):
            lost = life.retry(job, due_ms=h.now, error=error, started_ms=h.now, ended_ms=h.now)
            settlements = [lost, *map(h.done, others)]
            assert await store.settle(settlements, now_ms=h.now) == [True] * len(settlements)
            others = []
            [job] = await h.claim(worker=f"{worker}{n}", lease_ms=60_000)
        assert (job.failures, job.payload, len(job.history) >= 5) == (25, payload, True)
        assert (job.error or "").startswith(text[0])
        assert await store.cancel(["large"], now_ms=h.now) == [CancelOutcome.REQUESTED]
        done = life.done(job, started_ms=h.now, ended_ms=h.now, result=text * SMALL)
        assert await store.settle([done], now_ms=h.now) == [True]
        job = await h.get("large")
        assert (job.state, job.result, job.payload) == (State.DONE, None, payload)
        assert "result" in (job.error or "")
        assert await store.rerun(["large"], now_ms=h.now) == [True]
        [job] = await h.claim(worker=worker, lease_ms=60_000)
        assert await h.settle(life.dead(job, error=error, started_ms=h.now, ended_ms=h.now))
        assert (await h.get("large")).payload == payload
        assert await store.delete(["large"]) == [True]
        assert await h.counts() == {"done": 20}


async def test_of_a_job_that_is_too_large_the_traceback_goes_first(tmp_path: Path) -> None:
    async with server(tmp_path) as url, opened(url) as (h, store):
        payload = "x" * await largest(h, "x")
        await h.add(h.job("large", payload=payload))
        where = "Traceback:\n" + "y" * 8_000
        kept = []
        job = h.job()
        for n in range(8):
            [job] = await h.claim(lease_ms=60_000)
            at = h.now
            outcome = life.retry(
                job, due_ms=at, error=f"{n}: " + "e" * 600, started_ms=at, ended_ms=at,
                traceback=where,
            )  # fmt: skip
            assert await store.settle([outcome], now_ms=h.now) == [True]
            job = await h.get("large")
            kept.append(len(job.traceback or ""))
            assert where.startswith((job.traceback or "").rstrip("…"))
            assert len(job.error or "") >= 600 and len(job.history) == n + 1
        assert kept[0] == 2_000 and kept[-1] == 0, kept
        assert all(len(run.error or "") >= 600 for run in job.history)
        [job] = await h.claim(lease_ms=60_000)
        parked = life.park(job, ended_ms=h.now)
        assert await store.settle([parked], now_ms=h.now) == [True]
        [job] = await h.claim(tasks=[job.task], lease_ms=60_000)
        assert job.payload == payload
        assert await h.settle(h.done(job))


async def test_a_large_job_that_loses_its_workers_is_taken_over(tmp_path: Path) -> None:
    async with server(tmp_path) as url, opened(url) as (h, _):
        payload = "x" * await largest(h, "x")
        await h.add(h.job("large", payload=payload), *h.jobs(5))
        for n in range(3):
            assert len(await h.claim(10, worker=f"{n}" * 100, lease_ms=1_000)) == 6
            await h.pass_time(1_600)
        held = await h.claim(10)
        assert Counter(each.takeovers for each in held) == {3: 6}
        assert {each.payload for each in held} == {"{}", payload}


async def before_and_after(folder: Path) -> AsyncIterator[tuple[Words, Store]]:
    """A store that takes a mebibyte, and then the same one where little is taken."""
    for max_payload in (1 << 20, SMALL):
        async with server(folder, max_payload) as url, opened(url) as (h, store):
            yield h, store


async def test_jobs_that_have_become_too_large_are_dead_with_the_reason_and_the_others_run(
    tmp_path: Path,
) -> None:
    stores = before_and_after(tmp_path)
    h, store = await anext(stores)
    payload = '{"text":"' + "x" * 300_000 + '"}'
    large = [h.job(f"large-{n}", payload=payload, delay_ms=n * 500) for n in range(5)]
    await h.add(*large[:3], *h.jobs(50), *large[3:])
    h, store = await anext(stores)
    await h.pass_time(2_000)
    ids = [job.id for job in await h.claim(100)]
    assert sorted(ids) == [job.id for job in h.jobs(50)]
    for job in [await h.get(each.id) for each in large]:
        assert job.state is State.DEAD
        assert "300," in (job.error or "") and "max_payload" in (job.error or "")
        assert payload.startswith(job.payload) and len(job.payload) > 1_000
    assert await store.rerun([large[0].id], now_ms=h.now) == [True], "it is small by now"
    with pytest.raises(StopAsyncIteration):
        await anext(stores)


async def test_every_step_on_jobs_that_have_become_too_large_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    stores = before_and_after(tmp_path)
    h, store = await anext(stores)
    names = ("extended", "asked", "done", "retried", "released")
    payload = "x" * 300_000
    jobs = [h.job(name, payload=payload) for name in names]
    held = {job.id: job for job in await h.claimed(*jobs, h.job("small"))}
    assert len(held) == 6
    for name in ("waiting", "ended"):
        await h.add(h.job(name, payload=payload, delay_ms=3_600_000))
    await store.cancel(["ended"], now_ms=h.now)
    held = {
        job.id: job
        for job in await store.extend(list(held.values()), now_ms=h.now, lease_ms=60_000)
        if job is not None
    }
    h, store = await anext(stores)
    answers = await store.extend([held["extended"], held["small"]], now_ms=h.now, lease_ms=60_000)
    assert [job and job.id for job in answers] == [None, "small"]
    assert await store.cancel(["asked", "waiting"], now_ms=h.now) == ["requested", "cancelled"]
    assert await store.rerun(["ended"], now_ms=h.now) == [False]
    settlements = [
        h.settlement(Outcome.DONE, held["done"]),
        h.settlement(Outcome.RETRY, held["retried"]),
        h.settlement(Outcome.RELEASE, held["released"]),
        h.settlement(Outcome.DONE, held["small"]),
    ]
    assert await store.settle(settlements, now_ms=h.now) == [True] * 4
    assert await store.settle(settlements, now_ms=h.now) == [True] * 4, "it can be repeated"
    states = {name: (await h.get(name)).state for name in (*names, "waiting", "ended", "small")}
    assert states == {
        "extended": State.RUNNING,
        "asked": State.CANCELLED,
        "done": State.DONE,
        "retried": State.DEAD,
        "released": State.DEAD,
        "waiting": State.CANCELLED,
        "ended": State.CANCELLED,
        "small": State.DONE,
    }
    with pytest.raises(StopAsyncIteration):
        await anext(stores)


async def test_spare_tokens_of_jobs_that_have_become_too_large_hold_up_no_others(
    tmp_path: Path,
) -> None:
    stores = before_and_after(tmp_path)
    h, store = await anext(stores)
    await h.add(*h.jobs(3), h.job("large", payload="x" * 300_000), h.job("last"))
    h, store = await anext(stores)
    messages = await store._first.delivery.take(["default"], 10)  # type: ignore[attr-defined]
    store._first.delivery.keep(messages)  # type: ignore[attr-defined]
    await asyncio.sleep(1.5)
    found = [job.id for job in await h.claim(10)]
    assert sorted(found) == ["job-0000", "job-0001", "job-0002", "last"]
    with pytest.raises(StopAsyncIteration):
        await anext(stores)


async def test_a_job_larger_than_a_pull_asks_for_is_found_and_what_stands_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many queues each is asked for few bytes, but not for fewer than a message may have."""
    stores = before_and_after(tmp_path)
    h, _ = await anext(stores)
    await h.add(*h.jobs(3), h.job("large", payload="x" * 300_000), h.job("last"))
    h, _ = await anext(stores)
    monkeypatch.setattr(nats_store, "BATCH_BYTES", 1)
    found: list[str] = []
    for _ in range(10):
        found += [job.id for job in await h.claim(10)]
    assert sorted(found) == ["job-0000", "job-0001", "job-0002", "last"]
    assert (await h.get("large")).state is State.DEAD
    with pytest.raises(StopAsyncIteration):
        await anext(stores)


# --- Real workers


async def test_workers_run_innocent_jobs_once_beside_the_largest_and_the_loudest(
    tmp_path: Path,
) -> None:
    async with server(tmp_path / "nats") as url, opened(url) as (h, _):
        text = "x" * (await largest(h, "x") - 40)
        await h.add(
            *(h.job(f"large-{n}", task="fail", payload=f'{{"text":"{text}"}}') for n in range(3)),
            *(h.job(f"loud-{n}", task="fail", payload='{"text":"loud"}') for n in range(3)),
        )
        innocent = [
            h.job(f"innocent-{n:03}", task="work", payload='{"seconds":0.2}', delay_ms=n * 5)
            for n in range(400)
        ]
        await h.add(*innocent)
        with running_shop(tmp_path) as shop:
            shop.env["TICKWHEEL_STORE"] = url
            workers = [shop.worker(), shop.worker()]

            def over() -> bool:
                """All innocent jobs have ended, and every other one has failed three times."""
                again = {event.id for event in shop.events("fail") if event.attempt > 3}
                return len(shop.events("end")) >= 400 and len(again) == 6

            wait_until(
                lambda: over() or any(each.died() for each in workers),
                within_s=60,
                what="400 innocent jobs, and three failures of each other one",
            )
            assert not any(each.died() for each in workers), [each.log for each in workers]
            ran = Counter(event.id for event in shop.events("start"))
            assert ran == {job.id: 1 for job in innocent}
        jobs = [await h.get(f"{kind}-{n}") for kind in ("large", "loud") for n in range(3)]
        assert all(job.failures >= 3 and not job.takeovers for job in jobs)


async def test_workers_on_a_server_that_takes_less_than_it_did_run_the_innocent_jobs_once(
    tmp_path: Path,
) -> None:
    stores = before_and_after(tmp_path / "nats")
    h, store = await anext(stores)
    large = [
        h.job(f"large-{n}", task="fail", payload=f'{{"text":"{"x" * 200_000}"}}', delay_ms=n * 700)
        for n in range(4)
    ]
    innocent = [
        h.job(f"innocent-{n:03}", task="work", payload='{"seconds":0.1}', delay_ms=n * 10)
        for n in range(200)
    ]
    await h.add(*large, *innocent)
    h, store = await anext(stores)
    with running_shop(tmp_path) as shop:
        shop.env["TICKWHEEL_STORE"] = url_of(store)
        worker = shop.worker()
        wait_until(
            lambda: len(shop.events("end")) >= 200 or worker.died(),
            within_s=60,
            what="200 innocent jobs",
        )
        assert not worker.died(), worker.log
        assert Counter(event.id for event in shop.events("start")) == {
            job.id: 1 for job in innocent
        }
        assert not shop.events("fail")
    assert [(await h.get(job.id)).state for job in large] == [State.DEAD] * 4
    with pytest.raises(StopAsyncIteration):
        await anext(stores)


def url_of(store: object) -> str:
    [(host, port)] = store._options.hosts  # type: ignore[attr-defined]
    return f"nats://{host}:{port}/ns"


@pytest.mark.parametrize("id", ["{n:04}", "🕰" * 190 + "{n:04}"], ids=["short ids", "long ids"])
async def test_many_jobs_at_once_ask_for_no_more_than_the_server_takes(
    id: str, tmp_path: Path
) -> None:
    async with server(tmp_path, 16 * 1024) as url, opened(url) as (h, store):
        jobs = [h.job(id.format(n=n)) for n in range(600)]
        await h.add(*jobs)
        assert await store.add(jobs) == [False] * len(jobs)
        assert None not in await store.get([job.id for job in jobs])
        held: list[Job] = []
        while len(held) < len(jobs):
            held += await h.claim(len(jobs), lease_ms=60_000)
        assert await store.settle(list(map(h.done, held)), now_ms=h.now) == [True] * len(jobs)
        assert await store.prune([State.DONE], before_ms=h.now + 60_000, limit=1_000) == len(jobs)


async def test_an_outcome_that_nearly_fills_a_message_is_kept_whatever_the_id(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as url, opened(url) as (h, store):
        for room in range(500, 4_000, 250):
            await h.add(h.job("🕰" * 195 + f"{room:05}"))
            [job] = await h.claim(lease_ms=60_000)
            result = "x" * (SMALL - room)
            done = life.done(job, started_ms=h.now, ended_ms=h.now, result=result)
            assert await store.settle([done], now_ms=h.now) == [True]


async def test_a_server_that_takes_small_batches_gets_small_batches(tmp_path: Path) -> None:
    limits = "limits { batch { max_msgs: 100 } }"
    conf = jetstream(tmp_path).replace("jetstream {", f"jetstream {{ {limits},", 1)
    assert limits in conf
    async with raw_server(tmp_path, conf) as place, opened(f"nats://{place}/ns") as (h, store):
        jobs = h.jobs(500)
        with contextlib.suppress(StoreUnavailable):
            await store.add(jobs)
        await store.add(jobs)
        held: list[Job] = []
        while len(held) < len(jobs):
            held += await h.claim(len(jobs), lease_ms=60_000)
        assert await store.settle(list(map(h.done, held)), now_ms=h.now) == [True] * len(jobs)
