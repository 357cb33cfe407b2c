"""Batch tasks as users write them: what they take, and what is refused."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import process_tasks
import pytest

from tickwheel import (
    App,
    BadArguments,
    BadConfig,
    GiveUp,
    JobFailed,
    Partial,
    Retry,
    RetryPolicy,
    State,
    Task,
)


@dataclass
class Doc:
    id: int
    text: str = ""


def app_on_memory() -> App:
    return App("memory://")


async def test_a_batch_task_is_enqueued_with_one_item_and_called_with_a_list() -> None:
    app = app_on_memory()

    @app.batch(size=10)
    async def index(docs: list[Doc]) -> list[str]:
        return [doc.text.upper() for doc in docs]

    assert isinstance(index, Task)
    assert (index.name, index.definition.pool) == ("index", "async")
    assert await index([Doc(1, "a"), Doc(2, "b")]) == ["A", "B"]
    async with app, app.worker():
        jobs = [await index.enqueue(Doc(n, "abc"[n])) for n in range(3)]
        assert [await job.result(timeout=20) for job in jobs] == ["A", "B", "C"]
        info = await jobs[1].info()
    assert info.arguments == {"docs": Doc(1, "b")}
    with pytest.raises(BadArguments, match="Expected `object`, got `array`"):
        await index.enqueue([Doc(1)])  # type: ignore[arg-type]
    with pytest.raises(BadArguments, match="too many"):
        await index.enqueue(Doc(1), Doc(2))  # type: ignore[call-arg]


async def test_results_have_the_type_that_a_list_of_them_promises() -> None:
    app = app_on_memory()

    @app.batch()
    async def parse(texts: list[str]) -> list[Doc] | None:
        return [Doc(len(text), text) for text in texts]

    async with app, app.worker():
        job = await parse.enqueue("abc")
        assert await job.result(timeout=20) == Doc(3, "abc")


def none(items: list[int]) -> None: ...
def two(items: list[int], more: int = 0) -> None: ...
def no_parameter() -> None: ...
def one_item(item: int) -> None: ...
def sequence(items: Sequence[int]) -> None: ...
def several(*items: list[int]) -> None: ...
def by_name(*, items: list[int]) -> None: ...
def with_default(items: list[int] = []) -> None: ...  # noqa: B006
def returns_str(items: list[int]) -> str: ...  # type: ignore[empty-body]
def returns_either(items: list[int]) -> list[int] | str: ...  # type: ignore[empty-body]
def takes_file(items: list[type]) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two, "exactly one parameter, a list"),
        (no_parameter, "exactly one parameter, a list"),
        (one_item, "exactly one parameter, a list"),
        (sequence, "exactly one parameter, a list"),
        (several, "exactly one parameter, a list"),
        (by_name, "exactly one parameter, a list"),
        (with_default, "exactly one parameter, a list"),
        (returns_str, "must return a list"),
        (returns_either, "must return a list"),
        (takes_file, "can't be written as JSON"),
    ],
)
def test_a_function_that_can_not_be_a_batch_is_refused_at_once(
    function: Callable[..., Any], words: str
) -> None:
    with pytest.raises(BadConfig, match=words):
        app_on_memory().batch()(function)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "from 1 to 10,000"),
        ({"size": 10_001}, "from 1 to 10,000"),
        ({"size": True}, "from 1 to 10,000"),
        ({"size": 1.5}, "from 1 to 10,000"),
        ({"linger": "2m"}, "at most 1m"),
        ({"timeout": 0}, "timeout=0"),
        ({"pool": "async"}, "a plain function can't"),
        ({"retries": -1}, "at least 0"),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        app_on_memory().batch(**options)(none)


def test_mistakes_in_the_decorator_say_what_to_write() -> None:
    app = app_on_memory()
    with pytest.raises(BadConfig, match=r"write @app.batch\(\)"):
        app.batch(none)  # type: ignore[arg-type]
    with pytest.raises(BadArguments, match="did you mean linger"):
        app.batch(lingers="5s")  # type: ignore[call-arg]


def test_a_parameter_without_an_annotation_takes_anything() -> None:
    app = app_on_memory()

    @app.batch()
    def note(items):  # type: ignore[no-untyped-def]
        return items

    assert note.definition.arguments.encode(({"a": [1]},), {}, limit=100) == '{"items":{"a":[1]}}'


@pytest.mark.parametrize(
    ("errors", "results", "words"),
    [
        ([ValueError()], None, "must be a dict"),
        ({"0": ValueError()}, None, "must be the index"),
        ({-1: ValueError()}, None, "must be the index"),
        ({True: ValueError()}, None, "must be the index"),
        ({0: "wrong"}, None, "must be an exception, not str"),
        ({0: ValueError}, None, "must be an exception, not type"),
        ({0: ValueError()}, "abc", "must be a list"),
    ],
)
def test_partial_is_checked_where_it_is_made(errors: Any, results: Any, words: str) -> None:
    with pytest.raises(BadArguments, match=words):
        Partial(errors, results)


def test_partial_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(Partial({1: Retry("5m"), 2: GiveUp("no")}, [1, 2, 3])))
    assert [type(each) for each in again.errors.values()] == [Retry, GiveUp]
    assert (again.errors[1].delay, list(again.errors), again.results) == ("5m", [1, 2], [1, 2, 3])


async def test_a_batch_in_a_child_process_has_the_outcomes_of_its_jobs() -> None:
    app = process_tasks.app
    task = process_tasks.halve
    async with app, app.worker(processes=1):
        handles = [await task.enqueue(n) for n in (2, 4, 5, 6)]
        assert [await handles[n].result(timeout=60) for n in (0, 1, 3)] == [1, 2, 3]
        with pytest.raises(JobFailed, match="5 is odd"):
            await handles[2].result(timeout=60)
        info = await handles[2].info()
        # Where it was raised, in the child.
        assert info.traceback is not None and "in _half" in info.traceback
        assert (await handles[0].info()).state is State.DONE


async def test_an_error_that_can_not_be_pickled_fails_only_its_own_job() -> None:
    app = process_tasks.app
    async with app, app.worker(processes=1):
        good, bad = [await process_tasks.unpicklable.enqueue(n) for n in (0, 1)]
        assert await good.result(timeout=60) == 0
        with pytest.raises(JobFailed, match="Odd"):
            await bad.result(timeout=60)


def test_the_example_in_the_docs_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "batches.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def test_a_policy_counts_for_each_job() -> None:
    app = app_on_memory()
    policy = RetryPolicy(retries=2)
    assert app.batch(retries=policy)(none).definition.policy is policy
