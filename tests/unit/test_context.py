"""What a task knows of its own job, and what travels with a job: in all pools, on all stores."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import process_tasks
import pytest
from sub_tasks import parent

from stores import Harness
from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    BadTime,
    Job,
    JobCancelled,
    JobHandle,
    Progress,
    State,
    Task,
    current_job,
)
from tickwheel.stores.memory import MemoryStore

# So long may a step take on a slow machine before the test gives up.
PATIENCE_S = 30
# A lease that needs no extension in that time, except for news of progress.
LONG = "10m"


def known_here() -> dict[str, Any]:
    return process_tasks.what_it_knows()


async def known_on_the_loop() -> dict[str, Any]:
    return process_tasks.what_it_knows()


@pytest.fixture
def app() -> App:
    return App(MemoryStore())


async def until(happened: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not happened():
            await asyncio.sleep(0.01)


async def until_progress(job: JobHandle[Any]) -> Progress:
    async with asyncio.timeout(PATIENCE_S):
        while (progress := (await job.info()).progress) is None:
            await asyncio.sleep(0.01)
    return progress


# --- current_job


@pytest.mark.parametrize(
    ("function", "pool"),
    [
        (known_on_the_loop, "async"),
        (known_here, "thread"),
        (process_tasks.what_it_knows, "process"),
    ],
)
async def test_a_task_knows_its_job(app: App, function: Any, pool: Any) -> None:
    task: Task[[], dict[str, Any], Any] = app.task(name="known", pool=pool, timeout="5m")(function)
    async with app.worker(guarded=False, grace=0):
        job = await task.using(meta={"customer": "42"}).enqueue()
        known = await job.result(timeout=PATIENCE_S)
    info = await job.info()
    assert known["id"] == known["job"] == job.id
    assert (known["task"], known["attempt"], known["stopping"]) == ("known", 1, False)
    assert known["due"] == info.due.timestamp()
    assert known["meta"] == info.meta == {"customer": "42"}
    # Its own time began with the task: for a child, once it had started and imported it.
    [run] = info.history
    assert run.started_ms is not None
    assert run.started_ms <= round(known["deadline"] * 1000) - 300_000 <= run.ended_ms


async def test_the_deadline_in_a_child_process_counts_from_its_own_beginning(app: App) -> None:
    """Not from when the worker asked for it: an interpreter takes a while to start."""
    task = app.task(pool="process", timeout="1h")(process_tasks.what_it_knows)
    plain = app.task(pool="process", timeout=None, name="plain")(process_tasks.what_it_knows)
    async with app.worker(guarded=False, grace=0, processes=1):
        job = await task.enqueue()
        known = await job.result(timeout=PATIENCE_S)
        run = (await job.info()).history[-1]
        assert run.started_ms is not None
        began_ms = known["deadline"] * 1000 - 3_600_000
        # A fresh interpreter takes at least some 50 ms, of which nearly all were before the call.
        assert run.started_ms + 50 <= began_ms <= run.ended_ms
        assert (await (await plain.enqueue()).result(timeout=PATIENCE_S))["deadline"] is None


async def test_there_is_no_job_outside_a_task(app: App) -> None:
    assert current_job() is None


async def test_a_change_of_the_meta_that_a_task_sees_changes_nothing(app: App) -> None:
    @app.task
    async def change() -> dict[str, str]:
        context = current_job()
        assert context is not None
        context.meta["customer"] = "43"
        return context.meta

    async with app.worker(guarded=False):
        job = await change.using(meta={"customer": "42"}).enqueue()
        assert await job.result(timeout=PATIENCE_S) == {"customer": "42"}


async def test_a_thread_that_times_out_or_is_cancelled_sees_that_it_should_stop(app: App) -> None:
    began, seen = threading.Event(), threading.Event()

    @app.task(retries=0)
    def patient() -> None:
        context = current_job()
        assert context is not None and not context.stopping
        began.set()
        deadline = time.monotonic() + PATIENCE_S
        while not context.stopping and time.monotonic() < deadline:
            time.sleep(0.005)
        if context.stopping:
            seen.set()

    async with app.worker(guarded=False, grace=0):
        await patient.using(timeout="50ms").enqueue()
        await until(seen.is_set)
        began.clear()
        seen.clear()
        job = await patient.enqueue()
        await until(began.is_set)
        await job.cancel()
        # It came to its end all the same.
        await job.result(timeout=PATIENCE_S)
        assert seen.is_set()


async def test_an_async_task_that_is_interrupted_sees_why(app: App) -> None:
    began, stopping = asyncio.Event(), []

    @app.task(retries=0)
    async def patient() -> None:
        context = current_job()
        assert context is not None
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            stopping.append(context.stopping)

    async with app.worker(guarded=False, grace=0):
        await patient.using(timeout="50ms").enqueue()
        await until(lambda: len(stopping) == 1)
        began.clear()
        job = await patient.enqueue()
        await began.wait()
        await job.cancel()
        await until(lambda: len(stopping) == 2)
    assert stopping == [True, True]


# --- Progress, where real threads and processes say it


async def test_a_thread_says_its_progress(app: App, tmp_path: Path) -> None:
    @app.task
    def load() -> None:
        process_tasks.say_and_wait(str(tmp_path / "go"))

    async with app.worker(guarded=False, lease=LONG):
        job = await load.enqueue()
        await last_word(job)
        (tmp_path / "go").touch()
        await job.result(timeout=PATIENCE_S)


async def last_word(job: JobHandle[Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await job.info()).progress != Progress(0.4, "loading"):
            await asyncio.sleep(0.01)


async def test_a_child_process_says_its_progress(app: App, tmp_path: Path) -> None:
    load = app.task(pool="process")(process_tasks.say_and_wait)
    wrong = app.task(pool="process")(process_tasks.say_wrong)
    async with app.worker(guarded=False, grace=0, processes=1, lease=LONG):
        job = await load.enqueue(str(tmp_path / "go"))
        await last_word(job)
        (tmp_path / "go").touch()
        await job.result(timeout=PATIENCE_S)
        assert await (await wrong.enqueue()).result(timeout=PATIENCE_S) == "BadArguments"


async def test_what_a_child_says_of_a_job_that_has_ended_is_for_no_other(app: App) -> None:
    haunt = app.task(pool="process")(process_tasks.say_after_the_end)
    known = app.task(pool="process")(process_tasks.what_it_knows)
    async with app.worker(guarded=False, grace=0, processes=1):
        await (await haunt.enqueue()).result(timeout=PATIENCE_S)
        # The same child, while that thread still speaks.
        for _ in range(20):
            job = await known.enqueue()
            assert (await job.result(timeout=PATIENCE_S))["id"] == job.id
            assert (await job.info()).progress is None


async def test_a_process_that_a_task_forked_can_say_what_it_likes(app: App) -> None:
    fork = app.task(pool="process")(process_tasks.say_in_a_fork)
    async with app.worker(guarded=False, grace=0, processes=1):
        assert await (await fork.enqueue()).result(timeout=PATIENCE_S) == 0


async def test_many_threads_may_speak_at_once(app: App) -> None:
    @app.task
    def load() -> int:
        context = current_job()
        assert context is not None

        def speak(n: int) -> None:
            for _ in range(2_000):
                context.progress(n / 8, f"thread {n}")

        threads = [threading.Thread(target=speak, args=(n,)) for n in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return len(threads)

    async with app.worker(guarded=False):
        job = await load.enqueue()
        assert await job.result(timeout=PATIENCE_S) == 8


# --- Meta


async def test_meta_travels_with_the_job(h: Harness) -> None:
    app = App(h.store)

    @app.task
    async def seen() -> dict[str, str]:
        context = current_job()
        return {} if context is None else context.meta

    async with app:
        call = seen.using(meta={"customer": "42", "näme": "wert"})
        one = await call.enqueue()
        [many] = await app.enqueue_many([call.job()])
        none = await seen.enqueue()
        async with app.worker(guarded=False):
            for job in (one, many):
                assert await job.result(timeout=PATIENCE_S) == {"customer": "42", "näme": "wert"}
            assert await none.result(timeout=PATIENCE_S) == {}
        assert (await one.info()).meta == {"customer": "42", "näme": "wert"}
        assert (await none.info()).meta == {}


async def test_a_job_that_expires_is_cancelled(h: Harness) -> None:
    app = App(h.store)

    @app.task(expires="1h")
    async def note() -> None: ...

    async with app:
        now = datetime.now(UTC)
        job = await note.using(expires="20ms").enqueue()
        later = await note.enqueue()
        assert (await job.info()).expires is not None
        await asyncio.sleep(0.1)
        async with app.worker(guarded=False):
            with pytest.raises(JobCancelled, match="expired: could not start by 20"):
                await job.result(timeout=PATIENCE_S)
            await later.result(timeout=PATIENCE_S)
        info = await job.info()
        assert (info.state, info.error) == (State.CANCELLED, "expired")
        expires = (await later.info()).expires
        assert expires is not None
        assert timedelta(minutes=59) < expires - now < timedelta(minutes=61)
        # A person who wants it to run all the same gets that.
        assert await app.rerun(job)
        async with app.worker(guarded=False):
            await job.result(timeout=PATIENCE_S)


async def test_progress_reaches_the_store(h: Harness) -> None:
    app = App(h.store)
    go = asyncio.Event()

    @app.task
    async def load() -> None:
        context = current_job()
        assert context is not None
        context.progress(0.4, "loading")
        await asyncio.wait_for(go.wait(), PATIENCE_S)

    async with app, app.worker(guarded=False, lease=LONG):
        job = await load.enqueue()
        assert await until_progress(job) == Progress(0.4, "loading")
        go.set()
        await job.result(timeout=PATIENCE_S)
        assert (await job.info()).progress == Progress(0.4, "loading")


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"customer": 42}, "must be a str"),
        ([("customer", "42")], "must be a dict of strings"),
        ({f"n{n}": "" for n in range(17)}, "17 entries"),
    ],
)
async def test_meta_that_can_not_be_kept_is_refused(app: App, meta: Any, why: str) -> None:
    @app.task
    async def note() -> None: ...

    with pytest.raises(BadArguments, match=why):
        note.using(meta=meta)


@pytest.mark.parametrize(
    ("expires", "why"),
    [
        (0, "expires=0 leaves no time"),
        (-1, "negative"),
        ("soon", "not a duration"),
        (
            datetime(2030, 1, 1, tzinfo=UTC).replace(tzinfo=None),
            "expires=2030-01-01T00:00:00 has no time zone",
        ),
        (datetime(2100, 1, 1, tzinfo=UTC), "more than 10 years"),
    ],
)
async def test_an_expiry_that_makes_no_sense_is_refused(app: App, expires: Any, why: str) -> None:
    @app.task
    async def note() -> None: ...

    with pytest.raises(BadTime, match=why):
        note.using(expires=expires)
    if not isinstance(expires, datetime):
        with pytest.raises(BadTime, match=why):
            app.task(expires=expires, name="other")(lambda: None)


async def test_a_job_can_not_expire_before_it_is_due(app: App) -> None:
    @app.task
    async def note() -> None: ...

    soon = datetime.now(UTC) + timedelta(minutes=5)
    for call in (
        note.using(delay="10m", expires=soon),
        note.using(at=soon, expires=soon),
        note.using(expires=datetime.now(UTC) - timedelta(minutes=1)),
    ):
        with pytest.raises(BadTime, match="must be after the job is due"):
            await call.enqueue()
        with pytest.raises(BadTime, match="must be after the job is due"):
            call.job()
    assert await app.queues() == []


async def test_a_task_expires_after_a_while_not_at_a_time(app: App) -> None:
    at: Any = datetime.now(UTC) + timedelta(hours=1)
    with pytest.raises(BadConfig, match="is a duration"):
        app.task(expires=at)(known_here)


# --- Inherited meta


async def test_a_job_inherits_the_meta_of_its_task_if_asked(app: App) -> None:
    @app.task
    async def child() -> None: ...

    @app.task
    async def mother() -> list[str]:
        call = child.using(meta={"step": "2"}, inherit_meta=True)
        return [
            (await call.enqueue()).id,
            (await child.enqueue()).id,
            (await app.enqueue_many([call.job()]))[0].id,
        ]

    @app.task
    def father() -> list[str]:
        call = child.using(inherit_meta=True)
        return [call.enqueue_sync().id, child.enqueue_sync().id, call.enqueue_sync().id]

    async with app.worker(guarded=False):
        for task, own in ((mother, {"step": "2"}), (father, {"step": "1"})):
            job = await task.using(meta={"customer": "42", "step": "1"}).enqueue()
            ids = await job.result(timeout=PATIENCE_S)
            metas = [(await app.job(id).info()).meta for id in ids]
            inherited = {"customer": "42", **own}
            assert metas == [inherited, {}, inherited]


async def test_outside_a_task_there_is_nothing_to_inherit(app: App) -> None:
    @app.task
    async def child() -> None: ...

    job = await child.using(meta={"a": "b"}, inherit_meta=True).enqueue()
    assert (await job.info()).meta == {"a": "b"}
    assert (await (await child.using(inherit_meta=True).enqueue()).info()).meta == {}


async def test_an_app_may_inherit_for_all_its_jobs() -> None:
    app = App(MemoryStore(), inherit_meta=True)

    @app.task
    async def child() -> None: ...

    @app.task
    def father() -> list[str]:
        return [child.enqueue_sync().id, child.using(inherit_meta=False).enqueue_sync().id]

    async with app.worker(guarded=False):
        job = await father.using(meta={"customer": "42"}).enqueue()
        ids = await job.result(timeout=PATIENCE_S)
        assert [(await app.job(id).info()).meta for id in ids] == [{"customer": "42"}, {}]


async def test_a_task_in_its_own_process_passes_its_meta_on(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has an app of its own, on the same store, with the same hooks."""
    monkeypatch.setenv("TICKWHEEL_TEST_URL", h._url)
    app = App(h.store)
    task: Task[[], list[Any], Any] = app.task(pool="process", name="parent")(parent.function)
    async with app, app.worker(guarded=False, grace=0, processes=1):
        job = await task.using(meta={"customer": "42"}).enqueue()
        made, asked, plain, not_asked = await job.result(timeout=PATIENCE_S)
        assert made == {"customer": "42", "from": "child"}
        assert plain == {"from": "child"}
        if not h._url.startswith("memory:"):  # there the child has a store of its own
            assert (await app.job(asked).info()).meta == made
            assert (await app.job(not_asked).info()).meta == plain


