"""How commands show a job that failed."""

from __future__ import annotations

import pytest

from tickwheel.cli.views import ERROR_SHOWN, show_dead, show_job
from tickwheel.job import Job, State
from tickwheel.operate.documents import job_document

TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/tasks.py", line 12, in charge
    bank.pay(\x1b[31morder)
  File "/srv/env/lib/python3.12/site-packages/bank/client.py", line 99, in pay
ValueError: no such order"""


def dead_job(error: str = "ValueError: no such order", traceback: str | None = TRACEBACK) -> Job:
    return Job(
        id="1a1e",
        task="charge",
        payload="{}",
        due_ms=0,
        created_ms=0,
        state=State.DEAD,
        ended_ms=1,
        error=error,
        traceback=traceback,
    )


def test_a_job_is_shown_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    show_job(dead_job(), 1000)
    said = capsys.readouterr().out
    assert '\n  File "/srv/shop/tasks.py", line 12, in charge\n' in said
    assert "\x1b" not in said
    assert job_document(dead_job()).traceback == TRACEBACK


def test_a_dead_job_is_one_line_with_where_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    show_dead([dead_job()], 1000)
    [_, row] = capsys.readouterr().out.splitlines()
    assert row.endswith("ValueError: no such order (tasks.py:12)")


@pytest.mark.parametrize("length", [ERROR_SHOWN - 10, ERROR_SHOWN, ERROR_SHOWN + 1])
def test_where_it_happened_is_left_out_if_it_does_not_fit(
    length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    show_dead([dead_job("x" * length)], 1000)
    [_, row] = capsys.readouterr().out.splitlines()
    shown = row.split("ago  ")[-1].split()[-1]
    assert "tasks.py" not in shown
    assert len(shown) <= ERROR_SHOWN


def test_a_dead_job_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    show_dead([dead_job(traceback=None)], 1000)
    assert capsys.readouterr().out.rstrip().endswith("ValueError: no such order")
