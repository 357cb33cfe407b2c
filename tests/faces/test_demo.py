"""`tickwheel demo`: it plays in real processes, its check sees what is wrong, its picture fits."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tickwheel import Job, JobInfo, Outcome, QueueInfo, Run, State, WorkerInfo
from tickwheel.cli import main
from tickwheel.examples import shop
from tickwheel.examples.account import Books, Lateness, account, what_is_wrong
from tickwheel.examples.story import FAST, FULL, Event, Scene, WorkerSeen, read_books
from tickwheel.examples.view import frame, summary_table

# --- In real processes


@contextmanager
def playing(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The fast demo, with its temporary folder below this one; ended with the block.

    The user has settings of their own, which are not for the demo.
    """
    demo = subprocess.Popen(
        [sys.executable, "-m", "tickwheel", "demo", "--fast", *options],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), "TICKWHEEL_PROCESSES": "3", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield demo
    finally:
        if demo.poll() is None:
            # Not kill: it has processes of its own to end.
            demo.terminate()
            demo.wait(30)


def read_until(demo: subprocess.Popen[str], words: str) -> str:
    """What the demo has printed once these words have come; it prints a line now and then."""
    assert demo.stdout is not None
    out = ""
    while words not in out:
        line = demo.stdout.readline()
        assert line, f"it ended before it said {words!r}: {out}"
        out += line
    return out


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_every_order_is_accounted_for_although_a_worker_was_killed(tmp_path: Path) -> None:
    with playing(tmp_path, "-o", "json", "--record", "demo.svg") as demo:
        out, err = demo.communicate(timeout=90)
    assert demo.returncode == 0, out + err
    summary = json.loads(out)
    assert summary["wrong"] == []
    assert summary["placed"] == FAST.orders == summary["paid"] + summary["cancelled"]
    assert summary["pieces_after"] == summary["cancelled"]
    assert summary["parcels"] == summary["paid"] == sum(summary["answers"].values())
    assert summary["early"] == 0
    assert summary["taken_over"] >= summary["in_killed_hand"]["jobs"]
    assert summary["taken_over"] > 0
    assert summary["dead"] == summary["rerun"] > 0
    assert summary["ticks"] >= 1
    # Neither lost nor waited for for ever: one lease and what a busy machine adds.
    assert summary["in_killed_hand"]["max_ms"] < 20_000
    assert "was killed with kill -9" in err
    # Nothing is left but the picture.
    assert os.listdir(tmp_path) == ["demo.svg"]
    check_picture(tmp_path / "demo.svg")