async def test_too_much_together_is_refused(app: App) -> None:
    @app.task
    async def child() -> None: ...

    @app.task(retries=0)
    async def mother() -> str:
        with pytest.raises(BadArguments, match="17 entries"):
            await child.using(meta={"own": "1"}, inherit_meta=True).enqueue()
        return "refused"

    async with app.worker(guarded=False):
        meta = {f"n{n}": str(n) for n in range(16)}
        job = await mother.using(meta=meta).enqueue()
        assert await job.result(timeout=PATIENCE_S) == "refused"


# --- Hooks


async def test_hooks_add_to_the_meta_in_order_and_the_caller_wins(app: App) -> None:
    seen: list[Job] = []

    @app.task
    async def note(n: int) -> None: ...

    @app.on_enqueue
    def first(job: Job) -> dict[str, str]:
        seen.append(job)
        return {"a": "first", "b": "first", "c": "first"}

    @app.on_enqueue
    def second(job: Job) -> None: ...

    @app.on_enqueue
    def third(job: Job) -> dict[str, str]:
        return {"b": "third", "c": "third"}

    expected = {"a": "first", "b": "third", "c": "own"}
    call = note.using(meta={"c": "own"})
    one = await call.enqueue(1)
    assert (await one.info()).meta == expected
    assert call.job(2).meta == expected
    three = await asyncio.to_thread(call.enqueue_sync, 3)
    assert (await three.info()).meta == expected
    assert [job.payload for job in seen] == ['{"n":1}', '{"n":2}', '{"n":3}']
    assert seen[0].id == one.id and seen[0].meta == {"c": "own"}


