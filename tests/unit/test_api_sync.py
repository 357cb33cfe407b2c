"""The API without an event loop: every call has a form without `await`."""

from __future__ import annotations

import asyncio
import inspect
import threading
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from an_app import add, app, on_disk
from pydantic import BaseModel, field_validator

from tickwheel import (
    App,
    CancelOutcome,
    ResultTimeout,
    State,
    UsageError,
)

__all__ = ["app", "on_disk"]

T = TypeVar("T")


def test_closing_does_not_disturb_the_calls_of_other_threads(on_disk: App) -> None:
    job = on_disk.task(add).using(delay=60).enqueue_sync(1)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(on_disk.sync.result, job, timeout=0.5)
        while not waits.done():
            on_disk.sync.close()
        with pytest.raises(ResultTimeout):
            waits.result()
    on_disk.sync.close()
    assert list(on_disk._access._clients) == []


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
    assert app.sync.cancel(job) is CancelOutcome.CANCELLED
    assert app.sync.rerun([job.id]) == [True]
    [many] = app.sync.enqueue_many([task.using(delay=60).job(2)])
    assert app.sync.info(many).payload == '{"a":2}'
    assert app.sync.info(many.id).arguments == {"a": 2}
    assert [info.id for info in app.sync.find(state="waiting", limit=1).jobs] != []
    assert app.sync.cancel([many.id, many]) == [CancelOutcome.CANCELLED, CancelOutcome.TOO_LATE]
    assert app.sync.delete(many) is True
    [many] = app.sync.enqueue_many([task.using(delay=60).job(2)])
    assert app.sync.workers() == []
    with pytest.raises(ResultTimeout):
        app.sync.result(many, timeout=0.01)
    app.sync.close()
    # Closing is no end: the next call opens the store again.
    assert task.using(id="x").enqueue_sync(3).id == "x"
    app.sync.close()


def test_schedules_have_a_form_without_await(app: App) -> None:
    app.task(add)
    them = app.sync.schedules
    assert them.put("s", "add", every="1h", arguments={"a": 1}).name == "s"
    them.pause("s")
    assert [each.paused for each in them.list()] == [True]
    them.resume("s")
    assert app.sync.info(them.run("s")).arguments == {"a": 1}
    assert them.delete("s") is True
    assert them.list() == []
    app.sync.close()


# What needs an event loop.
ASYNC_ONLY = {"client", "worker", "put_rule"}


def public(api: object) -> dict[str, Any]:
    kind = type(api)
    names = [name for name in dir(kind) if not name.startswith("_")]
    return {name: getattr(kind, name) for name in names if callable(getattr(kind, name))}


def awaited(method: Any) -> bool:
    plain = inspect.unwrap(method)
    returns = inspect.signature(plain).return_annotation
    return inspect.iscoroutinefunction(plain) or "AsyncIterator" in str(returns)


def signatures(method: Any) -> list[str]:
    """As it is written, and its overloads; an async iterator is one, without `await`."""
    plain = inspect.unwrap(method)
    written = [inspect.signature(each) for each in (*typing.get_overloads(plain), plain)]
    return [str(each).replace("AsyncIterator", "Iterator") for each in written]


@pytest.mark.parametrize("part", ["app", "schedules"])
def test_all_that_is_awaited_has_a_form_without_of_the_same_signature(app: App, part: str) -> None:
    api, without = (app, app.sync) if part == "app" else (app.schedules, app.sync.schedules)
    wanted = {
        name: signatures(method)
        for name, method in public(api).items()
        if awaited(method) and name not in ASYNC_ONLY
    }
    assert len(wanted) >= 6
    have = {name: signatures(method) for name, method in public(without).items() if name in wanted}
    assert have == wanted


def test_a_handle_has_nothing_that_needs_an_event_loop(app: App) -> None:
    needed = {name for name, method in public(app.job("x")).items() if awaited(method)}
    assert needed <= public(app.sync).keys()


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


# --- Calls within calls


def in_time(call: Callable[[], T]) -> T:
    """What the call returns. One that hangs fails the test, and its thread doesn't stop the
    end of the process."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found.result(timeout=10)


@pytest.mark.parametrize("step", ["cancel", "rerun", "delete"])
def test_a_generator_of_jobs_may_use_the_app_itself(app: App, step: str) -> None:
    task = app.task(add)
    for number in range(3):
        task.using(delay=60).enqueue_sync(number)
    if step != "cancel":
        app.sync.cancel([info.id for info in app.sync.find_all()])
    answers = in_time(lambda: getattr(app.sync, step)(info.id for info in app.sync.find_all()))
    assert answers == [CancelOutcome.CANCELLED if step == "cancel" else True] * 3


class Looked(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def looks(cls, number: int) -> int:
        for each in LOOKS_IN:
            each.sync.queues()
        return number


LOOKS_IN: list[App] = []


@pytest.fixture
def looking(app: App) -> Iterator[App]:
    LOOKS_IN.append(app)
    yield app
    LOOKS_IN.clear()


def test_a_validator_may_use_the_app_while_a_job_is_added(looking: App) -> None:
    @looking.task
    def look(at: Looked) -> None: ...

    in_time(lambda: look.enqueue_sync(Looked(number=1)))
    assert [queue.waiting for queue in looking.sync.queues()] == [1]


@pytest.mark.filterwarnings("error")
def test_a_call_that_would_wait_for_itself_is_refused(app: App) -> None:
    async def nested() -> None:
        app.sync.queues()

    with pytest.raises(UsageError, match="can't be called inside another of their calls"):
        in_time(lambda: app._access.run_sync(nested()))
