"""Wrong use of the API is refused at the call, and nothing is stored."""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from an_app import add, add_in_thread, app, on_disk

from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    BadTime,
    CancelOutcome,
    JobUnknown,
    Priority,
    State,
    TickwheelError,
    UnknownTask,
    UsageError,
)

__all__ = ["app", "on_disk"]

NAIVE = datetime(2030, 1, 1)  # noqa: DTZ001
SOON = datetime(2030, 1, 1, tzinfo=UTC)
# Python refuses to write so many digits.
HUGE = 10**5000


# --- Wrong choices

USING: list[tuple[dict[str, Any], type[TickwheelError], str]] = [
    ({"delay": 60, "at": SOON}, BadTime, "use delay= or at=, not both"),
    ({"delay": -1}, BadTime, "-1 is negative; a duration must be 0 or more"),
    ({"delay": timedelta(seconds=-1)}, BadTime, "is negative"),
    ({"delay": True}, BadTime, "True is not a duration; write seconds, '30m' or a timedelta"),
    ({"delay": "soon"}, BadTime, "write for example '90s', '30m', '1h30m'"),
    ({"delay": float("nan")}, BadTime, "nan is not a duration"),
    ({"delay": 1_900_000_000_000}, BadTime, "more than 10 years; numbers are seconds"),
    ({"delay": SOON}, BadTime, "is not a duration"),
    ({"at": NAIVE}, BadTime, "has no time zone; write datetime.now(UTC)"),
    ({"at": "2030-01-01"}, BadTime, "at='2030-01-01' is not a datetime"),
    ({"at": timedelta(hours=1)}, BadTime, "is not a datetime"),
    ({"at": datetime(9999, 1, 1, tzinfo=UTC)}, BadTime, "is more than 10 years away"),
    ({"priority": "huge"}, BadConfig, "must be one of low, normal, high, urgent"),
    ({"priority": 2}, BadConfig, "must be one of low, normal, high, urgent"),
    ({"queue": ""}, BadConfig, "a queue name must have 1 to 128 characters, not ''"),
    ({"queue": "q" * 129}, BadConfig, "a queue name must have 1 to 128 characters"),
    ({"queue": "my queue"}, BadConfig, "a queue name may contain letters, digits and _ . : -"),
    ({"queue": "größe"}, BadConfig, "a queue name may contain letters, digits and _ . : -"),
    ({"queue": 5}, BadConfig, "characters, not 5"),
    ({"id": ""}, BadArguments, "must be 1 to 200 printable characters"),
    ({"id": "x" * 201}, BadArguments, "must be 1 to 200 printable characters"),
    ({"id": "a\nb"}, BadArguments, r"id='a\nb'"),
    ({"id": 42}, BadArguments, "id=42"),
    ({"retries": -1}, BadConfig, "retries=-1: must be a whole number of at least 0"),
    ({"retries": 10**20}, BadConfig, "retries=100000000000000000000: must be at most 1,000,000"),
    ({"retries": HUGE}, BadConfig, "retries=<int>: must be at most 1,000,000"),
    ({"delay": HUGE}, BadTime, "<int> is more than 10 years"),
    ({"delay": -HUGE}, BadTime, "<int> is negative"),
    ({"delay": "9" * 5000 + "s"}, BadTime, "is not a duration"),
    ({"at": HUGE}, BadTime, "at=<int> is not a datetime"),
    ({"priority": HUGE}, BadConfig, "priority=<int>: must be one of"),
    ({"timeout": HUGE}, BadTime, "<int> is more than 10 years"),
    ({"id": HUGE}, BadArguments, "id=<int>: must be"),
    ({"retries": 1.5}, BadConfig, "retries=1.5: must be a whole number of at least 0"),
    ({"retries": "3"}, BadConfig, "retries='3': must be a whole number of at least 0"),
    ({"timeout": 0}, BadConfig, "timeout=0 leaves no time to run"),
    ({"timeout": -1}, BadTime, "-1 is negative"),
    ({"timeout": "long"}, BadTime, "'long' is not a duration"),
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
    (add, {"name": ""}, BadConfig, "a task name must have 1 to 128 characters"),
    (add, {"name": "send mail"}, BadConfig, "a task name may contain letters, digits and _ . : -"),
    (add, {"name": 5}, BadConfig, "characters, not 5"),
    (lambda: None, {}, BadConfig, "this is '<lambda>'"),
    (5, {}, BadConfig, "@app.task needs a function that you define, not 5"),
    (add, {"queue": "my queue"}, BadConfig, "a queue name may contain"),
    (add, {"priority": "huge"}, BadConfig, "must be one of low, normal, high, urgent"),
    (add, {"retries": -1}, BadConfig, "retries=-1: must be a whole number of at least 0"),
    (add, {"timeout": 0}, BadConfig, "use timeout=None for no limit"),
    (add, {"timeout": "long"}, BadTime, "'long' is not a duration"),
    (add, {"timeout": True}, BadTime, "True is not a duration"),
    (add, {"pool": "thread"}, BadConfig, "an async function runs on the event loop"),
    (add, {"pool": "process"}, BadConfig, "an async function runs on the event loop"),
    (add_in_thread, {"pool": "async"}, BadConfig, "pool='async' can't be used"),
    (local_function(), {"pool": "process"}, BadConfig, "not inside a function"),
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
        (classmethod(lambda cls: None), {"name": "a"}),
    ],
    ids=["pool", "retries", "partial", "builtin", "classmethod"],
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
    words = r"two tasks are named 'add': .*an_app\.add and .*add_in_thread; give one.*name="
    with pytest.raises(BadConfig, match=words):
        app.task(name="add")(add_in_thread)
    assert [task.function for task in app.tasks.all()] == [add]