async def test_what_a_hook_adds_wins_over_what_is_inherited(app: App) -> None:
    @app.on_enqueue
    def trace(job: Job) -> dict[str, str]:
        assert job.meta is None or "customer" in job.meta
        return {"trace": f"of {job.task}"}

    @app.task
    async def child() -> None: ...

    @app.task
    async def mother() -> str:
        return (await child.using(inherit_meta=True).enqueue()).id

    async with app.worker(guarded=False):
        job = await mother.using(meta={"customer": "42"}).enqueue()
        id = await job.result(timeout=PATIENCE_S)
        assert (await app.job(id).info()).meta == {"customer": "42", "trace": "of child"}


async def test_a_hook_is_called_where_the_caller_is(app: App) -> None:
    """On its thread and in its context: there tracing keeps what is current."""
    span: contextvars.ContextVar[str] = contextvars.ContextVar("span", default="none")
    threads: list[int] = []

    @app.on_enqueue
    def trace(job: Job) -> dict[str, str]:
        threads.append(threading.get_ident())
        return {"span": span.get()}

    @app.task
    async def note() -> None: ...

    def flask() -> tuple[JobHandle[None], int]:
        span.set("request")
        return note.enqueue_sync(), threading.get_ident()

    job, thread = await asyncio.to_thread(flask)
    assert (await job.info()).meta == {"span": "request"}
    assert threads == [thread]
    span.set("loop")
    assert (await (await note.enqueue()).info()).meta == {"span": "loop"}


