"""What users write, used rightly and wrongly. Whatever is refused has stored nothing."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    BadTime,
    Cancelled,
    GiveUp,
    Job,
    JobFailed,
    JobUnknown,
    Outcome,
    Priority,
    ResultTimeout,
    State,
    StoreError,
    StoreUnavailable,
    TickwheelError,
    UnknownTask,
    UsageError,
    current_job,
)
from tickwheel.clock import LoopClock
from tickwheel.job import Settlement
from tickwheel.store import Query
from tickwheel.stores.memory import MemoryStore
from tickwheel.testing import run_virtual

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001
SOON = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def app() -> App:
    return App("memory://")


async def add(a: int, b: int = 0) -> int:
    return a + b


def add_in_thread(a: int, b: int = 0) -> int:
    return a + b


async def waiting(app: App) -> int:
    return sum(queue.waiting for queue in await app.queues())


# --- Wrong choices

USING: list[tuple[dict[str, Any], type[TickwheelError], str]] = [
    ({"delay": 60, "at": SOON}, BadTime, "give delay= or at=, not both"),
    ({"delay": -1}, BadTime, "-1 is negative; a length of time is 0 or more"),
    ({"delay": timedelta(seconds=-1)}, BadTime, "is negative"),
    ({"delay": True}, BadTime, "True is not a length of time; write seconds, '30m' or a timedelta"),
    ({"delay": "soon"}, BadTime, "write for example '90s', '30m', '1h30m'"),
    ({"delay": float("nan")}, BadTime, "nan is not a length of time"),
    ({"delay": 1_900_000_000_000}, BadTime, "more than 10 years; numbers are seconds"),
    ({"delay": SOON}, BadTime, "is not a length of time"),
    ({"at": NAIVE}, BadTime, "has no time zone; write datetime.now(UTC)"),
    ({"at": "2030-01-01"}, BadTime, "at='2030-01-01' is not a datetime"),
    ({"at": timedelta(hours=1)}, BadTime, "is not a datetime"),
    ({"at": datetime(9999, 1, 1, tzinfo=UTC)}, BadTime, "is more than 10 years away"),
    ({"priority": "huge"}, BadConfig, "a priority is one of low, normal, high, urgent"),
    ({"priority": 2}, BadConfig, "a priority is one of low, normal, high, urgent"),
    ({"queue": ""}, BadConfig, "a queue name has 1 to 128 characters; this is ''"),
    ({"queue": "q" * 129}, BadConfig, "a queue name has 1 to 128 characters"),
    ({"queue": "my queue"}, BadConfig, "a queue name is made of letters, digits and _ . : -"),
    ({"queue": "größe"}, BadConfig, "a queue name is made of letters, digits and _ . : -"),
    ({"queue": 5}, BadConfig, "this is 5"),
    ({"id": ""}, BadArguments, "an id is 1 to 200 printable characters"),
    ({"id": "x" * 201}, BadArguments, "an id is 1 to 200 printable characters"),
    ({"id": "a\nb"}, BadArguments, r"id='a\nb'"),
    ({"id": 42}, BadArguments, "id=42"),
    ({"retries": -1}, BadConfig, "retries=-1: a number of retries is 0 or more"),
    ({"retries": 1.5}, BadConfig, "retries=1.5: a number of retries is 0 or more"),
    ({"retries": "3"}, BadConfig, "retries='3': a number of retries is 0 or more"),
    ({"timeout": 0}, BadConfig, "timeout=0 leaves no time to run"),
    ({"timeout": -1}, BadTime, "-1 is negative"),
    ({"timeout": "long"}, BadTime, "'long' is not a length of time"),
]


@pytest.mark.parametrize(("choice", "error", "words"), USING)
async def test_a_wrong_choice_for_a_job_is_refused(
    app: App, choice: dict[str, Any], error: type[TickwheelError], words: str
) -> None:
    task = app.task(add)
    with pytest.raises(error, match=re.escape(words)) as caught:
        await task.using(**choice).enqueue(1)
    assert isinstance(caught.value, UsageError)
    assert await app.queues() == []


async def test_a_choice_that_does_not_exist_is_refused(app: App) -> None:
    task: Any = app.task(add)
    with pytest.raises(TypeError, match="countdown"):
        task.using(countdown=5)
    with pytest.raises(TypeError, match="positional"):
        task.using(5)


async def test_a_right_choice_is_what_the_job_has(app: App) -> None:
    task = app.task(queue="mail", priority="low")(add)
    plain = task.job(1)
    assert (plain.queue, plain.priority, plain.retries) == ("mail", Priority.LOW, None)
    assert (plain.due_ms, plain.state) == (plain.created_ms, State.WAITING)
    job = task.using(
        at=SOON, queue="urgent:mail", priority="urgent", id="order 42 ✓", retries=0, timeout="1m"
    ).job(1)
    assert (job.id, job.queue, job.priority) == ("order 42 ✓", "urgent:mail", Priority.URGENT)
    assert (job.due_ms, job.retries, job.timeout_ms) == (SOON.timestamp() * 1000, 0, 60_000)
    later = task.using(delay="30m").job(1)
    assert later.due_ms - later.created_ms == 1_800_000
    assert await app.queues() == []


# --- Wrong arguments

ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((), {}, "missing a required argument: 'a'"),
    ((1, 2, 3), {}, "too many positional arguments"),
    ((1,), {"c": 2}, "unexpected keyword argument 'c'"),
    (("1",), {}, "Expected `int`, got `str` - at `a`"),
    ((1,), {"b": None}, "Expected `int`, got `null` - at `b`"),
    ((object(),), {}, "can't be written as JSON"),
    ((10**300,), {}, "the limit of 100; store the data elsewhere and pass its id"),
]


@pytest.mark.parametrize(("args", "kwargs", "words"), ARGUMENTS)
async def test_wrong_arguments_are_refused_however_they_are_given(
    args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    app = App("memory://", payload_limit=100)
    task: Any = app.task(add)
    with pytest.raises(BadArguments, match=re.escape(words)) as caught:
        await task.enqueue(*args, **kwargs)
    assert str(caught.value).startswith("add(): ")
    with pytest.raises(BadArguments, match=re.escape(words)):
        await task.using(delay=1).enqueue(*args, **kwargs)
    with pytest.raises(BadArguments, match=re.escape(words)):
        task.enqueue_sync(*args, **kwargs)
    with pytest.raises(BadArguments, match=re.escape(words)):
        task.job(*args, **kwargs)
    assert await app.queues() == []


# --- Wrong tasks


def local_function() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


TASKS: list[tuple[Any, dict[str, Any], type[TickwheelError], str]] = [
    (add, {"name": ""}, BadConfig, "a task name has 1 to 128 characters"),
    (add, {"name": "send mail"}, BadConfig, "a task name is made of letters, digits and _ . : -"),
    (add, {"name": 5}, BadConfig, "this is 5"),
    (lambda: None, {}, BadConfig, "this is '<lambda>'"),
    (5, {}, BadConfig, "@app.task goes on a function of your own, not on 5"),
    (add, {"queue": "my queue"}, BadConfig, "a queue name is made of"),
    (add, {"priority": "huge"}, BadConfig, "a priority is one of low, normal, high, urgent"),
    (add, {"retries": -1}, BadConfig, "retries=-1: a number of retries is 0 or more"),
    (add, {"timeout": 0}, BadConfig, "write timeout=None for no limit"),
    (add, {"timeout": "long"}, BadTime, "'long' is not a length of time"),
    (add, {"timeout": True}, BadTime, "True is not a length of time"),
    (add, {"pool": "thread"}, BadConfig, "an async function runs on the event loop"),
    (add, {"pool": "process"}, BadConfig, "an async function runs on the event loop"),
    (add_in_thread, {"pool": "async"}, BadConfig, "pool='async' doesn't fit"),
    (local_function(), {"pool": "process"}, BadConfig, "move it out of the function"),
]


@pytest.mark.parametrize(("function", "options", "error", "words"), TASKS)
def test_a_wrong_task_is_refused_where_it_is_written(
    app: App, function: Any, options: dict[str, Any], error: type[TickwheelError], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        app.task(**options)(function)
    assert app.tasks.all() == []


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (add_in_thread, {"pool": "fiber"}),
        (add, {"retries": "5"}),
        (functools.partial(add_in_thread, 1), {}),
        (dict, {}),
    ],
    ids=["pool", "retries", "partial", "builtin"],
)
def test_what_can_be_no_task_is_refused_where_it_is_written(
    app: App, function: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(UsageError):
        app.task(**options)(function)


def plain_generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [plain_generator, async_generator])
def test_a_generator_is_no_task(app: App, function: Any) -> None:
    with pytest.raises(BadConfig, match="generator"):
        app.task(function)


def test_two_tasks_of_one_name_are_refused_with_both_their_places(app: App) -> None:
    app.task(add)
    words = r"two tasks are named 'add': .*test_api\.add and .*add_in_thread; give one.*name="
    with pytest.raises(BadConfig, match=words):
        app.task(name="add")(add_in_thread)
    assert [task.function for task in app.tasks.all()] == [add]


def test_an_unknown_task_is_refused_with_those_there_are(app: App) -> None:
    app.task(add)
    with pytest.raises(UnknownTask, match="no task is named 'ad' here; there are: add"):
        app.tasks.get("ad")


# --- Wrong workers, jobs and apps


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"concurrency": 0}, BadConfig, "a worker runs at least 1 job at a time"),
        ({"lease": "100ms"}, BadConfig, "below 500ms a short pause would lose jobs"),
        ({"lease": -1}, BadTime, "negative"),
        ({"grace": "a while"}, BadTime, "'a while' is not a length of time"),
        ({"queues": ["my queue"]}, BadConfig, "a queue name is made of letters, digits"),
        ({"queues": [5]}, BadConfig, "this is 5"),
    ],
)
async def test_a_wrong_worker_is_refused_and_does_not_start(
    app: App, options: dict[str, Any], error: type[TickwheelError], words: str
) -> None:
    with pytest.raises(error, match=re.escape(words)):
        async with app.worker(**options):
            pytest.fail("the block was entered")
    assert await app.workers() == []


@pytest.mark.parametrize(
    "options", [{"queues": "mail"}, {"concurrency": "3"}, {"concurrency": 1.5}], ids=str
)
async def test_options_of_a_wrong_type_are_refused(app: App, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        async with app.worker(**options):
            pass


@pytest.mark.parametrize("id", ["", "x" * 201, "a\tb", 42, None])
def test_an_id_that_can_be_none_is_refused(app: App, id: Any) -> None:
    with pytest.raises(BadArguments, match="an id is 1 to 200 printable characters"):
        app.job(id)


async def test_a_job_that_is_not_there_is_unknown(app: App) -> None:
    job = app.job("nobody")
    with pytest.raises(JobUnknown, match="no job has the id 'nobody'"):
        await job.info()
    with pytest.raises(JobUnknown):
        await job.result()
    assert await job.cancel() is Cancelled.UNKNOWN
    assert await app.rerun(["nobody"]) == [False]
    assert await app.delete(["nobody"]) == [False]


@pytest.mark.parametrize(
    "call",
    [
        lambda app: app.pause("my queue"),
        lambda app: app.resume(""),
        lambda app: app.job("x").result(timeout="long"),
        lambda app: app.job("x").result(timeout=-1),
    ],
)
async def test_other_wrong_calls_are_refused(app: App, call: Callable[[App], Any]) -> None:
    with pytest.raises(UsageError):
        await call(app)
    assert await app.queues() == []


@pytest.mark.parametrize(
    ("url", "words"),
    [("mongo://here", "no store for 'mongo://'"), ("jobs.db", "sqlite:///jobs.db")],
)
def test_a_wrong_store_is_refused_with_how_to_write_it(url: str, words: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(words)):
        App(url)


def test_a_wrong_retention_is_refused() -> None:
    with pytest.raises(BadTime):
        App("memory://", retention="for ever")
    with pytest.raises(BadTime):
        App("memory://", dead_retention=-1)


def test_the_store_comes_from_the_environment_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TICKWHEEL_STORE", raising=False)
    assert App().url == "sqlite:///tickwheel.db"
    monkeypatch.setenv("TICKWHEEL_STORE", "memory://")
    assert App().url == "memory://"
    assert App("sqlite:///other.db").url == "sqlite:///other.db"
    monkeypatch.setenv("TICKWHEEL_STORE", "nonsense")
    with pytest.raises(BadConfig, match=r"no store .*'nonsense'"):
        App()


# --- Right use


async def test_a_task_can_be_called_like_the_function_it_is(app: App) -> None:
    task, threaded = app.task(add), app.task(name="other", retries=3)(add_in_thread)
    assert await task(1, b=2) == 3
    assert threaded(1, 2) == 3
    assert current_job() is None
    assert (task.name, threaded.name, repr(threaded)) == ("add", "other", "<task other>")
    assert (task.function, inspect.unwrap(task)) == (add, add)
    assert await app.queues() == []


async def test_an_enqueued_job_can_be_looked_at(app: App) -> None:
    task = app.task(add)
    job = await task.using(delay="30m", priority="high").enqueue(1, b=2)
    assert job.added
    assert repr(job) == f"<job {job.id}>"
    info = await job.info()
    assert (info.id, info.task, info.queue) == (job.id, "add", "default")
    assert (info.state, info.priority, info.payload) == (
        State.WAITING,
        Priority.HIGH,
        '{"a":1,"b":2}',
    )
    assert info.due - info.created == timedelta(minutes=30)
    assert info.created.utcoffset() == timedelta(0)
    assert (info.attempts, info.failures, info.history, info.error) == (0, 0, (), None)
    assert await app.job(job.id).info() == info
    with pytest.raises(ResultTimeout, match=r"is still waiting after 0\.01 s"):
        await job.result(timeout="10ms")
    assert await job.cancel() is Cancelled.CANCELLED
    assert (await job.info()).state is State.CANCELLED


async def test_a_time_that_has_passed_means_now(app: App) -> None:
    task = app.task(add)
    async with app.worker():
        for year in (1, 1969, 2000):
            job = await task.using(at=datetime(year, 1, 1, tzinfo=UTC)).enqueue(year)
            assert await job.result(timeout=5) == year


async def test_many_jobs_are_stored_in_the_order_they_are_given(app: App) -> None:
    task, other = app.task(add), app.task(name="other", queue="other")(add_in_thread)
    jobs = [task.using(delay=60).job(n) for n in range(2_500)]
    handles = await app.enqueue_many([*jobs, other.using(id="x").job(1)])
    assert [handle.id for handle in handles] == [*(job.id for job in jobs), "x"]
    assert all(handle.added for handle in handles)
    assert [(queue.name, queue.waiting) for queue in await app.queues()] == [
        ("default", 2_500),
        ("other", 1),
    ]
    # The same again is stored once: the ids are taken.
    again = await app.enqueue_many(jobs[:3])
    assert [handle.added for handle in again] == [False] * 3
    assert await waiting(app) == 2_501
    assert await app.enqueue_many([]) == []


async def test_the_same_id_twice_in_one_batch_is_one_job(app: App) -> None:
    task = app.task(add)
    handles = await app.enqueue_many([task.using(id="x").job(n) for n in (1, 2)])
    assert [handle.added for handle in handles] == [True, False]
    assert await waiting(app) == 1


async def test_a_job_of_another_app_is_refused_and_nothing_is_stored(app: App) -> None:
    task, alien = app.task(add), App("memory://").task(add_in_thread)
    with pytest.raises(UnknownTask, match="add_in_thread"):
        await app.enqueue_many([task.job(1), alien.job(1)])
    assert await app.queues() == []


@pytest.mark.parametrize(
    "jobs", [[5], ["id"], 5, {5: 5}.keys(), "text"], ids=["number", "id", "one", "view", "text"]
)
async def test_what_is_no_list_of_jobs_is_refused(app: App, jobs: Any) -> None:
    with pytest.raises(UsageError, match=r"made with task\.job"):
        await app.enqueue_many(jobs)
    with pytest.raises(UsageError, match=r"made with task\.job"):
        app.sync.enqueue_many(jobs)


async def test_a_generator_of_jobs_is_taken_by_the_portion(app: App) -> None:
    task = app.task(add)
    stored: list[int] = []

    def made() -> Iterator[Job]:
        for n in range(9_000):
            if n % 1_000 == 0:
                stored.append(len(app._store._jobs))  # type: ignore[attr-defined]
            yield task.using(delay=60, id=f"{n}").job(n)

    handles = await app.enqueue_many(made())
    assert [handle.id for handle in handles] == [f"{n}" for n in range(9_000)]
    assert await waiting(app) == 9_000
    assert stored == [0] * 4 + [4_000] * 4 + [8_000]


async def test_what_a_generator_gave_before_its_mistake_is_stored(app: App) -> None:
    task = app.task(add)

    def made() -> Iterator[Any]:
        yield from (task.job(n) for n in range(4_000))
        yield "no job"

    with pytest.raises(BadArguments):
        await app.enqueue_many(made())
    assert await waiting(app) == 4_000


def test_a_generator_runs_in_the_thread_that_made_it(app: App) -> None:
    task = app.task(add)
    threads = set()

    def made() -> Iterator[Job]:
        threads.add(threading.get_ident())
        yield task.using(delay=60).job(1)

    assert len(app.sync.enqueue_many(made())) == 1
    assert threads == {threading.get_ident()}


async def test_a_closed_app_opens_again_when_it_is_used(app: App) -> None:
    task = app.task(add)
    async with app:
        await task.enqueue(1)
    async with app as same:
        assert same is app
    await task.enqueue(2)
    assert await waiting(app) == 2


@pytest.fixture
def on_disk(tmp_path: Path) -> App:
    """An app whose store answers nothing once it is closed."""
    return App(f"sqlite:///{tmp_path}/jobs.db")


def is_open(app: App) -> bool:
    """Whether the running loop still has a client; a call would open another one."""
    return asyncio.get_running_loop() in app._clients


async def test_a_nested_block_does_not_close_the_store_of_the_one_around_it(on_disk: App) -> None:
    app, task = on_disk, on_disk.task(add)
    async with app:
        client = await app.client()
        async with app:
            await task.enqueue(1)
        assert await app.client() is client
        assert sum(queue.waiting for queue in await client.queues()) == 1
    assert not is_open(app)


async def test_a_nested_block_does_not_close_the_store_of_a_worker(
    on_disk: App, caplog: pytest.LogCaptureFixture
) -> None:
    app, task = on_disk, on_disk.task(add)
    async with app.worker():
        async with app:
            assert await (await task.enqueue(1)).result(timeout=10) == 1
        assert await (await task.enqueue(2)).result(timeout=10) == 2
    # Somebody wanted it closed, and the worker was the last to use it.
    assert not is_open(app)
    ours = [record for record in caplog.records if record.name == "tickwheel"]
    assert [record.message for record in ours if record.levelname != "INFO"] == []


async def test_the_last_of_several_tasks_closes_the_store(on_disk: App) -> None:
    app, task = on_disk, on_disk.task(add)
    first_left = asyncio.Event()

    async def short() -> None:
        async with app:
            await task.enqueue(1)
        first_left.set()

    async def long() -> None:
        async with app:
            client = await app.client()
            await first_left.wait()
            assert await client.queues() != []
            await task.enqueue(2)
            assert await app.client() is client

    await asyncio.gather(long(), short())
    assert not is_open(app)
    assert await waiting(app) == 2
    async with app:
        pass
    assert not is_open(app)


async def test_a_block_closes_what_was_opened_before_it_on_first_use(on_disk: App) -> None:
    await on_disk.queues()
    async with on_disk:
        assert is_open(on_disk)
    assert not is_open(on_disk)


async def test_a_worker_leaves_open_what_nobody_wants_closed(on_disk: App) -> None:
    async with on_disk.worker():
        client = await on_disk.client()
    assert await on_disk.client() is client
    assert await client.queues() == []
    async with on_disk:
        pass


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_block_that_could_not_open_the_store_does_not_count(
    on_disk: App, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    error = StoreUnavailable("not now") if how == "fails" else asyncio.CancelledError()

    async def fail() -> None:
        raise error

    client = on_disk._client()
    with monkeypatch.context() as broken:
        broken.setattr(client.store, "open", fail)
        with pytest.raises(type(error)):
            async with on_disk:
                pass
        with pytest.raises(type(error)):
            async with on_disk.worker():
                pass
    async with on_disk:
        assert await client.queues() == []
    assert not is_open(on_disk)


async def test_a_block_that_is_cancelled_while_it_closes_closes_all_the_same(on_disk: App) -> None:
    entered, closed = asyncio.Event(), asyncio.Event()
    client = on_disk._client()
    own_close = client.store.close

    async def drained() -> None:
        entered.set()
        await asyncio.sleep(60)

    async def close() -> None:
        await own_close()
        closed.set()

    async def block() -> None:
        async with on_disk:
            client._adding.drained = drained  # type: ignore[method-assign]
            client.store.close = close  # type: ignore[method-assign]

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set() and not is_open(on_disk)


def test_a_nested_block_on_another_loop_has_a_store_of_its_own(on_disk: App) -> None:
    async def block() -> None:
        async with on_disk:
            await on_disk.queues()

    async def outer() -> None:
        async with on_disk:
            client = await on_disk.client()
            await asyncio.to_thread(asyncio.run, block())
            assert await client.queues() == []

    asyncio.run(outer())


# --- Text that no store can keep

HALF = "half a character: \ud800"


ODD_CALLS: dict[str, Callable[[App, Any], Any]] = {
    "an id": lambda app, task: task.using(id=HALF).enqueue(""),
    "a queue": lambda app, task: task.using(queue=HALF).enqueue(""),
    "an argument": lambda app, task: task.enqueue(HALF),
    "an argument's key": lambda app, task: task.enqueue({HALF: 1}),
    "a handle": lambda app, task: app.job(HALF).info(),
    "cancel": lambda app, task: app.cancel(["known", HALF]),
    "rerun": lambda app, task: app.rerun([HALF]),
    "rerun a number": lambda app, task: app.rerun([5]),  # type: ignore[list-item]
    "delete": lambda app, task: app.delete([HALF]),
    "pause": lambda app, task: app.pause(HALF),
    "find by queue": lambda app, task: app.find(Query(queue=HALF)),
    "find by task": lambda app, task: app.find(Query(task=HALF)),
    "find from": lambda app, task: app.find(Query(), cursor=HALF),
    "a schedule": lambda app, task: app.schedules.put(HALF, "echo", every="1h"),
    "a schedule's argument": lambda app, task: app.schedules.put(
        "hourly", "echo", every="1h", arguments={"what": HALF}
    ),
    "pause a schedule": lambda app, task: app.schedules.pause(HALF),
    "delete a schedule": lambda app, task: app.schedules.delete(HALF),
}


@pytest.mark.parametrize("what", list(ODD_CALLS))
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_text_that_is_no_unicode_is_refused_at_the_call(
    on_disk: App, kind: str, what: str
) -> None:
    app = on_disk if kind == "sqlite" else App("memory://")

    @app.task
    async def echo(what: Any) -> None: ...

    async with app:
        await echo.using(id="known", delay=60).enqueue("")
        with pytest.raises(UsageError):
            await ODD_CALLS[what](app, echo)
        assert [queue.waiting for queue in await app.queues()] == [1]
        assert await app.schedules.list() == []


@pytest.mark.parametrize(
    "url", ["sqlite:///{}", "nats://{}", "redis://{}", "postgresql://{}/a", "memory://{}", "{}"]
)
def test_a_url_that_is_no_unicode_is_refused(url: str) -> None:
    with pytest.raises(BadConfig):
        App(url.format("\udcff"))


# --- Without an event loop


def test_closing_does_not_disturb_the_calls_of_other_threads(on_disk: App) -> None:
    job = on_disk.task(add).using(delay=60).enqueue_sync(1)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(on_disk.sync.result, job, timeout=0.5)
        while not waits.done():
            on_disk.sync.close()
        with pytest.raises(ResultTimeout):
            waits.result()
    on_disk.sync.close()
    assert list(on_disk._clients) == []


async def test_closing_the_calls_without_await_leaves_the_loop_alone(on_disk: App) -> None:
    async with on_disk:
        client = await on_disk.client()
        await asyncio.to_thread(on_disk.sync.queues)
        await asyncio.to_thread(on_disk.sync.close)
        assert await client.queues() == []


def test_every_call_has_a_form_without_await(app: App) -> None:
    task = app.task(add)
    job = task.using(delay=60).enqueue_sync(1)
    assert app.sync.info(job).state is State.WAITING
    app.sync.pause("mail")
    assert [(queue.name, queue.paused) for queue in app.sync.queues()] == [
        ("default", False),
        ("mail", True),
    ]
    app.sync.resume("mail")
    assert app.sync.cancel(job) is Cancelled.CANCELLED
    assert app.sync.rerun([job.id]) == [True]
    [many] = app.sync.enqueue_many([task.using(delay=60).job(2)])
    assert app.sync.info(many).payload == '{"a":2}'
    with pytest.raises(ResultTimeout):
        app.sync.result(many, timeout=0.01)
    app.sync.close()
    # Closing is no end: the next call opens the store again.
    assert task.using(id="x").enqueue_sync(3).id == "x"
    app.sync.close()


def test_threads_may_enqueue_at_the_same_time(app: App) -> None:
    task = app.task(add)
    with ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda n: task.using(id=f"job {n}").enqueue_sync(n), range(100)))
    assert [job.id for job in jobs] == [f"job {n}" for n in range(100)]
    assert [queue.waiting for queue in app.sync.queues()] == [100]
    app.sync.close()


async def test_a_plain_function_may_enqueue_inside_a_running_loop(app: App) -> None:
    # A sync helper deep in an async program: it holds the loop up, but it must not hang.
    task = app.task(add)
    job = task.enqueue_sync(1)
    assert (await job.info()).state is State.WAITING
    assert app.sync.info(job).id == job.id
    app.sync.close()


async def test_a_thread_gets_the_result_of_a_job_that_runs_on_the_loop(app: App) -> None:
    task = app.task(add)

    def in_thread() -> int:
        return app.sync.result(task.enqueue_sync(1, 2), timeout=5)

    async with app.worker():
        assert await asyncio.to_thread(in_thread) == 3
    app.sync.close()


async def test_a_task_in_a_thread_may_enqueue_the_next_job(app: App) -> None:
    task = app.task(add)

    @app.task
    def first() -> str:
        return task.enqueue_sync(1, 2).id

    async with app.worker():
        job = await first.enqueue()
        assert await app.job(await job.result(timeout=5)).result(timeout=5) == 3
    app.sync.close()


# --- Several event loops


def test_an_app_outlives_its_event_loop(app: App) -> None:
    task = app.task(add)

    async def enqueue() -> int:
        await task.enqueue(1)
        return await waiting(app)

    async def work() -> int:
        async with app.worker():
            return await (await task.enqueue(1)).result(timeout=5)

    assert [asyncio.run(enqueue()) for _ in range(3)] == [1, 2, 3]
    assert asyncio.run(work()) == 1
    assert task.enqueue_sync(2).added
    app.sync.close()


def test_event_loops_in_several_threads_share_an_app(app: App) -> None:
    task = app.task(add)
    started = threading.Barrier(4)

    async def enqueue() -> None:
        started.wait(5)
        await asyncio.gather(*(task.enqueue(n) for n in range(50)))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(asyncio.run, enqueue()) for _ in range(4)]:
            done.result()
    assert asyncio.run(waiting(app)) == 200


class NosyLoop(asyncio.SelectorEventLoop):
    """Lets another thread start a loop at the moment in which it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.when_looked_at: Callable[[], object] | None = None

    def is_closed(self) -> bool:
        if (act := self.when_looked_at) is not None:
            self.when_looked_at = None
            act()
        return super().is_closed()