def test_an_unknown_task_is_refused_with_those_there_are(app: App) -> None:
    app.task(add)
    with pytest.raises(UnknownTask, match="no task is named 'ad' here; the tasks are: add"):
        app.tasks.get("ad")


# --- Wrong workers, jobs and apps


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"concurrency": 0}, BadConfig, "concurrency=0: must be at least 1"),
        ({"threads": 0}, BadConfig, "threads=0: must be at least 1"),
        ({"processes": "2"}, BadConfig, "processes='2': must be at least 1"),
        (
            {"lease": "100ms"},
            BadConfig,
            "must be at least 500ms, or a short pause would lose leases",
        ),
        ({"lease": -1}, BadTime, "negative"),
        ({"grace": "a while"}, BadTime, "'a while' is not a duration"),
        ({"queues": ["my queue"]}, BadConfig, "a queue name may contain letters, digits"),
        ({"queues": [5]}, BadConfig, "characters, not 5"),
        ({"queues": 5}, BadConfig, "queues=5: must be a list of names"),
        ({"queues": []}, BadConfig, "queues=[]: must name a queue; without it"),
        ({"concurency": 5}, BadArguments, "worker() has no option 'concurency'; did you mean"),
        ({"lease": HUGE}, BadTime, "<int> is more than 10 years"),
        ({"concurrency": -HUGE}, BadConfig, "concurrency=<int>: must be at least 1"),
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
    with pytest.raises(BadArguments, match="must be 1 to 200 printable characters"):
        app.job(id)


async def test_a_job_that_is_not_there_is_unknown(app: App) -> None:
    job = app.job("nobody")
    with pytest.raises(JobUnknown, match="no job has the id 'nobody'"):
        await job.info()
    with pytest.raises(JobUnknown):
        await job.result()
    assert await job.cancel() is CancelOutcome.UNKNOWN
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


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"store": 5}, BadConfig, "must be a URL, as in .*, not int$"),
        ({"store": b"redis://:secret@x"}, BadConfig, "must be a URL, as in .*, not bytes$"),
        ({"outbox": 5}, BadConfig, "outbox must be the URL of a database, not int"),
        ({"outbox": b"postgresql://:secret@x"}, BadConfig, "outbox must be .*, not bytes$"),
        ({"payload_limit": "x"}, BadConfig, "payload_limit='x': must be a number of bytes"),
        ({"payload_limit": 0}, BadConfig, "payload_limit=0: must be a number of bytes"),
        ({"imports": 5}, BadConfig, "imports=5: must be a list of names"),
        ({"imports": "shop"}, BadConfig, r"imports='shop': must be a list; write \['shop'\]"),
        (
            {"retension": "1d"},
            BadArguments,
            r"^App\(\) has no option 'retension'; did you mean ret",
        ),
    ],
    ids=str,
)
def test_a_wrong_app_is_refused(
    options: dict[str, Any], error: type[TickwheelError], words: str
) -> None:
    with pytest.raises(error, match=words):
        App(**{"store": "memory://", **options})


def test_an_app_has_the_name_of_the_module_that_creates_it() -> None:
    assert App("memory://").name == __name__.rpartition(".")[2]


@pytest.mark.parametrize("length", [3000, 10**6])
def test_a_long_value_is_not_shown_in_full(app: App, length: int) -> None:
    long = "x" * length
    calls: list[Callable[[], Any]] = [
        lambda: app.job(long),
        lambda: app.task(name=long)(add),
        lambda: app.task(queue=long)(add),
        lambda: app.task(priority=long)(add),  # type: ignore[call-overload]
        lambda: app.task(retries=long)(add),  # type: ignore[call-overload]
        lambda: app.task(timeout=long)(add),
        lambda: app.tasks.get(long),
        lambda: app.sync.cancel(long + "\ud800"),
        lambda: app.sync.info(app.job("x" * 200)),
        lambda: app.sync.find(state=long),  # type: ignore[arg-type]
        lambda: app.sync.find(limit=long),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(TickwheelError) as refused:
            call()
        assert len(str(refused.value)) < 300, str(refused.value)[:500]


def test_a_number_that_python_does_not_write_is_refused_like_others(app: App) -> None:
    for options in ({"limit": HUGE}, {"state": HUGE}, {"cursor": HUGE}, {"queue": HUGE}):
        with pytest.raises(BadArguments, match="=<int>"):
            app.sync.find(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", Priority)
def test_a_priority_is_chosen_by_its_name_or_as_an_info_has_it(
    app: App, priority: Priority
) -> None:
    task = app.task(priority=priority)(add)
    assert task.job(1).priority is priority
    assert task.using(priority=priority).job(1).priority is priority


def test_a_wrong_retention_is_refused() -> None:
    with pytest.raises(BadTime):
        App("memory://", retention="for ever")
    with pytest.raises(BadTime):
        App("memory://", dead_retention=-1)


def test_the_store_comes_from_the_environment_unless_it_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TICKWHEEL_STORE", raising=False)
    assert App().url == "sqlite:///jobs.db"
    monkeypatch.setenv("TICKWHEEL_STORE", "memory://")
    assert App().url == "memory://"
    assert App("sqlite:///other.db").url == "sqlite:///other.db"
    monkeypatch.setenv("TICKWHEEL_STORE", "nonsense")
    with pytest.raises(BadConfig, match=r"no store .*'nonsense'"):
        App()


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
    "find by queue": lambda app, task: app.find(queue=HALF),
    "find by task": lambda app, task: app.find(task=HALF),
    "find by meta": lambda app, task: app.find(meta={"customer": HALF}),
    "find from": lambda app, task: app.find(cursor=HALF),
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
