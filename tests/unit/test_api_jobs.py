"""Naming jobs, finding them, and what their infos show."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from an_app import add, app

from tickwheel import (
    App,
    BadArguments,
    CancelOutcome,
    JobInfo,
    State,
    UnknownTask,
    UsageError,
)
from tickwheel.job import Job
from tickwheel.jobs import PAGE_MOST
from tickwheel.testing import sandbox

__all__ = ["app"]

STEPS = ["cancel", "rerun", "delete"]


# --- One job or many


@pytest.mark.parametrize("step", [*STEPS, "info", "result"])
async def test_the_handle_of_another_app_is_refused(app: App, step: str) -> None:
    other = App("memory://")
    theirs, own = [await a.task(add).using(id="same", delay=60).enqueue(1) for a in (other, app)]
    with pytest.raises(BadArguments, match="the handle of job same is of another app; use that"):
        timeout = [0.1] if step == "result" else []
        await asyncio.to_thread(getattr(app.sync, step), theirs, *timeout)
    if step in STEPS:
        for jobs in (theirs, [own.id, theirs]):
            with pytest.raises(BadArguments, match="is of another app"):
                await getattr(app, step)(jobs)
    assert (await own.info()).state is State.WAITING


async def test_a_parameter_may_be_named_self(app: App) -> None:
    @app.task
    def mention(self: int) -> int:
        return self

    async with sandbox(app) as box:
        assert (await (await mention.enqueue(self=2)).info()).arguments == {"self": 2}
        box.assert_enqueued(mention, self=2)
        box.assert_not_enqueued(mention, self=3)
    handle = await asyncio.to_thread(mention.enqueue_sync, self=1)
    assert (await handle.info()).payload == mention.job(self=1).payload == '{"self":1}'
    assert mention(self=3) == 3


async def test_a_handle_of_an_apps_sandbox_is_the_apps_own(app: App) -> None:
    task = app.task(add)
    async with sandbox(app):
        assert await app.cancel(await task.using(id="a", delay=60).enqueue(1)) == "cancelled"
        handle = await task.using(id="b", delay=60).enqueue(1)
    assert await app.cancel(handle) is CancelOutcome.UNKNOWN


async def test_one_job_is_cancelled_by_its_id_or_its_handle(app: App) -> None:
    task = app.task(add)
    by_id, by_handle = [await task.using(id=id, delay=60).enqueue(1) for id in ("ab", "cd")]
    assert await app.cancel("ab") is CancelOutcome.CANCELLED
    assert await app.cancel(by_handle) is CancelOutcome.CANCELLED
    assert await app.cancel("a") is CancelOutcome.UNKNOWN
    assert [(await job.info()).state for job in (by_id, by_handle)] == [State.CANCELLED] * 2


@pytest.mark.parametrize("kind", [list, tuple, iter])
async def test_many_jobs_are_answered_with_a_list(app: App, kind: Any) -> None:
    task = app.task(add)
    handle = await task.using(id="cd", delay=60).enqueue(1)
    await task.using(id="ab", delay=60).enqueue(1)
    wanted = [CancelOutcome.CANCELLED, CancelOutcome.UNKNOWN, CancelOutcome.CANCELLED]
    assert await app.cancel(kind(["ab", "x", handle])) == wanted
    assert await app.rerun(kind([handle, "x"])) == [True, False]
    assert await app.delete(kind(["ab", handle])) == [True, False]
    assert await app.cancel(kind([])) == []


async def test_one_job_is_rerun_and_deleted(app: App) -> None:
    job = await app.task(add).using(id="ab", delay=60).enqueue(1)
    assert await app.rerun(job) is False
    assert await app.delete("ab") is False
    await app.cancel(job)
    assert await app.rerun("ab") is True
    await app.cancel(job)
    assert await app.delete(job) is True


WRONG: list[Callable[[], Any]] = [
    lambda: None,
    lambda: 5,
    lambda: b"ab",
    lambda: {"ab": 1},
    lambda: ["ab", None],
    lambda: [["ab"]],
    lambda: Job(id="ab", task="add", payload="{}", due_ms=0, created_ms=0),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("wrong", WRONG)
async def test_what_names_no_job_is_refused(app: App, step: str, wrong: Callable[[], Any]) -> None:
    await app.task(add).using(id="ab", delay=60).enqueue(1)
    words = f"{step}() takes a job's id, its handle, or a list of these, not "
    with pytest.raises(BadArguments, match=re.escape(words)):
        await getattr(app, step)(wrong())
    with pytest.raises(BadArguments, match=re.escape(words)):
        getattr(app.sync, step)(wrong())
    assert (await app.job("ab").info()).state is State.WAITING
    app.sync.close()


@pytest.mark.parametrize("wrong", [None, 5, b"ab", ["ab"]])
def test_one_job_without_await_is_named_by_its_id_or_its_handle(app: App, wrong: Any) -> None:
    for step in (app.sync.info, app.sync.result):
        with pytest.raises(BadArguments, match="give a job's id or its handle, not"):
            step(wrong)
    app.sync.close()


# --- The same id again


async def test_the_handle_of_a_taken_id_says_that_nothing_was_added(app: App) -> None:
    task = app.task(add)
    first = await task.using(id="a", delay=60).enqueue(1)
    assert repr(first) == "<job a>"
    await first.cancel()
    again = await task.using(id="a").enqueue(2)
    assert (repr(again), again.added) == ("<job a kept>", False)
    [many] = await app.enqueue_many([task.using(id="a").job(3)])
    assert repr(many) == "<job a kept>"
    info = await again.info()
    assert (info.state, info.arguments) == (State.CANCELLED, {"a": 1})


# --- Find


async def filled(app: App) -> None:
    task = app.task(add)
    other = app.task(name="other", queue="mail")(add)
    await task.using(id="a", delay=60).enqueue(1)
    await task.using(id="b", delay=60).enqueue(1, b=2)
    await other.using(id="c", delay=60).enqueue(3)
    await app.cancel("b")


def ids(infos: Iterable[JobInfo]) -> list[str]:
    return sorted(info.id for info in infos)


async def test_find_takes_plain_arguments(app: App) -> None:
    await filled(app)
    assert ids((await app.find()).jobs) == ["a", "b", "c"]
    assert ids((await app.find(state="waiting")).jobs) == ["a", "c"]
    assert ids((await app.find(state=State.CANCELLED)).jobs) == ["b"]
    assert ids((await app.find(queue="mail")).jobs) == ["c"]
    assert ids((await app.find(task="add", state="waiting")).jobs) == ["a"]
    first = await app.find(limit=2)
    rest = await app.find(limit=2, cursor=first.cursor)
    assert (ids([*first.jobs, *rest.jobs]), rest.cursor) == (["a", "b", "c"], None)
    assert ids(app.sync.find(state="waiting").jobs) == ["a", "c"]
    app.sync.close()


async def test_find_takes_one_pair_of_meta(app: App) -> None:
    task = app.task(add)
    metas = [{"customer": "42", "batch": "7"}, {"customer": "43"}, None]
    await app.enqueue_many(
        [
            msgspec.structs.replace(task.using(id=id, delay=60).job(1), meta=meta)
            for id, meta in zip("abc", metas, strict=True)
        ]
    )
    assert ids((await app.find(meta={"customer": "42"})).jobs) == ["a"]
    assert ids((await app.find(meta={"batch": "7"}, state="dead")).jobs) == []
    assert [info.id async for info in app.find_all(meta={"customer": "43"})] == ["b"]
    assert ids(app.sync.find(meta={"customer": "42"}).jobs) == ["a"]
    assert ids(app.sync.find_all(meta={"customer": "43"}, task="add")) == ["b"]
    app.sync.close()


async def test_meta_of_jobs_made_by_hand_is_checked(app: App) -> None:
    task = app.task(add)
    good, bad = (
        msgspec.structs.replace(task.using(delay=60).job(1), meta={"customer": value})
        for value in ("42", "4" * 257)
    )
    with pytest.raises(BadArguments, match="257 characters"):
        await app.enqueue_many([good, bad])
    assert await app.queues() == []


async def test_find_gives_what_info_gives(app: App) -> None:
    await filled(app)
    for info in (await app.find()).jobs:
        assert info == await app.job(info.id).info() == app.sync.info(info.id)
    app.sync.close()


async def test_find_all_reads_page_after_page(app: App) -> None:
    task = app.task(add)
    count = PAGE_MOST + 1
    await app.enqueue_many([task.using(delay=60).job(n) for n in range(count)])
    found = [info.arguments["a"] async for info in app.find_all(state="waiting")]
    assert sorted(found) == list(range(count))
    assert len(list(app.sync.find_all(task="add"))) == count
    assert [info async for info in app.find_all(state="dead")] == []
    app.sync.close()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"state": "waitin"}, "state='waitin': must be one of waiting, running, done, dead, cancelled"),
    ({"state": "waitin"}, "; did you mean waiting?"),
    ({"state": 5}, "state=5: must be one of"),
    ({"state": ["dead"]}, "state=['dead']: must be one of"),
    ({"queue": 5}, "queue=5: must be a str"),
    ({"task": add}, "must be a str"),
    ({"meta": {}}, "meta={}: must be one name and its value, as {'customer': '42'}"),
    ({"meta": {"a": "1", "b": "2"}}, "must be one name and its value"),
    ({"meta": "customer=42"}, "must be a dict of strings"),
    ({"meta": {"customer": 42}}, "meta['customer']=42: must be a str"),
    ({"stat": "dead"}, "has no option 'stat'; did you mean state?"),
    ({"colour": "red"}, "has no option 'colour'; it has state, queue, task"),
]
PAGES: list[tuple[dict[str, Any], str]] = [
    ({"limit": "5"}, "limit='5': must be a whole number from 1 to 1,000"),
    ({"limit": 0}, "limit=0: must be"),
    ({"limit": -1}, "limit=-1: must be"),
    ({"limit": 1001}, "limit=1001: must be"),
    ({"limit": True}, "limit=True: must be"),
    ({"limit": 1.5}, "limit=1.5: must be"),
    ({"cursor": 5}, "cursor=5: must be a str"),
    ({"cursor": b"x"}, "must be a str"),
]


@pytest.mark.parametrize(("asked", "words"), [*REFUSED, *PAGES])
async def test_a_wrong_question_is_refused_before_the_store_is_asked(
    asked: dict[str, Any], words: str
) -> None:
    # Nobody is there: the answer does not depend on the store.
    app = App("redis://127.0.0.1:9")
    with pytest.raises(BadArguments, match=re.escape(words)):
        await app.find(**asked)
    with pytest.raises(BadArguments, match=re.escape(words)):
        app.sync.find(**asked)


@pytest.mark.parametrize(("asked", "words"), REFUSED)
def test_a_wrong_question_for_all_is_refused_at_the_call(
    app: App, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadArguments, match=re.escape(words)):
        app.find_all(**asked)
    with pytest.raises(BadArguments, match=re.escape(words)):
        app.sync.find_all(**asked)


async def test_a_cursor_of_no_page_is_refused(app: App) -> None:
    with pytest.raises(
        BadArguments,
        match="'x' is not a cursor of this query; use the one that the previous page returned",
    ):
        await app.find(cursor="x")


# --- Arguments and results, decoded


@dataclass
class Parcel:
    id: int
    sent: datetime


async def test_arguments_and_results_are_shown_in_their_types(app: App) -> None:
    parcel = Parcel(1, datetime(2030, 1, 1, tzinfo=UTC))

    @app.task
    async def send(parcel: Parcel, *parts: int, loud: bool = False, **more: str) -> Parcel:
        return parcel

    async with app.worker():
        job = await send.enqueue(parcel, 1, 2, x="y")
        await job.result(timeout=10)
        info = await app.job(job.id).info()
    assert info.arguments == {"parcel": parcel, "parts": [1, 2], "more": {"x": "y"}}
    assert info.result == parcel == await app.job(job.id).result()
    assert info.payload == (
        '{"parcel":{"id":1,"sent":"2030-01-01T00:00:00Z"},"parts":[1,2],"more":{"x":"y"}}'
    )
    assert info.result_json == '{"id":1,"sent":"2030-01-01T00:00:00Z"}'
    assert (await app.find()).jobs == [info]


@pytest.mark.parametrize(
    ("payload", "arguments"),
    [
        ('{"a":"no int"}', {"a": "no int"}),
        ('{"gone":1}', {"gone": 1}),
        ("[1]", {}),
        ("broken", {}),
    ],
)
async def test_arguments_that_fit_no_more_are_shown_as_plain_values(
    app: App, payload: str, arguments: dict[str, Any]
) -> None:
    app.task(add)
    stored = Job(id="a", task="add", payload=payload, due_ms=0, created_ms=0)
    foreign = Job(id="b", task="of another app", payload=payload, due_ms=0, created_ms=0)
    await (await app.client()).store.add([stored, foreign])
    found = (await app.find()).jobs
    assert [info.arguments for info in found] == [arguments] * 2
    assert [info.payload for info in found] == [payload] * 2
    assert [(info.result, info.result_json) for info in found] == [(None, None)] * 2


# --- Options that don't exist

TYPOS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cron": (lambda app: app.cron("0 2 * * *", tzz="UTC"), "cron() has no option 'tzz'; did you"),
    "every": (lambda app: app.every("1m", overlaps="skip"), "did you mean overlap?"),
    "every, far off": (
        lambda app: app.every("1m", timezone="UTC"),
        "every() has no option 'timezone'; it has name, tz, start, end, arguments, misfire, "
        "misfire_limit, overlap, spread",
    ),
    "put": (
        lambda app: app.schedules.put("s", "add", evry="1m"),
        "put() has no option 'evry'; did",
    ),
    "put, without await": (
        lambda app: app.sync.schedules.put("s", "add", evry="1m"),
        "did you mean every?",
    ),
    "task": (lambda app: app.task(retry=3), "task() has no option 'retry'; did you mean retries?"),
    "using": (lambda app: app.task(add).using(delays=3), "using() has no option 'delays'; did you"),
}


WRONG_RULES: list[dict[str, Any]] = [
    {"every": "1h", "tz": 5},
    {"every": "1h", "tz": b"UTC"},
    {"every": "1h", "arguments": "x"},
    {"every": "1h", "arguments": [1]},
    {"every": "1h", "arguments": 5},
    {"every": "1h", "arguments": {1: 2}},
    {"cron": ["* * * * *"]},
    {"cron": 5},
    {"every": [1]},
    {"every": "1h", "misfire": []},
    {"every": "1h", "spread": None},
    {"every": "1h", "start": "soon"},
]


async def test_a_past_time_means_now_however_long_ago(app: App) -> None:
    task = app.task(add)
    call = task.using(at=datetime(1960, 1, 1, tzinfo=UTC))
    one = await call.enqueue(1)
    [many] = await app.enqueue_many([call.job(1)])
    dues = {(await each.info()).due for each in (one, many)}
    assert len(dues) == 1 and max(dues) <= datetime.now(UTC)


@pytest.mark.parametrize("rule", WRONG_RULES, ids=str)
async def test_a_wrong_value_in_a_schedule_is_our_error(app: App, rule: dict[str, Any]) -> None:
    app.task(add)
    with pytest.raises(UsageError):
        await app.schedules.put("s", "add", **{"arguments": {"a": 1}} | rule)
    assert await app.schedules.list() == []


async def test_a_schedule_takes_a_task_or_its_name(app: App) -> None:
    task = app.task(add)
    put = app.schedules.put
    one = await put("one", task, every="1h", arguments={"a": 1})
    two = await put("two", "add", every="1h", arguments={"a": 1})
    assert (one.task, one.rule) == (two.task, two.rule)
    for wrong in ("ad", None, [task], add):
        with pytest.raises(UnknownTask, match="the tasks are: add"):
            await put("s", wrong, every="1h")  # type: ignore[arg-type]


@pytest.mark.parametrize("what", list(TYPOS))
async def test_a_mistyped_option_is_refused_at_the_call_with_a_guess(app: App, what: str) -> None:
    call, words = TYPOS[what]
    with pytest.raises(BadArguments, match=re.escape(words)) as caught:
        call(app)
    assert isinstance(caught.value, TypeError)
    assert app.declared == {}
    app.sync.close()