def test_a_loop_may_start_while_another_one_starts(app: App) -> None:
    task = app.task(add)
    # A thread that may have to wait for ours, so ours waits for it but a moment.
    thread = threading.Thread(target=lambda: asyncio.run(enqueue(2)))

    async def enqueue(n: int) -> None:
        await task.enqueue(n)

    def start_another() -> None:
        thread.start()
        thread.join(0.2)

    with asyncio.Runner(loop_factory=NosyLoop) as runner:
        runner.run(enqueue(0))
        loop = runner.get_loop()
        assert isinstance(loop, NosyLoop)
        loop.when_looked_at = start_another
        try:
            asyncio.run(enqueue(1))
        finally:
            thread.join(5)
    assert asyncio.run(waiting(app)) == 3


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_loop_that_was_closed_while_it_waited_does_not_disturb_the_others(
    kind: str, tmp_path: Path
) -> None:
    app = App("memory://" if kind == "memory" else f"sqlite:///{tmp_path}/jobs.db")
    task = app.task(add)
    loop = asyncio.new_event_loop()
    # It would complain of the tasks that we abandon.
    loop.set_exception_handler(lambda loop, context: None)

    async def begin_to_wait() -> list[asyncio.Task[Any]]:
        store = (await app.client()).store
        waits = (
            store.wait(["default"], now_ms=0, until_ms=60_000),
            store.asked("worker", now_ms=0, until_ms=60_000),
        )
        tasks = [loop.create_task(wait) for wait in waits]
        await asyncio.sleep(0.05)
        return tasks

    abandoned = loop.run_until_complete(begin_to_wait())
    loop.close()
    assert task.enqueue_sync(1).added
    assert task.enqueue_sync(2).added
    assert asyncio.run(waiting(app)) == 2
    assert not any(each.done() for each in abandoned)
    app.sync.close()


