"""Tracebacks as text: what is shown, in how many bytes, whatever was raised."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tickwheel import GiveUp, Retry
from tickwheel.arguments import Arguments
from tickwheel.traceback import (
    LIMIT,
    RemoteTraceback,
    raised,
    shortened,
    traceback_text,
    users_frames,
    where,
)


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def text_of(call: Callable[[], object], limit: int = LIMIT) -> str:
    text = traceback_text(caught(call), limit=limit)
    assert text is not None
    assert len(text.encode()) <= limit
    return text


def fail() -> None:
    raise ValueError("no such order")


def test_it_shows_each_frame_with_its_source_and_what_was_raised() -> None:
    lines = text_of(fail).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-3].startswith(f'  File "{__file__}", line ')
    assert lines[-3].endswith(", in fail")
    assert lines[-2] == '    raise ValueError("no such order")'
    assert lines[-1] == "ValueError: no such order"


def test_our_own_frames_are_left_out() -> None:
    def decode() -> None:
        Arguments("fail", fail).encode(("too", "many"), {}, limit=100)

    text = text_of(decode)
    assert "in test_our_own_frames_are_left_out.<locals>.decode" in text
    assert "arguments.py" not in text


def test_so_are_the_loop_and_the_thread_that_run_the_task() -> None:
    def in_loop() -> None:
        async def task() -> None:
            fail()

        with closing(asyncio.new_event_loop()) as loop:
            loop.run_until_complete(task())

    # As in a worker: the frames above the user's own are not the user's.
    error = caught(in_loop)
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next.tb_next  # type: ignore[union-attr]
    text = traceback_text(error)
    assert text is not None
    assert text.splitlines()[1].endswith("<locals>.in_loop.<locals>.task")

    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(fail).exception() or AssertionError()
    assert (traceback_text(error) or "").splitlines()[1].endswith("in fail")


def test_without_a_frame_of_the_user_there_is_no_traceback() -> None:
    assert traceback_text(TimeoutError("ran longer than its timeout")) is None


def test_causes_come_first_and_say_how_they_are_related() -> None:
    def wrap() -> None:
        try:
            fail()
        except ValueError as error:
            raise RuntimeError("can't cancel") from error

    def meanwhile() -> None:
        try:
            fail()
        except ValueError:
            raise RuntimeError("can't cancel")  # noqa: B904

    text = text_of(wrap)
    assert (
        text.index("ValueError: no such order") < text.index("direct cause") < text.index("can't")
    )
    assert "another exception occurred" in text_of(meanwhile)


def test_a_suppressed_context_is_not_shown() -> None:
    def hide() -> None:
        try:
            fail()
        except ValueError:
            raise RuntimeError("can't cancel") from None

    assert "no such order" not in text_of(hide)


def test_causes_that_do_not_fit_are_cut() -> None:
    def deep(n: int) -> None:
        try:
            deep(n - 1) if n else fail()
        except Exception as error:
            raise RuntimeError(f"level {n} " + "x" * 1500) from error

    text = text_of(lambda: deep(20))
    assert text.splitlines()[0] == "… cut here"
    assert "level 20" in text
    assert "level 0" not in text


def test_a_chain_that_is_a_circle_ends() -> None:
    one, two = caught(fail), caught(fail)
    one.__cause__, two.__cause__ = two, one
    assert (traceback_text(one) or "").count("no such order") >= 2


def test_the_exceptions_of_a_group_are_shown() -> None:
    async def both() -> None:
        async def later() -> None:
            fail()

        async with asyncio.TaskGroup() as group:
            group.create_task(later())
            group.create_task(later())

    text = text_of(lambda: asyncio.run(both()))
    assert text.count("ValueError: no such order") == 2
    assert "Exception 1 of the 2 in the following group:" in text
    assert text.splitlines()[-1].startswith("ExceptionGroup: unhandled errors")


def test_a_deep_recursion_keeps_both_ends_and_is_cheap() -> None:
    def down(n: int) -> None:
        down(n + 1)

    error = caught(lambda: down(0))
    start = time.process_time()
    text = traceback_text(error)
    assert time.process_time() - start < 0.1
    assert text is not None and len(text.encode()) <= LIMIT
    assert "in caught" in text.splitlines()[1]
    assert "more frames" in text
    assert text.count("down(n + 1)") >= 10
    assert "RecursionError" in text.splitlines()[-1]
    shown = text.count("  File ")
    left_out = int(text.split("… ")[1].split(" more")[0].replace(",", ""))
    depth, frame = 0, error.__traceback__
    while frame is not None:
        depth, frame = depth + 1, frame.tb_next
    assert shown + left_out == depth


def test_the_users_frames_are_kept_before_those_of_libraries(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    source = "def call(n, back):\n    return call(n - 1, back) if n else back()\n"
    names: dict[str, Any] = {"__name__": "library"}
    exec(compile(source, str(folder / "library.py"), "exec"), names)

    def users_own() -> None:
        names["call"](100, fail)

    text = text_of(lambda: names["call"](100, users_own))
    assert "in test_the_users_frames_are_kept_before_those_of_libraries.<locals>.users_own" in text
    assert where(text) == f"test_traceback.py:{fail.__code__.co_firstlineno + 1}"


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise SystemExit("no")


class Odd(str):
    def __getitem__(self, _: object) -> str:
        raise RuntimeError("no")

    def encode(self, *_: object) -> bytes:
        raise RuntimeError("no")


class Evasive(Exception):
    def __str__(self) -> str:
        return Odd("odd")

    def __getattribute__(self, name: str) -> Any:
        if name in ("__cause__", "__notes__"):
            raise RuntimeError("no")
        return super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Unspeakable, Evasive])
def test_an_exception_that_does_not_want_to_be_read(kind: type[Exception]) -> None:
    def unreadable() -> None:
        raise kind()

    assert len(text_of(unreadable)) > 10
    assert raised(caught(unreadable)) is not None


def test_a_message_that_can_be_read_after_all_is_not_lost() -> None:
    def unreadable() -> None:
        raise Unspeakable

    assert text_of(unreadable).endswith("Unspeakable: (its message can't be read)")


@pytest.mark.parametrize("character", ["x", "é", "漢", "💥", "\0", "\ud800", "\n"])
@pytest.mark.parametrize("limit", [300, 301, 302, 303, LIMIT])
def test_no_message_is_too_long_or_too_strange(character: str, limit: int) -> None:
    def huge() -> None:
        raise ValueError(character * 1_000_000)

    text = traceback_text(caught(huge), limit=limit) or ""
    assert len(text.encode()) <= limit
    assert "\0" not in text


def test_notes_are_kept() -> None:
    def noted() -> None:
        error = ValueError("no such order")
        error.add_note("while cancelling 42")
        raise error

    assert text_of(noted).endswith("ValueError: no such order\nwhile cancelling 42")


def test_a_task_that_asks_for_a_retry_shows_what_it_handled() -> None:
    def again() -> None:
        try:
            fail()
        except ValueError as error:
            raise Retry("10m") from error

    def give_up() -> None:
        try:
            fail()
        except ValueError:
            raise GiveUp("hopeless")  # noqa: B904

    def by_choice() -> None:
        raise Retry("10m")

    assert isinstance(raised(caught(again)), ValueError)
    assert isinstance(raised(caught(give_up)), ValueError)
    assert raised(caught(by_choice)) is None


def test_the_traceback_from_a_child_process_is_taken_as_it_is() -> None:
    error = ValueError("no such order")
    error.__cause__ = RemoteTraceback("Traceback …\nValueError: no such order")
    assert traceback_text(error) == "Traceback …\nValueError: no such order"
    error.__cause__ = RemoteTraceback("é" * 100_000 + "\nthe end")
    text = traceback_text(error) or ""
    assert len(text.encode()) <= LIMIT
    assert text.startswith("… cut here\n") and text.endswith("the end")


@pytest.mark.parametrize("limit", range(20, 40))
def test_what_is_shortened_is_still_text(limit: int) -> None:
    short = shortened("漢💥é" * 100, limit)
    assert limit - 4 < len(short.encode()) <= limit


def test_a_traceback_for_the_log_has_the_users_frames_only() -> None:
    def decode() -> None:
        Arguments("fail", fail).encode(("too", "many"), {}, limit=100)

    frames = []
    each = users_frames(caught(decode).__traceback__)
    while each is not None:
        frames.append(each.tb_frame.f_code.co_name)
        each = each.tb_next
    assert frames == ["caught", "decode"]
    assert users_frames(None) is None


def test_where_names_the_last_line_of_the_users_code() -> None:
    line = fail.__code__.co_firstlineno + 1
    assert where(text_of(fail)) == f"test_traceback.py:{line}"
    library = f'  File "{os.path.dirname(textwrap.__file__)}/socket.py", line 7, in connect\n'
    assert where(text_of(fail) + "\n" + library) == f"test_traceback.py:{line}"
    assert where(library) == "socket.py:7"
    assert where("nothing") is None


def test_a_recursion_limit_that_was_raised_costs_no_more() -> None:
    def down(n: int) -> None:
        if n:
            down(n - 1)
        fail()

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        error = caught(lambda: down(8_000))
    finally:
        sys.setrecursionlimit(limit)
    text = traceback_text(error) or ""
    assert len(text.encode()) <= LIMIT
    assert "… 7," in text
