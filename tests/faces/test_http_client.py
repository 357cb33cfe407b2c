"""`HttpClient` and `AsyncHttpClient`: each verb, on a served app with a worker."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from http_faces import FACES, Face, FaceName, facing
from http_server import PATIENCE_S, Shop, served, shop
from worker_process import environment

from tickwheel import (
    AccessDenied,
    App,
    AsyncHttpClient,
    BadArguments,
    BadConfig,
    BadSchedule,
    BadTime,
    CancelOutcome,
    HttpClient,
    JobCancelled,
    JobFailed,
    JobInfo,
    JobsRefused,
    JobUnknown,
    Priority,
    QueueInfo,
    ResultTimeout,
    State,
    UnknownSchedule,
    UnknownTask,
)
from tickwheel.callbacks import Callbacks

JSON = {"content-type": "application/json"}

both = pytest.mark.parametrize("name", FACES)


@asynccontextmanager
async def opened(
    folder: Path, name: FaceName, *, app: App | None = None
) -> AsyncIterator[tuple[Shop, Face]]:
    """A served shop with keys, and a client that may do everything."""
    async with (
        served(app or shop(folder), keys=True) as its,
        facing(name, its.url, key=its.texts[0]) as face,
    ):
        yield its, face


# --- Add


@both
async def test_a_job_with_every_option(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        at = datetime(2031, 1, 31, 9, 30, tzinfo=UTC)
        pack = face.client.task("pack").using(
            at=at,
            id="order-42",
            queue="rush",
            priority="high",
            retries=3,
            timeout="90s",
            expires=timedelta(minutes=10),
            meta={"customer": "42"},
        )
        job = await face.do(pack.enqueue, order=42)
        assert (job.id, job.added, repr(job)) == ("order-42", True, "<job order-42>")
        assert not (await face.do(pack.enqueue, order=43)).added
        info = await face.do(job.info)
        assert isinstance(info, JobInfo)
        # The same as in the process that has the store, but for what is not shown.
        assert info == await its.app.job("order-42").info()
        assert (info.due, info.priority, info.queue) == (at, Priority.HIGH, "rush")
        [stored] = await (await its.app.client()).store.get(["order-42"])
        assert stored is not None and (stored.retries, stored.timeout_ms) == (3, 90_000)


@both
async def test_a_delay_counts_from_now(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        job = await face.do(face.client.task("pack").using(delay="1h30m").enqueue, order=1)
        info = await face.do(job.info)
        assert info.due - info.created == timedelta(minutes=90)


@both
async def test_options_add_up(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        rush = face.client.task("pack").using(queue="rush", delay="1h")
        job = await face.do(rush.using(delay="2h", meta={"a": "b"}).enqueue, order=1)
        info = await face.do(job.info)
        assert (info.queue, info.meta) == ("rush", {"a": "b"})
        assert info.due - info.created == timedelta(hours=2)


@both
async def test_results_and_big_integers_are_exact(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face), its.app.worker(queues=["default", "mail"]):
        big = -(10**40) - 1
        job = await face.do(face.client.task("pack").enqueue, order=big)
        assert await face.do(job.result, timeout=PATIENCE_S) == {"order": big}
        info = await face.do(job.info)
        assert info == await its.app.job(job.id).info()
        assert info.arguments == {"order": big} and info.history
        dead = await face.do(face.client.task("send").enqueue, to="ann")
        with pytest.raises(JobFailed, match="no mailbox for ann"):
            await face.do(dead.result, timeout=PATIENCE_S)


@both
async def test_a_result_that_does_not_come(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        job = await face.do(face.client.task("pack").using(delay="1h").enqueue, order=1)
        with pytest.raises(ResultTimeout, match=r"still waiting after 0\.1 s"):
            await face.do(job.result, timeout=0.1)
        await face.do(job.cancel)
        with pytest.raises(JobCancelled, match="was cancelled"):
            await face.do(job.result)
        with pytest.raises(JobUnknown, match="no job has the id 'nope'"):
            await face.do(face.client.job("nope").result)


@both
@pytest.mark.parametrize(
    "id", [".", "..", "...", "a/b", "/", "a%2Fb", "ünï 漢字 🙂", "?a=b#c", "+"]
)
async def test_odd_ids(tmp_path: Path, name: FaceName, id: str) -> None:
    async with opened(tmp_path, name) as (its, face):
        job = await face.do(face.client.task("pack").using(id=id, delay="1h").enqueue, order=1)
        assert job.id == id and (await face.do(job.info)).id == id
        assert (await face.do(job.explain)).id == id
        assert await face.do(face.client.cancel, id) is CancelOutcome.CANCELLED
        assert (await its.app.job(id).info()).state is State.CANCELLED
        assert await face.do(job.delete)


@both
async def test_many_are_added_in_portions(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        pack = face.client.task("pack").using(delay="1h", meta={"batch": "7"})
        jobs = (pack.job(order=number) for number in range(2001))
        handles = await face.do(face.client.enqueue_many, jobs)
        assert len({each.id for each in handles}) == 2001 and all(each.added for each in handles)
        found = await face.all(state="waiting", meta={"batch": "7"})
        assert sorted(info.arguments["order"] for info in found) == list(range(2001))
        batches = [each for each in await its.entries() if each.action == "add_jobs"]
        counts = [each.detail.partition(":")[0] for each in batches]
        assert counts == ["1000 of 1000 changed", "1000 of 1000 changed", "1 of 1 changed"]
        assert handles[0].id in batches[0].detail and len(batches[0].detail) <= 1000
        outcomes = await face.do(face.client.cancel, [*handles, "nope"])
        assert outcomes == [CancelOutcome.CANCELLED] * 2001 + [CancelOutcome.UNKNOWN]


@both
async def test_the_portions_of_large_jobs_fit_into_a_request(
    tmp_path: Path, name: FaceName
) -> None:
    async with opened(tmp_path, name) as (_, face):
        pack = face.client.task("pack").using(delay="1h")
        jobs = [pack.job(order=number, note="x" * 900_000) for number in range(20)]
        assert len(await face.do(face.client.enqueue_many, jobs)) == 20


@both
async def test_each_job_that_is_refused_is_named(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        pack, nope = face.client.task("pack"), face.client.task("nope")
        jobs = [pack.job(order=1), pack.job(order="?"), nope.job(), pack.job(order=2)]
        with pytest.raises(JobsRefused, match="2 of 4 jobs were refused; number 1: ") as refused:
            await face.do(face.client.enqueue_many, jobs)
        errors, handles = refused.value.errors, refused.value.handles
        assert {index: type(each) for index, each in errors.items()} == {
            1: BadArguments,
            2: UnknownTask,
        }
        assert (await face.do(handles[3].info)).arguments == {"order": 2}
        assert len(await face.all()) == 2 and handles.keys() == {0, 3}
        assert pickle.loads(pickle.dumps(refused.value)).errors.keys() == errors.keys()


@both
async def test_callbacks(tmp_path: Path, name: FaceName) -> None:
    app = shop(tmp_path)
    async with opened(tmp_path, name, app=app) as (_, face):
        with pytest.raises(BadConfig, match=r"http\.call"):
            await face.do(face.client.callbacks.call, "https://example.com/hook")
        Callbacks(app)
        call = face.client.callbacks.using(delay="1h", id="hook")
        job = await face.do(
            call.call, "https://example.com/hook", headers={"X-Order": "42"}, body={"order": 42}
        )
        info = await face.do(job.info)
        assert (info.task, info.arguments["headers"]) == ("http.call", {"x-order": "42", **JSON})
        [stored] = await (await app.client()).store.get(["hook"])
        assert stored is not None and r"{\"order\":42}" in stored.payload
        with pytest.raises(BadArguments, match="not bytes"):
            call.job("https://example.com", body=b"x")


# --- Find and change


@both
async def test_pages(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        ids = {await its.add(delay="1h") for _ in range(5)}
        await its.add("send", delay="1h")
        page = await face.do(face.client.find, task="pack", state="waiting", limit=3)
        rest = await face.do(face.client.find, task="pack", limit=3, cursor=page.cursor)
        assert {info.id for info in [*page.jobs, *rest.jobs]} == ids
        assert page.cursor is not None and rest.cursor is None
        with pytest.raises(BadArguments, match="must be one of waiting"):
            await face.do(face.client.find, state="wating")
        with pytest.raises(BadArguments, match="from 1 to 1,000"):
            await face.do(face.client.find, limit=0)


@both
async def test_cancel_rerun_and_delete(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        client = face.client
        job = await face.do(client.task("pack").using(delay="1h").enqueue, order=1)
        assert not await face.do(job.rerun) and not await face.do(job.delete)
        assert await face.do(job.cancel) is CancelOutcome.CANCELLED
        assert await face.do(job.cancel) is CancelOutcome.TOO_LATE
        assert await face.do(job.rerun)
        assert await face.do(client.cancel, job) is CancelOutcome.CANCELLED
        assert await face.do(client.rerun, [job, "nope"]) == [True, False]
        assert await face.do(client.cancel, [job.id]) == [CancelOutcome.CANCELLED]
        assert await face.do(client.cancel, [job, "nope", job]) == [
            CancelOutcome.TOO_LATE,
            CancelOutcome.UNKNOWN,
            CancelOutcome.TOO_LATE,
        ]
        assert await face.do(client.delete, [job.id, "nope"]) == [True, False]
        assert await face.do(client.cancel, []) == []
        with pytest.raises(JobUnknown):
            await face.do(job.info)
        with pytest.raises(BadArguments, match="takes a job's id"):
            await face.do(client.cancel, 42)


@both
async def test_changes_by_filter(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        client = face.client
        ids = {await its.add(delay="1h", meta={"a": "b"}) for _ in range(3)}
        await its.add("send", delay="1h")
        some = await face.do(client.cancel_matching, task="pack", limit=2)
        assert (some.changed, some.more) == (2, True)
        assert set(some.outcomes.values()) == {"cancelled"}
        rest = await face.do(client.cancel_matching, meta={"a": "b"}, since=its_birth())
        assert some.outcomes.keys() | rest.outcomes.keys() == ids and not rest.more
        again = await face.do(client.rerun_matching, state="cancelled", queue="default")
        assert again.outcomes.keys() == ids
        await face.do(client.cancel_matching, task="pack")
        gone = await face.do(client.delete_matching, state=State.CANCELLED)
        assert gone.changed == 3 and len(await face.all()) == 1
        with pytest.raises(BadArguments, match="filter is empty"):
            await face.do(client.cancel_matching)
        with pytest.raises(BadArguments, match="did you mean state"):
            await face.do(client.cancel_matching, stat="dead")


def its_birth() -> datetime:
    return datetime(2020, 1, 1, tzinfo=UTC)


@both
async def test_dead_jobs(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        client = face.client
        async with its.app.worker(queues=["mail"]):
            for _ in range(3):
                job = await face.do(client.task("send").enqueue, to="ann")
                with pytest.raises(JobFailed):
                    await face.do(job.result, timeout=PATIENCE_S)
        waiting = await its.add(delay="1h")
        page = await face.do(client.dead.find, task="send", limit=2)
        assert len(page.jobs) == 2 and page.cursor is not None
        dead = [info.id for info in page.jobs]
        done = await face.do(client.dead.rerun, [dead[0], waiting])
        assert (done.changed, done.outcomes) == (1, {dead[0]: "rerun", waiting: "not_dead"})
        done = await face.do(client.dead.delete, [dead[1]])
        assert done.outcomes == {dead[1]: "deleted"}
        assert (await face.do(client.dead.delete)).changed == 1
        assert (await face.do(client.dead.rerun, queue="mail")).changed == 0
        with pytest.raises(BadArguments, match="not both"):
            await face.do(client.dead.rerun, dead, task="send")


# --- Schedules, queues, workers


@both
async def test_schedules(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        schedules = face.client.schedules
        end = datetime(2040, 1, 1, tzinfo=UTC)
        put = await face.do(
            schedules.put,
            "nightly",
            "pack",
            cron="0 2 * * *",
            tz="Europe/Paris",
            arguments={"order": 10**30},
            end=end,
            overlap="skip",
            spread="1m",
        )
        [stored] = await its.app.schedules.list()
        assert stored.rule is not None and str(10**30) in stored.rule.payload
        assert (stored.rule.end_ms, stored.rule.spread_ms) == (2_208_988_800_000, 60_000)
        for field in ("name", "task", "explained", "next", "paused", "last_id", "problem"):
            assert getattr(put, field) == getattr(stored, field), field
        assert await face.do(schedules.get, "nightly") == put
        assert await face.do(schedules.list) == [put]
        after = datetime(2030, 6, 1, tzinfo=UTC)
        ticks = await face.do(schedules.next, "nightly", count=2, after=after)
        assert ticks == [after + timedelta(days=day) for day in (1, 2)]
        await face.do(schedules.pause, "nightly")
        assert (await face.do(schedules.get, "nightly")).paused
        await face.do(schedules.resume, "nightly")
        job = face.client.job(await face.do(schedules.run, "nightly"))
        assert (await face.do(job.info)).arguments == {"order": 10**30}
        assert await face.do(schedules.delete, "nightly")
        assert not await face.do(schedules.delete, "nightly")


@both
async def test_schedules_that_can_not_be(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        schedules = face.client.schedules
        for verb in (schedules.get, schedules.pause, schedules.resume, schedules.run):
            with pytest.raises(UnknownSchedule, match="'nope'"):
                await face.do(verb, "nope")
        with pytest.raises(BadSchedule, match="99"):
            await face.do(schedules.put, "s", "pack", cron="99 * * * *", arguments={"order": 1})
        with pytest.raises(UnknownTask):
            await face.do(schedules.put, "s", "nope", every="1h")
        with pytest.raises(BadConfig, match="schedule name"):
            await face.do(schedules.get, "a/b")


@both
async def test_queues_workers_tasks_and_counts(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (its, face):
        client = face.client
        await its.add(delay="1h")
        await face.do(client.pause, "default")
        assert await face.do(client.queues) == [QueueInfo(name="default", paused=True, waiting=1)]
        await face.do(client.resume, "default")
        assert await face.do(client.queues) == await its.app.queues()
        assert await face.do(client.workers) == []
        async with its.app.worker():
            async with asyncio.timeout(PATIENCE_S):
                while not (found := await face.do(client.workers)):
                    pass
            [worker] = found
            [known] = await its.app.workers()
            assert (worker.name, worker.queues) == (known.name, known.queues)
            assert worker.seen.timestamp() * 1000 >= known.started_ms
        [pack, send] = await face.do(client.tasks)
        assert (pack.name, pack.parameters[0], send.queue) == ("pack", "order", "mail")
        stats = await face.do(client.stats)
        assert (stats.waiting, stats.queues) == (1, 1)
        assert "versions" in {finding.about for finding in await face.do(client.doctor)}


# --- What is refused


@both
async def test_keys_that_are_wrong_or_may_not_do_it(tmp_path: Path, name: FaceName) -> None:
    async with served(shop(tmp_path), keys=True) as its:
        wrong = "tw_0123456789abcdef_" + "w" * 40
        for key, words in ((wrong, "key"), (None, "key")):
            async with facing(name, its.url, key=key) as face:
                with pytest.raises(AccessDenied, match=words) as denied:
                    await face.do(face.client.queues)
                assert wrong not in repr(face.client) + repr(denied.value) + repr(vars(face.client))
        await its.key("enqueue", tasks=["pack"])
        async with facing(name, its.url, key=its.texts[-1]) as face:
            job = await face.do(face.client.task("pack").enqueue, order=1)
            with pytest.raises(AccessDenied, match="lacks the scope read"):
                await face.do(job.info)
            with pytest.raises(AccessDenied, match="may not use the task 'send'"):
                await face.do(face.client.task("send").enqueue, to="ann")
            jobs = [face.client.task("send").job(to="ann")]
            with pytest.raises(JobsRefused) as refused:
                await face.do(face.client.enqueue_many, jobs)
            assert isinstance(refused.value.errors[0], AccessDenied)


@both
async def test_mistakes_are_found_before_anything_is_sent(name: FaceName) -> None:
    async with facing(name, "http://127.0.0.1:9") as face:
        pack = face.client.task("pack")
        for options, kind in (
            ({"delay": "1h", "at": its_birth()}, BadTime),
            ({"at": its_birth().replace(tzinfo=None)}, BadTime),
            ({"delay": "soon"}, BadTime),
            ({"queue": "a b"}, BadConfig),
            ({"priority": "vip"}, BadConfig),
            ({"id": ""}, BadArguments),
            ({"meta": {"a": 1}}, BadArguments),
            ({"dealy": "1h"}, BadArguments),
        ):
            with pytest.raises(kind):
                pack.using(**options)
        with pytest.raises(BadArguments, match="by name"):
            pack.job(42)
        for value in (float("nan"), object(), "\ud800"):
            with pytest.raises(BadArguments, match="can't be written as JSON"):
                pack.job(order=value)
        with pytest.raises(BadArguments, match="store the data elsewhere"):
            pack.job(note="x" * 1024 * 1024)
        with pytest.raises(BadArguments, match="created with"):
            await face.do(face.client.enqueue_many, ["x"])


@pytest.mark.parametrize("kind", [HttpClient, AsyncHttpClient])
@pytest.mark.parametrize(
    "url, options, words",
    [
        ("ftp://a", {}, "must be as https"),
        ("a.example.com", {}, "must be as https"),
        ("https://a/?b", {}, "must be as https"),
        ("https://user:s3cret@a", {}, "has a login"),
        ("https://a:99999", {}, "can't be read"),
        (42, {}, "must be a str"),
        ("http://a", {"key": "s3cret\nX: y"}, "without spaces"),
        ("http://a", {"timeout": 0}, "no time"),
        ("http://a", {"connections": 0}, "from 1 to 1,000"),
        ("https://a", {"ca_file": "/nope.pem"}, "can't be used"),
        ("http://a", {"keys": "x"}, "did you mean key"),
    ],
)
def test_settings_that_can_not_be(kind: Any, url: Any, options: Any, words: str) -> None:
    with pytest.raises((BadConfig, BadArguments), match=words) as refused:
        kind(url, **options)
    assert "s3cret" not in str(refused.value)


def test_the_package_itself_does_not_import_it() -> None:
    code = (
        "import sys, tickwheel; print('tickwheel.http_client' in sys.modules); "
        "tickwheel.HttpClient; print('starlette' in sys.modules, 'aiohttp' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.split()
    assert said == ["False"] * 3


async def test_a_client_serves_many_callers_at_once(tmp_path: Path) -> None:
    async with served(shop(tmp_path)) as its:
        async with AsyncHttpClient(its.url, connections=3) as client:
            pack = client.task("pack").using(delay="1h")
            jobs = await asyncio.gather(*(pack.enqueue(order=number) for number in range(50)))
            infos = await asyncio.gather(*(job.info() for job in jobs))
            assert [info.arguments["order"] for info in infos] == list(range(50))
        with pytest.raises(BadConfig, match="closed"):
            await client.queues()


@both
async def test_jobs_are_replaced_and_moved(tmp_path: Path, name: FaceName) -> None:
    async with opened(tmp_path, name) as (_, face):
        call = face.client.task("pack").using(id="a", delay="1h")
        first = await face.do(call.enqueue, order=1)
        again = await face.do(call.enqueue, order=2)
        assert (first.answer, again.answer, again.added) == ("added", "kept", False)
        other = await face.do(call.using(if_exists="replace").enqueue, order=3)
        assert (other.answer, repr(other)) == ("replaced", "<job a replaced>")
        assert (await face.do(other.info)).arguments["order"] == 3
        assert await face.do(other.move, delay="2h", queue="slow") == "moved"
        assert await face.do(face.client.move, ["a", "none"], priority="low") == [
            "moved",
            "unknown",
        ]
        moved = await face.do(face.client.move_matching, queue="slow", to={"later": "1h"})
        assert moved.changed == 1
        with pytest.raises(BadArguments, match="needs an id"):
            face.client.task("pack").using(if_exists="replace")
        with pytest.raises(BadArguments, match="move where"):
            await face.do(face.client.move, "a")
