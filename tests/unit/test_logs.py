"""Log lines as JSON: one object a line, whatever is logged."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tickwheel.cli.logs import JsonLine, Line


def record(message: str, *args: Any, exc_info: Any = None, **extra: Any) -> logging.LogRecord:
    made = logging.getLogger("tickwheel").makeRecord(
        "tickwheel", logging.WARNING, __file__, 1, message, args, exc_info, extra=extra
    )
    made.created, made.msecs = 1_800_000_000.25, 250
    return made


def line(*args: Any, **extra: Any) -> dict[str, Any]:
    text = JsonLine().format(record(*args, **extra))
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    return found


def test_a_line_has_the_message_and_what_else_is_known() -> None:
    found = line("pay %s: done", "1a1e", job_id="1a1e", task="pay", attempt=1)
    assert isinstance(found.pop("pid"), int)
    assert found == {
        "time": "2027-01-15T08:00:00.250Z",
        "level": "warning",
        "logger": "tickwheel",
        "message": "pay 1a1e: done",
        "job_id": "1a1e",
        "task": "pay",
        "attempt": 1,
    }


def test_an_exception_is_text() -> None:
    try:
        raise ValueError("no such order")
    except ValueError as error:
        found = line("failed", exc_info=(type(error), error, error.__traceback__))
    assert found["exception"].startswith("Traceback (most recent call last):\n")
    assert found["exception"].endswith("ValueError: no such order")


def test_what_json_can_not_say_is_shown_as_python_does() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert line("x", thing=object)["thing"] == "<class 'object'>"
    assert line("x", number=float("nan"))["number"] is None
    assert line("x", circle=circle)["circle"] == "[[...]]"
    assert "order" in line("lone \ud800 order")["message"]


def test_what_is_added_can_not_pose_as_the_message() -> None:
    assert line("the truth", level="none", time="never")["level"] == "warning"


def test_a_text_line_is_as_before() -> None:
    text = Line().format(record("pay: done", job_id="1a1e"))
    assert text == "2027-01-15 08:00:00.250Z WARNING tickwheel: pay: done"


def test_a_text_line_does_not_control_the_terminal() -> None:
    try:
        raise ValueError("\x1b[2J\x07 gone\tfar")
    except ValueError as error:
        text = Line().format(record("pay: \x1b[31mfailed", exc_info=(type(error), error, None)))
    assert text.splitlines()[0].endswith(r"pay: \x1b[31mfailed")
    assert text.splitlines()[-1] == "ValueError: \\x1b[2J\\x07 gone\tfar"