async def test_a_hook_that_raises_is_heard_and_nothing_is_stored(app: App) -> None:
    @app.on_enqueue
    def broken(job: Job) -> None:
        raise LookupError("no trace")

    @app.task
    async def note() -> None: ...

    with pytest.raises(LookupError, match="no trace"):
        await note.enqueue()
    with pytest.raises(LookupError, match="no trace"):
        note.job()
    with pytest.raises(LookupError, match="no trace"):
        await asyncio.to_thread(note.enqueue_sync)
    assert await app.queues() == []


async def test_what_a_hook_returns_is_checked(app: App) -> None:
    @app.on_enqueue
    def wrong(job: Job) -> Any:
        return {"n": 1}

    @app.task
    async def note() -> None: ...

    with pytest.raises(BadArguments, match=r"wrong returned .* must be a str"):
        await note.enqueue()


async def test_hooks_are_plain_functions_of_a_job(app: App) -> None:
    async def later(job: Job) -> None: ...

    def too_many(job: Job, more: int) -> None: ...

    for hook in (later, 7, None):
        with pytest.raises(BadConfig, match="needs a plain function"):
            app.on_enqueue(hook)  # type: ignore[type-var]
    with pytest.raises(BadConfig, match="must take one argument"):
        app.on_enqueue(too_many)  # type: ignore[type-var]


async def test_the_jobs_of_schedules_meet_no_hook(app: App) -> None:
    calls: list[str] = []

    @app.on_enqueue
    def trace(job: Job) -> None:
        calls.append(job.id)

    @app.every("1s")
    async def tick() -> None: ...

    async with app.worker(guarded=False):
        async with asyncio.timeout(PATIENCE_S):
            while not (await app.find(state="done")).jobs:
                await asyncio.sleep(0.02)
    assert calls == []