async def test_a_wait_may_be_collected_as_garbage_in_the_middle_of_a_step() -> None:
    store = MemoryStore()
    waits = [
        store.wait(["default"], now_ms=0, until_ms=60_000),
        store.asked("worker", now_ms=0, until_ms=60_000),
    ]
    for wait in waits:
        wait.send(None)
    finished = threading.Event()

    def step() -> None:
        with store._lock:
            for wait in waits:
                wait.close()
        finished.set()

    threading.Thread(target=step, daemon=True).start()
    assert await asyncio.to_thread(finished.wait, 5)
    assert not store._waiters


# --- The worker in a program


def test_a_worker_works_while_its_block_lasts_and_then_stops_gracefully() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())

        @app.task
        async def slow(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return seconds

        before = await slow.enqueue(1)
        async with app.worker(guarded=False, concurrency=2) as worker:
            assert await before.result(timeout=2) == 1
            assert [info.name for info in await app.workers()] == [worker.name]
            running = await slow.enqueue(10)
            await asyncio.sleep(1)
        assert (await running.info()).state is State.DONE
        assert await app.workers() == []
        after = await slow.enqueue(1)
        await asyncio.sleep(60)
        assert (await after.info()).state is State.WAITING

    run_virtual(story())


def test_a_worker_serves_the_queues_it_is_given_or_those_of_the_tasks() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        task = app.task(queue="mail")(add)
        mail, other = await task.enqueue(1), await task.using(queue="other").enqueue(2)
        async with app.worker(guarded=False):
            assert await mail.result(timeout=1) == 1
        async with app.worker(guarded=False, queues=["other"]):
            assert await other.result(timeout=1) == 2
            third = await task.enqueue(3)
            await asyncio.sleep(10)
            assert (await third.info()).state is State.WAITING

    run_virtual(story())


def test_a_failed_job_says_why_and_can_be_put_back() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        mended = False

        @app.task
        async def fragile() -> str:
            if not mended:
                raise GiveUp("the printer is off")
            return "printed"

        async with app.worker(guarded=False):
            job = await fragile.enqueue()
            with pytest.raises(JobFailed, match=f"job {job.id} is dead: the printer is off"):
                await job.result()
            mended = True
            assert await app.rerun([job.id]) == [True]
            assert await job.result() == "printed"
            assert [run.outcome for run in (await job.info()).history] == [
                Outcome.DEAD,
                Outcome.DONE,
            ]

    run_virtual(story())


class BrokenStore(MemoryStore):
    """Fails in a way that no store should: not StoreUnavailable, so nobody tries again."""

    async def claim(self, queues: Sequence[str], **_: Any) -> list[Job]:
        await asyncio.sleep(1)
        raise StoreError("the file is gone")


def innermost(error: BaseException) -> list[BaseException]:
    """What an exception group holds, however deep; other exceptions are themselves."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in innermost(each)]
    return [error]


def test_a_worker_that_fails_cancels_its_block_and_says_why() -> None:
    async def story() -> None:
        clock = LoopClock()
        app = App(BrokenStore(clock=clock), clock=clock)
        reached = []
        with pytest.raises(Exception) as caught:
            async with app.worker(guarded=False):
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    reached.append(asyncio.get_running_loop().time())
                    raise
        assert reached == [1]
        assert [str(each) for each in innermost(caught.value)] == ["the file is gone"]

    run_virtual(story())


def test_a_block_that_raises_ends_its_worker_too() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        task = app.task(add)
        with pytest.raises(Exception) as caught:
            async with app.worker(guarded=False):
                raise LookupError("mine")
        assert [str(each) for each in innermost(caught.value)] == ["mine"]
        job = await task.enqueue(1)
        await asyncio.sleep(60)
        assert (await job.info()).state is State.WAITING

    run_virtual(story())


async def test_what_a_block_raises_reaches_the_caller_as_it_is(app: App) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with app.worker():
            raise LookupError("mine")


async def test_what_a_block_raises_keeps_its_cause(app: App) -> None:
    cause = KeyError("why")
    with pytest.raises(LookupError, match="mine") as caught:
        async with app.worker():
            raise LookupError("mine") from cause
    assert caught.value.__cause__ is cause


class RefusingStore(MemoryStore):
    """Can't write the first outcome that it is given, and says so in no way that was agreed."""

    refused = False

    async def settle(self, settlements: Sequence[Settlement], *, now_ms: int) -> list[bool]:
        if not self.refused:
            self.refused = True
            raise StoreError("the row is too big")
        return await super().settle(settlements, now_ms=now_ms)


def test_an_outcome_that_the_store_refuses_is_said_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        clock = LoopClock()
        app = App(RefusingStore(clock=clock), clock=clock)
        task = app.task(add)
        async with app.worker(guarded=False):
            assert await (await task.enqueue(1)).result(timeout=60) == 1

    with caplog.at_level("WARNING", "tickwheel"):
        run_virtual(story())
    assert "the row is too big" in caplog.text


def test_a_worker_whose_block_raised_is_not_listed_any_more() -> None:
    async def story() -> None:
        app = App("memory://", clock=LoopClock())
        with pytest.raises(LookupError):
            async with app.worker(guarded=False):
                await asyncio.sleep(1)
                raise LookupError("mine")
        assert await app.workers() == []

    run_virtual(story())