def test_an_order_that_is_written_after_its_deadline_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the write may take longer than the order has."""
    monkeypatch.setattr(shop, "FOLDER", tmp_path)
    shop.open_shop(pieces=5)
    assert not shop.cancel_order(7)
    shop._write_order(7)
    books = read_books()
    assert (books.orders, books.pieces) == ({7: "cancelled"}, 5)


def check_picture(path: Path) -> None:
    ElementTree.parse(path)
    text = path.read_text().replace("&#160;", " ")
    for words in ("kill -9", "upcoming deadlines", "nothing lost"):
        assert words in text
    assert "@font-face" not in text


@pytest.mark.slow
def test_a_piece_that_went_astray_is_noticed(tmp_path: Path) -> None:
    with playing(tmp_path) as demo:
        out = read_until(demo, "The sale:")
        [database] = tmp_path.glob("*/shop.db")
        thief = sqlite3.connect(database, timeout=10)
        with thief:
            thief.execute("UPDATE stock SET pieces = pieces - 1")
        thief.close()
        rest, err = demo.communicate(timeout=90)
    assert demo.returncode == 1, out + rest + err
    assert re.search(r"✗ stock: \d+ left and \d+ sold do not add up to \d+", rest)
    assert "nothing lost" not in rest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_interrupted_nothing_stays_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    with playing(tmp_path) as demo:
        out = read_until(demo, "First deadlines")
        workers = [int(pid) for pid in re.findall(r"is running, pid (\d+)", out)]
        assert len(workers) == 2
        assert not any(map(gone, workers))
        demo.send_signal(number)
        _, err = demo.communicate(timeout=30)
    assert demo.returncode == 130
    assert err.strip() == "error: interrupted"
    assert all(map(gone, workers))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_its_workers_end_with_it_when_it_is_killed(tmp_path: Path) -> None:
    with playing(tmp_path) as demo:
        out = read_until(demo, "First deadlines")
        workers = [int(pid) for pid in re.findall(r"is running, pid (\d+)", out)]
        assert len(workers) == 2
        demo.kill()
        demo.communicate(timeout=30)
    until = time.monotonic() + 20
    while not all(map(gone, workers)):
        assert time.monotonic() < until, "a worker stayed behind"
        time.sleep(0.05)


def test_a_picture_that_could_not_be_written_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--record", str(tmp_path / "none" / "demo.svg")]) == 2
    assert "can't write to" in capsys.readouterr().err


# --- The check

TICK = datetime(2030, 1, 1, tzinfo=UTC)


def run(outcome: Outcome, due_ms: int, started_ms: int | None, worker: str = "alive") -> Run:
    return Run(
        attempt=1,
        worker=worker,
        outcome=outcome,
        due_ms=due_ms,
        started_ms=started_ms,
        ended_ms=due_ms + 5000,
    )


def job(id: str, task: str, state: State, *history: Run) -> JobInfo:
    return JobInfo.of(
        Job(id=id, task=task, payload="{}", due_ms=1000, created_ms=0, state=state, history=history)
    )


# Three orders: one paid, one cancelled on time, one cancelled after its worker was killed.
BOOKS = Books(
    orders={1: "paid", 2: "cancelled", 3: "cancelled"},
    pieces=2,
    parcels={1: 2},
    reports=[(TICK, 3), (TICK + timedelta(seconds=5), 2)],
)
JOBS = [
    job("cancel-1", "cancel_order", State.CANCELLED),
    job("cancel-2", "cancel_order", State.DONE, run(Outcome.DONE, 1000, 1001)),
    job(
        "cancel-3",
        "cancel_order",
        State.DONE,
        run(Outcome.LOST, 1000, None, "killed"),
        run(Outcome.DONE, 1000, 2900),
    ),
    job(
        "ship-1",
        "ship",
        State.DONE,
        run(Outcome.RETRY, 1000, 1000),
        run(Outcome.DEAD, 2000, 2000),
        run(Outcome.DONE, 3000, 3000),
    ),
    job("report_stock@1", "report_stock", State.WAITING),
]
SUMMARY = account(BOOKS, JOBS, expected=3, killed={"killed"}, answers=Counter())


def test_a_day_that_adds_up_is_summed_up() -> None:
    assert SUMMARY.wrong == []
    assert (SUMMARY.placed, SUMMARY.paid, SUMMARY.cancelled) == (3, 1, 2)
    assert SUMMARY.by_live_workers == Lateness(1, 1, 1, 1)
    assert SUMMARY.in_killed_hand == Lateness(1, 1900, 1900, 1900)
    assert SUMMARY.punctuality == Lateness(2, 1, 1900, 1900)
    assert (SUMMARY.taken_over, SUMMARY.asked_twice) == (1, 1)
    # Once dead, it does not count as saved by its retry.
    assert (SUMMARY.retried, SUMMARY.dead, SUMMARY.rerun) == (0, 1, 1)


@pytest.mark.parametrize(
    "books, words",
    [
        ({"orders": {1: "paid", 2: "cancelled"}}, "orders that were placed but are missing: 3"),
        ({"orders": {1: "paid", 2: "cancelled", 3: "open"}}, "neither paid nor cancelled: 3"),
        ({"pieces": 3}, "3 left and 1 sold do not add up to 3"),
        ({"parcels": {}}, "parcels missing or extra: 1"),
        ({"parcels": {1: 1, 2: 1}}, "parcels missing or extra: 2"),
        ({"reports": [(TICK, 3), (TICK + timedelta(seconds=10), 2)]}, "ticks missing"),
    ],
)
def test_books_that_do_not_add_up_are_noticed(books: dict[str, object], words: str) -> None:
    [wrong] = what_is_wrong(replace(BOOKS, **books), JOBS, 3)  # type: ignore[arg-type]
    assert words in wrong


@pytest.mark.parametrize(
    "change, words",
    [
        ({"history": (run(Outcome.DONE, 1000, 999),)}, "1 runs started before they were due"),
        ({"state": State.RUNNING}, "jobs that have not ended: cancel-2"),
        ({"state": State.DEAD}, "jobs that are still dead: cancel-2"),
    ],
)
def test_jobs_that_break_a_promise_are_noticed(change: dict[str, Any], words: str) -> None:
    changed = [JOBS[0], replace(JOBS[1], **change), *JOBS[2:]]
    [wrong] = what_is_wrong(BOOKS, changed, 3)
    assert words in wrong


def test_punctuality_is_by_nearest_rank() -> None:
    assert Lateness.of(range(1, 201)) == Lateness(200, 100, 198, 200)
    assert Lateness.of([]) == Lateness(0, 0, 0, 0)


# --- The picture


def a_busy_scene() -> Scene:
    def worker(number: int, killed: float | None = None) -> WorkerSeen:
        info = WorkerInfo(
            name=f"host-{number}",
            host="host",
            pid=4_194_303,
            version="1",
            queues=("default",),
            concurrency=100,
            started_ms=0,
            seen_ms=0,
            gone_after_ms=2000,
            held=1000,
        )
        return WorkerSeen(number, info.pid, killed, info)

    return Scene(
        FULL,
        now=23.4,
        chapter="First deadlines: unpaid orders are cancelled and return to stock",
        orders=Counter(open=150, paid=234, cancelled=199),
        pieces=317,
        parcels=208,
        queues=[
            QueueInfo(name="default", waiting=134, done=204),
            QueueInfo(name="warehouse", dead=30),
        ],
        workers=[worker(1, killed=20.0), worker(2), worker(3)],
        late_ms=[0, 1, 999],
        taken_over_ms=[1900],
        coming=[13] * 16,
        overdue=12,
        events=[Event(float(n), "something happened " * 6) for n in range(30)],
    )


def drawn(thing: object, width: int) -> list[str]:
    console = Console(width=width, height=24, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(thing)
    return captured.get().splitlines()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scene", [a_busy_scene(), Scene(FULL)], ids=["busy", "opening"])
def test_a_frame_fits_the_terminal(scene: Scene, width: int) -> None:
    lines = drawn(frame(scene, width, 24), width)
    # One row is for the cursor below it.
    assert len(lines) <= 23
    assert all(len(line) <= width for line in lines)


def test_a_frame_shows_who_was_killed_what_is_overdue_and_how_late_it_was() -> None:
    text = "\n".join(drawn(frame(a_busy_scene(), 80, 24), 80))
    for words in ("† kill -9", "holds 1000", "overdue 12", "p50 1, p99 999, max 999 ms"):
        assert words in text
    assert "at most 1.9 s late" in text


def test_the_summary_says_what_is_wrong_and_nothing_else_is_well() -> None:
    assert "nothing lost" in "\n".join(drawn(summary_table(SUMMARY), 100))
    text = "\n".join(drawn(summary_table(replace(SUMMARY, wrong=["order 7 is gone"])), 100))
    assert "✗ order 7 is gone" in text
    assert "nothing lost" not in text
